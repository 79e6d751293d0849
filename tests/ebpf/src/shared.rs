//! What the generator program and its driver in user space both read and write. Included by path
//! on the user side, so that each layout is written once.

/// Binary digits of a nanosecond kept in [`Plan::interval`] and [`Progress::due`]: intervals are
/// exact to 1.5e-5 ns, and a flood may last 78 hours before `due` overflows.
pub(crate) const FRACTION_BITS: u32 = 16;

/// [`Plan::family`]: write IPv4 sources and mend the header checksum.
pub(crate) const FAMILY_IPV4: u32 = 4;
/// [`Plan::family`]: write IPv6 sources; transport checksums are left as they are.
pub(crate) const FAMILY_IPV6: u32 = 6;

/// Where in a frame a source address may start: room for two VLAN tags, and a power of two so
/// that a mask bounds it for the verifier.
pub(crate) const MAX_SOURCE_OFFSET: u32 = 64;

/// One flood, the same for all its CPUs. Times are those of `CLOCK_MONOTONIC`, in nanoseconds.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    /// No frame leaves before.
    pub(crate) start: u64,
    /// No frame leaves at or after.
    pub(crate) deadline: u64,
    /// Between two frames of one CPU, in units of 2^-[`FRACTION_BITS`] ns; 0 for no pace.
    pub(crate) interval: u64,
    /// A CPU that fell behind by more than this forgets the rest, in the units of `interval`.
    pub(crate) catch_up: u64,
    /// First source: the upper half of an IPv6 address.
    pub(crate) base_high: u64,
    /// First source: the lower half of an IPv6 address, or an IPv4 address.
    pub(crate) base_low: u64,
    /// Consecutive lower halves used below each upper half.
    pub(crate) per_prefix: u64,
    /// Sources in all.
    pub(crate) count: u64,
    /// CPUs that take part.
    pub(crate) lanes: u64,
    /// One of the `FAMILY_` constants; anything else leaves the template's source alone.
    pub(crate) family: u32,
    /// Bytes before the source address; at most [`MAX_SOURCE_OFFSET`].
    pub(crate) source_offset: u32,
    /// One's complement sum of the IPv4 header with source and checksum zero.
    pub(crate) checksum_base: u32,
    /// 1: a pseudo-random source for each frame; 0: one after the other.
    pub(crate) random: u32,
    /// Every so manieth frame is an honest one, of the sources below; 0: none is.
    pub(crate) honest_every: u64,
    /// How many honest sources there are, which take turns.
    pub(crate) honest_count: u64,
    /// The first honest source, as `base_high`. The next ones are one higher each.
    pub(crate) honest_high: u64,
    /// As `base_low`. IPv4: the next ones are one higher each; IPv6: their upper 16 bits are one lower
    /// each, which leaves the sum of the address and so all checksums as they are.
    pub(crate) honest_low: u64,
    /// Destination port of honest frames.
    pub(crate) honest_port: u32,
    /// Destination port of all others, where some are honest.
    pub(crate) flood_port: u32,
}

/// One CPU's part of a flood.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Progress {
    /// Frames left to send; set to 0 at the deadline.
    pub(crate) left: u64,
    /// Frames handed to the interface.
    pub(crate) sent: u64,
    /// When the next frame is due after [`Plan::start`], in the units of [`Plan::interval`].
    pub(crate) due: u64,
    /// Which of the [`Plan::lanes`] this is, from 0.
    pub(crate) lane: u64,
    /// When the first frame left.
    pub(crate) first: u64,
    /// When the last frame left.
    pub(crate) last: u64,
    /// The longest time between two frames.
    pub(crate) pause: u64,
}

/// What a counting program saw on one CPU.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Seen {
    /// Frames.
    pub(crate) packets: u64,
    /// Bytes of those frames, from the Ethernet header on.
    pub(crate) bytes: u64,
}
