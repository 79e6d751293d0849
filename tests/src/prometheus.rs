//! A Prometheus of a test's own: Debian's binary, unpacked by `cargo xtask setup`, inside a namespace, with
//! its data in a directory that goes away with it.

use std::{
    collections::BTreeSet,
    env,
    fmt::Write as _,
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::{
    prctl::set_pdeathsig,
    signal::{SigSet, Signal},
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    agent::{Labels, METRICS},
    netns::Netns,
};

/// Where it listens, inside its namespace.
const LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9090);

/// Starting makes files and replays none.
const START: Duration = Duration::from_mins(1);

/// For one answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The file that lists what is scraped, which Prometheus watches.
const TARGETS: &str = "targets.json";

/// A running Prometheus; killed when the handle is dropped, and when the thread that started it ends.
pub struct Prometheus {
    child: Child,
    netns: Netns,
    directory: TempDir,
}

/// A program of the prometheus package.
///
/// # Errors
/// If set-up has not been run.
pub fn tool(name: &str) -> Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools");
    env::split_paths(&path)
        .chain([tools])
        .map(|directory| directory.join(name))
        .find(|candidate| candidate.is_file())
        .with_context(|| format!("there is no {name}; run `cargo xtask setup`"))
}

impl Prometheus {
    /// Starts it inside `netns`. It scrapes the agent there as the job `limiter` and evaluates `rules`, both
    /// each second, and is ready on return.
    ///
    /// # Errors
    /// If it cannot be started, or does not take the rules; with what it logged.
    pub fn start(netns: &Netns, rules: &str) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("limiter-test-").tempdir()?;
        let file = |name: &str| directory.path().join(name);
        fs::write(file("rules.yml"), rules)?;
        // YAML is a superset of JSON.
        let config = json!({
            "global": {
                "scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s",
            },
            "rule_files": [file("rules.yml")],
            "scrape_configs": [{
                "job_name": "limiter",
                "file_sd_configs": [{ "files": [file(TARGETS)], "refresh_interval": "1s" }],
            }],
        });
        fs::write(file("prometheus.yml"), config.to_string())?;
        let log = File::create(file("log"))?;
        let mut command = netns.command(tool("prometheus")?);
        command
            .arg(format!("--config.file={}", file("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", file("data").display()))
            .arg(format!("--web.listen-address={LISTEN}"))
            .args(["--storage.tsdb.wal-segment-size=10MB", "--log.level=warn"])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0);
        let prepare = || {
            set_pdeathsig(Signal::SIGKILL)?;
            // Who starts it may keep signals blocked, which a new program would inherit.
            SigSet::empty().thread_set_mask()?;
            Ok(())
        };
        // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
        unsafe { command.pre_exec(prepare) };
        let child = command.spawn().context("starting prometheus")?;
        let mut prometheus = Self { child, netns: netns.clone(), directory };
        prometheus.scrape(true)?;
        prometheus.wait_until_ready()?;
        Ok(prometheus)
    }

    /// Whether the agent is among what is scraped.
    ///
    /// # Errors
    /// If the list cannot be written.
    pub fn scrape(&self, is_listed: bool) -> Result<()> {
        let targets = if is_listed { json!([{ "targets": [METRICS] }]) } else { json!([]) };
        // It may be read at any moment, so it appears whole.
        let aside = self.directory.path().join("targets.new");
        fs::write(&aside, targets.to_string())?;
        fs::rename(aside, self.directory.path().join(TARGETS))?;
        Ok(())
    }

    /// What an expression is now: a value for each set of labels.
    ///
    /// # Errors
    /// If Prometheus does not take the expression.
    pub fn query(&self, expression: &str) -> Result<Vec<(Labels, f64)>> {
        let path = format!("/api/v1/query?query={}", percent_encoded(expression));
        let data = self.get(&path).with_context(|| format!("query {expression}"))?;
        let rows = data["result"].as_array().context("no list of results")?;
        let sample = |row: &Value| {
            let labels: Labels = serde_json::from_value(row["metric"].clone())?;
            let value = row["value"][1].as_str().context("no value")?.parse()?;
            Ok((labels, value))
        };
        rows.iter().map(sample).collect()
    }

    /// The names of the alerts that fire.
    ///
    /// # Errors
    /// If Prometheus does not answer.
    pub fn firing(&self) -> Result<BTreeSet<String>> {
        let alerts = self.query(r#"ALERTS{alertstate="firing"}"#)?;
        Ok(alerts.into_iter().filter_map(|(mut labels, _)| labels.remove("alertname")).collect())
    }

    /// The rules as Prometheus has understood them.
    ///
    /// # Errors
    /// If Prometheus does not answer.
    pub fn rules(&self) -> Result<Vec<Value>> {
        let data = self.get("/api/v1/rules")?;
        let groups = data["groups"].as_array().context("no groups")?;
        Ok(groups.iter().filter_map(|group| group["rules"].as_array()).flatten().cloned().collect())
    }

    /// What it logged: warnings and errors.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let give_up = Instant::now() + START;
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("prometheus ended with {status}; its log:\n{}", self.log());
            }
            if matches!(self.netns.run(|| get("/-/ready")), Ok((200, _))) {
                return Ok(());
            }
            ensure!(Instant::now() < give_up, "prometheus is not ready; its log:\n{}", self.log());
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// The data of a successful answer.
    fn get(&self, path: &str) -> Result<Value> {
        let (status, body) = self.netns.run(|| get(path))?;
        ensure!(status == 200, "{status}: {body}");
        let mut answer: Value = serde_json::from_str(&body)?;
        Ok(answer["data"].take())
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The status and body of a GET; over HTTP/1.0, whose answers come in one piece.
fn get(path: &str) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&LISTEN, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {LISTEN}\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    let status = head.split(' ').nth(1).context("no HTTP status")?;
    Ok((status.parse()?, body.to_owned()))
}

fn percent_encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut encoded, byte| {
        // A String takes everything.
        let _ = write!(encoded, "%{byte:02X}");
        encoded
    })
}
