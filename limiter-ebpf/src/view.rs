//! The frame's bytes: the only place with packet pointers.

use core::arch::asm;

use aya_ebpf::{
    bindings::xdp_md,
    helpers::generated::{bpf_xdp_get_buff_len, bpf_xdp_load_bytes},
    programs::XdpContext,
};
use limiter_common::PacketView;

/// No header lies further into a frame: 22 bytes of Ethernet and tags, and IPv6 with its longest
/// chain of extensions. It bounds the offset for the verifier.
const MAX_OFFSET: u32 = 0x7fff;

/// A received frame.
pub(crate) struct FrameView<'a> {
    ctx: &'a XdpContext,
    /// Bytes in its first buffer; unknown to the verifier.
    first: u32,
}

impl<'a> FrameView<'a> {
    #[inline(always)]
    pub(crate) fn new(ctx: &'a XdpContext) -> Self {
        let mut first = ctx.data_end();
        // SAFETY: arithmetic only; written out, since the verifier wants all 64 bits of pointers in it.
        unsafe { asm!("{end} -= {start}", end = inout(reg) first, start = in(reg) ctx.data()) };
        Self { ctx, first: first as u32 }
    }

    /// What the program was called with, to hand on to a function that the verifier checks by itself.
    #[inline(always)]
    pub(crate) fn raw(&self) -> *mut xdp_md {
        self.ctx.ctx
    }

    /// Writes over the first eight bytes, if there are as many.
    #[inline(always)]
    pub(crate) fn overwrite(&self, word: u64) -> Option<()> {
        let start = self.ctx.data();
        if start + size_of::<u64>() > self.ctx.data_end() {
            return None;
        }
        // SAFETY: within the frame's first buffer, as just checked; nobody else has it.
        unsafe { (start as *mut u64).write_volatile(word) };
        Some(())
    }

    /// The interface it came in on.
    #[inline(always)]
    pub(crate) fn ifindex(&self) -> u32 {
        self.ctx.ingress_ifindex() as u32
    }
}

impl PacketView for FrameView<'_> {
    #[inline(always)]
    fn length(&self, end: u32) -> u32 {
        if end <= self.first {
            return self.first;
        }
        // SAFETY: the context is the program's own.
        unsafe { bpf_xdp_get_buff_len(self.ctx.ctx) as u32 }
    }

    #[inline(always)]
    fn read<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        if offset > MAX_OFFSET {
            return None;
        }
        let offset = bounded(offset);
        let start = self.ctx.data() + offset;
        if start + N > self.ctx.data_end() {
            return self.load(offset);
        }
        // SAFETY: start..start + N lies within the linear part of the frame, as just checked.
        Some(unsafe { wide(start) })
    }

    #[inline(always)]
    fn words<const N: usize>(&self, offset: u32) -> Option<[u64; N]> {
        if offset > MAX_OFFSET {
            return None;
        }
        let offset = bounded(offset);
        let start = self.ctx.data() + offset;
        let mut words = [0; N];
        if start + 8 * N > self.ctx.data_end() {
            for (index, word) in words.iter_mut().enumerate() {
                *word = u64::from_be_bytes(self.load(offset + 8 * index)?);
            }
        } else {
            for (index, word) in words.iter_mut().enumerate() {
                // SAFETY: as above.
                *word = u64::from_be_bytes(unsafe { wide(start + 8 * index) });
            }
        }
        Some(words)
    }

    #[inline(always)]
    fn opaque(&self, value: u32) -> u32 {
        hidden(value, self.first.into())
    }
}

impl FrameView<'_> {
    /// The same bytes where they lie in a further buffer of the frame.
    #[inline(always)]
    fn load<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        const { assert!(N <= 8) };
        // A whole word, since kernels before 6.3 refuse a read of what some path left unwritten.
        let mut word = 0_u64;
        // SAFETY: the buffer has 8 bytes and N is at most that; the kernel checks the offset.
        let error = unsafe {
            bpf_xdp_load_bytes(self.ctx.ctx, offset as u32, (&raw mut word).cast(), N as u32)
        };
        (error == 0).then(|| first(word.to_ne_bytes()))
    }
}

/// `value`, of which the verifier no longer knows anything, if `unknown` is that to it: x ^ y ^ y is x,
/// but it does not work that out.
#[inline(always)]
pub(crate) fn hidden(value: u32, unknown: u64) -> u32 {
    let mut value = u64::from(value);
    // SAFETY: register arithmetic only.
    unsafe {
        asm!("{v} ^= {u}", "{v} ^= {u}", v = inout(reg) value, u = in(reg) unknown);
    }
    value as u32
}

/// The offset, which is at most [`MAX_OFFSET`], with that bound where every verifier sees it: kernel
/// 6.1 loses it when the comparison is made on another register.
#[inline(always)]
fn bounded(offset: u32) -> usize {
    let mut offset = offset as usize;
    // SAFETY: register arithmetic only.
    unsafe { asm!("{o} &= {m}", o = inout(reg) offset, m = const MAX_OFFSET) };
    offset
}

/// Reads N bytes with one load: left to itself, LLVM loads unaligned bytes one by one.
///
/// # Safety
/// `start..start + N` must be checked packet memory.
#[inline(always)]
unsafe fn wide<const N: usize>(start: usize) -> [u8; N] {
    const { assert!(N == 2 || N == 4 || N == 8) };
    let word: u64;
    // SAFETY: the caller's promise. The verifier allows unaligned loads from packets wherever the
    // hardware does.
    unsafe {
        match N {
            2 => asm!("{w} = *(u16 *)({p} + 0)", w = out(reg) word, p = in(reg) start),
            4 => asm!("{w} = *(u32 *)({p} + 0)", w = out(reg) word, p = in(reg) start),
            _ => asm!("{w} = *(u64 *)({p} + 0)", w = out(reg) word, p = in(reg) start),
        }
    }
    first(word.to_ne_bytes())
}

/// The first N of 8 bytes.
#[inline(always)]
fn first<const N: usize>(bytes: [u8; 8]) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[..N]);
    part
}
