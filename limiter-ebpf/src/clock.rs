//! The coarse clock.
//!
//! The kernel counts its timer's ticks ("jiffies") as its monotonic time passes, in the same step in
//! which it moves `CLOCK_MONOTONIC_COARSE` on (`tick_do_update_jiffies64`). So the count, times the
//! length of a tick, differs from that clock by a constant. It is read with a single load, which the
//! verifier puts in place of the call, where `bpf_ktime_get_coarse_ns` is a function of the kernel.

use aya_ebpf::{
    bindings::xdp_action::{XDP_ABORTED, XDP_PASS},
    helpers::{bpf_ktime_get_coarse_ns, generated::bpf_jiffies64},
    macros::xdp,
    programs::XdpContext,
};
use limiter_common::{abi::Settings, time::Nanos};

use crate::{maps::TICK, view::FrameView};

/// The time at the last tick.
#[inline(always)]
pub(crate) fn coarse(settings: &Settings) -> Nanos {
    match TICK.load() {
        // SAFETY: no arguments and no preconditions.
        0 => Nanos(unsafe { bpf_ktime_get_coarse_ns() }),
        tick => Nanos(counted(tick).wrapping_add(settings.coarse_origin)),
    }
}

/// The ticks counted, in nanoseconds.
#[inline(always)]
fn counted(tick: u64) -> u64 {
    // SAFETY: no arguments and no preconditions.
    unsafe { bpf_jiffies64() }.wrapping_mul(tick)
}

/// Writes into its packet what [`Settings::coarse_origin`] should be; passes it if no tick came in
/// between. Never attached: the agent runs it.
#[xdp]
pub(crate) fn clock_origin(ctx: XdpContext) -> u32 {
    let tick = TICK.load();
    let before = counted(tick);
    // SAFETY: no arguments and no preconditions.
    let now = unsafe { bpf_ktime_get_coarse_ns() };
    let is_one_tick = counted(tick) == before;
    let written = FrameView::new(&ctx).overwrite(now.wrapping_sub(before));
    if is_one_tick && written.is_some() { XDP_PASS } else { XDP_ABORTED }
}
