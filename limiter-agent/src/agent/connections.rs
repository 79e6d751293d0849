//! What the agent says of open connections.

use limiter_common::Family;

use super::Agent;
use crate::connections::{Page, Place, family, page};
use crate::datapath::DatapathError;
use crate::status::OpenConnections;
use crate::telemetry::Connections;

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
