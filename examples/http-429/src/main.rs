//! An HTTP application that limits its clients per account and per address, answers 429 so that they
//! know when to come back, and tells limiter's agent about those who go on regardless.
//!
//! What it shows, in the order in which a request meets it:
//!
//! 1. [`hops`]: whose request it is. The connection's peer is what the kernel sees and can drop; behind
//!    a trusted proxy the client is somebody else.
//! 2. [`limits`]: one limit for each address and one for each account, both token buckets.
//! 3. Early 503: while the host is under pressure, whom nobody knows is asked to come back later.
//! 4. [`bridge`]: a client that collects one 429 after another is reported, and the kernel drops it for
//!    a while; one that has shown a valid key is vouched for. Both off the path of the request.

mod bridge;
mod hops;
mod limits;

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result};
use axum::{
    Json, Router,
    extract::{ConnectInfo, State},
    http::{HeaderMap, HeaderValue, StatusCode, header::RETRY_AFTER},
    response::{IntoResponse as _, Response},
    routing::get,
};
use clap::Parser;
use ipnet::IpNet;
use serde_json::json;
use tokio::net::TcpListener;

use bridge::Bridge;
use limits::{Limits, Refusal};

/// An application that answers 429 and tells limiter who does not listen.
#[derive(Parser)]
struct Args {
    /// Where to listen
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// The agent's socket for applications, `[application] socket` in its configuration
    #[arg(long, default_value = "/run/limiter/app.sock")]
    agent: PathBuf,
    /// A network whose X-Forwarded-For is believed; may be given several times. Give the agent the same ones
    /// (`[application] trusted_proxies`): it would block a proxy for what comes through it
    #[arg(long = "trusted-proxy", value_name = "CIDR")]
    trusted_proxies: Vec<IpNet>,
    /// An account: the key that its requests carry in X-Api-Key
    #[arg(long = "key", value_name = "KEY", default_value = "example")]
    keys: Vec<String>,
    /// Requests per second of one address
    #[arg(long, default_value = "10")]
    per_address: std::num::NonZeroU32,
    /// Requests per second of one account, from wherever they come
    #[arg(long, default_value = "20")]
    per_account: std::num::NonZeroU32,
    /// An address that was refused so often within ten seconds is reported to the agent
    #[arg(long, default_value = "30")]
    report_after: u32,
}

struct App {
    trusted_proxies: Vec<IpNet>,
    keys: Vec<String>,
    limits: Limits,
    bridge: Bridge,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let listener = TcpListener::bind(args.listen)
        .await
        .with_context(|| format!("listening on {}", args.listen))?;
    let app = Arc::new(App {
        trusted_proxies: args.trusted_proxies,
        keys: args.keys,
        limits: Limits::new(args.per_address, args.per_account, args.report_after),
        bridge: Bridge::start(args.agent),
    });
    tokio::spawn(forget(Arc::clone(&app)));
    let router = Router::new().route("/", get(hello)).with_state(app);
    axum::serve(listener, router.into_make_service_with_connect_info::<SocketAddr>())
        .await
        .context("serving")
}

/// Forgets, again and again, those whose buckets are full.
async fn forget(app: Arc<App>) {
    let mut often = tokio::time::interval(Duration::from_secs(10));
    loop {
        often.tick().await;
        app.limits.forget();
    }
}

async fn hello(
    State(app): State<Arc<App>>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
) -> Response {
    let peer = peer.ip().to_canonical();
    let client = hops::client(peer, &headers, &app.trusted_proxies);
    // The address before the account: a key is guessed from somewhere.
    if let Err(refusal) = app.limits.address(client) {
        return refuse(&app, peer, client, &refusal);
    }
    let key = headers.get("x-api-key").and_then(|key| key.to_str().ok());
    let Some(key) = key.filter(|key| app.keys.iter().any(|known| known == key)) else {
        return unknown(&app);
    };
    if let Err(refusal) = app.limits.account(key) {
        // No report: others may use the account, and the address has kept to its own limit.
        return too_many(&refusal);
    }
    // Only a client that talks to this host itself: for others the kernel sees the proxy.
    if client == peer {
        app.bridge.vouch(peer);
    }
    (StatusCode::OK, format!("hello, {client}\n")).into_response()
}

/// Nobody knows the client. While the host is busy with an attack, it is asked to come back later; customers
/// are served.
fn unknown(app: &App) -> Response {
    if let Some(seconds) = app.bridge.overload() {
        let problem = json!({"title": "Service Unavailable", "detail": "the host is under attack"});
        return answer(StatusCode::SERVICE_UNAVAILABLE, seconds, problem);
    }
    (StatusCode::UNAUTHORIZED, "X-Api-Key is missing, or no account has it\n").into_response()
}

/// The address has had its share. If it goes on for too long, the agent hears of it.
fn refuse(app: &App, peer: IpAddr, client: IpAddr, refusal: &Refusal) -> Response {
    if app.limits.goes_on(client) {
        // What the kernel can drop is the peer. If that is a proxy whom others need, the agent refuses,
        // and this limit is all there is.
        app.bridge.report(peer);
    }
    too_many(refusal)
}

fn too_many(refusal: &Refusal) -> Response {
    let problem = json!({"title": "Too Many Requests", "detail": refusal.detail});
    let mut response = answer(StatusCode::TOO_MANY_REQUESTS, refusal.retry_after, problem);
    for (name, value) in refusal.headers() {
        if let Ok(value) = HeaderValue::from_str(&value) {
            response.headers_mut().insert(name, value);
        }
    }
    response
}

fn answer(code: StatusCode, retry_after: u64, problem: serde_json::Value) -> Response {
    (code, [(RETRY_AFTER, retry_after.to_string())], Json(problem)).into_response()
}
