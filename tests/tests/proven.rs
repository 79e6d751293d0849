//! Sources that have completed a TCP handshake are told from those that only claim an address, as
//! also the host's own is claimed by nobody else.
//!
//! The program hears of the handshakes of the whole host, so each test has addresses of its own.

use std::{
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use limiter_tests::{
    agent::Agent,
    client::{self, EchoServer, Pace, connect},
    frames,
    generator::{Flood, Generator},
    netns::{Interface, Netns, VethOptions, veth},
};
use serde_json::Value;

/// What sources that have proven nothing may send together, for as long as a test asks.
const CONFIG: &str = r#"
mode = "enforce"
[[interface]]
name = "edge0"
[[class]]
name = "tcp"
match = { protocol = "tcp" }
packets = { rate = "10000/s", burst = 10000 }
[[class]]
name = "rest"
packets = { rate = "1000/s", burst = 1000 }
unproven = { rate = "10/s", burst = 10 }
"#;

const PACE: Pace = Pace { rate: 100, duration: Duration::from_secs(1) };
/// The most answers at that pace without a proof: the sum's burst and a second of its rate, and a
/// little for a machine that is slow.
const MOST: u32 = 25;

/// The kernel's counter of connections opened at the SYN.
const FAST_OPEN: &str = "TcpExtTCPFastOpenPassive";

const PATIENCE: Duration = Duration::from_secs(10);

/// Two clients of a guarded server, and none of the three knows anything of another yet.
struct Stage {
    clients: Interface,
    edge: Interface,
    server: IpAddr,
    one: IpAddr,
    other: IpAddr,
}

impl Stage {
    /// `server`, `one` and `other` in one network for IPv4; for IPv6 in /64s of their own, since that
    /// is what a source is.
    fn new(server: &str, one: &str, other: &str) -> Result<Self> {
        let (clients, edge) = veth(
            (&Netns::new("clients")?, "clients0"),
            (&Netns::new("edge")?, "edge0"),
            VethOptions::default(),
        )?;
        let [server, one, other] = [server.parse()?, one.parse()?, other.parse()?];
        let prefix = |address: IpAddr| if address.is_ipv4() { 24 } else { 48 };
        for address in [one, other] {
            clients.add_known_address(address, prefix(address), &edge)?;
        }
        edge.add_known_address(server, prefix(server), &clients)?;
        Ok(Self { clients, edge, server, one, other })
    }

    fn listener(&self) -> Result<(TcpListener, SocketAddr)> {
        let address = SocketAddr::new(self.server, 80);
        let listener = self.edge.netns.run(|| TcpListener::bind(address))?;
        Ok((listener, address))
    }

    /// Both ends of a connection from `self.one`.
    fn connect(&self, listener: &TcpListener, to: SocketAddr) -> Result<(TcpStream, TcpStream)> {
        let near = self.clients.netns.run(|| connect(self.one, to))?;
        listener.set_nonblocking(true)?;
        let give_up = Instant::now() + PATIENCE;
        loop {
            match listener.accept() {
                Ok((far, _)) => return Ok((near, far)),
                Err(_) if Instant::now() < give_up => thread::sleep(Duration::from_millis(5)),
                Err(error) => return Err(error).context("nobody connected"),
            }
        }
    }

    /// How many of a hundred questions within a second are answered.
    fn answered(&self, from: IpAddr) -> Result<u32> {
        let _echo = EchoServer::start(&self.edge.netns, SocketAddr::new(self.server, 7))?;
        let client =
            client::start(&self.clients.netns, from, SocketAddr::new(self.server, 7), PACE)?;
        let goodput = client.join()?;
        ensure!(goodput.sent == PACE.rate, "{goodput:?}");
        Ok(goodput.answered)
    }

    /// That of the two clients only the first is proven.
    fn assert_only_one_is_proven(&self) -> Result<()> {
        let other = self.answered(self.other)?;
        assert!((1..=MOST).contains(&other), "{other} answered without a proof");
        // Whatever is left of the sum.
        let one = self.answered(self.one)?;
        assert_eq!(one, PACE.rate, "answered with a proof");
        Ok(())
    }
}

/// Whether the agent says that handshakes prove.
fn hears(agent: &Agent) -> Result<bool> {
    let metrics = agent.metrics()?;
    let values: Vec<_> =
        metrics.matching("limiter_proofs", &[("source", "handshakes")]).map(|it| it.1).collect();
    ensure!(values.len() == 1, "{values:?}");
    Ok(values[0] > 0.5)
}

fn a_handshake_proves(stage: &Stage) -> Result<()> {
    let agent = Agent::start(&stage.edge.netns, CONFIG)?;
    assert!(hears(&agent)?, "{}", agent.log());
    let (listener, address) = stage.listener()?;
    let before = stage.answered(stage.one)?;
    assert!(before <= MOST, "{before} answered before the handshake");
    // A proof outlives its connection.
    drop(stage.connect(&listener, address)?);
    stage.assert_only_one_is_proven()?;
    agent.terminate()?;
    Ok(())
}

#[test]
fn a_handshake_proves_an_ipv4_address() -> Result<()> {
    a_handshake_proves(&Stage::new("198.18.1.1", "198.18.1.2", "198.18.1.3")?)
}

#[test]
fn a_handshake_proves_an_ipv6_network() -> Result<()> {
    a_handshake_proves(&Stage::new("2001:db8:1::1", "2001:db8:1:1::2", "2001:db8:1:2::3")?)
}

/// A socket that takes both families shows an IPv4 peer by another address.
#[test]
fn a_handshake_with_a_socket_of_both_families_proves_an_ipv4_address() -> Result<()> {
    let stage = Stage::new("198.18.2.1", "198.18.2.2", "198.18.2.3")?;
    let agent = Agent::start(&stage.edge.netns, CONFIG)?;
    let listener = stage.edge.netns.run(|| TcpListener::bind("[::]:80"))?;
    drop(stage.connect(&listener, SocketAddr::new(stage.server, 80))?);
    stage.assert_only_one_is_proven()?;
    agent.terminate()?;
    Ok(())
}

/// Whom this host connects to has proven itself as well.
#[test]
fn a_connection_of_ours_proves_its_peer() -> Result<()> {
    let stage = Stage::new("198.18.3.1", "198.18.3.2", "198.18.3.3")?;
    let agent = Agent::start(&stage.edge.netns, CONFIG)?;
    let theirs = SocketAddr::new(stage.one, 80);
    let _listener = stage.clients.netns.run(|| TcpListener::bind(theirs))?;
    drop(stage.edge.netns.run(|| connect(stage.server, theirs))?);
    stage.assert_only_one_is_proven()?;
    agent.terminate()?;
    Ok(())
}

fn an_older_connection_proves(stage: &Stage) -> Result<()> {
    let (listener, address) = stage.listener()?;
    let connection = stage.connect(&listener, address)?;
    let agent = Agent::start(&stage.edge.netns, CONFIG)?;
    stage.assert_only_one_is_proven()?;
    agent.terminate()?;
    drop(connection);
    Ok(())
}

#[test]
fn an_older_connection_proves_an_ipv4_address() -> Result<()> {
    an_older_connection_proves(&Stage::new("198.18.4.1", "198.18.4.2", "198.18.4.3")?)
}

#[test]
fn an_older_connection_proves_an_ipv6_network() -> Result<()> {
    an_older_connection_proves(&Stage::new("2001:db8:4::1", "2001:db8:4:1::2", "2001:db8:4:2::3")?)
}

/// Floods the stage's port 80 with `syn` of a forged address, and expects nothing to be proven.
fn syns_prove_nothing(
    stage: &Stage,
    forged: &str,
    syn: impl Fn(&frames::Path) -> Vec<u8>,
) -> Result<()> {
    let forged: IpAddr = forged.parse()?;
    let (_listener, address) = stage.listener()?;
    let agent = Agent::start(&stage.edge.netns, CONFIG)?;
    // So that the answers go where an owner of the address would be.
    stage.edge.add_neighbour(forged, stage.clients.mac)?;
    let path = frames::Path {
        source_mac: stage.clients.mac,
        destination_mac: stage.edge.mac,
        source: SocketAddr::new(forged, 4000),
        destination: address,
    };
    let flood = Flood::new(syn(&path), 1_000.0, Duration::from_secs(1));
    let sent = Generator::new(&stage.clients)?.flood(&flood)?;
    assert!(sent.arrived() > 100, "{sent:?}");
    let sockets = stage.edge.netns.command("ss").args(["-Htn", "state", "syn-recv"]).output()?;
    let sockets = String::from_utf8(sockets.stdout)?;
    assert!(sockets.contains("198.18."), "no SYN was taken: {sockets}");

    stage.clients.add_address(&format!("{forged}/24"))?;
    let answered = stage.answered(forged)?;
    assert!((1..=MOST).contains(&answered), "{answered} answered after forged SYNs");
    agent.terminate()?;
    Ok(())
}

/// A forged address can ask for a connection, and never completes one.
#[test]
fn a_flood_of_syns_proves_nobody() -> Result<()> {
    let stage = Stage::new("198.18.5.1", "198.18.5.2", "198.18.5.3")?;
    syns_prove_nothing(&stage, "198.18.5.4", frames::tcp_syn)
}

/// With TCP Fast Open without cookies the kernel opens the connection at the SYN, and says so.
#[test]
fn a_flood_of_syns_that_open_fast_proves_nobody() -> Result<()> {
    let stage = Stage::new("198.18.7.1", "198.18.7.2", "198.18.7.3")?;
    // For servers (2), without a cookie (0x200), for all listeners (0x400).
    stage.edge.netns.set_sysctl("net/ipv4/tcp_fastopen", "1538")?;
    let syn = |path: &frames::Path| frames::tcp_syn_with(path, b"at once");
    syns_prove_nothing(&stage, "198.18.7.4", syn)?;
    let counters = stage.edge.netns.command("nstat").args(["-asz", FAST_OPEN]).output()?;
    let counters = String::from_utf8(counters.stdout)?;
    let opened = counters.lines().find(|line| line.starts_with(FAST_OPEN));
    assert!(opened.is_some_and(|line| !line.contains(" 0 ")), "nothing opened fast: {counters}");
    Ok(())
}

/// A host without cgroup v2 is guarded all the same, and says what it lacks.
#[test]
fn without_cgroup_v2_the_agent_goes_on_and_says_so() -> Result<()> {
    let stage = Stage::new("198.18.6.1", "198.18.6.2", "198.18.6.3")?;
    let (listener, address) = stage.listener()?;
    let hide = "umount --lazy --all --types cgroup2 && exec \"$@\"";
    let agent = Agent::start_under(
        &["unshare", "--mount", "sh", "-c", hide, "sh"],
        &stage.edge.netns,
        CONFIG,
    )?;
    assert!(!hears(&agent)?, "{}", agent.log());
    let status: Value = serde_json::from_str(&agent.get("/v1/status")?)?;
    let proofs = status["proofs"].as_str().context("status has no proofs")?;
    assert!(proofs.starts_with("unavailable: ") && proofs.contains("cgroup2"), "{proofs}");
    for protocol in ["tcp", "udp"] {
        let flows = status["own_flows"][protocol].as_str().context("status has no own_flows")?;
        assert!(flows.starts_with("unavailable: ") && flows.contains("cgroup2"), "{flows}");
    }
    assert!(agent.metrics()?.sum("limiter_own_flows", &[]) < 0.5);

    drop(stage.connect(&listener, address)?);
    let answered = stage.answered(stage.one)?;
    assert!((1..=MOST).contains(&answered), "{answered} answered");
    let log = agent.terminate()?;
    assert_eq!(log.matches("handshakes prove nobody").count(), 1, "{log}");
    assert_eq!(log.matches("own UDP flows are not known").count(), 1, "{log}");
    Ok(())
}

/// The agent follows the host's addresses while it runs: what claims to come from one is forged.
#[test]
fn a_new_address_of_the_host_is_nobody_elses() -> Result<()> {
    let stage = Stage::new("198.18.8.1", "198.18.8.2", "198.18.8.3")?;
    let agent = Agent::start(&stage.edge.netns, CONFIG)?;
    stage.edge.add_address("198.18.8.9/24")?;
    let path = frames::Path {
        source_mac: stage.clients.mac,
        destination_mac: stage.edge.mac,
        source: "198.18.8.9:4000".parse()?,
        destination: SocketAddr::new(stage.server, 7),
    };
    let flood = Flood::new(frames::udp(&path, 18), 10.0, Duration::from_secs(1));
    let mut generator = Generator::new(&stage.clients)?;
    let give_up = Instant::now() + 4 * PATIENCE;
    loop {
        // Longer than between two looks of the agent.
        thread::sleep(Duration::from_secs(12));
        generator.flood(&flood.clone().frames(1))?;
        if agent.metrics()?.sum("limiter_packets_total", &[("reason", "martian")]) > 0.5 {
            break;
        }
        assert!(Instant::now() < give_up, "{}", agent.log());
    }
    agent.terminate()?;
    Ok(())
}
