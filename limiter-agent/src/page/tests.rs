use std::time::{Duration, Instant, SystemTime};

use limiter_common::abi::Count;

use super::*;
use crate::events::{By, Of, Span, TopEntry, Totals};
use crate::status::{
    Block, Class, ConfigState, Exemption, Interface, Limit, OpenConnections, OwnFlows, Pending,
    Reload, Status,
};
use crate::telemetry::PacketCount;

const HOSTILE: &str = "<script>alert('x')</script>&\"";

fn status() -> Status {
    let limit = Limit { per_second: 1000.0, burst: 2000 };
    Status {
        version: "0.1.0".into(),
        abi: 9,
        pid: 1,
        started: "2026-12-01T00:00:00Z".into(),
        mode: "enforce".into(),
        mode_override: None,
        problems: vec![],
        failure_policies: vec![],
        interfaces: vec![],
        reserves: vec![],
        classes: vec![],
        exemptions: vec![],
        blocks: vec![],
        tables: vec![],
        new_sources: limit,
        proofs: "handshakes".into(),
        connections: OpenConnections {
            counted: "handshakes".into(),
            open: 0,
            sources: 0,
            most: None,
            uncounted: 0,
        },
        established: limit,
        own_flows: OwnFlows { tcp: "connect".into(), udp: "packets sent by clients".into() },
        map_memory_bytes: 1 << 20,
        config: ConfigState {
            path: "/etc/limiter/limiter.toml".into(),
            source: "/etc/limiter/limiter.toml".into(),
            loaded: "2026-12-01T00:00:00Z".into(),
            pending: None,
            rolled_back: None,
            last_reload: None,
        },
        totals: vec![],
    }
}

fn class(name: &str) -> Class {
    Class {
        name: name.into(),
        mode: "enforce".into(),
        packets: Some(Limit { per_second: 1000.0, burst: 2000 }),
        bytes: None,
        connections: None,
        new_sources: None,
        unproven: None,
        total: None,
    }
}

fn view(status: Status, traffic: Traffic) -> View {
    View {
        host: "edge1".into(),
        at: SystemTime::UNIX_EPOCH + Duration::from_hours(500_000),
        status,
        tables: vec![TableUse { family: "ipv4", capacity: 1000, proven: 3, seen: 4 }],
        pressures: vec![("none".into(), 0.999), ("c0".into(), 0.25)],
        exemptions: 2,
        blocks: 1234,
        traffic,
        top: Top {
            at: "2026-12-01T00:00:00Z".into(),
            of: Of::Sources,
            by: By::Packets,
            window: Span::Short,
            window_seconds: 10.0,
            events: 0,
            events_lost: 0,
            total: Totals::default(),
            known: 0,
            entries: vec![],
        },
    }
}

/// An hour of `classes`, each of which passes 100/s, and has ever more dropped.
fn traffic(classes: &[String]) -> Traffic {
    let start = Instant::now();
    let mut history = History::default();
    let reading = |n: u32| {
        let row = |class: &String, reason, action, packets| PacketCount {
            interface: "eth0".into(),
            family: "ipv4",
            class: class.clone(),
            reason,
            action,
            count: Count { packets, bytes: 60 * packets },
        };
        let n64 = u64::from(n);
        let rows = classes.iter().flat_map(|class| {
            [row(class, "conform", "pass", 500 * n64), row(class, "unproven", "drop", n64 * n64)]
        });
        Reading::new(start + PERIOD * n, &rows.collect::<Vec<_>>(), 0)
    };
    for n in 0..720 {
        history.add(reading(n));
    }
    history.traffic(reading(720), Range::Long.duration())
}

#[test]
fn everything_is_escaped() {
    let hostile = || HOSTILE.to_owned();
    let mut status = status();
    status.problems = vec![hostile()];
    status.mode_override = Some(crate::status::ModeOverride {
        mode: "bypass".into(),
        since: hostile(),
        by: hostile(),
    });
    status.interfaces = vec![Interface {
        name: hostile(),
        ifindex: 2,
        mode: "generic".into(),
        driver: hostile(),
        attachment: "link".into(),
    }];
    status.classes = vec![class(HOSTILE), Class { mode: hostile(), ..class("other") }];
    status.exemptions = vec![Exemption {
        cidr: hostile(),
        interface: None,
        owner: hostile(),
        expires: None,
        spoofable: true,
    }];
    status.blocks = vec![Block {
        cidr: hostile(),
        expires: None,
        active: true,
        reason: Some(hostile()),
        by: None,
    }];
    status.proofs = format!("unavailable: {HOSTILE}");
    status.config.source = hostile();
    status.config.rolled_back = Some(hostile());
    status.config.pending = Some(Pending { file: hostile(), until: hostile(), seconds_left: 9 });
    status.config.last_reload = Some(Reload {
        at: hostile(),
        successful: false,
        changes: vec![hostile()],
        errors: vec![hostile()],
    });
    let mut view = view(status, traffic(&[hostile()]));
    view.host = hostile();
    view.top.entries = vec![TopEntry {
        what: hostile(),
        totals: Totals::default(),
        class: hostile(),
        reason: hostile(),
        interface: hostile(),
    }];
    let html = render(&view, Request::default());
    assert!(html.matches("&lt;script&gt;alert").count() > 15, "{html}");
    // The one script is the page's own.
    assert_eq!(html.matches("<script").count(), 1);
    assert!(html.contains("<script src=\"page.js\" defer></script>"));
    for bad in
        ["alert('x')</script>", "&\"<", "style=", "onload=", "http-equiv=\"refresh\" content=\"0"]
    {
        assert!(!html.contains(bad), "{bad}");
    }
}

#[test]
fn a_page_without_history_says_so() {
    let html = render(&view(status(), Traffic::default()), Request::default());
    assert!(html.contains("There is nothing to compare with yet"), "{html}");
    assert_eq!(html.matches("None in this time.").count(), 3);
    assert!(!html.contains("<svg"));
    assert!(html.contains("Nothing was dropped, or would have been"));
    assert!(html.contains("2027-01-15T08:00:00Z"), "the time and its zone");
    assert!(html.contains("1\u{202f}234"));
}

#[test]
fn one_class_has_its_rates_its_limit_and_its_pressure() {
    let mut status = status();
    status.classes = vec![class("c0"), class("c1")];
    let html = render(&view(status, traffic(&["c0".into()])), Request::default());
    assert_eq!(html.matches("<svg").count(), 3);
    // 720² less 719² in 5 s.
    assert!(html.contains("<span class=\"number\" id=\"dropped\">288/s"), "{html}");
    assert!(html.contains("1\u{a0}k/s (burst 2\u{a0}k)"));
    assert!(html.contains("aria-label=\"Budgets of c0 used\""));
    assert!(html.contains("value=\"0.250\""));
    // 0.999 is not all.
    assert!(html.contains("budget used: 99\u{a0}%"));
    assert!(html.contains("1 without a packet in the last hour"));
    assert!(html.contains("<title>288/s dropped, enforce – limiter on edge1</title>"));
}

#[test]
fn sixty_four_classes_stay_legible_and_small() {
    let names: Vec<_> = (0..64).map(|n| format!("c{n}")).collect();
    let mut status = status();
    status.classes = names.iter().map(|name| class(name)).collect();
    let traffic = traffic(&names);
    let begun = Instant::now();
    let html = render(&view(status, traffic), Request::default());
    println!("{} bytes in {:?}", html.len(), begun.elapsed());
    assert!(html.contains("others (57)"), "what has no colour of its own is one layer");
    for name in &names {
        assert!(html.contains(&format!("scope=\"row\">{name}</th>")), "{name}");
    }
    assert!(html.len() < 200_000, "{} bytes", html.len());
}

#[test]
fn a_paused_page_neither_renews_itself_nor_forgets_its_range() {
    let request = Request { range: Range::Short, paused: true };
    let html = render(&view(status(), Traffic::default()), request);
    assert!(!html.contains("data-refresh") && !html.contains("http-equiv=\"refresh\""));
    assert!(!html.contains("<script"));
    assert!(html.contains("href=\"?range=15m&amp;refresh=off\""));
    assert!(html.contains("href=\"?range=5m\""), "to go on");
}
