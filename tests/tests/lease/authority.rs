//! Who signs certificates and tokens, made for each test.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::Result;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, PKCS_ED25519,
    RevokedCertParams, SerialNumber, date_time_ymd,
};
use serde_json::json;
use tempfile::TempDir;

/// A directory of PEM files, and who signs what lies in it.
pub(crate) struct Authority {
    directory: TempDir,
    issuer: Issuer<'static, KeyPair>,
    tokens: KeyPair,
}

impl Authority {
    pub(crate) fn new() -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("limiter-lease-").tempdir()?;
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name.push(DnType::CommonName, "the test's own");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key)?;
        fs::write(directory.path().join("ca.crt"), certificate.pem())?;
        let tokens = KeyPair::generate_for(&PKCS_ED25519)?;
        fs::write(directory.path().join("token.pub"), tokens.public_key_pem())?;
        let issuer = Issuer::new(params, key);
        let this = Self { directory, issuer, tokens };
        this.revoke(&[])?;
        Ok(this)
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.directory.path().join(file)
    }

    /// The same as text.
    pub(crate) fn file(&self, file: &str) -> String {
        self.path(file).display().to_string()
    }

    /// `NAME.crt` and `NAME.key`.
    pub(crate) fn certify(&self, name: &str, serial: u64, is_expired: bool) -> Result<()> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(vec![name.to_owned()])?;
        params.serial_number = Some(SerialNumber::from(serial));
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        if is_expired {
            params.not_after = date_time_ymd(2020, 1, 1);
        }
        let certificate = params.signed_by(&key, &self.issuer)?;
        fs::write(self.path(&format!("{name}.crt")), certificate.pem())?;
        fs::write(self.path(&format!("{name}.key")), key.serialize_pem())?;
        Ok(())
    }

    /// `ca.crl`.
    pub(crate) fn revoke(&self, serials: &[u64]) -> Result<()> {
        let revoked = serials.iter().map(|serial| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: date_time_ymd(2024, 1, 1),
            reason_code: None,
            invalidity_date: None,
        });
        let params = CertificateRevocationListParams {
            this_update: date_time_ymd(2024, 1, 1),
            next_update: date_time_ymd(4000, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        fs::write(self.path("ca.crl"), params.signed_by(&self.issuer)?.pem()?)?;
        Ok(())
    }

    /// A file with a token, and the token.
    pub(crate) fn token(
        &self,
        subject: &str,
        audience: &str,
        from_now: i64,
    ) -> Result<(PathBuf, String)> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
        let seconds = i64::try_from(now.as_secs())?;
        let id = format!("{subject}-{}", now.as_nanos());
        let (issued, expires) = (seconds.min(seconds + from_now - 60), seconds + from_now);
        let claims =
            json!({"sub": subject, "aud": audience, "iat": issued, "exp": expires, "jti": id});
        let key = EncodingKey::from_ed_pem(self.tokens.serialize_pem().as_bytes())?;
        let token = jsonwebtoken::encode(&Header::new(Algorithm::EdDSA), &claims, &key)?;
        let path = self.path(&format!("{id}.jwt"));
        fs::write(&path, &token)?;
        Ok((path, token))
    }
}

/// What is between the lines of a PEM file, none of which may be in a log.
pub(crate) fn secrets(path: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(path)?;
    Ok(text.lines().filter(|line| !line.starts_with('-')).map(str::to_owned).collect())
}

/// How long a test waits for what should come soon.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
