//! What operators ask and say about leases, on the control socket.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use axum::extract::{ConnectInfo, DefaultBodyLimit, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use log::warn;
use serde::{Deserialize, Serialize};

use super::Leases;
use super::revocations::Revocation;
use crate::api::{Api, Body, Peer, Written, problem};
use crate::status::{Change, utc};

/// The most leases in one answer.
const PAGE: usize = 1000;
/// Longer bodies, in bytes, are refused.
const LONGEST_BODY: usize = 4096;
/// The longest that a revocation with an end may last: ten years.
const LONGEST: u64 = 10 * 365 * 24 * 3600;

/// `GET /v1/leases`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Page {
    /// Only what comes after this address.
    pub(super) after: Option<IpAddr>,
    /// So many at most.
    pub(super) limit: Option<usize>,
}

/// Its answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Listed {
    pub(super) leases: Vec<Entry>,
    /// What `revoke` said and holds.
    pub(super) revoked: Vec<Revoked>,
    /// What to ask for with `after` to see more; none if that was all.
    pub(super) next: Option<IpAddr>,
}

/// A lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) address: IpAddr,
    pub(super) name: String,
    pub(super) interfaces: Vec<String>,
    pub(super) owner: String,
    /// UTC.
    pub(super) until: String,
}

/// A revocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Revoked {
    /// A name or an address.
    pub(super) subject: String,
    /// UTC.
    pub(super) since: String,
    pub(super) by: String,
    /// UTC; for ever if none.
    pub(super) until: Option<String>,
}

/// `POST /v1/leases/revoke`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RevokeRequest {
    /// A name or an address.
    pub(super) subject: String,
    /// How long; for ever if none.
    #[serde(default)]
    pub(super) for_seconds: Option<u64>,
    /// Whether to take it back.
    #[serde(default)]
    pub(super) undo: bool,
}

/// The routes of the control socket.
pub(crate) fn routes(api: &Api) -> Router {
    Router::new()
        .route("/v1/leases", get(list))
        .route("/v1/leases/revoke", post(revoke))
        .layer(DefaultBodyLimit::max(LONGEST_BODY))
        .with_state(api.clone())
}

async fn list(
    State(api): State<Api>,
    page: Result<Query<Page>, axum::extract::rejection::QueryRejection>,
) -> Response {
    let page = match page {
        Ok(Query(page)) => page,
        Err(error) => {
            let detail = "write after=ADDR and limit=N";
            return problem(StatusCode::BAD_REQUEST, detail, vec![error.body_text()]);
        }
    };
    let leases = api.agent.lock().await.leases();
    Json(leases.list(&page)).into_response()
}

async fn revoke(
    State(api): State<Api>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Body(request): Body<RevokeRequest>,
) -> Response {
    let leases = api.agent.lock().await.leases();
    let outcome = leases.revoke(&request, &peer.to_string());
    let later = |seconds| SystemTime::now().checked_add(Duration::from_secs(seconds));
    let until = request.for_seconds.and_then(later);
    api.audit.note(
        &peer,
        Written {
            action: if request.undo { "allow leases" } else { "revoke" },
            subject: &request.subject,
            until: until.filter(|_| outcome.is_ok() && !request.undo),
            outcome: outcome.as_ref().map(|it| it.changes.join("; ")).map_err(Clone::clone),
        },
    );
    match outcome {
        Ok(change) => Json(change).into_response(),
        Err(error) => problem(StatusCode::UNPROCESSABLE_ENTITY, "refused", vec![error]),
    }
}

impl Leases {
    fn list(&self, page: &Page) -> Listed {
        let limit = page.limit.unwrap_or(PAGE).clamp(1, PAGE);
        let mut ledger = self.ledger();
        ledger.prune();
        let rest = ledger.held().filter(|(at, _)| page.after.is_none_or(|after| **at > after));
        let mut leases: Vec<_> = rest
            .take(limit + 1)
            .map(|(address, held)| {
                let granted = ledger.grant_of(held);
                Entry {
                    address: *address,
                    name: held.name.clone(),
                    interfaces: granted.map_or(vec![], |it| it.interfaces.clone()),
                    owner: granted.map_or(String::new(), |it| it.grant.owner.clone()),
                    until: utc(held.until),
                }
            })
            .collect();
        let is_more = leases.len() > limit;
        leases.truncate(limit);
        let next = leases.last().filter(|_| is_more).map(|last| last.address);
        let revoked = ledger.revocations.iter(SystemTime::now()).map(|(subject, it)| Revoked {
            subject: subject.clone(),
            since: utc(it.since),
            by: it.by.clone(),
            until: it.until.map(utc),
        });
        let revoked = revoked.collect();
        Listed { leases, revoked, next }
    }

    fn revoke(&self, request: &RevokeRequest, by: &str) -> Result<Change, String> {
        let RevokeRequest { subject, for_seconds, undo } = request;
        if for_seconds.is_some_and(|seconds| seconds == 0 || seconds > LONGEST) {
            return Err("a revocation lasts from 1s to 10 years; leave --for out for one without \
                        an end"
                .to_owned());
        }
        let now = SystemTime::now();
        let subject =
            subject.parse().map_or(subject.clone(), |at: IpAddr| at.to_canonical().to_string());
        let mut ledger = self.ledger();
        let change = if *undo {
            if !ledger.revocations.remove(&subject) {
                return Err(format!(
                    "nobody revoked {subject} by a command; `leases` lists who is, and [lease] revoked \
                     is changed in the file"
                ));
            }
            format!("{subject} may take leases again")
        } else {
            let is_address = subject.parse::<IpAddr>().is_ok();
            if !is_address && !ledger.knows(&subject) {
                return Err(format!(
                    "no [[lease.grant]] is called {subject}, and it is no address; `leases` lists names"
                ));
            }
            let until = for_seconds.map(|seconds| now + Duration::from_secs(seconds));
            let revocation = Revocation { until, since: now, by: by.to_owned() };
            ledger.revocations.add(&subject, revocation);
            let ended = ledger.end_all(&subject, &format!("revoked by {by}"));
            let holds = until.map_or("until it is taken back".to_owned(), |until| {
                format!("until {}", utc(until))
            });
            format!("{subject} gets no lease {holds}; {} ended", ended.len())
        };
        let kept = ledger.revocations.keep(&self.0.state);
        drop(ledger);
        let mut warnings = Vec::new();
        if let Err(error) = kept {
            warn!("{error}");
            warnings.push(format!("in force, but {error}"));
        }
        Ok(Change { at: utc(now), changes: vec![change], warnings, confirm_by: None })
    }
}
