//! The application's own limits: token buckets by address and by account.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    num::NonZeroU32,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::http::HeaderName;
use governor::{
    DefaultKeyedRateLimiter, NotUntil, Quota,
    clock::{Clock as _, DefaultClock, QuantaInstant},
};

/// How long refusals of one address are counted together.
const WINDOW: Duration = Duration::from_secs(10);

/// Addresses whose refusals are counted at most. With more, some go unreported, not unlimited.
const MOST_COUNTED: usize = 100_000;

/// The limits, and who goes on in spite of them.
pub(crate) struct Limits {
    addresses: DefaultKeyedRateLimiter<IpAddr>,
    accounts: DefaultKeyedRateLimiter<String>,
    clock: DefaultClock,
    per_address: NonZeroU32,
    per_account: NonZeroU32,
    report_after: u32,
    refused: Mutex<HashMap<IpAddr, (Instant, u32)>>,
}

/// Why a request is refused, and what its client should know.
pub(crate) struct Refusal {
    /// In words.
    pub(crate) detail: &'static str,
    /// Seconds to wait, with jitter, so that those who were refused together do not return together.
    pub(crate) retry_after: u64,
    policy: &'static str,
    rate: NonZeroU32,
    reset: u64,
}

impl Refusal {
    /// The header fields of draft-ietf-httpapi-ratelimit-headers.
    pub(crate) fn headers(&self) -> [(HeaderName, String); 2] {
        let Self { policy, rate, reset, .. } = self;
        [
            (HeaderName::from_static("ratelimit-policy"), format!("\"{policy}\";q={rate};w=1")),
            (HeaderName::from_static("ratelimit"), format!("\"{policy}\";r=0;t={reset}")),
        ]
    }
}

impl Limits {
    /// Limits of so many requests per second, each with a burst of a second.
    pub(crate) fn new(per_address: NonZeroU32, per_account: NonZeroU32, report_after: u32) -> Self {
        Self {
            addresses: DefaultKeyedRateLimiter::keyed(Quota::per_second(per_address)),
            accounts: DefaultKeyedRateLimiter::keyed(Quota::per_second(per_account)),
            clock: DefaultClock::default(),
            per_address,
            per_account,
            report_after,
            refused: Mutex::default(),
        }
    }

    /// Whether the address may have one more request.
    pub(crate) fn address(&self, client: IpAddr) -> Result<(), Refusal> {
        let outcome = self.addresses.check_key(&bucket(client));
        outcome.map_err(|wait| {
            self.refusal(&wait, "address", self.per_address, "too many requests from your address")
        })
    }

    /// Whether the account may have one more request.
    pub(crate) fn account(&self, key: &str) -> Result<(), Refusal> {
        let outcome = self.accounts.check_key(&key.to_owned());
        outcome.map_err(|wait| {
            self.refusal(&wait, "account", self.per_account, "too many requests of your account")
        })
    }

    fn refusal(
        &self,
        wait: &NotUntil<QuantaInstant>,
        policy: &'static str,
        rate: NonZeroU32,
        detail: &'static str,
    ) -> Refusal {
        let wait = wait.wait_time_from(self.clock.now());
        let reset = wait.as_secs() + u64::from(wait.subsec_nanos() != 0);
        Refusal { detail, retry_after: reset + fastrand::u64(0..=2), policy, rate, reset }
    }

    /// Counts a refusal, and says whether the client has now collected enough of them to be reported.
    pub(crate) fn goes_on(&self, client: IpAddr) -> bool {
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let client = bucket(client);
        if refused.len() >= MOST_COUNTED && !refused.contains_key(&client) {
            return false;
        }
        let (since, count) = refused.entry(client).or_insert((Instant::now(), 0));
        *count += 1;
        let goes_on = *count >= self.report_after && since.elapsed() < WINDOW;
        if goes_on || since.elapsed() >= WINDOW {
            refused.remove(&client);
        }
        goes_on
    }

    /// Forgets whose buckets are full again, and old refusals.
    pub(crate) fn forget(&self) {
        self.addresses.retain_recent();
        self.accounts.retain_recent();
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.retain(|_, (since, _)| since.elapsed() < WINDOW);
    }
}

/// A customer has a /64 of IPv6, so that is what counts as one address.
fn bucket(client: IpAddr) -> IpAddr {
    match client {
        IpAddr::V4(_) => client,
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
    }
}
