//! What follows the network header: ports, flags and types.

use super::{PacketView, Ports, protocol};
use crate::abi::L4Index;

pub(super) struct L4 {
    pub(super) index: L4Index,
    pub(super) ports: Option<Ports>,
    pub(super) is_neighbour_discovery: bool,
}

/// Reads the header of `protocol` at `offset` in a packet that ends at `end`; `None` if it is
/// truncated. A fragment other than the `first` has no header to read.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "fields of longer words")]
pub(super) fn parse<V: PacketView + ?Sized>(
    view: &V,
    protocol: u8,
    first: bool,
    offset: u32,
    end: u32,
) -> Option<L4> {
    let mut l4 = L4 { index: L4Index::other(protocol), ports: None, is_neighbour_discovery: false };
    if !first {
        return Some(l4);
    }
    // The fixed part of each header (RFC 9293, 768, 9260, 792, 4443).
    let fixed = match protocol {
        protocol::TCP => 20,
        protocol::SCTP => 12,
        protocol::UDP | protocol::ICMP | protocol::ICMPV6 => 8,
        _ => return Some(l4),
    };
    if offset + fixed > end {
        return None;
    }
    let start = if protocol == protocol::TCP {
        let [start, rest] = view.words(offset)?;
        let header = (rest >> 28 & 0xf) as u32 * 4;
        if header < 20 || offset + header > end {
            return None;
        }
        l4.index = L4Index::tcp((rest >> 16) as u8);
        start
    } else {
        let [start] = view.words(offset)?;
        start
    };
    let kind = (start >> 56) as u8;
    match protocol {
        protocol::ICMP => l4.index = L4Index::icmp(kind),
        protocol::ICMPV6 => {
            l4.index = L4Index::icmpv6(kind);
            l4.is_neighbour_discovery = matches!(kind, 133..=137);
        }
        _ => {
            let (source, destination) = ((start >> 48) as u16, (start >> 32) as u16);
            l4.ports = Some(Ports { source, destination });
        }
    }
    Some(l4)
}
