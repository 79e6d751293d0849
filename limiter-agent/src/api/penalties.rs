//! `/v1/penalties` and `/v1/proven`: what an application tells of sources.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime};

use axum::Json;
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use ipnet::IpNet;
use limiter_common::abi::SourceAddress;
use limiter_common::bucket;
use limiter_common::packet::Source;
use limiter_common::time::Tick;
use limiter_common::units::PacketLimit;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::audit::Written;
use super::body::Body;
use super::paging::{Page, Paged};
use super::sources::{AddressesRequest, read, wrong};
use super::{Api, Peer, problem, with_code};
use crate::agent::{Blame, Order, PenaltyOrder, source_network};
use crate::config::Budget;
use crate::host;
use crate::sources::{is_among, touches};
use crate::status::utc;

/// How long a list of those connections is good for: it takes the kernel a while.
const FRESH: Duration = Duration::from_secs(5);
/// The longest reason, in characters.
const LONGEST_REASON: usize = 200;

/// `POST /v1/penalties`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PenaltyRequest {
    /// Whom.
    pub address: String,
    /// Why, for those who look at blocks.
    pub reason: Option<String>,
}

/// A penalty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PenaltyAnswer {
    /// As it was asked for.
    pub address: String,
    /// All that is blocked with it: the address itself, or its IPv6 /64.
    pub source: String,
    /// Its end, UTC.
    pub until: String,
    /// How long that is from now.
    pub seconds: u64,
    /// The how manieth in a row it is.
    pub level: u32,
}

/// A penalty in the list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedPenalty {
    /// Whom it blocks.
    pub source: String,
    /// Its end, UTC.
    pub until: String,
    /// The how manieth in a row it is.
    pub level: u32,
    /// Why.
    pub reason: Option<String>,
    /// Who asked for it.
    pub by: Option<String>,
}

/// A page of the penalties that hold, in the order of addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PenaltiesPage {
    /// The penalties.
    pub penalties: Vec<ListedPenalty>,
    /// What `after` should be for the next page; none if this is the last.
    pub next: Option<String>,
}

/// The answer of `POST /v1/proven`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProvenAnswer {
    /// Addresses that are proven now.
    pub proven: usize,
}

/// How much of each kind applications may write.
#[derive(Default)]
pub(super) struct Throttles {
    penalties: AtomicU64,
    proofs: AtomicU64,
    /// Who asks while it is being found out waits for that.
    reserved: Mutex<Option<(Instant, HashSet<IpAddr>)>>,
}

pub(super) async fn penalise(
    State(api): State<Api>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Body(PenaltyRequest { address, reason }): Body<PenaltyRequest>,
) -> Response {
    let budget = api.sources.view().bridge.penalties;
    // Before all else, which takes time.
    if let Err(wait) = spend(&api.throttles.penalties, budget, 1) {
        return too_many("penalties", wait);
    }
    if reason.as_ref().is_some_and(|reason| reason.chars().count() > LONGEST_REASON) {
        return wrong(vec![format!("the reason is longer than {LONGEST_REASON} characters")]);
    }
    let found = match read(&address) {
        Ok(found) => found,
        Err(error) => return wrong(vec![error]),
    };
    let net = source_network(found);
    let outcome = match api.spared(found, &net).await {
        Some((code, why)) => Err((StatusCode::FORBIDDEN, code, vec![why])),
        None => match api.sources.view().block(&net, SystemTime::now()) {
            Some(why) => Err((StatusCode::CONFLICT, "blocked", vec![why])),
            None => {
                api.order_penalty(PenaltyOrder { net, reason, draw: fastrand::f64() }, peer).await
            }
        },
    };
    let written = |until, outcome| Written { action: "penalty", subject: &address, until, outcome };
    match outcome {
        Ok((penalty, said)) => {
            api.audit.note(&peer, written(Some(penalty.until), Ok(said)));
            let (until, source) = (utc(penalty.until), net.to_string());
            let (seconds, level) = (penalty.seconds, penalty.level);
            Json(PenaltyAnswer { address, source, until, seconds, level }).into_response()
        }
        Err((status, code, errors)) => {
            api.audit.note(&peer, written(None, Err(errors.join("; "))));
            with_code(status, code, &format!("{net} is not penalised"), errors)
        }
    }
}

pub(super) async fn penalties(State(api): State<Api>, Page(page): Page<IpNet>) -> Response {
    let Paged { limit, after } = page;
    let view = api.sources.view();
    let all = view.penalties(SystemTime::now());
    let mut later = all.into_iter().filter(|it| after.is_none_or(|after| it.cidr > after));
    let penalties: Vec<_> = later
        .by_ref()
        .take(limit)
        .map(|it| ListedPenalty {
            source: it.cidr.to_string(),
            until: it.expires.map(utc).unwrap_or_default(),
            level: it.penalty.unwrap_or_default(),
            reason: it.reason.clone(),
            by: it.by.clone(),
        })
        .collect();
    let next = later.next().and_then(|_| penalties.last()).map(|it| it.source.clone());
    Json(PenaltiesPage { penalties, next }).into_response()
}

pub(super) async fn proven(
    State(api): State<Api>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Body(request): Body<AddressesRequest>,
) -> Response {
    let addresses = match request.read() {
        Ok(addresses) => addresses,
        Err(errors) => return wrong(errors),
    };
    let budget = api.sources.view().bridge.proofs;
    let count = u64::try_from(addresses.len()).unwrap_or(u64::MAX);
    if let Err(wait) = spend(&api.throttles.proofs, budget, count) {
        return too_many("proofs", wait);
    }
    let own = host::own_addresses();
    // A neighbour shares its /64 with this host.
    let real = |address: &IpAddr| unreal(*address, &[]).is_none() && !own.contains(address);
    let real: Vec<_> = addresses.iter().map(IpAddr::to_canonical).filter(real).collect();
    for address in &real {
        api.sources.prove(Source::from(*address));
    }
    let proven = real.len();
    let subject = match request.addresses.as_slice() {
        [only] => only.clone(),
        [first, rest @ ..] => format!("{first} and {} more", rest.len()),
        [] => String::new(),
    };
    let outcome = Ok(format!("{proven} proven"));
    api.audit.note(&peer, Written { action: "proven", subject: &subject, until: None, outcome });
    Json(ProvenAnswer { proven }).into_response()
}

impl Api {
    /// Why a source is never penalised: a code for programs, and a sentence; none if it may be.
    async fn spared(&self, address: IpAddr, net: &IpNet) -> Option<(&'static str, String)> {
        if let Some(why) = unreal(address, &host::own_addresses()) {
            return Some(why);
        }
        let view = self.sources.view();
        if let Some(proxy) = touches(&view.bridge.trusted_proxies, net) {
            let why = format!(
                "{proxy} is a trusted proxy, which sends in the name of many: limit whom it names \
                 in the application"
            );
            return Some(("trusted-proxy", why));
        }
        if let Some(it) = view.exemption(net, SystemTime::now()) {
            return Some(("exempt", format!("{} is exempt; ask {}", it.cidr, it.owner)));
        }
        let mut known = self.throttles.reserved.lock().await;
        if known.as_ref().is_none_or(|(at, _)| at.elapsed() >= FRESH) {
            match host::peers_of(is_reserved).await {
                Ok(peers) => *known = Some((Instant::now(), peers)),
                Err(error) => {
                    let why = format!("whether it has an ssh or BGP session is not known: {error}");
                    return Some(("unknown", why));
                }
            }
        }
        let mut peers = known.iter().flat_map(|(_, peers)| peers);
        peers.find(|peer| net.contains(*peer)).map(|peer| {
            let why = format!("{peer} has an open ssh or BGP session with this host");
            ("reserved", why)
        })
    }

    async fn order_penalty(
        &self,
        order: PenaltyOrder,
        peer: Peer,
    ) -> Result<(crate::agent::Penalty, String), (StatusCode, &'static str, Vec<String>)> {
        let failed =
            || (StatusCode::INTERNAL_SERVER_ERROR, "failed", vec!["the agent failed".to_owned()]);
        let done = self.commands.order(Order::Penalise(order), peer).await.ok_or_else(failed)?;
        match done {
            Ok(done) => {
                let said = done.change.changes.join("; ");
                done.penalty.map(|penalty| (penalty, said)).ok_or_else(failed)
            }
            Err((Blame::Request, errors)) => Err((StatusCode::CONFLICT, "refused", errors)),
            Err((Blame::Machine, errors)) => {
                Err((StatusCode::SERVICE_UNAVAILABLE, "no-room", errors))
            }
        }
    }
}

/// Whether operators or routers work over a connection between these ports, ours first: by ssh to this host, or
/// BGP, which either end may have opened.
fn is_reserved(ours: u16, theirs: u16) -> bool {
    const SSH: u16 = 22;
    const BGP: u16 = 179;
    ours == SSH || ours == BGP || theirs == BGP
}

/// Why no packet comes from an address.
fn unreal(address: IpAddr, own: &[IpAddr]) -> Option<(&'static str, String)> {
    let address = address.to_canonical();
    if SourceAddress::from(address).is_martian() || address.is_unspecified() {
        let why = format!("no packet from a network comes from {address}");
        return Some(("martian", why));
    }
    let own = is_among(own, &source_network(address))?;
    Some(("own-address", format!("{own} is an address of this host")))
}

/// Takes `count` of what `budget` allows, or says how long to wait for them.
fn spend(cell: &AtomicU64, budget: Budget, count: u64) -> Result<(), Duration> {
    let limit = budget.packets().unwrap_or(PacketLimit::NONE);
    if !limit.is_limited() {
        return Ok(());
    }
    let now = Tick::from(host::monotonic());
    // More at once than the budget ever holds takes all of it.
    let cost = limit.cost().saturating_mul(count).min(limit.tolerance());
    if bucket::admit(&cell, &mut bucket::Moment::new(now, || now), cost, limit.tolerance()) {
        return Ok(());
    }
    let used =
        Tick(cell.load(std::sync::atomic::Ordering::Relaxed)).since(now).max(0).cast_unsigned();
    let missing = used.saturating_add(cost).saturating_sub(limit.tolerance());
    Err(Duration::from_nanos(missing >> Tick::SHIFT))
}

fn too_many(what: &str, wait: Duration) -> Response {
    // A second at least, and up to a quarter more by chance.
    let seconds = wait.as_secs() + 1;
    let seconds = seconds + fastrand::u64(0..=(seconds / 4).max(1));
    let errors = vec![format!("[application] {what} is used up; try again in {seconds} seconds")];
    let detail = format!("more {what} are asked for than are taken");
    let mut answer = problem(StatusCode::TOO_MANY_REQUESTS, &detail, errors);
    answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    answer
}

#[cfg(test)]
mod tests {
    use limiter_common::units::Rate;

    use super::*;

    #[test]
    fn what_is_spent_has_to_be_waited_for() {
        let budget = Budget { rate: Rate::new(1, 10).expect("is a rate"), burst: 3 };
        let cell = AtomicU64::new(0);
        assert_eq!(spend(&cell, budget, 2), Ok(()));
        assert_eq!(spend(&cell, budget, 1), Ok(()));
        let wait = spend(&cell, budget, 2).expect_err("is spent");
        assert!((19..=20).contains(&wait.as_secs()), "{wait:?}");
        let wait = spend(&cell, budget, 1_000).expect_err("is spent");
        assert!((29..=30).contains(&wait.as_secs()), "it is not more than all: {wait:?}");
    }

    #[test]
    fn addresses_that_send_nothing_are_told() {
        let own = ["192.0.2.1".parse().expect("is one"), "2001:db8::1".parse().expect("is one")];
        for (address, code) in [
            ("127.0.0.1", Some("martian")),
            ("0.0.0.0", Some("martian")),
            ("::", Some("martian")),
            ("::ffff:127.0.0.1", Some("martian")),
            ("224.0.0.1", Some("martian")),
            ("192.0.2.1", Some("own-address")),
            ("::ffff:192.0.2.1", Some("own-address")),
            ("2001:db8::5", Some("own-address")),
            ("192.0.2.2", None),
            ("2001:db8:0:1::5", None),
        ] {
            let found = unreal(address.parse().expect("is one"), &own).map(|(code, _)| code);
            assert_eq!(found, code, "{address}");
        }
    }
}
