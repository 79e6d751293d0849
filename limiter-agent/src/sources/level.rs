//! How much of a bucket is left, in packets, bytes and seconds.

use limiter_common::table::is_ahead;
use limiter_common::time::Tick;
use limiter_common::units::Limits;

use super::LimitReport;
use crate::datapath::Bucket;
use crate::status::Limit;

/// A full frame at the usual MTU: a source that has room for less is refused what it mostly sends.
const FRAME: u64 = 1_514;
/// [`ByteLimit::cost_of`](limiter_common::units::ByteLimit::cost_of) so many bytes is a cost without
/// rounding.
const EXACT: u32 = 1 << 16;

/// A source's bucket in a class at some instant. All in ticks.
pub(super) struct Level {
    packets: Option<Dimension>,
    bytes: Option<Dimension>,
}

/// One of the two that are limited.
#[derive(Clone, Copy)]
struct Dimension {
    /// What [`UNITS`](Self::units) of it cost.
    cost: u64,
    /// One for packets, [`EXACT`] for bytes.
    units: u64,
    tolerance: u64,
    used: u64,
}

impl Level {
    /// The `bucket`, which is full if there is none, at `now`.
    pub(super) fn of(limits: &Limits, bucket: Option<Bucket>, now: Tick) -> Self {
        let used = |tat: Option<Tick>| match tat {
            Some(tat) if is_ahead(tat, now) => tat.since(now).cast_unsigned(),
            _ => 0,
        };
        let packets = limits.packets.is_limited().then(|| Dimension {
            cost: limits.packets.cost(),
            units: 1,
            tolerance: limits.packets.tolerance(),
            used: used(bucket.map(|it| it.packets)),
        });
        let bytes = limits.bytes.is_limited().then(|| Dimension {
            cost: limits.bytes.cost_of(EXACT).max(1),
            units: EXACT.into(),
            tolerance: limits.bytes.tolerance(),
            used: used(bucket.and_then(|it| it.bytes)),
        });
        Self { packets, bytes }
    }

    /// Whether it is not full.
    pub(super) fn is_used(&self) -> bool {
        self.each().any(|it| it.used > 0)
    }

    /// Packets that pass at once; full frames where only bytes are limited.
    pub(super) fn remaining(&self) -> u64 {
        let frames = self.remaining_bytes().map(|bytes| bytes / FRAME);
        self.packets.map(Dimension::left).or(frames).unwrap_or(u64::from(u32::MAX))
    }

    /// Bytes that pass at once.
    pub(super) fn remaining_bytes(&self) -> Option<u64> {
        self.bytes.map(Dimension::left)
    }

    /// The burst, in what [`remaining`](Self::remaining) counts.
    pub(super) fn quota(&self) -> u64 {
        let frames = self.bytes.map(|it| it.burst() / FRAME);
        self.packets.map(Dimension::burst).or(frames).unwrap_or(u64::from(u32::MAX))
    }

    /// Seconds in which an empty bucket fills, one at least.
    pub(super) fn window(&self) -> u64 {
        self.each().map(|it| seconds(it.tolerance)).max().unwrap_or(1).max(1)
    }

    /// Seconds until it is full.
    pub(super) fn reset(&self) -> u64 {
        self.each().map(|it| seconds(it.used)).max().unwrap_or(0)
    }

    /// Seconds until a packet, or a full frame, conforms; 0 if it does now.
    pub(super) fn wait(&self) -> u64 {
        let packets = self.packets.map_or(0, |it| it.wait_for(1));
        packets.max(self.bytes.map_or(0, |it| it.wait_for(FRAME)))
    }

    /// What it is when it is full.
    pub(super) fn limit(&self) -> LimitReport {
        LimitReport {
            packets: self.packets.map(Dimension::limit),
            bytes: self.bytes.map(Dimension::limit),
        }
    }

    fn each(&self) -> impl Iterator<Item = &Dimension> {
        self.packets.iter().chain(&self.bytes)
    }
}

impl Dimension {
    fn left(self) -> u64 {
        self.count(self.tolerance.saturating_sub(self.used))
    }

    fn burst(self) -> u64 {
        self.count(self.tolerance)
    }

    fn limit(self) -> Limit {
        #[expect(clippy::cast_precision_loss, reason = "for people to read")]
        let per_second = Tick::PER_SECOND as f64 * self.units as f64 / self.cost as f64;
        // Rates are whole numbers a second, a minute or an hour, which the cost is rounded for.
        Limit { per_second: (per_second * 1e4).round() / 1e4, burst: self.burst() }
    }

    fn wait_for(self, units: u64) -> u64 {
        let cost = u128::from(units) * u128::from(self.cost) / u128::from(self.units);
        let cost = u64::try_from(cost).unwrap_or(u64::MAX).min(self.tolerance);
        seconds(self.used.saturating_add(cost).saturating_sub(self.tolerance))
    }

    /// What so many ticks pay for.
    fn count(self, ticks: u64) -> u64 {
        let count = u128::from(ticks) * u128::from(self.units) / u128::from(self.cost);
        u64::try_from(count).unwrap_or(u64::MAX)
    }
}

/// Rounded up.
fn seconds(ticks: u64) -> u64 {
    ticks.div_ceil(Tick::PER_SECOND)
}

#[cfg(test)]
mod tests {
    use limiter_common::units::{ByteLimit, PacketLimit, Rate};

    use super::*;

    fn packets(per_second: u64, burst: u64) -> Limits {
        let rate = Rate::new(per_second, 1).expect("is a rate");
        Limits { packets: PacketLimit::new(rate, burst).expect("fits"), ..Limits::NONE }
    }

    fn level_of(limits: &Limits, packets: Tick, bytes: Option<Tick>, now: Tick) -> Level {
        Level::of(limits, Some(Bucket { packets, bytes }), now)
    }

    #[test]
    fn a_bucket_counts_down_and_says_when_it_is_full() {
        let (limits, now) = (packets(10, 100), Tick(1 << 50));
        let full = Level::of(&limits, None, now);
        assert_eq!((full.remaining(), full.reset(), full.wait()), (100, 0, 0));
        assert_eq!((full.quota(), full.window(), full.is_used()), (100, 10, false));
        // Forty are used: four seconds.
        let level = level_of(&limits, now.plus(4 * Tick::PER_SECOND), None, now);
        assert_eq!((level.remaining(), level.reset(), level.wait()), (60, 4, 0));
        let empty = level_of(&limits, now.plus(10 * Tick::PER_SECOND), None, now);
        assert_eq!((empty.remaining(), empty.reset(), empty.wait()), (0, 10, 1));
        // A lowered limit leaves a debt beyond the burst.
        let debt = level_of(&limits, now.plus(15 * Tick::PER_SECOND), None, now);
        assert_eq!((debt.remaining(), debt.wait()), (0, 6));
        let past = level_of(&limits, Tick(1), None, now);
        assert_eq!((past.remaining(), past.is_used()), (100, false));
    }

    #[test]
    fn bytes_are_counted_too() {
        let rate = Rate::new(1_000_000, 1).expect("is a rate");
        let bytes = ByteLimit::new(rate, 500_000).expect("fits");
        let limits = Limits { bytes, ..Limits::NONE };
        let now = Tick(1 << 50);
        let level = level_of(&limits, now, Some(now.plus(Tick::PER_SECOND / 4)), now);
        assert_eq!(level.remaining_bytes(), Some(250_000));
        assert_eq!((level.remaining(), level.quota()), (250_000 / FRAME, 500_000 / FRAME));
        let limit = level.limit().bytes.expect("is limited");
        assert!((limit.per_second - 1e6).abs() < 1.0 && limit.burst == 500_000, "{limit:?}");
        let empty = level_of(&limits, now, Some(now.plus(Tick::PER_SECOND / 2)), now);
        assert_eq!((empty.remaining(), empty.wait()), (0, 1));
        assert_eq!(Level::of(&Limits::NONE, None, now).wait(), 0);
    }
}
