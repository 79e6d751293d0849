//! Sampled drops: what the datapath shows of packets that it dropped, or would drop, while somebody
//! watches.

use super::{ClassId, Slot};
use crate::time::Nanos;
use crate::units::PacketLimit;
use crate::verdict::{Action, Family, Outcome, Reason};

/// What of a frame a sample holds at most, in bytes: Ethernet, two tags, IPv6 and room for some
/// extensions and the payload's beginning. A power of two, which is a bound that verifiers see.
pub const SAMPLE_BYTES: usize = 256;

/// The ring's size in bytes, a power of two: room for some 860 samples.
pub const SAMPLE_RING: usize = 256 << 10;

/// Which drops are sampled, and how many; all zero, none are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Sampling {
    /// Until when, by `CLOCK_MONOTONIC`. The agent moves it on while somebody watches, so that sampling
    /// ends without an agent. 0 is the switch: nothing else is read then.
    pub until: Nanos,
    /// How many samples all CPUs together may take.
    pub budget: PacketLimit,
    /// A bit for each [`ClassId`] that is looked at.
    pub classes: [u64; 2],
    /// A bit for each [`Slot`] that is looked at.
    pub slots: u32,
    /// A bit for each [`Reason`] that is looked at ([`Reason::bit`]).
    pub reasons: u32,
}

impl Sampling {
    /// None.
    pub const OFF: Self =
        Self { until: Nanos(0), budget: PacketLimit::NONE, classes: [0; 2], slots: 0, reasons: 0 };

    /// Every drop, within `budget`.
    #[must_use]
    pub const fn all(budget: PacketLimit, until: Nanos) -> Self {
        Self { until, budget, classes: [u64::MAX; 2], slots: u32::MAX, reasons: u32::MAX }
    }

    /// Whether packets with this outcome are looked at.
    #[inline(always)]
    #[must_use]
    pub const fn takes(&self, outcome: SampledOutcome) -> bool {
        let class = outcome.class as u32;
        let classes = self.classes[(class / 64 % 2) as usize];
        classes >> (class % 64) & 1 != 0
            && self.slots >> (outcome.slot as u32 % 32) & 1 != 0
            && self.reasons >> (outcome.reason as u32 % 32) & 1 != 0
    }
}

/// An [`Outcome`] in numbers, eight bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SampledOutcome {
    /// Its [`ClassId`].
    pub class: u16,
    /// Its [`Slot`].
    pub slot: u16,
    /// Its [`Reason`].
    pub reason: u8,
    /// Its [`Action`].
    pub action: u8,
    /// Its [`Family`].
    pub family: u8,
    /// Always 0.
    pub pad: u8,
}

impl SampledOutcome {
    /// All of it in one number, as the datapath hands it on.
    #[inline(always)]
    #[must_use]
    pub const fn pack(outcome: &Outcome) -> u64 {
        let Outcome { slot, family, class, reason, action } = outcome;
        let low = (class.0 & 0xffff) | (slot.0 << 16);
        let high = *reason as u32 | (*action as u32) << 8 | (*family as u32) << 16;
        low as u64 | (high as u64) << 32
    }

    /// The inverse of [`pack`](Self::pack).
    #[inline(always)]
    #[must_use]
    pub const fn unpack(packed: u64) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "one field each")]
        Self {
            class: packed as u16,
            slot: (packed >> 16) as u16,
            reason: (packed >> 32) as u8,
            action: (packed >> 40) as u8,
            family: (packed >> 48) as u8,
            pad: 0,
        }
    }

    /// Whether packets with this outcome become events: what is dropped, would be, or soon will be.
    #[inline(always)]
    #[must_use]
    pub const fn is_event(self) -> bool {
        self.action != Action::Pass as u8 || self.reason == Reason::NearLimit as u8
    }

    /// The outcome, if this version knows its numbers.
    #[must_use]
    pub fn outcome(self) -> Option<Outcome> {
        Some(Outcome {
            slot: Slot(self.slot.into()),
            family: *Family::ALL.get(usize::from(self.family))?,
            class: ClassId(self.class.into()),
            reason: *Reason::ALL.get(usize::from(self.reason))?,
            action: *Action::ALL.get(usize::from(self.action))?,
        })
    }
}

/// One dropped packet, or one that would be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Sample {
    /// When, by `CLOCK_MONOTONIC`.
    pub at: Nanos,
    /// What was decided.
    pub outcome: SampledOutcome,
    /// For how many packets it stands: those that were looked at on its CPU since the last sample
    /// there, itself included.
    pub weight: u64,
    /// The frame's length in bytes.
    pub length: u32,
    /// How many of `bytes` are the frame's; what follows them is of no meaning.
    pub captured: u32,
    /// The beginning of the frame.
    pub bytes: [u8; SAMPLE_BYTES],
}

/// What came of samples or of events, on each CPU, since the program was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SampleCount {
    /// Packets that were looked at.
    pub offered: u64,
    /// Samples written into the ring.
    pub written: u64,
    /// Samples that the budget allowed, and for which the ring had no room.
    pub lost: u64,
    /// Packets since the last sample. Events have that for each counter.
    pub since: u64,
}

impl SampleCount {
    /// The place of that of samples, and of the theoretical arrival time of their budget.
    pub const SAMPLES: u32 = 0;
    /// The same of events.
    pub const EVENTS: u32 = 1;
    /// How many places there are.
    pub const COUNT: usize = 2;
}

const _: () = assert!(size_of::<Sampling>() == 8 + 16 + 16 + 8);
const _: () = assert!(size_of::<SampledOutcome>() == 8);
const _: () = assert!(size_of::<Sample>() == 32 + SAMPLE_BYTES);
const _: () = assert!(size_of::<SampleCount>() == 32);

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(slot: u32, class: u32, reason: Reason) -> Outcome {
        Outcome {
            slot: Slot(slot),
            family: Family::Ipv6,
            class: ClassId(class),
            reason,
            action: Action::WouldDrop,
        }
    }

    #[test]
    fn an_outcome_survives_packing() {
        for outcome in [outcome(31, 126, Reason::Total), outcome(0, 0, Reason::NoSettings)] {
            let packed = SampledOutcome::pack(&outcome);
            assert_eq!(SampledOutcome::unpack(packed).outcome(), Some(outcome));
        }
        assert_eq!(SampledOutcome { reason: 99, ..SampledOutcome::default() }.outcome(), None);
    }

    #[test]
    fn only_what_was_asked_for_is_looked_at() {
        let takes = |sampling: Sampling, outcome: &Outcome| {
            sampling.takes(SampledOutcome::unpack(SampledOutcome::pack(outcome)))
        };
        let all = Sampling::all(PacketLimit::NONE, Nanos(1));
        let some = outcome(3, 70, Reason::Martian);
        assert!(takes(all, &some));
        assert!(!takes(Sampling { slots: !(1 << 3), ..all }, &some));
        assert!(!takes(Sampling { reasons: !Reason::Martian.bit(), ..all }, &some));
        assert!(!takes(Sampling { classes: [u64::MAX, !(1 << 6)], ..all }, &some));
        assert!(takes(Sampling { classes: [0, 1 << 6], ..all }, &some));
    }
}
