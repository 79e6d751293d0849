//! `[[prefix]]`, `[[exempt]]`, `[[block]]`: what applies to some networks.

use std::time::SystemTime;

use ipnet::IpNet;
use limiter_common::units::{LimitError, Limits};

use super::cidr::{self, Seen};
use super::class::Draft;
use super::reader::{Place, Table, Value};
use super::units::Unit;
use super::{
    Allowance, Block, Budget, Class, Exemption, Interface, Pattern, Prefix, budget, connections,
    expiry, interface, keys,
};

/// The entries; `None` only if something was noted.
pub(super) fn prefixes(root: &Table<'_>, classes: &[Draft<'_>]) -> Option<Vec<Prefix>> {
    let mut seen = Seen::new();
    all(&root.tables("prefix", "cidr")?, |table| {
        let cidr = cidr::read(table).filter(|cidr| once(table, &mut seen, *cidr));
        let (owner, comment) = (text(table, "owner"), text(table, "comment"));
        let (scale, own) = (table.get("scale"), table.get("class"));
        let limits = match (scale, own) {
            (Some(scale), None) => scaled(&scale, classes),
            (None, Some(_)) => own_limits(table, classes).map(|limits| (None, limits)),
            (Some(scale), Some(_)) => {
                let cause = "scale and limits of its own exclude each other";
                scale.place().error(cause, "remove scale, or every [[prefix.class]]");
                None
            }
            (None, None) => {
                let cure = "add scale = 20, or [[prefix.class]] with name and packets";
                table.place().error("it says nothing about the network", cure);
                None
            }
        };
        let (scale, limits) = limits?;
        Some(Prefix { cidr: cidr?, scale, limits, owner: owner?, comment: comment? })
    })
}

/// The entries; `None` only if something was noted.
pub(super) fn exemptions(
    root: &Table<'_>,
    interfaces: &[Option<Interface>],
    now: SystemTime,
) -> Option<Vec<Exemption>> {
    let mut seen = Seen::new();
    all(&root.tables("exempt", "cidr")?, |table| {
        let cidr = cidr::read(table);
        let written = table.get("interface");
        let pattern = interface::pattern(table, "interface", false);
        let spoofable = table.get("spoofable").map(|value| value.boolean());
        let owner = table.require("owner", "owner = \"platform\" (whom to ask about it)");
        let owner = owner.and_then(|owner| name_of_owner(&owner));
        let expires = expiry::read(table, now);
        match (&written, &pattern) {
            (Some(written), Some(pattern)) => configured(written.place(), pattern, interfaces)?,
            (Some(_), None) => return None,
            (None, _) => forgeable(table.place(), spoofable)?,
        }
        let cidr = cidr?;
        let pair = (cidr, pattern.clone());
        if let Some(earlier) = seen.before(pair, table.place().line()) {
            repeated(table.place(), earlier);
            return None;
        }
        spoofable.unwrap_or(Some(false))?;
        let line = table.place().line();
        Some(Exemption { cidr, interface: pattern, owner: owner?, expires: expires?, line })
    })
}

/// The entries; `None` only if something was noted.
pub(super) fn blocks(root: &Table<'_>, now: SystemTime) -> Option<Vec<Block>> {
    let mut seen = Seen::new();
    all(&root.tables("block", "cidr")?, |table| {
        let cidr = cidr::read(table).filter(|cidr| once(table, &mut seen, *cidr));
        let (expires, reason) = (expiry::read(table, now), text(table, "reason"));
        let cidr = cidr?;
        if cidr.prefix_len() == 0 {
            table.place().warn(
                "blocks every address of its family, this session's among them",
                "remove it, unless that is what you want",
            );
        }
        Some(Block { cidr, expires: expires?, reason: reason? })
    })
}

/// Reads every table, the later ones too if something is wrong with one.
fn all<'r, T>(
    tables: &[Table<'r>],
    mut read: impl FnMut(&Table<'r>) -> Option<T>,
) -> Option<Vec<T>> {
    let count = tables.len();
    let entries: Vec<T> = tables.iter().filter_map(&mut read).collect();
    (entries.len() == count).then_some(entries)
}

fn once(table: &Table<'_>, seen: &mut Seen<IpNet>, cidr: IpNet) -> bool {
    let earlier = seen.before(cidr, table.place().line());
    if let Some(earlier) = earlier {
        repeated(table.place(), earlier);
    }
    earlier.is_none()
}

fn repeated(place: &Place<'_>, earlier: usize) {
    place.error(
        format!("the same network is already at line {earlier}"),
        "make one entry of the two",
    );
}

/// A text that may be missing; `None` only if something was noted.
#[expect(clippy::option_option, reason = "absent and wrong are two things")]
fn text(table: &Table<'_>, key: &'static str) -> Option<Option<String>> {
    match table.get(key) {
        None => Some(None),
        Some(value) => Some(Some(value.string(&format!("write {key} = \"…\""))?.to_owned())),
    }
}

pub(super) fn name_of_owner(value: &Value<'_>) -> Option<String> {
    let cure = "write whom to ask about it: \"platform\"";
    let owner = value.string(cure)?;
    if owner.trim().is_empty() {
        value.place().error("nobody owns it", cure);
        return None;
    }
    Some(owner.to_owned())
}

/// The class limits times the factor. What is not known for a class that is wrong itself is left
/// out: the file is refused anyway.
fn scaled(value: &Value<'_>, classes: &[Draft<'_>]) -> Option<(Option<u32>, Vec<Limits>)> {
    let scale = u32::try_from(value.integer(1..=u64::from(u32::MAX))?).ok()?;
    let mut limits = Vec::new();
    for class in classes.iter().filter_map(|class| class.model.as_ref()) {
        let Allowance { packets, bytes, connections } = class.allowance;
        let packets = packets.map(|budget| budget.times(scale).and_then(Budget::packets));
        let bytes = bytes.map(|budget| budget.times(scale).and_then(Budget::bytes));
        let packets = fits(packets, value.place(), class, Unit::Packets, scale);
        let bytes = fits(bytes, value.place(), class, Unit::Bytes, scale);
        let connections = connections.map_or(0, |most| u64::from(most) * u64::from(scale));
        limits.push(Limits { packets: packets?, bytes: bytes?, connections });
    }
    Some((Some(scale), limits))
}

/// The limit, or none where the class has none; `None` if it was noted as too large.
fn fits<T: Default>(
    limit: Option<Result<T, LimitError>>,
    place: &Place<'_>,
    class: &Class,
    unit: Unit,
    scale: u32,
) -> Option<T> {
    match limit.transpose() {
        Ok(limit) => Some(limit.unwrap_or_default()),
        Err(error) => {
            let (cause, _) = budget::explain(error, unit);
            let (name, unit) = (&class.name, unit.as_str());
            place.error(
                format!("{scale} times the {unit} of class \"{name}\": {cause}"),
                "write a smaller scale, or give the class limits of its own: [[prefix.class]]",
            );
            None
        }
    }
}

/// The class limits, with those replaced that the prefix has of its own.
fn own_limits(table: &Table<'_>, classes: &[Draft<'_>]) -> Option<Vec<Limits>> {
    let names: Vec<_> = classes.iter().filter_map(|class| class.name).collect();
    let mut seen = Seen::new();
    let own = all(&table.tables("class", "name")?, |own| {
        let allowance = budget::allowance(own, true);
        let value = own.require("name", "name = \"dns\" (of a [[class]])")?;
        let name = value.string("write the name of a [[class]]")?;
        if !names.contains(&name) {
            let cure = match keys::nearest(name, &names) {
                Some(near) => format!("did you mean \"{near}\"?"),
                None => format!("the classes are {}", names.join(", ")),
            };
            value.place().error(format!("there is no class \"{name}\""), cure);
            return None;
        }
        if let Some(earlier) = seen.before(name, own.place().line()) {
            let cause = format!("the class is already at line {earlier}");
            own.place().error(cause, "make one entry of the two");
            return None;
        }
        let order = classes.iter().position(|class| class.name == Some(name));
        if let Some(limit) = own.get("connections")
            && let Some((cause, cure)) = connections::without_effect(classes, order?)
        {
            limit.place().error(cause, cure);
            return None;
        }
        Some((name, allowance?))
    })?;
    if own.is_empty() {
        let cure = "add [[prefix.class]] with name and packets, or scale = 20";
        table.place().error("the list of its own limits is empty", cure);
        return None;
    }
    let of_class = |class: &Class| {
        let own = own.iter().find(|(name, _)| *name == class.name);
        let mut limits = class.limits;
        if let Some((_, allowance)) = own {
            let own = allowance.limits().ok()?;
            if allowance.packets.is_some() {
                limits.packets = own.packets;
            }
            if allowance.bytes.is_some() {
                limits.bytes = own.bytes;
            }
            if allowance.connections.is_some() {
                limits.connections = own.connections;
            }
        }
        Some(limits)
    };
    classes.iter().filter_map(|class| class.model.as_ref()).map(of_class).collect()
}

/// Notes an interface that is not guarded: nothing arrives there that could be exempt, or reserved.
pub(super) fn configured(
    place: &Place<'_>,
    pattern: &Pattern,
    interfaces: &[Option<Interface>],
) -> Option<()> {
    let related = |interface: &Interface| {
        interface.name.matches(pattern.as_str()) || pattern.matches(interface.name.as_str())
    };
    // An entry that could not be read may be the one.
    if interfaces.iter().any(|interface| interface.as_ref().is_none_or(related)) {
        return Some(());
    }
    let names: Vec<_> = interfaces.iter().flatten().map(|known| known.name.as_str()).collect();
    let cause = format!("no [[interface]] is called \"{pattern}\"");
    place.error(cause, format!("write one of {}, or add the interface", names.join(", ")));
    None
}

/// Whether a bare prefix says that it knows what it is.
#[expect(clippy::option_option, reason = "absent and wrong are two things")]
fn forgeable(place: &Place<'_>, spoofable: Option<Option<bool>>) -> Option<()> {
    match spoofable {
        Some(Some(true)) => {
            place.warn(
                "anybody who forges a source address of this network is exempt",
                "tie it to an interface",
            );
            Some(())
        }
        // Noted already.
        Some(None) => None,
        Some(Some(false)) | None => {
            place.error(
                "a source address can be forged, and nothing else ties this to the network",
                "add interface = \"…\", or spoofable = true if forged packets may pass unlimited",
            );
            None
        }
    }
}
