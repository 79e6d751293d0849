//! What the agent does again and again, because the host changes under it.

use std::collections::HashSet;

use limiter_common::packet::Source;
use log::warn;

use super::Agent;
use crate::datapath::Datapath;
use crate::host::{self, SocketsError};

/// A failure that may last: it is logged when it comes, not as long as it lasts.
#[derive(Default)]
pub(crate) struct Complaint(Option<String>);

impl Complaint {
    pub(crate) fn hear<E: std::fmt::Display>(&mut self, outcome: Result<(), E>) {
        let error = outcome.err().map(|error| error.to_string());
        if let Some(error) = error.as_ref().filter(|_| self.0 != error) {
            warn!("{error}");
        }
        self.0 = error;
    }
}

impl Agent {
    /// Looks up this host's addresses again: packets from them are forged.
    pub fn renew_addresses(&mut self) {
        self.own.hear(self.datapath.own(&host::addresses()));
    }

    /// Vouches for the `peers` of lasting connections, which make no handshake again.
    pub fn renew_proofs(&mut self, peers: Result<HashSet<Source>, SocketsError>) {
        self.seeding.hear(prove(&self.datapath, peers));
    }
}

pub(super) fn prove(
    datapath: &Datapath,
    peers: Result<HashSet<Source>, SocketsError>,
) -> Result<(), SocketsError> {
    let now = host::monotonic();
    peers?.into_iter().for_each(|source| datapath.prove(source, now));
    Ok(())
}
