//! What was measured, as `GET /v1/measure` says it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use limiter_common::abi::WatchedSource;
use limiter_common::packet::Space;
use serde::{Deserialize, Serialize};

use super::distribution::Quantiles;
use super::hour::{ClassHour, Group};
use crate::config::{Allowance, Budget};
use crate::status::Limit;

/// All of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Since when, UTC. What is older than 24 hours of measuring is gone.
    pub since: String,
    /// Now, UTC.
    pub until: String,
    /// One source in so many is watched.
    pub one_in: u64,
    /// How many are, each in a class.
    pub watched: usize,
    /// How many can be.
    pub capacity: usize,
    /// Packets of sources that there was no room to watch.
    pub unwatched_packets: u64,
    /// The part of sources without a proof that the datapath takes for proven all the same, 0 to 1.
    pub false_proofs: f64,
    /// By class, in the order of rules, the reserves first.
    pub classes: Vec<ClassReport>,
}

/// A class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassReport {
    /// Its name.
    pub name: String,
    /// The mode that it is in. Only what is observed is measured.
    pub mode: String,
    /// How long it was observed.
    pub seconds: u64,
    /// What one source may send now.
    pub packets_limit: Option<Limit>,
    /// The same in bytes.
    pub bytes_limit: Option<Limit>,
    /// Sources that have proven their address.
    pub proven: GroupReport,
    /// The others: their addresses may be forged.
    pub others: GroupReport,
    /// Sources with limits of their own (`[[prefix]]`), which are in neither.
    pub apart: u64,
    /// New sources in a second.
    pub new_sources_per_second: Quantiles,
    /// Packets of all sources in a second.
    pub packets_per_second: Quantiles,
}

/// Some of a class's sources. A source counts once for each hour.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupReport {
    /// How many sent more than one packet.
    pub sources: u64,
    /// How many sent one; they are not in what follows.
    pub single_packet_sources: u64,
    /// Packets in the highest second of each source.
    pub packets: Quantiles,
    /// Bytes in the highest second of each.
    pub bytes: Quantiles,
    /// Packets per second in the highest ten seconds of each.
    pub packets_10s: Quantiles,
    /// Bytes per second in the highest ten seconds of each.
    pub bytes_10s: Quantiles,
    /// How many sent more in a second than the limit holds now (rate and burst), and so would be dropped in
    /// part.
    pub over_limit: u64,
    /// Those who sent most packets in a second.
    pub top: Vec<Heavy>,
}

/// A source that sent much.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heavy {
    /// Its address, or network.
    pub source: String,
    /// Packets in its highest second.
    pub packets: u64,
    /// Bytes in its highest second.
    pub bytes: u64,
}

impl ClassReport {
    /// Of what was measured in a class.
    #[must_use]
    pub fn new(name: &str, mode: &str, allowance: &Allowance, measured: &ClassHour) -> Self {
        Self {
            name: name.to_owned(),
            mode: mode.to_owned(),
            seconds: measured.time.as_secs(),
            packets_limit: allowance.packets.map(Limit::from),
            bytes_limit: allowance.bytes.map(Limit::from),
            proven: GroupReport::new(&measured.proven, allowance),
            others: GroupReport::new(&measured.others, allowance),
            apart: measured.apart,
            new_sources_per_second: measured.new.quantiles(),
            packets_per_second: measured.packets.quantiles(),
        }
    }
}

impl GroupReport {
    fn new(group: &Group, allowance: &Allowance) -> Self {
        let packets = allowance.packets.map_or(0, |it| group.packets.above(in_a_second(it)));
        let bytes = allowance.bytes.map_or(0, |it| group.bytes.above(in_a_second(it)));
        Self {
            sources: group.sources(),
            single_packet_sources: group.singles,
            packets: group.packets.quantiles(),
            bytes: group.bytes.quantiles(),
            packets_10s: group.sustained_packets.quantiles(),
            bytes_10s: group.sustained_bytes.quantiles(),
            over_limit: packets.max(bytes),
            top: group
                .top
                .iter()
                .map(|it| Heavy {
                    source: source_text(&it.source),
                    packets: it.packets,
                    bytes: it.bytes,
                })
                .collect(),
        }
    }
}

/// The most that passes in a second.
fn in_a_second(budget: Budget) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "rates are above 0 and far below 2^53"
    )]
    let rate = budget.rate.per_second().ceil() as u64;
    budget.burst.saturating_add(rate)
}

/// The first address of a source; none if this version does not know its space.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "the last 32 bits are the address")]
pub fn address(source: &WatchedSource) -> Option<IpAddr> {
    let WatchedSource { bits, space, .. } = *source;
    let v6 =
        |high: u64, low: u64| Some(Ipv6Addr::from(u128::from(high) << 64 | u128::from(low)).into());
    match space {
        it if it == Space::Ipv4 as u32 => Some(Ipv4Addr::from(bits as u32).into()),
        it if it == Space::Ipv6 as u32 => v6(bits, 0),
        it if it == Space::LinkLocal as u32 => v6(0xfe80 << 48, bits),
        it if it == Space::Nat64 as u32 => v6(0x0064_ff9b << 32, bits),
        it if it == Space::SixToFour as u32 => v6(0x2002 << 48 | bits << 16, 0),
        _ => None,
    }
}

/// A source as people write it: an address, or a network.
#[must_use]
pub fn source_text(source: &WatchedSource) -> String {
    let length = match source.space {
        it if it == Space::Ipv6 as u32 => "/64",
        it if it == Space::SixToFour as u32 => "/48",
        _ => "",
    };
    address(source).map_or_else(|| "unknown".to_owned(), |it| format!("{it}{length}"))
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use limiter_common::abi::ClassId;
    use limiter_common::packet::Source;

    use super::*;

    #[test]
    fn sources_are_written_as_networks_are() {
        for (address, text) in [
            ("198.51.100.7", "198.51.100.7"),
            ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
            ("fe80::1", "fe80::1"),
            ("64:ff9b::198.51.100.7", "64:ff9b::c633:6407"),
            ("2002:c633:6407:9::1", "2002:c633:6407::/48"),
        ] {
            let address: IpAddr = address.parse().expect("an address");
            let source = WatchedSource::new(Source::from(address), ClassId(1));
            assert_eq!(source_text(&source), text);
        }
    }
}
