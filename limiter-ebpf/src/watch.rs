//! What watched sources send in classes that are observed.

use core::ptr;

use limiter_common::{
    abi::{WatchedCount, WatchedSource},
    bucket::Cell as _,
    hash::SourceHash,
};

use crate::{
    env::Tat,
    maps::{UNWATCHED, WATCHED, WATCHING},
};

/// Only if there is no such entry.
const NEW: u64 = 1;

/// Counts a packet if its source is watched.
#[inline(always)]
pub(crate) fn watch(source: WatchedSource, hash: SourceHash, length: u32) {
    let Some(watching) = WATCHING.get_ptr(0) else { return };
    // SAFETY: an aligned word, which the agent may write at any time.
    if hash.is_sampled(unsafe { ptr::read_volatile(&raw const (*watching).mask) }) {
        count(source.bits, source.owner(), length);
    }
}

/// Counts a packet of a watched source, from its first one on.
///
/// A global function, as [`offer`](crate::sample) is.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn count(bits: u64, owner: u64, length: u32) -> u32 {
    let source = WatchedSource::of_owner(bits, owner);
    if add(&source, length) {
        return 0;
    }
    let Some(watching) = WATCHING.get_ptr_mut(0) else { return 0 };
    // SAFETY: an aligned word, which the agent and other CPUs may write at any time.
    let full = unsafe { &raw mut (*watching).full };
    // SAFETY: as above.
    if unsafe { ptr::read_volatile(full) } == 0 {
        let first = WatchedCount { packets: 1, bytes: length.into() };
        // It fails where another CPU was faster, too.
        if WATCHED.insert(source, first, NEW).is_ok() || add(&source, length) {
            return 0;
        }
        // SAFETY: as above.
        unsafe { ptr::write_volatile(full, 1) };
    }
    if let Some(unwatched) = UNWATCHED.get_ptr_mut(0) {
        // SAFETY: the word is this CPU's own.
        unsafe { *unwatched += 1 };
    }
    0
}

/// Adds a packet to an entry, if there is one.
#[inline(always)]
fn add(source: &WatchedSource, length: u32) -> bool {
    let Some(count) = WATCHED.get_ptr_mut(source) else { return false };
    // SAFETY: aligned words of a map value; other CPUs add to them, too.
    unsafe {
        Tat(&raw mut (*count).packets).add(1);
        Tat(&raw mut (*count).bytes).add(length.into());
    }
    true
}
