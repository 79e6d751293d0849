//! `expires = …`: an instant in RFC 3339, as a TOML date-time or a string.

use std::time::{Duration, SystemTime};

use toml::de::DeValue;
use toml::value::{Datetime, Offset};

use super::reader::Table;

/// The expiry of `table`, none if it does not say; `None` only if something was noted. One in the
/// past is a warning.
#[expect(clippy::option_option, reason = "absent and wrong are two things")]
pub(super) fn read(table: &Table<'_>, now: SystemTime) -> Option<Option<SystemTime>> {
    let cure = "write date, time and UTC: 2027-01-01T00:00:00Z";
    let Some(value) = table.get("expires") else { return Some(None) };
    let written = match value.raw() {
        DeValue::Datetime(time) => Some(*time),
        DeValue::String(text) => text.parse().ok(),
        DeValue::Integer(_)
        | DeValue::Float(_)
        | DeValue::Boolean(_)
        | DeValue::Array(_)
        | DeValue::Table(_) => {
            value.mistyped("a date and time", cure);
            return None;
        }
    };
    let Some(expires) = written.and_then(instant) else {
        value.place().error("this is not an instant in time", cure);
        return None;
    };
    if expires <= now {
        let ended = humantime::format_rfc3339_seconds(expires);
        value.place().warn(format!("ended at {ended} and has no effect"), "remove the entry");
    }
    Some(Some(expires))
}

/// The instant, if `time` has a date, a time and an offset.
fn instant(time: Datetime) -> Option<SystemTime> {
    let minutes = match time.offset? {
        Offset::Z => 0,
        Offset::Custom { minutes } => minutes,
    };
    // Seconds may be left out in TOML 1.1, but not in RFC 3339.
    let mut clock = time.time?;
    clock.second = clock.second.or(Some(0));
    let utc = Datetime { date: time.date, time: Some(clock), offset: Some(Offset::Z) };
    let local = humantime::parse_rfc3339(&utc.to_string()).ok()?;
    let offset = Duration::from_secs(u64::from(minutes.unsigned_abs()) * 60);
    let instant = if minutes < 0 { local.checked_add(offset) } else { local.checked_sub(offset) };
    instant.filter(|instant| (SystemTime::UNIX_EPOCH..=last()).contains(instant))
}

/// The last second that RFC 3339 can write: 9999-12-31T23:59:59Z.
fn last() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(253_402_300_799)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_taken_off() {
        let at = |text: &str| instant(text.parse().unwrap());
        let utc = at("2027-01-01T00:00:00Z");
        assert!(utc.is_some());
        assert_eq!(at("2027-01-01T02:00:00+02:00"), utc);
        assert_eq!(at("2026-12-31T18:30:00-05:30"), utc);
        assert_eq!(at("2027-01-01T00:00:00"), None);
        assert_eq!(at("2027-01-01"), None);
    }

    #[test]
    fn instants_that_cannot_be_written_in_utc_are_none() {
        let at = |text: &str| instant(text.parse().unwrap());
        assert_eq!(at("9999-12-31T23:59:59Z"), Some(last()));
        assert_eq!(at("9999-12-31T23:59:59-00:01"), None);
        assert_eq!(at("1970-01-01T00:00:00Z"), Some(SystemTime::UNIX_EPOCH));
        assert_eq!(at("1970-01-01T00:00:00+00:01"), None);
    }
}
