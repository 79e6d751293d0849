//! Tables too large for the memory there is: refused at start, with the size that would fit.

use std::{
    fs::{self, File, OpenOptions},
    io::Write as _,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{self, Command},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use limiter_tests::{
    agent,
    netns::{Netns, VethOptions, veth},
    process::output,
};

const LIMIT: u64 = 400 << 20;
const PATIENCE: Duration = Duration::from_mins(1);

/// A memory cgroup of our own, of either version.
struct MemoryCgroup(PathBuf);

impl MemoryCgroup {
    /// None where this machine has no memory controller to be had.
    fn new() -> Result<Option<Self>> {
        let root = Path::new("/sys/fs/cgroup");
        let name = format!("limiter-test-{}", process::id());
        let (directory, limit) = if root.join("memory/memory.limit_in_bytes").exists() {
            (root.join("memory").join(name), "memory.limit_in_bytes")
        } else {
            // Refused where the controller is not there or this is not the root.
            if fs::write(root.join("cgroup.subtree_control"), "+memory").is_err() {
                return Ok(None);
            }
            (root.join(name), "memory.max")
        };
        fs::create_dir(&directory)?;
        let group = Self(directory);
        fs::write(group.0.join(limit), LIMIT.to_string())?;
        Ok(Some(group))
    }

    /// Makes a command start inside.
    fn confine(&self, command: &mut Command) -> Result<()> {
        let mut procs: File = OpenOptions::new().write(true).open(self.0.join("cgroup.procs"))?;
        // SAFETY: between fork and exec the closure makes one system call and allocates nothing. A
        // process that is called 0 is the one that writes.
        unsafe { command.pre_exec(move || procs.write_all(b"0")) };
        Ok(())
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        // It is empty once its last process has been reaped, which may take the kernel a moment.
        let give_up = Instant::now() + Duration::from_secs(5);
        while fs::remove_dir(&self.0).is_err() && Instant::now() < give_up {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn tables_too_large_for_the_cgroup_are_refused_with_what_fits() -> Result<()> {
    let Some(group) = MemoryCgroup::new()? else {
        // Past the capture of the test runner, which sums these up.
        writeln!(std::io::stdout(), "skipped: memory: no memory controller here")?;
        return Ok(());
    };
    let netns = Netns::new("edge")?;
    let (_edge, _peer) =
        veth((&netns, "edge0"), (&Netns::new("peer")?, "peer0"), VethOptions::default())?;
    let directory = tempfile::Builder::new().prefix("limiter-test-").tempdir()?;
    let file = directory.path().join("limiter.toml");
    let run = |sources: u32| -> Result<_> {
        let config = format!(
            "[table]\nipv4_sources = {sources}\nipv6_sources = {sources}\n\
             [[interface]]\nname = \"edge0\"\n\
             [[class]]\nname = \"rest\"\npackets = {{ rate = \"1000/s\", burst = 1000 }}\n"
        );
        fs::write(&file, config)?;
        let mut command = netns.command(agent::binary()?);
        command.args(["run", "--unpinned", "--config"]).arg(&file);
        command.arg("--state").arg(directory.path().join("state"));
        command.arg("--control-socket").arg(directory.path().join("control.sock"));
        group.confine(&mut command)?;
        Ok(command)
    };
    let refused = output(&mut run(16_000_000)?, PATIENCE)?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(3), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        said.starts_with("[table] ipv4_sources = 16000000 and ipv6_sources = 16000000: "),
        "{said}"
    );
    let (_, most) = said.split_once("at most ").context(said.clone())?;
    let most: u32 = most.split(' ').next().unwrap_or_default().parse()?;
    // Some 80 bytes for a source of each family.
    let expected = u32::try_from(LIMIT / 80)?;
    assert!((expected / 2..=expected).contains(&most), "{said}");

    // What it says fits does: the agent gets as far as to be ended from here.
    let mut command = run(most - most / 10)?;
    let mut child = command.stderr(File::create(directory.path().join("log"))?).spawn()?;
    let log = || fs::read_to_string(directory.path().join("log")).unwrap_or_default();
    let give_up = Instant::now() + PATIENCE;
    while !log().contains("ready:") && child.try_wait()?.is_none() && Instant::now() < give_up {
        std::thread::sleep(Duration::from_millis(20));
    }
    let is_ready = log().contains("ready:");
    // It may have ended already.
    let _ = child.kill();
    child.wait()?;
    assert!(is_ready, "{}", log());
    Ok(())
}
