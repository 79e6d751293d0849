//! Programs of the benchmark: a wrapper that gives each run of the program under test another source,
//! and the floors that it is compared with.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

use core::arch::asm;

use aya_ebpf::{
    bindings::xdp_action::{XDP_ABORTED, XDP_DROP, XDP_PASS},
    btf_maps::{PerCpuArray, ProgramArray},
    macros::{btf_map, xdp},
    programs::XdpContext,
};
use limiter_common::{
    PacketView as _,
    packet::{Frame, parse},
};

use crate::{
    course::{Course, FAMILY_IPV4, FAMILY_IPV6},
    mix::mix,
    view::FrameView,
};

mod course;
mod mix;
mod runtime;
// The same code as in the program under test, so that the difference is the decision alone.
#[path = "../../../limiter-ebpf/src/view.rs"]
#[expect(dead_code, reason = "the parser needs neither the interface nor the context")]
mod view;

/// The flood's destination port, which [`floor_port`] drops: discard (RFC 863).
const FLOOD_PORT: u16 = 9;

/// In one value, so that the wrapper costs little beside what it wraps.
#[btf_map]
static COURSE: PerCpuArray<Course, 1> = PerCpuArray::new();

/// The program under test. At a constant index the kernel makes a plain jump of the tail call.
#[btf_map]
static TARGET: ProgramArray<1> = ProgramArray::new();

/// Writes the next source into the frame and goes on as the program under test. Where there is none,
/// the verdict is `XDP_ABORTED`.
#[xdp(frags)]
fn wrap(ctx: XdpContext) -> u32 {
    if vary(&ctx).is_some() {
        // SAFETY: nothing here has a destructor that a tail call would skip.
        unsafe { TARGET.tail_call(&ctx, 0) };
    }
    XDP_ABORTED
}

/// The cost of dropping everything.
#[xdp(frags)]
fn floor(_: XdpContext) -> u32 {
    XDP_DROP
}

/// The cost of reading the headers, too.
#[xdp(frags)]
fn parse_only(ctx: XdpContext) -> u32 {
    let Frame::Ip(packet) = parse(&FrameView::new(&ctx)) else { return XDP_ABORTED };
    let ports =
        packet.ports.map_or(0, |ports| u64::from(ports.source) + u64::from(ports.destination));
    let read = packet.source.bits ^ ports ^ packet.protocol.index() as u64;
    // SAFETY: no instruction at all; it makes the compiler keep what was read.
    unsafe { asm!("/* {read} */", read = in(reg) read) };
    XDP_DROP
}

/// Drops the flood by its destination port and passes the rest: the least that a filter can do, and it
/// knows the flood.
#[xdp(frags)]
fn floor_port(ctx: XdpContext) -> u32 {
    if is_flood(&FrameView::new(&ctx)) == Some(true) { XDP_DROP } else { XDP_PASS }
}

/// Passes everything. In front of what is no XDP program: only with one does a veth end take clients'
/// packets in turn with the flood's frames, as a card does.
#[xdp(frags)]
fn pass(_: XdpContext) -> u32 {
    XDP_PASS
}

/// Whether it is UDP to [`FLOOD_PORT`], behind headers without tags, options or extensions.
#[inline(always)]
fn is_flood(view: &FrameView<'_>) -> Option<bool> {
    const UDP: u8 = 17;
    let (protocol, port) = match u16::from_be_bytes(view.read(12)?) {
        // Time to live and protocol (RFC 791 §3.1).
        0x0800 => (view.read::<2>(14 + 8)?[1], view.read(14 + 20 + 2)?),
        // Next header and hop limit (RFC 8200 §3).
        0x86dd => (view.read::<2>(14 + 6)?[0], view.read(14 + 40 + 2)?),
        _ => return None,
    };
    Some(protocol == UDP && u16::from_be_bytes(port) == FLOOD_PORT)
}

#[inline(always)]
fn vary(ctx: &XdpContext) -> Option<()> {
    let course = COURSE.get_ptr_mut(0)?;
    // SAFETY: a slot of this CPU, and test runs keep bottom halves off.
    let course = unsafe { &mut *course };
    course.turn = course.turn.wrapping_add(1);
    let number = course.turn;
    let index = if course.random == 0 { number } else { mix(number) } & course.mask;
    let source = course.base.wrapping_add(index);
    match course.family {
        // The source address is 12 bytes into the header (RFC 791 §3.1).
        FAMILY_IPV4 => write(ctx, 14 + 12, (source as u32).to_be_bytes()),
        // It is 8 bytes into the header (RFC 8200 §3).
        FAMILY_IPV6 => write(ctx, 14 + 8, source.to_be_bytes()),
        _ => None,
    }
}

#[inline(always)]
fn write<const N: usize>(ctx: &XdpContext, offset: usize, bytes: [u8; N]) -> Option<()> {
    let target = ctx.data() + offset;
    if target + N > ctx.data_end() {
        return None;
    }
    // SAFETY: `target..target + N` was just found to lie within the frame, which this program may
    // write to; an array of bytes has no alignment.
    unsafe { (target as *mut [u8; N]).write(bytes) };
    Some(())
}
