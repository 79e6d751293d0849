//! The maps as plain collections, so that `decide()` runs here as it runs in the kernel.

use std::{
    cell::RefCell,
    collections::HashMap,
    rc::Rc,
    sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst},
};

use limiter_agent::plan::{Plan, Prefix};
use limiter_common::{
    Bucket, Decision, Env, Outcome,
    abi::{
        BudgetCell, ClassId, Count, KNOWN_WORDS, Lease, Policy, PolicyId, PrefixKey, Settings,
        SourceAddress,
    },
    bucket::{self, Moment},
    decide,
    env::WidePrefix,
    flows::{self, Answer, Flow, port_place},
    hash::{HashKey, SourceHash},
    lease::{self, Arriving},
    packet::Source,
    table::Meta,
    time::{Clock, Nanos, Tick},
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
            budgets: RefCell::default(),
            ceilings: RefCell::default(),
            known: RefCell::default(),
            flows: RefCell::default(),
            flow_ports: RefCell::default(),
            leases: Vec::new(),
            connections: RefCell::default(),
        };
        Self { settings, maps, counts: HashMap::new() }
    }

    /// Decides about a frame and counts it.
    pub fn receive(&mut self, frame: &[u8], ifindex: u32, now: Nanos) -> Outcome {
        self.maps.now.set(now);
        let Decision { outcome, length } = decide(frame, ifindex, &self.settings, &self.maps);
        let count = self.counts.entry(key(&outcome)).or_default();
        count.packets += 1;
        count.bytes += u64::from(length);
        outcome
    }

    /// Notes that the host opened a flow.
    pub fn open(&self, flow: Flow, now: Nanos) {
        let hash = self.maps.key().flow(&flow);
        let port = self.maps.flow_port(flow.local_port);
        if let (Some(port), Some(place)) = (port, self.maps.flow(hash)) {
            flow.open(&port, &place, hash, now);
        }
    }

    /// Gives an address a lease.
    pub fn lease(&mut self, address: SourceAddress, lease: Lease) {
        self.maps.leases.push((address, lease, Word::default()));
    }

    /// Says who has connections open, and how many.
    pub fn connect(&self, open: HashMap<Source, u32>) {
        self.maps.connections.replace(open);
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
    budgets: RefCell<HashMap<u32, Word>>,
    ceilings: RefCell<HashMap<(WidePrefix, ClassId), Word>>,
    known: RefCell<HashMap<u32, [Word; KNOWN_WORDS]>>,
    flows: RefCell<HashMap<u32, [Word; KNOWN_WORDS]>>,
    flow_ports: RefCell<HashMap<u32, [Word; KNOWN_WORDS]>>,
    leases: Vec<(SourceAddress, Lease, Word)>,
    connections: RefCell<HashMap<Source, u32>>,
}

/// A theoretical arrival time, or a word of the filters.
type Word = Rc<AtomicU64>;

/// As many places in the filters as there are numbers, so that no source is taken for another.
const PLACES: u32 = u32::MAX;

#[derive(Default)]
struct SharedBucket {
    packets: Word,
    bytes: Word,
    meta: AtomicU32,
}

impl Env for Maps {
    type Bucket = Handle;
    type Cell = Word;
    type Known = [Word; KNOWN_WORDS];

    fn now(&self, _: Clock, _: &Settings) -> Nanos {
        self.now.get()
    }

    fn key(&self) -> HashKey {
        HashKey::new([1, 0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9])
    }

    fn known(&self, hash: SourceHash) -> Option<Self::Known> {
        Some(self.known.borrow_mut().entry(hash.place(PLACES)).or_default().clone())
    }

    fn flow(&self, hash: SourceHash) -> Option<Self::Known> {
        Some(self.flows.borrow_mut().entry(hash.place(PLACES)).or_default().clone())
    }

    fn flow_port(&self, port: u16) -> Option<Self::Known> {
        Some(self.flow_ports.borrow_mut().entry(port_place(port)).or_default().clone())
    }

    fn answer(&self, flow: &Flow, now: Nanos, settings: &Settings) -> Answer {
        flows::answer(flow, now, settings, self)
    }

    fn leased_until(&self) -> Nanos {
        self.leases.iter().map(|(_, lease, _)| lease.until).max().unwrap_or(Nanos(0))
    }

    fn lease(&self, address: SourceAddress) -> Option<(&Lease, Word)> {
        let found = self.leases.iter().find(|(holder, _, _)| *holder == address);
        found.map(|(_, lease, cap)| (lease, cap.clone()))
    }

    fn leased(&self, arriving: &Arriving, now: Nanos, settings: &Settings) -> Answer {
        lease::answer(arriving, now, settings, self)
    }

    fn bucket(&self, source: Source, class: ClassId, _: SourceHash) -> Option<Handle> {
        self.buckets.borrow().get(&(source, class)).cloned().map(Handle)
    }

    fn create(
        &self,
        source: Source,
        class: ClassId,
        hash: SourceHash,
        meta: Meta,
        now: Tick,
    ) -> Option<Handle> {
        let bucket = SharedBucket {
            packets: Rc::new(AtomicU64::new(now.0)),
            bytes: Rc::new(AtomicU64::new(now.0)),
            meta: AtomicU32::new(meta.0),
        };
        self.buckets.borrow_mut().insert((source, class), Rc::new(bucket));
        self.bucket(source, class, hash)
    }

    fn admit_ceiling(
        &self,
        prefix: WidePrefix,
        class: ClassId,
        now: Tick,
        cost: u64,
        tolerance: u64,
    ) -> bool {
        let mut ceilings = self.ceilings.borrow_mut();
        let cell =
            ceilings.entry((prefix, class)).or_insert_with(|| Rc::new(AtomicU64::new(now.0)));
        bucket::admit(cell, &mut Moment::new(now, || now), cost, tolerance)
    }

    fn budget(&self, budget: BudgetCell) -> Option<Word> {
        Some(self.budgets.borrow_mut().entry(budget.index()).or_default().clone())
    }

    fn connections(&self, source: Source, _: SourceHash) -> u32 {
        self.connections.borrow().get(&source).copied().unwrap_or(0)
    }

    fn is_own(&self, _: SourceAddress) -> bool {
        false
    }

    fn watch(&self, _: Source, _: ClassId, _: SourceHash, _: u32) {}

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

    fn packets(&self) -> Option<Word> {
        Some(self.0.packets.clone())
    }

    fn bytes(&self) -> Option<Word> {
        Some(self.0.bytes.clone())
    }

    fn meta(&self) -> Meta {
        Meta(self.0.meta.load(SeqCst))
    }

    fn set_meta(&self, meta: Meta) {
        self.0.meta.store(meta.0, SeqCst);
    }
}
