//! What commands revoked: names and addresses that get no lease, over reloads and restarts.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::state::{StateDir, StateError};

const FILE: &str = "lease-revocations";
const VERSION: u32 = 1;

/// All that have not been taken back, by name (in lower case) or address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Revocations(BTreeMap<String, Revocation>);

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Revocation {
    /// For ever if none.
    pub(super) until: Option<SystemTime>,
    pub(super) since: SystemTime,
    pub(super) by: String,
}

impl Revocations {
    pub(super) fn restore(state: &StateDir) -> Self {
        state.read(FILE, VERSION).unwrap_or_default()
    }

    pub(super) fn keep(&self, state: &StateDir) -> Result<(), StateError> {
        state.write(FILE, VERSION, self)
    }

    pub(super) fn add(&mut self, subject: &str, revocation: Revocation) {
        self.0.retain(|_, it| it.until.is_none_or(|until| revocation.since < until));
        self.0.insert(subject.to_lowercase(), revocation);
    }

    /// False if there was none.
    pub(super) fn remove(&mut self, subject: &str) -> bool {
        self.0.remove(&subject.to_lowercase()).is_some()
    }

    pub(super) fn holds(&self, name: &str, address: IpAddr, now: SystemTime) -> bool {
        let of = |subject: &str| self.0.get(subject);
        let found = [of(&name.to_lowercase()), of(&address.to_string())];
        found.into_iter().flatten().any(|it| it.until.is_none_or(|until| now < until))
    }

    /// Those that hold.
    pub(super) fn iter(&self, now: SystemTime) -> impl Iterator<Item = (&String, &Revocation)> {
        self.0.iter().filter(move |(_, it)| it.until.is_none_or(|until| now < until))
    }
}
