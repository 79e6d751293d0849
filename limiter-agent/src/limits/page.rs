//! The limits as customers may read them: what one source may send in each class, what happens beyond, and
//! whom to ask for more. Not in it is what helps an attacker, or is somebody else's business: sums and budgets
//! that all share, reserves, exemptions, blocks, and limits of single networks.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::{Ceiling, ClassLimits, Limits};
use crate::status::{Limit, grouped};

/// What the page says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Public {
    /// The classes, in the order of rules.
    pub classes: Vec<PublicClass>,
    /// What wider prefixes may send.
    pub ceilings: Vec<Ceiling>,
    /// Whom to ask for more; none if the page does not say.
    pub contact: Option<String>,
    /// When it was made, UTC.
    pub as_of: String,
}

/// What one source may send in a class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PublicClass {
    /// Its name.
    pub name: String,
    /// What belongs to it; none for the last, which takes the rest.
    pub matches: Option<String>,
    /// Whether what is over it is dropped.
    pub enforced: bool,
    /// In packets.
    pub packets: Option<Limit>,
    /// In bytes.
    pub bytes: Option<Limit>,
}

/// What a source is.
const SOURCE: &str = "Limits hold for each source: an IPv4 address, or an IPv6 /64 (all addresses with the \
                      same first 64 bits together). Who shares an address shares its limits. Each kind of \
                      traffic below is counted apart; the first that a packet fits is its kind.";

/// What a rate and a burst are.
const BURST: &str = "The first number may be sent for ever, evenly. The second is how much may come at once \
                     after a pause. Bytes are those of whole Ethernet frames. In the column of traffic, `to` \
                     is a port here, and `from` a port at the sender.";

/// What happens beyond.
const OVER: &str = "What is over a limit is dropped without an answer: no ICMP error, no reset, no HTTP status. \
                    To the sender it looks like loss, so TCP slows down and goes on. Nobody is locked out for \
                    having been over a limit: the allowance grows back all the time, at the rate, and what \
                    conforms passes at once. While there is an attack from very many sources, those that this \
                    host has not seen before may have to try again; established connections go on.";

/// What is not enforced.
const OBSERVED: &str =
    "Where \"not enforced\" stands, packets over the limit are only counted for now.";

/// What to do about it.
const MORE: &str = "Send evenly rather than in bursts, keep connections open instead of making new ones, and \
                    spread load over several addresses only if they are yours. If that is not enough, say \
                    which addresses or networks it is about, which kind of traffic, how much on average and at \
                    most, and from when on. Limits can be agreed on for a network.";

impl Public {
    /// What of `limits` is for everybody.
    #[must_use]
    pub fn of(limits: &Limits, contact: Option<String>, as_of: String) -> Self {
        let class = |class: &ClassLimits| PublicClass {
            name: class.name.clone(),
            matches: class.matches.clone(),
            enforced: class.mode == "enforce",
            packets: class.packets,
            bytes: class.bytes,
        };
        let classes = limits.classes.iter().map(class).collect();
        Self { classes, ceilings: limits.ceilings.clone(), contact, as_of }
    }

    /// The page in Markdown.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut page = format!(
            "# Limits\n\n{SOURCE}\n\n\
             | traffic | one source may send | at once | beyond |\n|---|---|---|---|\n"
        );
        for class in &self.classes {
            // A String takes everything.
            let _ = writeln!(page, "| {} |", class.cells().join(" | "));
        }
        for (title, paragraphs) in self.sections() {
            if !title.is_empty() {
                let _ = write!(page, "\n## {title}\n");
            }
            for paragraph in paragraphs {
                let _ = write!(page, "\n{paragraph}\n");
            }
        }
        page
    }

    /// The page in HTML, which asks nobody for anything else.
    #[must_use]
    pub fn html(&self) -> String {
        let mut page = format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>Limits</title>\n<style>\n\
             :root {{ color-scheme: light dark; }}\n\
             body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 60rem; margin: auto; padding: 1rem; }}\n\
             div {{ overflow-x: auto; }}\ntable {{ border-collapse: collapse; }}\n\
             th, td {{ border: 1px solid GrayText; padding: .3rem .6rem; text-align: left; }}\n\
             </style>\n</head>\n<body>\n<h1>Limits</h1>\n<p>{}</p>\n<div><table>\n\
             <tr><th>traffic</th><th>one source may send</th><th>at once</th><th>beyond</th></tr>\n",
            escaped(SOURCE)
        );
        for class in &self.classes {
            let cells = class.cells().map(|cell| format!("<td>{}</td>", escaped(&cell)));
            let _ = writeln!(page, "<tr>{}</tr>", cells.concat());
        }
        page.push_str("</table></div>\n");
        for (title, paragraphs) in self.sections() {
            if !title.is_empty() {
                let _ = writeln!(page, "<h2>{title}</h2>");
            }
            for paragraph in paragraphs {
                let _ = writeln!(page, "<p>{}</p>", escaped(&paragraph));
            }
        }
        page.push_str("</body>\n</html>\n");
        page
    }

    /// What follows the table; the first part has no title.
    fn sections(&self) -> [(&'static str, Vec<String>); 3] {
        let mut notes = vec![BURST.to_owned()];
        if !self.ceilings.is_empty() {
            let ceilings = self.ceilings.iter();
            let ceilings = ceilings.map(|it| format!("an {} {} times", it.prefix, it.times));
            let ceilings = ceilings.collect::<Vec<_>>().join(", ");
            notes.push(format!(
                "All sources of a network together may send a multiple of the packets of one: {ceilings}. \
                 That counts only for sources that use more than half of what they may send at once."
            ));
        }
        let mut over = vec![OVER.to_owned()];
        if self.classes.iter().any(|class| !class.enforced) {
            over.push(OBSERVED.to_owned());
        }
        let contact = self.contact.as_deref().unwrap_or("whoever runs the service that you use");
        let more = vec![format!("{MORE} Ask {contact}."), format!("As of {}.", self.as_of)];
        [("", notes), ("What happens beyond a limit", over), ("If you need more", more)]
    }
}

impl PublicClass {
    fn cells(&self) -> [String; 4] {
        let traffic = self.matches.as_deref().unwrap_or("everything else");
        let budgets = [(self.packets, "packets"), (self.bytes, "bytes")];
        let budgets = budgets.into_iter().filter_map(|(limit, unit)| Some((limit?, unit)));
        let (rates, bursts): (Vec<_>, Vec<_>) = budgets
            .map(|(limit, unit)| (rate(limit, unit), format!("{} {unit}", grouped(limit.burst))))
            .unzip();
        let beyond = if self.enforced { "dropped" } else { "not enforced" };
        [
            format!("{}: {traffic}", self.name),
            rates.join("; "),
            bursts.join("; "),
            beyond.to_owned(),
        ]
    }
}

/// In the time in which it is at least one.
fn rate(limit: Limit, unit: &str) -> String {
    let per_second = limit.per_second;
    let (number, time) = [(1.0, "second"), (60.0, "minute"), (3600.0, "hour")]
        .map(|(seconds, time)| (per_second * seconds, time))
        .into_iter()
        .find(|(number, time)| *number >= 0.999_999 || *time == "hour")
        .unwrap_or((per_second, "second"));
    let number = format!("{number:.2}");
    let (whole, part) = number.split_once('.').unwrap_or((&number, ""));
    let part = part.trim_end_matches('0');
    let point = if part.is_empty() { "" } else { "." };
    let whole = whole.parse().map_or_else(|_| whole.to_owned(), grouped);
    let article = if time == "hour" { "an" } else { "a" };
    format!("{whole}{point}{part} {unit} {article} {time}")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::tests::sample;
    use super::*;

    fn page() -> Public {
        let contact = Some("noc@example.net".to_owned());
        Public::of(&sample(), contact, "2026-12-01T00:00:00Z".to_owned())
    }

    #[test]
    fn customers_see_what_one_source_may_send_and_what_happens() {
        let text = page().markdown();
        for line in [
            "| dns: udp to 53 | 1,000 packets a second; 500,000 bytes a second | 2,000 packets; \
             262,144 bytes | dropped |",
            "| rest: everything else | 30 packets a minute | 10 packets | not enforced |",
            "## If you need more",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
        for words in ["IPv6 /64", "an IPv6 /56 4 times", "Ask noc@example.net.", OBSERVED] {
            assert!(text.contains(words), "{words}\n{text}");
        }
    }

    #[test]
    fn customers_do_not_see_what_is_others_business() {
        let pages =
            [page().markdown(), page().html(), serde_json::to_string(&page()).expect("JSON")];
        for text in pages {
            for secret in [
                "secret",
                "203.0.113",
                "198.51.100",
                "192.0.2.",
                "2222",
                "777",
                "888",
                "999",
                "ssh",
            ] {
                assert!(!text.contains(secret), "{secret}\n{text}");
            }
        }
    }

    #[test]
    fn the_page_in_html_escapes_and_asks_nobody() {
        let mut public = page();
        public.contact = Some("<a href=\"https://example.net\">us</a>".to_owned());
        let text = public.html();
        assert!(
            text.contains("Ask &lt;a href=&quot;https://example.net&quot;&gt;us&lt;/a&gt;."),
            "{text}"
        );
        assert!(text.contains("<td>dns: udp to 53</td>"), "{text}");
        assert!(
            !text.contains("src=") && !text.contains("<link") && !text.contains("<script"),
            "{text}"
        );
    }

    #[test]
    fn slow_rates_are_said_in_minutes_and_hours() {
        let said = |per_second| rate(Limit { per_second, burst: 1 }, "packets");
        assert_eq!(said(1500.5), "1,500.5 packets a second");
        assert_eq!(said(0.5), "30 packets a minute");
        assert_eq!(said(1.0 / 60.0), "1 packets a minute");
        assert_eq!(said(1.0 / 3600.0), "1 packets an hour");
    }
}
