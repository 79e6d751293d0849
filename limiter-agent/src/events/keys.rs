//! What is ranked, and how it is written.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use limiter_common::abi::{AddressFamily, SourceAddress};
use limiter_common::packet::{Source, Space};

use super::decode::Headers;

/// A source: whose buckets the packets meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SourceKey(pub(super) Source);

/// An IPv4 /24 or an IPv6 /48 (or what these are of an embedded address).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct PrefixKey(Source);

/// A protocol and a port of this host; no port where the protocol has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct PortKey {
    protocol: u8,
    port: Option<u16>,
}

impl From<SourceAddress> for PrefixKey {
    fn from(address: SourceAddress) -> Self {
        let Source { space, bits } = Source::from(address);
        let mask = match space {
            Space::Ipv4 | Space::Nat64 => !0xff,
            Space::Ipv6 => !0xffff,
            // All neighbours are of one link; a 6to4 site is one IPv4 address.
            Space::LinkLocal => 0,
            Space::SixToFour => !0,
        };
        Self(Source { space, bits: bits & mask })
    }
}

impl PortKey {
    /// Where a packet goes to; none of what is not IP.
    #[must_use]
    pub(super) fn of(headers: &Headers) -> Option<Self> {
        Some(Self { protocol: headers.protocol?, port: headers.ports.map(|it| it.destination) })
    }
}

/// An address, or the prefix that shares a bucket, as `block` takes it.
impl fmt::Display for SourceKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Source { space, bits } = self.0;
        match space {
            Space::Ipv4 => out.pad(&v4(bits).to_string()),
            Space::Ipv6 => out.pad(&format!("{}/64", v6(bits, 0))),
            Space::LinkLocal => out.pad(&v6(0xfe80 << 48, bits).to_string()),
            Space::Nat64 => out.pad(&v6(0x0064_ff9b << 32, bits).to_string()),
            Space::SixToFour => out.pad(&format!("{}/48", v6(0x2002 << 48 | bits << 16, 0))),
        }
    }
}

impl fmt::Display for PrefixKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Source { space, bits } = self.0;
        match space {
            Space::Ipv4 => out.pad(&format!("{}/24", v4(bits))),
            Space::Ipv6 => out.pad(&format!("{}/48", v6(bits, 0))),
            Space::LinkLocal => out.pad("fe80::/10"),
            Space::Nat64 => out.pad(&format!("{}/120", v6(0x0064_ff9b << 32, bits))),
            Space::SixToFour => SourceKey(self.0).fmt(out),
        }
    }
}

impl fmt::Display for PortKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = protocol(self.protocol);
        match self.port {
            Some(port) => out.pad(&format!("{protocol}/{port}")),
            None => out.pad(&protocol),
        }
    }
}

/// The name of a protocol, or its number.
#[must_use]
pub(super) fn protocol(number: u8) -> String {
    let name = match number {
        1 => "icmp",
        6 => "tcp",
        17 => "udp",
        47 => "gre",
        50 => "esp",
        58 => "icmpv6",
        132 => "sctp",
        _ => return format!("ip-{number}"),
    };
    name.to_owned()
}

/// A source address in full.
#[must_use]
pub(super) fn address(SourceAddress { family, high, low }: SourceAddress) -> String {
    match family {
        AddressFamily::Ipv4 => v4(high >> 32).to_string(),
        AddressFamily::Ipv6 => v6(high, low).to_string(),
    }
}

fn v4(bits: u64) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::try_from(bits).unwrap_or(u32::MAX))
}

fn v6(high: u64, low: u64) -> Ipv6Addr {
    Ipv6Addr::from_bits(u128::from(high) << 64 | u128::from(low))
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn sources_and_prefixes_are_written_as_they_are_blocked() {
        for (address, source, prefix) in [
            ("192.0.2.77", "192.0.2.77", "192.0.2.0/24"),
            ("2001:db8:1:2:3::4", "2001:db8:1:2::/64", "2001:db8:1::/48"),
            ("fe80::1:2", "fe80::1:2", "fe80::/10"),
            ("64:ff9b::192.0.2.77", "64:ff9b::c000:24d", "64:ff9b::c000:200/120"),
            ("2002:c000:24d:9::1", "2002:c000:24d::/48", "2002:c000:24d::/48"),
        ] {
            let parsed = SourceAddress::from(address.parse::<IpAddr>().expect("parses"));
            assert_eq!(SourceKey(parsed.into()).to_string(), source);
            assert_eq!(PrefixKey::from(parsed).to_string(), prefix);
            assert!(source.parse::<IpAddr>().is_ok() || source.parse::<ipnet::IpNet>().is_ok());
            prefix.parse::<ipnet::IpNet>().expect("is a network");
        }
    }
}
