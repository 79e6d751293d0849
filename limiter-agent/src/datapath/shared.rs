//! Maps that the agent and the program share by memory: the bucket table, the filters and the budgets.

use std::{
    array,
    iter::zip,
    marker::PhantomData,
    ops::RangeInclusive,
    os::fd::{AsFd as _, AsRawFd as _},
    path::Path,
    sync::atomic::{
        AtomicU32, AtomicU64,
        Ordering::{Relaxed, SeqCst},
    },
};

use aya::{
    Ebpf,
    maps::{Array, Map, MapData},
};
use limiter_common::{
    Family,
    abi::{
        AddressFamily, Budget, BudgetCell, ClassId, FLOW_PORTS, KNOWN_WORDS, KnownWords, LineV4,
        LineV6, PolicyId, PrefixKey, SourceAddress, V4_SLOTS, V6_SLOTS, map,
    },
    flows::{Flow, port_place},
    hash::HashKey,
    known::{self, Filter, Mark, Standing},
    packet::{Source, Space},
    table::{Meta, is_ahead},
    time::{Nanos, Tick},
};
use memmap2::{MmapOptions, MmapRaw};
use serde::{Deserialize, Serialize};

use super::{DatapathError, banks::Place};

/// Lines of each table that an estimate reads.
pub const SAMPLED_LINES: u32 = 1 << 16;

/// How many buckets of a table are in use, that is, not full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tracked {
    /// Of sources that have proven their address.
    pub proven: u64,
    /// Of others.
    pub unproven: u64,
}

/// Who was proven at some instant, for a kernel that starts anew.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The parts of the hash key, which say where a source's marks are.
    pub key: [u64; 3],
    /// The marks of those who were proven, for each place of the filters.
    pub marks: Vec<u64>,
}

/// The table, the filters and the budgets, as memory.
pub(super) struct SharedMaps {
    v4: Mapping<LineV4>,
    v6: Mapping<LineV6>,
    known: Mapping<KnownWords>,
    flows: Mapping<KnownWords>,
    budgets: Mapping<Budget>,
    key: HashKey,
}

impl SharedMaps {
    pub(super) fn new(ebpf: &Ebpf, key: HashKey) -> Result<Self, DatapathError> {
        Ok(Self {
            v4: Mapping::of(ebpf, map::BUCKETS_V4)?,
            v6: Mapping::of(ebpf, map::BUCKETS_V6)?,
            known: Mapping::of(ebpf, map::KNOWN)?,
            flows: Mapping::of(ebpf, map::FLOWS)?,
            budgets: Mapping::of(ebpf, map::BUDGETS)?,
            key,
        })
    }

    /// Marks a source as proven from `now` on.
    pub(super) fn prove(&self, source: Source, now: Nanos) {
        let hash = self.key.source(source);
        Mark::of(hash).set(&words(&self.known, hash.place(self.known.count)), Filter::Proven, now);
    }

    /// Whether a source is proven at `now`, as the filter has it.
    pub(super) fn is_proven(&self, source: Source, now: Nanos) -> bool {
        let hash = self.key.source(source);
        let words = words(&self.known, hash.place(self.known.count));
        known::standing(&words, Mark::of(hash), now).0 == Standing::PROVEN
    }

    /// The part of other sources that the filter takes for proven at `now`, 0 to 1.
    pub(super) fn false_proofs(&self, now: Nanos) -> f64 {
        let share = |place| known::taken_for_proven(&words(&self.known, place), now);
        (0..self.known.count).map(share).sum::<f64>() / f64::from(self.known.count.max(1))
    }

    /// Whether a source is of the sample of this mask.
    pub(super) fn is_sampled(&self, source: Source, mask: u32) -> bool {
        self.key.source(source).is_sampled(mask)
    }

    /// Marks a flow as opened by this host, from `now` on.
    pub(super) fn open(&self, flow: Flow, now: Nanos) {
        let hash = self.key.flow(&flow);
        let port = words(&self.flows, port_place(flow.local_port));
        let place = FLOW_PORTS + hash.place(self.flows.count - FLOW_PORTS);
        flow.open(&port, &words(&self.flows, place), hash, now);
    }

    /// What the filters say of a source at `now`.
    pub(super) fn standing(&self, source: Source, now: Nanos) -> Standing {
        let hash = self.key.source(source);
        known::standing(&words(&self.known, hash.place(self.known.count)), Mark::of(hash), now).0
    }

    /// The bucket of a source in a class: its line, its slot there, and the theoretical arrival time of
    /// its packets. None if it has none, which is the same as a full one.
    pub(super) fn find(&self, source: Source, class: ClassId) -> Option<(u32, usize, Tick)> {
        let hash = self.key.bucket(self.key.source(source), class);
        let owner = Meta::owner(source.space, class);
        let is_v4 = source.space == Space::Ipv4;
        let lines = if is_v4 { self.v4.count } else { self.v6.count };
        [hash.first(lines), hash.second(lines)].into_iter().find_map(|index| {
            let slots = if is_v4 { V4_SLOTS } else { V6_SLOTS };
            (0..slots).find_map(|slot| {
                let (meta, bits, tat) =
                    if is_v4 { self.slot_v4(index, slot) } else { self.slot_v6(index, slot) };
                let is_owner = || Meta(meta.load(SeqCst)).has_owner(owner);
                // Asked again once the rest was read: another source may have taken the slot.
                (is_owner() && bits == source.bits)
                    .then(|| Tick(tat.load(SeqCst)))
                    .filter(|_| is_owner())
                    .map(|tat| (index, slot, tat))
            })
        })
    }

    /// Takes over what the budgets of another set of pinned maps stand at.
    pub(super) fn inherit_budgets(&self, maps: &Path) -> Result<(), DatapathError> {
        let old: Mapping<Budget> = Mapping::pinned(maps, map::BUDGETS)?;
        for index in 0..self.budgets.count.min(old.count) {
            // SAFETY: words of the mappings, aligned and touched by atomic operations only.
            unsafe {
                let tat = AtomicU64::from_ptr(&raw mut (*old.value(index)).tat).load(Relaxed);
                AtomicU64::from_ptr(&raw mut (*self.budgets.value(index)).tat).store(tat, Relaxed);
            }
        }
        Ok(())
    }

    /// Takes over what another set of pinned maps, with the same key, knows of sources. The filters may
    /// differ in size: a place takes the marks of all that share sources with it.
    pub(super) fn inherit_known(&self, maps: &Path) -> Result<(), DatapathError> {
        let old: Mapping<KnownWords> = Mapping::pinned(maps, map::KNOWN)?;
        for place in 0..self.known.count {
            for from in overlapping(place, self.known.count, old.count) {
                for (word, from) in zip(words(&self.known, place), words(&old, from)) {
                    merge(word, from.load(Relaxed));
                }
            }
        }
        Ok(())
    }

    /// Who is proven at `now`.
    pub(super) fn snapshot(&self, now: Nanos) -> Snapshot {
        let HashKey { offset, first, second } = self.key;
        let marks = |place| known::proven_marks(&words(&self.known, place), now);
        let key = [offset, first, second];
        Snapshot { key, marks: (0..self.known.count).map(marks).collect() }
    }

    /// Marks as proven from `now` on whoever was so when the snapshot was taken.
    pub(super) fn restore(&self, snapshot: &Snapshot, now: Nanos) {
        let old = u32::try_from(snapshot.marks.len()).unwrap_or(0);
        if old == 0 {
            return;
        }
        for place in 0..self.known.count {
            let marks = overlapping(place, self.known.count, old)
                .filter_map(|from| snapshot.marks.get(usize::try_from(from).ok()?));
            let marks = marks.fold(0, |sum, marks| sum | marks);
            if marks != 0 {
                Mark::of_many(marks).set(&words(&self.known, place), Filter::Proven, now);
            }
        }
    }

    /// Buckets in use at `now`, of IPv4 and IPv6, as at most so many `lines` of each table have them.
    pub(super) fn tracked(&self, now: Tick, lines: u32) -> [Tracked; 2] {
        let mut tracked = [Tracked::default(); 2];
        let portions = [Portion::of(self.v4.count, lines), Portion::of(self.v6.count, lines)];
        self.slots_of(portions, |family, meta, tat, _| {
            let meta = Meta(meta.load(Relaxed));
            if meta.class().is_some() && is_ahead(Tick(tat.load(Relaxed)), now) {
                let tracked = &mut tracked[family as usize];
                if meta.is_proven() { tracked.proven += 1 } else { tracked.unproven += 1 }
            }
        });
        for (tracked, portion) in zip(&mut tracked, portions) {
            tracked.proven = portion.scaled(tracked.proven);
            tracked.unproven = portion.scaled(tracked.unproven);
        }
        tracked
    }

    /// Makes every bucket look up its policy again, so that none takes a policy for current when the
    /// count of epochs, of which a bucket keeps eight bits, comes round.
    pub(super) fn forget_policies(&self) {
        self.slots(|_, word, _, _| {
            let meta = Meta(word.load(Relaxed));
            if meta.class().is_some() {
                // Whoever changed it meanwhile did so under the present epoch.
                let _ = word.compare_exchange(meta.0, meta.forgotten().0, SeqCst, Relaxed);
            }
        });
    }

    /// Makes the buckets of sources under these prefixes, as far as they are of `epoch`, look up their
    /// policies again. (Also those of the few IPv6 sources that are told by other bits than their first.)
    pub(super) fn outdate(&self, prefixes: &[Place], epoch: u32) {
        let networks: Vec<_> = prefixes.iter().map(Network::of).collect();
        self.slots(|family, word, _, source| {
            let meta = Meta(word.load(Relaxed));
            let is_under = |network: &Network| network.has(family, meta, source);
            if meta.class().is_some() && meta.is_of(epoch) && networks.iter().any(is_under) {
                let old = meta.with_policy(epoch.wrapping_sub(1), PolicyId::DEFAULT);
                // Whoever changed it meanwhile looked the policy up meanwhile.
                let _ = word.compare_exchange(meta.0, old.0, SeqCst, Relaxed);
            }
        });
    }

    /// The theoretical arrival time of a budget.
    pub(super) fn budget(&self, cell: BudgetCell) -> &AtomicU64 {
        let budget = self.budgets.value(cell.index());
        // SAFETY: a word of the mapping, aligned and touched by atomic operations only.
        unsafe { AtomicU64::from_ptr(&raw mut (*budget).tat) }
    }

    /// Shows each slot of both tables: its meta, the theoretical arrival time of its packets, and the bits
    /// of its source.
    fn slots(&self, show: impl FnMut(Family, &AtomicU32, &AtomicU64, u64)) {
        self.slots_of([self.v4.count, self.v6.count].map(|count| Portion::of(count, count)), show);
    }

    /// The same of a portion of each table's lines.
    fn slots_of(
        &self,
        [v4, v6]: [Portion; 2],
        mut show: impl FnMut(Family, &AtomicU32, &AtomicU64, u64),
    ) {
        for index in v4.lines() {
            for slot in 0..V4_SLOTS {
                let (meta, source, tat) = self.slot_v4(index, slot);
                show(Family::Ipv4, meta, tat, source);
            }
        }
        for index in v6.lines() {
            for slot in 0..V6_SLOTS {
                let (meta, source, tat) = self.slot_v6(index, slot);
                show(Family::Ipv6, meta, tat, source);
            }
        }
    }

    /// Meta, bits of the source and theoretical arrival time of one slot.
    fn slot_v4(&self, index: u32, slot: usize) -> (&AtomicU32, u64, &AtomicU64) {
        let line = self.v4.value(index);
        // SAFETY: words of the mapping, aligned and touched by atomic operations only.
        unsafe {
            let meta = AtomicU32::from_ptr((&raw mut (*line).metas[slot]).cast());
            let source = AtomicU32::from_ptr(&raw mut (*line).sources[slot]).load(SeqCst);
            (meta, source.into(), AtomicU64::from_ptr(&raw mut (*line).packets[slot]))
        }
    }

    fn slot_v6(&self, index: u32, slot: usize) -> (&AtomicU32, u64, &AtomicU64) {
        let line = self.v6.value(index);
        // SAFETY: as above.
        unsafe {
            let meta = AtomicU32::from_ptr((&raw mut (*line).metas[slot]).cast());
            let source = AtomicU64::from_ptr(&raw mut (*line).sources[slot]).load(SeqCst);
            (meta, source, AtomicU64::from_ptr(&raw mut (*line).packets[slot]))
        }
    }
}

/// Lines of a table: runs of neighbours, as memory is read best, spread over it.
#[derive(Clone, Copy)]
struct Portion {
    count: u32,
    runs: u32,
    length: u32,
}

impl Portion {
    /// A page's worth of lines.
    const RUN: u32 = 64;

    /// All `count` lines, or `most` of them.
    fn of(count: u32, most: u32) -> Self {
        if count <= most {
            return Self { count, runs: 1, length: count };
        }
        Self { count, runs: most.div_ceil(Self::RUN), length: Self::RUN }
    }

    fn lines(self) -> impl Iterator<Item = u32> {
        let start = move |run| u64::from(run) * u64::from(self.count) / u64::from(self.runs);
        let starts = (0..self.runs).map(move |run| u32::try_from(start(run)).unwrap_or(u32::MAX));
        starts.flat_map(move |start| start..start.saturating_add(self.length).min(self.count))
    }

    /// What `found` in the portion is in all of the table.
    fn scaled(self, found: u64) -> u64 {
        let lines = u64::from(self.runs) * u64::from(self.length);
        found.saturating_mul(self.count.into()) / lines.max(1)
    }
}

/// The sources under a prefix, as the tables have them.
struct Network {
    family: Family,
    /// The bits that the sources have in common, at the top of 64.
    bits: u64,
    mask: u64,
}

impl Network {
    fn of((bits, key): &Place) -> Self {
        let SourceAddress { family, high, .. } = key.address();
        let family = match family {
            AddressFamily::Ipv4 => Family::Ipv4,
            AddressFamily::Ipv6 => Family::Ipv6,
        };
        let length = bits.saturating_sub(PrefixKey::FIXED_BITS).min(u64::BITS);
        let mask = u64::MAX.checked_shl(u64::BITS - length).unwrap_or(0);
        Self { family, bits: high & mask, mask }
    }

    fn has(&self, family: Family, meta: Meta, source: u64) -> bool {
        let is_among = match family {
            Family::Ipv4 => source << 32 & self.mask == self.bits,
            Family::Ipv6 | Family::Other => !meta.is_of_prefix() || source & self.mask == self.bits,
        };
        family == self.family && is_among
    }
}

/// The places, of `old` ones, that have sources in common with `place`, of `new` ones.
fn overlapping(place: u32, new: u32, old: u32) -> RangeInclusive<u32> {
    let (place, new, old) = (u64::from(place), u64::from(new), u64::from(old));
    let at = |bound: u64| u32::try_from(bound).unwrap_or(u32::MAX);
    at(place * old / new)..=at(((place + 1) * old - 1) / new)
}

/// Adds the marks of the word `from` to a word of the filters.
fn merge(word: &AtomicU64, from: u64) {
    const ATTEMPTS: usize = 8;
    let mut current = word.load(Relaxed);
    for _ in 0..ATTEMPTS {
        let merged = known::merge(current, from);
        match word.compare_exchange(current, merged, SeqCst, Relaxed) {
            Ok(_) => return,
            // The program marked a source meanwhile.
            Err(found) => current = found,
        }
    }
}

/// The words of `filters` at `place`.
fn words(filters: &Mapping<KnownWords>, place: u32) -> [&AtomicU64; KNOWN_WORDS] {
    let words = filters.value(place).cast::<u64>();
    // SAFETY: words of the mapping, aligned and touched by atomic operations only; the value has so many.
    array::from_fn(|word| unsafe { AtomicU64::from_ptr(words.add(word)) })
}

/// The memory of an array map with values of type `V`.
pub(super) struct Mapping<V> {
    memory: MmapRaw,
    count: u32,
    value: PhantomData<V>,
}

impl<V: aya::Pod> Mapping<V> {
    pub(super) fn of(ebpf: &Ebpf, name: &'static str) -> Result<Self, DatapathError> {
        Self::new(ebpf.map(name).ok_or(DatapathError::MissingMap(name))?, name)
    }

    pub(super) fn pinned(maps: &Path, name: &'static str) -> Result<Self, DatapathError> {
        let map = MapData::from_pin(maps.join(name)).and_then(Map::from_map_data);
        Self::new(&map.map_err(|error| DatapathError::map(name, error))?, name)
    }

    fn new(map: &Map, name: &'static str) -> Result<Self, DatapathError> {
        let array: Array<&MapData, V> =
            map.try_into().map_err(|error| DatapathError::map(name, error))?;
        let count = array.len();
        let Map::Array(data) = map else { return Err(DatapathError::MissingMap(name)) };
        let length = usize::try_from(count).unwrap_or(usize::MAX).saturating_mul(size_of::<V>());
        let memory = MmapOptions::new()
            .len(length)
            .map_raw(data.fd().as_fd().as_raw_fd())
            .map_err(|error| DatapathError::Share { map: name, error })?;
        Ok(Self { memory, count, value: PhantomData })
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    pub(super) fn values(&self) -> impl Iterator<Item = *mut V> {
        (0..self.count).map(|index| self.value(index))
    }

    /// The value at `index`, which must be below the count.
    pub(super) fn value(&self, index: u32) -> *mut V {
        assert!(index < self.count, "{index} of {}", self.count);
        // SAFETY: within the mapping, as just checked.
        unsafe { self.memory.as_mut_ptr().cast::<V>().add(index as usize) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_portion_has_so_many_lines_spread_over_the_table_and_none_twice() {
        for (count, most) in [(1_000_003, 1 << 16), (1 << 23, 1 << 16), (65_537, 65_536), (8, 100)]
        {
            let lines: Vec<_> = Portion::of(count, most).lines().collect();
            assert_eq!(lines.len(), count.min(most) as usize);
            assert!(lines.is_sorted_by(|a, b| a < b) && lines.iter().all(|line| *line < count));
            // Whatever part of the table is looked at, as many of the portion are in it as of the table.
            let lower = lines.iter().filter(|line| **line < count / 2).count();
            assert!(lower.abs_diff(lines.len() / 2) <= 64, "{lower} of {}", lines.len());
        }
        assert_eq!(Portion::of(1 << 20, 1 << 16).scaled(3), 48);
        assert_eq!(Portion::of(8, 100).scaled(3), 3);
    }
}
