//! Two hosts on a cable for floods: one core sends, another receives.

use std::{
    collections::HashMap,
    fs,
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use limiter_common::Family;
use limiter_tests::{
    frames,
    generator::{Flood, Generator, Honest, Order, Sources},
    netns::{Interface, Netns, VethOptions, veth},
};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    sys::socket::{setsockopt, sockopt::RcvBufForce},
    unistd::Pid,
};

use crate::{
    MEASURING_NICE,
    runner::{FORGED, FORGED_IPV4, FORGED_IPV6, PAYLOAD, set_nice},
};

/// Where the generator runs, and where the guarded host receives.
pub(crate) const SENDING_CPU: usize = 0;
const RECEIVING_CPU: usize = 1;

/// Where honest packets go.
const HONEST_PORT: u16 = 7;
/// Where the flood goes, and nobody listens (RFC 863).
const FLOOD_PORT: u16 = 9;

/// Honest sources of each standing.
pub(crate) const CLIENTS: u32 = 4;

/// One honest frame among so many: each source stays far below its limit, and a goodput is known to
/// half a per cent after two seconds.
const HONEST_EVERY: u32 = 1024;

/// What honest sources send before the flood, so that they are known: packets per second of each, and
/// how long.
const BEFORE: (f64, Duration) = (100.0, Duration::from_millis(400));

/// Room for all that waits for the reader, which gets little of the receiving core.
const SOCKET_BUFFER: usize = 256 << 20;

/// From whom a flood comes (PERFORMANCE.md, "Peers").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    One,
    Thousand,
    Forged,
    /// Those that [`Stage::warm_up`] had send before, slowly (attack b).
    Warmed,
}

impl From {
    pub(crate) const ALL: [Self; 4] = [Self::One, Self::Thousand, Self::Forged, Self::Warmed];

    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::One => "one",
            Self::Thousand => "1 k",
            Self::Forged => "16 M forged",
            Self::Warmed => "1 M warmed up",
        }
    }

    fn count(self) -> u32 {
        match self {
            Self::One => 1,
            Self::Thousand => 1_000,
            Self::Forged => u32::try_from(FORGED).unwrap_or(u32::MAX),
            Self::Warmed => 1_000_000,
        }
    }
}

/// What a host knows of an honest source when the flood begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Proven,
    Seen,
    New,
}

impl Standing {
    pub(crate) const ALL: [Self; 3] = [Self::Proven, Self::Seen, Self::New];
}

/// Two hosts and a cable.
pub(crate) struct Stage {
    pub(crate) outside: Interface,
    pub(crate) inside: Interface,
    pub(crate) family: Family,
}

impl Stage {
    /// A cable with so many queues.
    pub(crate) fn new(family: Family, queues: u32) -> Result<Self> {
        // The name shows in that of a kernel thread, among those of other namespaces.
        let name = format!("bench{}", std::process::id());
        let (outside, inside) = veth(
            (&Netns::new("bench-outside")?, "outside0"),
            (&Netns::new("bench-inside")?, &name),
            VethOptions { queues, ..VethOptions::default() },
        )?;
        let stage = Self { outside, inside, family };
        let Ends { outside: near, inside: far, length } = stage.ends();
        stage.outside.add_address(&format!("{near}/{length}"))?;
        stage.inside.add_address(&format!("{far}/{length}"))?;
        stage.inside.add_neighbour(near, stage.outside.mac)?;
        // Where forged packets are not dropped, they get as far as they would on a real host.
        let device = &stage.inside.name;
        let near = near.to_string();
        stage.inside.netns.ip(&["route", "add", "default", "via", &near, "dev", device])?;
        Ok(stage)
    }

    /// The address of an honest source. Each is a source of its own.
    pub(crate) fn client(&self, standing: Standing, number: u32) -> IpAddr {
        let number = standing as u32 * CLIENTS + number;
        match self.family {
            // 198.18.0.0/15 is for benchmarks (RFC 2544), as is 2001:2::/48 (RFC 5180).
            Family::Ipv4 => Ipv4Addr::from(0xc612_0001 + number).into(),
            Family::Ipv6 | Family::Other => {
                let (high, low) = (0x2001_0002_0000_0000_u128, 0x8000_0000_0000_0001_u128);
                let number = u128::from(number);
                // As the generator makes them, with one checksum for all.
                Ipv6Addr::from((high + number) << 64 | (low - (number << 48))).into()
            }
        }
    }

    /// Has those send that are to be known when the flood comes.
    pub(crate) fn introduce(&self, generator: &mut Generator) -> Result<()> {
        let count = 2 * CLIENTS;
        let sources = match self.client(Standing::Proven, 0) {
            IpAddr::V4(first) => Sources::Ipv4 { first, count, order: Order::InTurn },
            IpAddr::V6(first) => {
                Sources::Ipv6 { first, prefixes: count, per_prefix: 1, order: Order::InTurn }
            }
        };
        let (rate, duration) = BEFORE;
        let flood = Flood::new(self.honest_frame(), rate * f64::from(count), duration);
        generator.flood(&flood.sources(sources).cpus([SENDING_CPU]))?;
        Ok(())
    }

    /// Has each of the sources of [`From::Warmed`] send one packet, as in ten seconds each.
    pub(crate) fn warm_up(&self, generator: &mut Generator) -> Result<()> {
        const SECONDS: f64 = 10.0;
        let (first, sources) = self.sources(From::Warmed, Order::InTurn);
        let rate = f64::from(From::Warmed.count()) / SECONDS;
        let flood =
            Flood::new(self.frame(first, FLOOD_PORT), rate, Duration::from_secs_f64(SECONDS));
        generator.flood(&flood.sources(sources).cpus([SENDING_CPU]))?;
        Ok(())
    }

    /// A flood as fast as possible.
    pub(crate) fn flood(&self, from: From, duration: Duration) -> Flood {
        let (first, sources) = self.sources(from, Order::Random);
        Flood::new(self.frame(first, FLOOD_PORT), f64::INFINITY, duration)
            .sources(sources)
            .cpus([SENDING_CPU])
    }

    fn sources(&self, from: From, order: Order) -> (IpAddr, Sources) {
        match self.family {
            Family::Ipv4 => {
                let first = Ipv4Addr::from(FORGED_IPV4);
                (first.into(), Sources::Ipv4 { first, count: from.count(), order })
            }
            Family::Ipv6 | Family::Other => {
                let first = Ipv6Addr::from(u128::from(FORGED_IPV6) << 64 | 1);
                let (prefixes, per_prefix) = (from.count(), 1);
                (first.into(), Sources::Ipv6 { first, prefixes, per_prefix, order })
            }
        }
    }

    /// The same with honest frames in it.
    pub(crate) fn mixed_flood(&self, from: From, duration: Duration) -> Flood {
        let honest = Honest { every: HONEST_EVERY, sources: 3 * CLIENTS, flood_port: FLOOD_PORT };
        let flood = self.flood(from, duration);
        Flood { template: self.honest_frame(), honest: Some(honest), ..flood }
    }

    fn honest_frame(&self) -> Vec<u8> {
        self.frame(self.client(Standing::Proven, 0), HONEST_PORT)
    }

    /// A short datagram.
    fn frame(&self, from: IpAddr, port: u16) -> Vec<u8> {
        let path = frames::Path {
            source_mac: self.outside.mac,
            destination_mac: self.inside.mac,
            source: SocketAddr::new(from, 40_000),
            destination: SocketAddr::new(self.ends().inside, port),
        };
        frames::udp(&path, PAYLOAD)
    }

    /// Moves receiving to a core of its own: to a kernel thread (threaded NAPI), which is pinned.
    /// Something must have made the interface poll: an XDP program, or GRO.
    pub(crate) fn receive_apart(&self) -> Result<Receiver> {
        let name = &self.inside.name;
        // The /sys that is mounted shows another namespace.
        let script =
            format!("mount -t sysfs sysfs /sys && echo 1 > /sys/class/net/{name}/threaded");
        let mut command = self.inside.netns.command("unshare");
        let status = command.args(["--mount", "sh", "-c", &script]).status().context("unshare")?;
        ensure!(status.success(), "threaded NAPI on {name}: {status}");
        let thread = kernel_thread(&format!("napi/{name}-"))?;
        let mut only = CpuSet::new();
        only.set(RECEIVING_CPU)?;
        sched_setaffinity(thread, &only).context("pinning the receiving thread")?;
        set_nice(thread, MEASURING_NICE)?;
        Ok(Receiver { thread })
    }

    fn ends(&self) -> Ends {
        match self.family {
            Family::Ipv4 => Ends {
                outside: Ipv4Addr::new(192, 0, 2, 1).into(),
                inside: Ipv4Addr::new(192, 0, 2, 2).into(),
                length: 24,
            },
            Family::Ipv6 | Family::Other => Ends {
                outside: Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
                inside: Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2).into(),
                length: 64,
            },
        }
    }
}

struct Ends {
    outside: IpAddr,
    inside: IpAddr,
    length: u8,
}

/// The thread that receives.
pub(crate) struct Receiver {
    thread: Pid,
}

impl Receiver {
    /// The CPU time that it has used.
    pub(crate) fn time(&self) -> Result<Duration> {
        let text = fs::read_to_string(format!("/proc/{}/schedstat", self.thread))?;
        let nanos = text.split(' ').next().context("no CPU time")?.parse()?;
        Ok(Duration::from_nanos(nanos))
    }
}

/// Counts the honest packets that arrive, by source.
pub(crate) struct Sink {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<io::Result<HashMap<IpAddr, u64>>>,
}

impl Sink {
    pub(crate) fn start(stage: &Stage) -> Result<Self> {
        let address = SocketAddr::new(stage.ends().inside, HONEST_PORT);
        let socket = stage.inside.netns.run(|| UdpSocket::bind(address))?;
        setsockopt(&socket, RcvBufForce, &SOCKET_BUFFER)?;
        socket.set_read_timeout(Some(Duration::from_millis(20)))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            // It has time until the flood is over.
            set_nice(Pid::from_raw(0), 0).map_err(io::Error::other)?;
            let mut counts = HashMap::new();
            loop {
                // Asked before, so that nothing that had arrived by then is left.
                let is_last = stopped.load(Ordering::Relaxed);
                match socket.recv_from(&mut [0; 64]) {
                    Ok((_, from)) => *counts.entry(from.ip()).or_default() += 1,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        if is_last {
                            return Ok(counts);
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
        });
        Ok(Self { stop, thread })
    }

    /// Ends it once it has read all that arrived.
    pub(crate) fn end(self) -> Result<HashMap<IpAddr, u64>> {
        self.stop.store(true, Ordering::Relaxed);
        let counts = self.thread.join().map_err(|_| anyhow!("the counting thread panicked"))?;
        Ok(counts?)
    }
}

fn kernel_thread(prefix: &str) -> Result<Pid> {
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // It may have ended meanwhile.
        let Ok(name) = fs::read_to_string(entry.path().join("comm")) else { continue };
        if name.starts_with(prefix) {
            return Ok(Pid::from_raw(pid));
        }
    }
    anyhow::bail!("no kernel thread is called {prefix}…: the interface does not poll")
}
