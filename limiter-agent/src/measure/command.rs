//! `limiter-agent recommend`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::advice::{Advice, Outcome, Terms, whole};
use super::write::{Recommendation, Request};
use crate::cli::{Failure, RecommendArgs};
use crate::client::{post, print, print_json};
use crate::status::Limit;

/// Asks the running agent for limits and writes them.
///
/// # Errors
/// [`Failure::Request`] if too little was measured, [`Failure::Machine`] if no agent answers or the file
/// cannot be written.
pub fn recommend(args: &RecommendArgs) -> Result<(), Failure> {
    let terms = Terms {
        min_seconds: args.min_time.as_secs(),
        min_sources: args.min_sources,
        margin: args.margin,
    };
    let request = Request { terms, enforce: args.enforce };
    let recommended: Recommendation = post(&args.client, "/v1/recommend", &request)?;
    if let Some(path) = &args.output {
        replace(path, &recommended.toml).map_err(|error| {
            Failure::Machine(format!(
                "cannot write {}: {error}; give another -o FILE",
                path.display()
            ))
        })?;
    }
    match &args.output {
        _ if args.client.json => print_json(&recommended),
        Some(path) => print(&summary(&recommended, path)),
        None => print(&recommended.toml),
    }
}

/// As a whole or not at all.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let mut draft = path.as_os_str().to_owned();
    draft.push(".new");
    let draft = PathBuf::from(draft);
    fs::write(&draft, text)?;
    fs::rename(&draft, path)
}

fn summary(recommended: &Recommendation, path: &Path) -> String {
    let limit = |name: &str, limit: &Option<Limit>| {
        limit.as_ref().map(|it| format!("{name} {}/s, burst {}", whole(it.per_second), it.burst))
    };
    let mut lines = Vec::new();
    for class in &recommended.classes {
        let what = match &class.outcome {
            Outcome::Kept(why) => format!("as it was: {why}"),
            Outcome::Limits(Advice { packets, bytes, would_hit: [proven, others], .. }) => {
                let mut parts: Vec<_> = [limit("packets", packets), limit("bytes", bytes)]
                    .into_iter()
                    .flatten()
                    .collect();
                if proven + others > 0 {
                    parts.push(format!("would hit {proven} proven sources and {others} others"));
                }
                parts.join("; ")
            }
        };
        lines.push(format!("{}: {what}", class.name));
    }
    lines.extend(limit("new sources:", &recommended.new_sources));
    lines.push(format!(
        "written to {}; read it, then: limiter-agent apply {0} --confirm 5m",
        path.display()
    ));
    lines.join("\n") + "\n"
}
