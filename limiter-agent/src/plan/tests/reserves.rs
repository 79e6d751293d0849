//! What reserves become.

use super::*;

/// The class of a frame with this TTL, to this port of UDP, that arrives on `slot`.
fn class_of(plan: &Plan, slot: Slot, ttl: u8, port: u16) -> ClassId {
    let sent = Sent {
        protocol: 17,
        fragment: (0, false),
        source_port: 9,
        destination_port: port,
        flags: 0,
        kind: 0,
        payload: 40,
    };
    let mut frame = sent.frame();
    frame[22] = ttl;
    let order = classify(&plan.settings, &packet(&frame), slot).unwrap();
    plan.settings.classes[order].id
}

#[test]
fn reserves_are_before_all_classes_where_interface_and_ttl_allow() {
    let text = FILE.replace("default_reserves = []", "default_reserves = [\"bfd\"]")
        + r#"
[[reserve]]
name = "near"
match = { protocol = "udp", ports = [7] }
interface = "eth1"
packets = { rate = "1000/s", burst = 2000 }
[[prefix]]
cidr = "203.0.113.0/24"
scale = 2
"#;
    let config = Config::parse("limiter.toml", &text, WALL).unwrap();
    let plan = planned(&config);
    assert!(plan.settings.need.has(Need::INTERFACE));
    let id = |name: &str| plan.names.class(name);
    assert_eq!([id("syn"), id("rest")], [ClassId(1), ClassId(2)], "as without reserves");
    let [eth0, eth1] = ["eth0", "eth1"].map(|name| plan.names.slot(name));
    for (slot, ttl, port, name) in [
        (eth0, 255, 3784, "reserve-bfd"),
        (eth0, 254, 3784, "rest"),
        (eth0, 1, 3784, "rest"),
        (eth0, 255, 3785, "rest"),
        (Slot::UNKNOWN, 255, 3784, "reserve-bfd"),
        (eth1, 64, 7, "reserve-near"),
        (eth0, 64, 7, "rest"),
        (Slot::UNKNOWN, 255, 7, "rest"),
    ] {
        assert_eq!(class_of(&plan, slot, ttl, port), id(name), "{slot:?} {ttl} {port}");
    }
    // A prefix's limits are those of classes: a reserve keeps its own.
    let own: Vec<_> = config.rules().map(|class| class.limits).collect();
    assert_eq!(plan.limits[..2], own[..2]);
    assert_ne!(plan.limits[2], own[2]);
    let near = &plan.settings.classes[0];
    assert!(near.traits.has(Traits::RESERVED));
    assert!(near.ceilings.iter().all(|ceiling| !ceiling.is_limited()));
    assert!(!plan.settings.classes[2].traits.has(Traits::RESERVED));
    // Without them nothing more is looked at.
    let without = planned(&super::config("")).settings;
    assert!(!without.need.has(Need::INTERFACE) && without.routed == u64::MAX);
}

#[test]
fn a_reserve_that_would_hold_nowhere_is_refused() {
    let text = format!(
        "{FILE}[[reserve]]\nname = \"near\"\nmatch = {{ protocol = 9 }}\ninterface = \"eth9*\"\n\
         packets = {{ rate = \"10/s\", burst = 20 }}"
    );
    let config = Config::parse("limiter.toml", &text, WALL).unwrap();
    let error = plan(&config, &host(&["eth0"]), None).unwrap_err().to_string();
    assert!(error.contains("limiter.toml:13: ") && error.contains("the reserve would"), "{error}");
}
