//! Sketches of the last seconds: each window is made of two generations, of which the older is dropped
//! when the younger is full, so that it covers between half of its length and all of it.

use std::collections::BTreeMap;
use std::collections::HashSet;
use std::hash::Hash;
use std::mem;
use std::time::Duration;

use limiter_common::Action;
use limiter_common::abi::{Event, SampledOutcome};
use limiter_common::packet::Source;
use limiter_common::time::Nanos;

use super::decode::Headers;
use super::keys::{PortKey, PrefixKey, SourceKey};
use super::sketch::{CAPACITY, Sketch, Tally};
use super::{By, Of};

/// One window.
pub(super) struct Window {
    /// Of one generation.
    length: Duration,
    young: Generation,
    old: Generation,
}

/// What a window knows of one dimension.
pub(super) struct Ranking<N> {
    /// Since when.
    pub(super) since: Nanos,
    /// Events that were counted.
    pub(super) events: u64,
    /// All keys together.
    pub(super) total: Tally,
    /// The keys, the first first.
    pub(super) entries: Vec<(N, Tally)>,
}

/// A key of any dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Source(SourceKey),
    Prefix(PrefixKey),
    Port(PortKey),
    Class(u16),
}

struct Generation {
    began: Nanos,
    events: u64,
    total: Tally,
    sources: Both<SourceKey>,
    prefixes: Both<PrefixKey>,
    ports: Both<PortKey>,
    /// There are few, so that none is missed.
    classes: BTreeMap<u16, Tally>,
}

/// A sketch for those who send many packets, and one for those who send many bytes.
struct Both<K>([Sketch<K>; 2]);

impl<K: Copy + Eq + Hash> Both<K> {
    fn new() -> Self {
        Self([By::Packets, By::Bytes].map(|by| Sketch::new(by, CAPACITY)))
    }

    fn add(&mut self, key: K, event: &Tally) {
        for sketch in &mut self.0 {
            sketch.add(key, event);
        }
    }

    fn by(&self, by: By) -> &Sketch<K> {
        let [packets, bytes] = &self.0;
        match by {
            By::Packets => packets,
            By::Bytes => bytes,
        }
    }
}

impl Generation {
    fn new(began: Nanos) -> Self {
        Self {
            began,
            events: 0,
            total: Tally::default(),
            sources: Both::new(),
            prefixes: Both::new(),
            ports: Both::new(),
            classes: BTreeMap::new(),
        }
    }

    fn add(&mut self, outcome: SampledOutcome, headers: &Headers, event: &Tally) {
        self.events += 1;
        self.total.add(event);
        if let Some(address) = headers.source {
            self.sources.add(SourceKey(Source::from(address)), event);
            self.prefixes.add(address.into(), event);
        }
        if let Some(port) = PortKey::of(headers) {
            self.ports.add(port, event);
        }
        self.classes.entry(outcome.class).or_default().add(event);
    }
}

impl Window {
    /// One that covers up to `length`.
    pub(super) fn new(length: Duration, now: Nanos) -> Self {
        Self { length: length / 2, young: Generation::new(now), old: Generation::new(now) }
    }

    /// Counts an event, if it is one of a drop.
    pub(super) fn add(&mut self, event: &Event, headers: &Headers, now: Nanos) {
        let is_dropped = event.outcome.action == Action::Drop as u8;
        if !is_dropped && event.outcome.action != Action::WouldDrop as u8 {
            return;
        }
        self.turn(now);
        let tally = Tally::event(event.weight, event.length, event.outcome, is_dropped);
        self.young.add(event.outcome, headers, &tally);
    }

    /// What it knows at `now` of one dimension.
    pub(super) fn ranking(&mut self, of: Of, by: By, now: Nanos) -> Ranking<Key> {
        self.turn(now);
        let (young, old) = (&self.young, &self.old);
        let mut total = old.total;
        total.add(&young.total);
        let mut entries = match of {
            Of::Sources => both(young.sources.by(by), old.sources.by(by), Key::Source),
            Of::Prefixes => both(young.prefixes.by(by), old.prefixes.by(by), Key::Prefix),
            Of::Ports => both(young.ports.by(by), old.ports.by(by), Key::Port),
            Of::Classes => {
                let mut classes = old.classes.clone();
                for (class, tally) in &young.classes {
                    classes.entry(*class).or_default().add(tally);
                }
                classes.into_iter().map(|(class, tally)| (Key::Class(class), tally)).collect()
            }
        };
        entries.sort_by_key(|(_, tally)| std::cmp::Reverse(tally.sum().of(by)));
        Ranking { since: old.began, events: old.events + young.events, total, entries }
    }

    fn turn(&mut self, now: Nanos) {
        let age = |generation: &Generation| {
            Duration::from_nanos(now.0.saturating_sub(generation.began.0))
        };
        if age(&self.young) < self.length {
            return;
        }
        let is_stale = age(&self.young) >= self.length * 2;
        self.old = mem::replace(&mut self.young, Generation::new(now));
        if is_stale {
            // Nothing came for so long; it did cover that time.
            let began = now.0.saturating_sub(u64::try_from(self.length.as_nanos()).unwrap_or(0));
            self.old = Generation::new(Nanos(began));
        }
    }
}

/// The keys of both generations.
fn both<K: Copy + Eq + Hash>(
    young: &Sketch<K>,
    old: &Sketch<K>,
    key: impl Fn(K) -> Key,
) -> Vec<(Key, Tally)> {
    let keys: HashSet<_> = young.keys().chain(old.keys()).collect();
    let entries = keys.into_iter().map(|it| {
        let mut tally = old.tally(&it);
        let (last, newer) = (tally.last, young.tally(&it));
        tally.add(&newer);
        if newer.sum().packets == 0 {
            tally.last = last;
        }
        (key(it), tally)
    });
    entries.collect()
}

#[cfg(test)]
mod tests {
    use limiter_common::Reason;
    use limiter_common::abi::{EVENT_BYTES, SourceAddress};

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn event(action: Action) -> Event {
        let outcome = SampledOutcome {
            class: 3,
            slot: 1,
            reason: Reason::PacketRate as u8,
            action: action as u8,
            ..SampledOutcome::default()
        };
        let bytes = [0; EVENT_BYTES];
        Event { at: Nanos(0), outcome, weight: 10, length: 60, captured: 0, pad: 0, bytes }
    }

    fn from(address: u32) -> Headers {
        let source = Some(SourceAddress::ipv4(address));
        Headers { source, protocol: Some(17), ports: None }
    }

    #[test]
    fn a_window_forgets_after_its_length() {
        let mut window = Window::new(Duration::from_secs(10), Nanos(0));
        let packets = |window: &mut Window, second: u64| {
            let ranking = window.ranking(Of::Sources, By::Packets, Nanos(second * SECOND));
            (ranking.total.sum().packets, (second * SECOND - ranking.since.0) / SECOND)
        };
        window.add(&event(Action::Drop), &from(1), Nanos(SECOND));
        window.add(&event(Action::WouldDrop), &from(1), Nanos(6 * SECOND));
        assert_eq!(packets(&mut window, 9), (20, 9));
        assert_eq!(packets(&mut window, 11), (10, 5));
        assert_eq!(packets(&mut window, 16), (0, 5));
        window.add(&event(Action::Drop), &from(1), Nanos(40 * SECOND));
        assert_eq!(packets(&mut window, 40), (10, 5));
    }

    #[test]
    fn drops_and_would_drops_are_told_apart_and_passes_not_counted() {
        let mut window = Window::new(Duration::from_secs(10), Nanos(0));
        for (address, action) in
            [(1, Action::Drop), (2, Action::WouldDrop), (2, Action::Drop), (3, Action::Pass)]
        {
            window.add(&event(action), &from(address), Nanos(1));
        }
        let ranking = window.ranking(Of::Sources, By::Packets, Nanos(2));
        let entries: Vec<_> = ranking
            .entries
            .iter()
            .map(|(_, it)| (it.dropped.packets, it.would_drop.packets))
            .collect();
        assert_eq!(entries, [(10, 10), (10, 0)]);
        let ports = window.ranking(Of::Ports, By::Bytes, Nanos(2)).entries;
        assert_eq!(ports.iter().map(|(_, it)| it.sum().bytes).collect::<Vec<_>>(), [1800]);
        let classes = window.ranking(Of::Classes, By::Packets, Nanos(2)).entries;
        assert_eq!(classes.first().map(|(key, _)| *key), Some(Key::Class(3)));
    }
}
