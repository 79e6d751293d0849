//! What the agent exports, and what it takes: metrics that match their documentation and never go
//! backwards, the memory that was announced, and listeners that rude clients cannot hold.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    os::unix::{
        fs::{FileTypeExt as _, MetadataExt as _},
        net::UnixStream,
    },
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use limiter_tests::{
    agent::{self, Agent, METRICS, Metrics},
    frames,
    generator::{Flood, Generator},
    netns::{Interface, Netns, VethOptions, veth},
    process, prometheus,
};
use serde_json::Value;

/// For a command or an answer; long, since the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(30);

/// The document that describes the metrics.
const DOCUMENTED: &str = include_str!("../../docs/limiter-agent.md");

/// A guarded interface, and the other end of its cable.
struct Edge {
    near: Interface,
    far: Interface,
}

impl Edge {
    fn new() -> Result<Self> {
        let (near, far) = veth(
            (&Netns::new("edge")?, "edge0"),
            (&Netns::new("peer")?, "peer0"),
            VethOptions::default(),
        )?;
        Ok(Self { near, far })
    }

    /// Sends as many datagrams to each of these UDP ports.
    fn send(&self, ports: &[(u16, u64)]) -> Result<()> {
        let mut generator = Generator::new(&self.far)?;
        for (port, frames) in ports {
            let path = frames::Path {
                source_mac: self.far.mac,
                destination_mac: self.near.mac,
                source: "192.0.2.1:40000".parse()?,
                destination: SocketAddr::new("192.0.2.2".parse()?, *port),
            };
            let frame = frames::udp(&path, 18);
            let flood = Flood::new(frame, 10_000.0, Duration::from_secs(5)).frames(*frames);
            let sent = generator.flood(&flood)?;
            ensure!(sent.arrived() == *frames, "{sent:?}");
        }
        Ok(())
    }
}

/// A configuration with a class `cN` for each UDP port 1000 + N, and the rest.
fn with_classes(numbers: impl IntoIterator<Item = u16>) -> String {
    let budget = "packets = { rate = \"1000000/s\", burst = 1000000 }";
    let classes: Vec<_> = numbers
        .into_iter()
        .map(|number| {
            let port = 1000 + number;
            format!(
                "[[class]]\nname = \"c{number}\"\n\
                 match = {{ protocol = \"udp\", ports = [{port}] }}\n{budget}\n"
            )
        })
        .collect();
    format!(
        "default_reserves = []\n[[interface]]\nname = \"edge0\"\n{}[[class]]\nname = \"rest\"\n{budget}\n\
         [table]\nipv4_sources = 4096\nipv6_sources = 4096\n",
        classes.concat()
    )
}

fn packets(metrics: &Metrics, class: &str) -> f64 {
    metrics.sum("limiter_packets_total", &[("class", class)])
}

#[test]
fn promtool_finds_nothing_to_criticise() -> Result<()> {
    let promtool = prometheus::tool("promtool")?;
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, &with_classes([1]))?;
    edge.send(&[(1001, 10), (9, 5)])?;
    let text = agent.get("/metrics")?;
    assert!(text.contains("limiter_packets_total{"), "{text}");
    let directory = tempfile::Builder::new().prefix("limiter-test-").tempdir()?;
    let file = directory.path().join("metrics");
    fs::write(&file, &text)?;
    let mut command = Command::new(promtool);
    command.args(["check", "metrics"]);
    let output = process::output_from(File::open(&file)?.into(), &mut command, PATIENCE)?;
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success() && said.is_empty(), "{}", String::from_utf8_lossy(&said));
    agent.terminate()?;
    Ok(())
}

/// Names and labels of the metrics in the table of the document.
fn documented() -> Result<BTreeMap<String, BTreeSet<String>>> {
    let mut metrics = BTreeMap::new();
    let mut last = BTreeSet::new();
    for row in DOCUMENTED.lines().filter_map(|line| line.strip_prefix("| `limiter_")) {
        let (metric, _) = row.split_once('`').context("a name in backticks")?;
        let (name, labels) = metric.split_once('{').unwrap_or((metric, ""));
        let labels = labels.trim_end_matches('}');
        // "…" stands for those of the row above.
        if labels != "…" {
            last = labels.split(',').filter(|it| !it.is_empty()).map(ToOwned::to_owned).collect();
        }
        metrics.insert(format!("limiter_{name}"), last.clone());
    }
    Ok(metrics)
}

#[test]
fn what_is_exported_is_what_is_documented() -> Result<()> {
    let documented = documented()?;
    assert!(documented.len() >= 12, "{documented:?}");
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, &with_classes([1]))?;
    edge.send(&[(1001, 10)])?;
    let text = agent.get("/metrics")?;
    let metrics = Metrics::parse(&text)?;
    let names: BTreeSet<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .map(ToOwned::to_owned)
        .collect();
    assert_eq!(names, documented.keys().cloned().collect(), "{text}");
    for (name, labels) in &documented {
        for (found, _) in metrics.matching(name, &[]) {
            assert_eq!(&found.keys().cloned().collect::<BTreeSet<_>>(), labels, "{name}");
        }
    }
    for (name, kind) in
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
    {
        let expected = if name.ends_with("_total") { "counter" } else { "gauge" };
        assert_eq!(kind, expected, "{name}");
        assert!(DOCUMENTED.contains(&format!("`{name}")), "{name}");
    }
    agent.terminate()?;
    Ok(())
}

/// What the program drops is no NIC's discard, though veth counts it in `rx_queue_N_xdp_drops`.
#[test]
fn what_xdp_drops_is_not_taken_for_what_a_nic_discards() -> Result<()> {
    let edge = Edge::new()?;
    let configuration =
        format!("mode = \"enforce\"\n{}[[block]]\ncidr = \"192.0.2.1/32\"\n", with_classes([]));
    let agent = Agent::start(&edge.near.netns, &configuration)?;
    edge.send(&[(9, 50)])?;
    let mut ethtool = edge.near.netns.command("ethtool");
    let counters = process::output(ethtool.args(["-S", "edge0"]), PATIENCE)?;
    let counters = String::from_utf8(counters.stdout)?;
    let drops = counters.lines().filter(|line| line.contains("_xdp_drops:"));
    let drops: u64 = drops.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum();
    assert_eq!(drops, 50, "{counters}");
    let metrics = agent.metrics()?;
    let discards: Vec<_> = metrics.matching("limiter_nic_rx_discards_total", &[]).collect();
    let [(labels, value)] = &discards[..] else { panic!("{discards:?}") };
    assert_eq!(
        (labels["interface"].as_str(), labels["counter"].as_str()),
        ("edge0", "rx_missed_errors")
    );
    assert!(value.abs() < 0.5, "{value}");
    agent.terminate()?;
    Ok(())
}

/// The kernel's own account of the memory of a process's BPF maps.
fn memlock(pid: u32) -> Result<u64> {
    let mut maps = BTreeMap::<u64, u64>::new();
    for descriptor in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        // Some are closed while they are listed.
        let Ok(text) = fs::read_to_string(descriptor?.path()) else { continue };
        let field =
            |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        if let (Some(id), Some(memlock)) = (field("map_id:"), field("memlock:")) {
            maps.insert(id, memlock);
        }
    }
    ensure!(!maps.is_empty(), "process {pid} has no maps");
    Ok(maps.values().sum())
}

#[test]
fn the_maps_take_the_memory_that_check_announces() -> Result<()> {
    let edge = Edge::new()?;
    let mut last = 0;
    for (ipv4, ipv6) in
        [(65_536, 65_536), (1_000_000, 65_536), (1_000_000, 1_000_000), (3_000_000, 1_000_000)]
    {
        let configuration = with_classes([1])
            .replace("ipv4_sources = 4096", &format!("ipv4_sources = {ipv4}"))
            .replace("ipv6_sources = 4096", &format!("ipv6_sources = {ipv6}"));
        let agent = Agent::start(&edge.near.netns, &configuration)?;
        let taken = memlock(agent.pid())?;

        let mut check = Command::new(agent::binary()?);
        check.args(["check", "--json"]).arg(agent.configuration());
        let said: Value = serde_json::from_slice(&process::output(&mut check, PATIENCE)?.stdout)?;
        let announced = said["map_memory_bytes"].as_u64().context("map_memory_bytes")?;
        let difference = taken.abs_diff(announced);
        assert!(difference * 20 <= taken, "{ipv4} + {ipv6}: {taken} taken, {announced} announced");

        let status: Value = serde_json::from_str(&agent.get("/v1/status")?)?;
        assert_eq!(status["map_memory_bytes"].as_u64(), Some(announced));
        let metrics = agent.metrics()?;
        for (family, sources) in [("ipv4", ipv4), ("ipv6", ipv6)] {
            let capacity = metrics.sum("limiter_table_capacity", &[("family", family)]);
            assert!((capacity - f64::from(sources)).abs() < 0.5, "{family}: {capacity}");
        }
        // What a source is promised to take at most (its bucket, filters and ceilings, open connections),
        // and the rest.
        let entries = (32 + 2 + 2) * u64::try_from(ipv4)? + (43 + 2 + 2) * u64::try_from(ipv6)?;
        assert!(taken < entries + (12 << 20) && taken > last, "{taken} bytes");
        last = taken;
        agent.terminate()?;
    }
    Ok(())
}

#[test]
fn a_reload_keeps_the_counters_of_each_class() -> Result<()> {
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, &with_classes([0, 1]))?;
    let holds = |expected: &[(&str, f64)]| -> Result<()> {
        let metrics = agent.metrics()?;
        for (class, packets_of) in expected {
            assert!((packets(&metrics, class) - packets_of).abs() < 0.5, "{class}: {metrics:?}");
        }
        Ok(())
    };
    edge.send(&[(1000, 10), (1001, 20)])?;
    holds(&[("c0", 10.0), ("c1", 20.0)])?;

    // A class is added before them.
    agent.reload(&with_classes([2, 0, 1]))?;
    holds(&[("c0", 10.0), ("c1", 20.0), ("c2", 0.0)])?;
    edge.send(&[(1000, 1), (1001, 2), (1002, 3)])?;
    holds(&[("c0", 11.0), ("c1", 22.0), ("c2", 3.0)])?;

    // One is removed: its counters stay, and its packets are the rest's.
    let rest = packets(&agent.metrics()?, "rest");
    agent.reload(&with_classes([2, 1]))?;
    edge.send(&[(1000, 5), (1001, 1)])?;
    holds(&[("c0", 11.0), ("c1", 23.0), ("c2", 3.0)])?;
    assert!(packets(&agent.metrics()?, "rest") >= rest + 5.0);

    // One is renamed: the new name begins at 0.
    agent.reload(&with_classes([2, 1]).replace("\"c1\"", "\"one\""))?;
    holds(&[("c1", 23.0), ("one", 0.0)])?;
    edge.send(&[(1001, 4)])?;
    holds(&[("c1", 23.0), ("one", 4.0)])?;

    // Both come back, and go on from where they were.
    agent.reload(&with_classes([0, 1]))?;
    edge.send(&[(1000, 1), (1001, 1)])?;
    holds(&[("c0", 12.0), ("c1", 24.0), ("one", 4.0), ("c2", 3.0)])?;
    agent.terminate()?;
    Ok(())
}

/// The maps have room for 16 names: then a new one takes the number of one that went away.
#[test]
fn names_that_share_a_number_do_not_share_counters() -> Result<()> {
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, &with_classes([0, 1]))?;
    edge.send(&[(1000, 10), (1001, 5)])?;
    // With these and the rest all numbers are taken.
    agent.reload(&with_classes(2..15))?;
    let mut expected = BTreeMap::from([(0_u16, 10), (1, 5)]);
    let mut last = agent.metrics()?;
    for (step, classes) in
        [&[15, 16][..], &[15, 0], &[1, 0], &[17, 18, 1], &[0, 1], &[15]].iter().enumerate()
    {
        agent.reload(&with_classes(classes.iter().copied()))?;
        for class in *classes {
            let frames = u64::try_from(step)? + 1;
            edge.send(&[(1000 + class, frames)])?;
            *expected.entry(*class).or_default() += frames;
        }
        let metrics = agent.metrics()?;
        for (class, frames) in &expected {
            let found = packets(&metrics, &format!("c{class}"));
            assert!(
                found.to_string() == frames.to_string(),
                "step {step}: c{class} is {found}, sent {frames}"
            );
        }
        for (labels, before) in last.matching("limiter_packets_total", &[]) {
            let labels: Vec<_> =
                labels.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            let now = metrics.sum("limiter_packets_total", &labels);
            assert!(now >= before, "step {step}: {labels:?} went from {before} to {now}");
        }
        last = metrics;
    }
    agent.terminate()?;
    Ok(())
}

#[test]
fn healthz_fails_while_an_interface_is_gone() -> Result<()> {
    let edge = Edge::new()?;
    let configuration = with_classes([1]);
    let agent = Agent::start(&edge.near.netns, &configuration)?;
    assert_eq!(agent.get("/healthz")?, r#"{"status":"ok","problems":[]}"#);

    edge.near.netns.ip(&["link", "delete", "edge0"])?;
    let (status, body) = edge.near.netns.run(|| tcp(b"GET /healthz HTTP/1.0\r\n\r\n"))?;
    assert_eq!(
        (status, body.as_str()),
        (503, r#"{"status":"failing","problems":["edge0 is gone"]}"#)
    );
    // The rest goes on, and a reload is taken, since it may be the one that ends the outage.
    agent.metrics()?;
    agent.reload(&configuration)?;
    let (status, body) = edge.near.netns.run(|| tcp(b"GET /healthz HTTP/1.0\r\n\r\n"))?;
    assert_eq!(status, 503, "{body}");

    veth((&edge.near.netns, "edge0"), (&edge.far.netns, "peer0"), VethOptions::default())?;
    let (status, _) = edge.near.netns.run(|| tcp(b"GET /healthz HTTP/1.0\r\n\r\n"))?;
    assert_eq!(status, 503, "the new edge0 is not guarded yet");
    agent.reload(&configuration)?;
    assert_eq!(agent.get("/healthz")?, r#"{"status":"ok","problems":[]}"#);

    // Somebody detaches the program by force; a reload attaches it again.
    let program = program_of(&edge.near)?.context("it is attached")?;
    let mut show = Command::new("bpftool");
    show.args(["--json", "link", "show"]);
    let output = process::output(&mut show, PATIENCE)?;
    let links: Value = serde_json::from_slice(&output.stdout)?;
    let link = links.as_array().into_iter().flatten().find(|link| link["prog_id"] == program);
    let link = link.context("the link is listed")?["id"].to_string();
    let mut detach = Command::new("bpftool");
    detach.args(["link", "detach", "id", &link]);
    assert!(process::output(&mut detach, PATIENCE)?.status.success());
    let (status, body) = edge.near.netns.run(|| tcp(b"GET /healthz HTTP/1.0\r\n\r\n"))?;
    assert_eq!(status, 503, "{body}");
    assert!(body.contains("the program is no longer attached to edge0"), "{body}");
    agent.reload(&configuration)?;
    assert_eq!(agent.get("/healthz")?, r#"{"status":"ok","problems":[]}"#);
    assert_eq!(program_of(&edge.near)?, Some(program));
    let status: Value = serde_json::from_str(&agent.get("/v1/status")?)?;
    assert_eq!(status["interfaces"][0]["attachment"], "link");
    agent.terminate()?;
    assert_eq!(program_of(&edge.near)?, None);
    Ok(())
}

#[test]
fn the_control_socket_is_for_its_owner_and_group() -> Result<()> {
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, &with_classes([1]))?;
    let socket = fs::metadata(control(&agent))?;
    assert!(socket.file_type().is_socket());
    assert_eq!(socket.mode() & 0o7777, 0o660);
    assert_eq!((socket.uid(), socket.gid()), (0, 0));
    agent.terminate()?;
    Ok(())
}

#[test]
fn clients_that_say_nothing_stop_nobody() -> Result<()> {
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, &with_classes([1]))?;
    let mut silent_tcp = edge
        .near
        .netns
        .run(|| (0..200).map(|_| TcpStream::connect(METRICS)).collect::<Result<Vec<_>, _>>())?;
    let mut silent_unix =
        (0..200).map(|_| UnixStream::connect(control(&agent))).collect::<Result<Vec<_>, _>>()?;
    for stream in &mut silent_tcp[..100] {
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a")?;
    }
    for stream in &mut silent_unix[..100] {
        stream.write_all(b"POST /v1/reload HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc")?;
    }
    let start = Instant::now();
    agent.metrics()?;
    agent.get("/healthz")?;
    assert!(agent.command(&["status"])?.status.success());
    agent.reload(&with_classes([1, 2]))?;
    assert!(start.elapsed() < Duration::from_secs(10), "took {:?}", start.elapsed());
    // Nor do they keep it from ending.
    let start = Instant::now();
    agent.terminate()?;
    assert!(start.elapsed() < Duration::from_secs(10), "took {:?}", start.elapsed());
    Ok(())
}

#[test]
fn requests_that_make_no_sense_are_refused_and_change_nothing() -> Result<()> {
    let edge = Edge::new()?;
    let agent = Agent::start(&edge.near.netns, &with_classes([1]))?;
    // A reload would take this.
    fs::write(agent.configuration(), with_classes([1, 2]))?;
    let before = agent.metrics()?;

    let long_path = format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "a".repeat(100_000));
    let long_header =
        format!("GET /metrics HTTP/1.1\r\nHost: a\r\nA: {}\r\n\r\n", "a".repeat(1 << 20));
    let headers: Vec<_> = (0..1000).map(|i| format!("A{i}: a\r\n")).collect();
    let many_headers = format!("GET /metrics HTTP/1.1\r\nHost: a\r\n{}\r\n", headers.concat());
    let reload =
        |rest: &str| format!("POST /v1/reload HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{rest}");
    let long_body = reload(&format!("Content-Length: {}\r\n\r\n{}", 1 << 20, "a".repeat(1 << 20)));
    let everywhere = [
        "\0\x01\x02\r\n\r\n".to_owned(),
        "HELO example.com\r\n\r\n".to_owned(),
        "GET /metrics HTTP/9.9\r\nHost: a\r\n\r\n".to_owned(),
        "GET /metrics\r\n\r\n".to_owned(),
        "GET /metrics HTTP/1.1\r\nNo Header: a\r\n\r\n".to_owned(),
        "POST /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            .to_owned(),
        "DELETE /v1/status HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".to_owned(),
        "GET /nothing HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".to_owned(),
        "GET /v1/reload HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".to_owned(),
        long_path,
        long_header,
        many_headers,
        long_body,
        reload("Content-Length: -1\r\n\r\n"),
        reload("Content-Length: 1\r\nContent-Length: 2\r\n\r\nab"),
        reload("Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n"),
    ];
    // The metrics listener has no reload at all.
    let reads_only = [reload("Content-Length: 0\r\n\r\n")];
    for request in everywhere.iter().chain(&reads_only) {
        let (status, _) = edge.near.netns.run(|| tcp(request.as_bytes()))?;
        assert!((400..500).contains(&status), "{status} for {request:.80?}");
    }
    for request in &everywhere {
        let stream = UnixStream::connect(control(&agent))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let (status, _) = exchange(stream, request.as_bytes())?;
        assert!((400..500).contains(&status), "{status} for {request:.80?}");
    }

    // A torn request gets no answer, since the one who asked has hung up.
    let mut stream = UnixStream::connect(control(&agent))?;
    stream.write_all(reload("Content-Length: 10\r\n\r\ntorn").as_bytes())?;
    stream.shutdown(Shutdown::Write)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");

    let after = agent.metrics()?;
    for name in [
        "limiter_config_last_reload_success_timestamp_seconds",
        "limiter_config_last_reload_successful",
        "limiter_mode",
    ] {
        let values =
            |metrics: &Metrics| format!("{:?}", metrics.matching(name, &[]).collect::<Vec<_>>());
        assert_eq!(values(&before), values(&after), "{name}");
    }
    let status: Value = serde_json::from_str(&agent.get("/v1/status")?)?;
    assert_eq!(status["config"]["last_reload"], Value::Null, "{status}");
    assert!(!agent.log().contains("panicked"), "{}", agent.log());
    agent.terminate()?;
    Ok(())
}

/// The id of the XDP program on an interface, if there is one.
fn program_of(interface: &Interface) -> Result<Option<u64>> {
    let links = interface.netns.ip(&["-json", "link", "show", "dev", &interface.name])?;
    let links: Value = serde_json::from_str(&links)?;
    Ok(links[0]["xdp"]["prog"]["id"].as_u64())
}

fn control(agent: &Agent) -> PathBuf {
    agent.configuration().with_file_name("control.sock")
}

fn tcp(request: &[u8]) -> Result<(u16, String)> {
    let stream = TcpStream::connect(METRICS)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    exchange(stream, request)
}

/// Sends a request and no more, and returns the status and body of the answer.
fn exchange<S: Read + Write>(mut stream: S, request: &[u8]) -> Result<(u16, String)> {
    let refused = |error: &std::io::Error| {
        matches!(
            error.kind(),
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::NotConnected
        )
    };
    // The answer may come, and the connection end, before all has been sent.
    if let Err(error) = stream.write_all(request)
        && !refused(&error)
    {
        return Err(error.into());
    }
    let mut answer = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(length) => answer.extend_from_slice(&chunk[..length]),
            Err(error) if refused(&error) && !answer.is_empty() => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => thread::yield_now(),
            Err(error) => {
                return Err(error)
                    .context(format!("no answer to {:.80?}", String::from_utf8_lossy(request)));
            }
        }
    }
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .with_context(|| format!("no answer to {:.80?}", String::from_utf8_lossy(request)))?;
    let status = head.split(' ').nth(1).context("no HTTP status")?;
    Ok((status.parse()?, body.to_owned()))
}
