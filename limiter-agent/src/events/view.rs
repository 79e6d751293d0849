//! Rankings and events in words: what `/v1/top` and `/v1/events` say.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use limiter_common::abi::{ClassId, Event, Slot};
use limiter_common::time::Nanos;
use limiter_common::{Action, Family, Reason};
use serde::{Deserialize, Serialize};

use super::decode::Headers;
use super::keys::{address, protocol};
use super::sketch::{Amount, Tally};
use super::windows::{Key, Ranking};
use super::{By, MOST_ENTRIES, Of, Query, Span};
use crate::plan::Names;
use crate::status::utc;

/// Who, or what, is dropped most.
///
/// All numbers are estimates from a sample. The true ones lie within the error that is stated beside them,
/// but for one in 370.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Top {
    /// When this was so, UTC.
    pub at: String,
    /// What is ranked.
    pub of: Of,
    /// In which order.
    pub by: By,
    /// Over which time, at most.
    pub window: Span,
    /// What the window covers now, in seconds.
    pub window_seconds: f64,
    /// Events in the window: packets that were looked at.
    pub events: u64,
    /// Events since the start that were lost because nobody read them in time. Later ones stand for them.
    pub events_lost: u64,
    /// All entries together, also those that are not listed.
    pub total: Totals,
    /// Entries there are; those listed are some of them.
    pub known: usize,
    /// The entries, the most first.
    pub entries: Vec<TopEntry>,
}

/// An estimate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Packets that were dropped, or would have been.
    pub packets: u64,
    /// How far that may be off.
    pub packets_error: u64,
    /// Bytes of their frames.
    pub bytes: u64,
    /// How far that may be off.
    pub bytes_error: u64,
    /// Of the packets: those that were dropped.
    pub dropped: u64,
    /// Of the packets: those that would have been, in enforce mode.
    pub would_drop: u64,
    /// Packets over what the window covers.
    pub packets_per_second: f64,
    /// The same for bytes.
    pub bytes_per_second: f64,
}

/// One source, prefix, port or class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TopEntry {
    /// Its name: `192.0.2.1`, `2001:db8::/64`, `192.0.2.0/24`, `udp/53`, `dns`.
    pub what: String,
    /// How much.
    #[serde(flatten)]
    pub totals: Totals,
    /// The class of its last packet that was looked at.
    pub class: String,
    /// The reason of that.
    pub reason: String,
    /// Where that came in.
    pub interface: String,
}

/// One packet that was dropped, would have been, or soon will be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventLine {
    /// When, UTC (RFC 3339, nanoseconds).
    pub time: String,
    /// Where it came in.
    pub interface: String,
    /// Its address family.
    pub family: String,
    /// Its class; `none` where no class was consulted.
    pub class: String,
    /// Why.
    pub reason: String,
    /// `drop`, `would_drop`, or `pass` for a warning.
    pub action: String,
    /// Its source address; none of what is not IP.
    pub source: Option<String>,
    /// `udp`, `tcp`, …; none of what is not IP, or malformed.
    pub protocol: Option<String>,
    /// The sender's port, if there is one.
    pub source_port: Option<u16>,
    /// This host's port, if there is one.
    pub destination_port: Option<u16>,
    /// The frame's length in bytes.
    pub length: u32,
    /// For how many packets it stands.
    pub weight: u32,
}

impl Top {
    pub(super) fn new(
        query: &Query,
        ranking: Ranking<Key>,
        labels: &Labels,
        now: Nanos,
        lost: u64,
    ) -> Self {
        let covered = Duration::from_nanos(now.0.saturating_sub(ranking.since.0));
        let seconds = covered.as_secs_f64().max(0.001);
        let known = ranking.entries.len();
        let entries = ranking.entries.into_iter().skip(query.offset);
        let entries = entries.take(query.limit.min(MOST_ENTRIES)).map(|(key, tally)| TopEntry {
            what: match key {
                Key::Source(it) => it.to_string(),
                Key::Prefix(it) => it.to_string(),
                Key::Port(it) => it.to_string(),
                Key::Class(it) => labels.class(it),
            },
            totals: Totals::new(&tally, seconds),
            class: labels.class(tally.last.class),
            reason: reason(tally.last.reason).to_owned(),
            interface: labels.interface(tally.last.slot),
        });
        Self {
            at: utc(SystemTime::now()),
            of: query.of,
            by: query.by,
            window: query.window,
            window_seconds: seconds,
            events: ranking.events,
            events_lost: lost,
            total: Totals::new(&ranking.total, seconds),
            known,
            entries: entries.collect(),
        }
    }
}

impl Totals {
    fn new(tally: &Tally, seconds: f64) -> Self {
        let Amount { packets, bytes } = tally.sum();
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let rate = |count: u64| count as f64 / seconds;
        Self {
            packets,
            packets_error: tally.error(By::Packets),
            bytes,
            bytes_error: tally.error(By::Bytes),
            dropped: tally.dropped.packets,
            would_drop: tally.would_drop.packets,
            packets_per_second: rate(packets),
            bytes_per_second: rate(bytes),
        }
    }
}

/// The names of numbers.
pub struct Labels {
    slots: HashMap<Slot, String>,
    classes: HashMap<ClassId, String>,
}

impl Labels {
    /// Of classes and interfaces.
    #[must_use]
    pub fn new(names: &Names) -> Self {
        Self {
            slots: names.slots().map(|(name, slot)| (slot, name.to_owned())).collect(),
            classes: names.classes().map(|(name, class)| (class, name.to_owned())).collect(),
        }
    }

    /// An event in words; `clocks` are the monotonic and the wall clock at one instant, not before it.
    #[must_use]
    pub fn event(&self, event: &Event, clocks: (Nanos, SystemTime)) -> EventLine {
        let age = Duration::from_nanos(clocks.0.0.saturating_sub(event.at.0));
        let headers = Headers::of(event);
        let outcome = event.outcome;
        let action = Action::ALL.get(usize::from(outcome.action));
        let family = Family::ALL.get(usize::from(outcome.family));
        EventLine {
            time: humantime::format_rfc3339_nanos(clocks.1 - age).to_string(),
            interface: self.interface(outcome.slot),
            family: family.map_or(UNKNOWN, |it| it.label()).to_owned(),
            class: self.class(outcome.class),
            reason: reason(outcome.reason).to_owned(),
            action: action.map_or(UNKNOWN, |it| it.label()).to_owned(),
            source: headers.source.map(address),
            protocol: headers.protocol.map(protocol),
            source_port: headers.ports.map(|it| it.source),
            destination_port: headers.ports.map(|it| it.destination),
            length: event.length,
            weight: event.weight,
        }
    }

    fn class(&self, class: u16) -> String {
        self.classes.get(&ClassId(class.into())).map_or(NO_CLASS, |it| it).to_owned()
    }

    fn interface(&self, slot: u16) -> String {
        self.slots.get(&Slot(slot.into())).map_or(UNKNOWN, |it| it).to_owned()
    }
}

fn reason(number: u8) -> &'static str {
    Reason::ALL.get(usize::from(number)).map_or(UNKNOWN, |it| it.label())
}

/// What metrics call an interface that is not configured.
const UNKNOWN: &str = "unknown";
/// What metrics call no class.
const NO_CLASS: &str = "none";
