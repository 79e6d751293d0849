//! `apply`, `confirm`, and the way back: the configuration in force as text, since the file that it
//! was read from may say something else by now.

use std::path::Path;
use std::time::{Duration, SystemTime};

use log::{error, info, warn};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::overrides::Overrides;
use super::{Agent, Blame, Refused, over_file};
use crate::cli::RunArgs;
use crate::config::{Config, LoadError, read_text};
use crate::state::StateDir;
use crate::status::{Change, utc};

const FILE: &str = "config";
const VERSION: u32 = 1;

/// A configuration as it was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Text {
    /// The file's name, as it was given.
    pub(super) file: String,
    text: String,
}

/// What the state directory knows of configurations.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Record {
    /// The last that was confirmed, or needed no confirmation.
    confirmed: Option<Text>,
    /// One that was put in force and not confirmed: it waits still, or whoever it waited for is dead,
    /// or it was rolled back and the agent's own file still holds it.
    unconfirmed: Option<Unconfirmed>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Unconfirmed {
    text: Text,
    /// Whether a running agent took it back.
    rolled_back: bool,
}

/// A configuration that is taken back unless it is confirmed.
pub(super) struct Pending {
    number: u64,
    pub(super) file: String,
    pub(super) until: SystemTime,
    pub(super) deadline: Instant,
    /// What was in force before, without what outranks it.
    pub(super) before: Config,
    text_before: Text,
}

/// What `apply` is asked for.
#[derive(Clone, Debug)]
pub struct Application {
    /// The file's name, for messages.
    pub file: String,
    /// What it says.
    pub text: String,
    /// How long to wait for `confirm`; none if none is needed.
    pub confirm: Option<Duration>,
}

/// When somebody has to look whether an application was confirmed.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    number: u64,
    /// When.
    pub at: Instant,
}

/// What a start begins with.
pub struct Beginning {
    /// The configuration, without what outranks it.
    pub config: Config,
    pub(super) text: Text,
    pub(super) overrides: Overrides,
    pub(super) record: Record,
    pub(super) state: StateDir,
    pub(super) rolled_back: Option<String>,
}

/// Reads what `args` name, or the last confirmed configuration if one that was not confirmed was in
/// force when the agent before ended.
///
/// # Errors
/// Everything that is wrong with the file, one line each.
pub fn begin(args: &RunArgs) -> Result<Beginning, Vec<String>> {
    let state = StateDir::open(&args.state);
    let record: Record = state.read(FILE, VERSION).unwrap_or_default();
    let (config, text, rolled_back) = if let Some((config, text, why)) = fall_back(args, &record) {
        (config, text, Some(why))
    } else {
        let text = Text::read(&args.config)?;
        (text.parse(args)?, text, None)
    };
    let overrides = Overrides::restore(&state);
    Ok(Beginning { config, text, overrides, record, state, rolled_back })
}

/// The last confirmed configuration and why it is used, if it must be.
fn fall_back(args: &RunArgs, record: &Record) -> Option<(Config, Text, String)> {
    let (confirmed, unconfirmed) = (record.confirmed.as_ref()?, record.unconfirmed.as_ref()?);
    let present = read_text(&args.config).ok();
    if unconfirmed.rolled_back && present.as_ref() == Some(&confirmed.text) {
        return None;
    }
    let file = &unconfirmed.text.file;
    let why = if unconfirmed.rolled_back {
        format!("{file} was applied and rolled back")
    } else {
        format!("{file} was applied and the agent ended before it was confirmed")
    };
    match confirmed.parse(args) {
        Ok(config) => Some((config, confirmed.clone(), why)),
        Err(errors) => {
            error!(
                "{why}, but the last confirmed configuration cannot be used ({}); reading {}",
                errors.join("; "),
                args.config.display()
            );
            None
        }
    }
}

impl Text {
    /// What it says.
    pub(super) fn as_str(&self) -> &str {
        &self.text
    }

    pub(super) fn read(path: &Path) -> Result<Self, Vec<String>> {
        let text = read_text(path).map_err(|error| complaints(&error))?;
        Ok(Self { file: path.display().to_string(), text })
    }

    /// Validates it, with what the command line overrides.
    pub(super) fn parse(&self, args: &RunArgs) -> Result<Config, Vec<String>> {
        let config = Config::parse(&self.file, &self.text, SystemTime::now());
        let config = config.map_err(|errors| complaints(&errors.into()))?;
        Ok(over_file(config, args))
    }
}

impl Pending {
    pub(super) fn seconds_left(&self) -> u64 {
        self.deadline.saturating_duration_since(Instant::now()).as_secs()
    }
}

impl Agent {
    /// Checks a configuration and puts it in force, or leaves everything as it was. If it has to be
    /// confirmed, the caller sees to it that [`Agent::expire`] is called in time.
    ///
    /// # Errors
    /// What is wrong with it, or why it cannot be.
    pub async fn apply(
        &mut self,
        wanted: Application,
        by: &str,
    ) -> Result<(Change, Option<Deadline>), Refused> {
        let outcome = self.try_apply(wanted, by).await;
        if let Err((_, errors)) = &outcome {
            for error in errors {
                error!("apply (by {by}): {error}");
            }
        }
        outcome
    }

    async fn try_apply(
        &mut self,
        Application { file, text, confirm }: Application,
        by: &str,
    ) -> Result<(Change, Option<Deadline>), Refused> {
        let text = Text { file, text };
        let config = text.parse(&self.args).map_err(|errors| (Blame::Request, errors))?;
        self.take_back_pending().await?;
        let warnings = config.warnings.iter().map(ToString::to_string).collect();
        let now = SystemTime::now();
        let mut change = Change { at: utc(now), changes: vec![], warnings, confirm_by: None };
        let before = (self.file.clone(), self.text.clone());
        let deadline = match confirm {
            None => None,
            Some(patience) => {
                // Before the switch: an agent that is killed right after it must know.
                self.note_unconfirmed(&text)?;
                Some((now + patience, Instant::now() + patience))
            }
        };
        let at = deadline.map(|(_, at)| at);
        match self.put_in_force(config, at).await {
            Ok(changes) => change.changes = changes,
            Err(refused) => {
                self.keep_record(None);
                return Err(refused);
            }
        }
        self.loaded = now;
        self.rolled_back = None;
        info!("applied {} (by {by}): {}", text.file, change.changes.join("; "));
        self.log_settings();
        let Some((until, deadline)) = deadline else {
            change.warnings.extend(self.settle(text));
            return Ok((change, None));
        };
        self.applications += 1;
        let number = self.applications;
        warn!("{} is rolled back at {} unless it is confirmed", text.file, utc(until));
        change.confirm_by = Some(utc(until));
        let file = text.file.clone();
        self.text = text;
        let (before, text_before) = before;
        self.pending = Some(Pending { number, file, until, deadline, before, text_before });
        Ok((change, Some(Deadline { number, at: deadline })))
    }

    /// Makes what was applied last for good.
    ///
    /// # Errors
    /// If nothing waits for it.
    pub fn confirm(&mut self, by: &str) -> Result<Change, Refused> {
        let Some(pending) = self.pending.take_if(|it| Instant::now() < it.deadline) else {
            let why = match &self.rolled_back {
                Some(why) => format!("nothing waits to be confirmed: {why}; apply it again"),
                None => {
                    "nothing waits to be confirmed; `apply FILE --confirm 60s` would".to_owned()
                }
            };
            return Err((Blame::Request, vec![why]));
        };
        if let Err(error) = self.datapath.head().confirm() {
            self.pending = Some(pending);
            return Err((Blame::Machine, vec![error.to_string()]));
        }
        info!("{} is confirmed (by {by})", pending.file);
        let changes = vec![format!("{} is confirmed", pending.file)];
        let warnings = self.settle(self.text.clone());
        Ok(Change { at: utc(SystemTime::now()), changes, warnings, confirm_by: None })
    }

    /// Takes back what was not confirmed in time. False if that failed and has to be tried again.
    pub async fn expire(&mut self, deadline: Deadline) -> bool {
        let waits = self.pending.as_ref().is_some_and(|it| it.number == deadline.number);
        if self.stopped || !waits {
            return true;
        }
        match self.take_back_pending().await {
            Ok(()) => true,
            Err((_, errors)) => {
                for error in errors {
                    error!("cannot roll back, trying again: {error}");
                }
                false
            }
        }
    }

    async fn take_back_pending(&mut self) -> Result<(), Refused> {
        let Some(pending) = self.pending.take() else { return Ok(()) };
        match self.put_in_force(pending.before.clone(), None).await {
            Ok(changes) => {
                let why = format!("{} was not confirmed and is rolled back", pending.file);
                warn!("{why}: {}", changes.join("; "));
                let text = std::mem::replace(&mut self.text, pending.text_before);
                let holds = read_text(&self.args.config).is_ok_and(|own| own == text.text);
                self.keep_record(holds.then_some(Unconfirmed { text, rolled_back: true }));
                self.loaded = SystemTime::now();
                self.rolled_back = Some(why);
                self.log_settings();
                Ok(())
            }
            Err(refused) => {
                self.pending = Some(pending);
                Err(refused)
            }
        }
    }

    /// Notes that the configuration in force needs no confirmation. What somebody should know about
    /// that is returned.
    pub(super) fn settle(&mut self, text: Text) -> Vec<String> {
        self.record = Record { confirmed: Some(text.clone()), unconfirmed: None };
        self.text = text;
        let mut warnings: Vec<_> = self.elsewhere().into_iter().collect();
        if let Err(error) = self.state.write(FILE, VERSION, &self.record) {
            warnings.push(error.to_string());
        }
        for warning in &warnings {
            warn!("{warning}");
        }
        warnings
    }

    /// Why a reload has to wait, if it has to.
    pub(super) fn waits(&self) -> Option<String> {
        let Pending { file, until, .. } = self.pending.as_ref()?;
        Some(format!(
            "{file} waits to be confirmed until {}: `limiter-agent confirm` first, or wait for the \
             rollback, or apply another file",
            utc(*until)
        ))
    }

    /// That the configuration in force is not the one that a start or a reload reads.
    fn elsewhere(&self) -> Option<String> {
        let path = self.args.config.display();
        let same = read_text(&self.args.config).is_ok_and(|own| own == self.text.text);
        (!same).then(|| {
            format!(
                "the next start or reload reads {path}, which says something else: copy {} there \
                 to keep it",
                self.text.file
            )
        })
    }

    fn note_unconfirmed(&mut self, text: &Text) -> Result<(), Refused> {
        let mut record = self.record.clone();
        record.unconfirmed = Some(Unconfirmed { text: text.clone(), rolled_back: false });
        let written = self.state.write(FILE, VERSION, &record);
        written.map_err(|error| {
            let why = "an agent that is killed would not know what to go back to";
            (Blame::Machine, vec![format!("{error} ({why}); or apply without --confirm")])
        })?;
        self.record = record;
        Ok(())
    }

    fn keep_record(&mut self, unconfirmed: Option<Unconfirmed>) {
        self.record.unconfirmed = unconfirmed;
        if let Err(error) = self.state.write(FILE, VERSION, &self.record) {
            warn!("{error}");
        }
    }
}

fn complaints(error: &LoadError) -> Vec<String> {
    match error {
        LoadError::Invalid(errors) => errors.as_slice().iter().map(ToString::to_string).collect(),
        LoadError::Read { .. } => {
            vec![format!("{error}; check the path, or start the agent with --config FILE")]
        }
    }
}
