//! `cidr = "…"` of prefixes, exemptions and blocks.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};

use ipnet::{IpNet, Ipv6Net};

use super::reader::Table;

/// The network of `table`; `None` only if something was noted.
pub(super) fn read(table: &Table<'_>) -> Option<IpNet> {
    let value = table.require("cidr", r#"cidr = "192.0.2.0/24""#)?;
    match parse(value.string(CURE)?) {
        Ok(net) => Some(net),
        Err((cause, cure)) => {
            value.place().error(cause, cure);
            None
        }
    }
}

const CURE: &str = r#"write a network such as "192.0.2.0/24" or "2001:db8::/32""#;

/// The network that is written as `text`: not narrower than a source.
///
/// # Errors
/// What is wrong with it, and a cure.
pub(super) fn parse(text: &str) -> Result<IpNet, (String, String)> {
    let parsed = match text.parse::<IpAddr>() {
        Ok(address) => Some(IpNet::from(address)),
        Err(_) => text.parse().ok(),
    };
    let Some(net) = parsed else {
        return Err((format!("\"{text}\" is not a network"), CURE.to_owned()));
    };
    if net.trunc() != net {
        return Err((
            format!("\"{text}\" has bits set beyond its length"),
            format!("write \"{}\", or the length that was meant", net.trunc()),
        ));
    }
    if let IpNet::V6(net) = net
        && let Some((longest, reason)) = longest_key(net)
    {
        let wider = Ipv6Net::new(net.addr(), longest).map_or(net, |net| net.trunc());
        return Err((
            format!("\"{text}\" is narrower than a source: {reason}"),
            format!("write \"{wider}\""),
        ));
    }
    Ok(net)
}

/// Notes an error where a value was seen before.
pub(super) struct Seen<T>(HashMap<T, usize>);

impl<T: Eq + Hash> Seen<T> {
    pub(super) fn new() -> Self {
        Self(HashMap::new())
    }

    /// The line of the earlier one, if there is one.
    pub(super) fn before(&mut self, value: T, line: usize) -> Option<usize> {
        match self.0.entry(value) {
            std::collections::hash_map::Entry::Occupied(earlier) => Some(*earlier.get()),
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert(line);
                None
            }
        }
    }
}

/// If `net` tells apart addresses that share a bucket (see
/// [`Source::ipv6`](limiter_common::packet::Source::ipv6)): the longest prefix that does not, and
/// why.
fn longest_key(net: Ipv6Net) -> Option<(u8, &'static str)> {
    let within = |address: Ipv6Addr, length| {
        Ipv6Net::new(address, length).is_ok_and(|space| space.contains(&net))
    };
    let whole_address = within(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10)
        || within(Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 96);
    if whole_address {
        None
    } else if within(Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16) {
        (net.prefix_len() > 48).then_some((48, "6to4 is limited per IPv4 address, a /48"))
    } else {
        (net.prefix_len() > 64).then_some((64, "IPv6 is limited per /64"))
    }
}
