//! What outlives the agent: limits that hold through restarts, upgrades and crashes, and end when they
//! are told to.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use limiter_tests::{
    agent::{Agent, Metrics},
    bpffs::Bpffs,
    frames,
    generator::{Flood, Generator},
    netns::{Interface, Netns, VethOptions, veth},
};
use serde_json::Value;

const SERVER: &str = "192.0.2.1";
const CLIENT: &str = "192.0.2.2";

/// A guarded server, and who floods it.
struct Stage {
    bpffs: Bpffs,
    clients: Interface,
    edge: Interface,
    generator: Generator,
}

impl Stage {
    fn new() -> Result<Self> {
        let (clients, edge) = veth(
            (&Netns::new("clients")?, "clients0"),
            (&Netns::new("edge")?, "edge0"),
            VethOptions::default(),
        )?;
        clients.add_known_address(CLIENT.parse()?, 24, &edge)?;
        edge.add_known_address(SERVER.parse()?, 24, &clients)?;
        let generator = Generator::new(&clients)?;
        Ok(Self { bpffs: Bpffs::new()?, clients, edge, generator })
    }

    fn start(&self, configuration: &str) -> Result<Agent> {
        Agent::start_pinned(&self.bpffs.pins(), &self.edge.netns, configuration)
    }

    /// Frames from `source`, whose destination port nobody listens on.
    fn frame(&self, source: IpAddr, port: u16) -> Result<Vec<u8>> {
        let path = frames::Path {
            source_mac: self.clients.mac,
            destination_mac: self.edge.mac,
            source: SocketAddr::new(source, 40000),
            destination: SocketAddr::new(SERVER.parse()?, port),
        };
        Ok(frames::udp(&path, 18))
    }

    /// IPv4 packets that came past the program to the server's stack.
    fn received(&self) -> Result<u64> {
        let snmp = self.edge.netns.run(|| std::fs::read_to_string("/proc/thread-self/net/snmp"))?;
        let mut lines = snmp.lines().filter_map(|line| line.strip_prefix("Ip: "));
        let (names, values) = (lines.next().context("names")?, lines.next().context("values")?);
        let place = names.split(' ').position(|name| name == "InReceives").context("a column")?;
        Ok(values.split(' ').nth(place).context("a value")?.parse()?)
    }

    /// Sends `count` packets at a thousand a second from the client, and says how many came past.
    fn pass(&mut self, count: u64) -> Result<u64> {
        let before = self.received()?;
        let frame = self.frame(CLIENT.parse()?, 9)?;
        let sent = self
            .generator
            .flood(&Flood::new(frame, 1000.0, Duration::from_secs(30)).frames(count))?;
        ensure!((sent.total(), sent.lost) == (count, 0), "{sent:?}");
        Ok(self.received()? - before)
    }

    /// The id of the program on the server's interface, and of the link that holds it there.
    fn attachment(&self) -> Result<Option<u64>> {
        let links = self.edge.netns.ip(&["-json", "link", "show", "dev", &self.edge.name])?;
        let links: Value = serde_json::from_str(&links)?;
        Ok(links[0]["xdp"]["prog"]["id"].as_u64())
    }
}

fn config(class: &str) -> String {
    format!(
        "mode = \"enforce\"\n[[interface]]\nname = \"edge0\"\n[[class]]\nname = \"rest\"\n{class}\n"
    )
}

/// A packet a minute, ten at once.
const SLOW: &str = "packets = { rate = \"1/m\", burst = 10 }";

fn counted(metrics: &Metrics, action: &str) -> f64 {
    metrics.sum("limiter_packets_total", &[("class", "rest"), ("action", action)])
}

#[test]
fn limits_hold_without_an_agent_and_the_next_one_goes_on() -> Result<()> {
    let mut stage = Stage::new()?;
    let agent = stage.start(&config(SLOW))?;
    assert_eq!(stage.pass(100)?, 10);
    let before = agent.metrics()?;
    let program = stage.attachment()?.context("it is attached")?;
    agent.terminate()?;
    assert_eq!(stage.attachment()?, Some(program), "it stays attached");
    assert_eq!(stage.pass(100)?, 0, "its bucket is empty");

    let agent = stage.start(&config(SLOW))?;
    assert!(agent.log().contains("taking over"), "{}", agent.log());
    assert_ne!(stage.attachment()?.context("it is attached")?, program, "a program of its own");
    assert_eq!(stage.pass(100)?, 0, "the bucket was kept");
    let after = agent.metrics()?;
    assert!((counted(&before, "drop") - 90.0).abs() < 0.5, "{before:?}");
    assert!((counted(&after, "drop") - 290.0).abs() < 0.5, "{after:?}");
    assert!((counted(&after, "pass") - 10.0).abs() < 0.5, "{after:?}");
    agent.kill();
    assert_eq!(stage.pass(100)?, 0, "limits hold after a crash");

    let agent = stage.start(&config(SLOW))?;
    let said = agent.command(&["detach"])?;
    assert_eq!(String::from_utf8_lossy(&said.stdout), "detached from edge0\n", "{said:?}");
    assert_eq!(stage.attachment()?, None);
    assert!(!stage.bpffs.pins().exists());
    agent.end()?;
    assert_eq!(stage.pass(100)?, 100);
    Ok(())
}
