//! Where the datapath's coarse clock begins.

use aya::{
    Ebpf, TestRunOptions,
    programs::{TestRun as _, Xdp},
};
use limiter_common::abi::CLOCK_ORIGIN;

use super::{DatapathError, xdp};

/// Readings of the clock. The kernel moves the count of ticks on a moment before the clock: a reading
/// in between is a tick too small, so the largest of some is taken.
const READINGS: usize = 8;

/// More than that are ever tried, since some fall together with a tick.
const ATTEMPTS: usize = 64;

/// What the count of ticks has to be moved by to be `CLOCK_MONOTONIC_COARSE`.
pub(super) fn origin(ebpf: &Ebpf) -> Result<u64, DatapathError> {
    let program = xdp(ebpf, CLOCK_ORIGIN)?;
    let mut readings = Vec::with_capacity(READINGS);
    for _ in 0..ATTEMPTS {
        readings.extend(read(program)?);
        if readings.len() == READINGS {
            break;
        }
    }
    readings.into_iter().max().map(i64::cast_unsigned).ok_or(DatapathError::Clock)
}

/// One reading; none if a tick came in between.
fn read(program: &Xdp) -> Result<Option<i64>, DatapathError> {
    /// `XDP_PASS` of the kernel's `enum xdp_action`.
    const READ: u32 = 2;
    // As long as the shortest packet that kernels run programs on.
    let mut packet = [0; 64];
    let options = TestRunOptions {
        data_in: Some(&[0; 64]),
        data_out: Some(&mut packet),
        ..TestRunOptions::new()
    };
    let result = program.test_run(options).map_err(DatapathError::Program)?;
    let origin = packet.first_chunk().map(|bytes| i64::from_ne_bytes(*bytes));
    Ok(origin.filter(|_| result.return_value == READ))
}
