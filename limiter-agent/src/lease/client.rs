//! The commands: `lease` for services, `leases` and `revoke` for operators.

use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use axum::http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::{TcpSocket, TcpStream, lookup_host};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;

use super::args::{LeaseArgs, LeasesArgs, RevokeArgs};
use super::control::{Listed, RevokeRequest};
use super::protocol::{Leased, PATH, Wanted};
use crate::api::Problem;
use crate::cli::Failure;
use crate::client::{ask, block_on, command, print, print_json};

/// How long the host may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a failed renewal is waited for at most before it is tried again.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// `limiter-agent lease`: takes a lease, renews it until it is told to end, and gives it back.
///
/// # Errors
/// [`Failure::Request`] if it is refused, or a file is wrong; [`Failure::Machine`] if no host answers.
pub fn lease(args: &LeaseArgs) -> Result<(), Failure> {
    let mut holder = Holder::new(args).map_err(|error| Failure::Request(format!("{error:#}")))?;
    let mut outcome = Ok(());
    let held = block_on(async {
        outcome = holder.hold().await;
        Ok(())
    });
    held.map_err(|error| Failure::machine(&error))?;
    outcome
}

/// `limiter-agent leases`.
///
/// # Errors
/// [`Failure::Machine`] if no agent answers.
pub fn leases(args: &LeasesArgs) -> Result<(), Failure> {
    let after = args.after.map_or(String::new(), |after| format!("&after={after}"));
    let path = format!("/v1/leases?limit={}{after}", args.limit);
    let answer = ask(&args.client.control_socket, Method::GET, &path, Bytes::new())?;
    answer.check(&args.client)?;
    let listed: Listed = answer.read()?;
    if args.client.json {
        return print_json(&listed);
    }
    let mut lines: Vec<_> = listed
        .leases
        .iter()
        .map(|it| {
            let on = it.interfaces.join(", ");
            format!("{}  {} on {on} until {} ({})", it.address, it.name, it.until, it.owner)
        })
        .collect();
    if lines.is_empty() {
        lines.push("no leases".to_owned());
    }
    lines.extend(listed.next.map(|next| format!("more: limiter-agent leases --after {next}")));
    lines.extend(listed.revoked.iter().map(|it| {
        let until = it.until.as_ref().map_or("until --undo".to_owned(), |at| format!("until {at}"));
        format!("revoked: {} {until}, since {} by {}", it.subject, it.since, it.by)
    }));
    print(&format!("{}\n", lines.join("\n")))
}

/// `limiter-agent revoke NAME|ADDR`.
///
/// # Errors
/// [`Failure::Request`] if there is no such name; [`Failure::Machine`] if no agent answers.
pub fn revoke(args: &RevokeArgs) -> Result<(), Failure> {
    let for_seconds = args.duration.map(|it| it.as_secs() + u64::from(it.subsec_nanos() > 0));
    let request = RevokeRequest { subject: args.subject.clone(), for_seconds, undo: args.undo };
    command(&args.client, "/v1/leases/revoke", &request)
}

/// A service that holds a lease.
struct Holder<'a> {
    args: &'a LeaseArgs,
    connector: TlsConnector,
    name: ServerName<'static>,
    body: Bytes,
    connection: Option<SendRequest<Full<Bytes>>>,
}

/// What the host said.
enum Said {
    Leased(Box<Leased>),
    /// Asking again does not help.
    Refused(String),
    /// It may.
    Unable(String),
}

impl<'a> Holder<'a> {
    fn new(args: &'a LeaseArgs) -> anyhow::Result<Self> {
        let (host, _) = args
            .server
            .rsplit_once(':')
            .context("--server: write HOST:PORT: edge1.example:9479")?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = args.server_name.as_deref().unwrap_or(host).to_owned();
        let name = ServerName::try_from(name)
            .context("--server: HOST is no name of a host; give one with --server-name")?;
        let mut roots = RootCertStore::empty();
        for root in certificates(&args.ca)? {
            roots.add(root).with_context(|| args.ca.display().to_string())?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(roots);
        let mut config = match (&args.cert, &args.key) {
            (Some(certificate), Some(key)) => {
                let chain = certificates(certificate)?;
                let secret = PrivateKeyDer::from_pem_file(key).map_err(|error| {
                    anyhow!("{}: {error}; write a private key in PEM", key.display())
                })?;
                builder.with_client_auth_cert(chain, secret).with_context(|| {
                    format!(
                        "{}: is it the certificate of {}?",
                        certificate.display(),
                        key.display()
                    )
                })?
            }
            _ => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let wanted =
            Wanted { duration: args.duration.map(|it| humantime::format_duration(it).to_string()) };
        let body = Bytes::from(serde_json::to_vec(&wanted)?);
        let connector = TlsConnector::from(Arc::new(config));
        Ok(Self { args, connector, name, body, connection: None })
    }

    async fn hold(&mut self) -> Result<(), Failure> {
        let listen = |kind| signal(kind).map_err(|error| Failure::machine(&error.into()));
        let mut interrupt = listen(SignalKind::interrupt())?;
        let mut terminate = listen(SignalKind::terminate())?;
        let mut held = None;
        let mut failures = 0_u32;
        loop {
            let pause = match self.renew().await {
                Ok(Said::Leased(leased)) => {
                    failures = 0;
                    let pause = Duration::from_secs(leased.renew_after.max(1));
                    self.say(&leased, held.is_none())?;
                    held = Some(leased.address);
                    pause
                }
                Ok(Said::Refused(why)) => return Err(Failure::Request(why)),
                Ok(Said::Unable(why)) if held.is_none() => return Err(Failure::Machine(why)),
                Err(error) if is_refusal(&error) => {
                    return Err(Failure::Request(format!("{error:#}")));
                }
                Err(error) if held.is_none() => return Err(Failure::machine(&error)),
                outcome => {
                    let why = match outcome {
                        Err(error) => format!("{error:#}"),
                        Ok(Said::Unable(why)) => why,
                        Ok(_) => String::new(),
                    };
                    let pause = Duration::from_secs(1 << failures.min(5)).min(LONGEST_PAUSE);
                    failures += 1;
                    // Where nobody listens, it is tried again all the same.
                    let _ = writeln!(
                        std::io::stderr(),
                        "not renewed, trying again in {}: {why}",
                        humantime::format_duration(pause)
                    );
                    pause
                }
            };
            tokio::select! {
                () = sleep(pause) => {}
                _ = interrupt.recv() => break,
                _ = terminate.recv() => break,
            }
        }
        self.release(held).await
    }

    /// A lease that cannot be given back ends by itself.
    async fn release(&mut self, held: Option<IpAddr>) -> Result<(), Failure> {
        let Some(address) = held else { return Ok(()) };
        match self.request(Method::DELETE, Bytes::new()).await {
            Ok((StatusCode::OK, _)) if self.args.json => Ok(()),
            Ok((StatusCode::OK, _)) => print(&format!("gave the lease for {address} back\n")),
            Ok((code, _)) => Err(Failure::Machine(format!("not given back, but it ends: {code}"))),
            Err(error) => Err(Failure::Machine(format!("not given back, but it ends: {error:#}"))),
        }
    }

    fn say(&self, leased: &Leased, is_first: bool) -> Result<(), Failure> {
        if self.args.json {
            let line = serde_json::to_string(leased)
                .map_err(|error| Failure::Machine(format!("cannot write JSON: {error}")))?;
            return print(&format!("{line}\n"));
        }
        if !is_first {
            return Ok(());
        }
        let Leased { name, address, interfaces, ports, until, .. } = leased;
        let (on, ports) = (interfaces.join(", "), ports.join(", "));
        print(&format!(
            "{address} has the lease of {name} on {on} for ports {ports} until {until}; it is renewed \
             until this ends\n"
        ))
    }

    async fn renew(&mut self) -> anyhow::Result<Said> {
        let (code, body) = self.request(Method::POST, self.body.clone()).await?;
        if code == StatusCode::OK {
            let leased = serde_json::from_slice(&body).context("not an answer of limiter-agent")?;
            return Ok(Said::Leased(Box::new(leased)));
        }
        let detail = serde_json::from_slice::<Problem>(&body).map(|problem| problem.detail);
        let why = format!("{code}: {}", detail.unwrap_or_default());
        Ok(if code.is_client_error() { Said::Refused(why) } else { Said::Unable(why) })
    }

    /// Asks on the connection that is there; on another if that has been closed.
    async fn request(
        &mut self,
        method: Method,
        body: Bytes,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        if let Some(connection) = self.connection.take()
            && let Ok(answer) = self.exchange(connection, method.clone(), body.clone()).await
        {
            return Ok(answer);
        }
        let connection =
            timeout(PATIENCE, self.connect()).await.context("no connection in time")??;
        self.exchange(connection, method, body).await
    }

    async fn exchange(
        &mut self,
        mut connection: SendRequest<Full<Bytes>>,
        method: Method,
        body: Bytes,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let mut request = Request::builder()
            .method(method)
            .uri(PATH)
            .header(header::HOST, self.args.server.as_str())
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(path) = &self.args.token_file {
            let token = std::fs::read_to_string(path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            let mut value = header::HeaderValue::try_from(format!("Bearer {}", token.trim()))
                .map_err(|_| anyhow!("{} holds no token", path.display()))?;
            value.set_sensitive(true);
            request = request.header(header::AUTHORIZATION, value);
        }
        let request = request.body(Full::new(body))?;
        let answer = timeout(PATIENCE, async {
            let answer = connection.send_request(request).await?;
            let code = answer.status();
            anyhow::Ok((code, answer.into_body().collect().await?.to_bytes()))
        });
        let answer = answer.await.context("no answer in time")??;
        self.connection = Some(connection);
        Ok(answer)
    }

    async fn connect(&self) -> anyhow::Result<SendRequest<Full<Bytes>>> {
        let server = &self.args.server;
        let addresses = lookup_host(server.as_str()).await.with_context(|| server.clone())?;
        let mut failed = anyhow!("{server} has no address");
        for address in addresses {
            match connect_from(self.args.from, address).await {
                Ok(stream) => {
                    let tls = self.connector.connect(self.name.clone(), stream).await;
                    let tls = tls.with_context(|| format!("TLS with {address}"))?;
                    let (sender, connection) = handshake(TokioIo::new(tls)).await?;
                    tokio::spawn(connection);
                    return Ok(sender);
                }
                Err(error) => failed = error.context(format!("connecting to {address}")),
            }
        }
        Err(failed)
    }
}

/// Whether the host refused the certificate, which TLS says before any answer.
fn is_refusal(error: &anyhow::Error) -> bool {
    use rustls::AlertDescription as Alert;
    let alert = error.chain().find_map(|cause| {
        let cause = cause.downcast_ref::<std::io::Error>()?.get_ref()?;
        let cause = cause.downcast_ref::<rustls::Error>()?;
        if let rustls::Error::AlertReceived(alert) = cause { Some(*alert) } else { None }
    });
    matches!(
        alert,
        Some(
            Alert::BadCertificate
                | Alert::UnsupportedCertificate
                | Alert::CertificateRevoked
                | Alert::CertificateExpired
                | Alert::CertificateUnknown
                | Alert::CertificateRequired
                | Alert::UnknownCA
                | Alert::AccessDenied
                | Alert::DecryptError
        )
    )
}

async fn connect_from(from: Option<IpAddr>, to: SocketAddr) -> anyhow::Result<TcpStream> {
    let socket = if to.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    if let Some(from) = from {
        if from.is_ipv4() != to.is_ipv4() {
            bail!("--from {from} is of another family");
        }
        socket.bind(SocketAddr::new(from, 0))?;
    }
    Ok(socket.connect(to).await?)
}

fn certificates(path: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let all = all.map_err(|error| anyhow!("{}: {error}; write PEM", path.display()))?;
    if all.is_empty() {
        bail!("{}: there is no certificate in it; write PEM", path.display());
    }
    Ok(all)
}
