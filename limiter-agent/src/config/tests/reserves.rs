//! `[[reserve]]` and `default_reserves`.

use super::*;

const ALL: [&str; 7] = ["ssh", "bgp", "bfd", "vrrp", "dhcp", "icmp-errors", "icmpv6-errors"];

const SSH: &str = "match = { protocol = \"tcp\", ports = [22] }";

fn names(config: &Config) -> Vec<(&str, bool)> {
    config.reserves.iter().map(|reserve| (reserve.name(), reserve.built_in)).collect()
}

/// A reserve of these lines; the first is line 7.
fn with_reserve(lines: &str) -> String {
    with(&format!("[[reserve]]\n{lines}\n{PACKETS}\n"))
}

/// The built-in ones but `taken`, after `own`.
fn beside(own: &[&'static str], taken: &[&str]) -> Vec<(&'static str, bool)> {
    let rest = ALL.into_iter().filter(|name| !own.contains(name) && !taken.contains(name));
    own.iter().map(|name| (*name, false)).chain(rest.map(|name| (name, true))).collect()
}

#[test]
fn the_built_in_ones_are_there_unless_it_is_said_which() {
    let config = parse(&with("")).unwrap();
    assert_eq!(names(&config), beside(&[], &[]));
    assert_eq!(config.warnings, []);
    let from_link = config.reserves.iter().filter(|it| it.from_link).map(Reserve::name);
    assert_eq!(from_link.collect::<Vec<_>>(), ["bfd", "vrrp"]);
    for reserve in &config.reserves {
        assert!(reserve.class.new_sources.is_some() && reserve.class.unproven.is_some());
    }
    for (list, expected) in
        [("[]", vec![]), ("[\"vrrp\", \"ssh\"]", vec![("ssh", true), ("vrrp", true)])]
    {
        let text = format!("default_reserves = {list}\n{}", with(""));
        assert_eq!(names(&parse(&text).unwrap()), expected);
    }
}

#[test]
fn one_of_the_same_name_or_match_takes_the_place_of_a_built_in_one() {
    // DESIGN's example: without a name.
    let config = parse(&with_reserve(&format!("{SSH}\ninterface = \"eth0\""))).unwrap();
    assert_eq!(names(&config), beside(&["ssh"], &[]));
    let ssh = &config.reserves[0];
    assert_eq!(ssh.class.name, "reserve-ssh");
    assert_eq!(ssh.interface.as_ref().map(Pattern::as_str), Some("eth0"));
    // A tenth of 1000/s and 2000, and ten times.
    let budget = |rate, burst| Some(Budget { rate: Rate::new(rate, 1).unwrap(), burst });
    let limit = |budget: Option<Budget>| budget.map(|it| it.packets().unwrap());
    assert_eq!(limit(ssh.class.new_sources), limit(budget(100, 200)));
    assert_eq!(limit(ssh.class.unproven), limit(budget(10_000, 20_000)));

    let gtsm = "name = \"bgp\"\nmatch = { protocol = \"tcp\", ports = [179] }\nttl = 255";
    let config = parse(&with_reserve(gtsm)).unwrap();
    assert_eq!(names(&config), beside(&["bgp"], &[]));
    assert!(config.reserves[0].from_link);
    // One that takes all of a built-in one's packets leaves it nothing to do; another name for a part of
    // them does not.
    let wide = "name = \"mgmt\"\nmatch = { protocol = \"tcp\", ports = [22, 2222] }";
    assert_eq!(names(&parse(&with_reserve(wide)).unwrap()), beside(&["mgmt"], &["ssh"]));
    let bound = format!("name = \"mgmt\"\n{SSH}\ninterface = \"eth0\"");
    assert_eq!(names(&parse(&with_reserve(&bound)).unwrap()), beside(&["mgmt"], &[]));
}

#[test]
fn a_built_in_one_gives_way_to_a_class_for_the_same_packets() {
    let cases = [
        ("protocol = \"tcp\", ports = [22]", "ssh", &["ssh"][..]),
        ("protocol = \"icmp\", icmp_type = [3, 11, 12]", "icmp-errors", &["icmp-errors"]),
        ("protocol = \"icmp\", icmp_type = [0, 3, 8]", "a part of what the built-in", &[]),
    ];
    for (matcher, warned, taken) in cases {
        let config = parse(&with_match(matcher)).unwrap();
        assert_eq!(names(&config), beside(&[], taken), "{matcher}");
        let [warning] = &config.warnings[..] else { panic!("{:?}", config.warnings) };
        let text = warning.to_string();
        assert!(text.contains(warned) && text.contains("default_reserves"), "{text}");
    }
    let config = parse(&with_match("protocol = \"icmp\", icmp_type = [0, 3, 8]")).unwrap();
    let errors = config.reserves.iter().find(|it| it.name() == "icmp-errors").unwrap();
    assert_eq!(errors.class.matcher.as_ref().unwrap().to_string(), "icmp type 11-12");
    // A class that only overlaps is after the reserve.
    for matcher in ["protocol = \"icmp\"", "ports = [22, 80]", "flags = \"syn\""] {
        let config = parse(&with_match(matcher)).unwrap();
        assert_eq!((names(&config), config.warnings.len()), (beside(&[], &[]), 0), "{matcher}");
    }
}

#[test]
fn what_is_wrong_with_a_reserve() {
    let own = |lines: &str| with_reserve(&format!("name = \"own\"\n{lines}"));
    let ssh = |lines: &str| own(&format!("{SSH}\n{lines}"));
    let cases = [
        (own(""), "6:1: reserve[0] \"own\" match", "missing; add match = { protocol"),
        (
            with_reserve("match = { protocol = \"tcp\", ports = [80] }"),
            "6:1: reserve[0].name",
            "missing; add name = \"mgmt\"",
        ),
        (ssh("").replace("own", "A"), "7:8: reserve[0] \"A\" name", "write 1 to 24 of a-z"),
        (ssh("ttl = 254"), "9:7: reserve[0] \"own\" ttl", "not 254; write ttl = 255, or remove it"),
        (ssh("ttl = \"255\""), "9:7: reserve[0] \"own\" ttl", "write ttl = 255"),
        (
            ssh("interface = \"eth7\""),
            "9:13: reserve[0] \"own\" interface",
            "no [[interface]] is called \"eth7\"; write one of eth0",
        ),
        (ssh("mode = \"bypass\""), "9:1: reserve[0] \"own\" mode", "unknown key"),
        (
            ssh("").replace("packets = { rate = \"1000/s\"", "packets = { rate = \"0/s\""),
            "10:20: reserve[0] \"own\" packets.rate",
            "a rate of 0",
        ),
        (
            with(&format!("[[reserve]]\nname = \"own\"\n{SSH}\n")),
            "6:1: reserve[0] \"own\" packets",
            "missing; add packets = {",
        ),
        (
            ssh("")
                + &format!("[[reserve]]\nname = \"own\"\nmatch = {{ protocol = 9 }}\n{PACKETS}"),
            "11:1: reserve[1] \"own\"",
            "the name is already that of the reserve at line 6",
        ),
        (
            ssh("") + &format!("[[reserve]]\nname = \"b\"\n{SSH}\nttl = 255\n{PACKETS}"),
            "11:1: reserve[1] \"b\"",
            "reserve \"own\" at line 6 takes all of these packets",
        ),
        (
            with_match("protocol = \"tcp\", ports = [22]")
                + &format!("[[reserve]]\nname = \"own\"\n{SSH}\n{PACKETS}"),
            "5:9: class[0] \"dns\" match",
            "reserve \"own\" at line 10 takes all of these packets",
        ),
        (
            with_match("protocol = 9").replace("\"dns\"", "\"reserve-ssh\""),
            "4:8: class[0] \"reserve-ssh\" name",
            "are those of reserves; choose another name",
        ),
        (
            format!("default_reserves = [\"shh\"]\n{}", with("")),
            "1:21: default_reserves[0]",
            "there is no built-in reserve \"shh\"; did you mean \"ssh\"?",
        ),
        (
            format!("default_reserves = \"ssh\"\n{}", with("")),
            "1:20: default_reserves",
            "expected a list",
        ),
    ];
    for (text, place, part) in cases {
        one_error(&text, place, &[part]);
    }
}

#[test]
fn reserves_and_classes_share_the_room_for_classes() {
    let classes: Vec<_> = (0..57)
        .map(|i| format!("[[class]]\nname = \"c{i}\"\nmatch = {{ protocol = {i} }}\n{PACKETS}\n"))
        .collect();
    let classes = classes.concat();
    let text = |more: &str| {
        format!(
            "[[interface]]\nname = \"eth0\"\n{classes}{more}[[class]]\nname = \"rest\"\n{PACKETS}"
        )
    };
    // ICMP has a class here, but none names its types.
    let more = format!("[[class]]\nname = \"more\"\nmatch = {{ protocol = 99 }}\n{PACKETS}\n");
    let error = &errors(&text(&more))[0];
    assert!(error.contains("7 reserves and 59 classes are more than 64"), "{error}");
    let fewer = format!("default_reserves = [\"ssh\"]\n{}", text(&more));
    assert_eq!(names(&parse(&fewer).unwrap()), [("ssh", true)]);
}

#[test]
fn caps_on_neighbours() {
    let caps = |text: &str| {
        let Neighbours { arp, nd } = parse(&with(text)).unwrap().neighbours;
        [arp.burst, nd.burst]
    };
    let budget = |burst| format!("{{ rate = \"10/s\", burst = {burst} }}");
    assert_eq!(caps(&format!("[neighbour]\npackets = {}", budget(7))), [7, 7]);
    assert_eq!(caps(&format!("[neighbour]\nnd = {}", budget(7))), [10_000, 7]);
    assert_eq!(caps(&format!("[neighbour]\npackets = {}\narp = {}", budget(7), budget(8))), [8, 7]);
}
