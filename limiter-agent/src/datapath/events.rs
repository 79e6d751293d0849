//! The ring of events.

use std::ptr;

use aya::{
    Ebpf,
    maps::{MapData, RingBuf},
};
use limiter_common::abi::{Event, map};

use super::DatapathError;

/// Events that are read at once, at most: as many as the ring holds.
const MOST: usize = 4096;

/// The ring, for one reader. Nobody is woken for an event: it is to be read several times a second.
pub struct EventRing(RingBuf<MapData>);

impl EventRing {
    /// Takes it out of the loaded object.
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, DatapathError> {
        let ring = ebpf.take_map(map::EVENTS).ok_or(DatapathError::MissingMap(map::EVENTS))?;
        ring.try_into().map(Self).map_err(|error| DatapathError::map(map::EVENTS, error))
    }

    /// Adds what it holds to `events`, oldest first.
    pub fn read(&mut self, events: &mut Vec<Event>) {
        for _ in 0..MOST {
            let Some(item) = self.0.next() else { break };
            events.extend(event(&item));
        }
    }
}

/// The event in an item of the ring; none if it is too short for one.
fn event(item: &[u8]) -> Option<Event> {
    let bytes = item.first_chunk::<{ size_of::<Event>() }>()?;
    // SAFETY: as long as an event, which is made of integers and of structures of integers.
    Some(unsafe { ptr::from_ref(bytes).cast::<Event>().read_unaligned() })
}
