//! `/v1/capture`: samples of what is dropped, as they come.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use limiter_common::abi::{ClassId, Sample, SampleCount, Sampling, Slot};
use limiter_common::time::Nanos;
use limiter_common::units::{PacketLimit, Rate};
use limiter_common::{Outcome, Reason};
use serde::{Deserialize, Serialize};
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::body::Body as Payload;
use super::{Shared, problem};
use crate::agent::Agent;
use crate::datapath::{DatapathError, Watch};
use crate::host;
use crate::plan::Names;

/// Packets a second, unless the request says otherwise.
pub const DEFAULT_RATE: u32 = 100;
/// The most that a request may ask for: what a reader can take without losing any.
pub const HIGHEST_RATE: u32 = 10_000;

/// How often the totals are said and sampling is kept on.
const PERIOD: Duration = Duration::from_millis(500);

/// Which drops are wanted; empty lists stand for all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CaptureRequest {
    /// Packets a second, at most.
    pub rate: u32,
    /// Names of guarded interfaces.
    pub interfaces: Vec<String>,
    /// Names of classes.
    pub classes: Vec<String>,
    /// Reasons, as metrics have them.
    pub reasons: Vec<String>,
}

/// One line of the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Line {
    /// A packet that was dropped, or would be.
    Packet(CapturedPacket),
    /// What came of it since the capture began.
    Totals(Totals),
}

/// A packet that was dropped, or would be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapturedPacket {
    /// When, as RFC 3339 writes it, in nanoseconds.
    pub time: String,
    /// Where it came in.
    pub interface: String,
    /// Its address family.
    pub family: String,
    /// Its class; `none` where no class was consulted.
    pub class: String,
    /// Why.
    pub reason: String,
    /// `drop` or `would_drop`.
    pub action: String,
    /// For how many packets it stands.
    pub weight: u64,
    /// The frame's length in bytes.
    pub length: u32,
    /// The beginning of the frame, in hexadecimal.
    pub bytes: String,
}

/// What came of a capture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Packets dropped, or that would be, among those that were asked for.
    pub dropped: u64,
    /// Packets captured.
    pub captured: u64,
    /// Packets that were to be captured and were lost on the way.
    pub lost: u64,
}

impl Default for CaptureRequest {
    fn default() -> Self {
        Self { rate: DEFAULT_RATE, interfaces: vec![], classes: vec![], reasons: vec![] }
    }
}

/// Streams lines of JSON until the client goes away or the agent stops.
pub(super) async fn capture(
    State(agent): State<Shared>,
    Payload(request): Payload<CaptureRequest>,
) -> Response {
    match Capture::start(agent, &request).await {
        Ok(capture) => {
            let lines = stream::unfold(capture, |mut capture| async {
                capture.next().await.map(|lines| (lines, capture))
            });
            let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
            (kind, Body::from_stream(lines)).into_response()
        }
        Err(Refused::Request(errors)) => {
            problem(StatusCode::UNPROCESSABLE_ENTITY, "nothing was captured", errors)
        }
        Err(Refused::Busy) => problem(
            StatusCode::CONFLICT,
            "another capture is running, and there is one at a time: wait for it, or end it",
            vec![],
        ),
        Err(Refused::Kernel(error)) => problem(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the datapath cannot be told to sample",
            vec![error.to_string()],
        ),
    }
}

/// Why there is no capture.
enum Refused {
    Request(Vec<String>),
    Busy,
    Kernel(DatapathError),
}

/// A capture that goes on; sampling is switched off when it is dropped.
struct Capture {
    agent: Shared,
    watch: Watch,
    timer: Interval,
    labels: Labels,
    /// What had been counted when it began.
    before: SampleCount,
}

impl Capture {
    async fn start(shared: Shared, request: &CaptureRequest) -> Result<Self, Refused> {
        let agent = shared.lock().await;
        let sampling = sampling(request, agent.names()).map_err(Refused::Request)?;
        let samples = agent.samples().try_lock_owned().map_err(|_| Refused::Busy)?;
        let before = agent.sample_count().map_err(Refused::Kernel)?;
        let watch = Watch::start(samples, sampling).map_err(Refused::Kernel)?;
        let labels = Labels::of(&agent);
        drop(agent);
        let mut timer = interval(PERIOD);
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok(Self { agent: shared, watch, timer, labels, before })
    }

    /// The next lines; none at the end.
    async fn next(&mut self) -> Option<Result<Bytes, DatapathError>> {
        tokio::select! {
            // The timer first: under a flood there are always more samples, and who never came to it
            // would see sampling run out.
            biased;
            _ = self.timer.tick() => self.totals().await.transpose(),
            samples = self.watch.next() => Some(samples.map(|samples| self.packets(&samples))),
        }
    }

    fn packets(&self, samples: &[Sample]) -> Bytes {
        let clocks = host::clocks();
        let packets = samples.iter().filter_map(|sample| self.labels.packet(sample, clocks));
        packets.map(|packet| line(&Line::Packet(packet))).collect::<String>().into()
    }

    async fn totals(&mut self) -> Result<Option<Bytes>, DatapathError> {
        let agent = self.agent.lock().await;
        if agent.is_stopped() {
            return Ok(None);
        }
        let now = agent.sample_count()?;
        // Classes and interfaces may come with a reload.
        self.labels = Labels::of(&agent);
        drop(agent);
        self.watch.renew()?;
        let totals = Totals {
            dropped: now.offered.saturating_sub(self.before.offered),
            captured: now.written.saturating_sub(self.before.written),
            lost: now.lost.saturating_sub(self.before.lost),
        };
        Ok(Some(line(&Line::Totals(totals)).into()))
    }
}

/// A line of JSON.
fn line(line: &Line) -> String {
    // Nothing in it can fail to be written.
    serde_json::to_string(line).map(|text| text + "\n").unwrap_or_default()
}

/// The names of numbers.
struct Labels {
    slots: HashMap<Slot, String>,
    classes: HashMap<ClassId, String>,
}

impl Labels {
    fn of(agent: &Agent) -> Self {
        let names = agent.names();
        Self {
            slots: names.slots().map(|(name, slot)| (slot, name.to_owned())).collect(),
            classes: names.classes().map(|(name, class)| (class, name.to_owned())).collect(),
        }
    }

    /// `clocks` are the monotonic and the wall clock at one instant, not before the sample's.
    fn packet(&self, sample: &Sample, clocks: (Nanos, SystemTime)) -> Option<CapturedPacket> {
        let Outcome { slot, family, class, reason, action } = sample.outcome.outcome()?;
        let age = Duration::from_nanos(clocks.0.0.saturating_sub(sample.at.0));
        let captured = usize::try_from(sample.captured).ok()?;
        let bytes = sample.bytes.get(..captured)?;
        let name = |name: Option<&String>, other: &str| name.map_or(other, |it| it).to_owned();
        Some(CapturedPacket {
            time: humantime::format_rfc3339_nanos(clocks.1 - age).to_string(),
            interface: name(self.slots.get(&slot), UNKNOWN),
            family: family.label().to_owned(),
            class: name(self.classes.get(&class), NO_CLASS),
            reason: reason.label().to_owned(),
            action: action.label().to_owned(),
            weight: sample.weight,
            length: sample.length,
            bytes: bytes.iter().fold(String::new(), |mut text, byte| {
                let _ = write!(text, "{byte:02x}");
                text
            }),
        })
    }
}

/// What metrics call an interface that is not configured.
const UNKNOWN: &str = "unknown";
/// What metrics call no class.
const NO_CLASS: &str = "none";

/// What the datapath is told.
fn sampling(request: &CaptureRequest, names: &Names) -> Result<Sampling, Vec<String>> {
    let mut errors = Vec::new();
    let mut sampling = Sampling::all(PacketLimit::NONE, Nanos(0));
    match budget(request.rate) {
        Some(budget) => sampling.budget = budget,
        None => errors.push(format!("a rate of {}: write 1 to {HIGHEST_RATE}/s", request.rate)),
    }
    let slots = names.slots().map(|(name, slot)| (name, slot.0)).chain([(UNKNOWN, 0)]);
    if let Some(bits) = bits("interface", &request.interfaces, slots, &mut errors) {
        sampling.slots = u32::try_from(bits & u128::from(u32::MAX)).unwrap_or(u32::MAX);
    }
    let reasons = Reason::ALL
        .iter()
        .filter(|reason| reason.drops_by_default() || **reason == Reason::TableFull);
    let reasons = reasons.map(|reason| (reason.label(), *reason as u32));
    if let Some(bits) = bits("reason", &request.reasons, reasons, &mut errors) {
        sampling.reasons = u32::try_from(bits & u128::from(u32::MAX)).unwrap_or(u32::MAX);
    }
    let classes = names.classes().map(|(name, class)| (name, class.0)).chain([(NO_CLASS, 0)]);
    if let Some(bits) = bits("class", &request.classes, classes, &mut errors) {
        let half = |bits: u128| u64::try_from(bits & u128::from(u64::MAX)).unwrap_or(u64::MAX);
        sampling.classes = [half(bits), half(bits >> 64)];
    }
    if errors.is_empty() { Ok(sampling) } else { Err(errors) }
}

/// A tenth of a second's packets may come at once.
fn budget(rate: u32) -> Option<PacketLimit> {
    if rate > HIGHEST_RATE {
        return None;
    }
    let burst = u64::from(rate / 10).max(1);
    PacketLimit::new(Rate::new(rate.into(), 1).ok()?, burst).ok()
}

/// A bit for the number of each of the names `asked` for; none if no name was.
fn bits<'a>(
    what: &str,
    asked: &[String],
    known: impl Iterator<Item = (&'a str, u32)>,
    errors: &mut Vec<String>,
) -> Option<u128> {
    if asked.is_empty() {
        return None;
    }
    let known: Vec<_> = known.collect();
    let mut bits = 0;
    for name in asked {
        if let Some((_, number)) = known.iter().find(|(it, _)| it == name) {
            bits |= 1_u128.checked_shl(*number).unwrap_or(0);
        } else {
            let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
            errors.push(format!("no {what} {name:?}; there are {}", names.join(", ")));
        }
    }
    Some(bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_bits_and_wrong_ones_are_said_with_the_right_ones() {
        let request = CaptureRequest {
            reasons: vec!["martian".into(), "blocked".into()],
            classes: vec!["none".into()],
            ..CaptureRequest::default()
        };
        let names = Names::default();
        let sampling = super::sampling(&request, &names).expect("is valid");
        assert_eq!(sampling.reasons, Reason::Martian.bit() | Reason::Blocked.bit());
        assert_eq!((sampling.classes, sampling.slots), ([1, 0], u32::MAX));

        let wrong = CaptureRequest {
            rate: 0,
            interfaces: vec!["eth9".into()],
            reasons: vec!["conform".into()],
            ..CaptureRequest::default()
        };
        let errors = super::sampling(&wrong, &names).expect_err("three are wrong");
        assert_eq!(errors.len(), 3);
        assert_eq!(errors[1], "no interface \"eth9\"; there are unknown");
        assert!(errors[2].contains("packet_rate, ") && !errors[2].contains("conform,"));
    }
}
