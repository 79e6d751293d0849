//! The agent's HTTP interface: read-only on the metrics listener, with writes on the control socket, and what
//! applications may ask and tell on a socket of theirs. `openapi.json` lists what is where; a test holds it
//! against the server.

mod audit;
mod body;
mod capture;
mod commands;
mod connections;
mod control;
mod events;
mod measure;
mod openapi;
mod page;
mod paging;
mod penalties;
mod server;
mod sources;

use std::sync::Arc;

use axum::extract::{ConnectInfo, DefaultBodyLimit, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use crate::agent::Agent;
use crate::host::{self, Discards, Link, LinksError};
use crate::lease;
use crate::limits::Limits;
use crate::sources::Sources;

use audit::Audit;
pub(crate) use audit::Written;
pub use audit::{AuditPage, Entry};
pub(crate) use body::Body;
use body::Whole;
pub use capture::{CaptureRequest, CapturedPacket, DEFAULT_RATE, HIGHEST_RATE, Line, Totals};
use commands::Commands;
pub use commands::{
    ApplyRequest, BlockRequest, ExemptRequest, ModeRequest, Peer, UnblockRequest, UnexemptRequest,
};
pub use control::{ControlError, ControlSocket};
pub use events::{EventsRequest, FollowLine, FollowTotals, RecentEvents};
use openapi::Place;
pub use openapi::document;
use penalties::Throttles;
pub use penalties::{ListedPenalty, PenaltiesPage, PenaltyAnswer, PenaltyRequest, ProvenAnswer};
pub use server::{MOST_CONNECTIONS, serve};
pub use sources::{AddressesRequest, MOST_ADDRESSES, SourcesAnswer};

/// The agent, shared by its handlers and its signals.
pub type Shared = Arc<Mutex<Agent>>;

/// Bodies longer than this, in bytes, are refused: no request needs one.
const LONGEST_BODY: usize = 4096;

/// An error as RFC 9457 writes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Always `about:blank`: the status says it all.
    #[serde(rename = "type")]
    pub kind: String,
    /// The status in words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What happened, in a sentence.
    pub detail: String,
    /// The cause in a word for programs, where a status has several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// Each thing that was wrong.
    pub errors: Vec<String>,
}

/// What was detached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detached {
    /// The interfaces, by name.
    pub interfaces: Vec<String>,
}

/// The answer of `/healthz`.
#[derive(Debug, Serialize)]
struct Health {
    status: &'static str,
    problems: Vec<String>,
}

/// What the handlers have in common.
#[derive(Clone)]
pub struct Api {
    pub(crate) agent: Shared,
    sources: Arc<Sources>,
    commands: Commands,
    pub(crate) audit: Arc<Audit>,
    throttles: Arc<Throttles>,
}

impl Api {
    /// Of this agent.
    pub async fn new(agent: Shared) -> Self {
        let sources = agent.lock().await.source_lookup();
        let audit = Arc::<Audit>::default();
        let commands = Commands::new(Arc::clone(&agent), Arc::clone(&audit));
        Self { agent, sources, commands, audit, throttles: Arc::default() }
    }
}

/// What anybody who reaches the metrics listener may ask.
pub fn readable(api: &Api) -> Router {
    openapi::with_fallbacks(reads(api).merge(page::page(Arc::clone(&api.agent))), Place::Metrics)
}

fn reads(api: &Api) -> Router {
    Router::new()
        .route("/metrics", get(metrics).layer(Extension(Arc::new(Discards::default()))))
        .route("/healthz", get(healthz))
        .route("/v1/status", get(status))
        .merge(events::routes())
        .merge(measure::readable())
        .route("/v1/limits", get(limits))
        .with_state(Arc::clone(&api.agent))
        .merge(common(api))
        .merge(connections::routes(Arc::clone(&api.agent)))
}

/// What may be asked everywhere.
fn common(api: &Api) -> Router {
    Router::new()
        .route("/v1/openapi.json", get(openapi::openapi))
        .route("/v1/sources/{address}", get(sources::source))
        .with_state(api.clone())
}

/// What those may ask who can open the control socket.
pub fn writable(api: &Api) -> Router {
    let others = Router::new()
        .route("/v1/capture", post(capture::capture))
        .merge(measure::private())
        .layer(DefaultBodyLimit::max(LONGEST_BODY))
        .with_state(Arc::clone(&api.agent));
    let own = Router::new()
        .route("/v1/detach", post(detach))
        .route("/v1/audit", get(audit::audit))
        .route("/v1/penalties", get(penalties::penalties))
        .layer(DefaultBodyLimit::max(LONGEST_BODY))
        .with_state(api.clone());
    let writes = commands::routes(api);
    let leases = lease::routes(api);
    let router = reads(api).merge(writes).merge(leases).merge(others).merge(own).merge(bridge(api));
    openapi::with_fallbacks(router, Place::Control).layer(middleware::from_fn(to_its_end))
}

/// What those may ask who can open the application socket.
pub fn application(api: &Api) -> Router {
    let router = openapi::with_fallbacks(common(api).merge(bridge(api)), Place::Application);
    router.layer(middleware::from_fn(to_its_end))
}

/// Answers on a task of its own: a client that hangs up must not leave half a change behind, nor one that is
/// in nobody's record.
async fn to_its_end(request: Request, next: Next) -> Response {
    tokio::spawn(next.run(request)).await.unwrap_or_else(|_| commands::lost())
}

/// What applications may write, and ask about many sources at once.
fn bridge(api: &Api) -> Router {
    /// A list of addresses is the longest of them.
    const LONGEST: usize = 16 << 10;
    Router::new()
        .route("/v1/sources", post(sources::sources))
        .route("/v1/penalties", post(penalties::penalise))
        .route("/v1/proven", post(penalties::proven))
        .layer(DefaultBodyLimit::max(LONGEST))
        .with_state(api.clone())
}

async fn metrics(
    State(agent): State<Shared>,
    Extension(discards): Extension<Arc<Discards>>,
) -> Response {
    let links = host::links().await;
    let (mut snapshot, attachments) = {
        let agent = agent.lock().await;
        (agent.snapshot(), links.map(|links| agent.attachments(&links)))
    };
    if let Ok(snapshot) = &mut snapshot {
        // Where the host does not answer, nothing is said of it.
        snapshot.attachments = attachments.unwrap_or_default();
        let names: Vec<_> = snapshot.interfaces.iter().map(|it| it.interface.clone()).collect();
        snapshot.discards = discards.read(&names).await;
    }
    let text = snapshot.map_err(|error| error.to_string()).and_then(|snapshot| {
        snapshot.encode().map_err(|error| format!("cannot encode metrics: {error}"))
    });
    match text {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error).into_response(),
    }
}

async fn healthz(State(agent): State<Shared>) -> Response {
    let links = host::links().await;
    let problems = problems(&*agent.lock().await, links);
    let (code, status) = if problems.is_empty() {
        (StatusCode::OK, "ok")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "failing")
    };
    (code, Json(Health { status, problems })).into_response()
}

async fn status(State(agent): State<Shared>) -> Response {
    let links = host::links().await;
    let agent = agent.lock().await;
    match agent.status(problems(&agent, links)) {
        Ok(status) => Json(status).into_response(),
        Err(error) => problem(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the kernel's counters cannot be read",
            vec![error.to_string()],
        ),
    }
}

async fn limits(State(agent): State<Shared>) -> Json<Limits> {
    Json(agent.lock().await.limits())
}

fn problems(agent: &Agent, links: Result<Vec<Link>, LinksError>) -> Vec<String> {
    links.map_or_else(|error| vec![error.to_string()], |links| agent.problems(&links))
}

/// The agent ends after it, as if it had been told to.
async fn detach(
    State(api): State<Api>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    _: Whole,
) -> Response {
    let outcome = api.agent.lock().await.detach();
    let said = outcome.as_ref().map(|names| format!("detached from {}", names.join(", ")));
    let outcome_said = said.map_err(ToString::to_string);
    api.audit.note(
        &peer,
        Written { action: "detach", subject: "all", until: None, outcome: outcome_said },
    );
    if let Ok(interfaces) = &outcome {
        // Whether netlink answers changes nothing.
        let _ = host::released(interfaces).await;
    }
    let ended = kill(Pid::this(), Signal::SIGTERM).map_err(|error| error.to_string());
    match outcome.map_err(|error| error.to_string()).and_then(|names| ended.map(|()| names)) {
        Ok(interfaces) => Json(Detached { interfaces }).into_response(),
        Err(error) => problem(
            StatusCode::INTERNAL_SERVER_ERROR,
            "not everything could be removed",
            vec![error],
        ),
    }
}

pub(crate) fn problem(code: StatusCode, detail: &str, errors: Vec<String>) -> Response {
    document_of(code, None, detail, errors)
}

fn with_code(status: StatusCode, code: &str, detail: &str, errors: Vec<String>) -> Response {
    document_of(status, Some(code.to_owned()), detail, errors)
}

fn document_of(
    code: StatusCode,
    cause: Option<String>,
    detail: &str,
    errors: Vec<String>,
) -> Response {
    let body = Problem {
        code: cause,
        kind: "about:blank".to_owned(),
        title: code.canonical_reason().unwrap_or_default().to_owned(),
        status: code.as_u16(),
        detail: detail.to_owned(),
        errors,
    };
    (code, [(header::CONTENT_TYPE, "application/problem+json")], Json(body)).into_response()
}
