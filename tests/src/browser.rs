//! A headless Chromium inside a namespace, spoken to by the protocol of its developer tools.
//!
//! By way of pipes, so that nothing listens anywhere, and so that it ends when its pipes do.
//! <https://chromedevtools.github.io/devtools-protocol/>

use std::{
    collections::VecDeque,
    fs::File,
    io::{BufRead as _, BufReader, Write as _},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::process::CommandExt as _,
    },
    process::{Child, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use nix::{
    sys::{
        prctl::set_pdeathsig,
        signal::{Signal, killpg},
    },
    unistd::Pid,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::netns::Netns;

/// For one answer. The machine may be busy.
const PATIENCE: Duration = Duration::from_secs(30);

/// A browser with one page. It ends when the handle is dropped, or the thread that started it ends.
pub struct Browser {
    child: Child,
    commands: Option<File>,
    answers: Receiver<Value>,
    session: String,
    number: u64,
    /// What happened on the page and was not asked for yet.
    events: VecDeque<Value>,
    profile: TempDir,
}

impl Browser {
    /// Starts it; it can reach what `netns` can, and has a profile of its own.
    ///
    /// # Errors
    /// If it cannot be started, or does not answer.
    pub fn start(netns: &Netns) -> Result<Self> {
        let profile = tempfile::Builder::new().prefix("limiter-browser-").tempdir()?;
        let (their_commands, commands) = std::io::pipe()?;
        let (answers, their_answers) = std::io::pipe()?;
        let (their_commands, their_answers): (OwnedFd, OwnedFd) =
            (their_commands.into(), their_answers.into());
        let mut command = netns.command("chromium");
        command
            .args(["--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu"])
            .args(["--disable-dev-shm-usage", "--no-first-run", "--disable-crash-reporter"])
            .args(["--disable-background-networking", "--disable-component-update"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .env("HOME", profile.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(profile.path().join("log"))?)
            .process_group(0);
        let (third, fourth) = (their_commands.as_raw_fd(), their_answers.as_raw_fd());
        let prepare = move || {
            set_pdeathsig(Signal::SIGKILL)?;
            // SAFETY: system calls on file descriptors that the closure's owner keeps open.
            let done = unsafe {
                // Out of the way first: either may be what the other becomes.
                let third = libc::fcntl(third, libc::F_DUPFD_CLOEXEC, 10);
                let fourth = libc::fcntl(fourth, libc::F_DUPFD_CLOEXEC, 10);
                libc::dup2(third, 3) == 3 && libc::dup2(fourth, 4) == 4
            };
            if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // SAFETY: between fork and exec the closure makes system calls and allocates nothing.
        unsafe { command.pre_exec(prepare) };
        let child = command
            .spawn()
            .context("chromium cannot be started; `cargo xtask setup` installs it")?;
        drop((their_commands, their_answers));
        let mut browser = Self {
            child,
            commands: Some(OwnedFd::from(commands).into()),
            answers: read(OwnedFd::from(answers).into()),
            session: String::new(),
            number: 0,
            events: VecDeque::new(),
            profile,
        };
        let page = browser.ask("Target.createTarget", &json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": page["targetId"], "flatten": true });
        let session = browser.ask("Target.attachToTarget", &attach)?;
        session["sessionId"].as_str().context("no session")?.clone_into(&mut browser.session);
        for domain in ["Page", "Network", "Log", "Runtime"] {
            browser.ask(&format!("{domain}.enable"), &json!({}))?;
        }
        Ok(browser)
    }

    /// Goes to an address and waits until the page is there.
    ///
    /// # Errors
    /// If it cannot be loaded.
    pub fn open(&mut self, address: &str) -> Result<()> {
        let answer = self.ask("Page.navigate", &json!({ "url": address }))?;
        ensure!(answer["errorText"].is_null(), "{address}: {}", answer["errorText"]);
        self.wait("Page.loadEventFired", PATIENCE)?;
        Ok(())
    }

    /// The value of an expression on the page.
    ///
    /// # Errors
    /// If it throws.
    pub fn value(&mut self, expression: &str) -> Result<Value> {
        let question =
            json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let mut answer = self.ask("Runtime.evaluate", &question)?;
        ensure!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        Ok(answer["result"]["value"].take())
    }

    /// The text of the element that a selector finds.
    ///
    /// # Errors
    /// If there is none.
    pub fn text(&mut self, selector: &str) -> Result<String> {
        let text = self.value(&format!("document.querySelector({selector:?})?.innerText"))?;
        text.as_str().map(str::to_owned).with_context(|| format!("nothing is {selector}"))
    }

    /// Presses a key and lets it go.
    ///
    /// # Errors
    /// If the browser refuses.
    pub fn press(&mut self, key: &str, code: u32) -> Result<()> {
        // A link is followed when the character comes, not the key.
        let text = if key == "Enter" { "\r" } else { "" };
        for (kind, text) in [("keyDown", text), ("keyUp", "")] {
            let event = json!({
                "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text,
            });
            self.ask("Input.dispatchKeyEvent", &event)?;
        }
        Ok(())
    }

    /// Shows the page on a screen of this width, in `light` or `dark`.
    ///
    /// # Errors
    /// If the browser refuses.
    pub fn show(&mut self, width: u32, scheme: &str) -> Result<()> {
        let phone = width < 600;
        let metrics = json!({
            "width": width, "height": 900, "deviceScaleFactor": if phone { 2 } else { 1 }, "mobile": phone,
        });
        self.ask("Emulation.setDeviceMetricsOverride", &metrics)?;
        let media = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.ask("Emulation.setEmulatedMedia", &media)?;
        Ok(())
    }

    /// Switches scripts of the page off or on, from the next page on.
    ///
    /// # Errors
    /// If the browser refuses.
    pub fn scripts(&mut self, on: bool) -> Result<()> {
        self.ask("Emulation.setScriptExecutionDisabled", &json!({ "value": !on }))?;
        Ok(())
    }

    /// The whole page as a PNG.
    ///
    /// # Errors
    /// If the browser cannot make one.
    pub fn screenshot(&mut self) -> Result<Vec<u8>> {
        let what = json!({ "format": "png", "captureBeyondViewport": true });
        let answer = self.ask("Page.captureScreenshot", &what)?;
        Ok(BASE64_STANDARD.decode(answer["data"].as_str().context("no picture")?)?)
    }

    /// What the protocol has told of this kind since the last call.
    pub fn events(&mut self, method: &str) -> Vec<Value> {
        while let Ok(message) = self.answers.try_recv() {
            self.events.push_back(message);
        }
        let (found, rest) = self.events.drain(..).partition(|event| event["method"] == method);
        self.events = rest;
        found.into_iter().map(|mut event: Value| event["params"].take()).collect()
    }

    /// Waits for an event, and forgets those of this kind.
    ///
    /// # Errors
    /// If it does not come in time.
    pub fn wait(&mut self, method: &str, patience: Duration) -> Result<Value> {
        let end = Instant::now() + patience;
        loop {
            if let Some(event) = self.events(method).pop() {
                return Ok(event);
            }
            let message = self.receive(end).with_context(|| format!("waiting for {method}"))?;
            self.events.push_back(message);
        }
    }

    fn ask(&mut self, method: &str, parameters: &Value) -> Result<Value> {
        self.number += 1;
        let mut message = json!({ "id": self.number, "method": method, "params": parameters });
        if !self.session.is_empty() {
            message["sessionId"] = self.session.clone().into();
        }
        let mut bytes = serde_json::to_vec(&message)?;
        bytes.push(0);
        let commands = self.commands.as_mut().context("it ends")?;
        commands.write_all(&bytes).with_context(|| method.to_owned())?;
        let end = Instant::now() + PATIENCE;
        loop {
            let mut message = self.receive(end).with_context(|| method.to_owned())?;
            if message["id"] == self.number {
                ensure!(message["error"].is_null(), "{method}: {}", message["error"]);
                return Ok(message["result"].take());
            }
            self.events.push_back(message);
        }
    }

    fn receive(&self, end: Instant) -> Result<Value> {
        match self.answers.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(message) => Ok(message),
            Err(error) => {
                let why = match error {
                    RecvTimeoutError::Timeout => "it does not answer",
                    RecvTimeoutError::Disconnected => "it has ended",
                };
                let log = std::fs::read_to_string(self.profile.path().join("log"));
                bail!("chromium: {why}; it says:\n{}", log.unwrap_or_default())
            }
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.commands = None;
        // It may have ended already. Its own children are in its group.
        if let Ok(group) = i32::try_from(self.child.id()) {
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
        }
        let _ = self.child.wait();
    }
}

/// Messages as they come; each ends with a zero.
fn read(answers: File) -> Receiver<Value> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut answers = BufReader::new(answers);
        loop {
            let mut message = Vec::new();
            if !matches!(answers.read_until(0, &mut message), Ok(1..)) {
                return;
            }
            message.pop();
            let Ok(message) = serde_json::from_slice(&message) else {
                return;
            };
            if sender.send(message).is_err() {
                return;
            }
        }
    });
    receiver
}
