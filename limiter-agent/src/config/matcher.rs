//! `match = { … }`: which packets belong to a class.

use std::fmt;
use std::ops::RangeInclusive;

use limiter_common::abi::L4Index;

use super::reader::{Place, Table, Value};

/// What a packet must be to belong to a class: all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Match {
    /// One of these internet protocols; empty if any. Never empty where ports or flags are asked
    /// for.
    pub protocols: Vec<u8>,
    /// Destination port. A packet without ports (a fragment other than the first) has none of them.
    pub ports: Option<PortSet>,
    /// Source port.
    pub source_ports: Option<PortSet>,
    /// TCP flags.
    pub flags: Option<Flags>,
    /// One of these `ICMP` types; empty if any.
    pub icmp_types: Vec<u8>,
    /// Whether it is a fragment, the first or another.
    pub fragment: Option<bool>,
    /// The longest frame, in bytes from the Ethernet header without the FCS.
    pub max_bytes: Option<u16>,
}

impl Match {
    /// Whether it accepts what is below the network header. Ports and length are apart.
    #[must_use]
    pub fn accepts(&self, l4: L4) -> bool {
        let flags =
            |wanted: Flags| matches!(l4.header, Header::Tcp(flags) if wanted.accepts(flags));
        let kind = matches!(l4.header, Header::Icmp(kind) if self.icmp_types.contains(&kind));
        (self.protocols.is_empty() || self.protocols.contains(&l4.protocol))
            && self.flags.is_none_or(flags)
            && (self.icmp_types.is_empty() || kind)
            && self.fragment.is_none_or(|fragment| fragment == l4.fragment)
    }

    /// The lengths of frames that it accepts, if it asks.
    #[must_use]
    pub fn lengths(&self) -> Option<PortSet> {
        self.max_bytes.map(|most| PortSet(vec![0..=most]))
    }

    /// Whether every packet that belongs to `other` belongs here as well. It may say no although
    /// they do, never the reverse.
    pub(super) fn covers(&self, other: &Self) -> bool {
        self.covers_ports_and_lengths(Some(other))
            && L4::all().all(|l4| !other.accepts(l4) || self.accepts(l4))
    }

    /// The same, as far as ports and lengths go; without another, every packet is meant.
    pub(super) fn covers_ports_and_lengths(&self, other: Option<&Self>) -> bool {
        let within = |mine: Option<&PortSet>, theirs: Option<&PortSet>| match (mine, theirs) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(mine), Some(theirs)) => mine.covers(theirs),
        };
        let lengths = other.and_then(Self::lengths);
        within(self.ports.as_ref(), other.and_then(|it| it.ports.as_ref()))
            && within(self.source_ports.as_ref(), other.and_then(|it| it.source_ports.as_ref()))
            && within(self.lengths().as_ref(), lengths.as_ref())
    }
}

/// For people: `udp to 67-68,546-547`.
impl fmt::Display for Match {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |items: Vec<String>| items.join(",");
        let mut parts = Vec::new();
        if self.protocols.is_empty() {
            parts.push("any".to_owned());
        } else {
            parts.push(list(self.protocols.iter().map(|it| name(*it)).collect()));
        }
        let ranges = |set: &PortSet| list(set.0.iter().map(plain).collect());
        parts.extend(self.ports.as_ref().map(|set| format!("to {}", ranges(set))));
        parts.extend(self.source_ports.as_ref().map(|set| format!("from {}", ranges(set))));
        parts.extend(self.flags.map(|flags| format!("flags {flags}")));
        if !self.icmp_types.is_empty() {
            let types = PortSet::new(
                self.icmp_types.iter().map(|it| (*it).into()..=(*it).into()).collect(),
            );
            parts.push(format!("type {}", ranges(&types)));
        }
        parts
            .extend(self.fragment.map(|is| if is { "fragment" } else { "no fragment" }.to_owned()));
        parts.extend(self.max_bytes.map(|most| format!("up to {most} bytes")));
        out.write_str(&parts.join(" "))
    }
}

/// What is below the network header, as far as the table of protocols tells it apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct L4 {
    /// The internet protocol.
    pub protocol: u8,
    /// What was read of its header.
    pub header: Header,
    /// Whether it is a fragment, the first or another.
    pub fragment: bool,
}

/// What was read of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// TCP with these flags.
    Tcp(u8),
    /// `ICMP` or `ICMPv6` of this type.
    Icmp(u8),
    /// None: another protocol, or a fragment other than the first.
    Unread,
}

impl L4 {
    /// Every value there is, one for each [`L4Index`].
    pub fn all() -> impl Iterator<Item = Self> {
        [false, true].into_iter().flat_map(|fragment| {
            (0..=u8::MAX).flat_map(move |byte| {
                [
                    (byte, Header::Unread),
                    (TCP, Header::Tcp(byte)),
                    (ICMP, Header::Icmp(byte)),
                    (ICMPV6, Header::Icmp(byte)),
                ]
                .map(|(protocol, header)| Self { protocol, header, fragment })
            })
        })
    }

    /// Its place in the table of protocols.
    #[must_use]
    pub const fn index(self) -> L4Index {
        let index = match self.header {
            Header::Unread => L4Index::other(self.protocol),
            Header::Tcp(flags) => L4Index::tcp(flags),
            Header::Icmp(kind) if self.protocol == ICMP => L4Index::icmp(kind),
            Header::Icmp(kind) => L4Index::icmpv6(kind),
        };
        if self.fragment { index.fragment() } else { index }
    }
}

/// TCP flags that must be set and flags that must not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags {
    /// All of these, as in the header.
    pub set: u8,
    /// None of these.
    pub clear: u8,
}

impl Flags {
    /// Whether a header with `flags` is accepted.
    #[must_use]
    pub const fn accepts(self, flags: u8) -> bool {
        flags & self.set == self.set && flags & self.clear == 0
    }
}

/// As they are written in the file.
impl fmt::Display for Flags {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |bits: u8, mark: &'static str| {
            let chosen = FLAGS.iter().filter(move |(_, bit)| bits & bit != 0);
            chosen.map(move |(name, _)| format!("{mark}{name}"))
        };
        let all: Vec<_> = named(self.set, "").chain(named(self.clear, "!")).collect();
        out.write_str(&all.join(","))
    }
}

/// A set of ports (or lengths): ranges in order that neither overlap nor touch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortSet(Vec<RangeInclusive<u16>>);

impl PortSet {
    /// The union of these ranges.
    #[must_use]
    pub fn new(mut ranges: Vec<RangeInclusive<u16>>) -> Self {
        ranges.sort_by_key(|range| *range.start());
        let mut merged: Vec<RangeInclusive<u16>> = Vec::new();
        for range in ranges {
            match merged.last_mut() {
                Some(last) if *range.start() <= last.end().saturating_add(1) => {
                    *last = *last.start()..=*range.end().max(last.end());
                }
                _ => merged.push(range),
            }
        }
        Self(merged)
    }

    /// Whether `port` is in it.
    #[must_use]
    pub fn contains(&self, port: u16) -> bool {
        self.0.iter().any(|range| range.contains(&port))
    }

    /// Its ranges, in order and apart.
    #[must_use]
    pub fn ranges(self) -> Vec<RangeInclusive<u16>> {
        self.0
    }

    /// Its ports.
    pub fn ports(&self) -> impl Iterator<Item = u16> {
        self.0.iter().cloned().flatten()
    }

    fn covers(&self, other: &Self) -> bool {
        let inside = |theirs: &RangeInclusive<u16>| {
            self.0.iter().any(|mine| mine.contains(theirs.start()) && mine.contains(theirs.end()))
        };
        other.0.iter().all(inside)
    }
}

/// For each of the 65,536 values, the classes that accept it as a set of bits. A class without such
/// a matcher accepts all.
pub(crate) fn accepting<'a>(sets: impl Iterator<Item = Option<&'a PortSet>>) -> Vec<u64> {
    let (mut everywhere, mut ranges) = (0, Vec::new());
    for (order, set) in sets.enumerate() {
        match set {
            None => everywhere |= 1 << order,
            Some(set) => ranges.extend(set.0.iter().map(|range| (range, 1 << order))),
        }
    }
    let mut accepting = vec![everywhere; 1 << 16];
    for (range, class) in ranges {
        for value in &mut accepting[usize::from(*range.start())..=usize::from(*range.end())] {
            *value |= class;
        }
    }
    accepting
}

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
const SCTP: u8 = 132;

const PROTOCOLS: &[(&str, u8)] =
    &[("tcp", TCP), ("udp", UDP), ("icmp", ICMP), ("icmpv6", ICMPV6), ("sctp", SCTP)];

/// RFC 9293 §3.1, RFC 3168 §6.1.
const FLAGS: &[(&str, u8)] = &[
    ("fin", 0x01),
    ("syn", 0x02),
    ("rst", 0x04),
    ("psh", 0x08),
    ("ack", 0x10),
    ("urg", 0x20),
    ("ece", 0x40),
    ("cwr", 0x80),
];

/// The shortest frame with an IP packet: Ethernet and IPv4 header.
const SHORTEST: u64 = 34;
/// Longer frames count as one byte more than this.
const LONGEST: u64 = 65_534;

/// The matchers of `table`; `None` only if something was noted.
pub(super) fn read(table: &Table<'_>) -> Option<Match> {
    let (protocol, ports, source_ports) =
        (table.get("protocol"), table.get("ports"), table.get("source_ports"));
    let (flags, icmp_type) = (table.get("flags"), table.get("icmp_type"));
    let (fragment, max_bytes) = (table.get("fragment"), table.get("max_bytes"));
    let all = [&protocol, &ports, &source_ports, &flags, &icmp_type, &fragment, &max_bytes];
    if all.iter().all(|value| value.is_none()) {
        table.place().error(
            "an empty match says nothing",
            "add a matcher such as protocol = \"udp\", or remove it if this is the last class",
        );
        return None;
    }
    let places = Places {
        protocol: place(protocol.as_ref()),
        ports: place(ports.as_ref().or(source_ports.as_ref())),
        flags: place(flags.as_ref()),
        icmp_type: place(icmp_type.as_ref()),
    };
    let protocols = protocol.map_or(Some(Vec::new()), protocols);
    let ports = ports.map(port_set);
    let source_ports = source_ports.map(port_set);
    let flags = flags.map(|value| flag_set(&value));
    let icmp_types = icmp_type.map_or(Some(Vec::new()), icmp_types);
    let fragment = fragment.map(|value| value.boolean());
    let max_bytes = max_bytes.map(|value| value.integer(SHORTEST..=LONGEST));

    let mut protocols = protocols?;
    agree(&places, &protocols)?;
    if protocols.is_empty() && places.flags.is_some() {
        protocols = vec![TCP];
    } else if protocols.is_empty() && places.ports.is_some() {
        protocols = vec![TCP, UDP, SCTP];
    }
    Some(Match {
        protocols,
        ports: settled(ports)?,
        source_ports: settled(source_ports)?,
        flags: settled(flags)?,
        icmp_types: icmp_types?,
        fragment: settled(fragment)?,
        max_bytes: settled(max_bytes)?.and_then(|most| u16::try_from(most).ok()),
    })
}

fn place<'r>(value: Option<&Value<'r>>) -> Option<Place<'r>> {
    value.map(|value| value.place().clone())
}

/// Where the matchers stand that can contradict each other.
struct Places<'r> {
    protocol: Option<Place<'r>>,
    ports: Option<Place<'r>>,
    flags: Option<Place<'r>>,
    icmp_type: Option<Place<'r>>,
}

/// Notes matchers that no packet can satisfy together.
fn agree(places: &Places<'_>, protocols: &[u8]) -> Option<()> {
    let stranger = |allowed: &[u8]| {
        protocols.iter().find(|protocol| !allowed.contains(protocol)).map(|found| name(*found))
    };
    if let (Some(place), Some(found)) = (&places.ports, stranger(&[TCP, UDP, SCTP])) {
        place.error(
            format!("can never match: protocol {found} has no ports"),
            "remove the ports, or that protocol (tcp, udp and sctp have ports)",
        );
        return None;
    }
    if let (Some(place), Some(found)) = (&places.flags, stranger(&[TCP])) {
        place.error(
            format!("can never match: protocol {found} has no such flags"),
            "remove the flags, or write protocol = \"tcp\"",
        );
        return None;
    }
    if let (Some(place), Some(other)) = (
        &places.icmp_type,
        places.ports.as_ref().map(|_| "ports").or(places.flags.as_ref().map(|_| "flags")),
    ) {
        place.error(
            format!("can never match: icmp has no {other}"),
            format!("remove icmp_type or the {other}"),
        );
        return None;
    }
    if let Some(place) = &places.icmp_type
        && !matches!(protocols, [ICMP | ICMPV6])
    {
        let place = places.protocol.as_ref().unwrap_or(place);
        place.error(
            "icmp_type needs to know which ICMP: the numbers differ",
            "write protocol = \"icmp\" or protocol = \"icmpv6\", in a class for each",
        );
        return None;
    }
    Some(())
}

fn protocols(value: Value<'_>) -> Option<Vec<u8>> {
    let cure = "write \"tcp\", \"udp\", \"icmp\", \"icmpv6\", \"sctp\" or a number from 0 to 255";
    let mut protocols = Vec::new();
    each(value, |item| {
        let protocol = match item.raw().as_str() {
            None if item.raw().is_integer() => u8::try_from(item.integer(0..=255)?).ok()?,
            None => {
                item.mistyped("a protocol", cure);
                return None;
            }
            Some(text) => {
                let known = PROTOCOLS.iter().find(|(name, _)| *name == text);
                if known.is_none() {
                    item.place().error(format!("\"{text}\" is not a protocol"), cure);
                }
                known?.1
            }
        };
        if protocols.contains(&protocol) {
            let cause = format!("{} is in the list twice", name(protocol));
            item.place().error(cause, "remove one of the two");
            return None;
        }
        protocols.push(protocol);
        Some(())
    })?;
    Some(protocols)
}

pub(super) fn port_set(value: Value<'_>) -> Option<PortSet> {
    let mut ranges: Vec<RangeInclusive<u16>> = Vec::new();
    each(value, |item| {
        let range = port_range(item)?;
        let overlaps = |other: &&RangeInclusive<u16>| {
            range.start() <= other.end() && other.start() <= range.end()
        };
        if let Some(other) = ranges.iter().find(overlaps) {
            let cause = format!("{} overlaps {}", show(&range), show(other));
            item.place().error(cause, "write each port once");
            return None;
        }
        ranges.push(range);
        Some(())
    })?;
    Some(PortSet::new(ranges))
}

fn port_range(item: &Value<'_>) -> Option<RangeInclusive<u16>> {
    let cure = "write a port from 0 to 65535, or a range: \"1000-2000\"";
    let Some(text) = item.raw().as_str() else {
        if !item.raw().is_integer() {
            item.mistyped("a port", cure);
            return None;
        }
        let port = u16::try_from(item.integer(0..=u64::from(u16::MAX))?).ok()?;
        return Some(port..=port);
    };
    let ends = text.split_once('-').and_then(|(low, high)| {
        Some((low.trim().parse::<u16>().ok()?, high.trim().parse::<u16>().ok()?))
    });
    match ends {
        None => item.place().error(format!("\"{text}\" is not a range of ports"), cure),
        Some((low, high)) if low > high => {
            let cause = format!("the range \"{text}\" is reversed");
            item.place().error(cause, format!("write \"{high}-{low}\""));
        }
        Some((low, high)) => return Some(low..=high),
    }
    None
}

fn flag_set(value: &Value<'_>) -> Option<Flags> {
    let names: Vec<_> = FLAGS.iter().map(|(name, _)| *name).collect();
    let cure =
        format!("write flags from {}, each alone or with \"!\": \"syn,!ack\"", names.join(", "));
    let text = value.string(&cure)?;
    let mut flags = Flags { set: 0, clear: 0 };
    for word in text.split(',').map(str::trim) {
        let (bare, side) = match word.strip_prefix('!') {
            Some(bare) => (bare, &mut flags.clear),
            None => (word, &mut flags.set),
        };
        let Some((_, bit)) = FLAGS.iter().find(|(name, _)| *name == bare) else {
            value.place().error(format!("\"{word}\" is not a TCP flag"), cure);
            return None;
        };
        *side |= bit;
    }
    if flags.set & flags.clear != 0 {
        let cause = format!("can never match: \"{text}\" wants a flag both set and clear");
        value.place().error(cause, "remove one of the two");
        return None;
    }
    Some(flags)
}

fn icmp_types(value: Value<'_>) -> Option<Vec<u8>> {
    let mut types = Vec::new();
    each(value, |item| {
        let kind = u8::try_from(item.integer(0..=255)?).ok()?;
        if types.contains(&kind) {
            item.place().error(format!("{kind} is in the list twice"), "remove one of the two");
            return None;
        }
        types.push(kind);
        Some(())
    })?;
    Some(types)
}

/// Reads every item of a list; `None` if it is empty or something was noted about an item.
fn each<'r>(value: Value<'r>, mut read: impl FnMut(&Value<'r>) -> Option<()>) -> Option<()> {
    let items = value.one_or_more();
    let read = items.iter().filter_map(&mut read).count();
    (read == items.len() && read > 0).then_some(())
}

/// An absent matcher is fine, a wrong one is not.
#[expect(clippy::option_option, reason = "absent and wrong are two things")]
fn settled<T>(read: Option<Option<T>>) -> Option<Option<T>> {
    match read {
        None => Some(None),
        Some(value) => value.map(Some),
    }
}

fn name(protocol: u8) -> String {
    let known = PROTOCOLS.iter().find(|(_, number)| *number == protocol);
    known.map_or_else(|| protocol.to_string(), |(name, _)| (*name).to_owned())
}

fn show(range: &RangeInclusive<u16>) -> String {
    if range.start() == range.end() { plain(range) } else { format!("\"{}\"", plain(range)) }
}

fn plain(range: &RangeInclusive<u16>) -> String {
    let (low, high) = (range.start(), range.end());
    if low == high { low.to_string() } else { format!("{low}-{high}") }
}
