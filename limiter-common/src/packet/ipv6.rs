//! IPv6 (RFC 8200) and its extension headers.

use super::{Frame, Packet, PacketView, Source, l4, protocol};
use crate::verdict::Family;

/// Extension headers that are walked; a longer chain is malformed. RFC 8504 §5.3 lets a host limit
/// the chain; 8 is one more than every kind of them once.
const MAX_EXTENSIONS: u32 = 8;

/// The packet at `offset`; `None` if it is malformed.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "fields of longer words")]
pub(super) fn parse<V: PacketView + ?Sized>(view: &V, offset: u32) -> Option<Frame> {
    let [first, high, low] = view.words(offset)?;
    let (version, next, hop_limit) = (first >> 60, (first >> 8) as u8, first as u8);
    let payload = offset + 40;
    let end = payload + (first >> 16 & 0xffff) as u32;
    let length = view.length(end);
    if version != 6 || end > length {
        return None;
    }
    let chain = walk(view, next, payload, end)?;
    let l4 = l4::parse(view, chain.protocol, chain.first, chain.offset, end)?;
    // RFC 6980: neighbour discovery is never fragmented.
    if l4.is_neighbour_discovery && hop_limit == 255 && !chain.fragmented {
        return Some(Frame::Neighbour(Family::Ipv6));
    }
    let source = Source::ipv6(high, low);
    Some(Frame::Ip(Packet {
        source,
        address: source.address(high, low),
        protocol: l4.index.within(chain.fragmented).hidden(|value| view.opaque(value)),
        ports: l4.ports,
        ttl: hop_limit,
        length,
    }))
}

/// Where the chain of extension headers ends.
struct Chain {
    protocol: u8,
    offset: u32,
    fragmented: bool,
    first: bool,
}

#[inline(always)]
fn walk<V: PacketView + ?Sized>(view: &V, next: u8, offset: u32, end: u32) -> Option<Chain> {
    let mut chain = Chain { protocol: next, offset, fragmented: false, first: true };
    for _ in 0..=MAX_EXTENSIONS {
        let extension = matches!(
            chain.protocol,
            protocol::HOP_BY_HOP
                | protocol::ROUTING
                | protocol::DESTINATION
                | protocol::MOBILITY
                | protocol::FRAGMENT
                | protocol::AUTHENTICATION
        );
        // What follows in a non-first fragment is payload, whatever the next header says.
        if !extension || !chain.first {
            return Some(chain);
        }
        let [next, length, frag_hi, frag_lo] = view.read::<4>(chain.offset)?;
        let length = u32::from(length);
        let size = match chain.protocol {
            protocol::FRAGMENT => {
                let fragment = u16::from_be_bytes([frag_hi, frag_lo]);
                chain.first = fragment & 0xfff8 == 0;
                // An "atomic" fragment (RFC 6946) is a whole packet.
                chain.fragmented |= fragment & 0xfff9 != 0;
                8
            }
            // RFC 4302 §2.2: in 4-octet units, minus 2.
            protocol::AUTHENTICATION => (length + 2) * 4,
            _ => (length + 1) * 8,
        };
        chain.offset = view.opaque(chain.offset + size);
        if chain.offset > end {
            return None;
        }
        chain.protocol = next;
    }
    None
}
