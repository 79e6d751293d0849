//! The decision about one packet.

use crate::abi::{
    BucketState, ClassId, ClassSettings, LimitsIndex, Mode, Need, Policy, PolicyId, PrefixKey,
    Resolution, Settings, Slot,
};
use crate::bucket::{self, Cell, Moment};
use crate::classify::classify;
use crate::packet::{Frame, Packet, PacketView, Source, parse};
use crate::time::{Clock, Nanos, Tick};
use crate::units::Limits;
use crate::verdict::{Family, Outcome, Reason};

/// What a decision needs from outside: the state behind it. The kernel side answers from maps.
pub trait Env {
    /// A bucket in the table.
    type Bucket: Bucket;
    /// A word that caps something else than one source.
    type Cell: Cell;

    /// The time, by that clock.
    fn now(&self, clock: Clock) -> Nanos;
    /// The bucket of `source` in `class`, if there is one.
    fn bucket(&self, source: Source, class: ClassId) -> Option<Self::Bucket>;
    /// The bucket of `source` in `class`, made from `state` if there is none yet.
    fn create(&self, source: Source, class: ClassId, state: BucketState) -> Option<Self::Bucket>;
    /// The cap on ARP and neighbour discovery of an interface.
    fn neighbours(&self, slot: Slot) -> Option<Self::Cell>;
    /// The budget for new sources of a class, or of all together ([`ClassId::NONE`]).
    fn budget(&self, class: ClassId) -> Option<Self::Cell>;
    /// The policy of the longest prefix that covers the address.
    fn prefix(&self, key: &PrefixKey) -> Option<PolicyId>;
    /// The policy at this place of the map (both banks counted).
    fn policy(&self, place: u32) -> Option<&Policy>;
    /// The limits at this place of the map (both banks counted).
    fn limits(&self, place: u32) -> Option<&Limits>;
}

/// A bucket in the table, shared between CPUs.
pub trait Bucket {
    /// A theoretical arrival time.
    type Cell: Cell;

    /// The packet bucket.
    fn packets(&self) -> Self::Cell;
    /// The byte bucket.
    fn bytes(&self) -> Self::Cell;
    /// The cached policy.
    fn resolution(&self) -> Resolution;
    /// Caches a policy.
    fn set_resolution(&self, resolution: Resolution);
}

/// Decides about the frame in `view`, received on the interface `ifindex`.
#[inline(always)]
pub fn decide<V: PacketView + ?Sized, E: Env>(
    view: &V,
    ifindex: u32,
    settings: &Settings,
    env: &E,
) -> Outcome {
    let slot = settings.slot(ifindex);
    let outside = |family, reason: Reason| Outcome {
        slot,
        family,
        class: ClassId::NONE,
        reason,
        action: reason.action(settings.mode, settings.drops),
    };
    let packet = match parse(view) {
        Frame::Ip(packet) => packet,
        Frame::NonIp => return outside(Family::Other, Reason::NonIp),
        Frame::Malformed(family) => return outside(family, Reason::Malformed),
        Frame::Neighbour(family) => {
            return outside(family, neighbour(slot, settings, env));
        }
    };
    let length = view.length();
    let Some((order, class)) = classify(settings, &packet, length)
        .and_then(|order| Some((order, settings.classes.get(order)?)))
    else {
        return outside(packet.family(), Reason::NoSettings);
    };
    let reason = if class.mode == Mode::BYPASS {
        Reason::Bypass
    } else {
        let now = env.now(class.clock);
        judge(&Arrival { packet: &packet, length, slot, now, order, class }, settings, env)
    };
    Outcome {
        slot,
        family: packet.family(),
        class: class.id,
        reason,
        action: reason.action(class.mode, settings.drops),
    }
}

/// A classified packet.
struct Arrival<'a> {
    packet: &'a Packet,
    length: u32,
    slot: Slot,
    now: Nanos,
    order: usize,
    class: &'a ClassSettings,
}

/// ARP and neighbour discovery: one cap for both on an interface, so that neither can be used to
/// flood.
#[inline(always)]
fn neighbour<E: Env>(slot: Slot, settings: &Settings, env: &E) -> Reason {
    let cap = &settings.neighbours;
    let mut moment = moment(env.now(Clock::FINE), Clock::FINE, env);
    let Some(cell) = env.neighbours(slot) else { return Reason::Neighbour };
    bucket::clamp(&cell, moment.now(), cap.tolerance());
    if bucket::admit(&cell, &mut moment, cap.cost(), cap.tolerance()) {
        Reason::Neighbour
    } else {
        Reason::NeighbourRate
    }
}

/// The limits of the packet's source: its policy first, then its bucket.
#[inline(always)]
fn judge<E: Env>(arrival: &Arrival<'_>, settings: &Settings, env: &E) -> Reason {
    let Arrival { packet, class, .. } = arrival;
    let mut moment = moment(arrival.now, class.clock, env);
    let now = moment.now();
    let found = env.bucket(packet.source, class.id);
    let cached = found.as_ref().and_then(|bucket| bucket.resolution().policy(settings.epoch));
    let policy = cached.unwrap_or_else(|| resolve(packet, settings, env));
    let resolution = Resolution::new(settings.epoch, policy);
    let standing = standing(policy, arrival, settings, env);
    if let (Some(bucket), None) = (&found, cached) {
        bucket.set_resolution(resolution);
        if let Ok(limits) = standing {
            bucket::clamp(&bucket.packets(), now, limits.packets.tolerance());
            bucket::clamp(&bucket.bytes(), now, limits.bytes.tolerance());
        }
    }
    let limits = match standing {
        Ok(limits) => limits,
        // A blocked or exempt stranger needs no bucket, and takes nobody else's.
        Err(reason) => return reason,
    };
    if let Some(bucket) = found {
        return charge(&bucket, arrival, limits, &mut moment);
    }
    if !is_welcome(class, &mut moment, settings, env) {
        return Reason::NewSource;
    }
    let full = BucketState { packets: now.0, bytes: now.0, resolution };
    match env.create(packet.source, class.id, full) {
        Some(bucket) => charge(&bucket, arrival, limits, &mut moment),
        None => Reason::TableFull,
    }
}

/// Whether the budgets for new sources, the class's and the common one, have room for one more.
/// Spent budgets are only read, so a flood of forged sources does not fight over them.
#[inline(always)]
fn is_welcome<E: Env>(
    class: &ClassSettings,
    moment: &mut Moment<impl Fn() -> Tick>,
    settings: &Settings,
    env: &E,
) -> bool {
    let (all, share) = (&settings.new_sources, &class.new_sources);
    let (Some(common), Some(own)) = (env.budget(ClassId::NONE), env.budget(class.id)) else {
        return true;
    };
    // They are not resolved anew after a reload as sources are, so a debt is shortened here.
    bucket::clamp(&common, moment.now(), all.tolerance());
    if share.is_limited() {
        bucket::clamp(&own, moment.now(), share.tolerance());
    }
    if share.is_limited() && !bucket::conforms(&own, moment, share.cost(), share.tolerance()) {
        return false;
    }
    if !bucket::admit(&common, moment, all.cost(), all.tolerance()) {
        return false;
    }
    if share.is_limited() {
        bucket::charge(&own, moment, share.cost(), share.tolerance());
    }
    true
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
fn standing<'a, E: Env>(
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
fn moment<E: Env>(now: Nanos, clock: Clock, env: &E) -> Moment<impl Fn() -> Tick> {
    Moment::new(now.into(), move || env.now(clock).into())
}

/// Charges packets and bytes, both or neither.
#[inline(always)]
fn charge<B: Bucket>(
    bucket: &B,
    arrival: &Arrival<'_>,
    limits: &Limits,
    moment: &mut Moment<impl Fn() -> Tick>,
) -> Reason {
    let Limits { packets, bytes } = limits;
    let frame = bytes.cost_of(arrival.length);
    let bucket_of_bytes = bucket.bytes();
    if bytes.is_limited() && !bucket::conforms(&bucket_of_bytes, moment, frame, bytes.tolerance()) {
        return Reason::ByteRate;
    }
    if packets.is_limited()
        && !bucket::admit(&bucket.packets(), moment, packets.cost(), packets.tolerance())
    {
        return Reason::PacketRate;
    }
    if bytes.is_limited() {
        bucket::charge(&bucket_of_bytes, moment, frame, bytes.tolerance());
    }
    Reason::Conform
}
