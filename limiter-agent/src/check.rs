//! `limiter-agent check`: the configuration alone, without the kernel.

use std::path::Path;
use std::time::SystemTime;

use limiter_common::time::Nanos;
use serde::Serialize;

use crate::cli::{CheckArgs, Failure};
use crate::client::print;
use crate::config::{Config, Diagnostic, LoadError};
use crate::plan::{self, Host, HostInterface};
use crate::status::bytes;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Verdict {
    file: String,
    valid: bool,
    errors: Vec<Diagnostic>,
    warnings: Vec<Diagnostic>,
    /// Kernel memory that the maps will take; none if the file is not valid.
    map_memory_bytes: Option<u64>,
}

/// Validates the file and says so.
///
/// # Errors
/// [`Failure::Request`] with every error found.
pub fn check(args: &CheckArgs) -> Result<(), Failure> {
    let verdict = judge(&args.file)?;
    if args.json {
        let text = serde_json::to_string_pretty(&verdict)
            .map_err(|error| Failure::Machine(format!("cannot write JSON: {error}")))?;
        print(&format!("{text}\n"))?;
        return if verdict.valid { Ok(()) } else { Err(Failure::Request(String::new())) };
    }
    for warning in &verdict.warnings {
        eprintln!("warning: {warning}");
    }
    if verdict.valid {
        let memory = bytes(verdict.map_memory_bytes.unwrap_or_default());
        return print(&format!("{}: valid; its maps take about {memory}\n", verdict.file));
    }
    let errors: Vec<_> = verdict.errors.iter().map(ToString::to_string).collect();
    Err(Failure::Request(errors.join("\n")))
}

fn judge(file: &Path) -> Result<Verdict, Failure> {
    let name = file.display().to_string();
    match Config::load(file) {
        Ok(config) => {
            let memory = memory(&config)?;
            Ok(Verdict {
                file: name,
                valid: true,
                errors: Vec::new(),
                warnings: config.warnings,
                map_memory_bytes: Some(memory),
            })
        }
        Err(LoadError::Invalid(errors)) => Ok(Verdict {
            file: name,
            valid: false,
            errors: errors.as_slice().to_vec(),
            warnings: Vec::new(),
            map_memory_bytes: None,
        }),
        Err(error @ LoadError::Read { .. }) => Err(Failure::Request(error.to_string())),
    }
}

/// The memory on a host that has one interface for each pattern of the file.
fn memory(config: &Config) -> Result<u64, Failure> {
    let interfaces = config.interfaces.iter().zip(1..).map(|(interface, ifindex)| {
        let name = interface.name.as_str().replace(['*', '?'], "0");
        HostInterface { name, ifindex }
    });
    let host =
        Host { interfaces: interfaces.collect(), monotonic: Nanos(0), wall: SystemTime::now() };
    let plan =
        plan::plan(config, &host, None).map_err(|error| Failure::Request(error.to_string()))?;
    Ok(plan.sizes.memory())
}
