//! Ethernet frames to send, built from addresses.

use std::net::{IpAddr, SocketAddr};

use etherparse::PacketBuilder;

/// Who sends a frame to whom on a link.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// Ethernet address of the sender.
    pub source_mac: [u8; 6],
    /// Ethernet address of the receiver; a stack takes only frames with its own.
    pub destination_mac: [u8; 6],
    /// Address and port of the sender.
    pub source: SocketAddr,
    /// Address and port of the receiver, of the same family.
    pub destination: SocketAddr,
}

/// A UDP datagram with `payload` zero bytes. Over IPv4 it carries no checksum (RFC 768), so that
/// it stays valid when the generator rewrites its source.
///
/// # Panics
/// If the families differ or the payload does not fit a datagram.
#[must_use]
pub fn udp(path: &Path, payload: usize) -> Vec<u8> {
    let mut frame = Vec::new();
    ip(path)
        .udp(path.source.port(), path.destination.port())
        .write(&mut frame, &vec![0; payload])
        .expect("a Vec takes everything");
    if path.source.is_ipv4() {
        // Ethernet, an IPv4 header without options, six bytes of UDP before the checksum.
        frame[14 + 20 + 6..][..2].fill(0);
    }
    frame
}

/// A TCP segment that opens a connection. Its checksum holds for the source given here only.
///
/// # Panics
/// If the families differ.
#[must_use]
pub fn tcp_syn(path: &Path) -> Vec<u8> {
    tcp_syn_with(path, &[])
}

/// The same with data, as TCP Fast Open (RFC 7413) has it.
///
/// # Panics
/// If the families differ or the payload does not fit a segment.
#[must_use]
pub fn tcp_syn_with(path: &Path, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    ip(path)
        .tcp(path.source.port(), path.destination.port(), 1, 64240)
        .syn()
        .write(&mut frame, payload)
        .expect("a Vec takes everything");
    frame
}

/// A TCP segment of a flood that claims to belong to a connection. Its checksum holds for the source given
/// here only.
///
/// # Panics
/// If the families differ.
#[must_use]
pub fn tcp_ack(path: &Path) -> Vec<u8> {
    let mut frame = Vec::new();
    ip(path)
        .tcp(path.source.port(), path.destination.port(), 1, 64240)
        .ack(1)
        .write(&mut frame, &[])
        .expect("a Vec takes everything");
    frame
}

fn ip(path: &Path) -> etherparse::PacketBuilderStep<etherparse::IpHeaders> {
    let ethernet = PacketBuilder::ethernet2(path.source_mac, path.destination_mac);
    match (path.source.ip(), path.destination.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => ethernet.ipv4(from.octets(), to.octets(), 64),
        (IpAddr::V6(from), IpAddr::V6(to)) => ethernet.ipv6(from.octets(), to.octets(), 64),
        (from, to) => panic!("{from} and {to} are of different families"),
    }
}
