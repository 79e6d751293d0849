//! Events: a sample of what is dropped, would be dropped, or soon will be, always on and within a budget.

use super::SampledOutcome;
use crate::time::Nanos;

/// What of a frame an event holds at most, in bytes: Ethernet, two tags, IPv6 with an extension, and
/// ports. The agent parses it, so that the datapath need not do so twice.
pub const EVENT_BYTES: usize = 96;

/// The ring's size in bytes, a power of two: room for some 3,850 events, about a second's.
pub const EVENT_RING: usize = 512 << 10;

/// One packet, and those like it for which it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Event {
    /// When, by `CLOCK_MONOTONIC`.
    pub at: Nanos,
    /// What was decided.
    pub outcome: SampledOutcome,
    /// For how many packets it stands: those with this outcome on its CPU since the last event there,
    /// itself included.
    pub weight: u32,
    /// The frame's length in bytes.
    pub length: u32,
    /// How many of `bytes` are the frame's; what follows them is of no meaning.
    pub captured: u32,
    /// Always 0.
    pub pad: u32,
    /// The beginning of the frame.
    pub bytes: [u8; EVENT_BYTES],
}

/// When the next packet of a counter's cell is an event; all zero, the first is.
/// See [`pace`](crate::pace).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Pace {
    /// A packet is one if the cell's count is above this.
    pub next: u64,
    /// The lower half of the cell's count at its last event.
    pub shown: u32,
    /// When that was, in [`pace::Moments`](crate::pace::Moments).
    pub at: u32,
}

const _: () = assert!(size_of::<Event>() == 32 + EVENT_BYTES);
const _: () = assert!(size_of::<Pace>() == 16);
