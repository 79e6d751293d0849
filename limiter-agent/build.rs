//! Builds the XDP program, which the agent carries inside itself.

use std::process::ExitCode;

fn main() -> ExitCode {
    match xtask::bpf::embed("limiter-ebpf", "limiter", "LIMITER_OBJECT") {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
