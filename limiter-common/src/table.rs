//! The bucket table: slots in cache lines, without storage.
//!
//! A bucket is found by what it is (exact source and class), in one of two lines that its hash
//! names; the second is looked at only when the first does not have it. A slot whose bucket is full
//! again is as good as free: a full bucket is the same as none. So nothing has to be cleared, and
//! replacing such a slot loses nothing.
//!
//! **Races.** A slot is owned by whoever its [`Meta`] names. To take one, a CPU swaps its meta from
//! what it saw to [`Meta::BUSY`], writes the rest and then the new meta; a CPU that looks meanwhile
//! sees no bucket there. A reader checks the meta again after it has read the source, so it never
//! takes one owner's policy for another's. Two CPUs that make a bucket for the same source at the
//! same time see the same slots and mostly choose the same one; the loser of the swap looks again. If
//! they chose two (a slot filled up in between), the later packets all find the first in order, and
//! the other was charged with at most one packet of each CPU. A charge that comes between a slot's
//! change of owners goes to the new owner: one packet's cost, once.

use crate::abi::{ClassId, PolicyId};
use crate::packet::{Source, Space};
use crate::time::Tick;
use crate::units::MAX_TOLERANCE;

/// What a slot holds beside the source itself: class, space, whether the source is proven, and the
/// cached policy with the epoch it was resolved under.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Meta(pub u32);

impl Meta {
    /// Never used.
    pub const EMPTY: Self = Self(0);
    /// Being taken by some CPU.
    pub const BUSY: Self = Self(Self::CLASS);

    /// The class; class ids are below 127, and 0 is no class.
    const CLASS: u32 = 0x7f;
    const SPACE_SHIFT: u32 = 7;
    const OWNER: u32 = 0x1ff;
    const PROVEN: u32 = 1 << 9;
    const EPOCH_SHIFT: u32 = 10;
    const EPOCH: u32 = 0xff;
    const POLICY_SHIFT: u32 = 18;
    /// A policy whose number does not fit is resolved for each packet.
    const UNCACHED: u32 = 0x3fff;

    /// The bucket of a source of `space` in `class`, nothing cached.
    #[inline(always)]
    #[must_use]
    pub const fn owner(space: Space, class: ClassId) -> Self {
        // IPv4 has a table of its own, so two bits tell the other spaces apart.
        Self((class.0 & Self::CLASS) | (space as u32 & 3) << Self::SPACE_SHIFT)
    }

    /// The same with a policy as of `epoch`.
    #[inline(always)]
    #[must_use]
    pub const fn with_policy(self, epoch: u32, policy: PolicyId) -> Self {
        let policy = if policy.0 < Self::UNCACHED { policy.0 } else { Self::UNCACHED };
        let kept = self.0 & (Self::OWNER | Self::PROVEN);
        Self(kept | (epoch & Self::EPOCH) << Self::EPOCH_SHIFT | policy << Self::POLICY_SHIFT)
    }

    /// The same with the owner proven or not.
    #[inline(always)]
    #[must_use]
    pub const fn with_proven(self, is_proven: bool) -> Self {
        Self(self.0 & !Self::PROVEN | if is_proven { Self::PROVEN } else { 0 })
    }

    /// Whether the owner was proven when this was written.
    #[inline(always)]
    #[must_use]
    pub const fn is_proven(self) -> bool {
        self.0 & Self::PROVEN != 0
    }

    /// Whether it was last written under `epoch` (modulo 256: the agent renews older ones in time).
    #[inline(always)]
    #[must_use]
    pub const fn is_of(self, epoch: u32) -> bool {
        (self.0 >> Self::EPOCH_SHIFT ^ epoch) & Self::EPOCH == 0
    }

    /// The cached policy, if there is one of `epoch`.
    #[inline(always)]
    #[must_use]
    pub const fn policy(self, epoch: u32) -> Option<PolicyId> {
        let policy = self.0 >> Self::POLICY_SHIFT;
        if policy == Self::UNCACHED || !self.is_of(epoch) { None } else { Some(PolicyId(policy)) }
    }

    /// The same without a cached policy.
    #[inline(always)]
    #[must_use]
    pub const fn forgotten(self) -> Self {
        Self(self.0 | Self::UNCACHED << Self::POLICY_SHIFT)
    }

    /// Whose bucket it is; none for a slot that is empty or being taken.
    #[must_use]
    pub const fn class(self) -> Option<ClassId> {
        let class = self.0 & Self::CLASS;
        if class == 0 || class == Self::CLASS { None } else { Some(ClassId(class)) }
    }

    /// In the IPv6 table, whether the source's bits are the first of its address: not those of link-local
    /// and translated ones.
    #[must_use]
    pub const fn is_of_prefix(self) -> bool {
        self.0 >> Self::SPACE_SHIFT & 3 == Space::Ipv6 as u32
    }

    /// Whether the slot is that of the source and class of `owner`, if it holds the same bits.
    #[inline(always)]
    #[must_use]
    pub const fn has_owner(self, owner: Self) -> bool {
        self.0 & Self::OWNER == owner.0 & Self::OWNER
    }

    #[inline(always)]
    const fn is_busy(self) -> bool {
        self.0 & Self::CLASS == Self::CLASS
    }
}

/// A line of slots in shared memory.
pub trait Line {
    /// Slots in it.
    const SLOTS: u32;
    /// With so many slots in use, a new source takes its second line if that has fewer. The fewer it
    /// is, the more evenly the lines fill, and the more look-ups read two of them.
    const CROWDED: u32;

    /// A slot's meta.
    fn meta(&self, slot: u32) -> Meta;
    /// Stores `new` if it is `current`, and returns what it was.
    fn swap_meta(&self, slot: u32, current: Meta, new: Meta) -> Meta;
    /// A slot's source.
    fn source(&self, slot: u32) -> u64;
    /// Writes it.
    fn set_source(&self, slot: u32, bits: u64);
    /// The later of a slot's theoretical arrival times.
    fn busy_until(&self, slot: u32, now: Tick) -> Tick;
    /// Sets a slot's theoretical arrival times, so that its bucket is full at `now`.
    fn fill(&self, slot: u32, now: Tick);

    /// Returns `value`. The kernel side hides it from the verifier behind `unknown`, which would check
    /// what follows once for each state that the slots of a line can be in.
    #[inline(always)]
    #[must_use]
    fn opaque(value: u32, _unknown: Meta) -> u32 {
        value
    }
}

/// What is looked for: a source's bits and the owner part of its meta.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    bits: u64,
    owner: Meta,
}

impl Wanted {
    /// The bucket of `source` in `class`.
    #[inline(always)]
    #[must_use]
    pub const fn new(source: Source, class: ClassId) -> Self {
        Self { bits: source.bits, owner: Meta::owner(source.space, class) }
    }

    /// The bucket of the source with these bits that `meta` says whose it is.
    #[inline(always)]
    #[must_use]
    pub const fn of(bits: u64, meta: Meta) -> Self {
        Self { bits, owner: meta }
    }

    /// Its slot in `line`, with its meta.
    #[inline(always)]
    pub fn find<L: Line>(&self, line: &L) -> Option<(u32, Meta)> {
        let (slot, meta) = self.locate(line);
        (slot != L::SLOTS).then_some((slot, meta))
    }

    /// Its slot in `line`, with its meta; [`Line::SLOTS`] if it is not there. Not an `Option`, of which
    /// the compiler leaves a half unwritten that verifiers see it read.
    #[inline(always)]
    pub fn locate<L: Line>(&self, line: &L) -> (u32, Meta) {
        for slot in 0..L::SLOTS {
            let meta = line.meta(slot);
            if !meta.has_owner(self.owner) || line.source(slot) != self.bits {
                continue;
            }
            // Changed meanwhile: perhaps only its policy, perhaps its owner, to one of this class.
            let again = line.meta(slot);
            if again.has_owner(self.owner) {
                return (slot, if again == meta { meta } else { again.forgotten() });
            }
        }
        (L::SLOTS, Meta::EMPTY)
    }

    /// Takes a slot in one of the two lines of the source: a free one in the first, unless that is
    /// crowded and the second less so; where both are full, that of an owner who has proven nothing.
    #[inline(always)]
    pub fn make<L: Line>(&self, first: &L, second: &L, meta: Meta, now: Tick) -> Made {
        let ours = Survey::of(first, now);
        if ours.is_busy != 0 {
            // Another CPU is taking a slot, perhaps for the same source.
            return Made::Raced;
        }
        let theirs = Survey::of(second, now);
        if theirs.is_busy != 0 || self.find(first).is_some() || self.find(second).is_some() {
            // The last: made since it was looked for. Whoever makes it from now on has seen the same
            // slots, chooses the same, and one of the two loses the swap.
            return Made::Raced;
        }
        if ours.used < L::CROWDED {
            return self.take(first, ours.free, meta, now).in_first();
        }
        if ours.used < L::SLOTS && ours.used <= theirs.used {
            return self.take(first, ours.free, meta, now).in_first();
        }
        if theirs.used < L::SLOTS {
            return self.take(second, theirs.free, meta, now).in_second();
        }
        self.displace(second, meta, now).in_second()
    }

    /// Takes a slot in `line` that is free or full again.
    #[inline(always)]
    pub fn claim<L: Line>(&self, line: &L, meta: Meta, now: Tick) -> Claim {
        let survey = Survey::of(line, now);
        if survey.is_busy != 0 {
            return Claim::Raced;
        }
        if survey.used == L::SLOTS {
            return Claim::Full;
        }
        self.take(line, survey.free, meta, now)
    }

    /// Takes a slot in `line` whose owner has proven nothing: the one furthest from full.
    #[inline(always)]
    fn displace<L: Line>(&self, line: &L, meta: Meta, now: Tick) -> Claim {
        let mut furthest = 0;
        let mut victim = (0, Meta::BUSY);
        for slot in 0..L::SLOTS {
            let found = line.meta(slot);
            let ahead = line.busy_until(slot, now).since(now);
            if !found.is_proven() && !found.is_busy() && ahead > furthest {
                furthest = ahead;
                victim = (slot, found);
            }
            victim.0 = L::opaque(victim.0, found);
        }
        if furthest == 0 { Claim::Full } else { self.take(line, victim, meta, now) }
    }

    #[inline(always)]
    fn take<L: Line>(&self, line: &L, free: (u32, Meta), meta: Meta, now: Tick) -> Claim {
        let (slot, found) = free;
        if line.swap_meta(slot, found, Meta::BUSY) != found {
            return Claim::Raced;
        }
        line.set_source(slot, self.bits);
        line.fill(slot, now);
        line.swap_meta(slot, Meta::BUSY, meta);
        Claim::Taken(slot)
    }
}

/// What became of an attempt to take a slot of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// It is the source's now.
    Taken(u32),
    /// Another CPU was faster.
    Raced,
    /// No slot of the line may be taken.
    Full,
}

impl Claim {
    #[inline(always)]
    const fn in_first(self) -> Made {
        match self {
            Self::Taken(slot) => Made::First(slot),
            Self::Raced => Made::Raced,
            Self::Full => Made::Full,
        }
    }

    #[inline(always)]
    const fn in_second(self) -> Made {
        match self {
            Self::Taken(slot) => Made::Second(slot),
            Self::Raced => Made::Raced,
            Self::Full => Made::Full,
        }
    }
}

/// What became of an attempt to take a slot in either line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// A slot of the first.
    First(u32),
    /// A slot of the second.
    Second(u32),
    /// Another CPU was faster, perhaps for the same source: look for the bucket again.
    Raced,
    /// All slots of both are in use by proven sources.
    Full,
}

/// What is in a line.
struct Survey {
    /// Slots whose buckets are not full.
    used: u32,
    /// The first of the others that nobody had yet, or else the first of the others, and what it
    /// holds: whoever had one may come back, and would have to be let in once more.
    free: (u32, Meta),
    /// Not 0 if another CPU is taking one.
    is_busy: u32,
}

impl Survey {
    #[inline(always)]
    fn of<L: Line>(line: &L, now: Tick) -> Self {
        let mut survey = Self { used: 0, free: (0, Meta::BUSY), is_busy: 0 };
        for slot in (0..L::SLOTS).rev() {
            let found = line.meta(slot);
            if found.is_busy() {
                survey.is_busy = 1;
                survey.used += 1;
            } else if found != Meta::EMPTY && is_ahead(line.busy_until(slot, now), now) {
                survey.used += 1;
            } else if found == Meta::EMPTY || survey.free.1 != Meta::EMPTY {
                survey.free = (slot, found);
            }
            survey.used = L::opaque(survey.used, found);
            survey.is_busy = L::opaque(survey.is_busy, found);
            survey.free.0 = L::opaque(survey.free.0, found);
        }
        survey
    }
}

/// Whether a bucket with this theoretical arrival time is not full at `now`. One further ahead than
/// any limit allows was left over from before the time line wrapped.
#[inline(always)]
#[must_use]
pub const fn is_ahead(tat: Tick, now: Tick) -> bool {
    let ahead = tat.since(now);
    ahead > 0 && ahead.cast_unsigned() <= MAX_TOLERANCE + Tick::PER_SECOND
}

#[cfg(test)]
mod tests;
