//! The page at `/`, in a real browser, under a real flood.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use limiter_tests::{
    agent::{Agent, METRICS},
    browser::Browser,
    frames,
    generator::{Flood, Generator},
    netns::{Interface, Netns, VethOptions, veth},
};
use serde_json::Value;

/// The owner of an exemption is any text, and the page shows it.
const CONFIG: &str = r#"
mode = "enforce"
default_reserves = []

[[interface]]
name = "edge0"

[table]
ipv4_sources = 4096
ipv6_sources = 4096

[[class]]
name = "dns"
match = { protocol = "udp", ports = [53] }
packets = { rate = "500/s", burst = 500 }
unproven = { rate = "5000/s", burst = 5000 }

[[class]]
name = "games"
match = { protocol = "udp", ports = [27015] }
packets = { rate = "5000/s", burst = 5000 }

[[class]]
name = "trial"
match = { protocol = "udp", ports = [4500] }
packets = { rate = "100/s", burst = 100 }
mode = "observe"

[[class]]
name = "rest"
packets = { rate = "10000/s", burst = 10000 }

[[exempt]]
cidr = "203.0.113.0/24"
owner = "<img src=x onerror='window.harm=1'>"
spoofable = true
"#;

struct Stage {
    near: Interface,
    far: Interface,
}

impl Stage {
    fn new() -> Result<Self> {
        let (near, far) = veth(
            (&Netns::new("edge")?, "edge0"),
            (&Netns::new("peer")?, "peer0"),
            VethOptions::default(),
        )?;
        Ok(Self { near, far })
    }

    /// Sends so many packets per second of one source to a UDP port, until `stop`.
    fn send(
        &self,
        source: &str,
        port: u16,
        rate: f64,
        stop: &Arc<AtomicBool>,
    ) -> Result<thread::JoinHandle<Result<()>>> {
        let path = frames::Path {
            source_mac: self.far.mac,
            destination_mac: self.near.mac,
            source: SocketAddr::new(source.parse()?, 40_000),
            destination: SocketAddr::new("192.0.2.200".parse()?, port),
        };
        let flood = Flood::new(frames::udp(&path, 18), rate, Duration::from_secs(90));
        let (flood, far) = (flood.until(Arc::clone(stop)), self.far.clone());
        Ok(thread::spawn(move || Generator::new(&far)?.flood(&flood).map(drop)))
    }
}

fn address(path: &str) -> String {
    format!("http://{METRICS}{path}")
}

/// Where people find what the page looks like.
fn screenshots() -> Result<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/screenshots");
    fs::create_dir_all(&directory)?;
    Ok(directory)
}

/// Waits until an expression is true on the page, and returns how long that took.
fn until(browser: &mut Browser, patience: Duration, expression: &str) -> Result<Duration> {
    let begun = Instant::now();
    while browser.value(expression)? != true {
        ensure!(begun.elapsed() < patience, "never came about: {expression}");
        thread::sleep(Duration::from_millis(50));
    }
    Ok(begun.elapsed())
}

/// The texts whose contrast with what is behind them is below 4.5 (WCAG 2.2, 1.4.3).
const PALE: &str = r"(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const f = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
  };
  const behind = (it) => {
    for (; it; it = it.parentElement) {
      const colour = rgb(getComputedStyle(it).backgroundColor);
      if (colour[3] > 0) return colour;
    }
    return rgb(getComputedStyle(document.documentElement).backgroundColor);
  };
  const texts = [...document.querySelectorAll('body *')].filter((it) =>
    it.tagName !== 'NOSCRIPT' && [...it.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
  const ratio = (it) => {
    const style = getComputedStyle(it);
    const own = rgb(it.closest('svg') ? style.fill : style.color);
    const [a, b] = [light(own), light(behind(it))].sort((a, b) => b - a);
    return (a + 0.05) / (b + 0.05);
  };
  const bad = texts.map((it) => [it.tagName, it.textContent.trim().slice(0, 40), ratio(it)]);
  return { all: texts.length, bad: bad.filter(([, , ratio]) => ratio < 4.5) };
})()";

/// Fails if text is hard to read, or the page is wider than the screen.
fn check_looks(browser: &mut Browser, width: u32, scheme: &str) -> Result<()> {
    let pale = browser.value(PALE)?;
    ensure!(pale["all"].as_u64() > Some(60), "{pale}");
    ensure!(pale["bad"].as_array().is_some_and(Vec::is_empty), "{scheme}: {}", pale["bad"]);
    let wide = browser.value("document.documentElement.scrollWidth")?;
    ensure!(wide.as_u64() <= Some(width.into()), "{wide} wide on a screen of {width}");
    let small = "Math.min(...[...document.querySelectorAll('svg text')].map((it) => \
                 it.getBoundingClientRect().height))";
    let small = browser.value(small)?;
    ensure!(small.as_f64() >= Some(9.0), "letters {small} high in a chart at {width}");
    Ok(())
}

#[test]
fn a_flood_shows_within_five_seconds_in_light_and_dark_on_desk_and_phone() -> Result<()> {
    let stage = Stage::new()?;
    let agent = Agent::start(&stage.near.netns, CONFIG)?;
    let mut browser = Browser::start(&stage.near.netns)?;
    let stop = Arc::new(AtomicBool::new(false));
    let honest = stage.send("192.0.2.1", 27015, 800.0, &stop)?;
    let trial = stage.send("192.0.2.3", 4500, 900.0, &stop)?;
    browser.open(&address("/?range=5m"))?;
    until(
        &mut browser,
        Duration::from_secs(10),
        "document.querySelector('#passed').innerText !== '0/s'",
    )?;
    ensure!(browser.text("#dropped")? == "0/s", "nothing is over an enforced limit yet");

    let flood = stage.send("192.0.2.2", 53, 20_000.0, &stop)?;
    // 500/s of 20,000/s pass; the rate rises with the first reading that the flood is in.
    let shows = "document.querySelector('#dropped').innerText.includes('k/s')";
    let took = until(&mut browser, Duration::from_secs(10), shows)?;
    println!("the drop showed after {took:.1?}");
    ensure!(took < Duration::from_secs(5), "{took:?}");
    let begun = Instant::now();

    // It says who, why, and what is not dropped.
    let rows = browser.text("#classes-table tbody")?;
    let row = |name: &str| rows.lines().find(|line| line.starts_with(name)).map(str::to_owned);
    ensure!(row("dns").is_some_and(|it| it.contains("enforce")), "{rows}");
    ensure!(row("trial").is_some_and(|it| it.contains("observe")), "{rows}");
    let reasons = browser.text("section[aria-labelledby=reasons]")?;
    ensure!(reasons.contains("packet_rate"), "{reasons}");
    let talkers = browser.text("#talkers-table tbody")?;
    ensure!(talkers.starts_with("192.0.2.2"), "{talkers}");
    ensure!(talkers.contains("192.0.2.3") && !talkers.contains("192.0.2.1"), "{talkers}");
    ensure!(browser.text("#mode")?.contains("Mode: enforce"));
    let warned = browser.text("#warnings")?;
    ensure!(warned.contains("onerror='window.harm=1'"), "{warned}");
    ensure!(browser.value("window.harm")?.is_null(), "a name was run");

    // So that charts have something to show.
    thread::sleep(Duration::from_secs(20).saturating_sub(begun.elapsed()));
    let directory = screenshots()?;
    for (width, scheme) in [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")] {
        browser.show(width, scheme)?;
        check_looks(&mut browser, width, scheme)?;
        fs::write(directory.join(format!("page-{scheme}-{width}.png")), browser.screenshot()?)?;
    }

    stop.store(true, Relaxed);
    for sender in [honest, trial, flood] {
        sender.join().expect("no panic")?;
    }
    let over = "document.querySelector('#dropped').innerText === '0/s'";
    until(&mut browser, Duration::from_secs(15), over)?;
    check_requests(&mut browser)?;

    // Its end shows, too, and is not taken for a quiet day.
    agent.terminate()?;
    until(&mut browser, Duration::from_secs(15), "!document.querySelector('#stale').hidden")?;
    Ok(())
}

/// Nothing but the page itself was asked for, and no policy was broken.
fn check_requests(browser: &mut Browser) -> Result<()> {
    let asked = browser.events("Network.requestWillBeSent");
    let url = |event: &Value| event["request"]["url"].as_str().unwrap_or_default().to_owned();
    let foreign: Vec<_> = asked
        .iter()
        .map(url)
        .filter(|url| !url.starts_with(&address("/")) && !url.starts_with("data:"))
        .collect();
    ensure!(asked.len() > 5 && foreign.is_empty(), "{} asked, {foreign:?}", asked.len());
    let complaints = browser.events("Log.entryAdded");
    ensure!(complaints.is_empty(), "{complaints:?}");
    let thrown = browser.events("Runtime.exceptionThrown");
    ensure!(thrown.is_empty(), "{thrown:?}");
    Ok(())
}

#[test]
fn it_works_by_keyboard_without_scripts_and_lets_nothing_in() -> Result<()> {
    let stage = Stage::new()?;
    let agent = Agent::start(&stage.near.netns, CONFIG)?;
    let mut browser = Browser::start(&stage.near.netns)?;
    browser.open(&address("/"))?;

    // Where the tabulator key leads, in order.
    let mut stops = Vec::new();
    for _ in 0..40 {
        browser.press("Tab", 9)?;
        let focused = "(() => { const it = document.activeElement; return it === document.body ? '' : \
                       it.getAttribute('aria-label') ?? it.innerText; })()";
        let focused = browser.value(focused)?.as_str().unwrap_or_default().to_owned();
        if focused.is_empty() || stops.first() == Some(&focused) {
            break;
        }
        stops.push(focused);
    }
    let expected =
        ["Skip to the content", "Last 5 minutes", "Last 15 minutes", "Last hour", "Pause"];
    ensure!(stops.iter().zip(expected).all(|(a, b)| a == b), "{stops:?}");
    for stop in ["Interfaces", "Table", "/metrics", "/v1/status", "/v1/top", "/healthz"] {
        ensure!(stops.iter().any(|it| it == stop), "no way to {stop}: {stops:?}");
    }

    // Focus stays when the page is renewed, and Enter follows a link.
    browser.value("document.getElementById('tables-table').focus()")?;
    let before = browser.text("time")?;
    until(
        &mut browser,
        Duration::from_secs(10),
        &format!("document.querySelector('time').innerText !== {before:?}"),
    )?;
    ensure!(browser.value("document.activeElement.id")? == "tables-table", "focus was lost");
    browser.value("document.getElementById('refresh').focus()")?;
    browser.events("Page.loadEventFired");
    browser.press("Enter", 13)?;
    browser.wait("Page.loadEventFired", Duration::from_secs(10))?;
    ensure!(browser.text("#refresh")? == "Refresh again");

    // Names for all parts: each section, table and picture has one.
    let nameless = "[...document.querySelectorAll('section:not([aria-labelledby]):not([aria-label]), \
                    table:not(:has(caption)), [role=img]:not([aria-label]), meter:not([aria-label])')].length";
    ensure!(browser.value(nameless)? == 0);
    let headings = "[...document.querySelectorAll('h1,h2,h3')].map((it) => it.tagName[1]).join('')";
    let headings = browser.value(headings)?.as_str().unwrap_or_default().to_owned();
    ensure!(headings.starts_with("12") && !headings.contains("13"), "{headings}");
    check_requests(&mut browser)?;

    // What somebody could bring in is neither run nor loaded.
    let harm = "(async () => { const it = document.createElement('script'); it.textContent = 'window.harm = 1'; \
                document.body.append(it); const style = document.createElement('p'); \
                style.setAttribute('style', 'color: rgb(1, 2, 3)'); document.body.append(style); \
                const sent = await fetch('http://192.0.2.1/').then(() => 'sent', (error) => `${error}`); \
                return [window.harm ?? null, getComputedStyle(style).color, sent]; })()";
    let harm = browser.value(harm)?;
    ensure!(harm[0].is_null() && harm[1] != "rgb(1, 2, 3)", "{harm}");
    let refused = browser.events("Log.entryAdded");
    let by_policy = |it: &&Value| {
        it["entry"]["text"].as_str().is_some_and(|it| it.contains("Content Security Policy"))
    };
    ensure!(refused.iter().filter(by_policy).count() >= 3, "{refused:?}");

    // Without scripts it loads itself anew.
    browser.scripts(false)?;
    browser.open(&address("/"))?;
    browser.wait("Page.loadEventFired", Duration::from_secs(15))?;
    agent.terminate()?;
    Ok(())
}

#[test]
fn it_has_strict_headers_and_refuses_what_it_does_not_know() -> Result<()> {
    let stage = Stage::new()?;
    let agent = Agent::start(&stage.near.netns, CONFIG)?;
    let page = agent.get("/")?;
    ensure!(page.starts_with("<!DOCTYPE html>"), "{page}");
    ensure!(agent.get("/page.css")?.contains("prefers-color-scheme: dark"));
    let error = agent.get("/?range=2m").expect_err("there is no such range").to_string();
    ensure!(error.contains("400") && error.contains("range is 5m, 15m or 1h"), "{error}");

    // Many who ask cost little: all get the same within a second.
    let before = agent_cpu(&agent)?;
    let begun = Instant::now();
    for _ in 0..200 {
        agent.get("/")?;
    }
    let (took, cost) = (begun.elapsed(), agent_cpu(&agent)?.saturating_sub(before));
    println!("200 pages in {took:?}: {cost:?} of CPU, {} bytes each", page.len());
    ensure!(cost < Duration::from_secs(1), "{cost:?}");
    agent.terminate()?;
    Ok(())
}

/// What the agent has used of the CPU.
fn agent_cpu(agent: &Agent) -> Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", agent.pid()))?;
    let fields: Vec<_> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // utime and stime (proc_pid_stat(5)), in hundredths of a second.
    let ticks = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
    Ok(Duration::from_millis(10 * ticks))
}
