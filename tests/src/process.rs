//! Commands that must end by themselves, and soon.

use std::{
    io::{self, Read},
    os::unix::process::CommandExt as _,
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::sys::{
    prctl::set_pdeathsig,
    signal::{SigSet, Signal},
};

/// Runs `command` with nothing to read, to its end, and returns what it printed. It is killed when
/// it takes longer than `patience`, and when the calling thread ends.
///
/// # Errors
/// If it cannot be started or takes too long; then with what it printed.
pub fn output(command: &mut Command, patience: Duration) -> Result<Output> {
    output_from(Stdio::null(), command, patience)
}

/// The same with something to read.
///
/// # Errors
/// As for [`output`].
pub fn output_from(stdin: Stdio, command: &mut Command, patience: Duration) -> Result<Output> {
    let what = format!("{command:?}");
    let prepare = || {
        set_pdeathsig(Signal::SIGKILL)?;
        // Who starts it may keep signals blocked, which a new program would inherit.
        SigSet::empty().thread_set_mask()?;
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
    unsafe { command.pre_exec(prepare) };
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| what.clone())?;
    let stdout = read(child.stdout.take().context("its standard output is piped")?);
    let stderr = read(child.stderr.take().context("its standard error is piped")?);
    let give_up = Instant::now() + patience;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if Instant::now() > give_up {
            child.kill()?;
            child.wait()?;
            break None;
        }
        thread::sleep(Duration::from_millis(5));
    };
    let finish = |reader: thread::JoinHandle<io::Result<Vec<u8>>>| {
        reader.join().unwrap_or_else(|_| Err(io::Error::other("the reading thread panicked")))
    };
    let (stdout, stderr) = (finish(stdout)?, finish(stderr)?);
    let Some(status) = status else {
        bail!(
            "{what} still ran after {patience:?}; it said:\n{}",
            String::from_utf8_lossy(&stderr)
        );
    };
    Ok(Output { status, stdout, stderr })
}

fn read(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<io::Result<Vec<u8>>> {
    thread::spawn(move || {
        let mut all = Vec::new();
        pipe.read_to_end(&mut all)?;
        Ok(all)
    })
}
