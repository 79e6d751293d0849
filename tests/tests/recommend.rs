//! From observing to enforcing: limits that are recommended for honest traffic lose none of it, and cut
//! whoever sends much more.
//!
//! Honest sources follow a schedule, so that they send the same when it is played again. Each has an
//! address of its own, which the clients' namespace takes for its own without having been given it.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    process::{Command, Output},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use limiter_tests::{
    agent::{Agent, binary},
    client::{self, EchoServer, Goodput, Pace, connect},
    frames,
    generator::{Flood, Generator, Order, Sources},
    netns::{Interface, Netns, VethOptions, veth},
};
use serde_json::Value;
use tempfile::TempDir;

/// Limits that the traffic is far above: what is measured is what arrives, not what would pass.
const CONFIG: &str = r#"
# A comment that stays.
mode = "observe"

[[interface]]
name = "edge0"

[[class]]
name = "dns"
match = { protocol = "udp", ports = [53] }
packets = { rate = "1/s", burst = 1 }      # too low
bytes = { rate = "8kbit/s", burst = 2000 }
unproven = { rate = "10/s", burst = 10 }

[[class]]
name = "quic"
match = { protocol = "udp", ports = [443] }
packets = { rate = "1/s", burst = 1 }
new_sources = { rate = "1/s", burst = 1 }

[[class]]
name = "web"
match = { protocol = "tcp", ports = [80] }
packets = { rate = "1/s", burst = 1 }

[[class]]
name = "rest"
packets = { rate = "77/s", burst = 777 }
"#;

const SERVER_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const SERVER_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);

/// What is recorded.
const RECORDED: Duration = Duration::from_secs(20);
/// The busiest honest source of class dns, in questions per second.
const BUSIEST: u32 = 60;

/// A guarded server and the network of its clients.
struct Stage {
    clients: Interface,
    edge: Interface,
}

impl Stage {
    fn new() -> Result<Self> {
        let (clients, edge) = veth(
            (&Netns::new("clients")?, "clients0"),
            (&Netns::new("edge")?, "edge0"),
            VethOptions::default(),
        )?;
        let near: [IpAddr; 2] = ["198.18.0.2".parse()?, "2001:db8::2".parse()?];
        let far: [IpAddr; 2] = [SERVER_V4.into(), SERVER_V6.into()];
        for (near, far) in near.into_iter().zip(far) {
            let length = if near.is_ipv4() { 24 } else { 64 };
            clients.add_known_address(near, length, &edge)?;
            edge.add_known_address(far, length, &clients)?;
        }
        for (version, network, gateway) in
            [("-4", "198.18.64.0/18", "198.18.0.2"), ("-6", "2001:db8:1000::/36", "2001:db8::2")]
        {
            edge.netns.ip(&[version, "route", "add", network, "via", gateway])?;
            clients.netns.ip(&[version, "route", "add", "local", network, "dev", "lo"])?;
            let family = if version == "-4" { "ipv4" } else { "ipv6" };
            clients.netns.set_sysctl(&format!("net/{family}/ip_nonlocal_bind"), "1")?;
        }
        Ok(Self { clients, edge })
    }

    /// A datagram to class dns from `source`.
    fn question(&self, source: Ipv4Addr) -> Vec<u8> {
        let path = frames::Path {
            source_mac: self.clients.mac,
            destination_mac: self.edge.mac,
            source: SocketAddr::new(source.into(), 4_000),
            destination: SocketAddr::new(SERVER_V4.into(), 53),
        };
        frames::udp(&path, 30)
    }

    /// Sends a flood while something else goes on.
    fn flood(&self, after: Duration, flood: Flood) -> thread::JoinHandle<Result<u64>> {
        let outside = self.clients.clone();
        thread::spawn(move || {
            thread::sleep(after);
            Ok(Generator::new(&outside)?.flood(&flood)?.arrived())
        })
    }

    /// Plays the honest schedule once: what each source of UDP sent and got back, class dns and class quic.
    fn play(&self, duration: Duration) -> Result<[Vec<Goodput>; 2]> {
        // They end with this.
        let echoes =
            [(SERVER_V4.into(), 53), (IpAddr::from(SERVER_V6), 443)].map(|(address, port)| {
                EchoServer::start(&self.edge.netns, SocketAddr::new(address, port))
            });
        let echoes = echoes.into_iter().collect::<Result<Vec<_>>>()?;
        let web = self.web(duration)?;
        let mut clients = [Vec::new(), Vec::new()];
        for number in 0..40_u8 {
            let rate = if number < 5 { BUSIEST } else { 10 };
            let from = Ipv4Addr::new(198, 18, 64, number + 1).into();
            let to = SocketAddr::new(SERVER_V4.into(), 53);
            clients[0].push(client::start(&self.clients.netns, from, to, Pace { rate, duration })?);
        }
        for number in 0..30_u16 {
            let rate = if number < 3 { 40 } else { 8 };
            let from = Ipv6Addr::new(0x2001, 0xdb8, 0x1000, number, 0, 0, 0, 7).into();
            let to = SocketAddr::new(SERVER_V6.into(), 443);
            clients[1].push(client::start(&self.clients.netns, from, to, Pace { rate, duration })?);
        }
        let [dns, quic] = clients;
        let join = |clients: Vec<client::Client>| {
            clients.into_iter().map(client::Client::join).collect::<Result<Vec<_>>>()
        };
        let goodput = [join(dns)?, join(quic)?];
        web.join().map_err(|_| anyhow!("the clients of class web panicked"))??;
        drop(echoes);
        Ok(goodput)
    }

    /// Connections of class web, each of which sends some segments a second.
    fn web(&self, duration: Duration) -> Result<thread::JoinHandle<Result<()>>> {
        let servers: Vec<TcpListener> = self.edge.netns.run(|| {
            let addresses = [IpAddr::from(SERVER_V4), SERVER_V6.into()];
            addresses
                .map(|it| TcpListener::bind(SocketAddr::new(it, 80)))
                .into_iter()
                .collect::<Result<_, _>>()
        })?;
        let stop = Arc::new(AtomicBool::new(false));
        for server in servers {
            server.set_nonblocking(true)?;
            let stop = Arc::clone(&stop);
            thread::spawn(move || drain(&server, &stop));
        }
        let thread = self.clients.netns.spawn(move || {
            let v4 = (0..30).map(|it| {
                (Ipv4Addr::new(198, 18, 65, it + 1).into(), SocketAddr::new(SERVER_V4.into(), 80))
            });
            let v6 = (0..10).map(|it| {
                let from = Ipv6Addr::new(0x2001, 0xdb8, 0x1001, it, 0, 0, 0, 7);
                (from.into(), SocketAddr::new(SERVER_V6.into(), 80))
            });
            let sent = send(v4.chain(v6), duration);
            stop.store(true, Ordering::Relaxed);
            sent
        });
        Ok(thread)
    }
}

/// Connects all and sends from each ten or thirty segments a second.
fn send(clients: impl Iterator<Item = (IpAddr, SocketAddr)>, duration: Duration) -> Result<()> {
    const STEP: Duration = Duration::from_millis(100);
    let start = Instant::now();
    let mut connections: Vec<TcpStream> =
        clients.map(|(from, to)| connect(from, to)).collect::<Result<_>>()?;
    for connection in &connections {
        connection.set_nodelay(true)?;
        connection.set_write_timeout(Some(Duration::from_secs(10)))?;
    }
    while start.elapsed() < duration {
        let began = Instant::now();
        for (number, connection) in connections.iter_mut().enumerate() {
            for _ in 0..if number % 10 == 0 { 3 } else { 1 } {
                connection.write_all(b"a request")?;
            }
        }
        thread::sleep(STEP.saturating_sub(began.elapsed()));
    }
    Ok(())
}

/// Takes what comes, until told to stop.
fn drain(server: &TcpListener, stop: &AtomicBool) {
    let mut connections = Vec::new();
    let mut buffer = [0; 4096];
    while !stop.load(Ordering::Relaxed) {
        while let Ok((connection, _)) = server.accept() {
            if connection.set_nonblocking(true).is_ok() {
                connections.push(connection);
            }
        }
        for connection in &mut connections {
            // Nothing to read is no reason to stop.
            let _ = connection.read(&mut buffer);
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Asks for limits for what a test can record.
fn recommend(agent: &Agent, arguments: &[&str]) -> Result<Output> {
    let enough = ["recommend", "--min-time", "15s", "--min-sources", "20"];
    agent.command(&[&enough[..], arguments].concat())
}

fn refusal(output: &Output) -> Result<String> {
    ensure!(output.status.code() == Some(1), "{output:?}");
    Ok(String::from_utf8(output.stderr.clone())?)
}

/// The recommendation as a file that passes `check`, and as it is told in JSON.
fn recommended(agent: &Agent, arguments: &[&str]) -> Result<(String, Value)> {
    let directory = TempDir::new()?;
    let file = directory.path().join("recommended.toml");
    let path = file.to_str().context("a path in UTF-8")?;
    let output = recommend(agent, &[&["-o", path, "--json"], arguments].concat())?;
    ensure!(output.status.success(), "{output:?}\n{}", agent.log());
    let checked = Command::new(binary()?).args(["check", path]).output()?;
    ensure!(checked.status.success(), "{checked:?}");
    let text = fs::read_to_string(&file)?;
    println!("{text}");
    let answer: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(answer["toml"] == text.as_str(), "the file is not what was answered");
    Ok((text, answer))
}

/// What a class is advised; an error if it keeps its limits.
fn advice<'a>(answer: &'a Value, class: &str) -> Result<&'a Value> {
    let classes = answer["classes"].as_array().context("no classes")?;
    let found = classes.iter().find(|it| it["name"] == class).context("no such class")?;
    found["outcome"].get("limits").with_context(|| format!("{class} keeps its limits: {found}"))
}

fn number(value: &Value) -> Result<f64> {
    value.as_f64().with_context(|| format!("{value} is no number"))
}

fn dropped(agent: &Agent, class: &str) -> Result<f64> {
    Ok(agent.metrics()?.sum("limiter_packets_total", &[("class", class), ("action", "drop")]))
}

#[test]
fn honest_traffic_loses_nothing_under_its_recommendation_and_a_flooder_is_cut() -> Result<()> {
    let stage = Stage::new()?;
    let agent = Agent::start(&stage.edge.netns, CONFIG)?;

    // Nothing was measured yet.
    let error = refusal(&recommend(&agent, &[])?)?;
    for class in ["dns", "quic", "web", "rest"] {
        assert!(error.contains(&format!("class \"{class}\": it was observed for ")), "{error}");
    }

    stage.play(RECORDED)?;
    let error = refusal(&agent.command(&["recommend"])?)?;
    assert!(error.contains("and 1h are needed"), "{error}");
    let error =
        refusal(&agent.command(&["recommend", "--min-time", "15s", "--min-sources", "1000"])?)?;
    assert!(error.contains("1000 are needed"), "{error}");
    let error = refusal(&recommend(&agent, &["--margin", "0.5"])?)?;
    assert!(error.contains("write a number from 1"), "{error}");

    let measured: Value = serde_json::from_str(&agent.get("/v1/measure")?)?;
    let class = |name: &str| {
        let classes = measured["classes"].as_array().context("no classes")?;
        classes.iter().find(|it| it["name"] == name).context("no such class")
    };
    // The test's own handshakes prove its clients, and its questions nobody.
    assert_eq!(class("web")?["proven"]["sources"], 40, "{measured}");
    assert_eq!(class("dns")?["others"]["sources"], 40, "{measured}");
    assert_eq!(class("quic")?["others"]["sources"], 30, "{measured}");
    let busiest = number(&class("dns")?["others"]["packets"]["max"])?;
    // Windows are a second long or little more.
    let most = f64::from(BUSIEST);
    assert!((most..2.0 * most).contains(&busiest), "{busiest}");

    let (text, answer) = recommended(&agent, &["--enforce"])?;
    assert!(text.contains("# A comment that stays."), "{text}");
    assert!(text.contains("# too low"), "{text}");
    assert!(text.contains("rate = \"77/s\", burst = 777"), "the class without traffic: {text}");
    assert!(advice(&answer, "rest").is_err(), "{answer}");
    assert_eq!(advice(&answer, "web")?["follows_proven"], true, "{answer}");
    assert_eq!(advice(&answer, "dns")?["follows_proven"], false, "{answer}");
    let limit = &advice(&answer, "dns")?["packets"];
    let (rate, burst) = (number(&limit["per_second"])?, number(&limit["burst"])?);
    assert!((1.5 * busiest..2.0 * busiest).contains(&rate), "{rate} for {busiest}");

    // The same again, under these limits, to an agent that knows nobody yet.
    agent.terminate()?;
    let agent = Agent::start(&stage.edge.netns, &text)?;
    let flood_time = Duration::from_secs(8);
    let flooder = Ipv4Addr::new(198, 18, 70, 1);
    let flood = Flood::new(stage.question(flooder), f64::from(20 * BUSIEST), flood_time);
    let flood = stage.flood(Duration::from_secs(6), flood);
    let [dns, quic] = stage.play(RECORDED)?;
    let offered = flood.join().map_err(|_| anyhow!("the flooder panicked"))??;
    for goodput in dns.iter().chain(&quic) {
        assert_eq!(goodput.answered, goodput.sent, "of {dns:?} {quic:?}");
    }
    for class in ["quic", "web", "rest"] {
        assert!(dropped(&agent, class)? < 0.5, "{class}: {:?}", agent.metrics()?);
    }
    let offered = f64::from(u32::try_from(offered)?);
    let passed = offered - dropped(&agent, "dns")?;
    let admitted = burst + rate * flood_time.as_secs_f64();
    assert!(
        (0.95 * admitted..1.05 * admitted).contains(&passed),
        "{passed} of {offered}: {admitted}"
    );

    // What is enforced is not measured.
    let error = refusal(&recommend(&agent, &[])?)?;
    assert!(error.contains("class \"dns\": it is in mode enforce"), "{error}");
    agent.terminate()?;
    Ok(())
}

#[test]
fn a_handful_of_forged_sources_do_not_move_the_advice_and_a_flood_does_not_fill_memory()
-> Result<()> {
    let stage = Stage::new()?;
    let agent = Agent::start(&stage.edge.netns, CONFIG)?;
    // Five of them, each 100 times as fast as an honest one.
    let forged =
        Flood::new(stage.question(Ipv4Addr::new(198, 18, 80, 1)), 5_000.0, Duration::from_secs(10));
    let forged = forged.sources(Sources::Ipv4 {
        first: Ipv4Addr::new(198, 18, 80, 1),
        count: 5,
        order: Order::InTurn,
    });
    let forged = stage.flood(Duration::from_secs(5), forged);
    stage.play(RECORDED)?;
    let sent = forged.join().map_err(|_| anyhow!("the flooder panicked"))??;
    assert!(sent > 25_000, "{sent}");
    let (text, answer) = recommended(&agent, &[])?;
    let dns = advice(&answer, "dns")?;
    let rate = number(&dns["packets"]["per_second"])?;
    let most = f64::from(BUSIEST);
    assert!((most..4.0 * most).contains(&rate), "{answer}");
    assert_eq!(dns["would_hit"], serde_json::json!([0, 5]), "{answer}");
    assert!(
        text.contains("would be hit: 0 of the proven and 5 others, such as 198.18.80."),
        "{text}"
    );
    assert!(text.contains("mode = \"observe\""), "{text}");

    // More sources than can be watched.
    let many =
        Flood::new(stage.question(Ipv4Addr::new(198, 18, 96, 1)), 40_000.0, Duration::from_secs(3));
    let many = many.sources(Sources::Ipv4 {
        first: Ipv4Addr::new(10, 0, 0, 1),
        count: 1 << 20,
        order: Order::Random,
    });
    let sent =
        stage.flood(Duration::ZERO, many).join().map_err(|_| anyhow!("the flood panicked"))??;
    assert!(sent > 40_000, "{sent}");
    let measured: Value = serde_json::from_str(&agent.get("/v1/measure")?)?;
    assert!(number(&measured["one_in"])? > 1.5, "{measured}");
    assert!(number(&measured["watched"])? <= number(&measured["capacity"])?, "{measured}");
    assert!(number(&measured["unwatched_packets"])? > 0.5, "{measured}");
    // What forged sources sent once each moves nothing.
    let (_, answer) = recommended(&agent, &[])?;
    let after = number(&advice(&answer, "dns")?["packets"]["per_second"])?;
    assert!((after - rate).abs() < 1.0, "{after}, and {rate} before the flood");

    // Limits change and what was measured stays; with other classes it begins anew.
    let seconds = |agent: &Agent| -> Result<f64> {
        let measured: Value = serde_json::from_str(&agent.get("/v1/measure")?)?;
        let classes = measured["classes"].as_array().context("no classes")?;
        number(&classes.iter().find(|it| it["name"] == "dns").context("no dns")?["seconds"])
    };
    agent.reload(&CONFIG.replace("77/s", "88/s"))?;
    assert!(seconds(&agent)? > 15.0, "{}", agent.log());
    agent.reload(&CONFIG.replace("[443]", "[443, 444]"))?;
    assert!(seconds(&agent)? < 5.0, "{}", agent.log());
    let log = agent.terminate()?;
    assert!(log.contains("what was measured under the old ones is gone"), "{log}");
    Ok(())
}
