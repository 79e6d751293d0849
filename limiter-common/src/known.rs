//! What a source has shown of itself: two keyed, ageing filters, small enough for the cache.
//!
//! A source address can be forged, so what it has sent proves nothing. A source is *proven* when it
//! completed a TCP handshake with this host (or a credential vouches for it), *seen* when it was let
//! in under the budget for new sources and went on sending within its limits, else a *stranger*.
//!
//! Each filter is a Bloom filter blocked by words: three bits of one 64-bit word for each source. It
//! has two generations, which take turns in two words. A word carries the number of its generation
//! in its upper 16 bits, so that one of an older generation reads as empty and nobody has to clear
//! it: the filters age by the clock alone. All four words of a source lie side by side, in one cache
//! line.

use crate::abi::KNOWN_WORDS;
use crate::bucket::Cell;
use crate::hash::SourceHash;
use crate::time::Nanos;

/// How sure it is that the address is not forged. A number and not an enum, so that the verifier need
/// not walk everything that follows once for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Standing(u32);

impl Standing {
    /// Nothing is known.
    pub const STRANGER: Self = Self(0);
    /// It was let in, and goes on sending.
    pub const SEEN: Self = Self(1);
    /// It has received what we sent to its address.
    pub const PROVEN: Self = Self(2);

    /// The same, with its number passed through `hide`.
    #[inline(always)]
    #[must_use]
    pub fn hidden(self, hide: impl Fn(u32) -> u32) -> Self {
        Self(hide(self.0))
    }
}

/// How lately a source was seen. A number, like [`Standing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen(u32);

impl Seen {
    /// It is not remembered.
    pub const NOT: Self = Self(0);
    /// In the generation before the present one.
    pub const BEFORE: Self = Self(1);
    /// In the present generation.
    pub const LATELY: Self = Self(2);

    /// The same, with its number passed through `hide`.
    #[inline(always)]
    #[must_use]
    pub fn hidden(self, hide: impl Fn(u32) -> u32) -> Self {
        Self(hide(self.0))
    }
}

/// The words that hold what is known of a source.
pub trait Known {
    /// One word.
    type Cell: Cell;

    /// The word at `place`, below [`KNOWN_WORDS`].
    fn word(&self, place: usize) -> Self::Cell;
}

impl<C: Cell + Clone> Known for [C; KNOWN_WORDS] {
    type Cell = C;

    fn word(&self, place: usize) -> C {
        self[place].clone()
    }
}

/// One of the two filters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// Sources that have proven their address.
    Proven,
    /// Sources that were let in.
    Seen,
    /// TCP connections that this host opened; in a map of their own, with what follows.
    Connections,
    /// UDP flows that this host began.
    Datagrams,
}

impl Filter {
    /// How long a generation of it lasts, as a power of two of nanoseconds: 9.2 minutes for proofs
    /// (renewed by each handshake, and by the agent while a connection lasts), 4.3 seconds for what
    /// was seen (renewed by each generation's first packet within the limits), 34 seconds for UDP flows
    /// of this host (renewed by what it sends, as is the case for connections). A mark lasts for the
    /// rest of its generation and all of the next.
    const fn shift(self) -> u32 {
        match self {
            Self::Proven | Self::Connections => 39,
            Self::Datagrams => 35,
            Self::Seen => 32,
        }
    }

    /// How long a mark lasts at least.
    #[must_use]
    pub const fn lasts(self) -> Nanos {
        Nanos(1 << self.shift())
    }

    /// The place of the word for `generation`.
    const fn place(self, generation: u16) -> usize {
        let pair = match self {
            Self::Proven | Self::Connections => 0,
            Self::Seen | Self::Datagrams => 2,
        };
        pair + (generation & 1) as usize
    }

    /// The generation that is marked at `now`.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "generations are counted modulo 2^16")]
    pub const fn generation(self, now: Nanos) -> u16 {
        (now.0 >> self.shift()) as u16
    }
}

/// The bits of a source within its words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(u64);

const STAMP_SHIFT: u32 = 48;
/// What of a word is marks.
const MARKS: u64 = (1 << STAMP_SHIFT) - 1;

/// The marks of all who are proven at `now`, at one place of the filters.
pub fn proven_marks<K: Known>(known: &K, now: Nanos) -> u64 {
    let generation = Filter::Proven.generation(now);
    let marks = |generation: u16| {
        let word = known.word(Filter::Proven.place(generation)).load();
        if word >> STAMP_SHIFT == u64::from(generation) { word & MARKS } else { 0 }
    };
    marks(generation) | marks(generation.wrapping_sub(1))
}

/// The part of sources at one place of the filters that are taken for proven at `now` without a proof, 0 to 1:
/// those whose three bits happen to be set.
pub fn taken_for_proven<K: Known>(known: &K, now: Nanos) -> f64 {
    let marks = proven_marks(known, now);
    [0, 16, 32]
        .iter()
        .map(|shift| f64::from((marks >> shift & 0xffff).count_ones()) / 16.0)
        .product()
}

/// The marks of two words of one generation; of two generations, those of the later one.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "generations are counted modulo 2^16")]
pub const fn merge(word: u64, other: u64) -> u64 {
    // One without marks is of no generation.
    if word & MARKS == 0 {
        return other;
    }
    if other & MARKS == 0 {
        return word;
    }
    let (stamp, other_stamp) = (word >> STAMP_SHIFT, other >> STAMP_SHIFT);
    // Generations are counted modulo 2^16.
    let ahead = other_stamp.wrapping_sub(stamp) as u16;
    match ahead {
        0 => word | other,
        1..0x8000 => other,
        _ => word,
    }
}

impl Mark {
    /// Three bits, one in each third of the 48 that a word has for them.
    #[inline(always)]
    #[must_use]
    pub const fn of(hash: SourceHash) -> Self {
        let low = hash.low();
        Self(1 << (low & 15) | 1 << (16 + (low >> 4 & 15)) | 1 << (32 + (low >> 8 & 15)))
    }

    /// The marks of several sources at one place, as [`proven_marks`] has them.
    #[must_use]
    pub const fn of_many(marks: u64) -> Self {
        Self(marks & MARKS)
    }

    /// The one bit of a port within its words, of which each is for 32 ports.
    #[inline(always)]
    #[must_use]
    pub const fn of_port(port: u16) -> Self {
        Self(1 << (port & 31))
    }

    /// Whether `word` has it, as of `generation`.
    #[inline(always)]
    const fn is_in(self, word: u64, generation: u16) -> bool {
        // One comparison: the stamp is right and all bits are there.
        word & (self.0 | 0xffff << STAMP_SHIFT) == self.0 | (generation as u64) << STAMP_SHIFT
    }

    /// How lately it was marked in `filter`, at `now`.
    #[inline(always)]
    pub fn find<K: Known>(self, known: &K, filter: Filter, now: Nanos) -> Seen {
        let generation = filter.generation(now);
        let before = generation.wrapping_sub(1);
        if self.is_in(known.word(filter.place(generation)).load(), generation) {
            Seen::LATELY
        } else if self.is_in(known.word(filter.place(before)).load(), before) {
            Seen::BEFORE
        } else {
            Seen::NOT
        }
    }

    /// Marks it in the present generation of `filter`. A lost race is another source's mark in the
    /// same word; it is tried again, and after that left to the next packet.
    #[inline(always)]
    pub fn set<K: Known>(self, known: &K, filter: Filter, now: Nanos) {
        const ATTEMPTS: usize = 2;
        let generation = filter.generation(now);
        let cell = known.word(filter.place(generation));
        let mut current = cell.load();
        for _ in 0..ATTEMPTS {
            let fresh = (current >> STAMP_SHIFT) == u64::from(generation);
            let new = if fresh { current } else { u64::from(generation) << STAMP_SHIFT } | self.0;
            let found = cell.compare_exchange(current, new);
            if found == current {
                return;
            }
            current = found;
        }
    }
}

/// The standing of a source at `now`, and how lately it was seen, which a proven one need not have been.
#[inline(always)]
pub fn standing<K: Known>(known: &K, mark: Mark, now: Nanos) -> (Standing, Seen) {
    let seen = mark.find(known, Filter::Seen, now);
    let standing = if mark.find(known, Filter::Proven, now) != Seen::NOT {
        Standing::PROVEN
    } else if seen != Seen::NOT {
        Standing::SEEN
    } else {
        Standing::STRANGER
    };
    (standing, seen)
}

const _: () = assert!(KNOWN_WORDS == 4);

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use proptest::prelude::*;

    use super::*;
    use crate::hash::HashKey;
    use crate::packet::Source;

    type Words = [AtomicU64; KNOWN_WORDS];

    fn mark(number: u32) -> Mark {
        Mark::of(
            HashKey::new([1, 0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9])
                .source(Source::ipv4(number)),
        )
    }

    proptest! {
        /// A mark lasts for one to two generations, whatever the time, and the other filter does not
        /// have it.
        #[test]
        fn marks_age(now in 0..u64::MAX / 2, number in any::<u32>(), proven in any::<bool>(), later in 0..4_u64) {
            let words = Words::default();
            let (filter, other) = if proven { (Filter::Proven, Filter::Seen) } else { (Filter::Seen, Filter::Proven) };
            let mark = mark(number);
            mark.set(&words.each_ref(), filter, Nanos(now));
            prop_assert_eq!(mark.find(&words.each_ref(), filter, Nanos(now)), Seen::LATELY);
            prop_assert_eq!(mark.find(&words.each_ref(), other, Nanos(now)), Seen::NOT);
            let generation = filter.lasts().0;
            let then = now + later * generation;
            let age = then / generation - now / generation;
            let expected = match age {
                0 => Seen::LATELY,
                1 => Seen::BEFORE,
                _ => Seen::NOT,
            };
            prop_assert_eq!(mark.find(&words.each_ref(), filter, Nanos(then)), expected);
        }
    }

    /// A mark of an older generation neither counts nor stays when the word is used again.
    #[test]
    fn old_marks_are_dropped_with_their_generation() {
        let words = Words::default();
        let generation = Filter::Seen.lasts().0;
        mark(1).set(&words.each_ref(), Filter::Seen, Nanos(0));
        mark(2).set(&words.each_ref(), Filter::Seen, Nanos(2 * generation));
        assert_eq!(
            standing(&words.each_ref(), mark(1), Nanos(2 * generation)).0,
            Standing::STRANGER
        );
        assert_eq!(
            standing(&words.each_ref(), mark(2), Nanos(2 * generation)),
            (Standing::SEEN, Seen::LATELY)
        );
        mark(1).set(&words.each_ref(), Filter::Proven, Nanos(2 * generation));
        assert_eq!(standing(&words.each_ref(), mark(1), Nanos(2 * generation)).0, Standing::PROVEN);
    }

    #[test]
    fn marks_of_the_same_or_a_later_generation_are_kept() {
        let word = |generation: u64, marks: u64| generation << STAMP_SHIFT | marks;
        assert_eq!(merge(word(7, 1), word(7, 2)), word(7, 3));
        assert_eq!(merge(word(7, 1), word(8, 2)), word(8, 2));
        assert_eq!(merge(word(8, 1), word(7, 2)), word(8, 1));
        assert_eq!(merge(word(0xffff, 1), word(0, 2)), word(0, 2));
        assert_eq!([merge(0, word(0x9000, 2)), merge(word(0x9000, 2), 0)], [word(0x9000, 2); 2]);
    }

    /// With six sources to a word, which is 100,000 proven ones at the shipped sizes, fewer than one
    /// stranger in twenty is taken for known; with one, nearly none.
    #[test]
    fn few_strangers_look_known() {
        let key = HashKey::new([3, 0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9]);
        for (sources, most) in [(6, 0.05), (1, 0.001)] {
            const WORDS: u32 = 4_096;
            let words: std::vec::Vec<Words> = (0..WORDS).map(|_| Words::default()).collect();
            let of = |number: u32| {
                let hash = key.source(Source::ipv4(number));
                (words[hash.place(WORDS) as usize].each_ref(), Mark::of(hash))
            };
            for number in 0..WORDS * sources {
                let (words, mark) = of(number);
                mark.set(&words, Filter::Proven, Nanos(0));
            }
            let strangers = (1 << 31)..(1 << 31) + 100_000_u32;
            let taken = strangers.filter(|number| {
                let (words, mark) = of(*number);
                standing(&words, mark, Nanos(0)).0 == Standing::PROVEN
            });
            let taken = u32::try_from(taken.count()).unwrap();
            let share = f64::from(taken) / 100_000.0;
            assert!(share < most, "{share} with {sources} sources for each word");
        }
    }
}
