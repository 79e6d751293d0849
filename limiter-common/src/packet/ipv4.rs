//! IPv4 (RFC 791).

use super::{Frame, Packet, PacketView, Source, l4};
use crate::abi::SourceAddress;

/// The packet at `offset`; `None` if it is malformed.
#[inline(always)]
pub(super) fn parse<V: PacketView + ?Sized>(view: &V, offset: u32) -> Option<Frame> {
    let [version, _, len_hi, len_lo, _, _, frag_hi, frag_lo, _, protocol, _, _, a, b, c, d] =
        view.read::<16>(offset)?;
    let header = u32::from(version & 0x0f) * 4;
    let total = u32::from(u16::from_be_bytes([len_hi, len_lo]));
    if version >> 4 != 4 || header < 20 || total < header || offset + total > view.length() {
        return None;
    }
    let first = [frag_hi & 0x1f, frag_lo] == [0, 0];
    let l4 = l4::parse(view, protocol, first, offset + header, offset + total)?;
    let more = frag_hi & 0x20 != 0;
    Some(Frame::Ip(Packet {
        source: Source::ipv4([a, b, c, d]),
        address: SourceAddress {
            family: 4,
            bytes: [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        },
        protocol: if more || !first { l4.index.fragment() } else { l4.index },
        ports: l4.ports,
    }))
}
