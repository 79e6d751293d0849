//! The leases of the running agent.

use super::Agent;
use crate::datapath::Datapath;
use crate::lease::Leases;
use crate::state::StateDir;

/// Takes over the leases that are in the kernel: they outlive agents.
pub(super) fn adopt(datapath: &mut Datapath, state: &StateDir) -> Result<Leases, String> {
    let maps = datapath.take_leases().ok_or("the leases have been taken")?;
    Leases::start(maps, state).map_err(|error| error.to_string())
}

impl Agent {
    /// The leases, for who gives and shows them.
    #[must_use]
    pub fn leases(&self) -> Leases {
        self.leases.clone()
    }
}
