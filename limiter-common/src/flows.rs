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
use crate::time::{Clock, Nanos};
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

    /// All of it in three numbers, to hand to a function of the kernel side.
    #[inline(always)]
    #[must_use]
    pub const fn to_parts(&self) -> [u64; 3] {
        [self.remote.high, self.remote.low, self.rest()]
    }

    /// What [`to_parts`](Self::to_parts) made.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "fields of a longer word")]
    pub const fn from_parts([high, low, rest]: [u64; 3]) -> Self {
        let family = if rest & 0xff == 4 { AddressFamily::Ipv4 } else { AddressFamily::Ipv6 };
        let is_tcp = rest >> 8 & 0xff == Transport::Tcp as u64;
        Self {
            remote: SourceAddress { family, high, low },
            remote_port: (rest >> 32) as u16,
            local_port: (rest >> 16) as u16,
            transport: if is_tcp { Transport::Tcp } else { Transport::Udp },
        }
    }

    /// Notes that this host opened it, or uses it still. Nothing is written if that was noted in the
    /// present generation.
    #[inline(always)]
    pub fn open<K: Known>(self, port: &K, place: &K, hash: SourceHash, now: Nanos) {
        let filter = self.transport.filter();
        for (known, mark) in [(port, Mark::of_port(self.local_port)), (place, Mark::of(hash))] {
            if mark.find(known, filter, now) != Seen::LATELY {
                mark.set(known, filter, now);
            }
        }
    }
}

/// The place of a port among the [`FLOW_PORTS`](crate::abi::FLOW_PORTS) first places of the filter.
#[inline(always)]
#[must_use]
pub const fn port_place(port: u16) -> u32 {
    (port >> 5) as u32
}

/// Whether a packet is an answer on a flow that this host opened, and within the limit of all of them. A
/// number, like [`Standing`](crate::known::Standing).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer(pub u32);

impl Answer {
    /// It is none.
    pub const NONE: Self = Self(0);
    /// It is one.
    pub const WITHIN: Self = Self(1);
    /// It is one too many.
    pub const OVER: Self = Self(2);
}

/// What of a packet's headers the question takes, read before anything else is asked and hidden from the
/// verifier: what is compared at the end would keep it from taking paths together all the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    /// The ports, the remote one in the upper half.
    ports: u32,
    /// Protocol and family, as in [`Flow::to_parts`]; 0 if the packet is no answer on any flow.
    kind: u32,
}

impl Asked {
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "fields of a longer word")]
    pub(crate) fn of(packet: &Packet, hide: impl Fn(u32) -> u32) -> Self {
        let rest = Flow::answered_by(packet).map_or(0, |flow| flow.rest());
        Self { ports: hide((rest >> 16) as u32), kind: hide((rest & 0xffff) as u32) }
    }

    /// Whether the packet could be an answer on a flow: it is TCP or UDP, and has its ports.
    #[inline(always)]
    pub(crate) const fn has_ports(self) -> bool {
        self.kind != 0
    }

    /// That flow, if it has ports, for a packet from `remote`.
    #[inline(always)]
    pub(crate) fn flow(self, remote: SourceAddress) -> Flow {
        let SourceAddress { high, low, .. } = remote;
        Flow::from_parts([high, low, u64::from(self.ports) << 16 | u64::from(self.kind)])
    }
}

/// What becomes of a packet that is dropped for `reason`, if that is about how much there is: it may be
/// an answer that this host waits for.
///
/// First, whether any flow is open on the packet's port. A flood mostly is on a port that this host
/// serves, or on all of them, and costs no look at a flow then.
#[inline(always)]
pub(crate) fn ask<E: Env>(
    reason: Reason,
    asked: Asked,
    packet: &Packet,
    now: Nanos,
    settings: &Settings,
    env: &E,
) -> Reason {
    if !reason.gives_way() || settings.drops & reason.bit() == 0 || !asked.has_ports() {
        return reason;
    }
    if !settings.established.is_limited() {
        return reason;
    }
    let flow = asked.flow(packet.address);
    let Some(port) = env.flow_port(flow.local_port) else { return reason };
    let filter = flow.transport.filter();
    if Mark::of_port(flow.local_port).find(&port, filter, now) == Seen::NOT {
        return reason;
    }
    match env.answer(&flow, now, settings) {
        Answer::NONE => reason,
        Answer::WITHIN => Reason::Established,
        _ => Reason::EstablishedRate,
    }
}

/// The answer of an [`Env`] about a packet of `flow`, on whose port some flow is open.
#[inline(always)]
pub fn answer<E: Env>(flow: &Flow, now: Nanos, settings: &Settings, env: &E) -> Answer {
    let hash = env.key().flow(flow);
    let Some(known) = env.flow(hash) else { return Answer::NONE };
    if Mark::of(hash).find(&known, flow.transport.filter(), now) == Seen::NOT {
        return Answer::NONE;
    }
    let Some(cell) = env.budget(BudgetCell::established()) else { return Answer::NONE };
    let (cost, tolerance) = (settings.established.cost(), settings.established.tolerance());
    let mut moment = Moment::new(now.into(), || env.now(Clock::FINE, settings).into());
    if bucket::admit(&cell, &mut moment, cost, tolerance) { Answer::WITHIN } else { Answer::OVER }
}

#[cfg(test)]
mod tests;
