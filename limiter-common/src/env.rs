//! What a decision needs from outside.

use crate::abi::{
    BudgetCell, Ceiling, ClassId, Lease, Policy, PolicyId, PrefixKey, Settings, SourceAddress,
};
use crate::bucket::Cell;
use crate::flows::{Answer, Flow};
use crate::hash::{HashKey, SourceHash};
use crate::known;
use crate::lease::Arriving;
use crate::packet::{Source, Space};
use crate::table::Meta;
use crate::time::{Clock, Nanos, Tick};
use crate::units::Limits;

/// What a decision needs from outside: the state behind it. The kernel side answers from maps.
pub trait Env {
    /// A bucket in the table.
    type Bucket: Bucket;
    /// A word that caps something else than one source.
    type Cell: Cell;
    /// What the filters hold of a source.
    type Known: known::Known;

    /// The time by that clock, under these settings.
    fn now(&self, clock: Clock, settings: &Settings) -> Nanos;
    /// The secret that places follow from.
    fn key(&self) -> HashKey;
    /// The place of a source in the filters.
    fn known(&self, hash: SourceHash) -> Option<Self::Known>;
    /// The place of a flow in their filter, and that of a port of this host's.
    fn flow(&self, hash: SourceHash) -> Option<Self::Known>;
    /// See [`flow`](Self::flow).
    fn flow_port(&self, port: u16) -> Option<Self::Known>;
    /// What [`flows::answer`] says. Rare, so the kernel side makes it a function of its own.
    fn answer(&self, flow: &Flow, now: Nanos, settings: &Settings) -> Answer;
    /// Until when any lease holds.
    fn leased_until(&self) -> Nanos;
    /// The lease of an address, and its cap.
    fn lease(&self, address: SourceAddress) -> Option<(&Lease, Self::Cell)>;
    /// What [`lease::answer`](crate::lease::answer) says. Rare, as [`answer`](Self::answer).
    fn leased(&self, arriving: &Arriving, now: Nanos, settings: &Settings) -> Answer;
    /// The bucket of `source` in `class`, if there is one.
    fn bucket(&self, source: Source, class: ClassId, hash: SourceHash) -> Option<Self::Bucket>;
    /// The same, made full at `now` with `meta` if there is none yet and a slot to be had.
    fn create(
        &self,
        source: Source,
        class: ClassId,
        hash: SourceHash,
        meta: Meta,
        now: Tick,
    ) -> Option<Self::Bucket>;
    /// Charges the ceiling of a wider prefix in `class` if that conforms at `now`, and says whether
    /// it did. It is made if there is none yet; where there is no room for it, everything conforms.
    fn admit_ceiling(
        &self,
        prefix: WidePrefix,
        class: ClassId,
        now: Tick,
        cost: u64,
        tolerance: u64,
    ) -> bool;
    /// A budget of a class, of all, or of an interface.
    fn budget(&self, budget: BudgetCell) -> Option<Self::Cell>;
    /// How many connections the source has open. Rare, so the kernel side makes it a function of its own.
    fn connections(&self, source: Source, hash: SourceHash) -> u32;
    /// Whether the address is one of this host's.
    fn is_own(&self, address: SourceAddress) -> bool;
    /// The policy of the longest prefix that covers the address.
    fn prefix(&self, key: &PrefixKey) -> Option<PolicyId>;
    /// Counts a packet of `length` bytes if its source is one of those that are watched.
    fn watch(&self, source: Source, class: ClassId, hash: SourceHash, length: u32);
    /// The policy at this place of the map (both banks counted).
    fn policy(&self, place: u32) -> Option<&Policy>;
    /// The limits at this place of the map (both banks counted).
    fn limits(&self, place: u32) -> Option<&Limits>;

    /// Returns `value`. The kernel side hides it from the verifier behind `unknown`, so that what
    /// follows is checked once and not once for each value.
    #[inline(always)]
    fn opaque(&self, value: u32, _unknown: Nanos) -> u32 {
        value
    }

    /// Returns `value`. The kernel side keeps the compiler from working out its address anew from an
    /// index of which the verifier no longer knows the bound.
    #[inline(always)]
    fn pinned<'a, T>(&self, value: &'a T) -> &'a T {
        value
    }
}

/// A bucket in the table, shared between CPUs.
pub trait Bucket {
    /// A theoretical arrival time.
    type Cell: Cell;

    /// The packet bucket.
    fn packets(&self) -> Option<Self::Cell>;
    /// The byte bucket, if there are any.
    fn bytes(&self) -> Option<Self::Cell>;
    /// What its slot said when it was found.
    fn meta(&self) -> Meta;
    /// Changes that, unless somebody else did meanwhile.
    fn set_meta(&self, meta: Meta);
}

/// A prefix wider than a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WidePrefix {
    /// Its bits, with `kind` a key of their own.
    pub bits: u64,
    /// A [`Ceiling`], or [`ADMISSIONS`](Self::ADMISSIONS).
    pub kind: u32,
}

impl WidePrefix {
    /// The kind of the budget for new sources of an IPv6 /48.
    pub const ADMISSIONS: u32 = 3;

    /// The prefix of this kind around `source`, if it lies in one.
    #[inline(always)]
    pub(crate) const fn around(source: Source, ceiling: Ceiling) -> Option<Self> {
        let bits = match (source.space, ceiling) {
            (Space::Ipv6, Ceiling::V6Site) => source.bits >> 16,
            (Space::Ipv6, Ceiling::V6Customer) | (Space::Ipv4, Ceiling::V4Network) => {
                source.bits >> 8
            }
            _ => return None,
        };
        Some(Self { bits, kind: ceiling as u32 })
    }
}
