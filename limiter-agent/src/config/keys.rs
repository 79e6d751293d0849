//! The keys of a configuration file, and what is said about others.

/// Every table that there is, with its keys. The name of a table is its path without indexes.
pub(super) const TABLES: &[(&str, &[&str])] = &[
    (
        "",
        &[
            "mode",
            "on_agent_loss",
            "agent_lease",
            "default_reserves",
            "interface",
            "table",
            "aggregate",
            "established",
            "neighbour",
            "faults",
            "reserve",
            "class",
            "prefix",
            "exempt",
            "block",
            "lease",
            "metrics",
            "control",
            "application",
        ],
    ),
    ("interface", &["name", "xdp"]),
    ("table", &["ipv4_sources", "ipv6_sources", "new_sources"]),
    ("table.new_sources", &["rate", "burst"]),
    ("aggregate", &["ipv6_56", "ipv6_48", "ipv4_24", "ipv6_48_new_sources"]),
    ("aggregate.ipv6_48_new_sources", &["rate", "burst"]),
    ("established", &["packets", "client_ports"]),
    ("established.packets", &["rate", "burst"]),
    ("neighbour", &["packets", "arp", "nd"]),
    ("neighbour.packets", &["rate", "burst"]),
    ("neighbour.arp", &["rate", "burst"]),
    ("neighbour.nd", &["rate", "burst"]),
    ("faults", &["malformed", "table_full"]),
    ("reserve", &["name", "match", "interface", "ttl", "packets", "new_sources", "unproven"]),
    (
        "reserve.match",
        &["protocol", "ports", "source_ports", "flags", "icmp_type", "fragment", "max_bytes"],
    ),
    ("reserve.packets", &["rate", "burst"]),
    ("reserve.new_sources", &["rate", "burst"]),
    ("reserve.unproven", &["rate", "burst"]),
    (
        "class",
        &[
            "name",
            "match",
            "packets",
            "bytes",
            "connections",
            "new_sources",
            "unproven",
            "total",
            "mode",
        ],
    ),
    (
        "class.match",
        &["protocol", "ports", "source_ports", "flags", "icmp_type", "fragment", "max_bytes"],
    ),
    ("class.packets", &["rate", "burst"]),
    ("class.bytes", &["rate", "burst"]),
    ("class.new_sources", &["rate", "burst"]),
    ("class.unproven", &["rate", "burst"]),
    ("class.total", &["rate", "burst"]),
    ("prefix", &["cidr", "scale", "class", "owner", "comment"]),
    ("prefix.class", &["name", "packets", "bytes", "connections"]),
    ("prefix.class.packets", &["rate", "burst"]),
    ("prefix.class.bytes", &["rate", "burst"]),
    ("exempt", &["cidr", "interface", "owner", "expires", "spoofable"]),
    ("block", &["cidr", "expires", "reason"]),
    (
        "lease",
        &["listen", "certificate", "key", "client_ca", "crl", "token_key", "revoked", "grant"],
    ),
    (
        "lease.grant",
        &["name", "interface", "ports", "protocol", "cap", "max_duration", "addresses", "owner"],
    ),
    ("lease.grant.cap", &["rate", "burst"]),
    ("metrics", &["listen"]),
    ("control", &["socket", "group"]),
    (
        "application",
        &[
            "socket",
            "group",
            "trusted_proxies",
            "first_penalty",
            "longest_penalty",
            "penalty_memory",
            "penalties",
            "proofs",
        ],
    ),
    ("application.penalties", &["rate", "burst"]),
    ("application.proofs", &["rate", "burst"]),
];

/// Keys of capabilities that this version does not have. Whoever writes them expects protection
/// that would not be there, so they get a message of their own.
const PLANNED: &[&str] = &["fleet", "vlan"];

/// The keys of `table`.
pub(super) fn of(table: &str) -> &'static [&'static str] {
    TABLES.iter().find(|(name, _)| *name == table).map_or(&[], |(_, keys)| keys)
}

/// The cause and the cure for a `key` that `table` does not have.
pub(super) fn unknown(table: &str, key: &str) -> (String, String) {
    if PLANNED.contains(&key) {
        let cause = "not available in this version".to_owned();
        return (cause, "remove it: without it, nothing enforces what it asks for".to_owned());
    }
    let known = of(table);
    let cure = if let Some(near) = nearest(key, known) {
        format!("did you mean \"{near}\"?")
    } else if let Some(home) = home(table, key) {
        format!("it belongs in {home}")
    } else {
        format!("the keys here are {}", known.join(", "))
    };
    ("unknown key".to_owned(), cure)
}

/// The candidate that `word` is most likely a misspelling of.
pub(super) fn nearest<'a>(word: &str, candidates: &[&'a str]) -> Option<&'a str> {
    let letters = word.chars().count();
    let allowed = |candidate: &str| 1 + candidate.len() / 4;
    candidates
        .iter()
        // The distance is at least this, and takes long for a long word.
        .filter(|candidate| candidate.len().abs_diff(letters) <= allowed(candidate))
        .map(|candidate| (distance(word, candidate), *candidate))
        .filter(|(distance, candidate)| *distance <= allowed(candidate))
        .min()
        .map(|(_, candidate)| candidate)
}

/// A table inside of `table` that has the key.
fn home(table: &str, key: &str) -> Option<&'static str> {
    TABLES
        .iter()
        .filter(|(name, keys)| name.starts_with(table) && keys.contains(&key))
        .map(|(name, _)| *name)
        .find(|name| !name.is_empty())
}

/// Levenshtein's distance.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        for (cell, y) in row.iter_mut().skip(1).zip(b.chars()) {
            let change = diagonal + usize::from(x != y);
            diagonal = *cell;
            left = change.min(diagonal + 1).min(left + 1);
            *cell = left;
        }
        row[0] = i + 1;
    }
    row.last().copied().unwrap_or(0)
}
