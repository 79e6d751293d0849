//! The compiled object: loading it, and its programs and maps by name.

use std::{fs::File, io, io::Read as _, path::Path};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, MapData},
    programs::{ProgramError, Xdp},
};
use limiter_common::{
    abi::{CLOCK_ORIGIN, FLOW_PORTS, Head, PROGRAM, global, map},
    hash::HashKey,
    pace::Moments,
};

use super::{DatapathError, pins};
use crate::{host, memory::cpus, plan::MapSizes};

/// The compiled programs.
static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("LIMITER_OBJECT"));

/// Loads the object with maps of these sizes: new ones, pinned in `directory`, or those that are there.
/// Its variable begins with `head`, which it would otherwise lose to zeros.
pub(super) fn load(
    sizes: &MapSizes,
    key: [u64; 3],
    head: Head,
    directory: Option<&Path>,
) -> Result<Ebpf, DatapathError> {
    let hash = HashKey::new(key);
    let (lines_v4, lines_v6) = (sizes.lines_v4(), sizes.lines_v6());
    let (ceilings, places) = (sizes.lines_ceilings(), sizes.known_places());
    let flow_places = sizes.flow_places();
    let (bytes, tick) = (u32::from(sizes.bytes), host::counted_tick().map_or(0, |tick| tick.0));
    let interval = Moments::interval(u32::try_from(cpus()).unwrap_or(u32::MAX)).0;
    let mut loader = EbpfLoader::new();
    loader
        .override_global(global::HEAD, &head, true)
        .override_global(global::COUNTER_SLOTS, &sizes.counters.slots, true)
        .override_global(global::COUNTER_CLASSES, &sizes.counters.classes, true)
        .override_global(global::LINES_V4, &lines_v4, true)
        .override_global(global::LINES_V6, &lines_v6, true)
        .override_global(global::LINES_CEILINGS, &ceilings, true)
        .override_global(global::KNOWN_PLACES, &places, true)
        .override_global(global::FLOW_PLACES, &flow_places, true)
        .override_global(global::BYTES, &bytes, true)
        .override_global(global::TICK, &tick, true)
        .override_global(global::EVENT_INTERVAL, &interval, true)
        .override_global(global::HASH_OFFSET, &hash.offset, true)
        .override_global(global::HASH_FIRST, &hash.first, true)
        .override_global(global::HASH_SECOND, &hash.second, true)
        // One to spare: older kernels need a free one to replace the value of another.
        .map_max_entries(map::PREFIXES, sizes.prefixes + 1)
        .map_max_entries(map::POLICIES, sizes.policies)
        .map_max_entries(map::LIMITS, sizes.limits)
        .map_max_entries(map::BUCKETS_V4, lines_v4)
        .map_max_entries(map::BUCKETS_V6, lines_v6)
        .map_max_entries(map::CEILINGS, ceilings)
        .map_max_entries(map::BYTES_V4, sizes.byte_lines(lines_v4))
        .map_max_entries(map::BYTES_V6, sizes.byte_lines(lines_v6))
        .map_max_entries(map::KNOWN, places)
        .map_max_entries(map::FLOWS, FLOW_PORTS + flow_places)
        .map_max_entries(map::COUNTERS, sizes.counters.cells());
    if let Some(directory) = directory {
        for map in map::KEPT {
            loader.map_pin_path(map, directory.join(pins::pin_name(map)));
        }
    }
    let mut ebpf = loader.load(OBJECT).map_err(DatapathError::load)?;
    for program in [PROGRAM, CLOCK_ORIGIN] {
        xdp_mut(&mut ebpf, program)?.load().map_err(DatapathError::Program)?;
    }
    Ok(ebpf)
}

pub(super) fn array<'a, V: aya::Pod>(
    ebpf: &'a mut Ebpf,
    name: &'static str,
) -> Result<Array<&'a mut MapData, V>, DatapathError> {
    let map = ebpf.map_mut(name).ok_or(DatapathError::MissingMap(name))?;
    map.try_into().map_err(|error| DatapathError::map(name, error))
}

pub(super) fn set<V: aya::Pod>(
    ebpf: &mut Ebpf,
    name: &'static str,
    place: u32,
    value: &V,
) -> Result<(), DatapathError> {
    array::<V>(ebpf, name)?.set(place, value, 0).map_err(|error| DatapathError::map(name, error))
}

/// Three numbers that nobody can guess.
pub(super) fn random() -> io::Result<[u64; 3]> {
    let mut file = File::open("/dev/urandom")?;
    let mut number = || {
        let mut bytes = [0; 8];
        file.read_exact(&mut bytes).map(|()| u64::from_ne_bytes(bytes))
    };
    Ok([number()?, number()?, number()?])
}

pub(super) fn xdp<'a>(ebpf: &'a Ebpf, name: &str) -> Result<&'a Xdp, DatapathError> {
    let program = ebpf.program(name).ok_or(ProgramError::NotLoaded);
    program.and_then(TryInto::try_into).map_err(DatapathError::Program)
}

pub(super) fn xdp_mut<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut Xdp, DatapathError> {
    let program = ebpf.program_mut(name).ok_or(ProgramError::NotLoaded);
    program.and_then(TryInto::try_into).map_err(DatapathError::Program)
}
