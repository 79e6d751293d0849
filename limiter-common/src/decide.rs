//! The decision about one packet.

use crate::abi::{
    BudgetCell, Ceiling, ClassId, ClassSettings, LimitsIndex, Mode, Need, PolicyId, PrefixKey,
    Settings, Slot, Traits,
};
use crate::bucket::{self, Moment};
use crate::classify::classify;
use crate::env::{Bucket, Env, WidePrefix};
use crate::flows::{self, Asked};
use crate::hash::SourceHash;
use crate::known::{self, Filter, Mark, Seen, Standing};
use crate::packet::{Frame, Packet, PacketView, Source, parse};
use crate::table::Meta;
use crate::time::{Clock, Nanos, Tick};
use crate::units::{Limits, PacketLimit};
use crate::verdict::{Family, Outcome, Reason};

/// What was decided about a frame, and its length in bytes: what is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The verdict.
    pub outcome: Outcome,
    /// The frame's length.
    pub length: u32,
}

impl Decision {
    /// About a frame of which nothing was read.
    #[inline(always)]
    #[must_use]
    pub fn unread<V: PacketView + ?Sized>(view: &V, outcome: Outcome) -> Self {
        Self { outcome, length: view.length(u32::MAX) }
    }
}

/// Decides about the frame in `view`, received on the interface `ifindex`.
#[inline(always)]
pub fn decide<V: PacketView + ?Sized, E: Env>(
    view: &V,
    ifindex: u32,
    settings: &Settings,
    env: &E,
) -> Decision {
    let slot = settings.slot(ifindex);
    let outside = |family, reason: Reason| Outcome {
        slot,
        family,
        class: ClassId::NONE,
        reason,
        action: reason.action(settings.mode, settings.drops),
    };
    let (family, reason) = match parse(view) {
        Frame::Ip(packet) => {
            let outcome = classified(&packet, slot, settings, env)
                .unwrap_or_else(|| outside(packet.family(), Reason::NoSettings));
            return Decision { outcome, length: packet.length };
        }
        Frame::NonIp => (Family::Other, Reason::NonIp),
        Frame::Malformed(family) => (family, Reason::Malformed),
        Frame::Neighbour(family) => (family, neighbour(family, slot, settings, env)),
    };
    Decision::unread(view, outside(family, reason))
}

/// Decides about an IP packet; `None` if no class takes it.
#[inline(always)]
fn classified<E: Env>(
    packet: &Packet,
    slot: Slot,
    settings: &Settings,
    env: &E,
) -> Option<Outcome> {
    let coarse = env.now(Clock::COARSE, settings);
    let sighting = Sighting::new(packet.source, coarse, env);
    let asked = Asked::of(packet, |value| env.opaque(value, coarse));
    let order = classify(settings, packet, slot)?;
    let class = settings.classes.get(order)?;
    let class = env.pinned(class);
    let reason = if class.mode == Mode::BYPASS {
        Reason::Bypass
    } else {
        let now =
            if class.clock == Clock::COARSE { coarse } else { env.now(Clock::FINE, settings) };
        let arrival = Arrival { packet, slot, now, order, class };
        let reason = judge(&arrival, &sighting, settings, env);
        flows::ask(reason, asked, packet, now, settings, env)
    };
    Some(Outcome {
        slot,
        family: packet.family(),
        class: class.id,
        reason,
        action: reason.action(class.mode, settings.drops),
    })
}

/// A classified packet.
struct Arrival<'a> {
    packet: &'a Packet,
    slot: Slot,
    now: Nanos,
    order: usize,
    class: &'a ClassSettings,
}

/// What the filters say of a packet's source. Looked up before the packet is classified, so that the
/// processor goes on with that while it waits for the filters' memory.
struct Sighting {
    hash: SourceHash,
    /// By the coarse clock, which is good enough for filters.
    now: Nanos,
    standing: Standing,
    seen: Seen,
}

impl Sighting {
    #[inline(always)]
    fn new<E: Env>(source: Source, now: Nanos, env: &E) -> Self {
        let hash = env.key().source(source);
        // Without the filters nobody is known, and nobody a stranger.
        let (standing, seen) = env.known(hash).map_or((Standing::SEEN, Seen::LATELY), |known| {
            known::standing(&known, Mark::of(hash), now)
        });
        let hide = |value| env.opaque(value, now);
        Self { hash, now, standing: standing.hidden(hide), seen: seen.hidden(hide) }
    }

    /// Remembers that the source conforms, if it has not been lately.
    #[inline(always)]
    fn remember<E: Env>(&self, env: &E) {
        if self.seen != Seen::LATELY
            && let Some(known) = env.known(self.hash)
        {
            Mark::of(self.hash).set(&known, Filter::Seen, self.now);
        }
    }
}

/// ARP and neighbour discovery: a cap for each on an interface, so that neither can be used to flood,
/// nor to starve the other.
#[inline(always)]
fn neighbour<E: Env>(family: Family, slot: Slot, settings: &Settings, env: &E) -> Reason {
    let (cap, cell) = match family {
        Family::Ipv6 => (&settings.nd, BudgetCell::nd(slot)),
        Family::Ipv4 | Family::Other => (&settings.arp, BudgetCell::arp(slot)),
    };
    let mut moment = moment(env.now(Clock::FINE, settings), Clock::FINE, settings, env);
    let Some(cell) = env.budget(cell) else { return Reason::Neighbour };
    if bucket::admit(&cell, &mut moment, cap.cost(), cap.tolerance()) {
        Reason::Neighbour
    } else {
        Reason::NeighbourRate
    }
}

/// The limits of the packet's source. First what only reads a word that all share, so that a flood
/// of forged sources touches no line of the table; then its policy; then its bucket.
#[inline(always)]
fn judge<E: Env>(
    arrival: &Arrival<'_>,
    sighting: &Sighting,
    settings: &Settings,
    env: &E,
) -> Reason {
    let Arrival { packet, class, .. } = arrival;
    let source = packet.source;
    let mut moment = moment(arrival.now, class.clock, settings, env);
    let now = moment.now();
    let &Sighting { hash, standing, seen, .. } = sighting;
    if let Some(reason) = gate(standing, seen, arrival, settings, env) {
        // A service that is exempt here passes even while strangers do not.
        if settings.exempts_on(arrival.slot)
            && let Err(reason) = limits(resolve(packet, settings, env), arrival, settings, env)
        {
            return reason;
        }
        return reason;
    }
    let standing = standing.hidden(|value| env.opaque(value, arrival.now));
    let found = env.bucket(source, class.id, hash);
    let meta = found.as_ref().map(Bucket::meta);
    let cached = meta.and_then(|meta| meta.policy(settings.epoch));
    let policy = cached.unwrap_or_else(|| resolve(packet, settings, env));
    let limits = match limits(policy, arrival, settings, env) {
        Ok(limits) => limits,
        // A blocked or exempt stranger needs no bucket, and takes nobody else's.
        Err(reason) => return reason,
    };
    let bucket = if let Some(bucket) = found {
        renew(&bucket, standing, policy, limits, now, settings.epoch);
        bucket
    } else {
        if let Some(reason) = admit(standing, arrival, settings, env) {
            return reason;
        }
        let meta = Meta::owner(source.space, class.id)
            .with_proven(standing == Standing::PROVEN)
            .with_policy(settings.epoch, policy);
        match env.create(source, class.id, hash, meta, now) {
            Some(bucket) => bucket,
            None => return Reason::TableFull,
        }
    };
    let reason = charge(&bucket, arrival, limits, standing, &mut moment, env);
    if reason.conforms() {
        sighting.remember(env);
    }
    reason
}

/// Brings a bucket up to date whose slot was written under older settings, or before its source was
/// proven.
#[inline(always)]
fn renew<B: Bucket>(
    bucket: &B,
    standing: Standing,
    policy: PolicyId,
    limits: &Limits,
    now: Tick,
    epoch: u32,
) {
    let meta = bucket.meta();
    let is_proven = standing == Standing::PROVEN;
    if meta.is_of(epoch) && (meta.is_proven() || !is_proven) {
        return;
    }
    if !meta.is_of(epoch) {
        if let Some(packets) = bucket.packets() {
            bucket::clamp(&packets, now, limits.packets.tolerance());
        }
        if limits.bytes.is_limited()
            && let Some(bytes) = bucket.bytes()
        {
            bucket::clamp(&bytes, now, limits.bytes.tolerance());
        }
    }
    bucket.set_meta(meta.with_proven(is_proven).with_policy(epoch, policy));
}

/// What a packet meets before the table: for a source that has no bucket the budget for new sources,
/// and the sums of its class. Only reads.
#[inline(always)]
fn gate<E: Env>(
    standing: Standing,
    seen: Seen,
    arrival: &Arrival<'_>,
    settings: &Settings,
    env: &E,
) -> Option<Reason> {
    let now = Tick::from(arrival.now);
    let class = arrival.class;
    // First what a flood of forged sources spends first. A source that is proven, or is one of the few
    // that the filter of the proven takes for such, and was not seen for so long that its bucket is full
    // again, has none that counts: it would meet this budget after two lines of the table.
    let has_no_bucket = class.traits.has(Traits::REFILLS_UNSEEN) && seen == Seen::NOT;
    if (standing == Standing::STRANGER || has_no_bucket)
        && !is_welcome(standing, class, now, settings, env)
    {
        return Some(Reason::NewSource);
    }
    if standing != Standing::PROVEN && class.unproven.is_limited() {
        let share = share(standing, Standing::SEEN, class.unproven.tolerance());
        if !has_room(BudgetCell::unproven(class.id), &class.unproven, share, now, env) {
            return Some(Reason::Unproven);
        }
    }
    if class.total.is_limited() {
        let share = share(standing, Standing::PROVEN, class.total.tolerance());
        if !has_room(BudgetCell::total(class.id), &class.total, share, now, env) {
            return Some(Reason::Total);
        }
    }
    None
}

/// How much of a sum's burst a source of `standing` may use, where one of `best` may use all: when it
/// is short, strangers give way first (at half of it), then those that were seen (at three quarters).
#[inline(always)]
fn share(standing: Standing, best: Standing, tolerance: u64) -> u64 {
    match standing {
        _ if standing >= best => tolerance,
        Standing::STRANGER => tolerance / 2,
        _ => tolerance / 4 * 3,
    }
}

/// How far a source of `standing` may draw on a budget for new sources. One that comes back and finds
/// its bucket gone has half as much again to itself, that strangers cannot spend.
#[inline(always)]
#[must_use]
pub fn reach(standing: Standing, budget: &PacketLimit) -> u64 {
    let tolerance = budget.tolerance();
    match standing {
        Standing::STRANGER => tolerance,
        Standing::SEEN => tolerance + tolerance / 4,
        _ => tolerance + tolerance / 2,
    }
}

/// Whether the budget in `cell` has room for one more within `tolerance`.
#[inline(always)]
fn has_room<E: Env>(
    cell: BudgetCell,
    budget: &PacketLimit,
    tolerance: u64,
    now: Tick,
    env: &E,
) -> bool {
    env.budget(cell).is_none_or(|cell| bucket::has_room(&cell, now, budget.cost(), tolerance))
}

/// Whether the budgets for new sources, the class's and the common one, have room for one more. A
/// reserve has its own only: what floods other classes cannot spend it, nor the reverse.
/// Only reads, so that a flood of forged sources does not fight over them.
#[inline(always)]
fn is_welcome<E: Env>(
    standing: Standing,
    class: &ClassSettings,
    now: Tick,
    settings: &Settings,
    env: &E,
) -> bool {
    let (all, own) = (&settings.new_sources, &class.new_sources);
    if own.is_limited() {
        let cell = BudgetCell::new_sources(class.id);
        if !has_room(cell, own, reach(standing, own), now, env) {
            return false;
        }
    }
    class.traits.has(Traits::RESERVED)
        || has_room(BudgetCell::new_sources(ClassId::NONE), all, reach(standing, all), now, env)
}

/// Lets a source in that has no bucket, at the expense of the budgets, or says why not.
#[inline(always)]
fn admit<E: Env>(
    standing: Standing,
    arrival: &Arrival<'_>,
    settings: &Settings,
    env: &E,
) -> Option<Reason> {
    /// Classes share the budget of a prefix; a class id that no class has.
    const ALL: ClassId = ClassId(126);
    let now = Tick::from(arrival.now);
    let Arrival { packet, class, .. } = arrival;
    // Strangers have been asked.
    if standing != Standing::STRANGER && !is_welcome(standing, class, now, settings, env) {
        return Some(Reason::NewSource);
    }
    if packet.address.is_martian() || env.is_own(packet.address) {
        return Some(Reason::Martian);
    }
    // Half of a reserve's budget is the most that one site has of it.
    let is_reserved = class.traits.has(Traits::RESERVED);
    let half = class.new_sources.half();
    let (site, owner) =
        if is_reserved { (&half, class.id) } else { (&settings.new_sources_site, ALL) };
    if site.is_limited()
        && let Some(prefix) = WidePrefix::around(packet.source, Ceiling::V6Site)
    {
        let prefix = WidePrefix { kind: WidePrefix::ADMISSIONS, ..prefix };
        if !env.admit_ceiling(prefix, owner, now, site.cost(), reach(standing, site)) {
            return Some(Reason::NewSource);
        }
    }
    add(BudgetCell::new_sources(class.id), &class.new_sources, now, env);
    if !is_reserved {
        add(BudgetCell::new_sources(ClassId::NONE), &settings.new_sources, now, env);
    }
    None
}

/// The policy of the packet's source under the present settings.
#[inline(always)]
fn resolve<E: Env>(packet: &Packet, settings: &Settings, env: &E) -> PolicyId {
    if !settings.need.has(Need::POLICIES) {
        return PolicyId::DEFAULT;
    }
    #[expect(clippy::cast_possible_truncation, reason = "0 or 1")]
    let key = PrefixKey::new(settings.bank as u8, packet.address);
    env.prefix(&key).unwrap_or(PolicyId::DEFAULT)
}

/// The limits that `policy` puts on the packet's source, or the reason why none are consulted.
#[inline(always)]
fn limits<'a, E: Env>(
    policy: PolicyId,
    arrival: &Arrival<'a>,
    settings: &Settings,
    env: &'a E,
) -> Result<&'a Limits, Reason> {
    let own = &arrival.class.limits;
    if policy == PolicyId::DEFAULT {
        return Ok(own);
    }
    let Some(policy) = env.policy(settings.policies.wrapping_add(policy.0)) else {
        return Err(Reason::NoSettings);
    };
    // An exemption is the operator's promise to a service, so it outranks a block.
    if policy.exempt.holds(arrival.slot, arrival.now) {
        return Err(Reason::Exempt);
    }
    if arrival.now < policy.blocked_until {
        return Err(Reason::Blocked);
    }
    if policy.limits == LimitsIndex::CLASS {
        return Ok(own);
    }
    env.limits(policy.limits.row(arrival.order)).ok_or(Reason::NoSettings)
}

/// The instant `now`, as read from `clock`.
#[inline(always)]
fn moment<E: Env>(
    now: Nanos,
    clock: Clock,
    settings: &Settings,
    env: &E,
) -> Moment<impl Fn() -> Tick> {
    Moment::new(now.into(), move || env.now(clock, settings).into())
}

/// Charges the bucket and the sums it counts towards, all or none.
#[inline(always)]
fn charge<E: Env>(
    bucket: &E::Bucket,
    arrival: &Arrival<'_>,
    limits: &Limits,
    standing: Standing,
    moment: &mut Moment<impl Fn() -> Tick>,
    env: &E,
) -> Reason {
    let Limits { packets, bytes } = limits;
    let class = arrival.class;
    let byte_cell = if bytes.is_limited() { bucket.bytes() } else { None };
    let mut is_near = false;
    if let Some(cell) = &byte_cell {
        let frame = bytes.cost_of(arrival.packet.length);
        let level = moment.level(cell, frame, bytes.tolerance());
        if !level.has_room(frame, bytes.tolerance()) {
            return Reason::ByteRate;
        }
        is_near = level.is_past_four_fifths(bytes.tolerance());
    }
    if packets.is_limited()
        && let Some(cell) = bucket.packets()
    {
        let (cost, tolerance) = (packets.cost(), packets.tolerance());
        let level = moment.level(&cell, cost, tolerance);
        if !level.has_room(cost, tolerance) {
            return Reason::PacketRate;
        }
        // A ceiling is for sources that take much: below half of their burst a forged neighbour
        // cannot do anything to them.
        let mut passes = true;
        if level.is_past_half(tolerance) {
            is_near |= level.is_past_four_fifths(tolerance);
            passes = pass_ceilings(arrival, moment.now(), env);
        }
        // It pays also where a ceiling refuses it: else it would soon be below half again, and all
        // together would have their full rates in spite of the ceiling.
        level.charge(&cell, moment.now(), cost);
        if !passes {
            return Reason::Ceiling;
        }
    }
    let now = moment.now();
    if let Some(cell) = &byte_cell {
        let frame = bytes.cost_of(arrival.packet.length);
        bucket::charge(cell, now, frame, bytes.tolerance());
    }
    if standing != Standing::PROVEN {
        add(BudgetCell::unproven(class.id), &class.unproven, now, env);
    }
    add(BudgetCell::total(class.id), &class.total, now, env);
    if is_near { Reason::NearLimit } else { Reason::Conform }
}

/// Charges a budget, if it is one.
#[inline(always)]
fn add<E: Env>(cell: BudgetCell, budget: &PacketLimit, now: Tick, env: &E) {
    if budget.is_limited()
        && let Some(cell) = env.budget(cell)
    {
        bucket::charge(&cell, now, budget.cost(), budget.tolerance());
    }
}

/// Charges the wider prefixes of the source, if they have ceilings; false if one is reached. The
/// narrower is charged first, and stays charged if the wider is what is reached.
#[inline(always)]
fn pass_ceilings<E: Env>(arrival: &Arrival<'_>, now: Tick, env: &E) -> bool {
    let class = arrival.class;
    let pass = |ceiling: Ceiling| {
        let limit = &class.ceilings[ceiling as usize];
        if limit.is_limited()
            && let Some(prefix) = WidePrefix::around(arrival.packet.source, ceiling)
        {
            return env.admit_ceiling(prefix, class.id, now, limit.cost(), limit.tolerance());
        }
        true
    };
    pass(Ceiling::V6Customer) && pass(Ceiling::V6Site) && pass(Ceiling::V4Network)
}
