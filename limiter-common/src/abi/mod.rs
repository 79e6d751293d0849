//! What the kernel and the agent share: map names, map keys and values, and their layout.
//!
//! Every type here is plain data without padding and without invalid bit patterns: what is read
//! from a map is a number first, and becomes an enum only by a check. A change of layout or
//! meaning needs a new [`ABI_VERSION`]; `cargo xtask tidy` fails without one.

mod bucket;
mod counter;
mod pod;
mod policy;
mod settings;

pub use bucket::{BucketState, Budget, Resolution, V4Key, V6Key};
pub use counter::{Count, CounterShape};
pub use policy::{
    AddressFamily, Exemptions, LimitsIndex, Policy, PolicyId, PrefixKey, SourceAddress,
};
pub use settings::{
    Bank, ClassId, ClassSettings, Dimension, Ingress, L4Index, Mode, Need, Settings, Slot,
};

/// The version of everything in this module.
pub const ABI_VERSION: u32 = 2;

/// The most classes a configuration can have: one bit each in a 64-bit set.
pub const MAX_CLASSES: usize = 64;
/// The most interfaces (bonds and their members counted apart) that one agent can guard, slot 0
/// being [`Slot::UNKNOWN`].
pub const MAX_INTERFACES: usize = 32;

/// The XDP program's name in the object.
pub const PROGRAM: &str = "limiter";

/// The names of the maps in the object.
pub mod map {
    /// Array of two [`Settings`](super::Settings): the banks.
    pub const SETTINGS: &str = "SETTINGS";
    /// Array of one `u32`: the index of the bank in force.
    pub const ACTIVE: &str = "ACTIVE";
    /// LPM trie from [`PrefixKey`](super::PrefixKey) to [`PolicyId`](super::PolicyId).
    pub const PREFIXES: &str = "PREFIXES";
    /// Array of [`Policy`](super::Policy), half for each bank.
    pub const POLICIES: &str = "POLICIES";
    /// Array of [`Limits`](crate::units::Limits), half for each bank.
    pub const LIMITS: &str = "LIMITS";
    /// LRU hash from [`V4Key`](super::V4Key) to [`BucketState`](super::BucketState).
    pub const BUCKETS_V4: &str = "BUCKETS_V4";
    /// LRU hash from [`V6Key`](super::V6Key) to [`BucketState`](super::BucketState).
    pub const BUCKETS_V6: &str = "BUCKETS_V6";
    /// Array of [`BucketState`](super::BucketState) by [`Slot`](super::Slot): the ARP and neighbour discovery caps.
    pub const NEIGHBOURS: &str = "NEIGHBOURS";
    /// Array of [`Budget`](super::Budget) by [`ClassId`](super::ClassId): the budgets for new sources,
    /// that of all classes together at [`ClassId::NONE`](super::ClassId::NONE).
    pub const BUDGETS: &str = "BUDGETS";
    /// Per-CPU array of `u64` by [`Family`](crate::Family): buckets made.
    pub const CREATED: &str = "CREATED";
    /// Per-CPU array of [`Count`](super::Count), see [`CounterShape`](super::CounterShape).
    pub const COUNTERS: &str = "COUNTERS";
}

/// Constants that the agent patches into the object before it loads it.
pub mod global {
    /// `u32`: slots in the counter map.
    pub const COUNTER_SLOTS: &str = "COUNTER_SLOTS";
    /// `u32`: class ids in the counter map.
    pub const COUNTER_CLASSES: &str = "COUNTER_CLASSES";
}
