//! `[lease]`: exemptions for services that show a credential.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use limiter_common::abi::{LEASE_PORTS, MAX_LEASES, Name};

use super::cidr::Seen;
use super::reader::{Table, Value};
use super::units::Unit;
use super::{Budget, Interface, Pattern, budget, interface, matcher, policy};

/// `[lease]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leasing {
    /// Where leases are taken.
    pub listen: SocketAddr,
    /// The server's certificate and what leads to its root, PEM.
    pub certificate: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
    /// Who signs the certificates of services, PEM; none takes a certificate if none.
    pub client_ca: Option<PathBuf>,
    /// Which of them are revoked, PEM.
    pub crl: Option<PathBuf>,
    /// The Ed25519 public key that tokens are signed for, PEM; no token is taken if none.
    pub token_key: Option<PathBuf>,
    /// Names and serial numbers that get nothing any more, in lower case.
    pub revoked: Vec<String>,
    /// Who may take a lease: at least one.
    pub grants: Vec<Grant>,
}

/// `[[lease.grant]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The name that a certificate or a token must have.
    pub name: String,
    /// The interfaces that its leases hold on.
    pub interface: Pattern,
    /// The destination ports that they hold for.
    pub ports: Vec<RangeInclusive<u16>>,
    /// Whether they hold for TCP.
    pub tcp: bool,
    /// Whether they hold for UDP.
    pub udp: bool,
    /// What passes beyond the limits of the source.
    pub cap: Budget,
    /// The longest that a lease lasts without a renewal.
    pub max_duration: Duration,
    /// From how many addresses at once.
    pub addresses: u64,
    /// Whom to ask about it.
    pub owner: String,
    /// The line in the file.
    pub line: usize,
}

/// The shortest lease: a renewal must have the time to fail once and be tried again.
pub const SHORTEST: Duration = Duration::from_secs(5);
/// The longest: a credential that was revoked elsewhere must not help for a day.
const LONGEST: Duration = Duration::from_hours(1);
const LONGEST_NAME: usize = size_of::<Name>();
const MOST: u64 = MAX_LEASES as u64 - 1;

/// The table, none if there is none; `None` only if something was noted.
#[expect(clippy::option_option, reason = "absent and wrong are two things")]
pub(super) fn read(root: &Table<'_>, interfaces: &[Option<Interface>]) -> Option<Option<Leasing>> {
    let Some(value) = root.get("lease") else { return Some(None) };
    let table = value.table("write [lease]")?;
    let listen = table.require("listen", "listen = \"0.0.0.0:9479\"").and_then(|it| socket(&it));
    let certificate = table
        .require("certificate", "certificate = \"/etc/limiter/lease.crt\" (what this host shows)")
        .and_then(|it| path(&it));
    let key = table.require("key", "key = \"/etc/limiter/lease.key\"").and_then(|it| path(&it));
    let optional = |name| table.get(name).map_or(Some(None), |it| path(&it).map(Some));
    let (client_ca, crl, token_key) =
        (optional("client_ca"), optional("crl"), optional("token_key"));
    let revoked = table.get("revoked").map_or(Some(Vec::new()), |it| revoked(&it));
    let grants = grants(&table, interfaces);
    let (client_ca, crl, token_key) = (client_ca?, crl?, token_key?);
    if client_ca.is_none() && token_key.is_none() {
        table.place().error(
            "no credential would be taken",
            "add client_ca = \"…\" for certificates, or token_key = \"…\" for signed tokens",
        );
        return None;
    }
    if let Some(value) = table.get("crl").filter(|_| client_ca.is_none()) {
        value.place().error(
            "there are no certificates that could be revoked",
            "add client_ca, or remove crl",
        );
        return None;
    }
    Some(Some(Leasing {
        listen: listen?,
        certificate: certificate?,
        key: key?,
        client_ca,
        crl,
        token_key,
        revoked: revoked?,
        grants: grants?,
    }))
}

fn grants(table: &Table<'_>, interfaces: &[Option<Interface>]) -> Option<Vec<Grant>> {
    let tables = table.tables("grant", "name")?;
    if tables.is_empty() {
        table.place().error("nobody may take a lease", "add [[lease.grant]] with name = \"…\"");
        return None;
    }
    let mut seen = Seen::new();
    let grants: Vec<_> =
        tables.iter().filter_map(|table| grant(table, interfaces, &mut seen)).collect();
    (grants.len() == tables.len()).then_some(grants)
}

fn grant(
    table: &Table<'_>,
    interfaces: &[Option<Interface>],
    seen: &mut Seen<String>,
) -> Option<Grant> {
    let line = table.place().line();
    let name = table.require("name", "name = \"billing.example\" (of its certificate or token)");
    let name = name.and_then(|it| name_of(&it, seen, line));
    let place = table.get("interface");
    let pattern = interface::pattern(table, "interface", true);
    let bound = place
        .zip(pattern.as_ref())
        .map(|(value, pattern)| policy::configured(value.place(), pattern, interfaces));
    let ports = table.require("ports", "ports = [443]").and_then(ports);
    let choices = [("tcp", (true, false)), ("udp", (false, true))];
    let protocols = table.get("protocol").map_or(Some((true, true)), |it| it.choice(&choices));
    let cap = table
        .require("cap", "cap = { rate = \"50000/s\", burst = 100000 }: the address can be forged")
        .and_then(|it| budget::budget(it, Unit::Packets));
    let duration =
        table.get("max_duration").map_or(Some(Duration::from_mins(5)), |it| duration(&it));
    let addresses = table.get("addresses").map_or(Some(1), |it| it.integer(1..=MOST));
    let owner = table.require("owner", "owner = \"platform\" (whom to ask about it)");
    let owner = owner.and_then(|it| policy::name_of_owner(&it));
    bound.unwrap_or(Some(()))?;
    let (tcp, udp) = protocols?;
    Some(Grant {
        name: name?,
        interface: pattern?,
        ports: ports?,
        tcp,
        udp,
        cap: cap?,
        max_duration: duration?,
        addresses: addresses?,
        owner: owner?,
        line,
    })
}

fn socket(value: &Value<'_>) -> Option<SocketAddr> {
    let cure = "write an IP address and a port: \"0.0.0.0:9479\" or \"[::]:9479\"";
    let text = value.string(cure)?;
    let address = text.parse().ok();
    if address.is_none() {
        value.place().error(format!("\"{text}\" is not a socket address"), cure);
    }
    address
}

fn path(value: &Value<'_>) -> Option<PathBuf> {
    let cure = "write an absolute path: \"/etc/limiter/lease.pem\"";
    let path = value.string(cure)?;
    if !path.starts_with('/') || path.contains('\0') {
        value.place().error(format!("\"{path}\" is no absolute path"), cure);
        return None;
    }
    Some(PathBuf::from(path))
}

/// Names as they are, serial numbers without colons; both in lower case.
fn revoked(value: &Value<'_>) -> Option<Vec<String>> {
    let cure = "write names and serial numbers: [\"old.example\", \"4f:3a:…\"], or remove the key";
    let items = value.list(cure);
    if items.is_empty() {
        return None;
    }
    let texts = items.iter().map(|item| Some(item.string(cure)?.to_lowercase()));
    texts.collect()
}

fn name_of(value: &Value<'_>, seen: &mut Seen<String>, line: usize) -> Option<String> {
    let cure = "write the name as the certificate or the token has it";
    let name = value.string(cure)?;
    if name.is_empty() || name.len() > LONGEST_NAME || name.contains(char::is_control) {
        let cause = format!("\"{name}\" cannot be the name of a service");
        value.place().error(cause, format!("{cure}; at most {LONGEST_NAME} bytes"));
        return None;
    }
    if let Some(earlier) = seen.before(name.to_lowercase(), line) {
        let cause = format!("the same name is already at line {earlier}");
        value.place().error(cause, "make one entry of the two");
        return None;
    }
    Some(name.to_owned())
}

fn ports(value: Value<'_>) -> Option<Vec<RangeInclusive<u16>>> {
    let place = value.place().clone();
    let ranges = matcher::port_set(value)?.ranges();
    if ranges.len() > LEASE_PORTS {
        place.error(
            format!("{} separate ranges of ports", ranges.len()),
            format!("write at most {LEASE_PORTS}; ranges are \"8000-8100\""),
        );
        return None;
    }
    Some(ranges)
}

fn duration(value: &Value<'_>) -> Option<Duration> {
    let cure = "write from \"5s\" to \"1h\"; a lease is renewed as long as it is needed";
    let text = value.string(cure)?;
    let duration = humantime::parse_duration(text).ok();
    let duration = duration.filter(|it| (SHORTEST..=LONGEST).contains(it));
    if duration.is_none() {
        value.place().error(format!("\"{text}\" is no duration of a lease"), cure);
    }
    duration
}
