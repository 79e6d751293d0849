//! From a valid configuration to the contents of the maps. PURE: the host is an argument, and what
//! comes out is compared, tested and written elsewhere.

mod classes;
mod interfaces;
mod names;
mod policies;
mod sizes;
#[cfg(test)]
mod tests;

use std::time::SystemTime;

use limiter_common::Reason;
use limiter_common::abi::{
    BudgetCell, Ceiling, ClassId, ClassSettings, Mode, Need, Policy, PolicyId, PortBits, Settings,
    Slot, SourceAddress, Traits,
};
use limiter_common::known::Filter;
use limiter_common::time::{Clock, Nanos, Tick};
use limiter_common::units::{LimitError, Limits, PacketLimit};

use crate::config::{self, Budget, Ceilings, Config, FaultAction, Pattern, PortSet, Xdp};
pub(crate) use interfaces::xdp_of;
pub use names::Names;
pub use sizes::MapSizes;

/// The host that a configuration is planned for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// All interfaces it has; globs are matched against them.
    pub interfaces: Vec<HostInterface>,
    /// Now, on the clock of the datapath.
    pub monotonic: Nanos,
    /// How often its coarse clock moves.
    pub tick: Nanos,
    /// The same instant, on the clock of expiry times.
    pub wall: SystemTime,
}

/// An interface of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostInterface {
    /// Its name.
    pub name: String,
    /// The kernel's index.
    pub ifindex: u32,
    /// The largest packet it takes, without the Ethernet header, in bytes.
    pub mtu: u32,
    /// The index of the bond that it is a member of.
    pub bond: Option<u32>,
}

/// Everything that the datapath is to hold, for whichever bank it is written to.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The settings, but for `epoch`, `bank` and `policies`, which the datapath fills in.
    pub settings: Box<Settings>,
    /// The policies: the record at `i` is that of `PolicyId(i + 1)`. Their `limits` count from the
    /// first of [`limits`](Self::limits); the datapath adds the place where the bank begins.
    pub policies: Vec<Policy>,
    /// The networks that have a policy. Each is listed once.
    pub prefixes: Vec<Prefix>,
    /// Rows of limits, one for each class in the order of rules, as policies refer to them.
    pub limits: Vec<Limits>,
    /// Local UDP ports whose sockets are clients' although they were bound to the port.
    pub client_ports: Box<PortBits>,
    /// The interfaces to attach to, in the order of their slots.
    pub interfaces: Vec<Guarded>,
    /// How large the maps must be made for this plan, with room for reloads.
    pub sizes: MapSizes,
    /// The numbers of classes and interfaces, for the next plan.
    pub names: Names,
    /// After so long without a sign of life of the agent nothing is dropped; none if the limits hold on.
    pub lease: Option<Nanos>,
    /// Interfaces of the configuration that were guarded and are gone. A reload goes on without them:
    /// it may be the one that ends an outage.
    pub gone: Vec<String>,
}

/// A network with a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// Its first address.
    pub address: SourceAddress,
    /// Its length in bits of the address: 0 to 32, or 0 to 128.
    pub bits: u32,
    /// Its policy.
    pub policy: PolicyId,
}

/// An interface that the program guards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guarded {
    /// Its name.
    pub name: String,
    /// The kernel's index.
    pub ifindex: u32,
    /// The number it is counted under.
    pub slot: Slot,
    /// How the program is attached.
    pub xdp: Xdp,
}

/// Why a valid configuration cannot be had on this host, or not without a restart.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The file names an interface that the host does not have.
    #[error(
        "{file}:{line}: this host has no interface \"{pattern}\"; it has {present}: write one of \
         these, or create the interface first"
    )]
    NoInterface {
        /// The configuration file.
        file: String,
        /// The line of the entry.
        line: usize,
        /// The name or glob.
        pattern: Pattern,
        /// The interfaces it has.
        present: String,
    },
    /// An exemption or a reserve is tied to an interface that no `[[interface]]` entry matches.
    #[error(
        "{file}:{line}: nothing that is guarded is called \"{pattern}\", so the {what} would \
         hold nowhere; guarded are {guarded}: write one of these"
    )]
    BoundNowhere {
        /// What is tied to it.
        what: &'static str,
        /// The configuration file.
        file: String,
        /// The line of the entry.
        line: usize,
        /// The name or glob.
        pattern: Pattern,
        /// The interfaces that are guarded.
        guarded: String,
    },
    /// A byte bucket never holds a full frame of a guarded interface.
    #[error(
        "{file}:{line}: class \"{class}\" never lets a full frame of {interface} through: at MTU {mtu} \
         it has {frame} bytes, and the byte burst (of the class, or of a [[prefix.class]] of that \
         name) holds less; write burst = {frame} or more"
    )]
    BurstBelowFrame {
        /// The configuration file.
        file: String,
        /// The line of the class.
        line: usize,
        /// The class.
        class: String,
        /// The interface with the largest MTU.
        interface: String,
        /// Its MTU.
        mtu: u32,
        /// Its longest frame, without a VLAN tag.
        frame: u32,
    },
    /// The globs match more interfaces than can be told apart.
    #[error(
        "{file}: the [[interface]] entries match {count} interfaces and at most {most} can be \
         guarded; write narrower globs"
    )]
    TooManyInterfaces {
        /// The configuration file.
        file: String,
        /// How many match.
        count: usize,
        /// How many are possible.
        most: usize,
    },
    /// No hash without collisions was found for the interface indexes. (With 31 of them, one try
    /// in seven succeeds, and thousands are made.)
    #[error(
        "the interface indexes of this host collide in the datapath's table; guard fewer of them"
    )]
    IndexesCollide,
    /// A class matcher has more distinct sets than the datapath's table holds.
    #[error(
        "the {key} of the classes make more different sets than the datapath can hold; let the \
         lists of fewer classes overlap"
    )]
    TooManyGroups {
        /// The matcher.
        key: &'static str,
    },
    /// A limit cannot be enforced. [`Config::parse`] lets none through.
    #[error("a limit cannot be enforced ({0:?}); check the file")]
    Limit(LimitError),
    /// More than the maps hold that were made when the agent started.
    #[error(
        "the running agent has room for {room} {what} and the new configuration needs {needed}; \
         restart the agent to make more room"
    )]
    NeedsRestart {
        /// What there is too much of.
        what: &'static str,
        /// How many are needed.
        needed: u32,
        /// How many fit.
        room: u32,
    },
    /// A bucket table of another size than the running one.
    #[error(
        "{key} is {wanted} and the running agent was started with {running}; restart the agent to \
         change it (this empties the table), or write {running}"
    )]
    TableSize {
        /// The key in `[table]`.
        key: &'static str,
        /// In the new configuration.
        wanted: u32,
        /// In the running agent.
        running: u32,
    },
}

impl From<LimitError> for PlanError {
    fn from(error: LimitError) -> Self {
        Self::Limit(error)
    }
}

/// What the datapath is to hold for `config` on `host`. `previous` keeps the numbers of classes and
/// interfaces as they are in the running datapath.
///
/// # Errors
/// [`PlanError`], if the host does not have what the configuration names. Whether the maps that
/// are there have room is asked of [`Plan::fits`].
pub fn plan(config: &Config, host: &Host, previous: Option<&Names>) -> Result<Plan, PlanError> {
    let interfaces::Choice { chosen, gone } = interfaces::choose(config, host, previous)?;
    let live = names::Live {
        // Reserves last: so classes have the numbers that they have without any.
        classes: config
            .classes
            .iter()
            .chain(config.reserves.iter().map(|reserve| &reserve.class))
            .map(|class| class.name.as_str())
            .collect(),
        interfaces: chosen.iter().map(|(interface, _)| interface.name.as_str()).collect(),
    };
    let names = Names::assign(previous, &live);
    let guarded = interfaces::number(&chosen, &names);
    let (multiplier, ingress) = interfaces::ingress(&interfaces::places(&guarded, host))?;
    let policies = policies::merge(config, host, &guarded);
    frames_fit(config, &chosen, &policies.limits)?;

    let mut settings = Box::new(Settings::EMPTY);
    settings.arp = config.neighbours.arp.packets()?;
    settings.nd = config.neighbours.nd.packets()?;
    settings.new_sources = config.table.new_sources.packets()?;
    settings.new_sources_site = config.ceilings.ipv6_48_new_sources.packets()?;
    settings.established = config.established.packets.packets()?;
    settings.exempting = policies.policies.iter().fold(0, |bits, it| bits | it.exempt.slots());
    settings.mode = config.mode.into();
    settings.drops = drops(config.faults);
    settings.ingress_multiplier = multiplier;
    settings.ingress = ingress;
    classes::compile(config, &guarded, &mut settings)?;
    for ((order, class), place) in config.rules().enumerate().zip(&mut settings.classes) {
        let id = names.class(&class.name);
        let sum = |budget: Option<Budget>| budget.map_or(Ok(PacketLimit::NONE), Budget::packets);
        *place = ClassSettings {
            limits: class.limits,
            new_sources: sum(class.new_sources)?,
            unproven: sum(class.unproven)?,
            total: sum(class.total)?,
            ceilings: if order < config.reserves.len() {
                [PacketLimit::NONE; Ceiling::COUNT]
            } else {
                ceilings(config.ceilings, class.limits.packets)
            },
            id,
            mode: mode(config.mode, class.mode),
            traits: Traits::default().with(Traits::RESERVED, order < config.reserves.len()),
            ..*place
        };
        settings.class_count += 1;
    }
    times(&mut settings, &policies.limits, host.tick);
    if !policies.prefixes.is_empty() {
        settings.need = settings.need.with(Need::POLICIES);
    }
    let sizes = MapSizes::of(config.table, &settings, &policies, &names);
    Ok(Plan {
        settings,
        policies: policies.policies,
        prefixes: policies.prefixes,
        limits: policies.limits,
        client_ports: port_bits(&config.established.client_ports),
        interfaces: guarded,
        sizes,
        names,
        lease: config.agent_loss.map(|seconds| Nanos(u64::from(seconds) * 1_000_000_000)),
        gone,
    })
}

fn port_bits(ports: &PortSet) -> Box<PortBits> {
    let mut bits = Box::new([0; 1 << 10]);
    for port in ports.ports() {
        bits[usize::from(port >> 6)] |= 1 << (port & 63);
    }
    bits
}

/// What one wider prefix may send in a class, by [`Ceiling`].
fn ceilings(config: Ceilings, limit: PacketLimit) -> [PacketLimit; Ceiling::COUNT] {
    let mut ceilings = [PacketLimit::NONE; Ceiling::COUNT];
    for (ceiling, factor) in [
        (Ceiling::V6Customer, config.ipv6_56),
        (Ceiling::V6Site, config.ipv6_48),
        (Ceiling::V4Network, config.ipv4_24),
    ] {
        ceilings[ceiling as usize] = factor.map_or(PacketLimit::NONE, |factor| limit.times(factor));
    }
    ceilings
}

/// Every byte bucket holds a full frame of the guarded interface with the largest MTU.
fn frames_fit(
    config: &Config,
    chosen: &interfaces::Chosen<'_>,
    rows: &[Limits],
) -> Result<(), PlanError> {
    const ETHERNET_HEADER: u32 = 14;
    let largest = chosen.iter().map(|(interface, _)| *interface).max_by_key(|it| it.mtu);
    let Some(HostInterface { name, mtu, .. }) = largest else { return Ok(()) };
    let frame = mtu.saturating_add(ETHERNET_HEADER);
    let count = config.rules().count();
    for (order, class) in config.rules().enumerate() {
        let others = rows.iter().skip(order).step_by(count);
        let mut limits = std::iter::once(&class.limits).chain(others).map(|limits| limits.bytes);
        if limits.any(|bytes| bytes.cost_of(frame) > bytes.tolerance()) {
            return Err(PlanError::BurstBelowFrame {
                file: config.file.clone(),
                line: class.line,
                class: class.name.clone(),
                interface: name.clone(),
                mtu: *mtu,
                frame,
            });
        }
    }
    Ok(())
}

impl Plan {
    /// The budgets that many sources have together: whose ([`ClassId::NONE`] is all classes'), where, and
    /// how much.
    pub fn budgets(&self) -> impl Iterator<Item = (ClassId, BudgetCell, PacketLimit)> {
        let settings = &self.settings;
        let all = (ClassId::NONE, BudgetCell::new_sources(ClassId::NONE), settings.new_sources);
        let classes = settings.classes.iter().flat_map(|class| {
            [
                (class.id, BudgetCell::new_sources(class.id), class.new_sources),
                (class.id, BudgetCell::unproven(class.id), class.unproven),
                (class.id, BudgetCell::total(class.id), class.total),
            ]
        });
        std::iter::once(all).chain(classes).filter(|(_, _, budget)| budget.is_limited())
    }

    /// Whether this can be loaded into maps of the sizes `running`, which were made for another
    /// plan. Sizes are taken from [`Plan::sizes`] of the plan that the agent started with.
    ///
    /// # Errors
    /// [`PlanError::NeedsRestart`] or [`PlanError::TableSize`].
    pub fn fits(&self, running: &MapSizes) -> Result<(), PlanError> {
        sizes::fits(self, running)
    }
}

/// Gives each class the cheapest clock that is exact enough for every budget that its packets may
/// meet: those of its sources (its own limits, and its place in each of the `rows`), of wider
/// prefixes, of all together, and those for new sources. And says of each whether all buckets of its
/// sources refill while a source is remembered.
fn times(settings: &mut Settings, rows: &[Limits], tick: Nanos) {
    let count = usize::try_from(settings.class_count).unwrap_or_default();
    let classes = &mut settings.classes[..count];
    for (order, class) in classes.iter_mut().enumerate() {
        let others = rows.iter().skip(order).step_by(count);
        let limits = std::iter::once(&class.limits).chain(others);
        let tolerance = |limit: PacketLimit| limit.is_limited().then(|| limit.tolerance());
        let own: Vec<_> = limits
            .flat_map(|Limits { packets, bytes }| {
                let bytes = bytes.is_limited().then(|| bytes.tolerance());
                [tolerance(*packets), bytes]
            })
            .flatten()
            .collect();
        let common = [settings.new_sources, settings.new_sources_site];
        let common = common.into_iter().filter(|_| !class.traits.has(Traits::RESERVED));
        let shared = common.chain([settings.established]);
        let shared = shared.chain([class.new_sources, class.unproven, class.total]);
        let shared = shared.chain(class.ceilings).filter_map(tolerance);
        let least = shared.chain(own.iter().copied()).min();
        class.clock = Clock::cheapest(least.unwrap_or(u64::MAX), tick);
        let remembered = Filter::Seen.lasts().0 << Tick::SHIFT;
        let refills = own.iter().all(|tolerance| *tolerance <= remembered);
        class.traits = class.traits.with(Traits::REFILLS_UNSEEN, refills);
    }
}

/// The mode of a class. Bypass is the kill switch: no class withstands it.
fn mode(global: config::Mode, own: Option<config::Mode>) -> Mode {
    match (global, own) {
        (config::Mode::Bypass, _) | (_, None) => global.into(),
        (_, Some(own)) => own.into(),
    }
}

/// The bits of the reasons that drop.
fn drops(faults: config::Faults) -> u32 {
    let drops = |reason: Reason| match reason {
        Reason::Malformed => faults.malformed == FaultAction::Drop,
        Reason::TableFull => faults.table_full == FaultAction::Drop,
        Reason::NoSettings
        | Reason::Conform
        | Reason::PacketRate
        | Reason::ByteRate
        | Reason::Blocked
        | Reason::Exempt
        | Reason::NonIp
        | Reason::Neighbour
        | Reason::NeighbourRate
        | Reason::NewSource
        | Reason::Martian
        | Reason::Ceiling
        | Reason::Unproven
        | Reason::Total
        | Reason::Established
        | Reason::EstablishedRate
        | Reason::NearLimit
        | Reason::Bypass => reason.drops_by_default(),
    };
    Reason::ALL.into_iter().filter(|reason| drops(*reason)).fold(0, |bits, it| bits | it.bit())
}
