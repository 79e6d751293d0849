//! What the kernel and the agent share: map names, map keys and values, and their layout.
//!
//! Every type here is plain data without padding and without invalid bit patterns: what is read
//! from a map is a number first, and becomes an enum only by a check. A change of layout or
//! meaning needs a new [`ABI_VERSION`]; `cargo xtask tidy` fails without one.

mod bucket;
mod counter;
mod event;
mod kept;
mod pod;
mod policy;
mod sample;
mod settings;

pub use bucket::{
    Budget, BudgetCell, ByteTats, FLOW_PORTS, KNOWN_WORDS, KnownWords, LineV4, LineV6, OwnAddress,
    PortBits, V4_CROWDED, V4_SLOTS, V6_CROWDED, V6_SLOTS,
};
pub use counter::{Count, CounterCell, CounterShape};
pub use event::{EVENT_BYTES, EVENT_RING, Event, Pace};
pub use kept::{Head, Identity, Name, Shape};
pub use policy::{
    AddressFamily, Exemptions, LimitsIndex, Policy, PolicyId, PrefixKey, SourceAddress,
};
pub use sample::{SAMPLE_BYTES, SAMPLE_RING, Sample, SampleCount, SampledOutcome, Sampling};
pub use settings::{
    Bank, Ceiling, ClassId, ClassSettings, Dimension, Ingress, L4Index, Mode, Need, Settings, Slot,
    Traits,
};

/// The version of everything in this module.
#[cfg(not(feature = "next-abi"))]
pub const ABI_VERSION: u32 = 10;
/// A version that no other agent has, for the test of upgrades.
#[cfg(feature = "next-abi")]
pub const ABI_VERSION: u32 = u32::MAX;

/// The version of what goes over to new maps, also of another [`ABI_VERSION`]: the filters of known
/// sources ([`KnownWords`], the hash and [`known`](crate::known)), the budgets, and the names of numbers
/// ([`Shape`], [`Name`]).
pub const CARRIED_VERSION: u32 = 1;

/// The most classes a configuration can have: one bit each in a 64-bit set.
pub const MAX_CLASSES: usize = 64;
/// Class ids are below that: a slot of the table has seven bits for one.
pub const MAX_CLASS_IDS: usize = 128;
/// The most interfaces (bonds and their members counted apart) that one agent can guard, slot 0
/// being [`Slot::UNKNOWN`].
pub const MAX_INTERFACES: usize = 32;

/// The most addresses of this host that are told from others'.
pub const MAX_OWN_ADDRESSES: usize = 4096;

/// The XDP program's name in the object.
pub const PROGRAM: &str = "limiter";
/// The name of the program that hears of completed handshakes.
pub const HANDSHAKES: &str = "handshakes";
/// The names of the programs that hear of UDP flows of this host: of a new socket, of one that asks for an
/// address and port (IPv4 and IPv6), and of a packet that is sent.
pub const FLOW_SOCKETS: &str = "flow_sockets";
/// See [`FLOW_SOCKETS`].
pub const FLOW_BINDS: [&str; 2] = ["flow_bind4", "flow_bind6"];
/// See [`FLOW_SOCKETS`].
pub const FLOW_PACKETS: &str = "flow_packets";
/// The name of the program that says what [`Settings::coarse_origin`] should be.
pub const CLOCK_ORIGIN: &str = "clock_origin";

/// The names of the maps in the object.
pub mod map {
    /// Array of one [`Identity`](super::Identity).
    pub const IDENTITY: &str = "IDENTITY";
    /// Array of one [`Shape`](super::Shape).
    pub const SHAPE: &str = "SHAPE";
    /// Array of [`Name`](super::Name).
    pub const NAMES: &str = "NAMES";
    /// Array of [`Settings`](super::Settings): for each bank, and for each a variant (see
    /// [`Bank::variant`](super::Bank::variant)).
    pub const SETTINGS: &str = "SETTINGS";
    /// Array of one [`Head`](super::Head), the program's only variable.
    pub const HEAD: &str = ".bss";
    /// LPM trie from [`PrefixKey`](super::PrefixKey) to [`PolicyId`](super::PolicyId).
    pub const PREFIXES: &str = "PREFIXES";
    /// Array of [`Policy`](super::Policy), half for each bank.
    pub const POLICIES: &str = "POLICIES";
    /// Array of [`Limits`](crate::units::Limits), half for each bank.
    pub const LIMITS: &str = "LIMITS";
    /// Array of [`LineV4`](super::LineV4): the buckets of IPv4 sources.
    pub const BUCKETS_V4: &str = "BUCKETS_V4";
    /// Array of [`LineV6`](super::LineV6): the buckets of IPv6 sources.
    pub const BUCKETS_V6: &str = "BUCKETS_V6";
    /// Array of [`LineV6`](super::LineV6): the ceilings of wider prefixes.
    pub const CEILINGS: &str = "CEILINGS";
    /// Array of [`ByteTats`](super::ByteTats) beside [`BUCKETS_V4`].
    pub const BYTES_V4: &str = "BYTES_V4";
    /// Array of [`ByteTats`](super::ByteTats) beside [`BUCKETS_V6`].
    pub const BYTES_V6: &str = "BYTES_V6";
    /// Array of [`KnownWords`](super::KnownWords): the filters of known sources.
    pub const KNOWN: &str = "KNOWN";
    /// Array of [`KnownWords`](super::KnownWords): the filter of flows that this host opened,
    /// behind [`FLOW_PORTS`](super::FLOW_PORTS) places for its ports.
    pub const FLOWS: &str = "FLOWS";
    /// Storage of sockets: whether one is a client's, and its last mark.
    pub const CLIENTS: &str = "CLIENTS";
    /// Array of one [`PortBits`](super::PortBits): local UDP ports whose sockets are clients' although
    /// they were bound to the port.
    pub const CLIENT_PORTS: &str = "CLIENT_PORTS";
    /// Hash set of [`OwnAddress`](super::OwnAddress): the host's addresses.
    pub const OWN: &str = "OWN";
    /// Array of [`Budget`](super::Budget) by [`BudgetCell`](super::BudgetCell).
    pub const BUDGETS: &str = "BUDGETS";
    /// Per-CPU array of `u64` by [`Family`](crate::Family): buckets made.
    pub const CREATED: &str = "CREATED";
    /// Per-CPU array of [`CounterCell`](super::CounterCell), see [`CounterShape`](super::CounterShape).
    pub const COUNTERS: &str = "COUNTERS";
    /// Array of `u32` by [`Reason`](crate::Reason): whether its first packet was logged.
    pub const LOGGED: &str = "LOGGED";
    /// Array of one [`Sampling`](super::Sampling): which drops are sampled.
    pub const SAMPLING: &str = "SAMPLING";
    /// Array of two `u64`: the theoretical arrival times of the budgets for samples and for events.
    pub const SAMPLE_TAT: &str = "SAMPLE_TAT";
    /// Ring buffer of [`Sample`](super::Sample).
    pub const SAMPLES: &str = "SAMPLES";
    /// Per-CPU array of [`SampleCount`](super::SampleCount): of samples, and of events.
    pub const SAMPLE_COUNT: &str = "SAMPLE_COUNT";
    /// Ring buffer of [`Event`](super::Event).
    pub const EVENTS: &str = "EVENTS";

    /// Those that outlive the agent: all but the program's constants, its log, samples and events.
    pub const KEPT: [&str; 23] = [
        IDENTITY,
        SHAPE,
        NAMES,
        SETTINGS,
        HEAD,
        PREFIXES,
        POLICIES,
        LIMITS,
        BUCKETS_V4,
        BUCKETS_V6,
        CEILINGS,
        BYTES_V4,
        BYTES_V6,
        KNOWN,
        OWN,
        BUDGETS,
        CREATED,
        COUNTERS,
        LOGGED,
        SAMPLE_COUNT,
        FLOWS,
        CLIENTS,
        CLIENT_PORTS,
    ];
}

/// Constants that the agent patches into the object before it loads it.
pub mod global {
    /// [`Head`](super::Head): not a constant, but what the variable begins with.
    pub const HEAD: &str = "HEAD";
    /// `u32`: slots in the counter map.
    pub const COUNTER_SLOTS: &str = "COUNTER_SLOTS";
    /// `u32`: class ids in the counter map.
    pub const COUNTER_CLASSES: &str = "COUNTER_CLASSES";
    /// `u32`: lines of the IPv4 table.
    pub const LINES_V4: &str = "LINES_V4";
    /// `u32`: lines of the IPv6 table.
    pub const LINES_V6: &str = "LINES_V6";
    /// `u32`: lines of the table of ceilings.
    pub const LINES_CEILINGS: &str = "LINES_CEILINGS";
    /// `u32`: places in the filters of known sources.
    pub const KNOWN_PLACES: &str = "KNOWN_PLACES";
    /// `u32`: places in the filter of this host's flows, those for ports not counted.
    pub const FLOW_PLACES: &str = "FLOW_PLACES";
    /// `u32`: whether there are byte buckets, 0 or 1.
    pub const BYTES: &str = "BYTES";
    /// `u64`: nanoseconds between two ticks of the kernel's timer; 0 if their count is no measure of
    /// time.
    pub const TICK: &str = "TICK";
    /// `u32`: the time between two events of a cell, in [`Moments`](crate::pace::Moments).
    pub const EVENT_INTERVAL: &str = "EVENT_INTERVAL";
    /// `u64`: the parts of the [`HashKey`](crate::hash::HashKey).
    pub const HASH_OFFSET: &str = "HASH_OFFSET";
    /// See [`HASH_OFFSET`].
    pub const HASH_FIRST: &str = "HASH_FIRST";
    /// See [`HASH_OFFSET`].
    pub const HASH_SECOND: &str = "HASH_SECOND";
}
