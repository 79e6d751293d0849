//! The maps. The sizes given here are the smallest; the agent sets those that the configuration
//! asks for before it loads the object.

use core::sync::atomic::AtomicU64;

use aya_ebpf::{
    Global,
    bindings::BPF_F_MMAPABLE,
    btf_maps::{Array, HashMap, LpmTrie, PerCpuArray, RingBuf, SkStorage},
    macros::btf_map,
};
use limiter_common::{
    abi::{
        Budget, BudgetCell, ByteTats, CounterCell, EVENT_RING, Event, Identity, KnownWords, LineV4,
        LineV6, MAX_OWN_ADDRESSES, Name, OwnAddress, Policy, PolicyId, PortBits, PrefixKey,
        SAMPLE_RING, Sample, SampleCount, Sampling, Settings, Shape,
    },
    units::Limits,
};

/// The agent reads and writes these without system calls.
const MMAPABLE: usize = BPF_F_MMAPABLE as usize;

#[btf_map]
pub(crate) static IDENTITY: Array<Identity, 1> = Array::new();
#[btf_map]
pub(crate) static SHAPE: Array<Shape, 1> = Array::new();
#[btf_map]
pub(crate) static NAMES: Array<Name, { Name::COUNT }> = Array::new();
#[btf_map]
pub(crate) static SETTINGS: Array<Settings, 4> = Array::new();
#[btf_map]
pub(crate) static PREFIXES: LpmTrie<PrefixKey, PolicyId, 1> = LpmTrie::new();
#[btf_map]
pub(crate) static POLICIES: Array<Policy, 1> = Array::new();
#[btf_map]
pub(crate) static LIMITS: Array<Limits, 1> = Array::new();
#[btf_map]
pub(crate) static BUCKETS_V4: Array<LineV4, 1, MMAPABLE> = Array::new();
#[btf_map]
pub(crate) static BUCKETS_V6: Array<LineV6, 1, MMAPABLE> = Array::new();
#[btf_map]
pub(crate) static CEILINGS: Array<LineV6, 1, MMAPABLE> = Array::new();
#[btf_map]
pub(crate) static BYTES_V4: Array<ByteTats, 1> = Array::new();
#[btf_map]
pub(crate) static BYTES_V6: Array<ByteTats, 1> = Array::new();
#[btf_map]
pub(crate) static KNOWN: Array<KnownWords, 1, MMAPABLE> = Array::new();
#[btf_map]
pub(crate) static FLOWS: Array<KnownWords, 1, MMAPABLE> = Array::new();
/// Sockets of clients: of UDP, and of TCP connections that this host opened with the generation in
/// which they were last marked.
#[btf_map]
pub(crate) static CLIENTS: SkStorage<u32> = SkStorage::new();
#[btf_map]
pub(crate) static CLIENT_PORTS: Array<PortBits, 1> = Array::new();
#[btf_map]
pub(crate) static OWN: HashMap<OwnAddress, u32, MAX_OWN_ADDRESSES> = HashMap::new();
#[btf_map]
pub(crate) static BUDGETS: Array<Budget, { BudgetCell::COUNT }, MMAPABLE> = Array::new();
#[btf_map]
pub(crate) static COUNTERS: PerCpuArray<CounterCell, 1> = PerCpuArray::new();
#[btf_map]
pub(crate) static CREATED: PerCpuArray<u64, 2> = PerCpuArray::new();
/// Read for each drop; what follows only while somebody watches.
#[btf_map]
pub(crate) static SAMPLING: Array<Sampling, 1> = Array::new();
#[btf_map]
pub(crate) static SAMPLE_TAT: Array<u64, { SampleCount::COUNT }> = Array::new();
#[btf_map]
pub(crate) static SAMPLES: RingBuf<Sample, SAMPLE_RING> = RingBuf::new();
#[btf_map]
pub(crate) static SAMPLE_COUNT: PerCpuArray<SampleCount, { SampleCount::COUNT }> =
    PerCpuArray::new();
#[btf_map]
pub(crate) static EVENTS: RingBuf<Event, EVENT_RING> = RingBuf::new();
/// Which reasons have been logged.
#[btf_map]
pub(crate) static LOGGED: Array<u32, 32> = Array::new();

/// The words of a [`limiter_common::abi::Head`]. A variable, which the agent writes through the map that
/// variables lie in: to look one up in a map of one would cost each packet twelve instructions more.
#[unsafe(no_mangle)]
pub(crate) static HEAD: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];

/// Slots in the counter map; a constant to the verifier.
#[unsafe(no_mangle)]
pub(crate) static COUNTER_SLOTS: Global<u32> = Global::new(1);
/// Class ids in the counter map; a constant to the verifier.
#[unsafe(no_mangle)]
pub(crate) static COUNTER_CLASSES: Global<u32> = Global::new(1);
/// Lines of the IPv4 table.
#[unsafe(no_mangle)]
pub(crate) static LINES_V4: Global<u32> = Global::new(1);
/// Lines of the IPv6 table.
#[unsafe(no_mangle)]
pub(crate) static LINES_V6: Global<u32> = Global::new(1);
/// Lines of the table of ceilings.
#[unsafe(no_mangle)]
pub(crate) static LINES_CEILINGS: Global<u32> = Global::new(1);
/// Places in the filters.
#[unsafe(no_mangle)]
pub(crate) static KNOWN_PLACES: Global<u32> = Global::new(1);
/// Places in the filter of this host's flows.
#[unsafe(no_mangle)]
pub(crate) static FLOW_PLACES: Global<u32> = Global::new(1);
/// Nanoseconds between two ticks of the kernel's timer; 0 if their count is no measure of time.
#[unsafe(no_mangle)]
pub(crate) static TICK: Global<u64> = Global::new(1);
/// See [`limiter_common::pace`].
#[unsafe(no_mangle)]
pub(crate) static EVENT_INTERVAL: Global<u32> = Global::new(1);
/// A part of the hash key, as the two below.
#[unsafe(no_mangle)]
pub(crate) static HASH_OFFSET: Global<u64> = Global::new(0);
#[unsafe(no_mangle)]
pub(crate) static HASH_FIRST: Global<u64> = Global::new(1);
#[unsafe(no_mangle)]
pub(crate) static HASH_SECOND: Global<u64> = Global::new(1);
/// Whether anything is limited in bytes, so that there is room for byte buckets; 0 or 1.
#[unsafe(no_mangle)]
pub(crate) static BYTES: Global<u32> = Global::new(0);
