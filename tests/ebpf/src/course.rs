//! What the benchmark's wrapper program and its driver in user space both read and write. Included by
//! path on the user side, so that the layout is written once.

/// [`Course::family`]: the source is an IPv4 address behind an untagged Ethernet header.
pub(crate) const FAMILY_IPV4: u32 = 4;
/// [`Course::family`]: the source is an IPv6 /64, likewise.
pub(crate) const FAMILY_IPV6: u32 = 6;

/// The sources that a program under test sees on a CPU, one after the other.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Course {
    /// The first source: an IPv4 address, or the upper half of an IPv6 address.
    pub(crate) base: u64,
    /// How many there are, less one; a power of two less one.
    pub(crate) mask: u64,
    /// 1: each drawn at random; 0: one after the other, each once a round.
    pub(crate) random: u32,
    /// One of the `FAMILY_` constants.
    pub(crate) family: u32,
    /// The number of the last run on this CPU.
    pub(crate) turn: u64,
}
