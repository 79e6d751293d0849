//! What the agent says of open connections.

use limiter_common::Family;
use log::warn;

use super::Agent;
use crate::connections::{Page, Place, family, page};
use crate::datapath::{Datapath, DatapathError};
use crate::host;
use crate::status::OpenConnections;
use crate::telemetry::Connections;

/// From now on, completed handshakes prove, and open connections are counted. Says why not, if that is so.
///
/// # Errors
/// [`DatapathError`] if a map cannot be read or written.
pub(super) async fn hear(datapath: &mut Datapath) -> Result<Option<String>, DatapathError> {
    // Before the program hears of any, so that none is counted twice.
    let older = host::connections().await.map(|listed| listed.received).unwrap_or_default();
    // Before the sockets are listed again, so that no connection is missed between the two.
    if let Err(error) = datapath.hear_handshakes() {
        warn!(
            "handshakes prove nobody: {error}. But for connections that last, nobody is proven; \
             everybody stays at most seen; open connections are neither counted nor limited"
        );
        return Ok(Some(error.to_string()));
    }
    datapath.count_connections(&older)?;
    Ok(None)
}

impl Agent {
    /// A page of the sources that have connections open to this host, or why they are not counted.
    ///
    /// # Errors
    /// The cause and the cure.
    pub fn connections(&self, after: Option<Place>, limit: usize) -> Result<Page, String> {
        self.deaf.clone().map_or(Ok(()), Err)?;
        Ok(page(self.datapath.connections(), after, limit))
    }

    pub(super) fn connections_in_status(&self) -> Result<OpenConnections, DatapathError> {
        let page = page(self.datapath.connections(), None, 1);
        Ok(OpenConnections {
            counted: super::report::known_by("handshakes", self.deaf.as_deref()),
            open: page.open,
            sources: page.sources,
            most: page.connections.into_iter().next(),
            uncounted: self.datapath.uncounted_connections()?,
        })
    }

    pub(super) fn connections_in_metrics(&self) -> Result<Connections, DatapathError> {
        let counts = self.datapath.connections();
        let of = |wanted: Family| {
            let of = counts.iter().filter(|(source, _)| family(*source) == wanted);
            let (sources, open) =
                of.fold((0, 0), |(sources, sum), (_, open)| (sources + 1, sum + u64::from(*open)));
            (wanted.label(), open, sources)
        };
        let uncounted = self.datapath.uncounted_connections()?;
        Ok(Connections { open: vec![of(Family::Ipv4), of(Family::Ipv6)], uncounted })
    }
}
