//! The open connections of sources: counted once at each end, looked up for some SYNs, never for another
//! packet.

use aya_ebpf::{
    bindings::{BPF_SOCK_OPS_STATE_CB_FLAG, BPF_TCP_CLOSE, BPF_TCP_SYN_RECV},
    programs::SockOpsContext,
};
use limiter_common::{
    Env as _,
    abi::{CONNECTION_SLOTS, SourceAddress},
    bucket::Cell as _,
    connections::{self, Slots},
    packet::Source,
};

use crate::{
    env::{MapEnv, Tat},
    handshakes::load,
    maps::{CONNECTION_LINES, CONNECTIONS, HEARING, INSTANCE},
    view::hidden,
};

/// What a change of a connection's state means.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// Its handshake is complete.
    Opened,
    /// It is over.
    Closed,
}

impl Change {
    /// What the change of state that the kernel tells of means, if anything. Every connection that others
    /// open leaves `SYN_RECV` once and becomes `CLOSE` once (before `TIME_WAIT`, which no socket is in), so
    /// what is counted is uncounted. One that TCP Fast Open made at the SYN waits in `SYN_RECV` too.
    #[inline(always)]
    pub(crate) fn of(ctx: &SockOpsContext) -> Option<Self> {
        // SAFETY: fields of the context.
        let state =
            |index: usize| load(unsafe { &raw const (*ctx.ops).__bindgen_anon_1.args[index] });
        match (state(0), state(1)) {
            (BPF_TCP_SYN_RECV, BPF_TCP_CLOSE) => None,
            (BPF_TCP_SYN_RECV, _) => Some(Self::Opened),
            (_, BPF_TCP_CLOSE) => Some(Self::Closed),
            _ => None,
        }
    }
}

/// Asks for the changes of a connection's state, beside what others have asked for.
#[inline(always)]
pub(crate) fn watch(ctx: &SockOpsContext) {
    // Without them it is not counted at all, so that nothing is wrong.
    let _ = ctx.set_cb_flags((ctx.cb_flags() | BPF_SOCK_OPS_STATE_CB_FLAG) as i32);
}

/// Counts the connection of a peer, or no longer.
#[inline(always)]
pub(crate) fn count(change: Change, peer: SourceAddress) {
    let Some(hearing) = HEARING.get_ptr_mut(0) else { return };
    // SAFETY: fields of a map value, which lives as long as the program runs.
    let (instance, uncounted) =
        unsafe { (Tat(&raw mut (*hearing).instance), Tat(&raw mut (*hearing).uncounted)) };
    // Another program counts, or will in a moment; and what is on loopback never meets a limit.
    if instance.load() != INSTANCE.load() || peer.is_martian() {
        return;
    }
    let source = Source::from(peer);
    let place = MapEnv.key().source(source).place(CONNECTION_LINES.load());
    let (bits, space) = (source.bits, source.space as u32);
    match change {
        Change::Opened if open_one(bits, space, place) == 0 => uncounted.add(1),
        Change::Opened => {}
        // One that was not counted has nothing to be taken off.
        Change::Closed => {
            close_one(bits, space, place);
        }
    }
}

// Global functions, which the verifier checks once, and not for each kind of source.

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn open_one(bits: u64, space: u32, place: u32) -> u32 {
    Line::at(place).is_some_and(|line| connections::add(&line, bits, space)).into()
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn close_one(bits: u64, space: u32, place: u32) -> u32 {
    Line::at(place).is_some_and(|line| connections::remove(&line, bits, space)).into()
}

/// How many connections the source of these bits in this space has open. A global function, which the
/// verifier checks once and not on each path that leads to it.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn open_connections(bits: u64, space: u32, place: u32) -> u32 {
    let Some(line) = Line::at(place) else { return 0 };
    connections::count(&line, bits, space)
}

struct Line(*mut u64);

impl Line {
    #[inline(always)]
    fn at(place: u32) -> Option<Self> {
        CONNECTIONS.get_ptr_mut(place).map(|line| Self(line.cast()))
    }

    #[inline(always)]
    fn at_word(&self, index: usize) -> Tat {
        // SAFETY: within the map value, which is two words for each slot.
        Tat(unsafe { self.0.add(index & (2 * CONNECTION_SLOTS - 1)) })
    }
}

impl Slots for Line {
    type Cell = Tat;

    #[inline(always)]
    fn bits(&self, slot: usize) -> Tat {
        self.at_word(2 * slot)
    }

    #[inline(always)]
    fn word(&self, slot: usize) -> Tat {
        self.at_word(2 * slot + 1)
    }

    #[inline(always)]
    fn opaque(&self, slot: usize, unknown: u64) -> usize {
        hidden(slot as u32, unknown) as usize
    }
}
