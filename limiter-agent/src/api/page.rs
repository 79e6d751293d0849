//! `/`: the page, its style sheet and its script. On the metrics listener only, for browsers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::time::{MissedTickBehavior, interval};

use super::{Shared, problem, problems};
use crate::agent::{Agent, Complaint};
use crate::events;
use crate::host;
use crate::page::{self, History, Range, Reading, Request, TableUse, View};

/// How long a page stays what it is, however many ask for it.
const FRESH: Duration = Duration::from_secs(1);

/// Talkers that are shown.
const TALKERS: usize = 20;

/// For style sheet and script, which come with the agent.
const KEEP: &str = "no-cache";

/// Nothing but what the page consists of: what a name might bring in is not run, loaded or sent.
const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; \
                      img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

struct Pages {
    agent: Shared,
    history: Arc<Mutex<History>>,
    host: String,
    /// The last of each kind. Who asks while one is made waits for it.
    made: tokio::sync::Mutex<BTreeMap<Request, (Instant, Bytes)>>,
}

/// The page's routes. From now on the history is kept.
pub(super) fn page(agent: Shared) -> Router {
    let history = Arc::default();
    tokio::spawn(keep(Arc::downgrade(&agent), Arc::clone(&history)));
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim().to_owned();
    let pages = Arc::new(Pages { agent, history, host, made: tokio::sync::Mutex::default() });
    Router::new()
        .route("/", get(answer))
        .route("/page.css", get(|| async { file("text/css; charset=utf-8", page::STYLE) }))
        .route("/page.js", get(|| async { file("text/javascript; charset=utf-8", page::SCRIPT) }))
        .with_state(pages)
}

/// Adds a point to the history every [`page::PERIOD`], until the agent ends.
async fn keep(agent: Weak<tokio::sync::Mutex<Agent>>, history: Arc<Mutex<History>>) {
    let mut timer = interval(page::PERIOD);
    timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut complaint = Complaint::default();
    loop {
        timer.tick().await;
        let Some(agent) = agent.upgrade() else {
            return;
        };
        let agent = agent.lock().await;
        if agent.is_stopped() {
            return;
        }
        let reading = agent.reading();
        drop(agent);
        complaint.hear(reading.map(|reading| locked(&history).add(reading)));
    }
}

async fn answer(State(pages): State<Arc<Pages>>, RawQuery(query): RawQuery) -> Response {
    let request = match request(query.as_deref().unwrap_or_default()) {
        Ok(request) => request,
        Err(error) => {
            return problem(StatusCode::BAD_REQUEST, "there is no such page", vec![error]);
        }
    };
    let mut made = pages.made.lock().await;
    let now = Instant::now();
    let html = match made.get(&request) {
        Some((at, html)) if now < *at + FRESH => html.clone(),
        _ => match pages.make(request).await {
            Ok(html) => {
                let html = Bytes::from(html);
                made.insert(request, (Instant::now(), html.clone()));
                html
            }
            Err(error) => {
                return problem(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "the kernel's counters cannot be read",
                    vec![error],
                );
            }
        },
    };
    (headers("text/html; charset=utf-8", "no-store"), html).into_response()
}

impl Pages {
    async fn make(&self, request: Request) -> Result<String, String> {
        let links = host::links().await;
        let agent = self.agent.lock().await;
        let snapshot = agent.snapshot().map_err(|error| error.to_string())?;
        let status = agent.status(problems(&agent, links)).map_err(|error| error.to_string())?;
        let top = agent.top(&query()).map_err(|error| error.to_string())?;
        drop(agent);
        let created = snapshot.created.iter().map(|(_, count)| count).sum();
        let reading = Reading::new(Instant::now(), &snapshot.packets, created);
        let traffic = {
            let range = request.range.duration();
            locked(&self.history).traffic(reading, range)
        };
        let tables = snapshot.capacities.iter().map(|(family, capacity)| {
            let of = |standing| {
                let mut rows = snapshot.sources.iter();
                rows.find(|it| it.0 == *family && it.1 == standing).map_or(0, |it| it.2)
            };
            TableUse { family, capacity: *capacity, proven: of("proven"), seen: of("seen") }
        });
        let view = View {
            host: self.host.clone(),
            at: SystemTime::now(),
            status,
            tables: tables.collect(),
            pressures: snapshot.pressures,
            exemptions: snapshot.exemptions,
            blocks: snapshot.blocks,
            traffic,
            top,
        };
        Ok(page::render(&view, request))
    }
}

/// Which talkers a page shows.
fn query() -> events::Query {
    events::Query { limit: TALKERS, ..events::Query::default() }
}

fn locked(history: &Mutex<History>) -> MutexGuard<'_, History> {
    history.lock().unwrap_or_else(PoisonError::into_inner)
}

fn request(query: &str) -> Result<Request, String> {
    let mut request = Request::default();
    for part in query.split('&').filter(|part| !part.is_empty()) {
        match part.split_once('=').unwrap_or((part, "")) {
            ("range", value) => {
                let range = Range::ALL.into_iter().find(|range| range.as_str() == value);
                request.range = range.ok_or("range is 5m, 15m or 1h")?;
            }
            ("refresh", "off") => request.paused = true,
            ("refresh", _) => return Err("refresh is off, or not given".to_owned()),
            _ => return Err("a page is asked for by range and refresh only".to_owned()),
        }
    }
    Ok(request)
}

fn file(kind: &'static str, text: &'static str) -> Response {
    (headers(kind, KEEP), text).into_response()
}

fn headers(kind: &'static str, cache: &'static str) -> [(HeaderName, &'static str); 6] {
    [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, cache),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_what_the_page_links_to_or_an_error() {
        let long = Request { range: Range::Long, paused: false };
        for (query, expected) in [
            ("", Some(long)),
            ("range=1h", Some(long)),
            ("range=5m", Some(Request { range: Range::Short, ..long })),
            ("range=15m&refresh=off", Some(Request { range: Range::Middle, paused: true })),
            ("range=2m", None),
            ("range", None),
            ("refresh=on", None),
            ("x=1", None),
        ] {
            assert_eq!(request(query).ok(), expected, "{query}");
        }
    }
}
