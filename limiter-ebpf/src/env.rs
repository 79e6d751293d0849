//! The state that decisions need, from maps.

use core::{arch::asm, ptr};

use aya_ebpf::{
    bindings::BPF_NOEXIST,
    btf_maps::lpm_trie::Key,
    helpers::{bpf_ktime_get_coarse_ns, bpf_ktime_get_ns},
};
use limiter_common::{
    Bucket, Env, Family,
    abi::{
        BucketState, ClassId, Policy, PolicyId, PrefixKey, Resolution, Settings, Slot, V4Key, V6Key,
    },
    bucket::{Cell, RETRIES},
    packet::{Source, Space},
    time::{Clock, Nanos},
    units::Limits,
};

use crate::maps::{
    ACTIVE, BUCKETS_V4, BUCKETS_V6, BUDGETS, CREATED, LIMITS, NEIGHBOURS, POLICIES, PREFIXES,
    SETTINGS,
};

/// The settings in force. Read once per packet, so that a packet sees one bank only.
#[inline(always)]
pub(crate) fn settings() -> Option<&'static Settings> {
    let active = ACTIVE.get_ptr(0)?;
    // SAFETY: an aligned word of the map; the agent may write it at any time.
    let active = unsafe { ptr::read_volatile(active) };
    SETTINGS.get(active)
}

/// The maps as an [`Env`].
pub(crate) struct MapEnv;

impl Env for MapEnv {
    type Bucket = BucketRef;
    type Cell = Tat;

    #[inline(always)]
    fn now(&self, clock: Clock) -> Nanos {
        // SAFETY: the helpers have no arguments and no preconditions.
        Nanos(match clock {
            Clock::COARSE => unsafe { bpf_ktime_get_coarse_ns() },
            _ => unsafe { bpf_ktime_get_ns() },
        })
    }

    #[inline(always)]
    fn bucket(&self, source: Source, class: ClassId) -> Option<BucketRef> {
        let bucket = match source.space {
            Space::Ipv4 => BUCKETS_V4.get_ptr_mut(v4(source, class)),
            _ => BUCKETS_V6.get_ptr_mut(v6(source, class)),
        };
        bucket.map(BucketRef)
    }

    #[inline(always)]
    fn create(&self, source: Source, class: ClassId, state: BucketState) -> Option<BucketRef> {
        let flags = u64::from(BPF_NOEXIST);
        let (made, family) = match source.space {
            Space::Ipv4 => (BUCKETS_V4.insert(v4(source, class), state, flags), Family::Ipv4),
            _ => (BUCKETS_V6.insert(v6(source, class), state, flags), Family::Ipv6),
        };
        if made.is_ok()
            && let Some(created) = CREATED.get_ptr_mut(family as u32)
        {
            // SAFETY: the word is this CPU's own.
            unsafe { *created += 1 };
        }
        // Another CPU may have been first, and an LRU may have taken it back already.
        self.bucket(source, class)
    }

    #[inline(always)]
    fn neighbours(&self, slot: Slot) -> Option<Tat> {
        NEIGHBOURS.get_ptr_mut(slot.0).map(|bucket| BucketRef(bucket).packets())
    }

    #[inline(always)]
    fn budget(&self, class: ClassId) -> Option<Tat> {
        // SAFETY: a field of a map value, which lives as long as the program runs.
        BUDGETS.get_ptr_mut(class.0).map(|budget| Tat(unsafe { &raw mut (*budget).tat }))
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
}

#[inline(always)]
fn v4(source: Source, class: ClassId) -> V4Key {
    V4Key::new(source.bits as u32, class.0)
}

#[inline(always)]
fn v6(source: Source, class: ClassId) -> V6Key {
    V6Key::new(source.bits, source.space as u32, class.0)
}

/// A bucket in a map. An LRU may give its memory to another source while this one still holds it:
/// then a charge goes to that other source's bucket, by one packet.
pub(crate) struct BucketRef(*mut BucketState);

impl Bucket for BucketRef {
    type Cell = Tat;

    #[inline(always)]
    fn packets(&self) -> Tat {
        // SAFETY: a field of a map value, which lives as long as the program runs.
        Tat(unsafe { &raw mut (*self.0).packets })
    }

    #[inline(always)]
    fn bytes(&self) -> Tat {
        // SAFETY: as above.
        Tat(unsafe { &raw mut (*self.0).bytes })
    }

    #[inline(always)]
    fn resolution(&self) -> Resolution {
        // SAFETY: an aligned word, read whole.
        unsafe { ptr::read_volatile(&raw const (*self.0).resolution) }
    }

    #[inline(always)]
    fn set_resolution(&self, resolution: Resolution) {
        // SAFETY: an aligned word, written whole.
        unsafe { ptr::write_volatile(&raw mut (*self.0).resolution, resolution) }
    }
}

/// A theoretical arrival time in a map. `core`'s atomics do not compile to BPF's instructions, so
/// these are written out.
pub(crate) struct Tat(*mut u64);

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
    fn retries() -> u32 {
        let retries: u64;
        // SAFETY: register arithmetic only.
        unsafe { asm!("{r} = {n}", r = out(reg) retries, n = const RETRIES) };
        retries as u32
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
