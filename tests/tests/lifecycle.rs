//! What outlives the agent: limits that hold through restarts, upgrades and crashes, and end when they
//! are told to.

use std::{
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, Result, ensure};
use limiter_tests::{
    agent::{self, Agent, Metrics},
    bpffs::Bpffs,
    client::{self, EchoServer, Goodput, Pace, connect},
    frames,
    generator::{Counter, Flood, Generator, Order, Sources, Verdict},
    netns::{Interface, Netns, VethOptions, veth},
    process,
};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(20);

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

    /// IPv4 packets that came past the program to the server's stack, without TCP: the agent is asked
    /// over that.
    fn received(&self) -> Result<u64> {
        let snmp = self.edge.netns.run(|| std::fs::read_to_string("/proc/thread-self/net/snmp"))?;
        let value = |protocol: &str, column: &str| {
            let mut lines = snmp.lines().filter_map(|line| line.strip_prefix(protocol));
            let (names, values) = (lines.next().context("names")?, lines.next().context("values")?);
            let place = names.split(' ').position(|name| name == column).context("a column")?;
            Ok::<u64, anyhow::Error>(values.split(' ').nth(place).context("a value")?.parse()?)
        };
        Ok(value("Ip:", "InReceives")? - value("Tcp:", "InSegs")?)
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

    /// A connection of the client, which proves its address.
    fn prove(&self) -> Result<(TcpStream, TcpStream)> {
        let address = SocketAddr::new(SERVER.parse()?, 80);
        let listener = self.edge.netns.run(|| TcpListener::bind(address))?;
        let near = self.clients.netns.run(|| connect(CLIENT.parse()?, address))?;
        Ok((near, listener.accept()?.0))
    }

    /// What the client's questions at 200 a second come to, until it is told to stop.
    fn ask(&self, server: SocketAddr, stop: &AtomicBool) -> Result<Goodput> {
        let pace = Pace { rate: 200, duration: Duration::from_secs(1) };
        let mut sum = Goodput::default();
        while !stop.load(Ordering::Relaxed) {
            let asked =
                client::start(&self.clients.netns, CLIENT.parse()?, server, pace)?.join()?;
            sum.sent += asked.sent;
            sum.answered += asked.answered;
        }
        Ok(sum)
    }

    /// What a command says where no agent answers.
    fn unattended(&self, command: &str, arguments: &[&str]) -> Result<String> {
        let mut words = self.edge.netns.command(agent::binary()?);
        words.arg(command).args(arguments).arg("--pins").arg(self.bpffs.pins());
        words.arg("--control-socket").arg(self.bpffs.path().join("nobody"));
        let output = process::output(&mut words, PATIENCE)?;
        ensure!(output.status.success(), "{command}: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// The id of the program on the server's interface, if there is one.
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
    Ok(())
}

#[test]
fn a_crash_and_a_bad_configuration_leave_the_limits_and_blocks_end_on_time() -> Result<()> {
    const LASTS: Duration = Duration::from_secs(15);
    let mut stage = Stage::new()?;
    agent::binary()?;
    let end = SystemTime::now() + LASTS;
    let block = format!(
        "packets = {{ rate = \"1000/s\", burst = 1000 }}\n\
         [[block]]\ncidr = \"{CLIENT}/32\"\nexpires = \"{}\"",
        limiter_agent::status::utc(end)
    );
    let agent = stage.start(&config(&block))?;
    let program = stage.attachment()?.context("it is attached")?;
    assert_eq!(stage.pass(20)?, 0, "it is blocked");
    agent.kill();
    assert_eq!(stage.pass(20)?, 0, "the block holds after a crash");
    ensure!(end > SystemTime::now() + Duration::from_secs(1), "this machine is too slow");
    thread::sleep(
        end.duration_since(SystemTime::now()).unwrap_or_default() + Duration::from_secs(1),
    );
    assert_eq!(stage.pass(20)?, 20, "the block ended with no agent");

    let bad = stage.start("mode = \"enforce\"\n[[class]]\nname = 7\n");
    assert!(bad.is_err());
    assert_eq!(stage.attachment()?, Some(program), "a bad configuration changes nothing");
    let agent = stage.start(&config(SLOW))?;
    assert_eq!(stage.pass(20)?, 10, "the good one holds");
    let mut pins: Vec<_> = std::fs::read_dir(stage.bpffs.pins())?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    pins.sort();
    let flows = ["flow_bind4", "flow_bind6", "flow_packets", "flow_sockets"];
    assert_eq!(pins, [&flows[..], &["handshakes", "link-edge0", "maps"]].concat());
    agent.terminate()?;
    Ok(())
}

#[test]
fn a_second_agent_is_refused() -> Result<()> {
    let stage = Stage::new()?;
    let agent = stage.start(&config(SLOW))?;
    let program = stage.attachment()?;
    let mut second = stage.edge.netns.command(agent::binary()?);
    second
        .args(["run", "--metrics-listen", "127.0.0.1:9479", "--config"])
        .arg(agent.configuration())
        .arg("--pins")
        .arg(stage.bpffs.pins());
    let directory = tempfile::tempdir()?;
    second.args(["--control-socket"]).arg(directory.path().join("control.sock"));
    let output = process::output(&mut second, PATIENCE)?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("another agent runs with the pins in"), "{said}");
    assert_eq!(stage.attachment()?, program);
    agent.terminate()?;
    Ok(())
}

#[test]
fn a_start_that_fails_leaves_everything_as_it_was() -> Result<()> {
    let mut stage = Stage::new()?;
    let options = VethOptions::default();
    let (_, other) = veth(
        (&stage.clients.netns.clone(), "clients1"),
        (&stage.edge.netns.clone(), "edge1"),
        options,
    )?;
    let both = config(SLOW).replace("[[class]]", "[[interface]]\nname = \"edge1\"\n[[class]]");
    let foreign = Counter::attach(&other, Verdict::Pass)?;
    let error = format!("{:#}", stage.start(&both).err().context("it is refused")?);
    assert!(error.contains("edge1 already has an XDP program"), "{error}");
    assert_eq!(stage.attachment()?, None);
    assert!(!stage.bpffs.pins().exists());

    let agent = stage.start(&config(SLOW))?;
    assert_eq!(stage.pass(20)?, 10);
    agent.terminate()?;
    let program = stage.attachment()?;
    assert!(stage.start(&both).is_err());
    assert_eq!(stage.attachment()?, program);
    assert_eq!(stage.pass(20)?, 0, "the limits before hold on");
    drop(foreign);
    let agent = stage.start(&both)?;
    assert_eq!(stage.pass(20)?, 0, "the bucket was kept");
    agent.terminate()?;
    Ok(())
}

#[test]
fn without_an_agent_its_remains_are_shown_and_removed() -> Result<()> {
    let mut stage = Stage::new()?;
    let agent = stage.start(&config(SLOW))?;
    assert_eq!(stage.pass(20)?, 10);
    agent.kill();
    let status = stage.unattended("status", &[])?;
    assert!(status.starts_with("no agent answers; what one left pinned goes on\n"), "{status}");
    assert!(status.contains("edge0") && status.contains("enforce"), "{status}");
    let status: Value = serde_json::from_str(&stage.unattended("status", &["--json"])?)?;
    assert_eq!(status["mode"], "enforce", "{status}");
    assert_eq!(status["interfaces"], serde_json::json!(["edge0"]), "{status}");
    let totals = status["totals"].as_array().context("a list")?;
    let packets = |reason: &str| {
        totals.iter().find(|total| total["reason"] == reason).map(|total| total["packets"].clone())
    };
    assert_eq!(packets("packet_rate"), Some(10.into()), "{status}");

    assert_eq!(stage.unattended("detach", &[])?, "detached from edge0\n");
    assert_eq!(stage.attachment()?, None);
    assert!(!stage.bpffs.pins().exists());
    assert_eq!(stage.unattended("detach", &[])?, "nothing was attached\n");
    Ok(())
}

/// The heart beats through a flood of all CPUs, and after it stopped nothing is dropped any more.
#[test]
fn limits_end_with_the_lease_if_so_chosen() -> Result<()> {
    const LEASE: Duration = Duration::from_secs(30);
    const BEAT: Duration = Duration::from_secs(5);
    let mut stage = Stage::new()?;
    let observe = format!("on_agent_loss = \"observe\"\nagent_lease = 30\n{}", config(SLOW));
    let agent = stage.start(&observe)?;
    assert_eq!(stage.pass(20)?, 10);
    let before = stage.received()?;
    let frame = stage.frame(CLIENT.parse()?, 9)?;
    let flood = Flood::new(frame, f64::INFINITY, LEASE + BEAT).cpus([0, 1]);
    let sent = stage.generator.flood(&flood)?;
    assert!(stage.received()? - before <= 2, "{sent:?}");
    agent.kill();
    let killed = Instant::now();
    thread::sleep(Duration::from_secs(23));
    assert_eq!(stage.pass(20)?, 0, "the lease lasts");
    let status = stage.unattended("status", &[])?;
    assert!(status.contains(" s, unless an agent is started"), "{status}");
    thread::sleep((LEASE + Duration::from_secs(1)).saturating_sub(killed.elapsed()));
    assert_eq!(stage.pass(20)?, 20, "the lease has ended");
    let agent = stage.start(&observe)?;
    assert_eq!(stage.pass(20)?, 0, "the bucket was kept");
    agent.terminate()?;
    Ok(())
}

#[test]
fn another_way_to_attach_is_had_by_a_restart() -> Result<()> {
    let mut stage = Stage::new()?;
    let agent = stage.start(&config(SLOW))?;
    assert_eq!(stage.pass(20)?, 10);
    agent.terminate()?;
    let generic = config(SLOW).replace("name = \"edge0\"", "name = \"edge0\"\nxdp = \"generic\"");
    let agent = stage.start(&generic)?;
    let links = stage.edge.netns.ip(&["link", "show", "dev", "edge0"])?;
    assert!(links.contains("xdpgeneric"), "{links}");
    agent.terminate()?;
    Ok(())
}

/// New sources a second, and at once, in [`FLOODED`].
const RATE: f64 = 1000.0;
const BURST: f64 = 500.0;

const FLOODED: &str = r#"
mode = "enforce"
[[interface]]
name = "edge0"
[table]
new_sources = { rate = "1000/s", burst = 500 }
[[class]]
name = "client"
match = { protocol = "udp", ports = [7] }
packets = { rate = "1000/s", burst = 1000 }
[[class]]
name = "tcp"
match = { protocol = "tcp" }
packets = { rate = "1000/s", burst = 1000 }
[[class]]
name = "rest"
packets = { rate = "1/s", burst = 1 }
"#;

/// 20 restarts, five of them after a crash, and five upgrades, the last one to another ABI. What passes
/// of a flood from forged sources is what the budget for new sources lets in.
#[test]
fn restarts_and_upgrades_under_a_flood_let_nothing_past() -> Result<()> {
    const LONGEST: Duration = Duration::from_mins(8);
    let stage = Stage::new()?;
    let directory = tempfile::tempdir()?;
    let usual = agent::binary()?.to_owned();
    let next = agent::binary_of_next_abi(directory.path())?;
    let start = |binary: &Path| {
        Agent::start_binary(binary, &stage.bpffs.pins(), &stage.edge.netns, FLOODED)
    };
    let mut agent = Some(start(&usual)?);
    let server = SocketAddr::new(SERVER.parse()?, 7);
    let echo = EchoServer::start(&stage.edge.netns, server)?;
    let _connection = stage.prove()?;

    let before = stage.received()?;
    let stop = Arc::new(AtomicBool::new(false));
    let (first, count) = ([10, 0, 0, 0].into(), 1 << 24);
    // In turn, so that none comes back while its bucket is there.
    let flood = Flood::new(stage.frame(IpAddr::V4(first), 9)?, 500_000.0, LONGEST)
        .sources(Sources::Ipv4 { first, count, order: Order::InTurn })
        .until(Arc::clone(&stop));
    let mut generator = Generator::new(&stage.clients)?;
    let (sent, asked) = thread::scope(|scope| {
        let flood = scope.spawn(move || generator.flood(&flood));
        let asking = scope.spawn(|| stage.ask(server, &stop));
        let mut restart = |round: u32| {
            let metrics = agent.as_ref().context("one runs")?.metrics()?;
            ensure!(refused(&metrics) < 0.5, "before round {round}: {metrics:?}");
            // A rebuilt program is to the kernel what one is that is loaded again.
            let binary = if round < 25 { &usual } else { &next };
            let taken = start_after(&mut agent, round % 4 == 3, || start(binary));
            taken.with_context(|| format!("round {round}"))
        };
        let restarted = (1..=25).try_for_each(&mut restart);
        stop.store(true, Ordering::Relaxed);
        let outcomes = (flood.join().expect("no panic"), asking.join().expect("no panic"));
        restarted.map(|()| outcomes)
    })?;
    let (sent, asked) = (sent?, asked?);
    let agent = agent.context("one runs")?;
    let metrics = agent.metrics()?;
    assert!(agent.log().contains("do not fit this one"), "{}", agent.log());
    assert!(refused(&metrics) < 0.5, "{metrics:?}");
    let passed = stage.received()? - before - echo.received();
    let limit = BURST + RATE * sent.elapsed().as_secs_f64();
    println!(
        "{} forged packets in {:?}, {} lost at the ring; {passed} passed, {:.4} of the limit; proven \
         client: {} asked, {} answered, 0 refused",
        sent.total(),
        sent.elapsed(),
        sent.lost,
        as_f64(passed) / limit,
        asked.sent,
        asked.answered
    );
    assert!((0.99..=1.01).contains(&(as_f64(passed) / limit)), "{passed} of {limit}");
    agent.terminate()?;
    Ok(())
}

/// Ends the agent and puts the next one in its place.
fn start_after(
    agent: &mut Option<Agent>,
    by_a_crash: bool,
    start: impl FnOnce() -> Result<Agent>,
) -> Result<()> {
    let old = agent.take().context("one runs")?;
    if by_a_crash {
        old.kill();
    } else {
        old.terminate()?;
    }
    *agent = Some(start()?);
    Ok(())
}

/// Packets of the proven client that were dropped.
fn refused(metrics: &Metrics) -> f64 {
    metrics.sum("limiter_packets_total", &[("class", "client"), ("action", "drop")])
}

fn as_f64(count: u64) -> f64 {
    u32::try_from(count).map_or(f64::INFINITY, f64::from)
}

/// Who was proven is so again on a host that began anew: what is pinned is gone, as after a reboot.
#[test]
fn who_was_proven_is_so_after_a_reboot() -> Result<()> {
    let unproven = "packets = { rate = \"1000/s\", burst = 1000 }\n\
                    unproven = { rate = \"1/h\", burst = 2 }";
    let mut stage = Stage::new()?;
    let agent = stage.start(&config(unproven))?;
    let connection = stage.prove()?;
    assert_eq!(stage.pass(20)?, 20, "it is proven");
    drop(connection);
    let pins = stage.bpffs.pins();
    let agent = agent.restart(&["--pins", pins.to_str().context("UTF-8")?], || {
        stage.unattended("detach", &[])?;
        assert_eq!(stage.attachment()?, None);
        Ok(())
    })?;
    assert!(
        agent.log().contains("who was proven before this start, is so again"),
        "{}",
        agent.log()
    );
    assert_eq!(stage.pass(20)?, 20, "it is proven still");
    agent.terminate()?;
    Ok(())
}

#[test]
fn without_an_agent_the_mode_can_be_changed() -> Result<()> {
    let mut stage = Stage::new()?;
    let agent = stage.start(&config(SLOW))?;
    assert_eq!(stage.pass(20)?, 10);
    agent.kill();
    for (mode, passing) in [("bypass", 20), ("config", 0), ("observe", 20)] {
        let said = stage.unattended("mode", &[mode])?;
        assert!(said.starts_with("no agent answers"), "{said}");
        assert_eq!(stage.pass(20)?, passing, "{mode}");
    }
    let status = stage.unattended("status", &[])?;
    assert!(status.contains("observe"), "{status}");
    let agent = stage.start(&config(SLOW))?;
    assert_eq!(stage.pass(20)?, 0, "the next agent does as its configuration says");
    agent.terminate()?;
    Ok(())
}

/// Whoever cut himself off by a wrong limit is let in again, although the agent that should have taken it
/// back was killed and none was started.
#[test]
fn what_is_not_confirmed_ends_without_an_agent() -> Result<()> {
    const PATIENCE: Duration = Duration::from_secs(8);
    let mut stage = Stage::new()?;
    let agent = stage.start(&config("packets = { rate = \"1000/s\", burst = 1000 }"))?;
    assert_eq!(stage.pass(20)?, 20);
    let directory = tempfile::tempdir()?;
    let wrong = directory.path().join("wrong.toml");
    std::fs::write(&wrong, config("packets = { rate = \"1/m\", burst = 1 }"))?;
    let applied = Instant::now();
    let name = wrong.to_str().context("UTF-8")?;
    let output = agent.command(&["apply", name, "--confirm", "8s"])?;
    ensure!(output.status.success(), "{output:?}");
    agent.kill();
    assert!(stage.pass(20)? <= 1, "the wrong limit holds");
    thread::sleep((PATIENCE + Duration::from_secs(2)).saturating_sub(applied.elapsed()));
    // The debt under the wrong limit is cut to a spent burst of the right one, which fills at its rate.
    stage.pass(20)?;
    assert_eq!(stage.pass(20)?, 20, "what was in force before is so again");
    Ok(())
}
