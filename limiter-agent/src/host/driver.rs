//! What an interface's driver says of itself (`linux/ethtool.h`).

use std::ffi::CStr;
use std::os::fd::AsRawFd;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

/// The name of the driver of the interface called `name`, in this network namespace; none if it says
/// nothing.
#[must_use]
pub fn driver(name: &str) -> Option<String> {
    const GET_DRIVER_INFO: u32 = 3;
    let asked = DriverInfo { command: GET_DRIVER_INFO, driver: [0; 32], rest: [0; 160] };
    let info = ask(name, asked)?;
    let name = CStr::from_bytes_until_nul(&info.driver).ok()?.to_str().ok()?;
    (!name.is_empty()).then(|| name.to_owned())
}

/// What the NIC does to packets before XDP sees them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// It merges TCP segments (LRO).
    pub merges: bool,
    /// It takes the outer VLAN tag off (rxvlan).
    pub strips_vlan: bool,
}

/// The offloads in force on the interface called `name`; none if it does not say.
#[must_use]
pub fn offloads(name: &str) -> Option<Offloads> {
    const GET_FLAGS: u32 = 0x25;
    const RX_VLAN: u32 = 1 << 8;
    const LRO: u32 = 1 << 15;
    let [_, flags] = ask(name, [GET_FLAGS, 0])?;
    Some(Offloads { merges: flags & LRO != 0, strips_vlan: flags & RX_VLAN != 0 })
}

/// The receive queues in use of the interface called `name`; none if its driver does not say.
#[must_use]
pub fn receive_queues(name: &str) -> Option<u32> {
    const GET_CHANNELS: u32 = 0x3c;
    // `struct ethtool_channels`: the command, the most of each kind, then those in use of each:
    // receive, send, other, combined.
    let [_, _, _, _, _, receive, _, _, combined] =
        ask(name, [GET_CHANNELS, 0, 0, 0, 0, 0, 0, 0, 0])?;
    Some(receive + combined)
}

/// `struct ethtool_drvinfo`.
#[repr(C)]
struct DriverInfo {
    command: u32,
    driver: [u8; 32],
    /// Version, firmware, bus and counts, of no interest here.
    rest: [u8; 160],
}

const _: () = assert!(size_of::<DriverInfo>() == 196);

/// What a driver may be asked: a structure of integers that begins with its command.
///
/// # Safety
/// It is as large as what the kernel writes for that command, and any bits are a value of it.
unsafe trait Question {}

// SAFETY: as large as `struct ethtool_drvinfo`, and integers only.
unsafe impl Question for DriverInfo {}
// SAFETY: `struct ethtool_value`: the command and its value.
unsafe impl Question for [u32; 2] {}
// SAFETY: `struct ethtool_channels`: the command and eight counts.
unsafe impl Question for [u32; 9] {}

/// The kernel's answer, in place of the question; none if it has none.
fn ask<T: Question>(name: &str, mut question: T) -> Option<T> {
    let socket =
        socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None).ok()?;
    // SAFETY: an all-zero ifreq is a valid value of this struct of integers and pointers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays 0: a longer name is no interface's.
    if name.len() >= request.ifr_name.len() {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = (&raw mut question).cast();
    // SAFETY: SIOCETHTOOL reads and writes an ifreq whose data points to the structure of the
    // command in its first word; both live until the call returns.
    let answer = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
    (answer == 0).then_some(question)
}
