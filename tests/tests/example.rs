//! The example application under abuse, with a real agent beside it: who does not listen to its 429s is
//! dropped in the kernel for a while, unless that would hit a proxy that others need.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use limiter_tests::{
    agent::{self, Agent},
    client::connect_within,
    netns::{Interface, Netns, VethOptions, veth},
};
use nix::sys::{prctl::set_pdeathsig, signal::Signal};
use std::os::unix::process::CommandExt as _;
use tempfile::TempDir;

const SERVER: &str = "198.18.61.1";
const ABUSER: &str = "198.18.61.2";
const PROXY: &str = "198.18.61.3";
const HONEST: &str = "198.18.61.4";
const PORT: u16 = 8080;

/// An answer comes at once or, where packets are dropped, never.
const PATIENCE: Duration = Duration::from_millis(700);
/// How long an abuser may go on before the kernel drops it; reported after 20 refusals, it takes a moment.
const LONGEST_ABUSE: Duration = Duration::from_secs(20);
/// The first penalty, with jitter.
const FIRST_PENALTY: Duration = Duration::from_secs(4);

/// What the application answered.
#[derive(Debug)]
struct Answer {
    code: u16,
    text: String,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        self.text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }
}

/// The application and the agent on a guarded host, and clients in front of it.
struct Stage {
    clients: Interface,
    // Ended in this order.
    application: Application,
    agent: Agent,
    _edge: Interface,
}

struct Application {
    child: Child,
    log: PathBuf,
    _directory: TempDir,
}

impl Application {
    /// What it has said so far.
    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        // Only fails if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Stage {
    fn new() -> Result<Self> {
        let (clients, edge) = veth(
            (&Netns::new("clients")?, "clients0"),
            (&Netns::new("edge")?, "edge0"),
            VethOptions::default(),
        )?;
        for client in [ABUSER, PROXY, HONEST] {
            clients.add_known_address(client.parse()?, 24, &edge)?;
        }
        edge.add_known_address(SERVER.parse()?, 24, &clients)?;
        let directory = tempfile::tempdir()?;
        let socket = directory.path().join("app.sock");
        let agent = Agent::start(
            &edge.netns,
            &format!(
                r#"
mode = "enforce"
[[interface]]
name = "edge0"
[[class]]
name = "rest"
packets = {{ rate = "10000/s", burst = 10000 }}
[application]
socket = "{}"
trusted_proxies = ["{PROXY}/32"]
first_penalty = "{}s"
"#,
                socket.display(),
                FIRST_PENALTY.as_secs()
            ),
        )?;
        let log = directory.path().join("log");
        let mut command = edge.netns.command(agent::program("example-http-429")?);
        command
            .args(["--listen", &format!("{SERVER}:{PORT}"), "--agent"])
            .arg(&socket)
            .args(["--trusted-proxy", &format!("{PROXY}/32")])
            .args(["--per-address", "5", "--report-after", "20"])
            .stdin(Stdio::null())
            .stderr(File::create(&log)?);
        // SAFETY: between fork and exec the closure makes a system call and allocates nothing.
        unsafe { command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?)) };
        let child = command.spawn().context("starting the application")?;
        let application = Application { child, log, _directory: directory };
        let stage = Self { clients, application, agent, _edge: edge };
        let give_up = Instant::now() + Duration::from_secs(10);
        while let Err(error) = stage.ask(HONEST, None) {
            ensure!(Instant::now() < give_up, "{error:#}; it said:\n{}", stage.application.log());
            thread::sleep(Duration::from_millis(50));
        }
        Ok(stage)
    }

    /// A request from `client`, in the name of another if it is a proxy.
    fn ask(&self, client: &str, forwarded: Option<&str>) -> Result<Answer> {
        let client: IpAddr = client.parse()?;
        let server = SocketAddr::new(SERVER.parse()?, PORT);
        let forwarded = forwarded.map(|list| format!("x-forwarded-for: {list}\r\n"));
        let request = format!(
            "GET / HTTP/1.1\r\nhost: example\r\nconnection: close\r\nx-api-key: example\r\n{}\r\n",
            forwarded.unwrap_or_default()
        );
        self.clients.netns.run(|| {
            let mut stream = connect_within(client, server, PATIENCE)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.write_all(request.as_bytes())?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            let code = text.split(' ').nth(1).and_then(|code| code.parse().ok());
            Ok(Answer { code: code.with_context(|| text.clone())?, text })
        })
    }

    /// Asks again and again until there is no answer, and returns how often it was served and how
    /// often refused.
    fn abuse(&self) -> Result<(u32, u32)> {
        let (mut served, mut refused) = (0, 0);
        let give_up = Instant::now() + LONGEST_ABUSE;
        while Instant::now() < give_up {
            match self.ask(ABUSER, None) {
                Ok(Answer { code: 200, .. }) => served += 1,
                Ok(answer) => {
                    ensure!(answer.code == 429, "{answer:?}");
                    let seconds: u64 = answer.header("retry-after").unwrap_or_default().parse()?;
                    ensure!((1..=3).contains(&seconds), "{answer:?}");
                    ensure!(answer.header("ratelimit").is_some(), "{answer:?}");
                    refused += 1;
                }
                Err(_) => return Ok((served, refused)),
            }
            thread::sleep(Duration::from_millis(5));
        }
        bail!(
            "still answered: {served} times served, {refused} refused\n{}",
            self.application.log()
        )
    }

    fn blocked(&self) -> Result<f64> {
        let labels = [("reason", "blocked"), ("action", "drop")];
        Ok(self.agent.metrics()?.sum("limiter_packets_total", &labels))
    }
}

#[test]
fn who_does_not_listen_to_429s_is_dropped_in_the_kernel_and_comes_back() -> Result<()> {
    let stage = Stage::new()?;
    let (served, refused) = stage.abuse()?;
    let began = Instant::now();
    println!("served {served}, refused {refused}");
    ensure!(served >= 5 && refused >= 20, "served {served}, refused {refused}");
    let blocked = stage.blocked()?;
    ensure!(blocked > 0.0, "{}\n{}", stage.application.log(), stage.agent.log());
    ensure!(stage.application.log().contains(&format!("{ABUSER} is blocked until ")));
    // Nobody else is hit.
    let answer = stage.ask(HONEST, None)?;
    ensure!(answer.code == 200, "{answer:?}");
    // It ends by itself.
    let give_up = Instant::now() + 3 * FIRST_PENALTY;
    let answer = loop {
        match stage.ask(ABUSER, None) {
            Ok(answer) => break answer,
            Err(error) => ensure!(Instant::now() < give_up, "never came back: {error:#}"),
        }
    };
    println!("came back after {:?}", began.elapsed());
    ensure!(answer.code == 200, "{answer:?}");
    Ok(())
}

#[test]
fn an_abuser_behind_a_trusted_proxy_meets_the_applications_limit_only() -> Result<()> {
    let stage = Stage::new()?;
    let (abuser, other) = ("203.0.113.9", "203.0.113.10");
    let began = Instant::now();
    let (mut served, mut refused) = (0, 0);
    while refused < 60 || began.elapsed() < Duration::from_secs(3) {
        // What the abuser itself claims stands left of what the proxy saw.
        match stage.ask(PROXY, Some(&format!("192.0.2.7, {abuser}")))?.code {
            200 => served += 1,
            429 => refused += 1,
            code => bail!("answered {code}"),
        }
        ensure!(began.elapsed() < LONGEST_ABUSE, "served {served}, refused {refused}");
    }
    // Its burst of 5 and 5 a second, and one for the clock.
    let allowed = 5.0 + 5.0 * began.elapsed().as_secs_f64() + 1.0;
    ensure!(f64::from(served) <= allowed, "served {served}, of {allowed}");
    let log = stage.application.log();
    ensure!(log.contains(&format!("{PROXY} is not blocked: 4")), "{log}");
    ensure!(log.contains("trusted"), "the reason is not given: {log}");
    ensure!(stage.blocked()? < 0.5, "{}", stage.agent.log());
    let answer = stage.ask(PROXY, Some(other))?;
    ensure!(answer.code == 200, "{answer:?}");
    Ok(())
}
