//! Who is seen most, in bounded memory.
//!
//! A weighted sketch of frequent items after Misra and Gries, which drops the lesser half of its entries
//! whenever it is full (as "A High-Performance Algorithm for Identifying Frequent Items in Data Streams",
//! Anderson et al. 2017, does). What it has dropped of a key is at most [`Sketch::missed`], and that is at
//! most the sum of all weights divided by half of the capacity. The sums that each entry has besides are
//! what was seen since it came in.

use std::collections::HashMap;
use std::hash::Hash;

use limiter_common::abi::SampledOutcome;

use super::By;

/// Keys that one sketch holds at most: seven eighths of a power of two, as hash tables grow.
pub(super) const CAPACITY: usize = 1792;

/// Packets and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Amount {
    /// Packets.
    pub(super) packets: u64,
    /// Bytes of their frames.
    pub(super) bytes: u64,
}

impl Amount {
    pub(super) fn add(&mut self, other: Self) {
        self.packets = self.packets.saturating_add(other.packets);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }

    pub(super) fn of(self, by: By) -> u64 {
        match by {
            By::Packets => self.packets,
            By::Bytes => self.bytes,
        }
    }

    fn map(self, other: Self, merge: impl Fn(u64, u64) -> u64) -> Self {
        Self { packets: merge(self.packets, other.packets), bytes: merge(self.bytes, other.bytes) }
    }
}

/// What is known of one key.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Tally {
    /// What was dropped.
    pub(super) dropped: Amount,
    /// What would have been.
    pub(super) would_drop: Amount,
    /// What may be missing of their sum, because it came before the key had an entry.
    pub(super) missing: Amount,
    /// The variance that sampling gives the number of packets, and that of bytes.
    pub(super) variance: [f64; 2],
    /// The last event.
    pub(super) last: SampledOutcome,
}

impl Tally {
    /// One event, which stands for `weight` packets of `length` bytes.
    #[must_use]
    pub(super) fn event(
        weight: u32,
        length: u32,
        outcome: SampledOutcome,
        is_dropped: bool,
    ) -> Self {
        let bytes = u64::from(weight) * u64::from(length);
        let amount = Amount { packets: weight.into(), bytes };
        let none = Amount::default();
        let (dropped, would_drop) = if is_dropped { (amount, none) } else { (none, amount) };
        // Of one that is seen with a probability of 1/weight (Horvitz and Thompson).
        let variance = f64::from(weight) * (f64::from(weight) - 1.0);
        let squared = f64::from(length) * f64::from(length);
        let variance = [variance, variance * squared];
        Self { dropped, would_drop, missing: none, variance, last: outcome }
    }

    /// What was dropped or would have been.
    #[must_use]
    pub(super) fn sum(&self) -> Amount {
        let mut sum = self.dropped;
        sum.add(self.would_drop);
        sum
    }

    /// How far the true sum may be off: what may be missing, and three standard errors of sampling
    /// (which are exceeded once in 370 times).
    #[must_use]
    pub(super) fn error(&self, by: By) -> u64 {
        let [packets, bytes] = self.variance;
        let variance = match by {
            By::Packets => packets,
            By::Bytes => bytes,
        };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "positive, and saturates"
        )]
        let sampling = (3.0 * variance.sqrt()).ceil() as u64;
        self.missing.of(by).saturating_add(sampling)
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.dropped.add(other.dropped);
        self.would_drop.add(other.would_drop);
        self.missing.add(other.missing);
        for (sum, more) in self.variance.iter_mut().zip(other.variance) {
            *sum += more;
        }
        self.last = other.last;
    }

    /// No less than the true sum, but for sampling.
    fn most(&self) -> Amount {
        let mut sum = self.sum();
        sum.add(self.missing);
        sum
    }
}

/// The sketch.
#[derive(Clone, Debug)]
pub(super) struct Sketch<K> {
    by: By,
    capacity: usize,
    entries: HashMap<K, Tally>,
    missed: Amount,
}

impl<K: Copy + Eq + Hash> Sketch<K> {
    /// An empty one, which keeps the first by packets or by bytes.
    #[must_use]
    pub(super) fn new(by: By, capacity: usize) -> Self {
        Self { by, capacity, entries: HashMap::new(), missed: Amount::default() }
    }

    /// Adds to a key.
    pub(super) fn add(&mut self, key: K, event: &Tally) {
        if let Some(tally) = self.entries.get_mut(&key) {
            tally.add(event);
            return;
        }
        if self.entries.len() >= self.capacity {
            self.purge();
        }
        self.entries.insert(key, Tally { missing: self.missed, ..*event });
    }

    /// What is known of a key; of one without an entry, what may have been missed of it.
    #[must_use]
    pub(super) fn tally(&self, key: &K) -> Tally {
        let unknown = || Tally { missing: self.missed, ..Tally::default() };
        self.entries.get(key).copied().unwrap_or_else(unknown)
    }

    /// The keys that have an entry.
    pub(super) fn keys(&self) -> impl Iterator<Item = K> {
        self.entries.keys().copied()
    }

    /// The most that a key without an entry can have had.
    #[cfg(test)]
    #[must_use]
    pub(super) fn missed(&self) -> Amount {
        self.missed
    }

    /// Drops the lesser half of the entries.
    fn purge(&mut self) {
        let by = self.by;
        let mut ranks: Vec<_> = self.entries.values().map(|it| it.most().of(by)).collect();
        let middle = ranks.len() / 2;
        let (_, &mut median, _) = ranks.select_nth_unstable(middle);
        let mut missed = self.missed;
        self.entries.retain(|_, tally| {
            let most = tally.most();
            let stays = most.of(by) > median;
            if !stays {
                missed = missed.map(most, u64::max);
            }
            stays
        });
        self.missed = missed;
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn event(weight: u32, length: u32) -> Tally {
        Tally::event(weight, length, SampledOutcome::default(), true)
    }

    /// Heavy keys and many that come once, in any order.
    fn stream() -> impl Strategy<Value = Vec<(u32, u32, u32)>> {
        let heavy = (0..5_u32, 1..500_u32, 60..1500_u32);
        let light = (5..5_000_u32, 1..500_u32, 60..1500_u32);
        vec(prop_oneof![heavy, light], 1..4_000)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// The true sum of each key is between what is known of it and that with what may be missing;
        /// which is at most the sum of all, divided by half of the capacity; by packets and by bytes.
        #[test]
        fn the_bound_holds(stream in stream(), capacity in 8..200_usize, is_by_bytes in any::<bool>()) {
            let by = if is_by_bytes { By::Bytes } else { By::Packets };
            let mut sketch = Sketch::new(by, capacity);
            let mut truth: HashMap<u32, Amount> = HashMap::new();
            let mut sum = Amount::default();
            for (key, weight, length) in stream {
                let event = event(weight, length);
                sketch.add(key, &event);
                truth.entry(key).or_default().add(event.sum());
                sum.add(event.sum());
                prop_assert!(sketch.entries.len() <= capacity);
            }
            for (key, truth) in truth {
                let tally = sketch.tally(&key);
                for by in [By::Packets, By::Bytes] {
                    let (low, high) = (tally.sum().of(by), tally.most().of(by));
                    prop_assert!(low <= truth.of(by) && truth.of(by) <= high, "{low} {truth:?} {high}");
                }
            }
            let bound = sum.of(by) / (capacity as u64 / 2);
            prop_assert!(sketch.missed().of(by) <= bound, "{:?} of {sum:?}", sketch.missed());
        }

        /// Who sent more than that has an entry.
        #[test]
        fn the_heavy_are_never_lost(stream in stream(), weight in 1..50_u32) {
            let mut sketch = Sketch::new(By::Packets, 100);
            let mut sum = 0;
            for (key, light, length) in stream {
                sketch.add(key + 1, &event(light % 3 + 1, length));
                sketch.add(0, &event(weight, 60));
                sum += u64::from(light % 3 + 1 + weight);
            }
            if sketch.tally(&0).sum().packets > sum / 50 {
                prop_assert!(sketch.keys().any(|key| key == 0));
                prop_assert_eq!(sketch.tally(&0).missing, Amount::default(), "it was there first");
            }
        }
    }

    #[test]
    fn the_error_grows_with_the_weights() {
        let exact = event(1, 60);
        assert_eq!((exact.error(By::Packets), exact.error(By::Bytes)), (0, 0));
        let mut tally = event(100, 60);
        for _ in 0..99 {
            tally.add(&event(100, 60));
        }
        assert_eq!(tally.sum().packets, 10_000);
        // Three times the root of 100 × 100 × 99.
        assert_eq!(tally.error(By::Packets), 2_985);
    }
}
