//! What can go wrong between the agent and the kernel.

use aya::{
    EbpfError,
    maps::MapError,
    programs::{ProgramError, xdp::XdpError},
};

/// Why the datapath could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum DatapathError {
    /// The kernel refused the object or could not make a map.
    #[error("the kernel refused the XDP object: {}", chain(.0))]
    Load(#[source] Box<EbpfError>),
    /// The kernel refused the program.
    #[error("the kernel refused the XDP program: {}", chain(.0))]
    Program(#[source] ProgramError),
    /// The program could not be attached.
    #[error("cannot attach to {interface}: {}", chain(.source))]
    Attach {
        /// The interface's name.
        interface: String,
        /// The kernel's answer.
        source: ProgramError,
    },
    /// A map that the object should have is not there.
    #[error("the XDP object has no map {0}; object and agent are of different builds")]
    MissingMap(&'static str),
    /// A map could not be read or written.
    #[error("map {map}: {}", chain(.source))]
    Map {
        /// Its name.
        map: &'static str,
        /// The kernel's answer.
        source: MapError,
    },
    /// The program's log buffer could not be read.
    #[error("the XDP program's log cannot be read: {0}")]
    Logs(String),
}

impl DatapathError {
    /// The errno of a refused attachment.
    #[must_use]
    pub fn attach_errno(&self) -> Option<i32> {
        let Self::Attach { source, .. } = self else { return None };
        if let ProgramError::SyscallError(error) = source {
            error.io_error.raw_os_error()
        } else if let ProgramError::XdpError(XdpError::NetlinkError(error)) = source {
            error.raw_os_error()
        } else {
            None
        }
    }

    pub(super) fn map(map: &'static str, source: MapError) -> Self {
        Self::Map { map, source }
    }
}

/// The messages of an error and its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
