//! The agent's life in a namespace, as an operator sees it: start, reload, end.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use limiter_tests::{
    agent::{Agent, Metrics},
    netns::{Interface, Netns, VethOptions, veth},
};

const OBSERVE: &str = r#"
mode = "observe"

[[interface]]
name = "edge0"

[[class]]
name = "rest"
packets = { rate = "1000/s", burst = 1000 }
"#;

/// A guarded interface, and the other end of its cable, which has to live as long.
fn edge() -> Result<(Interface, Interface)> {
    veth((&Netns::new("edge")?, "edge0"), (&Netns::new("peer")?, "peer0"), VethOptions::default())
}

/// Whether an XDP program is attached.
fn is_guarded(edge: &Interface) -> Result<bool> {
    Ok(edge.netns.ip(&["link", "show", "dev", &edge.name])?.contains("prog/xdp"))
}

fn wait_for(agent: &Agent, holds: impl Fn(&Metrics) -> bool) -> Result<()> {
    let give_up = Instant::now() + Duration::from_secs(10);
    while !holds(&agent.metrics()?) {
        if Instant::now() > give_up {
            bail!("never came about; the agent's log:\n{}", agent.log());
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn is_mode(mode: &'static str) -> impl Fn(&Metrics) -> bool {
    move |metrics| metrics.sum("limiter_mode", &[("mode", mode)]) > 0.5
}

fn reloads_are_good(good: bool) -> impl Fn(&Metrics) -> bool {
    move |metrics| (metrics.sum("limiter_config_last_reload_successful", &[]) > 0.5) == good
}

#[test]
fn it_attaches_says_so_and_leaves_nothing_behind() -> Result<()> {
    let (edge, _peer) = edge()?;
    let agent = Agent::start(&edge.netns, OBSERVE)?;
    assert!(is_guarded(&edge)?);
    let metrics = agent.metrics()?;
    let labels = [("interface", "edge0"), ("mode", "native"), ("driver", "veth")];
    assert_eq!(metrics.matching("limiter_interface_info", &labels).count(), 1);
    assert!(is_mode("observe")(&metrics));

    let status = agent.command(&["status", "--json"])?;
    assert!(status.status.success());
    let status: serde_json::Value = serde_json::from_slice(&status.stdout)?;
    assert_eq!(status["pid"], agent.pid());
    assert_eq!(status["interfaces"][0]["name"], "edge0");

    let log = agent.terminate()?;
    assert!(log.contains("detached from edge0"), "{log}");
    assert!(!is_guarded(&edge)?);
    Ok(())
}

#[test]
fn a_crash_detaches() -> Result<()> {
    let (edge, _peer) = edge()?;
    Agent::start(&edge.netns, OBSERVE)?.kill();
    let give_up = Instant::now() + Duration::from_secs(5);
    while is_guarded(&edge)? {
        assert!(Instant::now() < give_up, "still attached");
        thread::sleep(Duration::from_millis(20));
    }
    // Nothing is in the way of the next one.
    Agent::start(&edge.netns, OBSERVE)?.terminate()?;
    Ok(())
}

#[test]
fn a_bad_reload_leaves_the_settings_as_they_are() -> Result<()> {
    let (edge, _peer) = edge()?;
    let agent = Agent::start(&edge.netns, OBSERVE)?;
    let enforce = OBSERVE.replace("observe", "enforce");

    let error = agent.reload(&enforce.replace("1000/s", "0/s")).expect_err("the rate is zero");
    assert!(format!("{error:#}").contains("limiter.toml:9"), "names the line: {error:#}");
    let metrics = agent.metrics()?;
    assert!(is_mode("observe")(&metrics));
    assert!(reloads_are_good(false)(&metrics));

    agent.reload(&enforce)?;
    wait_for(&agent, is_mode("enforce"))?;
    wait_for(&agent, reloads_are_good(true))?;

    fs::write(agent.configuration(), "mode = \"sometimes\"")?;
    agent.sighup()?;
    wait_for(&agent, reloads_are_good(false))?;
    assert!(is_mode("enforce")(&agent.metrics()?));

    fs::write(agent.configuration(), OBSERVE)?;
    agent.sighup()?;
    wait_for(&agent, is_mode("observe"))?;
    agent.terminate()?;
    Ok(())
}

#[test]
fn what_waits_for_a_restart_is_said_until_it_waits_no_more() -> Result<()> {
    let (edge, _peer) = edge()?;
    let agent = Agent::start(&edge.netns, OBSERVE)?;
    let metrics = format!("{OBSERVE}[metrics]\nlisten = \"127.0.0.1:9500\"\n");
    let xdp = OBSERVE.replace("\"edge0\"", "\"edge0\"\nxdp = \"auto\"");
    let listen = "[metrics] listen changed: takes effect when the agent restarts";
    let interface = "xdp of interface edge0 changed: takes effect when the agent restarts";
    for (configuration, change) in [
        (metrics.as_str(), listen),
        (&metrics, listen),
        (OBSERVE, "no changes"),
        (&xdp, interface),
        (&xdp, interface),
        (OBSERVE, "no changes"),
    ] {
        fs::write(agent.configuration(), configuration)?;
        let output = agent.command(&["reload"])?;
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said, format!("reloaded\n  {change}\n"), "{configuration}");
    }
    agent.terminate()?;
    Ok(())
}

#[test]
fn an_interface_that_is_gone_is_a_problem_in_the_status() -> Result<()> {
    let (edge, _peer) = edge()?;
    // The agent's start needs one, and what is left needs one to guard.
    let (other, _peer) =
        veth((&edge.netns, "edge1"), (&Netns::new("peer")?, "peer1"), VethOptions::default())?;
    let both = format!("{OBSERVE}[[interface]]\nname = \"edge1\"\n");
    let agent = Agent::start(&edge.netns, &both)?;
    let problems = || -> Result<String> {
        let status = agent.command(&["status", "--json"])?;
        let status: serde_json::Value = serde_json::from_slice(&status.stdout)?;
        Ok(status["problems"].to_string())
    };
    assert_eq!(problems()?, "[]");
    other.netns.ip(&["link", "delete", "dev", "edge1"])?;
    assert_eq!(problems()?, r#"["edge1 is gone"]"#);
    agent.reload(&both)?;
    assert_eq!(problems()?, r#"["edge1 is gone"]"#);
    let text = agent.command(&["status"])?.stdout;
    let text = String::from_utf8_lossy(&text);
    assert!(text.lines().any(|line| line == "problem:  edge1 is gone"), "{text}");
    agent.terminate()?;
    Ok(())
}

#[test]
fn a_wrong_configuration_ends_the_start() -> Result<()> {
    let (edge, _peer) = edge()?;
    let wrong = OBSERVE.replace("edge0", "edge1");
    let error = Agent::start(&edge.netns, &wrong).err().expect("there is no such interface");
    let error = format!("{error:#}");
    assert!(error.contains("edge1"), "{error}");
    assert!(!is_guarded(&edge)?);
    Ok(())
}

/// The same on other kernels.
mod vm {
    use std::{env, time::Duration};

    use anyhow::Result;
    use limiter_tests::{
        agent,
        vm::{Kernel, VmSpec, run_ok},
    };

    fn it_runs_on(kernel: Kernel) -> Result<()> {
        let spec = VmSpec {
            binary: &env::current_exe()?,
            arguments: &["--test-threads=1", "it_attaches", "a_bad_reload"],
            companions: &[agent::binary()?],
            smp: 2,
            timeout: Duration::from_mins(3),
        };
        let output = run_ok(kernel, &spec)?;
        assert!(output.console.contains("test result: ok. 2 passed"), "{}", output.console);
        Ok(())
    }

    #[test]
    fn it_runs_on_6_1() -> Result<()> {
        it_runs_on(Kernel::V6_1)
    }

    #[test]
    fn it_runs_on_6_12() -> Result<()> {
        it_runs_on(Kernel::V6_12)
    }
}

/// Of root's powers the agent keeps on all of its threads what it needs for maps and attachments, with
/// which it still takes up an interface at a reload.
#[test]
fn it_keeps_no_privilege_that_it_does_not_need() -> Result<()> {
    // CAP_NET_ADMIN, CAP_PERFMON and CAP_BPF (`linux/capability.h`).
    const NEEDED: u64 = 1 << 12 | 1 << 38 | 1 << 39;
    let (edge, peer) = edge()?;
    let (more, _) = veth(
        (&edge.netns.clone(), "edge1"),
        (&peer.netns.clone(), "peer1"),
        VethOptions::default(),
    )?;
    let agent = Agent::start(&edge.netns, OBSERVE)?;
    let both = OBSERVE.replace("[[class]]", "[[interface]]\nname = \"edge1\"\n[[class]]");
    agent.reload(&both)?;
    assert!(is_guarded(&more)?);
    for thread in std::fs::read_dir(format!("/proc/{}/task", agent.pid()))? {
        let status = std::fs::read_to_string(thread?.path().join("status"))?;
        for set in ["CapEff:", "CapPrm:"] {
            let line = status.lines().find_map(|line| line.strip_prefix(set)).context("a set")?;
            assert_eq!(u64::from_str_radix(line.trim(), 16)?, NEEDED, "{status}");
        }
    }
    agent.terminate()?;
    Ok(())
}
