//! What commands said that outranks the file: a mode, and blocks. It holds over reloads and restarts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use ipnet::IpNet;
use log::{info, warn};
use serde::{Deserialize, Serialize};

use super::blocks::{BlockOrder, Blocks, RuntimeBlock};
use super::exemptions::{ExemptOrder, RuntimeExemption, RuntimeExemptions};
use super::penalties::{Penalties, Penalty, PenaltyOrder};
use super::{Agent, Blame, Refused, host_now};
use crate::config::{Config, Mode};
use crate::datapath::Datapath;
use crate::plan;
use crate::sources::{BlockSeen, Sources, View};
use crate::state::{StateDir, StateError};
use crate::status::{Change, utc};

const FILE: &str = "overrides";
const VERSION: u32 = 1;

/// A change of little size, which many may ask for at once.
#[derive(Clone, Debug)]
pub enum Order {
    /// The mode, or none to give the word back to the file.
    Mode(Option<Mode>),
    /// To block a network.
    Block(BlockOrder),
    /// To take that back.
    Unblock(IpNet),
    /// To exempt a network on an interface.
    Exempt(ExemptOrder),
    /// To take that back.
    Unexempt(IpNet, String),
    /// To block a source for a while that an application complains of.
    Penalise(PenaltyOrder),
}

/// An order, and who gave it.
#[derive(Clone, Debug)]
pub struct Asked {
    /// What.
    pub order: Order,
    /// Who, in words.
    pub by: String,
}

/// What came of an order.
#[derive(Clone, Debug)]
pub struct Done {
    /// What changed.
    pub change: Change,
    /// When it ends, if it does.
    pub until: Option<SystemTime>,
    /// The penalty, if it was about one.
    pub penalty: Option<Penalty>,
}

/// A mode that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModeOverride {
    pub(super) mode: Mode,
    pub(super) since: SystemTime,
    pub(super) by: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Overrides {
    pub(super) mode: Option<ModeOverride>,
    pub(super) blocks: Blocks,
    exemptions: RuntimeExemptions,
    /// Not kept over a restart, as the blocks are that they have become.
    penalties: Penalties,
}

/// The same in the state directory.
#[derive(Serialize, Deserialize)]
struct Saved {
    mode: Option<SavedMode>,
    blocks: BTreeMap<String, RuntimeBlock>,
    #[serde(default)]
    exemptions: Vec<(String, String, RuntimeExemption)>,
}

#[derive(Serialize, Deserialize)]
struct SavedMode {
    mode: String,
    since: SystemTime,
    by: String,
}

impl Overrides {
    /// As they were kept, but for blocks that are over.
    pub(super) fn restore(state: &StateDir) -> Self {
        let Some(Saved { mode, blocks, exemptions }) = state.read(FILE, VERSION) else {
            return Self::default();
        };
        let mode = mode.and_then(|SavedMode { mode, since, by }| {
            let known = [Mode::Observe, Mode::Enforce, Mode::Bypass];
            let mode = known.into_iter().find(|known| known.as_str() == mode)?;
            Some(ModeOverride { mode, since, by })
        });
        let blocks = Blocks::restored(blocks);
        let exemptions = RuntimeExemptions::restored(exemptions);
        let mut restored = Self { mode, blocks, exemptions, penalties: Penalties::default() };
        restored.prune(SystemTime::now());
        restored
    }

    fn keep(&self, state: &StateDir) -> Result<(), StateError> {
        let mode = self.mode.as_ref().map(|it| SavedMode {
            mode: it.mode.as_str().to_owned(),
            since: it.since,
            by: it.by.clone(),
        });
        let (blocks, exemptions) = (self.blocks.saved(), self.exemptions.saved());
        state.write(FILE, VERSION, &Saved { mode, blocks, exemptions })
    }

    /// Forgets blocks and exemptions that are over.
    pub(super) fn prune(&mut self, now: SystemTime) {
        self.blocks.prune(now);
        self.exemptions.prune(now);
    }

    /// `file` as it is in force. Observe and bypass hold for every class; enforce is the global mode.
    pub(super) fn over(&self, file: &Config) -> Config {
        let mut config = file.clone();
        if let Some(ModeOverride { mode, .. }) = self.mode {
            config.mode = mode;
            if mode != Mode::Enforce {
                config.classes.iter_mut().for_each(|class| class.mode = None);
            }
        }
        config.blocks.extend(self.blocks.as_config());
        config.exemptions.extend(self.exemptions.as_config(file));
        config
    }

    /// What looks sources up from now on.
    pub(super) fn lookup(
        &self,
        datapath: &Datapath,
        file: &Config,
        config: &Config,
        plan: &plan::Plan,
    ) -> Arc<Sources> {
        Arc::new(Sources::new(datapath.inspector(), self.view(file, config, plan)))
    }

    /// What of `config`, which is in force as `plan`, is about sources.
    fn view(&self, file: &Config, config: &Config, plan: &plan::Plan) -> View {
        let of_file = file.blocks.iter().map(|it| BlockSeen {
            cidr: it.cidr,
            expires: it.expires,
            reason: it.reason.clone(),
            by: None,
            penalty: None,
        });
        let by_command = self.blocks.iter().map(|(cidr, it)| BlockSeen {
            cidr: *cidr,
            expires: it.expires,
            reason: it.reason.clone(),
            by: Some(it.by.clone()),
            penalty: it.penalty,
        });
        View::new(config, plan, of_file, by_command)
    }

    /// For the log of a start: nobody should wonder why the file does not hold.
    pub(super) fn announce(&self) {
        if let Some(ModeOverride { mode, since, by }) = &self.mode {
            warn!(
                "mode {mode} since {}, by {by}, instead of the file's; `limiter-agent mode config` \
                 gives the word back to the file",
                utc(*since)
            );
        }
        let blocks = self.blocks.iter().count();
        if blocks > 0 {
            info!("{blocks} blocks by command hold on");
        }
    }

    /// `room` is how many penalties may hold at once.
    fn take(
        &mut self,
        asked: &Asked,
        file: &Config,
        now: SystemTime,
        room: usize,
    ) -> Result<Done, Refused> {
        let (mut until, mut penalty) = (None, None);
        let (said, warnings) = match &asked.order {
            Order::Mode(mode) => (self.take_mode(*mode, file, now, &asked.by), vec![]),
            Order::Block(order) => {
                let said = self.blocks.add(order, now, &asked.by);
                until = self.blocks.end(order.cidr());
                said
            }
            Order::Unblock(cidr) => {
                self.penalties.pardon(cidr);
                (self.blocks.remove(cidr)?, still_blocked(file, cidr, now))
            }
            Order::Exempt(order) => {
                let (said, end) = self.exemptions.add(order, file, now, &asked.by)?;
                until = end;
                (said, vec![])
            }
            Order::Unexempt(cidr, name) => (self.exemptions.remove(cidr, name)?, vec![]),
            Order::Penalise(order) => {
                let (said, given) = self.penalise(order, file, now, &asked.by, room)?;
                (until, penalty) = (Some(given.until), Some(given));
                (said, vec![])
            }
        };
        let change = Change { at: utc(now), changes: vec![said], warnings, confirm_by: None };
        Ok(Done { change, until, penalty })
    }

    fn penalise(
        &mut self,
        order: &PenaltyOrder,
        file: &Config,
        now: SystemTime,
        by: &str,
        room: usize,
    ) -> Result<(String, Penalty), Refused> {
        let hold = self.blocks.penalties();
        let penalties = &mut self.penalties;
        self.blocks.penalise(order, now, by, || {
            if hold >= room {
                let full = format!(
                    "{hold} sources are penalised at once, and the running agent has room for \
                     {room}; wait for some to end"
                );
                return Err((Blame::Machine, vec![full]));
            }
            Ok(penalties.next(order, &file.application, now))
        })
    }

    fn take_mode(
        &mut self,
        mode: Option<Mode>,
        file: &Config,
        now: SystemTime,
        by: &str,
    ) -> String {
        let before = self.mode.as_ref().map_or(file.mode, |it| it.mode);
        let after = mode.unwrap_or(file.mode);
        let whose = if mode.is_some() { "by command" } else { "as the configuration says" };
        // Since when, and by whom, is told of the first who asked.
        if self.mode.as_ref().map(|it| it.mode) != mode {
            self.mode = mode.map(|mode| ModeOverride { mode, since: now, by: by.to_owned() });
        }
        format!("mode {before} → {after}, {whose}")
    }
}

impl Agent {
    /// Puts all of the orders in force by one switch, or refuses some. One outcome for each.
    pub fn change(&mut self, asked: &[Asked]) -> Vec<Result<Done, Refused>> {
        let (before, now) = (self.overrides.clone(), SystemTime::now());
        self.overrides.prune(now);
        let room = self.room_for_penalties();
        let mut outcomes: Vec<_> =
            asked.iter().map(|it| self.overrides.take(it, &self.file, now, room)).collect();
        if self.overrides != before {
            if let Err(refused) = self.replan() {
                self.overrides = before;
                // Whoever asks for what cannot be is no reason to refuse the others.
                return match asked {
                    [_] => vec![Err(refused)],
                    all => {
                        all.iter().flat_map(|it| self.change(std::slice::from_ref(it))).collect()
                    }
                };
            }
            if let Err(error) = self.overrides.keep(&self.state) {
                warn!("{error}");
                for done in outcomes.iter_mut().flatten() {
                    done.change.warnings.push(format!("in force, but {error}"));
                }
            }
        }
        // Who asks notes what came of it.
        for done in outcomes.iter().flatten() {
            done.change.warnings.iter().for_each(|warning| warn!("{warning}"));
        }
        outcomes
    }

    /// How many penalties may hold at once: they must not take the room that operators need.
    fn room_for_penalties(&self) -> usize {
        const OPERATORS: usize = 256;
        let sizes = self.datapath.sizes();
        let room = usize::try_from(sizes.prefixes.min(sizes.policies) / 2).unwrap_or(0);
        let blocks = self.overrides.blocks.iter().count() - self.overrides.blocks.penalties();
        let file = self.file.prefixes.len() + self.file.exemptions.len() + self.file.blocks.len();
        room.saturating_sub(file + blocks + OPERATORS).min(plan::PENALTIES)
    }

    /// Plans the file anew with what outranks it, for the interfaces that are guarded now: no
    /// interface that came or went meanwhile may be in the way of a kill switch.
    fn replan(&mut self) -> Result<(), Refused> {
        if self.stopped {
            return Err((Blame::Machine, vec!["the agent is stopping".to_owned()]));
        }
        if let Some(pending) = &self.pending {
            // The bank that a rollback falls back to must have the change as well. What was confirmed
            // holds for a moment.
            let confirmed = self.overrides.over(&pending.before);
            let plan = self.plan_for(&confirmed)?;
            self.datapath
                .apply(&plan)
                .map_err(|error| (Blame::Machine, vec![error.to_string()]))?;
        }
        let config = self.overrides.over(&self.file);
        let plan = self.plan_for(&config)?;
        self.switch_to(&plan)?;
        self.config = config;
        self.plan = plan;
        self.publish();
        Ok(())
    }

    /// Lets those see what is in force who ask about sources.
    pub(super) fn publish(&self) {
        self.sources.publish(self.overrides.view(&self.file, &self.config, &self.plan));
    }

    /// What looks sources up, without the agent.
    #[must_use]
    pub fn source_lookup(&self) -> Arc<Sources> {
        Arc::clone(&self.sources)
    }

    fn plan_for(&self, config: &Config) -> Result<plan::Plan, Refused> {
        let request = |error: plan::PlanError| (Blame::Request, vec![error.to_string()]);
        let plan = plan::plan(config, &host_now(self.guarded.clone()), Some(&self.plan.names))
            .map_err(request)?;
        plan.fits(self.datapath.sizes()).map_err(request)?;
        Ok(plan)
    }
}

fn still_blocked(file: &Config, cidr: &IpNet, now: SystemTime) -> Vec<String> {
    let holds = |it: &&crate::config::Block| it.expires.is_none_or(|at| now < at);
    let around = file.blocks.iter().filter(holds).find(|it| it.cidr.contains(cidr));
    let around = around.map(|it| {
        format!("[[block]] {} of the file still blocks it; remove it there and reload", it.cidr)
    });
    around.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
mode = "observe"
[[interface]]
name = "eth0"
[[class]]
name = "rest"
packets = { rate = "10/s", burst = 10 }
mode = "enforce"
"#;

    #[test]
    fn observe_and_bypass_hold_for_all_classes_and_enforce_for_those_without_a_mode() {
        let file = Config::parse("test", TEXT, SystemTime::UNIX_EPOCH).expect("is valid");
        for (mode, of_class) in
            [(Mode::Observe, None), (Mode::Bypass, None), (Mode::Enforce, Some(Mode::Enforce))]
        {
            let mut overrides = Overrides::default();
            overrides.take_mode(Some(mode), &file, SystemTime::UNIX_EPOCH, "a test");
            let config = overrides.over(&file);
            assert_eq!((config.mode, config.classes[0].mode), (mode, of_class));
        }
        assert_eq!(Overrides::default().over(&file), file);
    }

    #[test]
    fn they_are_kept() {
        let directory = tempfile::tempdir().expect("a directory");
        let state = StateDir::open(directory.path());
        let file = Config::parse("test", TEXT, SystemTime::UNIX_EPOCH).expect("is valid");
        let mut overrides = Overrides::restore(&state);
        overrides.take_mode(Some(Mode::Bypass), &file, SystemTime::UNIX_EPOCH, "a test");
        overrides.keep(&state).expect("are written");
        assert_eq!(Overrides::restore(&state), overrides);
    }
}
