//! One HTTP/1.1 request on one connection, and its answer.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(30);

/// A request.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// `GET`, `POST`.
    pub method: &'a str,
    /// The path, with the query.
    pub target: &'a str,
    /// The body.
    pub body: Option<String>,
    /// Its content type.
    pub content_type: &'a str,
}

/// What was answered.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The head, in lower case.
    pub head: String,
    /// The body.
    pub body: String,
}

impl<'a> Request<'a> {
    /// A GET.
    #[must_use]
    pub const fn get(target: &'a str) -> Self {
        Self { method: "GET", target, body: None, content_type: "application/json" }
    }

    /// A POST of JSON.
    #[must_use]
    pub fn post(target: &'a str, body: &Value) -> Self {
        Self { method: "POST", body: Some(body.to_string()), ..Self::get(target) }
    }

    /// Asks on the Unix socket at `path`.
    ///
    /// # Errors
    /// If nobody answers, or not in HTTP.
    pub fn on(&self, path: &Path) -> Result<Answer> {
        let stream = UnixStream::connect(path)
            .with_context(|| format!("connecting to {}", path.display()))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        self.exchange(stream)
    }

    /// Asks at a TCP address, inside of whose namespace the caller is.
    ///
    /// # Errors
    /// If nobody answers, or not in HTTP.
    pub fn at(&self, address: SocketAddr) -> Result<Answer> {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        self.exchange(stream)
    }

    /// The request as it is sent.
    #[must_use]
    pub fn text(&self) -> String {
        let Self { method, target, content_type, .. } = self;
        let body = self.body.as_deref().unwrap_or_default();
        let length = body.len();
        let about = match &self.body {
            None => String::new(),
            Some(_) => format!("Content-Type: {content_type}\r\nContent-Length: {length}\r\n"),
        };
        format!("{method} {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{about}\r\n{body}")
    }

    fn exchange(&self, mut stream: impl Read + Write) -> Result<Answer> {
        // A server that refuses a long body closes before it has read all.
        let sent = stream.write_all(self.text().as_bytes());
        let mut answer = Vec::new();
        let read = stream.read_to_end(&mut answer);
        if answer.is_empty() {
            sent.context("sending the request")?;
            read.context("reading the answer")?;
        }
        let answer = String::from_utf8(answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
        let status = head.split(' ').nth(1).context("no HTTP status")?.parse()?;
        Ok(Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() })
    }
}

impl Answer {
    /// The body as JSON.
    ///
    /// # Errors
    /// If it is none.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.body).with_context(|| format!("not JSON: {self:?}"))
    }

    /// The value of a header.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.into_iter().find(|(key, _)| *key == name).map(|(_, value)| value)
    }
}
