//! `limiter-agent run`: start-up in an order that leaves nothing behind when it fails, then
//! signals until the end.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use std::{io, thread};

use log::{info, warn};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use crate::agent::{self, Agent, Complaint};
use crate::api::{self, Api, ControlSocket, Peer};
use crate::cli::{Failure, RunArgs};
use crate::datapath::Head;
use crate::measure::WINDOW;
use crate::{host, lease, service};

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
        .on_thread_start(drop_privileges)
        .enable_all()
        .build()
        .map_err(|error| Failure::Machine(format!("cannot start the runtime: {error}")))?;
    runtime.block_on(serve(args))
}

/// Whoever takes the agent over has the datapath, and nothing else. A thread that keeps more than it
/// needs is no reason not to limit.
fn drop_privileges() {
    if let Err(error) = host::drop_privileges() {
        warn!("privileges that are not needed could not be dropped: {error}");
    }
}

async fn serve(args: RunArgs) -> Result<(), Failure> {
    let beginning = agent::begin(&args).map_err(|errors| Failure::Request(errors.join("\n")))?;
    let config = beginning.config.clone();
    host::preflight().map_err(|unfit| Failure::Machine(unfit.to_string()))?;
    // From here on signals wait their turn, so that a start is never torn in the middle.
    let mut signals = Signals::new()?;
    // Before anything is attached: an address in use must not cost traffic.
    let metrics = listen(config.metrics).await?;
    let address = metrics.local_addr().unwrap_or(config.metrics);
    let lease = lease::bind(config.lease.as_ref()).await?;
    let control = config.control.clone();
    let bind = |path: &Path, group: &Option<String>| {
        let bound = ControlSocket::bind_for(path, group.as_deref());
        bound.map_err(|error| Failure::Machine(error.to_string()))
    };
    let (socket, commands) = bind(&control, &config.control_group)?;
    let bridge = &config.application;
    let application = bridge.socket.as_ref().map(|path| bind(path, &bridge.group)).transpose()?;

    let agent = Agent::start(args, beginning).await?;
    // This thread has loaded and attached; the others were made without.
    drop_privileges();
    let heart = Heart::start(agent.head()).map_err(|error| Failure::Machine(error.to_string()))?;
    let leases = agent.leases();
    let agent = Arc::new(Mutex::new(agent));
    let upkeep = tokio::spawn(upkeep(Arc::clone(&agent)));
    let measuring = tokio::spawn(measure(Arc::clone(&agent)));
    let watchdog = service::watchdog().map(|period| tokio::spawn(watchdog(agent.clone(), period)));
    let (stop, stopped) = watch::channel(());
    if let Some(listener) = lease {
        tokio::spawn(lease::serve(listener, leases, stopped.clone()));
    }
    let api = Api::new(Arc::clone(&agent)).await;
    let nobody = |_: &TcpStream| Peer::default();
    let mut servers = vec![
        tokio::spawn(api::serve(metrics, api::readable(&api), nobody, stopped.clone())),
        tokio::spawn(api::serve(commands, api::writable(&api), Peer::on_control, stopped.clone())),
    ];
    let mut places =
        format!("metrics on http://{address}/metrics, commands on {}", control.display());
    let application = application.map(|(socket, listener)| {
        let router = api::application(&api);
        servers.push(tokio::spawn(api::serve(listener, router, Peer::on_application, stopped)));
        places.push_str(", applications on the socket of [application]");
        socket
    });
    info!("ready: {places}");

    service::ready();

    while signals.next().await == Event::Reload {
        service::reloading();
        agent.lock().await.reload().await;
        service::ready();
    }

    info!("stopping");
    service::stopping();
    upkeep.abort();
    measuring.abort();
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
    drop(heart);
    drop((socket, application));
    Ok(())
}

/// Says that the agent lives, until it is dropped. On a thread of its own: nothing that keeps the agent
/// busy must look like its end.
struct Heart {
    _stop: mpsc::Sender<()>,
}

impl Heart {
    /// A sixth of the shortest lease.
    const PERIOD: Duration = Duration::from_secs(5);

    fn start(head: Head) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let beat = move || {
            let mut complaint = Complaint::default();
            while stopped.recv_timeout(Self::PERIOD) == Err(mpsc::RecvTimeoutError::Timeout) {
                complaint.hear(head.beat());
            }
        };
        thread::Builder::new().name("heart".to_owned()).spawn(beat)?;
        Ok(Self { _stop: stop })
    }
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

/// Reads what watched sources send, until it is aborted. A second lies between two readings, not between
/// their beginnings: no count may be of less.
async fn measure(agent: api::Shared) {
    let mut complaint = Complaint::default();
    loop {
        tokio::time::sleep(WINDOW).await;
        complaint.hear(agent.lock().await.measure());
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
