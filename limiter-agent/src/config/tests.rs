//! Whole files, and every way in which one can be wrong.

mod classes;
mod leases;
mod policies;
mod reserves;

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use limiter_common::units::Rate;
use proptest::prelude::*;

use super::*;

/// 2026-11-30T00:00:00Z.
fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_hours(498_888)
}

fn parse(text: &str) -> Result<Config, ConfigErrors> {
    Config::parse("limiter.toml", text, now())
}

/// The errors of a file.
#[track_caller]
fn errors(text: &str) -> Vec<String> {
    match parse(text) {
        Ok(_) => panic!("no error in:\n{text}"),
        Err(errors) => errors.to_string().lines().map(str::to_owned).collect(),
    }
}

/// Line 1 to 6 of most files here, and lines that follow.
fn with(rest: &str) -> String {
    format!(
        "[[interface]]\nname = \"eth0\"\n[[class]]\nname = \"rest\"\npackets = {{ rate = \
         \"10000/s\", burst = 20000 }}\n{rest}"
    )
}

/// A class above the catch-all.
fn with_class(class: &str) -> String {
    format!(
        "[[interface]]\nname = \"eth0\"\n[[class]]\nname = \"dns\"\n{class}\n[[class]]\nname = \
         \"rest\"\npackets = {{ rate = \"10000/s\", burst = 20000 }}\n"
    )
}

const PACKETS: &str = "packets = { rate = \"1000/s\", burst = 2000 }";

/// A class with this match, in line 5, above the catch-all.
fn with_match(matcher: &str) -> String {
    with_class(&format!("match = {{ {matcher} }}\n{PACKETS}"))
}

/// Exactly one error: it starts with the place and key, and its text has each of `parts`.
#[track_caller]
fn one_error(text: &str, place_and_key: &str, parts: &[&str]) {
    let errors = errors(text);
    assert_eq!(errors.len(), 1, "{errors:#?}");
    let error = &errors[0];
    assert!(error.starts_with(&format!("limiter.toml:{place_and_key}: ")), "{error}");
    for part in parts {
        assert!(error.contains(part), "no {part:?} in {error}");
    }
}

#[test]
fn the_least_file_has_the_documented_defaults() {
    let config = parse(&with("")).unwrap();
    assert_eq!(config.mode, Mode::Observe);
    assert_eq!(config.interfaces[0].xdp, Xdp::Native);
    let new_sources = Budget { rate: Rate::new(10_000, 1).unwrap(), burst: 100_000 };
    let size = TableSizes { ipv4_sources: 1_000_000, ipv6_sources: 1_000_000, new_sources };
    assert_eq!(config.table, size);
    assert_eq!([config.neighbours.arp.burst, config.neighbours.nd.burst], [10_000; 2]);
    assert_eq!(config.established.packets.burst, 400_000);
    assert_eq!(config.established.client_ports.ports().count(), 0);
    let faults = Faults { malformed: FaultAction::Drop, table_full: FaultAction::Pass };
    assert_eq!(config.faults, faults);
    assert_eq!(config.metrics.to_string(), "127.0.0.1:9478");
    assert_eq!(config.control, Path::new("/run/limiter/control.sock"));
    assert!(config.warnings.is_empty());
}

/// Every key there is. `docs/limiter.toml.md` and `keys.rs` are held against it below.
const FULL: &str = r#"
mode = "enforce"
[[interface]]
name = "eth0"
xdp = "auto"
[[interface]]
name = "ens*"
[table]
ipv4_sources = 2048
ipv6_sources = 0x1000
new_sources = { rate = "200/s", burst = 300 }
[neighbour]
packets = { rate = "100/s", burst = 200 }
[faults]
malformed = "pass"
table_full = "drop"
[[class]]
name = "amplification"
match = { protocol = "udp", source_ports = [53, "1000-2000"], fragment = false, max_bytes = 600 }
packets = { rate = "0.5/s", burst = 1 }
bytes = { rate = "4Mbit/s", burst = "256KiB" }
mode = "observe"
[[class]]
name = "syn"
match = { flags = "syn,!ack" }
new_sources = { rate = "100/s", burst = 1000 }
packets = { rate = "200/s", burst = 400 }
[[class]]
name = "echo"
match = { protocol = "icmp", icmp_type = [8, 0] }
packets = { rate = "10/m", burst = 4 }
[[class]]
name = "some"
match = { ports = ["5-6", 80], protocol = ["tcp", "sctp"] }
bytes = { rate = "1MiB/s", burst = 4000 }
[[class]]
name = "rest"
bytes = { rate = "8kbit/s", burst = 1514 }
[[prefix]]
cidr = "203.0.113.0/24"
scale = 20
owner = "network"
comment = "a carrier NAT"
[[prefix]]
cidr = "2001:db8::/64"
[[prefix.class]]
name = "syn"
packets = { rate = "1/s", burst = 2 }
bytes = { rate = "1Gbit/s", burst = "1MB" }
[[exempt]]
cidr = "10.0.0.0/8"
interface = "ens5"
owner = "platform"
expires = 2027-01-01T00:00:00+01:00
[[exempt]]
cidr = "10.0.0.0/8"
spoofable = true
owner = "platform"
[[block]]
cidr = "198.51.100.7"
expires = "2020-01-01T00:00:00Z"
reason = "scans"
[metrics]
listen = "[::1]:9478"
[control]
socket = "/tmp/s"
[established]
packets = { rate = "300/s", burst = 600 }
client_ports = ["1024-2047", 53]
"#;

#[test]
fn every_key_is_read() {
    let config = parse(FULL).unwrap();
    assert_eq!(config.mode, Mode::Enforce);
    assert_eq!(config.interfaces[1].name, Pattern::new("ens*"));
    let new_sources = Budget { rate: Rate::new(200, 1).unwrap(), burst: 300 };
    assert_eq!(config.table, TableSizes { ipv4_sources: 2048, ipv6_sources: 4096, new_sources });
    assert_eq!(config.faults.table_full, FaultAction::Drop);
    assert_eq!(config.established.packets.burst, 600);
    let ports = &config.established.client_ports;
    assert!([53, 1024, 2047].iter().all(|port| ports.contains(*port)) && !ports.contains(2048));
    let [amplification, syn, echo, some, rest] = &config.classes[..] else { panic!() };
    assert_eq!(amplification.mode, Some(Mode::Observe));
    assert_eq!(amplification.allowance.bytes.unwrap().burst, 262_144);
    let matcher = amplification.matcher.as_ref().unwrap();
    assert_eq!((matcher.fragment, matcher.max_bytes), (Some(false), Some(600)));
    let ports = matcher.source_ports.as_ref().unwrap();
    assert!([53, 1000, 2000].iter().all(|port| ports.contains(*port)) && !ports.contains(2001));
    assert_eq!(syn.matcher.as_ref().unwrap().flags, Some(Flags { set: 0x02, clear: 0x10 }));
    assert_eq!(syn.matcher.as_ref().unwrap().protocols, [6]);
    assert_eq!((syn.new_sources.unwrap().burst, rest.new_sources), (1000, None));
    assert_eq!(echo.matcher.as_ref().unwrap().icmp_types, [8, 0]);
    assert_eq!(some.matcher.as_ref().unwrap().protocols, [6, 132]);
    assert_eq!(rest.matcher, None);
    let [scaled, own] = &config.prefixes[..] else { panic!() };
    assert_eq!(scaled.limits.len(), 5);
    let twenty =
        Budget { rate: syn.allowance.packets.unwrap().rate.times(20).unwrap(), burst: 8000 };
    assert_eq!(scaled.limits[1].packets, twenty.packets().unwrap());
    assert!(own.limits[1].bytes.is_limited());
    assert_eq!(own.limits[0], amplification.limits);
    assert_eq!(config.exemptions[0].expires, Some(now() + Duration::from_hours(32 * 24 - 1)));
    assert!(config.exemptions[1].is_spoofable());
    assert_eq!(config.blocks[0].cidr.to_string(), "198.51.100.7/32");
    let warnings: Vec<_> = config.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(warnings.len(), 2);
    assert!(warnings[0].contains("exempt[1] \"10.0.0.0/8\": anybody who forges"), "{warnings:?}");
    assert!(warnings[1].contains("ended at 2020-01-01T00:00:00Z"), "{warnings:?}");
}

#[test]
fn all_errors_of_a_file_at_once_in_order() {
    let text = r#"mode = "observ"
[[interface]]
name = "eth0"
[[class]]
name = "dns"
match = { protocol = "udp", ports = [53] }
packets = { rate = "1000/x", burst = 0 }
[[class]]
name = "rest"
packet = { rate = "1/s", burst = 1 }
[[prefix]]
cidr = "203.0.113.7/24"
scale = 2
[[exempt]]
cidr = "10.0.0.0/8"
"#;
    let errors = errors(text);
    let starts = [
        "limiter.toml:1:8: mode: ",
        "limiter.toml:7:20: class[0] \"dns\" packets.rate: \"1000/x\" is not a rate; write a count \
         per second, minute or hour: \"1000/s\"",
        "limiter.toml:7:38: class[0] \"dns\" packets.burst: ",
        "limiter.toml:10:1: class[1] \"rest\" packet: unknown key; did you mean \"packets\"?",
        "limiter.toml:12:8: prefix[0] \"203.0.113.7/24\" cidr: \"203.0.113.7/24\" has bits set \
         beyond its length; write \"203.0.113.0/24\"",
        "limiter.toml:14:1: exempt[0] \"10.0.0.0/8\": a source address can be forged",
        "limiter.toml:14:1: exempt[0] \"10.0.0.0/8\" owner: missing; add owner",
    ];
    assert_eq!(errors.len(), starts.len(), "{errors:#?}");
    for (error, start) in errors.iter().zip(starts) {
        assert!(error.starts_with(start), "{error}\nis not\n{start}");
    }
}

#[test]
fn json_has_every_part() {
    let errors = parse(&with("mod = 1")).unwrap_err();
    let json = serde_json::to_value(&errors).unwrap();
    let expected = serde_json::json!([{
        "file": "limiter.toml", "line": 6, "column": 1, "key": "class[0] \"rest\" mod",
        "cause": "unknown key", "cure": "did you mean \"mode\"?",
    }]);
    assert_eq!(json, expected);
}

#[test]
fn what_is_not_toml() {
    one_error("mode = \"observe\"\n[[interface]\n", "2:13", &["not TOML"]);
    one_error(
        "mode = \"observe\"\nmode = \"enforce\"\n",
        "2:1",
        &["not TOML: duplicate key mode; "],
    );
}

#[test]
fn an_empty_file() {
    let errors = errors("");
    assert_eq!(errors.len(), 2);
    assert!(errors[0].starts_with("limiter.toml:1:1: no interface is guarded; add [[interface]]"));
    assert!(errors[1].starts_with("limiter.toml:1:1: no class limits anything; add [[class]]"));
}

#[test]
fn unknown_keys() {
    one_error(&with("nmae = 1"), "6:1: class[0] \"rest\" nmae", &["unknown key", "\"name\"?"]);
    one_error(&with("ports = [1]"), "6:1: class[0] \"rest\" ports", &["belongs in class.match"]);
    one_error(&with("[colour]"), "6:2: colour", &["unknown key", "the keys here are mode, "]);
    let text = with_match("port = 53, protocol = \"udp\"");
    one_error(&text, "5:11: class[0] \"dns\" match.port", &["did you mean \"ports\"?"]);
}

#[test]
fn a_misspelt_key_is_not_missing_as_well() {
    let text = with("").replace("burst", "burts");
    one_error(&text, "5:31: class[0] \"rest\" packets.burts", &["did you mean \"burst\"?"]);
    let text = with("").replace("[[interface]]", "[[interfaces]]");
    one_error(&text, "1:3: interfaces", &["did you mean \"interface\"?"]);
    // One that looks like another key does not excuse this one.
    let text = with("").replace("burst", "rat");
    let errors = errors(&text);
    assert_eq!(errors.len(), 2, "{errors:#?}");
}

#[test]
fn ports_of_clients_are_ports() {
    let ports = |text: &str| with(&format!("[established]\nclient_ports = {text}"));
    one_error(&ports("[\"9-5\"]"), "7:17: established.client_ports[0]", &["reversed"]);
    one_error(&ports("[]"), "7:16: established.client_ports", &["empty"]);
    one_error(&ports("70000"), "7:16: established.client_ports", &["out of range"]);
}

#[test]
fn keys_of_later_versions() {
    let cases = [(with("[fleet]"), "6:2: fleet"), (format!("vlan = 1\n{}", with("")), "1:1: vlan")];
    for (text, place) in cases {
        one_error(&text, place, &["not available in this version; remove it"]);
    }
}

#[test]
fn wrong_types() {
    let cases = [
        ("[[block]]\ncidr = 7", "7:8: block[0].cidr", "expected a string, found a whole number"),
        ("[block]\ncidr = \"::/8\"", "6:1: block", "expected a list of tables, found a table"),
        ("[metrics]\nlisten = 9478", "7:10: metrics.listen", "\"127.0.0.1:9478\""),
        ("[table]\nipv4_sources = \"1M\"", "7:16: table.ipv4_sources", "found a string"),
        (
            "[[exempt]]\ncidr=\"::/8\"\nowner=\"x\"\nspoofable=1",
            "9:11: exempt[0] \"::/8\" spoofable",
            "true or false",
        ),
        ("bytes = 7", "6:9: class[0] \"rest\" bytes", "expected a table"),
    ];
    for (rest, place, part) in cases {
        one_error(&with(rest), place, &[part]);
    }
}

#[test]
fn single_tables() {
    let cases = [
        ("[table]\nipv4_sources = 100", "7:16: table.ipv4_sources", "from 1024 to 16777216"),
        ("[table]\nipv6_sources = 99_999_999", "7:16: table.ipv6_sources", "out of range"),
        ("[faults]\nmalformed = \"reject\"", "7:13: faults.malformed", "\"pass\" or \"drop\""),
        ("[metrics]\nlisten = \"localhost\"", "7:10: metrics.listen", "is not a socket address"),
        ("[control]\nsocket = \"x.sock\"", "7:10: control.socket", "an absolute path"),
        (
            "mode = \"drop\"",
            "6:8: class[0] \"rest\" mode",
            "\"observe\" or \"enforce\" or \"bypass\"",
        ),
    ];
    for (rest, place, part) in cases {
        one_error(&with(rest), place, &[part]);
    }
}

#[test]
fn interfaces() {
    let twice = with("[[interface]]\nname = \"eth0\"");
    one_error(&twice, "6:1: interface[1] \"eth0\"", &["already named at line 1", "remove one"]);
    let long = with("[[interface]]\nname = \"a-very-long-name\"");
    one_error(&long, "7:8: interface[1] \"a-very-long-name\" name", &["at most 15 characters"]);
    let xdp = with("[[interface]]\nname = \"eth1\"\nxdp = \"nativ\"");
    one_error(&xdp, "8:7: interface[1] \"eth1\" xdp", &["\"native\" or \"generic\" or \"auto\""]);
    let entry = |i| format!("[[interface]]\nname = \"e{i}\"");
    let many = (1..=31).map(entry).collect::<Vec<_>>().join("\n");
    one_error(&with(&many), "66:1: interface[31] \"e31\"", &["more than 31", "glob"]);
}

#[test]
fn budgets() {
    let cases = [
        (
            "{ rate = \"0/s\", burst = 1 }",
            "packets.rate",
            "a rate of 0 passes nothing; write a rate from \"1/h\"",
        ),
        ("{ rate = \"31000000/s\", burst = 1 }", "packets.rate", "faster than \"30000000/s\""),
        ("{ rate = \"0.5/h\", burst = 1 }", "packets.rate", "slower than \"1/h\""),
        ("{ rate = \"4Mbit/s\", burst = 1 }", "packets.rate", "\"4Mbit/s\" is not a rate"),
        (
            "{ rate = 1000, burst = 1 }",
            "packets.rate",
            "expected a string, found a whole number; write a count per second",
        ),
        (
            "{ rate = \"1/s\", burst = 0 }",
            "packets.burst",
            "a burst of 0 passes nothing; write 1 or more",
        ),
        (
            "{ rate = \"1/s\", burst = \"10\" }",
            "packets.burst",
            "expected a whole number, found a string; write a whole number, 1 or more",
        ),
        ("{ rate = \"1/h\", burst = 6000 }", "packets.burst", "more than 208 days"),
        ("{ burst = 10 }", "packets.rate", "missing; add rate = \"1000/s\""),
        ("{ rate = \"1/s\" }", "packets.burst", "missing; add burst = 2000"),
    ];
    for (budget, key, part) in cases {
        let text = with_class(&format!("match = {{ protocol = 9 }}\npackets = {budget}"));
        let errors = errors(&text);
        assert_eq!(errors.len(), 1, "{budget}: {errors:#?}");
        assert!(errors[0].starts_with("limiter.toml:6:"), "{}", errors[0]);
        assert!(errors[0].contains(&format!("class[0] \"dns\" {key}: ")), "{}", errors[0]);
        assert!(errors[0].contains(part), "{}\nlacks\n{part}", errors[0]);
    }
    let cases = [
        (
            "{ rate = \"1000/s\", burst = 2000 }",
            "bytes.rate",
            "is not a byte rate; write it in bit/s",
        ),
        ("{ rate = \"300Gbit/s\", burst = 2000 }", "bytes.rate", "faster than \"200Gbit/s\""),
        ("{ rate = \"7999bit/s\", burst = 2000 }", "bytes.rate", "slower than \"8kbit/s\""),
        ("{ rate = \"0B/s\", burst = 2000 }", "bytes.rate", "a rate of 0"),
        (
            "{ rate = \"1MiB/s\", burst = 1513 }",
            "bytes.burst",
            "below one full frame never lets one through; write at least 1514",
        ),
        ("{ rate = \"1MiB/s\", burst = \"1kB\" }", "bytes.burst", "write at least 1514"),
        (
            "{ rate = \"1MiB/s\", burst = \"2K\" }",
            "bytes.burst",
            "\"2K\" is not a size; write bytes",
        ),
        ("{ rate = \"1MiB/s\", burst = true }", "bytes.burst", "expected a size, found a boolean"),
        ("{ rate = \"8kbit/s\", burst = \"1000GiB\" }", "bytes.burst", "more than 208 days"),
    ];
    for (budget, key, part) in cases {
        let text = with_class(&format!("match = {{ protocol = 9 }}\nbytes = {budget}"));
        one_error(&text, &errors(&text)[0]["limiter.toml:".len()..][..4], &[]);
        let error = &errors(&text)[0];
        assert!(error.contains(&format!("class[0] \"dns\" {key}: ")), "{error}");
        assert!(error.contains(part), "{error}\nlacks\n{part}");
    }
}

#[test]
fn neighbours() {
    let text = with("[neighbour]\npackets = { rate = \"0/s\", burst = 5 }");
    one_error(&text, "7:20: neighbour.packets.rate", &["a rate of 0"]);
}

#[test]
fn globs() {
    let matches = |pattern: &str, name: &str| Pattern::new(pattern).matches(name);
    assert!(matches("ens*", "ens1f0") && matches("*", "eth0") && matches("e?h*0", "eth10"));
    assert!(!matches("ens", "ens1") && !matches("e?", "e") && !matches("*0", "eth01"));
    assert!(matches("lo", "lo") && !matches("*", "lo"));
}

#[test]
fn the_default_configuration_is_valid() {
    let config = parse(include_str!("../../../deploy/limiter.toml")).unwrap();
    assert_eq!(config.mode, Mode::Observe);
    assert_eq!(config.warnings, []);
    let names: Vec<_> = config.classes.iter().map(|class| class.name.as_str()).collect();
    assert_eq!(names, ["amplification", "syn", "dns", "icmp", "rest"]);
}

/// The examples in it that are commented out are valid as well.
#[test]
fn the_examples_of_the_default_configuration_are_valid() {
    let text = include_str!("../../../deploy/limiter.toml");
    let is_toml = |line: &str| line.starts_with('[') || line.contains(" = ");
    let shown = text.lines().map(|line| match line.strip_prefix("# ") {
        Some(example) if is_toml(example) => example,
        _ => line,
    });
    let shown: Vec<_> = shown.collect();
    let text = format!("{}\n[[interface]]\nname = \"eth1\"\n", shown.join("\n"));
    let config = parse(&text).unwrap();
    assert_eq!(config.warnings, []);
    let entries = (config.prefixes.len(), config.exemptions.len(), config.blocks.len());
    assert_eq!(entries, (1, 1, 1));
    assert!(config.application.socket.is_some() && config.application.trusted_proxies.len() == 1);
}

#[test]
fn the_socket_for_applications_is_read_with_its_terms() {
    let bridge = |text: &str| parse(&with(text)).map(|config| config.application);
    let none = bridge("").unwrap();
    assert!(none.socket.is_none() && none.trusted_proxies.is_empty());
    assert_eq!((none.first_penalty.as_secs(), none.longest_penalty.as_secs()), (10, 3600));
    let some = bridge(
        "[application]\nsocket = \"/run/a.sock\"\ntrusted_proxies = [\"10.0.0.0/8\", \"2001:db8::7\"]\n\
         first_penalty = \"1m\"\npenalties = { rate = \"1/m\", burst = 2 }",
    )
    .unwrap();
    assert_eq!(some.first_penalty.as_secs(), 60);
    assert_eq!(some.trusted_proxies[1].to_string(), "2001:db8::7/128");
    for (line, parts) in [
        ("socket = \"app.sock\"", ["cannot be the path of a socket", "absolute"]),
        ("group = \"a b\"", ["cannot be a group's name", "limiter-app"]),
        ("trusted_proxies = [\"10.0.0.1/8\"]", ["is not a network", "10.0.0.0/8"]),
        ("first_penalty = \"soon\"", ["is no time", "\"10s\""]),
        ("longest_penalty = \"25h\"", ["is no time", "24h"]),
        ("longest_penalty = \"5s\"", ["longer than the longest", "first_penalty"]),
        ("trusted_proxy = [\"10.0.0.0/8\"]", ["unknown key", "did you mean \"trusted_proxies\"?"]),
    ] {
        let errors = bridge(&format!("[application]\n{line}")).unwrap_err();
        let text = errors.to_string();
        assert!(errors.as_slice().len() == 1 && parts.iter().all(|it| text.contains(it)), "{text}");
        assert!(text.contains("application"), "{text}");
    }
}

/// The rows `| `key` |` of the reference, with the table that their section is about.
fn documented() -> BTreeSet<(String, String)> {
    let mut rows = BTreeSet::new();
    let mut table = None;
    for line in include_str!("../../../docs/limiter.toml.md").lines() {
        if let Some(heading) = line.strip_prefix("### ") {
            let name = heading.split('`').nth(1).map(|name| name.trim_matches(['[', ']']));
            table = name.or((heading == "Top level").then_some(""));
        } else if let (Some(table), Some(row)) = (table, line.strip_prefix("| `"))
            && let Some((key, _)) = row.split_once('`')
        {
            rows.insert((table.to_owned(), key.to_owned()));
        }
    }
    rows
}

#[test]
fn the_reference_has_the_keys_that_there_are() {
    let mut known = BTreeSet::new();
    for (table, keys) in keys::TABLES {
        // Budgets and matchers are described once.
        let table = match *table {
            _ if keys == &["rate", "burst"] => "packets",
            "reserve.match" => "class.match",
            table => table,
        };
        known.extend(keys.iter().map(|key| (table.to_owned(), (*key).to_owned())));
    }
    assert_eq!(documented(), known);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Whatever is cut out of a file or put into it, reading it ends, and an error has its place.
    #[test]
    fn a_mangled_file_is_read_or_refused(
        at in 0..FULL.len(),
        length in 0_usize..40,
        put in prop::sample::select(vec!["", "\"", "é", "0", "[", "}", "\n", "= 99999999999999999999"]),
    ) {
        let (before, after) = FULL.split_at(at);
        let after = after.get(length..).unwrap_or_default();
        if let Err(errors) = parse(&format!("{before}{put}{after}")) {
            prop_assert!(!errors.as_slice().is_empty());
            for error in errors.as_slice() {
                prop_assert!(error.line > 0 && error.column > 0 && !error.cause.is_empty());
                prop_assert!(!error.cure.is_empty());
            }
        }
    }
}
