//! The control socket's place in the file system.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, fchmod};
use nix::unistd::Group;
use thiserror::Error;
use tokio::net::{UnixListener, UnixSocket};

/// Who may command the agent: its user and group.
const SOCKET_MODE: u32 = 0o660;
/// Who may see that it runs: everybody.
const DIRECTORY_MODE: u32 = 0o755;
/// Connections that may wait to be accepted.
const BACKLOG: u32 = 64;

/// Why there is no control socket.
#[derive(Debug, Error)]
pub enum ControlError {
    /// Another agent answers on it.
    #[error(
        "another limiter-agent answers on {}; stop it first, or give this one another \
         --control-socket", .0.display()
    )]
    Alive(PathBuf),
    /// Something else is in its place.
    #[error("{} exists and is not a socket; remove it, or give another --control-socket", .0.display())]
    NotASocket(PathBuf),
    /// The host has no such group.
    #[error(
        "cannot give {} to the group \"{group}\": this host has none of that name; make it \
         (`groupadd --system {group}`), or write another `group`", path.display()
    )]
    NoGroup {
        /// The socket's path.
        path: PathBuf,
        /// The group.
        group: String,
    },
    /// The file system refused.
    #[error(
        "cannot make the control socket {}: {source}; give another [control] socket or \
         --control-socket", path.display()
    )]
    Refused {
        /// The socket's path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The bound socket's file; dropping this removes it.
#[derive(Debug)]
pub struct ControlSocket {
    path: PathBuf,
    /// Device and inode, to remove only what was made here.
    identity: (u64, u64),
}

impl ControlSocket {
    /// Binds and listens at `path`, in place of a socket that a dead agent left.
    ///
    /// # Errors
    /// [`ControlError`] if an agent is alive on it or the file system refuses.
    pub fn bind(path: &Path) -> Result<(Self, UnixListener), ControlError> {
        Self::bind_for(path, None)
    }

    /// The same, for the members of `group` as well.
    ///
    /// # Errors
    /// The same, or [`ControlError::NoGroup`].
    pub fn bind_for(
        path: &Path,
        group: Option<&str>,
    ) -> Result<(Self, UnixListener), ControlError> {
        let refused = |source| ControlError::Refused { path: path.to_owned(), source };
        let group = group.map(|name| match Group::from_name(name) {
            Ok(Some(group)) => Ok(group.gid),
            Ok(None) => {
                Err(ControlError::NoGroup { path: path.to_owned(), group: name.to_owned() })
            }
            Err(errno) => Err(refused(errno.into())),
        });
        let group = group.transpose()?;
        make_way(path)?;
        let listener = listen(path).map_err(refused)?;
        if let Some(group) = group {
            chown(path, None, Some(group.as_raw())).map_err(refused)?;
        }
        let made = fs::metadata(path).map_err(refused)?;
        Ok((Self { path: path.to_owned(), identity: (made.dev(), made.ino()) }, listener))
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        let found = fs::metadata(&self.path).map(|found| (found.dev(), found.ino()));
        if found.is_ok_and(|found| found == self.identity)
            && let Err(error) = fs::remove_file(&self.path)
        {
            log::warn!("cannot remove {}: {error}", self.path.display());
        }
    }
}

/// Sees to it that `path` is free and its directory there.
fn make_way(path: &Path) -> Result<(), ControlError> {
    let refused = |source| ControlError::Refused { path: path.to_owned(), source };
    if let Some(directory) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(DIRECTORY_MODE).create(directory).map_err(refused)?;
    }
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(refused(error)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(ControlError::NotASocket(path.to_owned()));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(ControlError::Alive(path.to_owned())),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(refused)
        }
        Err(error) => Err(refused(error)),
    }
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    let socket = UnixSocket::new_stream()?;
    // Before the bind, so that the file is never open to more; after it, because the umask takes
    // its share at the bind.
    fchmod(&socket, Mode::from_bits_truncate(SOCKET_MODE))?;
    socket.bind(path)?;
    let listener = socket.listen(BACKLOG)?;
    fs::set_permissions(path, Permissions::from_mode(SOCKET_MODE))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dead_agents_socket_is_replaced_and_a_live_ones_is_not() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("run/control.sock");
        let (socket, listener) = ControlSocket::bind(&path).expect("binds");
        let mode = fs::metadata(&path).expect("is there").permissions().mode();
        assert_eq!(mode & 0o777, SOCKET_MODE);
        assert!(matches!(ControlSocket::bind(&path), Err(ControlError::Alive(_))));

        // The agent dies without cleaning up.
        drop(listener);
        std::mem::forget(socket);
        let (socket, _listener) = ControlSocket::bind(&path).expect("replaces");
        drop(socket);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn what_is_not_a_socket_stays() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        assert!(matches!(ControlSocket::bind(file.path()), Err(ControlError::NotASocket(_))));
        assert!(file.path().exists());
    }
}
