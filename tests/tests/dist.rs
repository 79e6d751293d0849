//! The Debian package: made by `cargo xtask dist`, installed into a copy of a small Debian that
//! `cargo xtask setup` keeps, upgraded, removed and purged; its unit and its manual pages.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use limiter_tests::{
    agent::{self, Agent},
    bpffs::Bpffs,
    netns::{Netns, VethOptions, veth},
    process,
};
use tempfile::TempDir;

/// For one command; a package may have to be built.
const PATIENCE: Duration = Duration::from_mins(10);

const CONFIGURATION: &str = "etc/limiter/limiter.toml";
const UNIT: &str = "lib/systemd/system/limiter.service";
const RULES: &str = "usr/share/limiter/prometheus/limiter.rules.yml";
const DASHBOARD: &str = "usr/share/limiter/grafana/limiter.json";
/// What `systemctl enable` makes.
const ENABLED: &str = "etc/systemd/system/multi-user.target.wants/limiter.service";

#[test]
fn the_package_installs_upgrades_and_leaves_nothing() -> Result<()> {
    let directory = directory()?;
    let (old, new) = (package(directory.path(), "0.0.1")?, package(directory.path(), "0.0.2")?);
    let root = Root::new(directory.path())?;
    let before = root.files()?;

    root.dpkg("--install", &old)?;
    for file in [CONFIGURATION, UNIT, "usr/bin/limiter-agent", RULES, DASHBOARD] {
        assert!(root.path(file).is_file(), "{file}");
    }
    let checked = root.run("limiter-agent", &["check"])?;
    assert!(checked.starts_with("/etc/limiter/limiter.toml: valid"), "{checked}");
    // It is for the operator to name an interface first.
    assert_eq!(root.systemctl()?, ["--system daemon-reload"]);

    let mine = fs::read_to_string(root.path(CONFIGURATION))?.replace("\"eth0\"", "\"lan0\"");
    fs::write(root.path(CONFIGURATION), &mine)?;
    fs::write(root.path("etc/limiter/limiter.toml.old"), "")?;
    symlink(Path::new("/").join(UNIT), root.path(ENABLED))?;
    root.dpkg("--install", &new)?;
    let version = root.run("dpkg-query", &["--show", "--showformat=${Version}", "limiter"])?;
    assert_eq!(version, "0.0.2");
    assert_eq!(fs::read_to_string(root.path(CONFIGURATION))?, mine);
    assert!(root.path(ENABLED).is_symlink());
    let calls = root.systemctl()?;
    assert!(calls.iter().any(|call| call.contains("try-restart limiter.service")), "{calls:?}");
    assert!(calls.iter().all(|call| !call.contains(" stop ")), "{calls:?}");

    root.let_stopping_fail(true)?;
    let refusal = root.dpkg("--remove", Path::new("limiter"));
    assert!(refusal.is_err(), "an agent that nobody can stop any more");
    assert!(root.path("usr/bin/limiter-agent").is_file());
    root.let_stopping_fail(false)?;

    root.dpkg("--remove", Path::new("limiter"))?;
    let calls = root.systemctl()?;
    assert!(calls.iter().any(|call| call.contains("stop limiter.service")), "{calls:?}");
    let left: Vec<_> = root.files()?.difference(&before).cloned().collect();
    assert_eq!(left, ["etc/limiter", CONFIGURATION, "etc/limiter/limiter.toml.old"]);
    assert_eq!(fs::read_to_string(root.path(CONFIGURATION))?, mine);

    root.dpkg("--purge", Path::new("limiter"))?;
    assert_eq!(root.files()?, before);
    Ok(())
}

/// An upgrade takes nothing away that holds, and a removal leaves nothing attached. (What systemd does in
/// between, this test does: it ends the agent.)
#[test]
fn limits_hold_through_an_upgrade_and_end_with_the_removal() -> Result<()> {
    let directory = directory()?;
    let (old, new) = (package(directory.path(), "0.0.1")?, package(directory.path(), "0.0.2")?);
    let root = Root::new(directory.path())?;
    root.dpkg("--install", &old)?;
    fs::create_dir_all(root.path("sys/fs/bpf"))?;
    let bpffs = Bpffs::at(root.path("sys/fs/bpf"))?;
    let (_peer, edge) = veth(
        (&Netns::new("peer")?, "peer0"),
        (&Netns::new("edge")?, "edge0"),
        VethOptions::default(),
    )?;
    let is_limited =
        || edge.netns.ip(&["link", "show", "dev", "edge0"]).map(|link| link.contains("prog/xdp"));
    let agent = Agent::start_pinned(
        &bpffs.pins(),
        &edge.netns,
        "[[interface]]\nname = \"edge0\"\n\
         [[class]]\nname = \"rest\"\npackets = { rate = \"10/s\", burst = 10 }\n",
    )?;
    root.dpkg("--install", &new)?;
    agent.terminate()?;
    assert!(is_limited()?, "after an upgrade");
    root.dpkg("--remove", Path::new("limiter"))?;
    assert!(!bpffs.pins().exists());
    let give_up = Instant::now() + Duration::from_secs(5);
    while is_limited()? {
        ensure!(Instant::now() < give_up, "still attached after the removal");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

#[test]
fn the_same_sources_make_the_same_package_and_its_pages_read_well() -> Result<()> {
    let directory = directory()?;
    let (one, two) = (directory.path().join("one"), directory.path().join("two"));
    let package_one = package(&one, "0.0.1")?;
    assert!(fs::read(&package_one)? == fs::read(package(&two, "0.0.1")?)?, "they differ");

    let unpacked = directory.path().join("unpacked");
    run(Command::new("dpkg-deb").arg("--extract").args([&package_one, &unpacked]))?;
    let agent = read(&unpacked.join("usr/share/man/man8/limiter-agent.8.gz"))?;
    for words in [
        "SYNOPSIS",
        "--metrics-listen <ADDR>",
        "SIGHUP",
        "EXIT STATUS",
        "/run/limiter/control.sock",
        "SEE ALSO",
    ] {
        assert!(agent.contains(words), "{words}: {agent}");
    }
    let configuration = read(&unpacked.join("usr/share/man/man5/limiter.toml.5.gz"))?;
    for words in ["NAME", "[[interface]]", "ipv4_sources", "default: 1000000", "SEE ALSO"] {
        assert!(configuration.contains(words), "{words}: {configuration}");
    }
    for completion in [
        "bash-completion/completions/limiter-agent",
        "zsh/vendor-completions/_limiter-agent",
        "fish/vendor_completions.d/limiter-agent.fish",
    ] {
        let text = fs::read_to_string(unpacked.join("usr/share").join(completion))?;
        assert!(text.contains("control-socket"), "{completion}");
    }
    Ok(())
}

#[test]
fn the_unit_is_sound_and_exposes_little() -> Result<()> {
    let directory = directory()?;
    let unit = fs::read_to_string(workspace().join("deploy/limiter.service"))?;
    // The package is not installed here.
    let agent = agent::binary()?.to_str().context("a path in UTF-8")?;
    let unit = unit.replace("/usr/bin/limiter-agent", agent);
    let path = directory.path().join("limiter.service");
    fs::write(&path, unit)?;
    let mut verify = Command::new("systemd-analyze");
    let verified = process::output(verify.args(["verify", "--man=no"]).arg(&path), PATIENCE)?;
    assert!(verified.status.success() && verified.stderr.is_empty(), "{verified:?}");
    // In tenths.
    let security = ["security", "--offline=true", "--threshold=30", "--no-pager"];
    run(Command::new("systemd-analyze").args(security).arg(&path))?;
    Ok(())
}

/// A copy of the small Debian, with a systemd that only writes down what it is told.
struct Root(PathBuf);

impl Root {
    fn new(directory: &Path) -> Result<Self> {
        let root = Self(directory.join("debian"));
        let debian = workspace().join("target/bookworm");
        ensure!(debian.is_dir(), "{} is missing: `cargo xtask setup` makes it", debian.display());
        run(Command::new("cp").arg("--archive").args([&debian, &root.0]))?;
        fs::create_dir_all(root.path("run/systemd/system"))?;
        fs::create_dir_all(root.path("etc/systemd/system/multi-user.target.wants"))?;
        root.let_stopping_fail(false)?;
        let systemctl = root.path("usr/local/bin/systemctl");
        fs::set_permissions(systemctl, fs::Permissions::from_mode(0o755))?;
        fs::write(root.path("run/systemctl"), "")?;
        Ok(root)
    }

    fn let_stopping_fail(&self, fail: bool) -> Result<()> {
        let code = u8::from(fail);
        let systemctl = format!(
            "#!/bin/sh\necho \"$*\" >>/run/systemctl\ncase \" $* \" in *' stop '*) exit {code};; esac\n"
        );
        Ok(fs::write(self.path("usr/local/bin/systemctl"), systemctl)?)
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }

    /// Runs dpkg, which can ask nobody. A package is a file beside the root.
    fn dpkg(&self, action: &str, package: &Path) -> Result<String> {
        if !package.is_absolute() {
            return self.run("dpkg", &[action, &package.to_string_lossy()]);
        }
        fs::copy(package, self.path("run/package.deb"))?;
        let said = self.run("dpkg", &[action, "/run/package.deb"]);
        fs::remove_file(self.path("run/package.deb"))?;
        said
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new("chroot");
        command.arg(&self.0).arg(program).args(arguments).env("DEBIAN_FRONTEND", "noninteractive");
        command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        run(&mut command)
    }

    /// What systemd was told since the last call.
    fn systemctl(&self) -> Result<Vec<String>> {
        let calls = fs::read_to_string(self.path("run/systemctl"))?;
        fs::write(self.path("run/systemctl"), "")?;
        Ok(calls.lines().map(str::to_owned).collect())
    }

    /// All files but those in which dpkg keeps its books.
    fn files(&self) -> Result<BTreeSet<String>> {
        let mut find = Command::new("find");
        find.arg(&self.0).args(["-path", "*/var/lib/dpkg", "-prune", "-o", "-printf", "%P\\n"]);
        Ok(run(&mut find)?
            .lines()
            .filter(|path| *path != "var/log/dpkg.log")
            .map(str::to_owned)
            .collect())
    }
}

fn directory() -> Result<TempDir> {
    Ok(tempfile::Builder::new().prefix("limiter-test-").tempdir()?)
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Makes a package of the unoptimised agent.
fn package(output: &Path, version: &str) -> Result<PathBuf> {
    let mut dist = Command::new("cargo");
    dist.current_dir(workspace()).args(["xtask", "dist", "--debug", "--version", version]);
    let said = run(dist.arg("--output").arg(output))?;
    Ok(said.lines().last().context("no package is named")?.into())
}

/// What a manual page looks like; complaints of the typesetter are failures.
fn read(page: &Path) -> Result<String> {
    let mut man = Command::new("man");
    man.env("MANWIDTH", "100").env("LC_ALL", "C.UTF-8").env("GROFF_NO_SGR", "1");
    let output = process::output(man.args(["--warnings", "--local-file"]).arg(page), PATIENCE)?;
    ensure!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

/// Runs a command that must succeed; returns what it printed.
fn run(command: &mut Command) -> Result<String> {
    let output = process::output(command, PATIENCE)?;
    ensure!(output.status.success(), "{command:?}: {output:?}");
    Ok(String::from_utf8(output.stdout)?)
}
