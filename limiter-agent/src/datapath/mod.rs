//! The kernel side, as the agent sees it: the only module that knows aya.
//!
//! [`Datapath`] owns the loaded program, its maps and its attachments. Dropping it detaches and
//! frees everything that is not pinned.

mod banks;
mod clock;
mod connections;
mod counters;
mod error;
mod events;
mod flows;
mod handshakes;
mod head;
mod inspect;
mod leases;
mod link;
mod object;
mod pins;
mod samples;
mod shared;
mod unattended;
mod watched;

use std::{
    collections::HashSet,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use aya::{
    Ebpf,
    maps::HashMap,
    programs::{Xdp, links::FdLink},
};
use limiter_common::{
    Family,
    abi::{
        self, ABI_VERSION, BudgetCell, CARRIED_VERSION, HANDSHAKES, Identity, MAX_INTERFACES,
        MAX_OWN_ADDRESSES, Name, OwnAddress, PROGRAM, Shape, Slot, SourceAddress, map,
    },
    bucket,
    decide::reach,
    flows::Flow,
    known::Standing,
    packet::Source,
    time::{Nanos, Tick},
};

use tokio::sync::Mutex;

use self::{
    banks::Banks,
    connections::Connections,
    link::Links,
    object::{array, load, random, set, xdp, xdp_mut},
    shared::SharedMaps,
};
pub use self::{
    error::DatapathError,
    events::EventRing,
    handshakes::{HandshakesError, cgroup},
    head::Head,
    inspect::{Bucket, Inspector},
    leases::Leases,
    link::{Attachment, LinkKind, foreign_program},
    pins::{DEFAULT_PINS, LeftMaps, Pins, PinsError},
    samples::{Samples, Watch},
    shared::{SAMPLED_LINES, Snapshot, Tracked},
    unattended::{KnownRemains, Remains, detach, remains, set_mode},
    watched::WatchedMaps,
};
use crate::{
    host::{self, Link},
    plan::{Guarded, MapSizes, Names, Plan},
};

/// The loaded programs with their maps and attachments.
pub struct Datapath {
    // Before the program, whose descriptor a netlink attachment needs when it is dropped.
    links: Links,
    handshakes: Option<FdLink>,
    connections: Connections,
    /// By the names of their pins.
    flows: Vec<(&'static str, FdLink)>,
    ebpf: Ebpf,
    sizes: MapSizes,
    banks: Banks,
    head: Head,
    shared: Arc<SharedMaps>,
    inspector: Arc<Inspector>,
    own: HashSet<OwnAddress>,
    samples: Arc<Mutex<Samples>>,
    events: Option<EventRing>,
    /// Until they are taken.
    leases: Option<Leases>,
    watched: WatchedMaps,
    pins: Option<Pins>,
    /// Whether the maps are pinned where a start makes new ones: this one, or one before that was ended
    /// before it had moved them.
    are_new_pins: bool,
    origin: Origin,
}

/// Where the maps come from.
#[derive(Debug)]
pub enum Origin {
    /// They are new.
    New,
    /// They are those of the agent before: with its buckets, standing and counters.
    Kept,
    /// They are new, and take the place of these, from which the standing of sources goes over.
    Replaced(LeftMaps),
}

/// What an agent before this one left in its pins.
pub struct Left {
    pins: Pins,
    maps: Option<LeftMaps>,
}

impl Left {
    /// Looks at what is there.
    #[must_use]
    pub fn new(pins: Pins) -> Self {
        let maps = pins.maps();
        Self { pins, maps }
    }

    /// The numbers of classes and interfaces that its maps hold; none if that cannot be read.
    #[must_use]
    pub fn names(&self) -> Option<&Names> {
        self.maps.as_ref()?.known.as_ref().map(|(_, names)| names)
    }

    /// Whether its maps can be kept for `plan`.
    #[must_use]
    pub fn fits(&self, plan: &Plan) -> bool {
        self.maps.as_ref().and_then(|maps| maps.fit(plan)).is_some()
    }
}

impl Drop for Datapath {
    /// A start that was not finished leaves no maps behind.
    fn drop(&mut self) {
        if let (Some(pins), Origin::New | Origin::Replaced(_)) = (&self.pins, &self.origin) {
            pins.drop_new_maps();
        }
    }
}

impl Datapath {
    /// Loads the program with new maps, as large as `plan` asks for, and puts its settings in force.
    /// Nothing is attached yet, and nothing will be pinned.
    ///
    /// # Errors
    /// [`DatapathError::Load`] when the kernel refuses the program or a map.
    pub fn load(plan: &Plan) -> Result<Self, DatapathError> {
        Self::start(plan, None, None)
    }

    /// The same, with the maps that an agent before this one `left` if they will do; else it goes on
    /// from what they say, or the `snapshot`, of the standing of sources. What is attached goes on as it
    /// is: that is for [`take_over`](Self::take_over), once all new interfaces are attached.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn start(
        plan: &Plan,
        left: Option<Left>,
        snapshot: Option<&Snapshot>,
    ) -> Result<Self, DatapathError> {
        let (pins, maps) = left.map_or((None, None), |Left { pins, maps }| (Some(pins), maps));
        let kept = maps.as_ref().and_then(|maps| Some((maps, maps.fit(plan)?)));
        let sizes = kept.map_or(plan.sizes, |(_, sizes)| sizes);
        let inherited = maps.as_ref().filter(|maps| maps.identity.carried == CARRIED_VERSION);
        let key = match (inherited, snapshot) {
            (Some(maps), _) => maps.identity.key,
            (None, Some(snapshot)) => snapshot.key,
            (None, None) => random().map_err(DatapathError::Random)?,
        };
        let (directory, head) = match (&pins, kept) {
            (_, Some((maps, _))) => (Some(maps.directory.clone()), Head::left(&maps.directory)?),
            (Some(pins), None) => (Some(pins.new_maps()?), abi::Head::FIRST),
            (None, None) => (None, abi::Head::FIRST),
        };
        let are_new_pins = directory.as_ref().is_some_and(|it| it.ends_with(pins::NEW_MAPS));
        let instance = random().map_err(DatapathError::Random)?[0];
        let mut ebpf = load(&sizes, key, instance, head, directory.as_deref())?;
        let program = xdp(&ebpf, PROGRAM)?.info().map_err(DatapathError::Program)?.id();
        let before = kept.map_or(0, |(maps, _)| maps.identity.programs[0]);
        let programs = [program, before];
        let identity = Identity { version: ABI_VERSION, carried: CARRIED_VERSION, key, programs };
        set(&mut ebpf, map::IDENTITY, 0, &identity)?;
        set(&mut ebpf, map::SHAPE, 0, &Shape::from(sizes))?;

        let shared = Arc::new(SharedMaps::new(&ebpf, identity.key())?);
        let inspector = Arc::new(Inspector::new(&ebpf, Arc::clone(&shared))?);
        let connections = Connections::new(&ebpf, identity.key(), instance)?;
        let head = Head::new(&mut ebpf)?;
        let banks = Banks::new(&ebpf, head.clone())?;
        let own = own_addresses(&ebpf)?;
        let is_kept = kept.is_some();
        let origin = match maps {
            Some(_) if is_kept => Origin::Kept,
            Some(maps) => Origin::Replaced(maps),
            None => Origin::New,
        };
        let samples = Arc::new(Mutex::new(Samples::take(&mut ebpf)?));
        let events = Some(EventRing::take(&mut ebpf)?);
        let leases = Some(Leases::take(&mut ebpf)?);
        let watched = WatchedMaps::take(&mut ebpf)?;
        let mut datapath = Self {
            links: Links::default(),
            handshakes: None,
            connections,
            flows: Vec::new(),
            ebpf,
            sizes,
            banks,
            head,
            shared,
            inspector,
            own,
            samples,
            events,
            leases,
            watched,
            pins,
            are_new_pins,
            origin,
        };
        if !matches!(datapath.origin, Origin::Kept) {
            datapath.install(plan, None)?;
            flows::set_client_ports(&mut datapath.ebpf, &plan.client_ports)?;
            if let Some(snapshot) = snapshot.filter(|it| it.key == key) {
                datapath.shared.restore(snapshot, host::monotonic());
            }
        }
        Ok(datapath)
    }

    /// Puts `plan` in force and our program in the place of an earlier agent's, where there is one;
    /// from then on the pins are ours. Interfaces that are not of the plan are let go.
    ///
    /// # Errors
    /// [`DatapathError`] when the kernel refuses; the earlier agent's settings stay in force.
    pub fn take_over(&mut self, plan: &Plan) -> Result<(), DatapathError> {
        if matches!(self.origin, Origin::Kept) {
            self.apply(plan)?;
        }
        self.inherit(plan)?;
        self.inherit_leases()?;
        self.links.swap(xdp_mut(&mut self.ebpf, PROGRAM)?)?;
        // Who was proven meanwhile.
        self.inherit_standing()?;
        if self.handshakes.is_some() {
            // Before the other program goes, so that there is always one that counts connections.
            self.appoint(0)?;
        }
        let Some(pins) = &self.pins else { return Ok(()) };
        if self.are_new_pins {
            pins.keep_new_maps()?;
        } else {
            pins.drop_new_maps();
        }
        self.origin = Origin::Kept;
        for interface in pins.interfaces() {
            if plan.interfaces.iter().all(|guarded| guarded.name != interface) {
                pins.drop_link(&interface);
            }
        }
        if let Some(link) = self.handshakes.take() {
            self.handshakes = Some(pins.keep_other(HANDSHAKES, link)?);
        }
        for (name, link) in std::mem::take(&mut self.flows) {
            self.flows.push((name, pins.keep_other(name, link)?));
        }
        Ok(())
    }

    /// What was found, until it is taken over.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Whether the attachments outlive this.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.pins.is_some()
    }

    /// Detaches from everything and removes what is pinned.
    ///
    /// # Errors
    /// [`PinsError`] with the first pin that cannot be removed.
    pub fn remove(&mut self) -> Result<(), PinsError> {
        self.links = Links::default();
        self.handshakes = None;
        self.flows.clear();
        self.pins.take().map_or(Ok(()), Pins::clear)
    }

    /// A handle for who says that the agent lives.
    #[must_use]
    pub fn head(&self) -> Head {
        self.head.clone()
    }

    /// Who is proven, to outlive the kernel.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.shared.snapshot(host::monotonic())
    }

    /// Puts the settings of `plan` in force: a packet sees the old ones or the new ones, never a
    /// mix. Where only a few prefixes differ, only their sources look up their policies again. The plan
    /// must fit the maps as they were sized ([`Plan::fits`]).
    ///
    /// # Errors
    /// [`DatapathError::Map`] when a map cannot be written; the old settings stay in force.
    pub fn apply(&mut self, plan: &Plan) -> Result<(), DatapathError> {
        self.apply_until(plan, None)
    }

    /// The same, but from `deadline` on the settings before hold again, with or without an agent,
    /// unless [`Head::confirm`] comes. Until then nothing else must be applied: it would take the
    /// place of what is to hold again.
    ///
    /// # Errors
    /// As for [`apply`](Self::apply).
    pub fn apply_until(
        &mut self,
        plan: &Plan,
        deadline: Option<Nanos>,
    ) -> Result<(), DatapathError> {
        flows::set_client_ports(&mut self.ebpf, &plan.client_ports)?;
        if deadline.is_none()
            && let Some(changed) = self.banks.amend(&mut self.ebpf, &self.sizes, plan)?
        {
            self.shared.outdate(&changed, self.head.epoch());
            return Ok(());
        }
        if self.banks.comes_round() {
            self.shared.forget_policies();
        }
        self.install(plan, deadline)?;
        self.shorten(plan, host::monotonic().into());
        Ok(())
    }

    fn install(&mut self, plan: &Plan, deadline: Option<Nanos>) -> Result<(), DatapathError> {
        let classes = plan.names.classes().map(|(name, id)| (Name::of_class(id), name));
        let slots = plan.names.slots().map(|(name, slot)| (Name::of_slot(slot), name));
        for (place, name) in classes.chain(slots) {
            set(&mut self.ebpf, map::NAMES, place, &Name::new(name))?;
        }
        self.banks.install(&mut self.ebpf, &self.sizes, plan, deadline)
    }

    /// Takes over what the maps that ours replace know of sources, and what their budgets stand at.
    fn inherit(&self, plan: &Plan) -> Result<(), DatapathError> {
        if let Some(maps) = self.replaced() {
            self.shared.inherit_budgets(&maps.directory)?;
            self.shorten(plan, host::monotonic().into());
        }
        self.inherit_standing()
    }

    fn inherit_standing(&self) -> Result<(), DatapathError> {
        self.replaced().map_or(Ok(()), |maps| self.shared.inherit_known(&maps.directory))
    }

    /// The maps that ours replace, if something of them can be carried over.
    fn replaced(&self) -> Option<&LeftMaps> {
        match &self.origin {
            Origin::Replaced(maps) if maps.identity.carried == CARRIED_VERSION => Some(maps),
            Origin::New | Origin::Kept | Origin::Replaced(_) => None,
        }
    }

    /// Shortens what looser budgets left as debts, so that one that was raised is felt at once. (A
    /// source's bucket is brought up to date by its next packet.)
    fn shorten(&self, plan: &Plan, now: Tick) {
        for (_, cell, budget) in plan.budgets() {
            bucket::clamp(&self.shared.budget(cell), now, reach(Standing::PROVEN, &budget));
        }
        let established = self.shared.budget(BudgetCell::established());
        bucket::clamp(&established, now, plan.settings.established.tolerance());
        let (arp, nd) = (plan.settings.arp, plan.settings.nd);
        for slot in (0..).map(Slot).take(MAX_INTERFACES) {
            for (cell, cap) in [(BudgetCell::arp(slot), arp), (BudgetCell::nd(slot), nd)] {
                bucket::clamp(&self.shared.budget(cell), now, cap.tolerance());
            }
        }
    }

    /// Says which addresses are this host's own: packets from them are forged.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the map cannot be written, [`DatapathError::OwnAddresses`] when there
    /// are more than [`MAX_OWN_ADDRESSES`]: the first of them count then.
    pub fn own(&mut self, addresses: &[SourceAddress]) -> Result<(), DatapathError> {
        let failed = |error| DatapathError::map(map::OWN, error);
        let map = self.ebpf.map_mut(map::OWN).ok_or(DatapathError::MissingMap(map::OWN))?;
        let mut own: HashMap<_, OwnAddress, u32> = map.try_into().map_err(failed)?;
        let known = addresses.iter().copied().map(OwnAddress::from).take(MAX_OWN_ADDRESSES);
        let wanted: HashSet<_> = known.collect();
        let gone: Vec<_> = self.own.difference(&wanted).copied().collect();
        for gone in gone {
            own.remove(&gone).map_err(failed)?;
            self.own.remove(&gone);
        }
        for new in wanted {
            if !self.own.contains(&new) {
                own.insert(new, 1, 0).map_err(failed)?;
                self.own.insert(new);
            }
        }
        if addresses.len() > MAX_OWN_ADDRESSES {
            return Err(DatapathError::OwnAddresses(addresses.len()));
        }
        Ok(())
    }

    /// From now on, whoever completes a TCP handshake with this host is proven, and the connections that
    /// it opens are known.
    ///
    /// # Errors
    /// [`HandshakesError`] when the host has nothing to listen on or the kernel refuses. All else
    /// goes on without.
    pub fn hear_handshakes(&mut self) -> Result<(), HandshakesError> {
        self.handshakes = Some(handshakes::attach(&mut self.ebpf)?);
        Ok(())
    }

    /// From now on, the UDP flows that this host opens are known, and connections that it opened stay so
    /// while they are used.
    ///
    /// # Errors
    /// [`HandshakesError`] as for [`hear_handshakes`](Self::hear_handshakes).
    pub fn hear_flows(&mut self) -> Result<(), HandshakesError> {
        self.flows = flows::attach(&mut self.ebpf)?;
        Ok(())
    }

    /// Notes that this host opened a flow, or uses it still.
    pub fn open(&self, flow: Flow, now: Nanos) {
        self.shared.open(flow, now);
    }

    /// Vouches for a source: it has received what this host sent to it.
    pub fn prove(&self, source: Source, now: Nanos) {
        self.shared.prove(source, now);
    }

    /// What looks single sources up, also for who has not the datapath to himself.
    #[must_use]
    pub fn inspector(&self) -> Arc<Inspector> {
        Arc::clone(&self.inspector)
    }

    /// How many buckets are in use at `now`, of IPv4 and IPv6. Reads the whole table.
    #[must_use]
    pub fn tracked(&self, now: Nanos) -> [(Family, Tracked); 2] {
        let [v4, v6] = self.shared.tracked(Tick::from(now), u32::MAX);
        [(Family::Ipv4, v4), (Family::Ipv6, v6)]
    }

    /// The same from at most [`SAMPLED_LINES`] lines of each family, spread over its table, and so at the
    /// same cost whatever its size: exact up to that size. Beyond it the standard error is at most
    /// 4/1000 of the capacity, since a keyed hash says which line a source is in: a line has two slots for
    /// each source of the capacity that falls to it, and however they fill, with 65,536 lines that is it.
    #[must_use]
    pub fn estimate(&self, now: Nanos) -> [(Family, Tracked); 2] {
        let [v4, v6] = self.shared.tracked(Tick::from(now), SAMPLED_LINES);
        [(Family::Ipv4, v4), (Family::Ipv6, v6)]
    }

    /// The theoretical arrival time of a budget.
    #[must_use]
    pub fn budget(&self, cell: BudgetCell) -> Tick {
        Tick(self.shared.budget(cell).load(Relaxed))
    }

    /// Attaches the program to an interface.
    ///
    /// # Errors
    /// [`DatapathError::Attach`] with the kernel's errno.
    pub fn attach(&mut self, interface: &Guarded) -> Result<Attachment, DatapathError> {
        self.links.attach(xdp_mut(&mut self.ebpf, PROGRAM)?, interface, self.pins.as_ref())
    }

    /// Takes the attachment of an agent before this one, if there is one as `interface` asks for;
    /// [`take_over`](Self::take_over) puts our program there. `present` is what the kernel says.
    pub fn adopt(&mut self, interface: &Guarded, present: &Link) -> bool {
        self.pins.as_ref().is_some_and(|pins| self.links.adopt(pins, interface, present))
    }

    /// Detaches it from an interface; nothing happens if it was not attached.
    pub fn detach(&mut self, interface: &str, ifindex: u32) {
        if let Some(pins) = &self.pins {
            pins.drop_link(interface);
        }
        self.links.detach(ifindex);
    }

    /// How large the maps are.
    #[must_use]
    pub fn sizes(&self) -> &MapSizes {
        &self.sizes
    }

    /// The samples of dropped packets, which one at a time can watch.
    #[must_use]
    pub fn samples(&self) -> Arc<Mutex<Samples>> {
        Arc::clone(&self.samples)
    }

    /// The ring of events, for the one who reads it; none if it was taken before.
    pub fn take_events(&mut self) -> Option<EventRing> {
        self.events.take()
    }

    /// Forwards the program's rare log lines to the `log` crate, on a task of the current tokio
    /// runtime that ends with it.
    ///
    /// # Errors
    /// [`DatapathError::Logs`] when the log buffer cannot be read.
    pub fn forward_logs(&mut self) -> Result<(), DatapathError> {
        let failed = |error: &dyn std::error::Error| DatapathError::Logs(error.to_string());
        let logger = aya_log::EbpfLogger::init(&mut self.ebpf).map_err(|e| failed(&e))?;
        // SAFETY: the logger owns its descriptor and closes it when it is dropped, not before.
        let logger = unsafe { tokio::io::unix::AsyncFd::register(logger) };
        let mut logger = logger.map_err(|error| failed(&error))?;
        tokio::spawn(async move {
            while let Ok(mut ready) = logger.readable_mut().await {
                ready.get_inner_mut().flush();
                ready.clear_ready();
            }
        });
        Ok(())
    }

    /// The loaded program, for `BPF_PROG_TEST_RUN` and its run count.
    ///
    /// # Errors
    /// [`DatapathError::Program`] if the object has no such program.
    pub fn program(&self) -> Result<&Xdp, DatapathError> {
        xdp(&self.ebpf, PROGRAM)
    }
}

/// The addresses that the map of own ones holds.
fn own_addresses(ebpf: &Ebpf) -> Result<HashSet<OwnAddress>, DatapathError> {
    let failed = |error| DatapathError::map(map::OWN, error);
    let map = ebpf.map(map::OWN).ok_or(DatapathError::MissingMap(map::OWN))?;
    let own: HashMap<_, OwnAddress, u32> = map.try_into().map_err(failed)?;
    own.keys().collect::<Result<_, _>>().map_err(failed)
}
