//! Maps that the agent and the program share by memory: the bucket table and the filters.

use std::{
    marker::PhantomData,
    os::fd::{AsFd as _, AsRawFd as _},
    sync::atomic::{
        AtomicU32, AtomicU64,
        Ordering::{Relaxed, SeqCst},
    },
};

use aya::{
    Ebpf,
    maps::{Array, MapData},
};
use limiter_common::{
    abi::{KNOWN_WORDS, KnownWords, LineV4, LineV6, V4_SLOTS, V6_SLOTS, map},
    bucket::Cell,
    hash::{HashKey, SourceHash},
    known::{Filter, Known, Mark},
    packet::Source,
    table::{Meta, is_ahead},
    time::{Nanos, Tick},
};
use memmap2::{MmapOptions, MmapRaw};

use super::DatapathError;

/// How many buckets of a table are in use, that is, not full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tracked {
    /// Of sources that have proven their address.
    pub proven: u64,
    /// Of others.
    pub unproven: u64,
}

/// The table and the filters, as memory.
pub(super) struct SharedMaps {
    v4: Mapping<LineV4>,
    v6: Mapping<LineV6>,
    known: Mapping<KnownWords>,
    key: HashKey,
}

impl SharedMaps {
    pub(super) fn new(ebpf: &Ebpf, key: HashKey) -> Result<Self, DatapathError> {
        Ok(Self {
            v4: Mapping::of(ebpf, map::BUCKETS_V4)?,
            v6: Mapping::of(ebpf, map::BUCKETS_V6)?,
            known: Mapping::of(ebpf, map::KNOWN)?,
            key,
        })
    }

    /// Marks a source as proven from `now` on.
    pub(super) fn prove(&self, source: Source, now: Nanos) {
        let hash = self.key.source(source);
        Mark::of(hash).set(&self.place(hash), Filter::Proven, now);
    }

    /// Buckets in use at `now`, of IPv4 and IPv6.
    pub(super) fn tracked(&self, now: Tick) -> [Tracked; 2] {
        let mut tracked = [Tracked::default(); 2];
        let mut count = |family: usize, meta: Meta, tat: u64| {
            if meta.class().is_some() && is_ahead(Tick(tat), now) {
                let tracked: &mut Tracked = &mut tracked[family];
                if meta.is_proven() { tracked.proven += 1 } else { tracked.unproven += 1 }
            }
        };
        for line in self.v4.values() {
            for slot in 0..V4_SLOTS {
                // SAFETY: words of the mapping, read as the program writes them: whole.
                let (meta, tat) = unsafe {
                    (load32(&raw mut (*line).metas[slot]), load64(&raw mut (*line).packets[slot]))
                };
                count(0, meta, tat);
            }
        }
        for line in self.v6.values() {
            for slot in 0..V6_SLOTS {
                // SAFETY: as above.
                let (meta, tat) = unsafe {
                    (load32(&raw mut (*line).metas[slot]), load64(&raw mut (*line).packets[slot]))
                };
                count(1, meta, tat);
            }
        }
        tracked
    }

    /// Makes every bucket look up its policy again, so that none takes a policy for current when the
    /// count of epochs, of which a bucket keeps eight bits, comes round.
    pub(super) fn forget_policies(&self) {
        for line in self.v4.values() {
            // SAFETY: as above.
            (0..V4_SLOTS).for_each(|slot| unsafe { forget(&raw mut (*line).metas[slot]) });
        }
        for line in self.v6.values() {
            // SAFETY: as above.
            (0..V6_SLOTS).for_each(|slot| unsafe { forget(&raw mut (*line).metas[slot]) });
        }
    }

    fn place(&self, hash: SourceHash) -> Place<'_> {
        let place = hash.place(self.known.count);
        let words = self.known.value(place).cast::<AtomicU64>();
        // SAFETY: the value lives as long as the mapping, is aligned, and all who touch it while it
        // is shared do so atomically.
        Place(std::array::from_fn(|word| unsafe { &*words.add(word) }))
    }
}

/// # Safety
/// The word must be part of a live mapping.
unsafe fn load32(word: *mut Meta) -> Meta {
    // SAFETY: the caller's promise; maps are aligned.
    Meta(unsafe { AtomicU32::from_ptr(word.cast()) }.load(Relaxed))
}

/// # Safety
/// The word must be part of a live mapping.
unsafe fn load64(word: *mut u64) -> u64 {
    // SAFETY: the caller's promise; maps are aligned.
    unsafe { AtomicU64::from_ptr(word) }.load(Relaxed)
}

/// # Safety
/// The word must be part of a live mapping.
unsafe fn forget(word: *mut Meta) {
    // SAFETY: the caller's promise; maps are aligned.
    let word = unsafe { AtomicU32::from_ptr(word.cast()) };
    let found = Meta(word.load(Relaxed));
    if found.class().is_some() {
        // Whoever changed it meanwhile did so under the present epoch.
        let _ = word.compare_exchange(found.0, found.forgotten().0, SeqCst, Relaxed);
    }
}

/// The words of one place of the filters.
struct Place<'a>([&'a AtomicU64; KNOWN_WORDS]);

impl<'a> Known for Place<'a> {
    type Cell = Word<'a>;

    fn word(&self, place: usize) -> Word<'a> {
        Word(self.0[place])
    }
}

struct Word<'a>(&'a AtomicU64);

impl Cell for Word<'_> {
    fn load(&self) -> u64 {
        self.0.load(Relaxed)
    }

    fn compare_exchange(&self, current: u64, new: u64) -> u64 {
        let swapped = self.0.compare_exchange(current, new, SeqCst, Relaxed);
        swapped.unwrap_or_else(|found| found)
    }

    fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Relaxed);
    }
}

/// The memory of an array map with values of type `V`.
struct Mapping<V> {
    memory: MmapRaw,
    count: u32,
    value: PhantomData<V>,
}

impl<V: aya::Pod> Mapping<V> {
    fn of(ebpf: &Ebpf, name: &'static str) -> Result<Self, DatapathError> {
        let failed = |error| DatapathError::map(name, error);
        let data = ebpf.map(name).ok_or(DatapathError::MissingMap(name))?;
        let array: Array<&MapData, V> = data.try_into().map_err(failed)?;
        let count = array.len();
        let aya::maps::Map::Array(data) = data else { return Err(DatapathError::MissingMap(name)) };
        let length = usize::try_from(count).unwrap_or(usize::MAX).saturating_mul(size_of::<V>());
        let memory = MmapOptions::new()
            .len(length)
            .map_raw(data.fd().as_fd().as_raw_fd())
            .map_err(|error| DatapathError::Share { map: name, error })?;
        Ok(Self { memory, count, value: PhantomData })
    }

    fn values(&self) -> impl Iterator<Item = *mut V> {
        (0..self.count).map(|index| self.value(index))
    }

    /// The value at `index`, which must be below the count.
    fn value(&self, index: u32) -> *mut V {
        assert!(index < self.count, "{index} of {}", self.count);
        // SAFETY: within the mapping, as just checked.
        unsafe { self.memory.as_mut_ptr().cast::<V>().add(index as usize) }
    }
}
