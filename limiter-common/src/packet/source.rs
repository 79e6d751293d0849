//! Which bucket a source address belongs to.

use core::net::IpAddr;

use crate::abi::{AddressFamily, SourceAddress};

/// Whose bucket a packet meets: a number within a space, so that addresses that mean different
/// things never share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// How to read `bits`.
    pub space: Space,
    /// IPv4 and embedded IPv4: the address. IPv6: the first 64 bits. Link-local: the last 64.
    pub bits: u64,
}

/// The kinds of sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Space {
    /// One IPv4 address.
    Ipv4 = 0,
    /// One IPv6 /64, the least that a network hands out.
    Ipv6 = 1,
    /// One link-local interface identifier: `fe80::/64` is the whole link, not one neighbour.
    LinkLocal = 2,
    /// One IPv4 address behind a translator (`64:ff9b::/96`, RFC 6052 §2.1).
    Nat64 = 3,
    /// One IPv4 address behind 6to4 (`2002::/16`, RFC 3056 §2).
    SixToFour = 4,
}

impl Source {
    /// The source of an IPv4 address in host order.
    #[inline(always)]
    #[must_use]
    pub const fn ipv4(address: u32) -> Self {
        Self { space: Space::Ipv4, bits: address as u64 }
    }

    /// The address that prefixes see of this source, whose IPv6 address is `high` and `low`: link-local
    /// ones as in `fe80::/64`, so that all addresses of a bucket have one policy.
    #[inline(always)]
    #[must_use]
    pub const fn address(self, high: u64, low: u64) -> SourceAddress {
        let high = if matches!(self.space, Space::LinkLocal) { 0xfe80 << 48 } else { high };
        SourceAddress::ipv6(high, low)
    }

    /// The source of an IPv6 address in host order, in halves.
    #[inline(always)]
    #[must_use]
    pub const fn ipv6(high: u64, low: u64) -> Self {
        if high >> 54 == 0xfe80 >> 6 {
            Self { space: Space::LinkLocal, bits: low }
        } else if high == 0x0064_ff9b_0000_0000 && low >> 32 == 0 {
            Self { space: Space::Nat64, bits: low }
        } else if high >> 48 == 0x2002 {
            Self { space: Space::SixToFour, bits: (high >> 16) & 0xffff_ffff }
        } else {
            Self { space: Space::Ipv6, bits: high }
        }
    }
}

impl SourceAddress {
    /// The address that packets have of a socket's IPv6 peer, which is `high` and `low`: a socket that
    /// takes both families shows an IPv4 peer as `::ffff:0:0/96` (RFC 4291 §2.5.5.2), which no packet has.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the last 32 bits")]
    pub const fn peer(high: u64, low: u64) -> Self {
        if high == 0 && low >> 32 == 0xffff {
            Self::ipv4(low as u32)
        } else {
            Source::ipv6(high, low).address(high, low)
        }
    }
}

/// Of the packets that come from an address.
impl From<SourceAddress> for Source {
    #[inline(always)]
    fn from(address: SourceAddress) -> Self {
        match address.family {
            AddressFamily::Ipv4 => Self { space: Space::Ipv4, bits: address.high >> 32 },
            AddressFamily::Ipv6 => Self::ipv6(address.high, address.low),
        }
    }
}

/// Of the packets that come from an address.
impl From<IpAddr> for Source {
    fn from(address: IpAddr) -> Self {
        SourceAddress::from(address).into()
    }
}
