//! Asks the agent, on a thread of its own: keys are answered while it waits.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use axum::http::{Method, StatusCode};
use hyper::body::Bytes;
use serde::{Deserialize, Serialize};

use super::metrics::{Rate, Scrape};
use crate::api::{BlockRequest, ModeRequest};
use crate::cli::Failure;
use crate::client::ask;
use crate::events::{Query, Top};
use crate::status::{Change, Interface, ModeOverride};
use crate::top::{path, read};

/// How often the view is renewed.
const PERIOD: Duration = Duration::from_secs(1);

/// What is wanted of the agent.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Wish {
    /// Another ranking from now on.
    Rank(Query),
    /// Drop all from here for so long.
    Block(String, Duration),
    /// All that is known of an address.
    Inspect(String),
    /// Another mode.
    Mode(String),
}

/// What the agent said.
#[derive(Debug)]
pub(super) enum News {
    /// All that is shown, once a second.
    Look(Box<Look>),
    /// What came of a wish.
    Done(String),
    /// A text to read.
    Details(String),
    /// It did not answer, or refused.
    Failed(String),
}

/// One look at the agent.
#[derive(Debug, Default)]
pub(super) struct Look {
    pub(super) top: Option<Top>,
    pub(super) status: Option<Status>,
    pub(super) scrape: Scrape,
    pub(super) rates: Vec<Rate>,
    /// New sources a second.
    pub(super) created: f64,
}

/// What is shown of `/v1/status`.
#[derive(Debug, Deserialize)]
pub(super) struct Status {
    pub(super) version: String,
    pub(super) mode: String,
    pub(super) mode_override: Option<ModeOverride>,
    pub(super) problems: Vec<String>,
    pub(super) interfaces: Vec<Interface>,
}

/// The thread, which ends when this is dropped.
pub(super) struct Worker {
    pub(super) wishes: Sender<Wish>,
    pub(super) news: Receiver<News>,
}

impl Worker {
    /// Starts it.
    pub(super) fn start(socket: PathBuf, query: Query) -> Self {
        let (wishes, asked) = mpsc::channel();
        let (told, news) = mpsc::channel();
        thread::spawn(move || work(&socket, query, &asked, &told));
        Self { wishes, news }
    }
}

fn work(socket: &Path, mut query: Query, wishes: &Receiver<Wish>, news: &Sender<News>) {
    let mut before: Option<(Scrape, Instant)> = None;
    let mut due = Instant::now();
    loop {
        if Instant::now() >= due {
            due = Instant::now() + PERIOD;
            let said = match look(socket, &query, &mut before) {
                Ok(look) => News::Look(Box::new(look)),
                Err(failure) => News::Failed(failure.to_string()),
            };
            if news.send(said).is_err() {
                return;
            }
        }
        let wish = match wishes.recv_timeout(due.saturating_duration_since(Instant::now())) {
            Ok(wish) => wish,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let said = match wish {
            Wish::Rank(other) => {
                query = other;
                due = Instant::now();
                continue;
            }
            Wish::Block(cidr, time) => {
                let reason = Some("limiter-agent top".to_owned());
                let for_seconds = Some(time.as_secs().max(1));
                change(socket, "/v1/block", &BlockRequest { cidr, for_seconds, reason })
            }
            Wish::Mode(mode) => change(socket, "/v1/mode", &ModeRequest { mode }),
            Wish::Inspect(address) => inspect(socket, &address),
        };
        due = Instant::now();
        if news.send(said.unwrap_or_else(|failure| News::Failed(failure.to_string()))).is_err() {
            return;
        }
    }
}

fn look(
    socket: &Path,
    query: &Query,
    before: &mut Option<(Scrape, Instant)>,
) -> Result<Look, Failure> {
    let get = |path: &str| ask(socket, Method::GET, path, Bytes::new());
    let top = read(&get(&path(query))?)?;
    let status = read(&get("/v1/status")?)?;
    let answer = get("/metrics")?;
    let scrape = Scrape::parse(&String::from_utf8_lossy(&answer.body));
    let now = Instant::now();
    let mut look = Look { top: Some(top), status: Some(status), ..Look::default() };
    if let Some((old, then)) = before {
        let elapsed = now - *then;
        look.rates = scrape.rates(old, elapsed);
        let created = |scrape: &Scrape| scrape.sum("limiter_sources_created_total", None);
        look.created =
            (created(&scrape) - created(old)).max(0.0) / elapsed.as_secs_f64().max(0.001);
    }
    *before = Some((scrape.clone(), now));
    look.scrape = scrape;
    Ok(look)
}

fn change(socket: &Path, path: &str, request: &impl Serialize) -> Result<News, Failure> {
    let body = serde_json::to_vec(request)
        .map_err(|error| Failure::Machine(format!("cannot write JSON: {error}")))?;
    let change: Change = read(&ask(socket, Method::POST, path, Bytes::from(body))?)?;
    let warnings = change.warnings.iter().map(|it| format!("warning: {it}"));
    Ok(News::Done(change.changes.into_iter().chain(warnings).collect::<Vec<_>>().join("; ")))
}

fn inspect(socket: &Path, address: &str) -> Result<News, Failure> {
    let answer = ask(socket, Method::GET, &format!("/v1/sources/{address}"), Bytes::new())?;
    if answer.code == StatusCode::NOT_FOUND {
        return Ok(News::Details(format!("the agent knows nothing more of {address}")));
    }
    let value: serde_json::Value = read(&answer)?;
    let text = serde_json::to_string_pretty(&value)
        .map_err(|error| Failure::Machine(format!("cannot write JSON: {error}")))?;
    Ok(News::Details(text))
}
