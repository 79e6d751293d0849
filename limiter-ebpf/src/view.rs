//! The frame's bytes: the only place with packet pointers.

use aya_ebpf::{
    EbpfContext as _,
    helpers::generated::{bpf_xdp_get_buff_len, bpf_xdp_load_bytes},
    programs::XdpContext,
};
use limiter_common::PacketView;

/// No header lies further into a frame: 22 bytes of Ethernet and tags, and IPv6 with its longest
/// chain of extensions. It bounds the offset for the verifier.
const MAX_OFFSET: usize = 0x7fff;

/// A received frame.
pub(crate) struct FrameView<'a> {
    ctx: &'a XdpContext,
    length: u32,
}

impl<'a> FrameView<'a> {
    #[inline(always)]
    pub(crate) fn new(ctx: &'a XdpContext) -> Self {
        // SAFETY: the context is the program's own.
        let length = unsafe { bpf_xdp_get_buff_len(ctx.ctx) };
        Self { ctx, length: length as u32 }
    }

    /// The interface it came in on.
    #[inline(always)]
    pub(crate) fn ifindex(&self) -> u32 {
        self.ctx.ingress_ifindex() as u32
    }
}

impl PacketView for FrameView<'_> {
    #[inline(always)]
    fn length(&self) -> u32 {
        self.length
    }

    #[inline(always)]
    fn read<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        let offset = offset as usize;
        if offset > MAX_OFFSET {
            return None;
        }
        let start = self.ctx.data() + offset;
        if start + N > self.ctx.data_end() {
            return self.load(offset);
        }
        // SAFETY: start..start + N lies within the linear part of the frame, as just checked, and
        // bytes have no alignment.
        Some(unsafe { *(start as *const [u8; N]) })
    }
}

impl FrameView<'_> {
    /// The same bytes where they lie in a further buffer of the frame.
    #[inline(always)]
    fn load<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        if offset + N > self.length as usize {
            return None;
        }
        let mut bytes = [0; N];
        // SAFETY: the buffer is N bytes long; the kernel checks the offset.
        let error = unsafe {
            bpf_xdp_load_bytes(
                self.ctx.as_ptr().cast(),
                offset as u32,
                bytes.as_mut_ptr().cast(),
                N as u32,
            )
        };
        (error == 0).then_some(bytes)
    }
}
