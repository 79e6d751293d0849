//! What those may ask for who can open the control socket: writes.

use std::fmt;
use std::sync::{Arc, Mutex as Lock, PoisonError};
use std::time::{Duration, SystemTime};

use axum::extract::{ConnectInfo, DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until};

use super::audit::{Audit, Written};
use super::body::{Body, Whole};
use super::{Api, LONGEST_BODY, Shared, problem};
use crate::agent::{
    Application, Asked, Blame, BlockOrder, Deadline, Done, ExemptOrder, Order, Refused,
};
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

/// `POST /v1/exempt`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExemptRequest {
    /// The network.
    pub cidr: String,
    /// The guarded interface that it must arrive on.
    pub interface: String,
    /// How long; for ever if none.
    pub for_seconds: Option<u64>,
    /// Whom to ask about it; who asks, if none.
    pub owner: Option<String>,
}

/// `POST /v1/unexempt`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnexemptRequest {
    /// The network.
    pub cidr: String,
    /// The interface.
    pub interface: String,
}

/// Who is at the other end of a socket.
#[derive(Clone, Copy, Debug, Default)]
pub struct Peer {
    /// Its user.
    pub uid: Option<u32>,
    /// Its group.
    pub gid: Option<u32>,
    /// Its process.
    pub pid: Option<i32>,
    /// The socket: `control`, `application`, or empty.
    pub socket: &'static str,
}

impl Peer {
    /// Who commands the agent.
    #[must_use]
    pub fn on_control(stream: &UnixStream) -> Self {
        Self::of(stream, "control")
    }

    /// An application.
    #[must_use]
    pub fn on_application(stream: &UnixStream) -> Self {
        Self::of(stream, "application")
    }

    fn of(stream: &UnixStream, socket: &'static str) -> Self {
        let credentials = stream.peer_cred().ok();
        Self {
            uid: credentials.map(|it| it.uid()),
            gid: credentials.map(|it| it.gid()),
            pid: credentials.and_then(|it| it.pid()),
            socket,
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.uid {
            Some(uid) => write!(out, "uid {uid}")?,
            None => out.write_str("somebody unknown")?,
        }
        if let Some(pid) = self.pid {
            write!(out, ", pid {pid}")?;
        }
        if let Some(gid) = self.gid {
            write!(out, ", gid {gid}")?;
        }
        if self.socket.is_empty() { Ok(()) } else { write!(out, ", {} socket", self.socket) }
    }
}

/// The agent, and what waits for it.
#[derive(Clone)]
pub(super) struct Commands {
    agent: Shared,
    waiting: Arc<Lock<Waiting>>,
    audit: Arc<Audit>,
}

/// Who waits for the agent is served together: a burst of requests is one switch of settings.
#[derive(Default)]
struct Waiting {
    orders: Vec<(Asked, oneshot::Sender<Result<Done, Refused>>)>,
    reloads: Vec<oneshot::Sender<(Reload, Option<Blame>)>>,
}

/// The routes.
pub(super) fn routes(api: &Api) -> Router {
    let apply = post(apply).layer(DefaultBodyLimit::max(LONGEST_CONFIGURATION));
    Router::new()
        .route("/v1/reload", post(reload))
        .route("/v1/mode", post(mode))
        .route("/v1/confirm", post(confirm))
        .route("/v1/block", post(block))
        .route("/v1/unblock", post(unblock))
        .route("/v1/exempt", post(exempt))
        .route("/v1/unexempt", post(unexempt))
        .layer(DefaultBodyLimit::max(LONGEST_BODY))
        .route("/v1/apply", apply)
        .with_state(api.commands.clone())
}

/// The body says nothing, but a request is acted on only once all of it has come in well.
async fn reload(
    State(commands): State<Commands>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    _: Whole,
) -> Response {
    let Some((reload, blame)) = commands.reload().await else { return lost() };
    let outcome = match blame {
        None => Ok(reload.changes.join("; ")),
        Some(_) => Err(reload.errors.join("; ")),
    };
    commands.note(&peer, "reload", "the configuration", None, outcome);
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
    commands.answer("mode", &request.mode, Order::Mode(mode), peer).await
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
    let until = confirm.map(|confirm| SystemTime::now() + confirm);
    let wanted = Application { file: file.clone(), text, confirm };
    let outcome = commands.agent.lock().await.apply(wanted, &peer.to_string()).await;
    let said = outcome.as_ref().map(|(change, _)| change.changes.join("; "));
    commands.note(&peer, "apply", &file, until, said.map_err(|(_, errors)| errors.join("; ")));
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
    _: Whole,
) -> Response {
    let outcome = commands.agent.lock().await.confirm(&peer.to_string());
    let said = outcome.as_ref().map(|change| change.changes.join("; "));
    let said = said.map_err(|(_, errors)| errors.join("; "));
    commands.note(&peer, "confirm", "what was applied", None, said);
    answer(outcome)
}

async fn block(
    State(commands): State<Commands>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Body(BlockRequest { cidr, for_seconds, reason }): Body<BlockRequest>,
) -> Response {
    match BlockOrder::new(&cidr, for_seconds.map(Duration::from_secs), reason).await {
        Ok(order) => commands.answer("block", &cidr, Order::Block(order), peer).await,
        Err(error) => {
            commands.note(&peer, "block", &cidr, None, Err(error.clone()));
            wrong(error)
        }
    }
}

async fn unblock(
    State(commands): State<Commands>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Body(UnblockRequest { cidr }): Body<UnblockRequest>,
) -> Response {
    match network(&cidr) {
        Ok(net) => commands.answer("unblock", &cidr, Order::Unblock(net), peer).await,
        Err(error) => wrong(error),
    }
}

async fn exempt(
    State(commands): State<Commands>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Body(ExemptRequest { cidr, interface, for_seconds, owner }): Body<ExemptRequest>,
) -> Response {
    let duration = for_seconds.map(Duration::from_secs);
    match ExemptOrder::new(&cidr, interface, owner, duration) {
        Ok(order) => commands.answer("exempt", &cidr, Order::Exempt(order), peer).await,
        Err(error) => {
            commands.note(&peer, "exempt", &cidr, None, Err(error.clone()));
            wrong(error)
        }
    }
}

async fn unexempt(
    State(commands): State<Commands>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Body(UnexemptRequest { cidr, interface }): Body<UnexemptRequest>,
) -> Response {
    match network(&cidr) {
        Ok(net) => commands.answer("unexempt", &cidr, Order::Unexempt(net, interface), peer).await,
        Err(error) => wrong(error),
    }
}

impl Commands {
    pub(super) fn new(agent: Shared, audit: Arc<Audit>) -> Self {
        Self { agent, waiting: Arc::default(), audit }
    }

    /// Gives an order, notes what came of it, and answers.
    async fn answer(&self, action: &str, subject: &str, order: Order, peer: Peer) -> Response {
        let Some(outcome) = self.order(order, peer).await else { return lost() };
        let (until, said) = match &outcome {
            Ok(done) => (done.until, Ok(done.change.changes.join("; "))),
            Err((_, errors)) => (None, Err(errors.join("; "))),
        };
        self.note(&peer, action, subject, until, said);
        answer(outcome.map(|done| done.change))
    }

    /// Gives an order; none if whoever took it is gone.
    pub(super) async fn order(&self, order: Order, peer: Peer) -> Option<Result<Done, Refused>> {
        let (sender, outcome) = oneshot::channel();
        let asked = Asked { order, by: peer.to_string() };
        self.waiting().orders.push((asked, sender));
        self.serve().await;
        outcome.await.ok()
    }

    fn note(
        &self,
        peer: &Peer,
        action: &str,
        subject: &str,
        until: Option<SystemTime>,
        outcome: Result<String, String>,
    ) {
        self.audit.note(peer, Written { action, subject, until, outcome });
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
pub(super) fn lost() -> Response {
    problem(StatusCode::INTERNAL_SERVER_ERROR, "the agent failed", vec![])
}
