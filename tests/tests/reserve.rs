//! What no class limit starves: the operator's way in, routing protocols, the errors of path MTU
//! discovery, and neighbours.
//!
//! The program hears of the handshakes of the whole host, so each test has addresses of its own.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use limiter_tests::{
    agent::{Agent, Metrics, binary},
    client::{self, EchoServer, Pace},
    frames,
    generator::{Flood, Generator, Order, Sources},
    netns::{Interface, Netns, VethOptions, veth},
};
use serde_json::Value;

/// One packet a minute of everything.
const NOTHING: &str = r#"
[[class]]
name = "rest"
packets = { rate = "1/m", burst = 1 }
"#;

const PATIENCE: Duration = Duration::from_secs(2);

/// Fast enough to spend what there is, and slow enough to leave others a CPU.
const FLOOD_RATE: f64 = 50_000.0;

/// A million addresses that nobody has.
const FORGED: Sources =
    Sources::Ipv4 { first: Ipv4Addr::new(10, 0, 0, 0), count: 1_000_000, order: Order::Random };

/// The interface `name` of `edge`, and the other end in a namespace of its own.
fn cable(edge: &Netns, name: &str) -> Result<(Interface, Interface)> {
    let (inside, outside) =
        veth((edge, name), (&Netns::new("outside")?, "peer0"), VethOptions::default())?;
    Ok((inside, outside))
}

/// A cable with addresses of both ends that they know of each other.
fn known(edge: &Netns, name: &str, ours: &str, theirs: &str) -> Result<(Interface, Interface)> {
    let (inside, outside) = cable(edge, name)?;
    inside.add_known_address(ours.parse()?, 24, &outside)?;
    outside.add_known_address(theirs.parse()?, 24, &inside)?;
    Ok((inside, outside))
}

fn path(from: &Interface, source: &str, to: &Interface, destination: &str) -> Result<frames::Path> {
    Ok(frames::Path {
        source_mac: from.mac,
        destination_mac: to.mac,
        source: source.parse()?,
        destination: destination.parse()?,
    })
}

fn enforced(head: &str, interfaces: &[&str], rest: &str) -> String {
    let interfaces: Vec<_> =
        interfaces.iter().map(|name| format!("[[interface]]\nname = \"{name}\"\n")).collect();
    let interfaces = interfaces.concat();
    format!("mode = \"enforce\"\n{head}\n{interfaces}{rest}{NOTHING}")
}

/// Answers each connection with what it says, until the end of the test.
fn echo(netns: &Netns, address: SocketAddr) -> Result<()> {
    let listener = netns.run(|| TcpListener::bind(address))?;
    thread::spawn(move || {
        for connection in listener.incoming() {
            let Ok(connection) = connection else { return };
            thread::spawn(move || {
                let (mut from, mut to) = (&connection, &connection);
                std::io::copy(&mut from, &mut to)
            });
        }
    });
    Ok(())
}

fn connect(netns: &Netns, to: SocketAddr) -> Result<TcpStream> {
    let connection = netns.run(|| TcpStream::connect_timeout(&to, PATIENCE))?;
    connection.set_read_timeout(Some(PATIENCE))?;
    connection.set_write_timeout(Some(PATIENCE))?;
    Ok(connection)
}

/// Says 20 kB and hears them back.
fn exchange(connection: &mut TcpStream) -> Result<()> {
    let mut heard = vec![0; 20_000];
    connection.write_all(&vec![7; heard.len()])?;
    connection.read_exact(&mut heard)?;
    ensure!(heard.iter().all(|byte| *byte == 7));
    Ok(())
}

fn ssh(netns: &Netns, to: SocketAddr) -> Result<()> {
    exchange(&mut connect(netns, to)?)
}

fn packets(counted: &Metrics, labels: &[(&str, &str)]) -> f64 {
    counted.sum("limiter_packets_total", labels)
}

/// A flood in the background until it is told to stop.
fn in_background<T>(
    interface: &Interface,
    flood: Flood,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let stop = Arc::new(AtomicBool::new(false));
    let flood = flood.until(Arc::clone(&stop));
    let mut generator = Generator::new(interface)?;
    thread::scope(|scope| {
        let flooding = scope.spawn(move || generator.flood(&flood));
        // Time to spend what there is.
        thread::sleep(Duration::from_millis(500));
        let result = work();
        stop.store(true, Relaxed);
        let sent = flooding.join().expect("the generator does not panic")?;
        ensure!(sent.arrived() > 10_000, "{sent:?}");
        result
    })
}

fn flood(frame: Vec<u8>) -> Flood {
    Flood::new(frame, FLOOD_RATE, Duration::from_mins(1)).cpus([0])
}

/// A limit of one packet a minute on everything, and a flood: ssh goes on, from where it is reserved.
#[test]
fn ssh_works_under_a_limit_of_one_packet_a_minute() -> Result<()> {
    let edge = Netns::new("edge")?;
    let (_, mgmt) = known(&edge, "mgmt0", "198.18.21.1", "198.18.21.2")?;
    let (wan, outside) = known(&edge, "wan0", "198.18.22.1", "198.18.22.2")?;
    let [mgmt_ssh, wan_ssh]: [SocketAddr; 2] =
        ["198.18.21.1:22".parse()?, "198.18.22.1:22".parse()?];
    let interfaces = ["mgmt0", "wan0"];
    let budget = "[table]\nnew_sources = { rate = \"10/s\", burst = 10 }\n";
    let agent = Agent::start(&edge, &enforced("", &interfaces, budget))?;
    for server in [mgmt_ssh, wan_ssh] {
        echo(&edge, server)?;
    }
    let frame = frames::udp(&path(&outside, "10.0.0.1:4000", &wan, "198.18.22.1:9")?, 18);
    in_background(&outside, flood(frame.clone()).sources(FORGED), || {
        // The built-in reserve holds everywhere.
        ssh(&mgmt.netns, mgmt_ssh)?;
        ssh(&outside.netns, wan_ssh)
    })?;
    let bound = r#"
[[reserve]]
match = { protocol = "tcp", ports = [22] }
interface = "mgmt*"
packets = { rate = "10000/s", burst = 20000 }
"#;
    agent.reload(&enforced("", &interfaces, &format!("{budget}{bound}")))?;
    in_background(&outside, flood(frame).sources(FORGED), || {
        ssh(&mgmt.netns, mgmt_ssh)?;
        let elsewhere = ssh(&outside.netns, wan_ssh);
        ensure!(elsewhere.is_err(), "ssh is limited where it is not reserved");
        Ok(())
    })?;
    let counted = agent.metrics()?;
    assert!(packets(&counted, &[("class", "reserve-ssh"), ("interface", "mgmt0")]) > 10.0);
    assert!(packets(&counted, &[("class", "rest"), ("action", "drop")]) > 1_000.0);
    let dropped = packets(&counted, &[("class", "reserve-ssh"), ("action", "drop")]);
    assert!(dropped < 0.5, "{dropped} packets of ssh dropped");
    agent.terminate()?;
    Ok(())
}

/// A forged flood of the reserved port itself spends its budget for new sources and no more: a session
/// that is there goes on.
#[test]
fn a_live_session_outlives_a_forged_flood_of_its_port() -> Result<()> {
    let edge = Netns::new("edge")?;
    let (wan, outside) = known(&edge, "wan0", "198.18.23.1", "198.18.23.2")?;
    let agent = Agent::start(&edge, &enforced("", &["wan0"], ""))?;
    let server: SocketAddr = "198.18.23.1:22".parse()?;
    echo(&edge, server)?;
    let mut session = connect(&outside.netns, server)?;
    exchange(&mut session)?;
    let before = agent.metrics()?;
    let start = Instant::now();
    let frame = frames::tcp_syn(&path(&outside, "10.0.0.1:4000", &wan, "198.18.23.1:22")?);
    in_background(&outside, flood(frame).sources(FORGED), || {
        for _ in 0..20 {
            exchange(&mut session)?;
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    })?;
    let counted = agent.metrics()?.since(&before);
    let created = counted.sum("limiter_sources_created_total", &[]);
    // A burst of 2,000 and 200 a second.
    let most = 2_000.0 + 200.0 * start.elapsed().as_secs_f64() + 10.0;
    assert!((1_000.0..=most).contains(&created), "{created} of {most} let in");
    let refused = packets(&counted, &[("class", "reserve-ssh"), ("reason", "new_source")]);
    assert!(refused > 10_000.0, "{refused} refused");
    agent.terminate()?;
    Ok(())
}

/// RFC 5881 §5: only what no router has forwarded is BFD.
#[test]
fn bfd_is_reserved_with_ttl_255_alone() -> Result<()> {
    let edge = Netns::new("edge")?;
    let (wan, outside) = known(&edge, "wan0", "198.18.24.1", "198.18.24.2")?;
    let agent = Agent::start(&edge, &enforced("", &["wan0"], ""))?;
    let mut generator = Generator::new(&outside)?;
    let mut send = |ttl: u8| -> Result<Metrics> {
        let path = path(&outside, "198.18.24.2:49152", &wan, "198.18.24.1:3784")?;
        let mut frame = frames::udp(&path, 24);
        frame[22] = ttl;
        let before = agent.metrics()?;
        let ten = Flood::new(frame, 1_000.0, Duration::from_secs(2)).cpus([0]).frames(10);
        let sent = generator.flood(&ten)?;
        ensure!(sent.arrived() == 10, "{sent:?}");
        Ok(agent.metrics()?.since(&before))
    };
    let near = send(255)?;
    assert!((packets(&near, &[("class", "reserve-bfd"), ("action", "pass")]) - 10.0).abs() < 0.5);
    let far = send(254)?;
    assert!(packets(&far, &[("class", "reserve-bfd")]) < 0.5);
    assert!((packets(&far, &[("class", "rest"), ("reason", "packet_rate")]) - 9.0).abs() < 0.5);
    agent.terminate()?;
    Ok(())
}

/// A guarded host, a router with a narrower link behind it, and a host there.
struct Routed {
    edge: Interface,
    router: Interface,
    _narrow: [Interface; 2],
}

/// IPv6's least, so that both families have one.
const NARROW: u32 = 1280;
const FAR: [&str; 2] = ["198.18.26.2", "2001:db8:26::2"];

impl Routed {
    fn new() -> Result<Self> {
        let edge = Netns::new("edge")?;
        let (inside, router) = known(&edge, "edge0", "198.18.25.1", "198.18.25.254")?;
        inside.add_known_address("2001:db8:25::1".parse()?, 64, &router)?;
        router.add_known_address("2001:db8:25::fe".parse()?, 64, &inside)?;
        let (near, far) = veth(
            (&router.netns, "narrow0"),
            (&Netns::new("far")?, "far0"),
            VethOptions { mtu: NARROW, ..VethOptions::default() },
        )?;
        for (address, length) in [("198.18.26.254", 24), ("2001:db8:26::fe", 64)] {
            near.add_known_address(address.parse()?, length, &far)?;
        }
        for (address, length) in FAR.into_iter().zip([24, 64]) {
            far.add_known_address(address.parse()?, length, &near)?;
        }
        router.netns.set_sysctl("net/ipv4/ip_forward", "1")?;
        router.netns.set_sysctl("net/ipv6/conf/all/forwarding", "1")?;
        // Each run of the test wants its errors at once.
        router.netns.set_sysctl("net/ipv4/icmp_ratelimit", "0")?;
        router.netns.set_sysctl("net/ipv6/icmp/ratelimit", "0")?;
        edge.ip(&["route", "add", "default", "via", "198.18.25.254"])?;
        edge.ip(&["-6", "route", "add", "default", "via", "2001:db8:25::fe"])?;
        Ok(Self { edge: inside, router, _narrow: [near, far] })
    }

    /// Sends what is too large for the narrow link, and says what the host then takes its MTU for.
    fn learnt(&self, far: &str) -> Result<Option<u32>> {
        let far: IpAddr = far.parse()?;
        let any = if far.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = self.edge.netns.run(|| UdpSocket::bind(any))?;
        for _ in 0..10 {
            // Once it is known to be too large, this host itself says so.
            let _ = socket.send_to(&[0; 1400], SocketAddr::new(far, 9));
            thread::sleep(Duration::from_millis(50));
        }
        let routes = self.edge.netns.ip(&["-json", "route", "get", &far.to_string()])?;
        let routes: Value = serde_json::from_str(&routes)?;
        let mtu = routes[0]["metrics"][0]["mtu"].as_u64();
        Ok(mtu.and_then(|mtu| u32::try_from(mtu).ok()))
    }
}

/// Forged sources spend all there is for new ones, by UDP or by ICMP that is no error: a router, which was
/// never seen before, still says that a packet was too big.
#[test]
fn path_mtu_discovery_works_under_a_forged_flood() -> Result<()> {
    for kind in ["udp", "echo"] {
        let stage = Routed::new()?;
        // Spent by the flood's first packet, also where the flood stands still for a while.
        let budget = "[table]\nnew_sources = { rate = \"1/m\", burst = 1 }\n";
        let path = path(&stage.router, "10.0.0.1:4000", &stage.edge, "198.18.25.1:9")?;
        let mut frame = frames::udp(&path, 18);
        if kind == "echo" {
            // Protocol and type.
            frame[23] = 1;
            frame[34] = 8;
        }
        let flood = || flood(frame.clone()).sources(FORGED);
        // That the flood is in the way, where nothing is reserved.
        let agent = Agent::start(
            &stage.edge.netns,
            &enforced("default_reserves = []", &["edge0"], budget),
        )?;
        let learnt = in_background(&stage.router, flood(), || stage.learnt(FAR[0]))?;
        assert_eq!(learnt, None, "{kind}, without a reserve");
        agent.reload(&enforced("", &["edge0"], budget))?;
        let learnt = in_background(&stage.router, flood(), || {
            Ok([stage.learnt(FAR[0])?, stage.learnt(FAR[1])?])
        })?;
        assert_eq!(learnt, [Some(NARROW); 2], "{kind}");
        agent.terminate()?;
    }
    Ok(())
}

/// A flood of either leaves the other alone: neighbours are found, and answer.
#[test]
fn arp_and_neighbour_discovery_do_not_starve_each_other() -> Result<()> {
    let edge = Netns::new("edge")?;
    let (inside, outside) = cable(&edge, "edge0")?;
    let addresses = [("198.18.27.1", "198.18.27.2", 24), ("2001:db8:27::1", "2001:db8:27::2", 64)];
    for (ours, theirs, length) in addresses {
        inside.add_address(&format!("{ours}/{length}"))?;
        outside.add_address(&format!("{theirs}/{length}"))?;
    }
    let config = r#"
mode = "enforce"
[neighbour]
packets = { rate = "50/s", burst = 50 }
[[interface]]
name = "edge0"
[[class]]
name = "rest"
packets = { rate = "10000/s", burst = 10000 }
"#;
    let agent = Agent::start(&edge, config)?;
    for (kind, (ours, theirs, _)) in ["nd", "arp"].into_iter().zip(addresses) {
        let frame =
            if kind == "arp" { arp(&inside, &outside) } else { solicitation(&inside, &outside) };
        let before = agent.metrics()?;
        let (ours, theirs): (IpAddr, IpAddr) = (ours.parse()?, theirs.parse()?);
        let goodput = in_background(&outside, flood(frame), || {
            let _echo = EchoServer::start(&edge, SocketAddr::new(ours, 7))?;
            let pace = Pace { rate: 100, duration: Duration::from_secs(1) };
            client::start(&outside.netns, theirs, SocketAddr::new(ours, 7), pace)?.join()
        })?;
        let counted = agent.metrics()?.since(&before);
        let family = if kind == "arp" { "other" } else { "ipv6" };
        let capped = packets(&counted, &[("reason", "neighbour_rate"), ("family", family)]);
        assert!(capped > 1_000.0, "{capped} {kind} packets over the cap");
        let others = packets(&counted, &[("reason", "neighbour_rate")]) - capped;
        assert!(others < 0.5, "{others} others");
        assert_eq!(goodput.answered, goodput.sent, "over the other protocol in a flood of {kind}");
    }
    agent.terminate()?;
    Ok(())
}

/// Who has an address that nobody has (RFC 826).
fn arp(inside: &Interface, outside: &Interface) -> Vec<u8> {
    let mut frame = [&inside.mac[..], &outside.mac, &[0x08, 0x06]].concat();
    frame.extend([0, 1, 0x08, 0x00, 6, 4, 0, 1]);
    frame.extend(outside.mac);
    frame.extend([198, 18, 27, 77, 0, 0, 0, 0, 0, 0, 198, 18, 27, 99]);
    frame.resize(60, 0);
    frame
}

/// A neighbour solicitation (RFC 4861 §4.3) that no router forwarded. Its checksum is wrong: what counts
/// here is what the program makes of it.
fn solicitation(inside: &Interface, outside: &Interface) -> Vec<u8> {
    let mut frame = [&inside.mac[..], &outside.mac, &[0x86, 0xdd]].concat();
    frame.extend([0x60, 0, 0, 0, 0, 24, 58, 255]);
    frame.extend([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9]);
    frame.extend([0xff, 0x02, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0, 0, 9]);
    frame.extend([135, 0, 0, 0, 0, 0, 0, 0, 0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9]);
    frame
}

/// `status` and `check` show what is reserved, also what is built in.
#[test]
fn status_and_check_show_the_reserves() -> Result<()> {
    let edge = Netns::new("edge")?;
    let (_inside, _outside) = cable(&edge, "edge0")?;
    let reserve = "[[reserve]]\nmatch = { protocol = \"tcp\", ports = [22] }\ninterface = \"edge*\"\n\
                   packets = { rate = \"2000/s\", burst = 4000 }\n";
    let agent = Agent::start(&edge, &enforced("", &["edge0"], reserve))?;
    let file = agent.configuration().display().to_string();
    let status = String::from_utf8(agent.command(&["status"])?.stdout)?;
    let check = |arguments: &[&str]| -> Result<String> {
        let output = edge.command(binary()?).arg("check").args(arguments).arg(&file).output()?;
        Ok(String::from_utf8(output.stdout)?)
    };
    let (checked, json) = (check(&[])?, check(&["--json"])?);
    for text in [&status, &checked] {
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let lines: Vec<_> = text.lines().map(words).collect();
        for expected in [
            "ssh tcp to 22 edge* any 2,000 4,000 200",
            "bgp tcp to 179 any any 5,000 10,000 20",
            "bfd udp to 3784,6784 any 255 5,000 10,000 100",
            "vrrp 112 any 255 1,000 2,000 100",
            "dhcp udp to 67-68,546-547 any any 1,000 2,000 200",
            "icmp-errors icmp type 3,11-12 any any 200 400 1,000",
            "icmpv6-errors icmpv6 type 1-4 any any 200 400 1,000",
        ] {
            assert!(lines.contains(&words(expected)), "{expected}\nnot in\n{text}");
        }
        assert!(
            text.lines().all(|line| line.chars().count() <= 80 || line.contains(&file)),
            "{text}"
        );
    }
    for json in [agent.get("/v1/status")?, json] {
        let json: Value = serde_json::from_str(&json)?;
        assert_eq!(json["reserves"][0]["interface"], "edge*", "{json}");
        assert_eq!(json["reserves"][0]["built_in"], false, "{json}");
        assert_eq!(json["reserves"][2]["ttl"], 255, "{json}");
        assert_eq!(json["reserves"][2]["built_in"], true, "{json}");
    }
    agent.terminate()?;
    Ok(())
}
