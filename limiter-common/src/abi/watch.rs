//! Watched sources: what each of a sample of sources sends in a class that is observed, all of its packets
//! counted.

use super::ClassId;
use crate::packet::Source;
use crate::verdict::Reason;

/// The most sources (in a class each) that are watched at a time.
pub const WATCHED: usize = 16_384;

/// Which sources are watched. The agent writes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Watching {
    /// Those whose hash has none of these bits ([`SourceHash::is_sampled`](crate::hash::SourceHash::is_sampled)):
    /// with n of them set, one in 2ⁿ.
    pub mask: u32,
    /// Not 0 once the map was full: no more are taken until the agent has made room. Written by the
    /// datapath, too, so that a flood from forged sources does not try in vain for each packet.
    pub full: u32,
}

/// Who is watched: a source in a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct WatchedSource {
    /// As in [`Source`].
    pub bits: u64,
    /// As in [`Source`]: a [`Space`](crate::packet::Space).
    pub space: u32,
    /// The class.
    pub class: ClassId,
}

impl WatchedSource {
    /// That source in that class.
    #[inline(always)]
    #[must_use]
    pub const fn new(source: Source, class: ClassId) -> Self {
        Self { bits: source.bits, space: source.space as u32, class }
    }

    /// All but the bits in one number, as the datapath hands it on.
    #[inline(always)]
    #[must_use]
    pub const fn owner(&self) -> u64 {
        self.space as u64 | (self.class.0 as u64) << 32
    }

    /// The inverse of [`owner`](Self::owner).
    #[inline(always)]
    #[must_use]
    pub const fn of_owner(bits: u64, owner: u64) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "one half each")]
        Self { bits, space: owner as u32, class: ClassId((owner >> 32) as u32) }
    }
}

/// What a watched source has sent since it is watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct WatchedCount {
    /// Packets.
    pub packets: u64,
    /// Bytes of whole frames.
    pub bytes: u64,
}

impl Reason {
    /// Whether a packet with this reason is one that the limit of its source would be chosen for: not one
    /// that no limit is asked about, nor one that cannot come from the source that it claims, nor an
    /// answer that this host asked for and that is over the limit.
    #[inline(always)]
    #[must_use]
    pub const fn is_measured(self) -> bool {
        const OTHERS: u32 = Reason::Exempt.bit()
            | Reason::Blocked.bit()
            | Reason::Martian.bit()
            | Reason::Bypass.bit()
            | Reason::NoSettings.bit()
            | Reason::Established.bit()
            | Reason::EstablishedRate.bit();
        OTHERS & self.bit() == 0
    }
}

const _: () = assert!(size_of::<Watching>() == 8);
const _: () = assert!(size_of::<WatchedSource>() == 16);
const _: () = assert!(size_of::<WatchedCount>() == 16);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::Space;

    #[test]
    fn an_owner_survives_its_number() {
        let source = Source { space: Space::SixToFour, bits: u64::MAX - 7 };
        let watched = WatchedSource::new(source, ClassId(126));
        assert_eq!(WatchedSource::of_owner(watched.bits, watched.owner()), watched);
    }
}
