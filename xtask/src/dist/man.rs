//! The manual pages: what the command line's grammar says, and what `docs/` says beyond it.

use std::{fs, process::Command};

use anyhow::{Context as _, Result};
use xtask::workspace_root;

use crate::shell;

/// Sections of `docs/limiter-agent.md` that say more than the grammar, and what they are called in
/// manuals.
const SECTIONS: &[(&str, &str)] = &[
    ("Commands", "COMMANDS"),
    ("What outlives the agent", "WHAT OUTLIVES THE AGENT"),
    ("What a reload changes", "RELOAD"),
    ("Standing", "STANDING"),
    ("Own flows", "OWN FLOWS"),
    ("systemd", "SYSTEMD"),
    ("Signals", "SIGNALS"),
    ("Exit codes", "EXIT STATUS"),
    ("Messages of a start that fails", "DIAGNOSTICS"),
    ("Files", "FILES"),
    ("Environment", "ENVIRONMENT"),
    ("HTTP", "HTTP"),
    ("Metrics", "METRICS"),
];

/// limiter-agent(8), whose `beginning` comes from the command line's grammar.
///
/// # Errors
/// When a section is missing, or pandoc fails.
pub(super) fn agent(beginning: &str) -> Result<String> {
    let text = docs("limiter-agent.md")?;
    let mut sections = SECTIONS
        .iter()
        .map(|(heading, name)| Ok(format!("## {name}\n{}", section(&text, heading)?)))
        .collect::<Result<Vec<_>>>()?;
    sections.push("## SEE ALSO\n\nlimiter.toml(5), systemctl(1), bpftool(8)\n".to_owned());
    Ok(format!("{beginning}{}", converted(&sections.join("\n"), &[])?))
}

/// limiter.toml(5).
///
/// # Errors
/// When the text does not begin with its title, or pandoc fails.
pub(super) fn configuration() -> Result<String> {
    let text = docs("limiter.toml.md")?;
    let text = text.strip_prefix("# limiter.toml\n").context("limiter.toml.md has no title")?;
    let page = format!(
        "## NAME\n\nlimiter.toml - configuration of limiter-agent(8)\n\n## DESCRIPTION\n{text}\n\
         ## SEE ALSO\n\nlimiter-agent(8)\n"
    );
    let footer = concat!("footer=limiter ", env!("CARGO_PKG_VERSION"));
    let title = ["title=limiter.toml", "section=5", "header=limiter", footer];
    converted(&page, &title)
}

/// Markdown as a manual page: with its header if there are `variables` for it.
fn converted(markdown: &str, variables: &[&str]) -> Result<String> {
    let mut pandoc = Command::new("pandoc");
    pandoc.args(["--from", "gfm", "--to", "man", "--shift-heading-level-by=-1", "--lua-filter"]);
    pandoc.arg(workspace_root().join("deploy/man/man.lua"));
    for variable in variables {
        pandoc.args(["--standalone", "--variable", variable]);
    }
    Ok(String::from_utf8(shell::filter(&mut pandoc, markdown.as_bytes())?)?)
}

fn docs(name: &str) -> Result<String> {
    let path = workspace_root().join("docs").join(name);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// What stands below a heading of the second level.
fn section<'a>(text: &'a str, heading: &str) -> Result<&'a str> {
    let (_, rest) = text
        .split_once(&format!("\n## {heading}\n"))
        .with_context(|| format!("docs/limiter-agent.md has no section {heading}"))?;
    Ok(rest.split("\n## ").next().unwrap_or(rest))
}
