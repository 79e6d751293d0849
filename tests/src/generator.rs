//! A generator of real frames: an XDP program of our own run with `BPF_PROG_TEST_RUN` and live
//! frames as if they had come in on a veth end, which sends them out again to the other end.
//!
//! A frame sent on CPU n arrives on receive queue n (modulo their number) of the other end and is
//! handled on that same CPU, so a flood from two CPUs meets two instances of the program under
//! test at once. The pace is kept inside the program, in steps of a batch.

use std::{
    mem,
    net::{Ipv4Addr, Ipv6Addr},
    sync::{
        Arc, Once,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use aya::{
    Ebpf, TestRunOptions,
    maps::{Array, PerCpuArray, PerCpuValues},
    programs::{ProgramError, TestRun as _, TestRunAttrs, Xdp, XdpMode},
    util::nr_cpus,
};
use limiter_common::abi::SourceAddress;
use nix::{
    errno::Errno,
    sched::{CpuSet, sched_setaffinity},
    sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction},
    time::{ClockId, clock_gettime},
    unistd::Pid,
};

use crate::netns::Interface;
use shared::{FAMILY_IPV4, FAMILY_IPV6, FRACTION_BITS, Plan, Progress, Seen};
use template::Template;

#[path = "../ebpf/src/shared.rs"]
mod shared;
mod template;

static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("LIMITER_GENERATOR_OBJECT"));

// SAFETY: integers only, without padding, so every bit pattern is a value and every byte is set.
unsafe impl aya::Pod for Plan {}
// SAFETY: as for `Plan`.
unsafe impl aya::Pod for Progress {}
// SAFETY: as for `Plan`.
unsafe impl aya::Pod for Seen {}

/// Frames per turn of the kernel's live-frame loop: well below the 256 places of a veth ring, which
/// the receiving side empties between two turns.
const BATCH: u32 = 64;

/// A lower bound for one turn of the loop. It makes sure that the repeats asked for last until
/// the deadline, and bounds the call should it not be interrupted.
const FASTEST_TURN: Duration = Duration::from_nanos(25);

/// Threads need this long to get their pages and enter the loop.
const SETUP: Duration = Duration::from_millis(100);

/// Sends floods of frames from one veth end to the other.
pub struct Generator {
    ebpf: Ebpf,
    interface: Interface,
}

/// A flood: what is sent, from whom, how fast and how long.
#[derive(Clone, Debug)]
pub struct Flood {
    /// The frame, from the Ethernet header on, without the frame check sequence.
    pub template: Vec<u8>,
    /// Source addresses that replace the template's.
    pub sources: Sources,
    /// Frames per second, all CPUs together. Infinity is as fast as possible; times are then exact to
    /// 64 frames.
    pub rate: f64,
    /// Time from the first moment a frame may leave to the last.
    pub duration: Duration,
    /// Most frames to send, all CPUs together; split evenly, rounded up.
    pub frames: Option<u64>,
    /// CPUs to send from, each of which takes an even share of the rate.
    pub cpus: Vec<usize>,
    /// A CPU that fell behind (its thread was not running) sends up to this much of the schedule
    /// at once when it goes on, and forgets the rest.
    pub catch_up: Duration,
    /// Ends the flood before its time once it is set.
    pub stop: Option<Arc<AtomicBool>>,
    /// Honest frames among the others.
    pub honest: Option<Honest>,
}

/// Honest frames in the stream of a flood, so that they meet the same ring at the same fill as its own.
///
/// The template is the first honest source's frame. Of the other sources, the IPv4 address is one
/// higher each, the IPv6 /64 one higher and the upper 16 bits of the rest one lower each: UDP over IPv6
/// has a checksum that must hold, and this leaves it as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Honest {
    /// Every so manieth frame is an honest one, the first included.
    pub every: u32,
    /// Honest sources, which take turns.
    pub sources: u32,
    /// Destination port of the flood's own frames.
    pub flood_port: u16,
}

impl Honest {
    /// How many of `frames` in all come from honest source number `source`, if one CPU sent them.
    #[must_use]
    pub fn sent_by(self, source: u32, frames: u64) -> u64 {
        let honest = frames.div_ceil(u64::from(self.every));
        honest.saturating_sub(u64::from(source)).div_ceil(u64::from(self.sources))
    }
}

impl Flood {
    /// A flood of `template` as it is, from CPU 0, with 100 ms of catching up.
    #[must_use]
    pub fn new(template: Vec<u8>, rate: f64, duration: Duration) -> Self {
        Self {
            template,
            sources: Sources::Template,
            rate,
            duration,
            frames: None,
            cpus: vec![0],
            catch_up: Duration::from_millis(100),
            stop: None,
            honest: None,
        }
    }

    /// The same from other sources.
    #[must_use]
    pub fn sources(self, sources: Sources) -> Self {
        Self { sources, ..self }
    }

    /// The same from other CPUs.
    #[must_use]
    pub fn cpus(self, cpus: impl IntoIterator<Item = usize>) -> Self {
        Self { cpus: cpus.into_iter().collect(), ..self }
    }

    /// The same, ended early once `frames` have been sent.
    #[must_use]
    pub fn frames(self, frames: u64) -> Self {
        Self { frames: Some(frames), ..self }
    }

    /// The same, ended early once `stop` is set.
    #[must_use]
    pub fn until(self, stop: Arc<AtomicBool>) -> Self {
        Self { stop: Some(stop), ..self }
    }
}

/// Source addresses of a flood, as an offset from the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sources {
    /// The template's own.
    Template,
    /// `count` consecutive IPv4 addresses.
    Ipv4 {
        /// The first.
        first: Ipv4Addr,
        /// How many.
        count: u32,
        /// In which order.
        order: Order,
    },
    /// `per_prefix` consecutive addresses in each of `prefixes` consecutive /64s.
    Ipv6 {
        /// The first address of the first /64.
        first: Ipv6Addr,
        /// How many /64s.
        prefixes: u32,
        /// How many addresses in each.
        per_prefix: u32,
        /// In which order.
        order: Order,
    },
}

/// The order in which sources are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// One after the other, over all CPUs together.
    InTurn,
    /// Pseudo-random, the same in each flood.
    Random,
}

/// What was sent.
#[derive(Clone, Debug)]
pub struct Sent {
    /// By CPU, in the order asked for.
    pub per_cpu: Vec<SentByCpu>,
    /// Frames that were sent and found the ring of the other end full.
    pub lost: u64,
}

/// What one CPU sent.
#[derive(Clone, Copy, Debug)]
pub struct SentByCpu {
    /// The CPU.
    pub cpu: usize,
    /// Frames handed to the interface.
    pub frames: u64,
    /// `CLOCK_MONOTONIC` at the first frame; zero if there was none.
    pub first: Duration,
    /// `CLOCK_MONOTONIC` at the last frame.
    pub last: Duration,
    /// The longest time between two of its frames: its thread was not running.
    pub pause: Duration,
}

impl Sent {
    /// Frames sent by all CPUs, those lost included.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.per_cpu.iter().map(|cpu| cpu.frames).sum()
    }

    /// Frames that reached the other end.
    #[must_use]
    pub fn arrived(&self) -> u64 {
        self.total() - self.lost
    }

    /// `CLOCK_MONOTONIC` at the first frame of all.
    #[must_use]
    pub fn first(&self) -> Duration {
        let firsts = self.per_cpu.iter().filter(|cpu| cpu.frames > 0).map(|cpu| cpu.first);
        firsts.min().unwrap_or_default()
    }

    /// `CLOCK_MONOTONIC` at the last frame of all.
    #[must_use]
    pub fn last(&self) -> Duration {
        self.per_cpu.iter().map(|cpu| cpu.last).max().unwrap_or_default()
    }

    /// From the first frame to the last.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.last().saturating_sub(self.first())
    }

    /// An upper bound for the longest time without a frame of any CPU. A bucket that takes longer
    /// to fill was never full in between.
    #[must_use]
    pub fn pause(&self) -> Duration {
        let (first, last) = (self.first(), self.last());
        let pauses = self.per_cpu.iter().filter(|cpu| cpu.frames > 0).map(|cpu| {
            cpu.pause.max(cpu.first.saturating_sub(first)).max(last.saturating_sub(cpu.last))
        });
        pauses.min().unwrap_or_default()
    }
}

impl Generator {
    /// Loads the program, to send from `interface`, one end of a veth pair. Nothing is attached
    /// there. The other end needs an XDP program, or GRO, to take frames.
    ///
    /// # Errors
    /// If the kernel refuses the program.
    pub fn new(interface: &Interface) -> Result<Self> {
        let mut ebpf = Ebpf::load(OBJECT).context("loading the generator")?;
        program(&mut ebpf, "generate")?.load()?;
        Ok(Self { ebpf, interface: interface.clone() })
    }

    /// Sends a flood and waits for its end: its duration and about 0.1 s, or less when
    /// [`Flood::frames`] ends it.
    ///
    /// # Errors
    /// If the flood makes no sense, a CPU is missing, or the other end takes no frames.
    pub fn flood(&mut self, flood: &Flood) -> Result<Sent> {
        let cpus = nr_cpus().map_err(|(file, error)| anyhow!("{file}: {error}"))?;
        ensure!(!flood.cpus.is_empty(), "a flood needs a CPU to send from");
        ensure!(flood.cpus.iter().all(|&cpu| cpu < cpus), "no such CPU in {:?}", flood.cpus);
        let plan = plan(flood)?;
        let deadline = Duration::from_nanos(plan.deadline);

        let mut slots = vec![Progress::default(); cpus];
        let frames = flood.frames.unwrap_or(u64::MAX).div_ceil(plan.lanes);
        for (lane, &cpu) in (0..).zip(&flood.cpus) {
            slots[cpu] = Progress { left: frames, lane, ..Progress::default() };
        }
        let plan_map = self.ebpf.map_mut("PLAN").context("map PLAN")?;
        Array::<_, Plan>::try_from(plan_map)?.set(0, plan, 0)?;
        let progress = self.ebpf.map_mut("PROGRESS").context("map PROGRESS")?;
        PerCpuArray::try_from(progress)?.set(0, PerCpuValues::try_from(slots)?, 0)?;

        let before = self.interface.counters()?;
        let progress = PerCpuArray::try_from(self.ebpf.map("PROGRESS").context("map PROGRESS")?)?;
        let program: &Xdp =
            self.ebpf.program("generate").context("program generate")?.try_into()?;
        let run = Run {
            program,
            progress,
            interface: &self.interface,
            template: &flood.template,
            deadline,
            stop: flood.stop.as_deref(),
            repeat: repeats(flood.duration + 2 * SETUP),
        };
        run.on(&flood.cpus)?;

        let slots = run.progress.get(&0, 0)?;
        let per_cpu = flood.cpus.iter().map(|&cpu| SentByCpu {
            cpu,
            frames: slots[cpu].sent,
            first: Duration::from_nanos(slots[cpu].first),
            last: Duration::from_nanos(slots[cpu].last),
            pause: Duration::from_nanos(slots[cpu].pause),
        });
        let mut sent = Sent { per_cpu: per_cpu.collect(), lost: 0 };
        sent.lost = self.lost_since(before, sent.total())?;
        Ok(sent)
    }

    /// Waits until every frame sent shows in the counters of the interface, as taken or as lost.
    fn lost_since(&self, before: crate::netns::Counters, sent: u64) -> Result<u64> {
        let give_up = Instant::now() + Duration::from_secs(1);
        loop {
            let now = self.interface.counters()?;
            let lost = now.tx_dropped - before.tx_dropped;
            let taken = now.tx_packets - before.tx_packets;
            if taken + lost >= sent {
                return Ok(lost);
            }
            if Instant::now() > give_up {
                bail!(
                    "of {sent} frames sent from {} the other end took {taken} and lost {lost}: \
                     it takes none unless an XDP program is attached there or its GRO is on",
                    self.interface.name
                );
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// One flood while it runs.
struct Run<'a> {
    program: &'a Xdp,
    progress: PerCpuArray<&'a aya::maps::MapData, Progress>,
    interface: &'a Interface,
    template: &'a [u8],
    deadline: Duration,
    stop: Option<&'a AtomicBool>,
    repeat: u32,
}

impl Run<'_> {
    /// Runs the program on all of `cpus` at once. The kernel ends the loop after a number of
    /// turns or on a signal, so each thread is interrupted once its part is done.
    fn on(&self, cpus: &[usize]) -> Result<()> {
        let interruption = interruption()?;
        thread::scope(|scope| {
            let (identify, threads) = mpsc::channel();
            let workers: Vec<_> = cpus
                .iter()
                .map(|&cpu| {
                    let identify = identify.clone();
                    scope.spawn(move || {
                        // SAFETY: takes nothing and cannot fail.
                        let thread = unsafe { libc::pthread_self() };
                        // The receiver lives until this thread has ended.
                        let _ = identify.send((cpu, thread));
                        self.worker(cpu)
                    })
                })
                .collect();
            drop(identify);
            let threads: Vec<_> = threads.iter().take(cpus.len()).collect();
            while !workers.iter().all(thread::ScopedJoinHandle::is_finished) {
                thread::sleep(Duration::from_millis(2));
                for &(cpu, thread) in &threads {
                    if self.is_done(cpu)? {
                        // SAFETY: the handle of the thread is held and not yet joined, so its
                        // identity is valid; the signal has a handler that does nothing.
                        unsafe { libc::pthread_kill(thread, interruption as libc::c_int) };
                    }
                }
            }
            for worker in workers {
                worker.join().map_err(|_| anyhow!("a sending thread panicked"))??;
            }
            Ok(())
        })
    }

    fn worker(&self, cpu: usize) -> Result<()> {
        self.interface.netns.enter();
        let mut only = CpuSet::new();
        only.set(cpu)?;
        sched_setaffinity(Pid::from_raw(0), &only).with_context(|| format!("CPU {cpu}"))?;

        let context = xdp_md(self.interface.index, self.template.len())?;
        while !self.is_done(cpu)? {
            let result = self.program.test_run(TestRunOptions {
                data_in: Some(self.template),
                ctx_in: Some(&context),
                repeat: self.repeat,
                attrs: TestRunAttrs::new().xdp_live_frames(BATCH),
                ..TestRunOptions::new()
            });
            match result {
                Ok(_) => {}
                Err(ProgramError::SyscallError(error))
                    if error.io_error.raw_os_error() == Some(Errno::EINTR as i32) => {}
                Err(error) => return Err(error).context("sending live frames"),
            }
        }
        Ok(())
    }

    fn is_done(&self, cpu: usize) -> Result<bool> {
        let stopped = self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed));
        Ok(stopped || monotonic()? > self.deadline || self.progress.get(&0, 0)?[cpu].left == 0)
    }
}

/// What a [`Counter`] does with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Drops it in XDP.
    Drop,
    /// Passes it to the stack.
    Pass,
}

/// An XDP program that counts what arrives on an interface, as long as it lives.
pub struct Counter {
    ebpf: Ebpf,
}

impl Counter {
    /// Attaches to `interface` in native mode.
    ///
    /// # Errors
    /// If the kernel refuses the program or the attachment.
    pub fn attach(interface: &Interface, verdict: Verdict) -> Result<Self> {
        let mut ebpf = Ebpf::load(OBJECT).context("loading the counter")?;
        let name = match verdict {
            Verdict::Drop => "count_drop",
            Verdict::Pass => "count_pass",
        };
        let counter = program(&mut ebpf, name)?;
        counter.load()?;
        interface
            .netns
            .run(|| counter.attach_to_if_index(interface.index, XdpMode::Driver))
            .with_context(|| format!("attaching {name} to {}", interface.name))?;
        Ok(Self { ebpf })
    }

    /// Frames seen by each CPU since the start.
    ///
    /// # Errors
    /// If the map cannot be read.
    pub fn per_cpu(&self) -> Result<Vec<u64>> {
        let seen = self.ebpf.map("SEEN").context("map SEEN")?;
        let seen = PerCpuArray::<_, Seen>::try_from(seen)?.get(&0, 0)?;
        Ok(seen.iter().map(|cpu| cpu.packets).collect())
    }

    /// Frames seen since the start.
    ///
    /// # Errors
    /// If the map cannot be read.
    pub fn total(&self) -> Result<u64> {
        Ok(self.per_cpu()?.iter().sum())
    }
}

/// Now, by the clock of [`Sent::first`] and [`Sent::last`].
///
/// # Errors
/// If there is no monotonic clock.
pub fn monotonic() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_MONOTONIC)?.into())
}

fn program<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut Xdp> {
    let program = ebpf.program_mut(name).with_context(|| format!("program {name}"))?;
    Ok(program.try_into()?)
}

fn plan(flood: &Flood) -> Result<Plan> {
    let lanes = u32::try_from(flood.cpus.len())?;
    let interval = f64::from(lanes) * 1e9 / flood.rate;
    ensure!(
        interval == 0.0 || (1.0..1e12).contains(&interval),
        "a rate of {} frames per second cannot be kept",
        flood.rate
    );
    let start = monotonic()? + SETUP;
    let template = match flood.sources {
        // Sent as it is, whatever it is.
        Sources::Template => Template::default(),
        Sources::Ipv4 { .. } | Sources::Ipv6 { .. } => Template::parse(&flood.template)?,
    };
    let mut plan = Plan {
        start: nanoseconds(start)?,
        deadline: nanoseconds(start + flood.duration)?,
        interval: nanoseconds(Duration::from_secs_f64(
            interval * f64::from(1_u32 << FRACTION_BITS) / 1e9,
        ))?,
        catch_up: nanoseconds(flood.catch_up)? << FRACTION_BITS,
        base_high: 0,
        base_low: 0,
        per_prefix: 1,
        count: 1,
        lanes: u64::from(lanes),
        family: 0,
        source_offset: template.source_offset,
        checksum_base: template.checksum_base,
        random: 0,
        honest_every: 0,
        honest_count: 0,
        honest_high: 0,
        honest_low: 0,
        honest_port: 0,
        flood_port: 0,
    };
    if let Some(honest) = flood.honest {
        ensure!(flood.sources != Sources::Template, "beside honest sources there are others");
        plan.honest_every = u64::from(honest.every);
        plan.honest_count = u64::from(honest.sources);
        [plan.honest_high, plan.honest_low] = template.source;
        plan.honest_port = u32::from(template.port);
        plan.flood_port = u32::from(honest.flood_port);
    }
    let (family, order) = match flood.sources {
        Sources::Template => return Ok(plan),
        Sources::Ipv4 { first, count, order } => {
            plan.base_low = u64::from(first.to_bits());
            plan.count = u64::from(count);
            (FAMILY_IPV4, order)
        }
        Sources::Ipv6 { first, prefixes, per_prefix, order } => {
            let [high, low] = halves(first);
            plan.base_high = high;
            plan.base_low = low;
            plan.per_prefix = u64::from(per_prefix);
            plan.count = u64::from(prefixes) * u64::from(per_prefix);
            (FAMILY_IPV6, order)
        }
    };
    ensure!(family == template.family, "the template is of another family than its sources");
    ensure!(plan.count > 0, "a flood needs a source");
    plan.family = family;
    plan.random = u32::from(order == Order::Random);
    Ok(plan)
}

fn halves(address: Ipv6Addr) -> [u64; 2] {
    let SourceAddress { high, low, .. } = address.into();
    [high, low]
}

fn repeats(duration: Duration) -> u32 {
    let turns = duration.as_nanos() / FASTEST_TURN.as_nanos();
    u32::try_from(turns).unwrap_or(u32::MAX)
}

fn nanoseconds(duration: Duration) -> Result<u64> {
    u64::try_from(duration.as_nanos()).context("too long")
}

/// `struct xdp_md` for a frame of `length` bytes that comes in on queue 0 of an interface: data,
/// `data_end`, `data_meta`, `ingress_ifindex`, `rx_queue_index`, `egress_ifindex`.
fn xdp_md(ifindex: u32, length: usize) -> Result<Vec<u8>> {
    let fields = [0, u32::try_from(length)?, 0, ifindex, 0, 0];
    Ok(fields.map(u32::to_ne_bytes).concat())
}

/// A signal that interrupts a system call and does nothing else.
fn interruption() -> Result<Signal> {
    extern "C" fn nothing(_: libc::c_int) {}
    static INSTALL: Once = Once::new();
    let signal = Signal::SIGUSR2;
    let mut result = Ok(());
    INSTALL.call_once(|| {
        let action =
            SigAction::new(SigHandler::Handler(nothing), SaFlags::empty(), SigSet::empty());
        // SAFETY: a handler that does nothing may run at any point.
        result = unsafe { sigaction(signal, &action) }.map(mem::drop);
    });
    result.context("installing a signal handler")?;
    Ok(signal)
}
