//! The `cargo xtask` commands; `cargo xtask help` lists them.

mod asm;
mod bench;
mod dist;
mod run;
mod setup;
mod shell;
mod test;
mod tidy;

use std::process::ExitCode;

use clap::Parser;

/// Developer tasks of limiter.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Task {
    /// Install what building, running and testing need; does only what is missing
    Setup {
        /// Only what `cargo build` needs: the BPF compiler and linker
        #[arg(long)]
        build_only: bool,
    },
    /// Run the playground, or the agent on a real interface
    Run(run::Options),
    /// Run every test: on the host, in network namespaces, and on old kernels in a VM (root)
    Test {
        /// Run only tests whose name contains this
        filter: Option<String>,
    },
    /// Check the rules that the compiler does not: imports, ABI version, sizes, format, lints
    Tidy {
        /// Write down the ABI as it is now, after its version was raised
        #[arg(long)]
        bless: bool,
    },
    /// Measure costs, floods and limits against floors and peers (root; alone on the machine)
    Bench(bench::Options),
    /// Make the Debian package, with manual pages and shell completions
    Dist(dist::Options),
    /// Print how many instructions each eBPF function has
    Asm,
}

fn main() -> ExitCode {
    let result = match Task::parse() {
        Task::Setup { build_only: true } => setup::build(),
        Task::Setup { build_only: false } => setup::everything(),
        Task::Run(options) => run::run(&options),
        Task::Test { filter } => test::run(filter.as_deref()),
        Task::Tidy { bless } => tidy::run(bless),
        Task::Bench(options) => bench::run(&options),
        Task::Dist(options) => dist::run(&options),
        Task::Asm => asm::run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
