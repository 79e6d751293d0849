//! Who wrote what: a line in the log for each write, and the last of them to be read.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use log::{info, warn};
use serde::{Deserialize, Serialize};

use super::paging::{Page, Paged};
use super::{Api, Peer};
use crate::status::utc;

/// Entries that are kept.
const KEPT: usize = 1_024;
/// Longer texts are cut: they are others'.
const LONGEST: usize = 400;

/// A write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Counts the writes since the agent started.
    pub id: u64,
    /// When, UTC.
    pub at: String,
    /// The user at the other end of the socket.
    pub uid: Option<u32>,
    /// Its group.
    pub gid: Option<u32>,
    /// Its process.
    pub pid: Option<i32>,
    /// `control` or `application`.
    pub socket: String,
    /// `block`, `penalty`, `proven` and so on.
    pub action: String,
    /// About what.
    pub subject: String,
    /// When it ends, UTC; none if it does not.
    pub until: Option<String>,
    /// Whether it was done; else it was refused, or failed.
    pub done: bool,
    /// What came of it.
    pub outcome: String,
}

/// A page of them, the oldest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditPage {
    /// The writes.
    pub entries: Vec<Entry>,
    /// What `after` should be for the next page; none if this is the last.
    pub next: Option<u64>,
}

/// What came of a write.
pub(crate) struct Written<'a> {
    pub(crate) action: &'a str,
    pub(crate) subject: &'a str,
    pub(crate) until: Option<SystemTime>,
    /// What was done, or why not.
    pub(crate) outcome: Result<String, String>,
}

/// The last writes.
#[derive(Default)]
pub(crate) struct Audit(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    next: u64,
    entries: VecDeque<Entry>,
}

impl Audit {
    /// Notes a write, and logs it.
    pub(crate) fn note(&self, peer: &Peer, written: Written<'_>) {
        let Written { action, subject, until, outcome } = written;
        let done = outcome.is_ok();
        let outcome = on_one_line(&outcome.unwrap_or_else(|why| why));
        let subject = on_one_line(subject);
        let end = until.map(|at| format!(" until {}", utc(at))).unwrap_or_default();
        let result = if done { "done" } else { "refused" };
        let line = format!("{action} {subject}{end} {result}: {outcome} (by {peer})");
        if done {
            info!("{line}");
        } else {
            warn!("{line}");
        }
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.next += 1;
        let entry = Entry {
            id: kept.next,
            at: utc(SystemTime::now()),
            uid: peer.uid,
            gid: peer.gid,
            pid: peer.pid,
            socket: peer.socket.to_owned(),
            action: action.to_owned(),
            subject,
            until: until.map(utc),
            done,
            outcome,
        };
        kept.entries.push_back(entry);
        if kept.entries.len() > KEPT {
            // What operators did is not for applications to push out.
            let is_theirs = |it: &Entry| it.socket == "application";
            let oldest = kept.entries.iter().position(is_theirs).unwrap_or(0);
            kept.entries.remove(oldest);
        }
    }

    fn page(&self, after: u64, limit: usize) -> AuditPage {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut later = kept.entries.iter().filter(|it| it.id > after);
        let entries: Vec<_> = later.by_ref().take(limit).cloned().collect();
        let next = later.next().and_then(|_| entries.last()).map(|it| it.id);
        AuditPage { entries, next }
    }
}

pub(super) async fn audit(State(api): State<Api>, Page(page): Page<u64>) -> Response {
    let Paged { limit, after } = page;
    Json(api.audit.page(after.unwrap_or(0), limit)).into_response()
}

/// What comes from outside goes to logs and terminals.
fn on_one_line(text: &str) -> String {
    let cut = text.char_indices().nth(LONGEST).map_or(text, |(at, _)| &text[..at]);
    let plain = cut.chars().map(|letter| if letter.is_control() { ' ' } else { letter });
    plain.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_are_kept_and_paged() {
        let (audit, peer) = (Audit::default(), Peer::default());
        for number in 0..KEPT + 10 {
            let subject = format!("{number}\n\u{1b}[2J");
            let outcome = Ok(String::new());
            audit.note(&peer, Written { action: "block", subject: &subject, until: None, outcome });
        }
        let first = audit.page(0, 2);
        assert_eq!(first.entries.iter().map(|it| it.id).collect::<Vec<_>>(), [11, 12]);
        assert_eq!((first.next, first.entries[0].subject.as_str()), (Some(12), "10  [2J"));
        let rest = audit.page(12, KEPT);
        assert_eq!((rest.entries.len(), rest.next), (KEPT - 2, None));
        assert_eq!(audit.page(u64::MAX, 10).entries, []);
    }
}
