//! From frame bytes to what a decision needs: who sent it, and what it is.

mod ipv4;
mod ipv6;
mod l4;
mod link;
mod source;

pub use source::{Source, Space};

use crate::abi::{AddressFamily, L4Index, SourceAddress};
use crate::verdict::Family;

/// A received frame. The kernel side reads packet memory, tests read a slice.
pub trait PacketView {
    /// The length of the frame in bytes, for a packet that ends at `end`: of its first buffer if the
    /// packet lies in that, else of all buffers together, which the kernel takes longer to say.
    fn length(&self, end: u32) -> u32;

    /// The `N` bytes at `offset`, or `None` where the frame ends before `offset + N`.
    fn read<const N: usize>(&self, offset: u32) -> Option<[u8; N]>;

    /// The same for `N` words of eight bytes in network order.
    fn words<const N: usize>(&self, offset: u32) -> Option<[u64; N]>;

    /// Returns `value`. The kernel side hides from the verifier what it knows of it, so that paths
    /// that differ only in this value are checked once and not once each: without that, the walk
    /// over IPv6 extensions alone multiplies the paths through everything behind it by ten.
    #[inline(always)]
    fn opaque(&self, value: u32) -> u32 {
        value
    }
}

impl PacketView for [u8] {
    fn length(&self, _end: u32) -> u32 {
        u32::try_from(self.len()).unwrap_or(u32::MAX)
    }

    fn read<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        self.get(offset as usize..)?.first_chunk().copied()
    }

    fn words<const N: usize>(&self, offset: u32) -> Option<[u64; N]> {
        let bytes = self.get(offset as usize..)?.get(..8 * N)?;
        let mut words = [0; N];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_be_bytes(*bytes.first_chunk()?);
        }
        Some(words)
    }
}

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Neither IP nor ARP.
    NonIp,
    /// ARP, or neighbour discovery that a router cannot have forwarded (hop limit 255, RFC 4861
    /// §7.1): what the host needs to have a link at all.
    Neighbour(Family),
    /// An IP packet.
    Ip(Packet),
    /// A frame whose headers are truncated, over-long or contradict themselves.
    Malformed(Family),
}

/// An IP packet, as far as decisions need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Whose bucket it meets.
    pub source: Source,
    /// The source address as written, for prefixes.
    pub address: SourceAddress,
    /// Protocol, flags, type, fragment.
    pub protocol: L4Index,
    /// Source and destination port; `None` for protocols without ports and non-first fragments.
    pub ports: Option<Ports>,
    /// Its TTL or hop limit.
    pub ttl: u8,
    /// The length of its frame in bytes.
    pub length: u32,
}

/// The ports of a TCP, UDP or SCTP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    /// The sender's.
    pub source: u16,
    /// Ours.
    pub destination: u16,
}

impl Packet {
    /// The family it is counted under.
    #[inline(always)]
    #[must_use]
    pub const fn family(&self) -> Family {
        match self.address.family {
            AddressFamily::Ipv4 => Family::Ipv4,
            AddressFamily::Ipv6 => Family::Ipv6,
        }
    }
}

/// Reads the headers of a frame. Never reads beyond it, and never takes one header for another:
/// where a length does not add up, the frame is [`Frame::Malformed`].
#[inline(always)]
pub fn parse<V: PacketView + ?Sized>(view: &V) -> Frame {
    let (network, offset) = match link::parse(view) {
        Some((network, offset)) => (network, view.opaque(offset)),
        None => return Frame::Malformed(Family::Other),
    };
    match network {
        link::Network::Ipv4 => ipv4::parse(view, offset).unwrap_or(Frame::Malformed(Family::Ipv4)),
        link::Network::Ipv6 => ipv6::parse(view, offset).unwrap_or(Frame::Malformed(Family::Ipv6)),
        link::Network::Arp => Frame::Neighbour(Family::Other),
        link::Network::Other => Frame::NonIp,
    }
}

/// Internet protocol numbers that are read further (IANA).
mod protocol {
    pub(super) const HOP_BY_HOP: u8 = 0;
    pub(super) const ICMP: u8 = 1;
    pub(super) const TCP: u8 = 6;
    pub(super) const UDP: u8 = 17;
    pub(super) const ROUTING: u8 = 43;
    pub(super) const FRAGMENT: u8 = 44;
    pub(super) const AUTHENTICATION: u8 = 51;
    pub(super) const ICMPV6: u8 = 58;
    pub(super) const DESTINATION: u8 = 60;
    pub(super) const SCTP: u8 = 132;
    pub(super) const MOBILITY: u8 = 135;
}

#[cfg(test)]
mod tests;
