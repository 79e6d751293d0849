//! The maps. The sizes given here are the smallest; the agent sets those that the configuration
//! asks for before it loads the object.

use aya_ebpf::{
    Global,
    btf_maps::{Array, LpmTrie, LruHashMap, PerCpuArray},
    macros::btf_map,
};
use limiter_common::{
    abi::{
        BucketState, Budget, Count, MAX_CLASSES, MAX_INTERFACES, Policy, PolicyId, PrefixKey,
        Settings, V4Key, V6Key,
    },
    units::Limits,
};

#[btf_map]
pub(crate) static SETTINGS: Array<Settings, 2> = Array::new();
#[btf_map]
pub(crate) static ACTIVE: Array<u32, 1> = Array::new();
#[btf_map]
pub(crate) static PREFIXES: LpmTrie<PrefixKey, PolicyId, 1> = LpmTrie::new();
#[btf_map]
pub(crate) static POLICIES: Array<Policy, 1> = Array::new();
#[btf_map]
pub(crate) static LIMITS: Array<Limits, 1> = Array::new();
#[btf_map]
pub(crate) static BUCKETS_V4: LruHashMap<V4Key, BucketState, 1> = LruHashMap::new();
#[btf_map]
pub(crate) static BUCKETS_V6: LruHashMap<V6Key, BucketState, 1> = LruHashMap::new();
#[btf_map]
pub(crate) static NEIGHBOURS: Array<BucketState, { MAX_INTERFACES }> = Array::new();
#[btf_map]
pub(crate) static BUDGETS: Array<Budget, { MAX_CLASSES + 1 }> = Array::new();
#[btf_map]
pub(crate) static COUNTERS: PerCpuArray<Count, 1> = PerCpuArray::new();
#[btf_map]
pub(crate) static CREATED: PerCpuArray<u64, 2> = PerCpuArray::new();
/// Which reasons have been logged.
#[btf_map]
pub(crate) static LOGGED: Array<u32, 32> = Array::new();

/// Slots in the counter map; a constant to the verifier.
#[unsafe(no_mangle)]
pub(crate) static COUNTER_SLOTS: Global<u32> = Global::new(1);
/// Class ids in the counter map; a constant to the verifier.
#[unsafe(no_mangle)]
pub(crate) static COUNTER_CLASSES: Global<u32> = Global::new(1);
