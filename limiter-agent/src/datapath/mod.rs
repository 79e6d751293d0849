//! The kernel side, as the agent sees it: the only module that knows aya.
//!
//! [`Datapath`] owns the loaded program, its maps and its attachments. Dropping it detaches and
//! frees everything.

mod banks;
mod clock;
mod error;
mod flows;
mod handshakes;
mod link;
mod shared;

use std::{collections::HashSet, fs::File, io, io::Read as _, sync::atomic::Ordering::Relaxed};

use aya::{
    Ebpf, EbpfLoader,
    maps::{HashMap, PerCpuArray},
    programs::{ProgramError, Xdp, sock_ops::SockOpsLink},
};
use limiter_common::{
    Family, Outcome,
    abi::{
        BudgetCell, Count, CounterShape, FLOW_PORTS, MAX_INTERFACES, MAX_OWN_ADDRESSES, OwnAddress,
        PROGRAM, Slot, SourceAddress, global, map,
    },
    bucket,
    decide::reach,
    flows::Flow,
    hash::HashKey,
    known::Standing,
    packet::Source,
    time::{Nanos, Tick},
};

use self::{banks::Banks, flows::FlowLinks, link::Links, shared::SharedMaps};
pub use self::{
    error::DatapathError,
    handshakes::{HandshakesError, cgroup},
    link::{Attachment, LinkKind, foreign_program},
    shared::Tracked,
};
use crate::{
    host,
    plan::{Guarded, MapSizes, Plan},
};

/// The compiled XDP program.
static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("LIMITER_OBJECT"));

/// The loaded programs with their maps and attachments.
pub struct Datapath {
    // Before the program, whose descriptor a netlink attachment needs when it is dropped.
    links: Links,
    handshakes: Option<SockOpsLink>,
    flows: Option<FlowLinks>,
    ebpf: Ebpf,
    sizes: MapSizes,
    banks: Banks,
    shared: SharedMaps,
    own: HashSet<OwnAddress>,
}

impl Datapath {
    /// Loads the program with maps as large as `plan` asks for, and puts its settings in force.
    /// Nothing is attached yet.
    ///
    /// # Errors
    /// [`DatapathError::Load`] when the kernel refuses the program or a map.
    pub fn load(plan: &Plan) -> Result<Self, DatapathError> {
        let sizes = plan.sizes;
        let key = HashKey::new(random().map_err(DatapathError::Random)?);
        let (lines_v4, lines_v6) = (sizes.lines_v4(), sizes.lines_v6());
        let (ceilings, places) = (sizes.lines_ceilings(), sizes.known_places());
        let mut ebpf = EbpfLoader::new()
            .override_global(global::COUNTER_SLOTS, &sizes.counters.slots, true)
            .override_global(global::COUNTER_CLASSES, &sizes.counters.classes, true)
            .override_global(global::LINES_V4, &lines_v4, true)
            .override_global(global::LINES_V6, &lines_v6, true)
            .override_global(global::LINES_CEILINGS, &ceilings, true)
            .override_global(global::KNOWN_PLACES, &places, true)
            .override_global(global::FLOW_PLACES, &sizes.flow_places(), true)
            .override_global(global::BYTES, &u32::from(sizes.bytes), true)
            .override_global(global::TICK, &host::counted_tick().map_or(0, |tick| tick.0), true)
            .override_global(global::HASH_OFFSET, &key.offset, true)
            .override_global(global::HASH_FIRST, &key.first, true)
            .override_global(global::HASH_SECOND, &key.second, true)
            // One to spare: older kernels need a free one to replace the value of another.
            .map_max_entries(map::PREFIXES, sizes.prefixes + 1)
            .map_max_entries(map::POLICIES, sizes.policies)
            .map_max_entries(map::LIMITS, sizes.limits)
            .map_max_entries(map::BUCKETS_V4, lines_v4)
            .map_max_entries(map::BUCKETS_V6, lines_v6)
            .map_max_entries(map::CEILINGS, ceilings)
            .map_max_entries(map::BYTES_V4, sizes.byte_lines(lines_v4))
            .map_max_entries(map::BYTES_V6, sizes.byte_lines(lines_v6))
            .map_max_entries(map::KNOWN, places)
            .map_max_entries(map::FLOWS, FLOW_PORTS + sizes.flow_places())
            .map_max_entries(map::COUNTERS, sizes.counters.cells())
            .load(OBJECT)
            .map_err(DatapathError::load)?;
        xdp_mut(&mut ebpf)?.load().map_err(DatapathError::Program)?;
        clock::load(&mut ebpf)?;
        let shared = SharedMaps::new(&ebpf, key)?;
        let mut banks = Banks::default();
        flows::set_client_ports(&mut ebpf, &plan.client_ports)?;
        banks.install(&mut ebpf, &sizes, plan)?;
        let (links, own) = (Links::default(), HashSet::new());
        Ok(Self { links, handshakes: None, flows: None, ebpf, sizes, banks, shared, own })
    }

    /// Puts the settings of `plan` in force: a packet sees the old ones or the new ones, never a
    /// mix. The plan must fit the maps as they were sized ([`Plan::fits`]).
    ///
    /// # Errors
    /// [`DatapathError::Map`] when a map cannot be written; the old settings stay in force.
    pub fn apply(&mut self, plan: &Plan) -> Result<(), DatapathError> {
        if self.banks.comes_round() {
            self.shared.forget_policies();
        }
        self.banks.install(&mut self.ebpf, &self.sizes, plan)?;
        flows::set_client_ports(&mut self.ebpf, &plan.client_ports)?;
        self.shorten(plan, host::monotonic().into());
        Ok(())
    }

    /// Shortens what looser budgets left as debts, so that one that was raised is felt at once. (A
    /// source's bucket is brought up to date by its next packet.)
    fn shorten(&self, plan: &Plan, now: Tick) {
        for (_, cell, budget) in plan.budgets() {
            bucket::clamp(&self.shared.budget(cell), now, reach(Standing::PROVEN, &budget));
        }
        let established = self.shared.budget(BudgetCell::established());
        bucket::clamp(&established, now, plan.settings.established.tolerance());
        let cap = plan.settings.neighbours;
        for slot in (0..).map(Slot).take(MAX_INTERFACES) {
            let cell = self.shared.budget(BudgetCell::neighbours(slot));
            bucket::clamp(&cell, now, cap.tolerance());
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
        self.flows = Some(flows::attach(&mut self.ebpf)?);
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

    /// How many buckets are in use at `now`, of IPv4 and IPv6. Reads the whole table.
    #[must_use]
    pub fn tracked(&self, now: Nanos) -> [(Family, Tracked); 2] {
        let [v4, v6] = self.shared.tracked(Tick::from(now));
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
        self.links.attach(xdp_mut(&mut self.ebpf)?, interface)
    }

    /// Detaches it from an interface; nothing happens if it was not attached.
    pub fn detach(&mut self, ifindex: u32) {
        self.links.detach(ifindex);
    }

    /// How large the maps are.
    #[must_use]
    pub fn sizes(&self) -> &MapSizes {
        &self.sizes
    }

    /// All counters that are not zero, summed over the CPUs.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the map cannot be read.
    pub fn counters(&self) -> Result<Vec<(Outcome, Count)>, DatapathError> {
        let shape: CounterShape = self.sizes.counters;
        let cells = self.per_cpu::<Count>(map::COUNTERS)?;
        let mut counters = Vec::new();
        for cell in 0..shape.cells() {
            let values = cells.get(&cell, 0).map_err(|e| DatapathError::map(map::COUNTERS, e))?;
            let count = values.iter().fold(Count::default(), |sum, count| Count {
                packets: sum.packets + count.packets,
                bytes: sum.bytes + count.bytes,
            });
            if let Some(outcome) = shape.outcome(cell).filter(|_| count.packets != 0) {
                counters.push((outcome, count));
            }
        }
        Ok(counters)
    }

    /// How many buckets have been made since the start, IPv4 and IPv6.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the map cannot be read.
    pub fn sources_created(&self) -> Result<[(Family, u64); 2], DatapathError> {
        let cells = self.per_cpu::<u64>(map::CREATED)?;
        let read = |family: Family| {
            let values = cells
                .get(&(family as u32), 0)
                .map_err(|error| DatapathError::map(map::CREATED, error))?;
            Ok((family, values.iter().sum()))
        };
        Ok([read(Family::Ipv4)?, read(Family::Ipv6)?])
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
        let program = self.ebpf.program(PROGRAM).ok_or_else(missing)?;
        program.try_into().map_err(DatapathError::Program)
    }

    fn per_cpu<V: aya::Pod>(
        &self,
        name: &'static str,
    ) -> Result<PerCpuArray<&aya::maps::MapData, V>, DatapathError> {
        let map = self.ebpf.map(name).ok_or(DatapathError::MissingMap(name))?;
        PerCpuArray::try_from(map).map_err(|error| DatapathError::map(name, error))
    }
}

/// Three numbers that nobody can guess.
fn random() -> io::Result<[u64; 3]> {
    let mut file = File::open("/dev/urandom")?;
    let mut number = || {
        let mut bytes = [0; 8];
        file.read_exact(&mut bytes).map(|()| u64::from_ne_bytes(bytes))
    };
    Ok([number()?, number()?, number()?])
}

fn xdp_mut(ebpf: &mut Ebpf) -> Result<&mut Xdp, DatapathError> {
    let program = ebpf.program_mut(PROGRAM).ok_or_else(missing)?;
    program.try_into().map_err(DatapathError::Program)
}

fn missing() -> DatapathError {
    DatapathError::Program(ProgramError::NotLoaded)
}
