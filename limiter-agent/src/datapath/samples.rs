//! Samples of what is dropped. The datapath writes them only while somebody watches.

use std::{io, os::fd::AsFd as _, os::fd::OwnedFd, ptr, time::Duration};

use aya::{
    Ebpf,
    maps::{Array, MapData, RingBuf},
};
use limiter_common::{
    abi::{Sample, Sampling, map},
    time::Nanos,
};
use tokio::{io::unix::AsyncFd, sync::OwnedMutexGuard};

use super::DatapathError;
use crate::host;

/// The switch and the ring.
pub struct Samples {
    switch: Array<MapData, Sampling>,
    ring: RingBuf<MapData>,
}

/// Somebody who watches; the datapath stops writing when this is dropped.
pub struct Watch {
    samples: OwnedMutexGuard<Samples>,
    sampling: Sampling,
    /// The ring's descriptor, of which the runtime says when there is something to read.
    ready: AsyncFd<OwnedFd>,
}

impl Samples {
    /// Takes both out of the loaded object, and switches sampling off: with maps that are older than
    /// this agent, it may be on.
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, DatapathError> {
        let mut take = |name| ebpf.take_map(name).ok_or(DatapathError::MissingMap(name));
        let (switch, ring) = (take(map::SAMPLING)?, take(map::SAMPLES)?);
        let mut samples = Self {
            switch: switch.try_into().map_err(|error| DatapathError::map(map::SAMPLING, error))?,
            ring: ring.try_into().map_err(|error| DatapathError::map(map::SAMPLES, error))?,
        };
        samples.switch(Sampling::OFF)?;
        Ok(samples)
    }

    fn switch(&mut self, sampling: Sampling) -> Result<(), DatapathError> {
        let set = self.switch.set(0, sampling, 0);
        set.map_err(|error| DatapathError::map(map::SAMPLING, error))
    }
}

impl Watch {
    /// How long sampling goes on without [`renew`](Self::renew).
    const LEASE: Duration = Duration::from_secs(5);

    /// Switches sampling on. What the ring held is gone.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the switch cannot be written, [`DatapathError::Samples`] outside of a
    /// runtime.
    pub fn start(
        mut samples: OwnedMutexGuard<Samples>,
        sampling: Sampling,
    ) -> Result<Self, DatapathError> {
        let ready = ready(&samples.ring).map_err(DatapathError::Samples)?;
        while samples.ring.next().is_some() {}
        let mut watch = Self { samples, sampling, ready };
        watch.renew()?;
        Ok(watch)
    }

    /// Keeps sampling on for some more seconds; to be called once a second.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the switch cannot be written.
    pub fn renew(&mut self) -> Result<(), DatapathError> {
        let lease = u64::try_from(Self::LEASE.as_nanos()).unwrap_or(u64::MAX);
        self.sampling.until = Nanos(host::monotonic().0.saturating_add(lease));
        self.samples.switch(self.sampling)
    }

    /// The next samples, at least one, oldest first. Nothing is lost if it is not awaited to its end.
    ///
    /// # Errors
    /// [`DatapathError::Samples`] when the runtime cannot wait for the ring.
    pub async fn next(&mut self) -> Result<Vec<Sample>, DatapathError> {
        loop {
            let mut guard = self.ready.readable().await.map_err(DatapathError::Samples)?;
            let mut samples = Vec::new();
            while let Some(item) = self.samples.ring.next() {
                samples.extend(read(&item));
                if samples.len() == MOST {
                    // More may be there: the ring stays ready.
                    return Ok(samples);
                }
            }
            guard.clear_ready();
            if !samples.is_empty() {
                return Ok(samples);
            }
        }
    }
}

/// Samples that are handed on together at most.
const MOST: usize = 256;

impl Drop for Watch {
    fn drop(&mut self) {
        if let Err(error) = self.samples.switch(Sampling::OFF) {
            log::warn!("sampling goes on for some seconds: {error}");
        }
    }
}

fn ready(ring: &RingBuf<MapData>) -> io::Result<AsyncFd<OwnedFd>> {
    let descriptor = ring.as_fd().try_clone_to_owned()?;
    // SAFETY: what is registered owns its descriptor and closes it when it is dropped, not before.
    unsafe { AsyncFd::register(descriptor) }.map_err(Into::into)
}

/// The sample in an item of the ring; none if it is too short for one.
fn read(item: &[u8]) -> Option<Sample> {
    let bytes = item.first_chunk::<{ size_of::<Sample>() }>()?;
    // SAFETY: as long as a sample, which is made of integers and of structures of integers.
    Some(unsafe { ptr::from_ref(bytes).cast::<Sample>().read_unaligned() })
}
