//! The program that hears of TCP connections: when the host opens one, when a handshake is completed,
//! and when one that others opened is over; never for a packet.

use core::ptr;

use aya_ebpf::{
    bindings::{
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB,
        BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_TCP_CONNECT_CB,
    },
    helpers::bpf_ktime_get_ns,
    macros::sock_ops,
    programs::SockOpsContext,
};
use limiter_common::{
    Env as _,
    abi::SourceAddress,
    known::{Filter, Mark},
    time::Nanos,
};

use crate::{
    connections::{self, Change},
    env::MapEnv,
    flows,
};

/// What such a program returns when it has no answer of its own to give.
const DONE: u32 = 1;

/// As `<linux/socket.h>` has them.
const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;

/// Of the TCP flags (RFC 9293 §3.1).
const SYN: u32 = 1 << 1;

/// Entry for the events of all TCP sockets.
#[sock_ops]
pub(crate) fn handshakes(ctx: SockOpsContext) -> u32 {
    match ctx.op() {
        BPF_SOCK_OPS_STATE_CB => {
            if let Some(change) = Change::of(&ctx)
                && let Some(peer) = peer(&ctx)
                && !flows::is_client(&ctx)
            {
                connections::count(change, peer);
            }
            return DONE;
        }
        BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB => connections::watch(&ctx),
        _ => {}
    }
    let (opens, proves) = (ctx.op() == BPF_SOCK_OPS_TCP_CONNECT_CB, is_proof(&ctx));
    if (opens || proves)
        && let Some(peer) = peer(&ctx)
    {
        // SAFETY: no arguments and no preconditions.
        let now = Nanos(unsafe { bpf_ktime_get_ns() });
        if opens {
            flows::connects(&ctx, peer, now);
        } else {
            prove(peer, now);
        }
    }
    DONE
}

#[inline(always)]
fn prove(peer: SourceAddress, now: Nanos) {
    let hash = MapEnv.key().source(peer.into());
    if let Some(known) = MapEnv.known(hash) {
        Mark::of(hash).set(&known, Filter::Proven, now);
    }
}

/// Whether the peer has just answered a number that was sent to its address only.
#[inline(always)]
fn is_proof(ctx: &SockOpsContext) -> bool {
    match ctx.op() {
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB => true,
        // With TCP Fast Open (RFC 7413) the SYN opens the connection, and a host may be set to ask
        // for no cookie. The agent finds such connections once they are established.
        BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB => {
            // SAFETY: a field of the context.
            load(unsafe { &raw const (*ctx.ops).skb_tcp_flags }) & SYN == 0
        }
        _ => false,
    }
}

/// The other end of the connection.
#[inline(always)]
fn peer(ctx: &SockOpsContext) -> Option<SourceAddress> {
    match ctx.family() {
        AF_INET => Some(SourceAddress::ipv4(u32::from_be(ctx.remote_ip4()))),
        AF_INET6 => {
            let half = |first: usize| {
                let word = |index: usize| {
                    // SAFETY: a field of the context.
                    let word = load(unsafe { &raw const (*ctx.ops).remote_ip6[index] });
                    u64::from(u32::from_be(word))
                };
                word(first) << 32 | word(first + 1)
            };
            Some(SourceAddress::peer(half(0), half(2)))
        }
        _ => None,
    }
}

/// The verifier takes whole words of the context only; two reads must not become one.
#[inline(always)]
pub(crate) fn load(word: *const u32) -> u32 {
    // SAFETY: a field of the context, which lives as long as the program runs.
    unsafe { ptr::read_volatile(word) }
}
