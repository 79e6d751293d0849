//! Rows about the warning at four fifths of a burst.

use limiter_common::{
    Action::{Drop, Pass},
    Family::{self, Ipv4, Ipv6},
    Reason::{ByteRate, Conform, NearLimit, PacketRate},
};

use super::super::{Expected, On, Row, common::frame::*, row};

pub(super) fn rows() -> Vec<Row> {
    // Of ten packets the last finds nine used, which is more than eight.
    let packets = |family: Family| -> Vec<Expected> {
        let mut expected = vec![(family, "warned", Conform, Pass); 9];
        expected.push((family, "warned", NearLimit, Pass));
        expected.extend([(family, "warned", PacketRate, Drop); 2]);
        expected
    };
    // Of 10,000 bytes the seventh finds 8,520 used, less what came in since.
    let mut bytes = vec![(Ipv4, "warned-bytes", Conform, Pass); 6];
    bytes.extend([(Ipv4, "warned-bytes", NearLimit, Pass), (Ipv4, "warned-bytes", ByteRate, Drop)]);
    vec![
        row("a warning", On::Wan, vec![udp(v4(200), 9, 7777, 100); 12], packets(Ipv4)),
        row("a warning, IPv6", On::Wan, vec![udp(v6(200), 9, 7777, 100); 12], packets(Ipv6)),
        row("a warning by bytes", On::Wan, vec![udp(v4(201), 9, 7778, 1378); 8], bytes),
    ]
}
