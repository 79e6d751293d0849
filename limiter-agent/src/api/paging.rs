//! `?limit=&after=` of lists.

use std::fmt::Display;
use std::str::FromStr;

use axum::extract::FromRequestParts;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;

use super::problem;

/// Entries in a page, unless the request says otherwise.
const USUAL: usize = 100;
/// The most that it may ask for.
pub(super) const LARGEST: usize = 1_000;

/// Which part of a list is wanted: `after` is what the entries are in order of.
pub(super) struct Page<T>(pub(super) Paged<T>);

/// The same, read.
pub(super) struct Paged<T> {
    pub(super) limit: usize,
    pub(super) after: Option<T>,
}

impl<T: FromStr<Err: Display>, S: Send + Sync> FromRequestParts<S> for Page<T> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Response> {
        let query = parts.uri.query().unwrap_or_default();
        read(query).map(Self).map_err(|error| {
            problem(StatusCode::UNPROCESSABLE_ENTITY, "there is no such page", vec![error])
        })
    }
}

fn read<T: FromStr<Err: Display>>(query: &str) -> Result<Paged<T>, String> {
    let mut page = Paged { limit: USUAL, after: None };
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        match key {
            "limit" => {
                let limit = value.parse().ok().filter(|limit| (1..=LARGEST).contains(limit));
                page.limit = limit.ok_or_else(|| format!("limit={value}: write 1 to {LARGEST}"))?;
            }
            "after" => {
                // The one character of networks that some clients escape, beside the colon.
                let value = value.replace("%2F", "/").replace("%2f", "/");
                let value = value.replace("%3A", ":").replace("%3a", ":");
                let after = value.parse().map_err(|error| {
                    format!("after={value}: {error}; write what `next` of the page before says")
                })?;
                page.after = Some(after);
            }
            _ => return Err(format!("{key}: there are limit and after")),
        }
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use ipnet::IpNet;

    use super::*;

    #[test]
    fn pages_are_read_or_refused() {
        let page = read::<u64>("limit=7&after=12").map_err(|_| ()).expect("is one");
        assert_eq!((page.limit, page.after), (7, Some(12)));
        let page = read::<IpNet>("after=2001%3Adb8::%2F64").map_err(|_| ()).expect("is one");
        assert_eq!(page.after.map(|it| it.to_string()).as_deref(), Some("2001:db8::/64"));
        for wrong in ["limit=0", "limit=1001", "limit=x", "after=-1", "page=2"] {
            assert!(read::<u64>(wrong).is_err(), "{wrong}");
        }
    }
}
