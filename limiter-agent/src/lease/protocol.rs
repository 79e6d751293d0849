//! What a service says and is told: HTTP/1.1 with JSON, on one path.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use axum::http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Bytes, Incoming};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::Leases;
use super::credentials::{Credentials, Identity};
use super::ledger::Granted;
use super::outcome::{Outcome, Refusal};
use super::tokens::Token;
use crate::api::Problem;
use crate::status::{Limit, utc};

/// The one path.
pub(super) const PATH: &str = "/v1/lease";

/// Longer bodies, in bytes, are refused.
const LONGEST_BODY: usize = 1024;
/// How long a body may take.
const BODY: Duration = Duration::from_secs(5);

/// `POST /v1/lease`; a body is not needed.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wanted {
    /// How long: "60s", "5m"; as long as the grant allows if none.
    #[serde(rename = "for", default, skip_serializing_if = "Option::is_none")]
    pub(super) duration: Option<String>,
}

/// A lease as its holder is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Leased {
    /// Of the grant.
    pub(super) name: String,
    /// The address that the request came from, which is what is exempt.
    pub(super) address: IpAddr,
    /// The interfaces that it holds on.
    pub(super) interfaces: Vec<String>,
    /// Destination ports: "443", "8000-8100".
    pub(super) ports: Vec<String>,
    /// "tcp", "udp".
    pub(super) protocols: Vec<String>,
    /// What passes beyond the limits of the address.
    pub(super) cap: Limit,
    /// The end, in UTC.
    pub(super) until: String,
    /// Seconds until it should be renewed.
    pub(super) renew_after: u64,
}

/// That a lease was given back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Released {
    pub(super) address: IpAddr,
    /// Whether there was one.
    pub(super) released: bool,
}

/// A connection.
pub(super) struct Session {
    certificate: Option<Identity>,
    address: IpAddr,
    number: u64,
    credentials: Arc<Credentials>,
    leases: Leases,
    is_known: AtomicBool,
    was_asked: AtomicBool,
}

impl Session {
    pub(super) fn new(
        certificate: Option<Identity>,
        address: IpAddr,
        number: u64,
        credentials: Arc<Credentials>,
        leases: Leases,
    ) -> Self {
        let (is_known, was_asked) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { certificate, address, number, credentials, leases, is_known, was_asked }
    }

    /// Whether somebody with a grant asked for something.
    pub(super) fn is_known(&self) -> bool {
        self.is_known.load(Relaxed)
    }

    /// Whether anybody asked for anything.
    pub(super) fn was_asked(&self) -> bool {
        self.was_asked.load(Relaxed)
    }

    /// Those of the certificate.
    pub(super) fn names(&self) -> &[String] {
        self.certificate.as_ref().map_or(&[], |it| &it.names)
    }

    /// Who asks: by the token if there is one, else by the certificate.
    fn identity(&self, token: Option<&HeaderValue>) -> Result<Identity, Refusal> {
        let Some(token) = token else {
            let none = "neither a client certificate nor a token was shown";
            return self
                .certificate
                .clone()
                .ok_or_else(|| Refusal::new(Outcome::NoCredential, none));
        };
        let wrong = |why| Refusal::new(Outcome::WrongToken, why);
        let key = self.credentials.tokens.as_ref();
        let key = key.ok_or_else(|| wrong("no token is taken here: there is no token_key"))?;
        let text = token.to_str().ok().and_then(|text| text.strip_prefix("Bearer "));
        let text = text.ok_or_else(|| wrong("write Authorization: Bearer TOKEN"))?;
        let token = Token::check(text.trim(), key, SystemTime::now())?;
        self.leases.use_token(&token, self.number)?;
        Ok(token.identity)
    }
}

/// The answer to a request.
pub(super) async fn answer(
    session: &Arc<Session>,
    request: Request<Incoming>,
) -> Response<Full<Bytes>> {
    session.was_asked.store(true, Relaxed);
    let (head, body) = request.into_parts();
    let body = timeout(BODY, Limited::new(body, LONGEST_BODY).collect()).await;
    let session = Arc::clone(session);
    // Maps and files are touched.
    let answered = tokio::task::spawn_blocking(move || {
        let token = head.headers.get(header::AUTHORIZATION);
        let mut names = session.names().to_vec();
        let body = body.ok().and_then(Result::ok).map(http_body_util::Collected::to_bytes);
        let done = match body {
            Some(body) => done(&session, &head.method, head.uri.path(), token, &body, &mut names),
            None => Err(Refusal::new(
                Outcome::BadRequest,
                format!("the body is longer than {LONGEST_BODY} bytes, or did not come in time"),
            )),
        };
        done.unwrap_or_else(|refusal| {
            session.leases.refuse(&refusal, &names, session.address);
            refused(&refusal)
        })
    });
    let failed = || refused(&Refusal::new(Outcome::Failed, "the agent failed"));
    answered.await.unwrap_or_else(|_| failed())
}

fn done(
    session: &Session,
    method: &Method,
    path: &str,
    token: Option<&HeaderValue>,
    body: &[u8],
    names: &mut Vec<String>,
) -> Result<Response<Full<Bytes>>, Refusal> {
    let bad = |why: String| Refusal::new(Outcome::BadRequest, why);
    if path != PATH {
        return Err(bad(format!("there is only {PATH} here")));
    }
    let identity = session.identity(token)?;
    names.clone_from(&identity.names);
    let (leases, address) = (&session.leases, session.address);
    let response = match *method {
        Method::POST => {
            let wanted: Wanted = if body.is_empty() {
                Wanted::default()
            } else {
                serde_json::from_slice(body)
                    .map_err(|error| bad(format!("the body is not what is needed: {error}")))?
            };
            let duration = wanted.duration.map(|text| {
                let cure = "write a duration: \"60s\", \"5m\"";
                humantime::parse_duration(&text).map_err(|_| bad(format!("for: {cure}")))
            });
            let given = leases.give(&identity, address, duration.transpose()?)?;
            let until = given.until;
            ok(&leased(&given.granted, address, until, given.lasts))
        }
        Method::GET => {
            let shown = leases.ledger().show(&identity, address)?;
            leases.count_as(Outcome::Shown);
            match shown {
                Some((granted, until)) => {
                    let left = until.duration_since(SystemTime::now()).unwrap_or_default();
                    ok(&leased(&granted, address, until, left))
                }
                None => problem(StatusCode::NOT_FOUND, &format!("there is no lease for {address}")),
            }
        }
        Method::DELETE => {
            let released = leases.ledger().release(&identity, address)?;
            leases.count_as(Outcome::Released);
            ok(&Released { address, released })
        }
        _ => return Err(bad("POST takes or renews, GET shows, DELETE gives back".to_owned())),
    };
    session.is_known.store(true, Relaxed);
    Ok(response)
}

fn leased(granted: &Granted, address: IpAddr, until: SystemTime, lasts: Duration) -> Leased {
    let grant = &granted.grant;
    let protocols = [("tcp", grant.tcp), ("udp", grant.udp)];
    let protocols = protocols.into_iter().filter(|(_, holds)| *holds);
    let ports = grant.ports.iter().map(|range| {
        let (first, last) = (range.start(), range.end());
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    });
    Leased {
        name: grant.name.clone(),
        address,
        interfaces: granted.interfaces.clone(),
        ports: ports.collect(),
        protocols: protocols.map(|(name, _)| name.to_owned()).collect(),
        cap: Limit::from(grant.cap),
        until: utc(until),
        // So that one that fails can be tried again.
        renew_after: (lasts.as_secs() / 2).max(1),
    }
}

fn ok<T: Serialize>(body: &T) -> Response<Full<Bytes>> {
    response(StatusCode::OK, "application/json", body)
}

fn refused(refusal: &Refusal) -> Response<Full<Bytes>> {
    let code = match refusal.outcome {
        Outcome::WrongToken
        | Outcome::WrongCertificate
        | Outcome::Expired
        | Outcome::Replayed
        | Outcome::NoCredential => StatusCode::UNAUTHORIZED,
        Outcome::Revoked | Outcome::NotGranted => StatusCode::FORBIDDEN,
        Outcome::TooMany => StatusCode::CONFLICT,
        Outcome::BadRequest => StatusCode::BAD_REQUEST,
        Outcome::Granted
        | Outcome::Renewed
        | Outcome::Released
        | Outcome::Shown
        | Outcome::Timeout
        | Outcome::Handshake
        | Outcome::Busy
        | Outcome::Failed => StatusCode::SERVICE_UNAVAILABLE,
    };
    let mut response = problem(code, &refusal.why);
    if code == StatusCode::UNAUTHORIZED {
        // RFC 9110 §11.6.1.
        let scheme = HeaderValue::from_static("Bearer");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
    }
    response
}

fn problem(code: StatusCode, detail: &str) -> Response<Full<Bytes>> {
    let body = Problem {
        code: None,
        kind: "about:blank".to_owned(),
        title: code.canonical_reason().unwrap_or_default().to_owned(),
        status: code.as_u16(),
        detail: detail.to_owned(),
        errors: vec![],
    };
    response(code, "application/problem+json", &body)
}

fn response<T: Serialize>(code: StatusCode, kind: &'static str, body: &T) -> Response<Full<Bytes>> {
    let body = serde_json::to_vec(body).unwrap_or_default();
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = code;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}
