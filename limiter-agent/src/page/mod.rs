//! The page at `/`, for those without Grafana: what is dropped and why, on any browser.
//!
//! HTML and SVG are made here, from a [`View`] that was taken in one go, so that the agent is not kept while
//! a page is made. The page loads its style sheet and a script from the same place, and nothing else; without
//! the script it works, too.

mod chart;
mod history;
mod render;
#[cfg(test)]
mod tests;
mod words;

use std::time::{Duration, SystemTime};

pub use history::{History, Line, PERIOD, Rate, Reading, Traffic};
pub use render::render;

use crate::events::Top;
use crate::status::Status;

/// The style sheet.
pub const STYLE: &str = include_str!("style.css");
/// The script, which renews the page in place so that focus and scroll stay.
pub const SCRIPT: &str = include_str!("script.js");
/// How often a page renews itself.
pub const REFRESH: Duration = Duration::from_secs(2);

/// Over which time charts go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Range {
    /// Five minutes.
    Short,
    /// A quarter of an hour.
    Middle,
    /// An hour.
    #[default]
    Long,
}

impl Range {
    /// All of them, the shortest first.
    pub const ALL: [Self; 3] = [Self::Short, Self::Middle, Self::Long];

    /// As the address has it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Short => "5m",
            Self::Middle => "15m",
            Self::Long => "1h",
        }
    }

    /// In words.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Short => "5 minutes",
            Self::Middle => "15 minutes",
            Self::Long => "hour",
        }
    }

    /// How long that is.
    #[must_use]
    pub const fn duration(self) -> Duration {
        match self {
            Self::Short => Duration::from_mins(5),
            Self::Middle => Duration::from_mins(15),
            Self::Long => Duration::from_hours(1),
        }
    }
}

/// What somebody wants to see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Request {
    /// Over which time.
    pub range: Range,
    /// Whether the page stays as it is.
    pub paused: bool,
}

/// All that one page shows.
#[derive(Clone, Debug)]
pub struct View {
    /// The host's name.
    pub host: String,
    /// When it was taken.
    pub at: SystemTime,
    /// What the agent does.
    pub status: Status,
    /// How full the tables are.
    pub tables: Vec<TableUse>,
    /// How much of a shared budget is used up, from 0 to 1; as in `limiter_pressure`.
    pub pressures: Vec<(String, f64)>,
    /// Exemptions that hold now.
    pub exemptions: usize,
    /// Blocks that hold now.
    pub blocks: usize,
    /// Rates.
    pub traffic: Traffic,
    /// Which sources are dropped most.
    pub top: Top,
}

/// How full a table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableUse {
    /// `ipv4` or `ipv6`.
    pub family: &'static str,
    /// Buckets it can hold.
    pub capacity: u32,
    /// Buckets of proven sources.
    pub proven: u64,
    /// Of sources that were seen.
    pub seen: u64,
}
