//! What is deployed for Prometheus and Grafana, with a real Prometheus that scrapes a real agent under a real
//! flood: the query of each panel returns data, and each alert fires and clears.

use std::{
    collections::BTreeSet,
    fs,
    io::Write as _,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use limiter_tests::{
    agent::Agent,
    frames,
    generator::{Flood, Generator, Order, Sources},
    netns::{Interface, Netns, VethOptions, veth},
    process,
    prometheus::{self, Prometheus},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(30);
/// For an alert to fire or to clear: windows of ten seconds, buckets that refill in as much, on a machine
/// that may be busy.
const ALERT: Duration = Duration::from_mins(1);

const RULES: &str = include_str!("../../deploy/prometheus/limiter.rules.yml");
const RULE_TESTS: &str = include_str!("../../deploy/prometheus/limiter.rules.test.yml");
const DASHBOARD: &str = include_str!("../../deploy/grafana/limiter.json");
const RUNBOOK: &str = include_str!("../../docs/runbook.md");

/// What a flood of one packet for each source, from one source or from forged ones makes fire.
const FLOODED: [&str; 5] = [
    "LimiterDropping",
    "LimiterWouldDropAfterChange",
    "LimiterStrangersRefused",
    "LimiterSumsUnderPressure",
    "LimiterTablePressure",
];

/// Alerts that nothing on a virtual interface makes fire, with the reason.
const NOT_HERE: [(&str, &str); 1] =
    [("LimiterNicDiscards", "virtual interfaces have no NIC that discards")];

fn deployed(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(name)
}

/// Each class has the limits that one flood meets, on a port of its own, and refills in seconds.
fn config(more: &str) -> String {
    format!(
        r#"
mode = "enforce"
default_reserves = []
[[interface]]
name = "edge0"
{more}
[table]
ipv4_sources = 1024
ipv6_sources = 1024
new_sources = {{ rate = "20000/s", burst = 20000 }}
[[class]]
name = "limited"
match = {{ protocol = "udp", ports = [1001] }}
packets = {{ rate = "10/s", burst = 10 }}
[[class]]
name = "watched"
match = {{ protocol = "udp", ports = [1002] }}
packets = {{ rate = "10/s", burst = 10 }}
mode = "observe"
[[class]]
name = "sum"
match = {{ protocol = "udp", ports = [1003] }}
packets = {{ rate = "100000/s", burst = 100000 }}
unproven = {{ rate = "50/s", burst = 1000 }}
[[class]]
name = "strangers"
match = {{ protocol = "udp", ports = [1004] }}
packets = {{ rate = "100/s", burst = 100 }}
new_sources = {{ rate = "10/s", burst = 10 }}
[[class]]
name = "crowd"
match = {{ protocol = "udp", ports = [1005] }}
packets = {{ rate = "30/m", burst = 10 }}
[[class]]
name = "rest"
packets = {{ rate = "1000/s", burst = 1000 }}
"#
    )
}

/// An interface that takes programs in generic mode only.
const SOFT: &str = "[[interface]]\nname = \"soft0\"\nxdp = \"auto\"";

/// The rules with short times instead of minutes: the windows of rates are ten seconds, that of a change
/// twenty, and an alert waits for a second. (The rules as they are are tested by `promtool`.)
fn hurried(rules: &str) -> Result<String> {
    let short = rules
        .replace("[1m]", "[10s]")
        .replace("[5m]", "[10s]")
        .replace("[1h]", "[20s]")
        .replace("offset 1h", "offset 20s");
    let lines = short.lines().map(|line| match line.split_once("for: ") {
        Some((indent, _)) if indent.trim().is_empty() => format!("{indent}for: 1s\n"),
        Some(_) | None => format!("{line}\n"),
    });
    let short: String = lines.collect();
    for unit in ["m]", "h]", "offset 1h", "for: 1m"] {
        ensure!(!short.contains(unit), "a time that is not shortened: {unit}");
    }
    Ok(short)
}

/// A guarded interface, the other end of its cable, the agent and a Prometheus beside it.
struct Stage {
    near: Interface,
    far: Interface,
    agent: Agent,
    prometheus: Prometheus,
}

impl Stage {
    fn new() -> Result<Self> {
        let (near, far) = cable(&Netns::new("edge")?, &Netns::new("peer")?)?;
        near.netns.ip(&["link", "add", "soft0", "type", "bridge"])?;
        near.netns.ip(&["link", "set", "dev", "soft0", "up"])?;
        let agent = Agent::start(&near.netns, &config(""))?;
        let prometheus = Prometheus::start(&near.netns, &hurried(RULES)?)?;
        // A change shows only against what was there before.
        let give_up = Instant::now() + PATIENCE;
        while prometheus.query("limiter_build_info")?.is_empty() {
            ensure!(Instant::now() < give_up, "nothing was scraped; {}", prometheus.log());
            thread::sleep(Duration::from_millis(100));
        }
        Ok(Self { near, far, agent, prometheus })
    }

    /// Waits until each of `alerts` has fired.
    fn fire(&self, alerts: &[&str]) -> Result<()> {
        let mut left: BTreeSet<_> = alerts.iter().copied().collect();
        self.wait(alerts, |firing| {
            left.retain(|it| !firing.contains(*it));
            left.is_empty()
        })
    }

    /// Waits until nothing fires.
    fn clear(&self) -> Result<()> {
        self.wait(&[], BTreeSet::is_empty)
    }

    fn wait(
        &self,
        wanted: &[&str],
        mut is_it: impl FnMut(&BTreeSet<String>) -> bool,
    ) -> Result<()> {
        let start = Instant::now();
        loop {
            let firing = self.prometheus.firing()?;
            if is_it(&firing) {
                let seconds = start.elapsed().as_secs();
                writeln!(std::io::stdout(), "after {seconds} s firing: {firing:?}")?;
                return Ok(());
            }
            if start.elapsed() > ALERT {
                let metrics = self.agent.get("/metrics").unwrap_or_default();
                bail!(
                    "wanted firing: {wanted:?}; do: {firing:?}\n{}\n{metrics}",
                    self.prometheus.log()
                );
            }
            thread::sleep(Duration::from_millis(250));
        }
    }
}

fn cable(near: &Netns, far: &Netns) -> Result<(Interface, Interface)> {
    veth((near, "edge0"), (far, "peer0"), VethOptions::default())
}

/// Floods that take turns on one CPU until they are dropped.
struct Floods {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Floods {
    fn start(near: &Interface, far: &Interface) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, near, far) = (Arc::clone(&stop), near.clone(), far.clone());
        let flood = move || -> Result<()> {
            let first = Ipv4Addr::new(10, 0, 0, 0);
            let forged = Sources::Ipv4 { first, count: 1 << 20, order: Order::Random };
            let crowd = Sources::Ipv4 { first, count: 1_500, order: Order::InTurn };
            let mut generator = Generator::new(&far)?;
            while !stopped.load(Ordering::Relaxed) {
                for (port, sources, frames) in [
                    (1001, Sources::Template, 2_000),
                    (1002, Sources::Template, 2_000),
                    (1003, Sources::Template, 2_000),
                    (1004, forged, 2_000),
                    (1005, crowd, 1_500),
                ] {
                    let path = frames::Path {
                        source_mac: far.mac,
                        destination_mac: near.mac,
                        source: "192.0.2.1:40000".parse()?,
                        destination: SocketAddr::new("192.0.2.2".parse()?, port),
                    };
                    let flood =
                        Flood::new(frames::udp(&path, 18), 20_000.0, Duration::from_secs(5));
                    generator.flood(&flood.sources(sources).frames(frames))?;
                }
            }
            Ok(())
        };
        Self { stop, thread: Some(thread::spawn(flood)) }
    }

    fn end(mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread
            .take()
            .context("it ends once")?
            .join()
            .map_err(|_| anyhow::anyhow!("panicked"))?
    }
}

impl Drop for Floods {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its panic, if any, has been printed.
            let _ = thread.join();
        }
    }
}

/// The panels and variables of the dashboard with their queries.
fn queries() -> Result<Vec<(String, String)>> {
    let dashboard: Value = serde_json::from_str(DASHBOARD)?;
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().context("panels")? {
        let title = panel["title"].as_str().context("a title")?;
        for target in panel["targets"].as_array().into_iter().flatten() {
            queries.push((title.to_owned(), target["expr"].as_str().context("expr")?.to_owned()));
        }
    }
    for variable in dashboard["templating"]["list"].as_array().context("variables")? {
        let Some(query) = variable["query"]["query"].as_str() else { continue };
        let inside = query.strip_prefix("label_values(").and_then(|it| it.rsplit_once(", "));
        let (selector, _) = inside.with_context(|| format!("not understood: {query}"))?;
        queries.push((format!("${}", variable["name"]), selector.to_owned()));
    }
    let substituted = |query: String| {
        let query = query.replace("$__rate_interval", "10s");
        query.replace("$instance", ".*").replace("$interface", ".*")
    };
    Ok(queries.into_iter().map(|(title, query)| (title, substituted(query))).collect())
}

#[test]
fn each_panel_has_data_and_each_alert_fires_and_clears() -> Result<()> {
    let mut stage = Stage::new()?;
    let alerts: BTreeSet<String> = stage
        .prometheus
        .rules()?
        .iter()
        .filter(|rule| rule["type"] == "alerting")
        .filter_map(|rule| Some(rule["name"].as_str()?.to_owned()))
        .collect();
    stage.clear()?;

    // A flood after a reload, and a second reload that fails.
    stage.agent.reload(&config(SOFT))?;
    let floods = Floods::start(&stage.near, &stage.far);
    fs::write(stage.agent.configuration(), "mode = \"fly\"\n")?;
    let refused = stage.agent.command(&["reload"])?;
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let mut fired = [&FLOODED[..], &["LimiterNotNative", "LimiterReloadFailed"]].concat();
    stage.fire(&fired)?;
    let near_limit = stage.agent.get("/metrics")?.contains("reason=\"near_limit\"");
    let skipped = |name: &str, why: &str| writeln!(std::io::stdout(), "skipped: {name}: {why}");
    for (title, query) in queries()? {
        if !near_limit && query.contains("near_limit") {
            skipped(&title, "no packet was counted as near_limit")?;
            continue;
        }
        let found = stage.prometheus.query(&query)?;
        assert!(found.iter().any(|(_, value)| value.is_finite()), "{title}: {query}: {found:?}");
    }
    if near_limit {
        stage.fire(&["LimiterNearLimit"])?;
        fired.push("LimiterNearLimit");
    }
    // An agent that stands still reads no samples.
    let mut capture = stage.agent.client(&["capture", "--rate", "10000/s", "--for", "20s"])?;
    let give_up = Instant::now() + PATIENCE;
    while stage.agent.metrics()?.sum("limiter_events_total", &[]) < 1.0 {
        ensure!(Instant::now() < give_up, "nothing is captured");
        thread::sleep(Duration::from_millis(50));
    }
    let agent = Pid::from_raw(i32::try_from(stage.agent.pid())?);
    kill(agent, Signal::SIGSTOP)?;
    thread::sleep(Duration::from_secs(2));
    kill(agent, Signal::SIGCONT)?;
    fired.push("LimiterEventsLost");
    let lost = stage.fire(&["LimiterEventsLost"]);
    capture.kill()?;
    capture.wait()?;
    lost?;

    floods.end()?;
    stage.agent.reload(&config(""))?;
    stage.clear()?;

    // The kill switch; an interface that goes away, and comes back.
    assert!(stage.agent.command(&["mode", "bypass"])?.status.success());
    stage.near.netns.ip(&["link", "delete", "edge0"])?;
    stage.fire(&["LimiterBypassed", "LimiterNotAttached"])?;
    (stage.near, stage.far) = cable(&stage.near.netns, &stage.far.netns)?;
    stage.agent.reload(&config(""))?;
    assert!(stage.agent.command(&["mode", "config"])?.status.success());
    stage.clear()?;
    fired.extend(["LimiterBypassed", "LimiterNotAttached"]);

    // No agent; then nothing that is to be scraped.
    let Stage { near, far, agent, prometheus } = stage;
    let down = |prometheus: &Prometheus| -> Result<()> {
        let give_up = Instant::now() + ALERT;
        while !prometheus.firing()?.contains("LimiterAgentDown") {
            ensure!(Instant::now() < give_up, "{:?}", prometheus.firing()?);
            thread::sleep(Duration::from_millis(250));
        }
        Ok(())
    };
    let agent = agent.restart(&["--unpinned"], || down(&prometheus))?;
    let stage = Stage { near, far, agent, prometheus };
    stage.clear()?;
    stage.prometheus.scrape(false)?;
    stage.fire(&["LimiterAgentAbsent"])?;
    stage.prometheus.scrape(true)?;
    stage.clear()?;
    fired.extend(["LimiterAgentDown", "LimiterAgentAbsent"]);

    let mut left: Vec<_> = alerts.iter().filter(|it| !fired.contains(&it.as_str())).collect();
    let no_near_limit = ("LimiterNearLimit", "no packet was counted as near_limit");
    for (name, why) in NOT_HERE.into_iter().chain((!near_limit).then_some(no_near_limit)) {
        left.retain(|it| *it != name);
        skipped(name, why)?;
    }
    assert!(left.is_empty(), "never fired: {left:?}");
    stage.agent.terminate()?;
    Ok(())
}

/// As they are, with their own times.
#[test]
fn promtool_tests_each_alert() -> Result<()> {
    for arguments in
        [["check", "rules", "limiter.rules.yml"], ["test", "rules", "limiter.rules.test.yml"]]
    {
        let mut promtool = Command::new(prometheus::tool("promtool")?);
        promtool.args(arguments).current_dir(deployed("prometheus"));
        let output = process::output(&mut promtool, PATIENCE)?;
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success() && said.contains("SUCCESS"), "{said}");
    }
    Ok(())
}

#[test]
fn each_alert_says_what_it_is_and_has_its_place_in_the_runbook() -> Result<()> {
    let netns = Netns::new("rules")?;
    let prometheus = Prometheus::start(&netns, RULES)?;
    let rules = prometheus.rules()?;
    let alerts: Vec<_> = rules.iter().filter(|rule| rule["type"] == "alerting").collect();
    assert!(alerts.len() >= 14, "{}", alerts.len());
    let mut names = Vec::new();
    for alert in alerts {
        let name = alert["name"].as_str().context("a name")?;
        names.push(name);
        let severity = alert["labels"]["severity"].as_str().context("a severity")?;
        assert!(["critical", "warning", "info"].contains(&severity), "{name}: {severity}");
        for annotation in ["summary", "description"] {
            let text = alert["annotations"][annotation].as_str().unwrap_or_default();
            assert!(text.len() > 10, "{name}: {annotation}");
        }
        let url = alert["annotations"]["runbook_url"].as_str().unwrap_or_default();
        assert!(
            url.ends_with(&format!("/docs/runbook.md#{}", name.to_lowercase())),
            "{name}: {url}"
        );
        let section =
            RUNBOOK.split("\n## ").find(|section| section.starts_with(&format!("{name}\n")));
        let section = section.with_context(|| format!("{name} is not in the runbook"))?;
        for part in ["**Means**", "**Look at**", "**Do**"] {
            assert!(section.contains(part), "{name}: {part}");
        }
        let firing = format!("'ALERTS{{alertname=\"{name}\", alertstate=\"firing\", ");
        assert!(RULE_TESTS.contains(&firing), "{name} is not tested to fire");
    }
    // And no section for an alert that is gone.
    let sections = RUNBOOK.split("\n## Limiter").skip(1);
    let sections: Vec<_> = sections.filter_map(|section| section.split('\n').next()).collect();
    for section in sections {
        assert!(names.contains(&format!("Limiter{section}").as_str()), "{section}");
    }
    Ok(())
}

/// What Grafana would refuse, or draw over each other.
#[test]
fn the_dashboard_is_well_formed() -> Result<()> {
    let dashboard: Value = serde_json::from_str(DASHBOARD)?;
    assert!(dashboard["schemaVersion"].as_u64().is_some_and(|it| it >= 39));
    let mut ids = BTreeSet::new();
    let mut taken = BTreeSet::new();
    for panel in dashboard["panels"].as_array().context("panels")? {
        let title = panel["title"].as_str().context("a title")?;
        assert!(ids.insert(panel["id"].as_u64().context("an id")?), "{title}: its id is another's");
        let place = |key: &str| panel["gridPos"][key].as_u64().context("a place");
        let (x, y, w, h) = (place("x")?, place("y")?, place("w")?, place("h")?);
        assert!(x + w <= 24, "{title} is beyond the edge");
        for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            assert!(taken.insert(cell), "{title} covers another at {cell:?}");
        }
        if panel["type"] == "row" {
            continue;
        }
        assert!(panel["description"].as_str().is_some_and(|it| it.len() > 5), "{title}");
        let targets = panel["targets"].as_array().context("targets")?;
        for source in targets.iter().chain([panel]).map(|it| &it["datasource"]["uid"]) {
            assert_eq!(source, "${datasource}", "{title}");
        }
        let mut names = BTreeSet::new();
        assert!(targets.iter().all(|it| names.insert(it["refId"].to_string())), "{title}");
    }
    Ok(())
}
