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
pub fn classify(settings: &Settings, packet: &Packet, length: u32) -> Option<usize> {
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
        accepting &= settings.lengths.accepting(u16::try_from(length).unwrap_or(u16::MAX));
    }
    (accepting != 0).then(|| accepting.trailing_zeros() as usize)
}
