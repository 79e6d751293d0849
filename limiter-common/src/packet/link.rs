//! Ethernet and VLAN tags.

use super::PacketView;

/// VLAN tags that are looked through (customer and service tag, IEEE 802.1Q and 802.1ad).
const MAX_TAGS: u32 = 2;

pub(super) enum Network {
    Ipv4,
    Ipv6,
    Arp,
    Other,
}

/// The network protocol and the offset of its header; `None` for a frame too short to say, or with
/// too many tags.
#[inline(always)]
pub(super) fn parse<V: PacketView + ?Sized>(view: &V) -> Option<(Network, u32)> {
    let mut offset = 12;
    let mut kind = u16::from_be_bytes(view.read(offset)?);
    for _ in 0..MAX_TAGS {
        if kind != 0x8100 && kind != 0x88a8 {
            break;
        }
        offset += 4;
        kind = u16::from_be_bytes(view.read(offset)?);
    }
    let network = match kind {
        0x0800 => Network::Ipv4,
        0x86dd => Network::Ipv6,
        0x0806 => Network::Arp,
        // The kernel looks through any number of priority tags, so a longer stack is not let by.
        0x8100 | 0x88a8 => return None,
        _ => Network::Other,
    };
    Some((network, offset + 2))
}
