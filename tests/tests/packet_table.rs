//! What becomes of each kind of packet: through the real object by `BPF_PROG_TEST_RUN`, and through the same
//! `decide()` on the host. Both must give the expected outcome, and the kernel's counters move by exactly that.

mod common;
#[path = "common/flows.rs"]
mod flows;
mod leased_rows;
mod reserved_rows;

use std::{collections::BTreeMap, time::Duration};

use anyhow::Result;
use common::{Bench, frame::*};
use limiter_agent::datapath::Watch;
use limiter_common::{
    Action::{self, *},
    Family::{self, *},
    Reason::{self, *},
    abi::Sampling,
    time::Nanos,
    units::{PacketLimit, Rate},
};
use proptest::{
    prelude::*,
    strategy::ValueTree as _,
    test_runner::{Config, TestRunner},
};

const CONFIG: &str = include_str!("common/table.toml");

/// Where packets come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum On {
    Lan,
    Wan,
    /// An interface that the configuration does not name.
    Unknown,
}

struct Row {
    name: &'static str,
    on: On,
    frames: Vec<Vec<u8>>,
    expected: Vec<Expected>,
}

type Expected = (Family, &'static str, Reason, Action);

/// `frames`, in order, and what becomes of each.
fn row(name: &'static str, on: On, frames: Vec<Vec<u8>>, expected: Vec<Expected>) -> Row {
    assert_eq!(frames.len(), expected.len(), "{name}");
    Row { name, on, frames, expected }
}

/// The same frame: `burst` pass (with a warning beyond four fifths), two are over the packet rate.
fn limited(
    name: &'static str,
    frame: &[u8],
    family: Family,
    class: &'static str,
    burst: usize,
) -> Row {
    let expect = |number| match number {
        _ if number >= burst => (family, class, PacketRate, Drop),
        _ => (family, class, if number * 5 > burst * 4 { NearLimit } else { Conform }, Pass),
    };
    let expected = (0..burst + 2).map(expect).collect();
    row(name, On::Wan, vec![frame.to_vec(); burst + 2], expected)
}

fn malformed(name: &'static str, frame: &[u8], family: Family) -> Row {
    row(name, On::Wan, vec![frame.to_vec()], vec![(family, "none", Malformed, Drop)])
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn table() -> Vec<Row> {
    let rest = "rest";
    let mut rows = vec![
        // Classes and matchers.
        limited("udp", &udp(v4(1), 4000, 4000, 100), Ipv4, rest, 4),
        limited("udp over IPv6", &udp(v6(1), 4000, 4000, 100), Ipv6, rest, 4),
        limited("a reflected answer, NTP", &udp(v4(2), 123, 4000, 100), Ipv4, "amplification", 2),
        limited("one from a port range", &udp(v4(3), 1901, 4000, 100), Ipv4, "amplification", 2),
        limited("one beside the range", &udp(v4(4), 1902, 4000, 100), Ipv4, rest, 4),
        limited(
            "first match wins: from 53 to 53",
            &udp(v4(5), 53, 53, 100),
            Ipv4,
            "amplification",
            2,
        ),
        limited("dns", &udp(v4(6), 4000, 53, 100), Ipv4, "dns", 3),
        limited("dns over tcp", &tcp(v4(7), 4000, 5399, ACK), Ipv4, "dns", 3),
        limited("syn", &tcp(v4(8), 4000, 443, SYN), Ipv4, "syn", 2),
        limited("syn over IPv6", &tcp(v6(8), 4000, 443, SYN), Ipv6, "syn", 2),
        limited("syn+ack is not syn,!ack", &tcp(v4(9), 4000, 443, SYN | ACK), Ipv4, rest, 4),
        limited("syn with other flags", &tcp(v4(10), 4000, 443, SYN | 0xc0), Ipv4, "syn", 2),
        limited("ping", &icmp(v4(11), 8), Ipv4, "ping", 1),
        limited("ping's answer is not a ping", &icmp(v4(12), 0), Ipv4, rest, 4),
        limited("ping over IPv6", &icmp(v6(11), 128), Ipv6, "ping6", 1),
        limited("type 8 of ICMPv6 is not a ping", &icmp(v6(12), 8), Ipv6, rest, 4),
        limited("sctp", &sctp(v4(13), 4000, 3868), Ipv4, "sctp", 1),
        limited("sctp to another port", &sctp(v4(14), 4000, 3869), Ipv4, rest, 4),
        limited("gre by its number", &raw(v4(15), 47, &[0; 40]), Ipv4, "gre", 1),
        limited("no next header", &raw(v6(15), 59, &[]), Ipv6, rest, 4),
        limited("esp", &raw(v6(16), 50, &[0; 40]), Ipv6, rest, 4),
        limited(
            "first fragment",
            &fragment(v4(17), 17, 0, true, &udp_header(1, 2, 32)),
            Ipv4,
            "fragments",
            1,
        ),
        limited("last fragment", &fragment(v4(18), 17, 100, false, &[0; 32]), Ipv4, "fragments", 1),
        limited("IPv6 fragment", &fragment(v6(18), 17, 100, true, &[0; 32]), Ipv6, "fragments", 1),
        limited(
            "a first fragment has ports",
            &fragment(v4(19), 17, 0, true, &udp_header(123, 2, 32)),
            Ipv4,
            "amplification",
            2,
        ),
        limited(
            "a later one has none, whatever it says",
            &fragment(v4(20), 17, 100, false, &udp_header(123, 53, 32)),
            Ipv4,
            "fragments",
            1,
        ),
        limited(
            "an atomic fragment is none",
            &fragment(v6(21), 17, 0, false, &udp_header(9, 2, 60)),
            Ipv6,
            rest,
            4,
        ),
        limited("60 bytes", &udp(v4(22), 9, 9, 18), Ipv4, "small", 1),
        limited("61 bytes", &udp(v4(23), 9, 9, 19), Ipv4, rest, 4),
        limited("jumbo frame in several buffers", &udp(v4(24), 9, 9, 8900), Ipv4, rest, 4),
        row(
            "bytes run out first",
            On::Wan,
            vec![udp(v4(25), 4000, 53, 1458); 3],
            vec![
                (Ipv4, "dns", Conform, Pass),
                (Ipv4, "dns", Conform, Pass),
                (Ipv4, "dns", ByteRate, Drop),
            ],
        ),
        // Modes.
        row(
            "observe",
            On::Wan,
            vec![tcp(v4(26), 4000, 8080, ACK); 3],
            vec![
                (Ipv4, "watched", Conform, Pass),
                (Ipv4, "watched", PacketRate, WouldDrop),
                (Ipv4, "watched", PacketRate, WouldDrop),
            ],
        ),
        row(
            "bypass",
            On::Wan,
            vec![tcp(v4(27), 4000, 8081, ACK); 3],
            vec![(Ipv4, "free", Bypass, Pass); 3],
        ),
        // Link layer.
        limited("one VLAN tag", &tagged(&udp(v4(28), 9, 9, 100), &[0x8100]), Ipv4, rest, 4),
        limited(
            "two VLAN tags",
            &tagged(&udp(v6(28), 9, 9, 100), &[0x8100, 0x88a8]),
            Ipv6,
            rest,
            4,
        ),
        row(
            "three VLAN tags",
            On::Wan,
            vec![tagged(&udp(v4(29), 9, 9, 100), &[0x8100, 0x8100, 0x88a8])],
            vec![(Other, "none", Malformed, Drop)],
        ),
        row("LLDP", On::Wan, vec![ethernet(0x88cc, &[0; 46])], vec![(Other, "none", NonIp, Pass)]),
        row(
            "an 802.3 length",
            On::Wan,
            vec![ethernet(38, &[0; 46])],
            vec![(Other, "none", NonIp, Pass)],
        ),
        // Neighbours: a cap for each of the two on the interface.
        row(
            "ARP and neighbour discovery",
            On::Lan,
            vec![
                nd(v6(30), 135, 255),
                nd(v6(31), 136, 255),
                nd(v6(30), 133, 255),
                ethernet(0x0806, &[0; 46]),
                ethernet(0x0806, &[0; 46]),
                ethernet(0x0806, &[0; 46]),
                ethernet(0x0806, &[0; 46]),
            ],
            vec![
                (Ipv6, "none", Neighbour, Pass),
                (Ipv6, "none", Neighbour, Pass),
                (Ipv6, "none", NeighbourRate, Drop),
                (Other, "none", Neighbour, Pass),
                (Other, "none", Neighbour, Pass),
                (Other, "none", Neighbour, Pass),
                (Other, "none", NeighbourRate, Drop),
            ],
        ),
        limited("neighbour discovery that was forwarded", &nd(v6(32), 135, 254), Ipv6, rest, 4),
        // Headers.
        limited("IPv4 options", &options(v4(33), 10, &udp_header(4000, 53, 60)), Ipv4, "dns", 3),
        limited(
            "every extension header",
            &chain(v6(34), &[0, 60, 43, 51, 60, 135], 17, &udp_header(4000, 53, 60)),
            Ipv6,
            "dns",
            3,
        ),
        limited(
            "eight extension headers",
            &chain(v6(35), &[60; 8], 6, &tcp_header(4000, 443, SYN)),
            Ipv6,
            "syn",
            2,
        ),
        malformed(
            "nine extension headers",
            &chain(v6(36), &[60; 9], 6, &tcp_header(4000, 443, SYN)),
            Ipv6,
        ),
        malformed(
            "an end in the second tag",
            &tagged(&udp(v4(1), 9, 9, 100), &[0x8100, 0x8100])[..20],
            Other,
        ),
        malformed("IPv4 cut in its header", &udp(v4(1), 9, 9, 100)[..33], Ipv4),
        malformed("IPv4 cut in its payload", &udp(v4(1), 9, 9, 100)[..141], Ipv4),
        malformed("IPv6 cut in its header", &udp(v6(1), 9, 9, 100)[..53], Ipv6),
        malformed("IPv6 cut in its payload", &udp(v6(1), 9, 9, 100)[..161], Ipv6),
        malformed("IPv4 of version 5", &patched(udp(v4(1), 9, 9, 100), 14, 0x55), Ipv4),
        malformed("IPv4 with a 16-byte header", &patched(udp(v4(1), 9, 9, 100), 14, 0x44), Ipv4),
        malformed("IPv4 longer than the frame", &patched(udp(v4(1), 9, 9, 100), 17, 0xff), Ipv4),
        malformed("IPv4 shorter than its header", &patched(udp(v4(1), 9, 9, 100), 17, 19), Ipv4),
        malformed("IPv6 of version 4", &patched(udp(v6(1), 9, 9, 100), 14, 0x45), Ipv6),
        malformed("UDP of 7 bytes", &raw(v4(1), 17, &[0; 7]), Ipv4),
        malformed("TCP of 19 bytes", &raw(v6(1), 6, &[0x50; 19]), Ipv6),
        malformed("TCP of a 16-byte header", &patched(tcp(v4(1), 1, 2, ACK), 46, 0x40), Ipv4),
        malformed(
            "TCP with options beyond its end",
            &patched(tcp(v4(1), 1, 2, ACK), 46, 0x60),
            Ipv4,
        ),
        malformed("ICMP of 7 bytes", &raw(v4(1), 1, &[8; 7]), Ipv4),
        malformed("SCTP of 11 bytes", &raw(v6(1), 132, &[1; 11]), Ipv6),
        malformed(
            "a first fragment without its header",
            &fragment(v4(1), 6, 0, true, &[0; 8]),
            Ipv4,
        ),
        malformed("an extension header beyond the end", &chain(v6(1), &[60], 59, &[])[..60], Ipv6),
        malformed(
            "an extension header that claims too much",
            &patched(chain(v6(1), &[60], 59, &[]), 55, 9),
            Ipv6,
        ),
        // Policies.
        limited("a scaled prefix", &udp(addr("203.0.113.1"), 9, 9, 100), Ipv4, rest, 12),
        limited(
            "a scaled prefix, another class",
            &tcp(addr("203.0.113.1"), 9, 9, SYN),
            Ipv4,
            "syn",
            6,
        ),
        limited("limits of its own inside", &udp(addr("203.0.113.129"), 9, 9, 100), Ipv4, rest, 1),
        limited("a scaled IPv6 prefix", &udp(addr("2001:db8:f:1::1"), 9, 9, 100), Ipv6, rest, 8),
        row(
            "blocked",
            On::Wan,
            vec![udp(addr("198.51.100.9"), 9, 9, 100); 2],
            vec![(Ipv4, rest, Blocked, Drop); 2],
        ),
        row(
            "blocked over IPv6",
            On::Lan,
            vec![udp(addr("2001:db8:bad:7::1"), 9, 9, 100); 2],
            vec![(Ipv6, rest, Blocked, Drop); 2],
        ),
        row(
            "blocked in an observed class",
            On::Wan,
            vec![tcp(addr("198.51.100.9"), 9, 8080, ACK)],
            vec![(Ipv4, "watched", Blocked, WouldDrop)],
        ),
        row(
            "exempt",
            On::Lan,
            vec![udp(addr("10.20.0.1"), 9, 9, 100); 6],
            vec![(Ipv4, rest, Exempt, Pass); 6],
        ),
        row(
            "exempt over IPv6",
            On::Lan,
            vec![udp(addr("2001:db8:e::1"), 9, 9, 100); 6],
            vec![(Ipv6, rest, Exempt, Pass); 6],
        ),
        row(
            "exempt outranks a block around it",
            On::Lan,
            vec![udp(addr("10.20.9.1"), 9, 9, 100)],
            vec![(Ipv4, rest, Exempt, Pass)],
        ),
        row(
            "the block holds elsewhere",
            On::Wan,
            vec![udp(addr("10.20.9.1"), 9, 9, 100)],
            vec![(Ipv4, rest, Blocked, Drop)],
        ),
        limited(
            "an exempt address forged from outside",
            &udp(addr("10.20.0.1"), 9, 9, 100),
            Ipv4,
            rest,
            4,
        ),
        row(
            "spoofable, anywhere",
            On::Wan,
            vec![udp(addr("10.30.0.1"), 9, 9, 100); 6],
            vec![(Ipv4, rest, Exempt, Pass); 6],
        ),
        row(
            "spoofable, on an unknown interface",
            On::Unknown,
            vec![udp(addr("10.30.0.1"), 9, 9, 100); 6],
            vec![(Ipv4, rest, Exempt, Pass); 6],
        ),
        // Keys.
        limited(
            "link-local, one interface identifier",
            &udp(addr("fe80::1"), 9, 9, 100),
            Ipv6,
            rest,
            4,
        ),
        limited("link-local, another", &udp(addr("fe80::2"), 9, 9, 100), Ipv6, rest, 4),
        limited("behind NAT64", &udp(addr("64:ff9b::192.0.2.200"), 9, 9, 100), Ipv6, rest, 4),
        limited(
            "behind NAT64, another",
            &udp(addr("64:ff9b::192.0.2.201"), 9, 9, 100),
            Ipv6,
            rest,
            4,
        ),
        limited(
            "behind 6to4, the same address",
            &udp(addr("2002:c000:2c8::1"), 9, 9, 100),
            Ipv6,
            rest,
            4,
        ),
        limited("and itself", &udp(addr("192.0.2.200"), 9, 9, 100), Ipv4, rest, 4),
    ];
    rows.extend(reserved_rows::rows());
    let four_of = |frames: Vec<Vec<u8>>, name| {
        let expected =
            (0..frames.len())
                .map(|i| {
                    if i < 4 { (Ipv6, rest, Conform, Pass) } else { (Ipv6, rest, PacketRate, Drop) }
                })
                .collect();
        row(name, On::Wan, frames, expected)
    };
    rows.push(four_of(
        (0..=255).map(|i| udp(addr(&format!("2001:db8:40:1::{i:x}")), 9, 9, 100)).collect(),
        "256 addresses of one /64 share a bucket",
    ));
    rows.push(four_of(
        (0..6).map(|i| udp(addr(&format!("2002:c000:2c9:{i}::1")), 9, 9, 100)).collect(),
        "the subnets of a 6to4 site share a bucket",
    ));
    rows.push(row(
        "two /64s have two",
        On::Wan,
        [1, 2]
            .iter()
            .flat_map(|i| vec![udp(addr(&format!("2001:db8:41:{i}::1")), 9, 9, 100); 5])
            .collect(),
        [(Conform, Pass), (Conform, Pass), (Conform, Pass), (Conform, Pass), (PacketRate, Drop)]
            .repeat(2)
            .into_iter()
            .map(|(reason, action)| (Ipv6, rest, reason, action))
            .collect(),
    ));
    rows
}

#[test]
fn every_row_of_the_table_holds_in_the_kernel_and_on_the_host() -> Result<()> {
    let mut benches = BTreeMap::new();
    for (on, names) in [(On::Lan, ["lan0", "wan0"]), (On::Wan, ["wan0", "lan0"])] {
        benches.insert(on, Bench::new(CONFIG, &[(names[0], Bench::IFINDEX), (names[1], 900)])?);
    }
    benches.insert(On::Unknown, Bench::new(CONFIG, &[("lan0", 900), ("wan0", 901)])?);

    let mut failures = Vec::new();
    for row in table() {
        let bench = benches.get_mut(&row.on).expect("all are there");
        let slot = match row.on {
            On::Lan => "lan0",
            On::Wan => "wan0",
            On::Unknown => "unknown",
        };
        let expected = row.expected.iter().map(|e| bench.outcome(slot, *e)).collect::<Vec<_>>();
        if let Err(error) = bench.check(&row.frames, &expected) {
            failures.push(format!("{}: {error:#}", row.name));
        }
    }
    assert!(failures.is_empty(), "{} rows failed:\n{}", failures.len(), failures.join("\n"));
    for bench in benches.values() {
        bench.check_run_count()?;
    }
    Ok(())
}

/// Three new sources in all, two of them in class "syn"; known ones go on, exempt ones need none.
const NEW_SOURCES: &str = r#"
mode = "enforce"
[table]
new_sources = { rate = "1/h", burst = 3 }
[[interface]]
name = "lan0"
[[class]]
name = "syn"
match = { protocol = "tcp", flags = "syn,!ack" }
packets = { rate = "1/h", burst = 4 }
new_sources = { rate = "1/h", burst = 2 }
[[class]]
name = "rest"
packets = { rate = "1/h", burst = 4 }
[[exempt]]
cidr = "10.20.0.0/16"
interface = "lan0"
owner = "platform"
[[block]]
cidr = "198.51.100.0/24"
"#;

#[test]
fn new_sources_meet_their_budgets() -> Result<()> {
    let mut bench = Bench::new(NEW_SOURCES, &[("lan0", Bench::IFINDEX)])?;
    let syn = |n| tcp(v4(n), 4000, 443, SYN);
    let steps = [
        (syn(1), (Ipv4, "syn", Conform, Pass)),
        (syn(2), (Ipv4, "syn", Conform, Pass)),
        // The class has let in its two, and takes nothing more from the common budget.
        (syn(3), (Ipv4, "syn", NewSource, Drop)),
        (syn(4), (Ipv4, "syn", NewSource, Drop)),
        // A blocked source takes nothing from it either.
        (udp(addr("198.51.100.1"), 9, 9, 100), (Ipv4, "rest", Blocked, Drop)),
        (udp(v6(5), 9, 9, 100), (Ipv6, "rest", Conform, Pass)),
        (udp(v6(6), 9, 9, 100), (Ipv6, "rest", NewSource, Drop)),
        (udp(v4(1), 9, 9, 100), (Ipv4, "rest", NewSource, Drop)),
        (udp(addr("10.20.0.1"), 9, 9, 100), (Ipv4, "rest", Exempt, Pass)),
        (syn(1), (Ipv4, "syn", Conform, Pass)),
        (udp(v6(5), 9, 9, 100), (Ipv6, "rest", Conform, Pass)),
    ];
    let (frames, expected): (Vec<_>, Vec<_>) = steps.into_iter().unzip();
    let expected: Vec<_> = expected.into_iter().map(|e| bench.outcome("lan0", e)).collect();
    bench.check(&frames, &expected)?;
    bench.check_run_count()
}

/// Thousands of frames, whole and mangled, from a few sources so that buckets fill: kernel and host
/// decide alike, frame by frame, and count alike.
#[test]
fn kernel_and_host_agree_on_random_frames() -> Result<()> {
    let mut bench = Bench::new(CONFIG, &[("wan0", Bench::IFINDEX), ("lan0", 900)])?;
    let mut runner = TestRunner::new_with_rng(
        Config::default(),
        proptest::test_runner::TestRng::deterministic_rng(
            proptest::test_runner::RngAlgorithm::ChaCha,
        ),
    );
    let templates: Vec<Vec<u8>> =
        table().into_iter().filter_map(|row| row.frames.into_iter().next()).collect();
    // Byte buckets refill fast enough to make outcomes depend on the moment; leave them out.
    let templates: Vec<_> =
        templates.into_iter().filter(|frame| (14..1000).contains(&frame.len())).collect();
    let strategy = (
        prop::sample::select(templates),
        prop::collection::vec((12..80_usize, any::<u8>()), 0..3),
        prop::option::of(14..120_usize),
    );
    for _ in 0..3_000 {
        let (mut frame, patches, cut) =
            strategy.new_tree(&mut runner).expect("no filters reject").current();
        for (place, value) in patches {
            if let Some(byte) = frame.get_mut(place) {
                *byte = value;
            }
        }
        if let Some(cut) = cut {
            frame.truncate(cut);
        }
        bench.compare(&frame)?;
    }
    bench.check_counters()?;
    bench.check_run_count()
}

/// While somebody watches, what is dropped comes out of the ring: short frames whole, and the beginning
/// of long ones, also of those in several buffers.
#[test]
fn drops_are_sampled_while_somebody_watches() -> Result<()> {
    let mut bench = Bench::new(CONFIG, &[("wan0", Bench::IFINDEX), ("lan0", 900)])?;
    let frames = [udp(v4(1), 9, 9, 20), udp(v6(2), 9, 9, 700), udp(v4(3), 9, 9, 8900)];
    let blocked = udp(addr("198.51.100.9"), 9, 9, 100);
    // Nobody watches yet.
    bench.compare(&blocked)?;
    let budget = PacketLimit::new(Rate::new(1000, 1).expect("is one"), 1000).expect("is one");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let samples = bench.datapath().samples().try_lock_owned()?;
        let sampling = Sampling::all(budget, Nanos(0));
        let mut watch = Watch::start(samples, sampling)?;
        for frame in &frames {
            for _ in 0..6 {
                bench.compare(frame)?;
            }
        }
        bench.compare(&blocked)?;
        let mut samples = Vec::new();
        while samples.len() < 7 {
            samples.extend(tokio::time::timeout(Duration::from_secs(10), watch.next()).await??);
        }
        assert_eq!(samples.len(), 7, "{samples:?}");
        let rate = [Ipv4, Ipv6, Ipv4].map(|family| (family, "rest", PacketRate, Drop));
        let expected = frames.iter().zip(rate).flat_map(|it| [it, it]);
        let expected = expected.chain([(&blocked, (Ipv4, "rest", Blocked, Drop))]);
        for (sample, (frame, outcome)) in samples.iter().zip(expected) {
            assert_eq!(sample.outcome.outcome(), Some(bench.outcome("wan0", outcome)));
            assert_eq!(sample.length as usize, frame.len());
            let captured = frame.len().min(256);
            assert_eq!(sample.captured as usize, captured);
            assert_eq!(sample.bytes[..captured], frame[..captured]);
            assert_eq!(sample.weight, 1);
        }
        drop(watch);
        // And now nobody any more.
        bench.compare(&blocked)?;
        let count = bench.datapath().sample_count()?;
        assert_eq!((count.offered, count.written, count.lost), (7, 7, 0));
        Ok(())
    })
}

/// The same on other kernels.
mod vm {
    use std::{env, time::Duration};

    use anyhow::Result;
    use limiter_tests::vm::{Kernel, VmSpec, run_ok};

    const TESTS: &[&str] = &[
        "--exact",
        "every_row_of_the_table_holds_in_the_kernel_and_on_the_host",
        "drops_are_sampled_while_somebody_watches",
        "flows::answers_on_flows_of_the_host_have_a_limit_of_their_own",
        "flows::the_programs_on_the_cgroup_are_accepted",
        "leased_rows::a_lease_holds_for_its_interface_and_ports_up_to_its_cap",
    ];

    fn the_table_holds_on(kernel: Kernel) -> Result<()> {
        let spec = VmSpec {
            binary: &env::current_exe()?,
            arguments: TESTS,
            companions: &[],
            smp: 2,
            timeout: Duration::from_mins(6),
        };
        let output = run_ok(kernel, &spec)?;
        assert!(output.console.contains("test result: ok. 5 passed"), "{}", output.console);
        Ok(())
    }

    #[test]
    fn the_table_holds_on_6_1() -> Result<()> {
        the_table_holds_on(Kernel::V6_1)
    }

    #[test]
    fn the_table_holds_on_6_12() -> Result<()> {
        the_table_holds_on(Kernel::V6_12)
    }
}
