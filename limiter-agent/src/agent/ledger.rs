//! The packet counters by name, so that no series goes backwards.
//!
//! The kernel counts by numbers of classes and interfaces. When a name takes over the number of one
//! that went away (see [`Names`]), what was counted until then stays with the old name, and the new
//! one begins where it had been.

use std::collections::{BTreeMap, HashMap};

use limiter_common::Outcome;
use limiter_common::abi::{ClassId, Count, Slot};

use crate::plan::Names;
use crate::telemetry::PacketCount;

/// What the kernel's counters alone do not tell.
#[derive(Default)]
pub(super) struct Ledger {
    /// What was counted under names that lost their number.
    past: BTreeMap<Row, Count>,
    /// What a cell had counted when its name took it over.
    bases: BTreeMap<Cell, Count>,
}

/// Interface, family, class, reason and action, by name.
type Row = (String, &'static str, String, &'static str, &'static str);
/// The same by number where the kernel knows only that.
type Cell = (u32, &'static str, u32, &'static str, &'static str);

impl Ledger {
    /// The `counters` under the names that they have now, and those of the past.
    pub(super) fn rows(&self, counters: &[(Outcome, Count)], names: &Names) -> Vec<PacketCount> {
        let labels = Labels::of(names);
        let mut rows = self.past.clone();
        for (outcome, count) in counters {
            let base = self.bases.get(&cell(outcome)).copied().unwrap_or_default();
            let own = without(*count, base);
            if own.packets > 0 {
                add(rows.entry(labels.row(outcome)).or_default(), own);
            }
        }
        let row = |((interface, family, class, reason, action), count)| PacketCount {
            interface,
            family,
            class,
            reason,
            action,
            count,
        };
        rows.into_iter().map(row).collect()
    }

    /// Notes the `counters` whose numbers go over from names in `old` to others in `new`.
    pub(super) fn hand_over(&mut self, counters: &[(Outcome, Count)], old: &Names, new: &Names) {
        let (old, new) = (Labels::of(old), Labels::of(new));
        for (outcome, count) in counters {
            let row = old.row(outcome);
            if row != new.row(outcome) {
                let base = self.bases.insert(cell(outcome), *count).unwrap_or_default();
                add(self.past.entry(row).or_default(), without(*count, base));
            }
        }
    }
}

struct Labels<'a> {
    slots: HashMap<Slot, &'a str>,
    classes: HashMap<ClassId, &'a str>,
}

impl<'a> Labels<'a> {
    fn of(names: &'a Names) -> Self {
        Self {
            slots: names.slots().map(|(name, slot)| (slot, name)).collect(),
            classes: names.classes().map(|(name, id)| (id, name)).collect(),
        }
    }

    fn row(&self, outcome: &Outcome) -> Row {
        (
            (*self.slots.get(&outcome.slot).unwrap_or(&"unknown")).to_owned(),
            outcome.family.label(),
            (*self.classes.get(&outcome.class).unwrap_or(&"none")).to_owned(),
            outcome.reason.label(),
            outcome.action.label(),
        )
    }
}

fn cell(outcome: &Outcome) -> Cell {
    let Outcome { slot, family, class, reason, action } = outcome;
    (slot.0, family.label(), class.0, reason.label(), action.label())
}

fn add(sum: &mut Count, count: Count) {
    sum.packets += count.packets;
    sum.bytes += count.bytes;
}

/// Counters only grow, so the base is never more.
fn without(count: Count, base: Count) -> Count {
    Count {
        packets: count.packets.saturating_sub(base.packets),
        bytes: count.bytes.saturating_sub(base.bytes),
    }
}
