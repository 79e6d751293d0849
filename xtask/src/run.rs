//! `cargo xtask run`: the playground, or the agent on a real interface.

use std::{os::unix::process::CommandExt as _, process::Command};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use xtask::workspace_root;

use crate::{setup, shell};

/// What to run, and how.
#[derive(Args)]
pub(crate) struct Options {
    /// Exit after the playground's table instead of waiting for Ctrl-C
    #[arg(long, conflicts_with = "iface")]
    once: bool,
    /// Run the agent on this interface instead of the playground
    #[arg(long, value_name = "NAME")]
    iface: Option<String>,
    /// What the agent does with traffic over a limit
    #[arg(long, requires = "iface", default_value = "observe")]
    mode: Mode,
    /// How the agent attaches: native, generic or auto; as deploy/limiter.toml says unless given
    #[arg(long, requires = "iface", value_parser = ["native", "generic", "auto"])]
    xdp: Option<String>,
    /// Further arguments of the playground or of `limiter-agent run`
    #[arg(last = true)]
    args: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    /// Drop nothing, count what would be dropped
    Observe,
    /// Drop what is over a limit
    Enforce,
    /// Limit nothing, count packets
    Bypass,
}

/// Builds, then becomes the playground or the agent.
///
/// # Errors
/// When not root, or when set-up or the build fails.
pub(crate) fn run(options: &Options) -> Result<()> {
    if !shell::is_root() {
        bail!("network namespaces and XDP need root: run `cargo xtask run` as root");
    }
    setup::running()?;

    let mut build = shell::cargo();
    build.args(["build", "-p", "limiter-agent", "--bin", "limiter-agent"]);
    if options.iface.is_none() {
        // Unoptimised, as the tests are: the packets are the kernel's work, and this builds fast.
        build.args(["-p", "limiter-tests", "--bin", "playground"]);
    } else {
        build.arg("--release");
    }
    let hint = if options.iface.is_some() { " (optimised: minutes the first time)" } else { "" };
    println!("building{hint} …");
    shell::run(&mut build)?;

    let mut program = if let Some(interface) = &options.iface {
        let mode = match options.mode {
            Mode::Observe => "observe",
            Mode::Enforce => "enforce",
            Mode::Bypass => "bypass",
        };
        let mut agent = Command::new(shell::target_dir()?.join("release/limiter-agent"));
        agent.args(["run", "--config", "deploy/limiter.toml"]).args([
            "--interface",
            interface,
            "--mode",
            mode,
            // Whoever tries it out expects Ctrl-C to end it.
            "--unpinned",
            "--state",
            "target/state",
        ]);
        if let Some(xdp) = &options.xdp {
            agent.args(["--xdp", xdp]);
        }
        agent
    } else {
        let mut playground = Command::new(shell::target_dir()?.join("debug/playground"));
        playground.args(options.once.then_some("--once"));
        playground
    };
    program.current_dir(workspace_root()).args(&options.args);
    // In place of this process, so that signals need no forwarding.
    let error = program.exec();
    Err(error).with_context(|| format!("cannot run `{}`", shell::line(&program)))
}
