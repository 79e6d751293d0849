//! Starts and reloads that cannot succeed: one sentence with the fix, the right exit code, and
//! nothing left behind.

use std::{
    fs::{self, File},
    io::Write as _,
    net::TcpListener,
    os::unix::{
        fs::{FileTypeExt as _, PermissionsExt as _},
        process::CommandExt as _,
    },
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use limiter_tests::{
    agent::{self, METRICS, Metrics},
    generator::{Counter, Verdict},
    netns::{Interface, Netns, VethOptions, veth},
    process,
};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::{
        prctl::set_pdeathsig,
        signal::{Signal, kill},
    },
    unistd::Pid,
};
use serde_json::Value;
use tempfile::TempDir;

/// For a start to fail or succeed; long, since the machine may be busy.
const PATIENCE: Duration = Duration::from_mins(1);

/// Numbers of capabilities (`linux/capability.h`).
const CAP_NET_ADMIN: libc::c_ulong = 12;
const CAP_SYS_ADMIN: libc::c_ulong = 21;
const CAP_PERFMON: libc::c_ulong = 38;
const CAP_BPF: libc::c_ulong = 39;
const CAP_LAST: libc::c_ulong = 40;

/// A host with two cables to another, and a directory for an agent's files.
struct Host {
    edge: Interface,
    other: Interface,
    /// The other end of its cable.
    peer: Interface,
    directory: TempDir,
}

impl Host {
    fn new() -> Result<Self> {
        let (netns, peer) = (Netns::new("edge")?, Netns::new("peer")?);
        let options = VethOptions::default();
        let (edge, peer0) = veth((&netns, "edge0"), (&peer, "peer0"), options)?;
        let (other, _) = veth((&netns, "edge1"), (&peer, "peer1"), options)?;
        let directory = tempfile::Builder::new().prefix("limiter-test-").tempdir()?;
        Ok(Self { edge, other, peer: peer0, directory })
    }

    fn netns(&self) -> &Netns {
        &self.edge.netns
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn socket(&self) -> PathBuf {
        self.path("control.sock")
    }

    /// `limiter-agent run` with this configuration, no pins, and the host's control socket.
    fn run(&self, configuration: &str) -> Result<Command> {
        fs::write(self.path("limiter.toml"), configuration)?;
        let mut command = self.netns().command(agent::binary()?);
        command.args(["run", "--unpinned", "--config"]).arg(self.path("limiter.toml"));
        command.arg("--state").arg(self.path("state"));
        command.arg("--control-socket").arg(self.socket());
        Ok(command)
    }

    /// Waits for a start to fail, which must leave nothing behind, and returns what it said: one
    /// sentence.
    fn refusal(&self, command: &mut Command, code: i32) -> Result<String> {
        let refusal = refusal_beside(command, code)?;
        self.assert_clean()?;
        Ok(refusal)
    }

    fn assert_clean(&self) -> Result<()> {
        let links = self.netns().ip(&["link", "show"])?;
        assert!(!links.contains("prog/xdp"), "{links}");
        assert!(!self.socket().exists());
        Ok(())
    }

    /// The id of the XDP program on one of the interfaces, if there is one.
    fn program(&self, interface: &Interface) -> Result<Option<u64>> {
        let links = self.netns().ip(&["-json", "link", "show", "dev", &interface.name])?;
        let links: Value = serde_json::from_str(&links)?;
        Ok(links[0]["xdp"]["prog"]["id"].as_u64())
    }

    fn start(&self, configuration: &str) -> Result<Daemon> {
        Daemon::start(self, &mut self.run(configuration)?)
    }

    /// Runs `limiter-agent status --json` or the like.
    fn ask(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = self.netns().command(agent::binary()?);
        command.args(arguments).arg("--control-socket").arg(self.socket());
        process::output(&mut command, PATIENCE)
    }

    fn status(&self) -> Result<Value> {
        let output = self.ask(&["status", "--json"])?;
        ensure!(output.status.success(), "{output:?}");
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

/// Waits for a start to fail and returns what it said, one sentence; others may have left something
/// on purpose.
fn refusal_beside(command: &mut Command, code: i32) -> Result<String> {
    let output = process::output(command, PATIENCE)?;
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert_eq!(text(&output.stdout), "");
    assert_eq!(said.lines().count(), 1, "{said}");
    Ok(said)
}

/// A running agent; killed when the handle is dropped.
struct Daemon {
    child: Child,
    log: PathBuf,
}

impl Daemon {
    fn start(host: &Host, command: &mut Command) -> Result<Self> {
        let log = host.path("log");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
        // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
        unsafe { command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?)) };
        let mut daemon = Self { child: command.spawn()?, log };
        let give_up = Instant::now() + PATIENCE;
        while !host.ask(&["status"])?.status.success() {
            if let Some(status) = daemon.child.try_wait()? {
                bail!("ended with {status}: {}", daemon.log());
            }
            ensure!(Instant::now() < give_up, "no answer: {}", daemon.log());
            thread::sleep(Duration::from_millis(20));
        }
        Ok(daemon)
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn stop(mut self) -> Result<String> {
        kill(Pid::from_raw(i32::try_from(self.child.id())?), Signal::SIGTERM)?;
        let give_up = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                ensure!(status.success(), "{status}: {}", self.log());
                return Ok(self.log());
            }
            ensure!(Instant::now() < give_up, "does not end: {}", self.log());
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A configuration for these interfaces, with small tables.
fn guarding(interfaces: &[(&str, &str)]) -> String {
    let interfaces: Vec<_> = interfaces
        .iter()
        .map(|(name, xdp)| format!("[[interface]]\nname = \"{name}\"\nxdp = \"{xdp}\"\n"))
        .collect();
    format!(
        "{}[table]\nipv4_sources = 1024\nipv6_sources = 1024\n\
         [[class]]\nname = \"rest\"\npackets = {{ rate = \"1000/s\", burst = 1000 }}\n",
        interfaces.concat()
    )
}

fn edge() -> String {
    guarding(&[("edge0", "native")])
}

/// Takes these capabilities from a command, which root has otherwise.
fn without(command: &mut Command, capabilities: impl IntoIterator<Item = libc::c_ulong>) {
    let capabilities: Vec<_> = capabilities.into_iter().collect();
    let drop_them = move || {
        for capability in &capabilities {
            // SAFETY: this prctl takes a number and touches no memory of ours.
            if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, *capability, 0, 0, 0) } != 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes system calls and allocates nothing.
    unsafe { command.pre_exec(drop_them) };
}

#[test]
fn a_missing_capability_is_named() -> Result<()> {
    let host = Host::new()?;
    for (capabilities, missing) in [
        (&[CAP_SYS_ADMIN, CAP_BPF][..], "missing CAP_BPF:"),
        (&[CAP_SYS_ADMIN, CAP_PERFMON], "missing CAP_PERFMON:"),
        (&[CAP_SYS_ADMIN, CAP_NET_ADMIN], "missing CAP_NET_ADMIN:"),
        (
            &[CAP_SYS_ADMIN, CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN],
            "missing CAP_BPF and CAP_PERFMON and CAP_NET_ADMIN:",
        ),
    ] {
        let mut command = host.run(&edge())?;
        without(&mut command, capabilities.iter().copied());
        let said = host.refusal(&mut command, 3)?;
        assert!(said.starts_with(missing), "{said}");
        assert!(said.contains("run as root, or grant them"), "{said}");
    }
    Ok(())
}

#[test]
fn the_documented_capabilities_are_enough() -> Result<()> {
    let host = Host::new()?;
    let needed = [CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN];
    let mut command = host.run(&edge())?;
    without(&mut command, (0..=CAP_LAST).filter(|capability| !needed.contains(capability)));
    let daemon = Daemon::start(&host, &mut command)?;
    let status = host.status()?;
    assert_eq!(status["interfaces"][0]["mode"], "native", "{status}");
    assert_eq!(status["interfaces"][0]["attachment"], "link", "{status}");
    let log = daemon.stop()?;
    assert!(!log.contains("WARN"), "{log}");
    host.assert_clean()
}

#[test]
fn no_bpf_file_system_is_said_with_the_command() -> Result<()> {
    let host = Host::new()?;
    fs::write(host.path("limiter.toml"), edge())?;
    let mut command = host.netns().command(agent::binary()?);
    command.arg("run").arg("--config").arg(host.path("limiter.toml"));
    command.arg("--state").arg(host.path("state")).arg("--control-socket").arg(host.socket());
    let cover = || {
        let none = None::<&str>;
        unshare(CloneFlags::CLONE_NEWNS)?;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        mount(Some("none"), "/sys/fs/bpf", Some("tmpfs"), MsFlags::empty(), none)?;
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes system calls; nix keeps short paths on the
    // stack, so that nothing is allocated.
    unsafe { command.pre_exec(cover) };
    let said = host.refusal(&mut command, 3)?;
    assert!(
        said.starts_with("no BPF file system is mounted at /sys/fs/bpf; fix: mount -t bpf"),
        "{said}"
    );
    Ok(())
}

#[test]
fn somebody_elses_program_is_named_and_stays() -> Result<()> {
    let host = Host::new()?;
    let counter = Counter::attach(&host.edge, Verdict::Pass)?;
    let theirs = host.program(&host.edge)?.context("it is attached")?;
    for xdp in ["native", "generic", "auto"] {
        let mut command = host.run(&guarding(&[("edge1", "native"), ("edge0", xdp)]))?;
        let said = refusal_beside(&mut command, 3)?;
        let named = format!(
            "edge0 already has an XDP program that somebody else attached: id {theirs}, named \
             count_pass; fix: stop the process"
        );
        assert!(said.starts_with(&named), "{said}");
        assert_eq!(host.program(&host.edge)?, Some(theirs), "{xdp}");
        assert_eq!(host.program(&host.other)?, None, "{xdp}");
    }
    drop(counter);
    host.assert_clean()
}

#[test]
fn an_interface_that_does_not_exist_is_named_with_those_that_do() -> Result<()> {
    let host = Host::new()?;
    let mut command = host.run(&guarding(&[("edge0", "native"), ("eth7", "native")]))?;
    let said = host.refusal(&mut command, 3)?;
    let place = format!("{}:4: ", host.path("limiter.toml").display());
    assert!(said.starts_with(&place), "{said}");
    assert!(said.contains("no interface \"eth7\"") && said.contains("edge0"), "{said}");

    let mut command = host.run(&edge())?;
    let said = host.refusal(command.args(["--interface", "eth8"]), 3)?;
    assert!(said.starts_with("--interface eth8: this host has no such interface"), "{said}");
    Ok(())
}

#[test]
fn a_driver_without_native_xdp_is_refused_and_the_first_interface_let_go() -> Result<()> {
    let host = Host::new()?;
    let mut command = host.run(&guarding(&[("edge0", "native"), ("lo", "native")]))?;
    let said = host.refusal(&mut command, 3)?;
    assert!(said.starts_with("native XDP on lo refused (EOPNOTSUPP): "), "{said}");
    assert!(said.contains("set xdp = \"generic\" (slower) or \"auto\""), "{said}");
    Ok(())
}

#[test]
fn too_few_queues_are_refused_and_auto_falls_back() -> Result<()> {
    let host = Host::new()?;
    // veth wants a receive queue for each transmit queue of its peer.
    host.netns().ip(&[
        "link",
        "add",
        "few0",
        "numrxqueues",
        "1",
        "numtxqueues",
        "1",
        "type",
        "veth",
        "peer",
        "name",
        "many0",
        "numrxqueues",
        "1",
        "numtxqueues",
        "4",
    ])?;
    host.netns().ip(&["link", "set", "dev", "few0", "up"])?;
    let mut command = host.run(&guarding(&[("edge0", "native"), ("few0", "native")]))?;
    let said = host.refusal(&mut command, 3)?;
    assert!(said.starts_with("native XDP on few0 refused by driver veth (ENOSPC"), "{said}");
    assert!(said.contains("queues") && said.contains("`ethtool -l few0`"), "{said}");

    let daemon = host.start(&guarding(&[("edge0", "auto"), ("few0", "auto")]))?;
    let interfaces = &host.status()?["interfaces"];
    let modes: Vec<_> =
        interfaces.as_array().into_iter().flatten().map(|it| (&it["name"], &it["mode"])).collect();
    assert_eq!(modes.len(), 2);
    for (name, mode) in modes {
        assert_eq!(mode, if name == "few0" { "generic" } else { "native" }, "{name}");
    }
    let metrics = host.netns().run(scrape)?;
    for (interface, mode) in [("edge0", "native"), ("few0", "generic")] {
        let labels = [("interface", interface), ("mode", mode), ("driver", "veth")];
        assert_eq!(metrics.matching("limiter_interface_info", &labels).count(), 1, "{interface}");
    }
    assert_eq!(metrics.matching("limiter_interface_info", &[]).count(), 2);
    let log = daemon.stop()?;
    let warnings: Vec<_> = log.lines().filter(|line| line.contains("WARN")).collect();
    let [warning] = warnings.as_slice() else { panic!("{log}") };
    assert!(warning.contains("native XDP on few0 refused"), "{warning}");
    assert!(warning.ends_with("attached in generic mode, which is slower"), "{warning}");
    host.assert_clean()
}

/// veth bounds the MTU for programs that take one buffer only (at about 3,500 bytes). Ours takes
/// many, and 17 pages of fragments are more than the largest MTU there is: no MTU is refused.
#[test]
fn no_mtu_of_veth_is_too_large() -> Result<()> {
    let host = Host::new()?;
    for mtu in ["68", "3520", "8901", "9000", "65535"] {
        for xdp in ["native", "generic"] {
            host.netns().ip(&["link", "set", "dev", "edge0", "mtu", mtu])?;
            host.peer.netns.ip(&["link", "set", "dev", "peer0", "mtu", mtu])?;
            let daemon = host.start(&guarding(&[("edge0", xdp)]))?;
            assert_eq!(host.status()?["interfaces"][0]["mode"], xdp, "MTU {mtu}");
            daemon.stop()?;
        }
    }
    host.assert_clean()
}

#[test]
fn a_second_agent_does_not_disturb_the_first() -> Result<()> {
    let host = Host::new()?;
    let daemon = host.start(&edge())?;
    let program = host.program(&host.edge)?;
    assert!(program.is_some());

    // Everything the same: they meet at the metrics address.
    let said = refusal_beside(&mut host.run(&edge())?, 3)?;
    assert!(said.starts_with(&format!("cannot serve metrics on {METRICS}: ")), "{said}");
    assert!(said.contains("--metrics-listen"), "{said}");

    // Another address: at the control socket.
    let mut command = host.run(&edge())?;
    let said = refusal_beside(command.args(["--metrics-listen", "127.0.0.1:9479"]), 3)?;
    let named = format!("another limiter-agent answers on {}; ", host.socket().display());
    assert!(said.starts_with(&named), "{said}");

    // Another socket as well: at the interface.
    let mut command = host.netns().command(agent::binary()?);
    command.args(["run", "--unpinned", "--config"]).arg(host.path("limiter.toml"));
    command.arg("--state").arg(host.path("state"));
    command.arg("--control-socket").arg(host.path("second.sock"));
    let said = refusal_beside(command.args(["--metrics-listen", "127.0.0.1:9479"]), 3)?;
    assert!(said.starts_with("edge0 already has an XDP program"), "{said}");
    assert!(!host.path("second.sock").exists());

    assert_eq!(host.program(&host.edge)?, program);
    assert_eq!(host.status()?["pid"], daemon.child.id());
    daemon.stop()?;
    host.assert_clean()
}

#[test]
fn a_metrics_address_in_use_costs_nothing() -> Result<()> {
    let host = Host::new()?;
    let taken = host.netns().run(|| TcpListener::bind(METRICS))?;
    let said = host.refusal(&mut host.run(&edge())?, 3)?;
    assert!(said.starts_with(&format!("cannot serve metrics on {METRICS}: ")), "{said}");
    drop(taken);
    Ok(())
}

#[test]
fn a_place_without_room_for_a_socket_is_said() -> Result<()> {
    let host = Host::new()?;
    let file = host.path("file");
    fs::write(&file, "precious")?;
    let long = host.path(&"a".repeat(120));
    let nowhere = PathBuf::from("/proc/nowhere/control.sock");
    let below_a_file = file.join("control.sock");
    for path in [&file, &long, &nowhere, &below_a_file] {
        fs::write(host.path("limiter.toml"), edge())?;
        let mut command = host.netns().command(agent::binary()?);
        command.args(["run", "--unpinned", "--config"]).arg(host.path("limiter.toml"));
        command.arg("--state").arg(host.path("state"));
        let said = host.refusal(command.arg("--control-socket").arg(path), 3)?;
        assert!(said.contains(&path.display().to_string()), "{said}");
        assert!(said.contains("give another"), "{said}");
    }
    assert_eq!(fs::read_to_string(&file)?, "precious");
    Ok(())
}

#[test]
fn a_killed_agents_socket_is_in_nobodys_way() -> Result<()> {
    let host = Host::new()?;
    let daemon = host.start(&edge())?;
    let mode = fs::metadata(host.socket())?.permissions().mode();
    assert_eq!(mode & 0o7777, 0o660);
    // Dropped, that is killed.
    drop(daemon);
    assert!(fs::metadata(host.socket())?.file_type().is_socket());
    let output = host.ask(&["status"])?;
    assert_eq!(output.status.code(), Some(3));
    let give_up = Instant::now() + PATIENCE;
    while host.program(&host.edge)?.is_some() {
        assert!(Instant::now() < give_up, "the program outlives its agent");
        thread::sleep(Duration::from_millis(20));
    }

    // One that fails leaves the file alone or removes it; one that starts takes its place.
    refusal_beside(&mut host.run(&guarding(&[("eth7", "native")]))?, 3)?;
    let daemon = host.start(&edge())?;
    assert_eq!(host.status()?["pid"], daemon.child.id());
    daemon.stop()?;
    host.assert_clean()
}

#[test]
fn a_wrong_configuration_exits_with_1_and_says_all() -> Result<()> {
    let host = Host::new()?;
    let wrong = edge().replace("1000/s", "0/s").replace("edge0", "").replace("1024", "12");
    let output = process::output(&mut host.run(&wrong)?, PATIENCE)?;
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let name = host.path("limiter.toml").display().to_string();
    let lines: Vec<_> = said
        .lines()
        .filter_map(|line| line.strip_prefix(&format!("{name}:"))?.split(':').next())
        .collect();
    assert_eq!(lines, ["2", "5", "6", "9"], "{said}");
    host.assert_clean()?;

    fs::remove_file(host.path("limiter.toml"))?;
    let mut command = host.netns().command(agent::binary()?);
    command.args(["run", "--unpinned", "--config"]).arg(&name);
    command.arg("--control-socket").arg(host.socket());
    command.arg("--state").arg(host.path("state"));
    let said = host.refusal(&mut command, 1)?;
    assert!(said.starts_with(&format!("cannot read {name}: ")), "{said}");
    Ok(())
}

#[test]
fn a_reload_that_cannot_attach_changes_nothing() -> Result<()> {
    let host = Host::new()?;
    let daemon = host.start(&edge())?;
    let program = host.program(&host.edge)?;
    // The new interfaces are edge1, which could be had, and lo, which cannot; the rate is new too.
    let wanted = guarding(&[("edge0", "native"), ("edge1", "native"), ("lo", "native")]);
    fs::write(host.path("limiter.toml"), wanted.replace("1000/s", "7/s"))?;
    let output = host.ask(&["reload"])?;
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("native XDP on lo refused"), "{said}");

    let status = host.status()?;
    assert_eq!(status["interfaces"].as_array().map(Vec::len), Some(1), "{status}");
    assert_eq!(status["classes"][0]["packets"]["per_second"], 1000.0, "{status}");
    assert_eq!(status["config"]["last_reload"]["successful"], false, "{status}");
    assert_eq!(host.program(&host.edge)?, program);
    assert_eq!(host.program(&host.other)?, None);

    // Without lo it is taken.
    let wanted = guarding(&[("edge0", "native"), ("edge1", "native")]);
    fs::write(host.path("limiter.toml"), wanted)?;
    assert!(host.ask(&["reload"])?.status.success());
    assert_eq!(host.program(&host.other)?, program);
    // And back: edge1 is let go.
    fs::write(host.path("limiter.toml"), edge())?;
    assert!(host.ask(&["reload"])?.status.success());
    assert_eq!(host.program(&host.other)?, None);
    daemon.stop()?;
    host.assert_clean()
}

#[test]
fn a_log_that_nobody_reads_any_more_does_not_end_the_agent() -> Result<()> {
    let host = Host::new()?;
    let mut command = host.run(&edge())?;
    let (reader, writer) = std::io::pipe()?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(writer);
    let mut daemon = Daemon { child: command.spawn()?, log: host.path("log") };
    // The command holds a copy of the writing end.
    drop(command);
    drop(reader);
    let give_up = Instant::now() + PATIENCE;
    while !host.ask(&["reload"])?.status.success() {
        assert!(Instant::now() < give_up && daemon.child.try_wait()?.is_none(), "it has ended");
        thread::sleep(Duration::from_millis(20));
    }
    daemon.stop()?;
    host.assert_clean()
}

/// 16 million sources of each family, the most that a configuration may ask for: 1.3 GiB.
#[test]
fn the_largest_tables_load() -> Result<()> {
    const NEEDED: u64 = 3 << 30;
    let available = limiter_agent::host::available_memory().context("MemAvailable")?;
    if available < NEEDED {
        // Past the capture of the test runner, which sums these up.
        writeln!(
            std::io::stdout(),
            "skipped: the_largest_tables_load: {} MiB of memory available, {} wanted",
            available >> 20,
            NEEDED >> 20
        )?;
        return Ok(());
    }
    let host = Host::new()?;
    let daemon = host.start(&edge().replace("1024", "16777216"))?;
    let status = host.status()?;
    assert_eq!(status["tables"][0]["capacity"], 16_777_216, "{status}");
    assert!(status["map_memory_bytes"].as_u64() > Some(5 << 28), "{status}");
    daemon.stop()?;
    host.assert_clean()
}

/// What the agent of this namespace says on `/metrics`.
fn scrape() -> Result<Metrics> {
    use std::io::Read as _;
    let mut stream = std::net::TcpStream::connect(METRICS)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Metrics::parse(answer.split_once("\r\n\r\n").context("no HTTP answer")?.1)
}
