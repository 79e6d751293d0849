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
use limiter_common::time::Nanos;

use crate::maps::{ORIGIN, TICK};

/// The time at the last tick.
#[inline(always)]
pub(crate) fn coarse() -> Nanos {
    if TICK.load() == 0 {
        // SAFETY: no arguments and no preconditions.
        return Nanos(unsafe { bpf_ktime_get_coarse_ns() });
    }
    let origin = match ORIGIN.get(0) {
        Some(origin) => *origin,
        None => 0,
    };
    Nanos(since_origin().wrapping_add(origin))
}

#[inline(always)]
fn since_origin() -> u64 {
    // SAFETY: no arguments and no preconditions.
    unsafe { bpf_jiffies64() }.wrapping_mul(TICK.load())
}

/// Writes into its packet what [`ORIGIN`] should be; passes it if no tick came in between. Never
/// attached: the agent runs it before the clock is needed.
#[xdp]
pub(crate) fn clock_origin(ctx: XdpContext) -> u32 {
    let start = ctx.data();
    if start + size_of::<u64>() > ctx.data_end() {
        return XDP_ABORTED;
    }
    let before = since_origin();
    // SAFETY: no arguments and no preconditions.
    let now = unsafe { bpf_ktime_get_coarse_ns() };
    if since_origin() != before {
        return XDP_ABORTED;
    }
    // SAFETY: within the packet, as checked.
    unsafe { (start as *mut u64).write_volatile(now.wrapping_sub(before)) };
    XDP_PASS
}
