//! The leases of the running agent.

use super::Agent;
use crate::cli::Failure;
use crate::config::Config;
use crate::datapath::Datapath;
use crate::lease::{Leases, Loaded};
use crate::plan::Plan;
use crate::state::StateDir;

/// Reads the files that the configuration names.
pub(super) fn load(config: &Config) -> Result<Loaded, Failure> {
    Leases::load(config).map_err(|errors| Failure::Request(errors.join("\n")))
}

/// Takes over the leases that are in the kernel, which outlive agents, and puts `config` in force.
pub(super) fn start(
    datapath: &mut Datapath,
    state: &StateDir,
    config: &Config,
    plan: &Plan,
    credentials: Loaded,
) -> Result<Leases, Failure> {
    let taken = || Failure::Machine("the leases have been taken".to_owned());
    let maps = datapath.take_leases().ok_or_else(taken)?;
    let leases = Leases::start(maps, state).map_err(|error| Failure::Machine(error.to_string()))?;
    leases.configure(config, &plan.interfaces, credentials);
    Ok(leases)
}

impl Agent {
    /// The leases, for who gives and shows them.
    #[must_use]
    pub fn leases(&self) -> Leases {
        self.leases.clone()
    }
}
