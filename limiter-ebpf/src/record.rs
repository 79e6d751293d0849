//! One count per packet, and a line in the log for the first packet of each rare reason.

use aya_ebpf::programs::XdpContext;
use aya_log_ebpf::{info, warn};
use limiter_common::{Decision, PacketView as _, Reason, abi::CounterShape};

use crate::{
    maps::{COUNTER_CLASSES, COUNTER_SLOTS, COUNTERS, LOGGED},
    sample,
    view::FrameView,
};

/// Counts the packet in the one cell of its outcome.
#[inline(always)]
pub(crate) fn record(view: &FrameView<'_>, Decision { outcome, length }: &Decision) {
    let shape = CounterShape { slots: COUNTER_SLOTS.load(), classes: COUNTER_CLASSES.load() };
    let Some(count) = COUNTERS.get_ptr_mut(shape.cell(outcome)) else { return };
    // SAFETY: the cell is this CPU's own, and XDP is not interrupted by itself.
    let first = unsafe {
        (*count).packets += 1;
        (*count).bytes += u64::from(*length);
        (*count).packets == 1
    };
    sample::watch(view, outcome, *length);
    if first {
        announce(view.context(), view.opaque(outcome.reason as u32));
    }
}

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
