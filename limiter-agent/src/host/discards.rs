//! What a NIC discards before XDP sees it: counters of drivers (`ethtool -S`) and of the kernel's
//! `rtnl_link_stats64`.
//!
//! Every driver names its counters itself. [`NAMES`] has those that count received frames for which
//! there was no room, and nothing else: not damaged frames, and not what an XDP program dropped (which
//! `rx_queue_N_drops` of `virtio_net` includes). Some count the same frame twice, at different places,
//! so they are not to be added up.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::mem::take;
use std::thread;
use std::time::Duration;

use tokio::runtime;
use tokio::sync::{Mutex, oneshot};
use tokio::time::{Instant, timeout_at};

use super::Link;
use super::driver::{driver, statistics};
use super::links::links;

/// How long a scrape waits for a driver; what it said last time stands in for it until it answers.
const PATIENCE: Duration = Duration::from_millis(250);

/// The names that drivers give to such counters; N is any number (of a queue, a priority or a ring),
/// over which is summed up.
const NAMES: &[&str] = &[
    // e1000e, igb, igc, ixgbe, i40e; the NIC's buffer was full.
    "rx_missed_errors",
    "rx_fifo_errors",
    // The same, for want of descriptors in the host's memory.
    "rx_no_buffer_count",
    "rx_no_dma_resources",
    // i40e: the port's, under both names that it has had; ice: the port's.
    "port.rx_dropped",
    "port.rx_discards",
    "rx_dropped.nic",
    // i40e, ice: this interface's part of the port; gve: no memory for a buffer.
    "rx_dropped",
    // mlx5: the port's buffer was full; a queue had no descriptor; by priority.
    "rx_discards_phy",
    "rx_out_of_buffer",
    "rx_prioN_discards",
    // bnxt: rings without descriptors (two names); the port's.
    "rx_total_ring_discards",
    "rx_total_discard_pkts",
    "rx_stat_discard",
    // virtio_net, if the device counts.
    "rxN_hw_drops",
    "rxN_hw_drop_overruns",
    // ena: beyond what the instance may have; the second counts both directions.
    "bw_in_allowance_exceeded",
    "pps_allowance_exceeded",
    "conntrack_allowance_exceeded",
];

/// A counter of what a NIC discarded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discard {
    /// The interface.
    pub interface: String,
    /// The counter's name, with N in place of a number.
    pub counter: String,
    /// Frames.
    pub value: u64,
}

/// Reads these counters, and never waits long for a driver that does not answer.
#[derive(Debug, Default)]
pub struct Discards(Mutex<HashMap<String, Reading>>);

/// What is known of one interface.
#[derive(Debug, Default)]
struct Reading {
    last: BTreeMap<String, u64>,
    /// A reading that goes on.
    running: Option<oneshot::Receiver<BTreeMap<String, u64>>>,
}

impl Discards {
    /// The counters of these interfaces. One that does not answer in time keeps its last values, and is
    /// asked anew once it has answered.
    pub async fn read(&self, interfaces: &[String]) -> Vec<Discard> {
        self.read_with(interfaces, counters).await
    }

    async fn read_with(
        &self,
        interfaces: &[String],
        counters: fn(&str) -> BTreeMap<String, u64>,
    ) -> Vec<Discard> {
        let mut readings = self.0.lock().await;
        readings.retain(|name, reading| interfaces.contains(name) || reading.running.is_some());
        for name in interfaces {
            let reading = readings.entry(name.clone()).or_default();
            let ask = name.clone();
            reading.running.get_or_insert_with(|| in_thread(move || counters(&ask)));
        }
        let until = Instant::now() + PATIENCE;
        let mut discards = Vec::new();
        for name in interfaces {
            let Some(reading) = readings.get_mut(name) else { continue };
            if let Some(running) = &mut reading.running
                && let Ok(answer) = timeout_at(until, running).await
            {
                reading.last = answer.unwrap_or(take(&mut reading.last));
                reading.running = None;
            }
            discards.extend(reading.last.iter().map(|(counter, value)| Discard {
                interface: name.clone(),
                counter: counter.clone(),
                value: *value,
            }));
        }
        discards
    }
}

/// Works on a thread of its own: the kernel waits inside of the call until the driver has answered. It is
/// none of the runtime's, whose end would wait for it.
fn in_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> oneshot::Receiver<T> {
    let (sender, receiver) = oneshot::channel();
    // Nobody may be waiting any more, and without a thread there is no answer.
    let _ = thread::Builder::new().spawn(move || drop(sender.send(work())));
    receiver
}

/// All counters of the interface that [`NAMES`] has, and the kernel's own.
fn counters(name: &str) -> BTreeMap<String, u64> {
    let mut counters = chosen(statistics(name));
    let Some(link) = link(name).ok().flatten() else { return counters };
    // Where the driver has one of that name, it is the same.
    counters.entry("rx_missed_errors".to_owned()).or_insert(link.missed);
    // `rx_dropped` also counts what the kernel drops behind XDP, but this driver adds what the device did.
    if driver(name).as_deref() == Some("ena") {
        counters.entry("rx_dropped".to_owned()).or_insert(link.dropped);
    }
    counters
}

/// Those of `statistics` that [`NAMES`] has, summed up over numbers.
fn chosen(statistics: Vec<(String, u64)>) -> BTreeMap<String, u64> {
    let mut counters = BTreeMap::new();
    for (name, value) in statistics {
        let name = if NAMES.contains(&name.as_str()) { name } else { without_numbers(&name) };
        if NAMES.contains(&name.as_str()) {
            let sum: &mut u64 = counters.entry(name).or_default();
            *sum = sum.wrapping_add(value);
        }
    }
    counters
}

/// With N in place of each number.
fn without_numbers(name: &str) -> String {
    let mut text = String::new();
    for character in name.chars() {
        match character {
            '0'..='9' if text.ends_with('N') => {}
            '0'..='9' => text.push('N'),
            other => text.push(other),
        }
    }
    text
}

/// On the calling thread alone, since the kernel asks the driver here, too.
fn link(name: &str) -> io::Result<Option<Link>> {
    let runtime = runtime::Builder::new_current_thread().enable_io().build()?;
    let links = runtime.block_on(links()).map_err(io::Error::other)?;
    Ok(links.into_iter().find(|link| link.name == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_discards_are_chosen_and_queues_are_summed_up() {
        let statistics = [
            ("rx_packets", 9),
            ("rx_missed_errors", 4),
            ("rx_crc_errors", 5),
            ("rx_prio0_discards", 1),
            ("rx_prio17_discards", 2),
            ("rx_queue_0_drops", 7),
            ("rx_queue_0_xdp_drops", 7),
            ("rx0_hw_drops", 3),
            ("rx_64_bytes", 8),
        ];
        let statistics = statistics.map(|(name, value)| (name.to_owned(), value)).to_vec();
        let chosen: Vec<_> = chosen(statistics).into_iter().collect();
        let expected = [("rxN_hw_drops", 3), ("rx_missed_errors", 4), ("rx_prioN_discards", 3)];
        assert_eq!(chosen, expected.map(|(name, value)| (name.to_owned(), value)));
    }

    #[test]
    fn every_name_is_its_own_pattern() {
        for name in NAMES {
            assert_eq!(without_numbers(name), *name);
        }
    }

    #[tokio::test]
    async fn a_driver_that_hangs_holds_up_neither_a_scrape_nor_another() {
        fn counters(name: &str) -> BTreeMap<String, u64> {
            if name == "slow0" {
                thread::sleep(PATIENCE * 8);
            }
            BTreeMap::from([("rx_missed_errors".to_owned(), 1)])
        }
        let discards = Discards::default();
        let names = ["slow0".to_owned(), "fast0".to_owned()];
        let begin = Instant::now();
        for _ in 0..2 {
            let read = discards.read_with(&names, counters).await;
            let names: Vec<_> = read.iter().map(|it| it.interface.as_str()).collect();
            assert_eq!(names, ["fast0"]);
        }
        assert!(begin.elapsed() < PATIENCE * 6, "{:?}", begin.elapsed());
    }
}
