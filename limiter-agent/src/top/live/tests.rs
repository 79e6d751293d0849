use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::app::{App, Dialog};
use super::draw::draw;
use super::metrics::{Rate, Scrape};
use super::worker::{Look, News, Status, Wish};
use crate::events::{By, Of, Query, Span, Top, TopEntry, Totals};

fn entry(what: &str, packets: u64, dropped: u64) -> TopEntry {
    TopEntry {
        what: what.to_owned(),
        totals: Totals {
            packets,
            packets_error: packets / 10,
            bytes: packets * 60,
            bytes_error: packets * 6,
            dropped,
            would_drop: packets - dropped,
            packets_per_second: 1234.5,
            bytes_per_second: 74_070.0,
        },
        class: "dns".to_owned(),
        reason: "packet_rate".to_owned(),
        interface: "eth0".to_owned(),
    }
}

fn look(entries: Vec<TopEntry>) -> Look {
    let top = Top {
        at: "2026-12-01T04:00:00Z".to_owned(),
        of: Of::Sources,
        by: By::Packets,
        window: Span::Short,
        window_seconds: 7.5,
        events: 900,
        events_lost: 0,
        total: Totals { packets: 10_000, bytes: 600_000, ..Totals::default() },
        known: entries.len(),
        entries,
    };
    let rates = vec![Rate {
        class: "dns".to_owned(),
        reason: "near_limit".to_owned(),
        action: "pass".to_owned(),
        packets: 42.0,
        bytes: 4_200.0,
    }];
    let scrape = Scrape::parse(
        "limiter_tracked_sources{family=\"ipv4\"} 950000\n\
         limiter_table_capacity{family=\"ipv4\"} 1000000\n\
         limiter_pressure{class=\"none\"} 0.93\n",
    );
    Look { top: Some(top), status: Some(status()), scrape, rates, created: 17.0 }
}

fn status() -> Status {
    serde_json::from_value(serde_json::json!({
        "version": "0.1.0", "mode": "observe", "mode_override": null, "problems": [],
        "interfaces": [{"name": "eth0", "ifindex": 2, "mode": "native", "driver": "virtio_net",
                        "attachment": "link"}],
    }))
    .expect("is a status")
}

/// The screen's lines.
fn screen(app: &App) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(80, 24)).expect("a terminal");
    terminal.draw(|frame| draw(frame, app)).expect("draws");
    let buffer = terminal.backend().buffer();
    let line = |y| (0..80).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..24).map(line).collect()
}

fn app() -> App {
    let mut app = App::new(Query::default());
    let entries = vec![
        entry("192.0.2.1", 5_000, 5_000),
        entry("2001:db8:1:2::/64", 3_000, 0),
        entry("198.51.100.7", 2_000, 2_000),
    ];
    app.hear(News::Look(Box::new(look(entries))));
    app
}

fn press(app: &mut App, keys: &str) -> Option<Wish> {
    let mut wish = None;
    for key in keys.chars() {
        let code = match key {
            '\n' => KeyCode::Enter,
            '\t' => KeyCode::Tab,
            '^' => KeyCode::Esc,
            '<' => KeyCode::Backspace,
            other => KeyCode::Char(other),
        };
        wish = app.press(KeyEvent::new(code, KeyModifiers::NONE));
    }
    wish
}

#[test]
fn all_that_matters_fits_80_by_24() {
    let screen = screen(&app());
    let text = screen.join("\n");
    for part in [
        "limiter 0.1.0  observe  eth0 native  2026-12-01T04:00:00Z",
        "passed 42.0/s  dropped 0.0/s  would drop 0.0/s  new 17.0/s  events lost 0",
        "IPv4 950k of 1.00M (95.0 %)",
        "budget for new 93.0 %",
        "near_limit",
        "sources dropped most, by packets, in the last 8 s: 3",
        "192.0.2.1",
        "1.23k",
        "593k",
        "50.0 %",
        "10.0 %",
        "dns packet_rate",
        "2001:db8:1:2::/64",
        "↑↓ select  b block  i inspect  m mode  Tab prefixes  s by bytes  q quit",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn a_block_is_of_the_entry_under_the_cursor_for_the_time_that_is_written() {
    let mut app = app();
    assert_eq!(press(&mut app, "jb"), None);
    assert!(screen(&app).join("\n").contains("block 2001:db8:1:2::/64"));
    assert_eq!(press(&mut app, "<<<\n"), None, "no time is no block");
    let block = Wish::Block("2001:db8:1:2::/64".to_owned(), Duration::from_hours(2));
    assert_eq!(press(&mut app, "2h\n"), Some(block));
    assert_eq!(app.dialog, Dialog::None);
    assert_eq!(press(&mut app, "b^"), None);
    // There is nothing to block in a class.
    press(&mut app, "\t\t\t");
    assert_eq!((app.query.of, press(&mut app, "b")), (Of::Classes, None));
    assert!(app.message.is_error);
}

#[test]
fn the_cursor_stays_on_whom_it_is_on() {
    let mut app = app();
    press(&mut app, "jj");
    let entries = vec![entry("198.51.100.7", 9_000, 0), entry("192.0.2.1", 5_000, 0)];
    app.hear(News::Look(Box::new(look(entries))));
    assert_eq!(app.selected, 0);
    assert_eq!(press(&mut app, "i"), Some(Wish::Inspect("198.51.100.7".to_owned())));
    app.hear(News::Look(Box::new(look(vec![]))));
    assert_eq!(app.selected, 0);
    assert!(screen(&app).join("\n").contains("nothing is dropped, and nothing would be"));
}

#[test]
fn a_mode_is_changed_after_a_yes_only() {
    let mut app = app();
    assert_eq!(press(&mut app, "mb"), None);
    assert!(screen(&app).join("\n").contains("change to bypass?"));
    assert_eq!(press(&mut app, "n"), None);
    assert_eq!(press(&mut app, "mx"), None);
    assert_eq!(app.dialog, Dialog::None);
    assert_eq!(press(&mut app, "mey"), Some(Wish::Mode("enforce".to_owned())));
    press(&mut app, "q");
    assert!(app.is_over);
}

#[test]
fn what_went_wrong_is_said_until_the_next_key() {
    let mut app = app();
    app.hear(News::Failed("refused\nbecause".to_owned()));
    assert!(screen(&app)[23].starts_with("refused; because"));
    let lines: Vec<_> = (0..60).map(|it| format!("line {it}")).collect();
    app.hear(News::Details(lines.join("\n")));
    assert!(screen(&app).join("\n").contains("line 3"));
    press(&mut app, &"j".repeat(20));
    assert!(!screen(&app).join("\n").contains("line 3 "));
    press(&mut app, "x");
    assert_eq!(app.dialog, Dialog::None);
}
