//! The page as HTML. Everything that comes from outside of this file goes in by way of `maud`, which escapes it;
//! charts hold numbers only.

mod traffic;

use maud::{DOCTYPE, Markup, html};

use super::words::{bits, exact, packets, percent, short};
use super::{REFRESH, Range, Request, TableUse, View};
use crate::events::Top;
use crate::status::{Reload, Status, utc};

/// Entries of the top talkers, interfaces or warnings that are shown, at most: the rest is counted. What is
/// bounded by the configuration's size is shown in full.
const MOST: usize = 50;

/// The page.
#[must_use]
pub fn render(view: &View, request: Request) -> String {
    let held = view.now("drop");
    let page = html! {
        (DOCTYPE)
        html lang="en" data-refresh=[(!request.paused).then_some(REFRESH.as_secs())] {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (packets(held.packets)) " dropped, " (view.status.mode) " – limiter on " (view.host) }
                link rel="icon" href="data:,";
                link rel="stylesheet" href="page.css";
                @if !request.paused {
                    script src="page.js" defer {}
                    noscript { meta http-equiv="refresh" content="5"; }
                }
            }
            body {
                a #skip href="#main" { "Skip to the content" }
                (header(view, request))
                p #stale role="status" hidden {
                    "The agent does not answer: what is shown here is old. Trying again."
                }
                main #main tabindex="-1" {
                    (banner(&view.status))
                    (warnings(view))
                    (tiles(view))
                    (traffic::charts(view, request.range))
                    (top_talkers(&view.top))
                    (traffic::classes(view, request.range))
                    (interfaces(view))
                    (tables(view))
                    (configuration(view))
                }
                (footer())
            }
        }
    };
    page.into_string()
}

fn header(view: &View, request: Request) -> Markup {
    let to = |range: Range, paused: bool| {
        format!("?range={}{}", range.as_str(), if paused { "&refresh=off" } else { "" })
    };
    html! {
        header {
            h1 { "limiter on " (view.host) }
            nav aria-label="Time and refresh" {
                ul {
                    @for range in Range::ALL {
                        li {
                            a href=(to(range, request.paused))
                                aria-current=[(range == request.range).then_some("true")] {
                                "Last " (range.words())
                            }
                        }
                    }
                    li {
                        a #refresh href=(to(request.range, !request.paused)) {
                            @if request.paused { "Refresh again" } @else { "Pause" }
                        }
                    }
                }
            }
        }
    }
}

fn banner(status: &Status) -> Markup {
    let (class, what) = match status.mode.as_str() {
        "enforce" => ("good", "What is over a limit is dropped."),
        "observe" => ("warn", "Nothing is dropped; what would be is counted."),
        "bypass" => ("bad", "Nothing is limited: every packet passes."),
        _ => ("warn", ""),
    };
    let own: Vec<_> = status.classes.iter().filter(|class| class.mode != status.mode).collect();
    html! {
        section #mode class={ "banner " (class) } aria-label="Mode" {
            p { strong { "Mode: " (status.mode) ". " } (what) }
            @if let Some(by) = &status.mode_override {
                p { "By command of " (by.by) " since " (by.since) " (UTC), not by the configuration." }
            }
            @if !own.is_empty() {
                p {
                    "Classes with a mode of their own: "
                    @for (index, class) in own.iter().enumerate() {
                        @if index > 0 { ", " } (class.name) " (" (class.mode) ")"
                    }
                    "."
                }
            }
        }
    }
}

/// What somebody should know first.
fn warnings(view: &View) -> Markup {
    let status = &view.status;
    let mut bad: Vec<String> = status.problems.clone();
    let config = &status.config;
    if let Some(why) = &config.rolled_back {
        bad.push(format!("An older configuration is in force than was wanted: {why}"));
    }
    if let Some(Reload { at, errors, successful: false, .. }) = &config.last_reload {
        bad.push(format!(
            "The last reload, {at} (UTC), failed; older settings are in force: {}",
            errors.join("; ")
        ));
    }
    let mut warn = Vec::new();
    if let Some(pending) = &config.pending {
        warn.push(format!(
            "The configuration {} waits to be confirmed: it is rolled back at {} (UTC), in {} s, unless \
             `limiter-agent confirm` comes",
            pending.file, pending.until, pending.seconds_left
        ));
    }
    for it in status.interfaces.iter().filter(|it| it.mode == "generic") {
        warn.push(format!(
            "{} runs the program in generic mode, which costs several times what native mode does",
            it.name
        ));
    }
    for it in status.exemptions.iter().filter(|it| it.spoofable) {
        warn.push(format!(
            "The exemption of {} ({}) holds on every interface: whoever forges such an address is not limited",
            it.cidr, it.owner
        ));
    }
    let known = [
        ("handshakes", &status.proofs),
        ("own TCP flows", &status.own_flows.tcp),
        ("own UDP flows", &status.own_flows.udp),
    ];
    for (what, known) in known {
        if let Some(why) = known.strip_prefix("unavailable: ") {
            warn.push(format!("The datapath does not hear of {what}: {why}"));
        }
    }
    let list = |id: &str, class: &str, heading: &str, lines: &[String]| {
        html! {
            @if !lines.is_empty() {
                section id=(id) class={ "banner " (class) } aria-label=(heading) {
                    p { strong { (heading) } }
                    ul.plain {
                        @for line in lines.iter().take(MOST) { li { (line) } }
                        @if lines.len() > MOST { li { "and " (lines.len() - MOST) " more" } }
                    }
                }
            }
        }
    };
    html! {
        (list("problems", "bad", "Problems", &bad))
        (list("warnings", "warn", "Warnings", &warn))
    }
}

fn tiles(view: &View) -> Markup {
    let tile = |id: &str, name: &str, number: &str, more: &str| {
        html! {
            div {
                dt { (name) }
                dd { span.number id=(id) { (number) } br; span.faint { (more) } }
            }
        }
    };
    let rate = |id: &str, name: &str, action: &str| {
        let rate = view.now(action);
        tile(id, name, &packets(rate.packets), &bits(rate.bytes))
    };
    let fullest = view.tables.iter().max_by(|a, b| a.share().total_cmp(&b.share()));
    let over = view.traffic.glance.map_or_else(
        || "There is nothing to compare with yet: rates come with the next reading.".to_owned(),
        |glance| format!("Rates of now are over the last {:.0} s.", glance.as_secs_f64()),
    );
    html! {
        section aria-labelledby="now" {
            h2 #now { "Now" }
            dl.tiles {
                (rate("dropped", "Dropped", "drop"))
                (rate("would-drop", "Would be dropped", "would_drop"))
                (rate("passed", "Passed", "pass"))
                (tile(
                    "created", "New sources", &packets(view.traffic.created),
                    &format!("budget used: {}", percent(view.pressure("none").unwrap_or_default())),
                ))
                @if let Some(table) = fullest {
                    (tile(
                        "table-use", "Table in use", &percent(table.share()),
                        &format!("{} of {} ({})", short(table.used()), short(table.capacity.into()), table.family),
                    ))
                }
                (tile(
                    "blocks", "Blocks", &exact(view.blocks as u64),
                    &format!("exemptions: {}", exact(view.exemptions as u64)),
                ))
            }
            p.faint { "As of " time datetime=(utc(view.at)) { (utc(view.at)) } " (UTC). " (over) }
        }
    }
}

fn top_talkers(top: &Top) -> Markup {
    html! {
        section aria-labelledby="talkers" {
            h2 #talkers { "Top talkers" }
            @if top.entries.is_empty() {
                p { "Nothing was dropped, or would have been, in the last seconds." }
            } @else {
                (wide("talkers-table", "Top talkers", &html! {
                    table {
                        caption { span { "Sources of what is dropped, or would be, over the last "
                            (format!("{:.0}", top.window_seconds)) " s: " (top.entries.len()) " of "
                            (top.known) " known; estimates from a sample, with how far they may be off" } }
                        thead { tr {
                            th scope="col" { "Source" }
                            th.n scope="col" { "Packets" } th.n scope="col" { "±" }
                            th.n scope="col" { "Bits" } th.n scope="col" { "Of those dropped" }
                            th scope="col" { "Class" } th scope="col" { "Reason" } th scope="col" { "Interface" }
                        } }
                        tbody {
                            @for it in &top.entries {
                                @let totals = &it.totals;
                                tr {
                                    th.name scope="row" { (it.what) }
                                    td.n { (packets(totals.packets_per_second)) }
                                    td.n { (percent(share(totals.packets_error, totals.packets))) }
                                    td.n { (bits(totals.bytes_per_second)) }
                                    td.n { (percent(share(totals.dropped, totals.packets))) }
                                    td { (it.class) } td { (it.reason) } td { (it.interface) }
                                }
                            }
                        }
                    }
                }))
            }
            @if top.events_lost > 0 {
                p.faint {
                    (exact(top.events_lost)) " events of the sample were lost since the start because nobody read \
                    them in time."
                }
            }
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "for people to read")]
fn share(part: u64, of: u64) -> f64 {
    part as f64 / of.max(1) as f64
}

fn interfaces(view: &View) -> Markup {
    html! {
        section aria-labelledby="interfaces" {
            h2 #interfaces { "Interfaces" }
            @if view.status.interfaces.is_empty() { p { "None is guarded." } } @else {
                (wide("interfaces-table", "Interfaces", &html! {
                    table {
                        caption { span { "Guarded interfaces, how the kernel runs the program, and packets now" } }
                        thead { tr {
                            th scope="col" { "Name" } th scope="col" { "Mode" } th scope="col" { "Driver" }
                            th scope="col" { "Attachment" }
                            th.n scope="col" { "Passed" } th.n scope="col" { "Would be dropped" }
                            th.n scope="col" { "Dropped" }
                        } }
                        tbody {
                            @for it in &view.status.interfaces {
                                tr {
                                    th.name scope="row" { (it.name) }
                                    td { (it.mode) } td { (it.driver) } td { (it.attachment) }
                                    @for action in ["pass", "would_drop", "drop"] {
                                        @let rate = view.traffic.interfaces.get(&(it.name.clone(), action));
                                        td.n { (packets(rate.copied().unwrap_or_default().packets)) }
                                    }
                                }
                            }
                        }
                    }
                }))
            }
        }
    }
}

fn tables(view: &View) -> Markup {
    html! {
        section aria-labelledby="tables" {
            h2 #tables { "Table" }
            (wide("tables-table", "Table", &html! {
                table {
                    caption { span { "Buckets in use: one for each source and class that is not at rest" } }
                    thead { tr {
                        th scope="col" { "Family" } th scope="col" { "Use" }
                        th.n scope="col" { "Proven" } th.n scope="col" { "Seen" } th.n scope="col" { "Capacity" }
                    } }
                    tbody {
                        @for it in &view.tables {
                            tr {
                                th scope="row" { (it.family) }
                                td { (gauge(it.share(), &format!("{} table in use", it.family))) }
                                td.n { (exact(it.proven)) } td.n { (exact(it.seen)) }
                                td.n { (exact(it.capacity.into())) }
                            }
                        }
                    }
                }
            }))
        }
    }
}

fn configuration(view: &View) -> Markup {
    let status = &view.status;
    let config = &status.config;
    html! {
        section aria-labelledby="configuration" {
            h2 #configuration { "Configuration" }
            dl.facts {
                dt { "In force" }
                dd {
                    (config.source) ", read " (config.loaded) " (UTC)"
                    @if config.source != config.path { "; the file is " (config.path) }
                }
                dt { "Last reload" }
                dd {
                    @match &config.last_reload {
                        None => "none since the start",
                        Some(reload) => {
                            (reload.at) " (UTC): "
                            @if reload.successful { "successful; " (reload.changes.join("; ")) }
                            @else { strong.bad { "failed" } "; " (reload.errors.join("; ")) }
                        }
                    }
                }
                dt { "To be confirmed" }
                dd {
                    @match &config.pending {
                        None => "nothing",
                        Some(pending) => { (pending.file) ", until " (pending.until) " (UTC)" }
                    }
                }
                @for policy in &status.failure_policies {
                    dt { (policy.event) } dd { (policy.action) }
                }
                dt { "Memory of the maps" }
                dd { (exact(status.map_memory_bytes.div_ceil(1024 * 1024))) " MiB" }
                dt { "Agent" }
                dd {
                    (status.version) ", layout " (status.abi) ", process " (status.pid) ", since "
                    (status.started) " (UTC)"
                }
            }
        }
    }
}

fn footer() -> Markup {
    html! {
        footer {
            nav aria-label="The same for programs" {
                ul {
                    li { a href="metrics" { "/metrics" } }
                    li { a href="v1/status" { "/v1/status" } }
                    li { a href="v1/top" { "/v1/top" } }
                    li { a href="healthz" { "/healthz" } }
                }
            }
        }
    }
}

/// What may be wider than a phone, and then scrolls by itself; by keyboard, too.
fn wide(id: &str, name: &str, content: &Markup) -> Markup {
    html! { div.wide id=(id) role="region" aria-label=(name) tabindex="0" { (content) } }
}

/// A share from 0 to 1.
fn gauge(share: f64, name: &str) -> Markup {
    html! {
        meter min="0" max="1" low="0.8" high="0.95" optimum="0" value=(format!("{share:.3}")) aria-label=(name) {}
        (percent(share))
    }
}

impl TableUse {
    #[expect(clippy::cast_precision_loss, reason = "for people to read")]
    fn used(self) -> f64 {
        (self.proven + self.seen) as f64
    }

    fn share(self) -> f64 {
        if self.capacity == 0 { 0.0 } else { (self.used() / f64::from(self.capacity)).min(1.0) }
    }
}

impl View {
    fn now(&self, action: &str) -> super::Rate {
        let line = self.traffic.verdicts.iter().find(|line| line.name == action);
        line.map(|line| line.now).unwrap_or_default()
    }

    fn pressure(&self, class: &str) -> Option<f64> {
        self.pressures.iter().find(|(name, _)| name == class).map(|(_, share)| *share)
    }
}
