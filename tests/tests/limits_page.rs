//! `limiter-agent limits`: from a running agent and from a file, for operators and for customers.

use std::{fs, process::Command, process::Output, time::Duration};

use anyhow::{Context as _, Result};
use limiter_tests::{
    agent::{self, Agent},
    netns::{Netns, VethOptions, veth},
    process,
};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(30);

const CONFIG: &str = r#"
mode = "enforce"
[[interface]]
name = "edge0"
[[class]]
name = "dns"
match = { protocol = "udp", ports = [53] }
packets = { rate = "1000/s", burst = 2000 }
total = { rate = "7777/s", burst = 7777 }
[[class]]
name = "rest"
packets = { rate = "300/s", burst = 600 }
mode = "observe"
[[exempt]]
cidr = "198.51.100.0/24"
interface = "edge0"
owner = "platform"
[[block]]
cidr = "203.0.113.0/24"
reason = "scanning"
[[prefix]]
cidr = "192.0.2.0/24"
scale = 20
"#;

/// What the page must not hold: an attacker's business, or other people's.
const SECRETS: [&str; 7] =
    ["198.51.100", "203.0.113", "192.0.2", "platform", "scanning", "7777", "edge0"];

fn text(output: Output) -> Result<String> {
    assert!(output.status.success(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn limits_are_those_in_force_and_the_page_holds_no_more_than_it_should() -> Result<()> {
    let (near, _far) = veth(
        (&Netns::new("edge")?, "edge0"),
        (&Netns::new("peer")?, "peer0"),
        VethOptions::default(),
    )?;
    let agent = Agent::start(&near.netns, CONFIG)?;
    let table = text(agent.command(&["limits"])?)?;
    assert!(table.contains("udp to 53") && table.contains("7,777"), "{table}");
    let page = text(agent.command(&["limits", "--public", "--contact", "noc@example.net"])?)?;
    let row = "| dns: udp to 53 | 1,000 packets a second | 2,000 packets | dropped |";
    assert!(page.contains(row) && page.contains("Ask noc@example.net."), "{page}");
    assert!(
        page.contains(
            "| rest: everything else | 300 packets a second | 600 packets | not enforced |"
        )
    );
    let html = text(agent.command(&["limits", "--public", "--html"])?)?;
    assert!(
        html.starts_with("<!DOCTYPE html>") && html.contains("1,000 packets a second"),
        "{html}"
    );
    let json = text(agent.command(&["limits", "--public", "--json"])?)?;
    for secret in SECRETS {
        for page in [&page, &html, &json] {
            assert!(!page.contains(secret), "{secret}: {page}");
        }
    }

    // The mode by command, and what is reloaded, are in force at once; both sockets say the same.
    assert!(agent.command(&["mode", "observe"])?.status.success());
    agent.reload(&CONFIG.replace("1000/s", "1500/s"))?;
    let json: Value = serde_json::from_str(&text(agent.command(&["limits", "--json"])?)?)?;
    assert_eq!(json, serde_json::from_str::<Value>(&agent.get("/v1/limits")?)?);
    assert_eq!(
        (&json["mode"], &json["classes"][0]["mode"]),
        (&"observe".into(), &"observe".into())
    );
    let rate = json["classes"][0]["packets"]["per_second"].as_f64().context("a rate")?;
    assert!((rate - 1500.0).abs() < 0.5, "{json}");
    agent.terminate()?;
    Ok(())
}

#[test]
fn a_file_needs_no_agent_and_a_wrong_one_is_said_to_be() -> Result<()> {
    let directory = tempfile::Builder::new().prefix("limiter-test-").tempdir()?;
    let file = directory.path().join("limiter.toml");
    let run = |arguments: &[&str]| -> Result<Output> {
        let mut limits = Command::new(agent::binary()?);
        process::output(limits.arg("limits").args(arguments), PATIENCE)
    };
    let path = file.to_str().context("UTF-8")?;
    fs::write(&file, CONFIG)?;
    assert!(text(run(&["--config", path])?)?.contains("udp to 53"));
    assert!(text(run(&["--config", path, "--public"])?)?.contains("| dns: udp to 53 |"));

    fs::write(&file, CONFIG.replace("1000/s", "1000/x"))?;
    let wrong = run(&["--config", path])?;
    let said = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert_eq!(wrong.status.code(), Some(1), "{said}");
    assert!(said.contains("limiter.toml:8:") && said.contains("1000/x"), "{said}");

    let nobody = run(&["--control-socket", "/nonexistent/control.sock"])?;
    assert_eq!(nobody.status.code(), Some(3), "{nobody:?}");
    assert_eq!(run(&["--html"])?.status.code(), Some(2), "only of the page");
    Ok(())
}
