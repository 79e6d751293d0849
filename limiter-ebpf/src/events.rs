//! Events: a few of the packets that are, or would be, dropped, for whoever asks who that is; and a line
//! in the log for the first packet of each rare reason.

use aya_ebpf::{
    bindings::{BPF_RB_NO_WAKEUP, xdp_md},
    helpers::{
        bpf_ktime_get_ns,
        generated::{bpf_get_prandom_u32, bpf_xdp_load_bytes},
    },
    programs::XdpContext,
};
use aya_log_ebpf::{info, warn};
use limiter_common::{
    Reason,
    abi::{EVENT_BYTES, Event, Pace, SampleCount, SampledOutcome},
    bucket::{self, Moment},
    pace::{Moments, budget},
    time::{Nanos, Tick},
};

use crate::{
    env::Tat,
    maps::{COUNTERS, EVENT_INTERVAL, EVENTS, LOGGED, SAMPLE_COUNT, SAMPLE_TAT},
    sample::captured,
};

/// The packet that the counter at `place` has just counted is the first there, or its turn to be shown.
///
/// A global function, which the verifier checks once and not on each path that leads to it. Its result
/// is of no meaning; kernels want one.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn show(ctx: *mut xdp_md, packed: u64, length: u32, place: u32) -> u32 {
    let outcome = SampledOutcome::unpack(packed);
    let Some(cell) = COUNTERS.get_ptr_mut(place) else { return 0 };
    if ctx.is_null() {
        return 0;
    }
    // SAFETY: the cell is this CPU's own, and XDP is not interrupted by itself.
    let cell = unsafe { &mut *cell };
    if !outcome.is_event() {
        cell.pace = Pace::NEVER;
    } else {
        // SAFETY: no arguments and no preconditions.
        let (now, random) = unsafe { (Nanos(bpf_ktime_get_ns()), bpf_get_prandom_u32()) };
        let (packets, weight) = (cell.count.packets, cell.pace.weight(cell.count.packets));
        let interval = Moments(EVENT_INTERVAL.load());
        cell.pace.advance(packets, now.into(), interval, random);
        // Where it is not shown, the next one stands for it, too.
        if write(ctx, outcome, weight, length, now) {
            cell.pace.show(packets, now.into());
        }
    }
    if cell.count.packets == 1 {
        announce(&XdpContext::new(ctx), outcome.reason.into());
    }
    0
}

/// Writes the event, if the budget and the ring have room for it.
#[inline(always)]
fn write(ctx: *mut xdp_md, outcome: SampledOutcome, weight: u32, length: u32, now: Nanos) -> bool {
    let (Some(count), Some(tat)) = (
        SAMPLE_COUNT.get_ptr_mut(SampleCount::EVENTS),
        SAMPLE_TAT.get_ptr_mut(SampleCount::EVENTS),
    ) else {
        return false;
    };
    // SAFETY: the value is this CPU's own.
    let count = unsafe { &mut *count };
    count.offered += 1;
    let (cost, tolerance) = budget(weight);
    // SAFETY: no arguments and no preconditions.
    let clock = || Tick::from(Nanos(unsafe { bpf_ktime_get_ns() }));
    if !bucket::admit(&Tat(tat), &mut Moment::new(Tick::from(now), clock), cost, tolerance) {
        return false;
    }
    let Some(mut entry) = EVENTS.reserve(0) else {
        count.lost += 1;
        return false;
    };
    let event: *mut Event = entry.as_mut_ptr();
    // SAFETY: the entry is as large as an event; each field is written as it is. What lies beyond the
    // captured bytes is left over from older events, and nobody reads it.
    let error = unsafe {
        (*event).at = now;
        (*event).outcome = outcome;
        (*event).weight = weight;
        (*event).length = length;
        (*event).pad = 0;
        let bytes = (&raw mut (*event).bytes).cast();
        if length >= EVENT_BYTES as u32 {
            (*event).captured = EVENT_BYTES as u32;
            bpf_xdp_load_bytes(ctx, 0, bytes, EVENT_BYTES as u32)
        } else {
            let captured = captured::<SHORT>(length);
            (*event).captured = captured;
            bpf_xdp_load_bytes(ctx, 0, bytes, captured)
        }
    };
    if error != 0 {
        count.lost += 1;
        entry.discard(BPF_RB_NO_WAKEUP.into());
        return false;
    }
    count.written += 1;
    // The agent looks every now and then: to wake it for each would cost more than the event.
    entry.submit(BPF_RB_NO_WAKEUP.into());
    true
}

/// What is captured of a frame that is shorter than [`EVENT_BYTES`], at most; a power of two.
const SHORT: usize = 64;

/// Logs the first packet of a reason, once for all CPUs (or a few times, if they race).
#[inline(never)]
fn announce(ctx: &XdpContext, reason: u32) {
    let Some(logged) = LOGGED.get_ptr_mut(reason) else { return };
    // SAFETY: an aligned word; a lost race logs a line twice.
    unsafe {
        if *logged != 0 {
            return;
        }
        *logged = 1;
    }
    match Reason::ALL.get(reason as usize) {
        Some(Reason::NoSettings) => warn!(ctx, "first packet without settings: it passed"),
        Some(Reason::TableFull) => {
            warn!(ctx, "first packet of a source without a place in the table")
        }
        Some(Reason::PacketRate) => info!(ctx, "first packet over a packet rate"),
        Some(Reason::ByteRate) => info!(ctx, "first packet over a byte rate"),
        Some(Reason::Blocked) => info!(ctx, "first packet of a blocked source"),
        Some(Reason::NewSource) => info!(ctx, "first packet over the budget for new sources"),
        Some(Reason::Malformed) => info!(ctx, "first malformed packet"),
        Some(Reason::NeighbourRate) => {
            info!(ctx, "first ARP or neighbour discovery packet over its cap")
        }
        _ => {}
    }
}
