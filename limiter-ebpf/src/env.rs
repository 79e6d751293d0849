//! The state that decisions need, from maps.

use core::{arch::asm, ptr, sync::atomic::AtomicU64};

use aya_ebpf::{btf_maps::lpm_trie::Key, helpers::bpf_ktime_get_ns};
use limiter_common::{
    Env, Family,
    abi::{
        BudgetCell, ClassId, FLOW_PORTS, Lease, Policy, PolicyId, PrefixKey, Settings,
        SourceAddress, WatchedSource,
    },
    bucket::Cell,
    env::WidePrefix,
    flows::{Answer, Flow, port_place},
    hash::{HashKey, SourceHash},
    known::Known,
    lease::Arriving,
    packet::{Source, Space},
    table::Meta,
    time::{Clock, Nanos, Tick},
    units::Limits,
};

use crate::{
    clock, connections, flows, leases,
    lines::{self, BucketRef},
    maps::{
        BUDGETS, CONNECTION_LINES, CREATED, FLOW_PLACES, FLOWS, HASH_FIRST, HASH_OFFSET,
        HASH_SECOND, HEAD, KNOWN, KNOWN_PLACES, LEASE_TERMS, LEASES, LIMITS, OWN, POLICIES,
        PREFIXES, SETTINGS,
    },
    view::hidden,
    watch,
};

/// The settings in force. Read once per packet, so that a packet sees one bank only.
#[inline(always)]
pub(crate) fn settings() -> Option<&'static Settings> {
    let [active, until, after, _] = &HEAD;
    let settings = SETTINGS.get(read(active) as u32)?;
    if clock::coarse(settings).0 <= read(until) {
        return Some(settings);
    }
    // No agent moved the time on, or nobody confirmed these.
    SETTINGS.get(read(after) as u32)
}

/// A word of the variable.
#[inline(always)]
fn read(word: &AtomicU64) -> u64 {
    // SAFETY: an aligned word, which the agent may write at any time.
    unsafe { ptr::read_volatile(word.as_ptr()) }
}

/// The maps as an [`Env`].
pub(crate) struct MapEnv;

impl Env for MapEnv {
    type Bucket = BucketRef;
    type Cell = Tat;
    type Known = KnownRef;

    #[inline(always)]
    fn now(&self, clock: Clock, settings: &Settings) -> Nanos {
        match clock {
            Clock::COARSE => clock::coarse(settings),
            // SAFETY: no arguments and no preconditions.
            _ => Nanos(unsafe { bpf_ktime_get_ns() }),
        }
    }

    #[inline(always)]
    fn key(&self) -> HashKey {
        HashKey { offset: HASH_OFFSET.load(), first: HASH_FIRST.load(), second: HASH_SECOND.load() }
    }

    #[inline(always)]
    fn known(&self, hash: SourceHash) -> Option<KnownRef> {
        KNOWN.get_ptr_mut(hash.place(KNOWN_PLACES.load())).map(|words| KnownRef(words.cast()))
    }

    #[inline(always)]
    fn flow(&self, hash: SourceHash) -> Option<KnownRef> {
        let place = FLOW_PORTS + hash.place(FLOW_PLACES.load());
        FLOWS.get_ptr_mut(place).map(|words| KnownRef(words.cast()))
    }

    #[inline(always)]
    fn flow_port(&self, port: u16) -> Option<KnownRef> {
        FLOWS.get_ptr_mut(port_place(port)).map(|words| KnownRef(words.cast()))
    }

    #[inline(always)]
    fn answer(&self, flow: &Flow, now: Nanos, settings: &Settings) -> Answer {
        let [high, low, rest] = flow.to_parts();
        Answer(flows::answer(high, low, rest, now.0, settings.bank))
    }

    #[inline(always)]
    fn leased_until(&self) -> Nanos {
        LEASE_TERMS.get_ptr(Lease::ALL).map_or(Nanos(0), |all| {
            // SAFETY: an aligned word, which the agent may write at any time.
            unsafe { ptr::read_volatile(&raw const (*all).until) }
        })
    }

    #[inline(always)]
    fn lease(&self, address: SourceAddress) -> Option<(&Lease, Tat)> {
        // SAFETY: the value is copied from; entries are preallocated, so that it is some entry's.
        let holder = unsafe { LEASES.get(&address.into()) }?;
        let terms = LEASE_TERMS.get_ptr_mut(holder.place)?;
        // SAFETY: a map value, which lives as long as the program runs.
        Some(unsafe { (&*terms, Tat(&raw mut (*terms).tat)) })
    }

    #[inline(always)]
    fn leased(&self, arriving: &Arriving, now: Nanos, settings: &Settings) -> Answer {
        let [high, low, rest] = arriving.to_parts();
        Answer(leases::leased(high, low, rest, now.0, settings.bank))
    }

    #[inline(always)]
    fn bucket(&self, source: Source, class: ClassId, hash: SourceHash) -> Option<BucketRef> {
        lines::find(source, class, self.key().bucket(hash, class))
    }

    #[inline(always)]
    fn create(
        &self,
        source: Source,
        class: ClassId,
        hash: SourceHash,
        meta: Meta,
        now: Tick,
    ) -> Option<BucketRef> {
        let (made, is_new) = lines::make(source, self.key().bucket(hash, class), meta, now)?;
        let family = match source.space {
            Space::Ipv4 => Family::Ipv4,
            _ => Family::Ipv6,
        };
        if is_new && let Some(created) = CREATED.get_ptr_mut(family as u32) {
            // SAFETY: the word is this CPU's own.
            unsafe { *created += 1 };
        }
        Some(made)
    }

    #[inline(always)]
    fn admit_ceiling(
        &self,
        prefix: WidePrefix,
        class: ClassId,
        now: Tick,
        cost: u64,
        tolerance: u64,
    ) -> bool {
        let owner = u64::from(class.0) << 32 | u64::from(prefix.kind);
        lines::admit_ceiling(prefix.bits, owner, now.0, cost, tolerance) != 0
    }

    #[inline(always)]
    fn budget(&self, budget: BudgetCell) -> Option<Tat> {
        // SAFETY: a field of a map value, which lives as long as the program runs.
        BUDGETS.get_ptr_mut(budget.index()).map(|budget| Tat(unsafe { &raw mut (*budget).tat }))
    }

    #[inline(always)]
    fn connections(&self, source: Source, hash: SourceHash) -> u32 {
        let place = hash.place(CONNECTION_LINES.load());
        connections::open_connections(source.bits, source.space as u32, place)
    }

    #[inline(always)]
    fn is_own(&self, address: SourceAddress) -> bool {
        OWN.get_ptr(&address.into()).is_some()
    }

    #[inline(always)]
    fn watch(&self, source: Source, class: ClassId, hash: SourceHash, length: u32) {
        watch::watch(WatchedSource::new(source, class), hash, length);
    }

    #[inline(always)]
    fn prefix(&self, key: &PrefixKey) -> Option<PolicyId> {
        PREFIXES.get(&Key::new(PrefixKey::FULL_BITS, *key)).copied()
    }

    #[inline(always)]
    fn policy(&self, place: u32) -> Option<&Policy> {
        POLICIES.get(place)
    }

    #[inline(always)]
    fn limits(&self, place: u32) -> Option<&Limits> {
        LIMITS.get(place)
    }

    #[inline(always)]
    fn opaque(&self, value: u32, unknown: Nanos) -> u32 {
        hidden(value, unknown.0)
    }

    #[inline(always)]
    fn pinned<'a, T>(&self, value: &'a T) -> &'a T {
        let mut pointer = ptr::from_ref(value);
        // SAFETY: an empty instruction: the pointer stays what it is.
        unsafe {
            asm!("/* {p} */", p = inout(reg) pointer);
            &*pointer
        }
    }
}

/// The words of one place in the filters.
pub(crate) struct KnownRef(*mut u64);

impl Known for KnownRef {
    type Cell = Tat;

    #[inline(always)]
    fn word(&self, place: usize) -> Tat {
        // SAFETY: within the map value: callers keep the place below KNOWN_WORDS.
        Tat(unsafe { self.0.add(place & 3) })
    }
}

/// A theoretical arrival time in a map. `core`'s atomics do not compile to BPF's instructions, so
/// these are written out.
pub(crate) struct Tat(pub(crate) *mut u64);

impl Cell for Tat {
    #[inline(always)]
    fn load(&self) -> u64 {
        // SAFETY: an aligned word of a map value.
        unsafe { ptr::read_volatile(self.0) }
    }

    #[inline(always)]
    fn compare_exchange(&self, current: u64, new: u64) -> u64 {
        let mut found = current;
        // SAFETY: an aligned word of a map value; BPF's cmpxchg compares with and returns in r0.
        unsafe {
            asm!("r0 = cmpxchg_64({word} + 0, r0, {new})",
                word = in(reg) self.0, new = in(reg) new, inout("r0") found);
        }
        found
    }

    #[inline(always)]
    fn add(&self, amount: u64) {
        // SAFETY: an aligned word of a map value.
        unsafe {
            asm!("lock *(u64 *)({word} + 0) += {amount}",
                word = in(reg) self.0, amount = in(reg) amount);
        }
    }
}
