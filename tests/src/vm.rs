//! Other kernels, in a VM: boots one with nothing but a test binary, runs it and reads what it
//! said on the serial console. Plain emulation, so that it works without KVM; about five seconds
//! until the binary starts.

use std::{
    fmt,
    fs::{self, File, Permissions},
    io::Write as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};

/// Stands before the exit code on the console.
const MARKER: &str = "limiter-vm: exit code ";

/// Programs of the host that tests run; put in if they are there.
const TOOLS: &[&str] = &["ip", "ethtool"];

/// Modules that tests need, below the kernel's own directory, each behind those that it depends on.
const MODULES: &[&str] = &[
    "kernel/drivers/net/veth.ko",
    "kernel/drivers/net/dummy.ko",
    "kernel/net/tls/tls.ko",
    "kernel/drivers/net/bonding/bonding.ko",
    "kernel/net/llc/llc.ko",
    "kernel/net/802/stp.ko",
    "kernel/net/802/garp.ko",
    "kernel/net/802/mrp.ko",
    "kernel/net/8021q/8021q.ko",
];

/// A kernel that `cargo xtask setup` has fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Linux 6.1.
    V6_1,
    /// Linux 6.12.
    V6_12,
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
        })
    }
}

/// What runs in the VM.
#[derive(Clone, Copy, Debug)]
pub struct VmSpec<'a> {
    /// Put to `/test/` under its own name and run there, as root, with `/tmp` as its directory.
    pub binary: &'a Path,
    /// Its arguments, without white space.
    pub arguments: &'a [&'a str],
    /// Other programs it needs, put beside it.
    pub companions: &'a [&'a Path],
    /// CPUs.
    pub smp: u32,
    /// After this, the VM is ended and the run has failed.
    pub timeout: Duration,
}

/// What came out.
#[derive(Clone, Debug)]
pub struct Output {
    /// Of the binary; as a shell has it, 128 and the signal's number if one ended it.
    pub exit_code: i32,
    /// All that was written on the console.
    pub console: String,
}

/// Boots `kernel`, runs the binary and waits for its end.
///
/// # Errors
/// If the kernel was not fetched, a tool is missing, the kernel died or the time was up; with the
/// end of the console.
pub fn run(kernel: Kernel, spec: &VmSpec<'_>) -> Result<Output> {
    // An emulated CPU may run into an instruction that another one is patching (static keys): the
    // emulator's fault, and rare. Nothing else is given a second chance.
    match boot(kernel, spec) {
        Err(error) if error.to_string().contains("Oops: int3") => {
            println!("vm: kernel {kernel} ran into a half-patched instruction; once more");
            boot(kernel, spec)
        }
        outcome => outcome,
    }
}

fn boot(kernel: Kernel, spec: &VmSpec<'_>) -> Result<Output> {
    let files = KernelFiles::find(kernel)?;
    let work = tempfile::tempdir()?;
    let initramfs = work.path().join("initramfs");
    build_initramfs(&files, spec, &work.path().join("root"), &initramfs)?;

    let console = work.path().join("console");
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-m", "1024"])
        .args(["-smp", &spec.smp.to_string()])
        .args(["-display", "none", "-monitor", "none", "-serial", "stdio"])
        .args(["-nic", "none", "-no-reboot"])
        .arg("-kernel")
        .arg(&files.image)
        .arg("-initrd")
        .arg(&initramfs)
        .args(["-append", "console=ttyS0 quiet panic=-1"])
        .stdin(Stdio::null())
        .stdout(File::create(&console)?)
        .stderr(Stdio::inherit());
    let ended = wait(&mut spawn(&mut qemu, "qemu-system-x86")?, spec.timeout)?;

    let console = fs::read(&console)?;
    let console = String::from_utf8_lossy(&console).replace('\r', "");
    let Some(exit_code) = exit_code(&console) else {
        let why = match ended {
            Some(status) => format!("ended without a word (qemu: {status})"),
            None => format!("was not done after {:?}", spec.timeout),
        };
        bail!("the VM with kernel {kernel} {why}; the end of its console:\n{}", tail(&console));
    };
    Ok(Output { exit_code, console })
}

/// Like [`run`], and fails unless the binary ended with 0.
///
/// # Errors
/// As for [`run`], or with the console of a binary that failed.
pub fn run_ok(kernel: Kernel, spec: &VmSpec<'_>) -> Result<Output> {
    let output = run(kernel, spec)?;
    ensure!(
        output.exit_code == 0,
        "on kernel {kernel} {} {:?} ended with {}:\n{}",
        spec.binary.display(),
        spec.arguments,
        output.exit_code,
        output.console
    );
    Ok(output)
}

struct KernelFiles {
    image: PathBuf,
    modules: PathBuf,
}

impl KernelFiles {
    fn find(kernel: Kernel) -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/kernels");
        let root = root.join(kernel.to_string());
        let find = || -> Option<Self> {
            let image = fs::read_dir(root.join("boot")).ok()?.flatten().find_map(|entry| {
                entry.file_name().to_str()?.starts_with("vmlinuz-").then(|| entry.path())
            })?;
            let modules = fs::read_dir(root.join("lib/modules")).ok()?.flatten().next()?.path();
            Some(Self { image, modules })
        };
        find().with_context(|| {
            format!(
                "there is no kernel {kernel} in target/kernels: run `cargo xtask setup`, which \
                 fetches it"
            )
        })
    }

    /// The contents of a module, which newer packages keep compressed.
    fn module(&self, name: &str) -> Result<Vec<u8>> {
        let plain = self.modules.join(name);
        if plain.exists() {
            return Ok(fs::read(plain)?);
        }
        let mut compressed = plain.into_os_string();
        compressed.push(".xz");
        let mut xz = Command::new("xz");
        xz.arg("-dc").arg(compressed);
        output(&mut xz, "xz-utils")
    }
}

fn build_initramfs(
    kernel: &KernelFiles,
    spec: &VmSpec<'_>,
    root: &Path,
    initramfs: &Path,
) -> Result<()> {
    for directory in ["bin", "test", "modules", "proc", "sys", "dev", "tmp", "run", "etc"] {
        fs::create_dir_all(root.join(directory))?;
    }
    let busybox = which("busybox").context("busybox is missing: run `cargo xtask setup`")?;
    fs::copy(busybox, root.join("bin/busybox"))?;
    for (number, module) in MODULES.iter().enumerate() {
        let name = Path::new(module).file_name().context("a module has a name")?;
        // They are loaded in the order of their names.
        let name = format!("{number:02}-{}", name.display());
        fs::write(root.join("modules").join(name), kernel.module(module)?)?;
    }
    for program in [spec.binary].iter().chain(spec.companions) {
        let name = program.file_name().context("a program has a name")?;
        let target = root.join("test").join(name);
        // Debug information is most of a test binary, and the VM's memory has to hold it.
        let mut strip = Command::new("strip");
        strip.arg("--strip-debug").arg("-o").arg(&target).arg(program);
        output(&mut strip, "binutils")?;
        copy_libraries(program, root)?;
    }
    for tool in TOOLS.iter().filter_map(|tool| which(tool)) {
        let name = tool.file_name().context("a program has a name")?;
        fs::copy(&tool, root.join("bin").join(name))?;
        copy_libraries(&tool, root)?;
    }
    let init = root.join("init");
    fs::write(&init, init_script(spec)?)?;
    fs::set_permissions(&init, Permissions::from_mode(0o755))?;

    let mut names = Vec::new();
    list(root, Path::new("."), &mut names)?;
    let mut cpio = Command::new("cpio");
    cpio.args(["--quiet", "-o", "-H", "newc"])
        .current_dir(root)
        .stdin(Stdio::piped())
        .stdout(File::create(initramfs)?);
    let mut cpio = spawn(&mut cpio, "cpio")?;
    cpio.0.stdin.take().context("a pipe was asked for")?.write_all(names.join("\n").as_bytes())?;
    let status = wait(&mut cpio, Duration::from_mins(1))?;
    ensure!(status.is_some_and(|status| status.success()), "cpio: {status:?}");
    Ok(())
}

fn init_script(spec: &VmSpec<'_>) -> Result<String> {
    let name = spec.binary.file_name().and_then(|name| name.to_str());
    let name = name.context("the name of a test binary is ASCII")?;
    let arguments = spec.arguments.join(" ");
    // The marker stands on a line of its own whatever the binary wrote last.
    Ok(format!(
        "#!/bin/busybox sh
/bin/busybox --install -s /bin 2>/dev/null
export PATH=/bin:/test HOME=/ TMPDIR=/tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t bpf bpf /sys/fs/bpf
mount -t cgroup2 cgroup /sys/fs/cgroup
for module in /modules/*; do insmod $module; done
ip link set dev lo up
cd /tmp
/test/{name} {arguments}
code=$?
echo
echo {MARKER}$code
poweroff -f
"
    ))
}

/// Copies the libraries that the loader finds for `program`, to where it finds them.
fn copy_libraries(program: &Path, root: &Path) -> Result<()> {
    let mut ldd = Command::new("ldd");
    ldd.arg(program);
    let listing = String::from_utf8(output(&mut ldd, "libc-bin")?)?;
    // "libm.so.6 => /lib/libm.so.6 (0x…)", or the path alone for the loader itself.
    let paths = listing.split_whitespace().filter(|word| word.starts_with('/'));
    for path in paths.map(Path::new) {
        let target = root.join(path.strip_prefix("/")?);
        fs::create_dir_all(target.parent().context("below the root")?)?;
        fs::copy(path, target).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Lists what is below `directory`, each directory before its contents, as paths from `root`.
fn list(root: &Path, directory: &Path, names: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(root.join(directory))? {
        let entry = entry?;
        let path = directory.join(entry.file_name());
        names.push(path.to_str().context("names are ASCII")?.to_owned());
        if entry.file_type()?.is_dir() {
            list(root, &path, names)?;
        }
    }
    Ok(())
}

fn exit_code(console: &str) -> Option<i32> {
    let line = console.lines().rev().find_map(|line| line.strip_prefix(MARKER))?;
    line.trim().parse().ok()
}

fn tail(console: &str) -> String {
    let lines: Vec<&str> = console.lines().collect();
    lines[lines.len().saturating_sub(60)..].join("\n")
}

fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let administrators = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(administrators)
        .map(|directory| directory.join(program))
        .find(|program| program.is_file())
}

fn output(command: &mut Command, package: &str) -> Result<Vec<u8>> {
    let output =
        command.stderr(Stdio::inherit()).output().with_context(|| missing(command, package))?;
    ensure!(output.status.success(), "{command:?}: {}", output.status);
    Ok(output.stdout)
}

fn spawn(command: &mut Command, package: &str) -> Result<Process> {
    let child = command.spawn().with_context(|| missing(command, package))?;
    Ok(Process(child))
}

fn missing(command: &Command, package: &str) -> String {
    let program = command.get_program().display();
    format!("cannot run {program} (Debian package {package}; `cargo xtask setup` installs it)")
}

/// Waits for the end at most for `timeout`; `None` if it was not reached.
fn wait(process: &mut Process, timeout: Duration) -> Result<Option<ExitStatus>> {
    let give_up = Instant::now() + timeout;
    while Instant::now() < give_up {
        if let Some(status) = process.0.try_wait()? {
            return Ok(Some(status));
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(None)
}

/// A child that does not outlive its handle.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
