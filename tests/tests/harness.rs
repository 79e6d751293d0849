//! The harness itself: what it says it sends is what arrives.

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use anyhow::Result;
use limiter_tests::{
    frames,
    generator::{Counter, Flood, Generator, Order, Sources, Verdict},
    netns::{Interface, Netns, VethOptions, veth},
};

fn pair() -> Result<(Interface, Interface)> {
    let (client, server) = veth(
        (&Netns::new("client")?, "client0"),
        (&Netns::new("server")?, "server0"),
        VethOptions::default(),
    )?;
    for (interface, host) in [(&client, 1), (&server, 2)] {
        interface.add_address(&format!("192.0.2.{host}/24"))?;
        interface.add_address(&format!("2001:db8::{host}/64"))?;
    }
    Ok((client, server))
}

fn path(client: &Interface, server: &Interface, source: &str, destination: &str) -> frames::Path {
    frames::Path {
        source_mac: client.mac,
        destination_mac: server.mac,
        source: SocketAddr::new(source.parse().unwrap(), 40000),
        destination: SocketAddr::new(destination.parse().unwrap(), 9),
    }
}

#[test]
fn every_frame_arrives_on_both_cpus() -> Result<()> {
    let (client, server) = pair()?;
    let counter = Counter::attach(&server, Verdict::Drop)?;
    let mut generator = Generator::new(&client)?;
    let frame = frames::udp(&path(&client, &server, "192.0.2.1", "192.0.2.2"), 18);

    let flood = Flood::new(frame, 100_000.0, Duration::from_secs(1)).cpus([0, 1]);
    let before = counter.per_cpu()?;
    let sent = generator.flood(&flood)?;
    let after = counter.per_cpu()?;

    let seen: Vec<u64> = after
        .iter()
        .zip(before)
        .map(|(after, before)| after - before)
        .collect();
    eprintln!("{sent:?}, seen {seen:?}");
    assert_eq!(seen.iter().sum::<u64>(), sent.arrived());
    assert!(
        seen.iter().all(|&seen| seen > 40_000),
        "both rings take their share: {seen:?}"
    );
    assert!(sent.total() > 90_000, "{}", sent.total());
    assert!(sent.total() <= 100_002, "{}", sent.total());
    Ok(())
}

#[test]
fn a_number_of_frames_is_kept_exactly() -> Result<()> {
    let (client, server) = pair()?;
    let counter = Counter::attach(&server, Verdict::Drop)?;
    let mut generator = Generator::new(&client)?;
    let frame = frames::udp(&path(&client, &server, "2001:db8::1", "2001:db8::2"), 18);
    let sent = generator.flood(
        &Flood::new(frame, 50_000.0, Duration::from_secs(10))
            .cpus([0, 1])
            .frames(5_000),
    )?;
    assert_eq!((sent.total(), sent.lost), (5_000, 0));
    assert!(sent.elapsed() < Duration::from_secs(1), "{sent:?}");
    // Besides, an end announces its multicast groups now and then.
    assert!((5_000..5_010).contains(&counter.total()?));
    Ok(())
}

#[test]
fn sources_reach_a_socket_with_valid_checksums() -> Result<()> {
    let (client, server) = pair()?;
    let _counter = Counter::attach(&server, Verdict::Pass)?;
    let mut generator = Generator::new(&client)?;
    let socket = server
        .netns
        .run(|| std::net::UdpSocket::bind("192.0.2.2:9"))?;
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;

    let frame = frames::udp(&path(&client, &server, "192.0.2.1", "192.0.2.2"), 18);
    let sources = Sources::Ipv4 {
        first: Ipv4Addr::new(192, 0, 2, 250),
        count: 3,
        order: Order::InTurn,
    };
    let flood = Flood::new(frame, 1_000.0, Duration::from_secs(1))
        .sources(sources)
        .frames(6);
    generator.flood(&flood)?;

    let mut seen = Vec::new();
    for _ in 0..6 {
        let (_, from) = socket.recv_from(&mut [0; 64])?;
        seen.push(from.to_string());
    }
    let expected = [
        "192.0.2.250:40000",
        "192.0.2.251:40000",
        "192.0.2.252:40000",
    ];
    assert_eq!(seen, [expected, expected].concat());
    Ok(())
}

#[test]
fn ipv6_sources_cover_prefixes() -> Result<()> {
    let (client, server) = pair()?;
    let _counter = Counter::attach(&server, Verdict::Pass)?;
    let mut generator = Generator::new(&client)?;
    let capture = Capture::open(&server)?;

    let frame = frames::udp(&path(&client, &server, "2001:db8::1", "2001:db8::2"), 18);
    let sources = Sources::Ipv6 {
        first: "2001:db8:0:5::100".parse()?,
        prefixes: 2,
        per_prefix: 2,
        order: Order::InTurn,
    };
    let flood = Flood::new(frame, 1_000.0, Duration::from_secs(1))
        .sources(sources)
        .frames(4);
    generator.flood(&flood)?;

    let expected = [
        "2001:db8:0:5::100",
        "2001:db8:0:5::101",
        "2001:db8:0:6::100",
        "2001:db8:0:6::101",
    ];
    for source in expected {
        assert_eq!(capture.next_udp_source()?, source.parse::<Ipv6Addr>()?);
    }
    Ok(())
}

#[test]
fn namespaces_end_with_their_handle() -> Result<()> {
    let netns = Netns::new("short")?;
    let path = netns.path();
    assert!(path.exists());
    let panicked = std::panic::catch_unwind(|| {
        let netns = netns;
        netns.run(|| panic!("as a failing test would"));
    });
    assert!(panicked.is_err());
    assert!(!path.exists());
    Ok(())
}

/// A packet socket: shows what reached the stack.
struct Capture {
    socket: std::os::fd::OwnedFd,
}

impl Capture {
    fn open(interface: &Interface) -> Result<Self> {
        use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
        let socket = interface.netns.run(|| {
            socket(
                AddressFamily::Packet,
                SockType::Raw,
                SockFlag::empty(),
                SockProtocol::EthAll,
            )
        })?;
        let wait = nix::sys::time::TimeVal::new(1, 0);
        nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::ReceiveTimeout, &wait)?;
        Ok(Self { socket })
    }

    fn next_udp_source(&self) -> Result<Ipv6Addr> {
        let mut frame = [0; 256];
        loop {
            let length = nix::unistd::read(&self.socket, &mut frame)?;
            // EtherType IPv6 and next header UDP.
            if length >= 54 && frame[12..14] == [0x86, 0xdd] && frame[20] == 17 {
                let source: [u8; 16] = frame[22..38].try_into()?;
                return Ok(source.into());
            }
        }
    }
}
