//! The command line: its grammar, and what each command's outcome means for the exit code.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::api::{DEFAULT_RATE, HIGHEST_RATE};
use crate::datapath::DEFAULT_PINS;
use crate::events::{By, Of, Span};
use crate::{capture, check, client, doctor, run, top};

/// Where the configuration lies unless the command line says otherwise.
pub const DEFAULT_CONFIG: &str = "/etc/limiter/limiter.toml";
/// Where the daemon listens for commands unless the command line says otherwise.
pub const DEFAULT_SOCKET: &str = "/run/limiter/control.sock";
/// Where the daemon keeps what outlives it unless the command line says otherwise.
pub const DEFAULT_STATE: &str = "/var/lib/limiter";

/// Limits floods per source before the kernel spends memory on them (XDP).
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Exit codes: 0 done; 1 the request or the configuration is wrong; 2 wrong usage; \
                  3 the agent or the kernel could not do it."
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Attach to the interfaces and limit until SIGTERM
    Run(RunArgs),
    /// Validate a configuration file without touching the kernel
    Check(CheckArgs),
    /// Say what on this host keeps the agent from its work, or makes it slow, and the fix
    Doctor(DoctorArgs),
    /// Show what the running agent does
    Status(ClientArgs),
    /// Show packets that the running agent drops, or would drop, with the reasons
    Capture(CaptureArgs),
    /// Show who, or what, the running agent drops most, or would drop, as it changes
    Top(TopArgs),
    /// Show packets that the running agent dropped, would have dropped, or soon will
    Events(EventsArgs),
    /// Make the running agent read its configuration again
    Reload(ClientArgs),
    /// Put another configuration in force, for good or until it is not confirmed
    Apply(ApplyArgs),
    /// Keep what was applied last
    Confirm(ClientArgs),
    /// Change the mode at once, over reloads and restarts
    Mode(ModeArgs),
    /// Drop all from a network at once, over reloads and restarts
    Block(BlockArgs),
    /// Take a block back
    Unblock(UnblockArgs),
    /// Detach from all interfaces and leave nothing behind, also where no agent runs
    Detach(ClientArgs),
}

/// Arguments of `limiter-agent run`. What is given here outranks the file, also after a reload.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// The configuration file
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    pub config: PathBuf,
    /// The Unix socket for commands, instead of the file's
    #[arg(long, value_name = "PATH")]
    pub control_socket: Option<PathBuf>,
    /// The address for /metrics, instead of the file's
    #[arg(long, value_name = "ADDR", value_parser = socket_address)]
    pub metrics_listen: Option<SocketAddr>,
    /// Interfaces to guard, instead of the file's, separated by spaces; may be repeated
    #[arg(long = "interface", value_name = "NAME", num_args = 1..)]
    pub interfaces: Vec<String>,
    /// The mode of all classes, instead of the file's
    #[arg(long)]
    pub mode: Option<ModeArg>,
    /// How to attach to all interfaces, instead of the file's
    #[arg(long)]
    pub xdp: Option<XdpArg>,
    /// Where maps and attachments are pinned, in a BPF file system
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PINS)]
    pub pins: PathBuf,
    /// Pin nothing: limiting ends with the agent
    #[arg(long, conflicts_with = "pins")]
    pub unpinned: bool,
    /// The directory for what must outlive the agent: modes, blocks, the confirmed configuration
    #[arg(long, value_name = "DIR", default_value = DEFAULT_STATE)]
    pub state: PathBuf,
}

impl RunArgs {
    /// Where to pin, if at all.
    #[must_use]
    pub fn pins(&self) -> Option<&Path> {
        (!self.unpinned).then_some(&self.pins)
    }
}

/// Arguments of `limiter-agent apply`.
#[derive(Clone, Debug, Args)]
pub struct ApplyArgs {
    /// The configuration file; mostly the agent's own, edited in place
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Go back to what was in force unless `confirm` comes in this time: 60s, 5m
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub confirm: Option<Duration>,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Arguments of `limiter-agent mode`.
#[derive(Clone, Debug, Args)]
pub struct ModeArgs {
    /// The mode
    #[arg(value_name = "MODE")]
    pub mode: NewMode,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// A mode to change to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NewMode {
    /// Drop nothing in any class; count what would be dropped
    Observe,
    /// Drop what is over its limit, but for classes with a mode of their own
    Enforce,
    /// Limit nothing in any class; count packets
    Bypass,
    /// Do as the configuration says
    Config,
}

impl NewMode {
    /// As the control socket spells it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Observe => "observe",
            Self::Enforce => "enforce",
            Self::Bypass => "bypass",
            Self::Config => "config",
        }
    }
}

/// Arguments of `limiter-agent block`.
#[derive(Clone, Debug, Args)]
pub struct BlockArgs {
    /// The network, or an address
    #[arg(value_name = "CIDR")]
    pub cidr: String,
    /// How long: 10m, 2h; without it until `unblock`
    #[arg(long = "for", value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub duration: Option<Duration>,
    /// Why, for `status`
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Arguments of `limiter-agent unblock`.
#[derive(Clone, Debug, Args)]
pub struct UnblockArgs {
    /// The network as it was blocked
    #[arg(value_name = "CIDR")]
    pub cidr: String,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// A mode as the command line spells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModeArg {
    /// Drop nothing; count what would be dropped
    Observe,
    /// Drop what is over its limit
    Enforce,
    /// Limit nothing; count packets
    Bypass,
}

/// A way to attach as the command line spells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum XdpArg {
    /// In the driver, or not at all
    Native,
    /// In the network stack, which is slower
    Generic,
    /// In the driver if it can, else generic
    Auto,
}

/// Arguments of `limiter-agent check`.
#[derive(Clone, Debug, Args)]
pub struct CheckArgs {
    /// The configuration file
    #[arg(value_name = "FILE", default_value = DEFAULT_CONFIG)]
    pub file: PathBuf,
    /// Answer in JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `limiter-agent doctor`.
#[derive(Clone, Debug, Args)]
pub struct DoctorArgs {
    /// Interfaces to look at, instead of the file's, separated by spaces; may be repeated
    #[arg(long = "iface", value_name = "NAME", num_args = 1..)]
    pub interfaces: Vec<String>,
    /// The configuration file [default: /etc/limiter/limiter.toml, or none if that is missing]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Answer in JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of the commands that ask the running agent.
#[derive(Clone, Debug, Args)]
pub struct ClientArgs {
    /// Answer in JSON
    #[arg(long)]
    pub json: bool,
    /// The running agent's Unix socket
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    pub control_socket: PathBuf,
    /// Where the maps and attachments of an agent that is gone are pinned
    #[arg(long, value_name = "DIR", default_value = DEFAULT_PINS)]
    pub pins: PathBuf,
}

/// Arguments of `limiter-agent capture`.
#[derive(Clone, Debug, Args)]
pub struct CaptureArgs {
    /// Write a pcapng file for tcpdump and Wireshark (`-` for standard output) instead of a line for
    /// each packet
    #[arg(short, long, value_name = "FILE", conflicts_with = "json")]
    pub write: Option<PathBuf>,
    /// Stop after so many packets
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// Stop after this time: 30s, 5m
    #[arg(long = "for", value_name = "DURATION")]
    pub duration: Option<humantime::Duration>,
    /// Take so many packets at most: 100/s
    #[arg(long, value_name = "N/s", default_value_t = DEFAULT_RATE, value_parser = capture_rate)]
    pub rate: u32,
    /// Only what came in on these interfaces, separated by spaces; may be repeated
    #[arg(long = "interface", value_name = "NAME", num_args = 1..)]
    pub interfaces: Vec<String>,
    /// Only these reasons, as `status` and metrics have them; may be repeated
    #[arg(long = "reason", value_name = "REASON", num_args = 1..)]
    pub reasons: Vec<String>,
    /// Only these classes; may be repeated
    #[arg(long = "class", value_name = "NAME", num_args = 1..)]
    pub classes: Vec<String>,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Arguments of `limiter-agent top`.
#[derive(Clone, Debug, Args)]
pub struct TopArgs {
    /// Print a table once instead of a live view; so it is where standard output is no terminal
    #[arg(long)]
    pub once: bool,
    /// What is ranked
    #[arg(long, value_name = "WHAT", default_value = "sources")]
    pub of: Of,
    /// In which order
    #[arg(long, value_name = "ORDER", default_value = "packets")]
    pub by: By,
    /// Over which time
    #[arg(long, value_name = "TIME", default_value = "10s")]
    pub window: Span,
    /// How many entries, up to 1000
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub limit: usize,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Arguments of `limiter-agent events`.
#[derive(Clone, Debug, Args)]
pub struct EventsArgs {
    /// Go on with what comes, until Ctrl-C
    #[arg(long)]
    pub follow: bool,
    /// How many of the last ones, up to 1024
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub limit: usize,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Why a command did not do what it was asked; decides the exit code.
#[derive(Debug)]
pub enum Failure {
    /// The request or the configuration is wrong: exit code 1.
    Request(String),
    /// The agent or the kernel could not do it: exit code 3.
    Machine(String),
}

impl Cli {
    /// Runs the command to its end.
    ///
    /// # Errors
    /// [`Failure`] holds what to tell the user.
    pub fn run(self) -> Result<(), Failure> {
        match self.command {
            Command::Run(args) => run::run(args),
            Command::Check(args) => check::check(&args),
            Command::Doctor(args) => doctor::doctor(&args),
            Command::Status(args) => client::status(&args),
            Command::Capture(args) => capture::capture(&args),
            Command::Top(args) => top::top(&args),
            Command::Events(args) => top::events(&args),
            Command::Reload(args) => client::reload(&args),
            Command::Apply(args) => client::apply(&args),
            Command::Confirm(args) => client::confirm(&args),
            Command::Mode(args) => client::mode(&args),
            Command::Block(args) => client::block(&args),
            Command::Unblock(args) => client::unblock(&args),
            Command::Detach(args) => client::detach(&args),
        }
    }
}

impl Failure {
    /// A machine failure with all its causes.
    #[must_use]
    pub fn machine(error: &anyhow::Error) -> Self {
        Self::Machine(format!("{error:#}"))
    }

    /// The exit code.
    #[must_use]
    pub fn code(&self) -> ExitCode {
        ExitCode::from(self.number())
    }

    const fn number(&self) -> u8 {
        match self {
            Self::Request(_) => 1,
            // 2 is clap's, for usage.
            Self::Machine(_) => 3,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(text) | Self::Machine(text) => out.write_str(text),
        }
    }
}

fn socket_address(text: &str) -> Result<SocketAddr, &'static str> {
    text.parse().map_err(|_| "write an IP address and a port: 127.0.0.1:9478 or [::1]:9478")
}

/// Packets a second, with or without the unit.
fn capture_rate(text: &str) -> Result<u32, String> {
    let rate = text.strip_suffix("/s").unwrap_or(text).parse();
    let rate = rate.ok().filter(|rate| (1..=HIGHEST_RATE).contains(rate));
    rate.ok_or_else(|| format!("write 1/s to {HIGHEST_RATE}/s"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_grammar_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn usage_errors_exit_with_2() {
        let error = Cli::try_parse_from(["limiter-agent", "fly"]).expect_err("no such command");
        assert_eq!(error.exit_code(), 2);
    }

    #[test]
    fn a_wrong_metrics_address_is_answered_with_a_right_one() {
        let line = ["limiter-agent", "run", "--metrics-listen", "localhost:9478"];
        let error = Cli::try_parse_from(line).expect_err("not an address").to_string();
        assert!(error.contains("127.0.0.1:9478 or [::1]:9478"), "{error}");
    }

    #[test]
    fn a_capture_takes_a_rate_with_or_without_its_unit() {
        for (text, rate) in [("250/s", Some(250)), ("10", Some(10)), ("0/s", None), ("1/m", None)] {
            assert_eq!(capture_rate(text).ok(), rate, "{text}");
        }
        let line = "limiter-agent capture -w a.pcapng --for 30s --reason blocked martian";
        let cli = Cli::try_parse_from(line.split(' ')).expect("parses");
        let Command::Capture(args) = cli.command else { panic!("not capture") };
        assert_eq!(args.reasons, ["blocked", "martian"]);
        assert_eq!(args.duration.map(|it| it.as_secs()), Some(30));
        let line = "limiter-agent capture -w a.pcapng --json";
        Cli::try_parse_from(line.split(' ')).expect_err("one or the other");
    }

    #[test]
    fn failures_exit_with_1_and_3() {
        assert_eq!(Failure::Request(String::new()).number(), 1);
        assert_eq!(Failure::Machine(String::new()).number(), 3);
    }

    #[test]
    fn run_takes_several_interfaces_in_either_spelling() {
        for line in [
            "limiter-agent run --interface a b --mode enforce",
            "limiter-agent run --interface a --interface b --mode enforce",
        ] {
            let cli = Cli::try_parse_from(line.split(' ')).expect("parses");
            let Command::Run(args) = cli.command else { panic!("not run") };
            assert_eq!(args.interfaces, ["a", "b"]);
            assert_eq!(args.mode, Some(ModeArg::Enforce));
            assert_eq!(args.config, PathBuf::from(DEFAULT_CONFIG));
        }
    }
}
