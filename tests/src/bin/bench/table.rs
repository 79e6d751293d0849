//! The bucket table: its bytes for each source, the sources that find no place, and what a packet
//! costs as it grows.

use anyhow::{Result, ensure};
use limiter_agent::memory::map_memory;
use limiter_common::{Family, Reason};
use serde_json::json;

use crate::{
    Effort,
    config::{SHIPPED_SOURCES, Shipped, UNLIMITED, now, prove},
    cost::{LOOPBACK, OVER, fill, load, thousands},
    report::{Bound, Report, Row, Spread},
    runner::{Packet, Run, Runner, Sources, forged, source},
};

/// Targets (PERFORMANCE.md, "Targets"): bytes of kernel memory for each source at the shipped load
/// factor, and the part of the sources that find no place.
const BYTES_FOR_PACKETS: f64 = 32.0;
const BYTES_WITH_BYTES: f64 = 64.0;
const OVERFLOW: f64 = 1e-3;

/// Sources of the overflow's measurement: as many as the shipped table is made for.
const SOURCES: u32 = SHIPPED_SOURCES;

/// A limit that no source reaches, whose buckets stay in use for a minute after one packet.
const SLOW: &str = "{ rate = \"1/m\", burst = 10 }";

/// Table sizes from the least to the most that the configuration takes (issue 2/4, item 8e).
const SIZES: [u32; 5] = [1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24];
const SIZES_QUICK: [u32; 2] = [SIZES[0], SIZES[2]];

/// Adds what the maps take for each source that the table is made for.
///
/// # Errors
/// When a configuration is refused.
pub(crate) fn memory(report: &mut Report) -> Result<()> {
    let shipped = Shipped::on(LOOPBACK.0)?;
    let packets = shipped.without_bytes()?;
    let mut rows = Vec::new();
    for family in [Family::Ipv4, Family::Ipv6] {
        for (what, config, most) in [
            ("packets", &packets, BYTES_FOR_PACKETS),
            ("packets and bytes", &shipped, BYTES_WITH_BYTES),
        ] {
            let of = |sources: u32| -> Result<u64> {
                let sizes = match family {
                    Family::Ipv4 => format!("ipv4_sources = {sources}"),
                    Family::Ipv6 | Family::Other => format!("ipv6_sources = {sources}"),
                };
                let plan = config.table(&sizes)?.plan(LOOPBACK.0, LOOPBACK.1)?;
                Ok(map_memory(&plan.sizes))
            };
            let (one, two) = (of(SHIPPED_SOURCES)?, of(2 * SHIPPED_SOURCES)?);
            #[expect(clippy::cast_precision_loss, reason = "well below 2^52")]
            let each = (two - one) as f64 / f64::from(SHIPPED_SOURCES);
            rows.push(Row {
                cells: vec![what.into(), family.label().into(), format!("{each:.1}")],
                json: json!({ "limits": what, "family": family.label(), "bytes": each }),
            });
            let name = format!("bytes for each source, {what}, {}", family.label());
            report.target(name, Bound::AtMost(most), Ok(each));
        }
    }
    let title = "Kernel memory for each source that the table is made for: buckets, filters and \
                 ceilings (its first million more)";
    report.table("memory", title, &["limits in", "family", "bytes"], &rows);
    Ok(())
}

/// Gives as many sources a bucket as the table is made for and counts those that have none.
///
/// # Errors
/// When something cannot be loaded or run.
pub(crate) fn overflow(runner: &mut Runner, report: &mut Report) -> Result<()> {
    let config = Shipped::on(LOOPBACK.0)?.unbounded(SLOW, SOURCES)?;
    let mut rows = Vec::new();
    for is_proven in [false, true] {
        let load = load(runner, &config)?;
        for family in [Family::Ipv4, Family::Ipv6] {
            if is_proven {
                // Of the numbers of sources, the wrapper goes through 2²⁰ and back to 0.
                prove(&load.0, 1 << 20, |index| source(family, forged(family), index))?;
            }
            let sources = Sources::Resident(1 << 20);
            let run = Run {
                program: load.1,
                family,
                sources,
                packet: Packet::Datagram,
                cpus: 1,
                repeat: SOURCES,
            };
            let times = runner.run(run)?;
            let counters = load.0.counters()?;
            let full = counters.iter().filter(|(outcome, _)| {
                outcome.family == family && outcome.reason == Reason::TableFull
            });
            let full: u64 = full.map(|(_, count)| count.packets).sum();
            let tracked = load.0.tracked(now()?);
            let tracked = tracked.iter().filter(|(it, _)| *it == family);
            let tracked: u64 = tracked.map(|(_, it)| it.proven + it.unproven).sum();
            ensure!(tracked <= SOURCES.into(), "{tracked} buckets of {SOURCES} sources");
            let missing = u64::from(SOURCES) - tracked;
            #[expect(clippy::cast_precision_loss, reason = "well below 2^52")]
            let share = missing as f64 / f64::from(SOURCES);
            let standing = if is_proven { "proven" } else { "seen" };
            rows.push(Row {
                cells: vec![
                    standing.into(),
                    family.label().into(),
                    tracked.to_string(),
                    missing.to_string(),
                    full.to_string(),
                    format!("{:.0}", times[0]),
                ],
                json: json!({
                    "standing": standing, "family": family.label(), "sources": SOURCES,
                    "tracked": tracked, "overflow": share, "table_full": full, "ns": times[0],
                }),
            });
            let name = format!("overflow, {} sources, {standing}, {}", SOURCES, family.label());
            report.target(name, Bound::AtMost(OVERFLOW), Ok(share));
        }
        runner.clear_from(load.1)?;
    }
    let title = format!("{SOURCES} sources in a table made for {SOURCES}, one packet each");
    let head = ["sources", "family", "tracked", "not tracked", "refused", "ns for each"];
    report.table("overflow", &title, &head, &rows);
    Ok(())
}

/// Measures what dropping costs in larger and larger tables, half full.
///
/// # Errors
/// When something cannot be loaded or run.
pub(crate) fn growth(runner: &mut Runner, effort: &Effort, report: &mut Report) -> Result<()> {
    let sizes: &[u32] = if effort.is_quick { &SIZES_QUICK } else { &SIZES };
    let shipped = Shipped::on(LOOPBACK.0)?.without_bytes()?;
    let floor = runner.add_own("floor")?;
    let family = Family::Ipv4;
    let mut loads = Vec::new();
    for &size in sizes {
        let table = format!(
            "ipv4_sources = {size}\nipv6_sources = {}\nnew_sources = {UNLIMITED}",
            SIZES[0]
        );
        let config = shipped.rest(&format!("packets = {OVER}"))?.table(&table)?;
        let load = load(runner, &config)?;
        fill(runner, &load, family, u64::from(size / 2))?;
        loads.push((size, load, Vec::new(), Vec::new()));
    }
    for _ in 0..effort.rounds {
        for (size, load, times, floors) in &mut loads {
            let sources = Sources::Resident(u64::from(*size / 2));
            let run = Run {
                program: load.1,
                family,
                sources,
                packet: Packet::Datagram,
                cpus: 1,
                repeat: effort.repeat,
            };
            times.push(runner.run(run)?[0]);
            floors.push(runner.run(Run { program: floor, ..run })?[0]);
        }
    }
    let rows = loads.iter().map(|(size, load, times, floors)| {
        let ratios: Vec<_> = times.iter().zip(floors).map(|(time, floor)| time / floor).collect();
        let time = Spread::of(times);
        let ratio = Spread::of(&ratios);
        let memory = map_memory(load.0.sizes()) >> 20;
        Row {
            cells: vec![
                thousands((*size).into()),
                thousands((*size / 2).into()),
                format!("{memory} MiB"),
                time.map_or(String::new(), |it| it.to_string()),
                ratio.map_or(String::new(), |it| format!("{it:.2}")),
            ],
            json: json!({
                "ipv4_sources": size, "resident": size / 2, "mebibytes": memory,
                "ns": time.map(|it| it.json()), "floors": ratio.map(|it| it.json()),
            }),
        }
    });
    let rows: Vec<_> = rows.collect();
    runner.clear_from(floor)?;
    let title = "Dropping in larger tables, half full, proven sources in turn, IPv4, one CPU";
    report.table("growth", title, &["made for", "resident", "maps", "ns", "× floor"], &rows);
    Ok(())
}
