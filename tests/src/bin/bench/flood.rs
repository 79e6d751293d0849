//! Floods of real frames: what is left of honest traffic, and what a packet costs the receiving core.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use limiter_common::Family;
use limiter_tests::generator::Generator;
use serde_json::json;

use crate::{
    Effort,
    peers::{Filter, Installed},
    report::{Bound, Report, Row, Spread},
    stage::{CLIENTS, From, Sink, Stage, Standing},
};

/// Targets (PERFORMANCE.md, "Targets"): the goodput of proven sources as a share of the floor's.
const GOODPUT: [(From, f64); 4] =
    [(From::One, 0.96), (From::Thousand, 0.93), (From::Forged, 0.96), (From::Warmed, 0.96)];

/// The least flood that the targets speak of, in packets per second offered.
const LEAST_FLOOD: f64 = 5e6;

/// One measurement.
#[derive(Clone, Copy)]
struct Measured {
    /// Frames per second that were sent, and that the receiving core took from its ring.
    offered: f64,
    taken: f64,
    /// Goodput by standing.
    goodput: [f64; 3],
    /// Of the receiving core's time, in nanoseconds for each frame taken.
    time: f64,
}

/// A filter under a flood.
struct Case {
    from: From,
    filter: Filter,
    measured: Vec<Measured>,
    skipped: Option<String>,
}

/// Floods every filter and compares.
///
/// # Errors
/// When the floor or limiter cannot be measured. Peers are left out with the reason.
pub(crate) fn measure(family: Family, effort: &Effort, report: &mut Report) -> Result<()> {
    let key = format!("floods_{}", family.label());
    let froms: &[From] = if effort.is_quick { &[From::One, From::Forged] } else { &From::ALL };
    let is_short = effort.is_quick || family != Family::Ipv4;
    let filters: &[Filter] = if is_short { &Filter::FEW } else { &Filter::ALL };
    let mut cases = Vec::new();
    for &from in froms {
        for &filter in filters {
            let skipped = filter.obstacle(from);
            cases.push(Case { from, filter, measured: Vec::new(), skipped });
        }
    }
    if effort.cpus < 2 {
        let reason = "the generator and the receiver need a CPU each";
        for case in &mut cases {
            case.skipped = Some(reason.to_owned());
        }
    }
    for _ in 0..effort.flood_rounds {
        for case in cases.iter_mut().filter(|case| case.skipped.is_none()) {
            let is_ours = matches!(case.filter, Filter::Floor | Filter::Limiter);
            match flood(case.filter, case.from, family, effort.flood(case.from)) {
                Ok(measured) => case.measured.push(measured),
                Err(error) if is_ours => return Err(error).context(case.filter.label()),
                Err(error) => case.skipped = Some(format!("{error:#}")),
            }
        }
    }
    let rows: Vec<_> = cases.iter().map(|case| case.row(&cases)).collect();
    let title = format!(
        "Floods over veth, {}, {} s each ({} s from {}), median (min..max) of {}; one core sends, one \
         receives; honest packets that arrive in %",
        family.label(),
        effort.flood(From::One).as_secs(),
        effort.flood(From::Forged).as_secs(),
        From::Forged.label(),
        effort.flood_rounds
    );
    let head = [
        "flood from, filter",
        "Mpps offered",
        "taken",
        "proven",
        "seen",
        "new",
        "proven ÷ floor",
        "ns for each taken",
    ];
    report.table(&key, &title, &head, &rows);
    for (from, least) in GOODPUT {
        targets(from, least, family, &cases, report);
    }
    Ok(())
}

fn targets(from: From, least: f64, family: Family, cases: &[Case], report: &mut Report) {
    let name =
        format!("goodput of proven ÷ the floor's, flood from {}, {}", from.label(), family.label());
    let case = cases.iter().find(|case| case.from == from && case.filter == Filter::Limiter);
    let share = case.and_then(|case| case.share(cases));
    let name = match case.and_then(|case| case.spread(|it| it.offered)) {
        Some(offered) if offered.median < LEAST_FLOOD => {
            format!("{name} (only {:.1} Mpps offered)", offered.median / 1e6)
        }
        _ => name,
    };
    let skipped = case.and_then(|case| case.skipped.clone());
    let reason = skipped.unwrap_or_else(|| "not in a quick run".into());
    report.target(name, Bound::AtLeast(least), share.map(|it| it.median).ok_or(reason));
}

impl Case {
    fn spread(&self, value: impl Fn(&Measured) -> f64) -> Option<Spread> {
        Spread::of(&self.measured.iter().map(value).collect::<Vec<_>>())
    }

    /// Goodput of proven sources as a share of the floor's, round by round.
    fn share(&self, cases: &[Self]) -> Option<Spread> {
        let is_floor = |case: &&Self| case.from == self.from && case.filter == Filter::Floor;
        let floor = cases.iter().find(is_floor)?;
        let pairs = self.measured.iter().zip(&floor.measured);
        Spread::of(&pairs.map(|(own, floor)| own.goodput[0] / floor.goodput[0]).collect::<Vec<_>>())
    }

    fn row(&self, cases: &[Self]) -> Row {
        let label = format!("{}: {}", self.from.label(), self.filter.label());
        let json = |spread: Option<Spread>| spread.map(|it| it.json());
        let offered = self.spread(|it| it.offered / 1e6);
        let taken = self.spread(|it| it.taken / 1e6);
        let goodput = [0, 1, 2].map(|standing| self.spread(|it| it.goodput[standing]));
        let share = self.share(cases);
        let time = self.spread(|it| it.time);
        let mut cells = vec![label];
        if let Some(reason) = &self.skipped {
            cells.push("skipped".to_owned());
            println!("skipped: {}: {}", cells[0], reason.lines().next().unwrap_or_default());
        } else {
            let text = |spread: Option<Spread>, digits: usize| {
                spread.map_or(String::new(), |it| format!("{it:.digits$}"))
            };
            let percent = |spread: Option<Spread>| {
                let times_100 = |Spread { median, min, max }| Spread {
                    median: 100.0 * median,
                    min: 100.0 * min,
                    max: 100.0 * max,
                };
                text(spread.map(times_100), 1)
            };
            cells.extend([text(offered, 2), text(taken, 2)]);
            cells.extend(goodput.map(percent));
            cells.extend([text(share, 3), text(time, 0)]);
        }
        Row {
            cells,
            json: json!({
                "from": self.from.label(),
                "filter": self.filter.label(),
                "offered_mpps": json(offered),
                "taken_mpps": json(taken),
                "proven": json(goodput[0]),
                "seen": json(goodput[1]),
                "new": json(goodput[2]),
                "proven_share_of_floor": json(share),
                "ns": json(time),
                "skipped": self.skipped,
            }),
        }
    }
}

fn flood(filter: Filter, from: From, family: Family, duration: Duration) -> Result<Measured> {
    // One queue, so that honest frames stand in line with the flood's.
    let stage = Stage::new(family, 1)?;
    let installed = filter.install(&stage)?;
    let receiver = stage.receive_apart()?;
    let mut generator = Generator::new(&stage.outside)?;
    if from == From::Warmed {
        stage.warm_up(&mut generator)?;
    }
    stage.introduce(&mut generator)?;

    let sink = Sink::start(&stage)?;
    let flood = stage.mixed_flood(from, duration);
    let before = receiver.time()?;
    let sent = generator.flood(&flood)?;
    let time = receiver.time()?.saturating_sub(before);
    let counts = sink.end()?;
    let honest = flood.honest.context("honest frames")?;
    let goodput = Standing::ALL.map(|standing| {
        let (mut offered, mut arrived) = (0, 0);
        for number in 0..CLIENTS {
            offered += honest.sent_by(standing as u32 * CLIENTS + number, sent.total());
            arrived += counts.get(&stage.client(standing, number)).copied().unwrap_or_default();
        }
        number(arrived) / number(offered.max(1))
    });
    if let Installed::Limiter(datapath) = &installed {
        let counted: u64 = datapath.counters()?.iter().map(|(_, count)| count.packets).sum();
        ensure!(
            counted >= sent.arrived(),
            "limiter counted {counted} of {} frames that arrived",
            sent.arrived()
        );
    }
    let (total, arrived) = (number(sent.total()), number(sent.arrived().max(1)));
    let elapsed = sent.elapsed().as_secs_f64();
    Ok(Measured {
        offered: total / elapsed,
        taken: arrived / elapsed,
        goodput,
        time: time.as_secs_f64() * 1e9 / arrived,
    })
}

#[expect(clippy::cast_precision_loss, reason = "counts well below 2^52")]
fn number(count: u64) -> f64 {
    count as f64
}
