//! Parsing against arbitrary bytes and against frames built by another library.

use std::vec::Vec;

use etherparse::{
    EtherType, Ethernet2Header, IpFragOffset, IpNumber, Ipv4Header, Ipv4Options, Ipv6FlowLabel,
    Ipv6FragmentHeader, Ipv6Header, PacketBuilder, TcpHeader, UdpHeader,
};
use proptest::prelude::*;

use super::*;

const IPV4: [u8; 4] = [198, 51, 100, 7];
const IPV6: [u8; 16] = [0x20, 1, 0xd, 0xb8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];

fn ethernet(kind: EtherType) -> Vec<u8> {
    let mut frame = Vec::new();
    Ethernet2Header { source: [2; 6], destination: [4; 6], ether_type: kind }
        .write(&mut frame)
        .unwrap();
    frame
}

fn ip(frame: &[u8]) -> Packet {
    let Frame::Ip(packet) = parse(frame) else { panic!("{:?}", parse(frame)) };
    packet
}

fn udp() -> Vec<u8> {
    let mut segment = Vec::new();
    UdpHeader { source_port: 5000, destination_port: 53, length: 8, checksum: 0 }
        .write(&mut segment)
        .unwrap();
    segment
}

/// An IPv6 frame whose extension headers are the given `(number, bytes)` and whose payload is UDP.
fn ipv6_chain(extensions: &[(u8, Vec<u8>)]) -> Vec<u8> {
    let mut payload = Vec::new();
    let mut numbers: Vec<u8> = extensions.iter().map(|(number, _)| *number).collect();
    numbers.push(17);
    for ((_, bytes), next) in extensions.iter().zip(&numbers[1..]) {
        let mut bytes = bytes.clone();
        bytes[0] = *next;
        payload.extend(bytes);
    }
    payload.extend(udp());
    let mut frame = ethernet(EtherType::IPV6);
    Ipv6Header {
        traffic_class: 0,
        flow_label: Ipv6FlowLabel::ZERO,
        payload_length: u16::try_from(payload.len()).unwrap(),
        next_header: IpNumber(numbers[0]),
        hop_limit: 64,
        source: IPV6,
        destination: [1; 16],
    }
    .write(&mut frame)
    .unwrap();
    frame.extend(payload);
    frame
}

fn extension() -> impl Strategy<Value = (u8, Vec<u8>)> {
    let options = (prop_oneof![Just(0_u8), Just(43), Just(60), Just(135)], 0..4_u8).prop_map(
        |(number, length)| {
            let mut bytes = std::vec![0; (usize::from(length) + 1) * 8];
            bytes[1] = length;
            (number, bytes)
        },
    );
    let authentication = (2..6_u8).prop_map(|length| {
        let mut bytes = std::vec![0; (usize::from(length) + 2) * 4];
        bytes[1] = length;
        (51, bytes)
    });
    prop_oneof![options, authentication]
}

proptest! {
    /// No bytes make the parser panic or read beyond the frame.
    #[test]
    fn any_bytes_are_parsed(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        parse(bytes.as_slice());
    }

    /// The same with plausible beginnings, which get further.
    #[test]
    fn any_ip_is_parsed(v6 in any::<bool>(), bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut frame = ethernet(if v6 { EtherType::IPV6 } else { EtherType::IPV4 });
        frame.extend(bytes);
        if let Some(version) = frame.get_mut(14) {
            *version = if v6 { 0x60 } else { 0x40 | *version & 0xf };
        }
        parse(frame.as_slice());
    }

    /// Extension headers in any order and number up to the bound lead to the ports.
    #[test]
    fn extensions_are_walked(extensions in prop::collection::vec(extension(), 0..=8)) {
        let frame = ipv6_chain(&extensions);
        let packet = ip(&frame);
        prop_assert_eq!(packet.ports, Some(Ports { source: 5000, destination: 53 }));
        prop_assert_eq!(packet.protocol, L4Index::other(17));
        prop_assert_eq!(packet.source, Source { space: Space::Ipv6, bits: 0x2001_0db8_0102_0304 });
        // A frame cut short anywhere behind its addresses is malformed, never something else.
        for length in 54..frame.len() {
            prop_assert_eq!(parse(&frame[..length]), Frame::Malformed(Family::Ipv6));
        }
        // A payload length that ends inside the chain or the UDP header is malformed as well, and
        // never read past.
        let payload = frame.len() - 54;
        for length in 0..payload {
            let mut cut = frame.clone();
            cut[18..20].copy_from_slice(&u16::try_from(length).unwrap().to_be_bytes());
            prop_assert_eq!(parse(cut.as_slice()), Frame::Malformed(Family::Ipv6));
        }
    }

    /// IPv4 with any options.
    #[test]
    fn ipv4_options_are_skipped(words in 0..=10_usize, tcp in any::<bool>(), flags in any::<u8>()) {
        let mut segment = Vec::new();
        if tcp {
            TcpHeader::new(443, 80, 1, 1).write(&mut segment).unwrap();
            segment[13] = flags;
        } else {
            segment = udp();
        }
        let number = if tcp { IpNumber::TCP } else { IpNumber::UDP };
        let mut header =
            Ipv4Header::new(u16::try_from(segment.len()).unwrap(), 64, number, IPV4, [1; 4]).unwrap();
        header.options = Ipv4Options::try_from(std::vec![1_u8; words * 4].as_slice()).unwrap();
        header.set_payload_len(segment.len()).unwrap();
        let mut frame = ethernet(EtherType::IPV4);
        header.write(&mut frame).unwrap();
        frame.extend(segment);
        let packet = ip(&frame);
        prop_assert_eq!(packet.source, Source::ipv4(u32::from_be_bytes(IPV4)));
        if tcp {
            prop_assert_eq!(packet.protocol, L4Index::tcp(flags));
            prop_assert_eq!(packet.ports, Some(Ports { source: 443, destination: 80 }));
        } else {
            prop_assert_eq!(packet.ports, Some(Ports { source: 5000, destination: 53 }));
        }
        for length in 14..frame.len() {
            prop_assert_eq!(parse(&frame[..length]), Frame::Malformed(Family::Ipv4));
        }
    }

    /// A non-first fragment has no ports, whatever its bytes say.
    #[test]
    fn later_fragments_have_no_ports(offset in 1..8191_u16, more in any::<bool>(), body in any::<[u8; 16]>()) {
        let mut header = Ipv4Header::new(16, 64, IpNumber::TCP, IPV4, [1; 4]).unwrap();
        header.fragment_offset = IpFragOffset::try_new(offset).unwrap();
        header.more_fragments = more;
        let mut frame = ethernet(EtherType::IPV4);
        header.write(&mut frame).unwrap();
        frame.extend(body);
        let packet = ip(&frame);
        prop_assert_eq!(packet.ports, None);
        prop_assert_eq!(packet.protocol, L4Index::other(6).fragment());

        let mut bytes = Vec::new();
        Ipv6FragmentHeader::new(IpNumber::UDP, IpFragOffset::try_new(offset).unwrap(), more, 7)
            .write(&mut bytes)
            .unwrap();
        let packet = ip(&ipv6_chain(&[(44, bytes)]));
        prop_assert_eq!(packet.ports, None);
        prop_assert_eq!(packet.protocol, L4Index::other(17).fragment());
    }
}

#[test]
fn a_first_fragment_has_its_ports_and_is_a_fragment() {
    let mut bytes = Vec::new();
    Ipv6FragmentHeader::new(IpNumber::UDP, IpFragOffset::ZERO, true, 7).write(&mut bytes).unwrap();
    let packet = ip(&ipv6_chain(&[(44, bytes)]));
    assert_eq!(packet.ports, Some(Ports { source: 5000, destination: 53 }));
    assert_eq!(packet.protocol, L4Index::other(17).fragment());
}

#[test]
fn an_atomic_fragment_is_a_whole_packet() {
    let mut bytes = Vec::new();
    Ipv6FragmentHeader::new(IpNumber::UDP, IpFragOffset::ZERO, false, 7).write(&mut bytes).unwrap();
    assert_eq!(ip(&ipv6_chain(&[(44, bytes)])).protocol, L4Index::other(17));
}

#[test]
fn nine_extensions_are_malformed() {
    let hop = std::vec![0_u8; 8];
    let frame = ipv6_chain(&std::vec![(60_u8, hop); 9]);
    assert_eq!(parse(frame.as_slice()), Frame::Malformed(Family::Ipv6));
}

#[test]
fn tags_are_looked_through_up_to_two() {
    let plain = ipv6_chain(&[]);
    let tag = |frame: &[u8], kind: [u8; 2]| {
        let mut tagged = frame[..12].to_vec();
        tagged.extend(kind);
        tagged.extend([0, 42]);
        tagged.extend(&frame[12..]);
        tagged
    };
    let one = tag(&plain, [0x81, 0]);
    let two = tag(&one, [0x88, 0xa8]);
    let three = tag(&two, [0x81, 0]);
    let longer = |bytes| Packet { length: ip(&plain).length + bytes, ..ip(&plain) };
    assert_eq!(ip(&one), longer(4));
    assert_eq!(ip(&two), longer(8));
    assert_eq!(parse(three.as_slice()), Frame::Malformed(Family::Other));
    assert_eq!(parse(&two[..17]), Frame::Malformed(Family::Other));
    assert_eq!(parse(&plain[..13]), Frame::Malformed(Family::Other));
}

#[test]
fn padding_behind_a_short_packet_is_not_part_of_it() {
    let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4(IPV4, [1; 4], 64).udp(1, 2);
    let mut frame = Vec::new();
    builder.write(&mut frame, &[]).unwrap();
    frame.resize(60, 0);
    assert_eq!(ip(&frame).ports, Some(Ports { source: 1, destination: 2 }));
    // The UDP header lies in the padding, not in the packet.
    frame[16..18].copy_from_slice(&27_u16.to_be_bytes());
    assert_eq!(parse(frame.as_slice()), Frame::Malformed(Family::Ipv4));
}

#[test]
fn tcp_headers_are_checked_for_their_own_length() {
    let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4(IPV4, [1; 4], 64).tcp(1, 2, 0, 9);
    let mut frame = Vec::new();
    builder.write(&mut frame, &[]).unwrap();
    assert_eq!(ip(&frame).protocol, L4Index::tcp(0));
    for data_offset in [0x40, 0x60, 0xf0] {
        frame[46] = data_offset;
        assert_eq!(parse(frame.as_slice()), Frame::Malformed(Family::Ipv4));
    }
}

#[test]
fn sources_have_spaces_of_their_own() {
    let of = |address: &str| Source::from(address.parse::<std::net::IpAddr>().unwrap());
    assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:ffff::9"));
    assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
    assert_eq!(of("fe80::1"), Source { space: Space::LinkLocal, bits: 1 });
    assert_eq!(of("febf::1").space, Space::LinkLocal);
    assert_eq!(of("fec0::1").space, Space::Ipv6);
    assert_eq!(of("64:ff9b::192.0.2.1"), Source { space: Space::Nat64, bits: 0xc000_0201 });
    assert_eq!(of("64:ff9b::1:192.0.2.1").space, Space::Ipv6);
    assert_eq!(of("2002:c000:201:5::9"), Source { space: Space::SixToFour, bits: 0xc000_0201 });
    assert_ne!(of("64:ff9b::192.0.2.1"), Source::ipv4(0xc000_0201));
}

/// Whoever connected is the same source as the packets it sends.
#[test]
fn a_sockets_peer_is_the_source_of_its_packets() {
    let address = |text: &str| text.parse::<std::net::IpAddr>().expect("is an address");
    let peer = |text: &str| {
        let SourceAddress { high, low, .. } = address(text).into();
        Source::from(SourceAddress::peer(high, low))
    };
    assert_eq!(peer("::ffff:192.0.2.1"), Source::ipv4(0xc000_0201));
    for text in ["2001:db8::1", "fe80::7", "64:ff9b::c000:201", "2002:c000:201::1", "::1"] {
        assert_eq!(peer(text), Source::from(address(text)), "{text}");
    }
}
