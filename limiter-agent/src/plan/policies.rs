//! `[[prefix]]`, `[[exempt]]` and `[[block]]` as one set of networks.
//!
//! The datapath makes one longest-prefix match and looks no further, so each network carries what
//! it inherits from the networks around it: the limits of the longest `[[prefix]]`, the latest end
//! of all blocks, and every exemption.

use std::collections::{BTreeMap, HashMap};
use std::time::SystemTime;

use ipnet::IpNet;
use limiter_common::abi::{Exemptions, LimitsIndex, MAX_INTERFACES, Policy, PolicyId, Slot};
use limiter_common::time::Nanos;
use limiter_common::units::Limits;

use super::{Guarded, Host, Prefix};
use crate::config::Config;

/// The merged networks.
#[derive(Default)]
pub(super) struct Merged {
    pub(super) prefixes: Vec<Prefix>,
    pub(super) policies: Vec<Policy>,
    pub(super) limits: Vec<Limits>,
}

/// What the file says about one network. Times are nanoseconds on the datapath's clock.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
struct Said {
    blocked_until: u64,
    exempt: BTreeMap<Slot, u64>,
    /// The place in the list of prefixes.
    limits: Option<usize>,
}

/// Merges the entries of `config` that have not expired.
pub(super) fn merge(config: &Config, host: &Host, guarded: &[Guarded]) -> Merged {
    let mut merged = Merged::default();
    let mut numbers: HashMap<Said, PolicyId> = HashMap::new();
    let mut around: Vec<(IpNet, Said)> = Vec::new();
    // In this order a network comes right after those around it.
    for (net, own) in said(config, host, guarded) {
        while around.last().is_some_and(|(outer, _)| !outer.contains(&net)) {
            around.pop();
        }
        let whole = around.last().map_or_else(|| own.clone(), |(_, outer)| outer.with(&own));
        let next = PolicyId(u32::try_from(merged.policies.len() + 1).unwrap_or(u32::MAX));
        let policy = *numbers.entry(whole.clone()).or_insert(next);
        if policy == next {
            let limits = whole.limits.and_then(|place| config.prefixes.get(place));
            // A reserve says all about itself: the limits of a prefix are those of classes.
            let reserved = config.reserves.iter().map(|reserve| reserve.class.limits);
            let limits = limits.map_or(LimitsIndex::CLASS, |prefix| {
                merged.rows(&reserved.chain(prefix.limits.iter().copied()).collect::<Vec<_>>())
            });
            merged.policies.push(whole.policy(limits));
        }
        let bits = u32::from(net.prefix_len());
        merged.prefixes.push(Prefix { address: net.network().into(), bits, policy });
        around.push((net, whole));
    }
    merged
}

impl Merged {
    /// The place of these rows, which several policies may share.
    fn rows(&mut self, rows: &[Limits]) -> LimitsIndex {
        let known = self.limits.chunks_exact(rows.len().max(1)).position(|known| known == rows);
        let place = known.map_or(self.limits.len(), |place| place * rows.len());
        if known.is_none() {
            self.limits.extend_from_slice(rows);
        }
        LimitsIndex(u32::try_from(place).unwrap_or(u32::MAX))
    }
}

impl Said {
    /// What holds for a network inside of this one, about which `inner` is said.
    fn with(&self, inner: &Self) -> Self {
        let mut whole = self.clone();
        whole.blocked_until = whole.blocked_until.max(inner.blocked_until);
        whole.limits = inner.limits.or(whole.limits);
        for (slot, until) in &inner.exempt {
            whole.exempt_until(*slot, *until);
        }
        whole
    }

    fn exempt_until(&mut self, slot: Slot, until: u64) {
        let known = self.exempt.entry(slot).or_insert(until);
        *known = until.max(*known);
    }

    fn policy(&self, limits: LimitsIndex) -> Policy {
        let mut exempt = Exemptions::NONE;
        for (slot, until) in &self.exempt {
            exempt.extend(*slot, Nanos(*until));
        }
        Policy::new(Nanos(self.blocked_until), exempt, limits)
    }
}

/// What is said about each network by itself.
fn said(config: &Config, host: &Host, guarded: &[Guarded]) -> BTreeMap<IpNet, Said> {
    let mut said: BTreeMap<IpNet, Said> = BTreeMap::new();
    for (place, prefix) in config.prefixes.iter().enumerate() {
        said.entry(prefix.cidr).or_default().limits = Some(place);
    }
    for block in &config.blocks {
        if let Some(until) = until(block.expires, host) {
            let blocked = &mut said.entry(block.cidr).or_default().blocked_until;
            *blocked = until.max(*blocked);
        }
    }
    for exemption in &config.exemptions {
        let Some(until) = until(exemption.expires, host) else { continue };
        let slots: Vec<_> = match &exemption.interface {
            Some(pattern) => {
                let named = guarded.iter().filter(|known| pattern.matches(&known.name));
                named.map(|known| known.slot).collect()
            }
            None => (0..).map(Slot).take(MAX_INTERFACES).collect(),
        };
        if slots.is_empty() {
            continue;
        }
        let own = said.entry(exemption.cidr).or_default();
        for slot in slots {
            own.exempt_until(slot, until);
        }
    }
    said
}

/// The datapath's time of an expiry, never if there is none; `None` if it has passed.
fn until(expires: Option<SystemTime>, host: &Host) -> Option<u64> {
    let Some(expires) = expires else { return Some(Nanos::NEVER.0) };
    let left = expires.duration_since(host.wall).ok().filter(|left| !left.is_zero())?;
    let left = u64::try_from(left.as_nanos()).unwrap_or(u64::MAX);
    Some(host.monotonic.0.saturating_add(left))
}
