//! What applications ask and tell on their socket: what a source has left, penalties that the kernel keeps,
//! proofs; and what is said to those who ask for what they must not have.

mod openapi;
mod server;
mod stage;

use std::{
    net::SocketAddr,
    process, thread,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result, ensure};
use limiter_tests::{
    agent::Agent,
    bpffs::Bpffs,
    client::{self, EchoServer, Pace},
    http::Request,
};
use serde_json::{Value, json};

use stage::{BURST, Stage, command, config, whole};

const APPLICATION: &str = r#"
first_penalty = "2s"
longest_penalty = "3s"
penalty_memory = "1h"
"#;

/// Sleeps until the instant that an answer named has passed.
fn wait_until(time: &Value) -> Result<()> {
    let end = humantime(time.as_str().context("a time")?)?;
    if let Ok(left) = end.duration_since(SystemTime::now()) {
        ensure!(left < Duration::from_mins(1), "{time} is far away");
        thread::sleep(left);
    }
    // The wall clock and the kernel's are read at two moments.
    thread::sleep(Duration::from_millis(100));
    Ok(())
}

/// The instant of `2026-12-01T04:05:06Z`, as `date` reads it.
fn humantime(text: &str) -> Result<SystemTime> {
    ensure!(text.ends_with('Z'), "{text} is not UTC");
    let output = process::Command::new("date").args(["+%s", "--date", text]).output()?;
    let seconds = String::from_utf8(output.stdout)?.trim().parse()?;
    Ok(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
}

fn class<'a>(report: &'a Value, name: &str) -> Result<&'a Value> {
    let classes = report["classes"].as_array().context("a list")?;
    let found = classes.iter().find(|class| class["class"] == name);
    found.with_context(|| format!("no class {name} in {report}"))
}

fn number(value: &Value) -> Result<u64> {
    value.as_u64().with_context(|| format!("{value} is no number"))
}

#[test]
fn a_source_has_left_what_it_has_not_sent() -> Result<()> {
    const SENT: u64 = 40;
    let mut stage = Stage::new()?;
    let agent = stage.start(&config(APPLICATION, stage.socket()))?;
    stage.send(&agent, "198.51.100.1", SENT)?;
    let target = "/v1/sources/198.51.100.1";
    let report = stage.ask(&Request::get(target), 200)?;
    let udp = class(&report, "udp")?;
    assert_eq!(number(&udp["remaining"])?, BURST - SENT, "{report}");
    assert_eq!(udp["retry_after"], 0, "{report}");
    // One a minute comes back.
    let reset = number(&udp["reset"])?;
    assert!((SENT * 60 - 30..=SENT * 60).contains(&reset), "{report}");
    assert_eq!(udp["limit"]["packets"]["burst"], BURST);
    assert_eq!(udp["ratelimit_policy"], format!("\"udp\";q={BURST};w={}", BURST * 60));
    assert_eq!(udp["ratelimit"], format!("\"udp\";r={};t={reset}", BURST - SENT));
    assert_eq!((&report["standing"], &report["exempt"]), (&json!("seen"), &json!(false)));
    assert_eq!(report["blocked_until"], Value::Null);
    assert_eq!(class(&report, "rest")?["remaining"], 1000);
    assert!(report["pressure"]["udp"].as_f64().is_some_and(|it| it > 0.0 && it < 1.0), "{report}");

    // The same on the other sockets, but for the second that may have passed.
    for other in [command(&agent, &Request::get(target), 200)?, stage.metrics(target)?] {
        assert_eq!(class(&other, "udp")?["remaining"], udp["remaining"]);
        assert_eq!(other["standing"], "seen");
    }
    let output = agent.command(&["inspect", "198.51.100.1", "--json"])?;
    let inspected: Value = serde_json::from_slice(&output.stdout)?;
    assert_eq!(class(&inspected, "udp")?["remaining"], udp["remaining"]);
    let text = String::from_utf8(agent.command(&["inspect", "198.51.100.1"])?.stdout)?;
    assert!(text.contains("standing   seen") && text.contains("udp"), "{text}");
    assert_eq!(agent.command(&["inspect", "198.51.100"])?.status.code(), Some(2));

    // Who has nothing left, waits, and is told so by somewhat different times.
    stage.send(&agent, "198.51.100.1", 2 * BURST)?;
    let mut waits = Vec::new();
    for _ in 0..20 {
        let report = stage.ask(&Request::get(target), 200)?;
        assert_eq!(class(&report, "udp")?["remaining"], 0, "{report}");
        waits.push(number(&class(&report, "udp")?["retry_after"])?);
    }
    assert!(waits.iter().all(|wait| (30..=75).contains(wait)), "{waits:?}");
    assert!(waits.iter().any(|wait| *wait != waits[0]), "{waits:?}");

    let stranger = stage.ask(&Request::get("/v1/sources/198.51.100.2"), 200)?;
    assert_eq!(stranger["standing"], "stranger");
    assert_eq!(class(&stranger, "udp")?["remaining"], BURST);
    agent.terminate()?;
    Ok(())
}

#[test]
fn bytes_prefixes_and_ipv6_networks_are_told_as_the_kernel_has_them() -> Result<()> {
    let mut stage = Stage::new()?;
    let agent = stage.start(&config(APPLICATION, stage.socket()))?;
    // The frame of these tests over IPv6, whose class limits bytes.
    let length = stage.send(&agent, "2001:db8:9:1::7", 10)?;
    // All of the /64 is one source.
    let report = stage.ask(&Request::get("/v1/sources/2001:db8:9:1::8"), 200)?;
    assert_eq!(report["source"], "2001:db8:9:1::/64");
    let udp = class(&report, "udp")?;
    assert_eq!(number(&udp["remaining"])?, BURST - 10, "{report}");
    let left = number(&udp["remaining_bytes"])?;
    let burst = number(&udp["limit"]["bytes"]["burst"])?;
    assert_eq!(burst, 100_000);
    // A kilobyte a second comes back, and the answer takes far less than ten.
    assert!((burst - 10 * length..burst - 10 * length + 10_000).contains(&left), "{left} {length}");

    stage.send(&agent, "203.0.113.9", 10)?;
    let report = stage.ask(&Request::get("/v1/sources/203.0.113.9"), 200)?;
    let udp = class(&report, "udp")?;
    assert_eq!(number(&udp["remaining"])?, 3 * BURST - 10, "{report}");
    assert_eq!(report["policy"]["prefix"]["scale"], 3);
    assert_eq!(report["policy"]["prefix"]["cidr"], "203.0.113.0/24");

    // An exemption and a block, each with who answers for it.
    let exempt = stage.ask(&Request::get("/v1/sources/10.20.0.7"), 200)?;
    assert_eq!((&exempt["exempt"], &exempt["blocked"]), (&json!(true), &json!(false)));
    assert_eq!(exempt["policy"]["exemptions"][0]["owner"], "platform");
    assert!(
        agent
            .command(&["block", "192.0.2.128/25", "--for", "1h", "--reason", "scans"])?
            .status
            .success()
    );
    let both = json!({"addresses": ["192.0.2.200", "::ffff:192.0.2.201", "192.0.2.2"]});
    let batch = stage.ask(&Request::post("/v1/sources", &both), 200)?;
    let blocked: Vec<_> =
        batch["sources"].as_array().context("a list")?.iter().map(|it| &it["blocked"]).collect();
    assert_eq!(blocked, [&json!(true), &json!(true), &json!(false)]);
    let block = &batch["sources"][0];
    assert_eq!(block["policy"]["blocks"][0]["reason"], "scans");
    assert!(block["policy"]["summary"].as_str().is_some_and(|it| it.contains("blocked until 20")));
    let wait = number(&class(block, "udp")?["retry_after"])?;
    assert!((3_590..=3_661).contains(&wait), "{wait}");
    wait_for_no_more_than_an_hour(&block["blocked_until"])?;
    agent.terminate()?;
    Ok(())
}

fn wait_for_no_more_than_an_hour(time: &Value) -> Result<()> {
    let end = humantime(time.as_str().context("a time")?)?;
    let left = end.duration_since(SystemTime::now())?;
    ensure!((3_590..=3_601).contains(&left.as_secs()), "{left:?}");
    Ok(())
}

#[test]
fn an_abuser_is_blocked_in_the_kernel_longer_each_time_and_comes_back() -> Result<()> {
    let mut stage = Stage::new()?;
    let agent = stage.start(&config(APPLICATION, stage.socket()))?;
    let address = "198.51.100.7";
    assert!(stage.fate(&agent, address, 10)?.passed == 10);
    let body = json!({"address": address, "reason": "429s"});
    let mut ends = Vec::new();
    for (level, longest) in [(1, 2), (2, 3), (3, 3)] {
        let given = stage.ask(&Request::post("/v1/penalties", &body), 200)?;
        assert_eq!(
            (&given["address"], &given["level"]),
            (&json!(address), &json!(level)),
            "{given}"
        );
        let seconds = number(&given["seconds"])?;
        assert!((1..=longest).contains(&seconds), "{given}");
        // Those under way report it as well, and it stays as it is.
        let again = stage.ask(&Request::post("/v1/penalties", &body), 200)?;
        assert_eq!((&again["level"], &again["until"]), (&given["level"], &given["until"]));

        let fate = stage.fate(&agent, address, 200)?;
        assert_eq!((fate.blocked, fate.passed), (200, 0), "{fate:?} at {given}");
        let report = stage.ask(&Request::get("/v1/sources/198.51.100.7"), 200)?;
        assert_eq!(report["penalty"], json!({"until": given["until"], "level": level}));
        assert_eq!(report["blocked_until"], given["until"]);
        assert!(number(&class(&report, "udp")?["retry_after"])? >= 1, "{report}");
        // Its neighbour is not touched.
        assert_eq!(stage.fate(&agent, "198.51.100.8", 1)?.passed, 1);
        wait_until(&given["until"])?;
        assert_eq!(stage.fate(&agent, address, 1)?.passed, 1, "it is over");
        ends.push(given["until"].clone());
    }
    let report = stage.ask(&Request::get("/v1/sources/198.51.100.7"), 200)?;
    assert_eq!((&report["penalty"], &report["blocked"]), (&Value::Null, &json!(false)));
    // An operator pardons: the next one is a first again.
    stage.ask(&Request::post("/v1/penalties", &body), 200)?;
    assert!(agent.command(&["unblock", address])?.status.success());
    assert_eq!(stage.fate(&agent, address, 1)?.passed, 1);
    let given = stage.ask(&Request::post("/v1/penalties", &body), 200)?;
    assert_eq!(given["level"], 1);
    let list = command(&agent, &Request::get("/v1/penalties"), 200)?;
    assert_eq!(list["penalties"][0]["source"], "198.51.100.7/32");
    assert_eq!(list["penalties"][0]["reason"], "429s");
    agent.terminate()?;
    Ok(())
}

/// The kernel ends it, and nobody else is there to do so.
#[test]
fn a_penalty_ends_on_time_without_the_agent() -> Result<()> {
    let stage = Stage::new()?;
    let bpffs = Bpffs::new()?;
    let text = config("first_penalty = \"6s\"\nlongest_penalty = \"6s\"\n", stage.socket());
    let agent = Agent::start_pinned(&bpffs.pins(), &stage.edge.netns, &text)?;
    let server = SocketAddr::new("192.0.2.1".parse()?, 7);
    let _echo = EchoServer::start(&stage.edge.netns, server)?;
    let client = "192.0.2.77".parse()?;
    stage.clients.add_known_address(client, 24, &stage.edge)?;
    let answered = || -> Result<u32> {
        let pace = Pace { rate: 20, duration: Duration::from_millis(500) };
        Ok(client::start(&stage.clients.netns, client, server, pace)?.join()?.answered)
    };
    assert_eq!(answered()?, 10);
    let body = json!({"address": client.to_string()});
    let given = stage.ask(&Request::post("/v1/penalties", &body), 200)?;
    agent.kill();
    assert_eq!(answered()?, 0, "it holds without the agent");
    wait_until(&given["until"])?;
    assert_eq!(answered()?, 10, "and is over");
    Ok(())
}

#[test]
fn some_are_never_penalised_and_the_reason_is_said() -> Result<()> {
    let mut stage = Stage::new()?;
    let text = config(
        "trusted_proxies = [\"198.51.100.0/28\", \"2001:db8:5::7\"]\nfirst_penalty = \"60s\"\n",
        stage.socket(),
    );
    let agent = stage.start(&text)?;
    assert!(agent.command(&["block", "198.18.0.0/16"])?.status.success());
    let before = command(&agent, &Request::get("/v1/penalties"), 200)?;
    for (address, status, code) in [
        ("198.51.100.3", 403, "trusted-proxy"),
        // Its /64 has a proxy in it.
        ("2001:db8:5::9", 403, "trusted-proxy"),
        ("10.20.1.1", 403, "exempt"),
        ("::ffff:10.20.1.1", 403, "exempt"),
        ("192.0.2.1", 403, "own-address"),
        ("127.0.0.1", 403, "martian"),
        ("0.0.0.0", 403, "martian"),
        ("239.1.1.1", 403, "martian"),
        ("198.18.5.5", 409, "blocked"),
    ] {
        let body = json!({"address": address});
        let problem = stage.ask(&Request::post("/v1/penalties", &body), status)?;
        assert_eq!(problem["code"], code, "{address}: {problem}");
        assert_eq!(problem["status"], status);
        let errors = problem["errors"].as_array().context("a list")?;
        assert!(errors.iter().any(|it| it.as_str().is_some_and(|it| it.len() > 20)), "{problem}");
    }
    let after = command(&agent, &Request::get("/v1/penalties"), 200)?;
    assert_eq!((&after, &after["penalties"]), (&before, &json!([])));
    // What comes from the proxy still passes.
    assert_eq!(stage.fate(&agent, "198.51.100.3", 20)?.passed, 20);
    // Where the ssh session is.
    let ssh = stage.edge.netns.run(|| std::net::TcpListener::bind("192.0.2.1:22"))?;
    let operator = "192.0.2.22".parse()?;
    stage.clients.add_known_address(operator, 24, &stage.edge)?;
    let to = SocketAddr::new("192.0.2.1".parse()?, 22);
    let _session = stage.clients.netns.run(|| client::connect(operator, to))?;
    // The list of sessions may be five seconds old.
    thread::sleep(Duration::from_secs(6));
    let body = json!({"address": operator.to_string()});
    let problem = stage.ask(&Request::post("/v1/penalties", &body), 403)?;
    assert_eq!(problem["code"], "reserved");
    drop(ssh);
    agent.terminate()?;
    Ok(())
}

#[test]
fn penalties_and_proofs_are_rate_limited_themselves() -> Result<()> {
    let stage = Stage::new()?;
    let text = config(
        "penalties = { rate = \"1/m\", burst = 3 }\nproofs = { rate = \"1/m\", burst = 5 }\n",
        stage.socket(),
    );
    let agent = stage.start(&text)?;
    for number in 1..=3 {
        let body = json!({"address": format!("198.51.100.{number}")});
        stage.ask(&Request::post("/v1/penalties", &body), 200)?;
    }
    let body = json!({"address": "198.51.100.4"});
    let answer = Request::post("/v1/penalties", &body).on(stage.socket())?;
    assert_eq!(answer.status, 429, "{answer:?}");
    let wait: u64 = answer.header("retry-after").context("a time to wait")?.parse()?;
    assert!((30..=76).contains(&wait), "{wait}");
    assert_eq!(answer.json()?["status"], 429);
    let report = stage.ask(&Request::get("/v1/sources/198.51.100.4"), 200)?;
    assert_eq!(report["penalty"], Value::Null, "nothing was changed");

    let addresses = |range: std::ops::Range<u32>| json!({"addresses": range.map(|it| format!("198.51.101.{it}")).collect::<Vec<_>>()});
    let proven = stage.ask(&Request::post("/v1/proven", &addresses(1..5)), 200)?;
    assert_eq!(proven, json!({"proven": 4}));
    let answer = Request::post("/v1/proven", &addresses(5..8)).on(stage.socket())?;
    assert_eq!(answer.status, 429, "{answer:?}");
    let report = stage.ask(&Request::get("/v1/sources/198.51.101.5"), 200)?;
    assert_eq!(report["standing"], "stranger", "nothing was changed");
    agent.terminate()?;
    Ok(())
}

#[test]
fn who_is_vouched_for_is_proven_to_the_kernel() -> Result<()> {
    const SENT: u64 = 60;
    let mut stage = Stage::new()?;
    let agent = stage.start(&config(APPLICATION, stage.socket()))?;
    let body = json!({"addresses": ["198.51.102.1", "2001:db8:7::1", "127.0.0.1"]});
    let proven = stage.ask(&Request::post("/v1/proven", &body), 200)?;
    assert_eq!(proven, json!({"proven": 2}), "the loopback sends nothing");
    for address in ["198.51.102.1", "2001:db8:7::9"] {
        let report = stage.ask(&Request::get(&format!("/v1/sources/{address}")), 200)?;
        assert_eq!(report["standing"], "proven", "{report}");
    }
    // The sum of those who have proven nothing, half of which strangers may use.
    let used = stage.fate(&agent, "198.51.103.1", 2 * BURST)?;
    assert!(used.passed < 2 * BURST, "{used:?}");
    let stranger = stage.fate(&agent, "198.51.103.2", 2 * BURST)?;
    let one = stage.fate(&agent, "198.51.102.1", SENT)?;
    assert_eq!(one.passed, SENT, "{one:?}; {stranger:?}");
    agent.terminate()?;
    Ok(())
}

#[test]
fn every_write_is_audited() -> Result<()> {
    let stage = Stage::new()?;
    let agent = stage.start(&config("trusted_proxies = [\"10.9.0.0/16\"]\n", stage.socket()))?;
    let post = |target, body: &Value, status| stage.ask(&Request::post(target, body), status);
    command(
        &agent,
        &Request::post(
            "/v1/block",
            &json!({"cidr": "198.18.0.0/16", "for_seconds": 60, "reason": "a test"}),
        ),
        200,
    )?;
    post("/v1/penalties", &json!({"address": "198.51.100.1", "reason": "x\ny"}), 200)?;
    post("/v1/penalties", &json!({"address": "10.9.1.1"}), 403)?;
    post("/v1/proven", &json!({"addresses": ["198.51.100.2", "198.51.100.3"]}), 200)?;
    command(&agent, &Request::post("/v1/reload", &json!({})), 200)?;
    let all = command(&agent, &Request::get("/v1/audit"), 200)?;
    let entries = all["entries"].as_array().context("a list")?;
    let brief: Vec<_> = entries
        .iter()
        .map(|it| (it["action"].as_str(), it["socket"].as_str(), it["done"].as_bool()))
        .collect();
    assert_eq!(
        brief,
        [
            (Some("block"), Some("control"), Some(true)),
            (Some("penalty"), Some("application"), Some(true)),
            (Some("penalty"), Some("application"), Some(false)),
            (Some("proven"), Some("application"), Some(true)),
            (Some("reload"), Some("control"), Some(true)),
        ],
        "{all}"
    );
    for entry in entries {
        assert_eq!((&entry["uid"], &entry["gid"]), (&json!(0), &json!(0)), "{entry}");
        assert_eq!(entry["pid"], json!(process::id()), "{entry}");
    }
    assert_eq!(entries[0]["subject"], "198.18.0.0/16");
    for timed in &entries[..2] {
        humantime(timed["until"].as_str().context("an end")?)?;
    }
    assert!(entries[2]["outcome"].as_str().is_some_and(|it| it.contains("trusted proxy")), "{all}");
    // In pages, and each once in the log.
    let first = command(&agent, &Request::get("/v1/audit?limit=2"), 200)?;
    assert_eq!((&first["next"], &first["entries"][1]), (&json!(2), &entries[1]));
    let second = command(&agent, &Request::get("/v1/audit?limit=3&after=2"), 200)?;
    assert_eq!((&second["next"], &second["entries"][0]), (&Value::Null, &entries[2]));
    command(&agent, &Request::get("/v1/audit?limit=0"), 422)?;
    let log = agent.log();
    let by = format!("(by uid 0, pid {}, gid 0, application socket)", process::id());
    let lines = log.lines().filter(|line| line.contains("penalty 198.51.100.1 until 20"));
    let lines: Vec<_> = lines.collect();
    assert!(lines.len() == 1 && lines[0].ends_with(&by), "{log}");
    agent.terminate()?;
    Ok(())
}

/// Penalties are blocks: they outlive a crash, with their level.
#[test]
fn penalties_outlive_a_crash() -> Result<()> {
    let mut stage = Stage::new()?;
    let agent = stage.start(&config("first_penalty = \"60s\"\n", stage.socket()))?;
    let given =
        stage.ask(&Request::post("/v1/penalties", &json!({"address": "198.51.100.1"})), 200)?;
    let agent = agent.kill_and_start(&["--unpinned"])?;
    let report = stage.ask(&Request::get("/v1/sources/198.51.100.1"), 200)?;
    assert_eq!(report["penalty"], json!({"until": given["until"], "level": 1}));
    let fate = stage.fate(&agent, "198.51.100.1", 50)?;
    assert_eq!(fate.blocked, 50, "{fate:?}");
    assert_eq!(whole(agent.metrics()?.sum("limiter_blocks", &[])), 1);
    agent.terminate()?;
    Ok(())
}

/// An exemption by command holds on its interface until its end, over a reload and a crash.
#[test]
fn an_exemption_by_command_holds_until_its_end() -> Result<()> {
    let mut stage = Stage::new()?;
    let text = config("", stage.socket());
    let agent = stage.start(&text)?;
    let address = "198.51.100.1";
    assert!(stage.fate(&agent, address, 2 * BURST)?.passed < 2 * BURST);
    let refused = agent.command(&["exempt", address, "--interface", "eth9"])?;
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let done = agent.command(&[
        "exempt",
        address,
        "--interface",
        "edge0",
        "--for",
        "25s",
        "--owner",
        "ops",
    ])?;
    assert!(done.status.success(), "{done:?}");
    agent.reload(&text)?;
    assert_eq!(stage.fate(&agent, address, 2 * BURST)?.passed, 2 * BURST);
    let agent = agent.kill_and_start(&["--unpinned"])?;
    assert_eq!(stage.fate(&agent, address, 2 * BURST)?.passed, 2 * BURST);
    let report = stage.ask(&Request::get("/v1/sources/198.51.100.1"), 200)?;
    let exemption = &report["policy"]["exemptions"][0];
    assert_eq!((&exemption["owner"], &exemption["interface"]), (&json!("ops"), &json!("edge0")));
    let body = json!({"address": address});
    assert_eq!(stage.ask(&Request::post("/v1/penalties", &body), 403)?["code"], "exempt");
    wait_until(&exemption["expires"])?;
    assert!(stage.fate(&agent, address, 2 * BURST)?.passed < 2 * BURST, "it is over");
    // And one that is taken back.
    for words in [["exempt", "203.0.113.0/24"], ["unexempt", "203.0.113.0/24"]] {
        assert!(agent.command(&[words[0], words[1], "--interface", "edge0"])?.status.success());
        let passed = stage.fate(&agent, "203.0.113.5", 5 * BURST)?.passed;
        assert_eq!(passed == 5 * BURST, words[0] == "exempt", "{words:?}: {passed}");
    }
    agent.terminate()?;
    Ok(())
}
