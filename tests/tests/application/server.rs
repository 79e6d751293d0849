//! Clients that send nonsense, too much or nothing, and those at the wrong socket.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::{
        fs::{MetadataExt as _, PermissionsExt as _},
        net::UnixStream,
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use limiter_tests::{
    agent::{Agent, METRICS},
    http::Request,
};
use serde_json::json;

use crate::stage::{Stage, checked, config, control, whole};

#[test]
fn bad_requests_are_refused_precisely_and_change_nothing() -> Result<()> {
    let stage = Stage::new()?;
    let agent = stage.start(&config("", stage.socket()))?;
    let before = agent.metrics()?;
    let penalty = |body: &str| Request {
        method: "POST",
        target: "/v1/penalties",
        body: Some(body.to_owned()),
        content_type: "application/json",
    };
    let many = vec!["198.51.100.1"; 257];
    let good = r#"{"address":"198.51.100.1"}"#;
    let long = format!(r#"{{"address":"198.51.100.1","reason":"{}"}}"#, "x".repeat(1 << 20));
    let cases = [
        (penalty(&long), 413, "longer than any"),
        (penalty("{\"address\""), 400, "not JSON"),
        (penalty(""), 400, "not JSON"),
        (Request { content_type: "text/xml", ..penalty(good) }, 415, "text/xml"),
        (penalty(r#"{"address":7}"#), 422, "invalid type: integer"),
        (penalty(r#"{"adress":"198.51.100.1"}"#), 422, "unknown field `adress`"),
        (penalty(r#"{"reason":"429s"}"#), 422, "missing field `address`"),
        (penalty(r#"{"address":"198.51.100.0/24"}"#), 422, "is not an IP address"),
        (penalty(r#"{"address":"somebody"}"#), 422, "is not an IP address"),
        (
            penalty(&json!({"address": "198.51.100.1", "reason": "x".repeat(201)}).to_string()),
            422,
            "200 characters",
        ),
        (Request::post("/v1/sources", &json!({"addresses": []})), 422, "1 to 256"),
        (Request::post("/v1/sources", &json!({"addresses": many})), 422, "1 to 256"),
        (Request::post("/v1/sources", &json!({"addresses": ["1.2.3.4", "x"]})), 422, "not an IP"),
        (
            Request::post("/v1/proven", &json!({"addresses": ["198.51.100.1", "x"]})),
            422,
            "not an IP",
        ),
        (Request::get("/v1/sources/nobody"), 422, "is not an IP address"),
        // What is for operators.
        (
            Request::post("/v1/block", &json!({"cidr": "198.51.100.0/24"})),
            403,
            "served on: control",
        ),
        (Request::post("/v1/mode", &json!({"mode": "bypass"})), 403, "served on: control"),
        (Request::post("/v1/detach", &json!({})), 403, "served on: control"),
        (Request::get("/v1/penalties"), 403, "served on: control"),
        (Request::get("/v1/audit"), 403, "served on: control"),
        (Request::get("/v1/status"), 403, "served on: control, metrics"),
        (Request::get("/nothing"), 404, "/v1/openapi.json"),
        (Request { method: "DELETE", ..penalty(good) }, 405, "takes POST here"),
    ];
    for (request, status, cause) in &cases {
        let problem = checked(request, &request.on(stage.socket())?, *status)?;
        assert_eq!(problem["status"], *status, "{problem}");
        assert!(problem.to_string().contains(cause), "{cause} in {problem}");
    }
    // The metrics address only reads.
    for target in ["/v1/penalties", "/v1/sources", "/v1/proven", "/v1/block", "/v1/reload"] {
        let request = Request::post(target, &json!({}));
        let answer = stage.edge.netns.run(|| request.at(METRICS))?;
        let problem = checked(&request, &answer, 403)?;
        assert!(problem.to_string().contains("control"), "{problem}");
    }
    let after = agent.metrics()?;
    for name in ["limiter_blocks", "limiter_config_last_reload_success_timestamp_seconds"] {
        assert_eq!(whole(after.sum(name, &[])), whole(before.sum(name, &[])), "{name}");
    }
    let report = stage.ask(&Request::get("/v1/sources/198.51.100.1"), 200)?;
    assert_eq!(
        (&report["standing"], &report["blocked"]),
        (&json!("stranger"), &json!(false)),
        "{report}"
    );
    agent.terminate()?;
    Ok(())
}

/// More silent clients than there is room for, and those who stop in the middle.
#[test]
fn clients_that_say_nothing_cost_the_others_nothing() -> Result<()> {
    const SILENT: usize = 600;
    let stage = Stage::new()?;
    let agent = stage.start(&config("", stage.socket()))?;
    for path in [stage.socket().to_owned(), control(&agent)] {
        let mut silent =
            (0..SILENT).map(|_| UnixStream::connect(&path)).collect::<Result<Vec<_>, _>>()?;
        for (number, stream) in silent.iter_mut().enumerate() {
            // Who was sent away for another cannot write.
            let _ = match number % 3 {
                0 => Ok(()),
                1 => stream.write_all(b"GET /v1/sources/192.0.2.1 HTTP/1.1\r\nHost: a"),
                _ => stream.write_all(
                    b"POST /v1/proven HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{\"addr",
                ),
            };
        }
        let start = Instant::now();
        for _ in 0..20 {
            checked(
                &Request::get("/v1/sources/198.51.100.1"),
                &Request::get("/v1/sources/198.51.100.1").on(&path)?,
                200,
            )?;
        }
        let took = start.elapsed();
        ensure!(took < Duration::from_secs(3), "20 answers took {took:?}");
        let open = descriptors(&agent)?;
        assert!(open < 400, "{open} descriptors");
    }
    agent.terminate()?;
    Ok(())
}

fn descriptors(agent: &Agent) -> Result<usize> {
    Ok(fs::read_dir(format!("/proc/{}/fd", agent.pid()))?.count())
}

#[test]
fn heads_and_bodies_that_do_not_come_end_the_connection() -> Result<()> {
    let stage = Stage::new()?;
    let agent = stage.start(&config("", stage.socket()))?;
    let open = |text: &[u8]| -> Result<UnixStream> {
        let mut stream = UnixStream::connect(stage.socket())?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        stream.write_all(text)?;
        Ok(stream)
    };
    let start = Instant::now();
    let mut nothing = open(b"")?;
    let mut head = open(b"GET /v1/sources/192.0.2.9 HTTP/1.1\r\nHost: a\r\n")?;
    let mut body = open(b"POST /v1/proven HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{")?;
    let mut idle = open(b"GET /v1/sources/192.0.2.9 HTTP/1.1\r\nHost: a\r\n\r\n")?;
    let mut answer = String::new();
    body.read_to_string(&mut answer)?;
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("within 10 seconds"), "{answer}");
    answer.clear();
    idle.read_to_string(&mut answer)?;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    for stream in [&mut nothing, &mut head] {
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).context("the agent ends it")?;
        assert!(!answer.starts_with(b"HTTP/1.1 200"));
    }
    let took = start.elapsed();
    assert!((9..18).contains(&took.as_secs()), "{took:?}");
    agent.terminate()?;
    Ok(())
}

#[test]
fn the_socket_is_for_a_group_and_goes_with_the_agent() -> Result<()> {
    let stage = Stage::new()?;
    let agent = stage.start(&config("group = \"daemon\"\n", stage.socket()))?;
    let made = fs::metadata(stage.socket())?;
    assert_eq!(made.permissions().mode() & 0o777, 0o660);
    let groups = fs::read_to_string("/etc/group")?;
    let gid = groups.lines().find_map(|line| line.strip_prefix("daemon:x:"));
    let gid: u32 = gid.and_then(|it| it.split(':').next()).context("a group")?.parse()?;
    assert_eq!((made.uid(), made.gid()), (0, gid));
    // Where it is and whose, only a start can change.
    let other = config("group = \"daemon\"\n", &stage.socket().with_file_name("other.sock"));
    fs::write(agent.configuration(), other)?;
    let output = agent.command(&["reload"])?;
    let said = String::from_utf8(output.stdout)?;
    assert!(said.contains("[application] socket or group changed"), "{said}");
    agent.terminate()?;
    assert!(!stage.socket().exists());

    let error = stage.start(&config("group = \"nobody-is-in-it\"\n", stage.socket()));
    let error = format!("{:#}", error.err().context("there is no such group")?);
    assert!(error.contains("groupadd --system nobody-is-in-it"), "{error}");
    // Without the table there is no such socket.
    let text = config("", stage.socket());
    let (without, _) = text.split_once("[application]").context("has it")?;
    let agent = stage.start(without)?;
    assert!(!stage.socket().exists());
    agent.terminate()?;
    Ok(())
}
