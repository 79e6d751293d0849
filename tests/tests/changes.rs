//! What an operator changes while the agent runs: the mode, blocks, a whole configuration that has to be
//! confirmed; and what of it is left after a crash.

use std::{
    fs,
    net::SocketAddr,
    path::PathBuf,
    process::Output,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use limiter_tests::{
    agent::{Agent, Metrics},
    bpffs::Bpffs,
    frames,
    generator::{Flood, Generator, Sent},
    netns::{Interface, Netns, VethOptions, veth},
};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(15);

/// Packets that a source may send in [`BURST`]: more than none and less than the flood.
const LIMIT: u64 = 100;

/// Frames of a flood in these tests, at a rate that fills no ring.
const FRAMES: u64 = 2_000;

fn config(mode: &str, burst: u64) -> String {
    format!(
        r#"mode = "{mode}"
[table]
ipv4_sources = 65536
ipv6_sources = 65536
[[interface]]
name = "edge0"
[[class]]
name = "udp"
match = {{ protocol = "udp" }}
packets = {{ rate = "1/m", burst = {burst} }}
[[class]]
name = "rest"
packets = {{ rate = "1000/s", burst = 1000 }}
"#
    )
}

/// A guarded server, and who floods it.
struct Stage {
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
        edge.add_address("192.0.2.1/24")?;
        let generator = Generator::new(&clients)?;
        Ok(Self { clients, edge, generator })
    }

    fn start(&self, configuration: &str) -> Result<Agent> {
        Agent::start(&self.edge.netns, configuration)
    }

    /// A flood that comes from `source`.
    fn flood(&self, source: &str) -> Result<Flood> {
        let path = frames::Path {
            source_mac: self.clients.mac,
            destination_mac: self.edge.mac,
            source: SocketAddr::new(source.parse()?, 40_000),
            destination: SocketAddr::new("192.0.2.1".parse()?, 9),
        };
        let rate = 20_000.0;
        Ok(Flood::new(frames::udp(&path, 18), rate, Duration::from_secs(30)).frames(FRAMES))
    }

    /// Floods from a source that was not seen before and returns what came of it.
    fn send(&mut self, agent: &Agent, source: &str) -> Result<Fate> {
        let before = agent.metrics()?;
        let sent = self.generator.flood(&self.flood(source)?)?;
        Fate::of(&agent.metrics()?.since(&before), &sent)
    }
}

/// Packets of class "udp".
#[derive(Debug, PartialEq, Eq)]
struct Fate {
    passed: u64,
    dropped: u64,
    would_drop: u64,
    blocked: u64,
    arrived: u64,
}

impl Fate {
    fn of(counted: &Metrics, sent: &Sent) -> Result<Self> {
        let packets = |labels: &[(&str, &str)]| whole(counted.sum("limiter_packets_total", labels));
        let action = |action| packets(&[("class", "udp"), ("action", action)]);
        let fate = Self {
            passed: action("pass"),
            dropped: action("drop"),
            would_drop: action("would_drop"),
            blocked: packets(&[("class", "udp"), ("reason", "blocked")]),
            arrived: sent.arrived(),
        };
        let counted = fate.passed + fate.dropped + fate.would_drop;
        ensure!(counted == fate.arrived, "each packet is counted once: {fate:?}");
        ensure!(fate.arrived > 2 * LIMIT, "it was no flood: {fate:?}");
        Ok(fate)
    }

    #[track_caller]
    fn assert_limited_to(&self, burst: u64) {
        assert_eq!((self.passed, self.dropped), (burst, self.arrived - burst), "{self:?}");
    }

    #[track_caller]
    fn assert_all_passed(&self) {
        assert_eq!(self.dropped, 0, "{self:?}");
    }

    #[track_caller]
    fn assert_all_blocked(&self) {
        assert_eq!(self.blocked, self.arrived, "{self:?}");
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "Prometheus values of counters are whole numbers below 2^53"
)]
fn whole(value: f64) -> u64 {
    value.round() as u64
}

/// Runs a command that is to succeed.
fn done(agent: &Agent, arguments: &[&str]) -> Result<String> {
    let output = agent.command(arguments)?;
    let said = said(&output);
    ensure!(output.status.success(), "{arguments:?}: {said}; the agent's log:\n{}", agent.log());
    Ok(said)
}

/// Runs a command that is to be refused, and returns what it said.
fn refused(agent: &Agent, arguments: &[&str]) -> Result<String> {
    let output = agent.command(arguments)?;
    let said = said(&output);
    ensure!(output.status.code() == Some(1), "{arguments:?}: {:?}: {said}", output.status);
    Ok(said)
}

fn said(output: &Output) -> String {
    [&*output.stdout, &*output.stderr].map(String::from_utf8_lossy).concat()
}

fn json(agent: &Agent, arguments: &[&str]) -> Result<Value> {
    let output = agent.command(&[arguments, &["--json"]].concat())?;
    serde_json::from_slice(&output.stdout).with_context(|| format!("{arguments:?}: {output:?}"))
}

/// Another file beside the agent's own.
fn beside(agent: &Agent, contents: &str) -> Result<(PathBuf, String)> {
    let path = agent.configuration().with_file_name("other.toml");
    fs::write(&path, contents)?;
    let name = path.to_str().context("UTF-8")?.to_owned();
    Ok((path, name))
}

fn own(agent: &Agent) -> Result<String> {
    Ok(agent.configuration().to_str().context("UTF-8")?.to_owned())
}

fn wait_for(agent: &Agent, holds: impl Fn(&Value) -> bool) -> Result<()> {
    let give_up = Instant::now() + PATIENCE;
    while !holds(&json(agent, &["status"])?) {
        ensure!(Instant::now() < give_up, "never came about; the log:\n{}", agent.log());
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn gauge(agent: &Agent, name: &str, labels: &[(&str, &str)]) -> Result<u64> {
    Ok(whole(agent.metrics()?.sum(name, labels)))
}

#[test]
fn a_mode_holds_at_once_and_over_a_crash_until_the_file_has_the_word_again() -> Result<()> {
    let mut stage = Stage::new()?;
    let agent = stage.start(&config("enforce", LIMIT))?;
    stage.send(&agent, "198.51.100.1")?.assert_limited_to(LIMIT);

    let said = done(&agent, &["mode", "bypass"])?;
    assert!(said.contains("mode enforce → bypass"), "{said}");
    stage.send(&agent, "198.51.100.2")?.assert_all_passed();
    assert_eq!(gauge(&agent, "limiter_mode", &[("mode", "bypass")])?, 1);
    assert!(agent.log().contains("(by uid 0, pid "), "{}", agent.log());

    agent.reload(&config("enforce", LIMIT))?;
    let agent = agent.kill_and_start(&["--unpinned"])?;
    stage.send(&agent, "198.51.100.3")?.assert_all_passed();
    let status = json(&agent, &["status"])?;
    assert_eq!(
        (&status["mode"], &status["mode_override"]["mode"]),
        (&"bypass".into(), &"bypass".into())
    );
    assert!(
        agent.log().contains("`limiter-agent mode config` gives the word back"),
        "{}",
        agent.log()
    );
    let text = done(&agent, &["status"])?;
    assert!(text.contains("by command since"), "{text}");

    done(&agent, &["mode", "observe"])?;
    let fate = stage.send(&agent, "198.51.100.4")?;
    assert_eq!((fate.passed, fate.dropped), (LIMIT, 0), "{fate:?}");

    done(&agent, &["mode", "config"])?;
    stage.send(&agent, "198.51.100.5")?.assert_limited_to(LIMIT);
    assert_eq!(json(&agent, &["status"])?["mode_override"], Value::Null);
    let agent = agent.kill_and_start(&["--unpinned"])?;
    stage.send(&agent, "198.51.100.6")?.assert_limited_to(LIMIT);
    agent.terminate()?;
    Ok(())
}

#[test]
fn a_switch_of_modes_under_a_flood_is_felt_within_moments() -> Result<()> {
    let mut stage = Stage::new()?;
    let agent = stage.start(&config("enforce", LIMIT))?;
    let mut flood = stage.flood("198.51.100.1")?;
    flood.frames = None;
    flood.duration = Duration::from_secs(3);
    let netns = &mut stage.generator;
    let (switched, sent) = thread::scope(|scope| -> Result<_> {
        let switched = scope.spawn(|| -> Result<_> {
            thread::sleep(Duration::from_secs(1));
            done(&agent, &["mode", "bypass"])?;
            let before = agent.metrics()?;
            thread::sleep(Duration::from_millis(500));
            Ok(agent.metrics()?.since(&before))
        });
        let sent = netns.flood(&flood)?;
        Ok((switched.join().expect("does not panic")?, sent))
    })?;
    let packets =
        |action| switched.sum("limiter_packets_total", &[("class", "udp"), ("action", action)]);
    assert!(whole(packets("pass")) > 1_000, "{}", packets("pass"));
    assert_eq!(whole(packets("drop")), 0);
    assert!(sent.arrived() > 10_000);
    agent.terminate()?;
    Ok(())
}

#[test]
fn a_bad_file_changes_nothing() -> Result<()> {
    let mut stage = Stage::new()?;
    let agent = stage.start(&config("enforce", LIMIT))?;
    let (path, name) = beside(&agent, &config("enforce", 200).replace("1/m", "0/m"))?;
    for arguments in [&["apply", &name][..], &["apply", &name, "--confirm", "60s"]] {
        let said = refused(&agent, arguments)?;
        assert!(said.contains(&format!("{name}:10:")), "{said}");
        let status = json(&agent, &["status"])?;
        assert_eq!(status["config"]["pending"], Value::Null);
        stage.send(&agent, "198.51.100.1")?;
    }
    let problem = json(&agent, &["apply", &name])?;
    assert_eq!(problem["status"], 422);
    fs::remove_file(path)?;
    let said = refused(&agent, &["apply", &name])?;
    assert!(said.starts_with("cannot read"), "{said}");
    stage.send(&agent, "198.51.100.2")?.assert_limited_to(LIMIT);
    let said = refused(&agent, &["confirm"])?;
    assert!(said.contains("nothing waits"), "{said}");
    agent.terminate()?;
    Ok(())
}

#[test]
fn what_is_not_confirmed_is_rolled_back_and_what_is_stays() -> Result<()> {
    let mut stage = Stage::new()?;
    let agent = stage.start(&config("enforce", LIMIT))?;
    let own = own(&agent)?;
    fs::write(agent.configuration(), config("enforce", 2))?;
    let said = done(&agent, &["apply", &own, "--confirm", "3s"])?;
    assert!(said.contains("class udp changed") && said.contains("rolled back at"), "{said}");
    let pending = &json(&agent, &["status"])?["config"]["pending"];
    assert!(pending["seconds_left"].as_u64().is_some_and(|left| left <= 3), "{pending}");
    assert_eq!(gauge(&agent, "limiter_config_pending", &[])?, 1);
    stage.send(&agent, "198.51.100.1")?.assert_limited_to(2);
    let said = refused(&agent, &["reload"])?;
    assert!(said.contains("waits to be confirmed"), "{said}");
    // A change meanwhile holds before and after.
    done(&agent, &["block", "198.51.100.99", "--for", "1h"])?;
    stage.send(&agent, "198.51.100.99")?.assert_all_blocked();
    stage.send(&agent, "198.51.100.2")?.assert_limited_to(2);

    wait_for(&agent, |status| status["config"]["pending"].is_null())?;
    stage.send(&agent, "198.51.100.3")?.assert_limited_to(LIMIT);
    stage.send(&agent, "198.51.100.99")?.assert_all_blocked();
    assert_eq!(gauge(&agent, "limiter_config_rolled_back", &[])?, 1);
    let said = refused(&agent, &["confirm"])?;
    assert!(said.contains("rolled back"), "{said}");
    // The file still holds what was rolled back.
    let agent = agent.kill_and_start(&["--unpinned"])?;
    stage.send(&agent, "198.51.100.4")?.assert_limited_to(LIMIT);
    assert!(done(&agent, &["status"])?.contains("ROLLED BACK"));

    done(&agent, &["apply", &own, "--confirm", "2s"])?;
    done(&agent, &["confirm"])?;
    thread::sleep(Duration::from_secs(4));
    stage.send(&agent, "198.51.100.5")?.assert_limited_to(2);
    let agent = agent.kill_and_start(&["--unpinned"])?;
    stage.send(&agent, "198.51.100.6")?.assert_limited_to(2);
    assert_eq!(gauge(&agent, "limiter_config_rolled_back", &[])?, 0);
    agent.terminate()?;
    Ok(())
}

#[test]
fn another_apply_takes_the_place_of_one_that_waits() -> Result<()> {
    let mut stage = Stage::new()?;
    let agent = stage.start(&config("enforce", LIMIT))?;
    let (path, name) = beside(&agent, &config("enforce", 2))?;
    done(&agent, &["apply", &name, "--confirm", "1h"])?;
    fs::write(&path, config("enforce", 3))?;
    done(&agent, &["apply", &name, "--confirm", "2s"])?;
    stage.send(&agent, "198.51.100.1")?.assert_limited_to(3);
    wait_for(&agent, |status| status["config"]["pending"].is_null())?;
    stage.send(&agent, "198.51.100.2")?.assert_limited_to(LIMIT);

    let said = done(&agent, &["apply", &name])?;
    assert!(said.contains("the next start or reload reads"), "{said}");
    stage.send(&agent, "198.51.100.3")?.assert_limited_to(3);
    agent.reload(&config("enforce", LIMIT))?;
    stage.send(&agent, "198.51.100.4")?.assert_limited_to(LIMIT);
    agent.terminate()?;
    Ok(())
}

/// Both when the pins bridge the gap and when nothing does.
#[test]
fn an_agent_killed_before_the_confirmation_comes_back_with_the_old_limits() -> Result<()> {
    let mut stage = Stage::new()?;
    let bpffs = Bpffs::new()?;
    let pins = bpffs.pins();
    let arguments = ["--pins", pins.to_str().context("UTF-8")?];
    let agent = Agent::start_pinned(&pins, &stage.edge.netns, &config("enforce", LIMIT))?;
    let own = own(&agent)?;
    fs::write(agent.configuration(), config("enforce", 2))?;
    done(&agent, &["apply", &own, "--confirm", "1h"])?;
    stage.send(&agent, "198.51.100.1")?.assert_limited_to(2);

    let agent = agent.kill_and_start(&arguments)?;
    stage.send(&agent, "198.51.100.2")?.assert_limited_to(LIMIT);
    assert!(
        agent.log().contains("the last confirmed configuration is in force"),
        "{}",
        agent.log()
    );
    let rolled_back = &json(&agent, &["status"])?["config"]["rolled_back"];
    assert!(rolled_back.as_str().is_some_and(|why| why.contains("before it was confirmed")));
    assert_eq!(gauge(&agent, "limiter_config_rolled_back", &[])?, 1);

    // It lasts, until somebody says otherwise.
    let agent = agent.kill_and_start(&arguments)?;
    stage.send(&agent, "198.51.100.3")?.assert_limited_to(LIMIT);
    done(&agent, &["reload"])?;
    stage.send(&agent, "198.51.100.4")?.assert_limited_to(2);
    assert_eq!(gauge(&agent, "limiter_config_rolled_back", &[])?, 0);
    done(&agent, &["detach"])?;
    Ok(())
}

#[test]
fn blocks_hold_over_a_crash_are_extended_and_end() -> Result<()> {
    let mut stage = Stage::new()?;
    let agent = stage.start(&config("enforce", LIMIT))?;
    stage.send(&agent, "198.51.100.1")?.assert_limited_to(LIMIT);
    done(&agent, &["block", "198.51.100.0/25", "--for", "2s", "--reason", "a flood"])?;
    // One that has a bucket already, and one that has none.
    stage.send(&agent, "198.51.100.1")?.assert_all_blocked();
    stage.send(&agent, "198.51.100.2")?.assert_all_blocked();

    let said = done(&agent, &["block", "198.51.100.0/25", "--for", "4s"])?;
    assert!(said.contains("is extended until"), "{said}");
    let said = done(&agent, &["block", "198.51.100.0/25", "--for", "1s"])?;
    assert!(said.contains("stays until") && said.contains("never shortened"), "{said}");
    let start = Instant::now();
    let agent = agent.kill_and_start(&["--unpinned"])?;
    let blocks = json(&agent, &["status"])?["blocks"].clone();
    assert_eq!(blocks[0]["cidr"], "198.51.100.0/25");
    assert_eq!(blocks[0]["reason"], "a flood");
    assert_eq!(gauge(&agent, "limiter_blocks", &[])?, 1);
    if start.elapsed() < Duration::from_secs(2) {
        stage.send(&agent, "198.51.100.3")?.assert_all_blocked();
    }
    thread::sleep(Duration::from_millis(5_500).saturating_sub(start.elapsed()));
    stage.send(&agent, "198.51.100.4")?.assert_limited_to(LIMIT);
    assert_eq!(json(&agent, &["status"])?["blocks"], Value::Array(vec![]));

    done(&agent, &["block", "2001:db8::/32"])?;
    done(&agent, &["block", "198.51.100.200"])?;
    let agent = agent.kill_and_start(&["--unpinned"])?;
    stage.send(&agent, "198.51.100.200")?.assert_all_blocked();
    done(&agent, &["unblock", "198.51.100.200"])?;
    stage.send(&agent, "198.51.100.200")?.assert_limited_to(LIMIT);
    let agent = agent.kill_and_start(&["--unpinned"])?;
    assert_eq!(json(&agent, &["status"])?["blocks"].as_array().map(Vec::len), Some(1));
    agent.terminate()?;
    Ok(())
}

#[test]
fn a_burst_of_blocks_is_few_switches() -> Result<()> {
    const BLOCKS: usize = 24;
    let stage = Stage::new()?;
    let agent = stage.start(&config("enforce", LIMIT))?;
    thread::scope(|scope| -> Result<()> {
        let all: Vec<_> = (0..BLOCKS)
            .map(|n| {
                let agent = &agent;
                scope.spawn(move || {
                    done(agent, &["block", &format!("203.0.113.{n}"), "--for", "1h"])
                })
            })
            .collect();
        all.into_iter().try_for_each(|it| it.join().expect("does not panic").map(drop))
    })?;
    let blocks = json(&agent, &["status"])?["blocks"].clone();
    assert_eq!(blocks.as_array().map(Vec::len), Some(BLOCKS));
    agent.terminate()?;
    Ok(())
}

#[test]
fn what_would_cut_the_host_off_or_makes_no_sense_is_refused() -> Result<()> {
    let stage = Stage::new()?;
    let agent = stage.start(&config("enforce", LIMIT))?;
    for (arguments, expected) in [
        (&["block", "0.0.0.0/0"][..], "every address of its family"),
        (&["block", "192.0.2.0/24"], "covers 192.0.2.1, an address of this host"),
        (&["block", "192.0.2.1"], "an address of this host"),
        (&["block", "192.0.2.9/24"], "write \"192.0.2.0/24\""),
        (&["block", "2001:db8::1"], "narrower than a source"),
        (&["block", "example.com"], "is not a network"),
        (&["block", "198.51.100.1", "--for", "0s"], "from 1s to 10 years"),
        (&["unblock", "198.51.100.1"], "nobody blocked 198.51.100.1/32 by a command"),
        (&["confirm"], "nothing waits"),
    ] {
        let said = refused(&agent, arguments)?;
        assert!(said.contains(expected), "{arguments:?}: {said}");
    }
    for usage in
        [&["mode", "sometimes"][..], &["block", "198.51.100.1", "--for", "soon"], &["apply"]]
    {
        assert_eq!(agent.command(usage)?.status.code(), Some(2), "{usage:?}");
    }
    assert_eq!(json(&agent, &["status"])?["blocks"], Value::Array(vec![]));
    agent.terminate()?;
    Ok(())
}
