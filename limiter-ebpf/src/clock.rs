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
    if TICK.load() == 0 {
        // SAFETY: no arguments and no preconditions.
        return Nanos(unsafe { bpf_ktime_get_coarse_ns() });
    }
    Nanos(since_origin().wrapping_add(settings.coarse_origin))
}

#[inline(always)]
fn since_origin() -> u64 {
    // SAFETY: no arguments and no preconditions.
    unsafe { bpf_jiffies64() }.wrapping_mul(TICK.load())
}

/// Writes into its packet what [`Settings::coarse_origin`] should be; passes it if no tick came in
/// between. Never attached: the agent runs it.
#[xdp]
pub(crate) fn clock_origin(ctx: XdpContext) -> u32 {
    let before = since_origin();
    // SAFETY: no arguments and no preconditions.
    let now = unsafe { bpf_ktime_get_coarse_ns() };
    let is_one_tick = since_origin() == before;
    let written = FrameView::new(&ctx).overwrite(now.wrapping_sub(before));
    if is_one_tick && written.is_some() { XDP_PASS } else { XDP_ABORTED }
}
