//! Signed tokens: JWTs (RFC 7519), signed with Ed25519 and nothing else. This host has the public key only,
//! so that nothing on it can make one.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode};
use serde::{Deserialize, Serialize};

use super::credentials::{Identity, Serial};
use super::outcome::{Outcome, Refusal};

/// The audience that a token must be for, so that one for another service is of no use here.
pub(super) const AUDIENCE: &str = "limiter-lease";

/// How much clocks may differ, in seconds.
const LEEWAY: u64 = 5;
/// The longest that a token may be good for.
const LONGEST: u64 = 3600;
const LONGEST_ID: usize = 128;
/// Tokens that are remembered at most.
const MOST: usize = 16_384;

/// What a token says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Claims {
    /// The name of the grant.
    pub(super) sub: String,
    pub(super) aud: String,
    pub(super) iat: u64,
    pub(super) exp: u64,
    /// What tells it from all others.
    pub(super) jti: String,
}

/// A token that is good, unless it was used before.
#[derive(Clone, Debug)]
pub(super) struct Token {
    pub(super) identity: Identity,
    id: String,
    expires: u64,
}

impl Token {
    /// Reads a token and checks its signature, its audience and its times.
    pub(super) fn check(text: &str, key: &DecodingKey, now: SystemTime) -> Result<Self, Refusal> {
        let mut validation = Validation::new(Algorithm::EdDSA);
        validation.leeway = LEEWAY;
        validation.validate_nbf = true;
        validation.set_audience(&[AUDIENCE]);
        validation.set_required_spec_claims(&["exp", "aud", "sub"]);
        let wrong = |why| Refusal::new(Outcome::WrongToken, why);
        let claims = decode::<Claims>(text, key, &validation).map_err(|error| {
            let kind = error.kind();
            if matches!(kind, ErrorKind::ExpiredSignature | ErrorKind::ImmatureSignature) {
                Refusal::new(Outcome::Expired, "the token's time is over, or has not come")
            } else if matches!(kind, ErrorKind::InvalidAudience) {
                wrong("the token is not for limiter-lease (aud)")
            } else {
                // The text of other errors might show parts of the token.
                wrong("the token is not one of ours: EdDSA, with sub, aud, iat, exp and jti")
            }
        })?;
        let Claims { sub, iat, exp, jti, .. } = claims.claims;
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        if iat > since + LEEWAY || exp.saturating_sub(iat) > LONGEST {
            return Err(wrong("the token is from the future, or good for more than an hour"));
        }
        if jti.is_empty() || jti.len() > LONGEST_ID {
            return Err(wrong("the token has no jti of 1 to 128 characters"));
        }
        let until = SystemTime::UNIX_EPOCH + Duration::from_secs(exp);
        let (names, serial) = (vec![sub.clone()], Serial::default());
        let identity = Identity { names, serial, is_token: true, until };
        Ok(Self { identity, id: format!("{sub}\n{jti}"), expires: exp + LEEWAY })
    }
}

/// The tokens that were used, until they are good no longer.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Used(BTreeMap<String, Use>);

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Use {
    expires: u64,
    /// The number of the connection on which it may go on, which no restart has again.
    #[serde(skip)]
    connection: u64,
}

impl Used {
    /// Notes that the token is used on a connection, numbered from 1; on another it is refused from then
    /// on. Says whether it is new.
    pub(super) fn take(
        &mut self,
        token: &Token,
        connection: u64,
        now: SystemTime,
    ) -> Result<bool, Refusal> {
        let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        self.0.retain(|_, used| used.expires > now);
        match self.0.get(&token.id) {
            Some(used) if used.connection == connection => Ok(false),
            Some(_) => Err(Refusal::new(Outcome::Replayed, "the token was used before")),
            None if self.0.len() >= MOST => {
                Err(Refusal::new(Outcome::Failed, "too many tokens are in use; try again later"))
            }
            None => {
                self.0.insert(token.id.clone(), Use { expires: token.expires, connection });
                Ok(true)
            }
        }
    }

    /// Forgets a use that could not be kept.
    pub(super) fn undo(&mut self, token: &Token) {
        self.0.remove(&token.id);
    }
}
