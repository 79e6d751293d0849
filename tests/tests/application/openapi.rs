//! The `OpenAPI` document against the server: everything in it is served where it says, answers with a status
//! that it lists and a body of the shape that it describes, and is refused elsewhere.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use limiter_tests::{
    agent::{Agent, METRICS},
    http::{Answer, Request},
};
use serde_json::{Value, json};

use crate::stage::{Stage, config, control};

const METHODS: [&str; 5] = ["get", "post", "put", "patch", "delete"];
const SOCKETS: [&str; 3] = ["control", "application", "metrics"];

/// Requests to each path, with the status that they are to be answered with. What is new in the document
/// needs one here.
fn samples(text: &str) -> Vec<(&'static str, &'static str, String, Option<Value>, u16)> {
    let get = |path: &'static str, status| ("get", path, path.to_owned(), None, status);
    let at = |path, target: &str, status| ("get", path, target.to_owned(), None, status);
    let post =
        |path: &'static str, body, status| ("post", path, path.to_owned(), Some(body), status);
    let address = json!({"address": "198.51.100.9", "reason": "429s"});
    vec![
        get("/metrics", 200),
        get("/healthz", 200),
        get("/v1/openapi.json", 200),
        get("/v1/status", 200),
        at("/v1/sources/{address}", "/v1/sources/192.0.2.9", 200),
        at("/v1/sources/{address}", "/v1/sources/203.0.113.9", 200),
        at("/v1/sources/{address}", "/v1/sources/10.20.0.1", 200),
        at("/v1/sources/{address}", "/v1/sources/192.0.2.0%2F24", 422),
        post("/v1/sources", json!({"addresses": ["192.0.2.9", "2001:db8::9"]}), 200),
        post("/v1/sources", json!({"addresses": []}), 422),
        post("/v1/block", json!({"cidr": "198.18.0.0/16", "for_seconds": 60, "reason": "x"}), 200),
        post("/v1/block", json!({"cidr": "0.0.0.0/0"}), 422),
        at("/v1/sources/{address}", "/v1/sources/198.18.0.1", 200),
        post("/v1/penalties", address, 200),
        post("/v1/penalties", json!({"address": "127.0.0.1"}), 403),
        post("/v1/penalties", json!({"address": "198.18.0.1"}), 409),
        at("/v1/sources/{address}", "/v1/sources/198.51.100.9", 200),
        get("/v1/penalties", 200),
        at("/v1/penalties", "/v1/penalties?limit=1&after=198.51.100.9%2F32", 200),
        at("/v1/penalties", "/v1/penalties?after=x", 422),
        post("/v1/proven", json!({"addresses": ["192.0.2.9"]}), 200),
        post("/v1/unblock", json!({"cidr": "198.18.0.0/16"}), 200),
        post("/v1/unblock", json!({"cidr": "198.18.0.0/16"}), 422),
        post("/v1/exempt", json!({"cidr": "10.9.0.0/16", "interface": "edge0"}), 200),
        post("/v1/exempt", json!({"cidr": "10.9.0.0/16", "interface": "eth9"}), 422),
        at("/v1/sources/{address}", "/v1/sources/10.9.0.1", 200),
        post("/v1/unexempt", json!({"cidr": "10.9.0.0/16", "interface": "edge0"}), 200),
        post("/v1/unexempt", json!({"cidr": "10.9.0.0/16", "interface": "edge0"}), 422),
        post("/v1/mode", json!({"mode": "observe"}), 200),
        post("/v1/mode", json!({"mode": "config"}), 200),
        post("/v1/reload", Value::Null, 200),
        post("/v1/apply", json!({"file": "x", "text": "mode = 7"}), 422),
        post("/v1/apply", json!({"file": "x", "text": text, "confirm_seconds": 60}), 200),
        post("/v1/confirm", Value::Null, 200),
        post("/v1/confirm", Value::Null, 422),
        post("/v1/capture", json!({"rate": 1}), 200),
        post("/v1/capture", json!({"reasons": ["none"]}), 422),
        get("/", 200),
        at("/", "/?range=5m&refresh=off", 200),
        at("/", "/?range=2m", 400),
        get("/page.css", 200),
        get("/page.js", 200),
        get("/v1/top", 200),
        at("/v1/top", "/v1/top?of=prefixes&by=bytes&window=60s&limit=5", 200),
        at("/v1/top", "/v1/top?limit=0", 422),
        get("/v1/events", 200),
        at("/v1/events", "/v1/events?limit=1025", 422),
        get("/v1/limits", 200),
        get("/v1/measure", 200),
        post(
            "/v1/recommend",
            json!({
                "terms": {"min_seconds": 3600, "min_sources": 50, "margin": 1.5},
                "enforce": false
            }),
            422,
        ),
        get("/v1/connections", 200),
        at("/v1/connections", "/v1/connections?limit=0", 422),
        get("/v1/leases", 200),
        at("/v1/leases", "/v1/leases?after=x", 400),
        post("/v1/leases/revoke", json!({"subject": "192.0.2.77", "for_seconds": 60}), 200),
        post("/v1/leases/revoke", json!({"subject": "nobody"}), 422),
        get("/v1/audit", 200),
        at("/v1/audit", "/v1/audit?limit=2&after=1", 200),
        at("/v1/audit", "/v1/audit?page=2", 422),
        // The agent ends after it.
        post("/v1/detach", Value::Null, 200),
    ]
}

#[test]
fn the_document_is_what_the_server_does() -> Result<()> {
    let stage = Stage::new()?;
    let text = config("", stage.socket());
    let agent = stage.start(&text)?;
    let document = stage.ask(&Request::get("/v1/openapi.json"), 200)?;
    let operations = operations(&document)?;
    let samples = samples(&text);
    for (method, path, _) in &operations {
        // A recommendation takes traffic and time, which recommend.rs gives it.
        let good = if path == "/v1/recommend" { 422 } else { 200 };
        let known = samples.iter().any(|it| it.0 == method && it.1 == path && it.4 == good);
        ensure!(known, "no sample of {method} {path}: add one above");
    }
    refused_elsewhere(&stage, &agent, &operations)?;
    for (method, path, target, body, status) in &samples {
        let operation = operations.iter().find(|it| it.0 == *method && it.1 == *path);
        let (_, _, operation) =
            operation.with_context(|| format!("{method} {path} is not in it"))?;
        if let (Some(body), 200) = (body.as_ref().filter(|it| !it.is_null()), *status) {
            let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
            matches(&document, schema, body).with_context(|| format!("the body of {path}"))?;
        }
        // What changes something is asked for once, what reads on each socket.
        let sockets = if *method == "get" { SOCKETS.as_slice() } else { &SOCKETS[..1] };
        for socket in sockets.iter().filter(|it| serves(operation, it)) {
            let what = || format!("{method} {target} on {socket}; the log:\n{}", agent.log());
            let request = request(method, target, body.as_ref());
            let answer = if *path == "/v1/capture" && *status == 200 {
                head(&control(&agent), &request)
            } else {
                ask(&stage, &agent, socket, &request)
            };
            let answer = answer.with_context(what)?;
            ensure!(answer.status == *status, "{answer:?} to {}", what());
            described(&document, operation, &answer).with_context(what)?;
        }
    }
    agent.end()?;
    Ok(())
}

/// Method, path and what is said about it.
fn operations(document: &Value) -> Result<Vec<(String, String, Value)>> {
    ensure!(document["openapi"].as_str().is_some_and(|it| it.starts_with("3.1")), "{document}");
    let mut operations = Vec::new();
    for (path, item) in document["paths"].as_object().context("paths")? {
        for (method, operation) in item.as_object().context("methods")? {
            ensure!(METHODS.contains(&method.as_str()), "{method} {path}");
            let sockets = operation["x-sockets"].as_array().context("x-sockets")?;
            let known = |it: &Value| it.as_str().is_some_and(|it| SOCKETS.contains(&it));
            ensure!(!sockets.is_empty() && sockets.iter().all(known), "{method} {path}");
            operations.push((method.clone(), path.clone(), operation.clone()));
        }
    }
    ensure!(operations.len() > 15, "{operations:?}");
    Ok(operations)
}

/// Where the document does not list an operation, it is not served.
fn refused_elsewhere(
    stage: &Stage,
    agent: &Agent,
    operations: &[(String, String, Value)],
) -> Result<()> {
    for (method, path, operation) in operations {
        for socket in SOCKETS.iter().filter(|it| !serves(operation, it)) {
            let target = path.replace("{address}", "192.0.2.9");
            let body = (method != "get").then(|| json!({}));
            let answer = ask(stage, agent, socket, &request(method, &target, body.as_ref()))?;
            ensure!(answer.status == 403, "{method} {path} on {socket}: {answer:?}");
            ensure!(answer.json()?["status"] == 403, "{answer:?}");
        }
        // Nor is another method served anywhere.
        let others = METHODS.iter().filter(|it| {
            operations.iter().all(|(method, known, _)| known != path || method != *it)
        });
        for other in others {
            let target = path.replace("{address}", "192.0.2.9");
            for socket in SOCKETS {
                let answer = ask(stage, agent, socket, &request(other, &target, None))?;
                let right = answer.status == 405 || answer.status == 403;
                ensure!(right, "{other} {path} on {socket}: {answer:?}");
            }
        }
    }
    Ok(())
}

fn serves(operation: &Value, socket: &str) -> bool {
    operation["x-sockets"].as_array().is_some_and(|it| it.iter().any(|it| it == socket))
}

fn request<'a>(method: &str, target: &'a str, body: Option<&Value>) -> Request<'a> {
    let method = METHODS.iter().position(|it| *it == method).unwrap_or(0);
    let method = ["GET", "POST", "PUT", "PATCH", "DELETE"][method];
    let body = body.filter(|it| !it.is_null()).map(ToString::to_string);
    Request { method, body, ..Request::get(target) }
}

fn ask(stage: &Stage, agent: &Agent, socket: &str, request: &Request<'_>) -> Result<Answer> {
    match socket {
        "control" => request.on(&control(agent)),
        "application" => request.on(stage.socket()),
        _ => stage.edge.netns.run(|| request.at(METRICS)),
    }
}

/// The head of an answer that goes on, and its first line.
fn head(path: &Path, request: &Request<'_>) -> Result<Answer> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(request.text().as_bytes())?;
    let mut lines = BufReader::new(stream).lines();
    let mut head = lines.next().context("no answer")??;
    let status = head.split(' ').nth(1).context("no status")?.parse()?;
    for line in lines.by_ref() {
        let line = line?;
        if line.is_empty() {
            break;
        }
        head.push('\n');
        head.push_str(&line.to_ascii_lowercase());
    }
    // A chunk's length stands before it.
    let body = lines.nth(1).context("no line")??;
    Ok(Answer { status, head, body })
}

/// Whether the answer is one that the document describes.
fn described(document: &Value, operation: &Value, answer: &Answer) -> Result<()> {
    let response = &operation["responses"][answer.status.to_string()];
    ensure!(response.is_object(), "{} is not listed", answer.status);
    let kind = answer.header("content-type").context("a content type")?;
    let kind = kind.split(';').next().unwrap_or_default();
    let content = &response["content"][kind];
    ensure!(content.is_object(), "{kind} is not listed: {response}");
    let body = if kind.ends_with("json") { answer.json()? } else { answer.body.clone().into() };
    matches(document, &content["schema"], &body)
}

/// Whether a value is of a schema of the document.
fn matches(document: &Value, schema: &Value, value: &Value) -> Result<()> {
    let mut schema = schema.as_object().context("a schema")?.clone();
    // Where references lead.
    schema.insert("components".to_owned(), document["components"].clone());
    let options = jsonschema::options().should_validate_formats(true);
    let validator = options
        .build(&schema.into())
        .map_err(|error| anyhow::anyhow!("the schema is none: {error}"))?;
    let errors: Vec<_> = validator
        .iter_errors(value)
        .map(|error| format!("{error} at {}", error.instance_path()))
        .collect();
    ensure!(errors.is_empty(), "{}\nin {value}", errors.join("\n"));
    Ok(())
}

/// A schema that takes everything would make the test above worthless.
#[test]
fn the_schemas_refuse_what_is_missing_and_what_is_not_described() -> Result<()> {
    let stage = Stage::new()?;
    let agent = stage.start(&config("", stage.socket()))?;
    let document = stage.ask(&Request::get("/v1/openapi.json"), 200)?;
    let good = stage.ask(&Request::get("/v1/sources/192.0.2.9"), 200)?;
    let schema = json!({"$ref": "#/components/schemas/Source"});
    matches(&document, &schema, &good)?;
    for key in good.as_object().context("an object")?.keys() {
        let mut bad = good.clone();
        bad.as_object_mut().context("an object")?.remove(key);
        ensure!(matches(&document, &schema, &bad).is_err(), "without {key}");
        let mut bad = good.clone();
        bad[key] = json!([[]]);
        ensure!(matches(&document, &schema, &bad).is_err(), "{key} of another type");
    }
    let mut bad = good.clone();
    bad["surprise"] = json!(1);
    ensure!(matches(&document, &schema, &bad).is_err(), "with something else");
    let mut bad = good;
    bad["blocked_until"] = json!("tomorrow");
    ensure!(matches(&document, &schema, &bad).is_err(), "with a time that is none");
    agent.terminate()?;
    Ok(())
}
