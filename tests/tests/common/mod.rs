//! A loaded object with a model beside it.

pub(crate) mod frame;

use std::{collections::HashMap, mem, net::IpAddr, time::SystemTime};

use anyhow::{Context as _, Result, bail, ensure};
use aya::programs::{TestRun as _, TestRunOptions};
use limiter_agent::{
    config::Config,
    datapath::{Datapath, Leases},
    plan::{Host, HostInterface, Plan, plan},
};
use limiter_common::{
    Action, Family, Outcome, Reason,
    abi::{ClassId, Count, Lease, Leaseholder, Name, Slot, SourceAddress},
    flows::Flow,
    packet::Source,
    time::Nanos,
};
use limiter_tests::{generator::monotonic, model::Model, netns::Netns};

/// The object loaded with a configuration, and a model of it; attached to nothing.
pub(crate) struct Bench {
    netns: Netns,
    datapath: Datapath,
    leases: Leases,
    /// The places for leases that are taken.
    places: u32,
    model: Model,
    plan: Plan,
    runs: u64,
    /// The counters as the last check left them: to read them takes thousands of system calls,
    /// which is most of the time on an emulated CPU.
    counters: Vec<(Outcome, Count)>,
    _stats: std::os::fd::OwnedFd,
}

impl Bench {
    /// The interface that `BPF_PROG_TEST_RUN` receives on: the loopback of the namespace.
    pub(crate) const IFINDEX: u32 = 1;

    /// Loads `config` for a host with these interfaces.
    pub(crate) fn new(config: &str, interfaces: &[(&str, u32)]) -> Result<Self> {
        let config = Config::parse("table.toml", config, SystemTime::now())?;
        let host = Host {
            interfaces: interfaces
                .iter()
                .map(|(name, ifindex)| HostInterface {
                    name: (*name).into(),
                    ifindex: *ifindex,
                    mtu: 1500,
                    bond: None,
                })
                .collect(),
            monotonic: now()?,
            tick: limiter_agent::host::tick(),
            wall: SystemTime::now(),
        };
        let plan = plan(&config, &host, None)?;
        let stats = aya::sys::enable_stats(aya::sys::Stats::RunTime)?;
        let mut datapath = Datapath::load(&plan)?;
        let leases = datapath.take_leases().context("the leases are there")?;
        let netns = Netns::new("table")?;
        netns.ip(&["link", "set", "lo", "up"])?;
        let model = Model::new(&plan);
        Ok(Self {
            netns,
            datapath,
            leases,
            places: Lease::ALL,
            model,
            plan,
            runs: 0,
            counters: Vec::new(),
            _stats: stats,
        })
    }

    /// The loaded object.
    pub(crate) fn datapath(&self) -> &Datapath {
        &self.datapath
    }

    /// Notes, in the kernel and in the model, that the host opened the flow.
    pub(crate) fn open(&self, flow: Flow) -> Result<()> {
        self.datapath.open(flow, now()?);
        self.model.open(flow, now()?);
        Ok(())
    }

    /// Gives an address a lease, in the kernel and in the model.
    pub(crate) fn lease(&mut self, address: SourceAddress, lease: Lease) -> Result<()> {
        self.places += 1;
        let holder = Leaseholder { place: self.places, serial: [0; 20], name: Name::NONE };
        self.leases.grant(address, &holder, &lease)?;
        self.leases.set_until(Lease::ALL, Nanos::NEVER);
        self.model.lease(address, lease);
        Ok(())
    }

    /// The slot of an interface.
    pub(crate) fn slot(&self, interface: &str) -> Slot {
        let known = self.plan.interfaces.iter().find(|known| known.name == interface);
        known.map_or(Slot::UNKNOWN, |known| known.slot)
    }

    /// Says, in the kernel and in the model, that only these sources have connections open, and how many.
    #[allow(dead_code, reason = "for the table of connections")]
    pub(crate) fn connect(&mut self, open: &[(IpAddr, u32)]) -> Result<()> {
        let open = open.iter().map(|&(address, count)| (Source::from(address), count));
        let open: HashMap<_, _> = open.collect();
        self.datapath.count_connections(&open)?;
        self.model.connect(open);
        Ok(())
    }

    /// Where frames are received.
    #[allow(dead_code, reason = "for the table of connections")]
    pub(crate) fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Attaches the programs that hear of connections and flows.
    pub(crate) fn hear(&mut self) -> Result<()> {
        self.datapath.hear_handshakes()?;
        self.datapath.hear_flows()?;
        Ok(())
    }

    /// The outcome with these labels.
    pub(crate) fn outcome(
        &self,
        interface: &str,
        (family, class, reason, action): (Family, &str, Reason, Action),
    ) -> Outcome {
        let slot = self.slot(interface);
        let class = if class == "none" { ClassId::NONE } else { self.plan.names.class(class) };
        Outcome { slot, family, class, reason, action }
    }

    /// Sends the frames, and checks each verdict and the counters against what is expected.
    pub(crate) fn check(&mut self, frames: &[Vec<u8>], expected: &[Outcome]) -> Result<()> {
        let compared = self.compare_all(frames, expected);
        let after = self.datapath.counters()?;
        let before = mem::replace(&mut self.counters, after);
        let after = &self.counters;
        compared?;
        let count = |counters: &[(Outcome, Count)], outcome: &Outcome| {
            let found = counters.iter().find(|(known, _)| known == outcome);
            found.map(|(_, count)| *count).unwrap_or_default()
        };
        let moved: Vec<_> =
            after.iter().filter(|(outcome, new)| count(&before, outcome) != *new).collect();
        for (outcome, new) in moved {
            let old = count(&before, outcome);
            let (mut packets, mut bytes) = (0, 0);
            for (frame, _) in frames.iter().zip(expected).filter(|(_, e)| *e == outcome) {
                packets += 1;
                bytes += frame.len() as u64;
            }
            let delta = (new.packets - old.packets, new.bytes - old.bytes);
            ensure!(
                delta == (packets, bytes),
                "{outcome:?} moved by {delta:?}, not {packets}, {bytes}"
            );
        }
        let sum =
            |counters: &[(Outcome, Count)]| counters.iter().map(|(_, c)| c.packets).sum::<u64>();
        let delta = sum(after) - sum(&before);
        ensure!(delta == frames.len() as u64, "{delta} packets counted of {}", frames.len());
        Ok(())
    }

    fn compare_all(&mut self, frames: &[Vec<u8>], expected: &[Outcome]) -> Result<()> {
        for (number, (frame, expected)) in frames.iter().zip(expected).enumerate() {
            let outcome = self.compare(frame).with_context(|| format!("frame {number}"))?;
            ensure!(
                outcome == *expected,
                "frame {number}: expected {expected:?}, the host decided {outcome:?}"
            );
        }
        Ok(())
    }

    /// Sends one frame through the kernel and through the model; the verdicts must be the same.
    pub(crate) fn compare(&mut self, frame: &[u8]) -> Result<Outcome> {
        let verdict = self.test_run(frame)?;
        // What the kernel does not take as a frame, it never shows to the program.
        let outcome = self.model.receive(frame, Self::IFINDEX, now()?);
        if verdict != (outcome.action == Action::Drop) {
            bail!(
                "the kernel {} it, the host decided {outcome:?}; {frame:02x?}",
                if verdict { "dropped" } else { "passed" }
            );
        }
        Ok(outcome)
    }

    /// Every counter of the kernel is the model's.
    pub(crate) fn check_counters(&self) -> Result<()> {
        let counters = self.datapath.counters()?;
        ensure!(
            counters.len() == self.model.outcomes(),
            "{} cells, not {}",
            counters.len(),
            self.model.outcomes()
        );
        for (outcome, count) in counters {
            let expected = self.model.count(&outcome);
            ensure!(count == expected, "{outcome:?}: {count:?}, the host counted {expected:?}");
        }
        Ok(())
    }

    /// The sum over all counters is the program's run count, and what was sent.
    pub(crate) fn check_run_count(&self) -> Result<()> {
        let counted: u64 = self.datapath.counters()?.iter().map(|(_, count)| count.packets).sum();
        let run = self.datapath.program()?.info()?.run_count();
        ensure!(
            counted == run && run == self.runs,
            "{counted} counted, {run} run, {} sent",
            self.runs
        );
        Ok(())
    }

    /// Whether the program drops the frame.
    fn test_run(&mut self, frame: &[u8]) -> Result<bool> {
        let program = self.datapath.program()?;
        let options = TestRunOptions { data_in: Some(frame), ..TestRunOptions::new() };
        let result = self.netns.run(move || program.test_run(options))?;
        self.runs += 1;
        match result.return_value {
            1 => Ok(true),
            2 => Ok(false),
            other => bail!("XDP action {other}"),
        }
    }
}

fn now() -> Result<Nanos> {
    Ok(Nanos(u64::try_from(monotonic()?.as_nanos())?))
}
