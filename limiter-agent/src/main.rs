//! `limiter-agent`: see `docs/limiter-agent.md`.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use limiter_agent::cli::Cli;

fn main() -> ExitCode {
    let cli = Cli::parse();
    // Colour only on a terminal: the journal and files get plain lines.
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")).init();
    let Err(failure) = cli.run() else { return ExitCode::SUCCESS };
    let text = failure.to_string();
    if !text.is_empty() {
        // Where nobody listens, the exit code still speaks.
        let _ = writeln!(std::io::stderr(), "{text}");
    }
    failure.code()
}
