//! The agent as a service manager runs it: with the unit's capabilities, and what it says to the
//! manager.

use std::{
    fs,
    os::unix::{
        fs::{FileTypeExt as _, PermissionsExt as _},
        net::UnixDatagram,
        process::CommandExt as _,
    },
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use limiter_tests::{
    agent,
    netns::{Netns, VethOptions, veth},
};
use nix::{
    sys::{
        prctl::set_pdeathsig,
        signal::{Signal, kill},
    },
    unistd::Pid,
};

const UNIT: &str = include_str!("../../deploy/limiter.service");

/// How long the agent may take to say something; the machine may be busy.
const PATIENCE: Duration = Duration::from_mins(1);

const CONFIGURATION: &str = "[[interface]]\nname = \"edge0\"\n\
    [table]\nipv4_sources = 1024\nipv6_sources = 1024\n\
    [[class]]\nname = \"rest\"\npackets = { rate = \"1000/s\", burst = 1000 }\n";

#[test]
fn a_service_manager_is_told_of_readiness_reloads_life_and_end() -> Result<()> {
    let (netns, peer) = (Netns::new("edge")?, Netns::new("peer")?);
    let _cable = veth((&netns, "edge0"), (&peer, "peer0"), VethOptions::default())?;
    let directory = tempfile::Builder::new().prefix("limiter-test-").tempdir()?;
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755))?;
    let path = |name| directory.path().join(name);
    fs::write(path("limiter.toml"), CONFIGURATION)?;
    let manager = Manager::new(&path("notify"))?;
    // What RuntimeDirectory= makes.
    fs::create_dir(path("run"))?;
    // The tests' own binary may lie where root without its powers may not look.
    fs::copy(agent::binary()?, path("limiter-agent"))?;

    let capabilities: String = unit("CapabilityBoundingSet")?
        .split(' ')
        .map(|capability| capability.replace("CAP_", ",+").to_lowercase())
        .collect();
    let log = path("log");
    let mut command = netns.command("setpriv");
    command
        .args(["--no-new-privs", "--inh-caps=-all"])
        .arg(format!("--bounding-set=-all{capabilities}"))
        .arg(path("limiter-agent"))
        .args(["run", "--unpinned"])
        .arg("--config")
        .arg(path("limiter.toml"))
        .arg("--control-socket")
        .arg(path("run/control.sock"))
        .arg("--state")
        .arg(path("run/state"))
        .env("NOTIFY_SOCKET", path("notify"))
        .env("WATCHDOG_USEC", "1000000")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(&log)?);
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?)) };
    let mut child = command.spawn()?;
    let pid = Pid::from_raw(i32::try_from(child.id())?);
    let said = || fs::read_to_string(&log).unwrap_or_default();
    let attached = || Ok::<_, anyhow::Error>(netns.ip(&["link"])?.contains("prog/xdp"));

    let outcome = (|| {
        // Life may be told before readiness; nothing else is.
        manager.wait("READY=1\n", said)?;
        assert!(attached()?, "ready before it is attached");
        assert!(fs::metadata(path("run/control.sock"))?.file_type().is_socket());

        let start = Instant::now();
        for _ in 0..4 {
            manager.wait("WATCHDOG=1\n", said)?;
        }
        assert!(start.elapsed() > Duration::from_secs(1), "not by a timer");

        kill(pid, Signal::SIGHUP)?;
        let reloading = manager.wait("RELOADING=1\n", said)?;
        let time = reloading.lines().find_map(|line| line.strip_prefix("MONOTONIC_USEC="));
        time.context("no time")?.parse::<u64>()?;
        manager.wait("READY=1\n", said)?;

        kill(pid, Signal::SIGTERM)?;
        manager.wait("STOPPING=1\n", said)?;
        ensure!(child.wait()?.success(), "{}", said());
        assert!(!attached()?);
        assert!(!said().contains("WARN"), "{}", said());
        Ok(())
    })();
    // After a success it has ended.
    let _ = child.kill();
    let _ = child.wait();
    outcome
}

/// The value of a key that the unit has once.
fn unit(key: &str) -> Result<&'static str> {
    let mut values =
        UNIT.lines().filter_map(|line| line.strip_prefix(key).and_then(|v| v.strip_prefix('=')));
    let value = values.next().with_context(|| format!("the unit has no {key}"))?;
    ensure!(values.next().is_none(), "the unit has {key} twice");
    Ok(value)
}

/// The service manager's end of the socket.
struct Manager(UnixDatagram);

impl Manager {
    fn new(path: &Path) -> Result<Self> {
        let socket = UnixDatagram::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o777))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(Self(socket))
    }

    /// The next message that is no sign of life, or is the one that is waited for; it must be that.
    fn wait(&self, beginning: &str, log: impl Fn() -> String) -> Result<String> {
        let give_up = Instant::now() + PATIENCE;
        let mut buffer = [0; 512];
        while Instant::now() < give_up {
            let length = self.0.recv(&mut buffer).with_context(&log)?;
            let message = String::from_utf8_lossy(&buffer[..length]).into_owned();
            if message.starts_with(beginning) {
                return Ok(message);
            }
            ensure!(message == "WATCHDOG=1\n", "{message} in place of {beginning}: {}", log());
        }
        anyhow::bail!("no {beginning}: {}", log())
    }
}
