//! What a service manager is told (`sd_notify(3)`). Where there is none, nothing is.

use std::time::Duration;

use log::warn;
use sd_notify::NotifyState;

/// How often [`alive`] must be said: twice in the time that the service manager waits. None if it
/// does not ask for it.
#[must_use]
pub fn watchdog() -> Option<Duration> {
    let limit = sd_notify::watchdog_enabled()?;
    // A timer of no length cannot be made.
    Some(limit / 2).filter(|half| !half.is_zero())
}

/// All interfaces are attached, or a reload is over.
pub fn ready() {
    tell(&[NotifyState::Ready]);
}

/// A reload begins; [`ready`] ends it.
pub fn reloading() {
    // The time is for `Type=notify-reload` of systemd 253 and later; the others ignore it.
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(error) => warn!("cannot tell the service manager of the reload: {error}"),
    }
}

/// The agent does its work.
pub fn alive() {
    tell(&[NotifyState::Watchdog]);
}

/// The agent is about to detach and end.
pub fn stopping() {
    tell(&[NotifyState::Stopping]);
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn!("cannot reach the service manager: {error}");
    }
}
