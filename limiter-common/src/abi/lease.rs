//! Leases: exemptions that a service took with a credential, for the address it asked from.

use super::{MAX_INTERFACES, Name, Slot};
use crate::flows::Transport;
use crate::time::Nanos;
use crate::units::PacketLimit;

/// Places for leases, the first of which is [`Lease::ALL`].
pub const MAX_LEASES: usize = 1024;

/// Ranges of ports that a lease can have.
pub const LEASE_PORTS: usize = 6;

/// What a lease allows, on one cache line. The program reads it only before it would drop a packet, and
/// writes nothing of it but `tat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Lease {
    /// Theoretical arrival time of its cap, a [`Tick`](crate::time::Tick).
    pub tat: u64,
    /// It holds until then; 0 once it is revoked.
    pub until: Nanos,
    /// What may pass beyond the limits of the source: the address can be forged, so there is always one.
    pub cap: PacketLimit,
    /// A bit for each [`Slot`] that it holds on.
    pub slots: u32,
    /// Which ranges are TCP's (the lower half) and UDP's (the upper), a bit for each.
    pub protocols: u32,
    /// Destination ports.
    pub ports: [PortRange; LEASE_PORTS],
}

/// Ports, both ends included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PortRange {
    /// The lowest.
    pub first: u16,
    /// The highest.
    pub last: u16,
}

impl Lease {
    /// It allows nothing.
    pub const NONE: Self = Self {
        tat: 0,
        until: Nanos(0),
        cap: PacketLimit::NONE,
        slots: 0,
        protocols: 0,
        ports: [PortRange { first: 0, last: 0 }; LEASE_PORTS],
    };
    /// The place whose `until` is the latest of all: while that has passed, nothing is looked up.
    pub const ALL: u32 = 0;

    /// The bit in `protocols` of a range.
    #[inline(always)]
    #[must_use]
    pub const fn protocol(transport: Transport, range: usize) -> u32 {
        let half = match transport {
            Transport::Tcp => 0,
            Transport::Udp => 16,
        };
        1 << (half + range)
    }

    /// Whether it is for what arrives on `slot` for this port.
    #[inline(always)]
    #[must_use]
    pub fn is_for(&self, slot: Slot, transport: Transport, port: u16) -> bool {
        // A mask and not a comparison: kernel 6.1 forgets the latter when registers are short.
        if self.slots >> (slot.index() % MAX_INTERFACES) & 1 == 0 {
            return false;
        }
        let mut found = false;
        for (range, PortRange { first, last }) in self.ports.iter().enumerate() {
            let is_of = self.protocols & Self::protocol(transport, range) != 0;
            if is_of && *first <= port && port <= *last {
                found = true;
            }
        }
        found
    }
}

/// Who has a lease, by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Leaseholder {
    /// The place of the [`Lease`].
    pub place: u32,
    /// The serial number of the certificate, filled up with zeros in front; all zeros if it was a token.
    pub serial: [u8; 20],
    /// The name of the grant.
    pub name: Name,
}

const _: () = assert!(MAX_INTERFACES == u32::BITS as usize && LEASE_PORTS <= 16);
const _: () = assert!(size_of::<Lease>() == 64);
const _: () = assert!(size_of::<Leaseholder>() == 88);
