//! `limiter-agent top` and `events`: who is dropped, as the running agent says it.

mod follow;
mod live;
mod text;

use std::io::{self, IsTerminal as _};

use axum::http::{Method, StatusCode};
use hyper::body::Bytes;

use crate::cli::{Failure, TopArgs};
use crate::client::{Answer, ask, print, print_json};
use crate::events::{Query, Top};

pub use follow::events;

/// `limiter-agent top`: live on a terminal, else once.
///
/// # Errors
/// [`Failure::Request`] if the agent does not take the question, [`Failure::Machine`] if it does not
/// answer.
pub fn top(args: &TopArgs) -> Result<(), Failure> {
    let TopArgs { of, by, window, limit, .. } = *args;
    let query = Query { of, by, window, limit, offset: 0 };
    if !args.once && !args.client.json && io::stdout().is_terminal() {
        return live::run(args, query);
    }
    let answer = ask(&args.client.control_socket, Method::GET, &path(&query), Bytes::new())?;
    let top: Top = read(&answer)?;
    if args.client.json { print_json(&top) } else { print(&text::table(&top)) }
}

fn path(query: &Query) -> String {
    let Query { of, by, window, limit, offset } = query;
    let (of, by, window) = (of.as_str(), by.as_str(), window.as_str());
    format!("/v1/top?of={of}&by={by}&window={window}&limit={limit}&offset={offset}")
}

fn read<T: serde::de::DeserializeOwned>(answer: &Answer) -> Result<T, Failure> {
    if answer.code == StatusCode::OK { answer.read() } else { Err(answer.refusal()) }
}
