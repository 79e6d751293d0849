//! `[application]`: what applications may ask and tell, and on which socket.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use limiter_common::units::Rate;

use super::reader::{Table, Value};
use super::units::Unit;
use super::{Bridge, Budget, budget, service};

/// Shorter penalties end before anybody notices them.
const LEAST: Duration = Duration::from_secs(1);
/// What lasts longer is for an operator to decide.
const MOST: Duration = Duration::from_hours(24);

/// `None` only if something was noted.
pub(super) fn read(root: &Table<'_>) -> Option<Bridge> {
    let table = match root.get("application") {
        None => None,
        Some(value) => Some(value.table("write [application]")?),
    };
    let get = |key| table.as_ref().and_then(|table| table.get(key));
    let socket = optional(get("socket"), |value| {
        service::socket(value, "write an absolute path: \"/run/limiter/app.sock\"")
    });
    let group = optional(get("group"), group);
    let trusted_proxies = get("trusted_proxies").map_or(Some(Vec::new()), |value| networks(&value));
    let first_penalty = duration(get("first_penalty"), Duration::from_secs(10));
    let longest_penalty = duration(get("longest_penalty"), Duration::from_hours(1));
    let penalty_memory = duration(get("penalty_memory"), Duration::from_mins(10));
    let penalties = rate(get("penalties"), 20, 200);
    let proofs = rate(get("proofs"), 100, 10_000);
    let (first_penalty, longest_penalty) = (first_penalty?, longest_penalty?);
    if first_penalty > longest_penalty {
        let key = if get("first_penalty").is_some() { "first_penalty" } else { "longest_penalty" };
        get(key)?.place().error(
            "the first penalty is longer than the longest",
            "write a first_penalty of at most longest_penalty",
        );
        return None;
    }
    Some(Bridge {
        socket: socket?,
        group: group?,
        trusted_proxies: trusted_proxies?,
        first_penalty,
        longest_penalty,
        penalty_memory: penalty_memory?,
        penalties: penalties?,
        proofs: proofs?,
    })
}

/// A value that may be missing; `None` only if something was noted.
#[expect(clippy::option_option, reason = "absent and wrong are two things")]
fn optional<'r, T>(
    value: Option<Value<'r>>,
    read: impl FnOnce(&Value<'r>) -> Option<T>,
) -> Option<Option<T>> {
    value.map_or(Some(None), |value| read(&value).map(Some))
}

/// The name of a group of this host; whether there is one is seen when the socket is made.
pub(super) fn group(value: &Value<'_>) -> Option<String> {
    let cure = "write the name of a group: \"limiter-app\"";
    let name = value.string(cure)?;
    if name.is_empty() || name.contains(|c: char| c.is_whitespace() || c == ':' || c.is_control()) {
        value.place().error(format!("\"{name}\" cannot be a group's name"), cure);
        return None;
    }
    Some(name.to_owned())
}

/// Networks, also narrower ones than a source.
fn networks(value: &Value<'_>) -> Option<Vec<IpNet>> {
    let cure = r#"write networks or addresses: ["10.0.0.0/8", "2001:db8::7"]"#;
    let items = value.list(cure);
    let count = items.len();
    let networks: Vec<_> = items
        .iter()
        .filter_map(|item| {
            let text = item.string(cure)?;
            let address = text.parse::<IpAddr>().map(IpNet::from).ok();
            let net: Option<IpNet> = address.or_else(|| text.parse().ok());
            let Some(net) = net.filter(|net| net.trunc() == *net) else {
                item.place().error(format!("\"{text}\" is not a network"), cure);
                return None;
            };
            Some(net)
        })
        .collect();
    (count > 0 && networks.len() == count).then_some(networks)
}

fn duration(value: Option<Value<'_>>, default: Duration) -> Option<Duration> {
    let cure = "write a time from \"1s\" to \"24h\": \"10s\", \"5m\"";
    let Some(value) = value else { return Some(default) };
    let text = value.string(cure)?;
    let duration = humantime::parse_duration(text).ok();
    let duration = duration.filter(|it| (LEAST..=MOST).contains(it) && it.subsec_nanos() == 0);
    if duration.is_none() {
        value.place().error(format!("\"{text}\" is no time in whole seconds up to a day"), cure);
    }
    duration
}

fn rate(value: Option<Value<'_>>, per_second: u64, burst: u64) -> Option<Budget> {
    match value {
        None => Some(Budget { rate: Rate::new(per_second, 1).ok()?, burst }),
        Some(value) => budget::budget(value, Unit::Packets),
    }
}
