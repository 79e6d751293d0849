//! What `top` and `events` print.

use std::fmt::Write as _;

use crate::events::{By, EventLine, Top, TopEntry, Totals};

/// The ranking as a table.
pub(super) fn table(top: &Top) -> String {
    let Totals { packets, packets_error, dropped, would_drop, packets_per_second, .. } = top.total;
    let mut text = format!(
        "{} by {} over the last {:.1} s, {}: {} packets/s, {packets} ±{packets_error} packets \
         ({dropped} dropped, {would_drop} would be)\n",
        top.of.as_str(),
        top.by.as_str(),
        top.window_seconds,
        top.at,
        rate(packets_per_second),
    );
    if top.entries.is_empty() {
        text.push_str("nothing was dropped, and nothing would have been\n");
        return text;
    }
    let width = top.entries.iter().map(|it| it.what.len()).max().unwrap_or(0).max(6);
    let _ = writeln!(
        text,
        "{:width$}  {:>9}  {:>9}  {:>9}  {:>11}  {:>11}  {:>6}  class, last reason",
        top.of.as_str().trim_end_matches("es").trim_end_matches('s'),
        "packets/s",
        "bit/s",
        "share",
        "dropped",
        "would drop",
        "±",
    );
    for entry in &top.entries {
        let TopEntry { what, totals, class, reason, .. } = entry;
        let (share, error) = match top.by {
            By::Packets => (
                ratio(totals.packets, top.total.packets),
                ratio(totals.packets_error, totals.packets),
            ),
            By::Bytes => {
                (ratio(totals.bytes, top.total.bytes), ratio(totals.bytes_error, totals.bytes))
            }
        };
        let _ = writeln!(
            text,
            "{what:width$}  {:>9}  {:>9}  {:>9}  {:>11}  {:>11}  {:>6}  {class}, {reason}",
            rate(totals.packets_per_second),
            rate(totals.bytes_per_second * 8.0),
            percent(share),
            totals.dropped,
            totals.would_drop,
            percent(error),
        );
    }
    let left = top.known.saturating_sub(top.entries.len());
    if left > 0 {
        let _ = writeln!(text, "and {left} more");
    }
    text
}

/// An event on one line.
pub(super) fn event(event: &EventLine) -> String {
    let source = event.source.as_deref().unwrap_or("-");
    let protocol = event.protocol.as_deref().unwrap_or("-");
    let ports = match (event.source_port, event.destination_port) {
        (Some(source), Some(destination)) => format!(" {source}>{destination}"),
        _ => String::new(),
    };
    let EventLine { time, action, reason, class, interface, length, weight, .. } = event;
    format!(
        "{time} {action} {reason} {source} {protocol}{ports} class={class} interface={interface} \
         length={length} stands_for={weight}\n"
    )
}

/// A rate with three digits and its magnitude: `12.3k`.
pub(super) fn rate(value: f64) -> String {
    let mut value = value;
    for unit in ["", "k", "M", "G"] {
        let digits = if value < 10.0 && !unit.is_empty() { 2 } else { usize::from(value < 99.95) };
        if value < 999.5 {
            return format!("{value:.digits$}{unit}");
        }
        value /= 1000.0;
    }
    format!("{value:.0}T")
}

pub(super) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

#[expect(clippy::cast_precision_loss, reason = "for people to read")]
pub(super) fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_three_digits() {
        for (value, text) in [
            (0.0, "0.0"),
            (7.25, "7.2"),
            (99.96, "100"),
            (999.4, "999"),
            (1_000.0, "1.00k"),
            (56_789.0, "56.8k"),
            (123_456_789.0, "123M"),
        ] {
            assert_eq!(rate(value), text);
        }
    }
}
