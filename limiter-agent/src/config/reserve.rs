//! `[[reserve]]` and `default_reserves`: what no class limit starves.

use std::collections::HashSet;

use limiter_common::abi::MAX_CLASSES;

use super::cidr::Seen;
use super::class::{self, Draft};
use super::reader::{Place, Reader, Table, Value};
use super::units::Unit;
use super::{
    Allowance, Budget, Class, Interface, Match, Reserve, budget, interface, keys, matcher, policy,
};

/// The built-in ones, as an operator would write them.
const BUILT_IN: &str = include_str!("reserves.toml");

/// How many unproven sources may use all of a reserve at once, where it does not say what they may
/// together.
const AT_ONCE: u32 = 10;

/// Those of the file, then those built-in ones that they and the `classes` leave in force; `None` only if
/// something was noted.
pub(super) fn read(
    root: &Table<'_>,
    classes: &[Draft<'_>],
    interfaces: &[Option<Interface>],
) -> Option<Vec<Reserve>> {
    let built_in = built_in();
    let wanted = wanted(root, &built_in);
    let written = written(root, classes, &built_in, interfaces);
    let (wanted, mut reserves) = (wanted?, written?);
    for reserve in built_in.into_iter().filter(|it| wanted.contains(it.name())) {
        if reserves.iter().any(|own| own.name() == reserve.name() || own.covers(&reserve)) {
            continue;
        }
        reserves.extend(beside(classes, reserve));
    }
    fits(&reserves, classes)?;
    Some(reserves)
}

/// The built-in ones; a test sees that nothing is wrong with them.
fn built_in() -> Vec<Reserve> {
    let reader = Reader::new("built-in reserves", BUILT_IN);
    let Ok(document) = reader.document() else { return Vec::new() };
    let tables = reader.root(&document).tables("reserve", "name").unwrap_or_default();
    let read = tables.iter().filter_map(|table| reserve(table, &[], None));
    read.map(|reserve| Reserve {
        built_in: true,
        class: Class { line: 0, ..reserve.class },
        ..reserve
    })
    .collect()
}

/// The names of the built-in ones that are asked for: all, unless it is said which.
fn wanted(root: &Table<'_>, built_in: &[Reserve]) -> Option<HashSet<String>> {
    let known: Vec<_> = built_in.iter().map(Reserve::name).collect();
    let Some(value) = root.get("default_reserves") else {
        return Some(known.into_iter().map(str::to_owned).collect());
    };
    let cure = format!("write a list of {}, or [] for none", known.join(", "));
    if value.raw().as_array().is_some_and(|items| items.is_empty()) {
        return Some(HashSet::new());
    }
    let items = value.list(&cure);
    let names: HashSet<_> = items
        .iter()
        .filter_map(|item| {
            let name = item.string(&cure)?;
            if !known.contains(&name) {
                let cure = keys::nearest(name, &known)
                    .map_or_else(|| cure.clone(), |near| format!("did you mean \"{near}\"?"));
                item.place().error(format!("there is no built-in reserve \"{name}\""), cure);
                return None;
            }
            Some(name.to_owned())
        })
        .collect();
    let is_list = value.raw().is_array();
    (is_list && names.len() == items.len()).then_some(names)
}

/// Those of the file.
fn written(
    root: &Table<'_>,
    classes: &[Draft<'_>],
    built_in: &[Reserve],
    interfaces: &[Option<Interface>],
) -> Option<Vec<Reserve>> {
    let tables = root.tables("reserve", "name")?;
    let mut seen = Seen::new();
    let reserves: Vec<_> = tables
        .iter()
        .filter_map(|table| {
            let reserve = reserve(table, built_in, Some(interfaces))?;
            let earlier = seen.before(reserve.class.name.clone(), table.place().line());
            if let Some(earlier) = earlier {
                let cause = format!("the name is already that of the reserve at line {earlier}");
                table.place().error(cause, "give each reserve a name of its own");
                return None;
            }
            Some((table.place(), reserve))
        })
        .collect();
    if reserves.len() != tables.len() {
        return None;
    }
    let mut reachable = true;
    for (order, (place, later)) in reserves.iter().enumerate() {
        let earlier = reserves[..order].iter().find(|(_, earlier)| earlier.covers(later));
        if let Some((_, earlier)) = earlier {
            never(place, earlier);
            reachable = false;
        }
    }
    let everywhere = |reserve: &Reserve| reserve.interface.is_none() && !reserve.from_link;
    for class in classes {
        let Some((place, matcher)) = class.matcher() else { continue };
        let takes = |reserve: &Reserve| everywhere(reserve) && reserve.takes(matcher);
        if let Some((_, reserve)) = reserves.iter().find(|(_, reserve)| takes(reserve)) {
            never(place, reserve);
            reachable = false;
        }
    }
    reachable.then(|| reserves.into_iter().map(|(_, reserve)| reserve).collect())
}

fn never(place: &Place<'_>, earlier: &Reserve) {
    let (name, line) = (earlier.name(), earlier.class.line);
    place.error(
        format!("can never match: reserve \"{name}\" at line {line} takes all of these packets"),
        "put the narrower reserve first, or remove one of the two",
    );
}

/// One entry; `interfaces` if they are to be compared with the file's.
fn reserve(
    table: &Table<'_>,
    built_in: &[Reserve],
    interfaces: Option<&[Option<Interface>]>,
) -> Option<Reserve> {
    let matcher = table.require("match", r#"match = { protocol = "tcp", ports = [22] }"#);
    let matcher = matcher
        .and_then(|value| value.table("write { protocol = \"tcp\", ports = [22] }"))
        .and_then(|table| matcher::read(&table));
    let name = name(table, matcher.as_ref(), built_in);
    let from_link = table.get("ttl").map_or(Some(false), |value| ttl(&value));
    let pattern = bound_to(table, interfaces);
    let sum = |key| budget::transpose(table.get(key).map(|it| budget::budget(it, Unit::Packets)));
    let packets = table.require("packets", r#"packets = { rate = "2000/s", burst = 4000 }"#);
    let packets = packets.and_then(|value| budget::budget(value, Unit::Packets));
    let (new_sources, unproven) = (sum("new_sources"), sum("unproven"));
    let (packets, new_sources, unproven) = (packets?, new_sources?, unproven?);
    let allowance = Allowance { packets: Some(packets), bytes: None, connections: None };
    let class = Class {
        name: format!("{}{}", Reserve::PREFIX, name?),
        matcher: Some(matcher?),
        allowance,
        limits: allowance.limits().ok()?,
        new_sources: Some(new_sources.unwrap_or_else(|| tenth(packets))),
        unproven: Some(unproven.unwrap_or_else(|| packets.times(AT_ONCE).unwrap_or(packets))),
        total: None,
        mode: None,
        line: table.place().line(),
    };
    let class = Class { unproven: class.unproven.filter(|sum| sum.packets().is_ok()), ..class };
    Some(Reserve { class, interface: pattern?, from_link: from_link?, built_in: false })
}

/// Its name: what is written, or that of the built-in one that matches the same.
fn name(table: &Table<'_>, matcher: Option<&Match>, built_in: &[Reserve]) -> Option<String> {
    let same = built_in.iter().find(|reserve| reserve.class.matcher.as_ref() == matcher);
    let value = match (table.get("name"), same) {
        (None, Some(same)) => return Some(same.name().to_owned()),
        (None, None) => table.require("name", "name = \"mgmt\" (metrics call it reserve-mgmt)")?,
        (Some(value), _) => value,
    };
    let name = value.string("write name = \"mgmt\"")?;
    let longest = class::LONGEST_NAME - Reserve::PREFIX.len();
    if !class::can_be_a_name(name, longest) {
        let cause = format!("\"{name}\" cannot be the name of a reserve");
        value.place().error(cause, format!("write 1 to {longest} of a-z, 0-9, _ and -"));
        return None;
    }
    Some(name.to_owned())
}

fn ttl(value: &Value<'_>) -> Option<bool> {
    let cure = "write ttl = 255, or remove it";
    match value.integer_or(0..=u64::MAX >> 1, cure)? {
        255 => Some(true),
        other => {
            value.place().error(
                format!("only a TTL of 255 says that no router forwarded the packet, not {other}"),
                cure,
            );
            None
        }
    }
}

/// The interface it is bound to, if it is to any.
#[expect(clippy::option_option, reason = "absent and wrong are two things")]
fn bound_to(
    table: &Table<'_>,
    interfaces: Option<&[Option<Interface>]>,
) -> Option<Option<super::Pattern>> {
    let Some(value) = table.get("interface") else { return Some(None) };
    let pattern = interface::pattern(table, "interface", false)?;
    if let Some(interfaces) = interfaces {
        policy::configured(value.place(), &pattern, interfaces)?;
    }
    Some(Some(pattern))
}

/// A tenth of the rate and of the burst, but at least ten at once; the whole rate where a tenth is too little
/// to be enforced.
fn tenth(packets: Budget) -> Budget {
    let burst = packets.burst.div_ceil(10).max(10);
    let tenth = packets.rate.over(10).ok().map(|rate| Budget { rate, burst });
    let whole = Budget { burst, ..packets };
    let enforceable = |budget: &Budget| budget.packets().is_ok();
    tenth.filter(enforceable).or(Some(whole).filter(enforceable)).unwrap_or(packets)
}

/// The built-in `reserve` beside the operator's classes, which it gives way to where it would leave one
/// without packets, or where one names its ICMP types; `None` if nothing remains of it.
fn beside(classes: &[Draft<'_>], mut reserve: Reserve) -> Option<Reserve> {
    for class in classes {
        let Some((place, matcher)) = class.matcher() else { continue };
        let mine = reserve.class.matcher.as_mut()?;
        let (covered, types) = (mine.covers(matcher), mine.icmp_types.len());
        if matcher.protocols == mine.protocols {
            mine.icmp_types.retain(|kind| !matcher.icmp_types.contains(kind));
        }
        let is_gone = covered || types != 0 && mine.icmp_types.is_empty();
        if is_gone || mine.icmp_types.len() != types {
            let (part, name) = (if is_gone { "" } else { "a part of " }, reserve.name());
            place.warn(
                format!("the class takes {part}what the built-in reserve \"{name}\" is for"),
                format!("make it a [[reserve]], or leave \"{name}\" out of default_reserves"),
            );
        }
        if is_gone {
            return None;
        }
    }
    Some(reserve)
}

/// All together fit the datapath.
fn fits(reserves: &[Reserve], classes: &[Draft<'_>]) -> Option<()> {
    let count = reserves.len();
    class::few_groups(reserves.iter().filter_map(|reserve| reserve.class.matcher.clone()), classes);
    if classes.len() <= MAX_CLASSES && count + classes.len() > MAX_CLASSES {
        let last = classes.last()?;
        last.place().error(
            format!("{count} reserves and {} classes are more than {MAX_CLASSES}", classes.len()),
            "join or remove some, or name fewer of the built-in ones in default_reserves",
        );
        return None;
    }
    Some(())
}

impl Reserve {
    /// Whether every packet that belongs to `other` belongs here.
    fn covers(&self, other: &Self) -> bool {
        let anywhere = self.interface.is_none() || self.interface == other.interface;
        let any_ttl = !self.from_link || other.from_link;
        anywhere && any_ttl && other.class.matcher.as_ref().is_some_and(|it| self.takes(it))
    }

    fn takes(&self, matcher: &Match) -> bool {
        self.class.matcher.as_ref().is_some_and(|own| own.covers(matcher))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_wrong_with_the_built_in_ones() {
        let names: Vec<_> = built_in().iter().map(|it| it.name().to_owned()).collect();
        let expected = ["ssh", "bgp", "bfd", "vrrp", "dhcp", "icmp-errors", "icmpv6-errors"];
        assert_eq!(names, expected);
        assert_eq!(BUILT_IN.matches("[[reserve]]").count(), expected.len() + 1, "one in a comment");
    }
}
