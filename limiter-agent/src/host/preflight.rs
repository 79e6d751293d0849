//! What must hold before anything is loaded, each failure with its fix.

use std::path::Path;

use caps::{CapSet, Capability};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use nix::sys::utsname::uname;
use thiserror::Error;

use super::privileges::NEEDED;
use super::{Link, RealMode};

/// Where the BPF file system belongs.
const BPFFS: &str = "/sys/fs/bpf";
/// The oldest kernel whose XDP takes multi-buffer (jumbo) frames.
const OLDEST: (u32, u32) = (5, 18);

/// Why this machine cannot run the agent as it stands.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Unfit {
    /// Not root, nor the capabilities instead.
    #[error(
        "missing {}: loading and attaching an XDP program needs CAP_BPF, CAP_PERFMON and \
         CAP_NET_ADMIN; fix: run as root, or grant them (systemd: AmbientCapabilities=)",
        .0.join(" and ")
    )]
    Capabilities(Vec<String>),
    /// No BPF file system.
    #[error(
        "no BPF file system is mounted at {BPFFS}; fix: mount -t bpf bpf {BPFFS} \
         (systemd mounts it at boot; `ip netns exec` hides it, `nsenter --net=…` does not)"
    )]
    NoBpffs,
    /// The kernel lacks what the program uses.
    #[error(
        "kernel {0} is too old: the program needs 5.18 or newer, the first whose XDP takes \
         multi-buffer frames; fix: boot a newer kernel"
    )]
    Kernel(String),
    /// Another program is where ours would go.
    #[error(
        "{interface} already has an XDP program that somebody else attached: id {program}{}; \
         fix: {}",
        name.as_ref().map(|name| format!(", named {name}")).unwrap_or_default(),
        detaching(interface, mode.keyword(), &program.to_string())
    )]
    Claimed {
        /// The interface.
        interface: String,
        /// How it is attached.
        mode: RealMode,
        /// The program's id.
        program: u32,
        /// Its name, if it has one.
        name: Option<String>,
    },
}

/// How to get rid of `program` on `interface`. A `bpf_link` ends with the process that holds it or by
/// force, and the kernel lets nobody remove its program over netlink; what was attached over netlink
/// has no link, and stays when its process ends.
pub(super) fn detaching(interface: &str, keyword: &str, program: &str) -> String {
    format!(
        "stop the process that holds it (`grep -l 'prog_id:.{program}$' /proc/[0-9]*/fdinfo/*` \
         finds it); to detach it by force, `bpftool link detach id N` if `bpftool link show` has a \
         link N of prog {program}, else `ip link set dev {interface} {keyword} off`"
    )
}

/// Checks privileges and kernel version. (The BPF file system is looked at by who pins something there.)
///
/// # Errors
/// [`Unfit`] names the first that does not hold, and its fix.
pub fn preflight() -> Result<(), Unfit> {
    let [capabilities, kernel, _] = requirements();
    [capabilities, kernel].into_iter().try_for_each(|(_, outcome)| outcome.map(drop))
}

/// What the agent needs, each by its name: what was found, or what does not hold.
pub fn requirements() -> [(&'static str, Result<String, Unfit>); 3] {
    let held = capabilities(|capability| {
        // An unreadable set counts as held; the kernel will have the last word.
        caps::has_cap(None, CapSet::Effective, capability).unwrap_or(true)
    });
    let release = uname().map(|name| name.release().to_string_lossy().into_owned());
    let release = release.unwrap_or_default();
    [
        ("capabilities", held.map(|()| "those that are needed are held".to_owned())),
        ("kernel", kernel(&release).map(|()| format!("Linux {release}"))),
        ("bpffs", bpffs(Path::new(BPFFS)).map(|()| format!("mounted at {BPFFS}"))),
    ]
}

/// Whether the kernel tells this process the names of programs that it has no descriptor of.
#[must_use]
pub fn sees_programs() -> bool {
    caps::has_cap(None, CapSet::Effective, Capability::CAP_SYS_ADMIN).unwrap_or(true)
}

/// How much memory this process may lock, in bytes; none if as much as it likes.
#[must_use]
pub fn memlock() -> Option<u64> {
    let (limit, _) = getrlimit(Resource::RLIMIT_MEMLOCK).ok()?;
    (limit != RLIM_INFINITY).then_some(limit)
}

/// Checks that no XDP program is attached to the interface. `name_of` finds a program's name.
///
/// # Errors
/// [`Unfit::Claimed`] if one is.
pub fn unclaimed(link: &Link, name_of: impl Fn(u32) -> Option<String>) -> Result<(), Unfit> {
    let Some(mode) = link.xdp else { return Ok(()) };
    let program = link.program.unwrap_or_default();
    Err(Unfit::Claimed { interface: link.name.clone(), mode, program, name: name_of(program) })
}

fn capabilities(held: impl Fn(Capability) -> bool) -> Result<(), Unfit> {
    if held(Capability::CAP_SYS_ADMIN) {
        return Ok(());
    }
    let missing: Vec<_> =
        NEEDED.into_iter().filter(|needed| !held(*needed)).map(|cap| cap.to_string()).collect();
    if missing.is_empty() { Ok(()) } else { Err(Unfit::Capabilities(missing)) }
}

/// `release` is what `uname -r` prints. One that cannot be read passes: the kernel decides.
fn kernel(release: &str) -> Result<(), Unfit> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
        return Ok(());
    };
    if (major, minor) < OLDEST { Err(Unfit::Kernel(release.to_owned())) } else { Ok(()) }
}

fn bpffs(path: &Path) -> Result<(), Unfit> {
    match statfs(path) {
        Ok(found) if found.filesystem_type() == BPF_FS_MAGIC => Ok(()),
        _ => Err(Unfit::NoBpffs),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_kernels_are_refused_by_name() {
        assert_eq!(kernel("5.15.0-91-generic"), Err(Unfit::Kernel("5.15.0-91-generic".into())));
        assert_eq!(kernel("4.19.0"), Err(Unfit::Kernel("4.19.0".into())));
        for fine in ["5.18.0", "6.1.0-18-amd64", "10.0", "odd"] {
            assert_eq!(kernel(fine), Ok(()), "{fine}");
        }
    }

    #[test]
    fn missing_capabilities_are_named() {
        let error = capabilities(|cap| cap == Capability::CAP_BPF).expect_err("two are missing");
        assert!(error.to_string().starts_with("missing CAP_PERFMON and CAP_NET_ADMIN:"), "{error}");
        assert_eq!(capabilities(|cap| cap == Capability::CAP_SYS_ADMIN), Ok(()));
        assert_eq!(capabilities(|cap| cap != Capability::CAP_SYS_ADMIN), Ok(()));
    }

    #[test]
    fn a_directory_is_not_a_bpffs() {
        assert_eq!(bpffs(Path::new("/")), Err(Unfit::NoBpffs));
        assert_eq!(bpffs(Path::new("/nonexistent")), Err(Unfit::NoBpffs));
    }

    #[test]
    fn a_foreign_program_is_named_with_its_fix() {
        let link = Link {
            name: "eth0".into(),
            xdp: Some(RealMode::Generic),
            program: Some(42),
            ..Link::default()
        };
        let text = unclaimed(&link, |_| Some("other".into())).expect_err("claimed").to_string();
        assert!(
            text.contains("id 42, named other")
                && text.contains(
                    "bpftool link detach id N` if `bpftool link show` has a link N of prog 42"
                )
                && text.contains("else `ip link set dev eth0 xdpgeneric off`"),
            "{text}"
        );
    }
}
