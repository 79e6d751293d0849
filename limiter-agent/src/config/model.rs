//! A valid configuration: what [`Config::parse`](super::Config::parse) promises can be enforced.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use ipnet::IpNet;
use limiter_common::abi;
use limiter_common::units::{ByteLimit, LimitError, Limits, PacketLimit, Rate};

use super::{Diagnostic, Leasing, Match, PortSet};

/// A valid configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The file's name, for messages.
    pub file: String,
    /// What is done with packets over a limit, where a class does not say otherwise.
    pub mode: Mode,
    /// The interfaces to guard: at least one.
    pub interfaces: Vec<Interface>,
    /// How many sources are remembered.
    pub table: TableSizes,
    /// The ceilings over wider prefixes.
    pub ceilings: Ceilings,
    /// What comes back on the flows that this host opened.
    pub established: Established,
    /// The caps on ARP and neighbour discovery, per interface.
    pub neighbours: Neighbours,
    /// What happens to packets that cannot be judged.
    pub faults: Faults,
    /// After so many seconds without an agent nothing is dropped; none if the limits hold on.
    pub agent_loss: Option<u32>,
    /// What no class limit starves, before all classes and in order.
    pub reserves: Vec<Reserve>,
    /// The rules in order; the last, and only the last, has no match.
    pub classes: Vec<Class>,
    /// Networks with limits of their own.
    pub prefixes: Vec<Prefix>,
    /// Networks that are not limited.
    pub exemptions: Vec<Exemption>,
    /// Networks that are dropped.
    pub blocks: Vec<Block>,
    /// Exemptions by credential, if there are any.
    pub lease: Option<Leasing>,
    /// Where metrics are served.
    pub metrics: SocketAddr,
    /// Where the daemon takes commands.
    pub control: PathBuf,
    /// The group that may command it, beside its user.
    pub control_group: Option<String>,
    /// What applications may ask and tell.
    pub application: Bridge,
    /// What is allowed but deserves a line in the log, in the order of lines.
    pub warnings: Vec<Diagnostic>,
}

impl Config {
    /// Everything that a packet may be counted as, in the order in which the datapath asks: the reserves,
    /// then the classes.
    pub fn rules(&self) -> impl Iterator<Item = &Class> {
        self.reserves.iter().map(|reserve| &reserve.class).chain(&self.classes)
    }
}

/// What is done with packets over a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// They pass, and are counted as `would_drop`.
    Observe,
    /// They are dropped.
    Enforce,
    /// Nothing is measured.
    Bypass,
}

impl Mode {
    /// As it is written in the file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Observe => "observe",
            Self::Enforce => "enforce",
            Self::Bypass => "bypass",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl From<Mode> for abi::Mode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Observe => Self::OBSERVE,
            Mode::Enforce => Self::ENFORCE,
            Mode::Bypass => Self::BYPASS,
        }
    }
}

/// `[[interface]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name, or a glob over names.
    pub name: Pattern,
    /// How the program is attached.
    pub xdp: Xdp,
    /// The line in the file.
    pub line: usize,
}

/// How the program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Xdp {
    /// In the driver, or not at all.
    Native,
    /// In the network stack, after the skb is allocated.
    Generic,
    /// In the driver if it can, else generic.
    Auto,
}

impl Xdp {
    /// As it is written in the file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Generic => "generic",
            Self::Auto => "auto",
        }
    }
}

/// The name of an interface, or a glob: `*` stands for any characters, `?` for one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pattern(String);

impl Pattern {
    /// A pattern of this text.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// As it is written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it can stand for more than one name.
    #[must_use]
    pub fn is_glob(&self) -> bool {
        self.0.contains(['*', '?'])
    }

    /// Whether `name` is one of its names. The loopback interface is only meant by its full name.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        if self.is_glob() && name == "lo" {
            return false;
        }
        glob(self.0.as_bytes(), name.as_bytes())
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// `[table]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableSizes {
    /// Buckets for IPv4.
    pub ipv4_sources: u32,
    /// Buckets for IPv6.
    pub ipv6_sources: u32,
    /// How many new sources are let in, all classes together.
    pub new_sources: Budget,
}

impl TableSizes {
    /// The fewest sources of a family that may be asked for.
    pub const LEAST: u32 = 1024;
    /// The most.
    pub const MOST: u32 = 1 << 24;
}

/// `[aggregate]`: what wider prefixes may send, as multiples of the limit of one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ceilings {
    /// An IPv6 /56; none if it has no ceiling.
    pub ipv6_56: Option<u32>,
    /// An IPv6 /48.
    pub ipv6_48: Option<u32>,
    /// An IPv4 /24.
    pub ipv4_24: Option<u32>,
    /// How many new sources one IPv6 /48 may let in of those that all together may.
    pub ipv6_48_new_sources: Budget,
}

/// `[neighbour]`: caps for each interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbours {
    /// On ARP.
    pub arp: Budget,
    /// On IPv6 neighbour discovery.
    pub nd: Budget,
}

/// `[established]`: what comes back on the flows that this host opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Established {
    /// What all of them together may receive beyond the limits of their sources.
    pub packets: Budget,
    /// Local UDP ports whose sockets are clients' although they were bound to the port.
    pub client_ports: PortSet,
}

/// `[faults]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faults {
    /// Truncated or contradictory headers.
    pub malformed: FaultAction,
    /// No bucket could be had.
    pub table_full: FaultAction,
}

/// What happens to a packet that cannot be judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// It passes.
    Pass,
    /// It is dropped (in enforce mode).
    Drop,
}

/// A token bucket: it refills at `rate` and holds `burst`, in packets or bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Per second, minute or hour.
    pub rate: Rate,
    /// Packets or bytes.
    pub burst: u64,
}

impl Budget {
    /// The limit in packets.
    ///
    /// # Errors
    /// [`LimitError`] names what cannot be enforced.
    pub const fn packets(self) -> Result<PacketLimit, LimitError> {
        PacketLimit::new(self.rate, self.burst)
    }

    /// The limit in bytes.
    ///
    /// # Errors
    /// [`LimitError`] names what cannot be enforced.
    pub const fn bytes(self) -> Result<ByteLimit, LimitError> {
        ByteLimit::new(self.rate, self.burst)
    }

    /// Half of the rate and the burst; the same where half is too little to be enforced.
    #[must_use]
    pub fn half(self) -> Self {
        let half = self.rate.over(2).map(|rate| Self { rate, burst: self.burst.div_ceil(2) });
        half.ok().filter(|half| half.packets().is_ok()).unwrap_or(self)
    }

    /// `factor` times the rate and the burst.
    ///
    /// # Errors
    /// [`LimitError`] if either does not fit.
    pub fn times(self, factor: u32) -> Result<Self, LimitError> {
        let burst = self.burst.checked_mul(factor.into()).ok_or(LimitError::TooLong)?;
        Ok(Self { rate: self.rate.times(factor)?, burst })
    }
}

/// What one source may send: at least one of the two is limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// Packets.
    pub packets: Option<Budget>,
    /// Bytes of whole frames.
    pub bytes: Option<Budget>,
    /// TCP connections that it may have open.
    pub connections: Option<u32>,
}

impl Allowance {
    /// The limits as the datapath wants them.
    ///
    /// # Errors
    /// [`LimitError`] names what cannot be enforced; never for one from a valid file.
    pub fn limits(&self) -> Result<Limits, LimitError> {
        let packets = self.packets.map_or(Ok(PacketLimit::NONE), Budget::packets)?;
        let bytes = self.bytes.map_or(Ok(Limits::NONE.bytes), Budget::bytes)?;
        let connections = self.connections.map_or(0, u64::from);
        Ok(Limits { packets, bytes, connections })
    }
}

/// `[[class]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Class {
    /// Its name: the `class` label of metrics.
    pub name: String,
    /// What belongs to it; `None` for the last class, which takes the rest.
    pub matcher: Option<Match>,
    /// What one source may send, as written.
    pub allowance: Allowance,
    /// The same, compiled.
    pub limits: Limits,
    /// How many new sources it may let in of those that all classes together may.
    pub new_sources: Option<Budget>,
    /// What all its sources together may send that have proven nothing.
    pub unproven: Option<Budget>,
    /// What all its sources together may send.
    pub total: Option<Budget>,
    /// Its own mode.
    pub mode: Option<Mode>,
    /// The line in the file.
    pub line: usize,
}

/// `[[reserve]]`, or a built-in one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserve {
    /// As a class: its label in metrics, what belongs to it, what one source may send, and its own budgets.
    pub class: Class,
    /// The interfaces that it holds on; all if none.
    pub interface: Option<Pattern>,
    /// Whether it is only for packets that no router forwarded (`ttl = 255`).
    pub from_link: bool,
    /// Whether it is not from the file.
    pub built_in: bool,
}

impl Reserve {
    /// What its label begins with.
    pub const PREFIX: &str = "reserve-";

    /// Its name in the file.
    #[must_use]
    pub fn name(&self) -> &str {
        self.class.name.strip_prefix(Self::PREFIX).unwrap_or(&self.class.name)
    }
}

/// `[[prefix]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// The network whose sources have limits of their own (each source; they do not share one).
    pub cidr: IpNet,
    /// The factor, if the limits are multiples of the class limits.
    pub scale: Option<u32>,
    /// The limits of each class, in the order of classes.
    pub limits: Vec<Limits>,
    /// Whom to ask about it.
    pub owner: Option<String>,
    /// Why it is there.
    pub comment: Option<String>,
}

/// `[[exempt]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exemption {
    /// The network that is not limited.
    pub cidr: IpNet,
    /// The interfaces it must arrive on; `None` (any) only if the file says `spoofable`.
    pub interface: Option<Pattern>,
    /// Whom to ask about it.
    pub owner: String,
    /// When it ends.
    pub expires: Option<SystemTime>,
    /// The line in the file.
    pub line: usize,
}

impl Exemption {
    /// Whether a forged source address is enough to be exempt.
    #[must_use]
    pub const fn is_spoofable(&self) -> bool {
        self.interface.is_none()
    }
}

/// `[[block]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The network that is dropped.
    pub cidr: IpNet,
    /// When it ends.
    pub expires: Option<SystemTime>,
    /// Why it is there.
    pub reason: Option<String>,
}

/// `[application]`: what applications may ask and tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bridge {
    /// The socket for applications; none if there is none.
    pub socket: Option<PathBuf>,
    /// The group that may open it, beside the agent's user.
    pub group: Option<String>,
    /// Who sends in the name of many: never penalised.
    pub trusted_proxies: Vec<IpNet>,
    /// How long the first penalty of a source lasts.
    pub first_penalty: Duration,
    /// The most that one lasts.
    pub longest_penalty: Duration,
    /// After so long without a penalty, one of them is forgotten.
    pub penalty_memory: Duration,
    /// How many penalties may be asked for.
    pub penalties: Budget,
    /// How many addresses may be vouched for.
    pub proofs: Budget,
}

/// Whether `pattern`, with `*` and `?`, is all of `name`.
fn glob(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern.split_first(), name.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), None) => glob(rest, name),
        (Some((b'*', rest)), Some((_, shorter))) => glob(rest, name) || glob(pattern, shorter),
        (Some((b'?', rest)), Some((_, name))) => glob(rest, name),
        (Some((letter, rest)), Some((first, name))) => letter == first && glob(rest, name),
        (None, Some(_)) | (Some(_), None) => false,
    }
}
