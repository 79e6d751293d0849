//! Rates, bursts and the limits that they compile to.
//!
//! A configured [`Rate`] is exact (a count per period). It is rounded once, when it becomes a
//! [`PacketLimit`] or [`ByteLimit`], and the rounding is bounded by [`MAX_RATE_ERROR`].

use crate::time::Tick;

/// The largest relative difference between a configured rate and the one that is enforced.
pub const MAX_RATE_ERROR: f64 = 1e-3;

/// The longest time that a full bucket may take to refill, in ticks (2⁵⁴ ns, 208 days): a quarter
/// of the time line, so that a bucket in use is never mistaken for one from before a wrap.
pub const MAX_TOLERANCE: u64 = 1 << 62;

/// Fraction bits of [`ByteLimit::cost`].
const BYTE_FRACTION: u32 = 16;
/// The longest frame that [`ByteLimit::cost_of`] multiplies without overflow, in bytes. Longer
/// ones (there are none on a NIC) are charged as this long.
pub const MAX_FRAME: u32 = (1 << 17) - 1;

/// A rate: `count` packets or bytes per `seconds`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    count: u64,
    seconds: u64,
}

/// Why a rate or burst cannot be enforced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitError {
    /// A rate of nothing passes nothing; that is a `[[block]]`.
    ZeroRate,
    /// A burst below one packet (or, for bytes, one frame) passes nothing.
    ZeroBurst,
    /// Faster than the number format holds within [`MAX_RATE_ERROR`].
    TooFast,
    /// Slower than the number format holds.
    TooSlow,
    /// `burst / rate` exceeds [`MAX_TOLERANCE`].
    TooLong,
}

impl Rate {
    /// A rate of `count` per `seconds`; `seconds` must not be 0 (a rate per nothing).
    ///
    /// # Errors
    /// [`LimitError::ZeroRate`] if either is 0.
    pub const fn new(count: u64, seconds: u64) -> Result<Self, LimitError> {
        if count == 0 || seconds == 0 {
            return Err(LimitError::ZeroRate);
        }
        Ok(Self { count, seconds })
    }

    /// Packets or bytes per second, for display.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "for people to read")]
    pub fn per_second(self) -> f64 {
        self.count as f64 / self.seconds as f64
    }

    /// This rate times `factor`.
    ///
    /// # Errors
    /// [`LimitError::TooFast`] if the product does not fit, [`LimitError::ZeroRate`] if it is 0.
    pub const fn times(self, factor: u32) -> Result<Self, LimitError> {
        match self.count.checked_mul(factor as u64) {
            Some(count) => Self::new(count, self.seconds),
            None => Err(LimitError::TooFast),
        }
    }

    /// This rate divided by `factor`.
    ///
    /// # Errors
    /// [`LimitError::TooSlow`] if the quotient does not fit, [`LimitError::ZeroRate`] for a factor of 0.
    pub const fn over(self, factor: u32) -> Result<Self, LimitError> {
        match self.seconds.checked_mul(factor as u64) {
            Some(seconds) => Self::new(self.count, seconds),
            None => Err(LimitError::TooSlow),
        }
    }

    /// Ticks per unit, times 2^`fraction`, rounded to nearest.
    const fn cost(self, fraction: u32) -> u128 {
        let line = (self.seconds as u128 * Tick::PER_SECOND as u128) << fraction;
        (line + self.count as u128 / 2) / self.count as u128
    }
}

/// A packet bucket: what a packet costs and how far ahead of now a source may run.
///
/// Enforces rates from 1/h to 30 M/s. The cost is a whole number of ticks; its rounding error is at
/// most half a tick in 8,533 (at 30 M/s), 6·10⁻⁵. Rounded to nearest: neither side gains on average.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PacketLimit {
    /// Ticks that one packet costs; 0 if packets are not limited.
    cost: u64,
    /// Ticks a full bucket holds: burst × cost.
    tolerance: u64,
}

impl PacketLimit {
    /// Not limited.
    pub const NONE: Self = Self { cost: 0, tolerance: 0 };
    /// The slowest rate: one packet per hour.
    pub const SLOWEST: Rate = Rate { count: 1, seconds: 3600 };
    /// The fastest rate: 30 million packets per second, twice the line rate of 10-gigabit Ethernet.
    pub const FASTEST: Rate = Rate { count: 30_000_000, seconds: 1 };

    /// The bucket that refills at `rate` and holds `burst` packets.
    ///
    /// # Errors
    /// [`LimitError`] names what does not fit.
    pub const fn new(rate: Rate, burst: u64) -> Result<Self, LimitError> {
        match limit(rate, burst, 0, Self::SLOWEST, Self::FASTEST) {
            Ok((cost, tolerance)) => Ok(Self { cost, tolerance }),
            Err(error) => Err(error),
        }
    }

    /// The limit of `factor` times the rate and the burst. The cost is rounded down to a whole tick,
    /// by less than 10⁻³ up to 256 M/s.
    #[must_use]
    pub const fn times(self, factor: u32) -> Self {
        let factor = if factor == 0 { 1 } else { factor as u64 };
        let cost = self.cost / factor;
        let is_lost = cost == 0 && self.cost != 0;
        Self { cost: if is_lost { 1 } else { cost }, tolerance: self.tolerance }
    }

    /// Half of the rate and the burst, which stays one packet at least.
    #[inline(always)]
    #[must_use]
    pub const fn half(self) -> Self {
        let cost = self.cost << 1;
        Self { cost, tolerance: if cost > self.tolerance { cost } else { self.tolerance } }
    }

    /// Ticks that one packet costs; 0 if packets are not limited.
    #[inline(always)]
    #[must_use]
    pub const fn cost(&self) -> u64 {
        self.cost
    }

    /// Whether packets are limited at all.
    #[inline(always)]
    #[must_use]
    pub const fn is_limited(&self) -> bool {
        self.cost != 0
    }

    /// Ticks that a full bucket holds.
    #[inline(always)]
    #[must_use]
    pub const fn tolerance(&self) -> u64 {
        self.tolerance
    }
}

/// A byte bucket, over the frame as XDP sees it (from the Ethernet header, without the FCS).
///
/// Enforces rates from 8 kbit/s to 200 Gbit/s. A byte's cost carries 16 fraction bits, a frame's
/// cost is rounded to whole ticks: at most half a tick in 614 (60 bytes at 200 Gbit/s), 8.2·10⁻⁴.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ByteLimit {
    /// Ticks that one byte costs, times 2¹⁶; 0 if bytes are not limited.
    cost: u64,
    /// Ticks a full bucket holds: burst × cost.
    tolerance: u64,
}

impl ByteLimit {
    /// The slowest rate: 8 kbit/s.
    pub const SLOWEST: Rate = Rate { count: 1_000, seconds: 1 };
    /// The fastest rate: 200 Gbit/s.
    pub const FASTEST: Rate = Rate { count: 25_000_000_000, seconds: 1 };

    /// The bucket that refills at `rate` bytes and holds `burst` bytes.
    ///
    /// # Errors
    /// [`LimitError`] names what does not fit.
    pub const fn new(rate: Rate, burst: u64) -> Result<Self, LimitError> {
        match limit(rate, burst, BYTE_FRACTION, Self::SLOWEST, Self::FASTEST) {
            Ok((cost, tolerance)) => Ok(Self { cost, tolerance }),
            Err(error) => Err(error),
        }
    }

    /// Ticks that a frame of `length` bytes costs; 0 if bytes are not limited.
    #[inline(always)]
    #[must_use]
    pub const fn cost_of(&self, length: u32) -> u64 {
        let length = if length > MAX_FRAME { MAX_FRAME } else { length };
        (length as u64 * self.cost + (1 << (BYTE_FRACTION - 1))) >> BYTE_FRACTION
    }

    /// Whether bytes are limited at all.
    #[inline(always)]
    #[must_use]
    pub const fn is_limited(&self) -> bool {
        self.cost != 0
    }

    /// Ticks that a full bucket holds.
    #[inline(always)]
    #[must_use]
    pub const fn tolerance(&self) -> u64 {
        self.tolerance
    }
}

/// The limits of one class for one source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Limits {
    /// Packets, all-zero if not limited.
    pub packets: PacketLimit,
    /// Bytes, all-zero if not limited.
    pub bytes: ByteLimit,
    /// Open connections with which a source may open no more; 0 if that is not limited.
    pub connections: u64,
}

impl Limits {
    /// Not limited.
    pub const NONE: Self = Self {
        packets: PacketLimit::NONE,
        bytes: ByteLimit { cost: 0, tolerance: 0 },
        connections: 0,
    };
}

/// Cost per unit (times 2^`fraction`) and tolerance in ticks. The tolerance is a multiple of the
/// rounded cost, rounded up, so that a burst of n passes n and not n - 1.
const fn limit(
    rate: Rate,
    burst: u64,
    fraction: u32,
    slowest: Rate,
    fastest: Rate,
) -> Result<(u64, u64), LimitError> {
    if burst == 0 {
        return Err(LimitError::ZeroBurst);
    }
    if faster(rate, fastest) {
        return Err(LimitError::TooFast);
    }
    if faster(slowest, rate) {
        return Err(LimitError::TooSlow);
    }
    let cost = rate.cost(fraction);
    let tolerance = match cost.checked_mul(burst as u128) {
        Some(product) => (product + ((1 << fraction) - 1)) >> fraction,
        None => return Err(LimitError::TooLong),
    };
    if tolerance > MAX_TOLERANCE as u128 {
        return Err(LimitError::TooLong);
    }
    #[expect(
        clippy::cast_possible_truncation,
        reason = "both are bounded above: 1/h and MAX_TOLERANCE"
    )]
    Ok((cost as u64, tolerance as u64))
}

/// Whether `a` is strictly faster than `b`.
const fn faster(a: Rate, b: Rate) -> bool {
    a.count as u128 * b.seconds as u128 > b.count as u128 * a.seconds as u128
}
