use std::sync::atomic::AtomicU64;

use proptest::prelude::*;

use super::*;
use crate::abi::KNOWN_WORDS;
use crate::hash::HashKey;
use crate::packet::{Frame, Ports, parse};

type Words = [AtomicU64; KNOWN_WORDS];

fn key() -> HashKey {
    HashKey::new([5, 0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9])
}

fn flow(remote: &str, ports: Ports, transport: Transport) -> Flow {
    let remote = remote.parse::<core::net::IpAddr>().expect("is an address").into();
    Flow { remote, remote_port: ports.source, local_port: ports.destination, transport }
}

fn dns(remote: &str, local_port: u16) -> Flow {
    flow(remote, Ports { source: 53, destination: local_port }, Transport::Udp)
}

fn is_open(words: &Words, flow: Flow, now: u64) -> bool {
    let mark = Mark::of(key().flow(&flow));
    mark.find(&words.each_ref(), flow.transport.filter(), Nanos(now)) != Seen::NOT
}

/// As the programs do: the flow is opened, and each packet that the host sends keeps it open.
fn send(words: &Words, flow: Flow, now: u64) {
    let port = Words::default();
    flow.open(&port.each_ref(), &words.each_ref(), key().flow(&flow), Nanos(now));
    assert_eq!(Flow::from_parts(flow.to_parts()), flow);
    // The port is open with it, and no other that shares its words.
    for number in (0..32).map(|low| flow.local_port & !31 | low) {
        let found =
            Mark::of_port(number).find(&port.each_ref(), flow.transport.filter(), Nanos(now));
        assert_eq!(found != Seen::NOT, number == flow.local_port);
        assert_eq!(port_place(number), port_place(flow.local_port));
    }
}

/// All that tells two flows apart is in the hash: each bit of the address, both ports, the protocol.
#[test]
fn another_flow_is_another_mark() {
    let one = dns("2001:db8::1", 40_000);
    let others = (0..128).map(|bit| {
        let address = u128::from(one.remote.high) << 64 | u128::from(one.remote.low);
        Flow { remote: core::net::Ipv6Addr::from(address ^ 1 << bit).into(), ..one }
    });
    let ports = (0..16).flat_map(|bit| {
        let (remote_port, local_port) = (one.remote_port ^ 1 << bit, one.local_port ^ 1 << bit);
        [Flow { remote_port, ..one }, Flow { local_port, ..one }]
    });
    let swapped = Flow { remote_port: one.local_port, local_port: one.remote_port, ..one };
    let rest = [Flow { transport: Transport::Tcp, ..one }, swapped, dns("192.0.2.1", 40_000)];
    let hashes: std::collections::HashSet<_> = others
        .chain(ports)
        .chain(rest)
        .chain([one])
        .map(|flow| (key().flow(&flow).place(u32::MAX), key().flow(&flow).low()))
        .collect();
    assert_eq!(hashes.len(), 128 + 32 + 3 + 1);
}

/// A connection that is used, however rarely below its generation, outlasts any number of generations;
/// once it is not, it is forgotten after one to two.
#[test]
fn a_connection_lives_while_it_is_used() {
    for (transport, idle_seconds) in [(Transport::Tcp, 540), (Transport::Udp, 34)] {
        let generation = transport.filter().lasts().0;
        assert!(generation > idle_seconds * 1_000_000_000);
        let words = Words::default();
        let it = flow("192.0.2.1", Ports { source: 443, destination: 40_000 }, transport);
        let mut now = 12_345;
        for _ in 0..50 {
            send(&words, it, now);
            now += generation - 1;
            assert!(is_open(&words, it, now), "{transport:?} at {now}");
        }
        let last = now - (generation - 1);
        assert!(!is_open(&words, it, last + 2 * generation));
    }
}

/// What is open for one protocol is not for the other, and a UDP flow ends long before a connection.
#[test]
fn the_protocols_are_apart() {
    let words = Words::default();
    let udp = dns("192.0.2.1", 40_000);
    let tcp = Flow { transport: Transport::Tcp, ..udp };
    send(&words, udp, 0);
    assert!(is_open(&words, udp, 0) && !is_open(&words, tcp, 0));
    send(&words, tcp, 0);
    let later = 2 * Filter::Datagrams.lasts().0;
    assert!(!is_open(&words, udp, later) && is_open(&words, tcp, later));
}

/// At a thousand queries per second with the shipped sizes (9 words for each of 34 s × 1,000 flows by
/// two), few forged packets that guess a port hit.
#[test]
fn a_guess_seldom_hits() {
    const WORDS: u32 = 1_000;
    let words: std::vec::Vec<Words> = (0..WORDS).map(|_| Words::default()).collect();
    let at = |flow: &Flow| &words[key().flow(flow).place(WORDS) as usize];
    let address = |number: u32| std::format!("198.51.{}.{}", number >> 8 & 0xff, number & 0xff);
    for number in 0..WORDS * 4 {
        let it = dns(&address(number), 32_768 + (number % 20_000) as u16);
        send(at(&it), it, 0);
    }
    let hits = (0..100_000_u32).filter(|number| {
        let it = dns(&address(number + 7), 32_768 + (number * 7 % 28_000) as u16);
        is_open(at(&it), it, 0)
    });
    let hits = hits.count();
    assert!(hits < 3_000, "{hits} of 100,000");
}

/// What a packet is an answer on: TCP and UDP with their ports, no fragment, nothing else.
#[test]
fn answers_are_found_by_their_headers() {
    use etherparse::PacketBuilder;
    let frame = |builder: etherparse::PacketBuilderStep<etherparse::UdpHeader>| {
        let mut frame = std::vec::Vec::new();
        builder.write(&mut frame, &[0; 32]).expect("is written");
        frame
    };
    let ip = |frame: &[u8]| {
        let Frame::Ip(packet) = parse(frame) else { panic!("no packet: {frame:?}") };
        packet
    };
    let udp = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([192, 0, 2, 1], [1; 4], 64);
    let udp = frame(udp.udp(53, 40_000));
    assert_eq!(Flow::answered_by(&ip(&udp)), Some(dns("192.0.2.1", 40_000)));
    // More fragments follow (RFC 791 §3.1).
    let mut fragment = udp.clone();
    fragment[20] |= 0x20;
    assert_eq!(Flow::answered_by(&ip(&fragment)), None);

    let mut tcp = std::vec::Vec::new();
    let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv6([7; 16], [8; 16], 64);
    builder.tcp(443, 50_000, 0, 9).ack(1).fin().write(&mut tcp, &[]).expect("is written");
    let expected = Flow {
        remote: core::net::Ipv6Addr::from([7; 16]).into(),
        remote_port: 443,
        local_port: 50_000,
        transport: Transport::Tcp,
    };
    assert_eq!(Flow::answered_by(&ip(&tcp)), Some(expected));

    let packet = ip(&udp);
    for protocol in [L4Index::other(132), L4Index::icmp(0), L4Index::tcp(0x10).fragment()] {
        assert_eq!(Flow::answered_by(&Packet { protocol, ..packet }), None);
    }
    assert_eq!(Flow::answered_by(&Packet { ports: None, ..packet }), None);
}

proptest! {
    /// A flow stays open for a generation at least, and is closed after two, whatever the time.
    #[test]
    fn flows_age(now in 0..u64::MAX / 2, port in any::<u16>(), later in 0..4_u64) {
        let words = Words::default();
        let it = dns("192.0.2.1", port);
        let generation = Filter::Datagrams.lasts().0;
        send(&words, it, now);
        prop_assert!(is_open(&words, it, now + generation));
        let then = now + later * generation;
        prop_assert_eq!(is_open(&words, it, then), then / generation - now / generation < 2);
    }
}
