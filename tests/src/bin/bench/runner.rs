//! Runs programs by `BPF_PROG_TEST_RUN`, each time with another source.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Barrier,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use aya::{
    Ebpf, TestRunOptions,
    maps::{MapData, PerCpuArray, PerCpuValues, ProgramArray},
    programs::{ProgramFd, TestRun as _, Xdp},
    util::nr_cpus,
};
use course::{Course, FAMILY_IPV4, FAMILY_IPV6};
use limiter_common::{Family, packet::Source};
use limiter_tests::{frames, netns::Netns};
use nix::{
    errno::Errno,
    sched::{CpuSet, sched_setaffinity},
    time::{ClockId, clock_gettime},
    unistd::Pid,
};

#[path = "../../../ebpf/src/course.rs"]
mod course;

pub(crate) static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("LIMITER_BENCH_OBJECT"));

/// The first forged source: 10.0.0.0/8 has 2²⁴ addresses (RFC 1918).
pub(crate) const FORGED_IPV4: u32 = 0x0a00_0000;
/// The first forged /64.
pub(crate) const FORGED_IPV6: u64 = 0x2a00_0000_0000_0000;
/// Forged sources in all: the 16 M of PERFORMANCE.md.
pub(crate) const FORGED: u64 = 1 << 24;

/// The turns of two CPUs begin this far apart, so that they do not go through the sources in step.
const LANE: u64 = 1 << 40 | 0x55_5555;

// SAFETY: integers only, without padding, so every bit pattern is a value and every byte is set.
unsafe impl aya::Pod for Course {}

/// Which sources a program sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sources {
    /// Always the same one.
    Hot,
    /// So many, a power of two, one after the other: where each lies in the table is random.
    Resident(u64),
    /// Each drawn from [`FORGED`] at random.
    New,
}

/// What a packet is, beside its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packet {
    /// A short datagram.
    Datagram,
    /// A TCP segment that acknowledges something.
    Ack,
}

/// A program under test, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tested(usize);

/// One run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) program: Tested,
    pub(crate) family: Family,
    pub(crate) sources: Sources,
    pub(crate) packet: Packet,
    /// On CPUs 0 to this less one.
    pub(crate) cpus: usize,
    /// Packets on each CPU.
    pub(crate) repeat: u32,
}

/// The wrapper.
pub(crate) struct Runner {
    ebpf: Ebpf,
    target: ProgramArray<MapData>,
    programs: Vec<ProgramFd>,
    /// The number of the next run of the wrapper.
    turn: u64,
    /// Test runs, and those during which somebody had the kernel count and time all programs.
    runs: u64,
    counted_runs: u64,
    netns: Netns,
}

impl Runner {
    pub(crate) fn new() -> Result<Self> {
        let mut ebpf = Ebpf::load(OBJECT).context("loading the benchmark's programs")?;
        for name in ["wrap", "floor", "parse_only"] {
            program(&mut ebpf, name)?.load()?;
        }
        let target = ebpf.take_map("TARGET").context("map TARGET")?;
        Ok(Self {
            target: target.try_into()?,
            ebpf,
            programs: Vec::new(),
            turn: 0,
            runs: 0,
            counted_runs: 0,
            netns: Netns::new("bench")?,
        })
    }

    /// Takes a loaded program to test.
    pub(crate) fn add(&mut self, program: &ProgramFd) -> Result<Tested> {
        self.programs.push(program.try_clone()?);
        Ok(Tested(self.programs.len() - 1))
    }

    /// Takes one of the benchmark's own programs.
    pub(crate) fn add_own(&mut self, name: &str) -> Result<Tested> {
        let fd = program(&mut self.ebpf, name)?.fd()?.try_clone()?;
        self.add(&fd)
    }

    /// Gives up the programs from this one on.
    pub(crate) fn clear_from(&mut self, first: Tested) -> Result<()> {
        self.target.clear_index(&0)?;
        self.programs.truncate(first.0);
        Ok(())
    }

    /// Runs, and returns the nanoseconds of CPU time for each packet, by CPU.
    ///
    /// CPU time and not the kernel's own figure, which is whole nanoseconds: one is 5 % of a bare
    /// drop.
    pub(crate) fn run(&mut self, run: Run) -> Result<Vec<f64>> {
        let (family, base) = match run.family {
            Family::Ipv4 => (FAMILY_IPV4, u64::from(FORGED_IPV4)),
            Family::Ipv6 | Family::Other => (FAMILY_IPV6, FORGED_IPV6),
        };
        let (mask, random) = match run.sources {
            Sources::Hot => (0, 0),
            Sources::Resident(count) => (count - 1, 0),
            Sources::New => (FORGED - 1, 1),
        };
        let program = self.programs.get(run.program.0).context("a program that was given up")?;
        self.target.set(0, program, 0).context("the wrapper refuses the program")?;
        self.set_course(Course { base, mask, random, family, turn: 0 }, run.repeat)?;
        let wrapper: &Xdp = self.ebpf.program("wrap").context("program wrap")?.try_into()?;
        let counted = wrapper.info()?.run_count();
        let frame = frame(run.family, run.packet);
        let start = Barrier::new(run.cpus);
        let results = thread::scope(|scope| {
            let workers: Vec<_> = (0..run.cpus)
                .map(|cpu| {
                    let (netns, start, frame) = (&self.netns, &start, &frame);
                    scope.spawn(move || {
                        netns.enter();
                        pin(cpu)?;
                        start.wait();
                        test_run(wrapper, frame, run.repeat)
                    })
                })
                .collect();
            let joined = workers
                .into_iter()
                .map(|worker| worker.join().map_err(|_| anyhow!("a measuring thread panicked"))?);
            joined.collect::<Result<Vec<_>>>()
        })?;
        self.runs += 1;
        if wrapper.info()?.run_count() != counted {
            self.counted_runs += 1;
        }
        // `XDP_ABORTED`.
        ensure!(results.iter().all(|it| it.1 != 0), "the wrapper found no program to call");
        Ok(results.into_iter().map(|(time, _)| time).collect())
    }

    /// Runs one of the benchmark's own programs as it is, without the wrapper, on CPU 0.
    pub(crate) fn run_bare(&self, name: &str, repeat: u32) -> Result<f64> {
        let program: &Xdp = self.ebpf.program(name).context("no such program")?.try_into()?;
        self.netns.run(|| {
            pin(0)?;
            Ok(test_run(program, &frame(Family::Ipv4, Packet::Datagram), repeat)?.0)
        })
    }

    /// Says so if another process made the kernel time programs (`bpf_stats`), which costs each run
    /// some tens of nanoseconds.
    pub(crate) fn disturbance(&self) -> Option<String> {
        let Self { runs, counted_runs, .. } = self;
        (*counted_runs > 0).then(|| {
            format!(
                "another process had bpf_stats on during {counted_runs} of {runs} test runs: their \
                 times are too long and their ratios too small"
            )
        })
    }

    /// Goes on where the last run ended, so that new sources are new; each CPU in a part of its own.
    fn set_course(&mut self, course: Course, repeat: u32) -> Result<()> {
        let cpus = nr_cpus().map_err(|(file, error)| anyhow!("{file}: {error}"))?;
        let map = self.ebpf.map_mut("COURSE").context("map COURSE")?;
        let mut courses: PerCpuArray<_, Course> = PerCpuArray::try_from(map)?;
        let lanes = (0..cpus as u64).map(|lane| Course { turn: self.turn + lane * LANE, ..course });
        courses.set(0, PerCpuValues::try_from(lanes.collect::<Vec<_>>())?, 0)?;
        self.turn += u64::from(repeat);
        Ok(())
    }
}

/// The source of number `index`, as the wrapper makes it.
pub(crate) fn source(family: Family, first: u64, index: u32) -> Source {
    match family {
        Family::Ipv4 => Source::ipv4(u32::try_from(first).unwrap_or_default() + index),
        Family::Ipv6 | Family::Other => Source::ipv6(first + u64::from(index), 0),
    }
}

/// The first forged source of a family.
pub(crate) fn forged(family: Family) -> u64 {
    match family {
        Family::Ipv4 => FORGED_IPV4.into(),
        Family::Ipv6 | Family::Other => FORGED_IPV6,
    }
}

/// Keeps the calling thread on one CPU.
pub(crate) fn pin(cpu: usize) -> Result<()> {
    let mut only = CpuSet::new();
    only.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &only).with_context(|| format!("CPU {cpu}"))
}

/// Gives a thread (0: the calling one, and those that it starts) precedence over other work on its CPU,
/// or takes it away.
pub(crate) fn set_nice(thread: Pid, nice: i32) -> Result<()> {
    let id = u32::try_from(thread.as_raw())?;
    // SAFETY: takes numbers and touches no memory of ours.
    let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, id, nice) };
    Errno::result(result).with_context(|| format!("priority of thread {thread}"))?;
    Ok(())
}

pub(crate) fn program<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut Xdp> {
    Ok(ebpf.program_mut(name).with_context(|| format!("program {name}"))?.try_into()?)
}

fn test_run(program: &Xdp, frame: &[u8], repeat: u32) -> Result<(f64, u32)> {
    let before = thread_time()?;
    let options = TestRunOptions { data_in: Some(frame), repeat, ..TestRunOptions::new() };
    let result = program.test_run(options)?;
    let elapsed = thread_time()?.saturating_sub(before);
    Ok((elapsed.as_secs_f64() * 1e9 / f64::from(repeat), result.return_value))
}

fn thread_time() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}

/// A packet to a port of no class but the last.
fn frame(family: Family, packet: Packet) -> Vec<u8> {
    let (source, destination): (IpAddr, IpAddr) = match family {
        Family::Ipv4 => (Ipv4Addr::from(FORGED_IPV4).into(), Ipv4Addr::new(192, 0, 2, 2).into()),
        Family::Ipv6 | Family::Other => {
            let host = |high| IpAddr::V6(Ipv6Addr::from(u128::from(high) << 64 | 1));
            (host(FORGED_IPV6), host(0x2001_0db8_0000_0000_u64))
        }
    };
    let path = frames::Path {
        source_mac: [2, 0, 0, 0, 0, 1],
        destination_mac: [2, 0, 0, 0, 0, 2],
        source: SocketAddr::new(source, 40_000),
        destination: SocketAddr::new(destination, 9),
    };
    match packet {
        Packet::Datagram => frames::udp(&path, PAYLOAD),
        Packet::Ack => frames::tcp_ack(&path),
    }
}

/// Bytes of UDP payload: over IPv4, the shortest frame there is on a wire.
pub(crate) const PAYLOAD: usize = 18;
