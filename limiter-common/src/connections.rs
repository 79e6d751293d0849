//! How many TCP connections each source has open, in a table without locks.
//!
//! A source's counts lie in one line, which its keyed hash names, in any of its slots: one slot for the
//! connections whose beginning was heard, and one for those that are older than the program that hears.
//! What is true of a slot (whose it is, how many) is one word, and every change is one swap of that word,
//! so none is lost, and a slot that is empty is free without anybody having to remove it. The word has a
//! number that changes with each owner: a change meant for an owner before does not reach the next.
//!
//! Two CPUs that see a source's first two connections at once may take two slots for it. Nothing is
//! wrong then: whoever counts adds up all slots of a source, and whoever removes takes from any.

use crate::abi::CONNECTION_SLOTS;
use crate::bucket::Cell;
use crate::packet::{Source, Space};

/// How often a change is tried: another CPU must have changed the same slot each time.
const ATTEMPTS: usize = 8;

/// Which connections a slot counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Origin {
    /// Those whose beginning was heard, and whose end will be.
    Heard = 0,
    /// Those that were open before, whose end is mostly not heard.
    Older = 1,
}

/// The slots of a line.
pub trait Slots {
    /// One word.
    type Cell: Cell;

    /// The bits of the source that `slot` (below [`CONNECTION_SLOTS`]) belongs to.
    fn bits(&self, slot: usize) -> Self::Cell;
    /// Whether it belongs to one, and how many connections that has.
    fn word(&self, slot: usize) -> Self::Cell;

    /// Returns `slot`. The kernel side hides it from the verifier behind `unknown`, so that what follows is
    /// checked once and not once for each slot: else kernel 6.1 gives up.
    #[inline(always)]
    fn opaque(&self, slot: usize, _unknown: u64) -> usize {
        slot
    }
}

/// What is true of a slot: the number of connections in the lower half; above it the number of the owner,
/// 28 bits; then the kind of owner, 4 bits. A slot without connections is nobody's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Word(u64);

impl Word {
    /// Its owner is being written.
    const BUSY: u64 = 15 << 60;
    /// What of a word is the same as long as the owner is.
    const OWNER: u64 = !0xffff_ffff;

    #[inline(always)]
    const fn kind(space: u32, origin: Origin) -> u64 {
        (1 + space as u64 + 5 * origin as u64) << 60
    }

    const fn is_free(self) -> bool {
        self.0 >> 60 == 0
    }

    /// The space and the origin of its owner; none if it has none, or one that is being written.
    const fn owner(self) -> Option<(Space, Origin)> {
        let (kind, origin) = match self.0 >> 60 {
            kind @ 1..=5 => (kind, Origin::Heard),
            kind @ 6..=10 => (kind - 5, Origin::Older),
            _ => return None,
        };
        let space = match kind {
            1 => Space::Ipv4,
            2 => Space::Ipv6,
            3 => Space::LinkLocal,
            4 => Space::Nat64,
            _ => Space::SixToFour,
        };
        Some((space, origin))
    }

    #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
    const fn count(self) -> u32 {
        self.0 as u32
    }

    /// The same owner with so many; nobody's if there are none.
    const fn with(self, count: u32) -> Self {
        let owner =
            if count == 0 { self.0 & Self::OWNER & !Self::BUSY } else { self.0 & Self::OWNER };
        Self(owner | count as u64)
    }

    /// The next owner's, of this kind, with so many.
    const fn next(self, kind: u64, count: u32) -> Self {
        let number = (self.0 & !Self::BUSY & Self::OWNER).wrapping_add(1 << 32) & !Self::BUSY;
        Self(kind | number | count as u64)
    }
}

/// How many connections the source of these bits in this [`Space`] has open.
#[inline(always)]
pub fn count<S: Slots>(slots: &S, bits: u64, space: u32) -> u32 {
    let (heard, older) = (Word::kind(space, Origin::Heard), Word::kind(space, Origin::Older));
    let mut sum = 0_u32;
    for slot in 0..CONNECTION_SLOTS {
        let word = slots.word(slot).load();
        let kind = word & Word::BUSY;
        if (kind == heard || kind == older) && slots.bits(slot).load() == bits {
            let again = slots.word(slot).load();
            // Else it got another owner in between.
            if (word ^ again) & Word::OWNER == 0 {
                sum = sum.wrapping_add(Word(again).count());
            }
        }
    }
    sum
}

/// Counts one more. False if the line has no room for the source.
#[inline(always)]
pub fn add<S: Slots>(slots: &S, bits: u64, space: u32) -> bool {
    change(slots, bits, space, Origin::Heard, |count| count.saturating_add(1))
}

/// Counts one less, of those that were heard if there are any, else of the others. False if none was
/// counted.
#[inline(always)]
pub fn remove<S: Slots>(slots: &S, bits: u64, space: u32) -> bool {
    for origin in [Origin::Heard, Origin::Older] {
        for _ in 0..ATTEMPTS {
            let Some((slot, word)) = find(slots, bits, space, origin) else { break };
            if swap(&slots.word(slot), word, word.with(word.count() - 1)) {
                return true;
            }
        }
    }
    false
}

/// Sets how many there are of this origin. False if the line has no room for the source.
pub fn set<S: Slots>(slots: &S, source: Source, origin: Origin, count: u32) -> bool {
    change(slots, source.bits, source.space as u32, origin, |_| count)
}

/// The source and the origin of what `slot` counts, and how many; none if it counts nothing.
pub fn entry<S: Slots>(slots: &S, slot: usize) -> Option<(Source, Origin, u32)> {
    let word = Word(slots.word(slot).load());
    let (space, origin) = word.owner()?;
    let bits = slots.bits(slot).load();
    let again = Word(slots.word(slot).load());
    let is_same = (word.0 ^ again.0) & Word::OWNER == 0;
    is_same.then_some((Source { space, bits }, origin, again.count()))
}

#[inline(always)]
fn change<S: Slots>(
    slots: &S,
    bits: u64,
    space: u32,
    origin: Origin,
    change: impl Fn(u32) -> u32,
) -> bool {
    for _ in 0..ATTEMPTS {
        if let Some((slot, word)) = find(slots, bits, space, origin) {
            if swap(&slots.word(slot), word, word.with(change(word.count()))) {
                return true;
            }
            continue;
        }
        let count = change(0);
        if count == 0 {
            return true;
        }
        let Some((slot, free)) = free(slots) else { return false };
        let busy = free.next(Word::BUSY, 0);
        let cell = slots.word(slot);
        if swap(&cell, free, busy) {
            let cell_of_bits = slots.bits(slot);
            // Nobody else writes them while the slot is busy.
            cell_of_bits.compare_exchange(cell_of_bits.load(), bits);
            let kind = Word::kind(space, origin);
            return swap(&cell, busy, Word(busy.0 & !Word::BUSY | kind | u64::from(count)));
        }
    }
    false
}

/// A slot of the source, with what is true of it.
#[inline(always)]
fn find<S: Slots>(slots: &S, bits: u64, space: u32, origin: Origin) -> Option<(usize, Word)> {
    let kind = Word::kind(space, origin);
    for slot in 0..CONNECTION_SLOTS {
        let word = slots.word(slot).load();
        if word & Word::BUSY == kind && slots.bits(slot).load() == bits {
            return Some((slots.opaque(slot, word), Word(word)));
        }
    }
    None
}

#[inline(always)]
fn free<S: Slots>(slots: &S) -> Option<(usize, Word)> {
    for slot in 0..CONNECTION_SLOTS {
        let word = Word(slots.word(slot).load());
        if word.is_free() {
            return Some((slots.opaque(slot, word.0), word));
        }
    }
    None
}

#[inline(always)]
fn swap<C: Cell>(cell: &C, from: Word, to: Word) -> bool {
    cell.compare_exchange(from.0, to.0) == from.0
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
    use std::{sync::Arc, thread, vec::Vec};

    use proptest::prelude::*;

    use super::*;

    type Line = Vec<[Arc<AtomicU64>; 2]>;

    fn line() -> Line {
        (0..CONNECTION_SLOTS).map(|_| [Arc::default(), Arc::default()]).collect()
    }

    impl Slots for Line {
        type Cell = Arc<AtomicU64>;

        fn bits(&self, slot: usize) -> Self::Cell {
            self[slot][0].clone()
        }

        fn word(&self, slot: usize) -> Self::Cell {
            self[slot][1].clone()
        }
    }

    fn add(line: &Line, source: Source, _: Origin) -> bool {
        super::add(line, source.bits, source.space as u32)
    }

    fn remove(line: &Line, source: Source) -> bool {
        super::remove(line, source.bits, source.space as u32)
    }

    fn count(line: &Line, source: Source) -> u32 {
        super::count(line, source.bits, source.space as u32)
    }

    fn used(line: &Line) -> usize {
        (0..CONNECTION_SLOTS).filter(|slot| entry(line, *slot).is_some()).count()
    }

    /// Sources that differ by their space only, and by their bits only.
    fn sources() -> Vec<Source> {
        let spaces = [Space::Ipv4, Space::Ipv6, Space::LinkLocal, Space::Nat64, Space::SixToFour];
        spaces
            .into_iter()
            .flat_map(|space| [Source { space, bits: 7 }, Source { space, bits: 8 }])
            .collect()
    }

    #[test]
    fn a_line_that_is_full_says_so_and_takes_others_when_there_is_room() {
        let line = line();
        let source = |n| Source::ipv4(n);
        for n in 0..16 {
            assert!(add(&line, source(n), Origin::Heard));
        }
        assert!(!add(&line, source(99), Origin::Heard));
        assert_eq!(count(&line, source(99)), 0);
        // Who is there already counts on.
        assert!(add(&line, source(3), Origin::Heard));
        assert!(remove(&line, source(5)));
        assert!(!remove(&line, source(5)));
        assert!(add(&line, source(99), Origin::Heard));
        assert_eq!([3, 5, 99].map(|n| count(&line, source(n))), [2, 0, 1]);
    }

    #[test]
    fn what_is_older_counts_as_well_and_is_taken_last() {
        let (line, source) = (line(), Source::ipv6(0x2001_0db8 << 32, 1));
        assert!(set(&line, source, Origin::Older, 2));
        assert!(add(&line, source, Origin::Heard));
        assert_eq!(count(&line, source), 3);
        assert!(remove(&line, source));
        let older = (0..CONNECTION_SLOTS).filter_map(|slot| entry(&line, slot));
        assert_eq!(older.collect::<Vec<_>>(), [(source, Origin::Older, 2)]);
        assert!(remove(&line, source) && remove(&line, source) && !remove(&line, source));
        assert!(set(&line, source, Origin::Older, 0));
        assert_eq!(used(&line), 0);
    }

    /// A swap that was prepared for an owner before fails, though the next one has as many.
    #[test]
    fn a_change_for_an_owner_before_does_not_reach_the_next() {
        let line = line();
        let (old, new) = (Source::ipv4(1), Source::ipv4(2));
        add(&line, old, Origin::Heard);
        let (slot, word) =
            find(&line, old.bits, old.space as u32, Origin::Heard).expect("is there");
        remove(&line, old);
        add(&line, new, Origin::Heard);
        assert_eq!(entry(&line, slot), Some((new, Origin::Heard, 1)));
        assert!(!swap(&line.word(slot), word, word.with(2)));
        assert_eq!(count(&line, new), 1);
    }

    #[test]
    fn the_number_of_the_owner_comes_round() {
        let line = line();
        line.word(0).store(Word::OWNER & !Word::BUSY, SeqCst);
        assert!(add(&line, Source::ipv4(1), Origin::Heard));
        assert_eq!(entry(&line, 0), Some((Source::ipv4(1), Origin::Heard, 1)));
    }

    proptest! {
        /// Against a plain count of each source.
        #[test]
        fn counts_are_those_of_a_plain_map(steps in prop::collection::vec((0..10_usize, any::<bool>()), 0..200)) {
            let (line, sources) = (line(), sources());
            let mut plain = [0_u32; 10];
            for (n, opens) in steps {
                if opens {
                    prop_assert!(add(&line, sources[n], Origin::Heard));
                    plain[n] += 1;
                } else {
                    prop_assert_eq!(remove(&line, sources[n]), plain[n] > 0);
                    plain[n] = plain[n].saturating_sub(1);
                }
                prop_assert!(sources.iter().zip(plain).all(|(it, n)| count(&line, *it) == n));
            }
            prop_assert_eq!(used(&line), plain.iter().filter(|n| **n > 0).count());
        }
    }

    /// Threads open and close connections of a few sources as fast as they can, so that slots change
    /// their owners all the time. In the end nothing is left, and nothing was lost on the way.
    #[test]
    fn nothing_is_lost_between_threads() {
        let line = line();
        let kept = Source::ipv4(42);
        thread::scope(|scope| {
            for thread in 0..4_u32 {
                let line = &line;
                scope.spawn(move || {
                    for round in 0..20_000_u32 {
                        let source = Source::ipv4((round + thread) % 3);
                        assert!(add(line, source, Origin::Heard));
                        if round % 100 == 0 {
                            assert!(add(line, kept, Origin::Heard));
                        }
                        assert!(remove(line, source));
                    }
                });
            }
        });
        assert_eq!(count(&line, kept), 800);
        assert_eq!([0, 1, 2].map(|n| count(&line, Source::ipv4(n))), [0; 3]);
    }
}
