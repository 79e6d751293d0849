//! What a scrape of the agent's metrics costs while a million sources attack.

use anyhow::Result;
use limiter_tests::scrape;
use serde_json::json;

use crate::{
    Effort,
    report::{Bound, Report, Row, Spread},
};

/// Milliseconds of CPU time (issue 4/4).
const MOST: f64 = 50.0;

/// Measures.
///
/// # Errors
/// When something cannot be made, or the agent does not answer.
pub(crate) fn measure(effort: &Effort, report: &mut Report) -> Result<()> {
    let scraped = scrape::under_attack(if effort.is_quick { 10 } else { 50 })?;
    let times: Vec<_> = scraped.cpu.iter().map(|cpu| cpu.as_secs_f64() * 1e3).collect();
    let spread = Spread::of(&times);
    let (series, tracked) = (scraped.series(), scraped.tracked()?);
    let rows = [Row {
        cells: vec![
            spread.map_or(String::new(), |it| format!("{it:.1}")),
            series.to_string(),
            format!("{tracked:.0}"),
            (scraped.text.len() >> 10).to_string(),
        ],
        json: json!({
            "milliseconds": spread.map(|it| it.json()), "series": series, "tracked": tracked,
            "bytes": scraped.text.len(),
        }),
    }];
    let title = "A scrape of /metrics with 16 classes, a million sources in the table and an attack from as many";
    report.table("scrape", title, &["ms of CPU", "series", "tracked", "KiB"], &rows);
    let measured = spread.map(|it| it.median).ok_or_else(|| "not measured".to_owned());
    report.target("ms of CPU for a scrape under attack", Bound::AtMost(MOST), measured);
    Ok(())
}
