//! IPv4 (RFC 791).

use super::{Frame, Packet, PacketView, Source, l4};
use crate::abi::SourceAddress;

/// The packet at `offset`; `None` if it is malformed.
#[inline(always)]
pub(super) fn parse<V: PacketView + ?Sized>(view: &V, offset: u32) -> Option<Frame> {
    let [version, _, len_hi, len_lo, _, _, frag_hi, frag_lo] = view.read(offset)?;
    let [_, protocol, _, _, source @ ..] = view.read::<8>(offset + 8)?;
    let header = u32::from(version & 0x0f) * 4;
    let total = u32::from(u16::from_be_bytes([len_hi, len_lo]));
    if version >> 4 != 4 || header < 20 || total < header || offset + total > view.length() {
        return None;
    }
    let first = [frag_hi & 0x1f, frag_lo] == [0, 0];
    let l4 = l4::parse(view, protocol, first, offset + header, offset + total)?;
    let more = frag_hi & 0x20 != 0;
    let source = u32::from_be_bytes(source);
    Some(Frame::Ip(Packet {
        source: Source::ipv4(source),
        address: SourceAddress::ipv4(source),
        protocol: if more || !first { l4.index.fragment() } else { l4.index },
        ports: l4.ports,
    }))
}
