//! An honest client: UDP datagrams at an even pace to an echo server, and how many came back; and one
//! that connects.

use std::{
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    os::fd::AsRawFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow};
use nix::sys::{
    socket::{
        self, AddressFamily, SockFlag, SockType, SockaddrStorage, setsockopt, socket,
        sockopt::SendTimeout,
    },
    time::{TimeVal, TimeValLike as _},
};

use crate::netns::Netns;

/// Answers may come this long after the last question.
const PATIENCE: Duration = Duration::from_millis(500);

/// How often an echo server looks whether it should end.
const TICK: Duration = Duration::from_millis(50);

/// Sends every datagram back to where it came from, as long as it lives.
pub struct EchoServer {
    stop: Arc<AtomicBool>,
    received: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl EchoServer {
    /// Starts on `address` inside `netns`.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub fn start(netns: &Netns, address: SocketAddr) -> Result<Self> {
        let socket = bind(netns, address)?;
        socket.set_read_timeout(Some(TICK))?;
        let stop = Arc::new(AtomicBool::new(false));
        let received = Arc::new(AtomicU64::new(0));
        let (stopped, counter) = (Arc::clone(&stop), Arc::clone(&received));
        let thread = netns.spawn(move || {
            let mut datagram = [0; 2048];
            while !stopped.load(Ordering::Relaxed) {
                if let Ok((length, from)) = socket.recv_from(&mut datagram) {
                    counter.fetch_add(1, Ordering::Relaxed);
                    // An answer that cannot be sent shows as one that did not come.
                    let _ = socket.send_to(&datagram[..length], from);
                }
            }
        });
        Ok(Self { stop, received, thread: Some(thread) })
    }

    /// Datagrams received since the start.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }
}

impl Drop for EchoServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its panic, if any, has been printed.
            let _ = thread.join();
        }
    }
}

/// A TCP connection from an address, which the standard library does not let one choose. To be called
/// inside the client's namespace.
///
/// # Errors
/// If nobody answers within ten seconds.
pub fn connect(from: IpAddr, to: SocketAddr) -> Result<TcpStream> {
    connect_within(from, to, Duration::from_secs(10))
}

/// The same with another patience, in whole seconds.
///
/// # Errors
/// If nobody answers in that time.
pub fn connect_within(from: IpAddr, to: SocketAddr, patience: Duration) -> Result<TcpStream> {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // Bounds the handshake as well.
    setsockopt(&socket, SendTimeout, &TimeVal::seconds(patience.as_secs().try_into()?))?;
    socket::bind(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(from, 0)))?;
    socket::connect(socket.as_raw_fd(), &SockaddrStorage::from(to))
        .with_context(|| format!("{from} to {to}"))?;
    Ok(socket.into())
}

/// How fast and how long a client asks.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Datagrams per second.
    pub rate: u32,
    /// From the first to the end of the last interval.
    pub duration: Duration,
}

/// What a client got.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Goodput {
    /// Datagrams sent.
    pub sent: u32,
    /// Datagrams that came back, each counted once.
    pub answered: u32,
}

impl Goodput {
    /// Answers per question, 0 to 1; 1 if nothing was asked.
    #[must_use]
    pub fn share(self) -> f64 {
        if self.sent == 0 { 1.0 } else { f64::from(self.answered) / f64::from(self.sent) }
    }
}

/// A client at work.
#[must_use = "the result comes from join"]
pub struct Client {
    thread: JoinHandle<io::Result<Goodput>>,
}

impl Client {
    /// Waits for the end: its duration and half a second for the last answers.
    ///
    /// # Errors
    /// If its socket failed.
    pub fn join(self) -> Result<Goodput> {
        let result = self.thread.join().map_err(|_| anyhow!("the honest client panicked"))?;
        result.context("the honest client's socket")
    }
}

/// Starts a client with the address `from` inside `netns`, which asks `to`.
///
/// # Errors
/// If the address cannot be bound.
pub fn start(netns: &Netns, from: IpAddr, to: SocketAddr, pace: Pace) -> Result<Client> {
    start_after(Duration::ZERO, netns, from, to, pace)
}

/// The same, so much later.
///
/// # Errors
/// As [`start`].
pub fn start_after(
    delay: Duration,
    netns: &Netns,
    from: IpAddr,
    to: SocketAddr,
    pace: Pace,
) -> Result<Client> {
    let socket = bind(netns, SocketAddr::new(from, 0))?;
    let thread = netns.spawn(move || {
        thread::sleep(delay);
        ask(&socket, to, pace)
    });
    Ok(Client { thread })
}

fn bind(netns: &Netns, address: SocketAddr) -> Result<UdpSocket> {
    netns.run(|| UdpSocket::bind(address)).with_context(|| format!("{address} in {}", netns.name()))
}

fn ask(socket: &UdpSocket, to: SocketAddr, pace: Pace) -> io::Result<Goodput> {
    let start = Instant::now();
    let interval = Duration::from_secs(1) / pace.rate;
    let mut goodput = Goodput::default();
    let mut answered = Vec::new();
    loop {
        let due = start + interval * goodput.sent;
        if due >= start + pace.duration {
            break;
        }
        if Instant::now() >= due {
            socket.send_to(&goodput.sent.to_be_bytes(), to)?;
            goodput.sent += 1;
            answered.push(false);
        } else {
            goodput.answered += u32::from(listen(socket, due, &mut answered)?);
        }
    }
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end && goodput.answered < goodput.sent {
        goodput.answered += u32::from(listen(socket, end, &mut answered)?);
    }
    Ok(goodput)
}

/// Waits until `until` at most for one answer, ticks it off, and says whether it is a new one.
fn listen(socket: &UdpSocket, until: Instant, answered: &mut [bool]) -> io::Result<bool> {
    let wait = until.saturating_duration_since(Instant::now());
    // A timeout of zero would mean none at all.
    socket.set_read_timeout(Some(wait.max(Duration::from_micros(1))))?;
    let mut number = [0; 4];
    match socket.recv_from(&mut number) {
        Ok((4, _)) => {
            let question = usize::try_from(u32::from_be_bytes(number)).ok();
            let place = question.and_then(|question| answered.get_mut(question));
            Ok(place.is_some_and(|answered| !std::mem::replace(answered, true)))
        }
        Ok(_) => Ok(false),
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
            ) =>
        {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}
