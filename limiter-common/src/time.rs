//! Time as the datapath counts it.

/// Nanoseconds since boot on the kernel's monotonic clock (`bpf_ktime_get_ns`, which is
/// `CLOCK_MONOTONIC`). Used for expiry times, which are compared as they stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(transparent)]
pub struct Nanos(pub u64);

impl Nanos {
    /// A time that never comes: the expiry of what does not expire.
    pub const NEVER: Self = Self(u64::MAX);
}

/// Which of the kernel's clocks times a packet. A number and not an enum, because it is read from a
/// map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Clock(u32);

impl Clock {
    /// Exact (`bpf_ktime_get_ns`), and the dearest thing that a packet meets.
    pub const FINE: Self = Self(0);
    /// That of the last timer tick (`CLOCK_MONOTONIC_COARSE`), up to a tick (1 to 10 ms) behind, for
    /// nearly nothing.
    pub const COARSE: Self = Self(1);

    /// The cheapest clock that is exact enough for a bucket of this `tolerance`, in ticks of the
    /// buckets' time line, where the kernel's timer ticks every `tick`.
    ///
    /// The coarse clock stands still between timer ticks and then makes up for it: nothing is lost
    /// or won over time, but what a source sends within one timer tick must fit its burst. So the
    /// burst must hold what its rate brings in two of them, which is `tolerance ≥ 2 × tick`.
    #[must_use]
    pub const fn cheapest(tolerance: u64, tick: Nanos) -> Self {
        if tolerance >> Tick::SHIFT >= 2 * tick.0 { Self::COARSE } else { Self::FINE }
    }
}

/// A point on the buckets' time line, in units of 1/256 ns, modulo 2⁶⁴ (2.28 years).
///
/// The fine unit is what makes fast rates exact: at 200 Gbit/s a 60-byte frame costs 614 ticks, so
/// rounding it to a whole tick errs by less than 10⁻³. The price is that the line wraps, so two
/// instants are compared only through their difference ([`Tick::since`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Tick(pub u64);

impl Tick {
    /// Ticks per nanosecond, as a power of two.
    pub const SHIFT: u32 = 8;
    /// Ticks per second.
    pub const PER_SECOND: u64 = 1_000_000_000 << Self::SHIFT;

    /// The signed distance from `earlier` to `self`, exact while it is below 2⁶³ ticks.
    #[inline(always)]
    #[must_use]
    pub const fn since(self, earlier: Self) -> i64 {
        self.0.wrapping_sub(earlier.0).cast_signed()
    }

    /// The instant `ticks` later.
    #[inline(always)]
    #[must_use]
    pub const fn plus(self, ticks: u64) -> Self {
        Self(self.0.wrapping_add(ticks))
    }
}

impl From<Nanos> for Tick {
    #[inline(always)]
    fn from(time: Nanos) -> Self {
        Self(time.0 << Self::SHIFT)
    }
}
