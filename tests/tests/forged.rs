//! Floods from sources that each send little: what the budget for new sources lets through.

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use anyhow::Result;
use limiter_tests::{
    agent::Agent,
    client::{self, EchoServer, Pace},
    frames,
    generator::{Flood, Generator, Order, Sources},
    netns::{Interface, Netns, VethOptions, veth},
};

/// Few enough new sources that the flood is at least ten times as many.
const CONFIG: &str = r#"
mode = "enforce"
[table]
new_sources = { rate = "1000/s", burst = 500 }
[[interface]]
name = "edge0"
[[class]]
name = "rest"
packets = { rate = "1000/s", burst = 1000 }
"#;

const CLIENT: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

fn link() -> Result<(Interface, Interface)> {
    let (client, edge) = veth(
        (&Netns::new("forger")?, "forger0"),
        (&Netns::new("edge")?, "edge0"),
        VethOptions::default(),
    )?;
    client.add_known_address(CLIENT.into(), 24, &edge)?;
    edge.add_known_address(SERVER.into(), 24, &client)?;
    Ok((client, edge))
}

/// A flood of forged sources passes what the budget predicts, within 1 %, and a client that was
/// there before it loses nothing.
fn hold(family: &str, template: (SocketAddr, SocketAddr), sources: Sources) -> Result<()> {
    let (client, edge) = link()?;
    let agent = Agent::start(&edge.netns, CONFIG)?;
    let _echo = EchoServer::start(&edge.netns, SocketAddr::new(SERVER.into(), 7))?;
    let honest = |rate, millis| {
        let pace = Pace { rate, duration: Duration::from_millis(millis) };
        client::start(&client.netns, CLIENT.into(), SocketAddr::new(SERVER.into(), 7), pace)
    };
    // Known from now on.
    honest(100, 100)?.join()?;

    let mut generator = Generator::new(&client)?;
    let path = frames::Path {
        source_mac: client.mac,
        destination_mac: edge.mac,
        source: template.0,
        destination: template.1,
    };
    let before = agent.metrics()?;
    let running = honest(200, 4_500)?;
    let flood = Flood::new(frames::udp(&path, 18), 50_000.0, Duration::from_secs(5));
    let sent = generator.flood(&flood.sources(sources))?;
    let goodput = running.join()?;
    let counted = agent.metrics()?.since(&before);

    let count = |labels: &[(&str, &str)]| counted.sum("limiter_packets_total", labels);
    let dropped = count(&[("family", family), ("reason", "new_source"), ("action", "drop")]);
    // The honest client's packets, and a forged source drawn twice, conform without the budget.
    let created = counted.sum("limiter_sources_created_total", &[("family", family)]);
    let predicted = 500.0 + 1_000.0 * sent.elapsed().as_secs_f64();
    let error = created / predicted - 1.0;
    assert!(error.abs() <= 0.01, "{created} admitted, {predicted} predicted; {sent:?}");
    #[expect(clippy::cast_precision_loss, reason = "well below 2^52")]
    let arrived = sent.arrived() as f64;
    assert!(arrived > 10.0 * predicted, "{sent:?}");
    assert!(dropped > 0.9 * arrived - predicted, "{dropped} of {arrived} dropped");
    assert_eq!(goodput.answered, goodput.sent, "the client was there before the flood");
    agent.terminate()?;
    Ok(())
}

/// A spent budget leaves a debt that was sized by its old rate; a reload that raises the rate shortens
/// it.
#[test]
fn a_raised_budget_is_felt_at_once() -> Result<()> {
    let (client, edge) = link()?;
    let slow = CONFIG.replace("\"1000/s\", burst = 500", "\"100/s\", burst = 150");
    assert_ne!(slow, CONFIG);
    let agent = Agent::start(&edge.netns, &slow)?;
    let mut generator = Generator::new(&client)?;
    let path = frames::Path {
        source_mac: client.mac,
        destination_mac: edge.mac,
        source: SocketAddr::from(([10, 0, 0, 1], 4000)),
        destination: SocketAddr::from((SERVER, 9)),
    };
    let mut first = Ipv4Addr::new(10, 0, 0, 0);
    let mut flood = |seconds| {
        let sources = Sources::Ipv4 { first, count: 1 << 20, order: Order::Random };
        first = Ipv4Addr::from(u32::from(first) + (1 << 20));
        let flood = Flood::new(frames::udp(&path, 18), 20_000.0, Duration::from_secs(seconds));
        generator.flood(&flood.sources(sources))
    };
    flood(1)?;
    agent.reload(CONFIG)?;
    let before = agent.metrics()?;
    let sent = flood(1)?;
    let created = agent.metrics()?.since(&before);
    let created = created.sum("limiter_sources_created_total", &[("family", "ipv4")]);
    // The debt is cut to what known sources may draw, half a burst more than strangers may; from then
    // on there is nothing but the rate.
    let predicted = 1_000.0 * sent.elapsed().as_secs_f64() - 250.0;
    assert!(created >= 0.99 * predicted, "{created} admitted, {predicted} predicted");
    agent.terminate()?;
    Ok(())
}

#[test]
fn forged_ipv4_sources_are_held_to_the_budget() -> Result<()> {
    let flood = (SocketAddr::from(([10, 0, 0, 1], 4000)), SocketAddr::from((SERVER, 9)));
    let first = Ipv4Addr::new(10, 0, 0, 0);
    hold("ipv4", flood, Sources::Ipv4 { first, count: 1 << 24, order: Order::Random })
}

#[test]
fn forged_ipv6_networks_are_held_to_the_budget() -> Result<()> {
    let first = Ipv6Addr::new(0x2a00, 0, 0, 0, 0, 0, 0, 1);
    let server = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2);
    let flood = (SocketAddr::from((first, 4000)), SocketAddr::from((server, 9)));
    let sources = Sources::Ipv6 { first, prefixes: 1 << 24, per_prefix: 1, order: Order::Random };
    hold("ipv6", flood, sources)
}
