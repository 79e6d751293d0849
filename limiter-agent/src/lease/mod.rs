//! Exemptions by credential: a service shows a certificate or a signed token over TLS, and the address that
//! it asks from gets a lease for a while. `docs/lease.md` has the protocol.
//!
//! [`Leases`] is what the listener, the control socket and the agent share. The leases themselves are in
//! the kernel and end by themselves, with or without an agent.

mod args;
mod client;
mod control;
mod credentials;
mod ledger;
mod listener;
mod outcome;
mod protocol;
mod revocations;
mod tokens;

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use log::{info, warn};
use tokio::sync::watch;

use self::credentials::{Credentials, Identity, hex};
use self::ledger::{Given, Ledger};
use self::outcome::{Counts, Outcome, Refusal};
use self::revocations::Revocations;
use self::tokens::{Token, Used};
use crate::config::Config;
use crate::datapath::{DatapathError, Leases as Maps};
use crate::plan::Guarded;
use crate::state::StateDir;
use crate::status::utc;

pub use args::{LeaseArgs, LeasesArgs, RevokeArgs};
pub use client::{lease, leases, revoke};
pub(crate) use control::routes;
pub(crate) use listener::{bind, serve};

const USED: &str = "lease-tokens";
const VERSION: u32 = 1;

/// The leases of the running agent.
#[derive(Clone)]
pub struct Leases(Arc<Inner>);

struct Inner {
    ledger: Mutex<Ledger>,
    used: Mutex<Used>,
    state: StateDir,
    counts: Counts,
    /// None while the configuration has no `[lease]`.
    credentials: watch::Sender<Option<Arc<Credentials>>>,
    quiet: Mutex<Quiet>,
}

/// Bounds what refusals write into the log: who wants to fill it, asks again and again.
struct Quiet {
    since: Instant,
    said: u32,
    left_out: u64,
}

/// The credentials that a configuration names, read.
pub(crate) type Loaded = Option<Credentials>;

impl Leases {
    /// Takes over the leases in the kernel.
    pub(crate) fn start(maps: Maps, state: &StateDir) -> Result<Self, DatapathError> {
        let ledger = Ledger::adopt(maps, Revocations::restore(state))?;
        let adopted = ledger.held().count();
        if adopted > 0 {
            info!("{adopted} leases hold on");
        }
        Ok(Self(Arc::new(Inner {
            ledger: Mutex::new(ledger),
            used: Mutex::new(state.read(USED, VERSION).unwrap_or_default()),
            state: state.clone(),
            counts: Counts::default(),
            credentials: watch::Sender::new(None),
            quiet: Mutex::new(Quiet { since: Instant::now(), said: 0, left_out: 0 }),
        })))
    }

    /// Reads the files that the configuration names.
    pub(crate) fn load(config: &Config) -> Result<Loaded, Vec<String>> {
        config.lease.as_ref().map(|lease| Credentials::load(lease, &config.file)).transpose()
    }

    /// Puts a configuration in force. If its files have other contents, who is connected has to connect again,
    /// and is checked again.
    pub(crate) fn configure(&self, config: &Config, interfaces: &[Guarded], credentials: Loaded) {
        let revoked = credentials.as_ref().map(|it| it.revoked.clone()).unwrap_or_default();
        self.ledger().configure(config.lease.as_ref(), interfaces, revoked);
        self.0.credentials.send_if_modified(|present| {
            let is_same = match (&*present, &credentials) {
                (Some(present), Some(new)) => present.is_same(new),
                (None, None) => true,
                _ => false,
            };
            if !is_same {
                *present = credentials.map(Arc::new);
            }
            !is_same
        });
    }

    /// How many hold.
    pub(crate) fn count(&self) -> usize {
        let mut ledger = self.ledger();
        ledger.prune();
        ledger.held().count()
    }

    /// What came of requests since the start.
    pub(crate) fn outcomes(&self) -> Vec<(&'static str, u64)> {
        self.0.counts.read()
    }

    /// Forgets what is over, which the kernel has done already.
    pub(crate) fn prune(&self) {
        self.ledger().prune();
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // It is left in order after each lease.
        self.0.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn credentials(&self) -> watch::Receiver<Option<Arc<Credentials>>> {
        self.0.credentials.subscribe()
    }

    fn count_as(&self, outcome: Outcome) {
        self.0.counts.add(outcome);
    }

    /// Takes a token for a connection. What was used must be known after a restart too.
    fn use_token(&self, token: &Token, connection: u64) -> Result<(), Refusal> {
        let mut used = self.0.used.lock().unwrap_or_else(PoisonError::into_inner);
        if used.take(token, connection, SystemTime::now())?
            && let Err(error) = self.0.state.write(USED, VERSION, &*used)
        {
            used.undo(token);
            warn!("lease: {error}");
            return Err(Refusal::new(
                Outcome::Failed,
                "a token that cannot be remembered is not taken; the agent's log says why",
            ));
        }
        Ok(())
    }

    fn give(
        &self,
        identity: &Identity,
        address: IpAddr,
        asked: Option<Duration>,
    ) -> Result<Given, Refusal> {
        let given = self.ledger().give(identity, address, asked)?;
        let Given { is_new, granted, until, .. } = &given;
        let (outcome, word) =
            if *is_new { (Outcome::Granted, "granted") } else { (Outcome::Renewed, "renewed") };
        self.count_as(outcome);
        let by = if identity.is_token {
            "a token".to_owned()
        } else {
            format!("certificate {}", hex(&identity.serial))
        };
        let (name, on) = (&granted.grant.name, granted.interfaces.join(", "));
        info!("lease: {word} {name} for {address} on {on} until {}, by {by}", utc(*until));
        Ok(given)
    }

    /// Counts a refusal and logs it. `names` are from the credential, as far as it was read.
    fn refuse(&self, refusal: &Refusal, names: &[String], address: IpAddr) {
        const MOST: u32 = 20;
        const PERIOD: Duration = Duration::from_secs(10);
        self.count_as(refusal.outcome);
        let mut quiet = self.0.quiet.lock().unwrap_or_else(PoisonError::into_inner);
        if quiet.since.elapsed() > PERIOD {
            if quiet.left_out > 0 {
                warn!("lease: {} more refusals are not in this log", quiet.left_out);
            }
            *quiet = Quiet { since: Instant::now(), said: 0, left_out: 0 };
        }
        if quiet.said >= MOST {
            quiet.left_out += 1;
            return;
        }
        quiet.said += 1;
        // It may quote what the client wrote.
        let (outcome, why) = (refusal.outcome.label(), refusal.why.escape_debug());
        match names.first() {
            // Whoever made the certificate chose the name.
            Some(name) => warn!("lease: refused {name:?} from {address} ({outcome}): {why}"),
            None => warn!("lease: refused {address} ({outcome}): {why}"),
        }
    }
}
