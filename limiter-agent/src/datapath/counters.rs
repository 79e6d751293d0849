//! The packet counters, many to a system call: one for each of the thousands of cells would be most of what
//! a scrape costs.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _},
};

use aya::{
    maps::{Map, MapData, MapError, PerCpuArray},
    sys::SyscallError,
    util::nr_cpus,
};
use limiter_common::{
    Family, Outcome,
    abi::{Count, CounterCell, CounterShape, SampleCount, map},
};

use super::{Datapath, DatapathError};

/// Cells read at once. With 256 CPUs they take two megabytes.
const AT_ONCE: u32 = 256;

/// `BPF_MAP_LOOKUP_BATCH` of `enum bpf_cmd` (linux/bpf.h), for per-CPU arrays since Linux 5.13.
const LOOKUP_BATCH: libc::c_long = 24;

/// The part of `union bpf_attr` that it takes.
#[derive(Default)]
#[repr(C)]
struct Request {
    /// Where to go on from: what the call before wrote to its `out_batch`; null to begin.
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

impl Datapath {
    /// All counters that are not zero, summed over the CPUs.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the map cannot be read.
    pub fn counters(&self) -> Result<Vec<(Outcome, Count)>, DatapathError> {
        match self.ebpf.map(map::COUNTERS) {
            Some(Map::PerCpuArray(cells)) => sum(cells, self.sizes.counters),
            Some(_) | None => Err(DatapathError::MissingMap(map::COUNTERS)),
        }
    }

    /// How many buckets have been made since the start, IPv4 and IPv6.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the map cannot be read.
    pub fn sources_created(&self) -> Result<[(Family, u64); 2], DatapathError> {
        let cells = self.per_cpu::<u64>(map::CREATED)?;
        let read = |family: Family| {
            let values = cells
                .get(&(family as u32), 0)
                .map_err(|error| DatapathError::map(map::CREATED, error))?;
            Ok::<_, DatapathError>((family, values.iter().sum()))
        };
        Ok([read(Family::Ipv4)?, read(Family::Ipv6)?])
    }

    /// What came of samples since the start, on all CPUs together.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the map cannot be read.
    pub fn sample_count(&self) -> Result<SampleCount, DatapathError> {
        self.sum_of_samples(SampleCount::SAMPLES)
    }

    /// What came of events since the start, on all CPUs together.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the map cannot be read.
    pub fn event_count(&self) -> Result<SampleCount, DatapathError> {
        self.sum_of_samples(SampleCount::EVENTS)
    }

    fn sum_of_samples(&self, place: u32) -> Result<SampleCount, DatapathError> {
        let cells = self.per_cpu::<SampleCount>(map::SAMPLE_COUNT)?;
        let failed = |error| DatapathError::map(map::SAMPLE_COUNT, error);
        let values = cells.get(&place, 0).map_err(failed)?;
        Ok(values.iter().fold(SampleCount::default(), |sum, count| SampleCount {
            offered: sum.offered + count.offered,
            written: sum.written + count.written,
            lost: sum.lost + count.lost,
            since: sum.since + count.since,
        }))
    }

    fn per_cpu<V: aya::Pod>(
        &self,
        name: &'static str,
    ) -> Result<PerCpuArray<&MapData, V>, DatapathError> {
        let map = self.ebpf.map(name).ok_or(DatapathError::MissingMap(name))?;
        PerCpuArray::try_from(map).map_err(|error| DatapathError::map(name, error))
    }
}

/// All counters that are not zero, summed over the CPUs.
pub(super) fn sum(
    cells: &MapData,
    shape: CounterShape,
) -> Result<Vec<(Outcome, Count)>, DatapathError> {
    let failed = |io_error| {
        let call = "bpf_map_lookup_batch";
        DatapathError::map(map::COUNTERS, MapError::SyscallError(SyscallError { call, io_error }))
    };
    let cpus = nr_cpus().map_err(|(_, error)| failed(error))?;
    let fd =
        u32::try_from(cells.fd().as_fd().as_raw_fd()).map_err(|e| failed(io::Error::other(e)))?;
    let mut keys = [0_u32; AT_ONCE as usize];
    let mut values = vec![CounterCell::default(); keys.len() * cpus];
    let mut counters = Vec::new();
    let (mut last, mut next) = (0_u32, 0_u32);
    // Each turn but the last reads so many, so there are no more turns than this.
    for turn in 0..=shape.cells().div_ceil(AT_ONCE) {
        let mut request = Request {
            in_batch: if turn == 0 { 0 } else { (&raw const last) as u64 },
            out_batch: (&raw mut next) as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            count: AT_ONCE,
            map_fd: fd,
            ..Request::default()
        };
        let is_end = match lookup(&mut request) {
            Ok(()) => false,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
            Err(error) => return Err(failed(error)),
        };
        let read = usize::try_from(request.count).unwrap_or_default().min(keys.len());
        for (cell, values) in keys[..read].iter().zip(values.chunks(cpus)) {
            let count = values.iter().fold(Count::default(), |sum, CounterCell { count, .. }| {
                Count { packets: sum.packets + count.packets, bytes: sum.bytes + count.bytes }
            });
            if let Some(outcome) = shape.outcome(*cell).filter(|_| count.packets != 0) {
                counters.push((outcome, count));
            }
        }
        if is_end {
            break;
        }
        last = next;
    }
    Ok(counters)
}

fn lookup(request: &mut Request) -> io::Result<()> {
    // SAFETY: the kernel reads and writes what the request points at: keys and values for `count` elements,
    // a value for each CPU there may be, and a key for each end of the batch.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, LOOKUP_BATCH, request, size_of::<Request>()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
