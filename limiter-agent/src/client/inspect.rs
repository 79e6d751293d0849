//! `limiter-agent inspect ADDR`.

use std::fmt::Write as _;

use axum::http::{Method, StatusCode};
use hyper::body::Bytes;

use super::{ask, print, print_json};
use crate::cli::{Failure, InspectArgs};
use crate::sources::{ClassReport, SourceReport};
use crate::status::Limit;

/// `limiter-agent inspect ADDR`.
///
/// # Errors
/// [`Failure::Request`] if it is no address, [`Failure::Machine`] if no agent answers.
pub fn inspect(args: &InspectArgs) -> Result<(), Failure> {
    let client = &args.client;
    let path = format!("/v1/sources/{}", args.address);
    let answer = ask(&client.control_socket, Method::GET, &path, Bytes::new())?;
    if answer.code != StatusCode::OK {
        return Err(answer.refusal());
    }
    let report: SourceReport = answer.read()?;
    if client.json { print_json(&report) } else { print(&text(&report)) }
}

fn text(report: &SourceReport) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: &str| {
        // Nothing can fail in memory.
        let _ = writeln!(out, "{name:<10} {value}");
    };
    line("address", &report.address);
    if report.source.split_once('/').is_some_and(|(net, _)| net != report.address) {
        line("source", &format!("{}, which shares its buckets", report.source));
    }
    line("standing", &report.standing);
    line("policy", &report.policy.summary);
    for block in &report.policy.blocks {
        let end =
            block.until.as_ref().map_or("without an end".to_owned(), |it| format!("until {it}"));
        let by = block.by.as_ref().map_or("the configuration".to_owned(), Clone::clone);
        let reason = block.reason.as_deref().unwrap_or("no reason given");
        line("blocked", &format!("{} {end}: {reason} (by {by})", block.cidr));
    }
    if let Some(penalty) = &report.penalty {
        line("penalty", &format!("level {} until {}", penalty.level, penalty.until));
    }
    let pressed = report.pressure.iter().filter(|(_, share)| **share >= 0.5);
    for (class, share) in pressed {
        line("pressure", &format!("{class} {:.0} %", share * 100.0));
    }
    let width = report.classes.iter().map(|it| it.class.len()).max().unwrap_or(0).max(5);
    let _ = writeln!(
        out,
        "\n{:<width$} {:<8} {:>9} {:>9} {:>10} {:>6} {:>6}",
        "class", "mode", "remaining", "burst", "per second", "reset", "retry"
    );
    for class in &report.classes {
        let _ = writeln!(out, "{}", row(class, width));
    }
    out
}

fn row(class: &ClassReport, width: usize) -> String {
    let ClassReport { class: name, mode, limit, remaining, reset, retry_after, .. } = class;
    let column = |limit: Option<Limit>| {
        let rate = limit.map_or("-".to_owned(), |it| format!("{}", it.per_second));
        (limit.map_or("-".to_owned(), |it| it.burst.to_string()), rate)
    };
    let (burst, rate) = column(limit.packets);
    let mut row = format!(
        "{name:<width$} {mode:<8} {remaining:>9} {burst:>9} {rate:>10} {reset:>5}s {retry_after:>5}s"
    );
    if let (Some(bytes), Some(left)) = (limit.bytes, class.remaining_bytes) {
        let (burst, rate) = column(Some(bytes));
        let _ = write!(row, "\n{:<width$} {:<8} {left:>9} {burst:>9} {rate:>10}", "", "bytes");
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_fits_a_terminal() {
        let limit = r#"{"packets":{"per_second":10000.0,"burst":20000},"bytes":null}"#;
        let class = format!(
            r#"{{"class":"amplification","mode":"enforce","limit":{limit},"remaining":0,
            "remaining_bytes":null,"reset":2,"retry_after":3,"ratelimit_policy":"","ratelimit":""}}"#
        );
        let report = format!(
            r#"{{"address":"2001:db8::7","source":"2001:db8::/64","standing":"seen","blocked":true,
            "blocked_until":null,"penalty":null,"exempt":false,"policy":{{"summary":"blocked without an end",
            "prefix":null,"exemptions":[],"blocks":[{{"cidr":"2001:db8::/32","until":null,
            "reason":"scans","by":null}}]}},"classes":[{class}],"pressure":{{"rest":0.75,"udp":0.1}}}}"#
        );
        let text = text(&serde_json::from_str(&report).expect("is a report"));
        for part in [
            "source     2001:db8::/64, which shares its buckets",
            "blocked    2001:db8::/32 without an end: scans (by the configuration)",
            "pressure   rest 75 %",
            "amplification enforce          0     20000      10000     2s     3s",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(!text.contains("udp") && text.lines().all(|line| line.len() <= 80), "{text}");
    }
}
