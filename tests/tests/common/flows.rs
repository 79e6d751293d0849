//! Answers on the flows of the host, as rows of the table.

use anyhow::Result;
use limiter_common::{
    Action::*,
    Family::*,
    Reason::*,
    flows::{Flow, Transport},
};

use crate::common::{Bench, frame::*};

/// Three answers beyond the limits of their sources.
const CONFIG: &str = r#"
mode = "enforce"
[established]
packets = { rate = "1/h", burst = 3 }
[[interface]]
name = "lan0"
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

#[test]
fn answers_on_flows_of_the_host_have_a_limit_of_their_own() -> Result<()> {
    let mut bench = Bench::new(CONFIG, &[("lan0", Bench::IFINDEX)])?;
    let flow = |remote: std::net::IpAddr, transport| Flow {
        remote: remote.into(),
        remote_port: 53,
        local_port: 4000,
        transport,
    };
    bench.open(flow(v4(1), Transport::Udp))?;
    bench.open(flow(v6(1), Transport::Tcp))?;
    bench.open(flow(addr("198.51.100.1"), Transport::Udp))?;
    bench.open(Flow { local_port: 7, ..flow(v4(2), Transport::Udp) })?;
    let first_fragment = fragment(v4(1), 17, 0, true, &udp_header(53, 4000, 32));
    let steps = [
        // What conforms does not need it.
        (udp(v4(1), 53, 4000, 100), (Ipv4, "rest", Conform, Pass)),
        (udp(v4(1), 53, 4000, 100), (Ipv4, "rest", Established, Pass)),
        (udp(v4(1), 53, 4001, 100), (Ipv4, "rest", PacketRate, Drop)),
        (udp(v4(1), 54, 4000, 100), (Ipv4, "rest", PacketRate, Drop)),
        (tcp(v4(1), 53, 4000, ACK), (Ipv4, "rest", PacketRate, Drop)),
        (tcp(v6(1), 53, 4000, SYN | ACK), (Ipv6, "rest", Conform, Pass)),
        (tcp(v6(1), 53, 4000, ACK), (Ipv6, "rest", Established, Pass)),
        (tcp(v6(1), 53, 4009, ACK), (Ipv6, "rest", PacketRate, Drop)),
        // A block is meant, whoever opened the flow.
        (udp(addr("198.51.100.1"), 53, 4000, 100), (Ipv4, "rest", Blocked, Drop)),
        (first_fragment, (Ipv4, "rest", PacketRate, Drop)),
        // The third, and then none is left, for nobody.
        (udp(v4(2), 53, 7, 100), (Ipv4, "watched", Conform, Pass)),
        (udp(v4(2), 53, 7, 100), (Ipv4, "watched", Established, Pass)),
        (udp(v4(2), 53, 7, 100), (Ipv4, "watched", EstablishedRate, WouldDrop)),
        (udp(v4(1), 53, 4000, 100), (Ipv4, "rest", EstablishedRate, Drop)),
        (tcp(v6(1), 53, 4000, ACK), (Ipv6, "rest", EstablishedRate, Drop)),
    ];
    let (frames, expected): (Vec<_>, Vec<_>) = steps.into_iter().unzip();
    let expected: Vec<_> = expected.into_iter().map(|e| bench.outcome("lan0", e)).collect();
    bench.check(&frames, &expected)?;
    bench.check_run_count()
}

/// The kernel takes the programs that hear of connections and flows, too.
#[test]
fn the_programs_on_the_cgroup_are_accepted() -> Result<()> {
    Bench::new(CONFIG, &[("lan0", Bench::IFINDEX)])?.hear()
}
