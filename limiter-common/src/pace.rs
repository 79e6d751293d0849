//! How often packets become events: one in N, where N follows the rate of what is counted in one cell.
//!
//! Each cell of the counter map (one CPU's, of one interface, family, class, reason and action) has a
//! pace of its own, so that what is rare is shown in full while what floods is thinned out; and since it
//! lies beside the count, a packet that is no event costs one comparison. An event stands for all
//! packets of its cell since the last one, so that the weights of all events add up to the counts.

use crate::abi::Pace;
use crate::time::{Nanos, Tick};

/// Events a second, of all CPUs and cells together.
pub const EVENT_RATE: u64 = 4_000;
/// Events that may come at once. Cells that are thinned out leave half of them to those that are not.
pub const EVENT_BURST: u64 = 400;

/// The longest average distance between two events of a cell, in packets: what bounds how long a trickle
/// that follows a flood in the same cell goes unseen. A flood's cell asks for more events than the budget
/// has, which costs it next to nothing.
pub const LONGEST_GAP: u32 = 512;

/// A point in time, or a time, in units of 2¹⁴ ns (16.4 µs), modulo 2³² (19.5 hours).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moments(pub u32);

impl Moments {
    /// The time between two events of a cell where `cpus` share the budget: 1 ms for each of them.
    #[must_use]
    pub const fn interval(cpus: u32) -> Self {
        /// A millisecond.
        const MILLISECOND: u32 = 61;
        Self(cpus.saturating_mul(MILLISECOND))
    }
}

impl From<Nanos> for Moments {
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "modulo 2³²")]
    fn from(time: Nanos) -> Self {
        Self((time.0 >> 14) as u32)
    }
}

/// The budget as a token bucket: what an event costs, and how far ahead of now its bucket may run for an
/// event of this weight.
#[inline(always)]
#[must_use]
pub const fn budget(weight: u32) -> (u64, u64) {
    const COST: u64 = Tick::PER_SECOND / EVENT_RATE;
    const TOLERANCE: u64 = COST * EVENT_BURST;
    (COST, if weight > 1 { TOLERANCE / 2 } else { TOLERANCE })
}

impl Pace {
    /// For what is never shown.
    pub const NEVER: Self = Self { next: u64::MAX, shown: 0, at: 0 };

    /// For how many packets one stands that is the cell's `count`th.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "there are fewer than 2³² between two")]
    pub const fn weight(&self, count: u64) -> u32 {
        (count as u32).wrapping_sub(self.shown)
    }

    /// Sets when the next event is due after the cell's `count`th packet at `now`, so that they come
    /// every `interval`. `random` makes the distance anything between half and one and a half of that:
    /// who sends in step cannot hide between two.
    #[inline(always)]
    pub fn advance(&mut self, count: u64, now: Moments, interval: Moments, random: u32) {
        let weight = u64::from(self.weight(count));
        let elapsed = u64::from(now.0.wrapping_sub(self.at)).max(1);
        // A few packets in a row say little of the rate: it may grow by four at a time.
        let most = (weight << 2).min(LONGEST_GAP.into());
        let wanted = (weight * u64::from(interval.0) / elapsed).min(most);
        let least = wanted - (wanted >> 1);
        let spread = ((wanted - least) << 1) + 1;
        let gap = least + ((u64::from(random) * spread) >> 32);
        self.next = count + gap.saturating_sub(1);
    }

    /// Notes that the cell's `count`th packet was shown at `now`.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "as for the weight")]
    pub const fn show(&mut self, count: u64, now: Moments) {
        self.shown = count as u32;
        self.at = now.0;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The numbers of the packets shown and their weights, of packets that come every `gap` nanoseconds.
    fn run(
        pace: &mut Pace,
        counts: core::ops::Range<u64>,
        start: u64,
        gap: u64,
        mut random: u32,
    ) -> std::vec::Vec<(u64, u64)> {
        let mut shown = std::vec::Vec::new();
        for (index, count) in counts.enumerate() {
            if count <= pace.next {
                continue;
            }
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let now = Moments::from(Nanos(start + index as u64 * gap));
            shown.push((count, pace.weight(count).into()));
            pace.advance(count, now, Moments::interval(2), random);
            pace.show(count, now);
        }
        shown
    }

    proptest! {
        /// The weights add up to the count of the last one shown, whatever the rate.
        #[test]
        fn weights_add_up(
            start in 0..u64::MAX / 2, gap in 1..100_000_000_u64, random in any::<u32>(), count in 1..50_000_u64,
        ) {
            let mut pace = Pace::default();
            let shown = run(&mut pace, 1..count + 1, start, gap, random);
            let sum: u64 = shown.iter().map(|(_, weight)| weight).sum();
            prop_assert_eq!(Some(sum), shown.last().map(|(number, _)| *number));
            prop_assert_eq!(shown[0], (1, 1), "the first is shown");
            prop_assert!(count - sum <= u64::from(LONGEST_GAP) * 3 / 2);
        }

        /// What comes more slowly than events may is shown in full, also after a flood.
        #[test]
        fn a_trickle_is_shown_in_full(random in any::<u32>(), flood in 1..1_000_000_u64) {
            let mut pace = Pace::default();
            let shown = run(&mut pace, 1..flood, 0, 100, random);
            let after = flood * 100 + 3_000_000;
            let trickle = run(&mut pace, flood..flood + 2_000, after, 3_000_000, random);
            prop_assert!(!shown.is_empty() || flood == 1);
            let tail = &trickle[2..];
            prop_assert!(tail.iter().all(|(_, weight)| *weight == 1), "{:?}", &trickle[..4]);
            prop_assert!(trickle.len() as u64 > 2_000 - 2 * u64::from(LONGEST_GAP));
        }

        /// At any rate that the longest gap allows for, they come every 2 ms. (Where that is four packets or
        /// five, whole numbers make it up to a third more.)
        #[test]
        fn events_keep_their_interval(gap in 4_000..500_000_u64, random in any::<u32>()) {
            let count = 2_000_000_000 / gap;
            let shown = run(&mut Pace::default(), 1..count, 77, gap, random).len();
            prop_assert!((800..=1_400).contains(&shown), "{shown} in two seconds");
        }
    }

    /// A source that is every third packet is a third of what is shown.
    #[test]
    fn packets_in_step_are_shown_alike() {
        let shown = run(&mut Pace::default(), 1..2_000_000, 0, 10_000, 1);
        let third: u64 = shown.iter().filter(|(it, _)| it % 3 == 0).map(|(_, weight)| weight).sum();
        assert!((600_000..=730_000).contains(&third), "{third}");
    }

    #[test]
    fn a_flood_leaves_half_of_the_burst() {
        let ((cost, flood), (same, rare)) = (budget(2), budget(1));
        assert_eq!((cost, rare / cost, flood / cost), (same, EVENT_BURST, EVENT_BURST / 2));
    }
}
