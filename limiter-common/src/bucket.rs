//! The token bucket, as a generic cell rate algorithm (ITU-T I.371, RFC 2697 in other words).
//!
//! A bucket is one number, its theoretical arrival time (TAT): the instant at which it will be full
//! again. A packet costs `cost` ticks and conforms if the TAT, moved on by its cost, is no more
//! than `tolerance` (burst × cost) ahead of now. That is a token bucket exactly: it refills
//! continuously, loses no fraction, and never holds more than the burst. A burst of 1 is a leaky
//! bucket: packets conform one interval apart. There is no window, so there is no edge of a window
//! to send two bursts around.
//!
//! **Concurrency.** A packet that does not conform writes nothing. One that does is charged without a
//! loop: a TAT that is ahead of now is moved on by an atomic addition, which loses no other CPU's
//! charge; one that lies in the past is swapped for now + cost, and where another CPU was faster the
//! cost is added to what that one wrote. So a race neither lets a packet through uncharged nor drops
//! one that conforms. CPUs that look at the same moment may overdraw the bucket by one packet each:
//! that is a debt, which later packets wait for.

#[cfg(not(target_arch = "bpf"))]
use core::{
    ops::Deref,
    sync::atomic::{
        AtomicU64,
        Ordering::{Relaxed, SeqCst},
    },
};

use crate::time::Tick;
use crate::units::MAX_TOLERANCE;

/// A shared 64-bit word holding a TAT.
pub trait Cell {
    /// Its value.
    fn load(&self) -> u64;
    /// Stores `new` if the value is `current`; returns the value found.
    fn compare_exchange(&self, current: u64, new: u64) -> u64;
    /// Adds to it.
    fn add(&self, amount: u64);
}

/// A word in memory that threads share, or the agent with the kernel.
#[cfg(not(target_arch = "bpf"))]
impl<T: Deref<Target = AtomicU64>> Cell for T {
    fn load(&self) -> u64 {
        AtomicU64::load(self, Relaxed)
    }

    fn compare_exchange(&self, current: u64, new: u64) -> u64 {
        let swapped = AtomicU64::compare_exchange(self, current, new, SeqCst, Relaxed);
        swapped.unwrap_or_else(|found| found)
    }

    fn add(&self, amount: u64) {
        self.fetch_add(amount, SeqCst);
    }
}

/// The time of a packet: read once, and once more for a bucket that was charged at a later time.
pub struct Moment<F> {
    now: Tick,
    clock: F,
    is_second: bool,
}

impl<F: Fn() -> Tick> Moment<F> {
    /// `now`, as just read from `clock`.
    #[inline(always)]
    pub const fn new(now: Tick, clock: F) -> Self {
        Self { now, clock, is_second: false }
    }

    /// The instant.
    #[inline(always)]
    pub const fn now(&self) -> Tick {
        self.now
    }

    /// How much of the bucket in `cell` is used.
    ///
    /// A debt beyond the tolerance was not made by any charge at this instant or before: another
    /// CPU has read the clock after this one (which the host of a virtual CPU may have stopped in
    /// between), so the clock is read again. A flood on accurate clocks hardly ever shows such a
    /// debt, and costs no second reading.
    #[inline(always)]
    pub fn level<C: Cell>(&mut self, cell: &C, cost: u64, tolerance: u64) -> Level {
        let mut level = Level::of(cell, self.now, cost, tolerance);
        if !self.is_second && level.used > tolerance {
            self.now = (self.clock)();
            self.is_second = true;
            level.used = debt(level.tat, self.now, stale_beyond(cost, tolerance));
        }
        level
    }
}

/// A bucket as it was found at some instant.
#[derive(Clone, Copy)]
pub struct Level {
    tat: u64,
    used: u64,
}

impl Level {
    /// The bucket in `cell` at `now`.
    #[inline(always)]
    fn of<C: Cell>(cell: &C, now: Tick, cost: u64, tolerance: u64) -> Self {
        let tat = cell.load();
        Self { tat, used: debt(tat, now, stale_beyond(cost, tolerance)) }
    }

    /// Whether a packet of `cost` conforms.
    #[inline(always)]
    #[must_use]
    pub const fn has_room(self, cost: u64, tolerance: u64) -> bool {
        self.used + cost <= tolerance
    }

    /// Whether more than half of the burst is used.
    #[inline(always)]
    #[must_use]
    pub const fn is_past_half(self, tolerance: u64) -> bool {
        self.used > tolerance / 2
    }

    /// Whether more than four fifths of the burst are used: of a burst of five packets or fewer, none is.
    #[inline(always)]
    #[must_use]
    pub const fn is_past_four_fifths(self, tolerance: u64) -> bool {
        self.used > tolerance - tolerance / 5
    }

    /// Charges the bucket in `cell`, where it was found at `now`, with `cost`.
    #[inline(always)]
    pub fn charge<C: Cell>(self, cell: &C, now: Tick, cost: u64) {
        if !(self.used == 0 && cell.compare_exchange(self.tat, now.plus(cost).0) == self.tat) {
            cell.add(cost);
        }
    }
}

/// Whether a shared budget has room for `cost` within `tolerance` at `now`; writes nothing.
#[inline(always)]
pub fn has_room<C: Cell>(cell: &C, now: Tick, cost: u64, tolerance: u64) -> bool {
    Level::of(cell, now, cost, tolerance).has_room(cost, tolerance)
}

/// Charges the bucket with `cost` if that conforms now, and says whether it did.
#[inline(always)]
pub fn admit<C: Cell, F: Fn() -> Tick>(
    cell: &C,
    moment: &mut Moment<F>,
    cost: u64,
    tolerance: u64,
) -> bool {
    let level = moment.level(cell, cost, tolerance);
    let conforms = level.has_room(cost, tolerance);
    if conforms {
        level.charge(cell, moment.now, cost);
    }
    conforms
}

/// Charges the bucket with `cost`, which conformed a moment ago, even if it no longer does.
#[inline(always)]
pub fn charge<C: Cell>(cell: &C, now: Tick, cost: u64, tolerance: u64) {
    Level::of(cell, now, cost, tolerance).charge(cell, now, cost);
}

/// Shortens a debt left by a looser limit to the present `tolerance`, so that a limit that was
/// raised is felt at once. What is further ahead than any limit allows is left over from before the
/// time line wrapped, and left alone. Losing the race leaves the debt to the next change of settings.
#[inline(always)]
pub fn clamp<C: Cell>(cell: &C, now: Tick, tolerance: u64) {
    let current = cell.load();
    if debt(current, now, MAX_TOLERANCE + Tick::PER_SECOND) > tolerance {
        cell.compare_exchange(current, now.plus(tolerance).0);
    }
}

/// How many ticks of the bucket are used at `now`. A TAT in the past is a full bucket; so is one
/// more than `stale` ahead, which can only be left over from before the time line wrapped.
#[inline(always)]
fn debt(tat: u64, now: Tick, stale: u64) -> u64 {
    let ahead = Tick(tat).since(now);
    if ahead <= 0 {
        return 0;
    }
    let ahead = ahead.cast_unsigned();
    if ahead > stale { 0 } else { ahead }
}

/// The largest debt that a bucket in use can show: twice its tolerance for a limit that was lowered
/// and not yet clamped, one packet overdrawn by each of 256 CPUs, and a second for clocks that
/// differ between CPUs. No overflow: a tolerance is at most 2⁶², a cost below 2⁵⁰.
///
/// So a bucket that nobody touched for between (2.28 years − this) and 2.28 years may be read as
/// partly used; it refills as ever. Any other idle time reads as a full bucket.
#[inline(always)]
fn stale_beyond(cost: u64, tolerance: u64) -> u64 {
    tolerance * 2 + cost * 256 + Tick::PER_SECOND
}

#[cfg(test)]
#[expect(clippy::cast_precision_loss, reason = "ratios")]
mod tests {
    use std::thread;

    use proptest::prelude::*;

    use super::*;
    use crate::time::Nanos;
    use crate::units::{ByteLimit, MAX_RATE_ERROR, PacketLimit, Rate};

    const TEN_YEARS: u64 = 10 * 365 * 86_400 * 1_000_000_000;

    fn start() -> impl Strategy<Value = u64> {
        prop_oneof![Just(0), 0..TEN_YEARS, Just(TEN_YEARS), Just((1 << 56) - 1)]
    }

    fn packet_rate() -> impl Strategy<Value = Rate> {
        prop_oneof![
            Just(PacketLimit::SLOWEST),
            Just(PacketLimit::FASTEST),
            (1..=30_000_000_u64, prop_oneof![Just(1_u64), Just(60), Just(3600)])
                .prop_map(|(count, seconds)| Rate::new(count, seconds).unwrap()),
        ]
    }

    fn at(now: Tick) -> Moment<impl Fn() -> Tick> {
        Moment::new(now, move || now)
    }

    /// A packet each `gap` ticks for `count` packets: how many are admitted.
    fn run(tat: &AtomicU64, start: Tick, gap: u64, count: u64, cost: u64, tolerance: u64) -> u64 {
        (0..count).filter(|i| admit(&tat, &mut at(start.plus(i * gap)), cost, tolerance)).count()
            as u64
    }

    proptest! {
        /// An overloaded bucket admits burst + rate × time, at any uptime. (A burst of 1 has a
        /// property of its own below.)
        #[test]
        fn admits_burst_plus_rate_times_time(
            rate in packet_rate(), burst in 2..2_000_u64, start in start(), overload in 2..20_u64,
        ) {
            let Ok(limit) = PacketLimit::new(rate, burst) else { return Ok(()) };
            let start = Tick::from(Nanos(start));
            let tat = AtomicU64::new(start.0);
            let gap = (limit.cost() / overload).max(1);
            let count = overload * (burst + 5_000);
            let admitted = run(&tat, start, gap, count, limit.cost(), limit.tolerance());
            let seconds = (gap * (count - 1)) as f64 / Tick::PER_SECOND as f64;
            let expected = burst as f64 + rate.per_second() * seconds;
            let error = (admitted as f64 - expected).abs();
            prop_assert!(error <= 1.0 + expected * MAX_RATE_ERROR, "{admitted} of {expected}");
        }

        /// Bytes: the same, for any frame length.
        #[test]
        fn admits_bytes_at_their_rate(
            bytes_per_second in prop_oneof![
                1_000..25_000_000_000_u64, Just(25_000_000_000), Just(1_000),
            ],
            length in prop_oneof![Just(60_u32), 60..9_000_u32, Just(9_000)],
            start in start(),
        ) {
            let rate = Rate::new(bytes_per_second, 1).unwrap();
            let burst = 100 * u64::from(length);
            let limit = ByteLimit::new(rate, burst).unwrap();
            let start = Tick::from(Nanos(start));
            let tat = AtomicU64::new(start.0);
            let cost = limit.cost_of(length);
            let gap = (cost / 4).max(1);
            let count = 40_000;
            let admitted = run(&tat, start, gap, count, cost, limit.tolerance());
            let seconds = (gap * (count - 1)) as f64 / Tick::PER_SECOND as f64;
            let expected = 100.0 + rate.per_second() * seconds / f64::from(length);
            let error = (admitted as f64 - expected).abs();
            prop_assert!(error <= 1.0 + expected * MAX_RATE_ERROR, "{admitted} of {expected}");
        }

        /// A burst of 1 spaces packets by the interval of the rate: from a load with gaps of `gap`
        /// it takes the first packet that is no sooner, each time.
        #[test]
        fn a_burst_of_one_spaces_packets(
            rate in packet_rate(), start in start(), percent in 1..100_u64,
        ) {
            let limit = PacketLimit::new(rate, 1).unwrap();
            let start = Tick::from(Nanos(start));
            let gap = (limit.cost() * percent / 100).max(1);
            let count = 20_000;
            let spacing = limit.cost().div_ceil(gap);
            let admitted = run(&AtomicU64::new(start.0), start, gap, count, limit.cost(), limit.tolerance());
            prop_assert_eq!(admitted, count.div_ceil(spacing));
        }

        /// A CPU that stood still between reading the clock and looking at the bucket reads it
        /// again, and drops nothing that conforms.
        #[test]
        fn an_old_reading_of_the_clock_drops_nothing(
            rate in packet_rate(), start in start(), late in 2..200_u64,
        ) {
            let limit = PacketLimit::new(rate, 2).unwrap();
            let start = Tick::from(Nanos(start));
            let later = start.plus(late * limit.cost());
            let cell = AtomicU64::new(start.0);
            let mut stopped = Moment::new(start, || later);
            prop_assert!(admit(&&cell, &mut at(later), limit.cost(), limit.tolerance()));
            prop_assert!(admit(&&cell, &mut stopped, limit.cost(), limit.tolerance()));
            prop_assert!(!admit(&&cell, &mut stopped, limit.cost(), limit.tolerance()));
        }

        /// A source just below its rate loses nothing.
        #[test]
        fn below_the_rate_nothing_is_dropped(rate in packet_rate(), start in start()) {
            let limit = PacketLimit::new(rate, 1).unwrap();
            let start = Tick::from(Nanos(start));
            let tat = AtomicU64::new(start.0);
            prop_assert_eq!(run(&tat, start, limit.cost(), 5_000, limit.cost(), limit.tolerance()), 5_000);
        }

        /// A packet that does not conform writes nothing; one that does moves the bucket by its cost.
        #[test]
        fn a_drop_writes_nothing(tat in any::<u64>(), now in any::<u64>(), rate in packet_rate(), burst in 1..1_000_u64) {
            let Ok(limit) = PacketLimit::new(rate, burst) else { return Ok(()) };
            let cell = AtomicU64::new(tat);
            let conforming = has_room(&&cell, Tick(now), limit.cost(), limit.tolerance());
            prop_assert_eq!(cell.load(Relaxed), tat);
            let admitted = admit(&&cell, &mut at(Tick(now)), limit.cost(), limit.tolerance());
            prop_assert_eq!(admitted, conforming);
            if admitted {
                let used = Tick(cell.load(Relaxed)).since(Tick(now));
                prop_assert!(used > 0 && used.cast_unsigned() <= limit.tolerance());
            } else {
                prop_assert_eq!(cell.load(Relaxed), tat);
            }
        }

        /// A bucket idle for up to 1.7 years holds exactly its burst again, wherever the time line
        /// wraps meanwhile.
        #[test]
        fn an_idle_bucket_is_full(start in start(), idle in 3_600_000_000_000..54_000_000_000_000_000_u64) {
            let limit = PacketLimit::new(Rate::new(100, 1).unwrap(), 50).unwrap();
            let begin = Tick::from(Nanos(start));
            let tat = AtomicU64::new(begin.0);
            prop_assert_eq!(run(&tat, begin, 0, 60, limit.cost(), limit.tolerance()), 50);
            let later = Tick::from(Nanos(start + idle));
            clamp(&&tat, later, limit.tolerance());
            prop_assert_eq!(run(&tat, later, 0, 60, limit.cost(), limit.tolerance()), 50);
        }

        /// What `clamp` leaves is at most a full bucket's worth of debt, and less debt stays as it is.
        #[test]
        fn clamp_shortens_debts_only(debt in 0..(1_u64 << 60), now in any::<u64>(), tolerance in 1..(1_u64 << 50)) {
            let cell = AtomicU64::new(Tick(now).plus(debt).0);
            clamp(&&cell, Tick(now), tolerance);
            let left = Tick(cell.load(Relaxed)).since(Tick(now)).cast_unsigned();
            prop_assert_eq!(left, debt.min(tolerance));
        }
    }

    /// Many threads on one bucket at one instant admit the burst, no more and no fewer; and a lost
    /// race is never a free packet: the debt afterwards is what was admitted.
    #[test]
    fn threads_share_one_burst() {
        let limit = PacketLimit::new(Rate::new(1, 1).unwrap(), 100_000).unwrap();
        let now = Tick::from(Nanos(1 << 40));
        let cell = AtomicU64::new(now.0);
        let admitted: u64 = thread::scope(|scope| {
            let threads: std::vec::Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| run(&cell, now, 0, 20_000, limit.cost(), limit.tolerance()))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        let debt = Tick(cell.load(Relaxed)).since(now).cast_unsigned();
        assert_eq!(debt, admitted * limit.cost());
        // CPUs that look at the same moment may overdraw, by at most one packet each.
        assert!((100_000..=100_008).contains(&admitted), "{admitted}");
    }
}
