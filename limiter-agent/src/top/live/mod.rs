//! `limiter-agent top` on a terminal.

mod app;
mod draw;
mod metrics;
mod worker;

use std::io;
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};

use self::app::App;
use self::worker::Worker;
use crate::cli::{Failure, TopArgs};
use crate::events::Query;

/// How soon what the agent said is shown.
const TICK: Duration = Duration::from_millis(100);

/// Shows it until `q` is pressed.
///
/// # Errors
/// [`Failure::Machine`] if the terminal cannot be used.
pub(super) fn run(args: &TopArgs, query: Query) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::Machine(format!("cannot use the terminal: {error}"));
    let mut terminal = ratatui::try_init().map_err(failed)?;
    let ended = show(&mut terminal, args, query);
    ratatui::restore();
    ended.map_err(failed)
}

fn show(terminal: &mut DefaultTerminal, args: &TopArgs, query: Query) -> io::Result<()> {
    let worker = Worker::start(args.client.control_socket.clone(), query);
    let mut app = App::new(query);
    while !app.is_over {
        for news in worker.news.try_iter() {
            app.hear(news);
        }
        terminal.draw(|frame| draw::draw(frame, &app))?;
        if event::poll(TICK)?
            && let Event::Key(key) = event::read()?
        {
            app.message = app::Message::default();
            if let Some(wish) = app.press(key) {
                // It lives as long as this.
                let _ = worker.wishes.send(wish);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
