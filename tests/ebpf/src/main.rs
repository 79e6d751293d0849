//! Programs of the test harness: a paced frame generator, run through `BPF_PROG_TEST_RUN` with
//! live frames, and counters to attach where its frames arrive.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

use core::arch::asm;

use aya_ebpf::{
    bindings::xdp_action::{XDP_DROP, XDP_PASS, XDP_TX},
    btf_maps::{Array, PerCpuArray},
    helpers::bpf_ktime_get_ns,
    macros::{btf_map, xdp},
    programs::XdpContext,
};

use crate::{
    mix::mix,
    shared::{FAMILY_IPV4, FAMILY_IPV6, FRACTION_BITS, MAX_SOURCE_OFFSET, Plan, Progress, Seen},
};

mod mix;
mod runtime;
mod shared;

/// How often a flood without a pace looks at the clock.
const FRAMES_PER_LOOK: u64 = 64;

#[btf_map]
static PLAN: Array<Plan, 1> = Array::new();

#[btf_map]
static PROGRESS: PerCpuArray<Progress, 1> = PerCpuArray::new();

#[btf_map]
static SEEN: PerCpuArray<Seen, 1> = PerCpuArray::new();

/// Sends the frame if one is due on this CPU. Setting up a run of live frames costs 20 ms, so
/// the caller asks for millions of repeats and the pace is kept here.
#[xdp]
fn generate(ctx: XdpContext) -> u32 {
    match send(&ctx) {
        Some(()) => XDP_TX,
        None => XDP_DROP,
    }
}

/// Counts the frame, if it is a flood's, and drops it.
#[xdp]
fn count_drop(ctx: XdpContext) -> u32 {
    count(&ctx);
    XDP_DROP
}

/// Counts the frame, if it is a flood's, and passes it to the stack.
#[xdp]
fn count_pass(ctx: XdpContext) -> u32 {
    count(&ctx);
    XDP_PASS
}

#[inline(always)]
fn send(ctx: &XdpContext) -> Option<()> {
    let plan = PLAN.get(0)?;
    let progress = PROGRESS.get_ptr_mut(0)?;
    // SAFETY: a slot of this CPU in a map that user space only reads during a flood, and test
    // runs keep bottom halves off, so nothing else on this CPU holds it.
    let progress = unsafe { &mut *progress };
    if progress.left == 0 {
        return None;
    }
    // Without a pace, the clock is only for the deadline, and would be most of a frame's cost.
    let now = if plan.interval == 0 && progress.sent % FRAMES_PER_LOOK != 0 {
        progress.last
    } else {
        // SAFETY: the helper takes no arguments and may be called from any program.
        unsafe { bpf_ktime_get_ns() }
    };
    if now >= plan.deadline {
        progress.left = 0;
        return None;
    }
    let elapsed = now.checked_sub(plan.start)? << FRACTION_BITS;
    let lag = elapsed.checked_sub(progress.due)?;
    if lag > plan.catch_up {
        progress.due = elapsed - plan.catch_up;
    }

    let frame = progress.sent * plan.lanes + progress.lane;
    let is_honest = plan.honest_every != 0 && frame % plan.honest_every == 0;
    let (base_high, base_low, source) = if is_honest {
        let source = frame / plan.honest_every % plan.honest_count.max(1);
        (plan.honest_high, plan.honest_low, source)
    } else {
        let source = if plan.random == 0 { frame } else { mix(frame) } % plan.count.max(1);
        (plan.base_high, plan.base_low, source)
    };
    match plan.family {
        FAMILY_IPV4 => write_ipv4(ctx, plan, base_low + source)?,
        FAMILY_IPV6 if is_honest => {
            write_ipv6(ctx, plan, base_high + source, base_low.wrapping_sub(source << 48))?;
        }
        FAMILY_IPV6 => {
            let per_prefix = plan.per_prefix.max(1);
            let (high, low) = (base_high + source / per_prefix, base_low + source % per_prefix);
            write_ipv6(ctx, plan, high, low)?;
        }
        _ => {}
    }
    if plan.honest_every != 0 {
        // The port is the second word behind the header, which ends behind the destination.
        let to_port = if plan.family == FAMILY_IPV4 { 4 + 4 + 2 } else { 16 + 16 + 2 };
        let port = if is_honest { plan.honest_port } else { plan.flood_port };
        write(ctx, plan.source_offset + to_port, u16::try_from(port).ok()?.to_be_bytes())?;
    }

    progress.due += plan.interval;
    progress.left -= 1;
    progress.sent += 1;
    if progress.first == 0 {
        progress.first = now;
    } else {
        progress.pause = progress.pause.max(now - progress.last);
    }
    progress.last = now;
    Some(())
}

/// Writes the source and the whole checksum, not a difference: a frame comes back from the page
/// pool as its last user left it.
#[inline(always)]
fn write_ipv4(ctx: &XdpContext, plan: &Plan, address: u64) -> Option<()> {
    let address = u32::try_from(address & 0xffff_ffff).ok()?;
    let mut sum = plan.checksum_base + (address >> 16) + (address & 0xffff);
    sum = (sum >> 16) + (sum & 0xffff);
    sum = (sum >> 16) + (sum & 0xffff);
    let checksum = !u16::try_from(sum & 0xffff).ok()?;
    // The checksum is the field before the source (RFC 791 §3.1).
    let [c0, c1] = checksum.to_be_bytes();
    let [a0, a1, a2, a3] = address.to_be_bytes();
    write(ctx, plan.source_offset.checked_sub(2)?, [c0, c1, a0, a1, a2, a3])
}

#[inline(always)]
fn write_ipv6(ctx: &XdpContext, plan: &Plan, high: u64, low: u64) -> Option<()> {
    write(ctx, plan.source_offset, high.to_be_bytes())?;
    write(ctx, plan.source_offset + 8, low.to_be_bytes())
}

#[inline(always)]
fn write<const N: usize>(ctx: &XdpContext, offset: u32, bytes: [u8; N]) -> Option<()> {
    // As far as the port behind an IPv6 header.
    if offset > MAX_SOURCE_OFFSET + 34 {
        return None;
    }
    let mut offset = usize::try_from(offset).ok()?;
    // SAFETY: register arithmetic only. It says the bound once more: kernel 6.1 loses it when the
    // comparison is made on another register.
    unsafe { asm!("{o} &= 127", o = inout(reg) offset) };
    let target = ctx.data() + offset;
    if target + N > ctx.data_end() {
        return None;
    }
    // SAFETY: `target..target + N` was just found to lie within the frame, which this program
    // may write to; an array of bytes has no alignment.
    unsafe { (target as *mut [u8; N]).write(bytes) };
    Some(())
}

/// Counts UDP: besides, the ends of a cable announce their multicast groups now and then.
#[inline(always)]
fn count(ctx: &XdpContext) {
    if is_udp(ctx)
        && let Some(seen) = SEEN.get_ptr_mut(0)
    {
        // SAFETY: a slot of this CPU; XDP programs of one CPU do not nest.
        let seen = unsafe { &mut *seen };
        seen.packets += 1;
        seen.bytes += (ctx.data_end() - ctx.data()) as u64;
    }
}

/// Whether an IP header without options or extensions says so.
#[inline(always)]
fn is_udp(ctx: &XdpContext) -> bool {
    const UDP: u8 = 17;
    let (start, end) = (ctx.data(), ctx.data_end());
    if start + 24 > end {
        return false;
    }
    // SAFETY: the first 24 bytes lie within the frame, as just found.
    let byte = |offset: usize| unsafe { *((start + offset) as *const u8) };
    match (byte(12), byte(13)) {
        (0x08, 0x00) => byte(23) == UDP,
        (0x86, 0xdd) => byte(20) == UDP,
        _ => false,
    }
}
