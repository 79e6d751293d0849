//! Packets from addresses with a lease, as rows of the table.

use anyhow::Result;
use limiter_common::{
    Action::*,
    Family::*,
    Reason::{self, *},
    abi::{Lease, PortRange, Slot},
    flows::{Flow, Transport},
    time::Nanos,
    units::{PacketLimit, Rate},
};

use crate::common::{Bench, frame::*};

const CONFIG: &str = r#"
mode = "enforce"
[established]
packets = { rate = "1/h", burst = 1 }
[[interface]]
name = "lan0"
[[interface]]
name = "wan0"
[[class]]
name = "watched"
match = { ports = [7] }
packets = { rate = "1/h", burst = 1 }
mode = "observe"
[[class]]
name = "rest"
packets = { rate = "1/h", burst = 1 }
[[block]]
cidr = "198.51.100.0/24"
"#;

/// For TCP and UDP port 443 and UDP ports 4000 to 4009 and 7, with a cap of so many packets.
fn lease(slot: Slot, packets: u64) -> Lease {
    let cap = PacketLimit::new(Rate::new(1, 3600).expect("is one"), packets).expect("is one");
    let mut lease = Lease { until: Nanos::NEVER, cap, slots: 1 << slot.0, ..Lease::NONE };
    for (at, (first, last)) in [(443, 443), (4000, 4009), (7, 7)].into_iter().enumerate() {
        lease.ports[at] = PortRange { first, last };
        lease.protocols |= Lease::protocol(Transport::Udp, at);
    }
    lease.protocols |= Lease::protocol(Transport::Tcp, 0);
    lease
}

#[test]
fn a_lease_holds_for_its_interface_and_ports_up_to_its_cap() -> Result<()> {
    let mut bench = Bench::new(CONFIG, &[("lan0", Bench::IFINDEX), ("wan0", 900)])?;
    let (here, elsewhere) = (bench.slot("lan0"), bench.slot("wan0"));
    bench.lease(v4(1).into(), lease(here, 3))?;
    bench.lease(v6(1).into(), lease(here, 1))?;
    bench.lease(v4(2).into(), lease(elsewhere, 3))?;
    bench.lease(v4(3).into(), Lease { until: Nanos(1), ..lease(here, 3) })?;
    bench.lease(v4(4).into(), lease(here, 2))?;
    bench.lease(addr("198.51.100.1").into(), lease(here, 3))?;
    bench.open(Flow {
        remote: v4(4).into(),
        remote_port: 53,
        local_port: 4000,
        transport: Transport::Udp,
    })?;
    let neighbour = addr("2001:db8:aaaa:1::2");
    let first_fragment = fragment(v4(1), 17, 0, true, &udp_header(53, 443, 32));
    let steps = [
        // What conforms does not need it.
        (udp(v4(1), 9, 443, 100), (Ipv4, "rest", Conform, Pass)),
        (udp(v4(1), 9, 443, 100), (Ipv4, "rest", Reason::Lease, Pass)),
        (tcp(v4(1), 9, 443, SYN), (Ipv4, "rest", Reason::Lease, Pass)),
        // Other ports, other protocols, no ports.
        (udp(v4(1), 9, 444, 100), (Ipv4, "rest", PacketRate, Drop)),
        (tcp(v4(1), 9, 4000, ACK), (Ipv4, "rest", PacketRate, Drop)),
        (icmp(v4(1), 8), (Ipv4, "rest", PacketRate, Drop)),
        (first_fragment, (Ipv4, "rest", PacketRate, Drop)),
        (udp(v4(1), 443, 9, 100), (Ipv4, "rest", PacketRate, Drop)),
        (udp(v4(1), 9, 4009, 100), (Ipv4, "rest", Reason::Lease, Pass)),
        (udp(v4(1), 9, 4009, 100), (Ipv4, "rest", LeaseRate, Drop)),
        (udp(v4(1), 9, 443, 100), (Ipv4, "rest", LeaseRate, Drop)),
        // The whole address, not the /64.
        (udp(v6(1), 9, 443, 100), (Ipv6, "rest", Conform, Pass)),
        (udp(neighbour, 9, 443, 100), (Ipv6, "rest", PacketRate, Drop)),
        (udp(v6(1), 9, 443, 100), (Ipv6, "rest", Reason::Lease, Pass)),
        (udp(v6(1), 9, 443, 100), (Ipv6, "rest", LeaseRate, Drop)),
        // Another interface's, and one that is over.
        (udp(v4(2), 9, 443, 100), (Ipv4, "rest", Conform, Pass)),
        (udp(v4(2), 9, 443, 100), (Ipv4, "rest", PacketRate, Drop)),
        (udp(v4(3), 9, 443, 100), (Ipv4, "rest", Conform, Pass)),
        (udp(v4(3), 9, 443, 100), (Ipv4, "rest", PacketRate, Drop)),
        // A block is meant, whoever has a lease.
        (udp(addr("198.51.100.1"), 9, 443, 100), (Ipv4, "rest", Blocked, Drop)),
        // The host's own flows come first, and a lease where their limit is reached.
        (udp(v4(4), 53, 4000, 100), (Ipv4, "rest", Conform, Pass)),
        (udp(v4(4), 53, 4000, 100), (Ipv4, "rest", Established, Pass)),
        (udp(v4(4), 53, 4000, 100), (Ipv4, "rest", Reason::Lease, Pass)),
        // A class in observe mode has its leases too, and its would-drops.
        (udp(v4(4), 9, 7, 100), (Ipv4, "watched", Conform, Pass)),
        (udp(v4(4), 9, 7, 100), (Ipv4, "watched", Reason::Lease, Pass)),
        (udp(v4(4), 9, 7, 100), (Ipv4, "watched", LeaseRate, WouldDrop)),
    ];
    let (frames, expected): (Vec<_>, Vec<_>) = steps.into_iter().unzip();
    let expected: Vec<_> = expected.into_iter().map(|e| bench.outcome("lan0", e)).collect();
    bench.check(&frames, &expected)?;
    bench.check_run_count()
}
