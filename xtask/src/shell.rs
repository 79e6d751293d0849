//! Running other programs.

use std::{
    env,
    ffi::OsStr,
    fs,
    io::Write as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context as _, Result, bail};
use xtask::workspace_root;

/// `cargo` in the workspace's root: the one that runs this.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
    command.current_dir(workspace_root());
    command
}

/// Runs `command` with its output on the terminal.
///
/// # Errors
/// When it cannot start or fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot run `{}`", line(command)))?;
    if !status.success() {
        bail!("`{}` failed", line(command));
    }
    Ok(())
}

/// Runs `command` and returns what it wrote to stdout.
///
/// # Errors
/// When it cannot start, or fails; then with the end of what it wrote.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    const LAST_LINES: usize = 8;
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run `{}`", line(command)))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let all = stdout + &String::from_utf8_lossy(&output.stderr);
        let lines: Vec<_> = all.lines().collect();
        let last = &lines[lines.len().saturating_sub(LAST_LINES)..];
        bail!("`{}` failed:\n{}", line(command), last.join("\n"));
    }
    Ok(stdout)
}

/// Runs `command` with `input` to read and returns what it wrote to stdout.
///
/// # Errors
/// When it cannot start or fails; what it says of that is on the terminal.
pub(crate) fn filter(command: &mut Command, input: &[u8]) -> Result<Vec<u8>> {
    let name = line(command);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run `{name}`"))?;
    let mut stdin = child.stdin.take().context("the child's input was taken already")?;
    // Beside the reading: both pipes may be full at once.
    let output = thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(input));
        child.wait_with_output()
    })?;
    if !output.status.success() {
        bail!("`{name}` failed");
    }
    Ok(output.stdout)
}

/// `command` as a person would type it.
pub(crate) fn line(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let words: Vec<_> = program
        .file_name()
        .into_iter()
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect();
    words.join(" ")
}

/// Whether this process runs as root.
pub(crate) fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

/// Where cargo puts what it builds: two levels above this binary.
///
/// # Errors
/// When this binary was moved elsewhere.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let this = env::current_exe().context("cannot tell where xtask's binary is")?;
    let target_dir = this.ancestors().nth(2).context("xtask's binary is in no target directory")?;
    Ok(target_dir.to_owned())
}
