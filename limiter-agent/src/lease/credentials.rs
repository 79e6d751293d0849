//! What the listener knows of credentials: its own certificate, who signs those of services, which are
//! revoked, and the key that tokens are checked with. Read from files at a start and at each reload.

use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash as _, Hasher as _};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jsonwebtoken::DecodingKey;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use x509_parser::prelude::{CertificateRevocationList, FromDer as _, GeneralName, X509Certificate};

use crate::config::Leasing;

/// A serial number, filled up with zeros in front (RFC 5280 §4.1.2.2: at most 20 octets).
pub(super) type Serial = [u8; 20];

/// All that is needed to tell who asks.
pub(crate) struct Credentials {
    pub(super) tls: Arc<ServerConfig>,
    pub(super) tokens: Option<DecodingKey>,
    /// Those of revoked certificates.
    pub(super) revoked: HashSet<Serial>,
    /// Of the contents of all files.
    fingerprint: u64,
}

/// Who a credential says it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// Of a certificate: all of its names.
    pub(super) names: Vec<String>,
    /// All zeros for a token.
    pub(super) serial: Serial,
    pub(super) is_token: bool,
    /// It is of no use after that.
    pub(super) until: SystemTime,
}

impl Credentials {
    /// Reads the files that `config` names.
    ///
    /// # Errors
    /// A line for each file that cannot be used, with the cure.
    pub(crate) fn load(config: &Leasing, file: &str) -> Result<Self, Vec<String>> {
        let mut errors = Vec::new();
        // First: should a file change meanwhile, the next reload sees that it has.
        let fingerprint = fingerprint(config);
        let mut note = |key: &str, path: &Path, error: String, cure: &str| {
            errors.push(format!("{file}: lease.{key}: {}: {error}; {cure}", path.display()));
        };
        let chain = certificates(&config.certificate).unwrap_or_else(|error| {
            note(
                "certificate",
                &config.certificate,
                error,
                "write a PEM file with the certificate",
            );
            Vec::new()
        });
        let key = PrivateKeyDer::from_pem_file(&config.key).map_err(|error| {
            let cure = "write a PEM file with the private key, readable for the agent";
            note("key", &config.key, error.to_string(), cure);
        });
        let tokens = config.token_key.as_ref().and_then(|path| {
            let key = token_key(path).map_err(|error| {
                let cure = "write the Ed25519 public key in PEM: openssl pkey -pubout";
                note("token_key", path, error, cure);
            });
            key.ok()
        });
        let (mut lists, mut revoked) = (Vec::new(), HashSet::new());
        if let Some(path) = &config.crl {
            match revocations(path) {
                Ok(found) => (lists, revoked) = found,
                Err(error) => note("crl", path, error, "write the revocation list in PEM"),
            }
        }
        let provider = Arc::new(ring::default_provider());
        let verifier = match &config.client_ca {
            None => Some(WebPkiClientVerifier::no_client_auth()),
            Some(path) => {
                let roots = certificates(path).and_then(|certificates| {
                    let mut roots = RootCertStore::empty();
                    for certificate in certificates {
                        roots.add(certificate).map_err(|error| error.to_string())?;
                    }
                    let mut builder = WebPkiClientVerifier::builder_with_provider(
                        Arc::new(roots),
                        provider.clone(),
                    )
                    .with_crls(lists)
                    .only_check_end_entity_revocation();
                    if config.token_key.is_some() {
                        builder = builder.allow_unauthenticated();
                    }
                    builder.build().map_err(|error| error.to_string())
                });
                let cure = "write the certificates of who signs for services, in PEM";
                roots.map_err(|error| note("client_ca", path, error, cure)).ok()
            }
        };
        let (Ok(key), Some(verifier), true) = (key, verifier, errors.is_empty()) else {
            return Err(errors);
        };
        let tls = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .and_then(|builder| {
                builder.with_client_cert_verifier(verifier).with_single_cert(chain, key)
            });
        let mut tls = tls.map_err(|error| {
            let path = config.certificate.display();
            vec![format!("{file}: lease.certificate: {path}: {error}; write the one of lease.key")]
        })?;
        // A session that goes on shows no certificate again, which may have been revoked meanwhile.
        tls.session_storage = Arc::new(NoServerSessionStorage {});
        tls.send_tls13_tickets = 0;
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { tls: Arc::new(tls), tokens, revoked, fingerprint })
    }

    /// Whether they were read from files with the same contents.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.fingerprint == other.fingerprint
    }
}

impl Identity {
    /// Who a certificate names, which TLS has found to be good.
    pub(super) fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
        let mut names = Vec::new();
        if let Ok(Some(others)) = certificate.subject_alternative_name() {
            names.extend(others.value.general_names.iter().filter_map(|name| {
                let (GeneralName::DNSName(name) | GeneralName::URI(name)) = name else {
                    return None;
                };
                Some((*name).to_owned())
            }));
        }
        let common = certificate.subject().iter_common_name();
        names.extend(common.filter_map(|name| name.as_str().ok().map(str::to_owned)));
        let until = u64::try_from(certificate.validity().not_after.timestamp()).ok()?;
        Some(Self {
            names,
            serial: serial(certificate.raw_serial())?,
            is_token: false,
            until: SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(until))?,
        })
    }
}

/// A file that cannot be read is noted where it is needed.
fn fingerprint(config: &Leasing) -> u64 {
    let Leasing { certificate, key, client_ca, token_key, crl, .. } = config;
    let optional = [client_ca, token_key, crl].map(|path| path.as_ref().map(fs::read));
    let all = [Some(fs::read(certificate)), Some(fs::read(key))].into_iter().chain(optional);
    let mut hasher = DefaultHasher::new();
    all.for_each(|contents| contents.map(Result::ok).hash(&mut hasher));
    hasher.finish()
}

/// A serial number in its place; none if it is longer than allowed.
fn serial(raw: &[u8]) -> Option<Serial> {
    // DER puts a zero before a number whose first bit is set.
    let raw = raw.strip_prefix(&[0]).unwrap_or(raw);
    let mut serial = Serial::default();
    let start = serial.len().checked_sub(raw.len())?;
    serial[start..].copy_from_slice(raw);
    Some(serial)
}

/// A serial number as people write it, without colons.
pub(super) fn hex(serial: &Serial) -> String {
    let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or('?');
    let digits: String =
        serial.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect();
    let short = digits.trim_start_matches('0');
    let odd = short.len() % 2;
    format!("{}{short}", "0".repeat(odd))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let all = all.map_err(|error| error.to_string())?;
    if all.is_empty() { Err("there is no certificate in it".to_owned()) } else { Ok(all) }
}

fn token_key(path: &Path) -> Result<DecodingKey, String> {
    let pem = std::fs::read(path).map_err(|error| error.to_string())?;
    // What is wrong with a key is not told: it might be a private one.
    DecodingKey::from_ed_pem(&pem).map_err(|_| "this is no Ed25519 public key in PEM".to_owned())
}

type Revocations = (Vec<CertificateRevocationListDer<'static>>, HashSet<Serial>);

fn revocations(path: &Path) -> Result<Revocations, String> {
    let lists = CertificateRevocationListDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| error.to_string())?;
    if lists.is_empty() {
        return Err("there is no revocation list in it".to_owned());
    }
    let mut serials = HashSet::new();
    for list in &lists {
        let (_, list) =
            CertificateRevocationList::from_der(list).map_err(|error| error.to_string())?;
        serials.extend(list.iter_revoked_certificates().filter_map(|it| serial(it.raw_serial())));
    }
    Ok((lists, serials))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serial_numbers_are_the_same_however_they_are_written() {
        let number = serial(&[0, 0x8f, 1]).expect("is short");
        assert_eq!(Some(number), serial(&[0x8f, 1]));
        assert_eq!(hex(&number), "8f01");
        assert_eq!(hex(&serial(&[7]).expect("is short")), "07");
        assert_eq!(serial(&[1; 21]), None);
    }
}
