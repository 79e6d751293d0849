//! What those may ask for who can open the control socket: writes.

use std::fmt;
use std::sync::{Arc, Mutex as Lock, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, DefaultBodyLimit, FromRequest, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::serve::IncomingStream;
use axum::{Json, Router};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::net::UnixListener;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until};

use super::{LONGEST_BODY, Shared, problem};
use crate::agent::{Application, Asked, Blame, BlockOrder, Deadline, Order, Refused};
use crate::config::{Mode, network};
use crate::status::{Change, Reload};

/// A configuration longer than this, in bytes, is refused: it names more networks than the datapath
/// can hold.
const LONGEST_CONFIGURATION: usize = 64 << 20;

/// How long after a rollback that failed another is tried.
const AGAIN: Duration = Duration::from_secs(2);

/// The longest that an applied configuration may wait.
const LONGEST_WAIT: Duration = Duration::from_hours(24);

/// `POST /v1/mode`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModeRequest {
    /// `observe`, `enforce` or `bypass`; `config` gives the word back to the configuration.
    pub mode: String,
}

/// `POST /v1/apply`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApplyRequest {
    /// The file's name, for messages.
    pub file: String,
    /// What it says.
    pub text: String,
    /// How long to wait for the confirmation; none if none is needed.
    pub confirm_seconds: Option<u64>,
}

/// `POST /v1/block`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockRequest {
    /// The network.
    pub cidr: String,
    /// How long; for ever if none.
    pub for_seconds: Option<u64>,
    /// Why.
    pub reason: Option<String>,
}

/// `POST /v1/unblock`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnblockRequest {
    /// The network.
    pub cidr: String,
}

/// Who is at the other end of the control socket.
#[derive(Clone, Copy, Debug, Default)]
pub struct Peer {
    uid: Option<u32>,
    pid: Option<i32>,
}

impl Connected<IncomingStream<'_, UnixListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        let credentials = stream.io().peer_cred().ok();
        Self { uid: credentials.map(|it| it.uid()), pid: credentials.and_then(|it| it.pid()) }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.uid, self.pid) {
            (Some(uid), Some(pid)) => write!(out, "uid {uid}, pid {pid}"),
            (Some(uid), None) => write!(out, "uid {uid}"),
            (None, _) => out.write_str("somebody unknown"),
        }
    }
}

/// The agent, and what waits for it.
#[derive(Clone)]
struct Commands {
    agent: Shared,
    waiting: Arc<Lock<Waiting>>,
}

/// Who waits for the agent is served together: a burst of requests is one switch of settings.
#[derive(Default)]
struct Waiting {
    orders: Vec<(Asked, oneshot::Sender<Result<Change, Refused>>)>,
    reloads: Vec<oneshot::Sender<(Reload, Option<Blame>)>>,
}

/// The routes.
pub(super) fn routes(agent: Shared) -> Router {
    let commands = Commands { agent, waiting: Arc::default() };
    let apply = post(apply).layer(DefaultBodyLimit::max(LONGEST_CONFIGURATION));
    Router::new()
        .route("/v1/reload", post(reload))
        .route("/v1/mode", post(mode))
        .route("/v1/confirm", post(confirm))
        .route("/v1/block", post(block))
        .route("/v1/unblock", post(unblock))
        .layer(DefaultBodyLimit::max(LONGEST_BODY))
        .route("/v1/apply", apply)
        .with_state(commands)
}

/// The body says nothing, but a request is acted on only once all of it has come in well.
async fn reload(State(commands): State<Commands>, _body: Bytes) -> Response {
    let Some((reload, blame)) = commands.reload().await else { return lost() };
    let Some(blame) = blame else { return Json(reload).into_response() };
    refusal(
        (blame, reload.errors),
        "the configuration was not taken; the old settings stay",
        "the configuration could not be put in force; the old settings stay",
    )
}

async fn mode(
    State(commands): State<Commands>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Body(request): Body<ModeRequest>,
) -> Response {
    let known = [Mode::Observe, Mode::Enforce, Mode::Bypass];
    let mode = match known.into_iter().find(|known| known.as_str() == request.mode) {
        Some(mode) => Some(mode),
        None if request.mode == "config" => None,
        None => {
            let cure = "write observe, enforce, bypass or config";
            return wrong(format!("there is no mode \"{}\"; {cure}", request.mode));
        }
    };
    commands.order(Order::Mode(mode), peer).await
}

async fn apply(
    State(commands): State<Commands>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Body(ApplyRequest { file, text, confirm_seconds }): Body<ApplyRequest>,
) -> Response {
    let confirm = confirm_seconds.map(Duration::from_secs);
    if confirm.is_some_and(|confirm| confirm.is_zero() || confirm > LONGEST_WAIT) {
        return wrong("a confirmation may take from 1s to 24h".to_owned());
    }
    let wanted = Application { file, text, confirm };
    let outcome = commands.agent.lock().await.apply(wanted, &peer.to_string()).await;
    match outcome {
        Ok((change, deadline)) => {
            if let Some(deadline) = deadline {
                tokio::spawn(expire(commands.agent, deadline));
            }
            Json(change).into_response()
        }
        Err(refused) => refusal(
            refused,
            "the configuration was not taken; the old settings stay",
            "the configuration could not be put in force; the old settings stay",
        ),
    }
}

async fn confirm(
    State(commands): State<Commands>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    _body: Bytes,
) -> Response {
    answer(commands.agent.lock().await.confirm(&peer.to_string()))
}

async fn block(
    State(commands): State<Commands>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Body(BlockRequest { cidr, for_seconds, reason }): Body<BlockRequest>,
) -> Response {
    match BlockOrder::new(&cidr, for_seconds.map(Duration::from_secs), reason).await {
        Ok(order) => commands.order(Order::Block(order), peer).await,
        Err(error) => wrong(error),
    }
}

async fn unblock(
    State(commands): State<Commands>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Body(UnblockRequest { cidr }): Body<UnblockRequest>,
) -> Response {
    match network(&cidr) {
        Ok(cidr) => commands.order(Order::Unblock(cidr), peer).await,
        Err(error) => wrong(error),
    }
}

impl Commands {
    async fn order(&self, order: Order, peer: Peer) -> Response {
        let (sender, outcome) = oneshot::channel();
        let asked = Asked { order, by: peer.to_string() };
        self.waiting().orders.push((asked, sender));
        self.serve().await;
        outcome.await.map_or_else(|_| lost(), answer)
    }

    async fn reload(&self) -> Option<(Reload, Option<Blame>)> {
        let (sender, outcome) = oneshot::channel();
        self.waiting().reloads.push(sender);
        self.serve().await;
        outcome.await.ok()
    }

    /// Serves everybody who waits by the time that the agent is free. It may be that another has.
    async fn serve(&self) {
        let mut agent = self.agent.lock().await;
        let Waiting { orders, reloads } = std::mem::take(&mut *self.waiting());
        if !orders.is_empty() {
            let (asked, senders): (Vec<_>, Vec<_>) = orders.into_iter().unzip();
            for (sender, outcome) in senders.into_iter().zip(agent.change(&asked)) {
                // Who hung up does not wait for an answer.
                let _ = sender.send(outcome);
            }
        }
        if !reloads.is_empty() {
            let outcome = agent.reload().await;
            for sender in reloads {
                let _ = sender.send(outcome.clone());
            }
        }
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, Waiting> {
        // A list has no state that a panic could leave half-way.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sees to it that what is not confirmed is taken back.
async fn expire(agent: Shared, deadline: Deadline) {
    sleep_until(Instant::max(deadline.at, Instant::now())).await;
    while !agent.lock().await.expire(deadline).await {
        sleep(AGAIN).await;
    }
}

/// A JSON body, whatever its content type says; curl's is that of a form.
pub(super) struct Body<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let bytes =
            Bytes::from_request(request, state).await.map_err(IntoResponse::into_response)?;
        let body = serde_json::from_slice(&bytes);
        body.map(Self).map_err(|error| wrong(format!("the body is not what is needed: {error}")))
    }
}

fn answer(outcome: Result<Change, Refused>) -> Response {
    match outcome {
        Ok(change) => Json(change).into_response(),
        Err(refused) => refusal(refused, "refused", "it could not be done"),
    }
}

fn refusal((blame, errors): Refused, request: &str, machine: &str) -> Response {
    match blame {
        Blame::Request => problem(StatusCode::UNPROCESSABLE_ENTITY, request, errors),
        Blame::Machine => problem(StatusCode::INTERNAL_SERVER_ERROR, machine, errors),
    }
}

fn wrong(error: String) -> Response {
    refusal((Blame::Request, vec![error]), "refused", "")
}

/// Whoever took the request is gone without an answer: a panic.
fn lost() -> Response {
    problem(StatusCode::INTERNAL_SERVER_ERROR, "the agent failed", vec![])
}
