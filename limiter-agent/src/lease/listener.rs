//! The listener for services: TLS, and bounds on what anybody who connects can cost.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use ipnet::IpNet;
use log::{info, warn};
use rustls::CertificateError as Cause;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::Leases;
use super::credentials::{Credentials, Identity};
use super::outcome::{Outcome, Refusal};
use super::protocol::{Session, answer};
use crate::agent::source_network;
use crate::cli::Failure;
use crate::config::Leasing;

/// Connections at once: each costs some ten kilobytes.
const MOST: usize = 256;
/// From one address.
const MOST_OF_ONE: usize = 8;
/// How long the handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long a connection may be open before somebody was known on it.
const UNKNOWN: Duration = Duration::from_secs(10);
/// How long it may be open after that: then the credential is looked at again.
const KNOWN: Duration = Duration::from_hours(1);
/// The longest head of a request, in bytes: a token must fit.
const HEAD: usize = 16 << 10;

/// Binds the address, if there is one.
pub(crate) async fn bind(config: Option<&Leasing>) -> Result<Option<TcpListener>, Failure> {
    let Some(Leasing { listen, .. }) = config else { return Ok(None) };
    let listener = TcpListener::bind(listen).await.map_err(|error| {
        let cure = "give another [lease] listen";
        Failure::Machine(format!("cannot take requests for leases on {listen}: {error}; {cure}"))
    })?;
    info!("leases on {listen}");
    Ok(Some(listener))
}

/// Serves until `stopped` ends.
pub(crate) async fn serve(listener: TcpListener, leases: Leases, mut stopped: watch::Receiver<()>) {
    let places = Arc::new(Semaphore::new(MOST));
    let peers = Arc::new(Peers::default());
    let mut number = 0;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            // An error says that the sender is gone, which is the signal.
            _ = stopped.changed() => return,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, most likely.
                warn!("lease: {error}");
                sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        number += 1;
        let address = peer.ip().to_canonical();
        let place = Arc::clone(&places).try_acquire_owned();
        let (Ok(place), Some(one)) = (place, Peers::enter(&peers, source_network(address))) else {
            leases.refuse(&Refusal::new(Outcome::Busy, "too many connections"), &[], address);
            continue;
        };
        let (leases, stopped) = (leases.clone(), stopped.clone());
        tokio::spawn(async move {
            connection(stream, SocketAddr::new(address, peer.port()), number, leases, stopped)
                .await;
            drop((place, one));
        });
    }
}

/// How many connections each address has, or each IPv6 /64.
#[derive(Default)]
struct Peers(Mutex<HashMap<IpNet, usize>>);

/// One of them.
struct One {
    peers: Arc<Peers>,
    network: IpNet,
}

impl Peers {
    fn enter(this: &Arc<Self>, network: IpNet) -> Option<One> {
        let mut counts = this.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(network).or_default();
        if *count >= MOST_OF_ONE {
            return None;
        }
        *count += 1;
        Some(One { peers: Arc::clone(this), network })
    }
}

impl Drop for One {
    fn drop(&mut self) {
        let mut counts = self.peers.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.network) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.network);
            }
        }
    }
}

async fn connection(
    stream: TcpStream,
    peer: SocketAddr,
    number: u64,
    leases: Leases,
    mut stopped: watch::Receiver<()>,
) {
    let address = peer.ip();
    let mut changes = leases.credentials();
    let Some(credentials) = changes.borrow_and_update().clone() else { return };
    let handshake = TlsAcceptor::from(Arc::clone(&credentials.tls)).accept(stream);
    let tls = match timeout(HANDSHAKE, handshake).await {
        Ok(Ok(tls)) => tls,
        Ok(Err(error)) => return leases.refuse(&refusal(&error), &[], address),
        Err(_) => {
            let late = Refusal::new(Outcome::Timeout, "no TLS handshake in time");
            return leases.refuse(&late, &[], address);
        }
    };
    let session = session(&tls, address, number, credentials, leases.clone());
    let session = Arc::new(session);
    let serving = Arc::clone(&session);
    let service = service_fn(move |request| {
        let session = Arc::clone(&serving);
        async move { Ok::<_, Infallible>(answer(&session, request).await) }
    });
    let serving = hyper::server::conn::http1::Builder::new()
        .header_read_timeout(None)
        .max_buf_size(HEAD)
        .serve_connection(TokioIo::new(tls), service);
    let patience = async {
        sleep(UNKNOWN).await;
        if session.is_known() {
            sleep(KNOWN.saturating_sub(UNKNOWN)).await;
        }
    };
    tokio::select! {
        // Whoever hung up in the middle of something has no answer to get.
        _ = serving => {}
        () = patience => {
            if !session.was_asked() {
                let late = Refusal::new(Outcome::Timeout, "no request in time");
                leases.refuse(&late, session.names(), address);
            }
        }
        _ = changes.changed() => {}
        _ = stopped.changed() => {}
    }
}

fn session(
    tls: &TlsStream<TcpStream>,
    address: IpAddr,
    number: u64,
    credentials: Arc<Credentials>,
    leases: Leases,
) -> Session {
    let (_, connection) = tls.get_ref();
    let certificate = connection.peer_certificates().and_then(|chain| chain.first());
    Session::new(certificate.and_then(Identity::of), address, number, credentials, leases)
}

/// What a handshake that failed is counted as.
fn refusal(error: &io::Error) -> Refusal {
    let cause = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    let outcome = match cause {
        Some(rustls::Error::InvalidCertificate(Cause::Revoked)) => Outcome::Revoked,
        Some(rustls::Error::InvalidCertificate(
            Cause::Expired
            | Cause::ExpiredContext { .. }
            | Cause::NotValidYet
            | Cause::NotValidYetContext { .. },
        )) => Outcome::Expired,
        Some(rustls::Error::InvalidCertificate(_)) => Outcome::WrongCertificate,
        Some(rustls::Error::NoCertificatesPresented) => Outcome::NoCredential,
        _ => Outcome::Handshake,
    };
    Refusal::new(outcome, error.to_string())
}
