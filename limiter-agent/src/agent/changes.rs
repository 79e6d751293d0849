//! What a reload changed, in words for the log.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::attach::Attached;
use crate::config::{Bridge, Class, Config, Exemption, Reserve};
use crate::plan::Guarded;

/// What only a start puts in force, as it did.
pub(super) struct Fixed {
    metrics: SocketAddr,
    control: PathBuf,
    control_group: Option<String>,
    application: (Option<PathBuf>, Option<String>),
}

impl Fixed {
    pub(super) fn of(config: &Config) -> Self {
        Self {
            metrics: config.metrics,
            control: config.control.clone(),
            control_group: config.control_group.clone(),
            application: (config.application.socket.clone(), config.application.group.clone()),
        }
    }

    /// What of `config`, which guards `interfaces`, waits for a restart; said again at each reload
    /// until there was one.
    pub(super) fn pending<'a>(
        &self,
        config: &Config,
        interfaces: &[Guarded],
        attached: impl Fn(u32) -> Option<&'a Attached>,
    ) -> Vec<String> {
        let mut pending = Vec::new();
        if self.metrics != config.metrics {
            pending.push(restart("[metrics] listen"));
        }
        if self.control != config.control {
            pending.push(restart("[control] socket"));
        }
        if self.control_group != config.control_group {
            pending.push(restart("[control] group"));
        }
        let bridge = &config.application;
        if (&self.application.0, &self.application.1) != (&bridge.socket, &bridge.group) {
            pending.push(restart("[application] socket or group"));
        }
        for Guarded { name, ifindex, xdp, .. } in interfaces {
            if attached(*ifindex).is_some_and(|attached| attached.asked != *xdp) {
                pending.push(restart(&format!("xdp of interface {name}")));
            }
        }
        pending
    }
}

/// The differences that matter to somebody who reads the log, briefly.
pub(super) fn between(old: &Config, new: &Config) -> Vec<String> {
    let mut changes = Vec::new();
    if old.mode != new.mode {
        changes.push(format!("mode {} → {}", old.mode, new.mode));
    }
    classes(old, new, &mut changes);
    lists(old, new, &mut changes);
    let (a, b) = (reserves(old), reserves(new));
    if a != b {
        changes.push(format!(
            "reserves: {}",
            b.iter().map(Reserve::name).collect::<Vec<_>>().join(", ")
        ));
    }
    if old.ceilings != new.ceilings {
        changes.push("[aggregate] changed".to_owned());
    }
    let terms =
        |config: &Config| Bridge { socket: None, group: None, ..config.application.clone() };
    if terms(old) != terms(new) {
        changes.push("[application] changed".to_owned());
    }
    if old.established != new.established {
        changes.push("[established] changed".to_owned());
    }
    changes
}

fn restart(what: &str) -> String {
    format!("{what} changed: takes effect when the agent restarts")
}

fn classes(old: &Config, new: &Config, changes: &mut Vec<String>) {
    for class in &new.classes {
        match find(old, &class.name) {
            None => changes.push(format!("class {} added", class.name)),
            // A class that merely moved in the file is the same.
            Some(before) if Class { line: class.line, ..before.clone() } != *class => {
                changes.push(format!("class {} changed", class.name));
            }
            Some(_) => {}
        }
    }
    if common(old, new).ne(common(new, old)) {
        changes.push("the order of classes changed".to_owned());
    }
    for class in &old.classes {
        if find(new, &class.name).is_none() {
            changes.push(format!("class {} removed", class.name));
        }
    }
}

/// The names of those classes of `config` that `other` has too, in order.
fn common<'a>(config: &'a Config, other: &'a Config) -> impl Iterator<Item = &'a str> {
    config
        .classes
        .iter()
        .map(|class| class.name.as_str())
        .filter(|name| find(other, name).is_some())
}

fn find<'a>(config: &'a Config, name: &str) -> Option<&'a Class> {
    config.classes.iter().find(|class| class.name == name)
}

/// The exemptions, wherever they stand in the file.
fn moved_to_line_0(config: &Config) -> Vec<Exemption> {
    config.exemptions.iter().map(|it| Exemption { line: 0, ..it.clone() }).collect()
}

/// The reserves, wherever they stand in the file.
fn reserves(config: &Config) -> Vec<Reserve> {
    let moved =
        |it: &Reserve| Reserve { class: Class { line: 0, ..it.class.clone() }, ..it.clone() };
    config.reserves.iter().map(moved).collect()
}

fn lists(old: &Config, new: &Config, changes: &mut Vec<String>) {
    let mut note = |what: &str, changed: bool, before: usize, now: usize| {
        if changed && before == now {
            changes.push(format!("{what} changed"));
        } else if changed {
            changes.push(format!("{what}: {before} → {now}"));
        }
    };
    let (a, b) = (&old.prefixes, &new.prefixes);
    note("prefixes", a != b, a.len(), b.len());
    let (a, b) = (moved_to_line_0(old), moved_to_line_0(new));
    note("exemptions", a != b, a.len(), b.len());
    let (a, b) = (&old.blocks, &new.blocks);
    note("blocks", a != b, a.len(), b.len());
    note("faults", old.faults != new.faults, 0, 0);
    note("neighbour caps", old.neighbours != new.neighbours, 0, 0);
    note("budget for new sources", old.table.new_sources != new.table.new_sources, 0, 0);
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    const BASE: &str = r#"
mode = "observe"
[[interface]]
name = "eth0"
[[class]]
name = "dns"
match = { protocol = "udp", ports = [53] }
packets = { rate = "10/s", burst = 10 }
[[class]]
name = "rest"
packets = { rate = "10/s", burst = 10 }
"#;

    fn changes(from: &str, to: &str) -> Vec<String> {
        let config =
            |text: &str| Config::parse("test", text, SystemTime::UNIX_EPOCH).expect("is valid");
        between(&config(BASE), &config(&BASE.replace(from, to)))
    }

    #[test]
    fn each_difference_is_named_once() {
        let block = "\n[[block]]\ncidr = \"192.0.2.0/24\"\n[[class]]\nname = \"rest\"";
        for (from, to, expected) in [
            ("observe", "enforce", "mode observe → enforce"),
            ("burst = 10 }\n[[class]]", "burst = 20 }\n[[class]]", "class dns changed"),
            ("[[class]]\nname = \"rest\"", block, "blocks: 0 → 1"),
        ] {
            assert_eq!(changes(from, to), [expected]);
        }
        assert_eq!(changes("\"dns\"", "\"name\""), ["class name added", "class dns removed"]);
    }

    #[test]
    fn what_only_moved_is_no_change() {
        assert!(changes("[[interface]]", "# a comment\n\n[[interface]]").is_empty());
    }
}
