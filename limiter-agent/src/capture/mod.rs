//! `limiter-agent capture`: dropped packets, as the running agent shows them.

mod output;
mod pcapng;

use std::io::{self, Write as _};
use std::path::Path;
use std::time::Duration;

use axum::http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep_until, timeout};

use crate::api::{CaptureRequest, Line, Totals};
use crate::cli::{CaptureArgs, Failure};
use crate::client::{Answer, unanswered};

use output::{Output, Written};

/// How long the agent may take to begin, and to say its totals at the end.
const PATIENCE: Duration = Duration::from_secs(10);

/// Captures until enough packets have come, the time is up, or SIGINT or SIGTERM arrives; then says on
/// standard error what came of it.
///
/// # Errors
/// [`Failure::Request`] if the agent does not know what is asked for, [`Failure::Machine`] if it does not
/// answer or the file cannot be written.
pub fn capture(args: &CaptureArgs) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::Machine(format!("cannot start the runtime: {error}")))?;
    let summary = runtime.block_on(run(args))?;
    summary.say();
    Ok(())
}

/// What came of a capture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Summary {
    /// Packets written out.
    written: u64,
    /// The agent's last totals.
    totals: Totals,
}

impl Summary {
    /// On standard error, which may be closed.
    fn say(self) {
        let _ = writeln!(io::stderr(), "{}", self.text());
    }

    fn text(self) -> String {
        let Self { written, totals: Totals { dropped, lost, .. } } = self;
        let mut text =
            format!("{written} packets captured of {dropped} that were, or would be, dropped");
        if lost > 0 {
            text = format!("{text}; {lost} more were lost on the way: ask for a lower --rate");
        }
        text
    }
}

async fn run(args: &CaptureArgs) -> Result<Summary, Failure> {
    let taken = |error| Failure::Machine(format!("cannot take signals: {error}"));
    let mut interrupt = signal(SignalKind::interrupt()).map_err(taken)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(taken)?;
    let mut lines = Lines::ask(&args.client.control_socket, args).await?;
    // Once the agent has agreed, so that a refusal leaves an old file alone.
    let mut output = Output::open(args)?;
    let end = args.duration.map(|duration| Instant::now() + *duration);
    let mut summary = Summary::default();
    let mut is_over = args.count == Some(0);
    while !is_over {
        let stop = async {
            match end {
                Some(end) => sleep_until(end).await,
                None => std::future::pending().await,
            }
        };
        let line = tokio::select! {
            biased;
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            () = stop => break,
            line = lines.next() => line?,
        };
        match line {
            None => {
                output.finish()?;
                summary.say();
                return Err(Failure::Machine("the agent has stopped".to_owned()));
            }
            Some(Line::Totals(totals)) => {
                summary.totals = totals;
                is_over = output.flush()? == Written::Unwanted;
            }
            Some(line @ Line::Packet(_)) => {
                is_over = output.write(&line)? == Written::Unwanted;
                summary.written += 1;
                is_over |= args.count == Some(summary.written);
            }
        }
    }
    // Totals that count what was written.
    let last = async {
        while let Ok(Some(line)) = lines.next().await {
            if let Line::Totals(totals) = line {
                return Some(totals);
            }
        }
        None
    };
    if let Ok(Some(totals)) = timeout(PATIENCE, last).await {
        summary.totals = totals;
    }
    output.finish()?;
    Ok(summary)
}

/// The agent's answer, line by line. The agent stops sampling when this is dropped.
struct Lines {
    body: Incoming,
    /// What has come and is no whole line yet.
    rest: Vec<u8>,
}

impl Lines {
    async fn ask(socket: &Path, args: &CaptureArgs) -> Result<Self, Failure> {
        let answer = timeout(PATIENCE, exchange(socket, args)).await;
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
    async fn next(&mut self) -> Result<Option<Line>, Failure> {
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

async fn exchange(socket: &Path, args: &CaptureArgs) -> anyhow::Result<(StatusCode, Incoming)> {
    let request = CaptureRequest {
        rate: args.rate,
        interfaces: args.interfaces.clone(),
        classes: args.classes.clone(),
        reasons: args.reasons.clone(),
    };
    let stream = UnixStream::connect(socket).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = Request::builder()
        .method(Method::POST)
        .uri("/v1/capture")
        .header("host", "localhost")
        .header("content-type", "application/json")
        .body(Full::<Bytes>::from(serde_json::to_vec(&request)?))?;
    let response = sender.send_request(request).await?;
    Ok((response.status(), response.into_body()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_lost_is_said() {
        let totals = Totals { dropped: 900, captured: 12, lost: 0 };
        let summary = Summary { written: 10, totals };
        assert_eq!(summary.text(), "10 packets captured of 900 that were, or would be, dropped");
        let text = Summary { totals: Totals { lost: 7, ..totals }, ..summary }.text();
        assert!(text.ends_with("; 7 more were lost on the way: ask for a lower --rate"), "{text}");
    }
}
