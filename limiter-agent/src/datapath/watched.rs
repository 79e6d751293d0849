//! Who is watched in classes that are observed, and what they have sent.

use std::{
    io,
    mem::size_of,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    ptr,
};

use aya::{
    Ebpf,
    maps::{Array, HashMap, Map, MapData, PerCpuArray},
};
use limiter_common::{
    abi::{WATCHED, WatchedCount, WatchedSource, Watching, map},
    packet::Source,
    time::Nanos,
};

use super::{Datapath, DatapathError};

/// The maps of watched sources.
pub struct WatchedMaps {
    watching: Array<MapData, Watching>,
    watched: HashMap<MapData, WatchedSource, WatchedCount>,
    unwatched: PerCpuArray<MapData, u64>,
    /// That of `watched`, which aya reads one entry at a time.
    descriptor: OwnedFd,
    keys: Vec<WatchedSource>,
    values: Vec<WatchedCount>,
}

impl WatchedMaps {
    /// Takes them out of the loaded object.
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, DatapathError> {
        let mut take = |name| ebpf.take_map(name).ok_or(DatapathError::MissingMap(name));
        let wrong = |name| move |error| DatapathError::map(name, error);
        let watched = take(map::WATCHED)?;
        let Map::HashMap(data) = &watched else {
            return Err(DatapathError::MissingMap(map::WATCHED));
        };
        let descriptor = data.fd().as_fd().try_clone_to_owned().map_err(DatapathError::Watched)?;
        Ok(Self {
            watching: typed(take(map::WATCHING)?).map_err(wrong(map::WATCHING))?,
            watched: typed(watched).map_err(wrong(map::WATCHED))?,
            descriptor,
            unwatched: typed(take(map::UNWATCHED)?).map_err(wrong(map::UNWATCHED))?,
            keys: vec![WatchedSource::default(); WATCHED],
            values: vec![WatchedCount::default(); WATCHED],
        })
    }

    /// Everybody who is watched, with what they have sent since they are. In one system call where
    /// nobody is added meanwhile, within a millisecond or two.
    ///
    /// # Errors
    /// [`DatapathError::Watched`] when the kernel refuses.
    pub fn read(
        &mut self,
    ) -> Result<impl Iterator<Item = (WatchedSource, WatchedCount)>, DatapathError> {
        let count = self.read_batches().map_err(DatapathError::Watched)?;
        let (keys, values) = (&self.keys[..count], &self.values[..count]);
        Ok(std::iter::zip(keys.iter().copied(), values.iter().copied()))
    }

    /// Watches those of `mask` from now on, as far as there is room.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the map cannot be written.
    pub fn watch(&mut self, mask: u32) -> Result<(), DatapathError> {
        let set = self.watching.set(0, Watching { mask, full: 0 }, 0);
        set.map_err(|error| DatapathError::map(map::WATCHING, error))
    }

    /// Whether somebody was not taken since the last [`watch`](Self::watch).
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the map cannot be read.
    pub fn is_full(&self) -> Result<bool, DatapathError> {
        let watching = self.watching.get(&0, 0);
        watching.map(|it| it.full != 0).map_err(|error| DatapathError::map(map::WATCHING, error))
    }

    /// Watches a source no longer. What it sent since the last [`read`](Self::read) is not counted.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the map cannot be written.
    pub fn forget(&mut self, source: &WatchedSource) -> Result<(), DatapathError> {
        match self.watched.remove(source) {
            Err(error) if !matches!(error, aya::maps::MapError::KeyNotFound) => {
                Err(DatapathError::map(map::WATCHED, error))
            }
            _ => Ok(()),
        }
    }

    /// Packets of sources that there was no room to watch, since the start.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the map cannot be read.
    pub fn unwatched(&self) -> Result<u64, DatapathError> {
        let values = self.unwatched.get(&0, 0);
        let values = values.map_err(|error| DatapathError::map(map::UNWATCHED, error))?;
        Ok(values.iter().sum())
    }

    fn read_batches(&mut self) -> io::Result<usize> {
        // Each goes on in the next of the map's buckets, of which there are as many as entries.
        const MOST: usize = 64;
        let Self { descriptor, keys, values, .. } = self;
        let mut place = 0_u64;
        let mut read = 0;
        for batch in 0..MOST {
            let mut attributes = Batch {
                from: if batch == 0 { 0 } else { address(&raw mut place) },
                to: address(&raw mut place),
                keys: address(keys[read..].as_mut_ptr()),
                values: address(values[read..].as_mut_ptr()),
                count: u32::try_from(keys.len() - read).unwrap_or(u32::MAX),
                map_fd: descriptor.as_raw_fd(),
                ..Batch::default()
            };
            // SAFETY: the attributes are those of this command; the buffers have `count` elements of the
            // map's key and value, and nobody else looks at them; the kernel reads and writes a word as
            // the place to go on at.
            let outcome = unsafe {
                libc::syscall(
                    libc::SYS_bpf,
                    BPF_MAP_LOOKUP_BATCH,
                    ptr::from_mut(&mut attributes),
                    size_of::<Batch>(),
                )
            };
            let error = (outcome != 0).then(io::Error::last_os_error);
            let is_end = error.as_ref().is_some_and(|it| it.raw_os_error() == Some(libc::ENOENT));
            match error {
                Some(error) if !is_end => return Err(error),
                _ => read += usize::try_from(attributes.count).unwrap_or(0),
            }
            if is_end || read >= keys.len() {
                break;
            }
        }
        Ok(read.min(keys.len()))
    }
}

impl Datapath {
    /// Who is watched in classes that are observed.
    pub fn watched(&mut self) -> &mut WatchedMaps {
        &mut self.watched
    }

    /// Whether a source is of the sample of that mask.
    #[must_use]
    pub fn is_sampled(&self, source: Source, mask: u32) -> bool {
        self.shared.is_sampled(source, mask)
    }

    /// Whether a source is proven at `now`; sometimes also one that is not, see
    /// [`false_proofs`](Self::false_proofs).
    #[must_use]
    pub fn is_proven(&self, source: Source, now: Nanos) -> bool {
        self.shared.is_proven(source, now)
    }

    /// Which part of those who have proven nothing the filter takes for proven, 0 to 1.
    #[must_use]
    pub fn false_proofs(&self, now: Nanos) -> f64 {
        self.shared.false_proofs(now)
    }
}

/// The command of `bpf(2)`.
const BPF_MAP_LOOKUP_BATCH: libc::c_int = 24;

/// What `bpf(2)` takes for it (`union bpf_attr`, `batch`).
#[derive(Default)]
#[repr(C)]
struct Batch {
    /// `in_batch`: where to begin, or null.
    from: u64,
    /// `out_batch`: where that is written which the next one begins with.
    to: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: i32,
    element_flags: u64,
    flags: u64,
}

const _: () = assert!(size_of::<Batch>() == 56);

fn address<T>(pointer: *mut T) -> u64 {
    pointer.expose_provenance() as u64
}

fn typed<T: TryFrom<Map>>(map: Map) -> Result<T, T::Error> {
    map.try_into()
}
