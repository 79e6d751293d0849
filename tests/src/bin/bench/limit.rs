//! How exact the limits are: what one source gets through, and whether it loses anything below them.

use anyhow::Result;
use limiter_agent::datapath::Datapath;
use limiter_common::{Action, Family, Outcome, abi::ClassId};
use limiter_tests::generator::{Flood, Generator, Sent};
use serde_json::json;

use crate::{
    Effort,
    config::{SHIPPED_LIMIT, Shipped},
    report::{Bound, Report, Row},
    stage::{From, Stage},
};

/// What is admitted of what should be (PERFORMANCE.md, "Targets"), within one packet and one tick.
const ADMITTED: (f64, f64) = (0.99, 1.0);

/// The part of its limit at which a source loses nothing (PERFORMANCE.md, "Targets").
const BELOW: f64 = 0.95;

/// CPUs that the target speaks of and few machines have to spare.
const MANY: usize = 8;

/// Measures both.
///
/// # Errors
/// When a flood cannot be sent.
pub(crate) fn measure(effort: &Effort, report: &mut Report) -> Result<()> {
    let (rate, burst) = SHIPPED_LIMIT;
    let mut rows = Vec::new();
    for family in [Family::Ipv4, Family::Ipv6] {
        for cpus in 1..=effort.cpus.min(2) {
            let counted = flood(family, cpus, effort, |flood| flood)?;
            let time = counted.sent.elapsed().as_secs_f64();
            let should = f64::from(burst) + f64::from(rate) * time;
            let ratio = number(counted.passed) / should;
            let tick = limiter_agent::host::tick().0;
            let slack = (1.0 + f64::from(rate) * number(tick) / 1e9) / should;
            let name = format!("admitted ÷ limit, {cpus} CPU(s), {}", family.label());
            let bound = Bound::Within(ADMITTED.0 - slack, ADMITTED.1 + slack);
            report.target(name, bound, Ok(ratio));
            rows.push(row("over the limit", family, cpus, &counted, Some(ratio)));
        }
        let cpus = effort.cpus.min(2);
        let below = |flood| Flood { rate: f64::from(rate) * BELOW, ..flood };
        let counted = flood(family, cpus, effort, below)?;
        let name = format!("drops at {BELOW} of the limit, {cpus} CPU(s), {}", family.label());
        report.target(name, Bound::AtMost(0.0), Ok(number(counted.dropped)));
        rows.push(row("0.95 of the limit", family, cpus, &counted, None));
    }
    if effort.cpus < MANY {
        let reason =
            format!("{} CPUs here; `cargo xtask test limits` asks it of a VM", effort.cpus);
        let name = format!("drops at {BELOW} of the limit, {MANY} CPUs");
        report.target(name, Bound::AtMost(0.0), Err(reason));
    }
    let title = format!(
        "One source of live frames against the shipped limit ({rate}/s, burst {burst}) for {} s, by \
         the program's counters",
        effort.flood(From::One).as_secs()
    );
    let head =
        ["sends", "family", "CPUs", "arrived", "ring losses", "passed", "dropped", "÷ limit"];
    report.table("limit", &title, &head, &rows);
    Ok(())
}

/// What was sent, and what the program did with it.
struct Counted {
    sent: Sent,
    passed: u64,
    dropped: u64,
}

/// Floods from one source on so many CPUs, each of which receives what it sends.
fn flood(
    family: Family,
    cpus: usize,
    effort: &Effort,
    change: impl Fn(Flood) -> Flood,
) -> Result<Counted> {
    let stage = Stage::new(family, 2)?;
    let inside = &stage.inside;
    let plan = Shipped::on(&inside.name)?.plan(&inside.name, inside.index)?;
    let mut datapath = Datapath::load(&plan)?;
    inside.netns.run(|| plan.interfaces.iter().try_for_each(|it| datapath.attach(it).map(drop)))?;
    let mut generator = Generator::new(&stage.outside)?;
    let sent =
        generator.flood(&change(stage.flood(From::One, effort.flood(From::One)).cpus(0..cpus)))?;
    let counters = datapath.counters()?;
    let count = |action| {
        let is_wanted = |outcome: &Outcome| {
            // Neighbour discovery has no class.
            outcome.family == family && outcome.class != ClassId::NONE && outcome.action == action
        };
        counters.iter().filter(|it| is_wanted(&it.0)).map(|(_, count)| count.packets).sum()
    };
    Ok(Counted { sent, passed: count(Action::Pass), dropped: count(Action::Drop) })
}

fn row(what: &str, family: Family, cpus: usize, counted: &Counted, ratio: Option<f64>) -> Row {
    let Counted { sent, passed, dropped } = counted;
    Row {
        cells: vec![
            what.into(),
            family.label().into(),
            cpus.to_string(),
            sent.arrived().to_string(),
            sent.lost.to_string(),
            passed.to_string(),
            dropped.to_string(),
            ratio.map_or(String::new(), |it| format!("{it:.4}")),
        ],
        json: json!({
            "sends": what, "family": family.label(), "cpus": cpus, "arrived": sent.arrived(),
            "lost": sent.lost, "passed": passed, "dropped": dropped, "ratio": ratio,
        }),
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts well below 2^52")]
fn number(count: u64) -> f64 {
    count as f64
}
