//! The maps as plain collections, so that `decide()` runs here as it runs in the kernel.

use std::{
    cell::RefCell,
    collections::HashMap,
    rc::Rc,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use limiter_agent::plan::{Plan, Prefix};
use limiter_common::{
    Bucket, Env, Outcome,
    abi::{
        BucketState, ClassId, Count, Policy, PolicyId, PrefixKey, Resolution, Settings, Slot,
        SourceAddress,
    },
    bucket::Cell,
    decide,
    packet::Source,
    time::{Clock, Nanos},
    units::Limits,
};

/// A plan in force, the state that packets leave behind, and the counts.
pub struct Model {
    settings: Box<Settings>,
    maps: Maps,
    counts: HashMap<[u32; 5], Count>,
}

impl Model {
    /// The plan as the first bank holds it.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        let settings = Box::new(Settings { epoch: 1, bank: 0, policies: 0, ..*plan.settings });
        let maps = Maps {
            now: std::cell::Cell::new(Nanos(0)),
            prefixes: plan.prefixes.clone(),
            policies: plan.policies.clone(),
            limits: plan.limits.clone(),
            buckets: RefCell::default(),
            neighbours: RefCell::default(),
            budgets: RefCell::default(),
        };
        Self { settings, maps, counts: HashMap::new() }
    }

    /// Decides about a frame and counts it.
    pub fn receive(&mut self, frame: &[u8], ifindex: u32, now: Nanos) -> Outcome {
        self.maps.now.set(now);
        let outcome = decide(frame, ifindex, &self.settings, &self.maps);
        let count = self.counts.entry(key(&outcome)).or_default();
        count.packets += 1;
        count.bytes += frame.len() as u64;
        outcome
    }

    /// What has been counted under an outcome.
    #[must_use]
    pub fn count(&self, outcome: &Outcome) -> Count {
        self.counts.get(&key(outcome)).copied().unwrap_or_default()
    }

    /// How many different outcomes have been counted.
    #[must_use]
    pub fn outcomes(&self) -> usize {
        self.counts.len()
    }
}

fn key(outcome: &Outcome) -> [u32; 5] {
    let Outcome { slot, family, class, reason, action } = *outcome;
    [slot.0, family as u32, class.0, reason as u32, action as u32]
}

struct Maps {
    now: std::cell::Cell<Nanos>,
    prefixes: Vec<Prefix>,
    policies: Vec<Policy>,
    limits: Vec<Limits>,
    buckets: RefCell<HashMap<(Source, ClassId), Rc<SharedBucket>>>,
    neighbours: RefCell<HashMap<Slot, Rc<SharedBucket>>>,
    budgets: RefCell<HashMap<ClassId, Rc<SharedBucket>>>,
}

#[derive(Default)]
struct SharedBucket {
    packets: AtomicU64,
    bytes: AtomicU64,
    resolution: std::cell::Cell<Resolution>,
}

impl Env for Maps {
    type Bucket = Handle;
    type Cell = Word;

    fn now(&self, _: Clock) -> Nanos {
        self.now.get()
    }

    fn bucket(&self, source: Source, class: ClassId) -> Option<Handle> {
        self.buckets.borrow().get(&(source, class)).cloned().map(Handle)
    }

    fn create(&self, source: Source, class: ClassId, state: BucketState) -> Option<Handle> {
        let bucket = SharedBucket {
            packets: AtomicU64::new(state.packets),
            bytes: AtomicU64::new(state.bytes),
            resolution: std::cell::Cell::new(state.resolution),
        };
        self.buckets.borrow_mut().insert((source, class), Rc::new(bucket));
        self.bucket(source, class)
    }

    fn neighbours(&self, slot: Slot) -> Option<Word> {
        Some(Word(self.neighbours.borrow_mut().entry(slot).or_default().clone(), Half::Packets))
    }

    fn budget(&self, class: ClassId) -> Option<Word> {
        Some(Word(self.budgets.borrow_mut().entry(class).or_default().clone(), Half::Packets))
    }

    fn prefix(&self, key: &PrefixKey) -> Option<PolicyId> {
        let covering = self.prefixes.iter().filter(|prefix| covers(prefix, key));
        covering.max_by_key(|prefix| prefix.bits).map(|prefix| prefix.policy)
    }

    fn policy(&self, place: u32) -> Option<&Policy> {
        self.policies.get(place as usize - 1)
    }

    fn limits(&self, place: u32) -> Option<&Limits> {
        self.limits.get(place as usize)
    }
}

/// Whether a key of all its bits, cut to the prefix's length, is the prefix.
fn covers(prefix: &Prefix, key: &PrefixKey) -> bool {
    let mask = |half: u64, bits: u32| if bits == 0 { 0 } else { half & (u64::MAX << (64 - bits)) };
    let cut = |address: SourceAddress| SourceAddress {
        high: mask(address.high, prefix.bits.min(64)),
        low: mask(address.low, prefix.bits.saturating_sub(64)),
        ..address
    };
    PrefixKey::new(0, cut(prefix.address)) == PrefixKey::new(0, cut(key.address()))
}

struct Handle(Rc<SharedBucket>);

impl Bucket for Handle {
    type Cell = Word;

    fn packets(&self) -> Word {
        Word(self.0.clone(), Half::Packets)
    }

    fn bytes(&self) -> Word {
        Word(self.0.clone(), Half::Bytes)
    }

    fn resolution(&self) -> Resolution {
        self.0.resolution.get()
    }

    fn set_resolution(&self, resolution: Resolution) {
        self.0.resolution.set(resolution);
    }
}

#[derive(Clone, Copy)]
enum Half {
    Packets,
    Bytes,
}

struct Word(Rc<SharedBucket>, Half);

impl Word {
    fn atomic(&self) -> &AtomicU64 {
        match self.1 {
            Half::Packets => &self.0.packets,
            Half::Bytes => &self.0.bytes,
        }
    }
}

impl Cell for Word {
    fn load(&self) -> u64 {
        self.atomic().load(Relaxed)
    }

    fn compare_exchange(&self, current: u64, new: u64) -> u64 {
        let swapped = self.atomic().compare_exchange(current, new, Relaxed, Relaxed);
        swapped.unwrap_or_else(|found| found)
    }

    fn add(&self, amount: u64) {
        self.atomic().fetch_add(amount, Relaxed);
    }
}
