//! Two hosts on a cable, what a flood between them is to measure, and when that is a measurement.

use std::{
    cell::Cell,
    fs,
    net::SocketAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use limiter_tests::{
    agent::{Agent, Metrics},
    client::{self, EchoServer, Pace},
    frames,
    generator::{Flood, Generator, Sent, monotonic},
    netns::{Interface, Netns, VethOptions, veth},
};

/// What a measurement may be off by.
pub(crate) const TOLERANCE: f64 = 0.01;

/// A flood has to offer this many times what its limit admits.
pub(crate) const OVERLOAD: f64 = 10.0;

/// Long enough for rate × time to be ten times the burst of [`LIMIT`].
pub(crate) const FLOOD_TIME: Duration = Duration::from_millis(5_200);

/// Twenty times [`LIMIT`].
pub(crate) const FLOOD_RATE: f64 = 20_000.0;

/// Its bucket takes half a second to fill: few machines are so busy that both CPUs together send
/// nothing for so long.
pub(crate) const LIMIT: Limit = Limit { rate: 1_000, burst: 500 };

/// A limit in packets, per second and at once; or in bytes.
#[derive(Clone, Copy)]
pub(crate) struct Limit {
    pub(crate) rate: u32,
    pub(crate) burst: u32,
}

impl Limit {
    /// What one source gets in `time` that sends more than that.
    pub(crate) fn admits(self, time: Duration) -> f64 {
        f64::from(self.burst) + f64::from(self.rate) * time.as_secs_f64()
    }

    /// How long an empty bucket takes to fill.
    pub(crate) fn fills_in(self) -> Duration {
        Duration::from_secs(1) * self.burst / self.rate
    }

    /// As a budget of the configuration.
    pub(crate) fn packets(self) -> String {
        format!("packets = {{ rate = \"{}/s\", burst = {} }}", self.rate, self.burst)
    }
}

/// Clients end this much before the flood beside them, and blocks are kept away from by as much: clocks
/// of processes and the start of a flood differ by less.
pub(crate) const MARGIN: Duration = Duration::from_millis(300);

pub(crate) const PACKETS: &str = "limiter_packets_total";

/// Bytes of UDP payload in a flood's frames: the shortest frame there is on a wire.
pub(crate) const PAYLOAD: usize = 18;

/// In enforce mode, with `budget` for each source of UDP. The rest is what two hosts on a cable say
/// to each other now and then (multicast groups), apart from the flood.
pub(crate) fn enforced(budget: &str) -> String {
    format!(
        r#"
mode = "enforce"

[table]
ipv4_sources = 65536
ipv6_sources = 65536

[[interface]]
name = "edge0"

[[class]]
name = "echo"
match = {{ protocol = "udp", ports = [7] }}
packets = {{ rate = "1000/s", burst = 1000 }}

[[class]]
name = "flood"
match = {{ protocol = "udp" }}
{budget}

[[class]]
name = "rest"
packets = {{ rate = "1000/s", burst = 1000 }}
"#
    )
}

/// All CPUs that the test may use.
pub(crate) fn cpus() -> usize {
    thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Whether this runs in the VM: all its CPUs share those of the host, and each stands still while
/// others have their turn.
pub(crate) fn cpus_are_emulated() -> bool {
    fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("QEMU TCG"))
}

/// Tests that measure take turns even if the test runner does not make them.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An end of a cable that is guarded, the other end, and a generator there.
pub(crate) struct Cable {
    pub(crate) outside: Interface,
    pub(crate) inside: Interface,
    pub(crate) generator: Generator,
}

impl Cable {
    /// To the interface `name` of `host`.
    pub(crate) fn new(host: &Netns, name: &str) -> Result<Self> {
        let options = VethOptions { queues: u32::try_from(cpus())?, ..VethOptions::default() };
        let (inside, outside) = veth((host, name), (&Netns::new("outside")?, "peer0"), options)?;
        let generator = Generator::new(&outside)?;
        Ok(Self { outside, inside, generator })
    }

    /// Gives both ends addresses, which they have to find each other by.
    pub(crate) fn add_addresses(&self) -> Result<()> {
        for (interface, host) in [(&self.outside, 1), (&self.inside, 2)] {
            interface.add_address(&format!("192.0.2.{host}/24"))?;
            interface.add_address(&format!("2001:db8::{host}/64"))?;
        }
        Ok(())
    }

    pub(crate) fn path(&self, source: &str, port: u16) -> Result<frames::Path> {
        let source = SocketAddr::new(source.parse()?, port);
        let destination = if source.is_ipv4() { "192.0.2.2" } else { "2001:db8::2" };
        Ok(frames::Path {
            source_mac: self.outside.mac,
            destination_mac: self.inside.mac,
            source,
            destination: SocketAddr::new(destination.parse()?, 9),
        })
    }

    /// A short datagram from `source`.
    pub(crate) fn udp(&self, source: &str, port: u16) -> Result<Vec<u8>> {
        Ok(frames::udp(&self.path(source, port)?, PAYLOAD))
    }

    /// Who has an address that nobody has (RFC 826).
    pub(crate) fn arp(&self) -> Vec<u8> {
        let mut frame = [&[0xff; 6], &self.outside.mac[..], &[0x08, 0x06]].concat();
        frame.extend([0, 1, 0x08, 0x00, 6, 4, 0, 1]);
        frame.extend(self.outside.mac);
        frame.extend([192, 0, 2, 1, 0, 0, 0, 0, 0, 0, 192, 0, 2, 99]);
        frame.resize(60, 0);
        frame
    }

    /// The addresses that a frame begins with.
    pub(crate) fn ethernet(&self) -> [u8; 12] {
        let mut addresses = [0; 12];
        addresses[..6].copy_from_slice(&self.inside.mac);
        addresses[6..].copy_from_slice(&self.outside.mac);
        addresses
    }

    pub(crate) fn send(&mut self, flood: &Flood) -> Result<Sent> {
        self.generator.flood(flood)
    }

    /// Sends a flood and reads what the agent counted meanwhile.
    pub(crate) fn flood(&mut self, agent: &Agent, flood: &Flood) -> Result<Measured> {
        let before = agent.metrics()?;
        let sent = self.send(flood)?;
        let measured = Measured { counted: agent.metrics()?.since(&before), sent };
        measured.report();
        Ok(measured)
    }
}

/// The agent on one end of a cable.
pub(crate) struct Stage {
    pub(crate) agent: Agent,
    pub(crate) edge: Cable,
    pub(crate) _alone: MutexGuard<'static, ()>,
}

impl Stage {
    /// With `edge0` as the guarded interface.
    pub(crate) fn new(configuration: &str) -> Result<Self> {
        let alone = alone();
        let host = Netns::new("host")?;
        let edge = Cable::new(&host, "edge0")?;
        Ok(Self { agent: Agent::start(&host, configuration)?, edge, _alone: alone })
    }

    /// A flood of class "flood" that was more than ten times `limit` at all times, and of which each
    /// packet was counted.
    pub(crate) fn saturate(&mut self, flood: &Flood, limit: Limit) -> Result<Measured> {
        self.saturate_each(limit, |_| Ok(flood.clone()))
    }

    /// The same with a flood of its own for each attempt, by number.
    pub(crate) fn saturate_each(
        &mut self,
        limit: Limit,
        flood: impl Fn(u8) -> Result<Flood>,
    ) -> Result<Measured> {
        let numbers = Cell::new(0);
        let next = || {
            let number = numbers.replace(numbers.get() + 1);
            flood(number)
        };
        for _ in 0..3 {
            let measured = self.attempt_each(limit, next, overloads(limit))?;
            let counted = measured.packets(&[("class", "flood")]);
            if counted == measured.sent.arrived() {
                return Ok(measured);
            }
            // The kernel's count of losses in a ring is off by a frame now and then; without losses
            // there is nothing to be off.
            ensure!(measured.sent.lost > 0, "{counted} were counted: {measured:?}");
            println!("limits: once more: {counted} were counted: {measured:?}");
            thread::sleep(limit.fills_in());
        }
        bail!("the rings of this machine lose frames without counting them")
    }

    /// A flood that was `as_meant`; a machine busy with other things gets a few chances, each with
    /// full buckets.
    pub(crate) fn attempt(
        &mut self,
        flood: &Flood,
        limit: Limit,
        as_meant: impl Fn(&Sent) -> Result<()>,
    ) -> Result<Measured> {
        self.attempt_each(limit, || Ok(flood.clone()), as_meant)
    }

    fn attempt_each(
        &mut self,
        limit: Limit,
        flood: impl Fn() -> Result<Flood>,
        as_meant: impl Fn(&Sent) -> Result<()>,
    ) -> Result<Measured> {
        let mut attempts = 0;
        loop {
            let flood = flood()?;
            let measured = self.edge.flood(&self.agent, &flood)?;
            attempts += 1;
            match as_meant(&measured.sent) {
                Ok(()) => return Ok(measured),
                Err(error) if attempts == 10 => {
                    return Err(error).context("the machine is too busy to measure");
                }
                Err(error) => println!("limits: once more: {error}"),
            }
            thread::sleep(limit.fills_in());
        }
    }

    /// A flood of one source from all CPUs that leaves others room: not more at once than the ring
    /// has, which an honest client needs too.
    pub(crate) fn shared_flood(&self) -> Result<Flood> {
        let frame = self.edge.udp("198.51.100.1", 40_000)?;
        let mut flood = Flood::new(frame, 50_000.0, Duration::from_secs(5)).cpus(0..cpus());
        flood.catch_up = Duration::from_millis(2);
        Ok(flood)
    }

    /// A flood, beside it an honest client for each family, and `meanwhile` something else.
    pub(crate) fn flood_beside_clients(
        &mut self,
        flood: &Flood,
        meanwhile: impl FnOnce() -> Result<()> + Send,
    ) -> Result<(Measured, Vec<client::Goodput>)> {
        let pace = Pace { rate: 200, duration: flood.duration.saturating_sub(MARGIN) };
        let host = self.edge.inside.netns.clone();
        let outside = self.edge.outside.netns.clone();
        let mut clients = Vec::new();
        let mut servers = Vec::new();
        for (from, to) in [("192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::2")] {
            let to = SocketAddr::new(to.parse()?, 7);
            servers.push(EchoServer::start(&host, to)?);
            clients.push(client::start(&outside, from.parse()?, to, pace)?);
        }
        let measured = thread::scope(|scope| {
            let meanwhile = scope.spawn(meanwhile);
            let measured = self.edge.flood(&self.agent, flood);
            meanwhile.join().expect("what happens meanwhile does not panic")?;
            measured
        })?;
        let goodputs = clients.into_iter().map(client::Client::join).collect::<Result<_>>()?;
        drop(servers);
        Ok((measured, goodputs))
    }
}

/// What was sent, and what the agent counted meanwhile.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) sent: Sent,
    pub(crate) counted: Metrics,
}

impl Measured {
    pub(crate) fn packets(&self, labels: &[(&str, &str)]) -> u64 {
        whole(self.counted.sum(PACKETS, labels))
    }

    pub(crate) fn bytes(&self, labels: &[(&str, &str)]) -> u64 {
        whole(self.counted.sum("limiter_bytes_total", labels))
    }

    /// Packets of class "flood" with this action.
    pub(crate) fn action(&self, action: &str) -> u64 {
        self.packets(&[("class", "flood"), ("action", action)])
    }

    pub(crate) fn passed(&self) -> u64 {
        self.action("pass")
    }

    pub(crate) fn buckets_made(&self, family: &str) -> u64 {
        whole(self.counted.sum("limiter_sources_created_total", &[("family", family)]))
    }

    pub(crate) fn assert_all_cpus_took_part(&self) {
        let share = self.sent.total() / (4 * self.sent.per_cpu.len() as u64);
        assert!(self.sent.per_cpu.iter().all(|cpu| cpu.frames > share), "{:?}", self.sent);
    }

    /// For whoever runs the tests with `--nocapture`.
    pub(crate) fn report(&self) {
        let Self { sent, .. } = self;
        println!(
            "limits: {} sent in {:?}, {} lost, pause {:?}; {} passed, {} dropped, {} would be",
            sent.total(),
            sent.elapsed(),
            sent.lost,
            sent.pause(),
            self.packets(&[("action", "pass")]),
            self.packets(&[("action", "drop")]),
            self.packets(&[("action", "would_drop")]),
        );
    }
}

/// That a flood was more than ten times `limit`, and that no bucket was full in between.
pub(crate) fn overloads(limit: Limit) -> impl Fn(&Sent) -> Result<()> {
    move |sent| {
        let offered = count(sent.arrived()) / sent.elapsed().as_secs_f64();
        ensure!(offered > OVERLOAD * f64::from(limit.rate), "only {offered} packets/s arrived");
        ensure!(sent.pause() < limit.fills_in(), "a pause of {:?}", sent.pause());
        Ok(())
    }
}

#[track_caller]
pub(crate) fn assert_within(found: u64, expected: f64) {
    let error = count(found) / expected - 1.0;
    println!("limits: {found} of {expected:.1} expected, {:+.2} %", 100.0 * error);
    assert!(error.abs() <= TOLERANCE, "{found}, not {expected}: off by {:.2} %", 100.0 * error);
}

/// The counters at some moment between two.
pub(crate) struct Scrape {
    pub(crate) asked: Duration,
    pub(crate) answered: Duration,
    pub(crate) metrics: Metrics,
}

impl Scrape {
    pub(crate) fn of(agent: &Agent) -> Result<Self> {
        let asked = monotonic()?;
        Ok(Self { metrics: agent.metrics()?, asked, answered: monotonic()? })
    }

    pub(crate) fn passed(&self) -> f64 {
        self.metrics.sum(PACKETS, &[("class", "flood"), ("action", "pass")])
    }

    /// Whether much more arrived until `later` than `limit` admits.
    pub(crate) fn overloads(&self, later: &Self, limit: Limit) -> bool {
        let arrived = |scrape: &Self| scrape.metrics.sum(PACKETS, &[("class", "flood")]);
        let time = later.answered.saturating_sub(self.asked);
        arrived(later) - arrived(self) > 3.0 * f64::from(limit.rate) * time.as_secs_f64()
    }
}

/// Scrapes for `duration` and returns the last scrape; no counter ever goes back.
pub(crate) fn watch(agent: &Agent, earlier: &Scrape, duration: Duration) -> Result<Scrape> {
    let end = monotonic()? + duration;
    let mut earlier = earlier.metrics.clone();
    loop {
        let scrape = Scrape::of(agent)?;
        let steps = scrape.metrics.since(&earlier);
        let steps: Vec<_> = steps.matching(PACKETS, &[]).collect();
        ensure!(steps.iter().all(|(_, step)| *step >= 0.0), "a counter went back: {steps:?}");
        ensure!(steps.len() >= earlier.matching(PACKETS, &[]).count(), "a counter is gone");
        if scrape.answered >= end {
            return Ok(scrape);
        }
        earlier = scrape.metrics;
        thread::sleep(Duration::from_millis(20));
    }
}

/// That `limit` was exactly what passed between two scrapes of a flood that never paused for longer
/// than `pause`: what a bucket saved in a pause before the first may pass after it.
#[track_caller]
pub(crate) fn assert_rate(from: &Scrape, to: &Scrape, limit: Limit, pause: Duration) {
    assert_at_most(from, to, limit, pause);
    let passed = to.passed() - from.passed();
    let time = to.asked.saturating_sub(from.answered).saturating_sub(pause);
    let least = f64::from(limit.rate) * time.as_secs_f64() * (1.0 - TOLERANCE) - 1.0;
    assert!(passed >= least, "{passed} passed in {time:?}, not {least}");
}

#[track_caller]
pub(crate) fn assert_at_most(from: &Scrape, to: &Scrape, limit: Limit, pause: Duration) {
    let passed = to.passed() - from.passed();
    let time = to.answered.saturating_sub(from.asked) + pause;
    let most = f64::from(limit.rate) * time.as_secs_f64() * (1.0 + TOLERANCE) + 1.0;
    println!("limits: {passed} passed in {time:?}, at most {most:.1}; longest pause {pause:?}");
    assert!(passed <= most, "{passed} passed in {time:?}, not {most}");
}

/// The id of the program that is attached to an interface.
pub(crate) fn program_id(interface: &Interface) -> Result<u32> {
    let text = interface.netns.ip(&["-json", "link", "show", "dev", &interface.name])?;
    let links: serde_json::Value = serde_json::from_str(&text)?;
    let id = links[0]["xdp"]["prog"]["id"].as_u64().context("ip shows no program")?;
    Ok(u32::try_from(id)?)
}

/// How often the kernel has run the program.
pub(crate) fn run_count(id: u32) -> Result<u64> {
    let programs = aya::programs::loaded_programs().filter_map(Result::ok);
    let program = programs.into_iter().find(|program| program.id() == id);
    let program = program.with_context(|| format!("there is no program {id}"))?;
    ensure!(program.name_as_str() == Some("limiter"), "{:?}", program.name_as_str());
    Ok(program.run_count())
}

/// What `read` says twice in a row.
pub(crate) fn quiet<T: PartialEq>(read: impl Fn() -> Result<T>) -> Result<T> {
    let give_up = Instant::now() + Duration::from_secs(10);
    let mut last = read()?;
    loop {
        thread::sleep(Duration::from_millis(200));
        let now = read()?;
        if now == last {
            return Ok(now);
        }
        ensure!(Instant::now() < give_up, "it never comes to rest");
        last = now;
    }
}

#[expect(clippy::cast_precision_loss, reason = "packet counts of a few seconds are below 2^53")]
pub(crate) fn count(packets: u64) -> f64 {
    packets as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "Prometheus values of counters are whole numbers below 2^53"
)]
pub(crate) fn whole(value: f64) -> u64 {
    value.round() as u64
}
