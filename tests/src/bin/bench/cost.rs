//! What a packet costs by `BPF_PROG_TEST_RUN`: the shipped program against the floors.

use anyhow::{Context as _, Result};
use limiter_agent::datapath::Datapath;
use limiter_common::{Family, Outcome, Reason, abi::Count, packet::Source};
use serde_json::json;

use crate::{
    Effort,
    config::{SHIPPED_SOURCES, Shipped, UNLIMITED, prove},
    report::{Bound, Report, Row, Spread},
    runner::{Packet, Run, Runner, Sources, Tested, forged, source},
};

/// The interface that test runs receive on: the loopback of their namespace.
pub(crate) const LOOPBACK: (&str, u32) = ("lo", 1);

/// Resident sources: a set that fits the second-level cache, and one that fits none.
const RESIDENT: [u64; 2] = [1 << 16, 1 << 20];

/// Proven sources beside a forged flood, of both families together (issue 2/4, item 8a).
const PROVEN: [u32; 3] = [16, 100_000, 1_000_000];

/// The first proven sources, none of which is forged.
const PROVEN_IPV4: u64 = 0x0b00_0000;
const PROVEN_IPV6: u64 = 0x2a01_0000_0000_0000;

/// Before each measurement of what meets shipped bursts and budgets: more than they hold, so that they
/// are spent, and what they keep back for known sources by those that the filters take for known.
const SPEND: u32 = 400_000;
/// Before any other: the code and the small maps are in the cache.
const WARM_UP: u32 = 20_000;

/// At least this part of a measurement must have been decided for the reason that it is about.
const PURITY: f64 = 0.95;

/// Targets (PERFORMANCE.md, "Targets"), as multiples of a bare `XDP_DROP`.
const HOT_DROP: f64 = 2.6;
const HOT_PASS: f64 = 3.0;
const MILLION_RESIDENT: f64 = 6.0;
const FORGED_100K_PROVEN: f64 = 2.8;
const FORGED_1M_PROVEN: f64 = 3.4;
/// How the drop path scales to two CPUs on one source, relative to the floor.
const SCALING: f64 = 0.95;

/// A limit that each resident source is over at its second packet, and whose buckets stay in use.
pub(crate) const OVER: &str = "{ rate = \"1/h\", burst = 1 }";
/// A limit that no resident source reaches, and whose buckets stay in use.
const UNDER: &str = "{ rate = \"1/s\", burst = 1000000 }";

/// What runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Floor,
    Parse,
    Drop,
    Pass,
    /// Dropping, with so many proven sources.
    Proven(u32),
}

/// One row.
struct Case {
    what: What,
    run: Run,
    /// The datapath that runs, by its number, and why it decides as it does.
    expected: Option<(usize, Reason)>,
    times: Vec<f64>,
    /// The part that was decided for the expected reason.
    purity: f64,
}

/// Measures and compares.
///
/// # Errors
/// When something cannot be loaded or run.
pub(crate) fn measure(runner: &mut Runner, effort: &Effort, report: &mut Report) -> Result<()> {
    let floor = runner.add_own("floor")?;
    let parse = runner.add_own("parse_only")?;
    let loads = Loads::new(runner)?;
    let mut cases = cases(effort, floor, parse, &loads);
    let mut bare = Vec::new();
    for round in 0..effort.rounds {
        bare.push(runner.run_bare("floor", effort.repeat)?);
        for case in &mut cases {
            case.measure(runner, &loads, round == 0)?;
        }
    }
    runner.clear_from(floor)?;
    let rows: Vec<_> = cases.iter().map(|case| case.row(&cases)).collect();
    let title = format!(
        "Cost by BPF_PROG_TEST_RUN behind a wrapper that rewrites the source: ns of CPU time for each \
         packet and CPU, median (min..max) of {} rounds of {} packets",
        effort.rounds, effort.repeat
    );
    let head = ["", "family", "sources", "CPUs", "ns", "× floor", "for its reason"];
    report.table("cost", &title, &head, &rows);
    if let Some(bare) = Spread::of(&bare) {
        println!("  XDP_DROP without the wrapper, for comparison: {bare:.1} ns");
        report.keep("bare_drop_ns", bare.json());
    }
    targets(&cases, report);
    Ok(())
}

/// The datapaths under test.
struct Loads {
    all: Vec<(Datapath, Tested)>,
}

impl Loads {
    const SHIPPED: usize = 0;
    /// The shipped configuration, which no forged source meets: a flood of them would leave a single
    /// source for seconds before the budget for new ones.
    const HOT_DROP: usize = PROVEN.len();
    const HOT_PASS: usize = Self::HOT_DROP + 1;
    const OVER: usize = Self::HOT_PASS + 1;
    const UNDER: usize = Self::HOT_PASS + 2;
    const ADMIT: usize = Self::HOT_PASS + 3;

    fn new(runner: &mut Runner) -> Result<Self> {
        let shipped = Shipped::on(LOOPBACK.0)?;
        let resident = |packets| shipped.unbounded(packets, SHIPPED_SOURCES);
        let mut all = Vec::new();
        for proven in PROVEN {
            let load = load(runner, &shipped)?;
            prove(&load.0, proven / 2, |index| source(Family::Ipv4, PROVEN_IPV4, index))?;
            prove(&load.0, proven / 2, |index| source(Family::Ipv6, PROVEN_IPV6, index))?;
            all.push(load);
        }
        all.push(load(runner, &shipped)?);
        all.push(load(runner, &shipped.rest(&format!("packets = {UNLIMITED}"))?)?);
        for packets in [OVER, UNDER] {
            let load = load(runner, &resident(packets)?)?;
            for family in [Family::Ipv4, Family::Ipv6] {
                fill(runner, &load, family, RESIDENT[1])?;
            }
            all.push(load);
        }
        all.push(load(runner, &resident("{ rate = \"10000/s\", burst = 20000 }")?)?);
        Ok(Self { all })
    }
}

/// Loads a configuration to be run.
pub(crate) fn load(runner: &mut Runner, config: &Shipped) -> Result<(Datapath, Tested)> {
    let datapath = Datapath::load(&config.plan(LOOPBACK.0, LOOPBACK.1)?)?;
    let tested = runner.add(datapath.program()?.fd()?)?;
    Ok((datapath, tested))
}

/// Proves `count` sources, and gives each a bucket.
pub(crate) fn fill(
    runner: &mut Runner,
    (datapath, program): &(Datapath, Tested),
    family: Family,
    count: u64,
) -> Result<()> {
    let repeat = u32::try_from(count)?;
    let nth = |index| -> Source { source(family, forged(family), index) };
    prove(datapath, repeat, nth)?;
    let (sources, packet) = (Sources::Resident(count), Packet::Datagram);
    runner.run(Run { program: *program, family, sources, packet, cpus: 1, repeat })?;
    Ok(())
}

fn cases(effort: &Effort, floor: Tested, parse: Tested, loads: &Loads) -> Vec<Case> {
    let mut cases = Vec::new();
    let resident = RESIDENT.map(Sources::Resident);
    let all = [Sources::Hot, resident[0], resident[1], Sources::New];
    for family in [Family::Ipv4, Family::Ipv6] {
        for sources in all {
            for cpus in 1..=effort.cpus.min(2) {
                // Quick: what there are targets for.
                let is_target = (sources == Sources::Hot || cpus == 1) && sources != resident[0];
                if effort.is_quick && !is_target {
                    continue;
                }
                let mut add = |what, program, expected| {
                    let packet = Packet::Datagram;
                    let run = Run { program, family, sources, packet, cpus, repeat: effort.repeat };
                    cases.push(Case { what, run, expected, times: Vec::new(), purity: 1.0 });
                };
                add(What::Floor, floor, None);
                add(What::Parse, parse, None);
                let (drop, reason) = match sources {
                    Sources::Hot => (Loads::HOT_DROP, Reason::PacketRate),
                    Sources::Resident(_) => (Loads::OVER, Reason::PacketRate),
                    Sources::New => (Loads::SHIPPED, Reason::NewSource),
                };
                let pass = match sources {
                    Sources::Hot => Loads::HOT_PASS,
                    Sources::Resident(_) => Loads::UNDER,
                    Sources::New => Loads::ADMIT,
                };
                add(What::Drop, loads.all[drop].1, Some((drop, reason)));
                if sources == Sources::New {
                    for (load, proven) in (Loads::SHIPPED..).zip(PROVEN).skip(1) {
                        add(What::Proven(proven), loads.all[load].1, Some((load, reason)));
                    }
                }
                add(What::Pass, loads.all[pass].1, Some((pass, Reason::Conform)));
            }
        }
    }
    cases
}

impl Case {
    fn measure(&mut self, runner: &mut Runner, loads: &Loads, is_first: bool) -> Result<()> {
        let is_shipped = self.expected.is_some_and(|(load, _)| load <= Loads::HOT_DROP);
        let repeat = if is_shipped { SPEND } else { WARM_UP };
        runner.run(Run { repeat, ..self.run })?;
        let datapath = self.expected.map(|(load, reason)| (&loads.all[load].0, reason));
        let before = datapath.filter(|_| is_first).map(|it| it.0.counters()).transpose()?;
        let times = runner.run(self.run).with_context(|| format!("{:?}", self.run))?;
        #[expect(clippy::cast_precision_loss, reason = "CPUs")]
        self.times.push(times.iter().sum::<f64>() / times.len() as f64);
        if let (Some(before), Some((datapath, reason))) = (before, datapath) {
            self.purity = purity(&before, &datapath.counters()?, reason);
        }
        Ok(())
    }

    /// The floor that goes with this: with the same sources on as many CPUs.
    fn floor<'a>(&self, cases: &'a [Case]) -> Option<&'a Case> {
        let same = |case: &&Case| {
            let (a, b) = (&case.run, &self.run);
            case.what == What::Floor
                && (a.family, a.sources, a.cpus) == (b.family, b.sources, b.cpus)
        };
        cases.iter().find(same)
    }

    /// Times that of the floor, round by round.
    fn ratio(&self, cases: &[Case]) -> Option<Spread> {
        let floor = self.floor(cases)?;
        let ratios: Vec<_> =
            self.times.iter().zip(&floor.times).map(|(time, floor)| time / floor).collect();
        Spread::of(&ratios)
    }

    fn row(&self, cases: &[Case]) -> Row {
        let time = Spread::of(&self.times);
        let ratio = self.ratio(cases);
        let what = match self.what {
            What::Floor => "XDP_DROP".to_owned(),
            What::Parse => "parse, XDP_DROP".to_owned(),
            What::Drop => "limiter, drop".to_owned(),
            What::Pass => "limiter, pass".to_owned(),
            What::Proven(count) => format!("limiter, drop, {} proven", thousands(count.into())),
        };
        let sources = match self.run.sources {
            Sources::Hot => "one".to_owned(),
            Sources::Resident(count) => format!("{} resident", thousands(count)),
            Sources::New => "all new".to_owned(),
        };
        let reason = self.expected.map_or(String::new(), |(_, reason)| {
            let remark = if self.purity < PURITY { " (!)" } else { "" };
            format!("{:.1} % {}{remark}", self.purity * 100.0, reason.label())
        });
        let text = |spread: Option<Spread>, digits: usize| {
            spread.map_or(String::new(), |spread| format!("{spread:.digits$}"))
        };
        Row {
            cells: vec![
                what.clone(),
                self.run.family.label().to_owned(),
                sources.clone(),
                self.run.cpus.to_string(),
                text(time, 1),
                text(ratio, 2),
                reason,
            ],
            json: json!({
                "what": what,
                "family": self.run.family.label(),
                "sources": sources,
                "cpus": self.run.cpus,
                "ns": time.map(|it| it.json()),
                "floors": ratio.map(|it| it.json()),
                "purity": self.purity,
            }),
        }
    }
}

fn targets(cases: &[Case], report: &mut Report) {
    let wanted = [
        ("drop, one source", What::Drop, Sources::Hot, HOT_DROP),
        ("pass, one source", What::Pass, Sources::Hot, HOT_PASS),
        ("drop, 1 M resident", What::Drop, Sources::Resident(RESIDENT[1]), MILLION_RESIDENT),
        ("pass, 1 M resident", What::Pass, Sources::Resident(RESIDENT[1]), MILLION_RESIDENT),
        ("all new, 100 k proven", What::Proven(PROVEN[1]), Sources::New, FORGED_100K_PROVEN),
        ("all new, 1 M proven", What::Proven(PROVEN[2]), Sources::New, FORGED_1M_PROVEN),
    ];
    for family in [Family::Ipv4, Family::Ipv6] {
        let find = |what, sources, cpus| {
            let same = |case: &&Case| {
                case.what == what
                    && (case.run.family, case.run.sources, case.run.cpus) == (family, sources, cpus)
            };
            cases.iter().find(same)
        };
        for (name, what, sources, most) in wanted {
            let ratio = find(what, sources, 1).and_then(|case| case.ratio(cases));
            let measured = ratio.map(|it| it.median).ok_or_else(|| "not measured".to_owned());
            let name = format!("× XDP_DROP, {name}, {}", family.label());
            report.target(name, Bound::AtMost(most), measured);
        }
        let ratio = |cpus| find(What::Drop, Sources::Hot, cpus)?.ratio(cases);
        let measured = match (ratio(1), ratio(2)) {
            (Some(one), Some(two)) => Ok(one.median / two.median),
            _ => Err("one CPU".to_owned()),
        };
        let name = format!("scaling of drop to 2 CPUs ÷ that of XDP_DROP, {}", family.label());
        report.target(name, Bound::AtLeast(SCALING), measured);
    }
}

/// The part of what was counted in between that was for `reason`.
fn purity(before: &[(Outcome, Count)], after: &[(Outcome, Count)], reason: Reason) -> f64 {
    let sum = |counters: &[(Outcome, Count)], wanted: &dyn Fn(&Outcome) -> bool| -> u64 {
        counters.iter().filter(|(it, _)| wanted(it)).map(|(_, count)| count.packets).sum()
    };
    let moved = |wanted: &dyn Fn(&Outcome) -> bool| sum(after, wanted) - sum(before, wanted);
    let all = moved(&|_| true);
    #[expect(clippy::cast_precision_loss, reason = "well below 2^52")]
    let part = moved(&|outcome| outcome.reason == reason) as f64 / all.max(1) as f64;
    part
}

/// A power of two or ten as people say it.
pub(crate) fn thousands(count: u64) -> String {
    match count {
        0..1_000 => count.to_string(),
        1_000..1_000_000 if count.is_multiple_of(1_000) => format!("{} k", count / 1_000),
        1_000..1_000_000 => format!("{} k", count >> 10),
        _ if count.is_multiple_of(1_000_000) => format!("{} M", count / 1_000_000),
        _ => format!("{} M", count >> 20),
    }
}
