//! What build scripts share with the `xtask` commands: how an eBPF object is built.

pub mod bpf;

use std::path::{Path, PathBuf};

/// The root of the workspace this crate was compiled in.
#[must_use]
pub fn workspace_root() -> PathBuf {
    let manifest_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest_dir.parent().unwrap_or(manifest_dir).to_path_buf()
}
