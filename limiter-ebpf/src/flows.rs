//! The programs that hear of the flows that this host opens.
//!
//! A TCP connection is opened once, and [`handshakes`](crate::handshakes) hears of it. For UDP it
//! depends on the socket: a client's has a port that the kernel chose, a server's one that it asked for.
//! A socket is a client's from its creation until it is bound to a port of its own. One that was there
//! before these programs counts as a server's, and so do the kernel's own.
//!
//! A packet that a client's socket sends keeps its flow open. It is looked at on the way out, behind
//! `connect` and `sendmsg`, since a connected socket has no port yet when it is connected; and behind
//! address translation, so that the flow is the one on the wire.

use core::ptr;

use aya_ebpf::{
    bindings::{BPF_SK_STORAGE_GET_F_CREATE, bpf_sock},
    helpers::generated::{bpf_sk_fullsock, bpf_sk_storage_delete, bpf_sk_storage_get},
    macros::{cgroup_skb, cgroup_sock, cgroup_sock_addr},
    programs::{SkBuffContext, SockAddrContext, SockContext, SockOpsContext},
};
use limiter_common::{
    Env as _,
    abi::SourceAddress,
    flows::{self, Answer, Flow, Transport},
    time::Nanos,
};

use crate::{
    clock, env,
    env::MapEnv,
    maps::{CLIENT_PORTS, CLIENTS, SETTINGS},
};

/// What these programs return: the kernel goes on.
const GO_ON: i32 = 1;

const TCP: u32 = Transport::Tcp as u32;
const UDP: u32 = Transport::Udp as u32;

/// No [generation](limiter_common::known::Filter::generation), which has 16 bits.
const NEVER: u32 = u32::MAX;

/// A new socket.
#[cgroup_sock(sock_create)]
pub(crate) fn flow_sockets(ctx: SockContext) -> i32 {
    // SAFETY: a field of the context.
    if unsafe { (*ctx.sock).protocol } == UDP {
        remember_client(ctx.sock);
    }
    GO_ON
}

/// A socket that asks for an address and a port.
#[cgroup_sock_addr(bind4)]
pub(crate) fn flow_bind4(ctx: SockAddrContext) -> i32 {
    forget_server(&ctx)
}

/// The same for IPv6.
#[cgroup_sock_addr(bind6)]
pub(crate) fn flow_bind6(ctx: SockAddrContext) -> i32 {
    forget_server(&ctx)
}

/// A packet on its way out.
#[cgroup_skb(egress)]
pub(crate) fn flow_packets(ctx: SkBuffContext) -> i32 {
    sent(&ctx);
    GO_ON
}

/// A connection that this host opens, before its SYN leaves.
#[inline(always)]
pub(crate) fn connects(ctx: &SockOpsContext, remote: SourceAddress, now: Nanos) {
    // SAFETY: a field of the context.
    let socket = unsafe { (*ctx.ops).__bindgen_anon_2.sk };
    if !socket.is_null() {
        remember_client(socket);
    }
    // The port is in the upper half of the word, in network order; our own is in host order.
    let remote_port = u32::from_be(ctx.remote_port()) as u16;
    let local_port = ctx.local_port() as u16;
    open(Flow { remote, remote_port, local_port, transport: Transport::Tcp }, now);
}

/// Whether the socket is one of a connection that this host opened.
#[inline(always)]
pub(crate) fn is_client(ctx: &SockOpsContext) -> bool {
    // SAFETY: a field of the context.
    let socket = unsafe { (*ctx.ops).__bindgen_anon_2.sk };
    // SAFETY: a map and a socket of the context.
    !socket.is_null()
        && !unsafe { bpf_sk_storage_get(clients(), socket.cast(), ptr::null_mut(), 0) }.is_null()
}

/// What the flow of these parts and the settings in `bank` say of a packet: an
/// [`Answer`](limiter_common::flows::Answer). A global function, as is what is rare in `lines.rs`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn answer(high: u64, low: u64, rest: u64, now: u64, bank: u32) -> u32 {
    let Some(settings) = SETTINGS.get(bank) else { return Answer::NONE.0 };
    flows::answer(&Flow::from_parts([high, low, rest]), Nanos(now), settings, &MapEnv).0
}

/// Notes that a client has the socket. Without memory for that, its flows are not known.
#[inline(always)]
fn remember_client(socket: *mut bpf_sock) {
    let mut generation = NEVER;
    let create = BPF_SK_STORAGE_GET_F_CREATE.into();
    // SAFETY: a map and a socket of the context; the value is copied.
    unsafe {
        bpf_sk_storage_get(clients(), socket.cast(), (&raw mut generation).cast(), create);
    }
}

#[inline(always)]
fn forget_server(ctx: &SockAddrContext) -> i32 {
    // SAFETY: fields of the context.
    let (port, socket) =
        unsafe { ((*ctx.sock_addr).user_port, (*ctx.sock_addr).__bindgen_anon_1.sk) };
    if port != 0 && !socket.is_null() {
        // SAFETY: a map and a socket of the context. That there is nothing to delete is no failure.
        unsafe { bpf_sk_storage_delete(clients(), socket.cast()) };
    }
    GO_ON
}

/// Keeps the flow of a packet open, if a client's socket sends it.
#[inline(always)]
fn sent(ctx: &SkBuffContext) -> Option<()> {
    // SAFETY: a field of the context.
    let socket = unsafe { (*ctx.skb.skb).__bindgen_anon_2.sk };
    if socket.is_null() {
        return None;
    }
    // SAFETY: a socket of the context.
    let socket = unsafe { bpf_sk_fullsock(socket) };
    if socket.is_null() {
        return None;
    }
    // SAFETY: a field of a socket that is not null.
    let transport = match unsafe { (*socket).protocol } {
        TCP => Transport::Tcp,
        UDP => Transport::Udp,
        _ => return None,
    };
    // SAFETY: a map and a socket.
    let last = unsafe { bpf_sk_storage_get(clients(), socket.cast(), ptr::null_mut(), 0) };
    let last: *mut u32 = last.cast();
    if last.is_null() && !(transport == Transport::Udp && is_client_port(socket)) {
        return None;
    }
    let now = clock::coarse(env::settings()?);
    if transport == Transport::Tcp {
        // A connection has one flow, so that it is enough to look at its first packet of each generation.
        let generation = transport.filter().generation(now).into();
        // SAFETY: an aligned word of the map's value, which is there for TCP, as just checked.
        unsafe {
            if *last == generation {
                return None;
            }
            *last = generation;
        }
    }
    open(flow(ctx, transport)?, now);
    Some(())
}

/// Whether the operator says that who is bound to this port is a client.
#[inline(always)]
fn is_client_port(socket: *mut bpf_sock) -> bool {
    // SAFETY: a field of a socket that is not null.
    let port = unsafe { (*socket).src_port };
    let Some(ports) = CLIENT_PORTS.get(0) else { return false };
    ports[port as usize >> 6 & (ports.len() - 1)] >> (port & 63) & 1 != 0
}

/// The flow of a packet, which begins with its network header.
#[inline(always)]
fn flow(ctx: &SkBuffContext, transport: Transport) -> Option<Flow> {
    /// `ETH_P_IP` as it lies in the context's word.
    const IPV4: u32 = 0x0800_u16.to_be() as u32;
    // SAFETY: a field of the context.
    let (remote, ports) = if unsafe { (*ctx.skb.skb).protocol } == IPV4 {
        // 20 bytes of header and the ports behind, unless there are options (RFC 791 §3.1).
        let words: [u32; 6] = ctx.load(0).ok()?;
        let length = u32::from_be(words[0]) >> 22 & 0x3c;
        let ports = if length == 20 { words[5] } else { ctx.load(length as usize).ok()? };
        (SourceAddress::ipv4(u32::from_be(words[4])), ports)
    } else {
        // 40 bytes of header; the destination is the second half (RFC 8200 §3).
        let words: [u32; 11] = ctx.load(0).ok()?;
        if u32::from_be(words[1]) >> 8 & 0xff != transport as u32 {
            return None;
        }
        let word = |index: usize| u64::from(u32::from_be(words[index]));
        (SourceAddress::peer(word(6) << 32 | word(7), word(8) << 32 | word(9)), words[10])
    };
    let ports = u32::from_be(ports);
    let (local_port, remote_port) = ((ports >> 16) as u16, ports as u16);
    Some(Flow { remote, remote_port, local_port, transport })
}

#[inline(always)]
fn open(flow: Flow, now: Nanos) {
    let hash = MapEnv.key().flow(&flow);
    if let (Some(port), Some(place)) = (MapEnv.flow_port(flow.local_port), MapEnv.flow(hash)) {
        flow.open(&port, &place, hash, now);
    }
}

fn clients() -> *mut core::ffi::c_void {
    (&raw const CLIENTS).cast_mut().cast()
}
