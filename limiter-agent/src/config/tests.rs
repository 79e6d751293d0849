//! Whole files, and every way in which one can be wrong.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

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
    let size = TableSizes { ipv4_sources: 1_000_000, ipv6_sources: 1_000_000 };
    assert_eq!(config.table, size);
    assert_eq!(config.neighbours.burst, 10_000);
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
"#;

#[test]
fn every_key_is_read() {
    let config = parse(FULL).unwrap();
    assert_eq!(config.mode, Mode::Enforce);
    assert_eq!(config.interfaces[1].name, Pattern::new("ens*"));
    assert_eq!(config.table, TableSizes { ipv4_sources: 2048, ipv6_sources: 4096 });
    assert_eq!(config.faults.table_full, FaultAction::Drop);
    let [amplification, syn, echo, some, rest] = &config.classes[..] else { panic!() };
    assert_eq!(amplification.mode, Some(Mode::Observe));
    assert_eq!(amplification.allowance.bytes.unwrap().burst, 262_144);
    let matcher = amplification.matcher.as_ref().unwrap();
    assert_eq!((matcher.fragment, matcher.max_bytes), (Some(false), Some(600)));
    let ports = matcher.source_ports.as_ref().unwrap();
    assert!([53, 1000, 2000].iter().all(|port| ports.contains(*port)) && !ports.contains(2001));
    assert_eq!(syn.matcher.as_ref().unwrap().flags, Some(Flags { set: 0x02, clear: 0x10 }));
    assert_eq!(syn.matcher.as_ref().unwrap().protocols, [6]);
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
        "limiter.toml:8:1: class[1] \"rest\": neither packets nor bytes",
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
    one_error("mode = \"observe\"\nmode = \"enforce\"\n", "2:1", &["not TOML", "duplicate"]);
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
fn keys_of_later_versions() {
    let new = "new_sources = { rate = \"1/s\", burst = 1 }";
    let cases = [
        (with(&format!("[table]\n{new}")), "7:1: table.new_sources"),
        (with("total = 1"), "6:1: class[0] \"rest\" total"),
        (with("unproven = 1"), "6:1: class[0] \"rest\" unproven"),
        (with("[established]"), "6:2: established"),
        (with("[aggregate]"), "6:2: aggregate"),
        (with("[[reserve]]"), "6:3: reserve"),
        (with("[fleet]"), "6:2: fleet"),
        (format!("lease = 1\n{}", with("")), "1:1: lease"),
        (format!("on_agent_loss = \"observe\"\n{}", with("")), "1:1: on_agent_loss"),
    ];
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
fn class_names() {
    let twice =
        with_class(&format!("match = {{ protocol = 9 }}\n{PACKETS}")).replace("dns", "rest");
    one_error(&twice, "7:1: class[1] \"rest\"", &["at line 3", "a name of its own"]);
    for (name, part) in [("none", "choose another"), ("DNS", "a-z"), ("", "1 to 32")] {
        let text = with_match("protocol = \"udp\"").replace("dns", name);
        one_error(&text, &format!("4:8: class[0] \"{name}\" name"), &[part]);
    }
}

#[test]
fn the_catch_all() {
    let no_last = with("match = { protocol = \"tcp\" }");
    one_error(&no_last, "6:9: class[0] \"rest\" match", &["add a last class without a match"]);
    let early = with_class(PACKETS);
    one_error(&early, "3:1: class[0] \"dns\"", &["can never match", "make it the last"]);
}

#[test]
fn classes_that_can_never_match() {
    let cases = [
        ("protocol = \"icmp\", ports = [1]", "class[0] \"dns\" match.ports", "icmp has no ports"),
        (
            "protocol = [\"udp\", 47], ports = [1]",
            "class[0] \"dns\" match.ports",
            "47 has no ports",
        ),
        (
            "protocol = \"udp\", flags = \"syn\"",
            "class[0] \"dns\" match.flags",
            "protocol = \"tcp\"",
        ),
        ("flags = \"syn,!syn\"", "class[0] \"dns\" match.flags", "both set and clear"),
        ("protocol = \"tcp\", icmp_type = [8]", "class[0] \"dns\" match.protocol", "\"icmpv6\""),
        ("icmp_type = [8]", "class[0] \"dns\" match.icmp_type", "protocol = \"icmp\""),
        ("icmp_type = [8], ports = [1]", "class[0] \"dns\" match.icmp_type", "icmp has no ports"),
        ("max_bytes = 20", "class[0] \"dns\" match.max_bytes", "from 34 to 65534"),
        ("ports = []", "class[0] \"dns\" match.ports", "an empty list matches nothing"),
        ("", "class[0] \"dns\" match", "an empty match says nothing"),
    ];
    for (matcher, key, part) in cases {
        let errors = errors(&with_match(matcher));
        assert_eq!(errors.len(), 1, "{matcher}: {errors:#?}");
        assert!(errors[0].starts_with("limiter.toml:5:"), "{}", errors[0]);
        assert!(errors[0].contains(key) && errors[0].contains(part), "{matcher}: {}", errors[0]);
    }
}

#[test]
fn classes_in_the_shadow_of_an_earlier_one() {
    let two = |first: &str, second: &str| {
        with_match(first).replace(
            "[[class]]\nname = \"rest\"",
            &format!(
                "[[class]]\nname = \"b\"\nmatch = {{ {second} }}\n{PACKETS}\n[[class]]\nname = \
                 \"rest\""
            ),
        )
    };
    let shadowed = [
        ("protocol = \"udp\"", "protocol = \"udp\""),
        ("protocol = \"udp\"", "protocol = \"udp\", ports = [53]"),
        ("ports = [\"1-10\", 11, \"12-20\"]", "protocol = \"tcp\", ports = [\"5-15\"]"),
        ("flags = \"syn\"", "flags = \"syn,!ack\""),
        ("protocol = \"icmp\"", "protocol = \"icmp\", icmp_type = [8]"),
        ("max_bytes = 100", "max_bytes = 60, protocol = \"udp\""),
        ("protocol = [\"tcp\", \"udp\"]", "protocol = [\"udp\", \"tcp\"], fragment = true"),
    ];
    for (first, second) in shadowed {
        let error = &errors(&two(first, second))[0];
        assert!(error.starts_with("limiter.toml:9:9: class[1] \"b\" match: can never"), "{error}");
        assert!(error.contains("class \"dns\" at line 3") && error.contains("first"), "{error}");
    }
    let apart = [
        ("protocol = \"udp\", ports = [53]", "protocol = \"udp\""),
        ("protocol = \"udp\", ports = [\"0-65535\"]", "protocol = \"udp\""),
        ("flags = \"syn,!ack\"", "flags = \"syn\""),
        ("ports = [53]", "source_ports = [53]"),
        ("max_bytes = 100", "max_bytes = 101"),
        ("fragment = true", "fragment = false"),
    ];
    for (first, second) in apart {
        assert_eq!(parse(&two(first, second)).err(), None, "{first} | {second}");
    }
}

#[test]
fn matchers() {
    let cases = [
        ("ports = [53, \"50-60\"]", "match.ports[1]: \"50-60\" overlaps 53; write each port once"),
        ("ports = [53, 53]", "match.ports[1]: 53 overlaps 53"),
        ("ports = [\"20-10\"]", "match.ports[0]: the range \"20-10\" is reversed; write \"10-20\""),
        ("ports = [65536]", "match.ports[0]: 65536 is out of range; write a whole number from 0"),
        ("ports = [-1]", "match.ports[0]: -1 is out of range"),
        ("ports = [\"http\"]", "match.ports[0]: \"http\" is not a range of ports; write a port"),
        ("ports = [1.5]", "match.ports[0]: expected a port, found a decimal number"),
        ("source_ports = [\"1-70000\"]", "match.source_ports[0]: \"1-70000\" is not a range"),
        ("protocol = \"gre\"", "match.protocol: \"gre\" is not a protocol; write \"tcp\""),
        ("protocol = 256", "match.protocol: 256 is out of range"),
        ("protocol = [\"tcp\", 6]", "match.protocol[1]: tcp is in the list twice"),
        ("flags = \"syn,ak\"", "match.flags: \"ak\" is not a TCP flag; write flags from fin,"),
        ("protocol = \"icmp\", icmp_type = [8, 8]", "match.icmp_type[1]: 8 is in the list twice"),
        ("fragment = \"yes\"", "match.fragment: expected a boolean, found a string; write true"),
    ];
    for (matcher, expected) in cases {
        let errors = errors(&with_match(matcher));
        assert_eq!(errors.len(), 1, "{matcher}: {errors:#?}");
        let key = format!("class[0] \"dns\" {expected}");
        assert!(errors[0].starts_with("limiter.toml:5:"), "{}", errors[0]);
        assert!(errors[0].contains(&key), "{}\nlacks\n{key}", errors[0]);
    }
}

#[test]
fn too_many_classes_and_too_many_sets_of_ports() {
    let classes = |count: usize, matcher: &dyn Fn(usize) -> String| -> String {
        let class = |i: usize| {
            let matcher = matcher(i);
            format!("[[class]]\nname = \"c{i}\"\nmatch = {{ {matcher} }}\n{PACKETS}\n")
        };
        let classes: String = (0..count).map(class).collect();
        let rest = format!("[[class]]\nname = \"rest\"\n{PACKETS}\n");
        format!("[[interface]]\nname = \"eth0\"\n{classes}{rest}")
    };
    let many = classes(64, &|i| format!("ports = [{i}]"));
    one_error(&many, "259:1: class[64] \"rest\"", &["more than 64 classes"]);
    assert_eq!(parse(&classes(63, &|i| format!("ports = [{i}]"))).err(), None);
    // Class i takes the ports below 512 whose bit i is set, so that all 512 sets differ.
    let bits = |i: usize| {
        let ports = (0..512).filter(|port| port >> i & 1 == 1).map(|port| port.to_string());
        format!("ports = [{}]", ports.collect::<Vec<_>>().join(", "))
    };
    let error = &errors(&classes(9, &bits))[0];
    assert!(error.contains("into 512 different sets") && error.contains("256"), "{error}");
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
            "expected a whole number, found a string",
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
fn networks() {
    let cases = [
        ("10.0.0.1/8", "write \"10.0.0.0/8\""),
        ("2001:db8::1/32", "write \"2001:db8::/32\""),
        ("10.0.0.0/33", "is not a network"),
        ("example.org", "is not a network; write a network such as"),
        ("2001:db8::/65", "IPv6 is limited per /64; write \"2001:db8::/64\""),
        ("2001:db8::5", "write \"2001:db8::/64\""),
        ("2002:c000:200:1::/64", "write \"2002:c000:200::/48\""),
        ("64:ff9b::/95", "write \"64:ff9b::/64\""),
    ];
    for (cidr, part) in cases {
        let text = with(&format!("[[block]]\ncidr = \"{cidr}\""));
        one_error(&text, &format!("7:8: block[0] \"{cidr}\" cidr"), &[part]);
    }
    for cidr in ["64:ff9b::c000:0201", "64:ff9b::/96", "fe80::1", "2002:c000:200::/48", "::/0"] {
        let text = with(&format!("[[block]]\ncidr = \"{cidr}\""));
        assert_eq!(parse(&text).err(), None, "{cidr}");
    }
}

#[test]
fn prefixes() {
    let cases = [
        (
            "scale = 1\n[[prefix]]\ncidr = \"10.0.0.0/8\"\nscale = 2",
            "9:1: prefix[1] \"10.0.0.0/8\"",
            "already at line 6; make one entry",
        ),
        ("", "6:1: prefix[0] \"10.0.0.0/8\"", "it says nothing about the network; add scale"),
        (
            "scale = 0",
            "8:9: prefix[0] \"10.0.0.0/8\" scale",
            "0 is out of range; write a whole number from 1",
        ),
        ("scale = 1.5", "8:9: prefix[0] \"10.0.0.0/8\" scale", "found a decimal number"),
        (
            "scale = 5000",
            "8:9: prefix[0] \"10.0.0.0/8\" scale",
            "5000 times the packets of class \"rest\": faster than \"30000000/s\" cannot be enforced; write a smaller scale",
        ),
        ("class = []", "6:1: prefix[0] \"10.0.0.0/8\"", "the list of its own limits is empty"),
        (
            "[[prefix.class]]\nname = \"rest\"",
            "8:1: prefix[0] \"10.0.0.0/8\" class[0] \"rest\"",
            "neither packets nor bytes",
        ),
        (
            "[[prefix.class]]\nname = \"rst\"\npackets = { rate = \"1/s\", burst = 1 }",
            "9:8: prefix[0] \"10.0.0.0/8\" class[0] \"rst\" name",
            "there is no class \"rst\"; did you mean \"rest\"?",
        ),
        (
            "scale = 2\n[[prefix.class]]\nname = \"rest\"\npackets = { rate = \"1/s\", burst = 1 }",
            "8:9: prefix[0] \"10.0.0.0/8\" scale",
            "exclude each other; remove scale",
        ),
    ];
    for (rest, place, part) in cases {
        one_error(&with(&format!("[[prefix]]\ncidr = \"10.0.0.0/8\"\n{rest}")), place, &[part]);
    }
}

#[test]
fn exemptions() {
    let owner = "owner = \"platform\"";
    let cases = [
        (
            owner.to_owned(),
            "6:1: exempt[0] \"10.0.0.0/8\"",
            "add interface = \"…\", or spoofable = true",
        ),
        (format!("{owner}\nspoofable = false"), "6:1: exempt[0] \"10.0.0.0/8\"", "can be forged"),
        (
            format!("{owner}\ninterface = \"eth1\""),
            "9:13: exempt[0] \"10.0.0.0/8\" interface",
            "no [[interface]] is called \"eth1\"; write one of eth0, or add",
        ),
        (
            "interface = \"eth0\"".to_owned(),
            "6:1: exempt[0] \"10.0.0.0/8\" owner",
            "missing; add owner",
        ),
        (
            "interface = \"eth0\"\nowner = \" \"".to_owned(),
            "9:9: exempt[0] \"10.0.0.0/8\" owner",
            "nobody owns it",
        ),
        (
            format!("{owner}\ninterface = \"eth0\"\nexpires = \"tomorrow\""),
            "10:11: exempt[0] \"10.0.0.0/8\" expires",
            "not an instant in time; write date, time and UTC",
        ),
        (
            format!("{owner}\ninterface = \"eth0\"\nexpires = 2027-01-01"),
            "10:11: exempt[0] \"10.0.0.0/8\" expires",
            "2027-01-01T00:00:00Z",
        ),
        (
            format!("{owner}\ninterface = \"eth0\"\nexpires = 60"),
            "10:11: exempt[0] \"10.0.0.0/8\" expires",
            "expected a date and time",
        ),
        (
            format!(
                "{owner}\ninterface = \"eth0\"\n[[exempt]]\ncidr = \"10.0.0.0/8\"\n{owner}\ninterface = \"eth0\""
            ),
            "10:1: exempt[1] \"10.0.0.0/8\"",
            "already at line 6",
        ),
    ];
    for (rest, place, part) in cases {
        one_error(&with(&format!("[[exempt]]\ncidr = \"10.0.0.0/8\"\n{rest}")), place, &[part]);
    }
    let glob = with("[[exempt]]\ncidr = \"10.0.0.0/8\"\ninterface = \"eth*\"\nowner = \"x\"");
    assert_eq!(parse(&glob).err(), None);
}

#[test]
fn a_block_of_everything_is_a_warning() {
    let config = parse(&with("[[block]]\ncidr = \"0.0.0.0/0\"")).unwrap();
    assert!(config.warnings[0].to_string().contains("6:1: block[0] \"0.0.0.0/0\": blocks every"));
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
    let is_toml = |line: &str| line.starts_with("[[") || line.contains(" = ");
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
        // Budgets are described once.
        let table = if keys == &["rate", "burst"] { "packets" } else { table };
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
