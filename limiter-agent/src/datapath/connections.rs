//! The open connections of sources, as the program counts them and as the agent corrects them.
//!
//! The program hears of each connection's begin and end, so what it counts stays true without an agent. Of
//! connections that are older than the program it does not hear. The agent counts these from the kernel's
//! list before the program hears of any, and takes those off that are no longer listed. It never adds to
//! them afterwards: what is listed and not heard of then was closed, or opened, between the two looks.

use std::{collections::HashMap, sync::atomic::AtomicU64};

use aya::{Ebpf, maps::Array};
use limiter_common::{
    abi::{CONNECTION_SLOTS, ConnectionLine, HANDSHAKES, Hearing, map},
    connections::{self, Origin, Slots},
    hash::HashKey,
    packet::Source,
};

use super::{Datapath, DatapathError, Origin as Maps, object::set, shared::Mapping};

/// The table.
pub(super) struct Connections {
    lines: Mapping<ConnectionLine>,
    key: HashKey,
    /// The number of our program among those that count.
    instance: u64,
}

impl Datapath {
    /// From now on, the open connections of each source are counted, beginning with those that were `older`
    /// than [`hear_handshakes`](Self::hear_handshakes). Where the program of an agent before this one counts,
    /// it goes on until it is replaced, and ours after it.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when a map cannot be read or written.
    pub fn count_connections(&mut self, older: &HashMap<Source, u32>) -> Result<(), DatapathError> {
        let is_counted = matches!(self.origin, Maps::Kept)
            && self.pins.as_ref().is_some_and(|pins| pins.has_other(HANDSHAKES));
        if is_counted {
            return Ok(());
        }
        let lost = self.connections.begin(older);
        self.appoint(lost)
    }

    /// Takes off the connections of whose end the program does not hear, where they are not among those
    /// that are `listed` as open now.
    pub fn settle_connections(&self, listed: &HashMap<Source, u32>) {
        self.connections.settle(listed);
    }

    /// Who has connections open to this host, and how many, in no order.
    #[must_use]
    pub fn connections(&self) -> Vec<(Source, u32)> {
        self.connections.sources().map(|(source, [heard, older])| (source, heard + older)).collect()
    }

    /// How many connections were not counted for want of room.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the map cannot be read.
    pub fn uncounted_connections(&self) -> Result<u64, DatapathError> {
        Ok(self.hearing()?.uncounted)
    }

    /// Makes our program the one that counts connections; so many were lost before.
    pub(super) fn appoint(&mut self, lost: u64) -> Result<(), DatapathError> {
        let uncounted = self.hearing()?.uncounted.saturating_add(lost);
        let instance = self.connections.instance;
        set(&mut self.ebpf, map::HEARING, 0, &Hearing { instance, uncounted })
    }

    fn hearing(&self) -> Result<Hearing, DatapathError> {
        let failed = |error| DatapathError::map(map::HEARING, error);
        let map = self.ebpf.map(map::HEARING).ok_or(DatapathError::MissingMap(map::HEARING))?;
        let array: Array<_, Hearing> = map.try_into().map_err(failed)?;
        array.get(&0, 0).map_err(failed)
    }
}

impl Connections {
    pub(super) fn new(ebpf: &Ebpf, key: HashKey, instance: u64) -> Result<Self, DatapathError> {
        Ok(Self { lines: Mapping::of(ebpf, map::CONNECTIONS)?, key, instance })
    }

    /// Begins anew with these, of which the program has heard nothing. Says how many found no room.
    fn begin(&self, older: &HashMap<Source, u32>) -> u64 {
        for (source, origin, _) in self.entries() {
            connections::set(&self.line(source), source, origin, 0);
        }
        let lost = older.iter().filter(|&(&source, &count)| {
            !connections::set(&self.line(source), source, Origin::Older, count)
        });
        lost.map(|(_, count)| u64::from(*count)).sum()
    }

    /// Takes those off that the program does not hear of and that are not among the `listed` any more.
    fn settle(&self, listed: &HashMap<Source, u32>) {
        for (source, [heard, older]) in self.sources() {
            let listed = listed.get(&source).copied().unwrap_or(0);
            let left = listed.saturating_sub(heard);
            if left < older {
                connections::set(&self.line(source), source, Origin::Older, left);
            }
        }
    }

    fn entries(&self) -> impl Iterator<Item = (Source, Origin, u32)> {
        self.lines.values().flat_map(entries)
    }

    /// Each source with its counts by [`Origin`]. All that a source has lies in one line.
    fn sources(&self) -> impl Iterator<Item = (Source, [u32; 2])> {
        self.lines.values().flat_map(|line| {
            let mut sources: Vec<(Source, [u32; 2])> = Vec::new();
            for (source, origin, count) in entries(line) {
                if let Some((_, counts)) = sources.iter_mut().find(|(known, _)| *known == source) {
                    counts[origin as usize] += count;
                } else {
                    let mut counts = [0; 2];
                    counts[origin as usize] = count;
                    sources.push((source, counts));
                }
            }
            sources
        })
    }

    fn line(&self, source: Source) -> Line<'_> {
        Line::of(self.lines.value(self.key.source(source).place(self.lines.count())))
    }
}

fn entries(line: *mut ConnectionLine) -> impl Iterator<Item = (Source, Origin, u32)> {
    (0..CONNECTION_SLOTS).filter_map(move |slot| connections::entry(&Line::of(line), slot))
}

/// A line of the mapping.
struct Line<'a>(&'a [AtomicU64; 2 * CONNECTION_SLOTS]);

impl Line<'_> {
    fn of(line: *mut ConnectionLine) -> Self {
        // SAFETY: a value of the mapping, which outlives this; aligned words, touched by atomic operations
        // only, here and in the kernel.
        Self(unsafe { &*line.cast() })
    }
}

impl<'a> Slots for Line<'a> {
    type Cell = &'a AtomicU64;

    fn bits(&self, slot: usize) -> &'a AtomicU64 {
        &self.0[2 * slot]
    }

    fn word(&self, slot: usize) -> &'a AtomicU64 {
        &self.0[2 * slot + 1]
    }
}
