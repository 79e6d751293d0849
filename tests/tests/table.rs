//! The bucket table of the real object, by `BPF_PROG_TEST_RUN`: how many sources it holds, what becomes
//! of those it has no room for, and how a change of settings reaches the buckets that are there.

use std::{
    collections::{BTreeMap, HashMap},
    io::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result, bail};
use aya::{
    maps::{Array, Map, MapData, MapInfo},
    programs::{TestRun as _, TestRunOptions},
};
use limiter_agent::{
    config::Config,
    datapath::Datapath,
    plan::{Host, HostInterface, Names, Plan, plan},
};
use limiter_common::{
    Family, Reason,
    packet::Source,
    time::{Nanos, Tick},
};
use limiter_tests::{
    frames::{self, Path},
    generator::monotonic,
    netns::Netns,
};
use nix::time::{ClockId, clock_gettime};

/// A source may send a packet an hour, so that each bucket ever charged is in use.
fn config(sources: u32, burst: u32, new_sources: &str, more: &str) -> String {
    format!(
        "mode = \"enforce\"\n\
         [table]\nipv4_sources = {sources}\nipv6_sources = {sources}\n\
         new_sources = {new_sources}\n\
         [[interface]]\nname = \"lan\"\n\
         [[class]]\nname = \"rest\"\npackets = {{ rate = \"1/h\", burst = {burst} }}\n{more}"
    )
}

const AMPLE: &str = r#"{ rate = "1000000/s", burst = 100000000 }"#;

/// The loaded object, attached to nothing.
struct Table {
    netns: Netns,
    datapath: Datapath,
    names: Names,
    /// The IPv4 table's lines, as the kernel has them.
    lines: Array<MapData, [u64; 8]>,
}

impl Table {
    fn load(config: &str) -> Result<Self> {
        let plan = planned(config, None)?;
        let datapath = Datapath::load(&plan)?;
        let maps = datapath.program()?.info()?.map_ids()?.context("no maps")?;
        let name = limiter_common::abi::map::BUCKETS_V4;
        let of = |id| MapInfo::from_id(id).ok().filter(|info| info.name_as_str() == Some(name));
        let lines = maps.into_iter().find_map(of).context("no table")?;
        let lines = Map::Array(MapData::from_id(lines.id())?).try_into()?;
        Ok(Self { netns: Netns::new("table")?, datapath, names: plan.names, lines })
    }

    fn apply(&mut self, config: &str) -> Result<()> {
        let plan = planned(config, Some(&self.names))?;
        self.datapath.apply(&plan)?;
        self.names = plan.names;
        Ok(())
    }

    /// One packet of each source, in order.
    fn send(&self, sources: impl Iterator<Item = IpAddr> + Send) -> Result<()> {
        let program = self.datapath.program()?;
        // A test run receives on the loopback interface of its namespace.
        self.netns.run(move || {
            let mut templates =
                [frame(Ipv4Addr::UNSPECIFIED.into()), frame(Ipv6Addr::UNSPECIFIED.into())];
            for source in sources {
                // The checksum of the header is the stack's business.
                let frame = match source {
                    IpAddr::V4(source) => {
                        templates[0][26..30].copy_from_slice(&source.octets());
                        &templates[0]
                    }
                    IpAddr::V6(source) => {
                        templates[1][22..38].copy_from_slice(&source.octets());
                        &templates[1]
                    }
                };
                let options = TestRunOptions { data_in: Some(frame), ..TestRunOptions::new() };
                let action = program.test_run(options)?.return_value;
                if action != 1 && action != 2 {
                    bail!("XDP action {action}");
                }
            }
            Ok(())
        })
    }

    /// Sends a packet of the IPv4 source with this number, and finds the line that its bucket is in, and
    /// the bucket's theoretical arrival time.
    fn bucket_of(&self, number: u32) -> Result<(u32, Nanos)> {
        self.send([v4(number)].into_iter())?;
        let wanted = 0x0a00_0000 + u64::from(number);
        for index in 0..self.lines.len() {
            // Four addresses, two to a word; two words of metas; four times.
            let line = self.lines.get(&index, 0)?;
            for (slot, tat) in line[4..].iter().enumerate() {
                if line[slot / 2] >> (32 * (slot % 2)) & 0xffff_ffff == wanted {
                    return Ok((index, Nanos(tat >> Tick::SHIFT)));
                }
            }
        }
        bail!("{} has no bucket", v4(number))
    }

    /// The metas of the IPv4 sources that have a bucket.
    fn metas(&self) -> Result<BTreeMap<u64, u64>> {
        let mut metas = BTreeMap::new();
        for index in 0..self.lines.len() {
            let line = self.lines.get(&index, 0)?;
            for slot in 0..4 {
                let half = |word: u64| word >> (32 * (slot % 2)) & 0xffff_ffff;
                let (source, meta) = (half(line[slot / 2]), half(line[2 + slot / 2]));
                if meta != 0 {
                    metas.insert(source, meta);
                }
            }
        }
        Ok(metas)
    }

    /// Vouches for each source.
    fn prove(&self, sources: impl Iterator<Item = IpAddr>) -> Result<()> {
        let now = now()?;
        sources.for_each(|source| self.datapath.prove(Source::from(source), now));
        Ok(())
    }

    /// Packets of a reason; those that conform with a warning conform.
    fn count(&self, family: Family, reason: Reason) -> Result<u64> {
        let counters = self.datapath.counters()?;
        let is_it = |it: Reason| it == reason || it.conforms() && reason.conforms();
        let of = counters.iter().filter(|(it, _)| it.family == family && is_it(it.reason));
        Ok(of.map(|(_, count)| count.packets).sum())
    }

    /// Buckets in use: those of proven sources, and of others.
    fn tracked(&self, family: Family) -> Result<(u64, u64)> {
        let tracked = self.datapath.tracked(now()?);
        let (_, it) = tracked[usize::from(family == Family::Ipv6)];
        Ok((it.proven, it.unproven))
    }
}

fn planned(config: &str, previous: Option<&Names>) -> Result<Plan> {
    let config = Config::parse("table.toml", config, SystemTime::now())?;
    let host = Host {
        interfaces: vec![HostInterface { name: "lan".into(), ifindex: 1, mtu: 1500, bond: None }],
        monotonic: now()?,
        tick: limiter_agent::host::tick(),
        wall: SystemTime::now(),
    };
    Ok(plan(&config, &host, previous)?)
}

fn now() -> Result<Nanos> {
    Ok(Nanos(u64::try_from(monotonic()?.as_nanos())?))
}

fn frame(source: IpAddr) -> Vec<u8> {
    let destination = match source {
        IpAddr::V4(_) => IpAddr::from([192, 0, 2, 2]),
        IpAddr::V6(_) => IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 2]),
    };
    let path = Path {
        source_mac: [2, 0, 0, 0, 0, 1],
        destination_mac: [2, 0, 0, 0, 0, 2],
        source: (source, 4000).into(),
        destination: (destination, 9).into(),
    };
    frames::udp(&path, 18)
}

fn v4(number: u32) -> IpAddr {
    Ipv4Addr::from(0x0a00_0000 + number).into()
}

/// An address in the /64 with this number.
fn v6(number: u32) -> IpAddr {
    Ipv6Addr::from((0x2a00_u128 << 112) + (u128::from(number) << 64) + 1).into()
}

/// A million sources of each family are tracked, but for those that found no slot free in their two
/// lines. Those are let in too: unproven, they take the place of another; proven, they are counted.
fn a_million(is_proven: bool) -> Result<()> {
    const SOURCES: u32 = 1_000_000;
    // What the host's model of the table shows (limiter-common/src/table/tests.rs).
    const OVERFLOW: [(Family, u64); 2] = [(Family::Ipv4, 1_000), (Family::Ipv6, 2_000)];
    let table = Table::load(&config(SOURCES, 10, AMPLE, ""))?;
    if is_proven {
        table.prove((0..SOURCES).map(v4))?;
        table.prove((0..SOURCES).map(v6))?;
    }
    table.send((0..SOURCES).map(v4))?;
    table.send((0..SOURCES).map(v6))?;
    for (family, overflow) in OVERFLOW {
        let (proven, unproven) = table.tracked(family)?;
        let full = table.count(family, Reason::TableFull)?;
        let conform = table.count(family, Reason::Conform)?;
        let without = u64::from(SOURCES) - proven - unproven;
        writeln!(
            std::io::stdout(),
            "{family:?}: {proven} proven, {unproven} unproven tracked, {without} not; {full} table_full"
        )?;
        assert!(without <= overflow, "{family:?}: {without} not tracked");
        assert_eq!(conform + full, u64::from(SOURCES));
        assert_eq!(full, if is_proven { without } else { 0 });
        assert_eq!(if is_proven { unproven } else { proven }, 0);
    }
    Ok(())
}

#[test]
fn a_million_strangers_are_tracked() -> Result<()> {
    a_million(false)
}

#[test]
fn a_million_proven_sources_are_tracked() -> Result<()> {
    a_million(true)
}

/// Where all slots belong to proven sources that are at work, whoever comes is counted as `table_full`
/// and costs the budget for new sources with each packet: there is nothing to be had for free.
#[test]
fn a_full_table_costs_the_budget() -> Result<()> {
    const BURST: u64 = 3_000;
    // The least table has room for 2,048 in each family.
    const SOURCES: u32 = 8_192;
    let budget = format!("{{ rate = \"1/h\", burst = {BURST} }}");
    let table = Table::load(&config(1_024, 10, &budget, ""))?;
    table.prove((0..SOURCES).map(v4))?;
    table.send((0..SOURCES).map(v4))?;
    let count = |reason| table.count(Family::Ipv4, reason);
    let (proven, unproven) = table.tracked(Family::Ipv4)?;
    let (full, refused) = (count(Reason::TableFull)?, count(Reason::NewSource)?);
    assert_eq!(unproven, 0);
    assert_eq!(count(Reason::Conform)?, proven);
    assert!((1_900..=2_048).contains(&proven), "{proven} tracked");
    // Those who are proven may use half as much again as a stranger.
    assert_eq!(proven + full, BURST + BURST / 2, "{full} table_full, {refused} refused");
    assert_eq!(proven + full + refused, u64::from(SOURCES));
    // Strangers had their share spent for them.
    table.send((SOURCES..2 * SOURCES).map(v4))?;
    assert_eq!(count(Reason::TableFull)?, full);
    assert_eq!(count(Reason::NewSource)?, refused + u64::from(SOURCES));
    // Proven sources keep the buckets that they have.
    assert_eq!(table.tracked(Family::Ipv4)?, (proven, 0));
    Ok(())
}

/// A stranger that finds only proven sources at work is counted as `table_full` each time, and pays.
#[test]
fn a_stranger_displaces_no_proven_source() -> Result<()> {
    const SOURCES: u32 = 20_000;
    let table = Table::load(&config(1_024, 10, AMPLE, ""))?;
    for sources in [v4 as fn(u32) -> IpAddr, v6] {
        table.prove((0..SOURCES).map(sources))?;
        table.send((0..SOURCES).map(sources))?;
    }
    for (family, sources) in [(Family::Ipv4, v4 as fn(u32) -> IpAddr), (Family::Ipv6, v6)] {
        let before = table.tracked(family)?;
        let full = table.count(family, Reason::TableFull)?;
        table.send((SOURCES..SOURCES + 1_000).map(sources))?;
        let (proven, unproven) = table.tracked(family)?;
        let full = table.count(family, Reason::TableFull)? - full;
        assert_eq!(proven, before.0, "{family:?}: a proven source lost its bucket");
        // With ten sources for each slot hardly one is free. (A stranger may look proven: the filters
        // are as small as the table, and here hold twenty times what they are made for.)
        assert!(full + unproven >= 950, "{family:?}: {full} table_full, {unproven} found room");
    }
    Ok(())
}

/// g. Whoever finds sources that lie in one line of one host's table has found nothing about another
/// host's, or about this one's after a restart: each has a key of its own.
#[test]
fn sources_aimed_at_a_line_miss_it_under_another_key() -> Result<()> {
    const TRIED: u32 = 10_000;
    // A bucket is full again at once, so that each source finds its own line empty.
    let config = config(1_024, 1, AMPLE, "").replace("1/h", "1000000/s");
    let (known, other) = (Table::load(&config)?, Table::load(&config)?);
    let mut lines: HashMap<u32, Vec<u32>> = HashMap::new();
    for number in 0..TRIED {
        let (line, _) = known.bucket_of(number)?;
        lines.entry(line).or_default().push(number);
    }
    let (aimed, sources) = lines.iter().max_by_key(|it| it.1.len()).context("no line")?;
    assert!(sources.len() > 25, "{} in line {aimed} of {}", sources.len(), lines.len());
    let mut hits: HashMap<u32, usize> = HashMap::new();
    for &number in sources {
        assert_eq!(known.bucket_of(number)?.0, *aimed, "a source stays where it is");
        *hits.entry(other.bucket_of(number)?.0).or_default() += 1;
    }
    let most = hits.values().max().copied().unwrap_or_default();
    writeln!(
        std::io::stdout(),
        "{} sources of one line: under another key, {} lines, {most} in the fullest",
        sources.len(),
        hits.len()
    )?;
    assert!(most <= 6 && hits.len() > sources.len() / 2, "{hits:?}");
    Ok(())
}

/// Where the coarse clock is exact enough, packets are judged at the time of the last timer tick, or at
/// most one before it.
#[test]
fn the_coarse_clock_follows_the_kernels() -> Result<()> {
    let tick = limiter_agent::host::tick().0;
    let coarse = || -> Result<u64> {
        let now = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE)?);
        Ok(u64::try_from(now.as_nanos())?)
    };
    let table = Table::load(&config(1_024, 1_000, AMPLE, "").replace("1/h", "1000/s"))?;
    for number in 0..200 {
        let before = coarse()?;
        let (_, Nanos(tat)) = table.bucket_of(number)?;
        // It was full, and one packet takes a millisecond to come back.
        let (now, after) = (tat - 1_000_000, coarse()?);
        assert!(before - tick <= now && now <= after, "{now}; {before} to {after}");
    }
    Ok(())
}

/// A change of the limits, and a block, hold for the next packet of every bucket there is.
#[test]
fn a_change_reaches_every_bucket() -> Result<()> {
    const SOURCES: u32 = 2_000;
    // Without ceilings, which the upper half of a burst would meet.
    let config = |burst, more: &str| {
        config(20_000, burst, AMPLE, &format!("{more}[aggregate]\nipv6_56 = 0\nipv6_48 = 0\n"))
    };
    let mut table = Table::load(&config(4, ""))?;
    let mut before = [0; 3];
    let mut expect = |table: &Table, what: &str, expected: [u64; 3]| -> Result<()> {
        table.send((0..SOURCES).map(v4))?;
        table.send((0..SOURCES).map(v6))?;
        let mut after = [0; 3];
        for (count, reason) in
            after.iter_mut().zip([Reason::Conform, Reason::PacketRate, Reason::Blocked])
        {
            *count = table.count(Family::Ipv4, reason)? + table.count(Family::Ipv6, reason)?;
        }
        for (index, (after, before)) in after.iter().zip(before).enumerate() {
            let expected = expected[index] * 2 * u64::from(SOURCES);
            assert_eq!(after - before, expected, "{what}: conform, packet_rate, blocked {index}");
        }
        before = after;
        Ok(())
    };
    let (pass, over, blocked) = ([1, 0, 0], [0, 1, 0], [0, 0, 1]);
    for _ in 0..4 {
        expect(&table, "the burst", pass)?;
    }
    expect(&table, "used up", over)?;
    table.apply(&config(6, ""))?;
    expect(&table, "a larger burst", pass)?;
    expect(&table, "a larger burst", pass)?;
    expect(&table, "used up again", over)?;
    let block = "[[block]]\ncidr = \"10.0.0.0/8\"\n[[block]]\ncidr = \"2a00::/16\"\n";
    table.apply(&config(6, block))?;
    expect(&table, "blocked", blocked)?;
    // Half of the former burst: what was used beyond it is forgiven, no more.
    table.apply(&config(3, ""))?;
    expect(&table, "no longer blocked, and a smaller burst", over)?;
    table.apply(&config(4, ""))?;
    expect(&table, "one more than the smaller burst", pass)?;
    expect(&table, "used up at last", over)?;
    Ok(())
}

/// 1,024 /64s of one /48 use their bursts up at once: each has the half that is its own, and what goes
/// beyond meets the ceilings.
#[test]
fn a_site_is_held_to_its_ceilings() -> Result<()> {
    const SOURCES: u32 = 1_024;
    const BURST: u32 = 10;
    // The lesser of what four /56s and one /48 may send, in bursts of one source.
    for (customer, site, bursts) in [(4, 8, 8), (1, 0, 4), (0, 3, 3)] {
        let more = format!("[aggregate]\nipv6_56 = {customer}\nipv6_48 = {site}\n");
        let table = Table::load(&config(20_000, BURST, AMPLE, &more))?;
        for _ in 0..2 * BURST {
            table.send((0..SOURCES).map(v6))?;
        }
        let conform = table.count(Family::Ipv6, Reason::Conform)?;
        // A packet that finds half of the burst used, and no more, is within that half.
        let own = u64::from(SOURCES * (BURST / 2 + 1));
        let expected = own + u64::from(bursts * BURST);
        assert_eq!(conform, expected, "/56: {customer} times, /48: {site} times");
    }
    Ok(())
}

/// What is said of one source is looked up again for that one only; and is felt at once, both ways.
#[test]
fn a_block_touches_its_own_sources_only() -> Result<()> {
    let block = |cidr: &str| format!("[[block]]\ncidr = \"{cidr}\"\n");
    let base = config(10_000, 100, AMPLE, &block("203.0.113.1/32"));
    let mut table = Table::load(&base)?;
    let sources = || (1..=3).map(v4).chain((1..=3).map(v6));
    table.send(sources())?;
    let before = table.metas()?;
    assert_eq!(before.len(), 3);

    let more =
        [format!("{}/32", v4(2)), "2a00:0:0:2::/64".to_owned()].map(|it| block(&it)).concat();
    table.apply(&format!("{base}{more}"))?;
    let after = table.metas()?;
    let changed: Vec<_> = before.iter().filter(|(source, meta)| after[source] != **meta).collect();
    assert_eq!(changed, [(&0x0a00_0002, &before[&0x0a00_0002])]);
    table.send(sources())?;
    for family in [Family::Ipv4, Family::Ipv6] {
        assert_eq!(table.count(family, Reason::Blocked)?, 1, "{family:?}");
        assert_eq!(table.count(family, Reason::Conform)?, 5, "{family:?}");
    }
    table.apply(&base)?;
    table.send(sources())?;
    for family in [Family::Ipv4, Family::Ipv6] {
        assert_eq!(table.count(family, Reason::Blocked)?, 1, "{family:?}");
        assert_eq!(table.count(family, Reason::Conform)?, 8, "{family:?}");
    }
    assert_eq!(table.metas()?, before, "and cached again");
    Ok(())
}
