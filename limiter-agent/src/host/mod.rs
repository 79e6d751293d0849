//! The machine that the agent runs on: its interfaces and clocks, and whether it can do what is
//! asked of it at all.

mod discards;
mod driver;
mod features;
mod links;
mod memory;
mod preflight;
mod privileges;
mod refusal;
mod sockets;

use std::net::IpAddr;
use std::time::SystemTime;

use limiter_common::abi::SourceAddress;
use limiter_common::time::Nanos;
use nix::ifaddrs::getifaddrs;
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_getres, clock_gettime};

pub use discards::{Discard, Discards};
pub use driver::{Offloads, driver, offloads, receive_queues};
pub use features::{XdpFeatures, xdp_features};
pub use links::{Link, LinksError, RealMode, links, released};
pub use memory::available_memory;
pub use preflight::{Unfit, memlock, preflight, requirements, sees_programs, unclaimed};
pub use privileges::drop_privileges;
pub use refusal::{Refusal, kernel_words, other_mode};
pub use sockets::{Connections, SocketsError, connections, peers_of};

/// The two clocks, read together: expiry times are written on the wall clock and enforced on the
/// monotonic one.
#[must_use]
pub fn clocks() -> (Nanos, SystemTime) {
    (monotonic(), SystemTime::now())
}

/// How often the kernel's coarse clock moves: its timer tick, 1 to 10 ms.
#[must_use]
pub fn tick() -> Nanos {
    // Were it unreadable, a second is more than any tick, and makes every class use the fine clock
    // that needs to.
    clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).map_or(Nanos(1_000_000_000), nanos)
}

/// The tick, if the kernel's count of them ("jiffies") is a measure of time. It is unless the timer can
/// only tick, and so may lose ticks: then `CLOCK_MONOTONIC` has no finer resolution either.
#[must_use]
pub fn counted_tick() -> Option<Nanos> {
    let is_fine = clock_getres(ClockId::CLOCK_MONOTONIC).is_ok_and(|it| nanos(it) == Nanos(1));
    is_fine.then(tick)
}

/// The addresses of this host's interfaces in this network namespace, but for loopback. None if the
/// kernel does not say: then packets that claim to come from them are not told from others.
#[must_use]
pub fn addresses() -> Vec<SourceAddress> {
    let addresses = own_addresses().into_iter().map(SourceAddress::from);
    addresses.filter(|address| !address.is_martian()).collect()
}

/// The same with loopback, as people write them.
#[must_use]
pub fn own_addresses() -> Vec<IpAddr> {
    let addresses = getifaddrs().into_iter().flatten().filter_map(|it| it.address);
    let addresses = addresses.filter_map(|address| {
        let v4 = address.as_sockaddr_in().map(|address| IpAddr::from(address.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|address| address.ip().into()))
    });
    addresses.collect()
}

/// `CLOCK_MONOTONIC`, the clock of `bpf_ktime_get_ns`.
#[must_use]
pub fn monotonic() -> Nanos {
    // The clock exists on every Linux; were it unreadable, expiry times would count from boot.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap_or(TimeSpec::new(0, 0));
    nanos(now)
}

fn nanos(time: TimeSpec) -> Nanos {
    Nanos(time.tv_sec().unsigned_abs() * 1_000_000_000 + time.tv_nsec().unsigned_abs())
}
