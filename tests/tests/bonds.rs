//! A guarded bond: the kernel runs the program on its members, and their packets are the bond's. This
//! needs a kernel with bonds, so it runs in VMs too.

use std::{io::Write as _, time::Duration};

use anyhow::{Result, ensure};
use limiter_tests::{
    agent::Agent,
    frames,
    generator::{Flood, Generator},
    netns::{Netns, VethOptions, veth},
};

const CONFIGURATION: &str = r#"
mode = "enforce"
[[interface]]
name = "bond0"
[table]
ipv4_sources = 1024
ipv6_sources = 1024
[[class]]
name = "rest"
packets = { rate = "1/m", burst = 10 }
[[exempt]]
cidr = "10.20.0.0/16"
interface = "bond0"
owner = "test"
"#;

const LEFT: &str = "left to the VMs: ";

#[test]
fn what_comes_in_by_a_member_is_the_bonds() -> Result<()> {
    let (edge, peer) = (Netns::new("edge")?, Netns::new("peer")?);
    let bond = ["link", "add", "bond0", "type", "bond", "mode", "active-backup"];
    if edge.ip(&bond).is_err() {
        // Checked there all the same, so nothing is skipped. Past the capture of the test runner.
        writeln!(std::io::stdout(), "{LEFT}bonds: this kernel has none")?;
        return Ok(());
    }
    let legs = [("leg0", "far0"), ("leg1", "far1")];
    let mut far_ends = Vec::new();
    for (near, far) in legs {
        let (_, far) = veth((&edge, near), (&peer, far), VethOptions::default())?;
        edge.ip(&["link", "set", "dev", near, "down"])?;
        edge.ip(&["link", "set", "dev", near, "master", "bond0"])?;
        edge.ip(&["link", "set", "dev", near, "up"])?;
        far_ends.push(far);
    }
    edge.ip(&["link", "set", "dev", "bond0", "up"])?;

    let agent = Agent::start(&edge, CONFIGURATION)?;
    let mut sent = 0;
    for (far, source) in far_ends.iter().flat_map(|far| [(far, "192.0.2.1"), (far, "10.20.0.1")]) {
        let path = frames::Path {
            source_mac: far.mac,
            destination_mac: [0xff; 6],
            source: format!("{source}:4000").parse()?,
            destination: "192.0.2.2:9".parse()?,
        };
        let flood = Flood::new(frames::udp(&path, 18), 200.0, Duration::from_secs(5)).frames(20);
        let arrived = Generator::new(far)?.flood(&flood)?.arrived();
        ensure!(arrived == 20, "{arrived} arrived");
        sent += arrived;
    }
    let metrics = agent.metrics()?;
    let count = |labels: &[(&str, &str)]| metrics.sum("limiter_packets_total", labels);
    // One bucket for both members; what is exempt on the bond is so on them.
    for (reason, expected) in
        [("conform", 9.0), ("near_limit", 1.0), ("packet_rate", 30.0), ("exempt", 40.0)]
    {
        let counted = count(&[("interface", "bond0"), ("class", "rest"), ("reason", reason)]);
        assert!((counted - expected).abs() < 0.5, "{reason}: {counted} of {sent}");
    }
    assert!(count(&[("interface", "unknown")]).abs() < 0.5);
    agent.terminate()?;
    Ok(())
}

mod vm {
    use std::{env, time::Duration};

    use anyhow::Result;
    use limiter_tests::{
        agent,
        vm::{Kernel, VmSpec, run_ok},
    };

    fn a_bond_is_one_interface_on(kernel: Kernel) -> Result<()> {
        let spec = VmSpec {
            binary: &env::current_exe()?,
            arguments: &["--exact", "what_comes_in_by_a_member_is_the_bonds"],
            companions: &[agent::binary()?],
            smp: 2,
            timeout: Duration::from_mins(3),
        };
        let output = run_ok(kernel, &spec)?;
        let console = output.console;
        assert!(console.contains("test result: ok. 1 passed"), "{console}");
        assert!(!console.contains(super::LEFT), "{console}");
        Ok(())
    }

    #[test]
    fn a_bond_is_one_interface_on_6_1() -> Result<()> {
        a_bond_is_one_interface_on(Kernel::V6_1)
    }

    #[test]
    fn a_bond_is_one_interface_on_6_12() -> Result<()> {
        a_bond_is_one_interface_on(Kernel::V6_12)
    }
}
