//! `/v1/sources`: what is known of single sources, for the application that answers 429 or 503.

use std::net::IpAddr;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde::{Deserialize, Serialize};

use super::body::Body;
use super::{Api, problem};
use crate::sources::SourceReport;

/// Addresses of one request.
pub const MOST_ADDRESSES: usize = 256;

/// `POST /v1/sources` and `POST /v1/proven`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddressesRequest {
    /// IPv4 and IPv6 addresses.
    pub addresses: Vec<String>,
}

/// The answer of `POST /v1/sources`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SourcesAnswer {
    /// In the order of the request.
    pub sources: Vec<SourceReport>,
}

pub(super) async fn source(State(api): State<Api>, Path(address): Path<String>) -> Response {
    match read(&address) {
        Ok(address) => Json(api.sources.report(address)).into_response(),
        Err(error) => wrong(vec![error]),
    }
}

pub(super) async fn sources(
    State(api): State<Api>,
    Body(request): Body<AddressesRequest>,
) -> Response {
    match request.read() {
        Ok(addresses) => {
            let sources = addresses.into_iter().map(|it| api.sources.report(it)).collect();
            Json(SourcesAnswer { sources }).into_response()
        }
        Err(errors) => wrong(errors),
    }
}

impl AddressesRequest {
    /// The addresses, or each thing that is wrong with them.
    pub(super) fn read(&self) -> Result<Vec<IpAddr>, Vec<String>> {
        let count = self.addresses.len();
        if !(1..=MOST_ADDRESSES).contains(&count) {
            return Err(vec![format!("{count} addresses; send 1 to {MOST_ADDRESSES} at a time")]);
        }
        let read: Vec<_> = self.addresses.iter().map(|it| read(it)).collect();
        let errors: Vec<_> = read.iter().filter_map(|it| it.clone().err()).take(10).collect();
        if errors.is_empty() { Ok(read.into_iter().flatten().collect()) } else { Err(errors) }
    }
}

/// An address, and nothing else: a network has no bucket.
pub(super) fn read(text: &str) -> Result<IpAddr, String> {
    text.parse().map_err(|_| {
        let shown: String = text.chars().take(60).collect();
        format!("{shown:?} is not an IP address; write 203.0.113.5 or 2001:db8::1")
    })
}

pub(super) fn wrong(errors: Vec<String>) -> Response {
    problem(StatusCode::UNPROCESSABLE_ENTITY, "nothing was looked at or changed", errors)
}
