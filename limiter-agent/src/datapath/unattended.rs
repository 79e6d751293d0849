//! What can be seen and done on the pins alone, where no agent runs.

use std::path::Path;

use aya::maps::{MapData, PerCpuArray};
use limiter_common::{
    Outcome,
    abi::{Bank, Count, CounterCell, Head, Mode, Settings, map},
    time::Nanos,
};

use super::{
    DatapathError, Pins, PinsError,
    head::effective,
    pins::{self, LeftMaps},
    sum,
};
use crate::{host, plan::Names};

/// What an agent left that is gone.
pub struct Remains {
    /// The interfaces that have a pin.
    pub interfaces: Vec<String>,
    /// The version of its maps.
    pub abi: u32,
    /// More of it, if the maps are of this version.
    pub known: Option<KnownRemains>,
}

/// What maps of this version say.
pub struct KnownRemains {
    /// The settings that hold.
    pub settings: Box<Settings>,
    /// Until when, if others hold afterwards.
    pub until: Option<Nanos>,
    /// Whose numbers the counters hold.
    pub names: Names,
    /// All counters that are not zero, summed over the CPUs.
    pub counters: Vec<(Outcome, Count)>,
}

/// What is in the pins at `directory`; none if there is nothing.
///
/// # Errors
/// [`DatapathError::Map`] when a map cannot be read.
pub fn remains(directory: &Path) -> Result<Option<Remains>, DatapathError> {
    let Some(maps) = pins::maps(directory) else { return Ok(None) };
    let interfaces = pins::interfaces(directory);
    let LeftMaps { directory, identity, known, is_current } = maps;
    let abi = identity.version;
    let Some((sizes, names)) = known.filter(|_| is_current) else {
        return Ok(Some(Remains { interfaces, abi, known: None }));
    };
    let (head, settings) = settings(&directory)?;
    let is_open = head.until.0 != u64::MAX && effective(&head, host::monotonic()) == head.active;
    let until = is_open.then_some(head.until);
    let failed = |error| DatapathError::map(map::COUNTERS, error);
    let counters = MapData::from_pin(directory.join(map::COUNTERS))
        .and_then(aya::maps::Map::from_map_data)
        .map_err(failed)?;
    let counters: PerCpuArray<MapData, CounterCell> = counters.try_into().map_err(failed)?;
    let counters = sum(&counters, sizes.counters)?;
    Ok(Some(Remains {
        interfaces,
        abi,
        known: Some(KnownRemains { settings, until, names, counters }),
    }))
}

/// Puts everything under `mode`, or with none under what the settings say, for as long as no agent runs.
///
/// # Errors
/// [`DatapathError`] if an agent runs, there is nothing that could be changed, or a map refuses.
pub fn set_mode(directory: &Path, mode: Option<Mode>) -> Result<(), DatapathError> {
    let pins = Pins::open(directory)?;
    let maps = pins.maps().filter(|maps| maps.is_current);
    let maps = maps.ok_or_else(|| DatapathError::NothingPinned(directory.to_owned()))?.directory;
    let failed = |map| move |error| DatapathError::map(map, error);
    let (head, _) = settings(&maps)?;
    // Settings that wait to be confirmed are not what anybody should be left with.
    let lasting = if head.until.0 == u64::MAX { head.active } else { head.after };
    let bank = Bank::of_place(lasting);
    let mut settings = read(&maps, bank.index())?;
    let place = match mode {
        None => bank.index(),
        Some(mode) => {
            settings.override_mode(mode);
            let mut array =
                pins::array::<Settings>(&maps, map::SETTINGS).map_err(failed(map::SETTINGS))?;
            array.set(bank.variant(), settings.as_ref(), 0).map_err(failed(map::SETTINGS))?;
            bank.variant()
        }
    };
    let mut array = pins::array::<Head>(&maps, map::HEAD).map_err(failed(map::HEAD))?;
    array.set(0, head.lasting(place), 0).map_err(failed(map::HEAD))
}

/// Detaches from all interfaces that have a pin, and removes the pins. Says which.
///
/// # Errors
/// [`PinsError`] if an agent runs, or something cannot be removed.
pub fn detach(directory: &Path) -> Result<Vec<String>, PinsError> {
    if !directory.exists() {
        return Ok(Vec::new());
    }
    let pins = Pins::open(directory)?;
    let interfaces = pins.interfaces();
    pins.clear()?;
    Ok(interfaces)
}

/// The variable, and the settings that hold by it.
fn settings(maps: &Path) -> Result<(Head, Box<Settings>), DatapathError> {
    let failed = |map| move |error| DatapathError::map(map, error);
    let head: Head = pins::array(maps, map::HEAD)
        .and_then(|array| array.get(&0, 0))
        .map_err(failed(map::HEAD))?;
    let place = u32::try_from(effective(&head, host::monotonic())).unwrap_or(0);
    Ok((head, read(maps, place)?))
}

/// The settings at `place`.
fn read(maps: &Path, place: u32) -> Result<Box<Settings>, DatapathError> {
    let settings = pins::array(maps, map::SETTINGS).and_then(|array| array.get(&place, 0));
    settings.map(Box::new).map_err(|error| DatapathError::map(map::SETTINGS, error))
}
