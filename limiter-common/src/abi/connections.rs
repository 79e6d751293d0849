//! The open connections of sources as they lie in maps, see [`connections`](crate::connections).

/// Slots in a line: at half load, 8 sources in 10,000 find no room in theirs.
pub const CONNECTION_SLOTS: usize = 16;

/// The line of some sources: for each slot the bits of its source, and what is true of it.
pub type ConnectionLine = [u64; 2 * CONNECTION_SLOTS];

/// Which program counts connections, and what it could not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Hearing {
    /// The number of the program that counts. While one takes the place of another, both hear of each
    /// connection.
    pub instance: u64,
    /// Connections that were not counted, because their line was full.
    pub uncounted: u64,
}

const _: () = assert!(size_of::<Hearing>() == 16);
const _: () = assert!(size_of::<ConnectionLine>() == 256 && CONNECTION_SLOTS.is_power_of_two());
