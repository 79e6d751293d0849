//! Bodies of requests, and what is said about wrong ones.

use std::error::Error as _;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::Response;
use serde::de::DeserializeOwned;
use serde_json::error::Category;

use super::problem;

/// A JSON body. What says that it is something else is refused, but for what curl says of each.
pub(crate) struct Body<T>(pub(crate) T);

/// A body that says nothing, but must have come in well.
pub(super) struct Whole;

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        if let Some(kind) = other_kind(request.headers()) {
            let cure = "send application/json";
            return Err(problem(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "the body is not JSON",
                vec![format!("its content type is {kind:?}; {cure}")],
            ));
        }
        let bytes = bytes(request, state).await?;
        serde_json::from_slice(&bytes).map(Self).map_err(|error| {
            let (code, detail) = match error.classify() {
                Category::Syntax | Category::Eof | Category::Io => {
                    (StatusCode::BAD_REQUEST, "the body is not JSON")
                }
                Category::Data => {
                    (StatusCode::UNPROCESSABLE_ENTITY, "the body is not what is needed")
                }
            };
            problem(code, detail, vec![error.to_string()])
        })
    }
}

impl<S: Send + Sync> FromRequest<S> for Whole {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        bytes(request, state).await.map(|_| Self)
    }
}

async fn bytes<S: Send + Sync>(request: Request, state: &S) -> Result<Bytes, Response> {
    Bytes::from_request(request, state).await.map_err(|rejection| {
        let cause = rejection.source().and_then(|error| error.source()).map(ToString::to_string);
        let cause = cause.unwrap_or_else(|| rejection.body_text());
        match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => problem(
                StatusCode::PAYLOAD_TOO_LARGE,
                "the body is longer than any that is taken here",
                vec![],
            ),
            code => problem(code, "the body did not come in well", vec![cause]),
        }
    })
}

/// The content type, if it says that the body is no JSON.
fn other_kind(headers: &HeaderMap) -> Option<&str> {
    let kind = headers.get(header::CONTENT_TYPE)?.to_str().unwrap_or("unreadable");
    let essence = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let is_json = essence == "application/json"
        || essence.starts_with("application/") && essence.ends_with("+json")
        || essence == "application/x-www-form-urlencoded";
    (!is_json).then_some(kind)
}
