//! The flows that this host opened: what comes back on them is an answer, and is not dropped with a
//! flood that claims to come from the same address.
//!
//! A flow is marked when the host opens it, in a filter like those of sources ([`known`](crate::known)),
//! and looked up only where a packet would be dropped. What hits falls under one limit of all flows
//! together and not under one of each source: a filter takes some flows for others, and a share of a
//! forged flood must not become so many sources with a limit each.

use crate::Env;
use crate::abi::{AddressFamily, BudgetCell, L4Index, Settings, SourceAddress};
use crate::bucket::{self, Moment};
use crate::hash::SourceHash;
use crate::known::{Filter, Known, Mark, Seen};
use crate::packet::Packet;
use crate::time::{Nanos, Tick};
use crate::verdict::Reason;

/// Whom this host speaks with, and by which ports. Its own address is not in it: where addresses are
/// translated on the way out (masquerading), ports mostly stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// The other end, as [`Packet::address`] has it: all 128 bits of an IPv6 address.
    pub remote: SourceAddress,
    /// Its port.
    pub remote_port: u16,
    /// This host's port.
    pub local_port: u16,
    /// The protocol.
    pub transport: Transport,
}

/// The protocols whose flows are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Transport {
    /// TCP.
    Tcp = 6,
    /// UDP.
    Udp = 17,
}

impl Transport {
    /// The filter that its flows are marked in.
    #[inline(always)]
    #[must_use]
    pub const fn filter(self) -> Filter {
        match self {
            Self::Tcp => Filter::Connections,
            Self::Udp => Filter::Datagrams,
        }
    }
}

impl Flow {
    /// The flow that a received packet would be an answer on. A fragment has none, since all but the
    /// first lack the ports.
    #[inline(always)]
    #[must_use]
    pub const fn answered_by(packet: &Packet) -> Option<Self> {
        const TCP: usize = L4Index::tcp(0).index();
        const LAST_TCP: usize = L4Index::tcp(u8::MAX).index();
        const UDP: usize = L4Index::other(Transport::Udp as u8).index();
        let Some(ports) = packet.ports else { return None };
        let transport = match packet.protocol.index() {
            TCP..=LAST_TCP => Transport::Tcp,
            UDP => Transport::Udp,
            _ => return None,
        };
        let (remote_port, local_port) = (ports.source, ports.destination);
        Some(Self { remote: packet.address, remote_port, local_port, transport })
    }

    /// What the hash takes beside the address.
    #[inline(always)]
    pub(crate) const fn rest(&self) -> u64 {
        let family = match self.remote.family {
            AddressFamily::Ipv4 => 4,
            AddressFamily::Ipv6 => 6,
        };
        (self.remote_port as u64) << 32
            | (self.local_port as u64) << 16
            | (self.transport as u64) << 8
            | family
    }

    /// Notes that this host opened it, or uses it still. Nothing is written if that was noted in the
    /// present generation.
    #[inline(always)]
    pub fn open<K: Known>(self, known: &K, hash: SourceHash, now: Nanos) {
        let (mark, filter) = (Mark::of(hash), self.transport.filter());
        if mark.find(known, filter, now) != Seen::LATELY {
            mark.set(known, filter, now);
        }
    }
}

/// What becomes of a packet that would be dropped, if it is an answer on a flow that this host opened:
/// then the limit of all such flows decides. `now` is by the coarse clock, as for all filters.
#[inline(always)]
pub(crate) fn answer<E: Env>(
    packet: &Packet,
    now: Nanos,
    moment: &mut Moment<impl Fn() -> Tick>,
    settings: &Settings,
    env: &E,
) -> Option<Reason> {
    let limit = &settings.established;
    if !limit.is_limited() {
        return None;
    }
    let flow = Flow::answered_by(packet)?;
    let hash = env.key().flow(&flow);
    let known = env.flow(hash)?;
    if Mark::of(hash).find(&known, flow.transport.filter(), now) == Seen::NOT {
        return None;
    }
    let cell = env.budget(BudgetCell::established())?;
    if bucket::admit(&cell, moment, limit.cost(), limit.tolerance()) {
        Some(Reason::Established)
    } else {
        Some(Reason::EstablishedRate)
    }
}

#[cfg(test)]
mod tests;
