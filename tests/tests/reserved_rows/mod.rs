//! Rows about reserves: by interface and TTL, the built-in ones among them; and about warnings.

mod warnings;

use limiter_common::{
    Action::{Drop, Pass},
    Family::{Ipv4, Ipv6},
    Reason::{Blocked, Conform, NewSource, PacketRate},
};

use super::{On, Row, common::frame::*, limited, row};

#[expect(clippy::too_many_lines, reason = "a table")]
pub(super) fn rows() -> Vec<Row> {
    let rest = "rest";
    let mut rows = vec![
        row(
            "reserved on its interface",
            On::Lan,
            vec![tcp(v4(40), 4000, 2222, SYN); 3],
            vec![
                (Ipv4, "reserve-mgmt", Conform, Pass),
                (Ipv4, "reserve-mgmt", Conform, Pass),
                (Ipv4, "reserve-mgmt", PacketRate, Drop),
            ],
        ),
        limited("and not elsewhere", &tcp(v4(41), 4000, 2222, SYN), Ipv4, "syn", 2),
        row(
            "nor on an unknown interface",
            On::Unknown,
            vec![tcp(v4(42), 4000, 2222, SYN)],
            vec![(Ipv4, "syn", Conform, Pass)],
        ),
        limited(
            "TTL 255 from a neighbour",
            &with_ttl(tcp(v4(43), 4000, 1179, ACK), 255),
            Ipv4,
            "reserve-gtsm",
            2,
        ),
        limited("TTL 254", &with_ttl(tcp(v4(44), 4000, 1179, ACK), 254), Ipv4, rest, 4),
        limited("TTL 0", &with_ttl(tcp(v4(45), 4000, 1179, ACK), 0), Ipv4, rest, 4),
        limited(
            "hop limit 255 behind extension headers",
            &with_ttl(chain(v6(46), &[0, 60], 6, &tcp_header(4000, 1179, ACK)), 255),
            Ipv6,
            "reserve-gtsm",
            2,
        ),
        limited("hop limit 254", &with_ttl(tcp(v6(47), 4000, 1179, ACK), 254), Ipv6, rest, 4),
        row(
            "BFD is built in, from a neighbour",
            On::Wan,
            vec![
                with_ttl(udp(v4(48), 49152, 3784, 24), 255),
                with_ttl(udp(v6(48), 49152, 3784, 24), 255),
                with_ttl(udp(v4(48), 49152, 3784, 24), 254),
                with_ttl(udp(v6(48), 49152, 3784, 24), 254),
            ],
            vec![
                (Ipv4, "reserve-bfd", Conform, Pass),
                (Ipv6, "reserve-bfd", Conform, Pass),
                (Ipv4, rest, Conform, Pass),
                (Ipv6, rest, Conform, Pass),
            ],
        ),
        row(
            "what else is built in",
            On::Wan,
            vec![
                tcp(v4(49), 4000, 22, SYN),
                tcp(v6(49), 4000, 179, SYN),
                with_ttl(raw(v4(49), 112, &[0x31; 20]), 255),
                udp(addr("0.0.0.0"), 68, 67, 300),
                udp(addr("fe80::49"), 546, 547, 100),
            ],
            vec![
                (Ipv4, "reserve-ssh", Conform, Pass),
                (Ipv6, "reserve-bgp", Conform, Pass),
                (Ipv4, "reserve-vrrp", Conform, Pass),
                (Ipv4, "reserve-dhcp", Conform, Pass),
                (Ipv6, "reserve-dhcp", Conform, Pass),
            ],
        ),
        limited("fragmentation needed", &icmp(v4(50), 3), Ipv4, "reserve-icmp-errors", 3),
        limited("time exceeded", &icmp(v4(51), 11), Ipv4, "reserve-icmp-errors", 3),
        limited("packet too big", &icmp(v6(50), 2), Ipv6, "reserve-icmpv6-errors", 3),
        limited("type 2 is no error of ICMP", &icmp(v4(52), 2), Ipv4, rest, 4),
        row(
            "a reserve's own budget for new sources",
            On::Wan,
            (60..64).map(|n| udp(v4(n), 9, 9999, 100)).collect(),
            vec![
                (Ipv4, "reserve-narrow", Conform, Pass),
                (Ipv4, "reserve-narrow", Conform, Pass),
                (Ipv4, "reserve-narrow", Conform, Pass),
                (Ipv4, "reserve-narrow", NewSource, Drop),
            ],
        ),
        row(
            "and nobody else's",
            On::Wan,
            vec![udp(v4(63), 9, 9998, 100), udp(v4(60), 9, 9999, 100)],
            vec![(Ipv4, rest, Conform, Pass), (Ipv4, "reserve-narrow", Conform, Pass)],
        ),
        limited(
            "a prefix does not scale a reserve",
            &with_ttl(tcp(addr("203.0.113.5"), 4000, 1179, ACK), 255),
            Ipv4,
            "reserve-gtsm",
            2,
        ),
        row(
            "a block holds in a reserve",
            On::Wan,
            vec![tcp(addr("198.51.100.9"), 4000, 22, SYN)],
            vec![(Ipv4, "reserve-ssh", Blocked, Drop)],
        ),
    ];
    rows.extend(warnings::rows());
    rows
}
