//! The live view on a terminal of 80 × 24 or more.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row, Table, TableState, Wrap};

use super::app::{App, Dialog};
use super::metrics::Rate;
use crate::events::{By, Of, TopEntry};
use crate::top::text::{percent, rate, ratio};

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const DIM: Style = Style::new().add_modifier(Modifier::DIM);

/// Lines for rates, their frame included.
const RATES: u16 = 8;

/// The whole screen.
pub(super) fn draw(frame: &mut Frame<'_>, app: &App) {
    let [head, rates, talkers, foot] = Layout::vertical([
        Constraint::Length(3),
        Constraint::Length(RATES),
        Constraint::Min(4),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(header(app)), head);
    draw_rates(frame, app, rates);
    draw_talkers(frame, app, talkers);
    frame.render_widget(Paragraph::new(footer(app)), foot);
    draw_dialog(frame, app);
}

fn header(app: &App) -> Vec<Line<'static>> {
    let scrape = &app.look.scrape;
    let Some(status) = &app.look.status else { return vec![Line::from("asking the agent …")] };
    let mut first = vec![
        Span::styled(format!("limiter {}", status.version), BOLD),
        Span::raw("  "),
        Span::styled(status.mode.clone(), mode_style(&status.mode)),
    ];
    if status.mode_override.is_some() {
        first.push(Span::raw(" by command"));
    }
    let interfaces: Vec<_> =
        status.interfaces.iter().map(|it| format!("{} {}", it.name, it.mode)).collect();
    first.push(Span::raw(format!("  {}", interfaces.join(", "))));
    first.push(Span::styled(format!("  {}", app.look.top.as_ref().map_or("", |top| &top.at)), DIM));
    let action = |action: &str| -> f64 {
        // Not `sum`, which begins at -0.
        let rates = app.look.rates.iter().filter(|it| it.action == action);
        rates.fold(0.0, |sum, it| sum + it.packets)
    };
    let lost = app.look.top.as_ref().map_or(0, |top| top.events_lost);
    let second = vec![
        Span::raw(format!("passed {}/s  ", rate(action("pass")))),
        Span::styled(format!("dropped {}/s  ", rate(action("drop"))), drop_style("drop")),
        Span::styled(
            format!("would drop {}/s  ", rate(action("would_drop"))),
            drop_style("would_drop"),
        ),
        Span::raw(format!("new {}/s  ", rate(app.look.created))),
        Span::styled(format!("events lost {lost}"), if lost > 0 { alarm() } else { DIM }),
    ];
    let table = |family: &str| {
        let label = Some(("family", family));
        let used = scrape.sum("limiter_tracked_sources", label);
        let all = scrape.sum("limiter_table_capacity", label);
        let share = if all > 0.0 { used / all } else { 0.0 };
        let name = if family == "ipv4" { "IPv4" } else { "IPv6" };
        let text = format!("{name} {} of {} ({})  ", rate(used), rate(all), percent(share));
        Span::styled(text, if share > 0.8 { alarm() } else { Style::new() })
    };
    let strangers = scrape.sum("limiter_pressure", Some(("class", "none")));
    let mut third = vec![
        table("ipv4"),
        table("ipv6"),
        Span::styled(
            format!("budget for new {}", percent(strangers)),
            if strangers > 0.9 { alarm() } else { Style::new() },
        ),
    ];
    if let Some((class, share)) = scrape.greatest("limiter_pressure", "class")
        && class != "none"
        && share > 0.5
    {
        third.push(Span::styled(format!("  {class} {}", percent(share)), alarm()));
    }
    if let Some(problem) = status.problems.first() {
        third = vec![Span::styled(format!("problem: {problem}"), alarm())];
    }
    vec![Line::from(first), Line::from(second), Line::from(third)]
}

fn draw_rates(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let rows = app.look.rates.iter().map(|it| {
        let Rate { class, reason, action, packets, bytes } = it;
        let style = drop_style(action);
        let style = if reason == "near_limit" { Style::new().fg(Color::Yellow) } else { style };
        Row::new([
            class.clone(),
            reason.clone(),
            action.clone(),
            format!("{:>9}", rate(*packets)),
            format!("{:>9}", rate(*bytes * 8.0)),
        ])
        .style(style)
    });
    let widths = [
        Constraint::Fill(1),
        Constraint::Length(17),
        Constraint::Length(11),
        Constraint::Length(9),
        Constraint::Length(9),
    ];
    let table = Table::new(rows, widths)
        .header(Row::new(["class", "reason", "action", "packets/s", "    bit/s"]).style(DIM))
        .block(Block::bordered().title(" rates "));
    frame.render_widget(table, area);
}

fn draw_talkers(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let top = app.look.top.as_ref();
    let rows = app.entries().iter().map(|it| {
        let TopEntry { what, totals, class, reason, .. } = it;
        let (part, error) = match app.query.by {
            By::Packets => (totals.packets, totals.packets_error),
            By::Bytes => (totals.bytes, totals.bytes_error),
        };
        let whole = top.map_or(0, |top| match app.query.by {
            By::Packets => top.total.packets,
            By::Bytes => top.total.bytes,
        });
        let style = drop_style(if totals.dropped > 0 { "drop" } else { "would_drop" });
        let right = |text: String| Cell::from(format!("{text:>9}"));
        Row::new([
            Cell::from(what.clone()),
            right(rate(totals.packets_per_second)),
            right(rate(totals.bytes_per_second * 8.0)),
            right(percent(ratio(part, whole))),
            Cell::from(format!("{:>7}", percent(ratio(error, part)))),
            Cell::from(format!("{class} {reason}")).style(style),
        ])
    });
    let widths = [
        Constraint::Length(what_width(app)),
        Constraint::Length(9),
        Constraint::Length(9),
        Constraint::Length(9),
        Constraint::Length(7),
        Constraint::Fill(1),
    ];
    let of = app.query.of.as_str();
    let title = match top {
        Some(top) => {
            let (by, seconds) = (app.query.by.as_str(), top.window_seconds);
            format!(" {of} dropped most, by {by}, in the last {seconds:.0} s: {} ", top.known)
        }
        None => format!(" {of} "),
    };
    let header = ["", "packets/s", "    bit/s", "    share", "      ±", "class, reason"];
    let table = Table::new(rows, widths)
        .header(Row::new(header).style(DIM))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .block(Block::bordered().title(title));
    let selected = (!app.entries().is_empty()).then_some(app.selected);
    let mut state = TableState::new().with_selected(selected);
    frame.render_stateful_widget(table, area, &mut state);
    if app.entries().is_empty() && area.height > 3 {
        let inner = Rect { x: area.x + 2, y: area.y + 2, width: area.width - 4, height: 1 };
        frame.render_widget(Paragraph::new("nothing is dropped, and nothing would be"), inner);
    }
}

/// IPv6 prefixes are up to 42 characters; most are not.
fn what_width(app: &App) -> u16 {
    let longest = app.entries().iter().map(|it| it.what.len()).max().unwrap_or(0);
    u16::try_from(longest).unwrap_or(u16::MAX).clamp(15, 24)
}

fn footer(app: &App) -> Line<'static> {
    if !app.message.text.is_empty() {
        let style = if app.message.is_error { alarm() } else { BOLD };
        return Line::from(Span::styled(app.message.text.clone(), style));
    }
    let other = match app.query.of {
        Of::Sources => "prefixes",
        Of::Prefixes => "ports",
        Of::Ports => "classes",
        Of::Classes => "sources",
    };
    let by = match app.query.by {
        By::Packets => "bytes",
        By::Bytes => "packets",
    };
    Line::from(Span::styled(
        format!("↑↓ select  b block  i inspect  m mode  Tab {other}  s by {by}  q quit"),
        DIM,
    ))
}

fn draw_dialog(frame: &mut Frame<'_>, app: &App) {
    let (title, lines, height) = match &app.dialog {
        Dialog::None => return,
        Dialog::Block { what, time } => (
            format!(" block {what} "),
            vec![
                Line::from(format!("for how long: {time}▏")),
                Line::from(Span::styled("Enter blocks, Esc does not", DIM)),
            ],
            4,
        ),
        Dialog::Mode => (
            " mode ".to_owned(),
            vec![
                Line::from("o  observe: drop nothing, count what would be dropped"),
                Line::from("e  enforce: drop what is over its limit"),
                Line::from("b  bypass: limit nothing"),
                Line::from("c  config: as the configuration says"),
                Line::from(Span::styled("any other key changes nothing", DIM)),
            ],
            7,
        ),
        Dialog::Confirm(mode) => (
            format!(" change to {mode}? "),
            vec![
                Line::from(format!("{mode} would hold at once, over reloads and restarts.")),
                Line::from(Span::styled("y changes it, any other key does not", DIM)),
            ],
            4,
        ),
        Dialog::Details { text, line } => {
            let area = centered(frame.area(), 76, frame.area().height.saturating_sub(4));
            let block = Block::bordered().title(" ↑↓ scroll, any other key closes ");
            let lines = Paragraph::new(text.as_str()).wrap(Wrap { trim: false });
            frame.render_widget(Clear, area);
            frame.render_widget(lines.scroll((*line, 0)).block(block), area);
            return;
        }
    };
    let area = centered(frame.area(), 60, height);
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(title)), area);
}

fn centered(area: Rect, width: u16, height: u16) -> Rect {
    let (width, height) = (width.min(area.width), height.min(area.height));
    let (x, y) = (area.x + (area.width - width) / 2, area.y + (area.height - height) / 2);
    Rect { x, y, width, height }
}

fn mode_style(mode: &str) -> Style {
    match mode {
        "enforce" => BOLD.fg(Color::Green),
        "bypass" => alarm(),
        _ => BOLD.fg(Color::Yellow),
    }
}

fn drop_style(action: &str) -> Style {
    match action {
        "drop" => Style::new().fg(Color::Red),
        "would_drop" => Style::new().fg(Color::Yellow),
        _ => Style::new(),
    }
}

const fn alarm() -> Style {
    BOLD.fg(Color::Red)
}
