//! The advice as a configuration file: the one in force with other limits, and the evidence beside them.

use std::collections::BTreeMap;
use std::time::SystemTime;

use limiter_common::abi::ClassId;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use toml_edit::{DocumentMut, InlineTable, Item, Table, TableLike, Value, value};

use super::advice::{self, Advice, ClassAdvice, Outcome, Terms, Why, advise, plus, whole};
use super::distribution::Quantiles;
use super::hour::ClassHour;
use super::report::{ClassReport, GroupReport, Report};
use crate::config::{Class, Config, Mode};
use crate::status::Limit;

/// What the lines begin with that are written here, so that the next recommendation replaces them.
const MARK: &str = "#| ";
/// A margin beyond that is a slip of the pen.
const HIGHEST_MARGIN: f64 = 100.0;

/// `POST /v1/recommend`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// When there is advice, and how much above the measured it is.
    pub terms: Terms,
    /// Whether the file enforces the limits that it advises; else modes stay as they are.
    pub enforce: bool,
}

/// A recommendation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recommendation {
    /// The file that the one in force was read from.
    pub file: String,
    /// The configuration that is recommended.
    pub toml: String,
    /// What each class is advised.
    pub classes: Vec<ClassAdvice>,
    /// The budget for new sources of all classes together; none if it stays as it is.
    pub new_sources: Option<Limit>,
}

/// Why there is none.
#[derive(Debug, Error)]
pub enum Refusal {
    /// The request makes no sense.
    #[error("margin is {0}; write a number from 1 to {HIGHEST_MARGIN}")]
    Margin(f64),
    /// For no class enough was measured.
    #[error("too little was measured in each class:\n{}", .0.join("\n"))]
    TooLittle(Vec<String>),
    /// The configuration in force cannot be written anew, or what was written is not valid.
    #[error("the recommendation cannot be written: {0}")]
    Text(String),
}

/// What is known.
pub struct Measured<'a> {
    /// The configuration in force.
    pub config: &'a Config,
    /// Its text.
    pub text: &'a str,
    /// What `GET /v1/measure` says.
    pub report: &'a Report,
    /// The distributions by class.
    pub classes: &'a BTreeMap<ClassId, ClassHour>,
    /// The number of a class.
    pub id: &'a dyn Fn(&str) -> ClassId,
    /// The mode that a class is in.
    pub mode: &'a dyn Fn(&Class) -> Mode,
}

/// Recommends limits above what was measured.
///
/// # Errors
/// [`Refusal`] says why not.
pub fn recommendation(
    measured: &Measured<'_>,
    request: &Request,
    now: SystemTime,
) -> Result<Recommendation, Refusal> {
    let Request { terms, .. } = request;
    if !(1.0..=HIGHEST_MARGIN).contains(&terms.margin) {
        return Err(Refusal::Margin(terms.margin));
    }
    let classes: Vec<_> =
        measured.config.classes.iter().map(|it| about(it, measured, terms)).collect();
    if classes.iter().all(|it| matches!(it.outcome, Outcome::Kept(_))) {
        let why = classes.iter().map(|it| match &it.outcome {
            Outcome::Kept(why) => format!("class \"{}\": {why}", it.name),
            Outcome::Limits(_) => String::new(),
        });
        return Err(Refusal::TooLittle(why.collect()));
    }
    let new_sources = all_new_sources(measured, &classes, terms);
    let mut recommendation = Recommendation {
        file: measured.config.file.clone(),
        toml: String::new(),
        classes,
        new_sources,
    };
    recommendation.toml = write(measured, &recommendation, request)?;
    // As `check` would.
    Config::parse("the recommendation", &recommendation.toml, now)
        .map_err(|errors| Refusal::Text(errors.to_string()))?;
    Ok(recommendation)
}

fn about(class: &Class, measured: &Measured<'_>, terms: &Terms) -> ClassAdvice {
    let mode = (measured.mode)(class);
    let outcome = if mode == Mode::Observe {
        let none = ClassHour::default();
        let found = measured.classes.get(&(measured.id)(&class.name)).unwrap_or(&none);
        let Report { false_proofs, one_in, .. } = measured.report;
        advise(class, found, *false_proofs, *one_in, terms)
    } else {
        Err(Why::NotObserved { mode: mode.to_string() })
    };
    ClassAdvice {
        name: class.name.clone(),
        outcome: outcome.map_or_else(Outcome::Kept, Outcome::Limits),
    }
}

/// That of all classes together; none if not all of them were observed.
fn all_new_sources(
    measured: &Measured<'_>,
    advice: &[ClassAdvice],
    terms: &Terms,
) -> Option<Limit> {
    let is_seen = |it: &ClassAdvice| {
        !matches!(&it.outcome, Outcome::Kept(Why::NotObserved { .. } | Why::LittleTime { .. }))
    };
    if !advice.iter().all(is_seen) {
        return None;
    }
    let found = advice.iter().filter_map(|it| measured.classes.get(&(measured.id)(&it.name)));
    let each = found.map(|it| advice::new_sources(it, measured.report.one_in, terms.margin));
    each.reduce(plus)
}

fn write(
    measured: &Measured<'_>,
    recommendation: &Recommendation,
    request: &Request,
) -> Result<String, Refusal> {
    let text: String =
        measured.text.split_inclusive('\n').filter(|line| !line.starts_with(MARK)).collect();
    let mut document: DocumentMut =
        text.parse().map_err(|error: toml_edit::TomlError| Refusal::Text(error.to_string()))?;
    if request.enforce {
        set(document.as_table_mut(), "mode", Mode::Enforce.as_str());
    }
    if let Some(limit) = recommendation.new_sources {
        let table = document.entry("table").or_insert_with(|| Item::Table(Table::new()));
        let table =
            table.as_table_like_mut().ok_or_else(|| Refusal::Text("[table] is none".to_owned()))?;
        set_budget(table, "new_sources", limit, false);
        let why =
            format!("{MARK}new sources of all classes: what the classes below let in, together\n");
        explain(table, "new_sources", &why);
    }
    let classes =
        document.get_mut("class").ok_or_else(|| Refusal::Text("no [[class]]".to_owned()))?;
    // Written inline, it has no room for comments.
    if let Ok(tables) = std::mem::take(classes).into_array_of_tables() {
        *classes = Item::ArrayOfTables(tables);
    }
    let tables = classes.as_array_of_tables_mut();
    let tables = tables.ok_or_else(|| Refusal::Text("class is no [[class]]".to_owned()))?;
    for (table, (class, advised)) in
        tables.iter_mut().zip(measured.config.classes.iter().zip(&recommendation.classes))
    {
        let report = measured.report.classes.iter().find(|it| it.name == class.name);
        change(table, class, advised, report, measured, request);
    }
    Ok(header(measured, request) + &document.to_string())
}

/// Writes what one class is advised.
fn change(
    table: &mut Table,
    class: &Class,
    advised: &ClassAdvice,
    report: Option<&ClassReport>,
    measured: &Measured<'_>,
    request: &Request,
) {
    let mut lines = Vec::new();
    match &advised.outcome {
        Outcome::Kept(why) => {
            lines.push(format!("limits as they were: {why}"));
            if request.enforce {
                set(table, "mode", (measured.mode)(class).as_str());
            }
        }
        Outcome::Limits(advice) => {
            let Advice { packets, bytes, new_sources, unproven, total, .. } = advice;
            let budgets = [
                ("packets", packets, false),
                ("bytes", bytes, true),
                ("new_sources", new_sources, false),
                ("unproven", unproven, false),
                ("total", total, false),
            ];
            for (key, limit, is_bytes) in budgets {
                if let Some(limit) = limit {
                    set_budget(table, key, *limit, is_bytes);
                }
            }
            if request.enforce && table.contains_key("mode") {
                set(table, "mode", Mode::Enforce.as_str());
            }
            if let Some(report) = report {
                lines = evidence(report, advice, &request.terms);
            }
        }
    }
    let text = marked(&lines);
    let key = if table.contains_key("packets") { "packets" } else { "bytes" };
    explain(table, key, &text);
}

/// Sets a budget's rate and burst, and leaves how it is written.
fn set_budget(table: &mut dyn TableLike, key: &str, limit: Limit, is_bytes: bool) {
    let rate = rate(whole(limit.per_second), is_bytes);
    let burst = i64::try_from(limit.burst).unwrap_or(i64::MAX);
    if let Some(budget) = table.get_mut(key).and_then(Item::as_table_like_mut) {
        set(budget, "rate", rate);
        set(budget, "burst", burst);
        return;
    }
    let mut budget = InlineTable::new();
    budget.insert("rate", Value::from(rate));
    budget.insert("burst", Value::from(burst));
    table.insert(key, value(budget));
}

/// Sets a value and leaves the comments around it.
fn set(table: &mut dyn TableLike, key: &str, new: impl Into<Value>) {
    let mut new = new.into();
    if let Some(Item::Value(old)) = table.get_mut(key) {
        *new.decor_mut() = old.decor().clone();
        *old = new;
    } else {
        table.insert(key, Item::Value(new));
    }
}

/// Puts a comment above a key, below what is there.
fn explain(table: &mut dyn TableLike, key: &str, comment: &str) {
    if let Some(mut key) = table.key_mut(key) {
        let decor = key.leaf_decor_mut();
        let before = decor.prefix().and_then(|it| it.as_str()).unwrap_or_default().to_owned();
        decor.set_prefix(format!("{before}{comment}"));
    }
}

fn rate(per_second: u64, is_bytes: bool) -> String {
    if !is_bytes {
        return format!("{per_second}/s");
    }
    let bits = per_second.saturating_mul(8);
    match bits {
        _ if bits.is_multiple_of(1_000_000) => format!("{}Mbit/s", bits / 1_000_000),
        _ if bits.is_multiple_of(1_000) => format!("{}kbit/s", bits / 1_000),
        _ => format!("{per_second}B/s"),
    }
}

fn header(measured: &Measured<'_>, request: &Request) -> String {
    let Report { since, until, one_in, unwatched_packets, false_proofs, .. } = measured.report;
    let Terms { margin, .. } = request.terms;
    let mut lines = vec![
        format!("limiter-agent recommend: limits from what was measured between {since} and {until}"),
        format!("in classes that were observed. Limits are {margin} times the highest second of any source that"),
        "is followed, rounded up, with a burst of twice that: a source that sends at most C in each second"
            .to_owned(),
        "loses nothing to a rate of C and a burst of 2 x C. Numbers are per source and second; a source"
            .to_owned(),
        "counts once an hour. Not measured: what wider prefixes send ([aggregate]) and the reserves. Review,"
            .to_owned(),
        "then: limiter-agent apply FILE --confirm 5m".to_owned(),
    ];
    if *one_in > 1 || *unwatched_packets > 0 {
        lines.push(format!(
            "One source in {one_in} is watched; {unwatched_packets} packets of others found no room."
        ));
    }
    if *false_proofs >= 0.01 {
        lines.push(format!(
            "Of sources without a proof {:.0} % pass for proven, so those far above all others are not \
             followed either.",
            false_proofs * 100.0
        ));
    }
    marked(&lines)
}

/// The lines as comments that are known again.
fn marked(lines: &[String]) -> String {
    lines.iter().flat_map(|line| [MARK, line.as_str(), "\n"]).collect()
}

/// What the limits of a class follow from, one line each.
fn evidence(report: &ClassReport, advice: &Advice, terms: &Terms) -> Vec<String> {
    let ClassReport { proven, others, .. } = report;
    let time = humantime::format_duration(std::time::Duration::from_secs(report.seconds));
    let mut lines = vec![format!(
        "observed for {time}: {} sources that have proven their address, {} that have not (and {} of a single \
         packet){}",
        proven.sources,
        others.sources,
        proven.single_packet_sources + others.single_packet_sources,
        if report.apart > 0 {
            format!("; {} with limits of their own left out", report.apart)
        } else {
            String::new()
        },
    )];
    for (name, group) in [("proven", proven), ("others", others)] {
        if group.sources > 0 {
            lines.extend(group_lines(name, group, advice.bytes.is_some()));
        }
    }
    let new = report.new_sources_per_second;
    lines.push(format!("new sources per second: {}", quantiles(new)));
    lines.push(if advice.follows_proven {
        format!("follows the proven, of whom none sent more than {} packets", advice.followed_packets)
    } else {
        format!(
            "follows all, since fewer than {} have proven themselves, up to {} packets; not, of the {} highest of \
             an hour or one in a thousand, those more than {} times above the next",
            terms.min_sources,
            advice.followed_packets,
            advice::HANDFUL,
            super::Distribution::OUTLIER,
        )
    });
    let [of_proven, of_others] = advice.would_hit;
    if of_proven + of_others > 0 {
        let rate = advice.packets.map_or(u64::MAX, |it| whole(it.per_second));
        let byte_rate = advice.bytes.map_or(u64::MAX, |it| whole(it.per_second));
        let hit = proven.top.iter().chain(&others.top);
        let hit = hit
            .filter(|it| it.packets > rate || it.bytes > byte_rate)
            .map(|it| format!("{} ({} packets, {} bytes)", it.source, it.packets, it.bytes));
        let named: Vec<_> = hit.take(5).collect();
        lines.push(format!(
            "would be hit: {of_proven} of the proven and {of_others} others, such as {}; if they are honest, give \
             them a [[prefix]]",
            named.join(", ")
        ));
    }
    lines
}

fn group_lines(name: &str, group: &GroupReport, has_bytes: bool) -> Vec<String> {
    let mut lines = vec![
        format!("{name}, packets in the highest second: {}", quantiles(group.packets)),
        format!("{name}, packets/s in the highest 10 s: {}", quantiles(group.packets_10s)),
    ];
    if has_bytes {
        lines.push(format!("{name}, bytes in the highest second: {}", quantiles(group.bytes)));
        lines.push(format!("{name}, bytes/s in the highest 10 s: {}", quantiles(group.bytes_10s)));
    }
    lines
}

fn quantiles(of: Quantiles) -> String {
    let Quantiles { p50, p90, p99, p999, max } = of;
    format!("p50 {p50}, p90 {p90}, p99 {p99}, p99.9 {p999}, max {max}")
}
