//! How much kernel memory the maps take.

use limiter_common::abi::{
    BucketState, Count, MAX_INTERFACES, Policy, PrefixKey, Settings, V4Key, V6Key,
};
use limiter_common::units::Limits;

use crate::plan::MapSizes;

/// What the kernel keeps beside the key and value of a hash entry (`struct htab_elem`), in bytes.
const HASH_ENTRY: usize = 48;
/// A hash bucket (`struct bucket`); there are as many as entries, rounded up to a power of two.
const HASH_BUCKET: usize = 16;
/// What the kernel keeps beside the key of a trie entry (`struct lpm_trie_node`) and its prefix
/// length, in bytes.
const TRIE_ENTRY: usize = 40;

/// The memory that maps of these sizes take, in bytes: about what `bpftool map show` adds up to
/// (`memlock`) when the prefix map is full. The counters have a copy for each CPU of this machine.
#[must_use]
pub fn map_memory(sizes: &MapSizes) -> u64 {
    let value = size_of::<BucketState>();
    let parts = [
        hash(sizes.ipv4_sources, size_of::<V4Key>() + value),
        hash(sizes.ipv6_sources, size_of::<V6Key>() + value),
        array(sizes.prefixes, (TRIE_ENTRY + size_of::<PrefixKey>()).next_multiple_of(8)),
        array(sizes.policies, size_of::<Policy>()),
        array(sizes.limits, size_of::<Limits>()),
        counters(sizes.counters.cells()),
        bytes(2 * size_of::<Settings>()),
        bytes(MAX_INTERFACES * value),
    ];
    parts.into_iter().fold(0, u64::saturating_add)
}

fn hash(entries: u32, contents: usize) -> u64 {
    let buckets = u64::from(entries).next_power_of_two().saturating_mul(bytes(HASH_BUCKET));
    array(entries, HASH_ENTRY + contents).saturating_add(buckets)
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
    fn a_million_sources_take_about_a_hundred_megabytes() {
        let empty = MapSizes {
            ipv4_sources: 1,
            ipv6_sources: 1,
            prefixes: 0,
            policies: 0,
            limits: 0,
            counters: CounterShape { slots: 0, classes: 0 },
        };
        let base = map_memory(&empty);
        let full = map_memory(&MapSizes { ipv4_sources: 1_000_000, ..empty });
        // 80 bytes an entry and 2²⁰ buckets of 16.
        assert_eq!(full - base, 80_000_000 + (16 << 20) - 80 - 16);
    }
}
