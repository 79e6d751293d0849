//! The benchmark: what a packet costs, what a flood leaves of honest traffic, how exact the limits
//! are, and what the table takes, each against floors or peers measured in the same run.
//! CONTRIBUTING.md says how to read it.

mod config;
mod cost;
mod flood;
mod limit;
mod own;
mod peers;
mod report;
mod runner;
mod scrape;
mod stage;
mod table;

use std::{
    fs,
    path::PathBuf,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use clap::Parser;
use limiter_common::Family;
use nix::unistd::Pid;
use serde_json::json;

use crate::{
    report::Report,
    runner::{Runner, set_nice},
    stage::From,
};

/// What measures goes before other work, which it is best to have none of.
pub(crate) const MEASURING_NICE: i32 = -20;

/// Measures limiter against floors and peers.
#[derive(Parser)]
struct Args {
    /// Less of everything, in under two minutes
    #[arg(long)]
    quick: bool,
    /// Also write all figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only this part: cost, own, floods, limit, memory, growth, scrape
    #[arg(long, value_name = "PART")]
    only: Option<String>,
}

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    pub(crate) is_quick: bool,
    /// Rounds of test runs; the variants take turns in each.
    pub(crate) rounds: usize,
    /// Packets in each test run.
    pub(crate) repeat: u32,
    /// Rounds of floods.
    pub(crate) flood_rounds: usize,
    /// How long each flood lasts; those from forged sources, and others.
    flood: [Duration; 2],
    /// CPUs there are.
    pub(crate) cpus: usize,
}

impl Effort {
    fn new(is_quick: bool) -> Self {
        let cpus = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        if is_quick {
            let flood = [2, 2].map(Duration::from_secs);
            Self { is_quick, rounds: 3, repeat: 200_000, flood_rounds: 1, flood, cpus }
        } else {
            // From forged sources a minute in three rounds.
            let flood = [20, 6].map(Duration::from_secs);
            Self { is_quick, rounds: 7, repeat: 1_000_000, flood_rounds: 3, flood, cpus }
        }
    }

    /// How long a flood lasts.
    pub(crate) fn flood(&self, from: From) -> Duration {
        let [forged, other] = self.flood;
        if from == From::Forged { forged } else { other }
    }
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let start = Instant::now();
    set_nice(Pid::from_raw(0), MEASURING_NICE)?;
    let effort = Effort::new(args.quick);
    let mut report = Report::default();
    let machine = machine()?;
    println!("{machine}; {} CPUs", effort.cpus);
    report.keep("machine", json!({ "name": machine, "cpus": effort.cpus }));
    report.keep("quick", json!(args.quick));

    let wants = |part: &str| {
        let wanted = args.only.as_deref().is_none_or(|only| only == part);
        if wanted {
            eprintln!("measuring: {part} …");
        }
        wanted
    };
    let mut runner = Runner::new()?;
    if wants("cost") {
        cost::measure(&mut runner, &effort, &mut report)?;
    }
    if wants("own") {
        own::measure(&mut runner, &effort, &mut report)?;
    }
    if wants("memory") {
        table::memory(&mut report)?;
        table::overflow(&mut runner, &mut report)?;
    }
    if wants("growth") {
        table::growth(&mut runner, &effort, &mut report)?;
    }
    if wants("floods") {
        let families: &[Family] =
            if effort.is_quick { &[Family::Ipv4] } else { &[Family::Ipv4, Family::Ipv6] };
        for family in families {
            flood::measure(*family, &effort, &mut report)?;
        }
    }
    if wants("limit") {
        limit::measure(&effort, &mut report)?;
    }
    if wants("scrape") {
        scrape::measure(&effort, &mut report)?;
    }
    if let Some(disturbance) = runner.disturbance() {
        println!("\nWarning: {disturbance}");
        report.keep("warning", json!(disturbance));
    }
    report.print_targets();
    println!("\n{} s in all", start.elapsed().as_secs());
    report.keep("seconds", json!(start.elapsed().as_secs()));
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report.json())? + "\n";
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The processor and the kernel.
fn machine() -> Result<String> {
    let cpus = fs::read_to_string("/proc/cpuinfo")?;
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    Ok(format!("{}, Linux {}", model.map_or("unknown CPU", |it| it.1), kernel.trim()))
}
