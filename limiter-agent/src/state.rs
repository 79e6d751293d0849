//! What outlives the agent: small files in a directory of its own.
//!
//! A file is replaced as a whole or not at all, says of which version its layout is, and never keeps
//! the agent from starting: one that cannot be read is set aside, with a warning.

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use log::warn;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Only the agent's user may look: it says whom an operator blocked, and why.
const MODE: u32 = 0o700;

/// Something could not be kept.
#[derive(Debug, Error)]
#[error(
    "cannot keep {} over a restart: {source}; make the directory writable for the agent, or give \
     another --state DIR", path.display()
)]
pub struct StateError {
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

/// The agent's directory of state.
#[derive(Clone, Debug)]
pub struct StateDir(PathBuf);

/// A JSON file with its version in front.
#[derive(Serialize, Deserialize)]
struct Versioned<T> {
    version: u32,
    state: T,
}

impl StateDir {
    /// The directory at `path`, made (0700) if it is missing. Where it cannot be written, that is a
    /// warning here and an error of each [`write`](Self::write).
    #[must_use]
    pub fn open(path: &Path) -> Self {
        let state = Self(path.to_owned());
        if let Err(error) = state.probe() {
            warn!("{error}. Until then a restart forgets modes, blocks and confirmations");
        }
        state
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Whether something can be kept.
    ///
    /// # Errors
    /// [`StateError`] if not.
    pub fn probe(&self) -> Result<(), StateError> {
        self.write_bytes("probe", b"")?;
        let path = self.0.join("probe");
        fs::remove_file(&path).map_err(|source| StateError { path, source })
    }

    /// What was written under `name` in this `version`; none if nothing was. What is of another
    /// version or not to be understood is set aside.
    #[must_use]
    pub fn read<T: DeserializeOwned>(&self, name: &str, version: u32) -> Option<T> {
        let bytes = self.read_bytes(name)?;
        match serde_json::from_slice::<Versioned<T>>(&bytes) {
            Ok(file) if file.version == version => Some(file.state),
            Ok(file) => {
                self.set_aside(name, &format!("is of version {}, not {version}", file.version));
                None
            }
            Err(error) => {
                self.set_aside(name, &format!("is damaged ({error})"));
                None
            }
        }
    }

    /// Keeps `state` under `name`.
    ///
    /// # Errors
    /// [`StateError`]; what was kept before is still there.
    pub fn write<T: Serialize>(
        &self,
        name: &str,
        version: u32,
        state: &T,
    ) -> Result<(), StateError> {
        let bytes = serde_json::to_vec_pretty(&Versioned { version, state }).map_err(|error| {
            StateError { path: self.0.join(name), source: io::Error::other(error) }
        })?;
        self.write_bytes(name, &bytes)
    }

    /// The bytes of the file `name`; none if there is none, or (a warning) it cannot be read.
    #[must_use]
    pub fn read_bytes(&self, name: &str) -> Option<Vec<u8>> {
        let path = self.0.join(name);
        match fs::read(&path) {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => {
                warn!("cannot read {}: {error}; going on without it", path.display());
                None
            }
        }
    }

    /// Replaces the file `name` as a whole.
    ///
    /// # Errors
    /// [`StateError`]; the old one is still there.
    pub fn write_bytes(&self, name: &str, bytes: &[u8]) -> Result<(), StateError> {
        let path = self.0.join(name);
        let replace = || -> io::Result<()> {
            DirBuilder::new().recursive(true).mode(MODE).create(&self.0)?;
            let draft = self.0.join(format!("{name}.new"));
            let mut file = File::create(&draft)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&draft, &path)?;
            // The new name, too, must survive a loss of power.
            File::open(&self.0)?.sync_all()
        };
        replace().map_err(|source| StateError { path: path.clone(), source })
    }

    /// Moves a file out of the way that cannot be used, for somebody to look at.
    pub fn set_aside(&self, name: &str, why: &str) {
        let path = self.0.join(name);
        let aside = self.0.join(format!("{name}.damaged"));
        let outcome = match fs::rename(&path, &aside) {
            Ok(()) => format!("it is now {}", aside.display()),
            Err(error) => format!("it cannot be moved away: {error}"),
        };
        warn!("{} {why} and is not used; {outcome}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn what_was_written_is_read_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let state = StateDir::open(&directory.path().join("deep/state"));
        let mode = fs::metadata(state.path()).expect("is made").permissions().mode();
        assert_eq!(mode & 0o777, MODE);
        assert_eq!(state.read::<u32>("number", 1), None);
        state.write("number", 1, &7).expect("is written");
        state.write("number", 1, &8).expect("is replaced");
        assert_eq!(state.read::<u32>("number", 1), Some(8));
        let names = fs::read_dir(state.path()).expect("is there").count();
        assert_eq!(names, 1, "drafts are left");
    }

    #[test]
    fn what_is_damaged_or_of_another_version_is_set_aside() {
        let directory = tempfile::tempdir().expect("a directory");
        let state = StateDir::open(directory.path());
        state.write("number", 2, &7).expect("is written");
        assert_eq!(state.read::<u32>("number", 1), None);
        state.write_bytes("number", b"{\"version\":1,\"sta").expect("is written");
        assert_eq!(state.read::<u32>("number", 1), None);
        assert!(directory.path().join("number.damaged").exists());
        assert!(!directory.path().join("number").exists());
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_an_error_of_each_write() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let state = StateDir::open(&file.path().join("state"));
        let error = state.write("number", 1, &7).expect_err("a file is no directory").to_string();
        assert!(error.contains("--state DIR"), "{error}");
        assert_eq!(state.read::<u32>("number", 1), None);
    }
}
