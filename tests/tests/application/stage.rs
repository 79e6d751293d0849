//! A guarded server whose agent has a socket for applications.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use limiter_tests::{
    agent::{Agent, METRICS},
    frames,
    generator::{Flood, Generator},
    http::{Answer, Request},
    netns::{Interface, Netns, VethOptions, veth},
};
use serde_json::Value;
use tempfile::TempDir;

/// What a source may send at once.
pub(crate) const BURST: u64 = 100;

/// The configuration, with these lines of `[application]`.
pub(crate) fn config(application: &str, socket: &Path) -> String {
    let socket = socket.display();
    format!(
        r#"mode = "enforce"
[table]
ipv4_sources = 65536
ipv6_sources = 65536
[[interface]]
name = "edge0"
[[class]]
name = "udp"
match = {{ protocol = "udp", ports = [9] }}
packets = {{ rate = "1/m", burst = {BURST} }}
bytes = {{ rate = "1000B/s", burst = 100000 }}
unproven = {{ rate = "1/m", burst = 200 }}
[[class]]
name = "rest"
packets = {{ rate = "1000/s", burst = 1000 }}
[[prefix]]
cidr = "203.0.113.0/24"
scale = 3
[[exempt]]
cidr = "10.20.0.0/16"
interface = "edge0"
owner = "platform"
[application]
socket = "{socket}"
{application}"#
    )
}

pub(crate) struct Stage {
    pub(crate) clients: Interface,
    pub(crate) edge: Interface,
    generator: Generator,
    _directory: TempDir,
    socket: PathBuf,
}

/// Packets of class "udp".
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fate {
    pub(crate) passed: u64,
    pub(crate) blocked: u64,
}

impl Stage {
    pub(crate) fn new() -> Result<Self> {
        let (clients, edge) = veth(
            (&Netns::new("clients")?, "clients0"),
            (&Netns::new("edge")?, "edge0"),
            VethOptions::default(),
        )?;
        edge.add_address("192.0.2.1/24")?;
        edge.add_address("2001:db8::1/64")?;
        let generator = Generator::new(&clients)?;
        let directory = tempfile::Builder::new().prefix("limiter-app-").tempdir()?;
        let socket = directory.path().join("app.sock");
        Ok(Self { clients, edge, generator, _directory: directory, socket })
    }

    /// The application socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(crate) fn start(&self, configuration: &str) -> Result<Agent> {
        Agent::start(&self.edge.netns, configuration)
    }

    /// Sends so many frames from `source` and returns how long each is.
    pub(crate) fn send(&mut self, agent: &Agent, source: &str, frames: u64) -> Result<u64> {
        let source: IpAddr = source.parse()?;
        let destination = if source.is_ipv4() { "192.0.2.1" } else { "2001:db8::1" };
        let path = frames::Path {
            source_mac: self.clients.mac,
            destination_mac: self.edge.mac,
            source: SocketAddr::new(source, 40_000),
            destination: SocketAddr::new(destination.parse()?, 9),
        };
        let frame = frames::udp(&path, 18);
        let length = u64::try_from(frame.len())?;
        let flood = Flood::new(frame, 20_000.0, Duration::from_secs(30)).frames(frames);
        let sent = self.generator.flood(&flood)?;
        ensure!(sent.arrived() == frames, "{sent:?}; the log:\n{}", agent.log());
        Ok(length)
    }

    /// The same, and what came of them.
    pub(crate) fn fate(&mut self, agent: &Agent, source: &str, frames: u64) -> Result<Fate> {
        let before = agent.metrics()?;
        self.send(agent, source, frames)?;
        let counted = agent.metrics()?.since(&before);
        let packets = |labels: &[(&str, &str)]| whole(counted.sum("limiter_packets_total", labels));
        let fate = Fate {
            passed: packets(&[("class", "udp"), ("action", "pass")]),
            blocked: packets(&[("class", "udp"), ("reason", "blocked"), ("action", "drop")]),
        };
        let all = packets(&[("class", "udp")]);
        ensure!(all == frames, "{all} counted of {frames}: {fate:?}");
        Ok(fate)
    }

    /// Asks on the application socket, and expects this status.
    pub(crate) fn ask(&self, request: &Request<'_>, status: u16) -> Result<Value> {
        checked(request, &request.on(&self.socket)?, status)
    }

    /// Asks on the metrics address.
    pub(crate) fn metrics(&self, target: &str) -> Result<Value> {
        let request = Request::get(target);
        checked(&request, &self.edge.netns.run(|| request.at(METRICS))?, 200)
    }
}

/// Asks on the control socket, and expects this status.
pub(crate) fn command(agent: &Agent, request: &Request<'_>, status: u16) -> Result<Value> {
    checked(request, &request.on(&control(agent))?, status)
}

pub(crate) fn control(agent: &Agent) -> PathBuf {
    agent.configuration().with_file_name("control.sock")
}

/// The body, which is a problem document where the status says so.
pub(crate) fn checked(request: &Request<'_>, answer: &Answer, status: u16) -> Result<Value> {
    ensure!(answer.status == status, "{} {}: {answer:?}", request.method, request.target);
    let kind = answer.header("content-type").context("a content type")?;
    let expected = if status < 400 { "application/json" } else { "application/problem+json" };
    ensure!(kind == expected, "{} {}: {answer:?}", request.method, request.target);
    answer.json()
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "Prometheus values of counters are whole numbers below 2^53"
)]
pub(crate) fn whole(value: f64) -> u64 {
    value.round() as u64
}
