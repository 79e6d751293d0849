//! `limiter-agent limits`: what a source may send, for operators, and as a page for those who are limited.

mod page;

use std::fmt;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::agent::class_mode;
use crate::cli::{Failure, LimitsArgs};
use crate::client::{self, print, print_json};
use crate::config::{Budget, Config};
use crate::status::{Grid, Limit, Reserve, grouped, limit, reserves, utc};

pub use page::{Public, PublicClass};

/// All limits in force: what `/v1/limits` answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// The global mode.
    pub mode: String,
    /// The classes, in the order of rules.
    pub classes: Vec<ClassLimits>,
    /// What stands before all classes.
    pub reserves: Vec<Reserve>,
    /// What wider prefixes may send.
    pub ceilings: Vec<Ceiling>,
    /// How many new sources are let in, all classes together.
    pub new_sources: Limit,
    /// What all flows together may receive that this host opened.
    pub established: Limit,
}

/// The limits of a class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassLimits {
    /// Its name.
    pub name: String,
    /// What belongs to it, briefly; none for the last, which takes the rest.
    pub matches: Option<String>,
    /// Its mode, its own or the global one.
    pub mode: String,
    /// What one source may send, in packets.
    pub packets: Option<Limit>,
    /// What one source may send, in bytes.
    pub bytes: Option<Limit>,
    /// Its share of the new sources.
    pub new_sources: Option<Limit>,
    /// What all its sources together may send that have proven nothing.
    pub unproven: Option<Limit>,
    /// What all its sources together may send.
    pub total: Option<Limit>,
}

/// What a wider prefix may send in each class, as a multiple of what one source may.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ceiling {
    /// Which: `IPv6 /56`.
    pub prefix: String,
    /// The multiple of the limit in packets.
    pub times: u32,
}

/// Prints the limits of the running agent, or of a file.
///
/// # Errors
/// [`Failure::Request`] with every error of the file, [`Failure::Machine`] if no agent answers.
pub fn limits(args: &LimitsArgs) -> Result<(), Failure> {
    let limits = match &args.config {
        Some(file) => Config::load(file)
            .map(|config| Limits::of(&config))
            .map_err(|error| Failure::Request(error.to_string()))?,
        None => client::limits(&args.control_socket)?,
    };
    if !args.public {
        return if args.json { print_json(&limits) } else { print(&limits.to_string()) };
    }
    let public = Public::of(&limits, args.contact.clone(), utc(SystemTime::now()));
    if args.json {
        print_json(&public)
    } else if args.html {
        print(&public.html())
    } else {
        print(&public.markdown())
    }
}

impl Limits {
    /// Those of `config`.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        let some = |budget: Option<Budget>| budget.map(Limit::from);
        let classes = config.classes.iter().map(|class| ClassLimits {
            name: class.name.clone(),
            matches: class.matcher.as_ref().map(ToString::to_string),
            mode: class_mode(config, class).to_string(),
            packets: some(class.allowance.packets),
            bytes: some(class.allowance.bytes),
            new_sources: some(class.new_sources),
            unproven: some(class.unproven),
            total: some(class.total),
        });
        let ceilings = [
            ("IPv6 /56", config.ceilings.ipv6_56),
            ("IPv6 /48", config.ceilings.ipv6_48),
            ("IPv4 /24", config.ceilings.ipv4_24),
        ];
        let ceilings = ceilings.into_iter().filter_map(|(prefix, times)| {
            Some(Ceiling { prefix: prefix.to_owned(), times: times? })
        });
        Self {
            mode: config.mode.to_string(),
            classes: classes.collect(),
            reserves: Reserve::all(config),
            ceilings: ceilings.collect(),
            new_sources: config.table.new_sources.into(),
            established: config.established.packets.into(),
        }
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sum = |it: Limit| {
            let (rate, burst) = limit(Some(it));
            format!("{rate}/s, burst {burst}")
        };
        writeln!(out, "mode:        {}", self.mode)?;
        writeln!(out, "new sources: {}", sum(self.new_sources))?;
        writeln!(out, "established: {}", sum(self.established))?;
        for Ceiling { prefix, times } in &self.ceilings {
            writeln!(
                out,
                "{:<12} {} times a class's packets",
                format!("{prefix}:"),
                grouped((*times).into())
            )?;
        }
        let mut grid = Grid::new(&[
            "CLASS",
            "MATCH",
            "MODE",
            "PACKETS/S>",
            "BURST>",
            "BYTES/S>",
            "BURST>",
            "NEW/S>",
            "UNPROVEN/S>",
            "TOTAL/S>",
        ]);
        for class in &self.classes {
            let (packets, burst) = limit(class.packets);
            let (bytes, byte_burst) = limit(class.bytes);
            let rates = [class.new_sources, class.unproven, class.total].map(|it| limit(it).0);
            let [news, unproven, total] = rates.each_ref().map(String::as_str);
            let matches = class.matches.as_deref().unwrap_or("the rest");
            grid.row([
                &class.name,
                matches,
                &class.mode,
                &packets,
                &burst,
                &bytes,
                &byte_burst,
                news,
                unproven,
                total,
            ]);
        }
        grid.write(out)?;
        write!(out, "{}", reserves(&self.reserves))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What nobody else should read stands in each of the entries that the page must not show.
    pub(super) const TEXT: &str = r#"
mode = "enforce"
[[interface]]
name = "secret0"
[table]
new_sources = { rate = "777/s", burst = 7770 }
[[reserve]]
name = "secret"
match = { protocol = "tcp", ports = [2222] }
interface = "secret0"
packets = { rate = "2000/s", burst = 4000 }
[[class]]
name = "dns"
match = { protocol = "udp", ports = [53] }
packets = { rate = "1000/s", burst = 2000 }
bytes = { rate = "4Mbit/s", burst = "256KiB" }
unproven = { rate = "888/s", burst = 8880 }
total = { rate = "999/s", burst = 9990 }
[[class]]
name = "rest"
packets = { rate = "30/m", burst = 10 }
mode = "observe"
[[prefix]]
cidr = "203.0.113.0/24"
scale = 20
owner = "secret"
[[exempt]]
cidr = "198.51.100.0/24"
interface = "secret0"
owner = "secret"
[[block]]
cidr = "192.0.2.0/24"
reason = "secret"
"#;

    pub(super) fn sample() -> Limits {
        let config = Config::parse("test", TEXT, SystemTime::UNIX_EPOCH).expect("is valid");
        Limits::of(&config)
    }

    #[test]
    fn operators_see_all_limits() {
        let text = sample().to_string();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines[..3],
            [
                "mode:        enforce",
                "new sources: 777/s, burst 7,770",
                "established: 200,000/s, burst 400,000",
            ]
        );
        assert!(text.contains("IPv6 /56:    4 times a class's packets"), "{text}");
        let row = |name| lines.iter().find(|line| line.starts_with(name)).expect("has a row");
        let words: Vec<_> = row("dns").split_whitespace().collect();
        assert_eq!(words.join(" "), "dns udp to 53 enforce 1,000 2,000 500,000 262,144 - 888 999");
        assert!(row("rest ").contains("the rest"), "{text}");
        assert!(row("secret ").contains("tcp to 2222"), "{text}");
    }

    #[test]
    fn json_round_trips() {
        let text = serde_json::to_string(&sample()).expect("is written");
        assert_eq!(serde_json::from_str::<Limits>(&text).expect("is read"), sample());
    }
}
