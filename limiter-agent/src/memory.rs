//! How much kernel memory the maps take.

use limiter_common::abi::{
    BucketState, Budget, BudgetCell, ByteTats, Count, KnownWords, LineV4, LineV6, MAX_INTERFACES,
    Policy, PrefixKey, Settings,
};
use limiter_common::units::Limits;

use crate::plan::MapSizes;

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
        array(sizes.prefixes, (TRIE_ENTRY + size_of::<PrefixKey>()).next_multiple_of(8)),
        array(sizes.policies, size_of::<Policy>()),
        array(sizes.limits, size_of::<Limits>()),
        counters(sizes.counters.cells()),
        bytes(2 * size_of::<Settings>()),
        bytes(MAX_INTERFACES * size_of::<BucketState>()),
        bytes(BudgetCell::COUNT * size_of::<Budget>()),
    ];
    parts.into_iter().fold(0, u64::saturating_add)
}

/// A pointer for each cell, and the cell once for each CPU.
fn counters(cells: u32) -> u64 {
    let copies = array(cells, size_of::<Count>()).saturating_mul(cpus());
    array(cells, size_of::<usize>()).saturating_add(copies)
}

fn array(entries: u32, contents: usize) -> u64 {
    u64::from(entries).saturating_mul(bytes(contents))
}

/// The CPUs that the kernel keeps per-CPU values for.
fn cpus() -> u64 {
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
        // The table, and two bytes of the filters.
        assert_eq!(more_v4 - base, (32 + 2) * 1_000_000);
        assert_eq!((more_v6 - base) / 1_000_000, 42 + 2);
        let with_bytes = MapSizes { bytes: true, ..empty };
        let more_v4 = of(&MapSizes { ipv4_sources: 2_000_000, bytes: true, ..empty });
        assert_eq!(more_v4 - of(&with_bytes), (48 + 2) * 1_000_000);
    }
}
