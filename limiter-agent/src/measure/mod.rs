//! What sources send in classes that are observed: the distributions that limits are chosen by.
//!
//! The datapath counts all packets of a sample of sources, chosen by the keyed hash, so that nobody can see
//! to it that they are in it or not. Once a second the counts are read here; each source's highest second
//! and highest ten seconds of an hour go into the distributions of its class, apart for sources that have
//! proven their address and for others. PURE: the clock and the kernel are arguments.

mod advice;
mod command;
mod distribution;
mod hour;
mod report;
#[cfg(test)]
mod tests;
mod write;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, SystemTime};

use limiter_common::abi::{ClassId, WATCHED, WatchedCount, WatchedSource};

use self::hour::{Hour, Live};
use crate::config::{Config, Match, Pattern};

pub use advice::{Advice, ClassAdvice, Outcome, Terms, Why};
pub use command::recommend;
pub use distribution::{Distribution, Followed, Quantiles};
pub use hour::{ClassHour, Group, Top};
pub use report::{ClassReport, GroupReport, Heavy, Report, address, source_text};
pub use write::{Measured, Recommendation, Refusal, Request, recommendation};

/// The least time between two readings: what is sent in one is never less than what is sent in a second
/// within it.
pub const WINDOW: Duration = Duration::from_secs(1);
/// Counts over a longer time than that say nothing of a second, and are left out.
const LONGEST_WINDOW: Duration = Duration::from_secs(2);
/// An hour of measuring.
const HOUR: Duration = Duration::from_hours(1);
/// So many of them are kept, the present one included.
pub const HOURS: usize = 24;
/// So many windows are what a source sends for long.
const SUSTAINED: u32 = 10;
/// A source that was silent for so many windows counts as new: after that time the datapath may have
/// forgotten it (see [`Filter::lasts`](limiter_common::known::Filter::lasts)).
const ABSENT: u32 = 4;
/// When the map is three quarters full, those make room that were silent for so many windows, and those of
/// a single packet after less.
const SILENT: u32 = 60;
const SILENT_SINGLE: u32 = 10;
/// The smallest sample is one source in 2²⁰.
const SMALLEST_SAMPLE: u32 = 20;

/// All that has been measured.
#[derive(Debug)]
pub struct Measure {
    /// One source in 2 to the power of this is watched.
    sample: u32,
    /// Windows since the sample could have been larger.
    roomy: u32,
    sources: HashMap<WatchedSource, Live>,
    /// The present one last.
    hours: VecDeque<Hour>,
    rules: Vec<Rule>,
    since: SystemTime,
    unwatched: u64,
}

/// How packets come to a class: what is measured is of no use under another.
type Rule = (String, Option<Match>, Option<Pattern>, bool);

/// What the datapath says, and the host.
pub struct Reading<'a> {
    /// Each watched source and what it has sent since it is watched.
    pub counts: &'a mut dyn Iterator<Item = (WatchedSource, WatchedCount)>,
    /// How long after the reading before.
    pub elapsed: Duration,
    /// The classes that are observed.
    pub observed: &'a BTreeSet<ClassId>,
    /// Whether a source was not taken for want of room.
    pub is_full: bool,
    /// Packets that were not counted for that, since the start.
    pub unwatched: u64,
    /// Whether a source is proven.
    pub is_proven: &'a dyn Fn(&WatchedSource) -> bool,
    /// Whether a source has limits of its own, apart from its class.
    pub is_apart: &'a dyn Fn(&WatchedSource) -> bool,
    /// Whether a source is of the sample with this mask.
    pub is_sampled: &'a dyn Fn(&WatchedSource, u32) -> bool,
}

/// What the datapath is to do.
#[derive(Debug, PartialEq, Eq)]
pub struct Orders {
    /// Who is watched no longer.
    pub forget: Vec<WatchedSource>,
    /// Which sample is watched.
    pub mask: u32,
}

impl Measure {
    /// Nothing yet, for this configuration.
    #[must_use]
    pub fn new(config: &Config, now: SystemTime) -> Self {
        Self {
            sample: 0,
            roomy: 0,
            sources: HashMap::new(),
            hours: VecDeque::new(),
            rules: rules(config),
            since: now,
            unwatched: 0,
        }
    }

    /// Another configuration is in force. What was measured holds on, unless packets come to the classes in
    /// another way; then false is returned and all begins anew.
    pub fn goes_on_under(&mut self, config: &Config, now: SystemTime) -> bool {
        for live in self.sources.values_mut() {
            live.ask_again();
        }
        let rules = rules(config);
        let goes_on = rules == self.rules;
        if !goes_on {
            let sample = self.sample;
            *self = Self { sample, ..Self::new(config, now) };
        }
        goes_on
    }

    /// Takes a reading in.
    pub fn read(&mut self, reading: &mut Reading<'_>) -> Orders {
        let is_second = (WINDOW..=LONGEST_WINDOW).contains(&reading.elapsed);
        self.unwatched = reading.unwatched;
        self.begin_hour(reading.elapsed);
        let mut sums: BTreeMap<ClassId, Sums> = BTreeMap::new();
        let mut forget = Vec::new();
        for class in reading.observed {
            sums.entry(*class).or_default();
        }
        for (source, count) in &mut *reading.counts {
            let Some(sums) = sums.get_mut(&source.class) else {
                forget.push(source);
                continue;
            };
            let live = self.sources.entry(source).or_default();
            let sent = live.window(count, is_second);
            if sent.packets == 0 {
                continue;
            }
            live.learn(|| (reading.is_proven)(&source), || (reading.is_apart)(&source));
            sums.packets += sent.packets;
            sums.unproven += if live.is_proven { 0 } else { sent.packets };
            sums.new += u64::from(sent.is_new);
        }
        let factor = 1 << self.sample;
        if let Some(hour) = self.hours.back_mut().filter(|_| is_second) {
            for (class, sums) in sums {
                hour.class(class).window(reading.elapsed, sums.times(factor));
            }
        }
        self.make_room(reading, &mut forget);
        for source in &forget {
            self.finish(source);
        }
        Orders { forget, mask: (1 << self.sample) - 1 }
    }

    /// What is known of each class, over all hours.
    #[must_use]
    pub fn classes(&self) -> BTreeMap<ClassId, ClassHour> {
        let mut classes: BTreeMap<ClassId, ClassHour> = BTreeMap::new();
        for (class, measured) in self.hours.iter().flat_map(Hour::classes) {
            classes.entry(*class).or_default().add(measured);
        }
        for (source, live) in &self.sources {
            classes.entry(source.class).or_default().record(source, live);
        }
        classes
    }

    /// Since when.
    #[must_use]
    pub fn since(&self) -> SystemTime {
        self.since
    }

    /// One source in how many is watched.
    #[must_use]
    pub fn one_in(&self) -> u64 {
        1 << self.sample
    }

    /// How many sources, each in a class, are watched.
    #[must_use]
    pub fn watched(&self) -> usize {
        self.sources.len()
    }

    /// Packets of sources that there was no room to watch.
    #[must_use]
    pub fn unwatched(&self) -> u64 {
        self.unwatched
    }

    /// Begins an hour if the present one is over: each source starts again, with what it sent so far
    /// recorded.
    fn begin_hour(&mut self, elapsed: Duration) {
        if let Some(hour) = self.hours.back_mut()
            && hour.lasts_still(elapsed)
        {
            return;
        }
        if let Some(hour) = self.hours.back_mut() {
            for (source, live) in &mut self.sources {
                hour.class(source.class).record(source, live);
                live.begin_hour();
            }
        }
        self.hours.push_back(Hour::default());
        if self.hours.len() > HOURS {
            self.hours.pop_front();
        }
    }

    /// Sees to it that there is room for others: first at the expense of the silent, then by a smaller
    /// sample. Where there has been much room for a minute, the sample grows.
    fn make_room(&mut self, reading: &Reading<'_>, forget: &mut Vec<WatchedSource>) {
        let most = self.sources.len();
        if reading.is_full {
            self.sample = (self.sample + 1).min(SMALLEST_SAMPLE);
            self.roomy = 0;
        } else if self.sample > 0 && most < WATCHED / 4 {
            self.roomy += 1;
            if self.roomy >= SILENT {
                self.sample -= 1;
                self.roomy = 0;
            }
        } else {
            self.roomy = 0;
        }
        if most <= WATCHED / 4 * 3 && !reading.is_full {
            return;
        }
        let mask = (1 << self.sample) - 1;
        let gone = self.sources.iter().filter(|(source, live)| {
            live.is_silent(SILENT, SILENT_SINGLE) || !(reading.is_sampled)(source, mask)
        });
        forget.extend(gone.map(|(source, _)| *source));
    }

    /// Records a source that is watched no longer.
    fn finish(&mut self, source: &WatchedSource) {
        if let Some(live) = self.sources.remove(source)
            && let Some(hour) = self.hours.back_mut()
        {
            hour.class(source.class).record(source, &live);
        }
    }
}

/// What a class's sources sent together in a window.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    /// Packets of all.
    pub(crate) packets: u64,
    /// Of those that have proven nothing.
    pub(crate) unproven: u64,
    /// Sources that sent again, or for the first time.
    pub(crate) new: u64,
}

impl Sums {
    /// Of as many times the sources.
    const fn times(self, factor: u64) -> Self {
        let Self { packets, unproven, new } = self;
        Self { packets: packets * factor, unproven: unproven * factor, new: new * factor }
    }
}

fn rules(config: &Config) -> Vec<Rule> {
    let reserves = config.reserves.iter().map(|it| {
        (it.class.name.clone(), it.class.matcher.clone(), it.interface.clone(), it.from_link)
    });
    let classes =
        config.classes.iter().map(|it| (it.name.clone(), it.matcher.clone(), None, false));
    reserves.chain(classes).collect()
}
