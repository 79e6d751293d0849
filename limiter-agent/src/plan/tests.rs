//! Plans against naive readings of the same configuration.

mod reserves;

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use limiter_common::abi::{AddressFamily, ClassId, Exemptions, Ingress, LimitsIndex};
use limiter_common::classify::classify;
use limiter_common::packet::{Frame, Packet, parse};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::*;
use crate::config::{Block, Class, Exemption, Flags, Match, PortSet};

const FILE: &str = r#"
default_reserves = []
[[interface]]
name = "eth*"
[[class]]
name = "syn"
match = { flags = "syn,!ack" }
packets = { rate = "200/s", burst = 400 }
mode = "enforce"
[[class]]
name = "rest"
packets = { rate = "10000/s", burst = 20000 }
"#;

const WALL: SystemTime = SystemTime::UNIX_EPOCH;
const BOOTED: u64 = 1_000_000_000_000;

fn config(extra: &str) -> Config {
    Config::parse("limiter.toml", &format!("{FILE}{extra}"), WALL).unwrap()
}

fn host(names: &[&str]) -> Host {
    let interfaces = names.iter().zip(1..);
    let interfaces = interfaces.map(|(name, ifindex)| HostInterface {
        name: (*name).to_owned(),
        ifindex,
        mtu: 1500,
        bond: None,
    });
    Host {
        interfaces: interfaces.collect(),
        monotonic: Nanos(BOOTED),
        tick: Nanos(4_000_000),
        wall: WALL,
    }
}

fn planned(config: &Config) -> Plan {
    plan(config, &host(&["lo", "eth0", "eth1"]), None).unwrap()
}

#[test]
fn settings_carry_modes_ids_and_faults() {
    let mut config = config("[faults]\nmalformed = \"pass\"\ntable_full = \"drop\"");
    let settings = planned(&config).settings;
    assert_eq!(settings.class_count, 2);
    assert_eq!(settings.mode, Mode::OBSERVE);
    let [syn, rest] = [settings.classes[0], settings.classes[1]];
    assert_eq!([syn.mode, rest.mode], [Mode::ENFORCE, Mode::OBSERVE]);
    assert_eq!([syn.id, rest.id], [ClassId(1), ClassId(2)]);
    assert_eq!(rest.limits, config.classes[1].limits);
    assert_eq!(settings.drops & Reason::Malformed.bit(), 0);
    assert_ne!(settings.drops & Reason::TableFull.bit(), 0);
    assert_ne!(settings.drops & Reason::PacketRate.bit(), 0);
    assert!(!settings.need.has(Need::POLICIES) && !settings.need.has(Need::SOURCE_PORT));
    config.mode = config::Mode::Bypass;
    assert_eq!(planned(&config).settings.classes[0].mode, Mode::BYPASS, "no class withstands it");
}

#[test]
fn each_class_has_the_cheapest_clock_that_serves_all_of_its_budgets() {
    let clocks = |extra: &str| {
        let settings = planned(&config(extra)).settings;
        [settings.classes[0].clock, settings.classes[1].clock]
    };
    // Every burst of the file takes seconds to come back.
    assert_eq!(clocks(""), [Clock::COARSE; 2]);
    // 10 packets at 2,000 a second are back in 5 ms, less than two timer ticks of 4 ms.
    let own = |burst: u64| {
        format!(
            "[[prefix]]\ncidr = \"203.0.113.0/24\"\n[[prefix.class]]\nname = \"rest\"\n\
             packets = {{ rate = \"2000/s\", burst = {burst} }}"
        )
    };
    assert_eq!(clocks(&own(10)), [Clock::COARSE, Clock::FINE]);
    assert_eq!(clocks(&own(16)), [Clock::COARSE; 2]);
    let news = "[table]\nnew_sources = { rate = \"10000/s\", burst = 50 }";
    assert_eq!(clocks(news), [Clock::FINE; 2]);
}

/// A class whose buckets may be in use for longer than a source is remembered has its table asked first.
#[test]
fn a_class_whose_buckets_refill_soon_is_told_from_others() {
    let refills = |burst: u64| {
        let own = format!(
            "[[prefix]]\ncidr = \"203.0.113.0/24\"\n[[prefix.class]]\nname = \"rest\"\n\
             packets = {{ rate = \"1000/s\", burst = {burst} }}"
        );
        planned(&config(&own)).settings.classes[1].traits.has(Traits::REFILLS_UNSEEN)
    };
    // What is seen is remembered for 2³² ns.
    assert!(refills(4_294));
    assert!(!refills(4_295));
}

#[test]
fn a_byte_burst_below_a_full_frame_is_refused() {
    let config = config("");
    let text = FILE.replace(
        "burst = 20000 }",
        "burst = 20000 }\nbytes = { rate = \"1Gbit/s\", burst = 4096 }",
    );
    let bytes = Config::parse("limiter.toml", &text, WALL).unwrap();
    let mut jumbo = host(&["lo", "eth0", "eth1"]);
    jumbo.interfaces[2].mtu = 9000;
    assert!(plan(&bytes, &host(&["eth0", "eth1"]), None).is_ok());
    assert!(plan(&config, &jumbo, None).is_ok());
    let error = plan(&bytes, &jumbo, None).unwrap_err().to_string();
    assert!(error.contains("class \"rest\"") && error.contains("burst = 9014"), "{error}");
    // The loopback's MTU is larger still, but it is not guarded.
    jumbo.interfaces[2].mtu = 1500;
    jumbo.interfaces[0].mtu = 65536;
    assert!(plan(&bytes, &jumbo, None).is_ok());
}

#[test]
fn a_reload_goes_on_without_interfaces_that_are_gone() {
    let text = format!("{FILE}\n[[interface]]\nname = \"lan0\"");
    let config = Config::parse("limiter.toml", &text, WALL).unwrap();
    let before = plan(&config, &host(&["eth0", "lan0"]), None).unwrap();
    let after = plan(&config, &host(&["eth0"]), Some(&before.names)).unwrap();
    assert_eq!((before.gone, after.gone), (vec![], vec!["lan0".to_owned()]));
    assert_eq!(after.interfaces.len(), 1);
    // One that was never there is a mistake, also in a reload.
    let typo = text.replace("lan0", "lan1");
    let typo = Config::parse("limiter.toml", &typo, WALL).unwrap();
    assert!(plan(&typo, &host(&["eth0"]), Some(&before.names)).is_err());
}

#[test]
fn globs_find_interfaces_and_a_full_name_goes_first() {
    let file = FILE.replace(
        "name = \"eth*\"",
        "name = \"eth*\"\n[[interface]]\nname = \"eth1\"\nxdp = \"generic\"",
    );
    let config = Config::parse("limiter.toml", &file, WALL).unwrap();
    let plan = planned(&config);
    let guarded: Vec<_> = plan.interfaces.iter().map(|it| (it.name.as_str(), it.xdp)).collect();
    assert_eq!(guarded, [("eth0", Xdp::Native), ("eth1", Xdp::Generic)]);
    assert_eq!(plan.settings.slot(2), plan.names.slot("eth0"));
    assert_eq!(plan.settings.slot(3), plan.names.slot("eth1"));
    assert_eq!(plan.settings.slot(1), Slot::UNKNOWN);
}

#[test]
fn an_interface_that_is_not_there() {
    let error = plan(&config(""), &host(&["lo", "ens5"]), None).unwrap_err().to_string();
    assert!(error.starts_with("limiter.toml:3: this host has no interface \"eth*\""), "{error}");
    assert!(error.contains("it has lo, ens5: write one of these"), "{error}");
    let exempt = "[[exempt]]\ncidr = \"10.0.0.0/8\"\nowner = \"x\"\ninterface = \"eth7\"";
    let error = plan(&config(exempt), &host(&["eth0"]), None).unwrap_err().to_string();
    assert!(
        error.starts_with("limiter.toml:13: nothing that is guarded is called \"eth7\""),
        "{error}"
    );
    let many: Vec<_> = (0..32).map(|i| format!("eth{i}")).collect();
    let many: Vec<_> = many.iter().map(String::as_str).collect();
    let error = plan(&config(""), &host(&many), None).unwrap_err().to_string();
    assert!(error.contains("match 32 interfaces and at most 31"), "{error}");
}

#[test]
fn numbers_stay_and_a_larger_configuration_needs_a_restart() {
    let first = planned(&config(""));
    let renamed = FILE.replace("\"syn\"", "\"handshake\"");
    let renamed = Config::parse("limiter.toml", &renamed, WALL).unwrap();
    let second = plan(&renamed, &host(&["eth1"]), Some(&first.names)).unwrap();
    assert_eq!(second.names.class("rest"), ClassId(2));
    assert_eq!(second.names.class("handshake"), ClassId(3));
    assert_eq!(second.names.slot("eth1"), first.names.slot("eth1"));
    assert_eq!(second.fits(&first.sizes), Ok(()));
    assert_eq!(first.sizes.counters.classes, 17);
    assert_eq!(first.sizes.counters.slots, 5);

    let block = |i| format!("[[block]]\ncidr = \"10.0.{}.{}\"", i / 256, i % 256);
    let blocks = (0..1100).map(block).collect::<Vec<_>>().join("\n");
    let many = plan(&config(&blocks), &host(&["eth0"]), Some(&first.names)).unwrap();
    assert_eq!(many.prefixes.len(), 1100);
    assert_eq!(many.policies.len(), 1, "equal policies share a record");
    let error = many.fits(&first.sizes).unwrap_err().to_string();
    assert!(error.contains("room for 1024") && error.contains("restart the agent"), "{error}");
    assert_eq!(many.fits(&many.sizes), Ok(()));
    let larger = planned(&config("[table]\nipv4_sources = 4096"));
    let error = larger.fits(&first.sizes).unwrap_err().to_string();
    assert!(error.contains("ipv4_sources is 4096") && error.contains("1000000"), "{error}");
}

#[test]
fn expiry_is_on_the_clock_of_the_datapath() {
    let config = config(
        "[[block]]\ncidr = \"10.0.0.0/8\"\nexpires = 1970-01-02T00:01:00Z\n[[block]]\ncidr = \
         \"11.0.0.0/8\"\n[[block]]\ncidr = \"12.0.0.0/8\"\nexpires = 1970-01-01T23:59:59Z",
    );
    let mut host = host(&["eth0"]);
    host.wall = WALL + Duration::from_hours(24);
    let plan = plan(&config, &host, None).unwrap();
    let until: Vec<_> = plan.policies.iter().map(|policy| policy.blocked_until).collect();
    assert_eq!(until, [Nanos(BOOTED + 60_000_000_000), Nanos::NEVER]);
    assert_eq!(plan.prefixes.len(), 2, "what has ended has no record");
    assert!(plan.settings.need.has(Need::POLICIES));
}

proptest! {
    #[test]
    fn every_interface_finds_its_slot(indexes in prop::collection::hash_set(1..1_u32 << 31, 1..31)) {
        let places: Vec<_> = indexes.iter().zip(1..).map(|(ifindex, slot)| Ingress {
            ifindex: *ifindex, slot: Slot(slot),
        }).collect();
        let (multiplier, table) = interfaces::ingress(&places).unwrap();
        for known in &places {
            prop_assert_eq!(table[Ingress::place(known.ifindex, multiplier)], *known);
        }
    }
}

#[test]
fn members_of_a_guarded_bond_have_its_slot_unless_they_have_their_own() {
    let config = config("[[interface]]\nname = \"bond0\"\n[[interface]]\nname = \"leg1\"");
    let mut host = host(&["eth0", "bond0", "leg1", "leg2", "leg3"]);
    for (member, bond) in [(2, 2), (3, 2), (4, 77)] {
        host.interfaces[member].bond = Some(bond);
    }
    let plan = plan(&config, &host, None).unwrap();
    let slot = |ifindex| {
        let known =
            plan.settings.ingress[Ingress::place(ifindex, plan.settings.ingress_multiplier)];
        if known.ifindex == ifindex { known.slot } else { Slot::UNKNOWN }
    };
    let (bond, leg) = (plan.names.slot("bond0"), plan.names.slot("leg1"));
    assert_eq!([2, 3, 4, 5].map(slot), [bond, leg, bond, Slot::UNKNOWN]);
}

/// A packet, before it is bytes.
#[derive(Clone, Debug)]
struct Sent {
    protocol: u8,
    /// Offset in units of 8 bytes, and whether more follow.
    fragment: (u8, bool),
    source_port: u16,
    destination_port: u16,
    flags: u8,
    kind: u8,
    payload: usize,
}

impl Sent {
    fn frame(&self) -> Vec<u8> {
        let mut frame = vec![0; 34 + self.payload];
        frame[12..14].copy_from_slice(&[0x08, 0x00]);
        frame[14] = 0x45;
        let total = u16::try_from(20 + self.payload).unwrap();
        frame[16..18].copy_from_slice(&total.to_be_bytes());
        frame[20] = u8::from(self.fragment.1) << 5;
        frame[21] = self.fragment.0;
        frame[23] = self.protocol;
        match self.protocol {
            1 | 58 => frame[34] = self.kind,
            _ => {
                frame[34..36].copy_from_slice(&self.source_port.to_be_bytes());
                frame[36..38].copy_from_slice(&self.destination_port.to_be_bytes());
            }
        }
        frame[46] = 0x50;
        frame[47] = self.flags;
        frame
    }

    /// Whether it belongs to a class with this match, read word for word.
    fn belongs(&self, matcher: &Match) -> bool {
        let first = self.fragment.0 == 0;
        let has_ports = first && [6, 17, 132].contains(&self.protocol);
        let is_tcp = first && self.protocol == 6;
        let is_icmp = first && [1, 58].contains(&self.protocol);
        let fragment = !first || self.fragment.1;
        (matcher.protocols.is_empty() || matcher.protocols.contains(&self.protocol))
            && matcher
                .ports
                .as_ref()
                .is_none_or(|set| has_ports && set.contains(self.destination_port))
            && matcher
                .source_ports
                .as_ref()
                .is_none_or(|set| has_ports && set.contains(self.source_port))
            && matcher.flags.is_none_or(|flags| {
                is_tcp && self.flags & flags.set == flags.set && self.flags & flags.clear == 0
            })
            && (matcher.icmp_types.is_empty() || is_icmp && matcher.icmp_types.contains(&self.kind))
            && matcher.fragment.is_none_or(|wanted| wanted == fragment)
            && matcher.max_bytes.is_none_or(|most| 34 + self.payload <= usize::from(most))
    }
}

fn protocol() -> impl Strategy<Value = u8> {
    prop::sample::select(vec![1, 6, 17, 47, 58, 132])
}

fn port_set() -> impl Strategy<Value = Option<PortSet>> {
    let range = (0_u16..40, 0_u16..8).prop_map(|(low, more)| low..=low + more);
    option::weighted(0.3, vec(range, 1..4).prop_map(PortSet::new))
}

fn matcher() -> impl Strategy<Value = Match> {
    let flags = (0_u8..8, 0_u8..8).prop_map(|(set, clear)| Flags { set, clear: clear & !set });
    (
        vec(protocol(), 0..4),
        port_set(),
        port_set(),
        option::weighted(0.2, flags),
        prop_oneof![4 => Just(Vec::new()), 1 => vec(0_u8..4, 1..3)],
        option::weighted(0.2, any::<bool>()),
        option::weighted(0.3, 60_u16..100),
    )
        .prop_map(
            |(protocols, ports, source_ports, flags, icmp_types, fragment, max_bytes)| Match {
                protocols,
                ports,
                source_ports,
                flags,
                icmp_types,
                fragment,
                max_bytes,
            },
        )
}

fn sent() -> impl Strategy<Value = Sent> {
    let fragment = prop_oneof![
        3 => Just((0, false)),
        1 => (0_u8..3, any::<bool>()),
    ];
    (protocol(), fragment, 0_u16..50, 0_u16..50, 0_u8..8, 0_u8..4, 20_usize..80).prop_map(
        |(protocol, fragment, source_port, destination_port, flags, kind, payload)| Sent {
            protocol,
            fragment,
            source_port,
            destination_port,
            flags,
            kind,
            payload,
        },
    )
}

/// The configuration with these matches in front of the catch-all.
fn classes(matchers: &[Match]) -> Vec<Class> {
    let rest = config("").classes.pop().unwrap();
    let named = |(i, matcher): (usize, &Match)| Class {
        name: format!("c{i}"),
        matcher: Some(matcher.clone()),
        ..rest.clone()
    };
    matchers.iter().enumerate().map(named).chain([rest.clone()]).collect()
}

fn packet(frame: &[u8]) -> Packet {
    match parse(frame) {
        Frame::Ip(packet) => packet,
        Frame::NonIp | Frame::Neighbour(_) | Frame::Malformed(_) => panic!("{frame:x?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn tables_classify_as_the_rules_read(
        matchers in vec(matcher(), 0..12),
        packets in vec(sent(), 1..200),
    ) {
        let mut config = config("");
        config.classes = classes(&matchers);
        let settings = planned(&config).settings;
        for sent in &packets {
            let frame = sent.frame();
            let naive = matchers.iter().position(|matcher| sent.belongs(matcher));
            let expected = Some(naive.unwrap_or(matchers.len()));
            prop_assert_eq!(classify(&settings, &packet(&frame), Slot::UNKNOWN), expected, "{:?}", sent);
        }
    }
}

#[test]
fn sixty_four_classes_use_every_bit() {
    let matchers: Vec<_> = (0..63)
        .map(|port| Match {
            protocols: vec![17],
            ports: Some(PortSet::new(vec![port..=port])),
            source_ports: None,
            flags: None,
            icmp_types: Vec::new(),
            fragment: None,
            max_bytes: None,
        })
        .collect();
    let mut config = config("");
    config.classes = classes(&matchers);
    let settings = planned(&config).settings;
    for port in 0..64 {
        let sent = Sent {
            protocol: 17,
            fragment: (0, false),
            source_port: 0,
            destination_port: port,
            flags: 0,
            kind: 0,
            payload: 26,
        };
        assert_eq!(
            classify(&settings, &packet(&sent.frame()), Slot::UNKNOWN),
            Some(usize::from(port))
        );
    }
}

/// An entry of a random configuration.
#[derive(Clone, Debug)]
enum Entry {
    Prefix(IpNet, u32),
    Block(IpNet, Option<u64>),
    Exempt(IpNet, Option<&'static str>, Option<u64>),
}

/// Networks of a small world, so that they nest.
fn net() -> impl Strategy<Value = IpNet> {
    let v4 = (0_u32..64, 24_u8..=32)
        .prop_map(|(low, length)| IpNet::new(v4(low), length).unwrap().trunc());
    let v6 = (0_u128..64, 56_u8..=64)
        .prop_map(|(low, length)| IpNet::new(v6(low), length).unwrap().trunc());
    let all = prop::sample::select(vec!["0.0.0.0/0", "::/0", "10.0.0.0/8"])
        .prop_map(|net| net.parse().unwrap());
    prop_oneof![4 => v4, 4 => v6, 1 => all]
}

fn v4(low: u32) -> IpAddr {
    IpAddr::V4((0x0a00_0000 + low).into())
}

fn v6(low: u128) -> IpAddr {
    IpAddr::V6(((0x2001_0db8 << 96) + (low << 64)).into())
}

fn entry() -> impl Strategy<Value = Entry> {
    let ends = || option::of(0_u64..4);
    let interface = prop::sample::select(vec![None, Some("eth0"), Some("eth*")]);
    prop_oneof![
        (net(), 1_u32..4).prop_map(|(net, scale)| Entry::Prefix(net, scale)),
        (net(), ends()).prop_map(|(net, ends)| Entry::Block(net, ends)),
        (net(), interface, ends()).prop_map(|(net, on, ends)| Entry::Exempt(net, on, ends)),
    ]
}

/// Seconds after [`WALL`]; 0 has ended.
fn at(ends: Option<u64>) -> Option<SystemTime> {
    ends.map(|seconds| WALL + Duration::from_secs(seconds))
}

fn with_entries(entries: &[Entry]) -> Config {
    let mut config = config("");
    let mut prefixes = HashMap::new();
    for entry in entries {
        match entry.clone() {
            Entry::Prefix(cidr, scale) => {
                let scaled = |class: &Class| class.allowance.packets.unwrap().times(scale).unwrap();
                let limits = config.classes.iter().map(|class| Limits {
                    packets: scaled(class).packets().unwrap(),
                    ..Limits::NONE
                });
                let limits = limits.collect();
                let (owner, comment) = (None, None);
                let scale = Some(scale);
                prefixes.insert(cidr, config::Prefix { cidr, scale, limits, owner, comment });
            }
            Entry::Block(cidr, ends) => {
                config.blocks.push(Block { cidr, expires: at(ends), reason: None });
            }
            Entry::Exempt(cidr, interface, ends) => config.exemptions.push(Exemption {
                cidr,
                interface: interface.map(Pattern::new),
                owner: String::new(),
                expires: at(ends),
                line: 1,
            }),
        }
    }
    config.prefixes = prefixes.into_values().collect();
    config
}

/// What a longest-prefix match finds.
fn look_up(plan: &Plan, address: IpAddr) -> Option<&Policy> {
    let covers = |prefix: &&Prefix| {
        let SourceAddress { family, high, low } = prefix.address;
        let net = match family {
            AddressFamily::Ipv4 => IpAddr::from(((high >> 32) as u32).to_be_bytes()),
            AddressFamily::Ipv6 => {
                IpAddr::from((u128::from(high) << 64 | u128::from(low)).to_be_bytes())
            }
        };
        IpNet::new(net, u8::try_from(prefix.bits).unwrap()).unwrap().contains(&address)
    };
    let found = plan.prefixes.iter().filter(covers).max_by_key(|prefix| prefix.bits)?;
    plan.policies.get(usize::try_from(found.policy.0).unwrap() - 1)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn one_match_finds_all_that_is_said_about_a_source(entries in vec(entry(), 0..24)) {
        let config = with_entries(&entries);
        let plan = planned(&config);
        for address in (0..80).flat_map(|low| [v4(low), v6(low.into())]) {
            agrees(&config, &plan, address)?;
        }
    }
}

/// Whether the plan holds for `address` what all networks around it say.
fn agrees(config: &Config, plan: &Plan, address: IpAddr) -> Result<(), TestCaseError> {
    let none = Policy::new(Nanos(0), Exemptions::NONE, LimitsIndex::CLASS);
    let policy = look_up(plan, address).unwrap_or(&none);
    let latest = |ends: &mut dyn Iterator<Item = Option<SystemTime>>| {
        let end = |expires: Option<SystemTime>| match expires {
            None => Nanos::NEVER,
            Some(time) if time <= WALL => Nanos(0),
            Some(time) => {
                let left = time.duration_since(WALL).unwrap().as_nanos();
                Nanos(BOOTED + u64::try_from(left).unwrap())
            }
        };
        ends.map(end).max().unwrap_or(Nanos(0))
    };

    let blocks = config.blocks.iter().filter(|block| block.cidr.contains(&address));
    let expected = latest(&mut blocks.map(|block| block.expires));
    prop_assert_eq!(policy.blocked_until, expected);

    for (name, slot) in [("eth0", 1), ("eth1", 2), ("unguarded", 0), ("unguarded", 31)] {
        let exemptions = config.exemptions.iter().filter(|it| it.cidr.contains(&address));
        let here = exemptions.filter(|it| it.interface.as_ref().is_none_or(|on| on.matches(name)));
        let until = latest(&mut here.map(|it| it.expires));
        for now in (0..6).map(|second| Nanos(BOOTED + second * 1_000_000_000)) {
            prop_assert_eq!(policy.exempt.holds(Slot(slot), now), now < until, "{}", name);
        }
    }

    let prefixes = config.prefixes.iter().filter(|prefix| prefix.cidr.contains(&address));
    match prefixes.max_by_key(|prefix| prefix.cidr.prefix_len()) {
        None => prop_assert_eq!(policy.limits, LimitsIndex::CLASS),
        Some(prefix) => {
            let first = usize::try_from(policy.limits.0).unwrap();
            prop_assert_eq!(&plan.limits[first..first + 2], &prefix.limits[..]);
        }
    }
    Ok(())
}
