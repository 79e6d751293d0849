//! The state of the live view, and what keys do to it.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::worker::{Look, News, Wish};
use crate::events::{By, Of, Query, TopEntry};

/// How long a block lasts unless another time is written.
const BLOCK: &str = "10m";

/// The live view.
pub(super) struct App {
    pub(super) query: Query,
    pub(super) look: Look,
    /// The entry under the cursor.
    pub(super) selected: usize,
    pub(super) dialog: Dialog,
    /// What came of the last key, or is wrong.
    pub(super) message: Message,
    pub(super) is_over: bool,
}

/// What is asked of who watches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Dialog {
    None,
    /// For how long to block this.
    Block {
        what: String,
        time: String,
    },
    /// Which mode to change to.
    Mode,
    /// Whether to change to this one.
    Confirm(&'static str),
    /// Something to read, from this line on.
    Details {
        text: String,
        line: u16,
    },
}

/// A line at the bottom.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) text: String,
    pub(super) is_error: bool,
}

impl App {
    pub(super) fn new(query: Query) -> Self {
        let (look, dialog, message) = (Look::default(), Dialog::None, Message::default());
        Self { query, look, selected: 0, dialog, message, is_over: false }
    }

    /// The entries shown.
    pub(super) fn entries(&self) -> &[TopEntry] {
        self.look.top.as_ref().map_or(&[], |top| &top.entries)
    }

    /// Takes in what the agent said.
    pub(super) fn hear(&mut self, news: News) {
        match news {
            News::Look(look) => {
                // The cursor stays on whom it is on.
                let chosen = self.entries().get(self.selected).map(|it| it.what.clone());
                self.look = *look;
                let place = self.entries().iter().position(|it| Some(&it.what) == chosen.as_ref());
                let last = self.entries().len().saturating_sub(1);
                self.selected = place.unwrap_or(self.selected).min(last);
                if self.message.is_error && self.message.text.starts_with("no agent") {
                    self.message = Message::default();
                }
            }
            News::Done(text) => self.message = Message { text, is_error: false },
            News::Failed(text) => {
                self.message = Message { text: text.replace('\n', "; "), is_error: true };
            }
            News::Details(text) => self.dialog = Dialog::Details { text, line: 0 },
        }
    }

    /// What a key asks of the agent, if anything.
    #[expect(clippy::wildcard_enum_match_arm, reason = "all other keys do nothing")]
    pub(super) fn press(&mut self, key: KeyEvent) -> Option<Wish> {
        if key.kind == KeyEventKind::Release {
            return None;
        }
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            self.is_over = true;
            return None;
        }
        match std::mem::replace(&mut self.dialog, Dialog::None) {
            Dialog::None => self.press_plain(key.code),
            Dialog::Block { what, time } => self.press_block(key.code, what, time),
            Dialog::Mode => {
                let mode = match key.code {
                    KeyCode::Char('o') => "observe",
                    KeyCode::Char('e') => "enforce",
                    KeyCode::Char('b') => "bypass",
                    KeyCode::Char('c') => "config",
                    _ => return None,
                };
                self.dialog = Dialog::Confirm(mode);
                None
            }
            Dialog::Confirm(mode) => {
                (key.code == KeyCode::Char('y')).then(|| Wish::Mode(mode.to_owned()))
            }
            Dialog::Details { text, line } => {
                let line = match key.code {
                    KeyCode::Down | KeyCode::Char('j') => line.saturating_add(1),
                    KeyCode::Up | KeyCode::Char('k') => line.saturating_sub(1),
                    _ => return None,
                };
                self.dialog = Dialog::Details { text, line };
                None
            }
        }
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "all other keys do nothing")]
    fn press_plain(&mut self, key: KeyCode) -> Option<Wish> {
        let last = self.entries().len().saturating_sub(1);
        match key {
            KeyCode::Char('q') | KeyCode::Esc => self.is_over = true,
            KeyCode::Down | KeyCode::Char('j') => self.selected = (self.selected + 1).min(last),
            KeyCode::Up | KeyCode::Char('k') => self.selected = self.selected.saturating_sub(1),
            KeyCode::Home => self.selected = 0,
            KeyCode::End => self.selected = last,
            KeyCode::Char('m') => self.dialog = Dialog::Mode,
            KeyCode::Char('b') => match self.chosen() {
                Ok(what) => self.dialog = Dialog::Block { what, time: BLOCK.to_owned() },
                Err(why) => self.message = why,
            },
            KeyCode::Char('i') => match self.chosen() {
                // The address that stands for a prefix.
                Ok(what) => {
                    let address = what.split('/').next().unwrap_or_default();
                    return Some(Wish::Inspect(address.to_owned()));
                }
                Err(why) => self.message = why,
            },
            KeyCode::Tab => {
                self.query.of = match self.query.of {
                    Of::Sources => Of::Prefixes,
                    Of::Prefixes => Of::Ports,
                    Of::Ports => Of::Classes,
                    Of::Classes => Of::Sources,
                };
                self.selected = 0;
                return Some(Wish::Rank(self.query));
            }
            KeyCode::Char('s') => {
                self.query.by = match self.query.by {
                    By::Packets => By::Bytes,
                    By::Bytes => By::Packets,
                };
                return Some(Wish::Rank(self.query));
            }
            _ => {}
        }
        None
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "all other keys do nothing")]
    fn press_block(&mut self, key: KeyCode, what: String, mut time: String) -> Option<Wish> {
        match key {
            KeyCode::Enter => match humantime::parse_duration(&time) {
                Ok(duration) if !duration.is_zero() => return Some(Wish::Block(what, duration)),
                Ok(_) | Err(_) => {
                    let text = format!("{time:?} is no time; write 10m, or 2h");
                    self.message = Message { text, is_error: true };
                }
            },
            KeyCode::Esc => return None,
            KeyCode::Backspace => {
                time.pop();
            }
            KeyCode::Char(character) if time.len() < 16 => time.push(character),
            _ => {}
        }
        self.dialog = Dialog::Block { what, time };
        None
    }

    /// The source or prefix under the cursor.
    fn chosen(&self) -> Result<String, Message> {
        let error = |text: &str| Message { text: text.to_owned(), is_error: true };
        if !matches!(self.query.of, Of::Sources | Of::Prefixes) {
            return Err(error("that is for sources and prefixes: press Tab until they are shown"));
        }
        let entry = self.entries().get(self.selected);
        entry.map(|it| it.what.clone()).ok_or_else(|| error("there is nothing under the cursor"))
    }
}
