//! Open connections are counted for each source, from whatever begin to whatever end, shown, and limited for
//! new SYNs.
//!
//! The program hears of the connections of the whole host, so each test has addresses of its own.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use limiter_tests::{
    agent::Agent,
    bpffs::Bpffs,
    client::{connect, connect_within},
    netns::{Interface, Netns, VethOptions, veth},
};
use nix::sys::socket::{setsockopt, sockopt};
use serde_json::Value;

const CONFIG: &str = r#"
mode = "enforce"
[[interface]]
name = "edge0"
[[class]]
name = "syn"
match = { protocol = "tcp", flags = "syn,!ack" }
packets = { rate = "1000/s", burst = 1000 }
connections = 3
[[class]]
name = "rest"
packets = { rate = "10000/s", burst = 10000 }
"#;

const PATIENCE: Duration = Duration::from_secs(20);

/// How long a SYN that is refused may be sent again and again.
const REFUSED: Duration = Duration::from_secs(3);

/// A guarded server, and two clients that are two sources.
struct Stage {
    bpffs: Bpffs,
    clients: Interface,
    edge: Interface,
    one: IpAddr,
    other: IpAddr,
    to: SocketAddr,
    listener: TcpListener,
}

/// Both ends.
type Connection = (TcpStream, TcpStream);

impl Stage {
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
        let to = SocketAddr::new(server, 80);
        let listener = edge.netns.run(|| TcpListener::bind(to))?;
        Ok(Self { bpffs: Bpffs::new()?, clients, edge, one, other, to, listener })
    }

    fn connect(&self, from: IpAddr) -> Result<Connection> {
        let near = self.clients.netns.run(|| connect(from, self.to))?;
        Ok((near, self.listener.accept()?.0))
    }

    /// No handshake comes about.
    fn assert_is_refused(&self, from: IpAddr) {
        let outcome = self.clients.netns.run(|| connect_within(from, self.to, REFUSED));
        assert!(outcome.is_err(), "{from} connected");
    }

    fn start_pinned(&self, configuration: &str) -> Result<Agent> {
        Agent::start_pinned(&self.bpffs.pins(), &self.edge.netns, configuration)
    }
}

/// Data still arrives.
fn assert_works((near, far): &mut Connection) -> Result<()> {
    far.set_read_timeout(Some(PATIENCE))?;
    near.write_all(b"still here")?;
    let mut heard = [0; 10];
    far.read_exact(&mut heard)?;
    assert_eq!(&heard, b"still here");
    Ok(())
}

/// How a source is written: an address, or a network.
fn written(source: IpAddr) -> String {
    match source {
        IpAddr::V4(_) => source.to_string(),
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            format!("{}/64", std::net::Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
    }
}

/// How many connections the agent says that a source has.
fn open(agent: &Agent, source: IpAddr) -> Result<u64> {
    let page: Value = serde_json::from_str(&agent.get("/v1/connections?limit=1000")?)?;
    let listed = page["connections"].as_array().context("no list")?;
    let found = listed.iter().find(|entry| entry["source"] == written(source).as_str());
    found.map_or(Ok(0), |entry| entry["open"].as_u64().context("no number"))
}

fn wait(agent: &Agent, source: IpAddr, wanted: u64) -> Result<()> {
    let give_up = Instant::now() + PATIENCE;
    loop {
        let found = open(agent, source)?;
        if found == wanted {
            return Ok(());
        }
        ensure!(Instant::now() < give_up, "{found} of {source}, not {wanted}\n{}", agent.log());
        thread::sleep(Duration::from_millis(20));
    }
}

fn refusals(agent: &Agent, action: &str) -> Result<f64> {
    let labels = [("reason", "connections"), ("class", "syn"), ("action", action)];
    Ok(agent.metrics()?.sum("limiter_packets_total", &labels))
}

/// With a reset instead of a FIN.
fn reset(stream: TcpStream) -> Result<()> {
    setsockopt(&stream, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 })?;
    drop(stream);
    Ok(())
}

fn every_end_is_heard(stage: &Stage) -> Result<()> {
    let unlimited = CONFIG.replace("connections = 3\n", "");
    let agent = Agent::start(&stage.edge.netns, &unlimited)?;
    let (one, other) = (stage.one, stage.other);
    let mut connections: Vec<_> = (0..6).map(|_| stage.connect(one)).collect::<Result<_>>()?;
    let of_other = stage.connect(other)?;
    wait(&agent, one, 6)?;
    wait(&agent, other, 1)?;

    // By FIN: first by the client, which leaves the server nothing to wait for, then by the server.
    let (near, far) = connections.pop().context("one of six")?;
    drop(near);
    thread::sleep(Duration::from_millis(50));
    assert_eq!(open(&agent, one)?, 6, "the server has not closed its end yet");
    drop(far);
    wait(&agent, one, 5)?;
    let (near, far) = connections.pop().context("one of six")?;
    drop(far);
    drop(near);
    wait(&agent, one, 4)?;

    // By RST: the client's, then the server's.
    let (near, far) = connections.pop().context("one of six")?;
    reset(near)?;
    wait(&agent, one, 3)?;
    drop(far);
    let (near, far) = connections.pop().context("one of six")?;
    reset(far)?;
    wait(&agent, one, 2)?;
    drop(near);

    // By a listener that goes away before it accepts.
    let unaccepted = SocketAddr::new(stage.to.ip(), 81);
    let listener = stage.edge.netns.run(|| TcpListener::bind(unaccepted))?;
    let near = stage.clients.netns.run(|| connect(one, unaccepted))?;
    wait(&agent, one, 3)?;
    drop(listener);
    wait(&agent, one, 2)?;
    drop(near);

    // By a timeout: the client is gone without a word.
    let (near, mut far) = connections.pop().context("one of six")?;
    setsockopt(&far, sockopt::TcpUserTimeout, &500)?;
    stage.clients.netns.ip(&["link", "set", "dev", &stage.clients.name, "down"])?;
    far.write_all(b"anybody?")?;
    wait(&agent, one, 1)?;
    assert_eq!(open(&agent, other)?, 1);
    drop((near, far, of_other, connections));
    agent.terminate()?;
    Ok(())
}

#[test]
fn every_end_is_heard_of_ipv4_connections() -> Result<()> {
    every_end_is_heard(&Stage::new("198.18.41.1", "198.18.41.2", "198.18.41.3")?)
}

#[test]
fn every_end_is_heard_of_ipv6_connections() -> Result<()> {
    let (one, other) = ("2001:db8:41:1::2", "2001:db8:41:2::3");
    every_end_is_heard(&Stage::new("2001:db8:41::1", one, other)?)
}

/// The client's process is killed.
#[test]
fn a_killed_process_has_no_connections() -> Result<()> {
    let stage = Stage::new("198.18.42.1", "198.18.42.2", "198.18.42.3")?;
    let agent = Agent::start(&stage.edge.netns, CONFIG)?;
    let script = format!("exec 3<>/dev/tcp/{}/80 && read -u 3", stage.to.ip());
    let mut command: Command = stage.clients.netns.command("bash");
    let mut client = command.args(["-c", &script]).stdin(Stdio::null()).spawn()?;
    let (mut far, peer) = stage.listener.accept()?;
    wait(&agent, peer.ip(), 1)?;
    client.kill()?;
    client.wait()?;
    // The server reads the end, and closes.
    far.set_read_timeout(Some(PATIENCE))?;
    assert_eq!(far.read(&mut [0])?, 0);
    drop(far);
    wait(&agent, peer.ip(), 0)?;
    agent.terminate()?;
    Ok(())
}

fn the_limit_refuses_one_more(stage: &Stage) -> Result<()> {
    let agent = Agent::start(&stage.edge.netns, CONFIG)?;
    let (one, other) = (stage.one, stage.other);
    let mut connections: Vec<_> = (0..3).map(|_| stage.connect(one)).collect::<Result<_>>()?;
    stage.assert_is_refused(one);
    let refused = refusals(&agent, "drop")?;
    assert!(refused > 0.5, "{}", agent.get("/metrics")?);
    // What is open goes on, and others are not concerned.
    connections.iter_mut().try_for_each(assert_works)?;
    let mut of_other: Vec<_> = (0..3).map(|_| stage.connect(other)).collect::<Result<_>>()?;
    of_other.iter_mut().try_for_each(assert_works)?;
    // Room for one more.
    drop(connections.pop());
    wait(&agent, one, 2)?;
    let before = refusals(&agent, "drop")?;
    connections.push(stage.connect(one)?);
    assert!((refusals(&agent, "drop")? - before).abs() < 0.5);
    wait(&agent, one, 3)?;
    agent.terminate()?;
    Ok(())
}

#[test]
fn the_limit_refuses_one_more_of_an_ipv4_address() -> Result<()> {
    the_limit_refuses_one_more(&Stage::new("198.18.43.1", "198.18.43.2", "198.18.43.3")?)
}

#[test]
fn the_limit_refuses_one_more_of_an_ipv6_network() -> Result<()> {
    let (one, other) = ("2001:db8:43:1::2", "2001:db8:43:2::3");
    the_limit_refuses_one_more(&Stage::new("2001:db8:43::1", one, other)?)
}

#[test]
fn observe_counts_what_would_be_refused() -> Result<()> {
    let stage = Stage::new("198.18.44.1", "198.18.44.2", "198.18.44.3")?;
    let agent = Agent::start(&stage.edge.netns, &CONFIG.replace("enforce", "observe"))?;
    let mut connections: Vec<_> =
        (0..5).map(|_| stage.connect(stage.one)).collect::<Result<_>>()?;
    connections.iter_mut().try_for_each(assert_works)?;
    wait(&agent, stage.one, 5)?;
    let would = refusals(&agent, "would_drop")?;
    assert!((would - 2.0).abs() < 0.5, "{would}");
    assert!(refusals(&agent, "drop")? < 0.5);
    agent.terminate()?;
    Ok(())
}

/// Also of older connections, whose end the program does not hear of: the next start takes those off that
/// ended meanwhile.
#[test]
fn older_connections_count_and_a_restart_keeps_the_counts_right() -> Result<()> {
    let stage = Stage::new("198.18.45.1", "198.18.45.2", "198.18.45.3")?;
    let one = stage.one;
    let older = [stage.connect(one)?, stage.connect(one)?];
    // Of this, the host is the client.
    let theirs = SocketAddr::new(one, 80);
    let _their_listener = stage.clients.netns.run(|| TcpListener::bind(theirs))?;
    let _ours = stage.edge.netns.run(|| connect(stage.to.ip(), theirs))?;
    let agent = stage.start_pinned(CONFIG)?;
    wait(&agent, one, 2)?;
    let heard = stage.connect(one)?;
    stage.assert_is_refused(one);
    wait(&agent, one, 3)?;

    let pins = stage.bpffs.pins();
    let pins = ["--pins", pins.to_str().context("UTF-8")?];
    let [first, second] = older;
    let mut while_alone = None;
    let agent = agent.restart(&pins, || {
        drop(first);
        // One that is heard of goes, and another comes, while no agent runs.
        drop(heard);
        let give_up = Instant::now() + PATIENCE;
        // Until the limit lets it: the program has heard of the end by itself.
        while while_alone.is_none() {
            while_alone = stage.connect(one).ok();
            ensure!(Instant::now() < give_up, "still refused");
        }
        Ok(())
    })?;
    wait(&agent, one, 2)?;
    drop(while_alone);
    wait(&agent, one, 1)?;
    let agent = agent.kill_and_start(&pins)?;
    wait(&agent, one, 1)?;
    drop(second);
    let agent = agent.kill_and_start(&pins)?;
    wait(&agent, one, 0)?;
    let log = agent.log();
    assert!(log.contains("taking over from the agent before"), "{log}");
    agent.terminate()?;
    Ok(())
}

/// With maps of its own, an agent finds all connections by the list; of those that a program before it asked
/// to hear, it hears.
#[test]
fn new_maps_begin_with_what_is_open() -> Result<()> {
    let stage = Stage::new("2001:db8:46::1", "2001:db8:46:1::2", "2001:db8:46:2::3")?;
    let agent = Agent::start(&stage.edge.netns, CONFIG)?;
    let connections = [stage.connect(stage.one)?, stage.connect(stage.one)?];
    wait(&agent, stage.one, 2)?;
    let agent = agent.restart(&["--unpinned"], || Ok(()))?;
    wait(&agent, stage.one, 2)?;
    let [first, second] = connections;
    drop(first);
    wait(&agent, stage.one, 1)?;
    drop(second);
    wait(&agent, stage.one, 0)?;
    agent.terminate()?;
    Ok(())
}

#[test]
fn they_are_shown() -> Result<()> {
    let stage = Stage::new("198.18.47.1", "198.18.47.2", "198.18.47.3")?;
    let agent = Agent::start(&stage.edge.netns, CONFIG)?;
    let _open = [stage.connect(stage.one)?, stage.connect(stage.one)?, stage.connect(stage.other)?];
    wait(&agent, stage.one, 2)?;
    wait(&agent, stage.other, 1)?;
    let metrics = agent.metrics()?;
    let of_ipv4 = [("family", "ipv4")];
    assert!(metrics.sum("limiter_connections", &of_ipv4) > 2.5);
    assert!(metrics.sum("limiter_connection_sources", &of_ipv4) > 1.5);
    assert!(metrics.sum("limiter_connections_uncounted_total", &[]) < 0.5);
    let status: Value = serde_json::from_str(&agent.get("/v1/status")?)?;
    assert_eq!(status["connections"]["counted"], "handshakes");
    assert!(status["connections"]["most"]["open"].as_u64() >= Some(2), "{status}");
    assert_eq!(status["classes"][0]["connections"], 3);

    // One at a time is the same as all at once.
    let page: Value = serde_json::from_str(&agent.get("/v1/connections?limit=1")?)?;
    assert_eq!(page["connections"].as_array().map(Vec::len), Some(1));
    let next = page["next"].as_str().context("there is another")?;
    let page: Value = serde_json::from_str(&agent.get(&format!("/v1/connections?after={next}"))?)?;
    assert!(page["connections"].as_array().is_some_and(|it| !it.is_empty()), "{page}");
    for (wrong, part) in [
        ("limit=0", "write 1 to 1000"),
        ("limit=1001", "write 1 to 1000"),
        ("limit=many", "limit"),
        ("after=nobody", "is not a place in the list"),
        ("order=up", "unknown field"),
    ] {
        let error = agent.get(&format!("/v1/connections?{wrong}")).expect_err(wrong).to_string();
        assert!(error.contains(": 422: ") && error.contains(part), "{error}");
    }

    let output = agent.command(&["connections", "--limit", "1000"])?;
    let text = String::from_utf8(output.stdout)?;
    let row = text.lines().find(|line| line.starts_with("198.18.47.2 ")).context(text.clone())?;
    assert!(row.ends_with(" 2"), "{text}");
    let output = agent.command(&["connections", "--json", "--limit", "1"])?;
    let page: Value = serde_json::from_slice(&output.stdout)?;
    assert_eq!(page["connections"].as_array().map(Vec::len), Some(1));
    assert_eq!(agent.command(&["connections", "--limit", "0"])?.status.code(), Some(2));
    agent.terminate()?;
    Ok(())
}
