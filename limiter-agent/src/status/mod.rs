//! What `/v1/status` says and `limiter-agent status` shows: a contract, so plain data apart from
//! the types it is filled from.

mod text;

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::config::{Budget, Config};
use crate::connections::Entry;
pub(crate) use text::{Grid, bytes, grid, grouped, limit, reserves};

/// What the running agent does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The agent's version.
    pub version: String,
    /// The version of the layout shared with the kernel.
    pub abi: u32,
    /// The agent's process.
    pub pid: u32,
    /// When it started, UTC (RFC 3339).
    pub started: String,
    /// `observe`, `enforce` or `bypass`.
    pub mode: String,
    /// The command that outranks the configuration's mode; none if none does.
    pub mode_override: Option<ModeOverride>,
    /// What keeps the agent from doing its work, as `/healthz` says it; empty if nothing.
    pub problems: Vec<String>,
    /// What happens to packets that cannot be judged.
    pub failure_policies: Vec<FailurePolicy>,
    /// The guarded interfaces.
    pub interfaces: Vec<Interface>,
    /// What no class limit starves, before the classes and in the order of rules.
    pub reserves: Vec<Reserve>,
    /// The classes, in the order of rules.
    pub classes: Vec<Class>,
    /// Networks that are not limited.
    pub exemptions: Vec<Exemption>,
    /// Networks that are dropped.
    pub blocks: Vec<Block>,
    /// The bucket tables.
    pub tables: Vec<Table>,
    /// How many new sources are let in, all classes together.
    pub new_sources: Limit,
    /// What proves that a source is not forged: `handshakes`, or `unavailable: ` and why.
    pub proofs: String,
    /// The TCP connections that others have open to this host.
    pub connections: OpenConnections,
    /// What all flows together may receive that this host opened, beyond the limits of their sources.
    pub established: Limit,
    /// What tells the datapath of those flows.
    pub own_flows: OwnFlows,
    /// What all maps take, in bytes of kernel memory.
    pub map_memory_bytes: u64,
    /// Where the settings come from.
    pub config: ConfigState,
    /// Packets since the start, by what was done and why.
    pub totals: Vec<Total>,
}

/// A mode that was asked for by a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModeOverride {
    /// The mode.
    pub mode: String,
    /// Since when, UTC.
    pub since: String,
    /// Who asked.
    pub by: String,
}

/// The TCP connections that others have open to this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenConnections {
    /// What tells of them: `handshakes`, or `unavailable: ` and why nothing does.
    pub counted: String,
    /// How many.
    pub open: u64,
    /// How many sources have any.
    pub sources: u64,
    /// The source that has the most; none if none has any.
    pub most: Option<Entry>,
    /// Those, since the maps were made, that were not counted for want of room.
    pub uncounted: u64,
}

/// What tells the datapath of the flows that this host opens, or `unavailable: ` and why nothing does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnFlows {
    /// `connect`.
    pub tcp: String,
    /// `packets sent by clients`.
    pub udp: String,
}

/// What happens on one event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailurePolicy {
    /// `malformed` or `table_full`.
    pub event: String,
    /// `pass` or `drop`.
    pub action: String,
}

/// A guarded interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its index.
    pub ifindex: u32,
    /// How the kernel runs the program: `native`, `generic`, `offload`.
    pub mode: String,
    /// Its driver; empty if it does not say.
    pub driver: String,
    /// `link` (`bpf_link`) or `netlink` (which outlives a crash of the agent).
    pub attachment: String,
}

/// A class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Class {
    /// Its name.
    pub name: String,
    /// Its mode, its own or the global one.
    pub mode: String,
    /// The limit in packets.
    pub packets: Option<Limit>,
    /// The limit in bytes.
    pub bytes: Option<Limit>,
    /// The TCP connections that a source may have open.
    pub connections: Option<u32>,
    /// Its share of the new sources.
    pub new_sources: Option<Limit>,
    /// The sum of its sources that have proven nothing.
    pub unproven: Option<Limit>,
    /// The sum of all its sources.
    pub total: Option<Limit>,
}

/// What no class limit starves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reserve {
    /// Its name; metrics and logs call it `reserve-NAME`.
    pub name: String,
    /// Whether it is there without being in the file.
    pub built_in: bool,
    /// What belongs to it, briefly.
    pub matches: String,
    /// The interface, or the glob, that it holds on; any if none.
    pub interface: Option<String>,
    /// The TTL that its packets must have; any if none.
    pub ttl: Option<u8>,
    /// The limit of one source, in packets.
    pub packets: Option<Limit>,
    /// How many new sources it lets in.
    pub new_sources: Option<Limit>,
    /// The sum of its sources that have proven nothing.
    pub unproven: Option<Limit>,
}

impl Reserve {
    /// Those in force under `config`.
    #[must_use]
    pub fn all(config: &Config) -> Vec<Self> {
        let reserves = config.reserves.iter().map(|reserve| Self {
            name: reserve.name().to_owned(),
            built_in: reserve.built_in,
            matches: reserve.class.matcher.as_ref().map(ToString::to_string).unwrap_or_default(),
            interface: reserve.interface.as_ref().map(ToString::to_string),
            ttl: reserve.from_link.then_some(u8::MAX),
            packets: reserve.class.allowance.packets.map(Limit::from),
            new_sources: reserve.class.new_sources.map(Limit::from),
            unproven: reserve.class.unproven.map(Limit::from),
        });
        reserves.collect()
    }
}

/// A token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limit {
    /// Units that it gains per second.
    pub per_second: f64,
    /// Units that it holds.
    pub burst: u64,
}

impl From<Budget> for Limit {
    fn from(budget: Budget) -> Self {
        Self { per_second: budget.rate.per_second(), burst: budget.burst }
    }
}

/// A network that is not limited.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exemption {
    /// The network.
    pub cidr: String,
    /// The interface it must arrive on; any if none.
    pub interface: Option<String>,
    /// Whom to ask about it.
    pub owner: String,
    /// When it ends, UTC.
    pub expires: Option<String>,
    /// Whether a forged source address is enough.
    pub spoofable: bool,
}

/// A network that is dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// The network.
    pub cidr: String,
    /// When it ends, UTC.
    pub expires: Option<String>,
    /// Whether that is still to come.
    pub active: bool,
    /// Why it is there.
    pub reason: Option<String>,
    /// Who asked for it by a command; none if it is the configuration's.
    pub by: Option<String>,
}

/// A bucket table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    /// `ipv4` or `ipv6`.
    pub family: String,
    /// Buckets it can hold.
    pub capacity: u32,
}

/// Where the settings come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigState {
    /// The file.
    pub path: String,
    /// The file whose text is in force: the same unless another was applied.
    pub source: String,
    /// When the settings in force were read, UTC.
    pub loaded: String,
    /// That they are rolled back unless they are confirmed; none if they are for good.
    pub pending: Option<Pending>,
    /// Why the settings in force are older ones than were wanted; none if they are not.
    pub rolled_back: Option<String>,
    /// The last attempt to read it again; none if there was none.
    pub last_reload: Option<Reload>,
}

/// An applied configuration that waits to be confirmed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pending {
    /// The file's name.
    pub file: String,
    /// When it is rolled back, UTC.
    pub until: String,
    /// How long that is.
    pub seconds_left: u64,
}

/// What a command did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// When, UTC.
    pub at: String,
    /// What changed, briefly.
    pub changes: Vec<String>,
    /// What somebody should know about it.
    pub warnings: Vec<String>,
    /// When it is taken back unless it is confirmed, UTC; none if it is for good.
    pub confirm_by: Option<String>,
}

/// One attempt to read the configuration again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reload {
    /// When, UTC.
    pub at: String,
    /// Whether the settings in force come from it.
    pub successful: bool,
    /// What it changed, briefly.
    pub changes: Vec<String>,
    /// Why it failed.
    pub errors: Vec<String>,
}

/// Packets of one fate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Total {
    /// `pass`, `drop` or `would_drop`.
    pub action: String,
    /// Why.
    pub reason: String,
    /// How many.
    pub packets: u64,
    /// How many bytes they had, whole frames.
    pub bytes: u64,
}

/// `time` in UTC (RFC 3339, whole seconds).
#[must_use]
pub fn utc(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}
