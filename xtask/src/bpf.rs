//! Finds a compiler and a linker for the BPF target and builds an eBPF package with them.
//!
//! A compiler serves when it has, or can build, `core` for the BPF target: a rustup nightly with
//! `rust-src`, or Debian's `rustc-web` with `libstd-rust-web-dev-bpf`. A linker serves when its
//! LLVM reads what the compiler's LLVM writes.

use std::{
    env,
    ffi::{OsStr, OsString},
    fmt, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::workspace_root;

/// The target triple of every eBPF object here.
pub const TARGET: &str = "bpfel-unknown-none";

/// Where `rustc-web` puts its compiler.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// The `bpf-linker` to install for a compiler's LLVM, each pair tried.
const PINNED_LINKERS: &[(u32, &str)] = &[(22, "0.10.3")];

/// The newest LLVM that a `bpf-linker` release series understands.
const LINKER_LLVM: &[(&str, u32)] = &[("0.10.", 22), ("0.11.", 23)];

/// A compiler and a linker that fit each other.
#[derive(Debug)]
pub struct Toolchain {
    pub compiler: Compiler,
    pub linker: Linker,
}

/// A compiler with `core` for the BPF target.
#[derive(Debug)]
pub struct Compiler {
    pub kind: CompilerKind,
    pub release: String,
    /// The LLVM version in full, such as `22.1.8`.
    pub llvm: String,
}

/// Where a compiler comes from, which decides how it gets its `core`.
#[derive(Debug)]
pub enum CompilerKind {
    /// A rustup nightly at this directory, with `rust-src`: `core` is built along.
    Nightly(PathBuf),
    /// Debian's `rustc-web`, with a ready-made `core`.
    Debian,
}

/// A `bpf-linker` executable.
#[derive(Debug)]
pub struct Linker {
    pub path: PathBuf,
    pub version: String,
}

impl Toolchain {
    /// The first compiler and linker that are there and fit.
    ///
    /// # Errors
    /// Says what is missing, as the cause of an error that names `cargo xtask setup`.
    pub fn find() -> Result<Self> {
        Self::look().map_err(|reason| {
            anyhow!(
                "cannot build eBPF programs: {reason}. \
                 Run `cargo xtask setup` as root: it installs what is missing."
            )
        })
    }

    fn look() -> Result<Self> {
        let compilers = Compiler::all();
        if compilers.is_empty() {
            bail!(
                "no compiler for {TARGET} (neither a rustup nightly with rust-src \
                 nor Debian's rustc-web with libstd-rust-web-dev-bpf)"
            );
        }
        let linkers = Linker::all();
        if linkers.is_empty() {
            bail!("bpf-linker is neither in PATH nor in cargo's bin directory");
        }
        for compiler in compilers {
            for linker in &linkers {
                if linker.fits(&compiler) {
                    let linker =
                        Linker { path: linker.path.clone(), version: linker.version.clone() };
                    return Ok(Self { compiler, linker });
                }
            }
        }
        let versions: Vec<_> = linkers.iter().map(|linker| linker.version.as_str()).collect();
        bail!("bpf-linker {} does not fit the LLVM of any BPF compiler here", versions.join(", "))
    }
}

impl Compiler {
    /// Every compiler here that can build for the BPF target, the preferred one first.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut kinds: Vec<_> = nightlies().into_iter().map(CompilerKind::Nightly).collect();
        kinds.push(CompilerKind::Debian);
        kinds.into_iter().filter_map(Self::probe).collect()
    }

    /// The `bpf-linker` version to install for this compiler, if one is known to fit.
    #[must_use]
    pub fn pinned_linker(&self) -> Option<&'static str> {
        let llvm = self.llvm_major()?;
        PINNED_LINKERS.iter().find(|(major, _)| *major == llvm).map(|(_, version)| *version)
    }

    fn probe(kind: CompilerKind) -> Option<Self> {
        let rustc = kind.rustc();
        let verbose_version = output_of(Command::new(&rustc).arg("-vV"))?;
        let field = |name: &str| {
            verbose_version.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned)
        };
        let compiler = Self { release: field("release: ")?, llvm: field("LLVM version: ")?, kind };
        let has_core = match &compiler.kind {
            CompilerKind::Nightly(root) => root.join("lib/rustlib/src/rust/library/core").is_dir(),
            CompilerKind::Debian => {
                let args = ["--print", "target-libdir", "--target", TARGET];
                let directory = output_of(Command::new(&rustc).args(args))?;
                names_in(Path::new(directory.trim())).any(|name| name.starts_with("libcore-"))
            }
        };
        has_core.then_some(compiler)
    }

    fn llvm_major(&self) -> Option<u32> {
        self.llvm.split('.').next()?.parse().ok()
    }

    /// The compiler's own LLVM library. `bpf-linker` opens at run time whichever it meets first in
    /// `LD_LIBRARY_PATH`, so it must be told.
    fn llvm_library(&self) -> Option<PathBuf> {
        let root = match &self.kind {
            CompilerKind::Nightly(root) => root.as_path(),
            CompilerKind::Debian => Path::new("/usr"),
        };
        let prefix = format!("libLLVM.so.{}", self.llvm_major()?);
        let multiarch = format!("lib/{}-linux-gnu", env::consts::ARCH);
        [root.join("lib"), root.join(multiarch)].into_iter().find_map(|directory| {
            let name = names_in(&directory).find(|name| name.starts_with(&prefix))?;
            Some(directory.join(name))
        })
    }
}

impl CompilerKind {
    fn rustc(&self) -> PathBuf {
        match self {
            Self::Nightly(root) => root.join("bin/rustc"),
            Self::Debian => PathBuf::from(DEBIAN_RUSTC),
        }
    }
}

impl fmt::Display for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            CompilerKind::Nightly(root) => {
                write!(f, "rustup's {}", root.file_name().unwrap_or_default().display())?;
            }
            CompilerKind::Debian => write!(f, "Debian's rustc-web")?,
        }
        write!(f, " (rustc {}, LLVM {})", self.release, self.llvm)
    }
}

impl Linker {
    /// Every `bpf-linker` in `PATH` and in cargo's bin directory.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let path = env::var_os("PATH").unwrap_or_default();
        let mut directories: Vec<_> = env::split_paths(&path).collect();
        directories.extend(home("CARGO_HOME", ".cargo").map(|home| home.join("bin")));
        let mut linkers: Vec<Self> = Vec::new();
        for path in directories.into_iter().map(|directory| directory.join("bpf-linker")) {
            if linkers.iter().all(|known| known.path != path)
                && let Some(answer) = output_of(Command::new(&path).arg("--version"))
                && let Some(version) = answer.split_whitespace().nth(1)
            {
                linkers.push(Self { path, version: version.to_owned() });
            }
        }
        linkers
    }

    /// Whether this linker's LLVM reads what `compiler` writes: LLVM reads its own and older
    /// bitcode, never newer.
    #[must_use]
    pub fn fits(&self, compiler: &Compiler) -> bool {
        let linker_llvm = LINKER_LLVM
            .iter()
            .find(|(series, _)| self.version.starts_with(series))
            .map(|(_, llvm)| *llvm);
        linker_llvm >= compiler.llvm_major() && compiler.llvm_major().is_some()
    }
}

/// Builds binary `bin` of eBPF package `package` for a build script, which hands the object's
/// path to its crate in the environment variable `variable`.
///
/// # Errors
/// When the toolchain is missing (the error names `cargo xtask setup`) or the build fails.
pub fn embed(package: &str, bin: &str, variable: &str) -> Result<()> {
    let out_dir = env::var_os("OUT_DIR").context("OUT_DIR is not set: not a build script")?;
    let toolchain = Toolchain::find()?;
    let object = build(&toolchain, package, bin, Path::new(&out_dir))?;

    let root = workspace_root();
    let package_dir = package_dir(&root, package)?;
    let sources = [
        package_dir.join("src"),
        package_dir.join("Cargo.toml"),
        root.join("limiter-common/src"),
        root.join("limiter-common/Cargo.toml"),
        root.join("Cargo.toml"),
        root.join("Cargo.lock"),
        toolchain.compiler.kind.rustc(),
        toolchain.linker.path,
    ];
    for source in sources {
        println!("cargo:rerun-if-changed={}", source.display());
    }
    println!("cargo:rustc-env={variable}={}", object.display());
    Ok(())
}

/// Builds binary `bin` of eBPF package `package` and copies the object to `out_dir`; returns the
/// copy's path. What the inner cargo reports goes to stderr.
///
/// # Errors
/// When the inner cargo cannot run or fails, or the object cannot be copied.
pub fn build(toolchain: &Toolchain, package: &str, bin: &str, out_dir: &Path) -> Result<PathBuf> {
    let target_dir = inner_target_dir(out_dir);
    let rustflags = [
        "-Dwarnings",
        "-Ctarget-cpu=v3",
        "-Clink-arg=--btf",
        &format!("-Clinker={}", toolchain.linker.path.display()),
    ];
    let mut command = match &toolchain.compiler.kind {
        CompilerKind::Nightly(root) => Command::new(root.join("bin/cargo")),
        // rustc-web brings no cargo; any will do.
        CompilerKind::Debian => Command::new(env::var_os("CARGO").unwrap_or("cargo".into())),
    };
    clean_environment(&mut command);
    command
        .current_dir(workspace_root())
        .args(["build", "--quiet", "--locked", "--release", "--target", TARGET])
        .args(["--package", package, "--bin", bin])
        .arg("--target-dir")
        .arg(&target_dir)
        .env("RUSTC", toolchain.compiler.kind.rustc())
        // Empty means none: a wrapper from the user's cargo config would meet a foreign compiler.
        .env("RUSTC_WRAPPER", "")
        .env("RUSTC_WORKSPACE_WRAPPER", "")
        .env("CARGO_ENCODED_RUSTFLAGS", rustflags.join("\x1f"))
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    match toolchain.compiler.kind {
        CompilerKind::Nightly(_) => command.args(["-Z", "build-std=core"]),
        // aya-ebpf switches on unstable features.
        CompilerKind::Debian => command.env("RUSTC_BOOTSTRAP", "1"),
    };
    if let Some(library) = toolchain.compiler.llvm_library() {
        command.env("LD_LIBRARY_PATH", llvm_dir(&target_dir, &library)?);
    }

    let status = command.status().context("cannot run cargo for the eBPF object")?;
    if !status.success() {
        bail!("{package} did not build with {}; the messages above say why", toolchain.compiler);
    }
    let built = target_dir.join(TARGET).join("release").join(bin);
    let object = out_dir.join(format!("{bin}.bpf.o"));
    fs::create_dir_all(out_dir)
        .and_then(|()| fs::copy(&built, &object))
        .with_context(|| format!("cannot copy {} to {}", built.display(), object.display()))?;
    Ok(object)
}

/// Toolchain directories of the rustup nightlies, the undated one first.
fn nightlies() -> Vec<PathBuf> {
    let Some(toolchains) = home("RUSTUP_HOME", ".rustup").map(|home| home.join("toolchains"))
    else {
        return Vec::new();
    };
    let mut names: Vec<_> =
        names_in(&toolchains).filter(|name| name.starts_with("nightly")).collect();
    // A digit sorts before the architecture's letter.
    names.sort_unstable_by(|a, b| b.cmp(a));
    names.into_iter().map(|name| toolchains.join(name)).collect()
}

fn home(variable: &str, default: &str) -> Option<PathBuf> {
    let fallback = || env::home_dir().map(|home| home.join(default));
    env::var_os(variable).map(PathBuf::from).or_else(fallback)
}

/// The inner cargo's own target directory: it must not be the outer one, which is locked. One for
/// the whole workspace, so that debug, release and clippy builds share the object's dependencies.
fn inner_target_dir(out_dir: &Path) -> PathBuf {
    let outer = out_dir.ancestors().find(|ancestor| ancestor.join("CACHEDIR.TAG").is_file());
    outer.unwrap_or(out_dir).join("bpf")
}

/// A directory with nothing but the LLVM library in it, for `bpf-linker` to find.
fn llvm_dir(target_dir: &Path, library: &Path) -> Result<PathBuf> {
    let directory = target_dir.join("llvm");
    let link = directory.join("libLLVM.so");
    if fs::read_link(&link).is_ok_and(|there| there == library) {
        return Ok(directory);
    }
    // Another build may do the same at the same time, so the link is made aside and moved.
    let aside = directory.join(format!("new-{}", std::process::id()));
    fs::create_dir_all(&directory)
        .and_then(|()| std::os::unix::fs::symlink(library, &aside))
        .and_then(|()| fs::rename(&aside, &link))
        .with_context(|| format!("cannot link {} to {}", link.display(), library.display()))?;
    Ok(directory)
}

fn package_dir(root: &Path, package: &str) -> Result<PathBuf> {
    match package {
        "limiter-ebpf" => Ok(root.join("limiter-ebpf")),
        "limiter-tests-ebpf" => Ok(root.join("tests/ebpf")),
        other => bail!("{other} is not an eBPF package of this workspace"),
    }
}

/// Takes away what the outer cargo (or clippy, nextest, a user's shell) says about a build, which
/// is not this one. Where crates come from stays.
fn clean_environment(command: &mut Command) {
    for (name, _) in env::vars_os() {
        if is_outer_build(&name) {
            command.env_remove(name);
        }
    }
}

fn is_outer_build(name: &OsStr) -> bool {
    const KEEP: &[&str] =
        &["CARGO_HOME", "CARGO_HTTP_", "CARGO_NET_", "CARGO_REGISTR", "CARGO_SOURCE_"];
    const DROP: &[&str] = &[
        "CARGO",
        "CLIPPY",
        "DEP_",
        "MAKEFLAGS",
        "MFLAGS",
        "NEXTEST",
        "RUSTC",
        "RUSTDOC",
        "RUSTFLAGS",
        "RUSTUP_TOOLCHAIN",
        "__CARGO",
    ];
    const DROP_EXACTLY: &[&str] =
        &["DEBUG", "HOST", "NUM_JOBS", "OPT_LEVEL", "OUT_DIR", "PROFILE", "TARGET"];
    let name = name.to_string_lossy();
    let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    DROP_EXACTLY.contains(&&*name) || (starts(DROP) && !starts(KEEP))
}

fn output_of(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn names_in(directory: &Path) -> impl Iterator<Item = String> + use<> {
    fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name())
        .filter_map(|name: OsString| name.into_string().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compiler(llvm: &str) -> Compiler {
        Compiler { kind: CompilerKind::Debian, release: "1.96.0".into(), llvm: llvm.into() }
    }

    fn linker(version: &str) -> Linker {
        Linker { path: "bpf-linker".into(), version: version.into() }
    }

    #[test]
    fn a_linker_reads_its_own_and_older_bitcode() {
        assert!(linker("0.10.3").fits(&compiler("22.1.8")));
        assert!(linker("0.11.0").fits(&compiler("22.1.8")));
        assert!(!linker("0.10.3").fits(&compiler("23.0.0")));
        assert!(!linker("0.9.14").fits(&compiler("22.1.8")));
        assert!(!linker("0.10.3").fits(&compiler("unknown")));
    }

    #[test]
    fn the_pinned_linker_fits_its_llvm() {
        for (llvm, version) in PINNED_LINKERS {
            let compiler = compiler(&format!("{llvm}.1.0"));
            assert_eq!(compiler.pinned_linker(), Some(*version));
            assert!(linker(version).fits(&compiler));
        }
        assert_eq!(compiler("99.0.0").pinned_linker(), None);
    }

    #[test]
    fn the_outer_build_is_forgotten_but_not_where_crates_come_from() {
        for name in
            ["CARGO", "CARGO_TARGET_DIR", "RUSTC_WORKSPACE_WRAPPER", "CLIPPY_ARGS", "TARGET"]
        {
            assert!(is_outer_build(name.as_ref()), "{name}");
        }
        for name in
            ["CARGO_HOME", "CARGO_HTTP_PROXY", "CARGO_REGISTRIES_X_INDEX", "PATH", "RUSTUP_HOME"]
        {
            assert!(!is_outer_build(name.as_ref()), "{name}");
        }
    }
}
