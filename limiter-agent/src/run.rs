//! `limiter-agent run`: start-up in an order that leaves nothing behind when it fails, then
//! signals until the end.

use std::future::IntoFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use log::{error, info, warn};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use crate::agent::{Agent, load_config};
use crate::api::{self, ControlSocket};
use crate::cli::{Failure, RunArgs};
use crate::{host, service};

/// How long open requests may take to finish at the end.
const GRACE: Duration = Duration::from_secs(2);

/// How often the host's addresses are looked up.
const ADDRESSES: Duration = Duration::from_secs(10);

/// How often the peers of lasting connections are proven anew: twice in the time that a proof lasts
/// at least ([`Filter::lasts`](limiter_common::known::Filter::lasts)).
const PROOFS: Duration = Duration::from_mins(4);

/// Runs the agent until SIGTERM or SIGINT.
///
/// # Errors
/// [`Failure::Request`] for a wrong configuration, [`Failure::Machine`] for all else.
pub fn run(args: RunArgs) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| Failure::Machine(format!("cannot start the runtime: {error}")))?;
    runtime.block_on(serve(args))
}

async fn serve(args: RunArgs) -> Result<(), Failure> {
    let config = load_config(&args).map_err(|errors| Failure::Request(errors.join("\n")))?;
    host::preflight().map_err(|unfit| Failure::Machine(unfit.to_string()))?;
    // From here on signals wait their turn, so that a start is never torn in the middle.
    let mut signals = Signals::new()?;
    // Before anything is attached: an address in use must not cost traffic.
    let metrics = listen(config.metrics).await?;
    let address = metrics.local_addr().unwrap_or(config.metrics);
    let control = config.control.clone();
    let (socket, commands) =
        ControlSocket::bind(&control).map_err(|error| Failure::Machine(error.to_string()))?;

    let agent = Agent::start(args, config).await?;
    let agent = Arc::new(Mutex::new(agent));
    let upkeep = tokio::spawn(upkeep(Arc::clone(&agent)));
    let watchdog = service::watchdog().map(|period| tokio::spawn(watchdog(agent.clone(), period)));
    let (stop, stopped) = watch::channel(());
    let servers = [
        spawn(metrics, api::readable(Arc::clone(&agent)), stopped.clone()),
        spawn(commands, api::writable(Arc::clone(&agent)), stopped),
    ];
    info!("ready: metrics on http://{address}/metrics, commands on {}", control.display());

    service::ready();

    while signals.next().await == Event::Reload {
        service::reloading();
        agent.lock().await.reload().await;
        service::ready();
    }

    info!("stopping");
    service::stopping();
    upkeep.abort();
    if let Some(watchdog) = watchdog {
        watchdog.abort();
    }
    agent.lock().await.stop();
    drop(stop);
    let end = Instant::now() + GRACE;
    for server in servers {
        let abort = server.abort_handle();
        if tokio::time::timeout_at(end, server).await.is_err() {
            abort.abort();
        }
    }
    drop(socket);
    Ok(())
}

/// Keeps what the program knows of the host true, until it is aborted.
async fn upkeep(agent: api::Shared) {
    let now = Instant::now();
    let mut addresses = interval_at(now + ADDRESSES, ADDRESSES);
    let mut proofs = interval_at(now + PROOFS, PROOFS);
    for timer in [&mut addresses, &mut proofs] {
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    }
    loop {
        tokio::select! {
            _ = addresses.tick() => agent.lock().await.renew_addresses(),
            _ = proofs.tick() => {
                // Listed without the lock: it may take a while.
                let connections = host::connections().await;
                agent.lock().await.renew_proofs(connections);
            }
        }
    }
}

/// Tells the service manager that the agent can still be asked, until it is aborted.
async fn watchdog(agent: api::Shared, period: Duration) {
    let mut timer = interval_at(Instant::now(), period);
    timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        timer.tick().await;
        // Whoever holds the lock for ever keeps everything else from working.
        drop(agent.lock().await);
        service::alive();
    }
}

async fn listen(address: SocketAddr) -> Result<TcpListener, Failure> {
    let listener = TcpListener::bind(address).await.map_err(|error| {
        Failure::Machine(format!(
            "cannot serve metrics on {address}: {error}; give another [metrics] listen or \
             --metrics-listen"
        ))
    })?;
    if !address.ip().is_loopback() {
        warn!("metrics on {address} can be read by everybody who reaches that address");
    }
    Ok(listener)
}

/// Serves until the sender of `stopped` is dropped and open requests are done.
fn spawn<L>(listener: L, router: Router, mut stopped: watch::Receiver<()>) -> JoinHandle<()>
where
    L: Listener,
    L::Addr: std::fmt::Debug,
{
    let stop = async move {
        // An error says that the sender is gone, which is the signal.
        while stopped.changed().await.is_ok() {}
    };
    let server = axum::serve(listener, router).with_graceful_shutdown(stop);
    tokio::spawn(async move {
        if let Err(error) = server.into_future().await {
            error!("HTTP server: {error}");
        }
    })
}

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Reload,
    Stop,
}

struct Signals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self, Failure> {
        let listen = |kind| {
            signal(kind).map_err(|error| Failure::Machine(format!("cannot take signals: {error}")))
        };
        Ok(Self {
            hangup: listen(SignalKind::hangup())?,
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> Event {
        tokio::select! {
            _ = self.terminate.recv() => Event::Stop,
            _ = self.interrupt.recv() => Event::Stop,
            _ = self.hangup.recv() => Event::Reload,
        }
    }
}
