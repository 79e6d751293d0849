//! The agent's HTTP interface: read-only on the metrics listener, with writes on the Unix socket.

mod capture;
mod commands;
mod control;
mod events;
mod page;

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::connect_info::IntoMakeServiceWithConnectInfo;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use crate::agent::Agent;
use crate::host::{self, Discards, Link, LinksError};

pub use capture::{CaptureRequest, CapturedPacket, DEFAULT_RATE, HIGHEST_RATE, Line, Totals};
pub use commands::{ApplyRequest, BlockRequest, ModeRequest, Peer, UnblockRequest};
pub use control::{ControlError, ControlSocket};
pub use events::{EventsRequest, FollowLine, FollowTotals, RecentEvents};
pub use page::page;

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

/// What anybody who reaches the metrics listener may ask.
pub fn readable(agent: Shared) -> Router {
    Router::new()
        .route("/metrics", get(metrics).layer(Extension(Arc::new(Discards::default()))))
        .route("/healthz", get(healthz))
        .route("/v1/status", get(status))
        .merge(events::routes())
        .with_state(agent)
}

/// What those may ask who can open the control socket.
pub fn writable(agent: Shared) -> IntoMakeServiceWithConnectInfo<Router, Peer> {
    let others = Router::new()
        .route("/v1/capture", post(capture::capture))
        .layer(DefaultBodyLimit::max(LONGEST_BODY))
        .route("/v1/detach", post(detach))
        .with_state(Arc::clone(&agent));
    let writes = commands::routes(Arc::clone(&agent));
    readable(agent).merge(writes).merge(others).into_make_service_with_connect_info()
}

async fn metrics(
    State(agent): State<Shared>,
    Extension(discards): Extension<Arc<Discards>>,
) -> Response {
    let mut snapshot = agent.lock().await.snapshot();
    if let Ok(snapshot) = &mut snapshot {
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

fn problems(agent: &Agent, links: Result<Vec<Link>, LinksError>) -> Vec<String> {
    links.map_or_else(|error| vec![error.to_string()], |links| agent.problems(&links))
}

/// The agent ends after it, as if it had been told to.
async fn detach(State(agent): State<Shared>, _body: Bytes) -> Response {
    let outcome = agent.lock().await.detach();
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

fn problem(code: StatusCode, detail: &str, errors: Vec<String>) -> Response {
    let body = Problem {
        kind: "about:blank".to_owned(),
        title: code.canonical_reason().unwrap_or_default().to_owned(),
        status: code.as_u16(),
        detail: detail.to_owned(),
        errors,
    };
    (code, [(header::CONTENT_TYPE, "application/problem+json")], Json(body)).into_response()
}
