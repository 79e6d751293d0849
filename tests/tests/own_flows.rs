//! What comes back on the flows that this host opened is not dropped with a flood forged in the name of
//! those who answer; and what others opened, or this host only answered, opens nothing.
//!
//! The programs hear of the whole host, so each test has addresses of its own.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use limiter_tests::{
    agent::{Agent, Metrics},
    client::{EchoServer, connect},
    frames,
    generator::{Flood, Generator, Sent},
    netns::{Interface, Netns, VethOptions, veth},
};

/// So little that nothing works without what is tested here: a source has twenty packets, and then
/// five a second.
const CONFIG: &str = r#"
mode = "enforce"
[[interface]]
name = "edge0"
[[class]]
name = "rest"
packets = { rate = "5/s", burst = 20 }
"#;

/// What a source may have sent of a flood that took so long, a moment of a slow machine included.
fn allowed(sent: &Sent) -> f64 {
    20.0 + 5.0 * (sent.elapsed().as_secs_f64() + 1.0)
}

/// Forged frames a second.
const FLOOD: f64 = 20_000.0;
const DOWNLOAD: usize = 16 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// A guarded host and the rest of the world, where `remote` is and `forged` may be.
struct Stage {
    world: Interface,
    edge: Interface,
    local: IpAddr,
    remote: IpAddr,
}

impl Stage {
    /// Both in network number `net` of the family.
    fn new(is_v4: bool, net: u8) -> Result<Self> {
        let (world, edge) = veth(
            (&Netns::new("world")?, "world0"),
            (&Netns::new("edge")?, "edge0"),
            VethOptions::default(),
        )?;
        let (local, remote, length) = if is_v4 {
            (format!("198.19.{net}.1"), format!("198.19.{net}.2"), 24)
        } else {
            (format!("2001:db8:f0{net:02x}::1"), format!("2001:db8:f0{net:02x}:1::2"), 48)
        };
        let (local, remote) = (local.parse()?, remote.parse()?);
        edge.add_known_address(local, length, &world)?;
        world.add_known_address(remote, length, &edge)?;
        Ok(Self { world, edge, local, remote })
    }

    fn agent(&self) -> Result<Agent> {
        Agent::start(&self.edge.netns, CONFIG)
    }

    /// Floods until it is stopped: UDP in the name of `remote`, from `from` to `to`.
    fn flood(&self, from: u16, to: u16) -> Result<Running> {
        let path = frames::Path {
            source_mac: self.world.mac,
            destination_mac: self.edge.mac,
            source: SocketAddr::new(self.remote, from),
            destination: SocketAddr::new(self.local, to),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let flood = Flood::new(frames::udp(&path, 18), FLOOD, PATIENCE).until(Arc::clone(&stop));
        let mut generator = Generator::new(&self.world)?;
        let thread = thread::spawn(move || generator.flood(&flood));
        // Its source has nothing left.
        thread::sleep(Duration::from_millis(300));
        Ok(Running { stop, thread })
    }

    /// A server in the world that sends [`DOWNLOAD`] bytes to whoever connects.
    fn serve(&self) -> Result<SocketAddr> {
        let address = SocketAddr::new(self.remote, 80);
        let listener = self.world.netns.run(|| TcpListener::bind(address))?;
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                send_all(connection);
            }
        });
        Ok(address)
    }
}

struct Running {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Sent>>,
}

impl Running {
    fn stop(self) -> Result<Sent> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the flood panicked"))?
    }
}

/// On a thread of its own, once it is told to begin.
fn send_all(mut connection: TcpStream) {
    thread::spawn(move || {
        let mut begin = [0];
        if connection.read_exact(&mut begin).is_ok() {
            // Whoever went away does not want it.
            let _ = connection.write_all(&vec![7; DOWNLOAD]);
        }
    });
}

/// Takes all that [`send_all`] sends, and says how long that took.
fn download(mut connection: TcpStream) -> Result<Duration> {
    let start = Instant::now();
    connection.set_read_timeout(Some(PATIENCE))?;
    connection.write_all(&[1])?;
    let (mut buffer, mut received) = (vec![0; 1 << 16], 0);
    while received < DOWNLOAD {
        ensure!(start.elapsed() < PATIENCE, "{received} bytes in {:?}", start.elapsed());
        let read = connection.read(&mut buffer).with_context(|| format!("{received} bytes"))?;
        ensure!(read > 0, "ended after {received} bytes");
        received += read;
    }
    Ok(start.elapsed())
}

/// Packets that passed or were dropped for a reason.
fn packets(metrics: &Metrics, reason: &str) -> f64 {
    metrics.sum("limiter_packets_total", &[("reason", reason)])
}

/// That of the flood no more passed than its source may send.
fn assert_limited(metrics: &Metrics, sent: &Sent) {
    let passed = packets(metrics, "conform") + packets(metrics, "near_limit");
    assert!(passed <= allowed(sent), "{passed} passed of {sent:?}");
    let dropped = packets(metrics, "packet_rate");
    #[expect(clippy::cast_precision_loss, reason = "well below 2^52")]
    let arrived = sent.arrived() as f64;
    assert!(dropped >= arrived - passed, "{dropped} dropped, {passed} passed of {arrived}");
    assert!(arrived > 1_000.0, "hardly a flood: {sent:?}");
}

fn a_download_goes_on(stage: &Stage) -> Result<()> {
    let server = stage.serve()?;
    let free = download(stage.edge.netns.run(|| connect(stage.local, server))?)?;
    let agent = stage.agent()?;
    let flood = stage.flood(4000, 9)?;
    let took = download(stage.edge.netns.run(|| connect(stage.local, server))?)?;
    let sent = flood.stop()?;
    let metrics = agent.metrics()?;
    println!("{} MiB in {took:?} during the flood, {free:?} before it", DOWNLOAD >> 20);
    assert_limited(&metrics, &sent);
    // Full segments, of which the source could send itself a handful.
    let answers = packets(&metrics, "established");
    assert!(answers >= 10_000.0, "{answers}");
    // At five packets a second: 40 minutes.
    assert!(took < free * 20 + Duration::from_secs(5), "{took:?}, {free:?} without a flood");
    agent.terminate()?;
    Ok(())
}

#[test]
fn a_download_by_the_host_is_not_dropped_with_a_flood() -> Result<()> {
    a_download_goes_on(&Stage::new(true, 1)?)
}

#[test]
fn a_download_over_ipv6_is_not_dropped_with_a_flood() -> Result<()> {
    a_download_goes_on(&Stage::new(false, 1)?)
}

/// Of a connection that was there before the agent, the kernel's list says who opened it.
#[test]
fn a_connection_that_is_older_than_the_agent_is_known() -> Result<()> {
    let stage = Stage::new(true, 2)?;
    let server = stage.serve()?;
    let connection = stage.edge.netns.run(|| connect(stage.local, server))?;
    let agent = stage.agent()?;
    let took = download(connection)?;
    assert!(took < PATIENCE, "{took:?}");
    assert!(packets(&agent.metrics()?, "established") >= 10_000.0);
    agent.terminate()?;
    Ok(())
}

/// Whoever connects to this host opens nothing for itself: neither before the agent came nor after.
#[test]
fn connections_that_others_open_stay_limited() -> Result<()> {
    let stage = Stage::new(true, 3)?;
    let server = SocketAddr::new(stage.local, 80);
    let listener = stage.edge.netns.run(|| TcpListener::bind(server))?;
    thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            send_all(connection);
        }
    });
    let mut older = stage.world.netns.run(|| connect(stage.remote, server))?;
    let agent = stage.agent()?;
    let mut newer = stage.world.netns.run(|| connect(stage.remote, server))?;
    for connection in [&mut older, &mut newer] {
        connection.write_all(&[1])?;
        let path = frames::Path {
            source_mac: stage.world.mac,
            destination_mac: stage.edge.mac,
            source: connection.local_addr()?,
            destination: server,
        };
        // As good as any segment: no flag opens anything.
        let flood = Flood::new(frames::tcp_syn(&path), 2_000.0, Duration::from_secs(1));
        let sent = Generator::new(&stage.world)?.flood(&flood)?;
        assert!(sent.arrived() > 500, "{sent:?}");
    }
    let metrics = agent.metrics()?;
    assert!(packets(&metrics, "established") < 0.5, "{metrics:?}");
    assert!(packets(&metrics, "packet_rate") > 1_000.0, "{metrics:?}");
    agent.terminate()?;
    Ok(())
}

/// Asks a hundred times, waits for each answer, and says how many came.
fn ask(socket: &UdpSocket, mut send: impl FnMut(&UdpSocket) -> std::io::Result<usize>) -> u32 {
    let timeout = socket.set_read_timeout(Some(Duration::from_millis(500)));
    timeout.expect("a timeout is taken");
    let mut answer = [0; 64];
    (0..100)
        .filter(|_| send(socket).is_ok() && socket.recv(&mut answer).is_ok())
        .fold(0, |sum, _| sum + 1)
}

fn answers_arrive(stage: &Stage) -> Result<()> {
    let resolver = SocketAddr::new(stage.remote, 53);
    let _resolver = EchoServer::start(&stage.world.netns, resolver)?;
    let agent = stage.agent()?;
    // From the resolver's own port: only the host's port is wrong.
    let flood = stage.flood(53, 9)?;
    let any = SocketAddr::new(stage.local, 0);
    let (connected, unconnected) = stage.edge.netns.run(|| -> Result<_> {
        let socket = UdpSocket::bind(any)?;
        socket.connect(resolver)?;
        let connected = ask(&socket, |socket| socket.send(b"whois"));
        let socket = UdpSocket::bind(any)?;
        Ok((connected, ask(&socket, |socket| socket.send_to(b"whois", resolver))))
    })?;
    let sent = flood.stop()?;
    let metrics = agent.metrics()?;
    // A ring may overflow once.
    assert!(connected >= 98 && unconnected >= 98, "{connected} and {unconnected} of 100 answered");
    assert_limited(&metrics, &sent);
    assert!(packets(&metrics, "established") >= 190.0, "{metrics:?}");
    agent.terminate()?;
    Ok(())
}

#[test]
fn answers_to_the_hosts_resolver_arrive_during_a_flood() -> Result<()> {
    answers_arrive(&Stage::new(true, 4)?)
}

#[test]
fn answers_over_ipv6_arrive_during_a_flood() -> Result<()> {
    answers_arrive(&Stage::new(false, 4)?)
}

/// A question of a forger, answered by `server`, and then a flood on the very same ports: how many of
/// its packets were taken for answers.
fn taken_for_answers(stage: &Stage, agent: &Agent, server: &EchoServer) -> Result<f64> {
    let asker = stage.world.netns.run(|| UdpSocket::bind(SocketAddr::new(stage.remote, 0)))?;
    asker.set_read_timeout(Some(PATIENCE))?;
    let before = server.received();
    asker.send_to(b"hello", SocketAddr::new(stage.local, 7))?;
    asker.recv(&mut [0; 8]).context("the server did not answer")?;
    ensure!(server.received() > before, "somebody else answered");
    let flood = stage.flood(asker.local_addr()?.port(), 7)?;
    thread::sleep(Duration::from_millis(500));
    let sent = flood.stop()?;
    let metrics = agent.metrics()?;
    let taken = packets(&metrics, "established");
    if taken < 0.5 {
        assert_limited(&metrics, &sent);
    }
    Ok(taken)
}

/// A server answers whoever asks, so its answers say nothing: whether its socket is older than the agent
/// or not.
#[test]
fn a_servers_answers_open_nothing() -> Result<()> {
    for (is_v4, net) in [(true, 5), (false, 5)] {
        let stage = Stage::new(is_v4, net)?;
        let address = SocketAddr::new(stage.local, 7);
        let older = EchoServer::start(&stage.edge.netns, address)?;
        let agent = stage.agent()?;
        assert!(taken_for_answers(&stage, &agent, &older)? < 0.5);
        agent.terminate()?;
        drop(older);

        let agent = stage.agent()?;
        let newer = EchoServer::start(&stage.edge.netns, address)?;
        assert!(taken_for_answers(&stage, &agent, &newer)? < 0.5);
        agent.terminate()?;
    }
    Ok(())
}

/// A resolver binds the ports that it asks from, and the operator says so.
#[test]
fn ports_of_clients_are_for_the_operator_to_name() -> Result<()> {
    let stage = Stage::new(true, 6)?;
    let agent = stage.agent()?;
    let server = EchoServer::start(&stage.edge.netns, SocketAddr::new(stage.local, 7))?;
    agent.reload(&format!("{CONFIG}\n[established]\nclient_ports = [5, \"7-8\"]\n"))?;
    assert!(taken_for_answers(&stage, &agent, &server)? > 1_000.0);
    agent.terminate()?;
    Ok(())
}

/// The limit of all such flows holds, and `status` and metrics show how they are known.
#[test]
fn what_is_established_has_a_limit() -> Result<()> {
    let stage = Stage::new(true, 7)?;
    let server = stage.serve()?;
    let limit = "[established]\npackets = { rate = \"100/s\", burst = 200 }\n";
    let agent = Agent::start(&stage.edge.netns, &format!("{CONFIG}\n{limit}"))?;
    let connection = stage.edge.netns.run(|| connect(stage.local, server))?;
    let taker = thread::spawn(move || download(connection));
    let start = Instant::now();
    thread::sleep(Duration::from_secs(2));
    let metrics = agent.metrics()?;
    let most = 200.0 + 100.0 * (start.elapsed().as_secs_f64() + 1.0);
    let (passed, dropped) =
        (packets(&metrics, "established"), packets(&metrics, "established_rate"));
    assert!(passed > 100.0 && passed <= most, "{passed} passed, {most} may");
    assert!(dropped > 0.5, "nothing was dropped");
    for protocol in ["tcp", "udp"] {
        let known = metrics.sum("limiter_own_flows", &[("protocol", protocol)]);
        assert!(known > 0.5, "{protocol}: {}", agent.log());
    }
    let status = agent.get("/v1/status")?;
    let status: serde_json::Value = serde_json::from_str(&status)?;
    assert_eq!(status["established"]["burst"], 200);
    assert_eq!(status["own_flows"]["tcp"], "connect");
    agent.terminate()?;
    // It is far too slow to end, and its namespace goes away.
    drop(taker);
    Ok(())
}
