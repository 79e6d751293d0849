//! `limiter-agent`: see `docs/limiter-agent.md`.

use std::process::ExitCode;

use clap::Parser;
use limiter_agent::cli::Cli;

fn main() -> ExitCode {
    let cli = Cli::parse();
    // Colour only on a terminal: the journal and files get plain lines.
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")).init();
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            failure.code().into()
        }
    }
}
