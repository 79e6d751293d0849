//! How large the maps are, and whether a reload still fits them.

use limiter_common::abi::{CounterShape, MAX_INTERFACES};

use super::policies::Merged;
use super::{Names, Plan, PlanError};
use crate::config::TableSizes;

/// Entries of each map. What lies in two banks is counted for both together, so that a bank has
/// half of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapSizes {
    /// Buckets for IPv4.
    pub ipv4_sources: u32,
    /// Buckets for IPv6.
    pub ipv6_sources: u32,
    /// Networks, both banks.
    pub prefixes: u32,
    /// Policies, both banks. A bank has one more than there are, for the place of
    /// [`PolicyId::DEFAULT`](limiter_common::abi::PolicyId::DEFAULT).
    pub policies: u32,
    /// Rows of limits, both banks.
    pub limits: u32,
    /// The counters.
    pub counters: CounterShape,
}

impl MapSizes {
    /// The sizes for a plan of these parts, with headroom: half again as many networks, policies
    /// and limits, rounded up to a power of two of at least 1,024 for each bank; class ids and
    /// slots as [`class_ids`] and [`slots`] say.
    pub(super) fn of(table: TableSizes, policies: &Merged, names: &Names) -> Self {
        Self {
            ipv4_sources: table.ipv4_sources,
            ipv6_sources: table.ipv6_sources,
            prefixes: banks(policies.prefixes.len()),
            policies: banks(policies.policies.len() + 1),
            limits: banks(policies.limits.len()),
            counters: CounterShape {
                slots: slots(count(names.slot_count() - 1)),
                classes: class_ids(count(names.class_ids() - 1)),
            },
        }
    }
}

/// Class ids for `classes`: a multiple of 16, and [`ClassId::NONE`].
///
/// [`ClassId::NONE`]: limiter_common::abi::ClassId::NONE
pub(super) fn class_ids(classes: usize) -> u32 {
    entries(classes.max(1).next_multiple_of(16)) + 1
}

/// Slots for `interfaces`: a multiple of 4, and [`Slot::UNKNOWN`].
///
/// [`Slot::UNKNOWN`]: limiter_common::abi::Slot::UNKNOWN
pub(super) fn slots(interfaces: usize) -> u32 {
    entries((interfaces.max(1).next_multiple_of(4) + 1).min(MAX_INTERFACES))
}

pub(super) fn fits(plan: &Plan, running: &MapSizes) -> Result<(), PlanError> {
    let tables = [
        ("ipv4_sources", plan.sizes.ipv4_sources, running.ipv4_sources),
        ("ipv6_sources", plan.sizes.ipv6_sources, running.ipv6_sources),
    ];
    for (key, wanted, running) in tables {
        if wanted != running {
            return Err(PlanError::TableSize { key, wanted, running });
        }
    }
    let rooms = [
        ("prefixes, exemptions and blocks", entries(plan.prefixes.len()), running.prefixes / 2),
        (
            "different policies of prefixes, exemptions and blocks",
            entries(plan.policies.len()),
            (running.policies / 2).saturating_sub(1),
        ),
        ("limits of prefixes", entries(plan.limits.len()), running.limits / 2),
        ("classes", plan.names.class_ids() - 1, running.counters.classes.saturating_sub(1)),
        ("interfaces", plan.names.slot_count() - 1, running.counters.slots.saturating_sub(1)),
    ];
    for (what, needed, room) in rooms {
        if needed > room {
            return Err(PlanError::NeedsRestart { what, needed, room });
        }
    }
    Ok(())
}

fn banks(needed: usize) -> u32 {
    const LEAST: u32 = 1024;
    let roomy = entries(needed + needed / 2);
    roomy.checked_next_power_of_two().unwrap_or(roomy).max(LEAST).saturating_mul(2)
}

/// A map has at most 2³² entries. What exceeds that is refused by the kernel for its memory.
fn entries(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn count(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
