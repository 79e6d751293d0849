//! `limiter-agent doctor`: what it finds on hosts that lack something, and that it changes nothing.

use std::{fs, io::Write as _, path::PathBuf, process::Output, time::Duration};

use anyhow::{Context as _, Result, ensure};
use limiter_tests::{
    agent::{self, Agent},
    generator::{Counter, Verdict},
    netns::{Interface, Netns, VethOptions, veth},
    process,
};
use serde_json::Value;
use tempfile::TempDir;

/// A kind of interface that runs programs in generic mode only.
const SOFT: &str = "bridge";

const PATIENCE: Duration = Duration::from_mins(1);

/// A host with a cable to another, and a directory for its files.
struct Host {
    edge: Interface,
    /// The other end.
    peer: Interface,
    directory: TempDir,
}

/// What `doctor --json` said.
struct Report {
    code: Option<i32>,
    json: Value,
}

impl Host {
    fn new(queues: u32) -> Result<Self> {
        let (netns, peer) = (Netns::new("edge")?, Netns::new("peer")?);
        let options = VethOptions { queues, ..VethOptions::default() };
        let (edge, peer) = veth((&netns, "edge0"), (&peer, "peer0"), options)?;
        let directory = tempfile::Builder::new().prefix("limiter-test-").tempdir()?;
        Ok(Self { edge, peer, directory })
    }

    fn doctor(&self, arguments: &[&str]) -> Result<Report> {
        self.doctor_under(&[], arguments)
    }

    /// By way of a command that becomes the agent.
    fn doctor_under(&self, wrapper: &[&str], arguments: &[&str]) -> Result<Report> {
        let arguments = [arguments, &["--json"]].concat();
        let output = self.output(wrapper, &arguments)?;
        let json = serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))?;
        ensure!(output.stderr.is_empty(), "{output:?}");
        Ok(Report { code: output.status.code(), json })
    }

    fn output(&self, wrapper: &[&str], arguments: &[&str]) -> Result<Output> {
        let binary = agent::binary()?;
        let binary = binary.to_str().context("the path is UTF-8")?;
        let words = [wrapper, &[binary, "doctor"], arguments].concat();
        let mut command = self.edge.netns.command(words[0]);
        process::output(command.args(&words[1..]), PATIENCE)
    }

    fn configuration(&self, text: &str) -> Result<PathBuf> {
        let path = self.directory.path().join("limiter.toml");
        fs::write(&path, text)?;
        Ok(path)
    }
}

impl Report {
    /// The only check of this name about `subject`.
    fn check(&self, name: &str, subject: Option<&str>) -> &Value {
        let checks = self.json["checks"].as_array().expect("checks is a list");
        let mut found =
            checks.iter().filter(|it| it["name"] == name && it["subject"].as_str() == subject);
        let check = found.next().unwrap_or_else(|| panic!("no {name}: {}", self.json));
        assert!(found.next().is_none(), "two of {name}: {}", self.json);
        assert_eq!(check["status"] == "ok", check["fix"].is_null(), "{check}");
        check
    }

    fn status(&self, name: &str, subject: Option<&str>) -> &str {
        self.check(name, subject)["status"].as_str().expect("status is a text")
    }

    /// The names of the checks that failed.
    fn failed(&self) -> Vec<&str> {
        let checks = self.json["checks"].as_array().expect("checks is a list");
        let failed = checks.iter().filter(|it| it["status"] == "failed");
        let failed: Vec<_> = failed.filter_map(|it| it["name"].as_str()).collect();
        assert_eq!(self.json["failed"], failed.len(), "{}", self.json);
        assert_eq!(self.code, Some(if failed.is_empty() { 0 } else { 3 }), "{}", self.json);
        failed
    }
}

fn guarding(name: &str, sources: u32) -> String {
    format!(
        "[table]\nipv4_sources = {sources}\nipv6_sources = {sources}\n\
         [[interface]]\nname = \"{name}\"\n\
         [[class]]\nname = \"rest\"\npackets = {{ rate = \"1000/s\", burst = 1000 }}\n"
    )
}

#[test]
fn a_veth_interface_is_found_fit_and_left_alone() -> Result<()> {
    let host = Host::new(2)?;
    let links = || host.edge.netns.ip(&["link", "show"]);
    let before = links()?;
    let report = host.doctor(&["--iface", "edge0"])?;
    assert_eq!(report.failed(), [""; 0], "{}", report.json);
    for name in ["kernel", "capabilities", "bpffs", "clock", "memory"] {
        assert_eq!(report.status(name, None), "ok", "{}", report.json);
    }
    for name in ["interface", "mtu", "program", "vlan-offload", "membership"] {
        assert_eq!(report.status(name, Some("edge0")), "ok", "{}", report.json);
    }
    let driver = report.check("driver", Some("edge0"))["finding"].as_str().context("text")?;
    assert!(driver.starts_with("veth; "), "{driver}");
    assert_eq!(links()?, before);

    // Text says the same, and without a name it looks at all but loopback.
    let text = host.output(&[], &[])?;
    assert_eq!(text.status.code(), Some(0), "{text:?}");
    let text = String::from_utf8(text.stdout)?;
    assert!(text.contains("ok       edge0 interface: up, index "), "{text}");
    assert!(!text.contains(" lo "), "{text}");
    assert!(text.contains("\nfailed: 0, "), "{text}");
    Ok(())
}

#[test]
fn interfaces_are_those_of_the_configuration() -> Result<()> {
    let host = Host::new(2)?;
    let file = host.configuration(&guarding("eth*", 1024))?;
    let file = file.to_str().context("ASCII")?;
    let report = host.doctor(&["--config", file])?;
    assert_eq!(report.failed(), ["interface"]);
    let check = report.check("interface", Some("eth*"));
    assert!(check["finding"].as_str().is_some_and(|it| it.contains("edge0")), "{check}");
    // The command line outranks it.
    let report = host.doctor(&["--config", file, "--iface", "edge0", "eth7"])?;
    assert_eq!(report.failed(), ["interface"]);
    assert_eq!(report.status("interface", Some("edge0")), "ok");
    assert_eq!(report.status("interface", Some("eth7")), "failed");

    host.configuration("mode = 1")?;
    let report = host.doctor(&["--config", file])?;
    assert_eq!(report.failed(), ["configuration"]);
    let report = host.doctor(&["--config", "/nonexistent/limiter.toml"])?;
    assert_eq!(report.failed(), ["configuration"]);
    Ok(())
}

#[test]
fn a_foreign_program_fails_and_our_own_does_not() -> Result<()> {
    let host = Host::new(2)?;
    let counter = Counter::attach(&host.edge, Verdict::Pass)?;
    let report = host.doctor(&["--iface", "edge0"])?;
    assert_eq!(report.failed(), ["program"]);
    let check = report.check("program", Some("edge0"));
    assert!(
        check["finding"].as_str().is_some_and(
            |it| it.contains("somebody else attached: id ") && it.ends_with("named count_pass")
        ) && check["fix"].as_str().is_some_and(|it| it.contains("bpftool link detach")),
        "{check}"
    );
    drop(counter);

    let agent = Agent::start(&host.edge.netns, &guarding("edge0", 1024))?;
    let report = host.doctor(&["--iface", "edge0"])?;
    assert_eq!(report.failed(), [""; 0]);
    assert_eq!(report.status("program", Some("edge0")), "ok");
    drop(agent);
    Ok(())
}

/// What `doctor` fails, `run` refuses.
#[test]
fn a_device_with_generic_xdp_only_is_refused_and_taken_in_generic_mode() -> Result<()> {
    let host = Host::new(2)?;
    let netns = &host.edge.netns;
    netns.ip(&["link", "add", "soft0", "type", SOFT])?;
    netns.ip(&["link", "set", "dev", "soft0", "up"])?;
    let Err(refusal) = Agent::start(netns, &guarding("soft0", 1024)) else {
        panic!("the kernel takes it")
    };
    let said = format!("{refusal:#}");
    assert!(said.contains("native XDP on soft0 refused by driver bridge (EOPNOTSUPP): "), "{said}");
    assert!(said.contains("set xdp = \"generic\" (slower) or \"auto\""), "{said}");
    for xdp in ["generic", "auto"] {
        let agent = Agent::start(netns, &guarding(&format!("soft0\"\nxdp = \"{xdp}"), 1024))?;
        let labels = [("interface", "soft0"), ("mode", "generic"), ("driver", SOFT)];
        assert!((agent.metrics()?.sum("limiter_interface_info", &labels) - 1.0).abs() < 0.5);
        agent.terminate()?;
    }
    Ok(())
}

/// Without the right to read names, it does not take an agent's program for a stranger's.
#[test]
fn what_it_may_not_see_is_said_and_not_guessed() -> Result<()> {
    let host = Host::new(2)?;
    let agent = Agent::start(&host.edge.netns, &guarding("edge0", 1024))?;
    let blind = ["setpriv", "--bounding-set=-sys_admin"];
    let report = host.doctor_under(&blind, &["--iface", "edge0"])?;
    assert_eq!(report.failed(), [""; 0]);
    let check = report.check("program", Some("edge0"));
    assert_eq!(check["status"], "warning", "{check}");
    assert!(
        check["finding"].as_str().is_some_and(|it| it.ends_with("without CAP_SYS_ADMIN")),
        "{check}"
    );
    drop(agent);
    Ok(())
}

#[test]
fn a_small_memlock_is_said_to_be_no_trouble() -> Result<()> {
    let host = Host::new(2)?;
    let report = host.doctor_under(&["prlimit", "--memlock=65536"], &["--iface", "edge0"])?;
    assert_eq!(report.failed(), [""; 0]);
    let check = report.check("memlock", None);
    assert_eq!(check["status"], "ok", "{check}");
    assert!(
        check["finding"]
            .as_str()
            .is_some_and(|it| it.starts_with("65536 bytes; it does not matter")),
        "{check}"
    );
    // Nor does it to `run`.
    let agent = Agent::start_under(
        &["prlimit", "--memlock=0"],
        &host.edge.netns,
        &guarding("edge0", 1024),
    )?;
    agent.terminate()?;
    Ok(())
}

#[test]
fn merging_is_warned_of_where_the_program_would_see_it() -> Result<()> {
    let host = Host::new(2)?;
    host.edge.set_gro(true)?;
    for (xdp, status) in [("native", "ok"), ("generic", "warning")] {
        let name = format!("edge0\"\nxdp = \"{xdp}");
        let file = host.configuration(&guarding(&name, 1024))?;
        let report = host.doctor(&["--config", file.to_str().context("ASCII")?])?;
        assert_eq!(report.status("gro", Some("edge0")), status, "{}", report.json);
    }
    Ok(())
}

#[test]
fn missing_privileges_and_file_systems_are_named() -> Result<()> {
    let host = Host::new(2)?;
    let powerless = ["setpriv", "--bounding-set=-sys_admin,-bpf,-net_admin"];
    let report = host.doctor_under(&powerless, &["--iface", "edge0"])?;
    assert_eq!(report.failed(), ["capabilities"]);
    let check = report.check("capabilities", None);
    assert!(
        check["finding"]
            .as_str()
            .is_some_and(|it| it.starts_with("missing CAP_BPF and CAP_NET_ADMIN:"))
            && check["fix"].as_str().is_some_and(|it| it.starts_with("run as root")),
        "{check}"
    );

    let cover = "mount -t tmpfs none /sys/fs/bpf && exec \"$@\"";
    let report =
        host.doctor_under(&["unshare", "--mount", "sh", "-c", cover, "sh"], &["--iface", "edge0"])?;
    assert_eq!(report.failed(), ["bpffs"]);
    let fix = report.check("bpffs", None)["fix"].as_str().context("text")?;
    assert!(fix.starts_with("mount -t bpf bpf /sys/fs/bpf"), "{fix}");

    // Without cgroups the agent runs, so that is a warning.
    let remove = "umount --lazy /sys/fs/cgroup && exec \"$@\"";
    let report = host
        .doctor_under(&["unshare", "--mount", "sh", "-c", remove, "sh"], &["--iface", "edge0"])?;
    assert_eq!(report.failed(), [""; 0]);
    assert_eq!(report.status("cgroup", None), "warning");
    Ok(())
}

#[test]
fn what_an_interface_lacks_is_found_as_the_kernel_has_it() -> Result<()> {
    let host = Host::new(2)?;
    let netns = &host.edge.netns;
    for mtu in ["8901", "9000"] {
        for (end, name) in [(netns, "edge0"), (&host.peer.netns, "peer0")] {
            end.ip(&["link", "set", "dev", name, "mtu", mtu])?;
        }
        let report = host.doctor(&["--iface", "edge0"])?;
        let check = report.check("mtu", Some("edge0"));
        assert_ne!(check["status"], "failed", "{check}");
        assert!(check["finding"].as_str().is_some_and(|it| it.starts_with(mtu)), "{check}");
    }
    netns.ip(&["link", "add", "few0", "type", "veth", "peer", "name", "few1"])?;
    netns.ip(&["link", "add", "soft0", "type", SOFT])?;
    let report = host.doctor(&["--iface", "edge0", "few0", "lo", "soft0"])?;

    assert_eq!(report.status("interface", Some("few0")), "warning");
    let queues = report.check("queues", Some("few0"));
    let is_single = std::thread::available_parallelism()?.get() == 1;
    assert_eq!(queues["status"], if is_single { "ok" } else { "warning" }, "{queues}");
    // These have no native XDP. Where the kernel does not say so, doctor does not guess.
    let is_known = report.status("driver", Some("edge0")) == "ok";
    for name in ["lo", "soft0"] {
        let driver = report.check("driver", Some(name));
        assert_eq!(driver["status"], if is_known { "failed" } else { "warning" }, "{driver}");
    }
    Ok(())
}

#[test]
fn tables_that_do_not_fit_fail() -> Result<()> {
    let host = Host::new(2)?;
    let file = host.configuration(&guarding("edge0", 16_777_216))?;
    let available = limiter_agent::host::available_memory().context("MemAvailable")?;
    let report = host.doctor(&["--config", file.to_str().context("ASCII")?])?;
    let check = report.check("memory", None);
    // Some 1.3 GiB; near it, what is available may change between the two readings.
    if available > 2 << 30 {
        assert_eq!(check["status"], "ok", "{check}");
    } else if available < 1 << 30 {
        assert_eq!(check["status"], "failed", "{check}");
    }
    Ok(())
}

#[test]
fn a_vlan_is_sent_to_the_interface_below() -> Result<()> {
    let host = Host::new(2)?;
    let vlan = ["link", "add", "link", "edge0", "name", "edge0.7", "type", "vlan", "id", "7"];
    if host.edge.netns.ip(&vlan).is_err() {
        return leave_to_vms("this kernel has no VLANs");
    }
    let report = host.doctor(&["--iface", "edge0", "edge0.7"])?;
    assert_eq!(report.status("vlan-offload", Some("edge0")), "warning", "{}", report.json);
    let check = report.check("membership", Some("edge0.7"));
    assert!(check["fix"].as_str().is_some_and(|it| it.starts_with("guard edge0:")), "{check}");
    Ok(())
}

#[test]
fn a_member_of_a_bond_is_told_of_it() -> Result<()> {
    let host = Host::new(2)?;
    let netns = &host.edge.netns;
    if netns.ip(&["link", "add", "bond0", "type", "bond"]).is_err() {
        return leave_to_vms("this kernel has no bonds");
    }
    netns.ip(&["link", "add", "leg0", "type", "veth", "peer", "name", "leg1"])?;
    for name in ["edge0", "leg0"] {
        netns.ip(&["link", "set", "dev", name, "down"])?;
        netns.ip(&["link", "set", "dev", name, "master", "bond0"])?;
    }
    let report = host.doctor(&["--iface", "edge0"])?;
    let check = report.check("membership", Some("edge0"));
    assert_eq!(check["status"], "warning", "{check}");
    assert!(check["fix"].as_str().is_some_and(|it| it.contains("bond0")), "{check}");
    Ok(())
}

/// The tests that need what this kernel may lack, on kernels that have it.
mod vm {
    use std::{env, time::Duration};

    use anyhow::Result;
    use limiter_tests::{
        agent,
        vm::{Kernel, VmSpec, run_ok},
    };

    fn vlans_and_bonds_are_known_on(kernel: Kernel) -> Result<()> {
        let spec = VmSpec {
            binary: &env::current_exe()?,
            arguments: &["--test-threads=1", "a_vlan_is_sent", "a_member_of_a_bond"],
            companions: &[agent::binary()?],
            smp: 2,
            timeout: Duration::from_mins(3),
        };
        let output = run_ok(kernel, &spec)?;
        let console = output.console;
        assert!(console.contains("test result: ok. 2 passed"), "{console}");
        assert!(!console.contains(super::LEFT), "{console}");
        Ok(())
    }

    #[test]
    fn vlans_and_bonds_are_known_on_6_1() -> Result<()> {
        vlans_and_bonds_are_known_on(Kernel::V6_1)
    }

    #[test]
    fn vlans_and_bonds_are_known_on_6_12() -> Result<()> {
        vlans_and_bonds_are_known_on(Kernel::V6_12)
    }
}

/// What this kernel lacks is checked in VMs all the same, so nothing is skipped. Past the capture of the
/// test runner.
fn leave_to_vms(why: &str) -> Result<()> {
    writeln!(std::io::stdout(), "{LEFT}doctor: {why}")?;
    Ok(())
}

const LEFT: &str = "left to the VMs: ";
