//! A BPF file system of a test's own.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;

/// A mounted BPF file system, which goes with all its pins when this is dropped.
pub struct Bpffs {
    path: PathBuf,
    /// What it is mounted on, if that goes with it.
    directory: Option<TempDir>,
}

impl Bpffs {
    /// Mounts one.
    ///
    /// # Errors
    /// If it cannot be mounted.
    pub fn new() -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("limiter-test-").tempdir()?;
        let mut mounted = Self::at(directory.path().to_owned())?;
        mounted.directory = Some(directory);
        Ok(mounted)
    }

    /// Mounts one on a directory that is there.
    ///
    /// # Errors
    /// If it cannot be mounted.
    pub fn at(path: PathBuf) -> Result<Self> {
        mount(Some("bpf"), &path, Some("bpf"), MsFlags::empty(), None::<&str>)
            .context("mounting a BPF file system")?;
        Ok(Self { path, directory: None })
    }

    /// A directory for an agent's pins, which is not there yet.
    #[must_use]
    pub fn pins(&self) -> PathBuf {
        self.path.join("limiter")
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        // Also with an agent that still has a file of it open.
        let _ = umount2(&self.path, MntFlags::MNT_DETACH);
    }
}
