//! One count per packet.

use limiter_common::{
    Decision, PacketView as _,
    abi::{CounterShape, SampledOutcome},
};

use crate::{
    events,
    maps::{COUNTER_CLASSES, COUNTER_SLOTS, COUNTERS},
    sample,
    view::FrameView,
};

/// Counts the packet in the one cell of its outcome, and shows it if it is that cell's turn.
#[inline(always)]
pub(crate) fn record(view: &FrameView<'_>, Decision { outcome, length }: &Decision) {
    let shape = CounterShape { slots: COUNTER_SLOTS.load(), classes: COUNTER_CLASSES.load() };
    let place = shape.cell(outcome);
    let Some(cell) = COUNTERS.get_ptr_mut(place) else { return };
    // SAFETY: the cell is this CPU's own, and XDP is not interrupted by itself.
    let is_turn = unsafe {
        (*cell).count.packets += 1;
        (*cell).count.bytes += u64::from(*length);
        (*cell).count.packets > (*cell).pace.next
    };
    sample::watch(view, outcome, *length);
    if is_turn {
        let packed = SampledOutcome::pack(outcome);
        events::show(view.raw(), packed, view.opaque(*length), view.opaque(place));
    }
}
