//! What stands between the flood and the host: nothing, the floor, limiter, and its peers.

use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use aya::{Ebpf, programs::XdpMode};
use limiter_agent::datapath::Datapath;
use limiter_common::Family;

use crate::{
    config::{SHIPPED_LIMIT, SHIPPED_SOURCES, Shipped, now},
    runner::{self, FORGED_IPV4, FORGED_IPV6, program},
    stage::{CLIENTS, From, Stage, Standing},
};

/// A filter that floods are measured against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filter {
    Nothing,
    /// An XDP program that knows the flood by its port.
    Floor,
    Limiter,
    /// A dynamic set of `limit` in the netdev hook.
    Nftables,
    /// In the raw table, the earliest there is.
    Hashlimit,
    /// xdp-filter, with the flood's one source on its list.
    StaticDeny,
}

/// What was installed, as long as it is held. Rules go with the namespace.
pub(crate) enum Installed {
    Rules,
    Program(#[expect(dead_code, reason = "held for its attachment")] Ebpf),
    Limiter(Box<Datapath>),
}

impl Filter {
    pub(crate) const ALL: [Self; 6] = [
        Self::Nothing,
        Self::Floor,
        Self::Limiter,
        Self::Nftables,
        Self::Hashlimit,
        Self::StaticDeny,
    ];
    /// In a quick run, and for IPv6.
    pub(crate) const FEW: [Self; 3] = [Self::Floor, Self::Limiter, Self::Nftables];

    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Nothing => "no filter",
            Self::Floor => "XDP_DROP by port (floor)",
            Self::Limiter => "limiter",
            Self::Nftables => "nftables netdev set",
            Self::Hashlimit => "iptables hashlimit",
            Self::StaticDeny => "xdp-filter, static deny",
        }
    }

    /// Why it cannot be measured against such a flood here.
    pub(crate) fn obstacle(self, from: From) -> Option<String> {
        let program = match self {
            Self::Nothing | Self::Floor | Self::Limiter => return None,
            Self::Nftables => "nft",
            Self::Hashlimit => "iptables",
            Self::StaticDeny if from != From::One => {
                return Some("a static list names one source at a time".into());
            }
            Self::StaticDeny => "xdp-filter",
        };
        let found = Command::new(program)
            .arg("--help")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        found.err().map(|error| format!("{program}: {error}"))
    }

    /// Puts it in force on the guarded interface.
    pub(crate) fn install(self, stage: &Stage) -> Result<Installed> {
        let inside = &stage.inside;
        let (rate, burst) = SHIPPED_LIMIT;
        let is_v4 = stage.family == Family::Ipv4;
        match self {
            Self::Nothing => return attach(stage, "pass"),
            Self::Floor => return attach(stage, "floor_port"),
            Self::Limiter => return limiter(stage),
            Self::Nftables => {
                let (kind, key) = if is_v4 {
                    ("ipv4_addr", "ip saddr")
                } else {
                    ("ipv6_addr", "ip6 saddr & ffff:ffff:ffff:ffff::")
                };
                let rules = format!(
                    "table netdev bench {{\n\
                     set sources {{ type {kind}; size {SHIPPED_SOURCES}; flags dynamic,timeout; timeout 10s; }}\n\
                     chain ingress {{ type filter hook ingress device \"{}\" priority 0; policy accept;\n\
                     update @sources {{ {key} limit rate over {rate}/second burst {burst} packets }} drop\n\
                     }}\n}}\n",
                    inside.name
                );
                run(stage, &["nft", &rules])?;
                return attach(stage, "pass");
            }
            Self::Hashlimit => {
                let program = if is_v4 { "iptables" } else { "ip6tables" };
                let (above, burst) = (format!("{rate}/second"), burst.to_string());
                let most = SHIPPED_SOURCES.to_string();
                let mask = if is_v4 { "32" } else { "64" };
                run(
                    stage,
                    &[
                        program,
                        "-t",
                        "raw",
                        "-A",
                        "PREROUTING",
                        "-p",
                        "udp",
                        "-m",
                        "hashlimit",
                        "--hashlimit-name",
                        "bench",
                        "--hashlimit-mode",
                        "srcip",
                        "--hashlimit-srcmask",
                        mask,
                        "--hashlimit-above",
                        &above,
                        "--hashlimit-burst",
                        &burst,
                        "--hashlimit-htable-size",
                        "524288",
                        "--hashlimit-htable-max",
                        &most,
                        "--hashlimit-htable-expire",
                        "10000",
                        "-j",
                        "DROP",
                    ],
                )?;
                return attach(stage, "pass");
            }
            Self::StaticDeny => {
                let name = &inside.name;
                let source = if is_v4 {
                    std::net::Ipv4Addr::from(FORGED_IPV4).to_string()
                } else {
                    std::net::Ipv6Addr::from(u128::from(FORGED_IPV6) << 64 | 1).to_string()
                };
                // What it pins lies in a bpffs of its own, which goes with the shell.
                let script = format!(
                    "mount -t bpf bpf /sys/fs/bpf && xdp-filter load --mode native --policy allow {name} \
                     && xdp-filter ip --mode src {source}"
                );
                run(stage, &["unshare", "--mount", "sh", "-c", &script])?;
            }
        }
        Ok(Installed::Rules)
    }
}

/// Attaches one of the benchmark's own programs.
fn attach(stage: &Stage, name: &str) -> Result<Installed> {
    let mut ebpf = Ebpf::load(runner::OBJECT)?;
    let program = program(&mut ebpf, name)?;
    program.load()?;
    let inside = &stage.inside;
    inside
        .netns
        .run(|| program.attach_to_if_index(inside.index, XdpMode::Driver))
        .with_context(|| format!("attaching {name}"))?;
    Ok(Installed::Program(ebpf))
}

/// Limiter as shipped, enforcing, with the clients proven that are to be.
fn limiter(stage: &Stage) -> Result<Installed> {
    let inside = &stage.inside;
    let plan = Shipped::on(&inside.name)?.plan(&inside.name, inside.index)?;
    let mut datapath = Datapath::load(&plan)?;
    let own = inside.netns.run(limiter_agent::host::addresses);
    datapath.own(&own)?;
    for number in 0..CLIENTS {
        datapath.prove(stage.client(Standing::Proven, number).into(), now()?);
    }
    inside.netns.run(|| plan.interfaces.iter().try_for_each(|it| datapath.attach(it).map(drop)))?;
    Ok(Installed::Limiter(Box::new(datapath)))
}

/// Runs a program in the guarded host's namespace.
fn run(stage: &Stage, words: &[&str]) -> Result<()> {
    let output = stage
        .inside
        .netns
        .command(words[0])
        .args(&words[1..])
        .output()
        .with_context(|| words[0].to_owned())?;
    ensure!(
        output.status.success(),
        "{}: {}",
        words.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}
