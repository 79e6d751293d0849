//! What the datapath knows of single sources, by the memory that it shares with the agent.

use std::{os::fd::AsFd as _, sync::Arc, sync::atomic::Ordering::Relaxed};

use aya::{
    Ebpf,
    maps::{Array, Map, MapData},
};
use limiter_common::{
    abi::{BudgetCell, ByteTats, ClassId, map},
    known::Standing,
    packet::{Source, Space},
    time::{Nanos, Tick},
};

use super::{DatapathError, SharedMaps};

/// The bucket of a source in a class: when it will be full again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Its packets.
    pub packets: Tick,
    /// Its bytes; none where nothing is limited in bytes.
    pub bytes: Option<Tick>,
}

/// Looks single sources up. It never waits for who changes settings, and costs no packet anything.
pub struct Inspector {
    shared: Arc<SharedMaps>,
    /// Of IPv4 and IPv6. Not shared by memory, so each look is a system call.
    bytes: [Array<MapData, ByteTats>; 2],
}

impl Inspector {
    pub(super) fn new(ebpf: &Ebpf, shared: Arc<SharedMaps>) -> Result<Self, DatapathError> {
        let bytes = [tats(ebpf, map::BYTES_V4)?, tats(ebpf, map::BYTES_V6)?];
        Ok(Self { shared, bytes })
    }

    /// What a source has shown of itself.
    #[must_use]
    pub fn standing(&self, source: Source, now: Nanos) -> Standing {
        self.shared.standing(source, now)
    }

    /// Vouches for a source: it has received what was sent to it.
    pub fn prove(&self, source: Source, now: Nanos) {
        self.shared.prove(source, now);
    }

    /// The bucket of a source in a class; none if it has none, which is the same as a full one.
    #[must_use]
    pub fn bucket(&self, source: Source, class: ClassId) -> Option<Bucket> {
        let (line, slot, packets) = self.shared.find(source, class)?;
        let bytes = &self.bytes[usize::from(source.space != Space::Ipv4)];
        // Where nothing is limited in bytes, the map has one entry, which nobody writes.
        let has_bytes = bytes.len() > 1;
        let tats = has_bytes.then(|| bytes.get(&line, 0).ok()).flatten();
        let bytes = tats.and_then(|tats| tats.get(slot).copied()).map(Tick);
        Some(Bucket { packets, bytes })
    }

    /// The theoretical arrival time of a budget.
    #[must_use]
    pub fn budget(&self, cell: BudgetCell) -> Tick {
        Tick(self.shared.budget(cell).load(Relaxed))
    }
}

/// A handle of our own for a map of byte buckets.
fn tats(ebpf: &Ebpf, name: &'static str) -> Result<Array<MapData, ByteTats>, DatapathError> {
    let Some(Map::Array(data)) = ebpf.map(name) else {
        return Err(DatapathError::MissingMap(name));
    };
    let fd = data.fd().as_fd().try_clone_to_owned();
    let fd = fd.map_err(|error| DatapathError::Share { map: name, error })?;
    let map = MapData::from_fd(fd).and_then(Map::from_map_data);
    map.and_then(TryInto::try_into).map_err(|error| DatapathError::map(name, error))
}
