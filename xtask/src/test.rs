//! `cargo xtask test`: every test there is, and a summary that hides nothing.

use std::{
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, bail};

use crate::{setup, shell};

/// Runs the tests of the default members, then package `limiter-tests` one test at a time: its
/// tests share the host's interfaces, CPUs and bpffs.
///
/// # Errors
/// When not root, when set-up fails, when a test fails, or when `filter` fits no test.
pub(crate) fn run(filter: Option<&str>) -> Result<()> {
    if !shell::is_root() {
        bail!("network namespaces and XDP need root: run `cargo xtask test` as root");
    }
    let start = Instant::now();
    setup::everything()?;

    let mut host = shell::cargo();
    host.args(["test", "--no-fail-fast", "--"]).args(filter);
    let mut system = shell::cargo();
    system
        .args(["test", "--no-fail-fast", "--package", "limiter-tests", "--", "--test-threads=1"])
        .args(filter)
        .env("PATH", setup::path_with_tools()?);

    let mut summary = Summary::default();
    for command in [&mut host, &mut system] {
        println!("\n{}", shell::line(command));
        if !stream(command, &mut summary)? {
            summary.failed_commands.push(shell::line(command));
        }
    }
    for line in summary.lines(start.elapsed().as_secs()) {
        println!("{line}");
    }
    if !summary.failed_commands.is_empty() {
        bail!("failed: {}", summary.failed_commands.join("; "));
    }
    if summary.passed == 0 {
        bail!("no test ran; does the filter fit a test's name?");
    }
    Ok(())
}

/// What the test programs said, summed up.
#[derive(Debug, Default, PartialEq, Eq)]
struct Summary {
    passed: u64,
    failed: u64,
    filtered: u64,
    /// Tests that did not run, or only in part, each with the reason.
    skipped: Vec<String>,
    failed_commands: Vec<String>,
}

impl Summary {
    /// Takes in one line of a test program's output.
    fn read(&mut self, line: &str) {
        if let Some(counts) = line.strip_prefix("test result: ") {
            for count in counts.split(['.', ';']).map(str::trim) {
                let Some((number, what)) = count.split_once(' ') else {
                    continue;
                };
                let number = number.parse().unwrap_or(0);
                match what {
                    "passed" => self.passed += number,
                    "failed" => self.failed += number,
                    "filtered out" => self.filtered += number,
                    _ => {}
                }
            }
        } else if let Some((name, reason)) =
            line.strip_prefix("test ").and_then(|test| test.split_once(" ... ignored"))
        {
            let reason = reason.trim_start_matches([',', ' ']);
            let reason = if reason.is_empty() { "ignored, no reason given" } else { reason };
            self.skipped.push(format!("{name}: {reason}"));
        } else if let Some((_, skipped)) = line.split_once("skipped: ") {
            // A test that finds itself unable to check something writes this past the capture.
            self.skipped.push(skipped.to_owned());
        }
    }

    fn lines(&self, seconds: u64) -> Vec<String> {
        let Self { passed, failed, filtered, skipped, .. } = self;
        let mut lines = vec![format!(
            "\n{passed} tests passed, {failed} failed, {} skipped, {filtered} filtered out, in {} min {:02} s",
            skipped.len(),
            seconds / 60,
            seconds % 60
        )];
        lines.extend(skipped.iter().map(|skipped| format!("skipped: {skipped}")));
        lines
    }
}

/// Runs `command`, shows its output and reads it along; returns whether it succeeded.
fn stream(command: &mut Command, summary: &mut Summary) -> Result<bool> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run `{}`", shell::line(command)))?;
    let stdout = child.stdout.take().context("the child's output was taken already")?;
    for line in BufReader::new(stdout).split(b'\n') {
        let line = line.context("cannot read the tests' output")?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        summary.read(&line);
    }
    Ok(child.wait().context("cannot wait for the tests")?.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_counts_and_names_what_was_skipped() {
        let mut summary = Summary::default();
        for line in [
            "running 5 tests",
            "test a ... ok",
            "test b ... ignored",
            "test c ... ignored, needs two NICs",
            "test d ... skipped: d: no IPv6 here",
            "test result: ok. 3 passed; 0 failed; 2 ignored; 0 measured; 7 filtered out; finished in 0.10s",
            "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s",
        ] {
            summary.read(line);
        }
        let skipped = ["b: ignored, no reason given", "c: needs two NICs", "d: no IPv6 here"];
        let expected = Summary {
            passed: 4,
            failed: 1,
            filtered: 7,
            skipped: skipped.map(str::to_owned).to_vec(),
            failed_commands: Vec::new(),
        };
        assert_eq!(summary, expected);
        let lines = summary.lines(125);
        assert!(lines[0].contains("4 tests passed, 1 failed, 3 skipped"), "{}", lines[0]);
        assert!(lines[0].contains("2 min 05 s"), "{}", lines[0]);
        assert_eq!(lines.len(), 4);
    }
}
