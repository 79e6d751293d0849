//! The leases in the kernel: who has one, and what it allows.

use std::{
    path::Path,
    sync::atomic::{
        AtomicU64,
        Ordering::{Relaxed, SeqCst},
    },
};

use aya::{
    Ebpf,
    maps::{HashMap, Map, MapData},
};
use limiter_common::{
    abi::{Lease, Leaseholder, MAX_LEASES, OwnAddress, SourceAddress, map},
    time::Nanos,
};

use super::{Datapath, DatapathError, Origin, pins::pin_name, shared::Mapping};

/// The maps of leases. There is one of it.
pub struct Leases {
    holders: HashMap<MapData, OwnAddress, Leaseholder>,
    terms: Mapping<Lease>,
}

/// The words of a [`Lease`], of which the first is written by the program and the second decides.
const WORDS: usize = size_of::<Lease>() / size_of::<u64>();
const UNTIL: usize = 1;

impl Datapath {
    /// The leases, for the only one who gives and takes them; none if they have been taken.
    #[must_use]
    pub fn take_leases(&mut self) -> Option<Leases> {
        self.leases.take()
    }

    /// Leases go over to new maps of the same version.
    pub(super) fn inherit_leases(&mut self) -> Result<(), DatapathError> {
        match (&self.origin, &mut self.leases) {
            (Origin::Replaced(maps), Some(leases)) if maps.is_current => {
                leases.inherit(&maps.directory)
            }
            _ => Ok(()),
        }
    }
}

impl Leases {
    /// Takes the maps out of the object, which goes on to use them.
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, DatapathError> {
        let terms = Mapping::of(ebpf, map::LEASE_TERMS)?;
        let holders = ebpf.take_map(map::LEASES).ok_or(DatapathError::MissingMap(map::LEASES))?;
        Ok(Self { holders: holders.try_into().map_err(failed)?, terms })
    }

    /// Takes over the leases of another set of pinned maps, of the same version.
    pub(super) fn inherit(&mut self, maps: &Path) -> Result<(), DatapathError> {
        let old: Mapping<Lease> = Mapping::pinned(maps, map::LEASE_TERMS)?;
        let path = maps.join(pin_name(map::LEASES));
        let holders = MapData::from_pin(path).and_then(Map::from_map_data).map_err(failed)?;
        let holders: HashMap<MapData, OwnAddress, Leaseholder> =
            holders.try_into().map_err(failed)?;
        for place in 0..u32::try_from(MAX_LEASES).unwrap_or(0) {
            for (word, from) in words(&self.terms, place).into_iter().zip(words(&old, place)) {
                word.store(from.load(Relaxed), Relaxed);
            }
        }
        for held in &holders {
            let (address, holder) = held.map_err(failed)?;
            self.holders.insert(address, holder, 0).map_err(failed)?;
        }
        Ok(())
    }

    /// All that are there, also those that are over.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the map cannot be read.
    pub fn all(&self) -> Result<Vec<(SourceAddress, Leaseholder, Nanos)>, DatapathError> {
        let all = self.holders.iter().map(|held| {
            let (address, holder) = held.map_err(failed)?;
            Ok((address.address(), holder, self.until(holder.place)))
        });
        all.collect()
    }

    /// Gives an address a lease. Its place must not be another's.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the map cannot be written; there is no lease then.
    pub fn grant(
        &mut self,
        address: SourceAddress,
        holder: &Leaseholder,
        lease: &Lease,
    ) -> Result<(), DatapathError> {
        self.set_terms(holder.place, lease);
        word(&self.terms, holder.place, 0).store(0, SeqCst);
        self.holders.insert(OwnAddress::from(address), holder, 0).map_err(failed)
    }

    /// Changes what a lease allows. How much of its cap is used stays.
    pub fn set_terms(&self, place: u32, lease: &Lease) {
        let Lease { tat: _, until, cap, slots, protocols, ports } = lease;
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let range = |at: usize| {
            let range = ports[at];
            u32::from(range.first) | u32::from(range.last) << 16
        };
        let terms = [
            cap.cost(),
            cap.tolerance(),
            pair(*slots, *protocols),
            pair(range(0), range(1)),
            pair(range(2), range(3)),
            pair(range(4), range(5)),
        ];
        for (at, value) in terms.into_iter().enumerate() {
            word(&self.terms, place, UNTIL + 1 + at).store(value, SeqCst);
        }
        self.set_until(place, *until);
    }

    /// Moves the end of a lease.
    pub fn set_until(&self, place: u32, until: Nanos) {
        word(&self.terms, place, UNTIL).store(until.0, SeqCst);
    }

    /// Ends a lease.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the map cannot be written; it holds no more all the same.
    pub fn end(&mut self, address: SourceAddress, place: u32) -> Result<(), DatapathError> {
        self.set_until(place, Nanos(0));
        self.holders.remove(&OwnAddress::from(address)).map_err(failed)
    }

    fn until(&self, place: u32) -> Nanos {
        if usize::try_from(place).is_ok_and(|place| place < MAX_LEASES) {
            Nanos(word(&self.terms, place, UNTIL).load(SeqCst))
        } else {
            Nanos(0)
        }
    }
}

fn failed(error: aya::maps::MapError) -> DatapathError {
    DatapathError::map(map::LEASES, error)
}

fn words(terms: &Mapping<Lease>, place: u32) -> [&AtomicU64; WORDS] {
    std::array::from_fn(|at| word(terms, place, at))
}

/// A word of the lease at `place`, on a little-endian machine.
fn word(terms: &Mapping<Lease>, place: u32, at: usize) -> &AtomicU64 {
    assert!(at < WORDS, "{at} of {WORDS}");
    let words = terms.value(place).cast::<u64>();
    // SAFETY: words of the mapping, aligned and touched by atomic operations only; the value has so many.
    unsafe { AtomicU64::from_ptr(words.add(at)) }
}

const _: () = assert!(cfg!(target_endian = "little") && WORDS == UNTIL + 7);
