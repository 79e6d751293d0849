//! What it costs to ask, before each drop, whether the packet is an answer on a flow that this host
//! opened: the shipped program against itself without that question, under floods that never hit.

use anyhow::Result;
use limiter_agent::datapath::Datapath;
use limiter_common::{
    Family,
    abi::SourceAddress,
    flows::{Flow, Transport},
    units::PacketLimit,
};
use serde_json::json;

use crate::{
    Effort,
    config::{Shipped, now},
    cost::LOOPBACK,
    report::{Bound, Report, Row, Spread},
    runner::{Packet, Run, Runner, Sources, Tested},
};

/// Flows of this host, of each protocol.
const FLOWS: u32 = 10_000;
/// The destination port of the flood.
const FLOOD_PORT: u16 = 9;
/// More than the shipped bursts and budgets hold, so that they are spent.
const SPEND: u32 = 400_000;
/// The target of issue 3/4: times the plain drop.
const MOST: f64 = 1.2;

/// One flood, and what its packets cost with the question and without.
struct Case {
    name: String,
    run: Run,
    /// With, without.
    times: [Vec<f64>; 2],
}

/// Measures and compares.
///
/// # Errors
/// When something cannot be loaded or run.
pub(crate) fn measure(runner: &mut Runner, effort: &Effort, report: &mut Report) -> Result<()> {
    let first = runner.add_own("floor")?;
    // Each flood has datapaths of its own, so that none spends another's budgets.
    let mut loads = Vec::new();
    let mut cases = Vec::new();
    for family in [Family::Ipv4, Family::Ipv6] {
        for (packet, flood) in [(Packet::Ack, "ACK"), (Packet::Datagram, "UDP")] {
            for (sources, from, in_use) in [
                (Sources::New, "all new", false),
                (Sources::New, "all new, on a port in use", true),
                (Sources::Hot, "one", false),
            ] {
                let (asking, plain) = (load(runner, true, in_use)?, load(runner, false, false)?);
                let (program, cpus, repeat) = (asking.1, 1, effort.repeat);
                let run = Run { program, family, sources, packet, cpus, repeat };
                let name = format!("{flood} flood, {from}, {}", family.label());
                cases.push(Case { name, run, times: [Vec::new(), Vec::new()] });
                loads.push([asking, plain]);
            }
        }
    }
    for _ in 0..effort.rounds {
        for (case, load) in cases.iter_mut().zip(&loads) {
            for (times, (_, program)) in case.times.iter_mut().zip(load) {
                let run = Run { program: *program, ..case.run };
                runner.run(Run { repeat: SPEND, ..run })?;
                times.push(runner.run(run)?[0]);
            }
        }
    }
    runner.clear_from(first)?;
    let title = format!(
        "Own flows ({FLOWS} connections and as many UDP flows, which no packet hits): ns for each dropped \
         packet, median (min..max) of {} rounds of {} packets",
        effort.rounds, effort.repeat
    );
    let rows: Vec<_> = cases.iter().map(Case::row).collect();
    report.table("own_flows", &title, &["", "asked", "not asked", "ratio"], &rows);
    for case in &cases {
        let measured = case.ratio().map(|it| it.median).ok_or_else(|| "not measured".to_owned());
        let name = format!("own flows asked before a drop × plain drop, {}", case.name);
        report.target(name, Bound::AtMost(MOST), measured);
    }
    Ok(())
}

/// The shipped configuration, with flows of this host if it `asks` for them, one of which is on the port of
/// the flood if that is `in_use`.
fn load(runner: &mut Runner, asks: bool, in_use: bool) -> Result<(Datapath, Tested)> {
    let mut plan = Shipped::on(LOOPBACK.0)?.plan(LOOPBACK.0, LOOPBACK.1)?;
    if !asks {
        plan.settings.established = PacketLimit::NONE;
    }
    let datapath = Datapath::load(&plan)?;
    let now = now()?;
    for number in 0..FLOWS {
        for transport in [Transport::Tcp, Transport::Udp] {
            let remote = SourceAddress::ipv4(0xc633_0000 + number);
            let local_port = 32_768 + u16::try_from(number % 28_000)?;
            let flow = Flow { remote, remote_port: 443, local_port, transport };
            datapath.open(flow, now);
            if in_use {
                datapath.open(Flow { local_port: FLOOD_PORT, ..flow }, now);
            }
        }
    }
    let tested = runner.add(datapath.program()?.fd()?)?;
    Ok((datapath, tested))
}

impl Case {
    /// Round by round.
    fn ratio(&self) -> Option<Spread> {
        let [with, without] = &self.times;
        let ratios: Vec<_> =
            with.iter().zip(without).map(|(with, without)| with / without).collect();
        Spread::of(&ratios)
    }

    fn row(&self) -> Row {
        let [with, without] = self.times.each_ref().map(|times| Spread::of(times));
        let ratio = self.ratio();
        let text = |spread: Option<Spread>, digits: usize| {
            spread.map_or(String::new(), |spread| format!("{spread:.digits$}"))
        };
        Row {
            cells: vec![self.name.clone(), text(with, 1), text(without, 1), text(ratio, 2)],
            json: json!({
                "flood": self.name,
                "asked_ns": with.map(|it| it.json()),
                "not_asked_ns": without.map(|it| it.json()),
                "ratio": ratio.map(|it| it.json()),
            }),
        }
    }
}
