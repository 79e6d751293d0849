//! Builds the eBPF programs of the frame generator and the benchmark, which the harness carries inside
//! itself.

use std::process::ExitCode;

fn main() -> ExitCode {
    // The benchmark's parse-only program reads frames with the code of the program under test.
    println!("cargo:rerun-if-changed=../limiter-ebpf/src/view.rs");
    let embed = |bin, variable| xtask::bpf::embed("limiter-tests-ebpf", bin, variable);
    match embed("generator", "LIMITER_GENERATOR_OBJECT")
        .and_then(|()| embed("bench", "LIMITER_BENCH_OBJECT"))
    {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
