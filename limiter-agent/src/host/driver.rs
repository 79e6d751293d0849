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
#[expect(clippy::struct_excessive_bools, reason = "each is an offload of its own, on or off")]
pub struct Offloads {
    /// It merges TCP segments (LRO).
    pub merges: bool,
    /// It merges as GRO does (rx-gro-hw).
    pub merges_in_hardware: bool,
    /// The kernel merges (GRO), behind native XDP and before generic.
    pub merges_behind: bool,
    /// It takes the outer VLAN tag off (rxvlan).
    pub strips_vlan: bool,
}

/// The offloads in force on the interface called `name`; none if it does not say.
#[must_use]
pub fn offloads(name: &str) -> Option<Offloads> {
    const GET_FLAGS: u32 = 0x25;
    const RX_VLAN: u32 = 1 << 8;
    const LRO: u32 = 1 << 15;
    const GET_GRO: u32 = 0x2b;
    let [_, flags] = ask(name, [GET_FLAGS, 0])?;
    Some(Offloads {
        merges: flags & LRO != 0,
        merges_in_hardware: feature(name, "rx-gro-hw").unwrap_or(false),
        merges_behind: ask(name, [GET_GRO, 0]).is_some_and(|[_, on]| on != 0),
        strips_vlan: flags & RX_VLAN != 0,
    })
}

/// Whether the feature of this name (`ethtool -k`) is on; none if this kernel has none of it.
fn feature(name: &str, feature: &str) -> Option<bool> {
    const GET_FEATURES: u32 = 0x3a;
    /// `ETH_SS_FEATURES`.
    const FEATURES: u32 = 4;
    /// Words of 32 features; kernels have two.
    const WORDS: usize = 8;
    let place = strings(name, FEATURES).iter().position(|it| it == feature)?;
    // `struct ethtool_gfeatures`: the command, for how many words there is room, and for each those
    // that are available, requested, active and never changed.
    let mut question = [0; 2 + 4 * WORDS];
    question[0] = GET_FEATURES;
    question[1] = u32::try_from(WORDS).ok()?;
    let answer = ask(name, question)?;
    let active = answer.get(2 + 4 * (place / 32) + 2)?;
    Some(active >> (place % 32) & 1 != 0)
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
pub(super) fn statistics(name: &str) -> Vec<(String, u64)> {
    const GET_VALUES: u32 = 0x1d;
    /// `ETH_SS_STATS`.
    const STATISTICS: u32 = 1;
    let names = strings(name, STATISTICS);
    if names.is_empty() {
        return Vec::new();
    }
    // `struct ethtool_stats`: the command, how many, and the values.
    let mut values = vec![0_u64; 1 + room(names.len())];
    let [c0, c1, c2, c3] = GET_VALUES.to_ne_bytes();
    let [n0, n1, n2, n3] = u32::try_from(names.len()).unwrap_or(u32::MAX).to_ne_bytes();
    values[0] = u64::from_ne_bytes([c0, c1, c2, c3, n0, n1, n2, n3]);
    // SAFETY: it begins with its command, and has room for what the kernel writes.
    if !unsafe { ethtool(name, values.as_mut_ptr().cast()) } {
        return Vec::new();
    }
    names.into_iter().zip(values.into_iter().skip(1)).collect()
}

/// A set of strings that the driver of the interface called `name` has; empty if it has none.
fn strings(name: &str, set: u32) -> Vec<String> {
    const GET_SET_SIZES: u32 = 0x37;
    const GET_STRINGS: u32 = 0x1b;
    /// `ETH_GSTRING_LEN`.
    const LENGTH: usize = 32;
    // `struct ethtool_sset_info`: the command, a reserved word, a mask of 64 bits, one size.
    let Some([_, _, _, _, count]) = ask(name, [GET_SET_SIZES, 0, 1 << set, 0, 0]) else {
        return Vec::new();
    };
    if count == 0 {
        return Vec::new();
    }
    let length = usize::try_from(count).unwrap_or(usize::MAX);
    // `struct ethtool_gstrings`: the command, the set, how many, and the strings.
    let mut answer = vec![0_u8; 12 + room(length) * LENGTH];
    for (word, value) in answer.chunks_exact_mut(4).zip([GET_STRINGS, set, count]) {
        word.copy_from_slice(&value.to_ne_bytes());
    }
    // SAFETY: it begins with its command, and has room for what the kernel writes.
    if !unsafe { ethtool(name, answer.as_mut_ptr().cast()) } {
        return Vec::new();
    }
    let strings = answer[12..].chunks_exact(LENGTH).take(length).map(|string| {
        let text = string.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).trim().to_owned()
    });
    strings.collect()
}

/// The kernel writes as many as there are by the time it is asked, whatever there is room for; a driver
/// that gets more queues between two questions has more.
const fn room(count: usize) -> usize {
    count * 2 + 1024
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
// SAFETY: `struct ethtool_gfeatures` with room for eight words of features.
unsafe impl Question for [u32; 34] {}
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
