//! `[[interface]]`.

use limiter_common::abi::MAX_INTERFACES;

use super::cidr::Seen;
use super::reader::Table;
use super::{Interface, Pattern, Xdp};

/// The longest name of an interface: the kernel's `IFNAMSIZ`, less the terminating 0.
const MAX_NAME: usize = 15;

/// One for each entry, `None` for those that something was noted about.
pub(super) fn read(root: &Table<'_>) -> Vec<Option<Interface>> {
    let Some(tables) = root.tables("interface", "name") else { return Vec::new() };
    if tables.is_empty() {
        root.place().error(
            "no interface is guarded",
            "add [[interface]] with name = \"eth0\" (`ip link` lists the names)",
        );
    }
    let most = MAX_INTERFACES - 1;
    if let Some(table) = tables.get(most) {
        table.place().error(
            format!("more than {most} interfaces"),
            "remove some, or name several by one glob: \"ens*\"",
        );
    }
    let mut seen = Seen::new();
    tables.iter().map(|table| interface(table, &mut seen)).collect()
}

fn interface(table: &Table<'_>, seen: &mut Seen<Pattern>) -> Option<Interface> {
    let choices = [("native", Xdp::Native), ("generic", Xdp::Generic), ("auto", Xdp::Auto)];
    let xdp = table.get("xdp").map_or(Some(Xdp::Native), |value| value.choice(&choices));
    let name = pattern(table, "name", true)?;
    let line = table.place().line();
    if let Some(earlier) = seen.before(name.clone(), line) {
        table.place().error(format!("already named at line {earlier}"), "remove one of the two");
        return None;
    }
    Some(Interface { name, xdp: xdp?, line })
}

/// The interface name or glob at `key`; `None` if there is none or something was noted.
pub(super) fn pattern(table: &Table<'_>, key: &'static str, required: bool) -> Option<Pattern> {
    let value = if required {
        table.require(key, &format!("{key} = \"eth0\""))?
    } else {
        table.get(key)?
    };
    let cure = "write the name of an interface, or a glob: \"eth0\", \"ens*\"";
    let text = value.string(cure)?;
    let can_be = |letter: char| !letter.is_whitespace() && !letter.is_control() && letter != '/';
    if text.is_empty() || text.len() > MAX_NAME || !text.chars().all(can_be) {
        let cause = format!("\"{text}\" cannot be the name of an interface");
        value.place().error(cause, format!("{cure}; at most {MAX_NAME} characters"));
        return None;
    }
    Some(Pattern::new(text))
}
