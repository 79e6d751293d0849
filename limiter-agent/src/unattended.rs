//! What `status` and `mode` say and do where no agent answers, from what one left pinned.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use limiter_common::abi::{self, ABI_VERSION, Count};
use serde::Serialize;

use crate::datapath::{self, DatapathError, KnownRemains, Remains};
use crate::host;
use crate::status::Total;

/// The limits that hold although no agent runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unattended {
    /// Always false: an agent's status has its `pid` instead.
    pub agent: bool,
    /// The version of the layout shared with the kernel.
    pub abi: u32,
    /// The interfaces with a pinned attachment.
    pub interfaces: Vec<String>,
    /// The mode in force; none if the maps are of another version than this program.
    pub mode: Option<String>,
    /// In how many seconds other settings hold, if so: those that were confirmed, or none that drop.
    pub seconds_left: Option<u64>,
    /// The names of the classes that have counters.
    pub classes: Vec<String>,
    /// Packets since the maps were made, by what was done and why.
    pub totals: Vec<Total>,
}

impl Unattended {
    /// What is in the pins at `directory`; none if there is nothing.
    ///
    /// # Errors
    /// [`DatapathError`] when a map cannot be read.
    pub fn look(directory: &Path) -> Result<Option<Self>, DatapathError> {
        let Some(Remains { interfaces, abi, known }) = datapath::remains(directory)? else {
            return Ok(None);
        };
        let mut unattended = Self {
            agent: false,
            abi,
            interfaces,
            mode: None,
            seconds_left: None,
            classes: Vec::new(),
            totals: Vec::new(),
        };
        if let Some(known) = known {
            unattended.know(&known);
        }
        Ok(Some(unattended))
    }

    fn know(&mut self, known: &KnownRemains) {
        let mode = match known.settings.mode {
            abi::Mode::OBSERVE => "observe",
            abi::Mode::ENFORCE => "enforce",
            _ => "bypass",
        };
        self.mode = Some(mode.to_owned());
        let left = |until: limiter_common::time::Nanos| {
            until.0.saturating_sub(host::monotonic().0) / 1_000_000_000
        };
        self.seconds_left = known.until.map(left);
        self.classes = known.names.classes().map(|(name, _)| name.to_owned()).collect();
        let mut totals = BTreeMap::<_, Count>::new();
        for (outcome, count) in &known.counters {
            let total = totals.entry((outcome.action.label(), outcome.reason.label())).or_default();
            total.packets += count.packets;
            total.bytes += count.bytes;
        }
        let total = |((action, reason), count): ((&str, &str), Count)| Total {
            action: action.to_owned(),
            reason: reason.to_owned(),
            packets: count.packets,
            bytes: count.bytes,
        };
        self.totals = totals.into_iter().map(total).collect();
    }
}

impl fmt::Display for Unattended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "no agent answers; what one left pinned goes on")?;
        writeln!(f, "interfaces  {}", self.interfaces.join(", "))?;
        let Some(mode) = &self.mode else {
            return writeln!(
                f,
                "its maps are of ABI {}, which this limiter-agent (ABI {ABI_VERSION}) cannot read",
                self.abi
            );
        };
        writeln!(f, "mode        {mode}")?;
        if let Some(seconds) = self.seconds_left {
            writeln!(f, "            for {seconds} s, unless an agent is started")?;
        }
        writeln!(f, "classes     {}", self.classes.join(", "))?;
        for Total { action, reason, packets, .. } in &self.totals {
            writeln!(f, "{action:<11} {reason:<16} {packets:>16}")?;
        }
        Ok(())
    }
}
