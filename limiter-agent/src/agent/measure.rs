//! What the agent measures of classes that are observed.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::SystemTime;

use ipnet::IpNet;
use limiter_common::abi::{self, ClassId, WATCHED, WatchedSource};
use limiter_common::packet::Source;
use log::info;
use tokio::time::Instant;

use super::{Agent, report};
use crate::config::Config;
use crate::datapath::DatapathError;
use crate::host;
use crate::measure::{
    ClassHour, ClassReport, Measure, Measured, Orders, Reading, Recommendation, Refusal, Report,
    Request, recommendation,
};
use crate::status::utc;

/// What is measured, and when it was read last.
pub(super) struct Watch {
    measure: Measure,
    read: Instant,
    apart: Apart,
    /// Whether somebody may be in the map.
    is_used: bool,
}

impl Watch {
    pub(super) fn new(config: &Config, now: SystemTime) -> Self {
        Self {
            measure: Measure::new(config, now),
            read: Instant::now(),
            apart: Apart::of(config),
            is_used: true,
        }
    }
}

impl Agent {
    /// Reads what watched sources have sent. To be called again a second after the last call returned.
    ///
    /// # Errors
    /// [`DatapathError`] if the map cannot be read or written.
    pub fn measure(&mut self) -> Result<(), DatapathError> {
        let observed: BTreeSet<ClassId> = self.observed().collect();
        if observed.is_empty() && !self.watch.is_used {
            return Ok(());
        }
        let elapsed = self.watch.read.elapsed();
        let (is_full, unwatched) =
            (self.datapath.watched().is_full()?, self.datapath.watched().unwatched()?);
        let counts: Vec<_> = self.datapath.watched().read()?.collect();
        // After the reading: the next one is at least a second later for every source.
        self.watch.read = Instant::now();
        let now = host::monotonic();
        let (datapath, apart) = (&self.datapath, &self.watch.apart);
        let Orders { forget, mask } = self.watch.measure.read(&mut Reading {
            counts: &mut counts.into_iter(),
            elapsed,
            observed: &observed,
            is_full,
            unwatched,
            is_proven: &|source| source_of(source).is_some_and(|it| datapath.is_proven(it, now)),
            is_apart: &|source| apart.has(source),
            is_sampled: &|source, mask| {
                source_of(source).is_some_and(|it| datapath.is_sampled(it, mask))
            },
        });
        for source in &forget {
            self.datapath.watched().forget(source)?;
        }
        self.watch.is_used = self.watch.measure.watched() > 0 || !observed.is_empty();
        self.datapath.watched().watch(mask)
    }

    /// What was measured, by class.
    #[must_use]
    pub fn measured(&self) -> Report {
        self.report_on(&self.watch.measure.classes())
    }

    /// Limits above what was measured.
    ///
    /// # Errors
    /// [`Refusal`] says why there are none.
    pub fn recommend(&self, request: &Request) -> Result<Recommendation, Refusal> {
        let classes = self.watch.measure.classes();
        let measured = Measured {
            config: &self.config,
            text: self.text.as_str(),
            report: &self.report_on(&classes),
            classes: &classes,
            id: &|name| self.plan.names.class(name),
            mode: &|class| report::mode(&self.config, class),
        };
        recommendation(&measured, request, SystemTime::now())
    }

    /// After another configuration was put in force.
    pub(super) fn measure_on(&mut self) {
        if !self.watch.measure.goes_on_under(&self.config, SystemTime::now()) {
            info!("classes have changed: what was measured under the old ones is gone");
        }
        self.watch.apart = Apart::of(&self.config);
    }

    fn report_on(&self, classes: &BTreeMap<ClassId, ClassHour>) -> Report {
        let measure = &self.watch.measure;
        let none = ClassHour::default();
        let of = |class: &crate::config::Class| {
            let found = classes.get(&self.plan.names.class(&class.name)).unwrap_or(&none);
            let mode = report::mode(&self.config, class).as_str();
            ClassReport::new(&class.name, mode, &class.allowance, found)
        };
        Report {
            since: utc(measure.since()),
            until: utc(SystemTime::now()),
            one_in: measure.one_in(),
            watched: measure.watched(),
            capacity: WATCHED,
            unwatched_packets: measure.unwatched(),
            false_proofs: self.datapath.false_proofs(host::monotonic()),
            classes: self.config.rules().map(of).collect(),
        }
    }

    fn observed(&self) -> impl Iterator<Item = ClassId> {
        let settings = &self.plan.settings;
        let count = usize::try_from(settings.class_count).unwrap_or(0);
        let classes = settings.classes.iter().take(count);
        classes.filter(|class| class.mode == abi::Mode::OBSERVE).map(|class| class.id)
    }
}

/// The networks with limits of their own.
struct Apart {
    networks: HashSet<IpNet>,
    /// The lengths that they have.
    lengths: BTreeSet<u8>,
}

impl Apart {
    fn of(config: &Config) -> Self {
        let networks: HashSet<_> = config.prefixes.iter().map(|it| it.cidr).collect();
        let lengths = networks.iter().map(IpNet::prefix_len).collect();
        Self { networks, lengths }
    }

    fn has(&self, source: &WatchedSource) -> bool {
        let Some(address) = crate::measure::address(source) else { return false };
        let around = self.lengths.iter().filter_map(|length| IpNet::new(address, *length).ok());
        around.map(|network| network.trunc()).any(|network| self.networks.contains(&network))
    }
}

fn source_of(source: &WatchedSource) -> Option<Source> {
    crate::measure::address(source).map(Source::from)
}
