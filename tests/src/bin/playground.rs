//! The playground: a real flood and an honest client against the agent, in namespaces of its own,
//! and a table of what the limit let through beside what it should have.

use std::{
    fmt, io,
    io::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    process::ExitCode,
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use clap::Parser;
use limiter_tests::{
    agent::{Agent, METRICS, Metrics},
    client::{self, EchoServer, Goodput, Pace},
    frames,
    generator::{Flood, Generator, Order, Sent, Sources},
    netns::{Interface, Netns, VethOptions, veth},
};
use nix::sys::signal::{SigSet, Signal};

/// The limit of each source, in packets per second.
const RATE: u32 = 1_000;
/// What a source may send at once.
const BURST: u32 = 1_000;
/// What the flood sends, in packets per second. At least ten times the limit must get through
/// even where other work keeps the generator waiting now and then.
const FLOOD: u32 = 25_000;
/// Long enough that the rate weighs ten times as much as the burst.
const FLOOD_TIME: Duration = Duration::from_millis(10_500);
/// What an honest client sends over each family.
const HONEST: Pace = Pace { rate: 100, duration: Duration::from_secs(10) };
/// Where the guarded host answers its clients.
const ECHO_PORT: u16 = 7;

/// Largest error between what the limit let through and what it should have.
const MAX_ERROR: f64 = 0.01;
/// Least share of its answers that an honest client must get.
const MIN_GOODPUT: f64 = 0.99;

/// Floods the agent in network namespaces and compares what passes with what the limit says.
#[derive(Parser)]
struct Args {
    /// Exit after the table instead of waiting for Ctrl-C
    #[arg(long)]
    once: bool,
}

/// What ends a wait.
enum Event {
    Signal,
    Measured(Result<Vec<Row>>),
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("playground: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<ExitCode> {
    let (events, event) = mpsc::channel();
    forward_signals(events.clone())?;

    progress("making namespaces and starting the agent")?;
    // By this thread, which outlives all others: the agent ends with the thread that started it.
    let stage = Arc::new(Stage::build()?);
    println!("done");
    let metrics = forward_metrics(&stage.server.netns)?;
    println!("metrics: http://{metrics}/metrics");

    let measured = Arc::clone(&stage);
    thread::spawn(move || {
        // Nobody listens any more if a signal came first.
        let _ = events.send(Event::Measured(measured.measure()));
    });
    let code = match event.recv()? {
        Event::Signal => ExitCode::from(130),
        Event::Measured(rows) => {
            let code = report(&rows?);
            if !args.once {
                println!("The agent goes on; metrics: http://{metrics}/metrics; Ctrl-C ends.");
                while !matches!(event.recv()?, Event::Signal) {}
            }
            code
        }
    };
    stage.end()?;
    Ok(code)
}

/// Turns Ctrl-C and SIGTERM into events. They are blocked in this thread, and so in all that
/// come after it, and waited for in one.
fn forward_signals(events: mpsc::Sender<Event>) -> Result<()> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGINT);
    signals.add(Signal::SIGTERM);
    signals.thread_block()?;
    thread::spawn(move || while signals.wait().is_ok() && events.send(Event::Signal).is_ok() {});
    Ok(())
}

/// Serves the agent's metrics listener, which is inside a namespace, on the loopback of ours.
fn forward_metrics(netns: &Netns) -> Result<SocketAddr> {
    let any_port = SocketAddr::new(METRICS.ip(), 0);
    let listener = TcpListener::bind(METRICS).or_else(|_| TcpListener::bind(any_port))?;
    let address = listener.local_addr()?;
    let netns = netns.clone();
    thread::spawn(move || {
        for outside in listener.incoming().flatten() {
            if let Ok(inside) = netns.run(|| TcpStream::connect(METRICS)) {
                thread::spawn(move || splice(outside, inside));
            }
        }
    });
    Ok(address)
}

/// Copies both ways until both ends have said all; a broken connection just ends.
fn splice(outside: TcpStream, inside: TcpStream) {
    let (Ok(question), Ok(target)) = (outside.try_clone(), inside.try_clone()) else {
        return;
    };
    let copy = |mut from: TcpStream, mut to: TcpStream| {
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    };
    let asking = thread::spawn(move || copy(question, target));
    copy(inside, outside);
    let _ = asking.join();
}

/// Two hosts joined by a cable: a client, and a server guarded by the agent.
struct Stage {
    client: Interface,
    server: Interface,
    echo_ipv4: EchoServer,
    echo_ipv6: EchoServer,
    agent: Mutex<Option<Agent>>,
}

impl Stage {
    const CLIENT_IPV4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
    const SERVER_IPV4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
    const CLIENT_IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
    const SERVER_IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2);

    fn build() -> Result<Self> {
        let (client, server) = veth(
            (&Netns::new("playground-client")?, "client0"),
            (&Netns::new("playground-server")?, "edge0"),
            VethOptions::default(),
        )?;
        client.add_address(&format!("{}/24", Self::CLIENT_IPV4))?;
        client.add_address(&format!("{}/64", Self::CLIENT_IPV6))?;
        server.add_address(&format!("{}/24", Self::SERVER_IPV4))?;
        server.add_address(&format!("{}/64", Self::SERVER_IPV6))?;
        client.add_neighbour(Self::SERVER_IPV4.into(), server.mac)?;
        client.add_neighbour(Self::SERVER_IPV6.into(), server.mac)?;
        server.add_neighbour(Self::CLIENT_IPV4.into(), client.mac)?;
        server.add_neighbour(Self::CLIENT_IPV6.into(), client.mac)?;
        let echo = |address| EchoServer::start(&server.netns, SocketAddr::new(address, ECHO_PORT));
        let echo_ipv4 = echo(Self::SERVER_IPV4.into())?;
        let echo_ipv6 = echo(Self::SERVER_IPV6.into())?;
        let agent = Agent::start(&server.netns, &configuration(&server, Mode::Observe))?;
        Ok(Self { client, server, echo_ipv4, echo_ipv6, agent: Mutex::new(Some(agent)) })
    }

    /// Runs all phases.
    fn measure(&self) -> Result<Vec<Row>> {
        let mut generator = Generator::new(&self.client)?;
        let phases = Phase::all();
        let mut rows = Vec::new();
        for (number, phase) in (1..).zip(&phases) {
            progress(&format!(
                "[{number}/{}] {phase}: {FLOOD} packets/s for {:.1} s beside an honest client",
                phases.len(),
                FLOOD_TIME.as_secs_f64()
            ))?;
            self.with_agent(|agent| agent.reload(&configuration(&self.server, phase.mode)))?;
            rows.push(self.run(phase, &mut generator)?);
            println!("done");
        }
        Ok(rows)
    }

    fn run(&self, phase: &Phase, generator: &mut Generator) -> Result<Row> {
        let before = self.with_agent(Agent::metrics)?;
        let echoed = self.echoed(phase.family);
        let honest = |from: IpAddr, to: IpAddr| {
            client::start(&self.client.netns, from, SocketAddr::new(to, ECHO_PORT), HONEST)
        };
        let ipv4 = honest(Self::CLIENT_IPV4.into(), Self::SERVER_IPV4.into())?;
        let ipv6 = honest(Self::CLIENT_IPV6.into(), Self::SERVER_IPV6.into())?;
        let sent = generator.flood(&phase.flood(&self.client, &self.server))?;
        let (ipv4, ipv6) = (ipv4.join()?, ipv6.join()?);

        let counted = self.with_agent(Agent::metrics)?.since(&before);
        let honest = match phase.family {
            Family::Ipv4 => ipv4,
            Family::Ipv6 => ipv6,
        };
        let measured = Measured {
            sent,
            counted: Counted::of(&counted, &self.server.name, phase.family),
            honest_sent: u64::from(honest.sent),
            honest_passed: self.echoed(phase.family) - echoed,
            goodput: Goodput {
                sent: ipv4.sent + ipv6.sent,
                answered: ipv4.answered + ipv6.answered,
            },
        };
        Ok(Row::new(phase, &measured))
    }

    fn echoed(&self, family: Family) -> u64 {
        match family {
            Family::Ipv4 => self.echo_ipv4.received(),
            Family::Ipv6 => self.echo_ipv6.received(),
        }
    }

    fn with_agent<T>(&self, work: impl FnOnce(&Agent) -> Result<T>) -> Result<T> {
        let agent = self.agent.lock().map_err(|_| anyhow::anyhow!("another thread panicked"))?;
        work(agent.as_ref().context("the playground is at its end")?)
    }

    /// Ends the agent and removes its files, even while a phase runs.
    fn end(&self) -> Result<()> {
        let agent =
            self.agent.lock().map_err(|_| anyhow::anyhow!("another thread panicked"))?.take();
        agent.map_or(Ok(()), |agent| agent.terminate().map(drop))
    }
}

fn configuration(interface: &Interface, mode: Mode) -> String {
    format!(
        "mode = \"{mode}\"\n\
         [[interface]]\n\
         name = \"{}\"\n\
         xdp = \"native\"\n\
         [[class]]\n\
         name = \"rest\"\n\
         packets = {{ rate = \"{RATE}/s\", burst = {BURST} }}\n\
         [metrics]\n\
         listen = \"{METRICS}\"\n",
        interface.name
    )
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Observe,
    Enforce,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Observe => "observe",
            Self::Enforce => "enforce",
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    Ipv4,
    Ipv6,
}

impl Family {
    /// The value of the metrics' label.
    fn label(self) -> &'static str {
        match self {
            Self::Ipv4 => "ipv4",
            Self::Ipv6 => "ipv6",
        }
    }
}

struct Phase {
    number: u8,
    mode: Mode,
    family: Family,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.family {
            Family::Ipv4 => "one IPv4 address",
            Family::Ipv6 => "all of one IPv6 /64",
        };
        f.pad(&format!("{}, {what}", self.mode))
    }
}

impl Phase {
    fn all() -> Vec<Self> {
        let modes = [Mode::Observe, Mode::Enforce];
        let both = modes.map(|mode| [(mode, Family::Ipv4), (mode, Family::Ipv6)]);
        (1..)
            .zip(both.as_flattened())
            .map(|(number, &(mode, family))| Self { number, mode, family })
            .collect()
    }

    /// A source of its own for each phase, so that each starts with a full bucket.
    fn flood(&self, client: &Interface, server: &Interface) -> Flood {
        let first_ipv6 = Ipv6Addr::new(0x2001, 0xdb8, 0xbad, self.number.into(), 0, 0, 0, 0);
        let (source, destination, sources) = match self.family {
            Family::Ipv4 => (
                Ipv4Addr::new(198, 51, 100, self.number).into(),
                Stage::SERVER_IPV4.into(),
                Sources::Template,
            ),
            Family::Ipv6 => (
                first_ipv6.into(),
                Stage::SERVER_IPV6.into(),
                Sources::Ipv6 {
                    first: first_ipv6,
                    prefixes: 1,
                    per_prefix: u32::MAX,
                    order: Order::Random,
                },
            ),
        };
        let frame = frames::udp(
            &frames::Path {
                source_mac: client.mac,
                destination_mac: server.mac,
                source: SocketAddr::new(source, 40000),
                destination: SocketAddr::new(destination, 9),
            },
            18,
        );
        let cpus = thread::available_parallelism().map_or(1, std::num::NonZero::get).min(2);
        Flood::new(frame, f64::from(FLOOD), FLOOD_TIME).sources(sources).cpus(0..cpus)
    }
}

/// Packets of a family by what the agent says was done with them.
struct Counted {
    pass: f64,
    drop: f64,
    would_drop: f64,
}

impl Counted {
    fn of(metrics: &Metrics, interface: &str, family: Family) -> Self {
        let packets = |action| {
            let labels = [
                ("interface", interface),
                ("family", family.label()),
                ("class", "rest"),
                ("action", action),
            ];
            metrics.sum("limiter_packets_total", &labels)
        };
        Self { pass: packets("pass"), drop: packets("drop"), would_drop: packets("would_drop") }
    }
}

/// What one phase showed, all of it in the phase's family but the goodput, which is of both.
struct Measured {
    sent: Sent,
    counted: Counted,
    honest_sent: u64,
    honest_passed: u64,
    goodput: Goodput,
}

/// One line of the table; everything but the goodput is about the flood alone.
struct Row {
    phase: String,
    offered: f64,
    passed: f64,
    dropped: f64,
    would_drop: f64,
    predicted: f64,
    error: f64,
    goodput: f64,
    complaints: Vec<String>,
}

impl Row {
    fn new(phase: &Phase, measured: &Measured) -> Self {
        let Measured { sent, counted, goodput, .. } = measured;
        let offered = number(sent.arrived());
        let elapsed = sent.elapsed().as_secs_f64();
        let conforming = counted.pass - number(measured.honest_passed);
        let refilled = f64::from(RATE) * elapsed;
        let predicted = f64::from(BURST) + refilled;
        let row = Self {
            phase: phase.to_string(),
            offered,
            passed: conforming + counted.would_drop,
            dropped: counted.drop,
            would_drop: counted.would_drop,
            predicted,
            error: conforming / predicted - 1.0,
            goodput: goodput.share(),
            complaints: Vec::new(),
        };
        let unaccounted = offered + number(measured.honest_sent)
            - (counted.pass + counted.drop + counted.would_drop);
        let complaints = [
            (row.error.abs() > MAX_ERROR)
                .then(|| format!("{conforming} packets within the limit, not {predicted:.0}")),
            (phase.mode == Mode::Observe && row.dropped > 0.0)
                .then(|| format!("{} packets dropped in observe mode", row.dropped)),
            (row.goodput < MIN_GOODPUT).then(|| {
                format!("the honest client got {} of {} answers", goodput.answered, goodput.sent)
            }),
            (unaccounted.abs() > 0.0)
                .then(|| format!("{unaccounted} packets offered that no counter shows")),
            (offered < 10.0 * refilled || refilled < 10.0 * f64::from(BURST)).then(|| {
                format!(
                    "the generator sent {offered} packets in {elapsed:.1} s, too few for a \
                     measurement: the machine is too busy"
                )
            }),
        ];
        Self { complaints: complaints.into_iter().flatten().collect(), ..row }
    }
}

/// Prints the table and what is wrong in it.
fn report(rows: &[Row]) -> ExitCode {
    println!(
        "\nLimit of each source: {RATE} packets/s, burst {BURST}.\n\
         {:<28} {:>9} {:>9} {:>9} {:>10} {:>9} {:>8} {:>8}",
        "phase", "offered", "passed", "dropped", "would-drop", "predicted", "error", "honest"
    );
    for row in rows {
        println!(
            "{:<28} {:>9} {:>9} {:>9} {:>10} {:>9.0} {:>6.2} % {:>6.1} %",
            row.phase,
            row.offered,
            row.passed,
            row.dropped,
            row.would_drop,
            row.predicted,
            100.0 * row.error,
            100.0 * row.goodput
        );
    }
    println!(
        "predicted: burst + rate x time, by the generator's clock; error: of passed less \
         would-drop; honest: answers\nthat a client beside the flood got, over IPv4 and IPv6.\n"
    );
    for row in rows {
        for complaint in &row.complaints {
            println!("FAILED {}: {complaint}", row.phase);
        }
    }
    if rows.iter().all(|row| row.complaints.is_empty()) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Starts a line that "done" will end.
fn progress(what: &str) -> Result<()> {
    print!("{what} … ");
    io::stdout().flush()?;
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "packet counts of a few seconds are below 2^53")]
fn number(count: u64) -> f64 {
    count as f64
}
