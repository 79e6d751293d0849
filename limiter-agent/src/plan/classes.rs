//! The classification tables.
//!
//! A class accepts a packet where every matcher it has accepts it, so each dimension is compiled by
//! itself, and the datapath intersects them ([`classify`](limiter_common::classify::classify)).

use std::collections::HashMap;

use limiter_common::abi::{Dimension, Need, Settings, Slot};

use super::{Guarded, PlanError};
use crate::config::{Config, L4, Match, PortSet, Reserve, accepting};

/// Fills in the tables, and which of them are needed.
pub(super) fn compile(
    config: &Config,
    guarded: &[Guarded],
    settings: &mut Settings,
) -> Result<(), PlanError> {
    let matchers: Vec<_> = config.rules().map(|class| class.matcher.as_ref()).collect();
    for l4 in L4::all() {
        settings.protocols[l4.index().index()] =
            set(matchers.iter().map(|matcher| matcher.is_none_or(|matcher| matcher.accepts(l4))));
    }
    let get = |dimension: fn(&Match) -> Option<PortSet>| -> Vec<Option<PortSet>> {
        matchers.iter().map(|matcher| matcher.and_then(dimension)).collect()
    };
    let dimensions = [
        ("ports", Need::DESTINATION_PORT, get(|it| it.ports.clone())),
        ("source_ports", Need::SOURCE_PORT, get(|it| it.source_ports.clone())),
        ("max_bytes", Need::LENGTH, get(Match::lengths)),
    ];
    let tables =
        [&mut settings.destination_ports, &mut settings.source_ports, &mut settings.lengths];
    for ((key, need, sets), table) in dimensions.into_iter().zip(tables) {
        if sets.iter().any(Option::is_some) {
            settings.need = settings.need.with(need);
        }
        dimension(&sets, table).ok_or(PlanError::TooManyGroups { key })?;
    }
    reserves(&config.reserves, guarded, settings);
    Ok(())
}

/// What reserves ask for besides: they are the first of the rules, and classes take any.
fn reserves(reserves: &[Reserve], guarded: &[Guarded], settings: &mut Settings) {
    for (order, reserve) in reserves.iter().enumerate() {
        let others = !(1 << order);
        if reserve.from_link {
            settings.routed &= others;
        }
        let Some(pattern) = &reserve.interface else { continue };
        settings.need = settings.need.with(Need::INTERFACE);
        let is_meant = |slot| guarded.iter().any(|it| it.slot == slot && pattern.matches(&it.name));
        for (slot, accepting) in (0..).map(Slot).zip(&mut settings.interfaces) {
            if !is_meant(slot) {
                *accepting &= others;
            }
        }
    }
}

/// One dimension; `None` if it has more distinct sets of classes than groups.
fn dimension(sets: &[Option<PortSet>], table: &mut Dimension) -> Option<()> {
    table.absent = set(sets.iter().map(Option::is_none));
    let mut groups = HashMap::new();
    let accepting = accepting(sets.iter().map(Option::as_ref));
    let mut rest = &mut table.groups[..];
    for run in accepting.chunk_by(|a, b| a == b) {
        let next = groups.len();
        let place = *groups.entry(run[0]).or_insert(next);
        let (values, after) = rest.split_at_mut(run.len());
        values.fill(u8::try_from(place).ok()?);
        table.classes[place] = run[0];
        rest = after;
    }
    Some(())
}

/// The set of the classes that accept, in the order of rules.
fn set(accept: impl Iterator<Item = bool>) -> u64 {
    accept.enumerate().fold(0, |set, (order, accepts)| set | u64::from(accepts) << order)
}
