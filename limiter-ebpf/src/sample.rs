//! Samples of what is dropped, for those who watch.

use core::{arch::asm, ptr};

use aya_ebpf::{
    bindings::xdp_md,
    helpers::{bpf_ktime_get_ns, generated::bpf_xdp_load_bytes},
};
use limiter_common::{
    Action, Outcome, PacketView as _,
    abi::{SAMPLE_BYTES, SampleCount, SampledOutcome},
    bucket::{self, Moment},
    time::{Nanos, Tick},
};

use crate::{
    env::Tat,
    maps::{SAMPLE_COUNT, SAMPLE_TAT, SAMPLES, SAMPLING},
    view::FrameView,
};

/// Shows the packet to whoever watches, if anybody does. All that it costs else is a look at one word,
/// and that only for packets that are, or would be, dropped.
#[inline(always)]
pub(crate) fn watch(view: &FrameView<'_>, outcome: &Outcome, length: u32) {
    if outcome.action == Action::Pass {
        return;
    }
    let Some(sampling) = SAMPLING.get_ptr(0) else { return };
    // SAFETY: an aligned word, which the agent may write at any time.
    if unsafe { ptr::read_volatile(&raw const (*sampling).until) } != Nanos(0) {
        offer(view.raw(), SampledOutcome::pack(outcome), view.opaque(length));
    }
}

/// Takes a sample of the packet if it is one of those that are looked at and the budget has room.
///
/// A global function, which the verifier checks once and not on each path that leads to it. Its result
/// is of no meaning; kernels want one.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn offer(ctx: *mut xdp_md, packed: u64, length: u32) -> u32 {
    let outcome = SampledOutcome::unpack(packed);
    let (Some(sampling), Some(count), Some(tat)) = (
        SAMPLING.get(0),
        SAMPLE_COUNT.get_ptr_mut(SampleCount::SAMPLES),
        SAMPLE_TAT.get_ptr_mut(SampleCount::SAMPLES),
    ) else {
        return 0;
    };
    // SAFETY: no arguments and no preconditions.
    let clock = || Nanos(unsafe { bpf_ktime_get_ns() });
    let now = clock();
    if ctx.is_null() || now >= sampling.until || !sampling.takes(outcome) {
        return 0;
    }
    // SAFETY: the value is this CPU's own, and XDP is not interrupted by itself.
    let count = unsafe { &mut *count };
    count.offered += 1;
    count.since += 1;
    let (cost, tolerance) = (sampling.budget.cost(), sampling.budget.tolerance());
    let mut moment = Moment::new(Tick::from(now), || Tick::from(clock()));
    if !bucket::admit(&Tat(tat), &mut moment, cost, tolerance) {
        return 0;
    }
    let Some(mut entry) = SAMPLES.reserve(0) else {
        count.lost += 1;
        return 0;
    };
    let sample = entry.as_mut_ptr();
    let captured = captured::<SAMPLE_BYTES>(length);
    // SAFETY: the entry is as large as a sample; each field is written as it is. What lies beyond the
    // captured bytes is left over from older samples, and nobody reads it.
    let error = unsafe {
        (*sample).at = now;
        (*sample).outcome = outcome;
        (*sample).weight = count.since;
        (*sample).length = length;
        (*sample).captured = captured;
        bpf_xdp_load_bytes(ctx, 0, (&raw mut (*sample).bytes).cast(), captured)
    };
    if error != 0 {
        count.lost += 1;
        entry.discard(0);
        return 0;
    }
    count.written += 1;
    count.since = 0;
    entry.submit(0);
    0
}

/// How much of a frame of this length is captured: at least one byte, and at most `MOST`, a power of two,
/// where every verifier sees it.
#[inline(always)]
pub(crate) fn captured<const MOST: usize>(length: u32) -> u32 {
    let mut last = u64::from(length.min(MOST as u32).max(1)) - 1;
    // SAFETY: register arithmetic only; it changes nothing, since the value is within the mask.
    unsafe { asm!("{l} &= {m}", "{l} += 1", l = inout(reg) last, m = const MOST as u64 - 1) };
    last as u32
}
