//! `cargo xtask bench`: what the product costs and lets through, against floors and peers.

use std::{os::unix::process::CommandExt as _, path, path::PathBuf, process::Command};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use xtask::workspace_root;

use crate::{setup, shell};

/// How to measure.
#[derive(Args)]
pub(crate) struct Options {
    /// Less of everything: under two minutes, for a first look
    #[arg(long)]
    quick: bool,
    /// Also write all figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Builds in release, then becomes the benchmark.
///
/// # Errors
/// When not root, or when set-up or the build fails.
pub(crate) fn run(options: &Options) -> Result<()> {
    if !shell::is_root() {
        bail!("network namespaces and XDP need root: run `cargo xtask bench` as root");
    }
    setup::benchmarking()?;
    println!("building …");
    let mut build = shell::cargo();
    build.args(["build", "--release", "-p", "limiter-tests", "--bin", "bench"]);
    build.args(["-p", "limiter-agent", "--bin", "limiter-agent"]);
    shell::run(&mut build)?;

    let mut program = Command::new(shell::target_dir()?.join("release/bench"));
    program.args(options.quick.then_some("--quick")).env("PATH", setup::path_with_tools()?);
    if let Some(file) = &options.json {
        // The benchmark runs elsewhere.
        program.arg("--json").arg(path::absolute(file)?);
    }
    program.current_dir(workspace_root());
    // In place of this process, so that signals need no forwarding.
    let error = program.exec();
    Err(error).with_context(|| format!("cannot run `{}`", shell::line(&program)))
}
