//! `[established]`: what comes back on the flows that this host opened.

use limiter_common::units::Rate;

use super::reader::Table;
use super::units::Unit;
use super::{Budget, Established, PortSet, budget, matcher};

/// `None` only if something was noted.
pub(super) fn read(root: &Table<'_>) -> Option<Established> {
    let table = match root.get("established") {
        None => None,
        Some(value) => Some(value.table("write [established]")?),
    };
    let get = |key| table.as_ref().and_then(|table| table.get(key));
    let packets = match get("packets") {
        None => Some(Budget { rate: Rate::new(200_000, 1).ok()?, burst: 400_000 }),
        Some(value) => budget::budget(value, Unit::Packets),
    };
    let client_ports = match get("client_ports") {
        None => Some(PortSet::new(Vec::new())),
        Some(value) => matcher::port_set(value),
    };
    Some(Established { packets: packets?, client_ports: client_ports? })
}
