//! What leases say of packets that would be dropped.

use limiter_common::{
    flows::Answer,
    lease::{self, Arriving},
    time::Nanos,
};

use crate::{env::MapEnv, maps::SETTINGS};

/// What the leases and the settings in `bank` say of a packet: an [`Answer`]. A global function, as is
/// what is rare in `lines.rs`.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn leased(high: u64, low: u64, rest: u64, now: u64, bank: u32) -> u32 {
    let Some(settings) = SETTINGS.get(bank) else { return Answer::NONE.0 };
    lease::answer(&Arriving::from_parts([high, low, rest]), Nanos(now), settings, &MapEnv).0
}
