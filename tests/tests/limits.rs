//! Limits on real traffic: the agent on a veth end, the generator's frames in the other, and the
//! agent's own metrics about what became of them.
//!
//! A limit admits burst + rate × time, to the hundredth. The time is the one measured between the
//! first frame and the last, frames that the generator lost in the ring of its own cable count as
//! not sent, and a flood that had to pause for so long that a bucket filled up is no measurement
//! and is repeated: so a busy machine makes a test take longer, and no less strict.

use std::{
    fs,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, Result, bail, ensure};
use limiter_agent::status::utc;
use limiter_tests::{
    agent::{Agent, Metrics},
    client::{self, EchoServer, Pace},
    frames,
    generator::{Flood, Generator, Order, Sent, Sources, monotonic},
    netns::{Interface, Netns, VethOptions, veth},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// What a measurement may be off by.
const TOLERANCE: f64 = 0.01;

/// A flood has to offer this many times what its limit admits.
const OVERLOAD: f64 = 10.0;

/// Long enough for rate × time to be ten times the burst of [`LIMIT`].
const FLOOD_TIME: Duration = Duration::from_millis(5_200);

/// Twenty times [`LIMIT`].
const FLOOD_RATE: f64 = 20_000.0;

/// Its bucket takes half a second to fill: few machines are so busy that both CPUs together send
/// nothing for so long.
const LIMIT: Limit = Limit { rate: 1_000, burst: 500 };

/// A limit in packets, per second and at once; or in bytes.
#[derive(Clone, Copy)]
struct Limit {
    rate: u32,
    burst: u32,
}

impl Limit {
    /// What one source gets in `time` that sends more than that.
    fn admits(self, time: Duration) -> f64 {
        f64::from(self.burst) + f64::from(self.rate) * time.as_secs_f64()
    }

    /// How long an empty bucket takes to fill.
    fn fills_in(self) -> Duration {
        Duration::from_secs(1) * self.burst / self.rate
    }

    /// As a budget of the configuration.
    fn packets(self) -> String {
        format!("packets = {{ rate = \"{}/s\", burst = {} }}", self.rate, self.burst)
    }
}

#[test]
fn an_ipv4_source_gets_its_burst_and_rate() -> Result<()> {
    let mut stage = Stage::new(&enforced(&LIMIT.packets()))?;
    let flood = Flood::new(stage.edge.udp("198.51.100.1", 40_000)?, FLOOD_RATE, FLOOD_TIME);
    let measured = stage.saturate(&flood, LIMIT)?;
    assert_within(measured.passed(), LIMIT.admits(measured.sent.elapsed()));
    assert_eq!(measured.buckets_made("ipv4"), 1);
    Ok(())
}

#[test]
fn an_ipv6_prefix_has_one_bucket_and_two_have_two() -> Result<()> {
    for prefixes in [1, 2] {
        let mut stage = Stage::new(&enforced(&LIMIT.packets()))?;
        let sources = Sources::Ipv6 {
            first: "2001:db8:0:7::".parse()?,
            prefixes,
            per_prefix: 256,
            order: Order::InTurn,
        };
        let rate = FLOOD_RATE * f64::from(prefixes);
        let frame = stage.edge.udp("2001:db8:0:7::", 40_000)?;
        let flood = Flood::new(frame, rate, FLOOD_TIME).sources(sources);
        let both = Limit { rate: LIMIT.rate * prefixes, burst: LIMIT.burst * prefixes };
        let measured = stage.saturate(&flood, both)?;
        assert!(measured.sent.arrived() > 2 * 256, "each address has sent");
        assert_within(measured.passed(), both.admits(measured.sent.elapsed()));
        assert_eq!(measured.buckets_made("ipv6"), u64::from(prefixes));
    }
    Ok(())
}

#[test]
fn all_cpus_share_one_limit() -> Result<()> {
    let mut stage = Stage::new(&enforced(&LIMIT.packets()))?;
    let frame = stage.edge.udp("198.51.100.1", 40_000)?;
    // Emulated CPUs do not send much more than ten times the limit, all of them together, and
    // take some milliseconds from the first frame sent to the first received.
    let time = if cpus_are_emulated() { 2 * FLOOD_TIME } else { FLOOD_TIME };
    let flood = Flood::new(frame, 12_000.0, time).cpus(0..cpus());
    let measured = stage.saturate(&flood, LIMIT)?;
    measured.assert_all_cpus_took_part();
    assert_within(measured.passed(), LIMIT.admits(measured.sent.elapsed()));
    Ok(())
}

#[test]
fn all_cpus_below_the_limit_lose_nothing() -> Result<()> {
    // A CPU whose thread was kept waiting sends up to 120 ms of its schedule at once, 57 packets of
    // all CPUs. The rest of the burst, 86 ms of the rate, is for frames that were sent in time and
    // then wait in a ring for the receiving side to get its turn. A limit that lost one token in
    // twenty would be through the burst before the end.
    let (burst, catch_up) = if cpus_are_emulated() {
        // They stand still for tenths of a second, also between reading the clock and charging the
        // bucket, and then meet a bucket that others have charged at a later time. Half of the
        // burst is for either.
        (500, Duration::from_millis(500))
    } else {
        (100, Duration::from_millis(120))
    };
    let limit = Limit { rate: 500, burst };
    let mut stage = Stage::new(&enforced(&limit.packets()))?;
    let frame = stage.edge.udp("198.51.100.1", 40_000)?;
    let rate = 0.95 * f64::from(limit.rate);
    let mut flood = Flood::new(frame, rate, Duration::from_secs(5)).cpus(0..cpus());
    flood.catch_up = catch_up;
    // Where threads wait for longer, the flood falls behind its rate and proves little.
    let measured = stage.attempt(&flood, limit, |sent| {
        let offered = count(sent.arrived()) / sent.elapsed().as_secs_f64();
        ensure!(offered > 0.935 * f64::from(limit.rate), "only {offered} packets/s");
        Ok(())
    })?;
    measured.assert_all_cpus_took_part();
    assert_eq!(measured.action("drop"), 0, "{measured:?}");
    assert_eq!(measured.passed(), measured.sent.arrived());
    Ok(())
}

#[test]
fn observe_mode_counts_what_enforce_mode_drops() -> Result<()> {
    let enforced = enforced(&LIMIT.packets());
    let mut stage = Stage::new(&enforced)?;
    let frame = stage.edge.udp("198.51.100.1", 40_000)?;
    let mut flood = Flood::new(frame, 10_000.0, Duration::from_secs(20)).frames(40_000);
    flood.catch_up = Duration::from_secs(1);
    // The same load: all of it, at its pace.
    let paced = |sent: &Sent| {
        let off = sent.elapsed().abs_diff(Duration::from_secs(4));
        ensure!(off < Duration::from_millis(20), "a pace off by {off:?}");
        ensure!(sent.lost == 0, "{} frames lost", sent.lost);
        ensure!(sent.pause() < LIMIT.fills_in(), "a pause of {:?}", sent.pause());
        Ok(())
    };
    let dropped = stage.attempt(&flood, LIMIT, paced)?;
    thread::sleep(LIMIT.fills_in());
    stage.agent.reload(&enforced.replace("enforce", "observe"))?;
    let watched = stage.attempt(&flood, LIMIT, paced)?;

    assert_eq!(watched.action("drop"), 0, "{watched:?}");
    assert_eq!(dropped.action("would_drop"), 0, "{dropped:?}");
    assert_within(watched.action("would_drop"), count(dropped.action("drop")));
    Ok(())
}

#[test]
fn bytes_have_a_rate_too() -> Result<()> {
    const LIMIT: Limit = Limit { rate: 1_000_000, burst: 64 * 1_024 };
    let mut stage = Stage::new(&enforced(r#"bytes = { rate = "8Mbit/s", burst = "64KiB" }"#))?;
    let mut frame = stage.edge.udp("198.51.100.1", 40_000)?;
    frame = frames::udp(&stage.edge.path("198.51.100.1", 40_000)?, 1_400 - frame.len() + PAYLOAD);
    assert_eq!(frame.len(), 1_400);
    let frames = Limit { rate: LIMIT.rate / 1_400, burst: LIMIT.burst / 1_400 };
    let flood = Flood::new(frame, 10_000.0, Duration::from_secs(2)).cpus(0..cpus());
    let measured = stage.saturate(&flood, frames)?;
    let passed = measured.bytes(&[("class", "flood"), ("action", "pass")]);
    assert_within(passed, LIMIT.admits(measured.sent.elapsed()));
    assert_eq!(passed, 1_400 * measured.passed());
    let byte_rate = measured.packets(&[("class", "flood"), ("reason", "byte_rate")]);
    assert_eq!(byte_rate, measured.action("drop"));
    Ok(())
}

#[test]
fn an_exemption_holds_on_its_interface_only() -> Result<()> {
    let alone = alone();
    let host = Netns::new("host")?;
    let edge = Cable::new(&host, "edge0")?;
    let mut lan = Cable::new(&host, "lan0")?;
    let configuration = enforced(&LIMIT.packets())
        + r#"
[[interface]]
name = "lan0"

[[exempt]]
cidr = "10.20.0.0/16"
interface = "lan0"
owner = "tests"
"#;
    let agent = Agent::start(&host, &configuration)?;
    let mut stage = Stage { agent, edge, _alone: alone };

    let forged = Flood::new(stage.edge.udp("10.20.0.1", 40_000)?, FLOOD_RATE, FLOOD_TIME);
    let measured = stage.saturate(&forged, LIMIT)?;
    assert_within(measured.passed(), LIMIT.admits(measured.sent.elapsed()));
    assert_eq!(measured.packets(&[("reason", "exempt")]), 0, "{measured:?}");

    let ours = Flood::new(lan.udp("10.20.0.1", 40_000)?, FLOOD_RATE, Duration::from_secs(1));
    let measured = lan.flood(&stage.agent, &ours)?;
    let exempt = [("interface", "lan0"), ("reason", "exempt"), ("action", "pass")];
    assert_eq!(measured.packets(&exempt), measured.sent.arrived(), "{measured:?}");
    Ok(())
}

#[test]
fn a_spoofed_ntp_reply_meets_the_shipped_amplification_class() -> Result<()> {
    const AMPLIFICATION: Limit = Limit { rate: 50, burst: 100 };
    let shipped = include_str!("../../deploy/limiter.toml");
    let (name, mode) = ("name = \"eth0\"", "mode = \"observe\"");
    assert!(shipped.contains(name) && shipped.contains(mode), "the file is another one now");
    let mine = shipped.replace(name, "name = \"edge0\"").replace(mode, "mode = \"enforce\"");
    let mut stage = Stage::new(&mine)?;

    let frame = stage.edge.udp("198.51.100.1", 123)?;
    let flood = Flood::new(frame, 2_000.0, Duration::from_secs(5));
    let measured = stage.attempt(&flood, AMPLIFICATION, overloads(AMPLIFICATION))?;
    let passed = measured.packets(&[("class", "amplification"), ("action", "pass")]);
    assert_within(passed, AMPLIFICATION.admits(measured.sent.elapsed()));
    let dropped = measured.packets(&[("class", "amplification"), ("action", "drop")]);
    assert_eq!(passed + dropped, measured.sent.arrived(), "all of it is of the class");
    Ok(())
}

#[test]
fn a_block_ends_in_time_without_the_agent() -> Result<()> {
    let limits = enforced(&LIMIT.packets());
    let mut stage = Stage::new(&limits)?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let expiry = SystemTime::UNIX_EPOCH + Duration::from_secs(now.as_secs() + 5);
    let block = format!("\n[[block]]\ncidr = \"198.51.100.0/24\"\nexpires = {}\n", utc(expiry));
    stage.agent.reload(&(limits + &block))?;
    let reloads = stage.agent.log().matches("reloaded").count();
    let before = stage.agent.metrics()?;
    let agent = Pid::from_raw(i32::try_from(stage.agent.pid())?);
    kill(agent, Signal::SIGSTOP)?;

    let frame = stage.edge.udp("198.51.100.1", 40_000)?;
    let left = expiry.duration_since(SystemTime::now())?;
    let time = left.checked_sub(2 * MARGIN).context("the reload took too long")?;
    let during = stage.edge.send(&Flood::new(frame.clone(), FLOOD_RATE, time))?;
    ensure!(SystemTime::now() < expiry, "the flood took longer than it should");
    thread::sleep(expiry.duration_since(SystemTime::now())? + MARGIN);
    let after = stage.edge.send(&Flood::new(frame, FLOOD_RATE, FLOOD_TIME))?;

    kill(agent, Signal::SIGCONT)?;
    let counted = stage.agent.metrics()?.since(&before);
    let blocked = [("reason", "blocked"), ("action", "drop"), ("class", "flood")];
    let measured = Measured { sent: after, counted };
    assert_eq!(measured.packets(&blocked), during.arrived(), "all that came before, {measured:?}");
    overloads(LIMIT)(&measured.sent)?;
    assert_within(measured.passed(), LIMIT.admits(measured.sent.elapsed()));
    let all = measured.packets(&[("class", "flood")]);
    assert_eq!(all, during.arrived() + measured.sent.arrived());
    let reloaded = stage.agent.log().matches("reloaded").count();
    assert_eq!(reloaded, reloads, "nothing else ended it");
    Ok(())
}

#[test]
fn an_honest_client_beside_a_flood_gets_its_answers() -> Result<()> {
    let mut stage = Stage::new(&enforced(&LIMIT.packets()))?;
    stage.edge.add_addresses()?;
    let mut flood =
        Flood::new(stage.edge.udp("198.51.100.1", 40_000)?, 50_000.0, Duration::from_secs(5))
            .cpus(0..cpus());
    // Not more at once than the ring has room for, which the honest client needs too.
    flood.catch_up = Duration::from_millis(2);

    let (measured, goodputs) = stage.flood_beside_clients(&flood, || Ok(()))?;
    for goodput in goodputs {
        assert!(goodput.share() >= 0.99, "{goodput:?} beside {:?}", measured.sent);
    }
    assert!(measured.action("drop") > 8 * measured.passed(), "it was a flood: {measured:?}");
    Ok(())
}

#[test]
fn neighbours_are_found_under_a_flood() -> Result<()> {
    let mut stage = Stage::new(&enforced(&LIMIT.packets()))?;
    stage.edge.add_addresses()?;
    let mut flood =
        Flood::new(stage.edge.udp("198.51.100.1", 40_000)?, 50_000.0, Duration::from_secs(5))
            .cpus(0..cpus());
    flood.catch_up = Duration::from_millis(2);

    let outside = stage.edge.outside.clone();
    let (measured, goodputs) = stage.flood_beside_clients(&flood, || {
        // Each time the two ends have to find each other again.
        for _ in 0..5 {
            thread::sleep(Duration::from_millis(500));
            outside.netns.ip(&["neighbour", "flush", "dev", &outside.name])?;
        }
        Ok(())
    })?;
    for goodput in goodputs {
        assert!(goodput.share() >= 0.99, "{goodput:?} beside {:?}", measured.sent);
    }
    for family in ["other", "ipv6"] {
        let found = measured.packets(&[("reason", "neighbour"), ("family", family)]);
        assert!(found >= 5, "{found} ARP or neighbour discovery packets ({family})");
    }
    assert_eq!(measured.packets(&[("reason", "neighbour_rate")]), 0, "{measured:?}");
    Ok(())
}

#[test]
fn arp_has_a_cap_of_its_own() -> Result<()> {
    let cap = format!("\n[neighbour]\n{}\n", LIMIT.packets());
    let mut stage = Stage::new(&(enforced(&LIMIT.packets()) + &cap))?;
    let flood = Flood::new(stage.edge.arp(), FLOOD_RATE, FLOOD_TIME).cpus(0..cpus());
    let measured = stage.attempt(&flood, LIMIT, overloads(LIMIT))?;
    let arp = |action| measured.packets(&[("family", "other"), ("action", action)]);
    assert_eq!(arp("pass"), measured.packets(&[("reason", "neighbour"), ("family", "other")]));
    assert_within(arp("pass"), LIMIT.admits(measured.sent.elapsed()));
    assert_eq!(arp("pass") + arp("drop"), measured.sent.arrived());
    Ok(())
}

#[test]
fn a_reload_under_flood_takes_effect_at_once_and_gives_nothing_away() -> Result<()> {
    // Both buckets take half a second to fill.
    const LOW: Limit = Limit { rate: 100, burst: 50 };
    let (high, low) = (enforced(&LIMIT.packets()), enforced(&LOW.packets()));
    // Another policy for somebody else, so that the settings are new and the limits are not.
    let prefix = "\n[[prefix]]\ncidr = \"203.0.113.0/24\"\nscale = 20\n";
    let Stage { agent, edge, _alone } = &mut Stage::new(&high)?;
    let agent = &*agent;
    let flood = Flood::new(edge.udp("198.51.100.1", 40_000)?, FLOOD_RATE, Duration::from_mins(1))
        .cpus(0..cpus());

    let script = || -> Result<Vec<Scrape>> {
        thread::sleep(Duration::from_millis(500));
        let mut scrapes = vec![Scrape::of(agent)?];
        let mut watch = |seconds| {
            let scrape = watch(agent, &scrapes[scrapes.len() - 1], Duration::from_secs(seconds))?;
            scrapes.push(scrape);
            Ok::<_, anyhow::Error>(())
        };
        watch(1)?;
        agent.reload(&low)?;
        watch(0)?;
        watch(2)?;
        agent.reload(&format!("{low}{prefix}"))?;
        watch(2)?;
        let reloads = agent.log().matches("reloaded").count();
        fs::write(agent.configuration(), &high)?;
        agent.sighup()?;
        let give_up = Instant::now() + Duration::from_secs(10);
        while agent.log().matches("reloaded").count() == reloads {
            ensure!(Instant::now() < give_up, "no reload on SIGHUP: {}", agent.log());
            thread::sleep(Duration::from_millis(5));
        }
        watch(0)?;
        watch(1)?;
        agent.reload(&format!("{high}{prefix}"))?;
        watch(2)?;
        Ok(scrapes)
    };
    let mut arrived = 0;
    let mut attempts = 0;
    let (pause, scrapes) = loop {
        let stop = Arc::new(AtomicBool::new(false));
        let flood = flood.clone().until(Arc::clone(&stop));
        let (sent, scrapes) = thread::scope(|scope| {
            let flood = scope.spawn(|| edge.send(&flood));
            let scrapes = script();
            stop.store(true, Ordering::Relaxed);
            (flood.join().expect("the flood's thread does not panic"), scrapes)
        });
        let (sent, scrapes) = (sent?, scrapes?);
        arrived += sent.arrived();
        attempts += 1;
        let flooded = scrapes.windows(2).all(|ends| ends[0].overloads(&ends[1], LIMIT));
        if flooded && sent.pause() < LIMIT.fills_in() {
            break (sent.pause(), scrapes);
        }
        ensure!(attempts < 10, "the machine is too busy to measure");
        println!("limits: once more: a pause of {:?}, or too few packets arrived", sent.pause());
        agent.reload(&high)?;
    };

    let [start, before, lowered, low, kept_low, raised, high, kept_high] = scrapes.as_slice()
    else {
        bail!("eight scrapes were made");
    };
    assert_rate(start, before, LIMIT, pause);
    // In the moment of the change, both limits held for a while.
    assert_at_most(before, lowered, LIMIT, pause);
    assert_rate(lowered, low, LOW, pause);
    assert_rate(low, kept_low, LOW, pause);
    assert_at_most(kept_low, raised, LIMIT, pause);
    assert_rate(raised, high, LIMIT, pause);
    assert_rate(high, kept_high, LIMIT, pause);

    let end = Scrape::of(agent)?.metrics;
    assert!(end.sum(PACKETS, &[("reason", "no_settings")]).abs() < 0.5, "{end:?}");
    assert_eq!(whole(end.sum(PACKETS, &[("class", "flood")])), arrived);
    assert_eq!(whole(end.sum("limiter_sources_created_total", &[("family", "ipv4")])), 1);
    Ok(())
}

#[test]
fn every_run_of_the_program_is_counted_once() -> Result<()> {
    let _stats = aya::sys::enable_stats(aya::sys::Stats::RunTime)?;
    let block = "\n[[block]]\ncidr = \"203.0.113.0/24\"\n";
    let configuration = enforced(&LIMIT.packets()) + block;
    let mut stage = Stage::new(&configuration)?;
    stage.edge.add_addresses()?;
    let program = program_id(&stage.edge.inside)?;

    let edge = &stage.edge;
    let mut frames = vec![
        edge.udp("198.51.100.1", 40_000)?,
        edge.udp("2001:db8:0:7::1", 40_000)?,
        edge.udp("203.0.113.1", 40_000)?,
        edge.arp(),
        // No kind of network that it knows (LLDP), a packet that is cut, and one without a header.
        [&edge.ethernet()[..], &[0x88, 0xcc], &[0; 46]].concat(),
        edge.udp("198.51.100.1", 40_000)?[..34].to_vec(),
        edge.udp("2001:db8:0:7::1", 40_000)?[..14].to_vec(),
    ];
    frames.push([&edge.ethernet()[..], &[0x81, 0x00, 0, 1], &frames[0][12..]].concat());
    let mut arrived = 0;
    for frame in frames {
        // Faster than the rings take it, so that some are lost: they are not run either.
        let flood = Flood::new(frame, 500_000.0, Duration::from_millis(300)).cpus(0..cpus());
        arrived += stage.edge.send(&flood)?.arrived();
        stage.agent.reload(&configuration)?;
    }
    let sources =
        Sources::Ipv4 { first: "100.64.0.0".parse()?, count: 1 << 22, order: Order::Random };
    // Many more sources than the table has room for.
    let frame = stage.edge.udp("100.64.0.0", 40_000)?;
    let flood = Flood::new(frame, 200_000.0, Duration::from_secs(2)).sources(sources);
    let (measured, _) = stage.flood_beside_clients(&flood.cpus(0..cpus()), || Ok(()))?;
    arrived += measured.sent.arrived();

    let (counted, runs) = quiet(|| {
        let counted = whole(stage.agent.metrics()?.sum(PACKETS, &[]));
        Ok((counted, run_count(program)?))
    })?;
    assert_eq!(counted, runs);
    assert!(runs > arrived, "{runs} runs: {arrived} frames and the clients'");
    Ok(())
}

/// The same on other kernels, with more CPUs, all of them emulated.
mod vm {
    use std::{env, time::Duration};

    use anyhow::Result;
    use limiter_tests::{
        agent,
        vm::{Kernel, VmSpec, run_ok},
    };

    fn passes(kernel: Kernel, test: &str, smp: u32) -> Result<()> {
        let spec = VmSpec {
            binary: &env::current_exe()?,
            arguments: &["--exact", "--nocapture", test],
            companions: &[agent::binary()?],
            smp,
            timeout: Duration::from_mins(3),
        };
        let output = run_ok(kernel, &spec)?;
        assert!(output.console.contains("test result: ok. 1 passed"), "{}", output.console);
        let report = output.console.lines().filter(|line| line.starts_with("limits: "));
        report.for_each(|line| println!("{line}"));
        Ok(())
    }

    #[test]
    fn four_cpus_share_one_limit_on_6_1() -> Result<()> {
        passes(Kernel::V6_1, "all_cpus_share_one_limit", 4)
    }

    #[test]
    fn four_cpus_share_one_limit_on_6_12() -> Result<()> {
        passes(Kernel::V6_12, "all_cpus_share_one_limit", 4)
    }

    #[test]
    fn eight_cpus_below_the_limit_lose_nothing_on_6_12() -> Result<()> {
        passes(Kernel::V6_12, "all_cpus_below_the_limit_lose_nothing", 8)
    }
}

/// Clients end this much before the flood beside them, and blocks are kept away from by as much: clocks
/// of processes and the start of a flood differ by less.
const MARGIN: Duration = Duration::from_millis(300);

const PACKETS: &str = "limiter_packets_total";

/// Bytes of UDP payload in a flood's frames: the shortest frame there is on a wire.
const PAYLOAD: usize = 18;

/// In enforce mode, with `budget` for each source of UDP. The rest is what two hosts on a cable say
/// to each other now and then (multicast groups), apart from the flood.
fn enforced(budget: &str) -> String {
    format!(
        r#"
mode = "enforce"

[table]
ipv4_sources = 65536
ipv6_sources = 65536

[[interface]]
name = "edge0"

[[class]]
name = "echo"
match = {{ protocol = "udp", ports = [7] }}
packets = {{ rate = "1000/s", burst = 1000 }}

[[class]]
name = "flood"
match = {{ protocol = "udp" }}
{budget}

[[class]]
name = "rest"
packets = {{ rate = "1000/s", burst = 1000 }}
"#
    )
}

/// All CPUs that the test may use.
fn cpus() -> usize {
    thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Whether this runs in the VM: all its CPUs share those of the host, and each stands still while
/// others have their turn.
fn cpus_are_emulated() -> bool {
    fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("QEMU TCG"))
}

/// Tests that measure take turns even if the test runner does not make them.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An end of a cable that is guarded, the other end, and a generator there.
struct Cable {
    outside: Interface,
    inside: Interface,
    generator: Generator,
}

impl Cable {
    /// To the interface `name` of `host`.
    fn new(host: &Netns, name: &str) -> Result<Self> {
        let options = VethOptions { queues: u32::try_from(cpus())?, ..VethOptions::default() };
        let (inside, outside) = veth((host, name), (&Netns::new("outside")?, "peer0"), options)?;
        let generator = Generator::new(&outside)?;
        Ok(Self { outside, inside, generator })
    }

    /// Gives both ends addresses, which they have to find each other by.
    fn add_addresses(&self) -> Result<()> {
        for (interface, host) in [(&self.outside, 1), (&self.inside, 2)] {
            interface.add_address(&format!("192.0.2.{host}/24"))?;
            interface.add_address(&format!("2001:db8::{host}/64"))?;
        }
        Ok(())
    }

    fn path(&self, source: &str, port: u16) -> Result<frames::Path> {
        let source = SocketAddr::new(source.parse()?, port);
        let destination = if source.is_ipv4() { "192.0.2.2" } else { "2001:db8::2" };
        Ok(frames::Path {
            source_mac: self.outside.mac,
            destination_mac: self.inside.mac,
            source,
            destination: SocketAddr::new(destination.parse()?, 9),
        })
    }

    /// A short datagram from `source`.
    fn udp(&self, source: &str, port: u16) -> Result<Vec<u8>> {
        Ok(frames::udp(&self.path(source, port)?, PAYLOAD))
    }

    /// Who has an address that nobody has (RFC 826).
    fn arp(&self) -> Vec<u8> {
        let mut frame = [&[0xff; 6], &self.outside.mac[..], &[0x08, 0x06]].concat();
        frame.extend([0, 1, 0x08, 0x00, 6, 4, 0, 1]);
        frame.extend(self.outside.mac);
        frame.extend([192, 0, 2, 1, 0, 0, 0, 0, 0, 0, 192, 0, 2, 99]);
        frame.resize(60, 0);
        frame
    }

    /// The addresses that a frame begins with.
    fn ethernet(&self) -> [u8; 12] {
        let mut addresses = [0; 12];
        addresses[..6].copy_from_slice(&self.inside.mac);
        addresses[6..].copy_from_slice(&self.outside.mac);
        addresses
    }

    fn send(&mut self, flood: &Flood) -> Result<Sent> {
        self.generator.flood(flood)
    }

    /// Sends a flood and reads what the agent counted meanwhile.
    fn flood(&mut self, agent: &Agent, flood: &Flood) -> Result<Measured> {
        let before = agent.metrics()?;
        let sent = self.send(flood)?;
        let measured = Measured { counted: agent.metrics()?.since(&before), sent };
        measured.report();
        Ok(measured)
    }
}

/// The agent on one end of a cable.
struct Stage {
    agent: Agent,
    edge: Cable,
    _alone: MutexGuard<'static, ()>,
}

impl Stage {
    /// With `edge0` as the guarded interface.
    fn new(configuration: &str) -> Result<Self> {
        let alone = alone();
        let host = Netns::new("host")?;
        let edge = Cable::new(&host, "edge0")?;
        Ok(Self { agent: Agent::start(&host, configuration)?, edge, _alone: alone })
    }

    /// A flood of class "flood" that was more than ten times `limit` at all times, and of which each
    /// packet was counted.
    fn saturate(&mut self, flood: &Flood, limit: Limit) -> Result<Measured> {
        let measured = self.attempt(flood, limit, overloads(limit))?;
        let counted = measured.packets(&[("class", "flood")]);
        ensure!(counted == measured.sent.arrived(), "{counted} were counted: {measured:?}");
        Ok(measured)
    }

    /// A flood that was `as_meant`; a machine busy with other things gets a few chances, each with
    /// full buckets.
    fn attempt(
        &mut self,
        flood: &Flood,
        limit: Limit,
        as_meant: impl Fn(&Sent) -> Result<()>,
    ) -> Result<Measured> {
        let mut attempts = 0;
        loop {
            let measured = self.edge.flood(&self.agent, flood)?;
            attempts += 1;
            match as_meant(&measured.sent) {
                Ok(()) => return Ok(measured),
                Err(error) if attempts == 10 => {
                    return Err(error).context("the machine is too busy to measure");
                }
                Err(error) => println!("limits: once more: {error}"),
            }
            thread::sleep(limit.fills_in());
        }
    }

    /// A flood, beside it an honest client for each family, and `meanwhile` something else.
    fn flood_beside_clients(
        &mut self,
        flood: &Flood,
        meanwhile: impl FnOnce() -> Result<()> + Send,
    ) -> Result<(Measured, Vec<client::Goodput>)> {
        let pace = Pace { rate: 200, duration: flood.duration.saturating_sub(MARGIN) };
        let host = self.edge.inside.netns.clone();
        let outside = self.edge.outside.netns.clone();
        let mut clients = Vec::new();
        let mut servers = Vec::new();
        for (from, to) in [("192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::2")] {
            let to = SocketAddr::new(to.parse()?, 7);
            servers.push(EchoServer::start(&host, to)?);
            clients.push(client::start(&outside, from.parse()?, to, pace)?);
        }
        let measured = thread::scope(|scope| {
            let meanwhile = scope.spawn(meanwhile);
            let measured = self.edge.flood(&self.agent, flood);
            meanwhile.join().expect("what happens meanwhile does not panic")?;
            measured
        })?;
        let goodputs = clients.into_iter().map(client::Client::join).collect::<Result<_>>()?;
        drop(servers);
        Ok((measured, goodputs))
    }
}

/// What was sent, and what the agent counted meanwhile.
#[derive(Debug)]
struct Measured {
    sent: Sent,
    counted: Metrics,
}

impl Measured {
    fn packets(&self, labels: &[(&str, &str)]) -> u64 {
        whole(self.counted.sum(PACKETS, labels))
    }

    fn bytes(&self, labels: &[(&str, &str)]) -> u64 {
        whole(self.counted.sum("limiter_bytes_total", labels))
    }

    /// Packets of class "flood" with this action.
    fn action(&self, action: &str) -> u64 {
        self.packets(&[("class", "flood"), ("action", action)])
    }

    fn passed(&self) -> u64 {
        self.action("pass")
    }

    fn buckets_made(&self, family: &str) -> u64 {
        whole(self.counted.sum("limiter_sources_created_total", &[("family", family)]))
    }

    fn assert_all_cpus_took_part(&self) {
        let share = self.sent.total() / (4 * self.sent.per_cpu.len() as u64);
        assert!(self.sent.per_cpu.iter().all(|cpu| cpu.frames > share), "{:?}", self.sent);
    }

    /// For whoever runs the tests with `--nocapture`.
    fn report(&self) {
        let Self { sent, .. } = self;
        println!(
            "limits: {} sent in {:?}, {} lost, pause {:?}; {} passed, {} dropped, {} would be",
            sent.total(),
            sent.elapsed(),
            sent.lost,
            sent.pause(),
            self.packets(&[("action", "pass")]),
            self.packets(&[("action", "drop")]),
            self.packets(&[("action", "would_drop")]),
        );
    }
}

/// That a flood was more than ten times `limit`, and that no bucket was full in between.
fn overloads(limit: Limit) -> impl Fn(&Sent) -> Result<()> {
    move |sent| {
        let offered = count(sent.arrived()) / sent.elapsed().as_secs_f64();
        ensure!(offered > OVERLOAD * f64::from(limit.rate), "only {offered} packets/s arrived");
        ensure!(sent.pause() < limit.fills_in(), "a pause of {:?}", sent.pause());
        Ok(())
    }
}

#[track_caller]
fn assert_within(found: u64, expected: f64) {
    let error = count(found) / expected - 1.0;
    println!("limits: {found} of {expected:.1} expected, {:+.2} %", 100.0 * error);
    assert!(error.abs() <= TOLERANCE, "{found}, not {expected}: off by {:.2} %", 100.0 * error);
}

/// The counters at some moment between two.
struct Scrape {
    asked: Duration,
    answered: Duration,
    metrics: Metrics,
}

impl Scrape {
    fn of(agent: &Agent) -> Result<Self> {
        let asked = monotonic()?;
        Ok(Self { metrics: agent.metrics()?, asked, answered: monotonic()? })
    }

    fn passed(&self) -> f64 {
        self.metrics.sum(PACKETS, &[("class", "flood"), ("action", "pass")])
    }

    /// Whether much more arrived until `later` than `limit` admits.
    fn overloads(&self, later: &Self, limit: Limit) -> bool {
        let arrived = |scrape: &Self| scrape.metrics.sum(PACKETS, &[("class", "flood")]);
        let time = later.answered.saturating_sub(self.asked);
        arrived(later) - arrived(self) > 3.0 * f64::from(limit.rate) * time.as_secs_f64()
    }
}

/// Scrapes for `duration` and returns the last scrape; no counter ever goes back.
fn watch(agent: &Agent, earlier: &Scrape, duration: Duration) -> Result<Scrape> {
    let end = monotonic()? + duration;
    let mut earlier = earlier.metrics.clone();
    loop {
        let scrape = Scrape::of(agent)?;
        let steps = scrape.metrics.since(&earlier);
        let steps: Vec<_> = steps.matching(PACKETS, &[]).collect();
        ensure!(steps.iter().all(|(_, step)| *step >= 0.0), "a counter went back: {steps:?}");
        ensure!(steps.len() >= earlier.matching(PACKETS, &[]).count(), "a counter is gone");
        if scrape.answered >= end {
            return Ok(scrape);
        }
        earlier = scrape.metrics;
        thread::sleep(Duration::from_millis(20));
    }
}

/// That `limit` was exactly what passed between two scrapes of a flood that never paused for longer
/// than `pause`: what a bucket saved in a pause before the first may pass after it.
#[track_caller]
fn assert_rate(from: &Scrape, to: &Scrape, limit: Limit, pause: Duration) {
    assert_at_most(from, to, limit, pause);
    let passed = to.passed() - from.passed();
    let time = to.asked.saturating_sub(from.answered).saturating_sub(pause);
    let least = f64::from(limit.rate) * time.as_secs_f64() * (1.0 - TOLERANCE) - 1.0;
    assert!(passed >= least, "{passed} passed in {time:?}, not {least}");
}

#[track_caller]
fn assert_at_most(from: &Scrape, to: &Scrape, limit: Limit, pause: Duration) {
    let passed = to.passed() - from.passed();
    let time = to.answered.saturating_sub(from.asked) + pause;
    let most = f64::from(limit.rate) * time.as_secs_f64() * (1.0 + TOLERANCE) + 1.0;
    println!("limits: {passed} passed in {time:?}, at most {most:.1}; longest pause {pause:?}");
    assert!(passed <= most, "{passed} passed in {time:?}, not {most}");
}

/// The id of the program that is attached to an interface.
fn program_id(interface: &Interface) -> Result<u32> {
    let text = interface.netns.ip(&["-json", "link", "show", "dev", &interface.name])?;
    let links: serde_json::Value = serde_json::from_str(&text)?;
    let id = links[0]["xdp"]["prog"]["id"].as_u64().context("ip shows no program")?;
    Ok(u32::try_from(id)?)
}

/// How often the kernel has run the program.
fn run_count(id: u32) -> Result<u64> {
    let programs = aya::programs::loaded_programs().filter_map(Result::ok);
    let program = programs.into_iter().find(|program| program.id() == id);
    let program = program.with_context(|| format!("there is no program {id}"))?;
    ensure!(program.name_as_str() == Some("limiter"), "{:?}", program.name_as_str());
    Ok(program.run_count())
}

/// What `read` says twice in a row.
fn quiet<T: PartialEq>(read: impl Fn() -> Result<T>) -> Result<T> {
    let give_up = Instant::now() + Duration::from_secs(10);
    let mut last = read()?;
    loop {
        thread::sleep(Duration::from_millis(200));
        let now = read()?;
        if now == last {
            return Ok(now);
        }
        ensure!(Instant::now() < give_up, "it never comes to rest");
        last = now;
    }
}

#[expect(clippy::cast_precision_loss, reason = "packet counts of a few seconds are below 2^53")]
fn count(packets: u64) -> f64 {
    packets as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "Prometheus values of counters are whole numbers below 2^53"
)]
fn whole(value: f64) -> u64 {
    value.round() as u64
}
