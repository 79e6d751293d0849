//! The running agent: the configuration in force, what it became in the kernel, and how one
//! becomes the next.

mod attach;
mod changes;
mod ledger;
mod report;
mod upkeep;

use std::collections::BTreeMap;
use std::time::SystemTime;

use log::{error, info, warn};

use crate::cli::{Failure, ModeArg, RunArgs, XdpArg};
use crate::config::{Config, Interface, LoadError, Mode, Pattern, Xdp};
use crate::datapath::Datapath;
use crate::host::{self, Link};
use crate::memory::check_memory;
use crate::plan::{self, Host, HostInterface, Plan, PlanError};
use crate::status::{Reload, utc};

use attach::Attached;
use changes::Fixed;
use ledger::Ledger;
use upkeep::Complaint;

/// The running agent. It is attached until it is dropped.
pub struct Agent {
    args: RunArgs,
    started: SystemTime,
    /// When the settings in force were read.
    loaded: SystemTime,
    last_reload: Option<Reload>,
    config: Config,
    fixed: Fixed,
    plan: Plan,
    datapath: Datapath,
    ledger: Ledger,
    /// By interface index.
    attached: BTreeMap<u32, Attached>,
    /// Whether it has been told to stop: a reload that was waiting must not attach again.
    stopped: bool,
    /// Why handshakes prove nobody, if they do not.
    deaf: Option<String>,
    /// Why the host's own UDP flows are not known, if they are not.
    deaf_to_flows: Option<String>,
    own: Complaint,
    seeding: Complaint,
}

/// Whose fault a failed reload is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The configuration's.
    Request,
    /// The agent's or the kernel's.
    Machine,
}

/// Reads the configuration that `args` name, with what they override.
///
/// # Errors
/// Everything that is wrong with it, one line each.
pub fn load_config(args: &RunArgs) -> Result<Config, Vec<String>> {
    let mut config = Config::load(&args.config).map_err(|error| match error {
        LoadError::Invalid(errors) => errors.as_slice().iter().map(ToString::to_string).collect(),
        LoadError::Read { .. } => {
            vec![format!("{error}; check the path, or start the agent with --config FILE")]
        }
    })?;
    if let Some(mode) = args.mode {
        override_mode(&mut config, mode);
    }
    if !args.interfaces.is_empty() {
        override_interfaces(&mut config, &args.interfaces);
    }
    if let Some(xdp) = args.xdp {
        override_xdp(&mut config, xdp);
    }
    if let Some(address) = args.metrics_listen {
        config.metrics = address;
    }
    if let Some(path) = &args.control_socket {
        config.control.clone_from(path);
    }
    Ok(config)
}

impl Agent {
    /// Loads the program, puts `config` in force and attaches to the interfaces.
    ///
    /// # Errors
    /// [`Failure`]; whatever was attached by then is detached again.
    pub async fn start(args: RunArgs, config: Config) -> Result<Self, Failure> {
        let now = SystemTime::now();
        let machine = |error: String| Failure::Machine(error);
        let links = host::links().await.map_err(|error| machine(error.to_string()))?;
        let plan = plan::plan(&config, &host_of(&links), None)
            .map_err(|error| machine(unplannable(&error)))?;
        if let Some(available) = host::available_memory() {
            check_memory(&plan.sizes, available).map_err(|error| machine(error.to_string()))?;
        }
        let mut datapath = Datapath::load(&plan).map_err(|error| machine(error.to_string()))?;
        if let Err(error) = datapath.forward_logs() {
            warn!("{error}");
        }
        // Without them, packets in the host's own name are strangers' packets: no reason not to start.
        let mut own = Complaint::default();
        own.hear(datapath.own(&host::addresses()));
        // Before the sockets are listed, so that no connection is missed between the two.
        let deaf = datapath.hear_handshakes().err().map(|error| error.to_string());
        if let Some(error) = &deaf {
            warn!(
                "handshakes prove nobody: {error}. But for connections that last, nobody is proven; \
                 everybody stays at most seen"
            );
        }
        let deaf_to_flows = datapath.hear_flows().err().map(|error| error.to_string());
        if let Some(error) = &deaf_to_flows {
            warn!(
                "this host's own UDP flows are not known: {error}. Answers to its questions fall under \
                 the limits of those who answer; of its own TCP connections, those that last are known"
            );
        }
        let mut seeding = Complaint::default();
        seeding.hear(upkeep::seed(&datapath, host::connections().await));
        let attached = attach::attach(&mut datapath, &plan.interfaces, &links, &config.file)
            .await
            .map_err(machine)?;
        let fixed = Fixed::of(&config);
        let agent = Self {
            args,
            started: now,
            loaded: now,
            last_reload: None,
            config,
            fixed,
            plan,
            datapath,
            ledger: Ledger::default(),
            attached: attached.into_iter().map(|it| (it.ifindex, it)).collect(),
            stopped: false,
            deaf,
            deaf_to_flows,
            own,
            seeding,
        };
        agent.log_settings();
        Ok(agent)
    }

    /// Reads the configuration again and puts it in force, or leaves everything as it was. The
    /// outcome is logged, kept for `status`, and returned.
    pub async fn reload(&mut self) -> (Reload, Option<Blame>) {
        let outcome = self.try_reload().await;
        let now = SystemTime::now();
        let mut reload =
            Reload { at: utc(now), successful: outcome.is_ok(), changes: vec![], errors: vec![] };
        let blame = match outcome {
            Ok(changes) => {
                self.loaded = now;
                info!("reloaded {}: {}", self.args.config.display(), changes.join("; "));
                self.log_settings();
                reload.changes = changes;
                None
            }
            Err((blame, errors)) => {
                for error in &errors {
                    error!("reload: {error}");
                }
                error!("reload failed; the old settings stay");
                reload.errors = errors;
                Some(blame)
            }
        };
        self.last_reload = Some(reload.clone());
        (reload, blame)
    }

    /// Detaches from all interfaces.
    pub fn stop(&mut self) {
        self.stopped = true;
        for (ifindex, it) in std::mem::take(&mut self.attached) {
            self.datapath.detach(ifindex);
            info!("detached from {}", it.name);
        }
    }

    async fn try_reload(&mut self) -> Result<Vec<String>, (Blame, Vec<String>)> {
        let request = |errors| (Blame::Request, errors);
        let machine = |error: String| (Blame::Machine, vec![error]);
        if self.stopped {
            return Err(machine("the agent is stopping".to_owned()));
        }
        let config = load_config(&self.args).map_err(request)?;
        let links = host::links().await.map_err(|error| machine(error.to_string()))?;
        let plan = plan::plan(&config, &host_of(&links), Some(&self.plan.names))
            .map_err(|error| request(vec![unplannable(&error)]))?;
        plan.fits(self.datapath.sizes()).map_err(|error| request(vec![error.to_string()]))?;
        let (news, gone) = self.moves(&plan, &links);
        let counters = self.datapath.counters().map_err(|error| machine(error.to_string()))?;
        self.renew_addresses();
        // New interfaces first: until the switch their packets are counted as of an unknown one.
        let attached = attach::attach(&mut self.datapath, &news, &links, &config.file)
            .await
            .map_err(machine)?;
        if let Err(error) = self.datapath.apply(&plan) {
            for it in &attached {
                self.datapath.detach(it.ifindex);
            }
            return Err(machine(error.to_string()));
        }
        let mut changes = changes::between(&self.config, &config);
        changes.extend(attached.iter().map(|it| format!("attached to {}", it.name)));
        self.attached.extend(attached.into_iter().map(|it| (it.ifindex, it)));
        for ifindex in gone {
            self.datapath.detach(ifindex);
            let name = self.attached.remove(&ifindex).map(|it| it.name);
            changes.push(format!("detached from {}", name.unwrap_or_default()));
        }
        changes.extend(
            self.fixed.pending(&config, &plan.interfaces, |ifindex| self.attached.get(&ifindex)),
        );
        for name in &plan.gone {
            warn!("{name} is gone and not guarded; reload when it is back");
            changes.push(format!("without {name}, which is gone"));
        }
        if changes.is_empty() {
            changes.push("no changes".to_owned());
        }
        self.ledger.hand_over(&counters, &self.plan.names, &plan.names);
        self.config = config;
        self.plan = plan;
        Ok(changes)
    }

    /// The interfaces that `plan` adds or that have lost the program, and the indexes of those that
    /// it no longer has.
    fn moves(&self, plan: &Plan, links: &[Link]) -> (Vec<plan::Guarded>, Vec<u32>) {
        let well = |ifindex| {
            self.attached.get(ifindex).is_some_and(|attached| attached.problem(links).is_none())
        };
        let news = plan.interfaces.iter().filter(|it| !well(&it.ifindex));
        let gone = self
            .attached
            .keys()
            .filter(|ifindex| plan.interfaces.iter().all(|guarded| guarded.ifindex != **ifindex));
        (news.cloned().collect(), gone.copied().collect())
    }

    /// One line for the mode, one for each failure policy and each warning.
    fn log_settings(&self) {
        let config = &self.config;
        match config.mode {
            Mode::Observe => info!("observe: nothing is dropped, only counted as would_drop"),
            Mode::Enforce => info!("enforce: what is over its limit is dropped"),
            Mode::Bypass => warn!("bypass: nothing is limited"),
        }
        for class in &config.classes {
            let mode = report::mode(config, class);
            if mode != config.mode {
                info!("{mode}: class {}", class.name);
            }
        }
        for (event, action) in report::failure_policies(config) {
            info!("{}: {action}", event.replace('_', " "));
        }
        for warning in &config.warnings {
            warn!("{warning}");
        }
    }

    /// What keeps the agent from doing its work on a host with these `links`, one line each; empty
    /// if nothing.
    #[must_use]
    pub fn problems(&self, links: &[Link]) -> Vec<String> {
        let mut problems: Vec<_> =
            self.attached.values().filter_map(|it| it.problem(links)).collect();
        problems.extend(self.plan.gone.iter().map(|name| format!("{name} is gone")));
        if let Err(error) = self.datapath.sources_created() {
            problems.push(error.to_string());
        }
        problems
    }
}

/// An interface that was named on the command line has no line in the file.
fn unplannable(error: &PlanError) -> String {
    if let PlanError::NoInterface { line: 0, pattern, present, .. } = error {
        return format!(
            "--interface {pattern}: this host has no such interface; it has {present}: write one \
             of these, or create the interface first"
        );
    }
    error.to_string()
}

/// The host as a plan sees it.
pub(crate) fn host_of(links: &[Link]) -> Host {
    let (monotonic, wall) = host::clocks();
    let interfaces = links
        .iter()
        .map(|link| HostInterface { name: link.name.clone(), ifindex: link.ifindex, mtu: link.mtu })
        .collect();
    Host { interfaces, monotonic, tick: host::tick(), wall }
}

/// Whoever says `--mode observe` must be able to rely on it, so it outranks the classes' modes.
fn override_mode(config: &mut Config, mode: ModeArg) {
    config.mode = match mode {
        ModeArg::Observe => Mode::Observe,
        ModeArg::Enforce => Mode::Enforce,
        ModeArg::Bypass => Mode::Bypass,
    };
    for class in &mut config.classes {
        class.mode = None;
    }
}

/// An interface keeps the `xdp` of the entry that names it.
pub(crate) fn override_interfaces(config: &mut Config, names: &[String]) {
    let interfaces = names.iter().map(|name| {
        let known = config.interfaces.iter().find(|known| known.name.matches(name));
        Interface {
            name: Pattern::new(name),
            xdp: known.map_or(Xdp::Native, |known| known.xdp),
            line: known.map_or(0, |known| known.line),
        }
    });
    config.interfaces = interfaces.collect();
}

fn override_xdp(config: &mut Config, xdp: XdpArg) {
    let xdp = match xdp {
        XdpArg::Native => Xdp::Native,
        XdpArg::Generic => Xdp::Generic,
        XdpArg::Auto => Xdp::Auto,
    };
    for interface in &mut config.interfaces {
        interface.xdp = xdp;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
mode = "observe"
[[interface]]
name = "eth*"
xdp = "auto"
[[class]]
name = "rest"
packets = { rate = "10/s", burst = 10 }
mode = "enforce"
"#;

    fn config() -> Config {
        Config::parse("test", TEXT, SystemTime::UNIX_EPOCH).expect("is valid")
    }

    #[test]
    fn a_mode_on_the_command_line_outranks_that_of_a_class() {
        let mut config = config();
        override_mode(&mut config, ModeArg::Observe);
        assert_eq!(report::mode(&config, &config.classes[0]), Mode::Observe);
    }

    #[test]
    fn an_interface_on_the_command_line_keeps_its_entrys_xdp() {
        let mut config = config();
        override_interfaces(&mut config, &["eth7".to_owned(), "wan".to_owned()]);
        let interfaces: Vec<_> =
            config.interfaces.iter().map(|it| (it.name.as_str(), it.xdp)).collect();
        assert_eq!(interfaces, [("eth7", Xdp::Auto), ("wan", Xdp::Native)]);
        override_xdp(&mut config, XdpArg::Generic);
        assert!(config.interfaces.iter().all(|it| it.xdp == Xdp::Generic));
    }
}
