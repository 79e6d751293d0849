//! The bucket table, the filters and the budgets as they lie in maps.

use super::{AddressFamily, ClassId, MAX_CLASSES, MAX_INTERFACES, Slot, SourceAddress};
use crate::table::Meta;

/// Slots in a line of the IPv4 table.
pub const V4_SLOTS: usize = 4;
/// Slots in a line of the IPv6 table.
pub const V6_SLOTS: usize = 3;
/// In use in an IPv4 line when a new source looks for room in its other line: at half load, 3 sources
/// in 10,000 find no slot, and one in ten lies in its second line.
pub const V4_CROWDED: u32 = 3;
/// The same for IPv6, whose lines have fewer slots: 6 in 10,000, and one in four.
pub const V6_CROWDED: u32 = 1;
/// Words of the filters at each place: two generations of the proven, two of the seen.
pub const KNOWN_WORDS: usize = 4;

/// A cache line of IPv4 buckets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct LineV4 {
    /// Addresses in host order.
    pub sources: [u32; V4_SLOTS],
    /// Whose they are.
    pub metas: [Meta; V4_SLOTS],
    /// Theoretical arrival times of the packet buckets, [`Tick`](crate::time::Tick)s.
    pub packets: [u64; V4_SLOTS],
}

/// A cache line of IPv6 buckets, or of ceilings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct LineV6 {
    /// The bits of sources, or prefixes.
    pub sources: [u64; V6_SLOTS],
    /// Theoretical arrival times of the packet buckets, [`Tick`](crate::time::Tick)s.
    pub packets: [u64; V6_SLOTS],
    /// Whose they are.
    pub metas: [Meta; V6_SLOTS],
    pad: u32,
}

/// Theoretical arrival times of the byte buckets of one line, in a map of their own that is no larger
/// than one entry where no byte rate is configured.
pub type ByteTats = [u64; V4_SLOTS];

/// Places in front of the filter of flows that are for ports of this host: one for each 32 of them.
pub const FLOW_PORTS: u32 = 1 << 11;

/// What the filters hold at one place, see [`known`](crate::known).
pub type KnownWords = [u64; KNOWN_WORDS];

/// A bit for each port.
pub type PortBits = [u64; 1 << 10];

/// A budget that many CPUs look at, alone on its cache line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Budget {
    /// Theoretical arrival time, a [`Tick`](crate::time::Tick).
    pub tat: u64,
    pad: [u64; 7],
}

/// The place of a budget in its map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetCell(u32);

impl BudgetCell {
    /// How many there are.
    pub const COUNT: usize = 3 * Self::CLASSES as usize + 2 * MAX_INTERFACES + 1;
    #[expect(clippy::cast_possible_truncation, reason = "64")]
    const CLASSES: u32 = MAX_CLASSES as u32 + 1;
    #[expect(clippy::cast_possible_truncation, reason = "32")]
    const INTERFACES: u32 = MAX_INTERFACES as u32;

    /// The budget for new sources of a class, or of all together ([`ClassId::NONE`]).
    #[inline(always)]
    #[must_use]
    pub const fn new_sources(class: ClassId) -> Self {
        Self(class.0)
    }

    /// The sum of what a class lets in from sources that have proven nothing.
    #[inline(always)]
    #[must_use]
    pub const fn unproven(class: ClassId) -> Self {
        Self(Self::CLASSES + class.0)
    }

    /// The sum of all that a class lets in.
    #[inline(always)]
    #[must_use]
    pub const fn total(class: ClassId) -> Self {
        Self(2 * Self::CLASSES + class.0)
    }

    /// The cap on ARP of an interface.
    #[inline(always)]
    #[must_use]
    pub const fn arp(slot: Slot) -> Self {
        Self(3 * Self::CLASSES + slot.0)
    }

    /// The cap on neighbour discovery of an interface.
    #[inline(always)]
    #[must_use]
    pub const fn nd(slot: Slot) -> Self {
        Self(3 * Self::CLASSES + Self::INTERFACES + slot.0)
    }

    /// What all flows together may receive that this host opened, beyond the limits of their sources.
    #[inline(always)]
    #[must_use]
    pub const fn established() -> Self {
        Self(3 * Self::CLASSES + 2 * Self::INTERFACES)
    }

    /// The index in the map.
    #[inline(always)]
    #[must_use]
    pub const fn index(self) -> u32 {
        self.0
    }
}

/// An address of this host, which is no packet's source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct OwnAddress {
    high: u64,
    low: u64,
    family: u64,
}

impl From<SourceAddress> for OwnAddress {
    #[inline(always)]
    fn from(address: SourceAddress) -> Self {
        let family = match address.family {
            AddressFamily::Ipv4 => 4,
            AddressFamily::Ipv6 => 6,
        };
        Self { high: address.high, low: address.low, family }
    }
}

impl OwnAddress {
    /// The address.
    #[must_use]
    pub const fn address(&self) -> SourceAddress {
        let family = if self.family == 4 { AddressFamily::Ipv4 } else { AddressFamily::Ipv6 };
        SourceAddress { family, high: self.high, low: self.low }
    }
}

const _: () = assert!(size_of::<LineV4>() == 64 && size_of::<LineV6>() == 64);
const _: () = assert!(size_of::<Budget>() == 64 && size_of::<OwnAddress>() == 24);
const _: () = assert!(V6_SLOTS <= V4_SLOTS);
