//! The table in ordinary memory: the same code that the kernel runs, on lines of atomics.

use std::array;
use std::eprintln;
use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::thread;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::abi::{V4_CROWDED, V4_SLOTS, V6_CROWDED, V6_SLOTS};
use crate::bucket::{self, Moment};
use crate::hash::HashKey;
use crate::time::Nanos;
use crate::units::{PacketLimit, Rate};

const CLASS: ClassId = ClassId(1);
const EPOCH: u32 = 7;

/// One line: plain reads and writes, and exchanges that are full barriers, as BPF has them.
struct MemoryLine<const SLOTS: usize> {
    metas: [AtomicU32; SLOTS],
    sources: [AtomicU64; SLOTS],
    packets: [AtomicU64; SLOTS],
}

impl<const SLOTS: usize> MemoryLine<SLOTS> {
    fn new() -> Self {
        Self {
            metas: array::from_fn(|_| AtomicU32::new(0)),
            sources: array::from_fn(|_| AtomicU64::new(0)),
            packets: array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    fn word(words: &[AtomicU64; SLOTS], slot: u32) -> &AtomicU64 {
        &words[slot as usize]
    }
}

impl<const N: usize> Line for MemoryLine<N> {
    #[expect(clippy::cast_possible_truncation, reason = "3 or 4")]
    const SLOTS: u32 = N as u32;
    const CROWDED: u32 = if N == V4_SLOTS { V4_CROWDED } else { V6_CROWDED };

    fn meta(&self, slot: u32) -> Meta {
        Meta(self.metas[slot as usize].load(Relaxed))
    }
    fn swap_meta(&self, slot: u32, current: Meta, new: Meta) -> Meta {
        let word = &self.metas[slot as usize];
        Meta(word.compare_exchange(current.0, new.0, SeqCst, SeqCst).unwrap_or_else(|it| it))
    }
    fn source(&self, slot: u32) -> u64 {
        Self::word(&self.sources, slot).load(Relaxed)
    }
    fn set_source(&self, slot: u32, bits: u64) {
        Self::word(&self.sources, slot).store(bits, Relaxed);
    }
    fn busy_until(&self, slot: u32, _: Tick) -> Tick {
        Tick(Self::word(&self.packets, slot).load(Relaxed))
    }
    fn fill(&self, slot: u32, now: Tick) {
        Self::word(&self.packets, slot).store(now.0, Relaxed);
    }
}

/// A table, and what `limiter-ebpf/src/lines.rs` does with it.
struct Table<const SLOTS: usize> {
    lines: Vec<MemoryLine<SLOTS>>,
    key: HashKey,
}

impl<const SLOTS: usize> Table<SLOTS> {
    fn new(lines: usize, seed: u64) -> Self {
        let random = [1, 2, 3].map(|it: u64| (seed ^ it).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let random = random.map(|it| (it ^ it >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9));
        Self {
            lines: (0..lines).map(|_| MemoryLine::new()).collect(),
            key: HashKey::new(random.map(|it| it ^ it >> 32)),
        }
    }

    /// The two lines of a source.
    fn places(&self, source: Source) -> [usize; 2] {
        let hash = self.key.bucket(self.key.source(source), CLASS);
        let lines = u32::try_from(self.lines.len()).unwrap();
        [hash.first(lines) as usize, hash.second(lines) as usize]
    }

    fn find(&self, source: Source) -> Option<(usize, u32, Meta)> {
        let wanted = Wanted::new(source, CLASS);
        self.places(source).into_iter().find_map(|place| {
            wanted.find(&self.lines[place]).map(|(slot, meta)| (place, slot, meta))
        })
    }

    /// A slot for the source's bucket.
    fn make(&self, source: Source, meta: Meta, now: Tick) -> Option<(usize, u32)> {
        let wanted = Wanted::of(source.bits, meta);
        let [first, second] = self.places(source);
        match wanted.make(&self.lines[first], &self.lines[second], meta, now) {
            Made::First(slot) => Some((first, slot)),
            Made::Second(slot) => Some((second, slot)),
            Made::Raced => self.find(source).map(|(place, slot, _)| (place, slot)),
            Made::Full => None,
        }
    }

    fn tat(&self, (place, slot): (usize, u32)) -> &AtomicU64 {
        MemoryLine::word(&self.lines[place].packets, slot)
    }
}

fn ipv4(number: u32) -> Source {
    Source::ipv4(0x0a00_0000 + number)
}

fn owner(source: Source) -> Meta {
    Meta::owner(source.space, CLASS).with_policy(EPOCH, PolicyId(0))
}

fn now() -> Tick {
    Tick::from(Nanos(1 << 40))
}

/// Threads that look up, make and charge buckets of the same few sources, with and without enough
/// room for them. Nobody is ever given the policy of another source; no slot stays taken; and a source
/// is let in no more often than its buckets allow.
#[test]
fn threads_share_a_few_lines() {
    for (lines, expected) in [(64, "room"), (6, "none")] {
        let (takes, admitted) = contend(lines);
        eprintln!("{expected}: {takes} buckets made, {admitted} packets admitted");
    }
}

const THREADS: u32 = 8;
/// Divides the number of policies that a slot can remember.
const SOURCES: u32 = 60;

/// Returns how many buckets were made and how many packets admitted.
fn contend(lines: usize) -> (u64, u64) {
    const ROUNDS: u32 = 60_000;
    const BURST: u64 = 50;
    const POLICIES: u32 = 16_380;
    let table = Table::<V4_SLOTS>::new(lines, 5);
    let limit = PacketLimit::new(Rate::new(1, 3600).unwrap(), BURST).unwrap();
    let counts = || (0..SOURCES).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
    let (takes, admitted) = (counts(), counts());
    let stamp = AtomicU32::new(0);
    let work = |thread: u32| {
        let mut random = u64::from(thread) + 1;
        for _ in 0..ROUNDS {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let number = u32::try_from((random >> 33) % u64::from(SOURCES)).unwrap();
            let source = ipv4(number);
            let place = if let Some((place, slot, meta)) = table.find(source) {
                // Each bucket ever made carries a policy of its own, which names its source, so that
                // no owner comes back with the meta it had. (Where two changes of owners lead back to
                // the same meta between two reads, one packet may meet the other's policy.)
                if let Some(policy) = meta.policy(EPOCH) {
                    assert_eq!(policy.0 % SOURCES, number, "a policy of another source");
                }
                (place, slot)
            } else {
                let policy = stamp.fetch_add(1, Relaxed) * SOURCES % POLICIES + number;
                let meta = Meta::owner(source.space, CLASS).with_policy(EPOCH, PolicyId(policy));
                let Some(place) = table.make(source, meta, now()) else { continue };
                // Counted even where another thread was faster.
                takes[number as usize].fetch_add(1, Relaxed);
                place
            };
            let mut moment = Moment::new(now(), now);
            if bucket::admit(&table.tat(place), &mut moment, limit.cost(), limit.tolerance()) {
                admitted[number as usize].fetch_add(1, Relaxed);
            }
        }
    };
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let work = &work;
            scope.spawn(move || work(thread));
        }
    });
    for line in &table.lines {
        for slot in 0..MemoryLine::<V4_SLOTS>::SLOTS {
            assert!(!line.meta(slot).is_busy(), "a slot that nobody gave back");
        }
    }
    let sum = |counts: &[AtomicU64]| counts.iter().map(|count| count.load(Relaxed)).sum();
    for (takes, admitted) in takes.iter().zip(&admitted) {
        let (takes, admitted) = (takes.load(Relaxed), admitted.load(Relaxed));
        // No time passes, so a bucket holds its burst and no more. Each thread may overdraw it once,
        // and once charge whoever comes after its owner.
        let most = takes * (BURST + 2 * u64::from(THREADS));
        assert!(admitted <= most, "{admitted} admitted from {takes} buckets");
        assert!(admitted >= BURST, "{admitted} admitted, at least {BURST} conform");
    }
    (sum(&takes), sum(&admitted))
}

/// The share of a million sources, all active and proven, that find no slot in a table of twice as
/// many.
fn overflow<const SLOTS: usize>(lines: usize, source: impl Fn(u32) -> Source) -> f64 {
    const SOURCES: u32 = 1_000_000;
    let table = Table::<SLOTS>::new(lines, 11);
    let mut without = 0;
    for number in 0..SOURCES {
        let source = source(number);
        let meta = owner(source).with_proven(true);
        match table.make(source, meta, now()) {
            Some(place) => table.tat(place).store(now().plus(1 << 40).0, Relaxed),
            None => without += 1,
        }
    }
    f64::from(without) / f64::from(SOURCES)
}

#[test]
fn a_million_active_ipv4_sources_find_room() {
    let share = overflow::<V4_SLOTS>(500_000, ipv4);
    eprintln!("IPv4: {share:.2e} of a million sources without a slot");
    assert!(share <= 1e-3, "{share}");
}

#[test]
fn a_million_active_ipv6_sources_find_room() {
    let source =
        |number| Source { space: Space::Ipv6, bits: 0x2a00_0000_0000_0000 + u64::from(number) };
    let share = overflow::<V6_SLOTS>(666_667, source);
    eprintln!("IPv6: {share:.2e} of a million sources without a slot");
    assert!(share <= 2e-3, "{share}");
}

/// A table of one line, so that both lines of every source are that, with its slots owned by the
/// sources 0 to 3, active for this long, proven or not.
fn one_line(owners: [(u64, bool); V4_SLOTS]) -> Table<V4_SLOTS> {
    let table = Table::new(1, 1);
    for (number, (ahead, is_proven)) in (0..).zip(owners) {
        let meta = owner(ipv4(number)).with_proven(is_proven);
        let place = table.make(ipv4(number), meta, now()).expect("free");
        assert_eq!(place, (0, number));
        table.tat(place).store(now().plus(ahead).0, Relaxed);
        // An inactive slot would be given to the next owner.
        if ahead == 0 {
            table.tat(place).store(now().plus(1).0, Relaxed);
        }
    }
    for (number, (ahead, _)) in (0..).zip(owners) {
        table.tat((0, number)).store(now().plus(ahead).0, Relaxed);
    }
    table
}

proptest! {
    /// A slot that is full again goes before one in use, whoever's it is; then the unproven one that
    /// is furthest from full; a proven one that is in use never.
    #[test]
    fn the_right_slot_is_replaced(
        owners in prop::array::uniform4((prop_oneof![Just(0), 1..1_000_u64], any::<bool>())),
    ) {
        let table = one_line(owners);
        let made = table.make(ipv4(9), owner(ipv4(9)), now());
        let full_again = owners.iter().position(|(ahead, _)| *ahead == 0);
        let furthest = owners.iter().filter(|(_, is_proven)| !is_proven).map(|(ahead, _)| *ahead).max();
        match made {
            Some((_, slot)) if full_again.is_some() => {
                prop_assert_eq!(owners[slot as usize].0, 0);
            }
            Some((_, slot)) => {
                let (ahead, is_proven) = owners[slot as usize];
                prop_assert!(!is_proven);
                prop_assert_eq!(Some(ahead), furthest);
            }
            None => prop_assert!(full_again.is_none() && furthest.is_none()),
        }
        // Whoever keeps a slot keeps its debt.
        for (number, (ahead, _)) in (0..).zip(owners) {
            if let Some((place, slot, _)) = table.find(ipv4(number)) {
                prop_assert_eq!((place, slot), (0, number));
                prop_assert_eq!(table.tat((place, slot)).load(Relaxed), now().plus(ahead).0);
            }
        }
        prop_assert_eq!(table.find(ipv4(9)).is_some(), made.is_some());
    }

    /// What goes into a slot's word comes out of it again, and nothing else changes.
    #[test]
    fn a_word_holds_all_of_it(
        class in 1..127_u32, space in 0..4_usize, epoch in any::<u32>(), policy in any::<u32>(),
        proven in any::<bool>(),
    ) {
        let space = [Space::Ipv6, Space::LinkLocal, Space::Nat64, Space::SixToFour][space];
        let owner = Meta::owner(space, ClassId(class));
        let meta = owner.with_proven(proven).with_policy(epoch, PolicyId(policy));
        prop_assert_eq!(meta, owner.with_policy(epoch, PolicyId(policy)).with_proven(proven));
        prop_assert_eq!(meta.class(), Some(ClassId(class)));
        prop_assert!(meta.has_owner(owner) && !meta.is_busy());
        prop_assert_eq!(meta.is_proven(), proven);
        for other in [0, 1, 2, 255] {
            let is_of = other == 0;
            prop_assert_eq!(meta.is_of(epoch.wrapping_add(other)), is_of);
            let fits = is_of && policy < 0x3fff;
            prop_assert_eq!(meta.policy(epoch.wrapping_add(other)), fits.then_some(PolicyId(policy)));
        }
        prop_assert_eq!(meta.forgotten().policy(epoch), None);
        prop_assert!(meta.forgotten().has_owner(owner) && meta.forgotten().is_of(epoch));
        prop_assert_eq!(meta.forgotten().is_proven(), proven);
        prop_assert_eq!(meta.with_proven(!proven).with_proven(proven), meta);
    }

    /// Only the very space and class own a slot.
    #[test]
    fn owners_are_told_apart(one in 1..127_u32, other in 1..127_u32) {
        let spaces = [Space::Ipv6, Space::LinkLocal, Space::Nat64, Space::SixToFour];
        for first in spaces {
            for second in spaces {
                let same = one == other && first as u32 == second as u32;
                let owner = Meta::owner(second, ClassId(other));
                prop_assert_eq!(Meta::owner(first, ClassId(one)).has_owner(owner), same);
            }
        }
        prop_assert!(!Meta::EMPTY.has_owner(Meta::owner(spaces[0], ClassId(one))));
        prop_assert!(!Meta::BUSY.has_owner(Meta::owner(spaces[0], ClassId(one))));
    }
}
