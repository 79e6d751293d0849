//! `cargo xtask setup`: finds or installs what building, running and testing need.
//!
//! Each step prints one line, does nothing when its thing is there, and fails with the command that
//! a person must run.

use std::{
    cell::Cell,
    env,
    ffi::OsString,
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use xtask::{
    bpf::{Compiler, Linker, TARGET, Toolchain},
    workspace_root,
};

use crate::shell;

const BPFFS: &str = "/sys/fs/bpf";

/// The release that the Debian package is for.
const DEBIAN: &str = "bookworm";

/// Debian packages that tests use, by the program that shows one to be there.
const TEST_TOOLS: &[(&str, &str)] = &[
    ("bpftool", "bpftool"),
    ("ip", "iproute2"),
    ("ethtool", "ethtool"),
    ("busybox", "busybox-static"),
    ("cpio", "cpio"),
    ("debootstrap", "debootstrap"),
    ("gzip", "gzip"),
    ("xz", "xz-utils"),
    ("modprobe", "kmod"),
    ("systemd-analyze", "systemd"),
    ("man", "man-db"),
    ("tcpdump", "tcpdump"),
    ("chromium", "chromium"),
];

/// Packages that make and check the Debian package, likewise.
const PACKING_TOOLS: &[(&str, &str)] = &[
    ("dpkg-shlibdeps", "dpkg-dev"),
    ("gzip", "gzip"),
    ("pandoc", "pandoc"),
    ("strip", "binutils"),
];

/// What the benchmark compares with, likewise.
const PEERS: &[(&str, &str)] =
    &[("nft", "nftables"), ("iptables", "iptables"), ("xdp-filter", "xdp-tools")];

/// Kernels to test on in a VM, by the package that always depends on the current point release (old
/// ones vanish from the mirrors).
const KERNELS: &[(&str, &str)] =
    &[("6.1", "linux-image-cloud-amd64"), ("6.12", "linux-image-6.12-cloud-amd64")];

/// Everything: building, running, testing.
///
/// # Errors
/// When something is missing and cannot be installed.
pub(crate) fn everything() -> Result<()> {
    let setup = Setup::default();
    setup.build()?;
    mount_bpffs()?;
    setup.packages(TEST_TOOLS)?;
    setup.packages(PACKING_TOOLS)?;
    debian()?;
    setup.qemu()?;
    setup.prometheus()?;
    setup.kernels()
}

/// What `cargo build` needs: the BPF compiler and linker.
///
/// # Errors
/// As for [`everything`].
pub(crate) fn build() -> Result<()> {
    Setup::default().build()
}

/// What running the agent or the playground needs.
///
/// # Errors
/// As for [`everything`].
pub(crate) fn running() -> Result<()> {
    let setup = Setup::default();
    setup.build()?;
    mount_bpffs()?;
    setup.packages(&[("ip", "iproute2")])
}

/// What making the Debian package needs.
///
/// # Errors
/// As for [`everything`].
pub(crate) fn packing() -> Result<()> {
    let setup = Setup::default();
    setup.build()?;
    setup.packages(PACKING_TOOLS)
}

/// What the benchmark needs. A peer that cannot be had is left out of the comparison.
///
/// # Errors
/// As for [`everything`], but for the peers.
pub(crate) fn benchmarking() -> Result<()> {
    running()?;
    let setup = Setup::default();
    setup.packages(&[("ethtool", "ethtool")])?;
    for peer in PEERS {
        if let Err(error) = setup.packages(&[*peer]) {
            eprintln!("note: the benchmark goes without {}: {error:#}", peer.0);
        }
    }
    Ok(())
}

/// `PATH` with where administrators' programs and those of set-up are.
///
/// # Errors
/// When a directory cannot be part of it.
pub(crate) fn path_with_tools() -> Result<OsString> {
    let path = env::var_os("PATH").unwrap_or_default();
    let administrators = ["/usr/sbin".into(), "/sbin".into()];
    let all = env::split_paths(&path).chain(administrators).chain([tools_dir()]);
    env::join_paths(all).context("PATH cannot be extended")
}

/// Where set-up puts programs that are taken out of a package without installing it.
pub(crate) fn tools_dir() -> PathBuf {
    workspace_root().join("target/tools")
}

#[derive(Default)]
struct Setup {
    /// Package lists are brought up to date once, and only when something is to be installed.
    lists_are_fresh: Cell<bool>,
}

impl Setup {
    fn build(&self) -> Result<()> {
        if Compiler::all().is_empty() {
            self.install_compiler()?;
        }
        if Toolchain::find().is_err() {
            install_linker()?;
        }
        let toolchain = Toolchain::find()?;
        done("BPF compiler", &toolchain.compiler);
        let Linker { path, version } = &toolchain.linker;
        done("bpf-linker", format_args!("{version} ({})", path.display()));
        Ok(())
    }

    /// Debian's packages; where they cannot be had, the sources of `core` for a rustup nightly.
    fn install_compiler(&self) -> Result<()> {
        let Err(no_packages) = self.install(&["rustc-web", "libstd-rust-web-dev-bpf"]) else {
            return Ok(());
        };
        let mut rustup = Command::new("rustup");
        rustup.args(["component", "add", "rust-src", "--toolchain", "nightly"]);
        let no_nightly = match shell::output(&mut rustup) {
            Ok(_) if !Compiler::all().is_empty() => return Ok(()),
            Ok(_) => anyhow::anyhow!("rust-src did not make the nightly build for {TARGET}"),
            Err(error) => error,
        };
        bail!(
            "no BPF compiler could be installed. Either make this work:\n  \
             apt-get update && apt-get install rustc-web libstd-rust-web-dev-bpf\n({no_packages:#})\n\
             or this:\n  rustup toolchain install nightly --component rust-src\n({no_nightly:#})"
        )
    }

    /// Installs the packages of those programs that are not there.
    fn packages(&self, tools: &[(&str, &str)]) -> Result<()> {
        let missing: Vec<_> = tools
            .iter()
            .filter(|(program, _)| find_program(program).is_none())
            .map(|(_, package)| *package)
            .collect();
        if missing.is_empty() {
            let packages: Vec<_> = tools.iter().map(|(_, package)| *package).collect();
            done("packages", format_args!("{} are there", packages.join(", ")));
            return Ok(());
        }
        self.install(&missing)?;
        done("packages", format_args!("installed {}", missing.join(", ")));
        Ok(())
    }

    /// `prometheus` and `promtool`, taken out of their package: installing that would start a daemon.
    fn prometheus(&self) -> Result<()> {
        const TOOLS: [&str; 2] = ["prometheus", "promtool"];
        let is_there =
            |tool: &&str| find_program(tool).is_some() || tools_dir().join(tool).is_file();
        if TOOLS.iter().all(is_there) {
            done("prometheus", "it and promtool are there");
            return Ok(());
        }
        let unpacked = self.unpack(&["prometheus"], &tools_dir().join("package"))?;
        for tool in TOOLS {
            let there = tools_dir().join(tool);
            fs::copy(unpacked.join("usr/bin").join(tool), &there)
                .with_context(|| format!("the prometheus package has no {tool}"))?;
            done(tool, format_args!("taken from its package: {}", there.display()));
        }
        fs::remove_dir_all(&unpacked).context("cannot remove the unpacked prometheus package")
    }

    /// The emulator that the VMs run on, unpacked with what it needs: installing it would remove the
    /// `qemu-utils` of another release, if there are such.
    fn qemu(&self) -> Result<()> {
        const NAME: &str = "qemu-system-x86_64";
        let tool = tools_dir().join(NAME);
        if let Some(found) = find_program(NAME).or(tool.is_file().then(|| tool.clone())) {
            done("qemu", found.display());
            return Ok(());
        }
        self.refresh_lists()?;
        let mut simulate = Command::new("apt-get");
        simulate.args(["install", "--simulate", "--no-install-recommends", "qemu-system-x86"]);
        let answer = shell::output(&mut simulate)?;
        // "Inst libfdt1 (1.6.1-4+b1 Debian:12 [amd64])"
        let packages: Vec<_> = answer
            .lines()
            .filter_map(|line| line.strip_prefix("Inst ")?.split(' ').next())
            .collect();
        self.unpack(&packages, &tools_dir().join("qemu"))?;
        let script = format!(
            "#!/bin/sh\n\
             root=$(dirname \"$(readlink -f \"$0\")\")/qemu\n\
             libraries=x86_64-linux-gnu\n\
             export LD_LIBRARY_PATH=\"$root/usr/lib/$libraries:$root/lib/$libraries\"\n\
             export QEMU_MODULE_DIR=\"$root/usr/lib/$libraries/qemu\"\n\
             exec \"$root/usr/bin/{NAME}\" \\\n  \
             -L \"$root/usr/share/qemu\" -L \"$root/usr/share/seabios\" \"$@\"\n"
        );
        fs::write(&tool, script)?;
        fs::set_permissions(&tool, Permissions::from_mode(0o755))?;
        done(
            "qemu",
            format_args!("unpacked, with {} packages: {}", packages.len(), tool.display()),
        );
        Ok(())
    }

    fn kernels(&self) -> Result<()> {
        for (series, metapackage) in KERNELS {
            let name = format!("kernel {series}");
            let directory = workspace_root().join("target/kernels").join(series);
            if let Some(image) = kernel_image(&directory) {
                done(&name, image.display());
                continue;
            }
            self.refresh_lists()?;
            let mut depends = Command::new("apt-cache");
            depends.args(["depends", metapackage]);
            let answer = shell::output(&mut depends)?;
            let Some(package) = answer
                .lines()
                .filter_map(|line| line.trim().strip_prefix("Depends: "))
                .find(|package| package.starts_with("linux-image-"))
            else {
                bail!("{metapackage} names no kernel; see `{}`", shell::line(&depends));
            };
            self.unpack(&[package], &directory)?;
            let Some(image) = kernel_image(&directory) else {
                bail!("{package} holds no kernel image");
            };
            done(&name, format_args!("unpacked {package}: {}", image.display()));
        }
        Ok(())
    }

    /// Downloads `packages` and unpacks them to `directory`, which appears whole or not at all.
    fn unpack(&self, packages: &[&str], directory: &Path) -> Result<PathBuf> {
        self.refresh_lists()?;
        let aside = directory.with_extension("unpacking");
        if aside.exists() {
            fs::remove_dir_all(&aside)?;
        }
        fs::create_dir_all(&aside)?;
        let mut download = Command::new("apt-get");
        // apt's own user may not write here.
        download.args(["-o", "APT::Sandbox::User=root", "download"]).args(packages);
        download.current_dir(&aside);
        shell::output(&mut download)?;
        let downloaded = fs::read_dir(&aside)?.flatten().map(|entry| entry.path());
        for file in downloaded.filter(|path| path.extension().is_some_and(|ext| ext == "deb")) {
            shell::output(Command::new("dpkg").arg("-x").args([&file, &aside]))?;
            fs::remove_file(&file)?;
        }
        if directory.exists() {
            fs::remove_dir_all(directory)?;
        }
        fs::rename(&aside, directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        Ok(directory.to_path_buf())
    }

    fn install(&self, packages: &[&str]) -> Result<()> {
        let mut install = Command::new("apt-get");
        install
            .env("DEBIAN_FRONTEND", "noninteractive")
            // Another apt may be at work.
            .args(["-o", "DPkg::Lock::Timeout=300"])
            // A conflict is for a person to decide.
            .args(["install", "--yes", "--no-install-recommends", "--no-remove"])
            .args(packages);
        let by_hand = format!("apt-get update && apt-get install {}", packages.join(" "));
        need_root(&by_hand)?;
        self.refresh_lists()?;
        shell::output(&mut install).with_context(|| {
            format!("{} could not be installed; run `{by_hand}`", packages.join(", "))
        })?;
        Ok(())
    }

    fn refresh_lists(&self) -> Result<()> {
        if self.lists_are_fresh.get() {
            return Ok(());
        }
        let mut update = Command::new("apt-get");
        update.args(["-o", "DPkg::Lock::Timeout=300", "update"]);
        need_root(&shell::line(&update))?;
        if let Err(error) = shell::output(&mut update) {
            // Often a foreign source that is not needed here; what is missing fails below.
            eprintln!("note: not all package lists are up to date: {error:#}");
        }
        self.lists_are_fresh.set(true);
        Ok(())
    }
}

/// A small Debian in a directory, to install the package into a copy of.
fn debian() -> Result<()> {
    let directory = workspace_root().join("target").join(DEBIAN);
    if !directory.exists() {
        let aside = directory.with_extension("unpacking");
        if aside.exists() {
            fs::remove_dir_all(&aside)?;
        }
        let mut debootstrap = Command::new("debootstrap");
        debootstrap.args(["--variant=minbase", DEBIAN]).arg(&aside);
        need_root("cargo xtask setup")?;
        shell::output(&mut debootstrap)?;
        fs::rename(&aside, &directory)?;
    }
    done("Debian", directory.display());
    Ok(())
}

fn mount_bpffs() -> Result<()> {
    let mounts = fs::read_to_string("/proc/mounts").context("cannot read /proc/mounts")?;
    // The last mount at a place is the one that is seen.
    let mounted = mounts.lines().rev().find_map(|mount| {
        let mut fields = mount.split(' ').skip(1);
        (fields.next() == Some(BPFFS)).then(|| fields.next() == Some("bpf"))
    });
    if mounted == Some(true) {
        done("bpffs", format_args!("mounted at {BPFFS}"));
        return Ok(());
    }
    let mut mount = Command::new("mount");
    mount.args(["-t", "bpf", "bpf", BPFFS]);
    need_root(&shell::line(&mount))?;
    shell::output(&mut mount).context("bpffs could not be mounted")?;
    done("bpffs", format_args!("now mounted at {BPFFS}"));
    Ok(())
}

/// Installs the linker that fits the first compiler for which one is known.
fn install_linker() -> Result<()> {
    let compilers = Compiler::all();
    let Some(version) = compilers.iter().find_map(Compiler::pinned_linker) else {
        let names: Vec<_> = compilers.iter().map(ToString::to_string).collect();
        bail!(
            "no bpf-linker is known to fit {}. Install one that does with `cargo install \
             bpf-linker --version …` and add it to the tables in xtask/src/bpf.rs",
            names.join(" or ")
        );
    };
    eprintln!("bpf-linker: installing {version} takes some minutes …");
    let mut install = shell::cargo();
    install
        // Outside of the workspace, so that its rust-toolchain.toml and config do not apply.
        .current_dir(env::temp_dir())
        .args(["install", "bpf-linker", "--version", version, "--locked", "--quiet"]);
    shell::output(&mut install).with_context(|| {
        format!("run `cargo install bpf-linker --version {version} --locked` yourself")
    })?;
    Ok(())
}

fn kernel_image(directory: &Path) -> Option<PathBuf> {
    let boot = fs::read_dir(directory.join("boot")).ok()?;
    boot.flatten().map(|entry| entry.path()).find(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz"))
    })
}

/// Where `program` is; administrators' directories count even if `PATH` lacks them.
fn find_program(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")])
        .map(|directory| directory.join(program))
        .find(|candidate| candidate.is_file())
}

fn need_root(by_hand: &str) -> Result<()> {
    if !shell::is_root() {
        bail!("this needs root; as root, run `cargo xtask setup`, or only: {by_hand}");
    }
    Ok(())
}

fn done(name: &str, what: impl std::fmt::Display) {
    println!("{name}: {what}");
}
