//! The worst scrape that the issues speak of: 16 classes with every kind of limit, a million sources in the
//! table, and an attack that goes on.

use std::{
    fmt::Write as _,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow};
use nix::{
    time::{clock_getcpuclockid, clock_gettime},
    unistd::Pid,
};

use crate::{
    agent::{Agent, Metrics},
    frames,
    generator::{Flood, Generator, Order, Sources},
    netns::{Interface, Netns, VethOptions, veth},
};

/// Sources in the table, and that it is made for.
pub const SOURCES: u32 = 1_000_000;

/// Classes, the one for the rest included.
const CLASSES: u16 = 16;

/// The class `cN` is for the UDP port 1000 + N.
const FIRST_PORT: u16 = 1000;

/// What a scrape was like.
#[derive(Clone, Debug)]
pub struct Scraped {
    /// CPU time of the agent for each, user and system, on all of its threads.
    pub cpu: Vec<Duration>,
    /// The last one.
    pub text: String,
    /// Different sources that were sent into the class that keeps them.
    pub sent: u64,
}

impl Scraped {
    /// Series of the guarded interface.
    #[must_use]
    pub fn series(&self) -> usize {
        let series = self.text.lines().filter(|line| line.starts_with("limiter_"));
        series.filter(|line| line.contains("interface=\"edge0\"")).count()
    }

    /// Buckets in use of IPv4, as the last one says.
    ///
    /// # Errors
    /// If it is not in the Prometheus text format.
    pub fn tracked(&self) -> Result<f64> {
        let metrics = Metrics::parse(&self.text)?;
        Ok(metrics.sum("limiter_tracked_sources", &[("family", "ipv4")]))
    }

    /// The median of the CPU times.
    #[must_use]
    pub fn median(&self) -> Duration {
        let mut sorted = self.cpu.clone();
        sorted.sort();
        sorted.get(sorted.len() / 2).copied().unwrap_or_default()
    }
}

/// The first class keeps each source for minutes, the others have a limit of each kind.
fn config(mode: &str) -> String {
    let mut classes = String::new();
    for number in 0..CLASSES - 1 {
        let port = FIRST_PORT + number;
        let limits = if number == 0 {
            "packets = { rate = \"1/m\", burst = 10 }"
        } else {
            "packets = { rate = \"20/s\", burst = 20 }\n\
             bytes = { rate = \"64kbit/s\", burst = \"2KiB\" }\n\
             new_sources = { rate = \"5000/s\", burst = 5000 }\n\
             unproven = { rate = \"20000/s\", burst = 10000 }\n\
             total = { rate = \"20000/s\", burst = 20000 }"
        };
        // A String takes everything.
        let _ = write!(
            classes,
            "[[class]]\nname = \"c{number}\"\nmatch = {{ protocol = \"udp\", ports = [{port}] }}\n{limits}\n"
        );
    }
    format!(
        "mode = \"{mode}\"\n[[interface]]\nname = \"edge0\"\n\
         [table]\nipv4_sources = {SOURCES}\nipv6_sources = {SOURCES}\n\
         new_sources = {{ rate = \"10000000/s\", burst = 10000000 }}\n{classes}\
         [[class]]\nname = \"rest\"\npackets = {{ rate = \"1000/s\", burst = 1000 }}\n\
         [[block]]\ncidr = \"10.255.0.0/16\"\n"
    )
}

/// Starts an agent, attacks it in each class and in two modes, fills its table, and scrapes it so many `times`
/// while an attack from a million sources goes on.
///
/// # Errors
/// If something cannot be made, or the agent does not answer.
pub fn under_attack(times: usize) -> Result<Scraped> {
    let (near, far) = veth(
        (&Netns::new("edge")?, "edge0"),
        (&Netns::new("peer")?, "peer0"),
        VethOptions::default(),
    )?;
    let agent = Agent::start(&near.netns, &config("observe"))?;
    let mut attack = Attack { generator: Generator::new(&far)?, near, far };
    for mode in ["observe", "enforce"] {
        agent.reload(&config(mode))?;
        for number in 0..CLASSES {
            attack.class(FIRST_PORT + number)?;
        }
    }
    let sent = attack.fill()?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let flood = thread::spawn(move || -> Result<()> {
        while !stopped.load(Ordering::Relaxed) {
            let sources = million(Order::Random);
            attack.send(FIRST_PORT + 1, false, sources, 18, 200_000)?;
        }
        Ok(())
    });
    let scraped = scrape(&agent, times);
    stop.store(true, Ordering::Relaxed);
    flood.join().map_err(|_| anyhow!("the flood panicked"))??;
    let (cpu, text) = scraped?;
    agent.terminate()?;
    Ok(Scraped { cpu, text, sent })
}

fn scrape(agent: &Agent, times: usize) -> Result<(Vec<Duration>, String)> {
    let clock = clock_getcpuclockid(Pid::from_raw(i32::try_from(agent.pid())?))?;
    let mut cpu = Vec::new();
    let mut text = String::new();
    for _ in 0..times {
        let before = Duration::from(clock_gettime(clock)?);
        text = agent.get("/metrics")?;
        // A thread that ends after the answer.
        thread::sleep(Duration::from_millis(20));
        cpu.push(Duration::from(clock_gettime(clock)?).saturating_sub(before));
    }
    Ok((cpu, text))
}

fn million(order: Order) -> Sources {
    Sources::Ipv4 { first: Ipv4Addr::new(10, 0, 0, 1), count: SOURCES, order }
}

struct Attack {
    generator: Generator,
    near: Interface,
    far: Interface,
}

impl Attack {
    /// What meets each kind of limit of the class on this port, in both families.
    fn class(&mut self, port: u16) -> Result<()> {
        let blocked =
            Sources::Ipv4 { first: Ipv4Addr::new(10, 255, 0, 0), count: 256, order: Order::InTurn };
        let martians = Sources::Ipv4 { first: Ipv4Addr::LOCALHOST, count: 8, order: Order::InTurn };
        let prefixes = |prefixes, per_prefix| Sources::Ipv6 {
            first: Ipv6Addr::new(0x2a00, 1, 0, 0, 0, 0, 0, 1),
            prefixes,
            per_prefix,
            order: Order::InTurn,
        };
        self.send(port, false, Sources::Template, 18, 100)?;
        self.send(port, false, Sources::Template, 1_400, 20)?;
        self.send(port, false, blocked, 18, 100)?;
        self.send(port, false, martians, 18, 8)?;
        self.send(port, false, million(Order::InTurn), 18, 30_000)?;
        self.send(port, true, Sources::Template, 18, 100)?;
        self.send(port, true, Sources::Template, 1_400, 20)?;
        self.send(port, true, prefixes(64, 16), 18, 4_000)?;
        self.send(port, true, prefixes(100_000, 1), 18, 20_000)
    }

    /// Sends a packet of each of a million sources into the class that keeps them.
    fn fill(&mut self) -> Result<u64> {
        self.send(FIRST_PORT, false, million(Order::InTurn), 18, SOURCES.into())?;
        Ok(SOURCES.into())
    }

    /// As fast as the other end takes it.
    fn send(
        &mut self,
        port: u16,
        is_ipv6: bool,
        sources: Sources,
        payload: usize,
        count: u64,
    ) -> Result<()> {
        let (source, destination) = if is_ipv6 {
            ("[2a00:1::1]:40000".parse()?, "[2001:db8::2]:0".parse()?)
        } else {
            ("192.0.2.1:40000".parse()?, "192.0.2.2:0".parse()?)
        };
        let mut destination: SocketAddr = destination;
        destination.set_port(port);
        let path = frames::Path {
            source_mac: self.far.mac,
            destination_mac: self.near.mac,
            source,
            destination,
        };
        // Slow enough that hardly a frame finds the ring full.
        let flood = Flood::new(frames::udp(&path, payload), 400_000.0, Duration::from_secs(20));
        self.generator.flood(&flood.sources(sources).frames(count)).context("the attack")?;
        Ok(())
    }
}
