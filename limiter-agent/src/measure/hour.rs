//! What one hour brought: distributions for each class, and the state of each source that is watched.

use std::collections::BTreeMap;
use std::time::Duration;

use limiter_common::abi::{ClassId, WatchedCount, WatchedSource};

use super::distribution::Distribution;
use super::{ABSENT, HOUR, SUSTAINED, Sums};

/// Of each group of a class the sources that sent most are named, so many of each hour.
const NAMED: usize = 8;

/// An hour, or what there is of it.
#[derive(Debug, Default)]
pub(super) struct Hour {
    age: Duration,
    classes: BTreeMap<ClassId, ClassHour>,
}

impl Hour {
    /// Whether it is not over after so much more time.
    pub(super) fn lasts_still(&mut self, elapsed: Duration) -> bool {
        self.age += elapsed;
        self.age < HOUR
    }

    pub(super) fn class(&mut self, class: ClassId) -> &mut ClassHour {
        self.classes.entry(class).or_default()
    }

    pub(super) fn classes(&self) -> impl Iterator<Item = (&ClassId, &ClassHour)> {
        self.classes.iter()
    }
}

/// What an hour, or several, brought in a class.
#[derive(Clone, Debug, Default)]
pub struct ClassHour {
    /// How long it was observed.
    pub time: Duration,
    /// In how many hours.
    pub hours: u64,
    /// Sources that have proven their address.
    pub proven: Group,
    /// The others.
    pub others: Group,
    /// Sources with limits of their own, which are in neither.
    pub apart: u64,
    /// New sources in each second.
    pub new: Distribution,
    /// Packets of all sources in each second.
    pub packets: Distribution,
    /// Packets of sources that had proven nothing, in each second.
    pub unproven: Distribution,
}

/// Sources of which each counts once an hour.
#[derive(Clone, Debug, Default)]
pub struct Group {
    /// Packets in the highest second of each source.
    pub packets: Distribution,
    /// Bytes in it.
    pub bytes: Distribution,
    /// Packets per second in the highest ten seconds.
    pub sustained_packets: Distribution,
    /// Bytes per second in them.
    pub sustained_bytes: Distribution,
    /// Sources that sent one packet, and are not in the distributions: that is all that a forged address
    /// costs, and no limit would stop it.
    pub singles: u64,
    /// Those who sent most packets in a second, the most first.
    pub top: Vec<Top>,
}

/// A source that sent much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Top {
    /// Who.
    pub source: WatchedSource,
    /// Packets in its highest second.
    pub packets: u64,
    /// Bytes in its highest second.
    pub bytes: u64,
}

impl ClassHour {
    /// A second in which all sources sent that much.
    pub(super) fn window(&mut self, elapsed: Duration, sums: Sums) {
        self.time += elapsed;
        self.hours = self.hours.max(1);
        self.new.record(sums.new);
        self.packets.record(sums.packets);
        self.unproven.record(sums.unproven);
    }

    /// A source's hour, as far as it has come.
    pub(super) fn record(&mut self, source: &WatchedSource, live: &Live) {
        match live.packets {
            0 => {}
            _ if live.is_apart == Some(true) => self.apart += 1,
            1 => self.group(live).singles += 1,
            _ => self.group(live).record(source, live),
        }
    }

    /// Adds another hour, or hours.
    pub(super) fn add(&mut self, other: &Self) {
        self.time += other.time;
        self.hours += other.hours;
        self.proven.add(&other.proven);
        self.others.add(&other.others);
        self.apart += other.apart;
        self.new.add(&other.new);
        self.packets.add(&other.packets);
        self.unproven.add(&other.unproven);
    }

    fn group(&mut self, live: &Live) -> &mut Group {
        if live.is_proven { &mut self.proven } else { &mut self.others }
    }
}

impl Group {
    /// How many sources are in the distributions.
    #[must_use]
    pub fn sources(&self) -> u64 {
        self.packets.count()
    }

    fn record(&mut self, source: &WatchedSource, live: &Live) {
        self.packets.record(live.second.packets);
        self.bytes.record(live.second.bytes);
        self.sustained_packets.record(live.sustained.packets.div_ceil(SUSTAINED.into()));
        self.sustained_bytes.record(live.sustained.bytes.div_ceil(SUSTAINED.into()));
        let WatchedCount { packets, bytes } = live.second;
        self.name([Top { source: *source, packets, bytes }]);
    }

    fn add(&mut self, other: &Self) {
        self.packets.add(&other.packets);
        self.bytes.add(&other.bytes);
        self.sustained_packets.add(&other.sustained_packets);
        self.sustained_bytes.add(&other.sustained_bytes);
        self.singles += other.singles;
        self.name(other.top.iter().copied());
    }

    fn name(&mut self, others: impl IntoIterator<Item = Top>) {
        for top in others {
            match self.top.iter_mut().find(|known| known.source == top.source) {
                Some(known) => {
                    known.packets = known.packets.max(top.packets);
                    known.bytes = known.bytes.max(top.bytes);
                }
                None => self.top.push(top),
            }
        }
        self.top.sort_by_key(|top| std::cmp::Reverse(top.packets));
        self.top.truncate(NAMED);
    }
}

/// A source that is watched, and what it has sent in this hour.
#[derive(Clone, Debug, Default)]
pub(super) struct Live {
    /// As read last.
    total: WatchedCount,
    /// In its highest second.
    second: WatchedCount,
    /// In its highest ten.
    sustained: WatchedCount,
    /// In those that run, and how many of them have.
    running: WatchedCount,
    windows: u32,
    /// In this hour.
    packets: u64,
    /// Windows without a packet, up to now.
    silent: u32,
    is_known: bool,
    pub(super) is_proven: bool,
    /// None while it is not known.
    is_apart: Option<bool>,
}

/// What a source sent in a window.
pub(super) struct Window {
    pub(super) packets: u64,
    /// Whether it did not for some time before.
    pub(super) is_new: bool,
}

impl Live {
    /// Takes in what was read. Where that was not after about a second, it says nothing of a second.
    pub(super) fn window(&mut self, total: WatchedCount, is_second: bool) -> Window {
        // Less than before is another entry, made since.
        let less = |new: u64, old: u64| if new >= old { new - old } else { new };
        let packets = less(total.packets, self.total.packets);
        let bytes = less(total.bytes, self.total.bytes);
        self.total = total;
        self.packets += packets;
        let is_new = packets > 0 && (!self.is_known || self.silent >= ABSENT);
        self.is_known = true;
        self.silent = if packets == 0 { self.silent.saturating_add(1) } else { 0 };
        if is_second {
            raise(&mut self.second, WatchedCount { packets, bytes });
            self.running.packets += packets;
            self.running.bytes += bytes;
            self.windows += 1;
            raise(&mut self.sustained, self.running);
        }
        if !is_second || self.windows >= SUSTAINED {
            self.running = WatchedCount::default();
            self.windows = 0;
        }
        Window { packets, is_new }
    }

    /// Finds out what is not known of it yet; once proven it stays so.
    pub(super) fn learn(&mut self, is_proven: impl Fn() -> bool, is_apart: impl Fn() -> bool) {
        self.is_proven = self.is_proven || is_proven();
        self.is_apart = self.is_apart.or_else(|| Some(is_apart()));
    }

    /// Prefixes may have changed.
    pub(super) fn ask_again(&mut self) {
        self.is_apart = None;
    }

    /// Whether it sent nothing for so long; for less if it is one that sent a single packet.
    pub(super) fn is_silent(&self, windows: u32, windows_of_single: u32) -> bool {
        self.silent >= if self.total.packets <= 1 { windows_of_single } else { windows }
    }

    pub(super) fn begin_hour(&mut self) {
        self.second = WatchedCount::default();
        self.sustained = WatchedCount::default();
        self.packets = 0;
    }
}

fn raise(highest: &mut WatchedCount, count: WatchedCount) {
    highest.packets = highest.packets.max(count.packets);
    highest.bytes = highest.bytes.max(count.bytes);
}
