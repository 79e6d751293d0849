//! Who was proven, kept for the time after a reboot: else every customer would be a stranger to the
//! flood that goes on.

use std::time::{Duration, SystemTime};

use limiter_common::abi::CARRIED_VERSION;
use log::info;
use serde::{Deserialize, Serialize};

use super::Agent;
use crate::datapath::Snapshot;
use crate::state::{StateDir, StateError};

const FILE: &str = "standing";

/// What is older says little of who sends now: addresses change hands.
const OLDEST: Duration = Duration::from_mins(30);

#[derive(Serialize, Deserialize)]
struct Kept {
    /// By the wall clock: the other begins anew with the kernel.
    taken: SystemTime,
    snapshot: Snapshot,
}

/// What was kept, if it is young enough at `now`.
pub(super) fn restore(state: &StateDir, now: SystemTime) -> Option<Snapshot> {
    let kept: Kept = state.read(FILE, CARRIED_VERSION)?;
    // A time to come is of a clock that was wrong.
    let age = now.duration_since(kept.taken).ok().filter(|age| *age <= OLDEST);
    if age.is_none() {
        info!(
            "who was proven before is not restored: that is older than {} minutes",
            OLDEST.as_secs() / 60
        );
    }
    age.map(|_| kept.snapshot)
}

impl Agent {
    /// Keeps who is proven now.
    ///
    /// # Errors
    /// [`StateError`]; what was kept before is still there.
    pub(super) fn keep_standing(&self) -> Result<(), StateError> {
        let kept = Kept { taken: SystemTime::now(), snapshot: self.datapath.snapshot() };
        self.state.write(FILE, CARRIED_VERSION, &kept)
    }
}
