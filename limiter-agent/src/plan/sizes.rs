//! How large the maps are, and whether a reload still fits them.

use limiter_common::abi::{CounterShape, MAX_INTERFACES, Settings, Shape, V4_SLOTS, V6_SLOTS};
use limiter_common::units::PacketLimit;

use super::policies::Merged;
use super::{Names, Plan, PlanError};
use crate::config::TableSizes;

/// Entries of each map. What lies in two banks is counted for both together, so that a bank has
/// half of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapSizes {
    /// Buckets for IPv4: half as many as there are slots.
    pub ipv4_sources: u32,
    /// Buckets for IPv6: half as many as there are slots.
    pub ipv6_sources: u32,
    /// Whether there are byte buckets.
    pub bytes: bool,
    /// Whether there are ceilings over wider prefixes, or budgets of them.
    pub ceilings: bool,
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
    ///
    /// Where applications may penalise sources, that many may be networks with policies as well.
    pub(super) fn of(
        table: TableSizes,
        penalties: usize,
        settings: &Settings,
        policies: &Merged,
        names: &Names,
    ) -> Self {
        let ceilings = settings.classes.iter().flat_map(|class| class.ceilings);
        let mut ceilings = ceilings.chain([settings.new_sources_site]);
        let classes = settings.classes.iter().map(|class| &class.limits);
        let mut limits = classes.chain(&policies.limits);
        Self {
            bytes: limits.any(|limits| limits.bytes.is_limited()),
            ceilings: ceilings.any(|limit: PacketLimit| limit.is_limited()),
            ipv4_sources: table.ipv4_sources,
            ipv6_sources: table.ipv6_sources,
            prefixes: banks(policies.prefixes.len() + penalties),
            policies: banks(policies.policies.len() + 1 + penalties),
            limits: banks(policies.limits.len()),
            counters: CounterShape {
                slots: slots(count(names.slot_count() - 1)),
                classes: class_ids(count(names.class_ids() - 1)),
            },
        }
    }
}

impl From<Shape> for MapSizes {
    fn from(shape: Shape) -> Self {
        let Shape { ipv4_sources, ipv6_sources, prefixes, policies, limits, .. } = shape;
        Self {
            ipv4_sources,
            ipv6_sources,
            bytes: shape.bytes != 0,
            ceilings: shape.ceilings != 0,
            prefixes,
            policies,
            limits,
            counters: CounterShape { slots: shape.slots, classes: shape.classes },
        }
    }
}

impl From<MapSizes> for Shape {
    fn from(sizes: MapSizes) -> Self {
        let MapSizes { ipv4_sources, ipv6_sources, prefixes, policies, limits, .. } = sizes;
        Self {
            ipv4_sources,
            ipv6_sources,
            bytes: sizes.bytes.into(),
            ceilings: sizes.ceilings.into(),
            prefixes,
            policies,
            limits,
            slots: sizes.counters.slots,
            classes: sizes.counters.classes,
        }
    }
}

impl MapSizes {
    /// Lines of the IPv4 table. At most half of the slots are in use when it holds what it is said
    /// to hold, which nearly always leaves a free one in the two lines of a source.
    #[must_use]
    pub fn lines_v4(&self) -> u32 {
        lines(self.ipv4_sources, V4_SLOTS)
    }

    /// Lines of the IPv6 table.
    #[must_use]
    pub fn lines_v6(&self) -> u32 {
        lines(self.ipv6_sources, V6_SLOTS)
    }

    /// Lines of the table of ceilings: only prefixes with a source past half of its burst are there,
    /// and those that let new sources in.
    #[must_use]
    pub fn lines_ceilings(&self) -> u32 {
        if self.ceilings { (self.lines_v6() / 8).max(1024) } else { 1 }
    }

    /// Lines of byte buckets beside `lines` of the table.
    #[must_use]
    pub fn byte_lines(&self, lines: u32) -> u32 {
        if self.bytes { lines } else { 1 }
    }

    /// Lines of the table of open connections: a slot for each eighth bucket, of which the table is good
    /// for half. With a handful of sources, room for more all the same.
    #[must_use]
    pub fn connection_lines(&self) -> u32 {
        (self.ipv4_sources.saturating_add(self.ipv6_sources) / 128).max(256)
    }

    /// Places in the filters of known sources: half a mebibyte of them for two million buckets, which
    /// is what the cache of a core holds. (With 4 MiB a flood of forged sources costs half as much
    /// again: each of its packets waits for memory.) 100,000 proven sources are six to a word.
    #[must_use]
    pub fn known_places(&self) -> u32 {
        (self.ipv4_sources.saturating_add(self.ipv6_sources) / 128).max(1024)
    }

    /// Places in the filter of this host's flows: half as many, since a packet that is looked up there
    /// would be dropped, and was looked up among the known sources before.
    #[must_use]
    pub fn flow_places(&self) -> u32 {
        self.known_places() / 2
    }
}

fn lines(sources: u32, slots: usize) -> u32 {
    entries((2 * usize::try_from(sources).unwrap_or(usize::MAX / 2)).div_ceil(slots))
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
    if plan.sizes.bytes && !running.bytes {
        return Err(PlanError::NeedsRestart { what: "byte rates", needed: 1, room: 0 });
    }
    if plan.sizes.ceilings && !running.ceilings {
        return Err(PlanError::NeedsRestart { what: "ceilings", needed: 1, room: 0 });
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
