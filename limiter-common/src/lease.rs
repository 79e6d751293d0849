//! Leases: what a service may send beyond the limits of its address, because it has shown a credential
//! from there.
//!
//! Its packets are packets from an address all the same, which anybody can forge. So a lease has a cap,
//! and holds for some ports on some interfaces only. Like the host's own flows ([`flows`](crate::flows))
//! it is looked up only where a packet would be dropped, so it costs other packets nothing.

use crate::Env;
use crate::abi::{Settings, Slot};
use crate::bucket::{self, Moment};
use crate::flows::{Answer, Asked, Flow};
use crate::packet::Packet;
use crate::time::{Clock, Nanos};
use crate::verdict::Reason;

/// What is asked about a packet: where it came in, from whom, and for which port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arriving {
    /// The flow that it would be an answer on, of which the remote port says nothing here.
    pub flow: Flow,
    /// The interface.
    pub slot: Slot,
}

impl Arriving {
    /// All of it in three numbers, to hand to a function of the kernel side.
    #[inline(always)]
    #[must_use]
    pub const fn to_parts(&self) -> [u64; 3] {
        let [high, low, rest] = self.flow.to_parts();
        // A flow leaves sixteen bits.
        [high, low, rest | (self.slot.0 as u64) << 48]
    }

    /// What [`to_parts`](Self::to_parts) made.
    #[inline(always)]
    #[must_use]
    pub const fn from_parts(parts: [u64; 3]) -> Self {
        Self { flow: Flow::from_parts(parts), slot: Slot((parts[2] >> 48) as u32) }
    }
}

/// What becomes of a packet that is dropped for `reason`, if that is about how much there is: its source
/// may have a lease.
#[inline(always)]
pub(crate) fn ask<E: Env>(
    reason: Reason,
    asked: Asked,
    (packet, slot): (&Packet, Slot),
    now: Nanos,
    settings: &Settings,
    env: &E,
) -> Reason {
    let is_about_much = reason.gives_way() || reason == Reason::EstablishedRate;
    if !is_about_much || settings.drops & reason.bit() == 0 || !asked.has_ports() {
        return reason;
    }
    if now >= env.leased_until() {
        return reason;
    }
    let arriving = Arriving { flow: asked.flow(packet.address), slot };
    match env.leased(&arriving, now, settings) {
        Answer::NONE => reason,
        Answer::WITHIN => Reason::Lease,
        _ => Reason::LeaseRate,
    }
}

/// The answer of an [`Env`] about a packet while there is any lease.
#[inline(always)]
pub fn answer<E: Env>(arriving: &Arriving, now: Nanos, settings: &Settings, env: &E) -> Answer {
    let Arriving { flow, slot } = arriving;
    let Some((lease, cell)) = env.lease(flow.remote) else { return Answer::NONE };
    if now >= lease.until || !lease.is_for(*slot, flow.transport, flow.local_port) {
        return Answer::NONE;
    }
    let mut moment = Moment::new(now.into(), || env.now(Clock::FINE, settings).into());
    if bucket::admit(&cell, &mut moment, lease.cap.cost(), lease.cap.tolerance()) {
        Answer::WITHIN
    } else {
        Answer::OVER
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{Lease, PortRange, SourceAddress};
    use crate::flows::Transport;

    #[test]
    fn a_question_comes_back_from_its_parts() {
        let flow = Flow {
            remote: SourceAddress::ipv6(1, 2),
            remote_port: 0xffff,
            local_port: 0xfffe,
            transport: Transport::Udp,
        };
        for slot in [0, 1, 31] {
            let it = Arriving { flow, slot: Slot(slot) };
            assert_eq!(Arriving::from_parts(it.to_parts()), it);
        }
    }

    #[test]
    fn a_lease_is_for_its_interfaces_protocols_and_ports() {
        let (tcp, udp) = (Transport::Tcp, Transport::Udp);
        let mut lease = Lease { slots: 1 << 3 | 1 << 31, ..Lease::NONE };
        lease.ports[0] = PortRange { first: 443, last: 443 };
        lease.ports[5] = PortRange { first: 8000, last: 8100 };
        lease.protocols =
            Lease::protocol(tcp, 0) | Lease::protocol(udp, 0) | Lease::protocol(udp, 5);
        for (slot, transport, port, expected) in [
            (3, tcp, 443, true),
            (31, udp, 443, true),
            (2, tcp, 443, false),
            (0, tcp, 443, false),
            (3, tcp, 442, false),
            (3, tcp, 444, false),
            (3, udp, 8000, true),
            (3, udp, 8100, true),
            (3, udp, 8101, false),
            (3, tcp, 8050, false),
            // The ranges that it does not use are no port 0.
            (3, tcp, 0, false),
            (3, udp, 0, false),
        ] {
            assert_eq!(lease.is_for(Slot(slot), transport, port), expected, "{slot} {port}");
        }
    }
}
