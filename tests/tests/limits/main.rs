//! Limits on real traffic: the agent on a veth end, the generator's frames in the other, and the
//! agent's own metrics about what became of them.
//!
//! A limit admits burst + rate × time, to the hundredth. The time is the one measured between the
//! first frame and the last, frames that the generator lost in the ring of its own cable count as
//! not sent, and a flood that had to pause for so long that a bucket filled up is no measurement
//! and is repeated: so a busy machine makes a test take longer, and no less strict.

mod stage;

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, Result, bail, ensure};
use limiter_agent::status::utc;
use limiter_tests::{
    agent::Agent,
    frames,
    generator::{Flood, Order, Sent, Sources},
    netns::Netns,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use stage::*;

#[test]
fn an_ipv4_source_gets_its_burst_and_rate() -> Result<()> {
    let mut stage = Stage::new(&enforced(&LIMIT.packets()))?;
    let frames: Vec<_> = (0..30)
        .map(|number| stage.edge.udp(&format!("198.51.100.{number}"), 40_000))
        .collect::<Result<_>>()?;
    let measured = stage.saturate_each(LIMIT, |attempt| {
        Ok(Flood::new(frames[usize::from(attempt)].clone(), FLOOD_RATE, FLOOD_TIME))
    })?;
    assert_within(measured.passed(), LIMIT.admits(measured.sent.elapsed()));
    assert_eq!(measured.buckets_made("ipv4"), 1);
    Ok(())
}

#[test]
fn an_ipv6_prefix_has_one_bucket_and_two_have_two() -> Result<()> {
    for prefixes in [1, 2] {
        let mut stage = Stage::new(&enforced(&LIMIT.packets()))?;
        let rate = FLOOD_RATE * f64::from(prefixes);
        let frame = stage.edge.udp("2001:db8::", 40_000)?;
        let both = Limit { rate: LIMIT.rate * prefixes, burst: LIMIT.burst * prefixes };
        let measured = stage.saturate_each(both, |attempt| {
            let sources = Sources::Ipv6 {
                first: format!("2001:db8:{attempt:x}:7::").parse()?,
                prefixes,
                per_prefix: 256,
                order: Order::InTurn,
            };
            Ok(Flood::new(frame.clone(), rate, FLOOD_TIME).sources(sources))
        })?;
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
        // They stand still for tenths of a second.
        (200, Duration::from_millis(300))
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
    let shipped = include_str!("../../../deploy/limiter.toml");
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
    let flood = stage.shared_flood()?;
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
    let flood = stage.shared_flood()?;
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
