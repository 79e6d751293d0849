//! What `/v1/status` says and `limiter-agent status` shows: a contract, so plain data apart from
//! the types it is filled from.

mod text;

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

pub(crate) use text::bytes;

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
    /// What keeps the agent from doing its work, as `/healthz` says it; empty if nothing.
    pub problems: Vec<String>,
    /// What happens to packets that cannot be judged.
    pub failure_policies: Vec<FailurePolicy>,
    /// The guarded interfaces.
    pub interfaces: Vec<Interface>,
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
    /// Its share of the new sources.
    pub new_sources: Option<Limit>,
    /// The sum of its sources that have proven nothing.
    pub unproven: Option<Limit>,
    /// The sum of all its sources.
    pub total: Option<Limit>,
}

/// A token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limit {
    /// Units that it gains per second.
    pub per_second: f64,
    /// Units that it holds.
    pub burst: u64,
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
    /// When the settings in force were read, UTC.
    pub loaded: String,
    /// The last attempt to read it again; none if there was none.
    pub last_reload: Option<Reload>,
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
