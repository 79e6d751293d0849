//! The token bucket, as a generic cell rate algorithm (ITU-T I.371, RFC 2697 in other words).
//!
//! A bucket is one number, its theoretical arrival time (TAT): the instant at which it will be full
//! again. A packet costs `cost` ticks and conforms if the TAT, moved on by its cost, is no more
//! than `tolerance` (burst × cost) ahead of now. That is a token bucket exactly: it refills
//! continuously, loses no fraction, and never holds more than the burst. A burst of 1 is a leaky
//! bucket: packets conform one interval apart. There is no window, so there is no edge of a window
//! to send two bursts around.
//!
//! **Concurrency.** A packet that does not conform writes nothing. One that does moves the TAT by
//! compare-and-swap, and decides again when another CPU was faster; so a race neither lets a
//! packet through uncharged nor drops one that conforms. After [`RETRIES`] lost races in a row the
//! charge is added without a look, and the packet passes: it did conform when it was last looked
//! at, and its cost is a debt that later packets wait for.

use crate::time::Tick;

/// Compare-and-swap attempts before a charge is added blindly. Each lost race is another CPU's
/// charge, so this many in a row is rare even with many cores on one bucket.
pub const RETRIES: usize = 8;

/// A shared 64-bit word holding a TAT.
pub trait Cell {
    /// Its value.
    fn load(&self) -> u64;
    /// Stores `new` if the value is `current`; returns the value found.
    fn compare_exchange(&self, current: u64, new: u64) -> u64;
    /// Adds to it.
    fn add(&self, amount: u64);
}

/// Whether a packet of `cost` conforms at `now`; writes nothing.
#[inline(always)]
pub fn conforms<C: Cell>(cell: &C, now: Tick, cost: u64, tolerance: u64) -> bool {
    next(cell.load(), now, cost, tolerance).is_some()
}

/// Charges the bucket with `cost` if that conforms at `now`, and says whether it did.
#[inline(always)]
pub fn admit<C: Cell>(cell: &C, now: Tick, cost: u64, tolerance: u64) -> bool {
    let mut current = cell.load();
    for _ in 0..RETRIES {
        let Some(new) = next(current, now, cost, tolerance) else {
            return false;
        };
        let found = cell.compare_exchange(current, new);
        if found == current {
            return true;
        }
        current = found;
    }
    cell.add(cost);
    true
}

/// Charges the bucket with `cost`, which conformed a moment ago, even if it no longer does.
#[inline(always)]
pub fn charge<C: Cell>(cell: &C, now: Tick, cost: u64, tolerance: u64) {
    if !admit(cell, now, cost, tolerance) {
        cell.add(cost);
    }
}

/// Shortens a debt left by a looser limit to the present `tolerance`, so that a limit that was
/// raised is felt at once. Losing the race leaves the debt to the next change of settings.
#[inline(always)]
pub fn clamp<C: Cell>(cell: &C, now: Tick, tolerance: u64) {
    let current = cell.load();
    if debt(current, now, u64::MAX) > tolerance {
        cell.compare_exchange(current, now.plus(tolerance).0);
    }
}

/// The TAT after a conforming packet of `cost`; `None` if it does not conform.
#[inline(always)]
fn next(tat: u64, now: Tick, cost: u64, tolerance: u64) -> Option<u64> {
    let debt = debt(tat, now, stale_beyond(cost, tolerance)) + cost;
    (debt <= tolerance).then_some(now.plus(debt).0)
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
/// and not yet clamped, charges added blindly by 256 CPUs at once, and a second for clocks that
/// differ between CPUs. No overflow: a tolerance is at most 2⁶², a cost below 2⁵⁰.
///
/// So a bucket that nobody touched for between (2.28 years − this) and 2.28 years may be read as
/// partly used; it refills as ever. Any other idle time reads as a full bucket.
#[inline(always)]
fn stale_beyond(cost: u64, tolerance: u64) -> u64 {
    tolerance * 2 + cost * 256 + Tick::PER_SECOND
}
