//! What the running agent knows of single sources: the policy and why, the standing, the buckets. Asked by
//! memory that is shared with the program and from a copy of the settings, so that nobody who asks waits for
//! who changes them, nor is in the way of packets.

mod level;
mod policy;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use ipnet::IpNet;
use limiter_common::abi::{BudgetCell, ClassId};
use limiter_common::known::Standing;
use limiter_common::packet::Source;
use limiter_common::time::{Nanos, Tick};
use limiter_common::units::{Limits, PacketLimit};
use serde::{Deserialize, Serialize};

use crate::config::{Bridge, Config, Mode};
use crate::datapath::{Bucket, Inspector};
use crate::host;
use crate::plan::Plan;
use crate::status::{Exemption, Limit, utc};
use level::Level;
pub(crate) use policy::{BlockSeen, is_among, touches};
use policy::{Nets, PrefixSeen};

/// The longest that anybody is told to wait, in seconds: for a block without an end.
const LONGEST_WAIT: u64 = 86_400;

/// What looks sources up.
pub struct Sources {
    inspector: Arc<Inspector>,
    view: RwLock<Arc<View>>,
}

/// The settings in force, as far as they are about sources.
pub struct View {
    /// `[application]`.
    pub bridge: Bridge,
    rules: Vec<Rule>,
    prefixes: Nets<PrefixSeen>,
    exemptions: Nets<ExemptionSeen>,
    blocks: Nets<BlockSeen>,
    budgets: Vec<(String, BudgetCell, PacketLimit)>,
}

/// A class or a reserve.
struct Rule {
    name: String,
    id: ClassId,
    mode: Mode,
    limits: Limits,
    is_reserve: bool,
}

#[derive(Clone)]
struct ExemptionSeen {
    shown: Exemption,
    expires: Option<SystemTime>,
}

/// What is known of one source: the answer of `GET /v1/sources/{addr}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SourceReport {
    /// The address that was asked for.
    pub address: String,
    /// All that shares its buckets: the address itself, or its IPv6 /64.
    pub source: String,
    /// `proven`, `seen` or `stranger`.
    pub standing: String,
    /// Whether it is blocked.
    pub blocked: bool,
    /// Until when, UTC; none if it is not, or without an end.
    pub blocked_until: Option<String>,
    /// The penalty that it has, if it has one.
    pub penalty: Option<PenaltyReport>,
    /// Whether it is exempt on some interface.
    pub exempt: bool,
    /// Which entries say what applies to it.
    pub policy: PolicyReport,
    /// Its buckets: of each class, and of the reserves in which it has one that is not full.
    pub classes: Vec<ClassReport>,
    /// How much of the budgets that all sources of a class have together is used up.
    pub pressure: BTreeMap<String, f64>,
}

/// A penalty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PenaltyReport {
    /// Its end, UTC.
    pub until: String,
    /// The how manieth in a row it is.
    pub level: u32,
}

/// Which entries say what applies to a source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyReport {
    /// What it comes to, in a sentence.
    pub summary: String,
    /// The `[[prefix]]` that gives it its limits; none if the classes do.
    pub prefix: Option<PrefixReport>,
    /// What exempts it.
    pub exemptions: Vec<Exemption>,
    /// What blocks it.
    pub blocks: Vec<BlockReport>,
}

/// A `[[prefix]]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixReport {
    /// The network.
    pub cidr: String,
    /// The factor; none if it has limits of its own.
    pub scale: Option<u32>,
    /// Whom to ask about it.
    pub owner: Option<String>,
    /// Why it is there.
    pub comment: Option<String>,
}

/// A block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockReport {
    /// The network.
    pub cidr: String,
    /// Its end, UTC; none if it has none.
    pub until: Option<String>,
    /// Why it is there.
    pub reason: Option<String>,
    /// Who asked for it; none if it is the file's.
    pub by: Option<String>,
}

/// A source's bucket in one class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassReport {
    /// The class.
    pub class: String,
    /// `observe`, `enforce` or `bypass`.
    pub mode: String,
    /// What the source may send.
    pub limit: LimitReport,
    /// Packets that it may send at once. Where only bytes are limited: full frames.
    pub remaining: u64,
    /// Bytes that it may send at once; none if they are not limited.
    pub remaining_bytes: Option<u64>,
    /// Seconds until the bucket is full again.
    pub reset: u64,
    /// Seconds after which to try again, with some chance in it; 0 if nothing is refused.
    pub retry_after: u64,
    /// The limit as the field `RateLimit-Policy` has it.
    pub ratelimit_policy: String,
    /// The rest as the field `RateLimit` has it.
    pub ratelimit: String,
}

/// What a source may send in a class.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LimitReport {
    /// In packets; none if they are not limited.
    pub packets: Option<Limit>,
    /// In bytes; none if they are not limited.
    pub bytes: Option<Limit>,
}

impl Sources {
    pub(crate) fn new(inspector: Arc<Inspector>, view: View) -> Self {
        Self { inspector, view: RwLock::new(Arc::new(view)) }
    }

    /// Puts other settings in the place of these.
    pub(crate) fn publish(&self, view: View) {
        *self.view.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(view);
    }

    /// The settings in force.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.view.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Vouches for a source.
    pub fn prove(&self, source: Source) {
        self.inspector.prove(source, host::monotonic());
    }

    /// What is known of `address` now.
    #[must_use]
    pub fn report(&self, address: IpAddr) -> SourceReport {
        let view = self.view();
        let (monotonic, now) = host::clocks();
        let found = self.found(&view, address.to_canonical(), monotonic);
        let pressure = self.pressures_of(&view, monotonic).into_iter().collect();
        view.report(address, &found, monotonic, now, pressure)
    }

    /// How much of its shared budgets each class that has any has used up; the most used counts.
    #[must_use]
    pub fn pressures(&self) -> Vec<(String, f64)> {
        self.pressures_of(&self.view(), host::monotonic())
    }

    fn pressures_of(&self, view: &View, now: Nanos) -> Vec<(String, f64)> {
        let mut pressures: BTreeMap<&str, f64> = BTreeMap::new();
        for (class, cell, budget) in &view.budgets {
            let debt = self.inspector.budget(*cell).since(now.into()).max(0).cast_unsigned();
            #[expect(clippy::cast_precision_loss, reason = "a ratio for people to read")]
            let share = (debt as f64 / budget.tolerance() as f64).min(1.0);
            let most = pressures.entry(class).or_default();
            *most = share.max(*most);
        }
        pressures.into_iter().map(|(class, share)| (class.to_owned(), share)).collect()
    }

    fn found(&self, view: &View, address: IpAddr, now: Nanos) -> Found {
        let source = Source::from(address);
        Found {
            standing: self.inspector.standing(source, now),
            buckets: view.rules.iter().map(|it| self.inspector.bucket(source, it.id)).collect(),
        }
    }
}

/// What the datapath has of a source.
struct Found {
    standing: Standing,
    /// In the order of rules.
    buckets: Vec<Option<Bucket>>,
}

impl View {
    /// Of what is in force. `blocks` are those by command.
    pub(crate) fn new<'a>(
        config: &Config,
        plan: &Plan,
        file_blocks: impl Iterator<Item = BlockSeen>,
        blocks: impl Iterator<Item = BlockSeen> + 'a,
    ) -> Self {
        let settings = &plan.settings;
        let reserves = config.reserves.len();
        let rules = config.rules().enumerate().map(|(order, class)| Rule {
            name: class.name.clone(),
            id: plan.names.class(&class.name),
            mode: match config.mode {
                Mode::Bypass => Mode::Bypass,
                Mode::Observe | Mode::Enforce => class.mode.unwrap_or(config.mode),
            },
            limits: settings.classes.get(order).map_or(class.limits, |it| it.limits),
            is_reserve: order < reserves,
        });
        let labels: BTreeMap<_, _> = plan
            .names
            .classes()
            .map(|(name, id)| (id, name))
            .chain([(ClassId::NONE, "none")])
            .collect();
        let budgets = plan.budgets().filter_map(|(class, cell, budget)| {
            Some(((*labels.get(&class)?).to_owned(), cell, budget))
        });
        let exemptions = config.exemptions.iter().map(|it| {
            let shown = Exemption {
                cidr: it.cidr.to_string(),
                interface: it.interface.as_ref().map(ToString::to_string),
                owner: it.owner.clone(),
                expires: it.expires.map(utc),
                spoofable: it.is_spoofable(),
            };
            (it.cidr, ExemptionSeen { shown, expires: it.expires })
        });
        Self {
            bridge: config.application.clone(),
            rules: rules.collect(),
            prefixes: Nets::new(config.prefixes.iter().map(|it| (it.cidr, it.into()))),
            exemptions: Nets::new(exemptions),
            blocks: Nets::new(file_blocks.chain(blocks).map(|it| (it.cidr, it))),
            budgets: budgets.collect(),
        }
    }

    /// The exemption that concerns a source, or a part of it, at `now`.
    #[must_use]
    pub fn exemption(&self, source: &IpNet, now: SystemTime) -> Option<Exemption> {
        let mut all = self.exemptions.touching(source);
        all.find(|it| holds(it.expires, now)).map(|it| it.shown.clone())
    }

    /// The block around a source that is no penalty of its own, in words.
    #[must_use]
    pub fn block(&self, source: &IpNet, now: SystemTime) -> Option<String> {
        let mut all = self.blocks.around(source);
        let is_other = |it: &&BlockSeen| it.penalty.is_none() && holds(it.expires, now);
        all.find(is_other).map(BlockSeen::in_words)
    }

    /// The penalties at `now`, in order.
    pub(crate) fn penalties(&self, now: SystemTime) -> Vec<&BlockSeen> {
        let holds = |it: &&BlockSeen| it.penalty.is_some() && holds(it.expires, now);
        let mut all: Vec<_> = self.blocks.all().filter(holds).collect();
        all.sort_by_key(|it| it.cidr);
        all
    }

    fn report(
        &self,
        address: IpAddr,
        found: &Found,
        monotonic: Nanos,
        now: SystemTime,
        pressure: BTreeMap<String, f64>,
    ) -> SourceReport {
        let source = policy::source_network(address);
        let exemptions: Vec<_> = self
            .exemptions
            .around(&source)
            .filter(|it| holds(it.expires, now))
            .map(|it| it.shown.clone())
            .collect();
        let blocks: Vec<_> =
            self.blocks.around(&source).filter(|it| holds(it.expires, now)).collect();
        let end = blocks.iter().map(|it| it.expires).reduce(|a, b| Some(a?.max(b?)));
        let penalty = blocks.iter().find_map(|it| Some((it.penalty?, it.expires?)));
        let prefix = self.prefixes.around(&source).next();
        let wait = end.map(|end| {
            end.map_or(LONGEST_WAIT, |end| seconds(end.duration_since(now).unwrap_or_default()))
        });
        let is_exempt = !exemptions.is_empty();
        let summary = policy::summary(&exemptions, end.map(policy::ends), prefix);
        let classes = self.rules.iter().enumerate().zip(&found.buckets);
        let classes = classes.filter_map(|((order, rule), bucket)| {
            let own = (order.checked_sub(self.reserves()))
                .and_then(|order| prefix.and_then(|it| it.limits.get(order)));
            let level = Level::of(own.unwrap_or(&rule.limits), *bucket, Tick::from(monotonic));
            let shown = !rule.is_reserve || level.is_used();
            shown.then(|| rule.report(&level, wait.filter(|_| !is_exempt)))
        });
        SourceReport {
            address: address.to_string(),
            source: source.to_string(),
            standing: standing(found.standing).to_owned(),
            blocked: end.is_some(),
            blocked_until: end.flatten().map(utc),
            penalty: penalty.map(|(level, until)| PenaltyReport { until: utc(until), level }),
            exempt: is_exempt,
            policy: PolicyReport {
                summary,
                prefix: prefix.map(PrefixReport::from),
                blocks: blocks.iter().map(|it| it.report()).collect(),
                exemptions,
            },
            classes: classes.collect(),
            pressure,
        }
    }

    fn reserves(&self) -> usize {
        self.rules.iter().filter(|rule| rule.is_reserve).count()
    }
}

impl Rule {
    /// `blocked` is how many seconds a block around the source lasts.
    fn report(&self, level: &Level, blocked: Option<u64>) -> ClassReport {
        let is_bypass = self.mode == Mode::Bypass;
        let blocked = blocked.filter(|_| !is_bypass);
        let wait = if is_bypass { 0 } else { blocked.unwrap_or(0).max(level.wait()) };
        let remaining = if blocked.is_some() { 0 } else { level.remaining() };
        let (quota, window, reset) = (level.quota(), level.window(), level.reset());
        let name = &self.name;
        ClassReport {
            class: name.clone(),
            mode: self.mode.to_string(),
            limit: level.limit(),
            remaining,
            remaining_bytes: level
                .remaining_bytes()
                .map(|it| if blocked.is_some() { 0 } else { it }),
            reset,
            retry_after: jittered(wait, fastrand::f64()),
            ratelimit_policy: format!("\"{name}\";q={quota};w={window}"),
            ratelimit: format!("\"{name}\";r={remaining};t={}", reset.max(blocked.unwrap_or(0))),
        }
    }
}

/// The wait with up to a quarter more, a minute at most and a second at least, so that those who were
/// refused together do not come back together.
fn jittered(wait: u64, draw: f64) -> u64 {
    if wait == 0 {
        return 0;
    }
    let spread = (wait / 4).clamp(1, 60);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "0 to 60"
    )]
    let more = (draw.clamp(0.0, 1.0) * (spread + 1) as f64) as u64;
    wait + more.min(spread)
}

fn standing(standing: Standing) -> &'static str {
    match standing {
        Standing::PROVEN => "proven",
        Standing::SEEN => "seen",
        _ => "stranger",
    }
}

fn holds(expires: Option<SystemTime>, now: SystemTime) -> bool {
    expires.is_none_or(|at| now < at)
}

/// Rounded up.
fn seconds(duration: Duration) -> u64 {
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_refused_never_waits_for_nothing() {
        assert_eq!([0.0, 0.5, 1.0].map(|draw| jittered(0, draw)), [0, 0, 0]);
        assert_eq!([0.0, 0.6, 1.0].map(|draw| jittered(1, draw)), [1, 2, 2]);
        assert_eq!([0.0, 0.5, 1.0].map(|draw| jittered(100, draw)), [100, 113, 125]);
        assert_eq!(jittered(LONGEST_WAIT, 1.0), LONGEST_WAIT + 60);
    }
}
