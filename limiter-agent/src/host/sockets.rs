//! Open TCP connections as the kernel reports them over netlink (`sock_diag(7)`).

use std::{
    collections::{HashMap, HashSet},
    io,
    net::IpAddr,
};

use limiter_common::abi::{AddressFamily, SourceAddress};
use limiter_common::flows::{Flow, Transport};
use limiter_common::packet::Source;
use netlink_packet_core::{
    DecodeError, NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_sock_diag::{
    SockDiagMessage,
    constants::{AF_INET, AF_INET6, IPPROTO_TCP},
    inet::{ExtensionFlags, InetRequest, SocketId, StateFlags},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_SOCK_DIAG};
use nix::sys::{
    socket::{setsockopt, sockopt::ReceiveTimeout},
    time::{TimeVal, TimeValLike as _},
};
use thiserror::Error;

/// The kernel answers at once; a part of its answer that takes this many seconds does not come.
const PATIENCE: i64 = 5;

/// The most that the kernel puts into one part of its answer (`NLMSG_GOODSIZE` and the like).
const PART: usize = 64 << 10;

/// The kernel did not list its connections.
#[derive(Debug, Error)]
pub enum SocketsError {
    /// The netlink socket failed.
    #[error("cannot list TCP connections over netlink: {0}")]
    Netlink(#[from] io::Error),
    /// The kernel's answer makes no sense.
    #[error("cannot read the kernel's list of TCP connections: {0}")]
    Answer(#[from] DecodeError),
}

/// What the established TCP connections of this network namespace say, but for those on loopback.
#[derive(Debug, Default)]
pub struct Connections {
    /// Their other ends.
    pub peers: HashSet<Source>,
    /// Those that this host opened: their local port is no listener's.
    pub opened: Vec<Flow>,
    /// How many of those that others opened each source has; also those that are about to be closed, while
    /// the kernel has a socket for them.
    pub received: HashMap<Source, u32>,
}

/// All established TCP connections in this network namespace, but for loopback.
///
/// # Errors
/// [`SocketsError`] if netlink does not answer, or not in its own terms.
pub async fn connections() -> Result<Connections, SocketsError> {
    // A busy host has a million of them.
    let listing = tokio::task::spawn_blocking(list_all).await;
    listing.unwrap_or_else(|panic| Err(io::Error::other(panic).into()))
}

/// The other ends of the established TCP connections in this network namespace of which `is_meant` says so,
/// who is asked about the port at this end and the one at the other.
///
/// # Errors
/// [`SocketsError`] if netlink does not answer, or not in its own terms.
pub async fn peers_of(is_meant: fn(u16, u16) -> bool) -> Result<HashSet<IpAddr>, SocketsError> {
    let listing = tokio::task::spawn_blocking(move || {
        let mut peers = HashSet::new();
        for (family, any) in [(AF_INET, SocketId::new_v4()), (AF_INET6, SocketId::new_v6())] {
            list(family, OPEN, any, &mut |id| {
                // A listener has no other end.
                let is_peer =
                    id.destination_port != 0 && is_meant(id.source_port, id.destination_port);
                peers.extend(is_peer.then(|| id.destination_address.to_canonical()));
            })?;
        }
        Ok(peers)
    });
    listing.await.unwrap_or_else(|panic| Err(io::Error::other(panic).into()))
}

fn list_all() -> Result<Connections, SocketsError> {
    let (mut connections, mut listening) = (Connections::default(), HashSet::new());
    let mut closing: Vec<Flow> = Vec::new();
    for (family, any) in [(AF_INET, SocketId::new_v4()), (AF_INET6, SocketId::new_v6())] {
        list(family, OPEN, any.clone(), &mut |id| {
            // A listener has no other end.
            if id.destination_port == 0 {
                listening.insert(id.source_port);
            } else if let Some(flow) = flow(&id) {
                connections.peers.insert(flow.remote.into());
                connections.opened.push(flow);
            }
        })?;
        list(family, CLOSING, any, &mut |id| closing.extend(flow(&id)))?;
    }
    let received = connections.opened.iter().chain(&closing);
    for flow in received.filter(|flow| listening.contains(&flow.local_port)) {
        *connections.received.entry(flow.remote.into()).or_default() += 1;
    }
    connections.opened.retain(|flow| !listening.contains(&flow.local_port));
    Ok(connections)
}

fn flow(id: &SocketId) -> Option<Flow> {
    let address = id.destination_address.to_canonical();
    let (remote_port, local_port) = (id.destination_port, id.source_port);
    let SourceAddress { family, high, low } = address.into();
    // Link-local addresses as packets have them.
    let remote = match family {
        AddressFamily::Ipv4 => address.into(),
        AddressFamily::Ipv6 => SourceAddress::peer(high, low),
    };
    let flow = Flow { remote, remote_port, local_port, transport: Transport::Tcp };
    (!address.is_loopback()).then_some(flow)
}

/// Established, or listening.
const OPEN: StateFlags = StateFlags::ESTABLISHED.union(StateFlags::LISTEN);
/// Closed by one end, and still a socket. (Not `FIN_WAIT2`, under which the kernel also lists what is one no
/// more.)
const CLOSING: StateFlags = StateFlags::FIN_WAIT1
    .union(StateFlags::CLOSE_WAIT)
    .union(StateFlags::LAST_ACK)
    .union(StateFlags::CLOSING);

/// Calls `found` for each TCP socket of a family that is in one of the `states`.
fn list(
    family: u8,
    states: StateFlags,
    any: SocketId,
    found: &mut dyn FnMut(SocketId),
) -> Result<(), SocketsError> {
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    setsockopt(&socket, ReceiveTimeout, &TimeVal::seconds(PATIENCE)).map_err(io::Error::from)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(&request(family, states, any), 0)?;
    let mut part = vec![0; PART];
    loop {
        let length = socket.recv(&mut &mut part[..], 0)?;
        let mut rest = part.get(..length).unwrap_or_default();
        while !rest.is_empty() {
            let message = NetlinkMessage::<SockDiagMessage>::deserialize(rest)?;
            #[expect(clippy::wildcard_enum_match_arm, reason = "the enum is non-exhaustive")]
            match message.payload {
                NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(it)) => {
                    found(it.header.socket_id);
                }
                NetlinkPayload::Done(_) => return Ok(()),
                NetlinkPayload::Error(error) => return Err(error.to_io().into()),
                _ => {}
            }
            let length = usize::try_from(message.header.length).unwrap_or(usize::MAX);
            // Each message begins at a multiple of four bytes.
            rest = rest.get(length.next_multiple_of(4).max(4)..).unwrap_or_default();
        }
    }
}

fn request(family: u8, states: StateFlags, any: SocketId) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let request = SockDiagMessage::InetRequest(InetRequest {
        family,
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::empty(),
        states,
        socket_id: any,
    });
    let mut message = NetlinkMessage::new(header, request.into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn of(address: &str) -> Option<Source> {
        let destination_address = address.parse().expect("is an address");
        let id = SocketId { destination_address, ..SocketId::new_v4() };
        flow(&id).map(|flow| flow.remote.into())
    }

    #[test]
    fn peers_are_sources() {
        assert_eq!(of("192.0.2.1"), Some(Source::ipv4(0xc000_0201)));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_eq!(of("2001:db8::1"), Some(Source::ipv6(0x2001_0db8 << 32, 1)));
        for loopback in ["127.0.0.9", "::1", "::ffff:127.0.0.1"] {
            assert_eq!(of(loopback), None, "{loopback}");
        }
    }

    /// Of the two ends of a connection, the one that connected has opened it.
    #[test]
    fn a_listeners_connections_were_opened_by_others() {
        let id = |source_port, destination_port| SocketId {
            source_port,
            destination_port,
            destination_address: [192, 0, 2, 1].into(),
            ..SocketId::new_v4()
        };
        let opened = flow(&id(40_000, 443)).expect("is a flow");
        assert_eq!((opened.local_port, opened.remote_port), (40_000, 443));
    }

    /// The kernel's own list has a connection of ours, by its ports, while it lasts.
    #[test]
    fn an_open_connection_is_listed() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
        let address = listener.local_addr().expect("is bound");
        let is_listed = || {
            let mut is_listed = false;
            let mut look = |id: SocketId| is_listed |= id.destination_port == address.port();
            list(AF_INET, OPEN, SocketId::new_v4(), &mut look).expect("is answered");
            is_listed
        };
        assert!(!is_listed());
        let _connection = TcpStream::connect(address).expect("connects");
        assert!(is_listed());
        list_all().expect("both families are answered");
    }
}
