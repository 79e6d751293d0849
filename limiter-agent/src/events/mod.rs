//! What the datapath shows of what it drops: who is hit most by it now, and the last events.
//!
//! The datapath samples by itself, whether or not anybody asks. One task reads its ring ten times a second
//! into [`Events`]. Memory is bounded whatever arrives: 24 sketches of 1792 keys
//! (two windows of two generations, three dimensions, by packets and by bytes), less than 5 MiB in all; the
//! last [`KEPT`] events, 128 KiB; and [`AHEAD`] events, 512 KiB, for all who follow.

mod decode;
mod keys;
mod sketch;
mod view;
mod windows;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use clap::ValueEnum;
use limiter_common::abi::Event;
use limiter_common::time::Nanos;
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;
use tokio::time::{MissedTickBehavior, interval};

use crate::datapath::EventRing;
use crate::host;
use crate::plan::Names;

use decode::Headers;
use windows::Window;

pub use view::{EventLine, Labels, Top, TopEntry, Totals};

/// Events that are kept for who asks later.
pub const KEPT: usize = 1024;
/// How far one who follows may fall behind, in events: what is beyond that is missed, and counted.
pub const AHEAD: usize = 4096;
/// Entries of one answer, at most.
pub const MOST_ENTRIES: usize = 1000;

/// How often the ring is read. It holds about a second's events.
const PERIOD: Duration = Duration::from_millis(100);

/// What is ranked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Of {
    /// Sources, as limits know them: an IPv4 address, an IPv6 /64
    #[default]
    Sources,
    /// IPv4 /24 and IPv6 /48
    Prefixes,
    /// Protocols and ports of this host
    Ports,
    /// Classes
    Classes,
}

/// In which order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum By {
    /// The most packets first
    #[default]
    Packets,
    /// The most bytes first
    Bytes,
}

/// Over which time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub enum Span {
    /// The last 5 to 10 seconds
    #[default]
    #[serde(rename = "10s")]
    #[value(name = "10s")]
    Short,
    /// The last 30 to 60 seconds
    #[serde(rename = "60s")]
    #[value(name = "60s")]
    Long,
}

impl Of {
    /// As the API spells it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Sources => "sources",
            Self::Prefixes => "prefixes",
            Self::Ports => "ports",
            Self::Classes => "classes",
        }
    }
}

impl By {
    /// As the API spells it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Packets => "packets",
            Self::Bytes => "bytes",
        }
    }
}

impl Span {
    /// As the API spells it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Short => "10s",
            Self::Long => "60s",
        }
    }
}

/// What `/v1/top` is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Query {
    /// What is ranked.
    pub of: Of,
    /// In which order.
    pub by: By,
    /// Over which time.
    pub window: Span,
    /// How many entries, up to [`MOST_ENTRIES`].
    pub limit: usize,
    /// How many to leave out at the beginning.
    pub offset: usize,
}

impl Default for Query {
    fn default() -> Self {
        let (of, by, window) = (Of::default(), By::default(), Span::default());
        Self { of, by, window, limit: 20, offset: 0 }
    }
}

/// The events of a running agent.
pub struct Events {
    state: Mutex<State>,
    followers: broadcast::Sender<Event>,
}

struct State {
    short: Window,
    long: Window,
    recent: VecDeque<Event>,
}

impl Events {
    /// Nothing has happened yet. The ring is read by a task of the current tokio runtime that ends with it.
    #[must_use]
    pub fn start(ring: Option<EventRing>, now: Nanos) -> Arc<Self> {
        let state = State {
            short: Window::new(Duration::from_secs(10), now),
            long: Window::new(Duration::from_mins(1), now),
            recent: VecDeque::new(),
        };
        let followers = broadcast::channel(AHEAD).0;
        let events = Arc::new(Self { state: Mutex::new(state), followers });
        if let Some(ring) = ring {
            tokio::spawn(Arc::clone(&events).read(ring));
        }
        events
    }

    /// Reads the ring, for ever.
    async fn read(self: Arc<Self>, mut ring: EventRing) {
        let mut timer = interval(PERIOD);
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut events = Vec::new();
        loop {
            timer.tick().await;
            events.clear();
            ring.read(&mut events);
            self.note(&events, host::monotonic());
        }
    }

    /// Takes events in.
    fn note(&self, events: &[Event], now: Nanos) {
        if events.is_empty() {
            return;
        }
        let is_followed = self.followers.receiver_count() > 0;
        let mut state = self.state();
        for event in events {
            let headers = Headers::of(event);
            let State { short, long, recent } = &mut *state;
            for window in [short, long] {
                window.add(event, &headers, now);
            }
            if recent.len() == KEPT {
                recent.pop_front();
            }
            recent.push_back(*event);
            if is_followed {
                // That nobody follows any more is no failure.
                let _ = self.followers.send(*event);
            }
        }
    }

    /// Who, or what, is dropped most now; `lost` events never came, of which the answer says so. For
    /// the page, `/v1/top`, and `top`.
    #[must_use]
    pub fn top(&self, query: &Query, names: &Names, lost: u64) -> Top {
        let now = host::monotonic();
        let ranking = {
            let mut state = self.state();
            let window = match query.window {
                Span::Short => &mut state.short,
                Span::Long => &mut state.long,
            };
            window.ranking(query.of, query.by, now)
        };
        Top::new(query, ranking, &Labels::new(names), now, lost)
    }

    /// The last events, at most `most` of them, oldest first.
    #[must_use]
    pub fn recent(&self, most: usize) -> Vec<Event> {
        let state = self.state();
        let skipped = state.recent.len().saturating_sub(most);
        state.recent.iter().skip(skipped).copied().collect()
    }

    /// The events from now on; none if `most` follow already.
    #[must_use]
    pub fn follow(&self, most: usize) -> Option<broadcast::Receiver<Event>> {
        // Under the lock, so that two at once do not both get the last place.
        let _state = self.state();
        (self.followers.receiver_count() < most).then(|| self.followers.subscribe())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
