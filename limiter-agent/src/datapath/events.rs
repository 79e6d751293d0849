//! The ring of events.

use std::{os::fd::OwnedFd, ptr};

use aya::{
    Ebpf,
    maps::{MapData, RingBuf},
};
use limiter_common::abi::{Event, map};
use tokio::io::unix::AsyncFd;

use super::{DatapathError, samples::ready};

/// Events that are handed on together at most.
const MOST: usize = 1024;

/// The ring, with one reader.
pub struct EventRing {
    ring: RingBuf<MapData>,
    /// Its descriptor, of which the runtime says when there is something to read; none before the first
    /// time.
    ready: Option<AsyncFd<OwnedFd>>,
}

impl EventRing {
    /// Takes it out of the loaded object.
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, DatapathError> {
        let ring = ebpf.take_map(map::EVENTS).ok_or(DatapathError::MissingMap(map::EVENTS))?;
        let ring = ring.try_into().map_err(|error| DatapathError::map(map::EVENTS, error))?;
        Ok(Self { ring, ready: None })
    }

    /// Adds what the ring holds to `events`, [`MOST`] at once; waits until there is something. Nothing is
    /// lost if it is not awaited to its end.
    ///
    /// # Errors
    /// [`DatapathError::Samples`] when the runtime cannot wait for the ring.
    pub async fn read(&mut self, events: &mut Vec<Event>) -> Result<(), DatapathError> {
        let ready = match self.ready.take() {
            Some(ready) => ready,
            None => ready(&self.ring).map_err(DatapathError::Samples)?,
        };
        let ready = self.ready.insert(ready);
        loop {
            let mut guard = ready.readable().await.map_err(DatapathError::Samples)?;
            let before = events.len();
            while let Some(item) = self.ring.next() {
                events.extend(event(&item));
                if events.len() - before == MOST {
                    // More may be there: the ring stays ready.
                    return Ok(());
                }
            }
            guard.clear_ready();
            if events.len() > before {
                return Ok(());
            }
        }
    }
}

/// The event in an item of the ring; none if it is too short for one.
fn event(item: &[u8]) -> Option<Event> {
    let bytes = item.first_chunk::<{ size_of::<Event>() }>()?;
    // SAFETY: as long as an event, which is made of integers and of structures of integers.
    Some(unsafe { ptr::from_ref(bytes).cast::<Event>().read_unaligned() })
}
