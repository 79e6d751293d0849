//! The agent's state for `status` and for metrics.

use std::collections::BTreeMap;
use std::time::SystemTime;

use limiter_common::Outcome;
use limiter_common::abi::{ABI_VERSION, ClassId, Count};
use limiter_common::time::Tick;

use super::Agent;
use crate::config::{self, Budget, Config, FaultAction, Mode};
use crate::datapath::{DatapathError, LinkKind};
use crate::host;
use crate::memory::map_memory;
use crate::status::{
    Block, Class, ConfigState, Exemption, FailurePolicy, Interface, Limit, OwnFlows, Status, Table,
    Total, utc,
};
use crate::telemetry::{InterfaceInfo, Snapshot};

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
            pressures: self.pressures(),
            proofs: vec![("handshakes", self.deaf.is_none())],
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
            mode: config.mode.as_str(),
            failure_policies: failure_policies(config).to_vec(),
            reload_successful: self.last_reload.as_ref().is_none_or(|reload| reload.successful),
            reload_success: self.loaded,
            exemptions: config.exemptions.iter().filter(|it| holds(it.expires)).count(),
            blocks: config.blocks.iter().filter(|it| holds(it.expires)).count(),
            version: VERSION,
            abi: ABI_VERSION,
        })
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
            problems,
            failure_policies: failure_policies(config)
                .map(|(event, action)| FailurePolicy {
                    event: event.to_owned(),
                    action: action.to_owned(),
                })
                .to_vec(),
            interfaces: self.interfaces(),
            classes: classes(config),
            exemptions: exemptions(config),
            blocks: blocks(config),
            tables: self
                .capacities()
                .map(|(family, capacity)| Table { family: family.to_owned(), capacity })
                .to_vec(),
            new_sources: limit(config.table.new_sources),
            proofs: known_by("handshakes", self.deaf.as_deref()),
            established: limit(config.established.packets),
            own_flows: OwnFlows {
                tcp: known_by("connect", self.deaf.as_deref()),
                udp: known_by("packets sent by clients", self.deaf_to_flows.as_deref()),
            },
            map_memory_bytes: map_memory(self.datapath.sizes()),
            config: ConfigState {
                path: self.args.config.display().to_string(),
                loaded: utc(self.loaded),
                last_reload: self.last_reload.clone(),
            },
            totals: totals(&self.datapath.counters()?),
        })
    }

    fn sources(&self) -> Vec<(&'static str, &'static str, u64)> {
        let tracked = self.datapath.tracked(host::monotonic());
        let rows = tracked.map(|(family, tracked)| {
            [("proven", tracked.proven), ("seen", tracked.unproven)]
                .map(|(standing, value)| (family.label(), standing, value))
        });
        rows.concat()
    }

    /// How much of its shared budgets each class that has any has used up, the most used counts.
    fn pressures(&self) -> Vec<(String, f64)> {
        let now = Tick::from(host::monotonic());
        let mut pressures: BTreeMap<ClassId, f64> = BTreeMap::new();
        for (class, cell, budget) in self.plan.budgets() {
            let debt = self.datapath.budget(cell).since(now).max(0).cast_unsigned();
            #[expect(clippy::cast_precision_loss, reason = "a ratio for people to read")]
            let share = (debt as f64 / budget.tolerance() as f64).min(1.0);
            let most = pressures.entry(class).or_default();
            *most = share.max(*most);
        }
        let classes = self.plan.names.classes().map(|(name, id)| (id, name));
        let labels: BTreeMap<_, _> = classes.chain([(ClassId::NONE, "none")]).collect();
        let named = |(class, share)| labels.get(&class).map(|name| ((*name).to_owned(), share));
        pressures.into_iter().filter_map(named).collect()
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
pub(super) fn failure_policies(config: &Config) -> [(&'static str, &'static str); 2] {
    let action = |action| match action {
        FaultAction::Pass => "pass",
        FaultAction::Drop => "drop",
    };
    [
        ("malformed", action(config.faults.malformed)),
        ("table_full", action(config.faults.table_full)),
    ]
}

/// The mode that a class is in: its own, the global one where it has none, and no other than bypass
/// when that is the global one (as [`plan`](crate::plan::plan) has it).
pub(super) fn mode(config: &Config, class: &config::Class) -> Mode {
    match config.mode {
        Mode::Bypass => Mode::Bypass,
        Mode::Observe | Mode::Enforce => class.mode.unwrap_or(config.mode),
    }
}

/// What tells the datapath something, or why nothing does.
fn known_by(what: &str, error: Option<&str>) -> String {
    error.map_or_else(|| what.to_owned(), |error| format!("unavailable: {error}"))
}

fn classes(config: &Config) -> Vec<Class> {
    let classes = config.classes.iter().map(|class| Class {
        name: class.name.clone(),
        mode: mode(config, class).to_string(),
        packets: class.allowance.packets.map(limit),
        bytes: class.allowance.bytes.map(limit),
        new_sources: class.new_sources.map(limit),
        unproven: class.unproven.map(limit),
        total: class.total.map(limit),
    });
    classes.collect()
}

fn limit(budget: Budget) -> Limit {
    Limit { per_second: budget.rate.per_second(), burst: budget.burst }
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

fn blocks(config: &Config) -> Vec<Block> {
    let now = SystemTime::now();
    let blocks = config.blocks.iter().map(|it| Block {
        cidr: it.cidr.to_string(),
        expires: it.expires.map(utc),
        active: it.expires.is_none_or(|at| now < at),
    });
    blocks.collect()
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
