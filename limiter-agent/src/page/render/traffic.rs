//! Rates: charts with their tables, and the classes.

use maud::{Markup, PreEscaped, html};

use super::super::chart::{self, COLOURS, Layer};
use super::super::history::{Line, Rate};
use super::super::words::{bits, packets, short};
use super::super::{Range, View};
use super::{gauge, wide};
use crate::status::{Class, Limit, utc};

/// The sum of the lines that get no layer of their own.
const OTHERS: &str = "others";

/// What is passed and dropped, by class and by reason.
pub(super) fn charts(view: &View, range: Range) -> Markup {
    let traffic = &view.traffic;
    let verdicts = traffic.verdicts.iter().filter_map(|line| {
        let (colour, name) = match line.name.as_str() {
            "pass" => (0, "passed"),
            "would_drop" => (1, "would be dropped"),
            "drop" => (2, "dropped"),
            _ => return None,
        };
        Some((colour, Line { name: name.to_owned(), ..line.clone() }))
    });
    html! {
        section aria-labelledby="traffic" {
            h2 #traffic { "Packets per second, last " (range.words()) }
            div.charts {
                (card(view, range, "verdicts", "By verdict", &verdicts.collect::<Vec<_>>()))
                (card(view, range, "classes-chart", "All packets, by class", &layers(&traffic.classes)))
                (card(view, range, "reasons", "Dropped, or would be, by reason", &layers(&traffic.reasons)))
            }
        }
    }
}

/// The classes, those that had packets in the range first.
pub(super) fn classes(view: &View, range: Range) -> Markup {
    let status = &view.status;
    let mut names: Vec<String> =
        status.reserves.iter().map(|reserve| format!("reserve-{}", reserve.name)).collect();
    names.extend(status.classes.iter().map(|class| class.name.clone()));
    // Those of earlier configurations, and what belongs to no class.
    for line in &view.traffic.classes {
        if !names.contains(&line.name) {
            names.push(line.name.clone());
        }
    }
    let find = |lines: &[Line], name: &str| lines.iter().find(|line| line.name == name).cloned();
    let (busy, idle): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| {
        find(&view.traffic.classes, name).is_some()
            || view.pressure(name).is_some_and(|it| it > 0.0)
    });
    html! {
        section aria-labelledby="classes" {
            h2 #classes { "Classes" }
            @if busy.is_empty() { p { "No class had a packet in the last " (range.words()) "." } } @else {
                (wide("classes-table", "Classes", &html! {
                    table {
                        caption { span { "Packets now and on average, and how far each class has used up its shared budgets" } }
                        thead { tr {
                            th scope="col" { "Class" } th scope="col" { "Mode" }
                            th.n scope="col" { "Packets" } th.n scope="col" { "Dropped, or would be" }
                            th.n scope="col" { "Those on average" } th.n scope="col" { "Bits" }
                            th scope="col" { "Pressure" } th.n scope="col" { "Limit of one source" }
                        } }
                        tbody {
                            @for name in &busy {
                                @let all = find(&view.traffic.classes, name).unwrap_or_default();
                                @let held = find(&view.traffic.held, name).unwrap_or_default();
                                @let class = status.classes.iter().find(|class| class.name == *name);
                                tr {
                                    th.name scope="row" { (name) }
                                    td { (class.map_or("–", |class| &class.mode)) }
                                    td.n { (packets(all.now.packets)) } td.n { (packets(held.now.packets)) }
                                    td.n { (packets(held.mean.packets)) } td.n { (bits(all.now.bytes)) }
                                    td { @if let Some(share) = view.pressure(name) {
                                        (gauge(share, &format!("Budgets of {name} used")))
                                    } @else { "–" } }
                                    td.n { (limit(view, name, class)) }
                                }
                            }
                        }
                    }
                }))
            }
            @if !idle.is_empty() {
                details #idle {
                    summary { (idle.len()) " without a packet in the last " (range.words()) }
                    p { (idle.join(", ")) }
                }
            }
        }
    }
}

fn limit(view: &View, name: &str, class: Option<&Class>) -> String {
    let of_reserve = || {
        let mut reserves = view.status.reserves.iter();
        let reserve = reserves.find(|it| name.strip_prefix("reserve-") == Some(&*it.name));
        reserve.and_then(|it| it.packets)
    };
    let of_packets = class.map_or_else(of_reserve, |class| class.packets);
    let text = |limit: Limit, rate: String| format!("{rate} (burst {})", short(count(limit.burst)));
    let limits = [
        of_packets.map(|limit| text(limit, packets(limit.per_second))),
        class.and_then(|class| class.bytes).map(|limit| text(limit, bits(limit.per_second))),
    ];
    let limits: Vec<_> = limits.into_iter().flatten().collect();
    if limits.is_empty() { "–".to_owned() } else { limits.join(", ") }
}

/// A chart and its table, whose rows are in the order of the layers: not only colours tell them apart.
fn card(view: &View, range: Range, id: &str, heading: &str, layers: &[(u8, Line)]) -> Markup {
    let traffic = &view.traffic;
    let parts: Vec<_> = layers
        .iter()
        .map(|(colour, line)| Layer { colour: *colour, values: &line.values })
        .collect();
    let minutes = range.duration().as_secs_f64() / 60.0;
    let label = layers.iter().map(|(_, line)| {
        let Line { name, now, mean, peak, .. } = line;
        let [now, mean, peak] = [now.packets, mean.packets, *peak].map(packets);
        format!("{name}: {now} now, {mean} on average, {peak} at most")
    });
    let label = format!("{heading}. {}", label.collect::<Vec<_>>().join("; "));
    html! {
        section.card aria-labelledby=(id) {
            h3 id=(id) { (heading) }
            @if layers.is_empty() { p.faint { "None in this time." } } @else {
                figure role="img" aria-label=(label) {
                    @match chart::stacked(minutes, &traffic.times, &parts) {
                        Ok(svg) => (PreEscaped(svg)),
                        Err(error) => p { "There is no chart: " (error) },
                    }
                }
                table {
                    caption { "Until " (utc(view.at)) " (UTC); the uppermost layer first" }
                    thead { tr {
                        th scope="col" { "What" } th.n scope="col" { "Now" }
                        th.n scope="col" { "Average" } th.n scope="col" { "Highest" }
                    } }
                    tbody {
                        @for (colour, line) in layers.iter().rev() {
                            tr {
                                th.name scope="row" {
                                    span class={ "swatch c" (colour) } aria-hidden="true" {} (line.name)
                                }
                                td.n { (packets(line.now.packets)) } td.n { (packets(line.mean.packets)) }
                                td.n { (packets(line.peak)) }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Each with its colour; what is beyond the colours becomes one.
fn layers(lines: &[Line]) -> Vec<(u8, Line)> {
    let most = usize::from(COLOURS);
    let own = if lines.len() > most { most - 1 } else { lines.len() };
    let (own, rest) = lines.split_at(own);
    let mut layers: Vec<_> = (0..).zip(own.iter().cloned()).collect();
    if !rest.is_empty() {
        layers.push((COLOURS - 1, sum(rest)));
    }
    layers
}

fn sum(lines: &[Line]) -> Line {
    let mut sum = Line { name: format!("{OTHERS} ({})", lines.len()), ..Line::default() };
    sum.values = vec![0.0; lines.iter().map(|line| line.values.len()).max().unwrap_or_default()];
    let add = |sum: &mut Rate, rate: Rate| {
        sum.packets += rate.packets;
        sum.bytes += rate.bytes;
    };
    for line in lines {
        add(&mut sum.now, line.now);
        add(&mut sum.mean, line.mean);
        for (sum, value) in sum.values.iter_mut().zip(&line.values) {
            *sum += value;
        }
    }
    // Theirs need not have been at the same time.
    sum.peak = sum.values.iter().copied().fold(0.0, f64::max);
    sum
}

#[expect(clippy::cast_precision_loss, reason = "for people to read")]
fn count(value: u64) -> f64 {
    value as f64
}
