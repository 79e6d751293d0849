//! SYNs of sources that have many connections open, through the real object and through the same `decide()`
//! on the host, as in the packet table; and that connections are counted, on each kernel.

#[allow(dead_code, reason = "shared with the packet table, which uses all of it")]
mod common;

use std::{
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use limiter_common::{Action::*, Family::*, Reason::*, packet::Source};

use common::{Bench, frame::*};

/// Twice as many, and three in one class, for some networks.
const CONFIG: &str = r#"
mode = "enforce"
[[interface]]
name = "lan0"
[[class]]
name = "watched"
match = { protocol = "tcp", ports = [7] }
packets = { rate = "1/h", burst = 9 }
connections = 2
mode = "observe"
[[class]]
name = "web"
match = { ports = [80, 443] }
packets = { rate = "1/h", burst = 2 }
connections = 2
[[class]]
name = "rest"
packets = { rate = "1/h", burst = 9 }
[[prefix]]
cidr = "203.0.113.0/24"
scale = 2
[[prefix]]
cidr = "203.0.113.128/25"
[[prefix.class]]
name = "web"
connections = 3
[[exempt]]
cidr = "10.20.0.0/16"
interface = "lan0"
owner = "platform"
[[block]]
cidr = "198.51.100.0/24"
"#;

#[test]
fn syns_of_sources_with_many_connections_are_refused() -> Result<()> {
    let mut bench = Bench::new(CONFIG, &[("lan0", Bench::IFINDEX)])?;
    let (scaled, own) = (addr("203.0.113.1"), addr("203.0.113.129"));
    bench.connect(&[
        (v4(1), 2),
        (v4(2), 1),
        (v6(1), 2),
        (addr("10.20.0.1"), 50),
        (addr("198.51.100.1"), 50),
        (scaled, 3),
        (own, 3),
    ])?;
    let syn = |source, port| tcp(source, 4000, port, SYN);
    let refused = |family| (family, "web", Connections, Drop);
    let first_fragment = fragment(v4(1), 6, 0, true, &tcp_header(4000, 80, SYN));
    let steps = [
        (syn(v4(1), 80), refused(Ipv4)),
        (tcp(v4(1), 4000, 443, SYN | 0xc0), refused(Ipv4)),
        (first_fragment, refused(Ipv4)),
        (syn(v6(1), 80), refused(Ipv6)),
        // It has taken nothing from the bucket, and what is no SYN goes on.
        (tcp(v4(1), 4000, 80, ACK), (Ipv4, "web", Conform, Pass)),
        (tcp(v4(1), 4000, 80, SYN | ACK), (Ipv4, "web", Conform, Pass)),
        (tcp(v4(1), 4000, 80, ACK), (Ipv4, "web", PacketRate, Drop)),
        (udp(v4(3), 4000, 80, 100), (Ipv4, "web", Conform, Pass)),
        (syn(v4(1), 80), refused(Ipv4)),
        // One below the limit, and none.
        (syn(v4(2), 80), (Ipv4, "web", Conform, Pass)),
        (syn(v4(4), 80), (Ipv4, "web", Conform, Pass)),
        (syn(v6(2), 80), (Ipv6, "web", Conform, Pass)),
        // Another class has no limit, and one observes.
        (syn(v4(1), 22222), (Ipv4, "rest", Conform, Pass)),
        (syn(v4(1), 7), (Ipv4, "watched", Connections, WouldDrop)),
        (syn(v4(2), 7), (Ipv4, "watched", Conform, Pass)),
        // Networks.
        (syn(addr("10.20.0.1"), 80), (Ipv4, "web", Exempt, Pass)),
        (syn(addr("198.51.100.1"), 80), (Ipv4, "web", Blocked, Drop)),
        (syn(scaled, 80), (Ipv4, "web", Conform, Pass)),
        (syn(own, 80), refused(Ipv4)),
    ];
    let (frames, expected): (Vec<_>, Vec<_>) = steps.into_iter().unzip();
    let expected: Vec<_> = expected.into_iter().map(|e| bench.outcome("lan0", e)).collect();
    bench.check(&frames, &expected)?;
    bench.connect(&[(v4(1), 1), (scaled, 4), (own, 2)])?;
    let steps = [(syn(scaled, 80), refused(Ipv4)), (syn(own, 80), (Ipv4, "web", Conform, Pass))];
    let (frames, expected): (Vec<_>, Vec<_>) = steps.into_iter().unzip();
    let expected: Vec<_> = expected.into_iter().map(|e| bench.outcome("lan0", e)).collect();
    bench.check(&frames, &expected)?;
    bench.check_run_count()
}

const PATIENCE: Duration = Duration::from_secs(10);

/// Waits until the source has so many.
fn wait(bench: &Bench, source: Source, wanted: u32) -> Result<()> {
    let give_up = Instant::now() + PATIENCE;
    loop {
        let found = bench.datapath().connections();
        let found = found.iter().find(|(known, _)| *known == source).map_or(0, |(_, count)| *count);
        if found == wanted {
            return Ok(());
        }
        ensure!(Instant::now() < give_up, "{found} of {source:?}, not {wanted}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn connections_are_counted_from_begin_to_end() -> Result<()> {
    let mut bench = Bench::new(CONFIG, &[("lan0", Bench::IFINDEX)])?;
    let netns = bench.netns().clone();
    bench.hear()?;
    bench.connect(&[])?;
    netns.ip(&["address", "add", "198.18.40.1/32", "dev", "lo"])?;
    netns.ip(&["address", "add", "2001:db8:40::1/128", "dev", "lo", "nodad"])?;
    for address in ["198.18.40.1", "2001:db8:40::1", "127.0.0.1"] {
        let address: IpAddr = address.parse()?;
        let listener = netns.run(|| TcpListener::bind(SocketAddr::new(address, 0)))?;
        let to = listener.local_addr()?;
        let source = Source::from(address);
        let counted = u32::from(!address.is_loopback());
        let mut ends = Vec::new();
        for n in 1..=5 {
            let near = netns.run(|| TcpStream::connect(to))?;
            ends.push((near, listener.accept()?.0));
            wait(&bench, source, n * counted)?;
        }
        // Either end may be the first to close.
        for n in (0..5).rev() {
            let (near, far) = ends.pop().expect("one for each");
            let (first, second) = if n % 2 == 0 { (near, far) } else { (far, near) };
            drop(first);
            drop(second);
            wait(&bench, source, n * counted)?;
        }
    }
    Ok(())
}

/// The same on other kernels.
mod vm {
    use std::{env, time::Duration};

    use anyhow::Result;
    use limiter_tests::vm::{Kernel, VmSpec, run_ok};

    const TESTS: &[&str] = &[
        "--exact",
        "connections_are_counted_from_begin_to_end",
        "syns_of_sources_with_many_connections_are_refused",
    ];

    fn both_hold_on(kernel: Kernel) -> Result<()> {
        let spec = VmSpec {
            binary: &env::current_exe()?,
            arguments: TESTS,
            companions: &[],
            smp: 2,
            timeout: Duration::from_mins(6),
        };
        let output = run_ok(kernel, &spec)?;
        assert!(output.console.contains("test result: ok. 2 passed"), "{}", output.console);
        Ok(())
    }

    #[test]
    fn both_hold_on_6_1() -> Result<()> {
        both_hold_on(Kernel::V6_1)
    }

    #[test]
    fn both_hold_on_6_12() -> Result<()> {
        both_hold_on(Kernel::V6_12)
    }
}
