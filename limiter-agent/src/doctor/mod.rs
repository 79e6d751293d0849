//! `limiter-agent doctor`: what on this host keeps the agent from its work, or makes it slow. It reads
//! and reports; nothing is loaded, attached or written.

mod interface;
mod machine;
mod report;

use std::env::consts::ARCH;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::thread::available_parallelism;
use std::time::SystemTime;

use crate::agent::{host_of, override_interfaces};
use crate::check;
use crate::cli::{DEFAULT_CONFIG, DoctorArgs, Failure};
use crate::client::{print, print_json};
use crate::config::{Config, Interface, LoadError, Pattern, Xdp};
use crate::datapath::{cgroup, foreign_program};
use crate::host::{self, Link};
use crate::plan::{self, MapSizes, PlanError, xdp_of};

use interface::Seen;
use report::{Check, Outcome, Report, Status};

/// The configuration that is shipped, for a host that has none yet.
const SHIPPED: &str = include_str!("../../../deploy/limiter.toml");

/// Checks the host and prints what was found.
///
/// # Errors
/// [`Failure::Machine`] without a text if a check failed; with one if the interfaces cannot be listed.
pub fn doctor(args: &DoctorArgs) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .map_err(|error| Failure::Machine(format!("cannot start the runtime: {error}")))?;
    let links =
        runtime.block_on(host::links()).map_err(|error| Failure::Machine(error.to_string()))?;
    let report = Report::new(checks(args, &links));
    if args.json { print_json(&report) } else { print(&report.to_string()) }?;
    if report.failed == 0 { Ok(()) } else { Err(Failure::Machine(String::new())) }
}

fn checks(args: &DoctorArgs, links: &[Link]) -> Vec<Check> {
    let Subject { config, configuration, sizes } = subject(args, links);
    let mut checks = machine();
    checks.push(("configuration", configuration));
    checks.push(("memory", machine::memory(sizes.as_ref(), host::available_memory())));
    let mut checks: Vec<_> =
        checks.into_iter().map(|(name, outcome)| Check { name, subject: None, outcome }).collect();
    for entry in &config.interfaces {
        if !links.iter().any(|link| entry.name.matches(&link.name)) {
            let names: Vec<_> = links.iter().map(|link| link.name.as_str()).collect();
            let outcome = Outcome::failed(
                format!("this host has none of that name; it has {}", names.join(", ")),
                "name one of these, or create it first",
            );
            let subject = Some(entry.name.as_str().to_owned());
            checks.push(Check { name: "interface", subject, outcome });
        }
    }
    let is_guarded = |name: &str| xdp_of(&config, name).is_some();
    for link in links {
        let Some(xdp) = xdp_of(&config, &link.name) else { continue };
        let seen = Seen {
            link,
            links,
            xdp,
            file: &config.file,
            driver: host::driver(&link.name),
            features: host::xdp_features(link.ifindex),
            offloads: host::offloads(&link.name),
            queues: host::receive_queues(&link.name).unwrap_or(link.queues),
            cpus: available_parallelism().map_or(1, Into::into),
            program: link.program.and_then(foreign_program),
            sees_programs: host::sees_programs(),
            is_guarded: &is_guarded,
        };
        let found = interface::checks(&seen).into_iter();
        checks.extend(found.map(|(name, outcome)| {
            let subject = Some(link.name.clone());
            Check { name, subject, outcome }
        }));
    }
    checks
}

/// What is asked of the machine, whatever the configuration.
fn machine() -> Vec<(&'static str, Outcome)> {
    let read = |path: &str| fs::read_to_string(path).ok();
    let source = |file: &str| read(&format!("/sys/devices/system/clocksource/clocksource0/{file}"));
    let mut checks: Vec<_> = host::requirements()
        .into_iter()
        .map(|(name, found)| {
            let failed = |unfit| Outcome::said(Status::Failed, &unfit);
            (name, found.map_or_else(failed, Outcome::ok))
        })
        .collect();
    let cgroup = match cgroup() {
        Ok(path) => Outcome::ok(format!("version 2 mounted at {}", path.display())),
        Err(error) => {
            let mut outcome = Outcome::said(Status::Warning, &error);
            outcome.finding += ": handshakes prove nobody, and this host's own flows are not known";
            outcome
        }
    };
    let available = source("available_clocksource").unwrap_or_default();
    checks.extend([
        ("architecture", machine::architecture(ARCH)),
        ("btf", machine::btf(Path::new("/sys/kernel/btf/vmlinux").exists())),
        ("memlock", machine::memlock(host::memlock())),
        ("jit", machine::jit(read("/proc/sys/net/core/bpf_jit_enable").as_deref())),
        ("cgroup", cgroup),
        ("clock", machine::clock(host::counted_tick().is_some())),
        ("clocksource", machine::clocksource(source("current_clocksource").as_deref(), &available)),
    ]);
    checks
}

/// The configuration that the host is to be fit for.
struct Subject {
    config: Config,
    /// What the check of the configuration found.
    configuration: Outcome,
    /// None if they depend on interfaces that are missing.
    sizes: Option<MapSizes>,
}

fn subject(args: &DoctorArgs, links: &[Link]) -> Subject {
    let path = args.config.as_deref().unwrap_or(Path::new(DEFAULT_CONFIG));
    let name = path.display();
    let (config, mut configuration) = match Config::load(path) {
        Ok(config) => (Some(config), Outcome::ok(format!("{name}: valid"))),
        Err(LoadError::Read { source, .. })
            if args.config.is_none() && source.kind() == ErrorKind::NotFound =>
        {
            let finding = format!("{name} is not there; what follows is for the shipped one");
            (None, Outcome::warning(finding, "write it, or give --config FILE"))
        }
        Err(error @ LoadError::Read { .. }) => (
            None,
            Outcome::failed(error.to_string(), "check the path, or give another --config FILE"),
        ),
        Err(LoadError::Invalid(errors)) => {
            let finding = format!("{name} has {} errors", errors.as_slice().len());
            (None, Outcome::failed(finding, format!("limiter-agent check {name} names them")))
        }
    };
    let is_loaded = config.is_some();
    let mut config = config.unwrap_or_else(shipped);
    if !args.interfaces.is_empty() {
        override_interfaces(&mut config, &args.interfaces);
    } else if !is_loaded {
        config.interfaces = every_interface(links);
    }
    let plan = plan::plan(&config, &host_of(links), None);
    if let Err(error) = &plan
        // The checks of interfaces say it of each.
        && !matches!(error, PlanError::NoInterface { .. })
        && is_loaded
    {
        configuration = Outcome::failed(error.to_string(), format!("change {name} as that says"));
    }
    let sizes = plan.map(|plan| plan.sizes).ok();
    let sizes = sizes.or_else(|| check::sizes(&config).ok().flatten());
    Subject { config, configuration, sizes }
}

fn shipped() -> Config {
    Config::parse("limiter.toml", SHIPPED, SystemTime::now())
        .expect("the shipped configuration is valid: a test holds it to that")
}

/// All that are up, but for loopback. Nobody has asked for native mode there.
fn every_interface(links: &[Link]) -> Vec<Interface> {
    let up = links.iter().filter(|link| link.is_up && link.name != "lo");
    up.map(|link| Interface { name: Pattern::new(&link.name), xdp: Xdp::Auto, line: 0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_configuration_is_valid() {
        assert!(!shipped().classes.is_empty());
    }

    #[test]
    fn without_a_configuration_all_that_is_up_is_looked_at() {
        let link = |name: &str, is_up| Link { name: name.to_owned(), is_up, ..Link::default() };
        let chosen = every_interface(&[link("lo", true), link("eth0", true), link("eth1", false)]);
        let names: Vec<_> = chosen.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names, ["eth0"]);
    }
}
