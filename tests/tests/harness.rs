//! The harness itself: what it says it sends is what arrives.

use std::{
    iter::zip,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use anyhow::Result;
use limiter_tests::{
    client::{self, EchoServer, Pace},
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

fn path(
    client: &Interface,
    server: &Interface,
    source: &str,
    destination: &str,
) -> Result<frames::Path> {
    Ok(frames::Path {
        source_mac: client.mac,
        destination_mac: server.mac,
        source: SocketAddr::new(source.parse()?, 40000),
        destination: SocketAddr::new(destination.parse()?, 9),
    })
}

#[test]
fn every_frame_arrives_on_both_cpus() -> Result<()> {
    let (client, server) = pair()?;
    let counter = Counter::attach(&server, Verdict::Drop)?;
    let mut generator = Generator::new(&client)?;
    let frame = frames::udp(&path(&client, &server, "192.0.2.1", "192.0.2.2")?, 18);

    let flood = Flood::new(frame, 100_000.0, Duration::from_secs(1)).cpus([0, 1]);
    let before = counter.per_cpu()?;
    let sent = generator.flood(&flood)?;
    let after = counter.per_cpu()?;

    let seen: Vec<u64> = after.iter().zip(before).map(|(after, before)| after - before).collect();
    assert_eq!(seen.iter().sum::<u64>(), sent.arrived(), "{seen:?}, {sent:?}");
    // A busy machine may keep the threads from running, but nothing makes them too fast.
    let sent_by: Vec<u64> = sent.per_cpu.iter().map(|cpu| cpu.frames).collect();
    assert!(sent_by.iter().all(|sent| (25_000..=50_000).contains(sent)), "{sent:?}");
    // Each CPU receives what it sends. A frame of the host's own (multicast listener reports), sent
    // from the other one, may have that one poll the queue, and take the few frames that wait there.
    assert!(
        zip(&seen, &sent_by).all(|(seen, sent)| seen.abs_diff(*sent) <= 500),
        "{seen:?}, {sent:?}"
    );
    Ok(())
}

#[test]
fn a_number_of_frames_is_kept_exactly() -> Result<()> {
    let (client, server) = pair()?;
    let counter = Counter::attach(&server, Verdict::Drop)?;
    let mut generator = Generator::new(&client)?;
    let frame = frames::udp(&path(&client, &server, "2001:db8::1", "2001:db8::2")?, 18);
    let sent = generator
        .flood(&Flood::new(frame, 50_000.0, Duration::from_secs(10)).cpus([0, 1]).frames(5_000))?;
    assert_eq!((sent.total(), sent.lost), (5_000, 0));
    assert!(sent.elapsed() < Duration::from_secs(1), "{sent:?}");
    assert_eq!(counter.total()?, 5_000);
    Ok(())
}

#[test]
fn sources_reach_a_socket_with_valid_checksums() -> Result<()> {
    let (client, server) = pair()?;
    let _counter = Counter::attach(&server, Verdict::Pass)?;
    let mut generator = Generator::new(&client)?;
    let socket = server.netns.run(|| std::net::UdpSocket::bind("192.0.2.2:9"))?;
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;

    let frame = frames::udp(&path(&client, &server, "192.0.2.1", "192.0.2.2")?, 18);
    let sources =
        Sources::Ipv4 { first: Ipv4Addr::new(192, 0, 2, 250), count: 3, order: Order::InTurn };
    let flood = Flood::new(frame, 1_000.0, Duration::from_secs(1)).sources(sources).frames(6);
    generator.flood(&flood)?;

    let mut seen = Vec::new();
    for _ in 0..6 {
        let (_, from) = socket.recv_from(&mut [0; 64])?;
        seen.push(from.to_string());
    }
    let expected = ["192.0.2.250:40000", "192.0.2.251:40000", "192.0.2.252:40000"];
    assert_eq!(seen, [expected, expected].concat());
    Ok(())
}

#[test]
fn ipv6_sources_cover_prefixes() -> Result<()> {
    let (client, server) = pair()?;
    let _counter = Counter::attach(&server, Verdict::Pass)?;
    let mut generator = Generator::new(&client)?;
    let capture = Capture::open(&server)?;

    let frame = frames::udp(&path(&client, &server, "2001:db8::1", "2001:db8::2")?, 18);
    let sources = Sources::Ipv6 {
        first: "2001:db8:0:5::100".parse()?,
        prefixes: 2,
        per_prefix: 2,
        order: Order::InTurn,
    };
    let flood = Flood::new(frame, 1_000.0, Duration::from_secs(1)).sources(sources).frames(4);
    generator.flood(&flood)?;

    let expected =
        ["2001:db8:0:5::100", "2001:db8:0:5::101", "2001:db8:0:6::100", "2001:db8:0:6::101"];
    for source in expected {
        assert_eq!(capture.next_udp_source()?, source.parse::<Ipv6Addr>()?);
    }
    Ok(())
}

#[test]
fn an_honest_client_gets_its_answers() -> Result<()> {
    let (client, server) = pair()?;
    for (from, to) in [("192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::2")] {
        let to = SocketAddr::new(to.parse()?, 7);
        let pace = Pace { rate: 500, duration: Duration::from_secs(1) };
        let silent = client::start(&client.netns, from.parse()?, to, pace)?.join()?;
        assert_eq!((silent.sent, silent.answered), (500, 0), "nobody listens yet");

        let _server = EchoServer::start(&server.netns, to)?;
        let heard = client::start(&client.netns, from.parse()?, to, pace)?.join()?;
        assert_eq!((heard.sent, heard.answered), (500, 500));
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
            socket(AddressFamily::Packet, SockType::Raw, SockFlag::empty(), SockProtocol::EthAll)
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

/// The same on other kernels; those of the tests that the kernel has most to do with.
mod vm {
    use std::{env, path::Path, time::Duration};

    use anyhow::Result;
    use limiter_tests::vm::{Kernel, VmSpec, run, run_ok};

    fn frames_arrive_on(kernel: Kernel) -> Result<()> {
        let spec = VmSpec {
            binary: &env::current_exe()?,
            arguments: &["--test-threads=1", "every_frame", "sources_reach"],
            companions: &[],
            smp: 4,
            timeout: Duration::from_mins(3),
        };
        let output = run_ok(kernel, &spec)?;
        assert!(output.console.contains("test result: ok. 2 passed"), "{}", output.console);
        Ok(())
    }

    #[test]
    fn frames_arrive_on_6_1() -> Result<()> {
        frames_arrive_on(Kernel::V6_1)
    }

    #[test]
    fn frames_arrive_on_6_12() -> Result<()> {
        frames_arrive_on(Kernel::V6_12)
    }

    #[test]
    fn exit_codes_and_deaths_are_told_apart() -> Result<()> {
        let spec = VmSpec {
            binary: Path::new("/bin/false"),
            arguments: &[],
            companions: &[],
            smp: 1,
            timeout: Duration::from_mins(1),
        };
        assert_eq!(run(Kernel::V6_1, &spec)?.exit_code, 1);

        let sleeper = VmSpec {
            binary: Path::new("/bin/sleep"),
            arguments: &["1000"],
            timeout: Duration::from_secs(10),
            ..spec
        };
        let error = run(Kernel::V6_1, &sleeper).expect_err("it sleeps on");
        assert!(format!("{error:#}").contains("was not done after 10s"), "{error:#}");
        Ok(())
    }
}
