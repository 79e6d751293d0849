//! The last hour's rates, which the agent keeps so that the page needs no database.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use limiter_common::abi::Count;

use crate::telemetry::PacketCount;

/// How far apart points are.
pub const PERIOD: Duration = Duration::from_secs(5);
/// Points that are kept: an hour.
const POINTS: usize = 720;
/// Series of one point: what is beyond that is kept as one, [`OTHERS`]. 720 points of 256 take 2.8 MiB.
const SERIES: usize = 256;
/// The class and the reason of what found no place of its own.
const OTHERS: &str = "(others)";

/// What a rate of now is taken over, at least.
const GLANCE: Duration = Duration::from_secs(1);
/// Readings that are kept to compare the next with: they are at least a [`GLANCE`] apart, and the
/// oldest is that of the last point or one before it.
const READINGS: usize = 8;

/// What is counted apart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Series {
    class: String,
    reason: &'static str,
    action: &'static str,
}

/// Packets and bytes, per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rate {
    /// Packets per second.
    pub packets: f64,
    /// Bytes per second, whole frames.
    pub bytes: f64,
}

/// The counters at one time.
#[derive(Clone, Debug)]
pub struct Reading {
    at: Instant,
    series: BTreeMap<Arc<Series>, Count>,
    interfaces: BTreeMap<(String, &'static str), Count>,
    created: u64,
}

/// The rates of one period.
#[derive(Clone, Debug)]
struct Point {
    at: Instant,
    seconds: f32,
    rates: Box<[Entry]>,
}

/// 16 bytes, so that many fit.
#[derive(Clone, Debug)]
struct Entry {
    series: Arc<Series>,
    packets: f32,
    bytes: f32,
}

/// The rates of the last [`POINTS`] periods.
#[derive(Clone, Debug, Default)]
pub struct History {
    points: VecDeque<Point>,
    /// How many have gone: the number of the first.
    gone: usize,
    readings: VecDeque<Reading>,
    /// Those in use, so that a name is in memory once.
    names: BTreeSet<Arc<Series>>,
}

/// What came of the history for one part of the traffic.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Line {
    /// Its name.
    pub name: String,
    /// Now.
    pub now: Rate,
    /// Over the range.
    pub mean: Rate,
    /// The highest of one period, in packets per second.
    pub peak: f64,
    /// Packets per second, at each of [`Traffic::times`].
    pub values: Vec<f64>,
}

/// What came of the history.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Traffic {
    /// When values are of, in minutes from now: none above 0, which is the last.
    pub times: Vec<f64>,
    /// `pass`, `would_drop`, `drop`, as far as there was any.
    pub verdicts: Vec<Line>,
    /// All packets, by class; the most in all first.
    pub classes: Vec<Line>,
    /// Of those, what was dropped or would be.
    pub held: Vec<Line>,
    /// What was dropped or would be, by reason; the most in all first.
    pub reasons: Vec<Line>,
    /// Now, by interface and action.
    pub interfaces: BTreeMap<(String, &'static str), Rate>,
    /// New sources per second that got a bucket, now.
    pub created: f64,
    /// What the rates of now were taken over; none if there was no earlier reading.
    pub glance: Option<Duration>,
}

impl Reading {
    /// The sums of `packets` over interfaces and families, and how many buckets were created.
    #[must_use]
    pub fn new(at: Instant, packets: &[PacketCount], created: u64) -> Self {
        let mut series: BTreeMap<_, Count> = BTreeMap::new();
        let mut interfaces: BTreeMap<_, Count> = BTreeMap::new();
        for row in packets {
            let PacketCount { interface, class, reason, action, count, .. } = row;
            let key = Series { class: class.clone(), reason, action };
            add(series.entry(Arc::new(key)).or_default(), *count);
            add(interfaces.entry((interface.clone(), *action)).or_default(), *count);
        }
        Self { at, series, interfaces, created }
    }
}

impl History {
    /// Adds a point: what came since the last one.
    pub fn add(&mut self, reading: Reading) {
        if let Some(point) = self.point(&reading) {
            if self.points.len() == POINTS {
                self.points.pop_front();
                self.gone += 1;
            }
            self.points.push_back(point);
            self.names.retain(|name| Arc::strong_count(name) > 1);
        }
        self.remember(reading);
    }

    /// What is known of the last `range`, with what came until `reading`.
    pub fn traffic(&mut self, reading: Reading, range: Duration) -> Traffic {
        let mut latest = self.readings.iter().rev();
        let before = latest.find(|it| it.at + GLANCE <= reading.at).cloned();
        let glance = before.as_ref().map(|before| reading.at - before.at);
        let now = self.rates(before.as_ref(), &reading);
        let over = |before: &Reading| {
            let seconds = (reading.at - before.at).as_secs_f64();
            let interfaces = reading.interfaces.iter().map(|(key, count)| {
                let old = before.interfaces.get(key).copied().unwrap_or_default();
                (key.clone(), rate(*count, old, seconds))
            });
            let created = reading.created.saturating_sub(before.created);
            (interfaces.collect(), count(created) / seconds)
        };
        let (interfaces, created) = before.as_ref().map(over).unwrap_or_default();
        let points: Vec<_> = self.since(reading.at, range).collect();
        let lines = |name: &dyn Fn(&Series) -> Option<&str>| lines(&points, &now, name);
        let is_held = |series: &Series| series.action != "pass";
        let mut verdicts = lines(&|series| Some(series.action));
        let order = ["pass", "would_drop", "drop"];
        verdicts.sort_by_key(|line| order.iter().position(|it| *it == line.name));
        let minutes = |it: &Group<'_>| -(reading.at - it.at).as_secs_f64() / 60.0;
        let traffic = Traffic {
            times: points.iter().map(minutes).chain([0.0]).collect(),
            verdicts,
            classes: lines(&|series| Some(&series.class)),
            held: lines(&|series| is_held(series).then_some(&series.class)),
            reasons: lines(&|series| is_held(series).then_some(series.reason)),
            interfaces,
            created,
            glance,
        };
        if self.readings.back().is_none_or(|last| last.at + GLANCE <= reading.at) {
            self.remember(reading);
        }
        traffic
    }

    fn remember(&mut self, reading: Reading) {
        if self.readings.len() == READINGS {
            self.readings.pop_front();
        }
        self.readings.push_back(reading);
    }

    /// What came since the last point's end; none if there is nothing to compare with.
    fn point(&mut self, reading: &Reading) -> Option<Point> {
        let end = self.points.back().map(|point| point.at);
        let before = self.readings.iter().find(|it| end.is_none_or(|end| it.at >= end));
        let before = before.or(self.readings.back())?.clone();
        let seconds = (reading.at - before.at).as_secs_f32();
        (seconds > 0.0).then(|| Point {
            at: reading.at,
            seconds,
            rates: self.rates(Some(&before), reading).into(),
        })
    }

    fn rates(&mut self, before: Option<&Reading>, reading: &Reading) -> Vec<Entry> {
        let Some(before) = before else {
            return Vec::new();
        };
        let seconds = (reading.at - before.at).as_secs_f64();
        let mut rates: Vec<_> = reading
            .series
            .iter()
            .map(|(series, count)| {
                let old = before.series.get(series).copied().unwrap_or_default();
                (Arc::clone(series), rate(*count, old, seconds))
            })
            .filter(|(_, rate)| rate.packets > 0.0)
            .collect();
        if rates.len() > SERIES {
            rates.sort_by(|(_, a), (_, b)| b.packets.total_cmp(&a.packets));
            let mut rest = BTreeMap::<_, Rate>::new();
            // One place for each action.
            for (series, rate) in rates.drain(SERIES - 3..) {
                let sum = rest.entry(series.action).or_default();
                sum.packets += rate.packets;
                sum.bytes += rate.bytes;
            }
            let others = |(action, rate)| {
                (Arc::new(Series { class: OTHERS.into(), reason: OTHERS, action }), rate)
            };
            rates.extend(rest.into_iter().map(others));
        }
        rates.into_iter().map(|(series, rate)| self.entry(series, rate)).collect()
    }

    #[expect(clippy::cast_possible_truncation, reason = "seven digits do for people to read")]
    fn entry(&mut self, series: Arc<Series>, rate: Rate) -> Entry {
        let series = self.names.get(&series).cloned().unwrap_or_else(|| {
            self.names.insert(Arc::clone(&series));
            series
        });
        Entry { series, packets: rate.packets as f32, bytes: rate.bytes as f32 }
    }

    /// The points of the last `range`, so many together that there are at most 181. Whose turn it is goes by
    /// their numbers: a group once full stays the same.
    fn since(&self, now: Instant, range: Duration) -> impl Iterator<Item = Group<'_>> {
        let each = usize::try_from(range.as_secs() / PERIOD.as_secs() / 180).unwrap_or(1).max(1);
        let mut groups: Vec<Group<'_>> = Vec::new();
        let numbered = (self.gone..).zip(&self.points);
        for (number, point) in numbered.filter(|(_, point)| now - point.at <= range) {
            match groups.last_mut() {
                Some(group) if group.number == number / each => {
                    group.at = point.at;
                    group.points.push(point);
                }
                _ => {
                    groups.push(Group { number: number / each, at: point.at, points: vec![point] });
                }
            }
        }
        groups.into_iter()
    }
}

/// Points that are shown as one.
struct Group<'a> {
    number: usize,
    at: Instant,
    points: Vec<&'a Point>,
}

/// By name, the most packets first.
fn lines(groups: &[Group<'_>], now: &[Entry], name: &dyn Fn(&Series) -> Option<&str>) -> Vec<Line> {
    let mut lines: BTreeMap<String, Line> = BTreeMap::new();
    let length = groups.len() + 1;
    let mut seconds = 0.0;
    for (index, group) in groups.iter().enumerate() {
        let in_group: f64 = group.points.iter().map(|it| f64::from(it.seconds)).sum();
        seconds += in_group;
        for point in &group.points {
            for (name, rate) in sums(&point.rates, name) {
                let line = line(&mut lines, name, length);
                let weight = f64::from(point.seconds);
                line.mean.packets += rate.packets * weight;
                line.mean.bytes += rate.bytes * weight;
                line.peak = line.peak.max(rate.packets);
                line.values[index] += rate.packets * weight / in_group;
            }
        }
    }
    for (name, rate) in sums(now, name) {
        let line = line(&mut lines, name, length);
        line.now = rate;
        line.peak = line.peak.max(rate.packets);
        line.values[length - 1] = rate.packets;
    }
    let mut lines: Vec<_> = lines.into_values().collect();
    for line in &mut lines {
        let of_all = |sum: f64| if seconds > 0.0 { sum / seconds } else { 0.0 };
        line.mean = Rate { packets: of_all(line.mean.packets), bytes: of_all(line.mean.bytes) };
    }
    let weight = |line: &Line| line.mean.packets + line.now.packets;
    lines.sort_by(|a, b| weight(b).total_cmp(&weight(a)));
    lines
}

fn line<'a>(lines: &'a mut BTreeMap<String, Line>, name: &str, length: usize) -> &'a mut Line {
    lines.entry(name.to_owned()).or_insert_with(|| Line {
        name: name.to_owned(),
        values: vec![0.0; length],
        ..Line::default()
    })
}

fn sums<'a>(
    rates: &'a [Entry],
    name: &dyn Fn(&'a Series) -> Option<&'a str>,
) -> BTreeMap<&'a str, Rate> {
    let mut sums: BTreeMap<_, Rate> = BTreeMap::new();
    for entry in rates {
        if let Some(name) = name(&entry.series) {
            let sum = sums.entry(name).or_default();
            sum.packets += f64::from(entry.packets);
            sum.bytes += f64::from(entry.bytes);
        }
    }
    sums
}

fn add(sum: &mut Count, count: Count) {
    sum.packets += count.packets;
    sum.bytes += count.bytes;
}

fn rate(new: Count, old: Count, seconds: f64) -> Rate {
    Rate {
        packets: count(new.packets.saturating_sub(old.packets)) / seconds,
        bytes: count(new.bytes.saturating_sub(old.bytes)) / seconds,
    }
}

#[expect(clippy::cast_precision_loss, reason = "exact up to 2⁵³")]
fn count(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(class: &str, reason: &'static str, action: &'static str, packets: u64) -> PacketCount {
        PacketCount {
            interface: "eth0".into(),
            family: "ipv4",
            class: class.into(),
            reason,
            action,
            count: Count { packets, bytes: packets * 100 },
        }
    }

    fn line<'a>(lines: &'a [Line], name: &str) -> &'a Line {
        lines.iter().find(|line| line.name == name).expect(name)
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-3 * b.abs().max(1.0), "{a} is not {b}");
    }

    #[test]
    fn a_flood_shows_in_the_glance_before_it_is_a_point() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs_f64(seconds);
        let pass = |packets| row("rest", "conform", "pass", packets);
        let mut history = History::default();
        for n in 0..4_u32 {
            let rows = [pass(500 * u64::from(n))];
            history.add(Reading::new(after(5.0 * f64::from(n)), &rows, 0));
        }
        // Two seconds after the last point, in which a flood began.
        let rows = [pass(1700), row("rest", "packet_rate", "drop", 20_000)];
        let range = Duration::from_mins(5);
        let traffic = history.traffic(Reading::new(after(17.0), &rows, 30), range);
        assert_eq!(traffic.glance, Some(Duration::from_secs(2)));
        close(line(&traffic.verdicts, "drop").now.packets, 10_000.0);
        close(line(&traffic.verdicts, "drop").now.bytes, 1_000_000.0);
        close(line(&traffic.verdicts, "pass").mean.packets, 100.0);
        close(line(&traffic.classes, "rest").now.packets, 10_100.0);
        close(line(&traffic.held, "rest").now.packets, 10_000.0);
        close(line(&traffic.reasons, "packet_rate").peak, 10_000.0);
        close(traffic.created, 15.0);
        close(traffic.interfaces[&("eth0".to_owned(), "drop")].packets, 10_000.0);
        assert_eq!(traffic.times.len(), 4, "three points, and now");
        // What was glanced at does not shorten the next point.
        history.add(Reading::new(after(20.0), &rows, 30));
        let traffic = history.traffic(Reading::new(after(20.0), &rows, 30), range);
        close(line(&traffic.verdicts, "drop").values[3], 4000.0);
        close(line(&traffic.verdicts, "drop").now.packets, 0.0);
    }

    #[test]
    fn memory_is_bounded_and_nothing_is_lost() {
        assert_eq!(size_of::<Entry>(), 16);
        let start = Instant::now();
        let mut history = History::default();
        for n in 0..800_u32 {
            let rows: Vec<_> = (0..400)
                .map(|class| row(&format!("c{class}"), "total", "drop", 500 * u64::from(n)))
                .collect();
            history.add(Reading::new(start + PERIOD * n, &rows, 0));
        }
        assert_eq!(history.points.len(), POINTS);
        assert!(history.points.iter().all(|point| point.rates.len() <= SERIES));
        assert!(history.names.len() <= 2 * SERIES);
        let rows: Vec<_> =
            (0..400).map(|class| row(&format!("c{class}"), "total", "drop", 400_000)).collect();
        let reading = Reading::new(start + PERIOD * 800, &rows, 0);
        let traffic = history.traffic(reading, Duration::from_hours(1));
        close(line(&traffic.verdicts, "drop").now.packets, 40_000.0);
        close(line(&traffic.verdicts, "drop").mean.packets, 40_000.0);
        assert!(traffic.times.len() <= 182, "{}", traffic.times.len());
        assert!(traffic.times.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn names_that_went_away_are_forgotten() {
        let start = Instant::now();
        let mut history = History::default();
        for n in 0..2000_u32 {
            let class = format!("c{}", n / 10);
            let rows = [row(&class, "conform", "pass", u64::from(n))];
            history.add(Reading::new(start + PERIOD * n, &rows, 0));
        }
        assert!(history.names.len() < 100, "{}", history.names.len());
    }
}
