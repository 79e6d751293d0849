//! The single tables: `mode`, `[table]`, `[aggregate]`, `[neighbour]`, `[faults]`, `[metrics]`, `[control]`. Each
//! answers `None` only if something was noted.

use std::net::SocketAddr;
use std::path::PathBuf;

use limiter_common::units::Rate;

use super::reader::{Table, Value};
use super::units::Unit;
use super::{
    Budget, Ceilings, FaultAction, Faults, Mode, Neighbours, TableSizes, application, budget,
};

/// The mode at `key`, none if it is not there.
#[expect(clippy::option_option, reason = "absent and wrong are two things")]
pub(super) fn mode(table: &Table<'_>, key: &'static str) -> Option<Option<Mode>> {
    let modes = [Mode::Observe, Mode::Enforce, Mode::Bypass].map(|mode| (mode.as_str(), mode));
    table.get(key).map_or(Some(None), |value| value.choice(&modes).map(Some))
}

pub(super) fn table(root: &Table<'_>) -> Option<TableSizes> {
    const DEFAULT: u32 = 1_000_000;
    let table = match root.get("table") {
        None => None,
        Some(value) => Some(value.table("write [table]")?),
    };
    let size = |key| {
        let value = table.as_ref().and_then(|table| table.get(key));
        let size =
            value.map(|value| value.integer(TableSizes::LEAST.into()..=TableSizes::MOST.into()));
        size.map_or(Some(DEFAULT), |size| u32::try_from(size?).ok())
    };
    let (ipv4_sources, ipv6_sources) = (size("ipv4_sources"), size("ipv6_sources"));
    let new_sources = match table.as_ref().and_then(|table| table.get("new_sources")) {
        None => Some(Budget { rate: Rate::new(10_000, 1).ok()?, burst: 100_000 }),
        Some(value) => budget::budget(value, Unit::Packets),
    };
    Some(TableSizes {
        ipv4_sources: ipv4_sources?,
        ipv6_sources: ipv6_sources?,
        new_sources: new_sources?,
    })
}

/// One IPv6 /48 has half of the budget for new sources, unless it is said otherwise.
pub(super) fn ceilings(root: &Table<'_>, sizes: Option<TableSizes>) -> Option<Ceilings> {
    let table = match root.get("aggregate") {
        None => None,
        Some(value) => Some(value.table("write [aggregate]")?),
    };
    let get = |key| table.as_ref().and_then(|table| table.get(key));
    // 0 is the way to say that there is none.
    let multiple = |key, default| match get(key) {
        None => Some(default),
        Some(value) => value
            .integer(0..=1_000_000)
            .and_then(|it| u32::try_from(it).ok())
            .map(|it| (it != 0).then_some(it)),
    };
    let ipv6_56 = multiple("ipv6_56", Some(4));
    let ipv6_48 = multiple("ipv6_48", Some(8));
    let ipv4_24 = multiple("ipv4_24", None);
    let new_sources = match get("ipv6_48_new_sources") {
        Some(value) => budget::budget(value, Unit::Packets),
        None => sizes.map(|sizes| sizes.new_sources.half()),
    };
    Some(Ceilings {
        ipv6_56: ipv6_56?,
        ipv6_48: ipv6_48?,
        ipv4_24: ipv4_24?,
        ipv6_48_new_sources: new_sources?,
    })
}

/// `packets` for each of the two, unless one has its own.
pub(super) fn neighbours(root: &Table<'_>) -> Option<Neighbours> {
    let table = match root.get("neighbour") {
        None => None,
        Some(value) => Some(value.table("write [neighbour]")?),
    };
    let read = |key, default| match table.as_ref().and_then(|table| table.get(key)) {
        None => default,
        Some(value) => budget::budget(value, Unit::Packets),
    };
    let default = Budget { rate: Rate::new(5_000, 1).ok()?, burst: 10_000 };
    let each = read("packets", Some(default));
    let (arp, nd) = (read("arp", each), read("nd", each));
    Some(Neighbours { arp: arp?, nd: nd? })
}

pub(super) fn faults(root: &Table<'_>) -> Option<Faults> {
    let table = match root.get("faults") {
        None => None,
        Some(value) => Some(value.table("write [faults]")?),
    };
    let action = |key, default| {
        let choices = [("pass", FaultAction::Pass), ("drop", FaultAction::Drop)];
        let value = table.as_ref().and_then(|table| table.get(key));
        value.map_or(Some(default), |value| value.choice(&choices))
    };
    let malformed = action("malformed", FaultAction::Drop);
    let table_full = action("table_full", FaultAction::Pass);
    Some(Faults { malformed: malformed?, table_full: table_full? })
}

/// What happens when the agent is gone: after how many seconds nothing is dropped, if so.
#[expect(clippy::option_option, reason = "none and wrong are two things")]
pub(super) fn agent_loss(root: &Table<'_>) -> Option<Option<u32>> {
    const DEFAULT: u32 = 60;
    let lease = root.get("agent_lease");
    let seconds = match &lease {
        None => Some(DEFAULT),
        // Below that, a flood that slows the agent down could end the limits.
        Some(value) => value
            .integer_or(30..=86_400, "write a number of seconds from 30 to 86400")
            .and_then(|it| u32::try_from(it).ok()),
    };
    let observes = match root.get("on_agent_loss") {
        None => Some(false),
        Some(value) => value.choice(&[("keep", false), ("observe", true)]),
    };
    let (seconds, observes) = (seconds?, observes?);
    if let Some(lease) = lease.filter(|_| !observes) {
        lease.place().warn(
            "has no effect: the limits hold on without an agent",
            "add on_agent_loss = \"observe\", or remove it",
        );
    }
    Some(observes.then_some(seconds))
}

pub(super) fn metrics(root: &Table<'_>) -> Option<SocketAddr> {
    let cure = "write an IP address and a port: \"127.0.0.1:9478\" or \"[::1]:9478\"";
    let listen = match root.get("metrics") {
        None => None,
        Some(value) => value.table("write [metrics]")?.get("listen"),
    };
    let Some(value) = listen else { return Some(SocketAddr::from(([127, 0, 0, 1], 9478))) };
    let text = value.string(cure)?;
    let address = text.parse().ok();
    if address.is_none() {
        value.place().error(format!("\"{text}\" is not a socket address"), cure);
    }
    address
}

/// The control socket, and the group that may open it beside its owner.
pub(super) fn control(root: &Table<'_>) -> Option<(PathBuf, Option<String>)> {
    let table = match root.get("control") {
        None => None,
        Some(value) => Some(value.table("write [control]")?),
    };
    let get = |key| table.as_ref().and_then(|table| table.get(key));
    let path = match get("socket") {
        None => Some(PathBuf::from("/run/limiter/control.sock")),
        Some(value) => socket(&value, "write an absolute path: \"/run/limiter/control.sock\""),
    };
    let group = match get("group") {
        None => Some(None),
        Some(value) => application::group(&value).map(Some),
    };
    Some((path?, group?))
}

/// The path of a Unix socket; `None` only if something was noted.
pub(super) fn socket(value: &Value<'_>, cure: &str) -> Option<PathBuf> {
    /// `sun_path` of `struct sockaddr_un`, less the terminating 0.
    const LONGEST: usize = 107;
    let path = value.string(cure)?;
    if !path.starts_with('/') || path.len() > LONGEST || path.contains('\0') {
        let cause = format!("\"{path}\" cannot be the path of a socket");
        value.place().error(cause, format!("{cure}; at most {LONGEST} characters"));
        return None;
    }
    Some(PathBuf::from(path))
}
