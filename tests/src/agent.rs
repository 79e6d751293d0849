//! The agent as its users run it: the binary, inside a namespace, with a configuration file of the
//! test's own; and what it says on `/metrics`.

use std::{
    collections::BTreeMap,
    env,
    ffi::OsStr,
    fs,
    fs::File,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use nix::{
    sys::{
        prctl::set_pdeathsig,
        signal::{SigSet, Signal, kill},
    },
    unistd::Pid,
};
use tempfile::TempDir;

use crate::netns::Netns;

/// Where the agent serves metrics unless its configuration says otherwise. Each namespace has a
/// loopback interface of its own, so agents do not get in each other's way.
pub const METRICS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9478);

/// Start-up loads a program, which takes seconds where the kernel is emulated.
const START: Duration = Duration::from_mins(1);

/// An end detaches and answers open requests.
const END: Duration = Duration::from_secs(20);

/// A running agent; killed when the handle is dropped, and when the thread that started it ends.
pub struct Agent {
    child: Child,
    netns: Netns,
    directory: Arc<TempDir>,
}

impl Agent {
    /// Starts `limiter-agent run` inside `netns` with this configuration and waits until it says
    /// that it is well. The configuration leaves `[metrics] listen` as it is by default.
    ///
    /// # Errors
    /// If it cannot be started, ends, or is not well in time; with its log.
    pub fn start(netns: &Netns, configuration: &str) -> Result<Self> {
        Self::start_under(&[], netns, configuration)
    }

    /// The same by way of a command that becomes the agent: a program and its arguments, to which
    /// the agent's command line is added.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_under(wrapper: &[&str], netns: &Netns, configuration: &str) -> Result<Self> {
        Self::start_with(wrapper, binary()?, &["--unpinned"], netns, configuration)
    }

    /// Starts it with its maps and attachments pinned in `pins`, a directory of a BPF file system.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_pinned(pins: &Path, netns: &Netns, configuration: &str) -> Result<Self> {
        Self::start_binary(binary()?, pins, netns, configuration)
    }

    /// The same with another binary.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_binary(
        binary: &Path,
        pins: &Path,
        netns: &Netns,
        configuration: &str,
    ) -> Result<Self> {
        let pins = pins.to_str().context("a path in UTF-8")?;
        Self::start_with(&[], binary, &["--pins", pins], netns, configuration)
    }

    fn start_with(
        wrapper: &[&str],
        binary: &Path,
        arguments: &[&str],
        netns: &Netns,
        configuration: &str,
    ) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("limiter-test-").tempdir()?;
        fs::write(directory.path().join("limiter.toml"), configuration)?;
        Self::start_in(Arc::new(directory), wrapper, binary, arguments, netns)
    }

    /// Kills it, as a crash would, and starts it again with the same files and other `arguments` of
    /// `run`, such as `--unpinned`.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn kill_and_start(self, arguments: &[&str]) -> Result<Self> {
        let (directory, netns) = (Arc::clone(&self.directory), self.netns.clone());
        self.kill();
        Self::start_in(directory, &[], binary()?, arguments, &netns)
    }

    /// Ends it by SIGTERM, does something, and starts it again with the same files and these
    /// `arguments` of `run`.
    ///
    /// # Errors
    /// As for [`start`](Self::start) and [`terminate`](Self::terminate), or as `between` says.
    pub fn restart(self, arguments: &[&str], between: impl FnOnce() -> Result<()>) -> Result<Self> {
        let (directory, netns) = (Arc::clone(&self.directory), self.netns.clone());
        self.terminate()?;
        between()?;
        Self::start_in(directory, &[], binary()?, arguments, &netns)
    }

    fn start_in(
        directory: Arc<TempDir>,
        wrapper: &[&str],
        binary: &Path,
        arguments: &[&str],
        netns: &Netns,
    ) -> Result<Self> {
        let log = File::create(directory.path().join("log"))?;
        let mut words = wrapper.iter().map(OsStr::new).chain([binary.as_os_str()]);
        let mut command = netns.command(words.next().context("the agent is a command")?);
        command
            .args(words)
            .arg("run")
            .arg("--config")
            .arg(directory.path().join("limiter.toml"))
            .arg("--control-socket")
            .arg(directory.path().join("control.sock"))
            .arg("--state")
            .arg(directory.path().join("state"))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            // Ctrl-C is for the one who started the agent, who then ends it.
            .process_group(0);
        let prepare = || {
            set_pdeathsig(Signal::SIGKILL)?;
            // Who starts it may keep signals blocked, which a new program would inherit.
            SigSet::empty().thread_set_mask()?;
            Ok(())
        };
        // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
        unsafe { command.pre_exec(prepare) };
        let child = command.spawn().context("starting limiter-agent")?;
        let mut agent = Self { child, netns: netns.clone(), directory };
        agent.wait_until_well()?;
        Ok(agent)
    }

    /// The configuration file, for tests that change it.
    #[must_use]
    pub fn configuration(&self) -> PathBuf {
        self.directory.path().join("limiter.toml")
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has logged.
    #[must_use]
    pub fn log(&self) -> String {
        let log = fs::read(self.directory.path().join("log")).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    /// Scrapes `/metrics`.
    ///
    /// # Errors
    /// If the agent does not answer, or not in the Prometheus text format.
    pub fn metrics(&self) -> Result<Metrics> {
        Metrics::parse(&self.get("/metrics")?)
    }

    /// The body of a successful GET on the metrics listener.
    ///
    /// # Errors
    /// If the agent does not answer with 200; with its log.
    pub fn get(&self, path: &str) -> Result<String> {
        let (status, body) = self
            .netns
            .run(|| get(METRICS, path))
            .with_context(|| format!("GET {path}; the agent's log:\n{}", self.log()))?;
        ensure!(status == 200, "GET {path}: {status}: {body}");
        Ok(body)
    }

    /// Runs `limiter-agent` with `arguments` against this agent's control socket.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn command(&self, arguments: &[&str]) -> Result<Output> {
        self.netns
            .command(binary()?)
            .args(arguments)
            .arg("--control-socket")
            .arg(self.directory.path().join("control.sock"))
            .output()
            .with_context(|| format!("limiter-agent {arguments:?}"))
    }

    /// Starts `limiter-agent` with `arguments` against this agent's control socket, and does not wait. What it
    /// prints is lost.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn client(&self, arguments: &[&str]) -> Result<Child> {
        self.netns
            .command(binary()?)
            .args(arguments)
            .arg("--control-socket")
            .arg(self.directory.path().join("control.sock"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("limiter-agent {arguments:?}"))
    }

    /// Puts another configuration in force by `limiter-agent reload`.
    ///
    /// # Errors
    /// If the agent does not take it; with what it says.
    pub fn reload(&self, configuration: &str) -> Result<()> {
        fs::write(self.configuration(), configuration)?;
        let output = self.command(&["reload"])?;
        ensure!(
            output.status.success(),
            "reload: {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }

    /// Asks for a reload by SIGHUP, and does not wait for it.
    ///
    /// # Errors
    /// If the agent is gone.
    pub fn sighup(&self) -> Result<()> {
        self.signal(Signal::SIGHUP)
    }

    /// Ends it by SIGTERM and returns its log.
    ///
    /// # Errors
    /// If it does not end with exit code 0 in time; with its log.
    pub fn terminate(self) -> Result<String> {
        self.signal(Signal::SIGTERM)?;
        self.end()
    }

    /// Waits for its end and returns its log.
    ///
    /// # Errors
    /// If it does not end with exit code 0 in time; with its log.
    pub fn end(mut self) -> Result<String> {
        let status = self.wait(END)?;
        ensure!(
            status.is_some_and(|status| status.success()),
            "it should have ended: {status:?}; the agent's log:\n{}",
            self.log()
        );
        Ok(self.log())
    }

    /// Ends it by SIGKILL, as a crash would.
    pub fn kill(self) {
        drop(self);
    }

    fn wait_until_well(&mut self) -> Result<()> {
        let give_up = Instant::now() + START;
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("limiter-agent ended with {status}; its log:\n{}", self.log());
            }
            let health = self.netns.run(|| get(METRICS, "/healthz"));
            if matches!(health, Ok((200, _))) {
                return Ok(());
            }
            if Instant::now() > give_up {
                bail!("limiter-agent is not well: {health:?}; its log:\n{}", self.log());
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn wait(&mut self, timeout: Duration) -> Result<Option<ExitStatus>> {
        let give_up = Instant::now() + timeout;
        while Instant::now() < give_up {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(None)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.child.id())?);
        kill(pid, signal).with_context(|| format!("{signal} to the agent"))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One scrape: each sample by its name and labels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics {
    samples: BTreeMap<(String, Labels), f64>,
}

/// Labels by name.
pub type Labels = BTreeMap<String, String>;

impl Metrics {
    /// Reads the Prometheus text format.
    ///
    /// # Errors
    /// If a line is not of that format.
    pub fn parse(text: &str) -> Result<Self> {
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let samples = lines
            .map(|line| sample(line).with_context(|| format!("not a Prometheus sample: {line}")));
        Ok(Self { samples: samples.collect::<Result<_>>()? })
    }

    /// The sum of all samples of `name` that have these labels among theirs; 0 if there is none.
    #[must_use]
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        // Not `sum`, which begins at -0.
        self.matching(name, labels).fold(0.0, |sum, (_, value)| sum + value)
    }

    /// The samples of `name` that have these labels among theirs.
    pub fn matching<'a>(
        &'a self,
        name: &'a str,
        labels: &'a [(&'a str, &'a str)],
    ) -> impl Iterator<Item = (&'a Labels, f64)> {
        self.samples
            .iter()
            .filter(move |((sample, has), _)| {
                let has = |&(key, value): &(&str, &str)| has.get(key).is_some_and(|it| it == value);
                sample == name && labels.iter().all(has)
            })
            .map(|((_, labels), &value)| (labels, value))
    }

    /// What was added to each sample since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let samples = self.samples.iter().map(|(key, value)| {
            let before = earlier.samples.get(key).copied().unwrap_or_default();
            (key.clone(), value - before)
        });
        Self { samples: samples.collect() }
    }
}

/// The agent's binary. Cargo does not tell one package where another's binary is, but puts it
/// beside ours; under cargo's test programs it is built first.
///
/// # Errors
/// If it is not there and cannot be built.
pub fn binary() -> Result<&'static Path> {
    static BINARY: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let found =
        BINARY.get_or_init(|| program("limiter-agent").map_err(|error| format!("{error:#}")));
    found.as_deref().map_err(|error| anyhow!("{error}"))
}

/// Puts the binary of an agent with another ABI version into `directory`.
///
/// # Errors
/// If it cannot be built.
pub fn binary_of_next_abi(directory: &Path) -> Result<PathBuf> {
    let usual = binary()?;
    let profile = usual.parent().context("a program is in a directory")?;
    build(profile, "limiter-agent", &["--features", "next-abi"])?;
    let binary = directory.join("limiter-agent");
    let copied = fs::copy(usual, &binary).context("copying the agent");
    // Cargo has put it in the place of the usual one.
    build(profile, "limiter-agent", &[])?;
    copied?;
    Ok(binary)
}

fn sample(line: &str) -> Result<((String, Labels), f64)> {
    let end = line.find(['{', ' ']).context("no value")?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Labels::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (key, quoted) = rest.split_once("=\"").context("a label without a value")?;
            let (value, after) = unquote(quoted)?;
            labels.insert(key.to_owned(), value);
            rest = after.strip_prefix(',').unwrap_or(after);
        }
        rest = &rest[1..];
    }
    Ok(((name.to_owned(), labels), rest.trim().parse()?))
}

/// The text up to the closing quote, and what follows that.
fn unquote(quoted: &str) -> Result<(String, &str)> {
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Ok((value, &quoted[at + 1..])),
            '\\' => match characters.next().context("ends in a backslash")?.1 {
                'n' => value.push('\n'),
                escaped => value.push(escaped),
            },
            plain => value.push(plain),
        }
    }
    bail!("an open quote")
}

/// The status and body of a GET over HTTP/1.1.
fn get(address: SocketAddr, path: &str) -> Result<(u16, String)> {
    let patience = Duration::from_secs(10);
    let mut stream = TcpStream::connect_timeout(&address, patience)?;
    stream.set_read_timeout(Some(patience))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    let status = head.split(' ').nth(1).context("no HTTP status")?;
    Ok((status.parse()?, body.to_owned()))
}

/// The program of a workspace package of the same name, built as [`binary`] is.
///
/// # Errors
/// As for [`binary`].
pub fn program(package: &str) -> Result<PathBuf> {
    let this = env::current_exe()?;
    let directory = this.parent().context("a program is in a directory")?;
    // Cargo keeps test programs, and only those, in `deps`. It rebuilds them without the agent's
    // binary, so one that is there may be out of date.
    let is_test = directory.ends_with("deps");
    let profile = if is_test { directory.parent().context("deps is below")? } else { directory };
    let binary = profile.join(package);
    if is_test || !binary.exists() {
        build(profile, package, &[])?;
    }
    Ok(binary)
}

fn build(profile: &Path, package: &str, arguments: &[&str]) -> Result<()> {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args(["build", "--quiet", "--package", package, "--bin", package])
        .args(arguments)
        .args(profile.ends_with("release").then_some("--release"))
        .arg("--target-dir")
        .arg(profile.parent().context("a profile has a directory in target")?)
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    let status = cargo.status().with_context(|| format!("building {package}"))?;
    ensure!(status.success(), "building {package}: {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_with_their_labels() {
        let text = "# HELP a_total Some.\n# TYPE a_total counter\n\
                    a_total{class=\"x, \\\"y\\\"\",action=\"drop\"} 12\n\
                    a_total{class=\"z\",action=\"drop\"} 3\n\
                    a_total{class=\"z\",action=\"pass\"} 100\nb 1.5\n";
        let metrics = Metrics::parse(text).expect("is of the format");
        assert!((metrics.sum("a_total", &[("action", "drop")]) - 15.0).abs() < 1e-9);
        assert!((metrics.sum("a_total", &[("class", "x, \"y\"")]) - 12.0).abs() < 1e-9);
        assert!((metrics.sum("b", &[]) - 1.5).abs() < 1e-9);
        assert!(metrics.sum("c", &[]).abs() < 1e-9);
        assert_eq!(metrics.since(&metrics).sum("a_total", &[]).to_bits(), 0.0_f64.to_bits());
        Metrics::parse("a{b=\"c} 1").expect_err("the quote is open");
    }
}
