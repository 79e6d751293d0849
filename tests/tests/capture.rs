//! `limiter-agent capture`: what is dropped comes out with its reason, within the budget, and nothing is
//! written when nobody watches.

use std::{
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, Result, ensure};
use limiter_tests::{
    agent::{self, Agent},
    frames,
    generator::{Flood, Generator},
    netns::{Interface, Netns, VethOptions, veth},
    process,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use pcap_file::pcapng::{
    PcapNgReader,
    blocks::{Block, enhanced_packet::EnhancedPacketBlock, enhanced_packet::EnhancedPacketOption},
};
use serde_json::Value;
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_mins(1);

const CONFIGURATION: &str = r#"
mode = "enforce"
[[interface]]
name = "edge0"
[table]
ipv4_sources = 4096
ipv6_sources = 4096
[[class]]
name = "dns"
match = { protocol = "udp", ports = [53] }
packets = { rate = "10/s", burst = 10 }
[[class]]
name = "watched"
match = { protocol = "udp", ports = [99] }
packets = { rate = "10/s", burst = 10 }
mode = "observe"
[[class]]
name = "rest"
packets = { rate = "1000/s", burst = 1000 }
[[block]]
cidr = "198.51.100.0/24"
"#;

/// A guarded host, and another on its cable that sends.
struct Edge {
    near: Interface,
    far: Interface,
    directory: TempDir,
}

impl Edge {
    fn new() -> Result<Self> {
        let (near, far) = veth(
            (&Netns::new("edge")?, "edge0"),
            (&Netns::new("peer")?, "peer0"),
            VethOptions::default(),
        )?;
        let directory = tempfile::Builder::new().prefix("limiter-test-").tempdir()?;
        Ok(Self { near, far, directory })
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("drops.pcapng")
    }

    /// Sends datagrams of `payload` bytes from `source` to this port, as many a second for as long.
    fn flood(
        &self,
        source: &str,
        port: u16,
        payload: usize,
        (rate, duration): (f64, Duration),
    ) -> Result<u64> {
        let path = frames::Path {
            source_mac: self.far.mac,
            destination_mac: self.near.mac,
            source: source.parse()?,
            destination: SocketAddr::new("192.0.2.2".parse()?, port),
        };
        let flood = Flood::new(frames::udp(&path, payload), rate, duration);
        Ok(Generator::new(&self.far)?.flood(&flood)?.arrived())
    }

    /// A `limiter-agent capture` that goes on.
    fn capture(&self, agent: &Agent, arguments: &[&str]) -> Result<Capture> {
        let mut command = Command::new(agent::binary()?);
        command.arg("capture").args(arguments).arg("--control-socket");
        command.arg(agent.configuration().with_file_name("control.sock"));
        let said = self.directory.path().join("said");
        command.stdin(Stdio::null()).stdout(File::create(self.directory.path().join("out"))?);
        command.stderr(File::create(&said)?);
        Ok(Capture { child: command.spawn()?, said })
    }
}

/// Killed when dropped.
struct Capture {
    child: Child,
    said: PathBuf,
}

impl Capture {
    /// Waits for its end; what it said on standard error.
    fn end(&mut self) -> Result<String> {
        let give_up = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                let said = fs::read_to_string(&self.said)?;
                ensure!(status.success(), "{status}: {said}");
                return Ok(said);
            }
            ensure!(Instant::now() < give_up, "it does not end");
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(i32::try_from(self.child.id())?), signal)?)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Samples written since the start.
fn samples(agent: &Agent) -> Result<f64> {
    Ok(agent.metrics()?.sum("limiter_events_total", &[("stream", "capture")]))
}

fn tcpdump(file: &Path) -> Result<Vec<String>> {
    let mut command = Command::new("tcpdump");
    let output = process::output(command.arg("-nn").arg("-r").arg(file), PATIENCE)
        .context("tcpdump (Debian package tcpdump; `cargo xtask setup` installs it)")?;
    ensure!(output.status.success(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?.lines().map(ToOwned::to_owned).collect())
}

/// Each packet of the file with its comment.
fn packets(file: &Path) -> Result<Vec<(EnhancedPacketBlock<'static>, String)>> {
    let bytes = fs::read(file)?;
    let mut reader = PcapNgReader::new(&bytes[..])?;
    let mut packets = Vec::new();
    while let Some(block) = reader.next_block() {
        let Block::EnhancedPacket(packet) = block?.into_owned() else { continue };
        let [EnhancedPacketOption::Comment(comment)] = &packet.options[..] else {
            anyhow::bail!("{:?}", packet.options)
        };
        let comment = comment.clone().into_owned();
        packets.push((packet, comment));
    }
    Ok(packets)
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// Long enough for a capture to begin, on a busy machine.
const BEGINNING: Duration = Duration::from_secs(1);

#[test]
fn dropped_packets_come_out_with_their_reasons_and_others_do_not() -> Result<()> {
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, CONFIGURATION)?;
    let file = edge.file();
    let path = file.to_str().context("ASCII")?;
    let mut capture = edge.capture(&agent, &["-w", path, "--rate", "10000/s"])?;
    thread::sleep(BEGINNING);
    let second = Duration::from_secs(1);
    let began = SystemTime::now();
    edge.flood("192.0.2.1:4000", 53, 1000, (200.0, second))?;
    edge.flood("192.0.2.3:4000", 99, 18, (200.0, second))?;
    edge.flood("198.51.100.7:4000", 9, 18, (200.0, second))?;
    // Within its limit, so it must not be seen.
    edge.flood("192.0.2.4:4000", 9, 18, (200.0, second))?;
    thread::sleep(BEGINNING);
    capture.signal(Signal::SIGINT)?;
    let said = capture.end()?;
    assert!(said.contains(" packets captured of ") && !said.contains("lost"), "{said}");

    let packets = packets(&file)?;
    let lines = tcpdump(&file)?;
    assert_eq!(lines.len(), packets.len());
    assert!(!lines.iter().any(|line| line.contains("192.0.2.4.")), "{lines:?}");
    for (source, reason, action, class, payload) in [
        ("192.0.2.1.4000", "packet_rate", "drop", "dns", 1000),
        ("192.0.2.3.4000", "packet_rate", "would_drop", "watched", 18),
        ("198.51.100.7.4000", "blocked", "drop", "rest", 18),
    ] {
        let comment = format!("action={action} reason={reason} class={class} interface=edge0 ");
        let mut found = 0;
        for (line, (packet, said)) in lines.iter().zip(&packets) {
            assert_eq!(line.contains(source), said.starts_with(&comment), "{line}: {said}");
            if line.contains(source) {
                found += 1;
                assert_eq!(packet.original_len, 42 + payload, "{line}");
                assert_eq!(packet.data.len(), usize::try_from(42 + payload)?.min(256));
                let since =
                    packet.timestamp.saturating_sub(began.duration_since(SystemTime::UNIX_EPOCH)?);
                assert!(since < PATIENCE, "{line}");
            }
        }
        // 200 less the burst and what refills.
        assert!((150..=200).contains(&found), "{source}: {found}");
    }
    agent.terminate()?;
    Ok(())
}

#[test]
fn nothing_is_written_unless_somebody_watches() -> Result<()> {
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, CONFIGURATION)?;
    let flood =
        || edge.flood("198.51.100.7:4000", 9, 18, (2_000.0, Duration::from_secs(1))).map(drop);
    flood()?;
    assert!(samples(&agent)?.abs() < 0.5);

    let capture = edge.capture(&agent, &["--rate", "1000/s"])?;
    thread::sleep(BEGINNING);
    flood()?;
    let watched = samples(&agent)?;
    assert!(watched > 100.0, "{watched}");
    // A client that goes away without a word.
    capture.signal(Signal::SIGKILL)?;
    drop(capture);
    thread::sleep(BEGINNING);
    let before = samples(&agent)?;
    flood()?;
    assert!((samples(&agent)? - before).abs() < 0.5);
    // The next one begins at once.
    let mut capture = edge.capture(&agent, &["--json", "--count", "5"])?;
    thread::sleep(BEGINNING);
    flood()?;
    capture.end()?;
    let out = fs::read_to_string(edge.directory.path().join("out"))?;
    let lines: Vec<Value> = out.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    assert_eq!(lines.len(), 5);
    assert!(lines.iter().all(|it| it["reason"] == "blocked" && it["length"] == 60), "{out}");
    agent.terminate()?;
    Ok(())
}

#[test]
fn the_budget_holds_under_a_full_flood() -> Result<()> {
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, CONFIGURATION)?;
    let file = edge.file();
    let path = file.to_str().context("ASCII")?;
    let mut capture = edge.capture(&agent, &["-w", path, "--rate", "200/s", "--for", "3s"])?;
    thread::sleep(Duration::from_millis(500));
    let sent = edge.flood("198.51.100.7:4000", 9, 18, (1e6, Duration::from_secs(4)))?;
    let said = capture.end()?;
    let packets = packets(&file)?;
    // Half a second passes before the flood, and the machine may be busy.
    assert!((200..=3 * 200 + 40).contains(&packets.len()), "{} of {sent}: {said}", packets.len());
    assert!(!said.contains("lost"), "{said}");
    let metrics = agent.metrics()?;
    assert!(metrics.sum("limiter_events_lost_total", &[("stream", "capture")]).abs() < 0.5);
    // Each stands for those that came on its CPU since the one before.
    let stands: u64 = packets
        .iter()
        .filter_map(|(_, comment)| comment.rsplit_once("stands_for=")?.1.parse::<u64>().ok())
        .sum();
    assert!(stands > packets.len() as u64 * 10, "{stands}");
    let dropped = metrics.sum("limiter_packets_total", &[("action", "drop")]);
    #[expect(clippy::cast_precision_loss, reason = "far below 2⁵²")]
    let stands = stands as f64;
    assert!(stands <= dropped, "{stands} of {dropped}");
    agent.terminate()?;
    Ok(())
}

#[test]
fn what_cannot_be_captured_is_refused_with_what_can() -> Result<()> {
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, CONFIGURATION)?;
    let mut first = edge.capture(&agent, &[])?;
    thread::sleep(BEGINNING);
    let second = agent.command(&["capture", "--for", "1s"])?;
    assert_eq!(second.status.code(), Some(3), "{}", text(&second));
    assert!(text(&second).starts_with("another capture is running"), "{}", text(&second));

    let wrong = agent.command(&["capture", "--class", "http", "--reason", "conform"])?;
    assert_eq!(wrong.status.code(), Some(1), "{}", text(&wrong));
    let there_are = ["no class \"http\"; there are dns, ", ", rest, watched, none"];
    for part in there_are.into_iter().chain(["no reason \"conform\";"]) {
        assert!(text(&wrong).contains(part), "{}", text(&wrong));
    }
    let nowhere = agent.command(&["capture", "-w", "/nonexistent/drops"])?;
    assert_eq!(nowhere.status.code(), Some(3), "{}", text(&nowhere));

    // An agent that stops says so to whoever watches, and does not wait for them.
    agent.terminate()?;
    let give_up = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = first.child.try_wait()? {
            break status;
        }
        ensure!(Instant::now() < give_up, "it does not end");
        thread::sleep(Duration::from_millis(10));
    };
    let said = fs::read_to_string(&first.said)?;
    assert_eq!(status.code(), Some(3), "{said}");
    assert!(said.ends_with("the agent has stopped\n"), "{said}");
    Ok(())
}

/// What was not asked for takes nothing from the budget.
#[test]
fn a_rare_reason_is_found_in_a_flood_of_others() -> Result<()> {
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, CONFIGURATION)?;
    let file = edge.file();
    let path = file.to_str().context("ASCII")?;
    let mut capture = edge.capture(
        &agent,
        &["-w", path, "--rate", "5/s", "--reason", "packet_rate", "--class", "dns", "--count", "3"],
    )?;
    thread::sleep(BEGINNING);
    thread::scope(|scope| -> Result<()> {
        let flood = scope
            .spawn(|| edge.flood("198.51.100.7:4000", 9, 18, (100_000.0, Duration::from_secs(4))));
        edge.flood("192.0.2.1:4000", 53, 18, (50.0, Duration::from_secs(4)))?;
        flood.join().expect("does not panic")?;
        Ok(())
    })?;
    capture.end()?;
    let packets = packets(&file)?;
    assert_eq!(packets.len(), 3);
    for (_, comment) in packets {
        assert!(comment.starts_with("action=drop reason=packet_rate class=dns "), "{comment}");
    }
    agent.terminate()?;
    Ok(())
}
