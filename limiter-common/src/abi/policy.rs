//! What applies to a source apart from its class: its prefix's limits, blocks and exemptions.

use core::net::{IpAddr, Ipv6Addr};

use super::{MAX_INTERFACES, Slot};
use crate::time::Nanos;

/// The number of a [`Policy`] within its bank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct PolicyId(pub u32);

impl PolicyId {
    /// No prefix, block or exemption covers the source: the class limits apply. It has no record.
    pub const DEFAULT: Self = Self(0);
}

/// A row of the limits map: `policy.limits + class order` finds a [`Limits`](crate::units::Limits).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct LimitsIndex(pub u32);

impl LimitsIndex {
    /// The class's own limits, which are in the settings and not in the map.
    pub const CLASS: Self = Self(u32::MAX);
}

/// Everything that the configuration says about one prefix, with what it inherits from the
/// prefixes around it already merged in: one longest-prefix match finds all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Policy {
    /// Blocked until then; 0 if not blocked.
    pub blocked_until: Nanos,
    /// On which interfaces it is exempt, and until when.
    pub exempt: Exemptions,
    /// The first of its limits in the limits map, one per class in order.
    pub limits: LimitsIndex,
    pad: u32,
}

impl Policy {
    /// A policy of these parts.
    #[must_use]
    pub const fn new(blocked_until: Nanos, exempt: Exemptions, limits: LimitsIndex) -> Self {
        Self { blocked_until, exempt, limits, pad: 0 }
    }

    /// Whether it is the same but for times that differ by up to `margin`.
    #[must_use]
    pub fn is_about(&self, other: &Self, margin: Nanos) -> bool {
        let is_near = |(a, b): (&Nanos, &Nanos)| a.0.abs_diff(b.0) <= margin.0;
        self.limits == other.limits
            && is_near((&self.blocked_until, &other.blocked_until))
            && self.exempt.0.iter().zip(&other.exempt.0).all(is_near)
    }
}

/// Per interface slot, the time until which a prefix is exempt there; 0 where it is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Exemptions([Nanos; MAX_INTERFACES]);

impl Exemptions {
    /// Exempt nowhere.
    pub const NONE: Self = Self([Nanos(0); MAX_INTERFACES]);

    /// Whether it is exempt on `slot` at `now`.
    #[inline(always)]
    #[must_use]
    pub fn holds(&self, slot: Slot, now: Nanos) -> bool {
        // A mask and not a comparison: kernel 6.1 forgets the latter when registers are short.
        now < self.0[slot.index() % MAX_INTERFACES]
    }

    /// A bit for each slot on which it is, or was, exempt.
    #[must_use]
    pub fn slots(&self) -> u32 {
        let exempt = (0..).zip(&self.0).filter(|(_, until)| until.0 != 0);
        exempt.fold(0, |bits, (slot, _): (u32, _)| bits | 1 << slot)
    }

    /// Makes it exempt on `slot` until `until`, or for longer if it already was.
    pub fn extend(&mut self, slot: Slot, until: Nanos) {
        if let Some(known) = self.0.get_mut(slot.index()) {
            *known = until.max(*known);
        }
    }
}

/// A source address as prefixes match it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SourceAddress {
    /// IPv4 or IPv6; they do not match each other's prefixes.
    pub family: AddressFamily,
    /// The first 64 bits of an IPv6 address; an IPv4 address in the upper half.
    pub high: u64,
    /// The last 64 bits of an IPv6 address; 0 for IPv4.
    pub low: u64,
}

/// The family of a [`SourceAddress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum AddressFamily {
    /// IPv4.
    Ipv4 = 4,
    /// IPv6.
    Ipv6 = 6,
}

impl SourceAddress {
    /// An IPv4 address in host order.
    #[inline(always)]
    #[must_use]
    pub const fn ipv4(address: u32) -> Self {
        Self { family: AddressFamily::Ipv4, high: (address as u64) << 32, low: 0 }
    }

    /// An IPv6 address in host order, in halves.
    #[inline(always)]
    #[must_use]
    pub const fn ipv6(high: u64, low: u64) -> Self {
        Self { family: AddressFamily::Ipv6, high, low }
    }

    /// Whether no packet on a link can come from it: 127/8, multicast and 240/4 (RFC 6890 §2.2.2),
    /// the rest of 0/8 than 0.0.0.0 (which DHCP clients use, RFC 2131 §4.1); `::1`, `ff00::/8` and
    /// `::ffff:0:0/96` (RFC 6890 §2.2.3).
    #[inline(always)]
    #[must_use]
    pub const fn is_martian(self) -> bool {
        match self.family {
            AddressFamily::Ipv4 => {
                let first = self.high >> 56;
                first >= 224 || first == 127 || first == 0 && self.high != 0
            }
            AddressFamily::Ipv6 => {
                let (high, low) = (self.high, self.low);
                high >> 56 == 0xff || high == 0 && (low == 1 || low >> 32 == 0xffff)
            }
        }
    }
}

impl From<IpAddr> for SourceAddress {
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => Self::ipv4(address.to_bits()),
            IpAddr::V6(address) => address.into(),
        }
    }
}

impl From<Ipv6Addr> for SourceAddress {
    fn from(address: Ipv6Addr) -> Self {
        let address = u128::from(address);
        #[expect(clippy::cast_possible_truncation, reason = "the halves of the address")]
        Self::ipv6((address >> 64) as u64, address as u64)
    }
}

/// The key data of the prefix map: the bank and the address, so that both banks share one trie
/// and a packet sees one of them only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct PrefixKey {
    bank: u8,
    family: u8,
    pad: [u8; 2],
    /// In network order.
    address: [u32; 4],
}

impl PrefixKey {
    /// Bits in front of the address, to be added to an address's prefix length.
    pub const FIXED_BITS: u32 = 32;
    /// The length of a key that names one address; any shorter prefix matches it.
    pub const FULL_BITS: u32 = Self::FIXED_BITS + 128;

    /// The key of `address` in the bank with the index `bank`.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the quarters of the address")]
    pub const fn new(bank: u8, address: SourceAddress) -> Self {
        let SourceAddress { family, high, low } = address;
        Self {
            bank,
            family: family as u8,
            pad: [0; 2],
            address: [
                ((high >> 32) as u32).to_be(),
                (high as u32).to_be(),
                ((low >> 32) as u32).to_be(),
                (low as u32).to_be(),
            ],
        }
    }

    /// The index of the bank.
    #[must_use]
    pub const fn bank(&self) -> u8 {
        self.bank
    }

    /// The address.
    #[must_use]
    pub fn address(&self) -> SourceAddress {
        let [a, b, c, d] = self.address.map(|quarter| u64::from(u32::from_be(quarter)));
        let family = if self.family == AddressFamily::Ipv4 as u8 {
            AddressFamily::Ipv4
        } else {
            AddressFamily::Ipv6
        };
        SourceAddress { family, high: a << 32 | b, low: c << 32 | d }
    }
}

const _: () = assert!(MAX_INTERFACES.is_power_of_two());
const _: () = assert!(size_of::<PrefixKey>() == 20);
const _: () = assert!(size_of::<Policy>() == 16 + 8 * MAX_INTERFACES);
