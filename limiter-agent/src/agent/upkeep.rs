//! What the agent does again and again, because the host changes under it.

use log::warn;

use super::Agent;
use crate::datapath::Datapath;
use crate::host::{self, Connections, SocketsError};

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
        self.leases.prune();
    }

    /// Vouches for the peers of lasting `connections`, which make no handshake again, and keeps those open
    /// that this host opened before the programs could hear of it. Keeps who is proven for the time
    /// after a reboot.
    pub fn renew_proofs(&mut self, connections: Result<Connections, SocketsError>) {
        self.seeding.hear(seed(&self.datapath, connections));
        let kept = self.keep_standing();
        self.keeping.hear(kept);
    }
}

pub(super) fn seed(
    datapath: &Datapath,
    connections: Result<Connections, SocketsError>,
) -> Result<(), SocketsError> {
    let Connections { peers, opened, received } = connections?;
    let now = host::monotonic();
    for source in peers {
        datapath.prove(source, now);
    }
    datapath.settle_connections(&received);
    for flow in opened {
        datapath.open(flow, now);
    }
    Ok(())
}
