//! From a packet to its class, by table look-ups.
//!
//! Each table answers "which classes accept this value" as a set of up to 64 bits, in the order of
//! rules. The packet's class is the first that every table accepts; no rule is walked.

use crate::abi::{Need, Settings};
use crate::packet::Packet;

/// The place of the packet's class in the order of rules; `None` if no class takes it, which a
/// configuration with its catch-all never lets happen.
#[inline(always)]
#[must_use]
pub fn classify(settings: &Settings, packet: &Packet) -> Option<usize> {
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
    (accepting != 0).then(|| accepting.trailing_zeros() as usize)
}

/// The length as 16 bits, longer ones as (nearly) the most. Without a branch, so that the verifier
/// keeps sight of the bound.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the point of it")]
const fn saturate(length: u32) -> u16 {
    (length | 0_u32.wrapping_sub(length >> 16)) as u16
}
