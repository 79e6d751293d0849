//! The settings that a packet is decided under: one value per bank, switched as a whole.

use super::{LimitsIndex, MAX_CLASSES, MAX_INTERFACES};
use crate::time::Clock;
use crate::units::{Limits, PacketLimit};

/// An index into the two banks of settings: 0 or 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bank {
    /// The bank in force when the program is loaded.
    #[default]
    First,
    /// The other one.
    Second,
}

impl Bank {
    /// The index in the map of settings.
    #[must_use]
    pub const fn index(self) -> u32 {
        match self {
            Self::First => 0,
            Self::Second => 1,
        }
    }

    /// The same as the first byte of a [`PrefixKey`](super::PrefixKey).
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::First => 0,
            Self::Second => 1,
        }
    }

    /// The place in the map of settings of a variant of the settings of this bank: those that hold
    /// without an agent, or in a mode that was set without one.
    #[must_use]
    pub const fn variant(self) -> u32 {
        2 + self.index()
    }

    /// The bank whose settings, or variant of them, lie at `place`.
    #[must_use]
    pub const fn of_place(place: u64) -> Self {
        if place & 1 == 0 { Self::First } else { Self::Second }
    }

    /// The other bank.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }
}

/// What is done with packets that are over a limit. A number and not an enum, because it is read
/// from a map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Mode(u32);

impl Mode {
    /// Nothing is dropped; what would be is counted.
    pub const OBSERVE: Self = Self(0);
    /// Packets over a limit are dropped.
    pub const ENFORCE: Self = Self(1);
    /// Nothing is limited or measured against a limit; packets are counted.
    pub const BYPASS: Self = Self(2);
}

/// The stable number of a class: bucket keys and counters carry it, so it stays with the class's
/// name through reloads. (A class's place in the order of rules is something else.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct ClassId(pub u32);

impl ClassId {
    /// No class: what is decided before, or without, classification.
    pub const NONE: Self = Self(0);
}

/// The stable number of a configured interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Slot(pub u32);

impl Slot {
    /// An interface that is not configured (or became so a moment ago).
    pub const UNKNOWN: Self = Self(0);

    /// The number as an array index.
    #[inline(always)]
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// One place of the interface table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Ingress {
    /// The kernel's interface index; 0 (never an interface) if the place is empty.
    pub ifindex: u32,
    /// The slot it is counted and exempted under.
    pub slot: Slot,
}

impl Ingress {
    /// Places in the interface table.
    pub const PLACES: usize = 256;

    /// The place of `ifindex` under `multiplier`, an odd number that the agent picks so that no
    /// two of its interfaces share a place.
    #[inline(always)]
    #[must_use]
    pub const fn place(ifindex: u32, multiplier: u32) -> usize {
        (ifindex.wrapping_mul(multiplier) >> 24) as usize
    }
}

/// Which look-ups the configuration makes necessary; the others are skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Need(pub u32);

impl Need {
    /// Some class matches on source ports.
    pub const SOURCE_PORT: Self = Self(1);
    /// Some class matches on destination ports.
    pub const DESTINATION_PORT: Self = Self(2);
    /// Some class matches on the frame's length.
    pub const LENGTH: Self = Self(4);
    /// There is a prefix, exemption or block.
    pub const POLICIES: Self = Self(8);
    /// Some reserve is bound to interfaces.
    pub const INTERFACE: Self = Self(16);

    /// Whether all of `other` is needed.
    #[inline(always)]
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Both.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The wider prefixes that have a ceiling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Ceiling {
    /// An IPv6 /56, the least that a customer is given.
    V6Customer = 0,
    /// An IPv6 /48.
    V6Site = 1,
    /// An IPv4 /24.
    V4Network = 2,
}

impl Ceiling {
    /// How many there are.
    pub const COUNT: usize = 3;
}

/// What is true of a class, bits of a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Traits(pub u32);

impl Traits {
    /// Every bucket of its sources is full again before the source counts as not seen
    /// ([`Filter::lasts`](crate::known::Filter::lasts)).
    pub const REFILLS_UNSEEN: Self = Self(1);
    /// It is a reserve: its new sources are let in by its own budget alone.
    pub const RESERVED: Self = Self(2);

    /// Whether all of `other` is true.
    #[inline(always)]
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// `self`, with `other` if it `holds`.
    #[must_use]
    pub const fn with(self, other: Self, holds: bool) -> Self {
        if holds { Self(self.0 | other.0) } else { self }
    }
}

/// One class, at its place in the order of rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ClassSettings {
    /// The limits of a source that no prefix gives others.
    pub limits: Limits,
    /// How many new sources it may admit; not limited if it has no share of its own.
    pub new_sources: PacketLimit,
    /// What all its sources together may send that have proven nothing; not limited if unset.
    pub unproven: PacketLimit,
    /// What all its sources together may send; not limited if unset.
    pub total: PacketLimit,
    /// What one wider prefix may send, by [`Ceiling`]; not limited if unset.
    pub ceilings: [PacketLimit; Ceiling::COUNT],
    /// Its number.
    pub id: ClassId,
    /// Its mode: its own, or the global one.
    pub mode: Mode,
    /// The clock that is exact enough for all limits that its packets may meet.
    pub clock: Clock,
    /// What is true of it.
    pub traits: Traits,
}

/// A dimension of classification with 65,536 values: a port, or a frame length (longer frames count
/// as 65,535). Values are grouped, since few sets of classes are distinct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Dimension {
    /// Which classes accept a packet that has no such value (no ports).
    pub absent: u64,
    /// Which classes accept each group.
    pub classes: [u64; 256],
    /// The group of each value.
    pub groups: [u8; 65536],
}

impl Dimension {
    /// Accepts nothing.
    #[expect(clippy::large_stack_arrays, reason = "a constant; the agent boxes its settings")]
    pub const EMPTY: Self = Self { absent: 0, classes: [0; 256], groups: [0; 65536] };

    /// Which classes accept `value`.
    #[inline(always)]
    #[must_use]
    pub const fn accepting(&self, value: u16) -> u64 {
        self.classes[self.groups[value as usize] as usize]
    }
}

/// An index into the table of protocols: what is below the network header, in eleven bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct L4Index(u32);

impl L4Index {
    /// Entries in the table.
    pub const COUNT: usize = 2048;

    /// A protocol of which no header is read, or (for a non-first fragment) can be.
    #[inline(always)]
    #[must_use]
    pub const fn other(protocol: u8) -> Self {
        Self(protocol as u32)
    }

    /// TCP with these flags (the header's byte 13).
    #[inline(always)]
    #[must_use]
    pub const fn tcp(flags: u8) -> Self {
        Self(256 + flags as u32)
    }

    /// ICMP of this type.
    #[inline(always)]
    #[must_use]
    pub const fn icmp(kind: u8) -> Self {
        Self(512 + kind as u32)
    }

    /// `ICMPv6` of this type.
    #[inline(always)]
    #[must_use]
    pub const fn icmpv6(kind: u8) -> Self {
        Self(768 + kind as u32)
    }

    /// Whether it is TCP that opens a connection: SYN without ACK (RFC 9293 §3.5), also in a first fragment.
    #[inline(always)]
    #[must_use]
    pub const fn opens(self) -> bool {
        const ACK_AND_SYN: u32 = 0x12;
        const SYN: u32 = 0x02;
        self.0 & (0x300 | ACK_AND_SYN) == 0x100 | SYN
    }

    /// The same in a fragment, the first or another.
    #[inline(always)]
    #[must_use]
    pub const fn fragment(self) -> Self {
        Self(self.0 | 1024)
    }

    /// The same, in a fragment if it `is_fragment`.
    #[inline(always)]
    #[must_use]
    pub const fn within(self, is_fragment: bool) -> Self {
        if is_fragment { self.fragment() } else { self }
    }

    /// The same, with its number passed through `hide`.
    #[inline(always)]
    #[must_use]
    pub fn hidden(self, hide: impl Fn(u32) -> u32) -> Self {
        Self(hide(self.0))
    }

    /// The array index, below [`COUNT`](Self::COUNT).
    #[inline(always)]
    #[must_use]
    pub const fn index(self) -> usize {
        (self.0 % 2048) as usize
    }
}

/// All that a packet is decided under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Settings {
    /// The cap on ARP, per interface.
    pub arp: PacketLimit,
    /// The cap on IPv6 neighbour discovery, per interface.
    pub nd: PacketLimit,
    /// How many new sources all classes together may admit.
    pub new_sources: PacketLimit,
    /// How many new sources one IPv6 /48 may admit; not limited if unset.
    pub new_sources_site: PacketLimit,
    /// What all flows together may receive that this host opened, beyond the limits of their sources; no
    /// flow is looked up if it is not limited.
    pub established: PacketLimit,
    /// The count of timer ticks, times their length, and this is `CLOCK_MONOTONIC_COARSE`, in
    /// nanoseconds; modulo 2⁶⁴.
    pub coarse_origin: u64,
    /// Changes with every switch; what a bucket has cached of another epoch is stale.
    pub epoch: u32,
    /// The bank these settings lie in, 0 or 1: the first byte of every [`PrefixKey`](super::PrefixKey).
    pub bank: u32,
    /// The first of this bank's policies in their map.
    pub policies: u32,
    /// The mode of what has no class.
    pub mode: Mode,
    /// A bit for each [`Reason`](crate::Reason) that drops.
    pub drops: u32,
    /// Which look-ups are needed.
    pub need: Need,
    /// See [`Ingress::place`].
    pub ingress_multiplier: u32,
    /// How many of `classes` are in use.
    pub class_count: u32,
    /// A bit for each [`Slot`] on which something is exempt.
    pub exempting: u32,
    /// Always 0.
    pub pad: u32,
    /// Which classes accept a packet that a router may have forwarded: one whose TTL or hop limit is not
    /// 255, the highest (RFC 5082).
    pub routed: u64,
    /// Which classes accept what arrives on each [`Slot`].
    pub interfaces: [u64; MAX_INTERFACES],
    /// The interfaces.
    pub ingress: [Ingress; Ingress::PLACES],
    /// The classes, in the order of rules.
    pub classes: [ClassSettings; MAX_CLASSES],
    /// Which classes accept each protocol, flag set, ICMP type and fragment.
    pub protocols: [u64; L4Index::COUNT],
    /// Which classes accept each source port.
    pub source_ports: Dimension,
    /// Which classes accept each destination port.
    pub destination_ports: Dimension,
    /// Which classes accept each frame length.
    pub lengths: Dimension,
}

impl Settings {
    /// No interfaces, no classes, observe mode, nothing drops.
    pub const EMPTY: Self = Self {
        arp: PacketLimit::NONE,
        nd: PacketLimit::NONE,
        new_sources: PacketLimit::NONE,
        new_sources_site: PacketLimit::NONE,
        established: PacketLimit::NONE,
        coarse_origin: 0,
        epoch: 0,
        bank: 0,
        policies: 0,
        mode: Mode::OBSERVE,
        drops: 0,
        need: Need(0),
        ingress_multiplier: 1,
        class_count: 0,
        exempting: 0,
        pad: 0,
        routed: u64::MAX,
        interfaces: [u64::MAX; MAX_INTERFACES],
        ingress: [Ingress { ifindex: 0, slot: Slot::UNKNOWN }; Ingress::PLACES],
        classes: [ClassSettings {
            limits: Limits::NONE,
            new_sources: PacketLimit::NONE,
            unproven: PacketLimit::NONE,
            total: PacketLimit::NONE,
            ceilings: [PacketLimit::NONE; Ceiling::COUNT],
            id: ClassId::NONE,
            mode: Mode::OBSERVE,
            clock: Clock::FINE,
            traits: Traits(0),
        }; MAX_CLASSES],
        protocols: [0; L4Index::COUNT],
        source_ports: Dimension::EMPTY,
        destination_ports: Dimension::EMPTY,
        lengths: Dimension::EMPTY,
    };

    /// Puts everything under one mode.
    pub fn override_mode(&mut self, mode: Mode) {
        self.mode = mode;
        for class in &mut self.classes {
            class.mode = mode;
        }
    }

    /// The slot of the interface with this index.
    #[inline(always)]
    #[must_use]
    pub const fn slot(&self, ifindex: u32) -> Slot {
        let ingress = &self.ingress[Ingress::place(ifindex, self.ingress_multiplier)];
        if ingress.ifindex == ifindex { ingress.slot } else { Slot::UNKNOWN }
    }

    /// Whether something is exempt on `slot`.
    #[inline(always)]
    #[must_use]
    pub const fn exempts_on(&self, slot: Slot) -> bool {
        self.exempting >> (slot.0 % u32::BITS) & 1 != 0
    }
}

impl LimitsIndex {
    /// The row of the class at place `order`.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "below MAX_CLASSES")]
    pub const fn row(self, order: usize) -> u32 {
        self.0.wrapping_add(order as u32)
    }
}

const _: () = assert!(MAX_INTERFACES <= Ingress::PLACES && MAX_INTERFACES <= u32::BITS as usize);
const _: () = assert!(size_of::<ClassSettings>() == 152);
const _: () = assert!(size_of::<Dimension>() == 8 + 8 * 256 + 65536);
const _: () = assert!(
    size_of::<Settings>()
        == 136
            + 8 * MAX_INTERFACES
            + 8 * Ingress::PLACES
            + 152 * MAX_CLASSES
            + 8 * L4Index::COUNT
            + 3 * size_of::<Dimension>()
);
