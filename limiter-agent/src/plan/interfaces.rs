//! Which interfaces are guarded, and how the datapath finds their slots.

use std::collections::HashSet;

use limiter_common::abi::{Ingress, MAX_INTERFACES};

use super::{Guarded, Host, HostInterface, Names, PlanError};
use crate::config::{Config, Pattern, Xdp};

pub(super) type Chosen<'a> = Vec<(&'a HostInterface, Xdp)>;

pub(super) struct Choice<'a> {
    pub(super) chosen: Chosen<'a>,
    /// See [`Plan::gone`](super::Plan::gone).
    pub(super) gone: Vec<String>,
}

/// The host's interfaces that the configuration names. One that several entries match is attached
/// as the entry with its very name says, else as the first glob says.
pub(super) fn choose<'a>(
    config: &Config,
    host: &'a Host,
    previous: Option<&Names>,
) -> Result<Choice<'a>, PlanError> {
    let was_guarded = |name: &Pattern| previous.is_some_and(|names| names.has_interface(name));
    let mut gone = Vec::new();
    for entry in &config.interfaces {
        if !host.interfaces.iter().any(|known| entry.name.matches(&known.name)) {
            if was_guarded(&entry.name) {
                gone.push(entry.name.as_str().to_owned());
                continue;
            }
            return Err(PlanError::NoInterface {
                file: config.file.clone(),
                line: entry.line,
                pattern: entry.name.clone(),
                present: names(host.interfaces.iter()),
            });
        }
    }
    let chosen: Chosen<'a> = host
        .interfaces
        .iter()
        .filter_map(|interface| Some((interface, xdp_of(config, &interface.name)?)))
        .collect();
    let (count, most) = (chosen.len(), MAX_INTERFACES - 1);
    if count > most {
        return Err(PlanError::TooManyInterfaces { file: config.file.clone(), count, most });
    }
    bound(config, &chosen, was_guarded)?;
    Ok(Choice { chosen, gone })
}

/// How the interface called `name` is attached; none if the configuration does not name it.
pub(crate) fn xdp_of(config: &Config, name: &str) -> Option<Xdp> {
    let matching = config.interfaces.iter().filter(|entry| entry.name.matches(name));
    Some(matching.min_by_key(|entry| entry.name.is_glob())?.xdp)
}

/// The chosen interfaces with their slots, in the order of slots.
pub(super) fn number(chosen: &Chosen<'_>, names: &Names) -> Vec<Guarded> {
    let guarded = chosen.iter().map(|(interface, xdp)| Guarded {
        name: interface.name.clone(),
        ifindex: interface.ifindex,
        slot: names.slot(&interface.name),
        xdp: *xdp,
    });
    let mut guarded: Vec<_> = guarded.collect();
    guarded.sort_by_key(|interface| interface.slot);
    guarded
}

/// The slot of each interface that packets may say they came in on: of those that are guarded, and of the
/// members of a bond that is. The kernel runs a bond's program on its members, and the packet is theirs.
pub(super) fn places(guarded: &[Guarded], host: &Host) -> Vec<Ingress> {
    let own = guarded.iter().map(|it| Ingress { ifindex: it.ifindex, slot: it.slot });
    let members = host.interfaces.iter().filter_map(|member| {
        let is_guarded = guarded.iter().any(|it| it.ifindex == member.ifindex);
        let bond = guarded.iter().find(|it| Some(it.ifindex) == member.bond)?;
        (!is_guarded).then_some(Ingress { ifindex: member.ifindex, slot: bond.slot })
    });
    own.chain(members).collect()
}

/// A multiplier under which no two of `places` share a place, and the table.
pub(super) fn ingress(places: &[Ingress]) -> Result<(u32, [Ingress; Ingress::PLACES]), PlanError> {
    /// 2³² divided by the golden ratio: its powers spread well (Knuth, TAOCP vol. 3, §6.4).
    const GOLDEN: u32 = 0x9e37_79b1;
    const TRIES: usize = 1 << 14;
    let apart = |multiplier: &u32| {
        let mut taken = HashSet::new();
        places.iter().all(|known| taken.insert(Ingress::place(known.ifindex, *multiplier)))
    };
    let multiplier = std::iter::successors(Some(GOLDEN), |last| Some(last.wrapping_mul(GOLDEN)))
        .take(TRIES)
        .find(apart)
        .ok_or(PlanError::IndexesCollide)?;
    let mut table = [Ingress::default(); Ingress::PLACES];
    for known in places {
        table[Ingress::place(known.ifindex, multiplier)] = *known;
    }
    Ok((multiplier, table))
}

/// Every exemption and every reserve holds on some interface that is guarded.
fn bound(
    config: &Config,
    chosen: &Chosen<'_>,
    was_guarded: impl Fn(&Pattern) -> bool,
) -> Result<(), PlanError> {
    let exemptions =
        config.exemptions.iter().map(|it| ("exemption", it.interface.as_ref(), it.line));
    let reserves =
        config.reserves.iter().map(|it| ("reserve", it.interface.as_ref(), it.class.line));
    let grants = config.lease.iter().flat_map(|lease| &lease.grants);
    let grants = grants.map(|it| ("lease grant", Some(&it.interface), it.line));
    for (what, pattern, line) in exemptions.chain(reserves).chain(grants) {
        let Some(pattern) = pattern else { continue };
        if !was_guarded(pattern)
            && !chosen.iter().any(|(interface, _)| pattern.matches(&interface.name))
        {
            return Err(PlanError::BoundNowhere {
                what,
                file: config.file.clone(),
                line,
                pattern: pattern.clone(),
                guarded: names(chosen.iter().map(|(interface, _)| *interface)),
            });
        }
    }
    Ok(())
}

fn names<'a>(interfaces: impl Iterator<Item = &'a HostInterface>) -> String {
    interfaces.map(|interface| interface.name.as_str()).collect::<Vec<_>>().join(", ")
}
