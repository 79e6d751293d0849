//! The agent's state for `status` and for metrics.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use limiter_common::Outcome;
use limiter_common::abi::{ABI_VERSION, Count, SampleCount};
use tokio::sync::Mutex;

use super::Agent;
use crate::config::{self, Config, FaultAction, Mode};
use crate::datapath::{DatapathError, LinkKind, Samples};
use crate::events::{Events, Query, Top};
use crate::host::{self, Link};
use crate::limits::Limits;
use crate::memory::map_memory;
use crate::page::Reading;
use crate::plan::Names;
use crate::status::{
    Block, Class, ConfigState, Exemption, FailurePolicy, Interface, Limit, ModeOverride, OwnFlows,
    Pending, Reserve, Status, Table, Total, utc,
};
use crate::telemetry::{Attachment, InterfaceInfo, Snapshot};

const VERSION: &str = env!("CARGO_PKG_VERSION");

impl Agent {
    /// All that one scrape says.
    ///
    /// # Errors
    /// [`DatapathError`] if the kernel's counters cannot be read.
    pub fn snapshot(&self) -> Result<Snapshot, DatapathError> {
        let now = SystemTime::now();
        let holds = |expires: Option<SystemTime>| expires.is_none_or(|at| now < at);
        let config = &self.config;
        Ok(Snapshot {
            packets: self.ledger.rows(&self.datapath.counters()?, &self.plan.names),
            capacities: self.capacities().to_vec(),
            sources: self.sources(),
            pressures: self.sources.pressures(),
            proofs: vec![("handshakes", self.deaf.is_none())],
            connections: self.connections_in_metrics()?,
            own_flows: vec![("tcp", self.deaf.is_none()), ("udp", self.deaf_to_flows.is_none())],
            created: self
                .datapath
                .sources_created()?
                .map(|(family, count)| (family.label(), count))
                .to_vec(),
            interfaces: self
                .attached
                .values()
                .map(|it| InterfaceInfo {
                    interface: it.name.clone(),
                    mode: it.mode.label(),
                    driver: it.driver.clone(),
                })
                .collect(),
            // The host is asked without the agent's lock, and the driver may take its time.
            attachments: Vec::new(),
            discards: Vec::new(),
            samples: self.datapath.sample_count()?,
            events: self.datapath.event_count()?,
            mode: config.mode.as_str(),
            mode_overridden: self.overrides.mode.is_some(),
            pending: self.pending.is_some(),
            rolled_back: self.rolled_back.is_some(),
            failure_policies: failure_policies(config).to_vec(),
            reload_successful: self.last_reload.as_ref().is_none_or(|reload| reload.successful),
            reload_success: self.loaded,
            exemptions: config.exemptions.iter().filter(|it| holds(it.expires)).count(),
            blocks: config.blocks.iter().filter(|it| holds(it.expires)).count(),
            leases: self.leases.count(),
            lease_requests: self.leases.outcomes(),
            version: VERSION,
            abi: ABI_VERSION,
        })
    }

    /// Whether the program is on each interface that is to be guarded, seen on the host's present `links`.
    #[must_use]
    pub fn attachments(&self, links: &[Link]) -> Vec<Attachment> {
        let attached = self.attached.values().map(|it| Attachment {
            interface: it.name.clone(),
            xdp: it.asked.as_str(),
            holds: it.problem(links).is_none(),
        });
        let is_listed = |name: &String| self.attached.values().any(|it| it.name == *name);
        let gone = self.plan.gone.iter().filter(|name| !is_listed(name)).map(|name| {
            let entry = self.config.interfaces.iter().find(|it| it.name.matches(name));
            let xdp = entry.map_or("native", |it| it.xdp.as_str());
            Attachment { interface: name.clone(), xdp, holds: false }
        });
        attached.chain(gone).collect()
    }

    /// What the page's history is made of: a part of a snapshot that costs less.
    ///
    /// # Errors
    /// [`DatapathError`] if the kernel's counters cannot be read.
    pub(crate) fn reading(&self) -> Result<Reading, DatapathError> {
        let packets = self.ledger.rows(&self.datapath.counters()?, &self.plan.names);
        let created = self.datapath.sources_created()?.map(|(_, count)| count).iter().sum();
        Ok(Reading::new(Instant::now(), &packets, created))
    }

    /// What `/v1/status` says, with the [`problems`](Self::problems) on this host.
    ///
    /// # Errors
    /// [`DatapathError`] if the kernel's counters cannot be read.
    pub fn status(&self, problems: Vec<String>) -> Result<Status, DatapathError> {
        let config = &self.config;
        Ok(Status {
            version: VERSION.to_owned(),
            abi: ABI_VERSION,
            pid: std::process::id(),
            started: utc(self.started),
            mode: config.mode.to_string(),
            mode_override: self.overrides.mode.as_ref().map(|it| ModeOverride {
                mode: it.mode.to_string(),
                since: utc(it.since),
                by: it.by.clone(),
            }),
            problems,
            failure_policies: failure_policies(config)
                .map(|(event, action)| FailurePolicy {
                    event: event.to_owned(),
                    action: action.to_owned(),
                })
                .to_vec(),
            interfaces: self.interfaces(),
            reserves: Reserve::all(config),
            classes: classes(config),
            exemptions: exemptions(config),
            blocks: self.blocks(),
            tables: self
                .capacities()
                .map(|(family, capacity)| Table { family: family.to_owned(), capacity })
                .to_vec(),
            new_sources: config.table.new_sources.into(),
            proofs: known_by("handshakes", self.deaf.as_deref()),
            connections: self.connections_in_status()?,
            established: config.established.packets.into(),
            own_flows: OwnFlows {
                tcp: known_by("connect", self.deaf.as_deref()),
                udp: known_by("packets sent by clients", self.deaf_to_flows.as_deref()),
            },
            map_memory_bytes: map_memory(self.datapath.sizes()),
            config: ConfigState {
                path: self.args.config.display().to_string(),
                source: self.text.file.clone(),
                loaded: utc(self.loaded),
                pending: self.pending.as_ref().map(|it| Pending {
                    file: it.file.clone(),
                    until: utc(it.until),
                    seconds_left: it.seconds_left(),
                }),
                rolled_back: self.rolled_back.clone(),
                last_reload: self.last_reload.clone(),
            },
            totals: totals(&self.datapath.counters()?),
        })
    }

    /// The file's, and those by command that are not over; penalties, of which there may be many, apart.
    fn blocks(&self) -> Vec<Block> {
        let now = SystemTime::now();
        let of_file = self.file.blocks.iter().map(|it| Block {
            cidr: it.cidr.to_string(),
            expires: it.expires.map(utc),
            active: it.expires.is_none_or(|at| now < at),
            reason: it.reason.clone(),
            by: None,
        });
        let by_command = self.overrides.blocks.iter();
        let by_command = by_command.filter(|(_, it)| it.holds(now) && it.penalty.is_none());
        let by_command = by_command.map(|(cidr, it)| Block {
            cidr: cidr.to_string(),
            expires: it.expires.map(utc),
            active: true,
            reason: it.reason.clone(),
            by: Some(it.by.clone()),
        });
        of_file.chain(by_command).collect()
    }

    /// What `/v1/limits` says.
    #[must_use]
    pub fn limits(&self) -> Limits {
        Limits::of(&self.config)
    }

    /// The numbers of classes and interfaces.
    #[must_use]
    pub fn names(&self) -> &Names {
        &self.plan.names
    }

    /// The samples of dropped packets.
    #[must_use]
    pub fn samples(&self) -> Arc<Mutex<Samples>> {
        self.datapath.samples()
    }

    /// What came of sampling since the start.
    ///
    /// # Errors
    /// [`DatapathError`] if the kernel's counters cannot be read.
    pub fn sample_count(&self) -> Result<SampleCount, DatapathError> {
        self.datapath.sample_count()
    }

    /// Who is dropped most, and the last events.
    #[must_use]
    pub fn events(&self) -> &Arc<Events> {
        &self.events
    }

    /// Who, or what, is dropped most now.
    ///
    /// # Errors
    /// [`DatapathError`] if the kernel's counters cannot be read.
    pub fn top(&self, query: &Query) -> Result<Top, DatapathError> {
        Ok(self.events.top(query, self.names(), self.datapath.event_count()?.lost))
    }

    /// What came of events since the start.
    ///
    /// # Errors
    /// [`DatapathError`] if the kernel's counters cannot be read.
    pub fn event_count(&self) -> Result<SampleCount, DatapathError> {
        self.datapath.event_count()
    }

    /// Whether the agent has been told to stop.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    fn sources(&self) -> Vec<(&'static str, &'static str, u64)> {
        let tracked = self.datapath.estimate(host::monotonic());
        let rows = tracked.map(|(family, tracked)| {
            [("proven", tracked.proven), ("seen", tracked.unproven)]
                .map(|(standing, value)| (family.label(), standing, value))
        });
        rows.concat()
    }

    /// Of the maps as they were made, whatever the file says now.
    fn capacities(&self) -> [(&'static str, u32); 2] {
        let sizes = self.datapath.sizes();
        [("ipv4", sizes.ipv4_sources), ("ipv6", sizes.ipv6_sources)]
    }

    fn interfaces(&self) -> Vec<Interface> {
        let interfaces = self.attached.values().map(|it| Interface {
            name: it.name.clone(),
            ifindex: it.ifindex,
            mode: it.mode.to_string(),
            driver: it.driver.clone(),
            attachment: match it.kind {
                LinkKind::BpfLink => "link",
                LinkKind::Netlink => "netlink",
            }
            .to_owned(),
        });
        interfaces.collect()
    }
}

/// Event and action of each failure policy.
pub(super) fn failure_policies(config: &Config) -> [(&'static str, &'static str); 3] {
    let action = |action| match action {
        FaultAction::Pass => "pass",
        FaultAction::Drop => "drop",
    };
    [
        ("malformed", action(config.faults.malformed)),
        ("table_full", action(config.faults.table_full)),
        ("on_agent_loss", if config.agent_loss.is_some() { "observe" } else { "keep" }),
    ]
}

/// The mode that a class is in: its own, the global one where it has none, and no other than bypass
/// when that is the global one (as [`plan`](crate::plan::plan) has it).
pub(crate) fn mode(config: &Config, class: &config::Class) -> Mode {
    match config.mode {
        Mode::Bypass => Mode::Bypass,
        Mode::Observe | Mode::Enforce => class.mode.unwrap_or(config.mode),
    }
}

/// What tells the datapath something, or why nothing does.
pub(super) fn known_by(what: &str, error: Option<&str>) -> String {
    error.map_or_else(|| what.to_owned(), |error| format!("unavailable: {error}"))
}

fn classes(config: &Config) -> Vec<Class> {
    let classes = config.classes.iter().map(|class| Class {
        name: class.name.clone(),
        mode: mode(config, class).to_string(),
        packets: class.allowance.packets.map(Limit::from),
        bytes: class.allowance.bytes.map(Limit::from),
        connections: class.allowance.connections,
        new_sources: class.new_sources.map(Limit::from),
        unproven: class.unproven.map(Limit::from),
        total: class.total.map(Limit::from),
    });
    classes.collect()
}

fn exemptions(config: &Config) -> Vec<Exemption> {
    let exemptions = config.exemptions.iter().map(|it| Exemption {
        cidr: it.cidr.to_string(),
        interface: it.interface.as_ref().map(ToString::to_string),
        owner: it.owner.clone(),
        expires: it.expires.map(utc),
        spoofable: it.is_spoofable(),
    });
    exemptions.collect()
}

/// By action and reason, the most packets first.
fn totals(counters: &[(Outcome, Count)]) -> Vec<Total> {
    let mut sums: BTreeMap<(&str, &str), Count> = BTreeMap::new();
    for (outcome, count) in counters {
        let sum = sums.entry((outcome.action.label(), outcome.reason.label())).or_default();
        sum.packets += count.packets;
        sum.bytes += count.bytes;
    }
    let mut totals: Vec<_> = sums
        .into_iter()
        .map(|((action, reason), sum)| Total {
            action: action.to_owned(),
            reason: reason.to_owned(),
            packets: sum.packets,
            bytes: sum.bytes,
        })
        .collect();
    totals.sort_by_key(|total| std::cmp::Reverse(total.packets));
    totals
}

#[cfg(test)]
mod tests {
    use limiter_common::abi::{ClassId, Slot};
    use limiter_common::{Action, Family, Reason};

    use super::*;

    #[test]
    fn totals_add_up_over_interfaces_families_and_classes() {
        let outcome = |slot, class| Outcome {
            slot: Slot(slot),
            family: Family::Ipv4,
            class: ClassId(class),
            reason: Reason::Conform,
            action: Action::Pass,
        };
        let count = |packets| Count { packets, bytes: packets * 60 };
        let other = Outcome { reason: Reason::PacketRate, action: Action::Drop, ..outcome(1, 1) };
        let totals =
            totals(&[(outcome(1, 1), count(2)), (outcome(2, 3), count(3)), (other, count(9))]);
        let brief: Vec<_> =
            totals.iter().map(|it| (&*it.action, &*it.reason, it.packets, it.bytes)).collect();
        assert_eq!(brief, [("drop", "packet_rate", 9, 540), ("pass", "conform", 5, 300)]);
    }
}
