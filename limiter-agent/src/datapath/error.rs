//! What can go wrong between the agent and the kernel.

use std::{io, path::PathBuf};

use aya::{
    EbpfError,
    maps::MapError,
    pin::PinError,
    programs::{ProgramError, links::LinkError, xdp::XdpError},
};
use limiter_common::abi::MAX_OWN_ADDRESSES;

use super::PinsError;

/// Why the datapath could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum DatapathError {
    /// The kernel refused the object or could not make a map.
    #[error("the kernel refused the XDP object: {}", chain(.0))]
    Load(#[source] Box<EbpfError>),
    /// The kernel has no memory for a map.
    #[error(
        "the kernel has not enough memory for the maps ({}); make ipv4_sources and ipv6_sources \
         in [table] smaller, or give the host, or the agent's memory cgroup, more", chain(.0)
    )]
    Memory(#[source] Box<EbpfError>),
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
    /// An attachment could not be pinned.
    #[error("cannot pin {}: {}", path.display(), chain(.source))]
    Pin {
        /// Where.
        path: PathBuf,
        /// The kernel's answer.
        source: PinError,
    },
    /// There are no maps of this version that could be changed without an agent.
    #[error(
        "no agent of this version left anything in {}; start one with `limiter-agent run`",
        .0.display()
    )]
    NothingPinned(PathBuf),
    /// The pins cannot be used.
    #[error(transparent)]
    Pins(#[from] PinsError),
    /// A map could not be shared by memory.
    #[error("map {map} cannot be mapped into memory: {error}")]
    Share {
        /// Its name.
        map: &'static str,
        /// The kernel's answer.
        error: io::Error,
    },
    /// The kernel has no random numbers for the hash key.
    #[error("no random numbers for the hash key: {0}")]
    Random(io::Error),
    /// The host has more addresses than the datapath can tell from others'.
    #[error(
        "this host has {0} addresses, and the datapath knows the first {MAX_OWN_ADDRESSES}: a packet \
         that claims to come from another of them is taken for any stranger's"
    )]
    OwnAddresses(usize),
    /// The timer's ticks came too fast to read the clock between two of them.
    #[error("the kernel's coarse clock cannot be read: a timer tick came in between each time")]
    Clock,
    /// The program's log buffer could not be read.
    #[error("the XDP program's log cannot be read: {0}")]
    Logs(String),
    /// The runtime cannot wait for the ring of samples.
    #[error("cannot wait for samples: {0}; fix: more file descriptors (LimitNOFILE=)")]
    Samples(#[source] io::Error),
    /// The map of watched sources cannot be read.
    #[error("cannot read who is watched: {0}; nothing is measured meanwhile")]
    Watched(#[source] io::Error),
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

    pub(super) fn load(error: EbpfError) -> Self {
        let causes = causes(&error).filter_map(|cause| cause.downcast_ref::<io::Error>());
        let no_memory = causes.filter_map(io::Error::raw_os_error).any(|it| it == libc::ENOMEM);
        let error = Box::new(error);
        if no_memory { Self::Memory(error) } else { Self::Load(error) }
    }

    pub(super) fn map(map: &'static str, source: MapError) -> Self {
        Self::Map { map, source }
    }
}

/// What aya says of links, as it says it of programs.
pub(super) fn of_program(error: LinkError) -> ProgramError {
    match error {
        LinkError::SyscallError(error) => error.into(),
        LinkError::InvalidLink | LinkError::UnknownLinkType(_) => {
            ProgramError::UnexpectedProgramType
        }
    }
}

/// The messages of an error and its causes in one line. Many of aya's repeat their cause's.
pub(super) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    causes(error).map(ToString::to_string).fold(String::new(), |mut line, message| {
        if !line.ends_with(&message) {
            let separator = if line.is_empty() { "" } else { ": " };
            line = format!("{line}{separator}{message}");
        }
        line
    })
}

fn causes<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error), |error| error.source())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(errno: i32) -> String {
        let io_error = io::Error::from_raw_os_error(errno);
        let error = MapError::CreateError { name: "BUCKETS_V4".into(), io_error };
        DatapathError::load(EbpfError::MapError(error)).to_string()
    }

    #[test]
    fn no_memory_is_said_with_the_way_out() {
        let text = refused(libc::ENOMEM);
        assert!(text.starts_with("the kernel has not enough memory for the maps"), "{text}");
        assert!(text.contains("[table]"), "{text}");
        let text = refused(libc::EPERM);
        assert!(text.starts_with("the kernel refused the XDP object: "), "{text}");
    }

    #[test]
    fn a_cause_is_said_once() {
        let text = refused(libc::EPERM);
        assert_eq!(text.matches("BUCKETS_V4").count(), 1, "{text}");
        assert_eq!(text.matches("Operation not permitted").count(), 1, "{text}");
    }
}
