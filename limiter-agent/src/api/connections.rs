//! `GET /v1/connections`: who has connections open, the most first.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Deserialize;

use super::{Shared, problem};
use crate::connections::{DEFAULT_PAGE, LONGEST_PAGE};

/// The question.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    /// The longest page.
    limit: Option<usize>,
    /// The `next` of the page before.
    after: Option<String>,
}

pub(super) fn routes(agent: Shared) -> Router {
    Router::new().route("/v1/connections", get(connections)).with_state(agent)
}

async fn connections(
    State(agent): State<Shared>,
    asked: Result<Query<Asked>, QueryRejection>,
) -> Response {
    let wrong = |error: String| problem(StatusCode::UNPROCESSABLE_ENTITY, "refused", vec![error]);
    let Asked { limit, after } = match asked {
        Ok(Query(asked)) => asked,
        Err(rejection) => return wrong(rejection.body_text()),
    };
    let limit = limit.unwrap_or(DEFAULT_PAGE);
    if !(1..=LONGEST_PAGE).contains(&limit) {
        return wrong(format!("limit: {limit} is out of range; write 1 to {LONGEST_PAGE}"));
    }
    let after = match after.map(|after| after.parse()).transpose() {
        Ok(after) => after,
        Err(error) => return wrong(error),
    };
    match agent.lock().await.connections(after, limit) {
        Ok(page) => Json(page).into_response(),
        Err(error) => problem(
            StatusCode::SERVICE_UNAVAILABLE,
            "connections are not counted on this host",
            vec![error],
        ),
    }
}
