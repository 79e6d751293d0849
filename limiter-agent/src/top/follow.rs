//! `limiter-agent events`.

use std::io::{self, Write as _};
use std::path::Path;
use std::time::Duration;

use axum::http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;

use super::{read, text};
use crate::api::{FollowLine, FollowTotals, RecentEvents};
use crate::cli::{EventsArgs, Failure};
use crate::client::{Answer, ask, print, print_json, unanswered};

/// How long the agent may take to begin.
const PATIENCE: Duration = Duration::from_secs(10);

/// `limiter-agent events`. Following ends with SIGINT or SIGTERM, or when nobody reads what it prints.
///
/// # Errors
/// [`Failure::Request`] if the agent does not take the question, [`Failure::Machine`] if it does not
/// answer, or ends.
pub fn events(args: &EventsArgs) -> Result<(), Failure> {
    let path = format!("/v1/events?limit={}&follow={}", args.limit, args.follow);
    if args.follow {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Failure::Machine(format!("cannot start the runtime: {error}")))?;
        return runtime.block_on(follow(args, &path));
    }
    let answer = ask(&args.client.control_socket, Method::GET, &path, Bytes::new())?;
    let recent: RecentEvents = read(&answer)?;
    if args.client.json {
        return print_json(&recent);
    }
    print(&recent.events.iter().map(text::event).collect::<String>())
}

async fn follow(args: &EventsArgs, path: &str) -> Result<(), Failure> {
    let taken = |error| Failure::Machine(format!("cannot take signals: {error}"));
    let mut interrupt = signal(SignalKind::interrupt()).map_err(taken)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(taken)?;
    let mut lines = Lines::ask(&args.client.control_socket, path).await?;
    let mut before = FollowTotals::default();
    let mut is_first = true;
    loop {
        let line = tokio::select! {
            biased;
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
            line = lines.next() => line?,
        };
        match line {
            None => return Err(Failure::Machine("the agent has stopped".to_owned())),
            Some(FollowLine::Event(event)) => {
                let text = if args.client.json {
                    let json = serde_json::to_string(&event)
                        .map_err(|error| Failure::Machine(format!("cannot write JSON: {error}")))?;
                    json + "\n"
                } else {
                    text::event(&event)
                };
                if !is_wanted(&text)? {
                    return Ok(());
                }
            }
            Some(FollowLine::Totals(totals)) => {
                // What was lost before concerns nobody here.
                if !is_first && totals != before {
                    let missed = totals.missed - before.missed;
                    let lost = totals.events_lost.saturating_sub(before.events_lost);
                    // Where nobody listens, it goes on.
                    let _ = writeln!(
                        io::stderr(),
                        "{missed} events were missed here and {lost} were lost before; later ones stand \
                         for those that were lost"
                    );
                }
                (before, is_first) = (totals, false);
            }
        }
    }
}

/// Writes it out at once; false if nobody wants it any more.
fn is_wanted(text: &str) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::Machine(format!("cannot write: {error}"))),
    }
}

/// The agent's answer, line by line.
struct Lines {
    body: Incoming,
    /// What has come and is no whole line yet.
    rest: Vec<u8>,
}

impl Lines {
    async fn ask(socket: &Path, path: &str) -> Result<Self, Failure> {
        let answer = timeout(PATIENCE, exchange(socket, path)).await;
        let answer =
            answer.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer within {PATIENCE:?}")));
        let (code, body) = answer.map_err(|error| unanswered(socket, &error))?;
        if code == StatusCode::OK {
            return Ok(Self { body, rest: Vec::new() });
        }
        let body = body.collect().await.map(http_body_util::Collected::to_bytes);
        Err(Answer { code, body: body.unwrap_or_default() }.refusal())
    }

    /// None when the agent has ended the answer.
    async fn next(&mut self) -> Result<Option<FollowLine>, Failure> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<_> = self.rest.drain(..=end).collect();
                return serde_json::from_slice(&line).map(Some).map_err(|error| {
                    Failure::Machine(format!(
                        "the agent's answer is not understood ({error}); is it of another version?"
                    ))
                });
            }
            match self.body.frame().await {
                None | Some(Err(_)) => return Ok(None),
                Some(Ok(frame)) => {
                    self.rest.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new()));
                }
            }
        }
    }
}

async fn exchange(socket: &Path, path: &str) -> anyhow::Result<(StatusCode, Incoming)> {
    let stream = UnixStream::connect(socket).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = Request::builder()
        .method(Method::GET)
        .uri(path)
        .header("host", "localhost")
        .body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await?;
    Ok((response.status(), response.into_body()))
}
