//! The name of an interface's driver, which error messages and metrics carry.

use std::ffi::CStr;
use std::os::fd::AsRawFd;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

/// `struct ethtool_drvinfo` of `linux/ethtool.h`.
#[repr(C)]
struct DriverInfo {
    command: u32,
    driver: [u8; 32],
    /// Version, firmware, bus and counts, of no interest here.
    rest: [u8; 160],
}

/// `ETHTOOL_GDRVINFO`.
const GET_DRIVER_INFO: u32 = 3;

const _: () = assert!(size_of::<DriverInfo>() == 196);

/// The driver of the interface called `name`, in this network namespace; none if it says nothing.
#[must_use]
pub fn driver(name: &str) -> Option<String> {
    let socket =
        socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None).ok()?;
    let mut info = DriverInfo { command: GET_DRIVER_INFO, driver: [0; 32], rest: [0; 160] };
    // SAFETY: an all-zero ifreq is a valid value of this struct of integers and pointers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays 0: a longer name is no interface's.
    if name.len() >= request.ifr_name.len() {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = (&raw mut info).cast();
    // SAFETY: SIOCETHTOOL reads and writes an ifreq whose data points to the structure of the
    // command in its first word; both live until the call returns.
    let answer = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
    if answer != 0 {
        return None;
    }
    let name = CStr::from_bytes_until_nul(&info.driver).ok()?.to_str().ok()?;
    (!name.is_empty()).then(|| name.to_owned())
}
