//! The commands that ask the running agent over its control socket.

mod commands;

use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use axum::http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

use crate::api::{Detached, Problem};
use crate::cli::{ClientArgs, Failure};
use crate::datapath;
use crate::host;
use crate::status::{Reload, Status};
use crate::unattended::Unattended;

pub use commands::{apply, block, confirm, mode, unblock};

/// How long the agent may take; a reload waits for the kernel.
const PATIENCE: Duration = Duration::from_secs(30);

/// `limiter-agent status`.
///
/// # Errors
/// [`Failure::Machine`] if no agent answers.
pub fn status(args: &ClientArgs) -> Result<(), Failure> {
    if !answers(&args.control_socket)
        && let Some(unattended) = unattended(&args.pins)?
    {
        return if args.json { print_json(&unattended) } else { print(&unattended.to_string()) };
    }
    let answer = ask(&args.control_socket, Method::GET, "/v1/status", Bytes::new())?;
    if answer.code != StatusCode::OK {
        return Err(answer.refusal());
    }
    let status: Status = answer.read()?;
    if args.json { print_json(&status) } else { print(&status.to_string()) }
}

/// `limiter-agent reload`.
///
/// # Errors
/// [`Failure::Request`] if the agent did not take the configuration, [`Failure::Machine`] if it
/// could not apply it or does not answer.
pub fn reload(args: &ClientArgs) -> Result<(), Failure> {
    let answer = ask(&args.control_socket, Method::POST, "/v1/reload", Bytes::new())?;
    answer.check(args)?;
    let reload: Reload = answer.read()?;
    if args.json {
        return print_json(&reload);
    }
    let mut lines = vec!["reloaded".to_owned()];
    lines.extend(reload.changes.iter().map(|change| format!("  {change}")));
    print(&format!("{}\n", lines.join("\n")))
}

/// `limiter-agent detach`.
///
/// # Errors
/// [`Failure::Machine`] if something cannot be removed.
pub fn detach(args: &ClientArgs) -> Result<(), Failure> {
    let detached = if answers(&args.control_socket) {
        let answer = ask(&args.control_socket, Method::POST, "/v1/detach", Bytes::new())?;
        if answer.code != StatusCode::OK {
            return Err(answer.refusal());
        }
        answer.read()?
    } else {
        let interfaces =
            datapath::detach(&args.pins).map_err(|error| Failure::Machine(error.to_string()))?;
        // Whether netlink answers changes nothing.
        let _ = block_on(async { Ok(host::released(&interfaces).await?) });
        Detached { interfaces }
    };
    if args.json {
        return print_json(&detached);
    }
    let names = detached.interfaces.join(", ");
    print(
        if names.is_empty() {
            "nothing was attached\n".to_owned()
        } else {
            format!("detached from {names}\n")
        }
        .as_str(),
    )
}

fn unattended(pins: &Path) -> Result<Option<Unattended>, Failure> {
    Unattended::look(pins).map_err(|error| Failure::Machine(error.to_string()))
}

/// Whether an agent listens on `socket`.
fn answers(socket: &Path) -> bool {
    std::os::unix::net::UnixStream::connect(socket).is_ok()
}

/// The agent's answer.
pub(crate) struct Answer {
    pub(crate) code: StatusCode,
    pub(crate) body: Bytes,
}

impl Answer {
    /// # Errors
    /// Unless it is a good one: what it says, for people or in JSON.
    fn check(&self, args: &ClientArgs) -> Result<(), Failure> {
        if self.code == StatusCode::OK {
            return Ok(());
        }
        if args.json
            && let Ok(problem) = self.read::<Problem>()
        {
            print_json(&problem)?;
            return Err(self.failure(String::new()));
        }
        Err(self.refusal())
    }

    pub(crate) fn read<T: serde::de::DeserializeOwned>(&self) -> Result<T, Failure> {
        serde_json::from_slice(&self.body).map_err(|error| {
            Failure::Machine(format!(
                "the agent's answer is not understood ({error}); is it of another version?"
            ))
        })
    }

    /// What a problem document says, for people.
    pub(crate) fn refusal(&self) -> Failure {
        let text = match self.read::<Problem>() {
            Ok(problem) => {
                let mut lines = vec![problem.detail];
                lines.extend(problem.errors);
                lines.join("\n")
            }
            Err(_) => format!("the agent answered {}", self.code),
        };
        self.failure(text)
    }

    fn failure(&self, text: String) -> Failure {
        if self.code == StatusCode::UNPROCESSABLE_ENTITY {
            Failure::Request(text)
        } else {
            Failure::Machine(text)
        }
    }
}

pub(crate) fn ask(
    socket: &Path,
    method: Method,
    path: &str,
    body: Bytes,
) -> Result<Answer, Failure> {
    let exchange = async {
        tokio::time::timeout(PATIENCE, exchange(socket, method, path, body))
            .await
            .unwrap_or_else(|_| Err(anyhow::anyhow!("no answer within {PATIENCE:?}")))
    };
    block_on(exchange).map_err(|error| unanswered(socket, &error))
}

/// Nobody answers on the socket.
pub(crate) fn unanswered(socket: &Path, error: &anyhow::Error) -> Failure {
    let (socket, cure) = (socket.display(), cure(error));
    Failure::Machine(format!("no agent answers on {socket}: {error:#}; {cure}"))
}

fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start the runtime")?.block_on(work)
}

fn cure(error: &anyhow::Error) -> &'static str {
    match error.downcast_ref().map(io::Error::kind) {
        Some(ErrorKind::NotFound) => {
            "start it with `limiter-agent run`, or name its socket with --control-socket PATH"
        }
        Some(ErrorKind::ConnectionRefused) => {
            "the one that made this socket has ended: start it again with `limiter-agent run`"
        }
        Some(ErrorKind::PermissionDenied) => {
            "you may not open this socket: run this as root, or as the agent's user"
        }
        _ => "is this the socket of a limiter-agent that runs?",
    }
}

async fn exchange(
    socket: &Path,
    method: Method,
    path: &str,
    body: Bytes,
) -> anyhow::Result<Answer> {
    let stream = UnixStream::connect(socket).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "localhost")
        .body(Full::new(body))?;
    let response = sender.send_request(request).await?;
    let code = response.status();
    let body = response.into_body().collect().await?.to_bytes();
    connection.abort();
    Ok(Answer { code, body })
}

pub(crate) fn print_json<T: serde::Serialize>(value: &T) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Failure::Machine(format!("cannot write JSON: {error}")))?;
    print(&format!("{text}\n"))
}

/// Like `print!`, but a closed pipe (`| head`) is no panic.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::Machine(format!("cannot write: {error}")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: StatusCode, body: &str) -> Answer {
        Answer { code, body: Bytes::copy_from_slice(body.as_bytes()) }
    }

    #[test]
    fn a_problem_document_becomes_lines_and_the_right_exit_code() {
        let body = r#"{"type":"about:blank","title":"t","status":422,"detail":"not taken",
                       "errors":["a:1:1: x; y","a:2:1: z; w"]}"#;
        match answer(StatusCode::UNPROCESSABLE_ENTITY, body).refusal() {
            Failure::Request(text) => assert_eq!(text, "not taken\na:1:1: x; y\na:2:1: z; w"),
            Failure::Machine(text) => panic!("blames the machine: {text}"),
        }
        let machine = answer(StatusCode::INTERNAL_SERVER_ERROR, body).refusal();
        assert!(matches!(machine, Failure::Machine(_)));
    }

    #[test]
    fn no_agent_is_a_machine_failure_that_names_the_socket() {
        let error =
            ask(Path::new("/nonexistent/control.sock"), Method::GET, "/v1/status", Bytes::new());
        let Err(Failure::Machine(text)) = error else { panic!("answered") };
        assert!(text.contains("/nonexistent/control.sock"), "{text}");
        assert!(text.ends_with("or name its socket with --control-socket PATH"), "{text}");
    }

    #[test]
    fn a_socket_that_may_not_be_opened_is_not_taken_for_a_dead_agent() {
        let error = io::Error::from(ErrorKind::PermissionDenied);
        assert!(cure(&error.into()).starts_with("you may not open this socket"));
        assert!(cure(&io::Error::from(ErrorKind::ConnectionRefused).into()).contains("has ended"));
    }
}
