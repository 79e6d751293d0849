//! `limiter-agent top` and `events`: who floods is named, within the error that is stated, while it goes
//! on; and events are neither many nor silently lost.

use std::{
    fs::File,
    io::{BufRead as _, BufReader},
    net::{SocketAddr, UdpSocket},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use limiter_tests::{
    agent::{self, Agent},
    frames,
    generator::{Flood, Generator, Order, Sources},
    netns::{Interface, Netns, VethOptions, veth},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use tempfile::TempDir;

/// Port 9 lets nearly nothing pass, so that what was sent there is what was dropped.
const CONFIGURATION: &str = r#"
mode = "enforce"
[[interface]]
name = "edge0"
[table]
ipv4_sources = 4096
ipv6_sources = 4096
new_sources = { rate = "1000/s", burst = 1000 }
[[class]]
name = "discard"
match = { protocol = "udp", ports = [9] }
packets = { rate = "1/s", burst = 1 }
[[class]]
name = "rare"
match = { protocol = "udp", ports = [99] }
packets = { rate = "1/s", burst = 1 }
mode = "observe"
[[class]]
name = "rest"
packets = { rate = "1000/s", burst = 1000 }
[[block]]
cidr = "198.51.100.0/24"
"#;

/// A guarded host, and another on its cable with some addresses.
struct Edge {
    near: Interface,
    far: Interface,
    directory: TempDir,
}

impl Edge {
    const FLOODERS: [&str; 3] = ["10.9.0.1", "10.9.1.2", "10.9.2.3"];

    fn new() -> Result<Self> {
        let (near, far) = veth(
            (&Netns::new("edge")?, "edge0"),
            (&Netns::new("peer")?, "peer0"),
            VethOptions::default(),
        )?;
        near.netns.ip(&["addr", "add", "10.9.255.254/16", "dev", "edge0"])?;
        for address in Self::FLOODERS {
            far.netns.ip(&["addr", "add", &format!("{address}/16"), "dev", "peer0"])?;
        }
        let directory = tempfile::Builder::new().prefix("limiter-test-").tempdir()?;
        Ok(Self { near, far, directory })
    }

    /// Datagrams from each of the flooders, as many a millisecond, until `stop` is set; counts those sent.
    fn send(
        &self,
        port: u16,
        per_millisecond: [u32; 3],
        stop: Arc<AtomicBool>,
        sent: Arc<[AtomicU64; 3]>,
    ) -> Result<thread::JoinHandle<Result<()>>> {
        let sockets = self.far.netns.run(|| {
            Self::FLOODERS
                .map(|address| UdpSocket::bind((address, 4000)))
                .into_iter()
                .collect::<std::io::Result<Vec<_>>>()
        })?;
        Ok(thread::spawn(move || {
            let began = Instant::now();
            let mut done = 0_u32;
            while !stop.load(Ordering::Relaxed) {
                // What a busy machine kept from being sent is not made up for.
                let due = u32::try_from(began.elapsed().as_millis())?.min(done.saturating_add(20));
                for _ in done..due {
                    for ((socket, count), sent) in sockets.iter().zip(per_millisecond).zip(&*sent) {
                        for _ in 0..count {
                            socket.send_to(&[0; 18], ("10.9.255.254", port))?;
                            sent.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
                done = u32::try_from(began.elapsed().as_millis())?;
                thread::sleep(Duration::from_micros(500));
            }
            Ok(())
        }))
    }

    fn frame(&self, source: &str, port: u16) -> Result<Vec<u8>> {
        let path = frames::Path {
            source_mac: self.far.mac,
            destination_mac: self.near.mac,
            source: source.parse()?,
            destination: SocketAddr::new("10.9.255.254".parse()?, port),
        };
        Ok(frames::udp(&path, 18))
    }

    /// A `limiter-agent` that goes on, with its standard output in a file.
    fn start(&self, agent: &Agent, arguments: &[&str]) -> Result<Running> {
        let out = self.directory.path().join("out");
        let mut command = Command::new(agent::binary()?);
        command.args(arguments).arg("--control-socket");
        command.arg(agent.configuration().with_file_name("control.sock"));
        command.stdin(Stdio::null()).stdout(File::create(&out)?).stderr(Stdio::null());
        Ok(Running(command.spawn()?))
    }
}

/// Killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn top(agent: &Agent, arguments: &[&str]) -> Result<Value> {
    let output = agent.command(&[&["top", "--json"], arguments].concat())?;
    ensure!(output.status.success(), "{output:?}");
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn number(value: &Value) -> Result<u64> {
    value.as_u64().with_context(|| format!("{value} is no number"))
}

/// What the first entries are called.
fn names(top: &Value, count: usize) -> Vec<&str> {
    let entries = top["entries"].as_array().map_or(&[][..], Vec::as_slice);
    entries.iter().take(count).filter_map(|it| it["what"].as_str()).collect()
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "far below 2⁵²"
)]
fn counted(agent: &Agent, name: &str, labels: &[(&str, &str)]) -> Result<u64> {
    Ok(agent.metrics()?.sum(name, labels) as u64)
}

#[test]
fn three_who_flood_are_named_among_200_000_in_order_and_within_the_error() -> Result<()> {
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, CONFIGURATION)?;
    let stop = Arc::new(AtomicBool::new(false));
    let sent: Arc<[AtomicU64; 3]> = Arc::default();
    let flooders = edge.send(9, [8, 4, 2], Arc::clone(&stop), Arc::clone(&sent))?;
    let mut generator = Generator::new(&edge.far)?;
    let sources =
        Sources::Ipv4 { first: "172.16.0.0".parse()?, count: 200_000, order: Order::Random };
    let many = Flood::new(edge.frame("172.16.0.0:4000", 7)?, 50_000.0, Duration::from_secs(30));
    let many = many.sources(sources).until(Arc::clone(&stop));
    let many = thread::spawn(move || generator.flood(&many));

    thread::sleep(Duration::from_millis(1500));
    let began = Instant::now();
    let during = top(&agent, &[])?;
    let took = began.elapsed();
    let by_bytes = top(&agent, &["--by", "bytes", "--window", "60s"])?;
    let prefixes = top(&agent, &["--of", "prefixes"])?;
    let ports = top(&agent, &["--of", "ports"])?;
    let table = agent.command(&["top", "--once", "--limit", "3"])?;
    thread::sleep(Duration::from_millis(500));
    stop.store(true, Ordering::Relaxed);
    flooders.join().expect("does not panic")?;
    let many = many.join().expect("does not panic")?;
    // Once the ring has been read.
    thread::sleep(Duration::from_millis(300));
    let after = top(&agent, &["--window", "60s"])?;

    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_eq!(names(&during, 3), Edge::FLOODERS, "{during:#}");
    assert_eq!(names(&by_bytes, 3), Edge::FLOODERS, "{by_bytes:#}");
    assert_eq!(names(&after, 3), Edge::FLOODERS, "{after:#}");
    assert_eq!(names(&prefixes, 3), ["10.9.0.0/24", "10.9.1.0/24", "10.9.2.0/24"]);
    assert_eq!(names(&ports, 2), ["udp/7", "udp/9"], "{ports:#}");
    let table = String::from_utf8(table.stdout)?;
    assert!(table.contains("10.9.0.1 ") && table.contains("discard, "), "{table}");
    assert!(table.ends_with(" more\n"), "{table}");

    let sum = many.total();
    assert!(sum > 20_000, "only {sum} frames of the others were sent");
    for (entry, sent) in after["entries"].as_array().context("a list")?.iter().zip(&*sent) {
        // A packet a second passes, and one at the beginning.
        let (sent, passed) = (sent.load(Ordering::Relaxed), 6);
        let (packets, error) = (number(&entry["packets"])?, number(&entry["packets_error"])?);
        assert!(packets.abs_diff(sent) <= error + passed, "{sent} were sent: {entry:#}");
        assert!(error < sent / 2, "an error that says nothing: {entry:#}");
        assert_eq!(number(&entry["dropped"])?, packets);
        assert_eq!((&entry["class"], &entry["interface"]), (&"discard".into(), &"edge0".into()));
        // UDP of 18 bytes is a frame of 60.
        assert_eq!(number(&entry["bytes"])?, packets * 60);
    }
    assert_eq!(counted(&agent, "limiter_events_lost_total", &[("stream", "top")])?, 0);
    agent.terminate()?;
    Ok(())
}

/// The weights of all events are the counters, but for those that are still to be stood for: at most one
/// and a half of the longest distance, for each counter and CPU.
#[test]
fn weights_add_up_to_the_counters_and_what_is_rare_is_shown_in_full() -> Result<()> {
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, CONFIGURATION)?;
    let flood = Flood::new(edge.frame("198.51.100.7:4000", 7)?, 300_000.0, Duration::from_secs(3));
    let flood = flood.cpus([0, 1]);
    let mut generator = Generator::new(&edge.far)?;
    let flood = thread::spawn(move || generator.flood(&flood));
    let sender = edge.far.netns.run(|| UdpSocket::bind((Edge::FLOODERS[0], 4000)))?;
    for _ in 0..50 {
        sender.send_to(&[0; 18], "10.9.255.254:99")?;
        thread::sleep(Duration::from_millis(40));
    }
    let sent = flood.join().expect("does not panic")?.total();
    thread::sleep(Duration::from_millis(300));
    let classes = top(&agent, &["--of", "classes", "--window", "60s"])?;
    let metrics = agent.metrics()?;
    let cells = metrics.matching("limiter_packets_total", &[("action", "drop")]).count()
        + metrics.matching("limiter_packets_total", &[("action", "would_drop")]).count();
    let dropped = counted(&agent, "limiter_packets_total", &[("action", "drop")])?;
    let would_drop = counted(&agent, "limiter_packets_total", &[("action", "would_drop")])?;
    let weights = number(&classes["total"]["packets"])?;
    let events = number(&classes["events"])?;
    let tail = 768 * cells as u64 * 2;
    assert!(dropped + would_drop >= weights, "{weights} of {dropped} + {would_drop}");
    assert!(dropped + would_drop - weights <= tail, "{weights} of {dropped} + {would_drop}");
    assert!(dropped > 100_000, "{sent} were sent");
    // 4,000 a second, and a burst of 400; the flood and what was around it lasted some 3 seconds.
    assert!((500..=4_000 * 5 + 400).contains(&events), "{events} events of {dropped}");

    let entries = classes["entries"].as_array().context("a list")?;
    let rare = entries.iter().find(|it| it["what"] == "rare").context("the rare class")?;
    assert_eq!((number(&rare["packets"])?, number(&rare["packets_error"])?), (would_drop, 0));
    assert_eq!(number(&rare["would_drop"])?, would_drop);
    assert!(would_drop > 40, "{would_drop}");
    agent.terminate()?;
    Ok(())
}

/// An agent that does not read loses events, says so, and knows the sum all the same.
#[test]
fn events_that_nobody_reads_are_counted_as_lost() -> Result<()> {
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, CONFIGURATION)?;
    let pid = Pid::from_raw(i32::try_from(agent.pid())?);
    kill(pid, Signal::SIGSTOP)?;
    // Of which each is an event: new to its counter's pace, or slow enough.
    let flood = Flood::new(edge.frame("198.51.100.7:4000", 7)?, 200_000.0, Duration::from_secs(8));
    let flood = flood.cpus([0, 1]);
    let sent = Generator::new(&edge.far)?.flood(&flood);
    kill(pid, Signal::SIGCONT)?;
    let sent = sent?.total();
    thread::sleep(Duration::from_millis(300));
    let lost = counted(&agent, "limiter_events_lost_total", &[("stream", "top")])?;
    let written = counted(&agent, "limiter_events_total", &[("stream", "top")])?;
    let said = top(&agent, &["--window", "60s"])?;
    assert!(lost > 0, "{written} written of {sent}: {said:#}");
    assert_eq!(number(&said["events_lost"])?, lost);
    // One event after the loss stands for all that was lost.
    edge_blocked(&edge, 2_000)?;
    thread::sleep(Duration::from_millis(300));
    let said = top(&agent, &["--window", "60s"])?;
    let dropped = counted(&agent, "limiter_packets_total", &[("reason", "blocked")])?;
    let weights = number(&said["total"]["packets"])?;
    assert!(dropped - weights <= 2 * 768, "{weights} of {dropped}");
    agent.terminate()?;
    Ok(())
}

/// Some more of what is blocked, from both CPUs.
fn edge_blocked(edge: &Edge, frames: u64) -> Result<()> {
    let flood = Flood::new(edge.frame("198.51.100.7:4000", 7)?, 20_000.0, Duration::from_secs(2));
    Generator::new(&edge.far)?.flood(&flood.cpus([0, 1]).frames(frames))?;
    Ok(())
}

#[test]
fn events_are_kept_and_followed() -> Result<()> {
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, CONFIGURATION)?;
    let follow = edge.start(&agent, &["events", "--follow", "--json", "--limit", "0"])?;
    thread::sleep(Duration::from_secs(1));
    let sender = edge.far.netns.run(|| UdpSocket::bind((Edge::FLOODERS[1], 4321)))?;
    for _ in 0..20 {
        sender.send_to(&[0; 18], "10.9.255.254:9")?;
    }
    thread::sleep(Duration::from_millis(500));
    drop(follow);
    let lines = BufReader::new(File::open(edge.directory.path().join("out"))?).lines();
    let lines: Vec<Value> =
        lines.map(|line| Ok(serde_json::from_str(&line?)?)).collect::<Result<_>>()?;
    let kept = agent.command(&["events", "--json"])?;
    let kept: Value = serde_json::from_slice(&kept.stdout)?;
    let kept = kept["events"].as_array().context("a list")?;
    for events in [&lines, kept] {
        let drops: Vec<_> = events.iter().filter(|it| it["action"] == "drop").collect();
        // The datagrams came at once, so that not each is an event of its own.
        let weights: u64 = drops.iter().filter_map(|it| it["weight"].as_u64()).sum();
        assert!((5..=19).contains(&weights), "{events:?}");
        for drop in drops {
            assert_eq!(drop["source"], Edge::FLOODERS[1]);
            assert_eq!(
                (&drop["source_port"], &drop["destination_port"]),
                (&4321.into(), &9.into())
            );
            assert_eq!(
                (&drop["class"], &drop["reason"]),
                (&"discard".into(), &"packet_rate".into())
            );
            assert_eq!((&drop["protocol"], &drop["length"]), (&"udp".into(), &60.into()));
        }
    }
    let text = String::from_utf8(agent.command(&["events", "--limit", "3"])?.stdout)?;
    assert!(text.contains(" drop packet_rate 10.9.1.2 udp 4321>9 class=discard "), "{text}");

    // It ends with the agent, and says so.
    let mut follow = edge.start(&agent, &["events", "--follow"])?;
    thread::sleep(Duration::from_millis(500));
    agent.terminate()?;
    let give_up = Instant::now() + Duration::from_secs(20);
    let status = loop {
        if let Some(status) = follow.0.try_wait()? {
            break status;
        }
        ensure!(Instant::now() < give_up, "it does not end");
        thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(status.code(), Some(3));
    Ok(())
}

#[test]
fn what_cannot_be_asked_is_refused_with_what_can() -> Result<()> {
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, CONFIGURATION)?;
    for (arguments, says) in [
        (["top", "--json", "--limit", "0"], "write 1 to 1000"),
        (["events", "--json", "--limit", "5000"], "no more than 1024 are kept"),
    ] {
        let output = agent.command(&arguments)?;
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = String::from_utf8([output.stdout, output.stderr].concat())?;
        assert!(said.contains(says), "{said}");
    }
    let empty = agent.command(&["top"])?;
    let empty = String::from_utf8(empty.stdout)?;
    assert!(empty.ends_with("nothing was dropped, and nothing would have been\n"), "{empty}");
    // Anybody who reaches the listener may look.
    let page: Value =
        serde_json::from_str(&agent.get("/v1/top?of=ports&by=bytes&window=60s&limit=5")?)?;
    assert_eq!(page["of"], "ports");
    agent.terminate()?;
    Ok(())
}
