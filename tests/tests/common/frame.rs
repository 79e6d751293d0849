//! Frames from their parts, valid or not.

use std::net::IpAddr;

pub(crate) const SYN: u8 = 0x02;
pub(crate) const ACK: u8 = 0x10;

/// Address `n` of 192.0.2.0/24.
pub(crate) fn v4(n: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, n])
}

/// An address in the /64 number `n`.
pub(crate) fn v6(n: u16) -> IpAddr {
    IpAddr::from([0x2001, 0xdb8, 0xaaaa, n, 0, 0, 0, 1])
}

pub(crate) fn addr(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

pub(crate) fn ethernet(kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    frame.extend(kind.to_be_bytes());
    frame.extend(payload);
    frame
}

/// The frame with VLAN tags of these kinds, the first outermost.
pub(crate) fn tagged(frame: &[u8], kinds: &[u16]) -> Vec<u8> {
    let mut tagged = frame[..12].to_vec();
    for kind in kinds {
        tagged.extend(kind.to_be_bytes());
        tagged.extend([0, 42]);
    }
    tagged.extend(&frame[12..]);
    tagged
}

/// The frame with one byte changed.
pub(crate) fn patched(mut frame: Vec<u8>, place: usize, value: u8) -> Vec<u8> {
    frame[place] = value;
    frame
}

/// The frame of an IP packet with this TTL or hop limit.
pub(crate) fn with_ttl(frame: Vec<u8>, ttl: u8) -> Vec<u8> {
    let place = if frame[12..14] == [0x08, 0x00] { 22 } else { 21 };
    patched(frame, place, ttl)
}

/// An IP packet of `protocol`.
pub(crate) fn raw(source: IpAddr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    match source {
        IpAddr::V4(_) => ipv4(source, protocol, [0, 0], 0, payload),
        IpAddr::V6(_) => ipv6(source, protocol, 64, payload),
    }
}

pub(crate) fn udp(source: IpAddr, from: u16, to: u16, payload: usize) -> Vec<u8> {
    raw(source, 17, &udp_header(from, to, payload))
}

pub(crate) fn tcp(source: IpAddr, from: u16, to: u16, flags: u8) -> Vec<u8> {
    raw(source, 6, &tcp_header(from, to, flags))
}

/// ICMP or `ICMPv6` of this type.
pub(crate) fn icmp(source: IpAddr, kind: u8) -> Vec<u8> {
    let protocol = if source.is_ipv4() { 1 } else { 58 };
    raw(source, protocol, &[kind, 0, 0, 0, 0, 1, 0, 1, 9, 9])
}

pub(crate) fn sctp(source: IpAddr, from: u16, to: u16) -> Vec<u8> {
    let mut header = from.to_be_bytes().to_vec();
    header.extend(to.to_be_bytes());
    header.extend([0; 24]);
    raw(source, 132, &header)
}

/// `ICMPv6` of a neighbour discovery type with this hop limit.
pub(crate) fn nd(source: IpAddr, kind: u8, hop_limit: u8) -> Vec<u8> {
    ipv6(
        source,
        58,
        hop_limit,
        &[kind, 0, 0, 0, 0, 0, 0, 0, 0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    )
}

/// A fragment at `offset` (in units of 8 bytes).
pub(crate) fn fragment(
    source: IpAddr,
    protocol: u8,
    offset: u16,
    more: bool,
    payload: &[u8],
) -> Vec<u8> {
    if source.is_ipv4() {
        let field = offset | if more { 0x2000 } else { 0 };
        return ipv4(source, protocol, field.to_be_bytes(), 0, payload);
    }
    let field = (offset << 3 | u16::from(more)).to_be_bytes();
    let mut whole = vec![protocol, 0, field[0], field[1], 0, 0, 0, 7];
    whole.extend(payload);
    ipv6(source, 44, 64, &whole)
}

/// UDP over IPv4 with `words` words of options.
pub(crate) fn options(source: IpAddr, words: u8, payload: &[u8]) -> Vec<u8> {
    ipv4(source, 17, [0, 0], words, payload)
}

/// An IPv6 packet with extension headers of these numbers, each of the least length, then `last`.
pub(crate) fn chain(source: IpAddr, extensions: &[u8], last: u8, payload: &[u8]) -> Vec<u8> {
    let mut whole = Vec::new();
    let next = extensions.iter().skip(1).chain([&last]);
    for (number, next) in extensions.iter().zip(next) {
        // AH counts in units of 4 bytes and takes off 2: 12 bytes with an empty check value.
        let (length, size) = if *number == 51 { (1, 12) } else { (0, 8) };
        let mut header = vec![0; size];
        header[0] = *next;
        header[1] = length;
        whole.extend(header);
    }
    whole.extend(payload);
    ipv6(source, extensions.first().copied().unwrap_or(last), 64, &whole)
}

pub(crate) fn udp_header(from: u16, to: u16, payload: usize) -> Vec<u8> {
    let mut header = from.to_be_bytes().to_vec();
    header.extend(to.to_be_bytes());
    header.extend(u16::try_from(payload + 8).expect("fits a datagram").to_be_bytes());
    header.extend([0, 0]);
    header.resize(8 + payload, 0xab);
    header
}

pub(crate) fn tcp_header(from: u16, to: u16, flags: u8) -> Vec<u8> {
    let mut header = from.to_be_bytes().to_vec();
    header.extend(to.to_be_bytes());
    header.extend([0, 0, 0, 1, 0, 0, 0, 1, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    header
}

fn ipv4(source: IpAddr, protocol: u8, fragment: [u8; 2], words: u8, payload: &[u8]) -> Vec<u8> {
    let IpAddr::V4(source) = source else { panic!("{source} is not IPv4") };
    let header = 20 + 4 * usize::from(words);
    let total = u16::try_from(header + payload.len()).expect("fits a packet").to_be_bytes();
    let mut packet = vec![
        0x45 + words,
        0,
        total[0],
        total[1],
        0,
        1,
        fragment[0],
        fragment[1],
        64,
        protocol,
        0,
        0,
    ];
    packet.extend(source.octets());
    packet.extend([192, 0, 2, 254]);
    packet.resize(header, 1);
    packet.extend(payload);
    ethernet(0x0800, &packet)
}

fn ipv6(source: IpAddr, next: u8, hop_limit: u8, payload: &[u8]) -> Vec<u8> {
    let IpAddr::V6(source) = source else { panic!("{source} is not IPv6") };
    let length = u16::try_from(payload.len()).expect("fits a packet").to_be_bytes();
    let mut packet = vec![0x60, 0, 0, 0, length[0], length[1], next, hop_limit];
    packet.extend(source.octets());
    packet.extend(std::net::Ipv6Addr::LOCALHOST.octets());
    packet.extend(payload);
    ethernet(0x86dd, &packet)
}
