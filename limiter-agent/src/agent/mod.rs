//! The running agent: the configuration in force, what it became in the kernel, and how one
//! becomes the next.

mod apply;
mod attach;
mod blocks;
mod changes;
mod connections;
mod exemptions;
mod leases;
mod ledger;
mod measure;
mod overrides;
mod penalties;
mod report;
mod standing;
mod upkeep;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use limiter_common::time::Nanos;
use log::{error, info, warn};
use tokio::time::Instant;

use crate::cli::{Failure, ModeArg, RunArgs, XdpArg};
use crate::config::{Config, Interface, Mode, Pattern, Xdp};
use crate::datapath::{Datapath, Head, Left, LinkKind, Origin, Pins, PinsError};
use crate::events::Events;
use crate::host::{self, Link};
use crate::lease::Leases;
use crate::memory::check_memory;
use crate::plan::{self, Host, HostInterface, Plan, PlanError};
use crate::sources::Sources;
use crate::state::StateDir;
use crate::status::{Reload, utc};

pub use apply::{Application, Beginning, Deadline, begin};
use apply::{Pending, Record, Text};
use attach::Attached;
pub use blocks::BlockOrder;
use changes::Fixed;
pub use exemptions::ExemptOrder;
use ledger::Ledger;
use measure::Watch;
use overrides::Overrides;
pub use overrides::{Asked, Done, Order};
pub use penalties::{Penalty, PenaltyOrder, source_network};
pub(crate) use report::mode as class_mode;
pub(crate) use upkeep::Complaint;

/// How much later than the agent the datapath goes back to what was confirmed, if there is no agent to do
/// it.
const UNATTENDED: Duration = Duration::from_secs(1);

/// The running agent. It is attached until it is dropped.
pub struct Agent {
    args: RunArgs,
    started: SystemTime,
    /// When the settings in force were read.
    loaded: SystemTime,
    last_reload: Option<Reload>,
    /// The configuration as it was written, without what outranks it.
    file: Config,
    /// Its text.
    text: Text,
    /// What commands said that outranks it.
    overrides: Overrides,
    /// The configuration in force: the file's and what outranks it.
    config: Config,
    state: StateDir,
    record: Record,
    /// An applied configuration that waits to be confirmed.
    pending: Option<Pending>,
    /// How many were applied that had to be confirmed.
    applications: u64,
    /// Why the configuration in force is an older one than was wanted, if it is.
    rolled_back: Option<String>,
    /// The guarded interfaces as the host had them when they were planned last.
    guarded: Vec<HostInterface>,
    fixed: Fixed,
    plan: Plan,
    datapath: Datapath,
    events: Arc<Events>,
    leases: Leases,
    sources: Arc<Sources>,
    ledger: Ledger,
    watch: Watch,
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
    keeping: Complaint,
}

/// Whose fault a failed reload is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The configuration's.
    Request,
    /// The agent's or the kernel's.
    Machine,
}

/// Why a change was refused: whose fault it is, and each thing that is wrong.
pub type Refused = (Blame, Vec<String>);

/// The configuration with what `args` override.
fn over_file(mut config: Config, args: &RunArgs) -> Config {
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
    config
}

impl Agent {
    /// Loads the program, puts what it begins with in force and attaches to the interfaces.
    ///
    /// # Errors
    /// [`Failure`]; whatever was attached by then is detached again.
    pub async fn start(args: RunArgs, beginning: Beginning) -> Result<Self, Failure> {
        let Beginning { config: file, text, overrides, record, state, rolled_back } = beginning;
        let config = overrides.over(&file);
        let now = SystemTime::now();
        let machine = |error: String| Failure::Machine(error);
        let credentials = leases::load(&config)?;
        let links = host::links().await.map_err(|error| machine(error.to_string()))?;
        let left = match args.pins() {
            Some(directory) => {
                Some(Left::new(Pins::open(directory).map_err(|error| machine(error.to_string()))?))
            }
            None => None,
        };
        let plan = plan::plan(&config, &host_of(&links), left.as_ref().and_then(Left::names))
            .map_err(|error| machine(unplannable(&error)))?;
        let is_new = left.as_ref().is_none_or(|left| !left.fits(&plan));
        if let Some(available) = host::available_memory().filter(|_| is_new) {
            check_memory(&plan.sizes, available).map_err(|error| machine(error.to_string()))?;
        }
        let snapshot = standing::restore(&state, now);
        let mut datapath = Datapath::start(&plan, left, snapshot.as_ref())
            .map_err(|error| machine(error.to_string()))?;
        announce(datapath.origin(), snapshot.is_some());
        if let Err(error) = datapath.forward_logs() {
            warn!("{error}");
        }
        let events = Events::start(datapath.take_events(), host::monotonic());
        // Without them, packets in the host's own name are strangers' packets: no reason not to start.
        let mut own = Complaint::default();
        own.hear(datapath.own(&host::addresses()));
        let deaf =
            connections::hear(&mut datapath).await.map_err(|error| machine(error.to_string()))?;
        let deaf_to_flows = datapath.hear_flows().err().map(|error| error.to_string());
        if let Some(error) = &deaf_to_flows {
            warn!(
                "this host's own UDP flows are not known: {error}. Answers to its questions fall under \
                 the limits of those who answer; of its own TCP connections, those that last are known"
            );
        }
        let mut seeding = Complaint::default();
        seeding.hear(upkeep::seed(&datapath, host::connections().await));
        let attached =
            attach::start(&mut datapath, &plan, &links, &config.file).await.map_err(machine)?;
        let leases = leases::start(&mut datapath, &state, &config, &plan, credentials)?;
        let fixed = Fixed::of(&config);
        let watch = Watch::new(&config, now);
        let sources = overrides.lookup(&datapath, &file, &config, &plan);
        let mut agent = Self {
            args,
            started: now,
            loaded: now,
            last_reload: None,
            file,
            text: text.clone(),
            overrides,
            config,
            state,
            record,
            pending: None,
            applications: 0,
            rolled_back,
            guarded: guarded(&plan, &links),
            fixed,
            plan,
            datapath,
            events,
            leases,
            sources,
            ledger: Ledger::default(),
            watch,
            attached: attached.into_iter().map(|it| (it.ifindex, it)).collect(),
            stopped: false,
            deaf,
            deaf_to_flows,
            own,
            seeding,
            keeping: Complaint::default(),
        };
        agent.log_settings();
        agent.overrides.announce();
        match &agent.rolled_back {
            None => drop(agent.settle(text)),
            Some(why) => warn!(
                "{why}: the last confirmed configuration is in force, not {}; `limiter-agent \
                 reload` reads that",
                agent.args.config.display()
            ),
        }
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
                self.rolled_back = None;
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

    /// Stops: what is pinned goes on limiting as it does now, all else is detached.
    pub fn stop(&mut self) {
        self.stopped = true;
        if let Err(error) = self.keep_standing() {
            warn!("{error}");
        }
        for (ifindex, it) in std::mem::take(&mut self.attached) {
            if self.datapath.is_pinned() && it.kind == LinkKind::BpfLink {
                info!("{} stays limited as it is (`limiter-agent detach` ends that)", it.name);
            } else {
                self.datapath.detach(&it.name, ifindex);
                info!("detached from {}", it.name);
            }
        }
    }

    /// Detaches from all interfaces and leaves nothing behind. The agent is of no use after that.
    ///
    /// # Errors
    /// [`PinsError`] with the first pin that cannot be removed.
    pub fn detach(&mut self) -> Result<Vec<String>, PinsError> {
        self.stopped = true;
        let names: Vec<_> =
            std::mem::take(&mut self.attached).into_values().map(|it| it.name).collect();
        self.datapath.remove()?;
        for name in &names {
            info!("detached from {name}");
        }
        Ok(names)
    }

    /// A handle for who says that the agent lives.
    #[must_use]
    pub fn head(&self) -> Head {
        self.datapath.head()
    }

    async fn try_reload(&mut self) -> Result<Vec<String>, Refused> {
        if let Some(why) = self.waits() {
            return Err((Blame::Request, vec![why]));
        }
        let text = Text::read(&self.args.config).map_err(|errors| (Blame::Request, errors))?;
        let file = text.parse(&self.args).map_err(|errors| (Blame::Request, errors))?;
        let changes = self.put_in_force(file, None).await?;
        self.settle(text);
        Ok(changes)
    }

    /// Puts a configuration in force, or leaves everything as it was. With a `deadline`, it holds until
    /// then unless it is confirmed. Says what it changed.
    async fn put_in_force(
        &mut self,
        file: Config,
        deadline: Option<Instant>,
    ) -> Result<Vec<String>, Refused> {
        let request = |errors| (Blame::Request, errors);
        let machine = |error: String| (Blame::Machine, vec![error]);
        if self.stopped {
            return Err(machine("the agent is stopping".to_owned()));
        }
        self.overrides.prune(SystemTime::now());
        let config = self.overrides.over(&file);
        let credentials = Leases::load(&config).map_err(request)?;
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
        if let Err(refused) = self.switch(&plan, deadline) {
            for it in &attached {
                self.datapath.detach(&it.name, it.ifindex);
            }
            return Err(refused);
        }
        let mut changes = changes::between(&self.config, &config);
        changes.extend(attached.iter().map(|it| format!("attached to {}", it.name)));
        self.attached.extend(attached.into_iter().map(|it| (it.ifindex, it)));
        for ifindex in gone {
            let name = self.attached.remove(&ifindex).map(|it| it.name).unwrap_or_default();
            self.datapath.detach(&name, ifindex);
            changes.push(format!("detached from {name}"));
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
        self.leases.configure(&config, &plan.interfaces, credentials);
        self.ledger.hand_over(&counters, &self.plan.names, &plan.names);
        self.guarded = guarded(&plan, &links);
        self.file = file;
        self.config = config;
        self.plan = plan;
        self.measure_on();
        self.publish();
        Ok(changes)
    }

    /// Switches to other settings of the configuration in force, which may wait to be confirmed.
    fn switch_to(&mut self, plan: &Plan) -> Result<(), Refused> {
        self.switch(plan, self.pending.as_ref().map(|pending| pending.deadline))
    }

    fn switch(&mut self, plan: &Plan, deadline: Option<Instant>) -> Result<(), Refused> {
        // A little later than the agent's own, which is to come first: it knows what to say.
        let deadline = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now()) + UNATTENDED;
            let left = u64::try_from(left.as_nanos()).unwrap_or(u64::MAX);
            Nanos(host::monotonic().0.saturating_add(left))
        });
        let outcome = self.datapath.apply_until(plan, deadline);
        outcome.map_err(|error| (Blame::Machine, vec![error.to_string()]))
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
    host_now(links.iter().map(interface_of).collect())
}

/// The host as a plan sees it now, with these interfaces.
fn host_now(interfaces: Vec<HostInterface>) -> Host {
    let (monotonic, wall) = host::clocks();
    Host { interfaces, monotonic, tick: host::tick(), wall }
}

fn interface_of(link: &Link) -> HostInterface {
    HostInterface { name: link.name.clone(), ifindex: link.ifindex, mtu: link.mtu, bond: link.bond }
}

/// Says what a start has found.
fn announce(origin: &Origin, is_restored: bool) {
    match origin {
        Origin::New if is_restored => {
            info!("who was proven before this start, is so again");
        }
        Origin::New => {}
        Origin::Kept => info!(
            "taking over from the agent before: its buckets, standing, counters and attachments"
        ),
        Origin::Replaced(maps) => info!(
            "the maps of the agent before ({maps}) do not fit this one or its configuration: new \
             ones take their place, and the standing of sources goes over"
        ),
    }
}

/// Those of the `links` that `plan` guards, and the members of bonds among them.
fn guarded(plan: &Plan, links: &[Link]) -> Vec<HostInterface> {
    let is_guarded = |link: &&Link| {
        plan.interfaces.iter().any(|it| [Some(link.ifindex), link.bond].contains(&Some(it.ifindex)))
    };
    links.iter().filter(is_guarded).map(interface_of).collect()
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
