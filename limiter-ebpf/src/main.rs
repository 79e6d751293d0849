//! The XDP program: it hands the frame, the clock and the maps to `limiter_common::decide`, records
//! the outcome once, and acts on it. Beside it, [`handshakes`] notes who has
//! proven their address, and [`flows`] whom this host speaks with.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod clock;
mod env;
mod events;
mod flows;
mod handshakes;
mod lines;
mod maps;
mod record;
mod sample;
mod view;

use aya_ebpf::{
    bindings::xdp_action::{XDP_DROP, XDP_PASS},
    macros::xdp,
    programs::XdpContext,
};
use limiter_common::{Action, Decision, Outcome, decide};

use crate::{env::MapEnv, record::record, view::FrameView};

/// Entry for every frame, also those in several buffers (jumbo MTU).
#[xdp(frags)]
pub(crate) fn limiter(ctx: XdpContext) -> u32 {
    let view = FrameView::new(&ctx);
    let decision = match env::settings() {
        Some(settings) => decide(&view, view.ifindex(), settings, &MapEnv),
        None => Decision::unread(&view, Outcome::NO_SETTINGS),
    };
    record(&view, &decision);
    match decision.outcome.action {
        Action::Pass | Action::WouldDrop => XDP_PASS,
        Action::Drop => XDP_DROP,
    }
}

/// Never reached: the verifier accepts no program that can panic. The language wants it there.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

/// Helpers such as `bpf_ktime_get_ns` are for GPL-compatible programs.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
