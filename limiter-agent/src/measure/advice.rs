//! From what was measured to limits that none of it would have met.

use std::fmt;
use std::time::Duration;

use limiter_common::units::{ByteLimit, PacketLimit};
use serde::{Deserialize, Serialize};

use super::distribution::{Distribution, Followed};
use super::hour::{ClassHour, Group};
use crate::config::{Budget, Class};
use crate::status::Limit;

/// So many of an hour's sources, or seconds, may be far above all others and are not followed.
pub(super) const HANDFUL: u64 = 5;
/// No limit is advised below that: a source that sends a few packets more tomorrow is no flood.
const LEAST_PACKETS: u64 = 10;
const LEAST_BYTES: u64 = 15_000;
/// Nor a byte burst below some jumbo frames.
const LEAST_BYTE_BURST: u64 = 64 << 10;
const LEAST_NEW_SOURCES: u64 = 10;
/// Where one in so many of the unproven is taken for proven, some of them are not to be followed either.
const FALSE_PROOFS: f64 = 0.01;

/// When there is advice, and how much above the measured it is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Terms {
    /// A class must have been observed for so long, in seconds.
    pub min_seconds: u64,
    /// So many of its sources must have sent more than one packet.
    pub min_sources: u64,
    /// Limits are so many times what was measured; 1 or more.
    pub margin: f64,
}

impl Default for Terms {
    fn default() -> Self {
        Self { min_seconds: 3600, min_sources: 50, margin: 1.5 }
    }
}

/// What a class is advised.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassAdvice {
    /// The class.
    pub name: String,
    /// New limits, or why there are none.
    pub outcome: Outcome,
}

/// New limits, or none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Limits.
    Limits(Advice),
    /// The class keeps its limits, for this reason.
    Kept(Why),
}

/// Limits for a class. What is none stays as it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Advice {
    /// For each source, in packets.
    pub packets: Option<Limit>,
    /// For each source, in bytes.
    pub bytes: Option<Limit>,
    /// New sources.
    pub new_sources: Option<Limit>,
    /// All sources that have proven nothing together: where what is written would not have done.
    pub unproven: Option<Limit>,
    /// All sources together: where what is written would not have done.
    pub total: Option<Limit>,
    /// Whether the limits follow the proven sources alone.
    pub follows_proven: bool,
    /// The highest second that is followed, in packets.
    pub followed_packets: u64,
    /// The highest second that is followed, in bytes.
    pub followed_bytes: u64,
    /// Sources (proven, others) that sent more in a second than the new rate, and may be dropped in part.
    pub would_hit: [u64; 2],
}

/// Why there is no advice for a class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// It is in another mode.
    NotObserved {
        /// The mode.
        mode: String,
    },
    /// It was not observed for long enough.
    LittleTime {
        /// For how long it was, in seconds.
        seconds: u64,
        /// For how long it should, in seconds.
        needed: u64,
    },
    /// It has had too few sources that sent more than one packet.
    FewSources {
        /// How many it had.
        sources: u64,
        /// How many more sent a single packet.
        singles: u64,
        /// How many it should have had.
        needed: u64,
    },
}

impl fmt::Display for Why {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |seconds: &u64| humantime::format_duration(Duration::from_secs(*seconds));
        match self {
            Self::NotObserved { mode } => write!(
                out,
                "it is in mode {mode}, and only what is observed is measured; give it mode = \"observe\" for \
                 some time"
            ),
            Self::LittleTime { seconds, needed } => write!(
                out,
                "it was observed for {} and {} are needed; wait, or give another --min-time",
                time(seconds),
                time(needed)
            ),
            Self::FewSources { sources, singles, needed } => write!(
                out,
                "{sources} of its sources sent more than one packet ({singles} sent one) and {needed} are \
                 needed; wait, or give another --min-sources"
            ),
        }
    }
}

/// What `class` should be limited to after what was measured in it.
pub(super) fn advise(
    class: &Class,
    measured: &ClassHour,
    false_proofs: f64,
    one_in: u64,
    terms: &Terms,
) -> Result<Advice, Why> {
    let seconds = measured.time.as_secs();
    if seconds < terms.min_seconds {
        return Err(Why::LittleTime { seconds, needed: terms.min_seconds });
    }
    let ClassHour { proven, others, .. } = measured;
    let sources = proven.sources() + others.sources();
    if sources < terms.min_sources {
        let singles = proven.singles + others.singles;
        return Err(Why::FewSources { sources, singles, needed: terms.min_sources });
    }
    let follows_proven = proven.sources() >= terms.min_sources;
    let few = HANDFUL * measured.hours.max(1);
    let highest = |of: fn(&Group) -> &Distribution| {
        // Those who are proven for sure are followed, whatever they send.
        let known = if false_proofs < FALSE_PROOFS {
            of(proven).max()
        } else {
            of(proven).followed(few).highest
        };
        let unknown = if follows_proven { 0 } else { of(others).followed(few).highest };
        known.max(unknown)
    };
    let packets = highest(|group| &group.packets);
    let bytes = highest(|group| &group.bytes);
    let packets_limit = limit(packets, LEAST_PACKETS, 1, fastest_packets(), terms.margin);
    let bytes_limit = limit(bytes, LEAST_BYTES, LEAST_BYTE_BURST, fastest_bytes(), terms.margin);
    let above = |group: &Group| {
        let above = |limited: bool, of: &Distribution, limit: Limit| {
            if limited { of.above(whole(limit.per_second)) } else { 0 }
        };
        let packets = above(class.allowance.packets.is_some(), &group.packets, packets_limit);
        packets.max(above(class.allowance.bytes.is_some(), &group.bytes, bytes_limit))
    };
    Ok(Advice {
        packets: class.allowance.packets.map(|_| packets_limit),
        bytes: class.allowance.bytes.map(|_| bytes_limit),
        new_sources: class.new_sources.map(|_| new_sources(measured, one_in, terms.margin)),
        unproven: class.unproven.and_then(|it| raised(it, &measured.unproven, few, terms.margin)),
        total: class.total.and_then(|it| raised(it, &measured.packets, few, terms.margin)),
        follows_proven,
        followed_packets: packets,
        followed_bytes: bytes,
        would_hit: [above(proven), above(others)],
    })
}

/// What one source may send whose highest second is `highest`. Counts are of windows that follow each other
/// and are at least a second long. An interval of t seconds meets at most t + 2 of them, so a source that
/// sends at most C in each sends at most 2 × C + C × t in it: a bucket of rate C and burst 2 × C loses
/// nothing.
fn limit(highest: u64, least: u64, least_burst: u64, fastest: u64, margin: f64) -> Limit {
    let rate = round_up(times(highest, margin)).clamp(least, fastest);
    #[expect(clippy::cast_precision_loss, reason = "rates are far below 2^53")]
    Limit { per_second: rate as f64, burst: (2 * rate).max(least_burst) }
}

/// How many new sources a class should let in: per second what was measured, and at once all of its sources,
/// as after a restart. Its sources of a single packet count per second only: they are what a flood from
/// forged addresses is made of.
pub(super) fn new_sources(measured: &ClassHour, one_in: u64, margin: f64) -> Limit {
    let Followed { highest, .. } = measured.new.followed(HANDFUL * measured.hours.max(1));
    let known = (measured.proven.sources() + measured.others.sources() + measured.apart) * one_in;
    let least = round_up(times(known, margin));
    limit(highest, LEAST_NEW_SOURCES, least, fastest_packets(), margin)
}

/// A sum that would have been too low, raised. Strangers may use half of its burst.
fn raised(budget: Budget, seconds: &Distribution, few: u64, margin: f64) -> Option<Limit> {
    let rate = round_up(times(seconds.followed(few).highest, margin));
    let old = Limit::from(budget);
    let burst = rate.saturating_mul(4);
    if whole(old.per_second) >= rate && old.burst >= burst {
        return None;
    }
    let rate = rate.max(whole(old.per_second)).min(fastest_packets());
    #[expect(clippy::cast_precision_loss, reason = "rates are far below 2^53")]
    Some(Limit { per_second: rate as f64, burst: burst.max(old.burst) })
}

/// Two sums of budgets.
pub(super) fn plus(one: Limit, other: Limit) -> Limit {
    Limit { per_second: one.per_second + other.per_second, burst: one.burst + other.burst }
}

fn fastest_packets() -> u64 {
    whole(PacketLimit::FASTEST.per_second())
}

fn fastest_bytes() -> u64 {
    whole(ByteLimit::FASTEST.per_second())
}

/// A rate as a whole number.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rates are above 0 and far below 2^53"
)]
pub(super) fn whole(rate: f64) -> u64 {
    rate as u64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "what is measured is far below 2^53, and the cast saturates"
)]
fn times(value: u64, margin: f64) -> u64 {
    (value as f64 * margin).ceil() as u64
}

/// The next number of two digits and zeros.
fn round_up(value: u64) -> u64 {
    let unit = 10_u64.pow(value.max(1).ilog10().saturating_sub(1));
    value.div_ceil(unit).saturating_mul(unit)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_are_rounded_up_to_two_digits() {
        for (value, rounded) in
            [(0, 0), (7, 7), (99, 99), (101, 110), (1_200, 1_200), (1_201, 1_300)]
        {
            assert_eq!(round_up(value), rounded);
        }
    }

    proptest! {
        /// The rule that limits follow from: a bucket of rate C and burst 2 × C loses nothing of what has at
        /// most C in each window, wherever in the windows it lies.
        #[test]
        fn what_was_measured_loses_nothing(
            counts in prop::collection::vec(0..=20_u64, 1..12),
            places in prop::collection::vec(0.0..1.0_f64, 240),
        ) {
            const MOST: f64 = 20.0;
            let mut places = places.into_iter().cycle();
            let mut level = 2.0 * MOST;
            let mut last = 0.0;
            for (window, count) in (0_u32..).zip(counts) {
                let mut times: Vec<_> = places.by_ref().take(usize::try_from(count).unwrap_or(0)).collect();
                times.sort_by(f64::total_cmp);
                for time in times {
                    let now = f64::from(window) + time;
                    level = (level + (now - last) * MOST).min(2.0 * MOST);
                    last = now;
                    prop_assert!(level >= 1.0, "{level} at {now}");
                    level -= 1.0;
                }
            }
        }
    }
}
