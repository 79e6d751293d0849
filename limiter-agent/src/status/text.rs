//! [`Status`] for people: readable at 80 columns.

use std::fmt;

use super::{
    Block, Class, ConfigState, Exemption, Interface, Limit, ModeOverride, OpenConnections, Pending,
    Reserve, Status, Table, Total,
};

impl fmt::Display for Status {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, abi, pid, mode, .. } = self;
        writeln!(
            out,
            "limiter-agent {version} (ABI {abi}), pid {pid}, since {}",
            day(&self.started)
        )?;
        writeln!(out, "mode:     {mode} ({})", meaning(mode))?;
        if let Some(ModeOverride { since, by, .. }) = &self.mode_override {
            writeln!(out, "          by command since {} ({by})", day(since))?;
        }
        self.problems.iter().try_for_each(|problem| writeln!(out, "problem:  {problem}"))?;
        let policies: Vec<_> = self
            .failure_policies
            .iter()
            .map(|policy| format!("{} {}", words(&policy.event), policy.action))
            .collect();
        writeln!(out, "faults:   {}", policies.join(", "))?;
        config(out, &self.config)?;
        tables(out, &self.tables, self.map_memory_bytes)?;
        let (per_second, burst) = limit(Some(self.new_sources));
        writeln!(out, "new:      {per_second} sources/s let in, burst {burst}")?;
        writeln!(out, "proofs:   {}", self.proofs)?;
        connections(out, &self.connections)?;
        let (per_second, burst) = limit(Some(self.established));
        writeln!(out, "own:      {per_second} packets/s beyond all limits, burst {burst}")?;
        writeln!(out, "          tcp: {}", self.own_flows.tcp)?;
        writeln!(out, "          udp: {}", self.own_flows.udp)?;
        interfaces(out, &self.interfaces)?;
        write!(out, "{}", reserves(&self.reserves))?;
        classes(out, &self.classes)?;
        exemptions(out, &self.exemptions)?;
        blocks(out, &self.blocks)?;
        totals(out, &self.totals)
    }
}

fn meaning(mode: &str) -> &'static str {
    match mode {
        "enforce" => "what is over its limit is dropped",
        "observe" => "nothing is dropped, only counted as would_drop",
        "bypass" => "nothing is limited",
        _ => "unknown",
    }
}

fn config(out: &mut fmt::Formatter<'_>, config: &ConfigState) -> fmt::Result {
    writeln!(out, "config:   {}, read {}", config.path, day(&config.loaded))?;
    if config.source != config.path {
        writeln!(out, "          in force is {}", config.source)?;
    }
    if let Some(Pending { file, until, seconds_left }) = &config.pending {
        writeln!(out, "          NOT CONFIRMED: {file};")?;
        writeln!(out, "          rolled back at {}, in {seconds_left} s", day(until))?;
    }
    if let Some(why) = &config.rolled_back {
        writeln!(out, "          ROLLED BACK: {why}")?;
    }
    let Some(reload) = &config.last_reload else { return Ok(()) };
    if reload.successful {
        return Ok(());
    }
    writeln!(out, "          RELOAD FAILED at {}; the old settings stay:", day(&reload.at))?;
    reload.errors.iter().try_for_each(|error| writeln!(out, "          {error}"))
}

fn tables(out: &mut fmt::Formatter<'_>, tables: &[Table], memory: u64) -> fmt::Result {
    let sizes: Vec<_> = tables
        .iter()
        .map(|table| format!("{} {} sources", grouped(table.capacity.into()), table.family))
        .collect();
    writeln!(out, "tables:   {}; maps take {}", sizes.join(", "), bytes(memory))
}

fn connections(out: &mut fmt::Formatter<'_>, it: &OpenConnections) -> fmt::Result {
    if it.counted.starts_with("unavailable") {
        return writeln!(out, "open:     {}", it.counted);
    }
    let (open, sources) = (grouped(it.open), grouped(it.sources));
    writeln!(out, "open:     {open} connections from {sources} sources")?;
    if let Some(most) = &it.most {
        writeln!(out, "          the most: {} from {}", grouped(most.open.into()), most.source)?;
    }
    if it.uncounted != 0 {
        writeln!(out, "          NOT COUNTED for want of room: {}", grouped(it.uncounted))?;
    }
    Ok(())
}

fn interfaces(out: &mut fmt::Formatter<'_>, interfaces: &[Interface]) -> fmt::Result {
    let mut grid = Grid::new(&["INTERFACE", "INDEX>", "XDP", "DRIVER", "ATTACHED BY"]);
    for it in interfaces {
        let driver = if it.driver.is_empty() { "-" } else { &it.driver };
        grid.row([&it.name, &it.ifindex.to_string(), &it.mode, driver, &it.attachment]);
    }
    grid.write(out)
}

/// A table of them, after an empty line; nothing if there are none.
pub(crate) fn reserves(reserves: &[Reserve]) -> impl fmt::Display {
    let mut grid =
        Grid::new(&["RESERVE", "MATCH", "INTERFACE", "TTL>", "PACKETS/S>", "BURST>", "NEW/S>"]);
    for it in reserves {
        let (rate, burst) = limit(it.packets);
        let (news, _) = limit(it.new_sources);
        let interface = it.interface.as_deref().unwrap_or("any");
        let ttl = it.ttl.map_or_else(|| "any".to_owned(), |ttl| ttl.to_string());
        grid.row([&*it.name, &it.matches, interface, &ttl, &rate, &burst, &news]);
    }
    fmt::from_fn(move |out| grid.write(out))
}

fn classes(out: &mut fmt::Formatter<'_>, classes: &[Class]) -> fmt::Result {
    let mut grid = Grid::new(&[
        "CLASS",
        "MODE",
        "PACKETS/S>",
        "BURST>",
        "BYTES/S>",
        "BURST>",
        "NEW/S>",
        "OPEN>",
    ]);
    for class in classes {
        let (rate, burst) = limit(class.packets);
        let (byte_rate, byte_burst) = limit(class.bytes);
        let (news, _) = limit(class.new_sources);
        let open = class.connections.map_or("-".to_owned(), |most| grouped(most.into()));
        grid.row([&class.name, &class.mode, &*rate, &burst, &byte_rate, &byte_burst, &news, &open]);
    }
    grid.write(out)
}

/// Rate and burst, or a dash for each.
pub(crate) fn limit(limit: Option<Limit>) -> (String, String) {
    match limit {
        Some(Limit { per_second, burst }) => (rate(per_second), grouped(burst)),
        None => ("-".to_owned(), "-".to_owned()),
    }
}

/// Whole where it is whole; three digits after the point for slow ones.
fn rate(per_second: f64) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a configured rate is positive and below 2⁶⁴"
    )]
    if per_second >= 100.0 || per_second.fract() == 0.0 {
        grouped(per_second.round() as u64)
    } else {
        format!("{per_second:.3}")
    }
}

fn exemptions(out: &mut fmt::Formatter<'_>, exemptions: &[Exemption]) -> fmt::Result {
    let mut grid = Grid::new(&["EXEMPT", "INTERFACE", "EXPIRES", "OWNER"]);
    for it in exemptions {
        let interface = it.interface.as_deref().unwrap_or("any, SPOOFABLE");
        grid.row([&*it.cidr, interface, &expiry(it.expires.as_deref()), &it.owner]);
    }
    grid.write(out)
}

fn blocks(out: &mut fmt::Formatter<'_>, blocks: &[Block]) -> fmt::Result {
    let mut grid = Grid::new(&["BLOCKED", "STATE", "EXPIRES", "BY", "REASON"]);
    for it in blocks {
        let state = if it.active { "active" } else { "expired" };
        let (by, reason) = (it.by.as_deref(), it.reason.as_deref());
        let (by, reason) = (by.unwrap_or("the file"), reason.unwrap_or_default());
        grid.row([&*it.cidr, state, &expiry(it.expires.as_deref()), by, reason]);
    }
    grid.write(out)
}

fn expiry(expires: Option<&str>) -> String {
    expires.map_or("never".to_owned(), day)
}

fn totals(out: &mut fmt::Formatter<'_>, totals: &[Total]) -> fmt::Result {
    let mut grid = Grid::new(&["ACTION", "REASON", "PACKETS>", "BYTES>"]);
    for it in totals {
        grid.row([&*it.action, &it.reason, &grouped(it.packets), &grouped(it.bytes)]);
    }
    grid.write(out)
}

/// `2026-11-30T15:00:00Z` as `2026-11-30 15:00:00 UTC`.
fn day(rfc3339: &str) -> String {
    rfc3339.replacen('T', " ", 1).replacen('Z', " UTC", 1)
}

fn words(label: &str) -> String {
    label.replace('_', " ")
}

/// With a separator every three digits.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `bytes` in the binary unit that suits it.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "for people to read")]
pub(crate) fn bytes(bytes: u64) -> String {
    const MIB: f64 = 1_048_576.0;
    let mib = bytes as f64 / MIB;
    if mib >= 1024.0 { format!("{:.1} GiB", mib / 1024.0) } else { format!("{mib:.1} MiB") }
}

/// A table after an empty line; nothing if there are no rows. A heading that ends in `>` aligns to the right.
pub(crate) fn grid<const N: usize>(
    headings: [&'static str; N],
    rows: impl Iterator<Item = [String; N]>,
) -> impl fmt::Display {
    let grid = Grid { headings, rows: rows.collect() };
    fmt::from_fn(move |out| grid.write(out))
}

/// Columns as wide as their widest cell. A heading that ends in `>` aligns to the right.
pub(crate) struct Grid<const N: usize> {
    headings: [&'static str; N],
    rows: Vec<[String; N]>,
}

impl<const N: usize> Grid<N> {
    pub(crate) fn new(headings: &[&'static str; N]) -> Self {
        Self { headings: *headings, rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: [&str; N]) {
        self.rows.push(cells.map(str::to_owned));
    }

    /// Nothing if there are no rows.
    pub(crate) fn write(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rows.is_empty() {
            return Ok(());
        }
        writeln!(out)?;
        let titles = self.headings.map(|heading| heading.trim_end_matches('>').to_owned());
        for row in std::iter::once(&titles).chain(&self.rows) {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let width = self.width(column);
                let padded = if self.headings[column].ends_with('>') {
                    format!("{cell:>width$}")
                } else {
                    format!("{cell:<width$}")
                };
                line.push_str(&padded);
                line.push_str("  ");
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }

    fn width(&self, column: usize) -> usize {
        let title = self.headings[column].trim_end_matches('>').chars().count();
        self.rows.iter().map(|row| row[column].chars().count()).fold(title, usize::max)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Entry, FailurePolicy, OwnFlows, Reload};
    use super::*;

    #[expect(clippy::too_many_lines, reason = "all that a status has")]
    fn status() -> Status {
        Status {
            version: "0.1.0".into(),
            abi: 1,
            pid: 4242,
            started: "2026-11-30T15:00:00Z".into(),
            mode: "observe".into(),
            mode_override: Some(ModeOverride {
                mode: "observe".into(),
                since: "2026-11-30T15:30:00Z".into(),
                by: "uid 0, pid 99".into(),
            }),
            problems: vec!["eth1 is gone".into()],
            failure_policies: vec![
                FailurePolicy { event: "malformed".into(), action: "drop".into() },
                FailurePolicy { event: "table_full".into(), action: "pass".into() },
            ],
            interfaces: vec![Interface {
                name: "eth0".into(),
                ifindex: 2,
                mode: "native".into(),
                driver: "virtio_net".into(),
                attachment: "link".into(),
            }],
            reserves: vec![Reserve {
                name: "bfd".into(),
                built_in: true,
                matches: "udp to 3784".into(),
                interface: None,
                ttl: Some(255),
                packets: Some(Limit { per_second: 5000.0, burst: 10_000 }),
                new_sources: Some(Limit { per_second: 100.0, burst: 1_000 }),
                unproven: None,
            }],
            classes: vec![
                Class {
                    name: "dns".into(),
                    mode: "enforce".into(),
                    packets: Some(Limit { per_second: 1000.0, burst: 2000 }),
                    bytes: Some(Limit { per_second: 500_000.0, burst: 262_144 }),
                    connections: Some(100),
                    new_sources: Some(Limit { per_second: 2000.0, burst: 20_000 }),
                    unproven: Some(Limit { per_second: 9000.0, burst: 18_000 }),
                    total: None,
                },
                Class {
                    name: "rest".into(),
                    mode: "observe".into(),
                    packets: Some(Limit { per_second: 1.0 / 60.0, burst: 1 }),
                    bytes: None,
                    connections: None,
                    new_sources: None,
                    unproven: None,
                    total: None,
                },
            ],
            exemptions: vec![Exemption {
                cidr: "10.0.0.0/8".into(),
                interface: None,
                owner: "platform".into(),
                expires: None,
                spoofable: true,
            }],
            blocks: vec![Block {
                cidr: "198.51.100.0/24".into(),
                expires: Some("2027-01-01T00:00:00Z".into()),
                active: true,
                reason: Some("scans".into()),
                by: Some("uid 0".into()),
            }],
            tables: vec![
                Table { family: "ipv4".into(), capacity: 1_000_000 },
                Table { family: "ipv6".into(), capacity: 1_000_000 },
            ],
            new_sources: Limit { per_second: 10_000.0, burst: 100_000 },
            proofs: "handshakes".into(),
            connections: OpenConnections {
                counted: "handshakes".into(),
                open: 1234,
                sources: 56,
                most: Some(Entry {
                    source: "2001:db8:1:2::/64".into(),
                    family: "ipv6".into(),
                    open: 100,
                }),
                uncounted: 3,
            },
            established: Limit { per_second: 200_000.0, burst: 400_000 },
            own_flows: OwnFlows { tcp: "connect".into(), udp: "unavailable: no cgroup v2".into() },
            map_memory_bytes: 200 << 20,
            config: ConfigState {
                path: "/etc/limiter/limiter.toml".into(),
                source: "new.toml".into(),
                loaded: "2026-11-30T15:00:00Z".into(),
                pending: Some(Pending {
                    file: "new.toml".into(),
                    until: "2026-11-30T15:01:00Z".into(),
                    seconds_left: 59,
                }),
                rolled_back: None,
                last_reload: Some(Reload {
                    at: "2026-11-30T16:00:00Z".into(),
                    successful: false,
                    changes: vec![],
                    errors: vec!["limiter.toml:3:1: bad; better".into()],
                }),
            },
            totals: vec![Total {
                action: "would_drop".into(),
                reason: "packet_rate".into(),
                packets: 1_234_567,
                bytes: 98_765_432_100,
            }],
        }
    }

    #[test]
    fn people_see_this() {
        let expected = "\
limiter-agent 0.1.0 (ABI 1), pid 4242, since 2026-11-30 15:00:00 UTC
mode:     observe (nothing is dropped, only counted as would_drop)
          by command since 2026-11-30 15:30:00 UTC (uid 0, pid 99)
problem:  eth1 is gone
faults:   malformed drop, table full pass
config:   /etc/limiter/limiter.toml, read 2026-11-30 15:00:00 UTC
          in force is new.toml
          NOT CONFIRMED: new.toml;
          rolled back at 2026-11-30 15:01:00 UTC, in 59 s
          RELOAD FAILED at 2026-11-30 16:00:00 UTC; the old settings stay:
          limiter.toml:3:1: bad; better
tables:   1,000,000 ipv4 sources, 1,000,000 ipv6 sources; maps take 200.0 MiB
new:      10,000 sources/s let in, burst 100,000
proofs:   handshakes
open:     1,234 connections from 56 sources
          the most: 100 from 2001:db8:1:2::/64
          NOT COUNTED for want of room: 3
own:      200,000 packets/s beyond all limits, burst 400,000
          tcp: connect
          udp: unavailable: no cgroup v2

INTERFACE  INDEX  XDP     DRIVER      ATTACHED BY
eth0           2  native  virtio_net  link

RESERVE  MATCH        INTERFACE  TTL  PACKETS/S   BURST  NEW/S
bfd      udp to 3784  any        255      5,000  10,000    100

CLASS  MODE     PACKETS/S  BURST  BYTES/S    BURST  NEW/S  OPEN
dns    enforce      1,000  2,000  500,000  262,144  2,000   100
rest   observe      0.017      1        -        -      -     -

EXEMPT      INTERFACE       EXPIRES  OWNER
10.0.0.0/8  any, SPOOFABLE  never    platform

BLOCKED          STATE   EXPIRES                  BY     REASON
198.51.100.0/24  active  2027-01-01 00:00:00 UTC  uid 0  scans

ACTION      REASON         PACKETS           BYTES
would_drop  packet_rate  1,234,567  98,765,432,100
";
        assert_eq!(status().to_string(), expected);
        assert!(expected.lines().all(|line| line.chars().count() <= 80));
    }

    #[test]
    fn json_round_trips() {
        let text = serde_json::to_string(&status()).expect("serializes");
        assert_eq!(serde_json::from_str::<Status>(&text).expect("parses"), status());
    }
}
