//! `[[class]]`: each by itself, then all together.

use std::collections::HashSet;

use limiter_common::abi::MAX_CLASSES;

use super::cidr::Seen;
use super::matcher::{self, PortSet};
use super::reader::{Place, Table, Value};
use super::units::Unit;
use super::{Class, Match, Reserve, budget, connections, service};

/// The groups of values that one dimension of the datapath's tables can tell apart.
pub(crate) const MAX_GROUPS: usize = 256;

/// The longest name of a class.
pub(super) const LONGEST_NAME: usize = 32;

/// A class as far as it could be read.
pub(super) struct Draft<'r> {
    place: Place<'r>,
    /// Its name, valid or not.
    pub(super) name: Option<&'r str>,
    matcher: Matcher<'r>,
    /// Where its limit of connections is written.
    pub(super) connections: Option<Place<'r>>,
    /// The class; `None` if something was noted.
    pub(super) model: Option<Class>,
}

impl<'r> Draft<'r> {
    /// Where it stands.
    pub(super) const fn place(&self) -> &Place<'r> {
        &self.place
    }

    /// What belongs to it, and where that is written.
    pub(super) const fn matcher(&self) -> Option<(&Place<'r>, &Match)> {
        match &self.matcher {
            Matcher::Absent | Matcher::Wrong => None,
            Matcher::Read(place, matcher) => Some((place, matcher)),
        }
    }
}

enum Matcher<'r> {
    Absent,
    Wrong,
    Read(Place<'r>, Match),
}

/// One for each entry.
pub(super) fn read<'r>(root: &Table<'r>) -> Vec<Draft<'r>> {
    let Some(tables) = root.tables("class", "name") else { return Vec::new() };
    if tables.is_empty() {
        root.place().error(
            "no class limits anything",
            "add [[class]] with a name and packets = { rate = \"10000/s\", burst = 20000 }",
        );
    }
    if let Some(table) = tables.get(MAX_CLASSES) {
        table.place().error(format!("more than {MAX_CLASSES} classes"), "join or remove some");
    }
    let classes: Vec<_> = tables.iter().map(class).collect();
    distinct_names(&classes);
    if classes.len() <= MAX_CLASSES {
        reachable(&classes);
        connections::effective(&classes);
    }
    classes
}

fn class<'r>(table: &Table<'r>) -> Draft<'r> {
    let name = table.require("name", "name = \"dns\"");
    let matcher = match table.get("match") {
        None => Matcher::Absent,
        Some(value) => match_of(value),
    };
    let allowance = budget::allowance(table, false);
    let sum =
        |key| budget::transpose(table.get(key).map(|value| budget::budget(value, Unit::Packets)));
    let (new_sources, unproven, total) = (sum("new_sources"), sum("unproven"), sum("total"));
    let mode = service::mode(table, "mode");
    let text = name.as_ref().and_then(|name| name.string("write name = \"dns\""));
    let valid = name.as_ref().zip(text).and_then(|(name, text)| valid_name(name, text));
    let model = || {
        Some(Class {
            name: valid?.to_owned(),
            matcher: match &matcher {
                Matcher::Absent => None,
                Matcher::Wrong => return None,
                Matcher::Read(_, matcher) => Some(matcher.clone()),
            },
            allowance: allowance?,
            limits: allowance?.limits().ok()?,
            new_sources: new_sources?,
            unproven: unproven?,
            total: total?,
            mode: mode?,
            line: table.place().line(),
        })
    };
    let model = model();
    let connections = table.get("connections").map(|value| value.place().clone());
    Draft { place: table.place().clone(), name: text, matcher, connections, model }
}

fn match_of(value: Value<'_>) -> Matcher<'_> {
    let place = value.place().clone();
    let table = value.table("write { protocol = \"udp\", ports = [53] }");
    match table.and_then(|table| matcher::read(&table)) {
        Some(read) => Matcher::Read(place, read),
        None => Matcher::Wrong,
    }
}

/// Names are label values in metrics and arguments of commands.
fn valid_name<'r>(value: &Value<'r>, name: &'r str) -> Option<&'r str> {
    if name.starts_with(Reserve::PREFIX) {
        value.place().error(
            format!("names that begin with \"{}\" are those of reserves", Reserve::PREFIX),
            "choose another name, or make it a [[reserve]]",
        );
        return None;
    }
    if name == "none" {
        let cause = "\"none\" is what metrics call packets without a class";
        value.place().error(cause, "choose another name");
        return None;
    }
    if !can_be_a_name(name, LONGEST_NAME) {
        let cause = format!("\"{name}\" cannot be the name of a class");
        value.place().error(cause, "write 1 to 32 of a-z, 0-9, _ and -");
        return None;
    }
    Some(name)
}

/// Whether `name` has 1 to `longest` of the letters that names have.
pub(super) fn can_be_a_name(name: &str, longest: usize) -> bool {
    let letter = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-');
    (1..=longest).contains(&name.len()) && name.bytes().all(letter)
}

fn distinct_names(classes: &[Draft<'_>]) {
    let mut seen = Seen::new();
    for class in classes {
        let Some(name) = class.name else { continue };
        if let Some(earlier) = seen.before(name, class.place.line()) {
            class.place.error(
                format!("the name is already that of the class at line {earlier}"),
                "give each class a name of its own",
            );
        }
    }
}

/// The last class catches the rest, and every other can be reached.
fn reachable(classes: &[Draft<'_>]) {
    let Some((last, others)) = classes.split_last() else { return };
    if let Matcher::Read(place, _) = &last.matcher {
        place.error(
            "the last class has a match, so that some packets would have no class",
            "add a last class without a match, for the rest",
        );
    }
    for class in others {
        if let Matcher::Absent = class.matcher {
            class.place.error(
                "without a match it takes every packet, and the classes below can never match",
                "add a match, or make it the last class",
            );
        }
    }
    for (order, class) in classes.iter().enumerate() {
        let Matcher::Read(place, later) = &class.matcher else { continue };
        let covering = classes[..order].iter().find(
            |earlier| matches!(&earlier.matcher, Matcher::Read(_, matcher) if matcher.covers(later)),
        );
        if let Some(earlier) = covering {
            let name = earlier.name.unwrap_or("?");
            let line = earlier.place.line();
            place.error(
                format!(
                    "can never match: class \"{name}\" at line {line} takes all of these packets"
                ),
                "put the narrower class first, or remove one",
            );
        }
    }
}

/// The datapath's tables hold a bounded number of distinct sets of ports, for classes and the `reserved`
/// together.
pub(super) fn few_groups(reserved: impl Iterator<Item = Match>, classes: &[Draft<'_>]) {
    let matcher = |class: &'_ Draft<'_>| class.matcher().map(|(_, matcher)| matcher.clone());
    let matchers = reserved.map(Some).chain(classes.iter().map(matcher));
    let matchers: Vec<_> = matchers.take(MAX_CLASSES).collect();
    let count = |key: &str, set: fn(&Match) -> Option<&PortSet>| {
        let sets = matchers.iter().map(|matcher| matcher.as_ref().and_then(set));
        let groups = matcher::accepting(sets).into_iter().collect::<HashSet<_>>().len();
        if groups > MAX_GROUPS
            && let Some(last) = classes.last()
        {
            last.place.error(
                format!(
                    "the {key} of all classes cut the range of ports into {groups} different sets, \
                     and only {MAX_GROUPS} can be told apart"
                ),
                "let the lists of fewer classes overlap",
            );
        }
    };
    count("ports", |matcher| matcher.ports.as_ref());
    count("source_ports", |matcher| matcher.source_ports.as_ref());
}
