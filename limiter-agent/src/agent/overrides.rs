//! What commands said that outranks the file: a mode, and blocks. It holds over reloads and restarts.

use std::collections::BTreeMap;
use std::time::SystemTime;

use ipnet::IpNet;
use log::{info, warn};
use serde::{Deserialize, Serialize};

use super::blocks::{BlockOrder, Blocks, RuntimeBlock};
use super::{Agent, Blame, Refused, host_now};
use crate::config::{Config, Mode};
use crate::plan;
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
}

/// An order, and who gave it.
#[derive(Clone, Debug)]
pub struct Asked {
    /// What.
    pub order: Order,
    /// Who, in words.
    pub by: String,
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
}

/// The same in the state directory.
#[derive(Serialize, Deserialize)]
struct Saved {
    mode: Option<SavedMode>,
    blocks: BTreeMap<String, RuntimeBlock>,
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
        let Some(Saved { mode, blocks }) = state.read(FILE, VERSION) else {
            return Self::default();
        };
        let mode = mode.and_then(|SavedMode { mode, since, by }| {
            let known = [Mode::Observe, Mode::Enforce, Mode::Bypass];
            let mode = known.into_iter().find(|known| known.as_str() == mode)?;
            Some(ModeOverride { mode, since, by })
        });
        let mut blocks = Blocks::restored(blocks);
        blocks.prune(SystemTime::now());
        Self { mode, blocks }
    }

    fn keep(&self, state: &StateDir) -> Result<(), StateError> {
        let mode = self.mode.as_ref().map(|it| SavedMode {
            mode: it.mode.as_str().to_owned(),
            since: it.since,
            by: it.by.clone(),
        });
        state.write(FILE, VERSION, &Saved { mode, blocks: self.blocks.saved() })
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
        config
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

    fn take(&mut self, asked: &Asked, file: &Config, now: SystemTime) -> Result<Change, Refused> {
        let (said, warnings) = match &asked.order {
            Order::Mode(mode) => (self.take_mode(*mode, file, now, &asked.by), vec![]),
            Order::Block(order) => self.blocks.add(order, now, &asked.by),
            Order::Unblock(cidr) => (self.blocks.remove(cidr)?, still_blocked(file, cidr, now)),
        };
        Ok(Change { at: utc(now), changes: vec![said], warnings, confirm_by: None })
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
    pub fn change(&mut self, asked: &[Asked]) -> Vec<Result<Change, Refused>> {
        let (before, now) = (self.overrides.clone(), SystemTime::now());
        self.overrides.blocks.prune(now);
        let mut outcomes: Vec<_> =
            asked.iter().map(|it| self.overrides.take(it, &self.file, now)).collect();
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
                for change in outcomes.iter_mut().flatten() {
                    change.warnings.push(format!("in force, but {error}"));
                }
            }
        }
        for (asked, outcome) in asked.iter().zip(&outcomes) {
            match outcome {
                Ok(change) => {
                    info!("{} (by {})", change.changes.join("; "), asked.by);
                    change.warnings.iter().for_each(|warning| warn!("{warning}"));
                }
                Err((_, errors)) => warn!("refused {}: {}", asked.by, errors.join("; ")),
            }
        }
        outcomes
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
        Ok(())
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
