//! What the language and the kernel want of every program here.

/// The BPF target cannot unwind; nothing here can panic in a program that the verifier accepts.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
