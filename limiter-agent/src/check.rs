//! `limiter-agent check`: the configuration alone, without the kernel.

use std::io::Write;
use std::path::Path;
use std::time::SystemTime;

use limiter_common::time::Nanos;
use serde::Serialize;

use crate::cli::{CheckArgs, Failure};
use crate::client::print;
use crate::config::{Config, Diagnostic, LoadError};
use crate::memory::map_memory;
use crate::plan::{self, Host, HostInterface, MapSizes, PlanError};
use crate::status::{Reserve, bytes, reserves};

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Verdict {
    file: String,
    valid: bool,
    errors: Vec<Diagnostic>,
    warnings: Vec<Diagnostic>,
    /// Kernel memory that the maps will take; none if the file is not valid, or if that depends on
    /// the host's interfaces.
    map_memory_bytes: Option<u64>,
    /// What no class limit starves, the built-in ones among them.
    reserves: Vec<Reserve>,
}

/// Validates the file and says so.
///
/// # Errors
/// [`Failure::Request`] with every error found.
pub fn check(args: &CheckArgs) -> Result<(), Failure> {
    let verdict = judge(&args.file);
    if args.json {
        let text = serde_json::to_string_pretty(&verdict)
            .map_err(|error| Failure::Machine(format!("cannot write JSON: {error}")))?;
        print(&format!("{text}\n"))?;
        return if verdict.valid { Ok(()) } else { Err(Failure::Request(String::new())) };
    }
    for warning in &verdict.warnings {
        // Where nobody listens, the verdict still counts.
        let _ = writeln!(std::io::stderr(), "warning: {warning}");
    }
    if verdict.valid {
        let memory = verdict.map_memory_bytes.map_or_else(
            || "how much memory its maps take depends on the host's interfaces".to_owned(),
            |memory| format!("its maps take about {} of kernel memory", bytes(memory)),
        );
        let reserves = reserves(&verdict.reserves);
        return print(&format!("{}: valid; {memory}\n{reserves}", verdict.file));
    }
    let errors: Vec<_> = verdict.errors.iter().map(said).collect();
    Err(Failure::Request(errors.join("\n")))
}

fn judge(file: &Path) -> Verdict {
    let name = file.display().to_string();
    let wrong = |errors| Verdict {
        file: name.clone(),
        valid: false,
        errors,
        warnings: Vec::new(),
        map_memory_bytes: None,
        reserves: Vec::new(),
    };
    match Config::load(file) {
        Ok(config) => match sizes(&config) {
            Ok(sizes) => Verdict {
                file: name,
                valid: true,
                errors: Vec::new(),
                reserves: Reserve::all(&config),
                warnings: config.warnings,
                map_memory_bytes: sizes.as_ref().map(map_memory),
            },
            Err(error) => wrong(vec![nowhere(&name, &error.to_string(), "")]),
        },
        Err(LoadError::Invalid(errors)) => wrong(errors.as_slice().to_vec()),
        Err(error @ LoadError::Read { .. }) => {
            wrong(vec![nowhere(&name, &error.to_string(), "check the path, or name another FILE")])
        }
    }
}

/// An error that has no place in the file: its line and column are 0.
fn nowhere(file: &str, cause: &str, cure: &str) -> Diagnostic {
    Diagnostic {
        file: file.to_owned(),
        line: 0,
        column: 0,
        key: String::new(),
        cause: cause.to_owned(),
        cure: cure.to_owned(),
    }
}

/// An error without a place names the file itself.
fn said(error: &Diagnostic) -> String {
    match (error.line, error.cure.as_str()) {
        (0, "") => error.cause.clone(),
        (0, cure) => format!("{}; {cure}", error.cause),
        _ => error.to_string(),
    }
}

/// Plans the file for a host that has an interface for each pattern in it, which finds what does
/// not fit the datapath, and says how large the maps are: none if that depends on the real host.
pub(crate) fn sizes(config: &Config) -> Result<Option<MapSizes>, PlanError> {
    let bound = config.exemptions.iter().filter_map(|exemption| exemption.interface.as_ref());
    let bound = bound.chain(config.reserves.iter().filter_map(|it| it.interface.as_ref()));
    let patterns = config.interfaces.iter().map(|interface| &interface.name).chain(bound);
    let interfaces = patterns.zip(1..).map(|(pattern, ifindex)| {
        let name = pattern.as_str().replace(['*', '?'], "0");
        HostInterface { name, ifindex, mtu: 1500, bond: None }
    });
    let host = Host {
        interfaces: interfaces.collect(),
        monotonic: Nanos(0),
        tick: Nanos(0),
        wall: SystemTime::now(),
    };
    match plan::plan(config, &host, None) {
        Ok(plan) => Ok(Some(plan.sizes)),
        // The invented host may lack what the real one has.
        Err(PlanError::NoInterface { .. } | PlanError::BoundNowhere { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
