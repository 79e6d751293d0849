//! `connections = 100`: how many TCP connections a source may have open, in a class or for a network.

use super::class::Draft;
use super::matcher::L4;
use super::reader::Table;

/// The most that can be asked for.
const MOST: u64 = 1_000_000;

/// The number, none if it is not there; `None` only if something was noted.
#[expect(clippy::option_option, reason = "absent and wrong are two things")]
pub(super) fn read(table: &Table<'_>) -> Option<Option<u32>> {
    let Some(value) = table.get("connections") else { return Some(None) };
    let cure = format!(
        "write a whole number from 1 to {MOST}; without the key connections are not limited, and \
         [[block]] lets none through"
    );
    u32::try_from(value.integer_or(1..=MOST, &cure)?).ok().map(Some)
}

/// Notes each class that has a limit and never meets a packet that it is about.
pub(super) fn effective(classes: &[Draft<'_>]) {
    for (order, class) in classes.iter().enumerate() {
        if let Some(place) = &class.connections
            && let Some((cause, cure)) = without_effect(classes, order)
        {
            place.error(cause, cure);
        }
    }
}

/// Why a limit in the class at `order` would have no effect, and what to do.
pub(super) fn without_effect(classes: &[Draft<'_>], order: usize) -> Option<(String, String)> {
    let class = classes.get(order)?;
    let matcher = class.matcher().map(|(_, matcher)| matcher);
    let accepted = L4::all()
        .filter(|l4| l4.index().opens() && matcher.is_none_or(|matcher| matcher.accepts(*l4)));
    let accepted: Vec<_> = accepted.collect();
    if accepted.is_empty() {
        return Some((
            "no packet of this class opens a TCP connection (SYN without ACK)".to_owned(),
            "write it in the class that takes the SYNs".to_owned(),
        ));
    }
    let takes_all = |earlier: &&Draft<'_>| {
        earlier.matcher().is_some_and(|(_, earlier)| {
            earlier.covers_ports_and_lengths(matcher)
                && accepted.iter().all(|l4| earlier.accepts(*l4))
        })
    };
    let earlier = classes[..order].iter().find(takes_all)?;
    let (name, line) = (earlier.name.unwrap_or("?"), earlier.place().line());
    Some((
        format!("class \"{name}\" at line {line} takes every SYN that would belong to this class"),
        "write it in that class".to_owned(),
    ))
}
