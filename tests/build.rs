//! Builds the frame generator's eBPF program, which the harness carries inside itself.

use std::process::ExitCode;

fn main() -> ExitCode {
    match xtask::bpf::embed("limiter-tests-ebpf", "generator", "LIMITER_GENERATOR_OBJECT") {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
