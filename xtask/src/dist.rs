//! `cargo xtask dist`: the Debian package. The same sources make the same bytes: what is packed is
//! sorted, belongs to root, and has the time of `SOURCE_DATE_EPOCH`, else of the last commit.

mod man;

use std::{
    env, fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use xtask::workspace_root;

use crate::{setup, shell};

const MAINTAINER: &str = "limiter maintainers <maintainers@limiter.invalid>";

/// What to pack, and where to.
#[derive(Args)]
pub(crate) struct Options {
    /// Pack a build without optimisation, for tests
    #[arg(long, hide = true)]
    debug: bool,
    /// The package's version, for tests of upgrades
    #[arg(long, hide = true, default_value = env!("CARGO_PKG_VERSION"))]
    version: String,
    /// The directory for the package, instead of target/dist
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Builds and packs; prints the package's path.
///
/// # Errors
/// When set-up, the build or a tool fails.
pub(crate) fn run(options: &Options) -> Result<()> {
    setup::packing()?;
    let built = build(options.debug)?;
    let output = options.output.clone().unwrap_or(shell::target_dir()?.join("dist"));
    let root = output.join("root");
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    let time = source_time()?;
    let stage = Stage { root };
    stage.fill(options, &built, &time)?;

    let architecture = shell::output(Command::new("dpkg").arg("--print-architecture"))?;
    stage.control(&options.version, architecture.trim())?;
    let name = format!("limiter_{}_{}.deb", options.version, architecture.trim());
    let package = output.join(name);
    // It gives files the time of SOURCE_DATE_EPOCH where theirs is later, which all of these are.
    let mut pack = Command::new("dpkg-deb");
    pack.env("SOURCE_DATE_EPOCH", &time).args(["--root-owner-group", "-Zxz"]);
    pack.args(options.debug.then_some("-z1"));
    shell::output(pack.arg("--build").args([&stage.root, &package]))?;
    fs::remove_dir_all(&stage.root)?;
    println!("{}", package.display());
    Ok(())
}

/// Builds the agent and what its grammar is printed by; returns where they are.
fn build(debug: bool) -> Result<PathBuf> {
    let mut build = shell::cargo();
    // Of the default members: so `cargo test` has made most of a debug build.
    build.args(["build", "--bin", "limiter-agent", "--example", "reference"]);
    build.args((!debug).then_some("--release"));
    shell::run(&mut build)?;
    Ok(shell::target_dir()?.join(if debug { "debug" } else { "release" }))
}

/// Seconds since 1970.
fn source_time() -> Result<String> {
    if let Ok(time) = env::var("SOURCE_DATE_EPOCH") {
        return Ok(time);
    }
    let mut log = Command::new("git");
    log.current_dir(workspace_root()).args(["log", "-1", "--format=%ct"]);
    Ok(shell::output(&mut log)?.trim().to_owned())
}

/// The directory whose content is packed.
struct Stage {
    root: PathBuf,
}

impl Stage {
    fn fill(&self, options: &Options, built: &Path, time: &str) -> Result<()> {
        let source = workspace_root();
        let agent = self.copy(&built.join("limiter-agent"), "usr/bin/limiter-agent", 0o755)?;
        shell::output(Command::new("strip").arg(agent))?;
        self.copy(&source.join("deploy/limiter.toml"), "etc/limiter/limiter.toml", 0o644)?;
        let unit = "lib/systemd/system/limiter.service";
        self.copy(&source.join("deploy/limiter.service"), unit, 0o644)?;
        self.copy(
            &source.join("deploy/debian/copyright"),
            "usr/share/doc/limiter/copyright",
            0o644,
        )?;
        for shared in [
            "deploy/prometheus/limiter.rules.yml",
            "deploy/prometheus/limiter.rules.test.yml",
            "deploy/grafana/limiter.json",
        ] {
            let below = shared.strip_prefix("deploy/").unwrap_or(shared);
            self.copy(&source.join(shared), &format!("usr/share/limiter/{below}"), 0o644)?;
        }
        self.copy(&source.join("docs/runbook.md"), "usr/share/doc/limiter/runbook.md", 0o644)?;
        let changes = changelog(&options.version, time)?;
        self.compressed("usr/share/doc/limiter/changelog.gz", &changes)?;

        let reference = self.root.with_file_name("reference");
        fs::create_dir_all(&reference)?;
        shell::output(Command::new(built.join("examples/reference")).arg(&reference))?;
        for (made, path) in [
            ("limiter-agent.bash", "usr/share/bash-completion/completions/limiter-agent"),
            ("_limiter-agent", "usr/share/zsh/vendor-completions/_limiter-agent"),
            ("limiter-agent.fish", "usr/share/fish/vendor_completions.d/limiter-agent.fish"),
        ] {
            self.copy(&reference.join(made), path, 0o644)?;
        }
        let beginning = fs::read_to_string(reference.join("limiter-agent.man"))?;
        fs::remove_dir_all(reference)?;
        self.compressed("usr/share/man/man8/limiter-agent.8.gz", &man::agent(&beginning)?)?;
        self.compressed("usr/share/man/man5/limiter.toml.5.gz", &man::configuration()?)
    }

    /// What dpkg reads; last, since it speaks of the rest.
    fn control(&self, version: &str, architecture: &str) -> Result<()> {
        let source = workspace_root().join("deploy/debian");
        let template = fs::read_to_string(source.join("control"))?;
        let mut sums = Command::new("sh");
        sums.current_dir(&self.root)
            .args(["-c", "find lib usr -type f -print0 | sort -z | xargs -0 md5sum"]);
        let sums = shell::output(&mut sums)?;
        let size = shell::output(
            Command::new("du").args(["-k", "-s", "--apparent-size"]).arg(&self.root),
        )?;
        let control = template
            .replace("@VERSION@", version)
            .replace("@ARCHITECTURE@", architecture)
            .replace("@MAINTAINER@", MAINTAINER)
            .replace("@SIZE@", size.split_whitespace().next().context("du printed nothing")?)
            .replace("@DEPENDS@", &self.libraries()?);
        self.write("DEBIAN/control", 0o644, control.as_bytes())?;
        self.write("DEBIAN/conffiles", 0o644, b"/etc/limiter/limiter.toml\n")?;
        self.write("DEBIAN/md5sums", 0o644, sums.as_bytes())?;
        for script in ["postinst", "prerm", "postrm"] {
            self.copy(&source.join(script), &format!("DEBIAN/{script}"), 0o755)?;
        }
        Ok(())
    }

    /// The packages of the libraries that the agent is linked with.
    fn libraries(&self) -> Result<String> {
        // It reads the control file of a source package, where there is none.
        let work = self.root.with_file_name("shlibdeps");
        fs::create_dir_all(work.join("debian"))?;
        fs::write(
            work.join("debian/control"),
            "Source: limiter\n\nPackage: limiter\nArchitecture: any\n",
        )?;
        let mut ask = Command::new("dpkg-shlibdeps");
        ask.current_dir(&work).arg("-O").arg(self.root.join("usr/bin/limiter-agent"));
        let answer = shell::output(&mut ask);
        fs::remove_dir_all(&work)?;
        let answer = answer?;
        let depends = answer.trim().strip_prefix("shlibs:Depends=");
        depends.map(str::to_owned).context("dpkg-shlibdeps says nothing")
    }

    fn compressed(&self, path: &str, text: &str) -> Result<()> {
        let mut gzip = Command::new("gzip");
        gzip.args(["-9", "-n", "-c"]);
        self.write(path, 0o644, &shell::filter(&mut gzip, text.as_bytes())?)
    }

    fn copy(&self, from: &Path, to: &str, mode: u32) -> Result<PathBuf> {
        let bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        self.write(to, mode, &bytes)?;
        Ok(self.root.join(to))
    }

    /// Directories are made readable by all, whatever the umask.
    fn write(&self, path: &str, mode: u32, bytes: &[u8]) -> Result<()> {
        let full = self.root.join(path);
        let parent = full.parent().context("a file is in a directory")?;
        fs::create_dir_all(parent)?;
        for directory in parent.ancestors().take_while(|above| above.starts_with(&self.root)) {
            fs::set_permissions(directory, fs::Permissions::from_mode(0o755))?;
        }
        fs::write(&full, bytes)?;
        fs::set_permissions(&full, fs::Permissions::from_mode(mode))?;
        Ok(())
    }
}

/// The newest part of CHANGELOG.md, as Debian writes it.
fn changelog(version: &str, time: &str) -> Result<String> {
    let text = fs::read_to_string(workspace_root().join("CHANGELOG.md"))?;
    let newest = text.split("\n## ").nth(1).context("CHANGELOG.md has no section")?;
    let (_, changes) = newest.split_once('\n').context("CHANGELOG.md has an empty section")?;
    ensure!(changes.contains("- "), "CHANGELOG.md lists nothing in its first section");
    let changes = changes.trim().replace("\n- ", "\n* ").replacen("- ", "* ", 1);
    let changes: Vec<_> = changes.lines().map(|line| format!("  {line}")).collect();
    let mut date = Command::new("date");
    date.env("LC_ALL", "C").args(["--utc", "--rfc-email", "--date", &format!("@{time}")]);
    let date = shell::output(&mut date)?;
    Ok(format!(
        "limiter ({version}) unstable; urgency=medium\n\n{}\n\n -- {MAINTAINER}  {}\n",
        changes.join("\n"),
        date.trim()
    ))
}
