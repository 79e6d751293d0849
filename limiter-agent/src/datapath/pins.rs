//! What outlives the agent: its maps and attachments, pinned in a BPF file system.
//!
//! ```text
//! /sys/fs/bpf/limiter/          locked by the agent that runs
//!     link-<interface>          the attachment to an interface
//!     handshakes, flow_…        the programs that hear of handshakes and of this host's own flows
//!     maps/<MAP>                the maps that the attached program uses
//!     maps-new/<MAP>            those of a start that has not replaced them yet
//! ```
//!
//! A pin's name has no dots (the file system reserves them), so an interface's `.` is written `%2e`.

use std::{
    fmt,
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use aya::{
    maps::{Array, Map, MapData, MapError},
    programs::links::{FdLink, PinnedLink},
};
use limiter_common::abi::{
    ABI_VERSION, CARRIED_VERSION, ClassId, Identity, Name, Shape, Slot, map,
};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

use super::DatapathError;
use crate::plan::{MapSizes, Names, Plan};

/// Where the pins are unless the command line says otherwise.
pub const DEFAULT_PINS: &str = "/sys/fs/bpf/limiter";

const LINK: &str = "link-";
const MAPS: &str = "maps";
pub(super) const NEW_MAPS: &str = "maps-new";

/// Why the pins cannot be used. Each says the cause and the cure.
#[derive(Debug, thiserror::Error)]
pub enum PinsError {
    /// There is no BPF file system at that place.
    #[error(
        "no BPF file system is mounted at {at}; fix: mount -t bpf bpf {at} (systemd mounts it at boot; \
         `ip netns exec` hides it, `nsenter --net=…` does not), or start with --unpinned: then nothing \
         is limited while no agent runs", at = .0.display()
    )]
    NoBpffs(PathBuf),
    /// Another agent has them.
    #[error(
        "another agent runs with the pins in {}; stop it first, or give this one others with --pins DIR",
        .0.display()
    )]
    Busy(PathBuf),
    /// The file system refused.
    #[error("{}: {error}; fix: run as root, or give the agent that directory", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        error: io::Error,
    },
}

/// The pins of one agent, locked until this is dropped.
#[derive(Debug)]
pub struct Pins {
    directory: PathBuf,
    /// Locked as long as it is open, so also an agent that was killed leaves it unlocked.
    _lock: File,
}

/// A set of maps that an agent left.
#[derive(Debug)]
pub struct LeftMaps {
    pub(super) directory: PathBuf,
    pub(super) identity: Identity,
    /// How large they are and whose numbers they hold, if that can be read.
    pub(super) known: Option<(MapSizes, Names)>,
    /// Whether they are of this agent's version, and all there.
    pub(super) is_current: bool,
}

impl Pins {
    /// Makes the directory if need be, and locks it.
    ///
    /// # Errors
    /// [`PinsError`] if another agent runs with it, or it cannot be had.
    pub fn open(directory: &Path) -> Result<Self, PinsError> {
        let failed = |error| PinsError::Io { path: directory.to_owned(), error };
        let parent = directory.parent().unwrap_or(directory);
        if !is_bpffs(parent) {
            return Err(PinsError::NoBpffs(parent.to_owned()));
        }
        match fs::create_dir(directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(error));
            }
            _ => {}
        }
        let lock = File::open(directory).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(PinsError::Busy(directory.to_owned())),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        // Whoever detaches removes the directory while it has it locked.
        let is_there = fs::metadata(directory)
            .and_then(|there| Ok(there.ino() == lock.metadata()?.ino()))
            .unwrap_or(false);
        if !is_there {
            return Err(PinsError::Busy(directory.to_owned()));
        }
        Ok(Self { directory: directory.to_owned(), _lock: lock })
    }

    /// Where they are.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where the maps of a start are pinned before they replace others. What a start that was ended
    /// left there is removed.
    pub(super) fn new_maps(&self) -> Result<PathBuf, PinsError> {
        let path = self.directory.join(NEW_MAPS);
        remove_maps(&path)?;
        fs::create_dir(&path).map_err(|error| PinsError::Io { path: path.clone(), error })?;
        Ok(path)
    }

    /// Puts the new maps in the place of the old ones.
    pub(super) fn keep_new_maps(&self) -> Result<(), PinsError> {
        let (old, new) = (self.directory.join(MAPS), self.directory.join(NEW_MAPS));
        remove_maps(&old)?;
        fs::rename(&new, &old).map_err(|error| PinsError::Io { path: new, error })
    }

    /// Forgets the new maps.
    pub(super) fn drop_new_maps(&self) {
        // What cannot be removed now is removed by the next start.
        let _ = remove_maps(&self.directory.join(NEW_MAPS));
    }

    /// The attachment to an interface that an agent left, if there is one.
    pub(super) fn link(&self, interface: &str) -> Option<FdLink> {
        PinnedLink::from_pin(self.link_path(interface)).ok().map(FdLink::from)
    }

    /// Pins the attachment to an interface.
    pub(super) fn keep_link(&self, interface: &str, link: FdLink) -> Result<FdLink, DatapathError> {
        keep(&self.link_path(interface), link)
    }

    /// Unpins the attachment to an interface.
    pub(super) fn drop_link(&self, interface: &str) {
        // One that is not there is as good as removed.
        let _ = fs::remove_file(self.link_path(interface));
    }

    /// Pins the attachment of a program on the cgroup, in the place of an older one.
    pub(super) fn keep_other(&self, name: &str, link: FdLink) -> Result<FdLink, DatapathError> {
        keep(&self.directory.join(name), link)
    }

    /// Whether a program on the cgroup is attached under this name.
    pub(super) fn has_other(&self, name: &str) -> bool {
        self.directory.join(name).exists()
    }

    /// The interfaces that have a pin.
    pub(super) fn interfaces(&self) -> Vec<String> {
        interfaces(&self.directory)
    }

    /// The maps that the attached programs use.
    pub(super) fn maps(&self) -> Option<LeftMaps> {
        maps(&self.directory)
    }

    /// Removes everything, which detaches what no process holds; the directory goes with it.
    ///
    /// # Errors
    /// [`PinsError::Io`] with the first that cannot be removed.
    pub fn clear(self) -> Result<(), PinsError> {
        let failed = |path: &Path, error| PinsError::Io { path: path.to_owned(), error };
        for interface in self.interfaces() {
            self.drop_link(&interface);
        }
        for maps in [MAPS, NEW_MAPS] {
            remove_maps(&self.directory.join(maps))?;
        }
        for entry in
            fs::read_dir(&self.directory).map_err(|e| failed(&self.directory, e))?.flatten()
        {
            fs::remove_file(entry.path()).map_err(|error| failed(&entry.path(), error))?;
        }
        Ok(())
    }

    fn link_path(&self, interface: &str) -> PathBuf {
        self.directory.join(format!("{LINK}{}", escape(interface)))
    }
}

impl Drop for Pins {
    /// Nothing is left of a start that came to nothing.
    fn drop(&mut self) {
        // It is refused where there are pins.
        let _ = fs::remove_dir(&self.directory);
    }
}

/// Pins a link, in the place of an older one.
fn keep(path: &Path, link: FdLink) -> Result<FdLink, DatapathError> {
    let _ = fs::remove_file(path);
    let pinned =
        link.pin(path).map_err(|source| DatapathError::Pin { path: path.to_owned(), source })?;
    Ok(pinned.into())
}

/// The interfaces that have a pin in `directory`.
pub(super) fn interfaces(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| {
        let name = entry.file_name();
        name.to_str()?.strip_prefix(LINK).map(unescape)
    });
    let mut names: Vec<_> = names.collect();
    names.sort_unstable();
    names
}

/// The maps in `directory` that the attached programs use: mostly there is one set. A start that was
/// ended in the middle leaves two; then the new one counts if some program uses it.
pub(super) fn maps(directory: &Path) -> Option<LeftMaps> {
    let links = interfaces(directory);
    let attached = links.iter().filter_map(|interface| {
        let path = directory.join(format!("{LINK}{}", escape(interface)));
        Some(PinnedLink::from_pin(path).map(FdLink::from).ok()?.info().ok()?.program_id())
    });
    let attached: Vec<u32> = attached.collect();
    let is_in_use =
        |maps: &LeftMaps| maps.identity.programs.iter().any(|program| attached.contains(program));
    let new = LeftMaps::read(directory.join(NEW_MAPS)).filter(is_in_use);
    new.or_else(|| {
        // Without attachments nothing contradicts them.
        let old = LeftMaps::read(directory.join(MAPS))?;
        (attached.is_empty() || is_in_use(&old)).then_some(old)
    })
}

impl fmt::Display for LeftMaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ABI {}", self.identity.version)
    }
}

impl LeftMaps {
    fn read(directory: PathBuf) -> Option<Self> {
        let identity: Identity = array(&directory, map::IDENTITY).ok()?.get(&0, 0).ok()?;
        let is_whole = map::KEPT.iter().all(|map| directory.join(pin_name(map)).exists());
        let is_current = identity.version == ABI_VERSION && is_whole;
        let known = (identity.carried == CARRIED_VERSION).then(|| known(&directory));
        Some(Self { directory, identity, known: known.and_then(Result::ok), is_current })
    }

    /// How large they are, if `plan` can do with them as they are.
    pub(super) fn fit(&self, plan: &Plan) -> Option<MapSizes> {
        let (sizes, _) = self.known.as_ref().filter(|_| self.is_current)?;
        plan.fits(sizes).is_ok().then_some(*sizes)
    }
}

fn known(directory: &Path) -> Result<(MapSizes, Names), MapError> {
    let shape: Shape = array(directory, map::SHAPE)?.get(&0, 0)?;
    let sizes = MapSizes::from(shape);
    let names: Array<MapData, Name> = array(directory, map::NAMES)?;
    let name = |place| names.get(&place, 0).ok().and_then(|name| name.text().map(str::to_owned));
    let classes = (1..sizes.counters.classes).map(ClassId);
    let classes = classes.filter_map(|id| Some((name(Name::of_class(id))?, id)));
    let slots = (1..sizes.counters.slots).map(Slot);
    let slots = slots.filter_map(|slot| Some((name(Name::of_slot(slot))?, slot)));
    let names = Names::restored(classes, slots, &sizes);
    Ok((sizes, names))
}

/// A pinned array.
pub(super) fn array<V: aya::Pod>(
    directory: &Path,
    name: &str,
) -> Result<Array<MapData, V>, MapError> {
    Map::from_map_data(MapData::from_pin(directory.join(pin_name(name)))?)?.try_into()
}

/// The file name for a map: that of the variables begins with a dot.
pub(super) fn pin_name(map: &str) -> &str {
    if map == map::HEAD { "HEAD" } else { map }
}

fn remove_maps(path: &Path) -> Result<(), PinsError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(PinsError::Io { path: path.to_owned(), error })
        }
        _ => Ok(()),
    }
}

fn is_bpffs(path: &Path) -> bool {
    statfs(path).is_ok_and(|found| found.filesystem_type() == BPF_FS_MAGIC)
}

/// The name of an interface as a part of a pin's.
fn escape(interface: &str) -> String {
    interface.replace('%', "%25").replace('.', "%2e")
}

fn unescape(part: &str) -> String {
    part.replace("%2e", ".").replace("%25", "%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_interfaces_come_back() {
        for name in ["eth0", "bond0.100", "a%2eb", "%", "x.%25"] {
            assert!(!escape(name).contains('.'), "{name}");
            assert_eq!(unescape(&escape(name)), name);
        }
    }

    #[test]
    fn another_file_system_is_refused_with_the_cure() {
        let error = Pins::open(Path::new("/proc/limiter")).expect_err("not a bpffs").to_string();
        assert!(error.contains("at /proc; fix: mount -t bpf bpf /proc ("), "{error}");
    }
}
