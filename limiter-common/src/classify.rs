//! From a packet to its class, by table look-ups.
//!
//! Each table answers "which classes accept this value" as a set of up to 64 bits, in the order of
//! rules. The packet's class is the first that every table accepts; no rule is walked.

use crate::abi::{MAX_INTERFACES, Need, Settings, Slot};
use crate::packet::Packet;

/// The TTL, or hop limit, of a packet that no router has forwarded: the highest there is, and each
/// takes off one (RFC 5082 §3).
const FROM_LINK: u8 = 255;

/// The place in the order of rules of the class of a `packet` that arrived on `slot`; `None` if no class
/// takes it, which a configuration with its catch-all never lets happen.
#[inline(always)]
#[must_use]
pub fn classify(settings: &Settings, packet: &Packet, slot: Slot) -> Option<usize> {
    let mut accepting = settings.protocols[packet.protocol.index()];
    if settings.need.has(Need::DESTINATION_PORT) {
        accepting &= match packet.ports {
            Some(ports) => settings.destination_ports.accepting(ports.destination),
            None => settings.destination_ports.absent,
        };
    }
    if settings.need.has(Need::SOURCE_PORT) {
        accepting &= match packet.ports {
            Some(ports) => settings.source_ports.accepting(ports.source),
            None => settings.source_ports.absent,
        };
    }
    if settings.need.has(Need::LENGTH) {
        accepting &= settings.lengths.accepting(saturate(packet.length));
    }
    // One word, beside those that were read: to ask whether it is needed costs more than to read it.
    if packet.ttl != FROM_LINK {
        accepting &= settings.routed;
    }
    if settings.need.has(Need::INTERFACE) {
        accepting &= settings.interfaces[slot.index() % MAX_INTERFACES];
    }
    (accepting != 0).then(|| accepting.trailing_zeros() as usize)
}

/// The length as 16 bits, longer ones as (nearly) the most. Without a branch, so that the verifier
/// keeps sight of the bound.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the point of it")]
const fn saturate(length: u32) -> u16 {
    (length | 0_u32.wrapping_sub(length >> 16)) as u16
}
