//! Exemptions by credential: a service that holds a lease passes where its address would not, on one
//! interface, for some ports, up to a cap and for a time; and nobody gets one with a wrong credential.

mod authority;

use std::{
    io::{BufRead as _, BufReader},
    net::{IpAddr, SocketAddr, TcpStream},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use authority::{Authority, PATIENCE, secrets};
use limiter_tests::{
    agent::{Agent, Metrics, binary},
    bpffs::Bpffs,
    client::EchoServer,
    frames,
    generator::{Flood, Generator, Sent},
    netns::{Interface, Netns, VethOptions, veth},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// What a source may send without a lease: 20 packets, and then five a second.
const LIMITS: &str = r#"
mode = "enforce"
[[interface]]
name = "edge0"
[[interface]]
name = "edge1"
[table]
ipv4_sources = 1024
ipv6_sources = 1024
[[reserve]]
name = "lease"
match = { protocol = "tcp", ports = [9479] }
packets = { rate = "2000/s", burst = 4000 }
[[class]]
name = "rest"
packets = { rate = "5/s", burst = 20 }
"#;

/// The cap of a lease: packets a second, and at once.
const CAP: (f64, f64) = (3_000.0, 3_000.0);
/// The port that leases are for.
const PORT: u16 = 7;

/// A guarded host with two interfaces, and who is beyond them.
struct Stage {
    edge: Netns,
    front: (Interface, Interface),
    back: (Interface, Interface),
    local: IpAddr,
    remote: IpAddr,
    authority: Authority,
}

impl Stage {
    fn new(is_v4: bool) -> Result<Self> {
        let edge = Netns::new("edge")?;
        let options = VethOptions::default();
        let front = veth((&Netns::new("front")?, "front0"), (&edge, "edge0"), options)?;
        let back = veth((&Netns::new("back")?, "back0"), (&edge, "edge1"), options)?;
        let (local, remote, length) = if is_v4 {
            ("198.18.77.1".parse()?, "198.18.77.2".parse()?, 24)
        } else {
            ("2001:db8:77::1".parse()?, "2001:db8:77::2".parse()?, 64)
        };
        front.1.add_known_address(local, length, &front.0)?;
        front.0.add_known_address(remote, length, &front.1)?;
        let authority = Authority::new()?;
        authority.certify("edge.test", 1, false)?;
        authority.certify("billing.test", 2, false)?;
        Ok(Self { edge, front, back, local, remote, authority })
    }

    /// The configuration, with `more` in `[lease]`.
    fn config(&self, more: &str) -> String {
        let files = |file| self.authority.file(file);
        let (rate, burst) = CAP;
        format!(
            r#"{LIMITS}
[lease]
listen = "{listen}"
certificate = "{certificate}"
key = "{key}"
client_ca = "{ca}"
crl = "{crl}"
token_key = "{token}"
{more}
[[lease.grant]]
name = "billing.test"
interface = "edge0"
ports = [{PORT}]
cap = {{ rate = "{rate}/s", burst = {burst} }}
max_duration = "60s"
owner = "tests"
"#,
            listen = self.server(),
            certificate = files("edge.test.crt"),
            key = files("edge.test.key"),
            ca = files("ca.crt"),
            crl = files("ca.crl"),
            token = files("token.pub"),
        )
    }

    fn server(&self) -> SocketAddr {
        SocketAddr::new(self.local, 9479)
    }

    /// `limiter-agent lease`, run where the service is.
    fn lease(&self, more: &[&str]) -> Result<Command> {
        let mut command = self.front.0.netns.command(binary()?);
        command
            .args(["lease", "--server", &self.server().to_string(), "--server-name", "edge.test"])
            .args(["--ca", &self.authority.file("ca.crt")])
            .args(more)
            .stdin(Stdio::null());
        Ok(command)
    }

    /// With the certificate of `name`.
    fn with_certificate(&self, authority: &Authority, name: &str) -> Result<Command> {
        let (certificate, key) =
            (authority.file(&format!("{name}.crt")), authority.file(&format!("{name}.key")));
        self.lease(&["--cert", &certificate, "--key", &key])
    }

    /// Holds a lease, for so long at a time.
    fn hold(&self, duration: &str) -> Result<Service> {
        let mut command = self.with_certificate(&self.authority, "billing.test")?;
        Service::start(command.args(["--for", duration]))
    }

    /// UDP in the name of the service, from its side or from the other.
    fn send(&self, from_back: bool, port: u16, rate: f64, duration: Duration) -> Result<Sent> {
        let (far, near) = if from_back { &self.back } else { &self.front };
        let path = frames::Path {
            source_mac: far.mac,
            destination_mac: near.mac,
            source: SocketAddr::new(self.remote, 4000),
            destination: SocketAddr::new(self.local, port),
        };
        Generator::new(far)?.flood(&Flood::new(frames::udp(&path, 18), rate, duration))
    }
}

/// A service with a lease; killed when it is dropped, so that it does not give it back.
struct Service(Child);

impl Service {
    fn start(command: &mut Command) -> Result<Self> {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let mut line = String::new();
        let output = child.stdout.take().context("a pipe")?;
        let mut this = Self(child);
        BufReader::new(output).read_line(&mut line)?;
        if !line.contains("has the lease of") {
            let mut errors = String::new();
            if let Some(mut pipe) = this.0.stderr.take() {
                std::io::Read::read_to_string(&mut pipe, &mut errors)?;
            }
            anyhow::bail!("no lease: {line}{errors}");
        }
        Ok(this)
    }

    /// As Ctrl-C does.
    fn interrupt(mut self) -> Result<()> {
        kill(Pid::from_raw(i32::try_from(self.0.id())?), Signal::SIGINT)?;
        let give_up = Instant::now() + PATIENCE;
        while Instant::now() < give_up {
            if let Some(status) = self.0.try_wait()? {
                ensure!(status.success(), "{status}");
                return Ok(());
            }
            thread::sleep(Duration::from_millis(20));
        }
        anyhow::bail!("it does not end")
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn packets(metrics: &Metrics, interface: &str, reason: &str) -> f64 {
    metrics.sum("limiter_packets_total", &[("interface", interface), ("reason", reason)])
}

/// All of class `rest`.
fn by_action(metrics: &Metrics, interface: &str, action: &str) -> f64 {
    let labels = [("interface", interface), ("class", "rest"), ("action", action)];
    metrics.sum("limiter_packets_total", &labels)
}

fn outcomes(agent: &Agent, outcome: &str) -> Result<f64> {
    Ok(agent.metrics()?.sum("limiter_lease_requests_total", &[("outcome", outcome)]))
}

#[expect(clippy::cast_precision_loss, reason = "well below 2^52")]
fn arrived(sent: &Sent) -> f64 {
    sent.arrived() as f64
}

fn text(output: &Output) -> String {
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    format!("{} {out}{err}", output.status)
}

const SECOND: Duration = Duration::from_secs(1);

fn a_lease_holds_where_it_should(is_v4: bool) -> Result<()> {
    let stage = Stage::new(is_v4)?;
    let agent = Agent::start(&stage.edge, &stage.config(""))?;

    // Without a lease: what a source may send.
    let before = agent.metrics()?;
    let sent = stage.send(false, PORT, 1_000.0, SECOND)?;
    let since = agent.metrics()?.since(&before);
    assert!(by_action(&since, "edge0", "pass") < 40.0, "{since:?}");
    assert!(by_action(&since, "edge0", "drop") > arrived(&sent) - 40.0, "{sent:?} {since:?}");

    let service = stage.hold("60s")?;
    assert!((agent.metrics()?.sum("limiter_leases", &[]) - 1.0).abs() < 1e-9);

    // With one: all of a flood for that limit, two hundred times as much.
    let before = agent.metrics()?;
    let sent = stage.send(false, PORT, 1_000.0, SECOND * 2)?;
    let since = agent.metrics()?.since(&before);
    assert!(arrived(&sent) > 1_500.0, "{sent:?}");
    assert!(by_action(&since, "edge0", "drop") < 0.5, "{since:?}");
    assert!(packets(&since, "edge0", "lease") > arrived(&sent) - 60.0, "{sent:?} {since:?}");

    // Not for another port, and not from another interface.
    for (from_back, port, interface) in [(false, PORT + 1, "edge0"), (true, PORT, "edge1")] {
        let before = agent.metrics()?;
        let sent = stage.send(from_back, port, 1_000.0, SECOND)?;
        let since = agent.metrics()?.since(&before);
        assert!(packets(&since, interface, "lease") < 0.5, "{port} on {interface}: {since:?}");
        let dropped = packets(&since, interface, "packet_rate");
        assert!(dropped > arrived(&sent) - 40.0, "{sent:?} {since:?}");
    }

    // Forged on its interface: what the cap allows, and no more.
    let before = agent.metrics()?;
    let sent = stage.send(false, PORT, 40_000.0, SECOND * 2)?;
    let since = agent.metrics()?.since(&before);
    let (rate, burst) = CAP;
    let most = burst + rate * sent.elapsed().as_secs_f64() + 60.0;
    let passed = by_action(&since, "edge0", "pass");
    assert!(passed <= most, "{passed} passed, {most} may: {sent:?}");
    assert!(packets(&since, "edge0", "lease_rate") >= arrived(&sent) - most, "{since:?}");
    assert!(arrived(&sent) > 3.0 * most, "hardly a flood: {sent:?}");

    // Given back, it is over at once.
    service.interrupt()?;
    let before = agent.metrics()?;
    stage.send(false, PORT, 1_000.0, SECOND)?;
    let since = agent.metrics()?.since(&before);
    assert!(packets(&since, "edge0", "lease") < 0.5, "{since:?}");
    assert!(packets(&since, "edge0", "packet_rate") > 500.0, "{since:?}");
    let log = agent.terminate()?;
    for line in ["lease: granted billing.test for", "it was given back"] {
        assert!(log.contains(line), "{line} is not in {log}");
    }
    Ok(())
}

#[test]
fn a_lease_passes_up_to_its_cap_on_its_interface_and_ports() -> Result<()> {
    a_lease_holds_where_it_should(true)
}

#[test]
fn a_lease_of_an_ipv6_address_holds_alike() -> Result<()> {
    a_lease_holds_where_it_should(false)
}

/// What of a thousand packets in a second arrived at the socket.
fn received(stage: &Stage, server: &EchoServer) -> Result<u64> {
    let before = server.received();
    stage.send(false, PORT, 1_000.0, SECOND)?;
    thread::sleep(Duration::from_millis(200));
    Ok(server.received() - before)
}

/// No agent, no reload: the datapath ends it. Before that, it outlives the agent.
#[test]
fn a_lease_ends_without_an_agent_and_without_a_reload() -> Result<()> {
    let stage = Stage::new(true)?;
    let bpffs = Bpffs::new()?;
    let pins = bpffs.pins();
    let agent = Agent::start_pinned(&pins, &stage.edge, &stage.config(""))?;
    let server = EchoServer::start(&stage.edge, SocketAddr::new(stage.local, PORT))?;

    // The agent lives, the service does not, and nothing is reloaded.
    drop(stage.hold("5s")?);
    let taken = Instant::now();
    assert!(received(&stage, &server)? > 900);
    thread::sleep(Duration::from_secs(6).saturating_sub(taken.elapsed()));
    assert!(received(&stage, &server)? < 60);
    assert!(agent.metrics()?.sum("limiter_leases", &[]) < 0.5);
    assert!(agent.log().contains("ended: its time is over"), "{}", agent.log());

    // Neither lives.
    drop(stage.hold("8s")?);
    let taken = Instant::now();
    let arguments = ["--pins", pins.to_str().context("UTF-8")?];
    let files = agent.configuration();
    ensure!(files.exists());
    agent.kill();
    let during = received(&stage, &server)?;
    ensure!(taken.elapsed() < Duration::from_secs(7), "too slow to see it: {:?}", taken.elapsed());
    assert!(during > 900, "{during} of 1000");
    thread::sleep(Duration::from_secs(9).saturating_sub(taken.elapsed()));
    let after = received(&stage, &server)?;
    assert!(after < 60, "{after} of 1000 without a lease");

    // The next agent finds nothing left, and takes over what is given under it.
    let agent = Agent::start_pinned(&pins, &stage.edge, &stage.config(""))?;
    assert!(agent.metrics()?.sum("limiter_leases", &[]) < 0.5);
    let service = stage.hold("60s")?;
    let agent = agent.kill_and_start(&arguments)?;
    assert!(agent.log().contains("1 leases hold on"), "{}", agent.log());
    let listed = text(&agent.command(&["leases"])?);
    assert!(listed.contains("billing.test on edge0 until"), "{listed}");
    assert!(received(&stage, &server)? > 900);
    // It is still the service's: it can give it back to an agent that never gave it.
    service.interrupt()?;
    assert!(received(&stage, &server)? < 60);
    agent.command(&["detach"])?;
    Ok(())
}

/// By an operator until that is taken back, by the configuration, and by a list.
#[test]
fn what_is_revoked_ends_and_is_not_given_again() -> Result<()> {
    let stage = Stage::new(true)?;
    let agent = Agent::start(&stage.edge, &stage.config(""))?;
    let leases = || Ok::<_, anyhow::Error>(agent.metrics()?.sum("limiter_leases", &[]));
    let refused = |why: &str| -> Result<()> {
        let before = outcomes(&agent, "revoked")?;
        let output = stage.with_certificate(&stage.authority, "billing.test")?.output()?;
        ensure!(output.status.code() == Some(1), "{why}: {}", text(&output));
        ensure!(outcomes(&agent, "revoked")? > before, "{why}: {}", text(&output));
        Ok(())
    };

    let service = stage.hold("60s")?;
    let output = agent.command(&["revoke", "billing.test"])?;
    ensure!(output.status.success(), "{}", text(&output));
    assert!(leases()? < 0.5, "{}", text(&output));
    refused("by name")?;
    let output = agent.command(&["revoke", "nobody.test"])?;
    assert!(output.status.code() == Some(1), "{}", text(&output));
    let output = agent.command(&["revoke", "billing.test", "--undo"])?;
    ensure!(output.status.success(), "{}", text(&output));
    drop(service);

    let service = stage.hold("60s")?;
    agent.command(&["revoke", &stage.remote.to_string(), "--for", "1h"])?;
    assert!(leases()? < 0.5);
    refused("by address")?;
    let listed = text(&agent.command(&["leases"])?);
    assert!(
        listed.contains("no leases") && listed.contains("revoked: 198.18.77.2 until 2"),
        "{listed}"
    );
    agent.command(&["revoke", &stage.remote.to_string(), "--undo"])?;
    drop(service);

    for more in ["revoked = [\"billing.test\"]", "revoked = [\"02\"]"] {
        let service = stage.hold("60s")?;
        agent.reload(&stage.config(more))?;
        assert!(leases()? < 0.5, "{more}");
        refused(more)?;
        agent.reload(&stage.config(""))?;
        drop(service);
    }

    let service = stage.hold("60s")?;
    stage.authority.revoke(&[7, 2])?;
    agent.reload(&stage.config(""))?;
    assert!(leases()? < 0.5);
    refused("by a list")?;
    drop(service);
    let log = agent.terminate()?;
    assert!(log.contains("its credential is revoked"), "{log}");
    Ok(())
}

#[test]
fn wrong_credentials_are_refused_and_counted() -> Result<()> {
    let stage = Stage::new(true)?;
    let agent = Agent::start(&stage.edge, &stage.config(""))?;
    let stranger = Authority::new()?;
    stranger.certify("billing.test", 2, false)?;
    let own = &stage.authority;
    own.certify("expired.test", 3, true)?;
    own.certify("other.test", 4, false)?;
    let mut tokens = Vec::new();
    let refused = |command: &mut Command, outcome: &str| -> Result<()> {
        let before = outcomes(&agent, outcome)?;
        let output = command.output()?;
        ensure!(output.status.code() == Some(1), "{outcome}: {}", text(&output));
        ensure!(
            (outcomes(&agent, outcome)? - before - 1.0).abs() < 1e-9,
            "{outcome}: {}\n{}",
            text(&output),
            agent.log()
        );
        Ok(())
    };
    refused(&mut stage.with_certificate(&stranger, "billing.test")?, "wrong_certificate")?;
    refused(&mut stage.with_certificate(own, "expired.test")?, "expired")?;
    refused(&mut stage.with_certificate(own, "other.test")?, "not_granted")?;
    let mut with_token = |authority: &Authority, subject, audience, from_now| -> Result<Command> {
        let (path, token) = authority.token(subject, audience, from_now)?;
        tokens.push(token);
        stage.lease(&["--token-file", path.to_str().context("UTF-8")?])
    };
    let ours = "limiter-lease";
    refused(&mut with_token(&stranger, "billing.test", ours, 60)?, "wrong_token")?;
    refused(&mut with_token(own, "billing.test", "another", 60)?, "wrong_token")?;
    refused(&mut with_token(own, "billing.test", ours, 7200)?, "wrong_token")?;
    refused(&mut with_token(own, "billing.test", ours, -60)?, "expired")?;
    refused(&mut with_token(own, "other.test", ours, 60)?, "not_granted")?;
    assert!(agent.metrics()?.sum("limiter_leases", &[]) < 0.5);

    // A good one is taken, and renewed on its connection; elsewhere it is used up, after a restart too.
    let (path, token) = own.token("billing.test", ours, 300)?;
    tokens.push(token);
    let good = ["--token-file", path.to_str().context("UTF-8")?];
    let service = Service::start(stage.lease(&good)?.args(["--for", "5s"]))?;
    refused(&mut stage.lease(&good)?, "replayed")?;
    thread::sleep(Duration::from_secs(4));
    assert!(outcomes(&agent, "renewed")? > 0.5, "{}", agent.log());
    drop(service);
    let log = agent.log();
    let agent = agent.kill_and_start(&["--unpinned"])?;
    let output = stage.lease(&good)?.output()?;
    assert!(output.status.code() == Some(1), "{}", text(&output));
    assert!(outcomes(&agent, "replayed")? > 0.5, "{}", agent.log());

    // The certificate takes the place of none, and no secret is told.
    let log = log + &agent.terminate()?;
    for outcome in ["wrong_certificate", "expired", "not_granted", "wrong_token", "replayed"] {
        assert!(log.contains(&format!("({outcome})")), "{outcome} is not in {log}");
    }
    for token in tokens {
        let parts = token.split('.').map(str::to_owned).collect::<Vec<_>>();
        assert!(parts.len() == 3 && parts[1..].iter().all(|part| !log.contains(part)), "{log}");
    }
    for name in ["edge.test.key", "billing.test.key", "edge.test.crt"] {
        for secret in secrets(&own.path(name))? {
            assert!(!log.contains(&secret), "{name} is in {log}");
        }
    }
    Ok(())
}

/// Whoever connects and says nothing is sent away, and has no more than some connections meanwhile.
#[test]
fn slow_clients_cost_little() -> Result<()> {
    let stage = Stage::new(true)?;
    let agent = Agent::start(&stage.edge, &stage.config(""))?;
    let slow: Vec<_> = stage.front.0.netns.run(|| {
        (0..9).map(|_| TcpStream::connect(stage.server())).collect::<std::io::Result<_>>()
    })?;
    let start = Instant::now();
    while outcomes(&agent, "busy")? < 0.5 {
        ensure!(start.elapsed() < PATIENCE, "nine connections of one address are served");
        thread::sleep(Duration::from_millis(50));
    }
    // Another address is served meanwhile.
    let other = "198.18.77.3";
    stage.front.0.add_known_address(other.parse()?, 24, &stage.front.1)?;
    stage.front.1.add_neighbour(other.parse()?, stage.front.0.mac)?;
    let mut command = stage.with_certificate(&stage.authority, "billing.test")?;
    let service = Service::start(command.args(["--from", other]))?;
    while outcomes(&agent, "timeout")? < 7.5 {
        ensure!(start.elapsed() < PATIENCE, "slow clients stay: {}", agent.log());
        thread::sleep(Duration::from_millis(100));
    }
    service.interrupt()?;
    drop(slow);
    let service = stage.hold("60s")?;
    drop(service);
    // More addresses than the grant allows.
    let before = outcomes(&agent, "too_many")?;
    let output = stage
        .with_certificate(&stage.authority, "billing.test")?
        .args(["--from", other])
        .output()?;
    ensure!(output.status.code() == Some(1), "{}", text(&output));
    assert!(outcomes(&agent, "too_many")? > before, "{}", text(&output));
    agent.terminate()?;
    Ok(())
}

/// What cannot be used is said with the file and a cure, and changes nothing.
#[test]
fn files_that_cannot_be_used_are_named() -> Result<()> {
    let stage = Stage::new(true)?;
    let agent = Agent::start(&stage.edge, &stage.config(""))?;
    let service = stage.hold("60s")?;
    for (file, key) in [
        ("ca.crt", "client_ca"),
        ("ca.crl", "crl"),
        ("token.pub", "token_key"),
        ("edge.test.crt", "certificate"),
        ("edge.test.key", "key"),
    ] {
        let path = stage.authority.path(file);
        let good = std::fs::read(&path)?;
        std::fs::write(&path, "no PEM")?;
        let output = agent.command(&["reload"])?;
        let said = text(&output);
        let place = format!("lease.{key}: {}: ", path.display());
        assert!(output.status.code() == Some(1) && said.contains(&place), "{key}: {said}");
        assert!(said.contains("; write "), "{key}: {said}");
        std::fs::write(&path, good)?;
    }
    assert!((agent.metrics()?.sum("limiter_leases", &[]) - 1.0).abs() < 1e-9);
    let output = agent.command(&["reload"])?;
    ensure!(output.status.success(), "{}", text(&output));
    service.interrupt()?;
    agent.terminate()?;
    Ok(())
}
