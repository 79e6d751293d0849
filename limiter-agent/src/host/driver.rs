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

/// The counters that the driver of the interface called `name` has of its own (`ethtool -S`), by their
/// names; none if it has none. The driver may take its time.
#[must_use]
pub fn statistics(name: &str) -> Vec<(String, u64)> {
    const GET_SET_SIZES: u32 = 0x37;
    const GET_NAMES: u32 = 0x1b;
    const GET_VALUES: u32 = 0x1d;
    /// `ETH_SS_STATS`, the set of strings that names the counters.
    const STATISTICS: u32 = 1;
    /// `ETH_GSTRING_LEN`.
    const NAME_LENGTH: usize = 32;
    // `struct ethtool_sset_info`: the command, a reserved word, a mask of 64 bits, one size.
    let Some([_, _, _, _, count]) = ask(name, [GET_SET_SIZES, 0, 1 << STATISTICS, 0, 0]) else {
        return Vec::new();
    };
    // The kernel writes as many as there are by the time it is asked, whatever there is room for; a
    // driver that gets more queues in between has more.
    let room = count as usize * 2 + 1024;
    // `struct ethtool_gstrings`: the command, the set, how many, and the strings.
    let mut names = vec![0_u8; 12 + room * NAME_LENGTH];
    names[..4].copy_from_slice(&GET_NAMES.to_ne_bytes());
    names[4..8].copy_from_slice(&STATISTICS.to_ne_bytes());
    names[8..12].copy_from_slice(&count.to_ne_bytes());
    // `struct ethtool_stats`: the command, how many, and the values.
    let mut values = vec![0_u64; 1 + room];
    let [c0, c1, c2, c3] = GET_VALUES.to_ne_bytes();
    let [n0, n1, n2, n3] = count.to_ne_bytes();
    values[0] = u64::from_ne_bytes([c0, c1, c2, c3, n0, n1, n2, n3]);
    // SAFETY: both begin with their commands, and have room for what the kernel writes.
    let answered = unsafe {
        ethtool(name, names.as_mut_ptr().cast()) && ethtool(name, values.as_mut_ptr().cast())
    };
    if count == 0 || !answered {
        return Vec::new();
    }
    let names = names[12..].chunks_exact(NAME_LENGTH).take(count as usize).map(|name| {
        let text = name.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).trim().to_owned()
    });
    names.zip(values.into_iter().skip(1)).collect()
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
// SAFETY: `struct ethtool_sset_info` with one size.
unsafe impl Question for [u32; 5] {}
// SAFETY: `struct ethtool_channels`: the command and eight counts.
unsafe impl Question for [u32; 9] {}

/// The kernel's answer, in place of the question; none if it has none.
fn ask<T: Question>(name: &str, mut question: T) -> Option<T> {
    // SAFETY: what a `Question` promises.
    unsafe { ethtool(name, (&raw mut question).cast()) }.then_some(question)
}

/// Asks the driver of the interface called `name`; false if there is no answer.
///
/// # Safety
/// `question` must point to the structure of the command in its first word, with room for all that the
/// kernel writes for that command.
unsafe fn ethtool(name: &str, question: *mut libc::c_char) -> bool {
    let Ok(socket) = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)
    else {
        return false;
    };
    // SAFETY: an all-zero ifreq is a valid value of this struct of integers and pointers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays 0: a longer name is no interface's.
    if name.len() >= request.ifr_name.len() {
        return false;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = question;
    // SAFETY: SIOCETHTOOL reads and writes an ifreq whose data points to the structure of the
    // command in its first word; both live until the call returns.
    unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) == 0 }
}
