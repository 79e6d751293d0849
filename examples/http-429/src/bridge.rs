//! What the application tells limiter's agent, and asks it: HTTP on the agent's socket for applications,
//! by one task, so that no request waits for it. The agent may be away; then the application's own limits
//! are all there is.

use std::{
    collections::HashMap,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use axum::{
    body::Bytes,
    http::{Method, Request, StatusCode, header::CONTENT_TYPE},
};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    net::UnixStream,
    sync::mpsc::{self, Receiver, Sender},
    time::{MissedTickBehavior, interval, timeout},
};

/// Things to tell that wait at most; more are not told. Who is not reported now, goes on and is later.
const MOST_WAITING: usize = 256;
/// How long the agent may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// The longest answer that is read, in bytes.
const LONGEST: usize = 64 * 1024;
/// A proof holds for many minutes; it is renewed at most this often.
const VOUCH_AGAIN: Duration = Duration::from_mins(5);
/// From here on a budget counts as used up: sources that are not proven are refused.
const OVERLOADED: f64 = 0.95;

enum Word {
    Report(IpAddr),
    Vouch(IpAddr),
}

/// The way to the agent.
pub(crate) struct Bridge {
    words: Sender<Word>,
    overloaded: Arc<AtomicBool>,
}

impl Bridge {
    /// Talks to the agent at `socket` from now on.
    pub(crate) fn start(socket: PathBuf) -> Self {
        let (words, waiting) = mpsc::channel(MOST_WAITING);
        let overloaded = Arc::new(AtomicBool::new(false));
        tokio::spawn(talk(socket, waiting, Arc::clone(&overloaded)));
        Self { words, overloaded }
    }

    /// The address collects one 429 after another.
    pub(crate) fn report(&self, address: IpAddr) {
        // Full: it will be reported next time.
        let _ = self.words.try_send(Word::Report(address));
    }

    /// The address has shown who it is.
    pub(crate) fn vouch(&self, address: IpAddr) {
        let _ = self.words.try_send(Word::Vouch(address));
    }

    /// After how many seconds clients should come back, if the host is busy with an attack.
    pub(crate) fn overload(&self) -> Option<u64> {
        self.overloaded.load(Ordering::Relaxed).then_some(2)
    }
}

async fn talk(socket: PathBuf, mut words: Receiver<Word>, overloaded: Arc<AtomicBool>) {
    let mut vouched: HashMap<IpAddr, Instant> = HashMap::new();
    let mut often = interval(Duration::from_secs(1));
    often.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = often.tick() => {
                vouched.retain(|_, at| at.elapsed() < VOUCH_AGAIN);
                // An agent that does not answer is no reason to turn clients away.
                let pressure = pressure(&socket).await.unwrap_or(0.0);
                overloaded.store(pressure >= OVERLOADED, Ordering::Relaxed);
            }
            word = words.recv() => match word {
                None => return,
                Some(Word::Report(address)) => report(&socket, address).await,
                Some(Word::Vouch(address)) if vouched.contains_key(&address) => {}
                Some(Word::Vouch(address)) => {
                    if vouch(&socket, address).await {
                        vouched.insert(address, Instant::now());
                    }
                }
            }
        }
    }
}

/// Whether the agent believes it.
async fn vouch(socket: &Path, address: IpAddr) -> bool {
    let told = post(socket, "/v1/proven", &json!({"addresses": [address]})).await;
    if let Err(error) = &told {
        eprintln!("{address} is not vouched for: {error:#}");
    }
    told.is_ok_and(|(code, _)| code.is_success())
}

async fn report(socket: &Path, address: IpAddr) {
    let body = json!({"address": address, "reason": "goes on after many 429s"});
    match post(socket, "/v1/penalties", &body).await {
        Ok((code, answer)) if code.is_success() => {
            eprintln!("{address} is blocked until {}", answer["until"].as_str().unwrap_or("?"));
        }
        Ok((code, problem)) => {
            let errors = problem["errors"].as_array().into_iter().flatten();
            let why =
                problem["detail"].as_str().into_iter().chain(errors.filter_map(Value::as_str));
            let why: Vec<_> = why.collect();
            eprintln!("{address} is not blocked: {code}: {}", why.join(": "));
        }
        Err(error) => eprintln!("{address} is not blocked: {error:#}"),
    }
}

#[derive(Deserialize)]
struct Source {
    pressure: HashMap<String, f64>,
}

/// How much of the most used sum of the host's classes is used.
async fn pressure(socket: &Path) -> Result<f64> {
    // Pressure is the host's, so any address will do.
    let (_, answer) = ask(socket, Method::GET, "/v1/sources/192.0.2.1", Bytes::new()).await?;
    let source: Source = serde_json::from_value(answer)?;
    Ok(source.pressure.into_values().fold(0.0, f64::max))
}

async fn post(socket: &Path, path: &str, body: &Value) -> Result<(StatusCode, Value)> {
    ask(socket, Method::POST, path, body.to_string().into()).await
}

async fn ask(
    socket: &Path,
    method: Method,
    path: &str,
    body: Bytes,
) -> Result<(StatusCode, Value)> {
    timeout(PATIENCE, async {
        let stream = UnixStream::connect(socket)
            .await
            .with_context(|| format!("cannot connect to {}", socket.display()))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let connection = tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "limiter")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))?;
        let response = sender.send_request(request).await?;
        let code = response.status();
        let body = Limited::new(response.into_body(), LONGEST).collect().await;
        let body = body.map_err(|error| anyhow::anyhow!("{error}"))?.to_bytes();
        connection.abort();
        let answer = serde_json::from_slice(&body).with_context(|| format!("{path}: {code}"))?;
        Ok((code, answer))
    })
    .await
    .context("the agent does not answer")?
}
