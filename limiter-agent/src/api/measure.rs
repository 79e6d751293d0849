//! What was measured, and what follows from it.

use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};

use super::body::Body;
use super::{LONGEST_BODY, Shared, problem};
use crate::measure::{Refusal, Request};

/// What anybody may ask who reaches the listener.
pub(super) fn readable() -> Router<Shared> {
    Router::new().route("/v1/measure", get(measure))
}

/// What shows the configuration, too.
pub(super) fn private() -> Router<Shared> {
    Router::new().route("/v1/recommend", post(recommend)).layer(DefaultBodyLimit::max(LONGEST_BODY))
}

async fn measure(State(agent): State<Shared>) -> Response {
    Json(agent.lock().await.measured()).into_response()
}

async fn recommend(State(agent): State<Shared>, Body(request): Body<Request>) -> Response {
    match agent.lock().await.recommend(&request) {
        Ok(recommendation) => Json(recommendation).into_response(),
        Err(refusal) => {
            let (code, errors) = match refusal {
                Refusal::TooLittle(classes) => (StatusCode::UNPROCESSABLE_ENTITY, classes),
                Refusal::Margin(_) => (StatusCode::UNPROCESSABLE_ENTITY, vec![refusal.to_string()]),
                Refusal::Text(_) => (StatusCode::INTERNAL_SERVER_ERROR, vec![refusal.to_string()]),
            };
            problem(code, "there is no recommendation", errors)
        }
    }
}
