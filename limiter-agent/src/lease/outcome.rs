//! What came of requests for leases, and of connections that made none.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The outcomes, for `limiter_lease_requests_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// A new lease.
    Granted,
    /// A lease goes on.
    Renewed,
    /// A lease was given back.
    Released,
    /// A lease was looked at.
    Shown,
    /// A certificate of somebody unknown, or one that is none for clients.
    WrongCertificate,
    /// A token that was not signed with the key, or is for something else.
    WrongToken,
    /// A certificate or a token whose time is over, or has not come.
    Expired,
    /// A token that was used before.
    Replayed,
    /// A certificate or a name that is revoked.
    Revoked,
    /// Neither a certificate nor a token.
    NoCredential,
    /// A good credential whose name has no grant.
    NotGranted,
    /// More addresses than the grant allows, or the address has another's lease.
    TooMany,
    /// Not what the protocol says.
    BadRequest,
    /// A connection that took too long.
    Timeout,
    /// A connection that broke off, or did not speak TLS 1.3.
    Handshake,
    /// Too many connections at once.
    Busy,
    /// The agent or the kernel could not do it.
    Failed,
}

impl Outcome {
    pub(crate) const ALL: [Self; 17] = [
        Self::Granted,
        Self::Renewed,
        Self::Released,
        Self::Shown,
        Self::WrongCertificate,
        Self::WrongToken,
        Self::Expired,
        Self::Replayed,
        Self::Revoked,
        Self::NoCredential,
        Self::NotGranted,
        Self::TooMany,
        Self::BadRequest,
        Self::Timeout,
        Self::Handshake,
        Self::Busy,
        Self::Failed,
    ];

    /// The value of the `outcome` label.
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Renewed => "renewed",
            Self::Released => "released",
            Self::Shown => "shown",
            Self::WrongCertificate => "wrong_certificate",
            Self::WrongToken => "wrong_token",
            Self::Expired => "expired",
            Self::Replayed => "replayed",
            Self::Revoked => "revoked",
            Self::NoCredential => "no_credential",
            Self::NotGranted => "not_granted",
            Self::TooMany => "too_many",
            Self::BadRequest => "bad_request",
            Self::Timeout => "timeout",
            Self::Handshake => "handshake",
            Self::Busy => "busy",
            Self::Failed => "failed",
        }
    }
}

/// How often each came up since the start.
#[derive(Debug, Default)]
pub(crate) struct Counts([AtomicU64; Outcome::ALL.len()]);

impl Counts {
    pub(crate) fn add(&self, outcome: Outcome) {
        self.0[outcome as usize].fetch_add(1, Relaxed);
    }

    pub(crate) fn read(&self) -> Vec<(&'static str, u64)> {
        let counts = Outcome::ALL.into_iter().zip(&self.0);
        counts.map(|(outcome, count)| (outcome.label(), count.load(Relaxed))).collect()
    }
}

/// A request that is not granted: what it is counted as, and what the client and the log are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) outcome: Outcome,
    pub(super) why: String,
}

impl Refusal {
    pub(super) fn new(outcome: Outcome, why: impl Into<String>) -> Self {
        Self { outcome, why: why.into() }
    }
}
