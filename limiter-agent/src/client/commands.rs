//! The commands that change what the running agent does.

use std::io::Write as _;
use std::time::SystemTime;

use axum::http::Method;
use hyper::body::Bytes;
use limiter_common::abi;
use serde::Serialize;

use super::{answers, ask, print, print_json};
use crate::api::{
    ApplyRequest, BlockRequest, ExemptRequest, ModeRequest, UnblockRequest, UnexemptRequest,
};
use crate::cli::{
    ApplyArgs, BlockArgs, ClientArgs, ExemptArgs, Failure, ModeArgs, NewMode, UnblockArgs,
    UnexemptArgs,
};
use crate::config::read_text;
use crate::datapath;
use crate::status::{Change, utc};

/// `limiter-agent mode MODE`.
///
/// # Errors
/// [`Failure`] as the agent says, or [`Failure::Machine`] if none answers.
pub fn mode(args: &ModeArgs) -> Result<(), Failure> {
    if !answers(&args.client.control_socket) && args.client.pins.exists() {
        return unattended_mode(args);
    }
    let mode = args.mode.as_str().to_owned();
    command(&args.client, "/v1/mode", &ModeRequest { mode })
}

/// `limiter-agent apply FILE`. The file is read here: the agent may not be allowed to.
///
/// # Errors
/// [`Failure::Request`] if the file cannot be read or is wrong; else as for [`mode`].
pub fn apply(args: &ApplyArgs) -> Result<(), Failure> {
    let text = read_text(&args.file).map_err(|error| Failure::Request(error.to_string()))?;
    let request = ApplyRequest {
        file: args.file.display().to_string(),
        text,
        confirm_seconds: args.confirm.map(whole_seconds),
    };
    command(&args.client, "/v1/apply", &request)
}

/// `limiter-agent confirm`.
///
/// # Errors
/// As for [`mode`].
pub fn confirm(args: &ClientArgs) -> Result<(), Failure> {
    command(args, "/v1/confirm", &())
}

/// `limiter-agent block CIDR`.
///
/// # Errors
/// As for [`mode`].
pub fn block(args: &BlockArgs) -> Result<(), Failure> {
    let request = BlockRequest {
        cidr: args.cidr.clone(),
        for_seconds: args.duration.map(whole_seconds),
        reason: args.reason.clone(),
    };
    command(&args.client, "/v1/block", &request)
}

/// `limiter-agent unblock CIDR`.
///
/// # Errors
/// As for [`mode`].
pub fn unblock(args: &UnblockArgs) -> Result<(), Failure> {
    command(&args.client, "/v1/unblock", &UnblockRequest { cidr: args.cidr.clone() })
}

/// `limiter-agent exempt CIDR`.
///
/// # Errors
/// As for [`mode`].
pub fn exempt(args: &ExemptArgs) -> Result<(), Failure> {
    let request = ExemptRequest {
        cidr: args.cidr.clone(),
        interface: args.interface.clone(),
        for_seconds: args.duration.map(whole_seconds),
        owner: args.owner.clone(),
    };
    command(&args.client, "/v1/exempt", &request)
}

/// `limiter-agent unexempt CIDR`.
///
/// # Errors
/// As for [`mode`].
pub fn unexempt(args: &UnexemptArgs) -> Result<(), Failure> {
    let (cidr, interface) = (args.cidr.clone(), args.interface.clone());
    command(&args.client, "/v1/unexempt", &UnexemptRequest { cidr, interface })
}

/// Changes the mode where no agent answers, in what one left pinned.
fn unattended_mode(args: &ModeArgs) -> Result<(), Failure> {
    let mode = match args.mode {
        NewMode::Observe => Some(abi::Mode::OBSERVE),
        NewMode::Bypass => Some(abi::Mode::BYPASS),
        NewMode::Config => None,
        NewMode::Enforce => {
            return Err(Failure::Request(
                "no agent answers, and without one there are only observe, bypass and config (what the \
                 last agent had in force); start it with `limiter-agent run`"
                    .to_owned(),
            ));
        }
    };
    datapath::set_mode(&args.client.pins, mode)
        .map_err(|error| Failure::Machine(error.to_string()))?;
    let change = format!(
        "no agent answers: what one left pinned is under {} until the next one starts",
        args.mode.as_str()
    );
    if args.client.json {
        return print_json(&Change {
            at: utc(SystemTime::now()),
            changes: vec![change],
            warnings: Vec::new(),
            confirm_by: None,
        });
    }
    print(&format!("{change}\n"))
}

/// Asks for a change and says what came of it.
pub(crate) fn command(
    args: &ClientArgs,
    path: &str,
    request: &impl Serialize,
) -> Result<(), Failure> {
    let body = serde_json::to_vec(request)
        .map_err(|error| Failure::Machine(format!("cannot write JSON: {error}")))?;
    let answer = ask(&args.control_socket, Method::POST, path, Bytes::from(body))?;
    answer.check(args)?;
    let change: Change = answer.read()?;
    if args.json {
        return print_json(&change);
    }
    for warning in &change.warnings {
        // Where nobody listens, it was done all the same.
        let _ = writeln!(std::io::stderr(), "warning: {warning}");
    }
    let mut lines = change.changes;
    lines.extend(
        change
            .confirm_by
            .map(|by| format!("rolled back at {by} unless you confirm: limiter-agent confirm")),
    );
    print(&format!("{}\n", lines.join("\n")))
}

/// Rounded up: nothing ends early.
fn whole_seconds(duration: std::time::Duration) -> u64 {
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0))
}
