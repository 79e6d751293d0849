//! `/v1/top` and `/v1/events`: who is dropped, and how it goes on.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures_util::stream;
use limiter_common::abi::Event;
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::{Shared, problem};
use crate::events::{self, EventLine, KEPT, Labels, MOST_ENTRIES};
use crate::host;

/// Who may follow at once: each may be a client that went away and has not been missed yet.
const MOST_FOLLOWERS: usize = 16;

/// How often one who follows hears that there is nothing new.
const PERIOD: Duration = Duration::from_secs(1);

/// Events in one piece of an answer, at most.
const PIECE: usize = 256;

/// What `/v1/events` is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EventsRequest {
    /// How many of the last ones.
    pub limit: usize,
    /// Whether to go on with what comes.
    pub follow: bool,
}

impl Default for EventsRequest {
    fn default() -> Self {
        Self { limit: 100, follow: false }
    }
}

/// The last events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecentEvents {
    /// Oldest first.
    pub events: Vec<EventLine>,
    /// Events since the start that were lost because nobody read them in time.
    pub events_lost: u64,
}

/// One line for those who follow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FollowLine {
    /// An event.
    Event(EventLine),
    /// Said once a second.
    Totals(FollowTotals),
}

/// What does not show in a stream of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FollowTotals {
    /// Events that this client was too slow for.
    pub missed: u64,
    /// Events since the agent's start that the agent was too slow for.
    pub events_lost: u64,
}

pub(super) fn routes() -> Router<Shared> {
    Router::new().route("/v1/top", get(top)).route("/v1/events", get(events))
}

async fn top(
    State(agent): State<Shared>,
    query: Result<Query<events::Query>, QueryRejection>,
) -> Response {
    let query = match query {
        Ok(Query(query)) if (1..=MOST_ENTRIES).contains(&query.limit) => query,
        Ok(Query(query)) => {
            let error = format!("a limit of {}: write 1 to {MOST_ENTRIES}", query.limit);
            return unanswerable("/v1/top", error);
        }
        Err(rejection) => return unanswerable("/v1/top", rejection.body_text()),
    };
    match agent.lock().await.top(&query) {
        Ok(top) => Json(top).into_response(),
        Err(error) => problem(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the kernel's counters cannot be read",
            vec![error.to_string()],
        ),
    }
}

async fn events(
    State(agent): State<Shared>,
    request: Result<Query<EventsRequest>, QueryRejection>,
) -> Response {
    let request = match request {
        Ok(Query(request)) if request.limit <= KEPT => request,
        Ok(Query(request)) => {
            let error = format!("a limit of {}: no more than {KEPT} are kept", request.limit);
            return unanswerable("/v1/events", error);
        }
        Err(rejection) => return unanswerable("/v1/events", rejection.body_text()),
    };
    if !request.follow {
        return recent(&agent, request.limit).await;
    }
    let Some(follow) = Follow::start(agent, request.limit).await else {
        return problem(
            StatusCode::SERVICE_UNAVAILABLE,
            &format!("{MOST_FOLLOWERS} clients follow already, and no more may: end one of them"),
            vec![],
        );
    };
    let lines = stream::unfold(follow, |mut follow| async {
        follow.next().await.map(|lines| (Ok::<_, Infallible>(lines), follow))
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

async fn recent(agent: &Shared, limit: usize) -> Response {
    let agent = agent.lock().await;
    let labels = Labels::new(agent.names());
    let events = agent.events().recent(limit);
    let clocks = host::clocks();
    match agent.event_count() {
        Ok(count) => Json(RecentEvents {
            events: events.iter().map(|event| labels.event(event, clocks)).collect(),
            events_lost: count.lost,
        })
        .into_response(),
        Err(error) => problem(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the kernel's counters cannot be read",
            vec![error.to_string()],
        ),
    }
}

fn unanswerable(path: &str, error: String) -> Response {
    problem(StatusCode::UNPROCESSABLE_ENTITY, &format!("{path} cannot be asked so"), vec![error])
}

/// One who follows. A client that does not read misses events, and keeps nobody waiting.
struct Follow {
    agent: Shared,
    /// What was kept, until it is sent.
    recent: Vec<Event>,
    events: Receiver<Event>,
    labels: Labels,
    timer: Interval,
    missed: u64,
}

impl Follow {
    /// None if too many follow already.
    async fn start(shared: Shared, limit: usize) -> Option<Self> {
        let agent = shared.lock().await;
        let events = agent.events().follow(MOST_FOLLOWERS)?;
        let recent = agent.events().recent(limit);
        let labels = Labels::new(agent.names());
        drop(agent);
        let mut timer = interval(PERIOD);
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Some(Self { agent: shared, recent, events, labels, timer, missed: 0 })
    }

    /// The next lines; none at the end.
    async fn next(&mut self) -> Option<Bytes> {
        if !self.recent.is_empty() {
            let recent = std::mem::take(&mut self.recent);
            return Some(self.lines(&recent));
        }
        loop {
            tokio::select! {
                // The timer first: under a flood there always are more events.
                biased;
                _ = self.timer.tick() => return self.totals().await,
                event = self.events.recv() => match event {
                    Ok(event) => {
                        let events = self.further(event);
                        return Some(self.lines(&events));
                    }
                    Err(RecvError::Lagged(missed)) => self.missed += missed,
                    Err(RecvError::Closed) => return None,
                },
            }
        }
    }

    /// The event, and those that are there by now.
    fn further(&mut self, event: Event) -> Vec<Event> {
        let mut events = vec![event];
        while events.len() < PIECE {
            match self.events.try_recv() {
                Ok(event) => events.push(event),
                Err(TryRecvError::Lagged(missed)) => self.missed += missed,
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        events
    }

    fn lines(&self, events: &[Event]) -> Bytes {
        let clocks = host::clocks();
        let lines = events.iter().map(|event| FollowLine::Event(self.labels.event(event, clocks)));
        lines.map(|it| line(&it)).collect::<String>().into()
    }

    async fn totals(&mut self) -> Option<Bytes> {
        let agent = self.agent.lock().await;
        if agent.is_stopped() {
            return None;
        }
        // Classes and interfaces may come with a reload.
        self.labels = Labels::new(agent.names());
        let events_lost = agent.event_count().map_or(0, |count| count.lost);
        let totals = FollowTotals { missed: self.missed, events_lost };
        Some(line(&FollowLine::Totals(totals)).into())
    }
}

/// A line of JSON.
fn line(line: &FollowLine) -> String {
    // Nothing in it can fail to be written.
    serde_json::to_string(line).map(|text| text + "\n").unwrap_or_default()
}
