//! What is wrong with classes and their matchers.

use super::*;

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
        format!("default_reserves = []\n[[interface]]\nname = \"eth0\"\n{classes}{rest}")
    };
    let many = classes(64, &|i| format!("ports = [{i}]"));
    one_error(&many, "260:1: class[64] \"rest\"", &["more than 64 classes"]);
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
fn limits_of_connections() {
    let class = |matcher: &str, limit: &str| {
        with_class(&format!("match = {{ {matcher} }}\n{PACKETS}\nconnections = {limit}"))
    };
    let syn = "flags = \"syn,!ack\"";
    let place = "7:15: class[0] \"dns\" connections";
    for wrong in ["0", "-1", "1000001"] {
        let parts = ["is out of range; write a whole number from 1 to 1000000", "[[block]]"];
        one_error(&class(syn, wrong), place, &parts);
    }
    for (wrong, found) in [("\"9\"", "a string"), ("1.5", "a decimal number"), ("{}", "a table")] {
        one_error(&class(syn, wrong), place, &["expected a whole number", found]);
    }
    for without in ["protocol = \"udp\"", "flags = \"ack\"", "flags = \"syn,ack\""] {
        one_error(&class(without, "9"), place, &["no packet of this class", "takes the SYNs"]);
    }
    for matcher in
        [syn, "ports = [80]", "protocol = \"tcp\"", "protocol = \"tcp\", fragment = true"]
    {
        let config = parse(&class(matcher, "9")).expect(matcher);
        assert_eq!(config.classes[0].limits.connections, 9);
        assert_eq!(config.classes[1].limits.connections, 0);
    }
    // Behind a class that takes all SYNs, or all to the ports in question.
    for (matcher, has_effect) in [
        (syn, false),
        ("protocol = \"tcp\"", false),
        ("flags = \"syn\", ports = [80]", true),
        ("flags = \"syn\", fragment = false", true),
    ] {
        let text = with_match(matcher) + "connections = 9\n";
        if has_effect {
            assert_eq!(parse(&text).err(), None, "{matcher}");
        } else {
            let parts = ["class \"dns\" at line 3 takes every SYN", "write it in that class"];
            one_error(&text, "10:15: class[1] \"rest\" connections", &parts);
        }
    }
}

#[test]
fn networks_scale_the_limit_of_connections_or_have_their_own() {
    let text = with_class(&format!("match = {{ ports = [80] }}\n{PACKETS}\nconnections = 9"));
    let scaled = text.clone() + "[[prefix]]\ncidr = \"203.0.113.0/24\"\nscale = 20\n";
    let limits = |text: &str| {
        let config = parse(text).expect("is valid");
        config.prefixes[0].limits.iter().map(|limits| limits.connections).collect::<Vec<_>>()
    };
    assert_eq!(limits(&scaled), [180, 0]);
    let own = |class: &str| {
        let prefix = "[[prefix]]\ncidr = \"203.0.113.0/24\"\n[[prefix.class]]";
        format!("{text}{prefix}\nname = \"{class}\"\nconnections = 7\n")
    };
    assert_eq!(limits(&own("dns")), [7, 0]);
    assert_eq!(limits(&own("rest")), [9, 7]);
    let udp = own("dns").replace("match = { ports = [80] }", "match = { protocol = \"udp\" }");
    let error = &errors(&udp.replacen("connections = 9\n", "", 1))[0];
    assert!(error.contains("no packet of this class opens a TCP connection"), "{error}");
}
