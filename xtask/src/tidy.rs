//! `cargo xtask tidy`: the rules that the compiler does not enforce. `ARCHITECTURE.md` gives their
//! reasons; a rule here that no made-up input can break is not a rule (see the tests).

mod abi;
mod code;
mod rules;

use std::{fmt, fs};

use anyhow::{Context as _, Result, bail};
use xtask::workspace_root;

use crate::shell;

/// Runs all checks; prints the problems and one summary line.
///
/// With `bless`, first writes down the ABI as it is now.
///
/// # Errors
/// When there is a problem, or a check cannot run.
pub(crate) fn run(bless: bool) -> Result<()> {
    let files = workspace_files()?;
    let mut problems: Vec<_> = files.iter().flat_map(rules::check_file).collect();
    problems.extend(rules::check_presence(&files));
    problems.extend(abi::check(&files, bless)?);
    for problem in &problems {
        println!("{problem}");
    }
    let failed: Vec<_> = tools().into_iter().filter(|command| !succeeds(command)).collect();
    if !problems.is_empty() || !failed.is_empty() {
        let failed = if failed.is_empty() { "none".to_owned() } else { failed.join("; ") };
        bail!(
            "tidy: {} problem(s) in {} files; failed of cargo: {failed}",
            problems.len(),
            files.len()
        );
    }
    println!("tidy: {} files, no problems", files.len());
    Ok(())
}

/// A broken rule.
#[derive(Debug, PartialEq, Eq)]
struct Problem {
    path: String,
    /// Counted from 1; 0 where the whole file is meant.
    line: usize,
    what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.what),
            line => write!(f, "{}:{line}: {}", self.path, self.what),
        }
    }
}

/// A file of the workspace.
#[derive(Debug)]
struct File {
    /// Relative to the workspace's root, with `/`.
    path: String,
    /// In bytes.
    size: usize,
    /// Empty if it is not UTF-8.
    text: String,
}

/// What git tracks, and what it would track: a new file is checked before it is added.
fn workspace_files() -> Result<Vec<File>> {
    let root = workspace_root();
    let mut list = std::process::Command::new("git");
    list.current_dir(&root).args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let listed = shell::output(&mut list)?;
    let mut files = Vec::new();
    for path in listed.split_terminator('\0') {
        let full = root.join(path);
        // Deleted, but not yet for git.
        if !full.is_file() {
            continue;
        }
        let bytes = fs::read(&full).with_context(|| format!("cannot read {path}"))?;
        let size = bytes.len();
        let text = String::from_utf8(bytes).unwrap_or_default();
        files.push(File { path: path.to_owned(), size, text });
    }
    Ok(files)
}

fn tools() -> [String; 2] {
    [
        "fmt --all --check".to_owned(),
        // The eBPF packages build for their own target only, with `-D warnings`.
        "clippy --quiet --workspace --exclude limiter-ebpf --exclude limiter-tests-ebpf \
         --all-targets -- -D warnings"
            .to_owned(),
    ]
}

/// Runs cargo with `arguments`; what it finds goes to the terminal.
fn succeeds(arguments: &str) -> bool {
    let status = shell::cargo().args(arguments.split_whitespace()).status();
    status.is_ok_and(|status| status.success())
}
