//! What a reload changed, in words for the log.

use crate::config::{Class, Config};

/// The differences that matter to somebody who reads the log, briefly.
pub(super) fn between(old: &Config, new: &Config) -> Vec<String> {
    let mut changes = Vec::new();
    if old.mode != new.mode {
        changes.push(format!("mode {} → {}", old.mode, new.mode));
    }
    classes(old, new, &mut changes);
    lists(old, new, &mut changes);
    let restart = |what: &str| format!("{what} changed: takes effect when the agent restarts");
    if old.metrics != new.metrics {
        changes.push(restart("[metrics] listen"));
    }
    if old.control != new.control {
        changes.push(restart("[control] socket"));
    }
    for interface in &new.interfaces {
        let before = old.interfaces.iter().find(|before| before.name == interface.name);
        if before.is_some_and(|before| before.xdp != interface.xdp) {
            changes.push(restart(&format!("xdp of interface {}", interface.name)));
        }
    }
    changes
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
    for class in &old.classes {
        if find(new, &class.name).is_none() {
            changes.push(format!("class {} removed", class.name));
        }
    }
}

fn find<'a>(config: &'a Config, name: &str) -> Option<&'a Class> {
    config.classes.iter().find(|class| class.name == name)
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
    let (a, b) = (&old.exemptions, &new.exemptions);
    note("exemptions", a != b, a.len(), b.len());
    let (a, b) = (&old.blocks, &new.blocks);
    note("blocks", a != b, a.len(), b.len());
    note("faults", old.faults != new.faults, 0, 0);
    note("neighbour cap", old.neighbours != new.neighbours, 0, 0);
}
