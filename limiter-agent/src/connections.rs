//! Who has TCP connections open to this host: the answer of `GET /v1/connections`, a page of it at a time.

use std::cmp::Reverse;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::time::SystemTime;

use limiter_common::Family;
use limiter_common::packet::{Source, Space};
use serde::{Deserialize, Serialize};

use crate::status::{grid, utc};

/// The longest page.
pub const LONGEST_PAGE: usize = 1000;
/// The page of who does not say how long.
pub const DEFAULT_PAGE: usize = 100;

/// Some of the sources that have connections open, the most first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Page {
    /// When they were counted, UTC.
    pub at: String,
    /// Connections that are open, of all sources.
    pub open: u64,
    /// Sources that have any.
    pub sources: u64,
    /// Those of this page.
    pub connections: Vec<Entry>,
    /// What to ask for `after` to get the next page; none if this is the last.
    pub next: Option<String>,
}

/// A source with open connections.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// An IPv4 address, or an IPv6 network.
    pub source: String,
    /// `ipv4` or `ipv6`.
    pub family: String,
    /// How many.
    pub open: u32,
}

/// The place of a source in the order of pages: the most connections first, then by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    open: Reverse<u32>,
    space: u32,
    bits: u64,
}

impl Place {
    /// Of a source with so many.
    #[must_use]
    pub const fn new(source: Source, open: u32) -> Self {
        Self { open: Reverse(open), space: source.space as u32, bits: source.bits }
    }
}

/// As [`Page::next`] has it: `12,192.0.2.1`.
impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once(',').and_then(|(open, source)| {
            let address: IpAddr = source.split('/').next()?.parse().ok()?;
            Some(Self::new(Source::from(address), open.parse().ok()?))
        });
        parsed.ok_or_else(|| {
            format!(
                "after: \"{text}\" is not a place in the list; write the \"next\" of a page before"
            )
        })
    }
}

/// The page of at most `limit` sources of these `counts` that come `after` a place.
#[must_use]
pub fn page(
    counts: impl IntoIterator<Item = (Source, u32)>,
    after: Option<Place>,
    limit: usize,
) -> Page {
    let (mut open, mut sources, mut rest) = (0, 0, Vec::new());
    for (source, count) in counts {
        open += u64::from(count);
        sources += 1;
        let place = Place::new(source, count);
        if after.is_none_or(|after| after < place) {
            rest.push((place, source));
        }
    }
    let has_more = rest.len() > limit;
    if has_more {
        rest.select_nth_unstable_by_key(limit, |(place, _)| *place);
        rest.truncate(limit);
    }
    rest.sort_unstable_by_key(|(place, _)| *place);
    let connections: Vec<_> = rest
        .into_iter()
        .map(|(place, source)| Entry {
            source: text(source),
            family: family(source).label().to_owned(),
            open: place.open.0,
        })
        .collect();
    let next = connections.last().filter(|_| has_more);
    let next = next.map(|last| format!("{},{}", last.open, last.source));
    Page { at: utc(SystemTime::now()), open, sources, connections, next }
}

/// The family whose metrics a source is in.
#[must_use]
pub const fn family(source: Source) -> Family {
    match source.space {
        Space::Ipv4 => Family::Ipv4,
        Space::Ipv6 | Space::LinkLocal | Space::Nat64 | Space::SixToFour => Family::Ipv6,
    }
}

/// A source as people write it.
#[must_use]
pub fn text(source: Source) -> String {
    let Source { space, bits } = source;
    let v6 = |high: u64, low: u64| Ipv6Addr::from(u128::from(high) << 64 | u128::from(low));
    match space {
        Space::Ipv4 => Ipv4Addr::from(u32::try_from(bits).unwrap_or(u32::MAX)).to_string(),
        Space::Ipv6 => format!("{}/64", v6(bits, 0)),
        Space::LinkLocal => v6(0xfe80 << 48, bits).to_string(),
        Space::Nat64 => v6(0x0064_ff9b << 32, bits).to_string(),
        Space::SixToFour => format!("{}/48", v6(0x2002 << 48 | bits << 16, 0)),
    }
}

/// For people, at 80 columns.
impl fmt::Display for Page {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{} connections from {} sources", self.open, self.sources)?;
        let rows = self.connections.iter().map(|it| [it.source.clone(), it.open.to_string()]);
        write!(out, "{}", grid(["SOURCE", "OPEN>"], rows))
    }
}

#[cfg(test)]
mod tests {
    use limiter_common::abi::SourceAddress;

    use super::*;

    fn source(address: &str) -> Source {
        SourceAddress::from(address.parse::<IpAddr>().expect("is an address")).into()
    }

    const ADDRESSES: [(&str, &str); 5] = [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1:2", "fe80::1:2"),
        ("64:ff9b::192.0.2.1", "64:ff9b::c000:201"),
        ("2002:c000:0201:5::1", "2002:c000:201::/48"),
    ];

    #[test]
    fn sources_are_written_as_people_write_them_and_read_again() {
        for (address, written) in ADDRESSES {
            let source = source(address);
            assert_eq!(text(source), written);
            assert_eq!(format!("7,{written}").parse(), Ok(Place::new(source, 7)));
        }
        for wrong in ["", "7", "7,", ",192.0.2.1", "-1,192.0.2.1", "7,nobody", "4294967296,::1"] {
            let error = wrong.parse::<Place>().expect_err(wrong);
            assert!(error.contains(&format!("\"{wrong}\"")) && error.contains("next"), "{error}");
        }
    }

    /// Pages, one after the other, are the whole list in order, whatever their length.
    #[test]
    fn pages_make_up_the_list() {
        let counts: Vec<_> = (0..50_u32)
            .map(|n| (Source::ipv4(n * 7919), n % 5 + 1))
            .chain(ADDRESSES.map(|(address, _)| (source(address), 3)))
            .collect();
        let whole = page(counts.clone(), None, 1000);
        assert_eq!((whole.sources, whole.next), (55, None));
        assert_eq!(whole.open, 10 * (1 + 2 + 3 + 4 + 5) + 15);
        assert!(whole.connections.is_sorted_by(|a, b| a.open >= b.open));
        for limit in [1, 7, 54, 55] {
            let (mut found, mut after) = (Vec::new(), None);
            loop {
                let page = page(counts.clone(), after, limit);
                assert!(page.connections.len() <= limit);
                found.extend(page.connections);
                let Some(next) = page.next else { break };
                after = Some(next.parse().expect("is a place"));
            }
            assert_eq!(found, whole.connections, "{limit} at a time");
        }
    }

    #[test]
    fn people_see_this() {
        let mut page = page([(source("192.0.2.1"), 12), (source("2001:db8::1"), 3)], None, 10);
        page.at = "2026-11-30T15:00:00Z".to_owned();
        let expected = "\
15 connections from 2 sources

SOURCE         OPEN
192.0.2.1        12
2001:db8::/64     3
";
        assert_eq!(page.to_string(), expected);
    }
}
