//! IPv4 (RFC 791).

use super::{Frame, Packet, PacketView, Source, l4};
use crate::abi::SourceAddress;

/// The packet at `offset`; `None` if it is malformed.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "fields of longer words")]
pub(super) fn parse<V: PacketView + ?Sized>(view: &V, offset: u32) -> Option<Frame> {
    /// "More fragments", and the offset of this one.
    const MORE: u32 = 0x2000;
    const OFFSET: u32 = 0x1fff;
    let [first, second] = view.words(offset)?;
    let (version, header, total) =
        (first >> 60, (first >> 56 & 0xf) as u32 * 4, (first >> 32) as u32 & 0xffff);
    let end = offset + total;
    let length = view.length(end);
    if version != 4 || header < 20 || total < header || end > length {
        return None;
    }
    let (fragment, protocol, source) = (first as u32, (second >> 48) as u8, second as u32);
    let is_first = fragment & OFFSET == 0;
    let l4 = l4::parse(view, protocol, is_first, offset + header, end)?;
    let is_fragment = fragment & (MORE | OFFSET) != 0;
    Some(Frame::Ip(Packet {
        source: Source::ipv4(source),
        address: SourceAddress::ipv4(source),
        protocol: l4.index.within(is_fragment).hidden(|value| view.opaque(value)),
        ports: l4.ports,
        ttl: (second >> 56) as u8,
        length,
    }))
}
