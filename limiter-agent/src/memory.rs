//! How much kernel memory the maps take.

use limiter_common::abi::{
    Budget, BudgetCell, ByteTats, ConnectionLine, CounterCell, EVENT_RING, FLOW_PORTS, KnownWords,
    Lease, Leaseholder, LineV4, LineV6, MAX_LEASES, MAX_OWN_ADDRESSES, OwnAddress, Policy,
    PortBits, PrefixKey, SAMPLE_RING, Settings, WATCHED, WatchedCount, WatchedSource,
};
use limiter_common::units::Limits;

use thiserror::Error;

use crate::config::TableSizes;
use crate::plan::MapSizes;

/// What an entry of a hash map takes with what the kernel keeps beside it (`struct htab_elem`, `struct
/// bucket`), in bytes.
const fn hashed<Key, Value>() -> usize {
    size_of::<Key>().next_multiple_of(8) + size_of::<Value>().next_multiple_of(8) + 48 + 16
}
/// What the kernel keeps beside the key of a trie entry (`struct lpm_trie_node`) and its prefix
/// length, in bytes.
const TRIE_ENTRY: usize = 40;

/// The memory that maps of these sizes take, in bytes: about what `bpftool map show` adds up to
/// (`memlock`) when the prefix map is full. The counters have a copy for each CPU of this machine.
#[must_use]
pub fn map_memory(sizes: &MapSizes) -> u64 {
    let (v4, v6) = (sizes.lines_v4(), sizes.lines_v6());
    let parts = [
        array(v4, size_of::<LineV4>()),
        array(v6, size_of::<LineV6>()),
        array(sizes.lines_ceilings(), size_of::<LineV6>()),
        array(sizes.byte_lines(v4), size_of::<ByteTats>()),
        array(sizes.byte_lines(v6), size_of::<ByteTats>()),
        array(sizes.known_places(), size_of::<KnownWords>()),
        array(FLOW_PORTS + sizes.flow_places(), size_of::<KnownWords>()),
        array(sizes.connection_lines(), size_of::<ConnectionLine>()),
        array(sizes.prefixes, (TRIE_ENTRY + size_of::<PrefixKey>()).next_multiple_of(8)),
        array(sizes.policies, size_of::<Policy>()),
        array(sizes.limits, size_of::<Limits>()),
        counters(sizes.counters.cells()),
        bytes(4 * size_of::<Settings>()),
        bytes(BudgetCell::COUNT * size_of::<Budget>()),
        bytes(size_of::<PortBits>()),
        bytes(MAX_OWN_ADDRESSES * hashed::<OwnAddress, u32>()),
        bytes(MAX_LEASES * (hashed::<OwnAddress, Leaseholder>() + size_of::<Lease>())),
        bytes(WATCHED * hashed::<WatchedSource, WatchedCount>()),
        bytes(SAMPLE_RING),
        bytes(EVENT_RING),
    ];
    parts.into_iter().fold(0, u64::saturating_add)
}

/// Checks that maps of these sizes fit into `available` bytes, before the kernel is asked for them:
/// it would refuse the one that happens to come last, or end a process to make room.
///
/// # Errors
/// [`TooLarge`] says which size would fit.
pub fn check_memory(sizes: &MapSizes, available: u64) -> Result<(), TooLarge> {
    /// For the agent itself and what the program takes beside its maps.
    const RESERVE: u64 = 32 << 20;
    let room = available.saturating_sub(RESERVE);
    let needed = map_memory(sizes);
    if needed <= room {
        return Ok(());
    }
    let MapSizes { ipv4_sources, ipv6_sources, .. } = *sizes;
    Err(TooLarge { ipv4_sources, ipv6_sources, needed, room, fitting: fitting(sizes, room) })
}

/// The maps do not fit into memory.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "[table] ipv4_sources = {ipv4_sources} and ipv6_sources = {ipv6_sources}: the maps need {} and {} \
     are available to them; fix: {}",
    mebibytes(*.needed), mebibytes(*.room), advice(*.fitting)
)]
pub struct TooLarge {
    /// As configured.
    pub ipv4_sources: u32,
    /// As configured.
    pub ipv6_sources: u32,
    /// What all maps take, in bytes.
    pub needed: u64,
    /// What they may take, in bytes.
    pub room: u64,
    /// The most sources of each family that fit; none if not even the smallest tables do.
    pub fitting: Option<u32>,
}

fn advice(fitting: Option<u32>) -> String {
    match fitting {
        Some(sources) => format!("smaller tables: at most {sources} sources of each family fit"),
        None => {
            "not even the smallest tables fit: give the host, or the agent's memory cgroup, more"
                .to_owned()
        }
    }
}

/// The most sources of each family with which the maps take no more than `room`.
fn fitting(sizes: &MapSizes, room: u64) -> Option<u32> {
    let fits = |sources: &u32| {
        let (ipv4_sources, ipv6_sources) = (*sources, *sources);
        map_memory(&MapSizes { ipv4_sources, ipv6_sources, ..*sizes }) <= room
    };
    let (mut most, mut too_many) = (TableSizes::LEAST, TableSizes::MOST + 1);
    if !fits(&most) {
        return None;
    }
    while too_many - most > 1 {
        let middle = u32::midpoint(most, too_many);
        *(if fits(&middle) { &mut most } else { &mut too_many }) = middle;
    }
    Some(most)
}

fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

/// A pointer for each cell, and the cell once for each CPU.
fn counters(cells: u32) -> u64 {
    let copies = array(cells, size_of::<CounterCell>()).saturating_mul(cpus());
    array(cells, size_of::<usize>()).saturating_add(copies)
}

fn array(entries: u32, contents: usize) -> u64 {
    u64::from(entries).saturating_mul(bytes(contents))
}

/// The CPUs that the kernel keeps per-CPU values for.
pub(crate) fn cpus() -> u64 {
    // SAFETY: sysconf(3) takes a number and touches no memory of ours.
    let count = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
    u64::try_from(count).unwrap_or(1).max(1)
}

fn bytes(size: usize) -> u64 {
    u64::try_from(size).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use limiter_common::abi::CounterShape;

    use super::*;

    #[test]
    fn a_source_takes_what_is_promised() {
        let empty = MapSizes {
            ipv4_sources: 1_000_000,
            ipv6_sources: 1_000_000,
            bytes: false,
            ceilings: false,
            prefixes: 0,
            policies: 0,
            limits: 0,
            counters: CounterShape { slots: 0, classes: 0 },
        };
        let of = |sizes: &MapSizes| map_memory(sizes);
        let base = of(&empty);
        let more_v4 = of(&MapSizes { ipv4_sources: 2_000_000, ..empty });
        let more_v6 = of(&MapSizes { ipv6_sources: 2_000_000, ..empty });
        // The table, three eighths of a byte of the filters, and two bytes for open connections.
        assert_eq!((more_v4 - base) / 100_000, 343);
        assert_eq!((more_v6 - base) / 100_000, 450);
        let with_bytes = MapSizes { bytes: true, ..empty };
        let more_v4 = of(&MapSizes { ipv4_sources: 2_000_000, bytes: true, ..empty });
        assert_eq!((more_v4 - of(&with_bytes)) / 100_000, 503);
    }

    #[test]
    fn what_would_fit_is_said() {
        let sizes = MapSizes {
            ipv4_sources: 16_000_000,
            ipv6_sources: 16_000_000,
            bytes: false,
            ceilings: true,
            prefixes: 2048,
            policies: 2048,
            limits: 2048,
            counters: CounterShape { slots: 5, classes: 17 },
        };
        let needed = map_memory(&sizes);
        let reserve = 32 << 20;
        assert_eq!(check_memory(&sizes, needed + reserve), Ok(()));
        for available in [needed + reserve - 1, 1 << 30, 100 << 20] {
            let error = check_memory(&sizes, available).expect_err("too large");
            let fitting = error.fitting.expect("something fits");
            let with = |sources| {
                map_memory(&MapSizes { ipv4_sources: sources, ipv6_sources: sources, ..sizes })
            };
            assert!(with(fitting) <= error.room && with(fitting + 1) > error.room, "{error}");
            assert!(
                error.to_string().starts_with("[table] ipv4_sources = 16000000 and"),
                "{error}"
            );
            assert!(error.to_string().contains(&format!("at most {fitting} sources")), "{error}");
        }
        let error = check_memory(&sizes, reserve).expect_err("too large");
        assert_eq!(error.fitting, None);
        assert!(error.to_string().ends_with("or the agent's memory cgroup, more"), "{error}");
    }
}
