//! Serving HTTP/1.1 to clients that may be slow, dead or many.
//!
//! A head and a body must come in time, and what is answered must be taken. There is room for so many
//! connections; one more takes the place of the oldest that waits for its client, never of one that is being
//! answered.

use std::error::Error;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::ConnectInfo;
use axum::http::{Request, Response};
use axum::serve::Listener;
use http_body_util::BodyExt as _;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Sleep, sleep};
use tokio_io_timeout::TimeoutStream;

use super::Peer;

/// Connections of one socket.
pub const MOST_CONNECTIONS: usize = 256;

/// For a request's head, and between two requests.
const HEAD: Duration = Duration::from_secs(10);
/// For a request's body.
const BODY: Duration = Duration::from_secs(10);
/// For a client that takes nothing of its answer.
const ANSWER: Duration = Duration::from_secs(30);
/// The longest head, in bytes.
const LONGEST_HEAD: usize = 64 << 10;

/// Serves until the sender of `stopped` is gone, and until open requests are done.
pub async fn serve<L: Listener>(
    mut listener: L,
    router: Router,
    peer: fn(&L::Io) -> Peer,
    stopped: watch::Receiver<()>,
) {
    let mut connections = JoinSet::new();
    let mut seats: Vec<Seat> = Vec::new();
    let mut end = pin!(ended(stopped.clone()));
    loop {
        let (stream, _) = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut end => break,
        };
        while connections.try_join_next().is_some() {}
        seats.retain(|seat| !seat.connection.is_finished());
        if seats.len() >= MOST_CONNECTIONS {
            if let Some(oldest) = seats.iter().position(|seat| !seat.is_busy.load(Relaxed)) {
                seats.remove(oldest).connection.abort();
            } else {
                tokio::select! {
                    _ = connections.join_next() => {}
                    () = &mut end => break,
                }
            }
        }
        let peer = peer(&stream);
        let is_busy = Arc::new(AtomicBool::new(false));
        let work = connection(stream, router.clone(), peer, Arc::clone(&is_busy), stopped.clone());
        seats.push(Seat { is_busy, connection: connections.spawn(work) });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// One connection's place among the others.
struct Seat {
    /// Whether its client waits for us, and not we for it.
    is_busy: Arc<AtomicBool>,
    connection: AbortHandle,
}

/// Ends when the sender is dropped.
async fn ended(mut stopped: watch::Receiver<()>) {
    // An error says that the sender is gone, which is the signal.
    while stopped.changed().await.is_ok() {}
}

async fn connection<S>(
    stream: S,
    router: Router,
    peer: Peer,
    is_busy: Arc<AtomicBool>,
    stopped: watch::Receiver<()>,
) where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + 'static,
{
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(ANSWER));
    let router = TowerToHyperService::new(router);
    let service = service_fn(|request: Request<Incoming>| {
        let is_busy = Arc::clone(&is_busy);
        let body = |body| Body::new(Received::new(body, Arc::clone(&is_busy)));
        let mut request = request.map(body);
        request.extensions_mut().insert(ConnectInfo(peer));
        let answer = router.call(request);
        async move {
            let answer: Result<Response<Body>, _> = answer.await;
            let guard = Answered(is_busy);
            answer.map(|answer| {
                answer.map(|body| {
                    Body::new(body.map_frame(move |frame| {
                        let _until_all_is_sent = &guard;
                        frame
                    }))
                })
            })
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(LONGEST_HEAD)
        .serve_connection(TokioIo::new(Box::pin(stream)), service);
    let mut connection = pin!(connection);
    // What goes wrong with a connection is its client's affair.
    tokio::select! {
        _ = connection.as_mut() => return,
        () = ended(stopped) => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

/// The request was answered once this is dropped.
struct Answered(Arc<AtomicBool>);

impl Drop for Answered {
    fn drop(&mut self) {
        self.0.store(false, Relaxed);
    }
}

/// A body that must come in time.
struct Received {
    body: Incoming,
    deadline: Pin<Box<Sleep>>,
    /// Set once all of it is there.
    is_whole: Arc<AtomicBool>,
}

impl Received {
    fn new(body: Incoming, is_whole: Arc<AtomicBool>) -> Self {
        is_whole.store(body.is_end_stream(), Relaxed);
        Self { body, deadline: Box::pin(sleep(BODY)), is_whole }
    }
}

impl HttpBody for Received {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Ready(frame) => {
                if frame.is_none() || self.body.is_end_stream() {
                    self.is_whole.store(true, Relaxed);
                }
                Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
            }
            Poll::Pending => {
                ready!(self.deadline.as_mut().poll(context));
                let seconds = BODY.as_secs();
                Poll::Ready(Some(Err(format!("it did not come within {seconds} seconds").into())))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
