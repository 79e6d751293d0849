//! The program that hears of completed handshakes, and the cgroup that it listens on.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    os::unix::ffi::OsStringExt as _,
    path::PathBuf,
};

use aya::{
    Ebpf,
    programs::{CgroupAttachMode, ProgramError, SockOps, links::FdLink},
};
use limiter_common::abi::HANDSHAKES;

use super::error::{chain, of_program};

/// Why nobody hears of handshakes. Each says the cause and the cure.
#[derive(Debug, thiserror::Error)]
pub enum HandshakesError {
    /// There is nothing to listen on.
    #[error(
        "no root of a cgroup v2 hierarchy is mounted; fix: mount -t cgroup2 cgroup2 /sys/fs/cgroup \
         (in a container, give it the host's)"
    )]
    NoCgroup,
    /// It is there and cannot be opened.
    #[error("the cgroup v2 at {path} cannot be opened: {error}; fix: let the agent read that path")]
    Open {
        /// Where it is mounted.
        path: PathBuf,
        /// The kernel's answer.
        error: io::Error,
    },
    /// The kernel does not take the program.
    #[error(
        "the kernel refused the program: {}; fix: a kernel with CONFIG_CGROUP_BPF, and CAP_BPF, \
         CAP_PERFMON and CAP_NET_ADMIN", chain(.0)
    )]
    Load(#[source] ProgramError),
    /// The kernel does not attach it.
    #[error(
        "the kernel refused to attach the program to the cgroup at {path}: {}; fix: if `bpftool \
         cgroup show {path}` has a sock_ops program without the flag multi, stop what attached it",
        chain(.error)
    )]
    Attach {
        /// Where the cgroup is mounted.
        path: PathBuf,
        /// The kernel's answer.
        error: ProgramError,
    },
}

/// Loads the program and attaches it to the root of the cgroup v2 hierarchy, where it hears of the
/// connections of all processes. Dropping the link detaches it.
pub(super) fn attach(ebpf: &mut Ebpf) -> Result<FdLink, HandshakesError> {
    let path = cgroup()?;
    let cgroup =
        File::open(&path).map_err(|error| HandshakesError::Open { path: path.clone(), error })?;
    let program = ebpf.program_mut(HANDSHAKES).ok_or(ProgramError::NotLoaded);
    let program = program.and_then(TryInto::<&mut SockOps>::try_into);
    let program = program.map_err(HandshakesError::Load)?;
    program.load().map_err(HandshakesError::Load)?;
    // A link always leaves room for others; the flag that asks for it is refused (EINVAL).
    let link = program
        .attach(cgroup, CgroupAttachMode::Single)
        .and_then(|link| program.take_link(link))
        .and_then(|link| FdLink::try_from(link).map_err(of_program));
    link.map_err(|error| HandshakesError::Attach { path, error })
}

/// Where the root of the cgroup v2 hierarchy is mounted.
///
/// # Errors
/// [`HandshakesError::NoCgroup`] if it is nowhere.
pub fn cgroup() -> Result<PathBuf, HandshakesError> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    root(&mounts).ok_or(HandshakesError::NoCgroup)
}

/// Where the root of the cgroup v2 hierarchy is mounted, from `mountinfo` (`proc_pid_mountinfo(5)`).
fn root(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, path) = (fields.next()?, fields.next()?);
        let is_ours = root == "/" && file_system.split(' ').next() == Some("cgroup2");
        is_ours.then(|| unescape(path))
    })
}

/// Space, tab, newline and backslash are written as a backslash and three octal digits.
fn unescape(path: &str) -> PathBuf {
    let mut bytes = Vec::new();
    let mut rest = path.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..3).filter(|_| *first == b'\\');
        let code = code.and_then(|digits| str::from_utf8(digits).ok());
        if let Some(byte) = code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            bytes.push(byte);
            rest = &after[3..];
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
42 31 0:38 /pod7 /mnt/pod rw - cgroup2 cgroup2 rw
41 31 0:38 / /sys/fs/a\\040b rw,relatime shared:4 - cgroup2 cgroup2 rw
";

    #[test]
    fn the_root_of_cgroup_v2_is_found() {
        assert_eq!(root(HYBRID), Some("/sys/fs/a b".into()));
        let unified = "35 24 0:30 / /sys/fs/cgroup rw shared:9 master:1 - cgroup2 none rw";
        assert_eq!(root(unified), Some("/sys/fs/cgroup".into()));
    }

    #[test]
    fn a_host_without_it_has_none() {
        let without: Vec<_> = HYBRID.lines().take(3).collect();
        let without = without.join("\n");
        assert_eq!(root(&without), None);
        assert_eq!(root(""), None);
        assert!(HandshakesError::NoCgroup.to_string().contains("fix: mount -t cgroup2"));
    }
}
