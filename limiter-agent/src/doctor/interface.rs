//! What is asked about one interface. Pure: what was read is in [`Seen`].

use limiter_common::abi::PROGRAM;

use super::report::{Outcome, Status};
use crate::config::Xdp;
use crate::host::{Link, Offloads, XdpFeatures, other_mode, unclaimed};

/// The largest MTU whose frames surely fit one buffer: a page without the room in front of a packet
/// (`XDP_PACKET_HEADROOM`), the `skb_shared_info` behind it, the Ethernet header and two VLAN tags.
const ONE_BUFFER: u32 = 4096 - 256 - 320 - 14 - 8;

/// What was read of an interface, and of the host around it.
pub(super) struct Seen<'a> {
    pub(super) link: &'a Link,
    /// All interfaces.
    pub(super) links: &'a [Link],
    /// How the program is to be attached.
    pub(super) xdp: Xdp,
    /// The configuration, where `xdp` is set.
    pub(super) file: &'a str,
    /// None if it has none or does not say.
    pub(super) driver: Option<String>,
    /// None if the kernel does not say.
    pub(super) features: Option<XdpFeatures>,
    /// None if the kernel does not say.
    pub(super) offloads: Option<Offloads>,
    /// Receive queues in use.
    pub(super) queues: u32,
    pub(super) cpus: usize,
    /// The name of the XDP program that is attached, if it has one that can be read.
    pub(super) program: Option<String>,
    /// Whether names of programs can be read at all.
    pub(super) sees_programs: bool,
    /// Whether the interface of this name is to be guarded as well.
    pub(super) is_guarded: &'a dyn Fn(&str) -> bool,
}

/// All checks, by their names.
pub(super) fn checks(seen: &Seen<'_>) -> Vec<(&'static str, Outcome)> {
    let mut checks = vec![
        ("interface", state(seen.link)),
        ("driver", driver(seen)),
        ("mtu", mtu(seen)),
        ("program", program(seen)),
        ("queues", queues(seen)),
    ];
    if let Some(offloads) = seen.offloads {
        // Without hardware nothing is merged, whatever the flag says (a bond's is always on).
        if !seen.link.is_virtual() {
            checks.push(("lro", lro(seen.link, offloads)));
        }
        checks.push(("gro", gro(seen, offloads)));
        checks.push(("vlan-offload", vlan_offload(seen, offloads)));
    }
    checks.push(("membership", membership(seen)));
    checks
}

fn state(Link { name, ifindex, is_up, .. }: &Link) -> Outcome {
    if *is_up {
        return Outcome::ok(format!("up, index {ifindex}"));
    }
    Outcome::warning("down: nothing arrives", format!("ip link set dev {name} up"))
}

fn driver(seen: &Seen<'_>) -> Outcome {
    let driver = seen.driver.as_deref().unwrap_or("of unknown name");
    match (seen.xdp, seen.features) {
        (Xdp::Generic, _) => Outcome::ok(format!("{driver}; generic XDP asks nothing of it")),
        (_, Some(XdpFeatures { native: true, .. })) => {
            Outcome::ok(format!("{driver}; it has native XDP"))
        }
        (_, Some(_)) => Outcome::new(
            seen.refusal(),
            format!(
                "{driver}; it does not tell the kernel of native XDP, with its present settings"
            ),
            other_mode(&seen.link.name, seen.file),
        ),
        (_, None) => Outcome::warning(
            format!(
                "{driver}; whether it has native XDP cannot be known here (Linux 6.3 and newer say)"
            ),
            "`limiter-agent run` finds out; with xdp = \"auto\" it goes on if not",
        ),
    }
}

fn mtu(seen: &Seen<'_>) -> Outcome {
    let Link { name, mtu, .. } = seen.link;
    if *mtu <= ONE_BUFFER {
        return Outcome::ok(format!("{mtu}; a frame fits one buffer"));
    }
    let fix = format!("ip link set dev {name} mtu 1500, or {}", other_mode(name, seen.file));
    match (seen.xdp, seen.features) {
        (Xdp::Generic, _) => Outcome::ok(format!("{mtu}; generic XDP takes any")),
        (_, Some(XdpFeatures { frags: true, .. })) => {
            Outcome::ok(format!("{mtu}; the driver's XDP takes frames of several buffers"))
        }
        (_, Some(_)) => Outcome::new(
            seen.refusal(),
            format!(
                "{mtu}; above {ONE_BUFFER} frames may take several buffers, and the driver does \
                     not tell the kernel of XDP for such"
            ),
            fix,
        ),
        (_, None) => Outcome::warning(
            format!(
                "{mtu}; above {ONE_BUFFER} frames may take several buffers, and whether the \
                     driver's XDP takes such cannot be known here (Linux 6.3 and newer say)"
            ),
            fix,
        ),
    }
}

fn program(seen: &Seen<'_>) -> Outcome {
    let id = seen.link.program.unwrap_or_default();
    match unclaimed(seen.link, |_| seen.program.clone()) {
        Ok(()) => Outcome::ok("no XDP program is attached"),
        Err(_) if seen.program.as_deref() == Some(PROGRAM) => {
            Outcome::ok(format!("a limiter-agent's own is attached, id {id}"))
        }
        Err(_) if seen.program.is_none() && !seen.sees_programs => Outcome::warning(
            format!(
                "an XDP program is attached, id {id}; whether it is a limiter-agent's own cannot be \
                 known without CAP_SYS_ADMIN"
            ),
            format!(
                "run this as root; `limiter-agent status` says whether an agent guards {}",
                seen.link.name
            ),
        ),
        Err(claimed) => Outcome::said(Status::Failed, &claimed),
    }
}

fn queues(seen: &Seen<'_>) -> Outcome {
    let (name, queues, cpus) = (&seen.link.name, seen.queues, seen.cpus);
    if matches!(seen.link.kind.as_deref(), Some("bond" | "vlan")) {
        return Outcome::ok("those of the interfaces below it");
    }
    if queues == 1 && cpus > 1 {
        return Outcome::warning(
            format!("1 receive queue: one of {cpus} CPUs takes all packets"),
            format!(
                "`ethtool -l {name}` shows how many there can be, `ethtool -L {name} combined N` \
                     (or rx N) sets them"
            ),
        );
    }
    Outcome::ok(format!("receive queues: {queues}; CPUs: {cpus}"))
}

fn lro(Link { name, .. }: &Link, offloads: Offloads) -> Outcome {
    if !offloads.merges {
        return Outcome::ok("off");
    }
    Outcome::warning(
        "on: many drivers refuse native XDP, and what is merged counts as one packet",
        format!("ethtool -K {name} lro off"),
    )
}

/// Native XDP comes before GRO, but for that in the NIC; generic XDP comes after it.
fn gro(seen: &Seen<'_>, offloads: Offloads) -> Outcome {
    let name = &seen.link.name;
    if offloads.merges_in_hardware {
        return Outcome::warning(
            "on in the NIC: what it merges counts as one packet, and many drivers refuse native XDP",
            format!("ethtool -K {name} rx-gro-hw off"),
        );
    }
    match seen.xdp {
        Xdp::Generic if offloads.merges_behind => Outcome::warning(
            "on: generic XDP sees what was merged, which counts as one packet",
            format!("ethtool -K {name} gro off"),
        ),
        Xdp::Native | Xdp::Auto if offloads.merges_behind => {
            Outcome::ok("on: it merges behind native XDP, which sees each packet")
        }
        Xdp::Native | Xdp::Auto | Xdp::Generic => Outcome::ok("off"),
    }
}

fn vlan_offload(seen: &Seen<'_>, offloads: Offloads) -> Outcome {
    let Link { name, ifindex, .. } = seen.link;
    if !offloads.strips_vlan {
        return Outcome::ok("off: XDP sees VLAN tags");
    }
    let vlans = seen.links.iter().filter(|it| is_vlan(it) && it.below == Some(*ifindex));
    let vlans = names(vlans);
    if vlans.is_empty() {
        return Outcome::ok("on; no VLAN lies on it");
    }
    Outcome::warning(
        format!(
            "on: VLAN tags may be taken off before XDP sees them, and then do not count as \
                 bytes ({vlans})"
        ),
        format!("ethtool -K {name} rxvlan off"),
    )
}

fn membership(seen: &Seen<'_>) -> Outcome {
    let link = seen.link;
    let name_of = |index| {
        let found = seen.links.iter().find(|it| Some(it.ifindex) == index);
        found.map_or("another network namespace", |it| &it.name)
    };
    if is_vlan(link) {
        let below = name_of(link.below);
        return Outcome::warning(
            format!("a VLAN on {below}: its packets have cost an skb by the time they are here"),
            format!("guard {below}: the program looks behind VLAN tags"),
        );
    }
    let Some(bond) = link.bond else {
        return Outcome::ok("neither a VLAN nor a member of a bond");
    };
    let members: Vec<_> = seen.links.iter().filter(|it| it.bond == Some(bond)).collect();
    let bond = name_of(Some(bond));
    if members.iter().all(|it| (seen.is_guarded)(&it.name)) {
        return Outcome::ok(format!("a member of {bond}, all of whose members are guarded"));
    }
    Outcome::warning(
        format!("a member of {bond}: what arrives by its other members is not limited"),
        format!("guard the bond, {bond}, or all of {}", names(members.into_iter())),
    )
}

fn is_vlan(link: &Link) -> bool {
    link.kind.as_deref() == Some("vlan")
}

fn names<'a>(links: impl Iterator<Item = &'a Link>) -> String {
    links.map(|it| it.name.as_str()).collect::<Vec<_>>().join(", ")
}

impl Seen<'_> {
    /// How bad it is that the driver does not say that it can. That it cannot is certain only of the
    /// kernel's own drivers; those of a vendor may not say it and yet can, and so may a bond of such.
    fn refusal(&self) -> Status {
        let is_bond = self.link.kind.as_deref() == Some("bond");
        if self.xdp == Xdp::Native && self.link.is_virtual() && !is_bond {
            Status::Failed
        } else {
            Status::Warning
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::RealMode;

    const ALL: XdpFeatures = XdpFeatures { native: true, frags: true };

    fn link(name: &str, ifindex: u32) -> Link {
        Link { name: name.to_owned(), ifindex, mtu: 1500, is_up: true, ..Link::default() }
    }

    fn seen(links: &[Link], xdp: Xdp, features: Option<XdpFeatures>) -> Seen<'_> {
        Seen {
            link: &links[0],
            links,
            xdp,
            file: "limiter.toml",
            driver: Some("e1000e".to_owned()),
            features,
            offloads: Some(Offloads::default()),
            queues: 2,
            cpus: 2,
            program: None,
            sees_programs: true,
            is_guarded: &|name| name == "eth0",
        }
    }

    #[test]
    fn a_good_interface_has_no_fix() {
        let links = [link("eth0", 2)];
        for (name, outcome) in checks(&seen(&links, Xdp::Native, Some(ALL))) {
            assert_eq!((outcome.status, outcome.fix), (Status::Ok, None), "{name}");
        }
    }

    #[test]
    fn what_cannot_be_known_of_a_driver_is_a_warning() {
        let mut links = [Link { mtu: 9000, ..link("eth0", 2) }];
        for features in [None, Some(XdpFeatures::default())] {
            for check in [driver, mtu] {
                let of = |links: &[Link], xdp| check(&seen(links, xdp, features)).status;
                assert_eq!(of(&links, Xdp::Native), Status::Warning, "{features:?}");
                assert_eq!(of(&links, Xdp::Generic), Status::Ok, "{features:?}");
            }
        }
        // The kernel's own drivers say what they can.
        links[0].kind = Some("dummy".to_owned());
        for check in [driver, mtu] {
            let of = |xdp| check(&seen(&links, xdp, Some(XdpFeatures::default()))).status;
            assert_eq!((of(Xdp::Native), of(Xdp::Auto)), (Status::Failed, Status::Warning));
        }
        assert_eq!(mtu(&seen(&links, Xdp::Native, Some(ALL))).status, Status::Ok);
    }

    #[test]
    fn only_a_foreign_program_is_in_the_way() {
        let attached = (Some(RealMode::Native), Some(7));
        let links = [Link { xdp: attached.0, program: attached.1, ..link("eth0", 2) }];
        let with = |name: Option<&str>| {
            let program = name.map(ToOwned::to_owned);
            super::program(&Seen { program, ..seen(&links, Xdp::Native, Some(ALL)) })
        };
        assert_eq!(with(Some(PROGRAM)).status, Status::Ok);
        assert_eq!(with(Some("other")).status, Status::Failed);
        assert!(with(None).fix.is_some_and(|fix| fix.contains("bpftool link detach")));
        // Whose it is cannot be known: it may be ours.
        let blind = Seen { sees_programs: false, ..seen(&links, Xdp::Native, Some(ALL)) };
        let outcome = super::program(&blind);
        assert_eq!(outcome.status, Status::Warning);
        assert!(
            outcome.finding.contains("id 7; whether it is a limiter-agent's own"),
            "{outcome:?}"
        );
    }

    #[test]
    fn offloads_and_queues_that_cost_are_warned_of() {
        let vlan = Link { kind: Some("vlan".into()), below: Some(2), ..link("eth0.7", 3) };
        let links = [link("eth0", 2), vlan];
        let mut it = seen(&links, Xdp::Native, Some(ALL));
        it.offloads = Some(Offloads { merges: true, strips_vlan: true, ..Offloads::default() });
        it.queues = 1;
        let warned: Vec<_> = checks(&it)
            .into_iter()
            .filter(|(_, outcome)| outcome.status == Status::Warning)
            .map(|(name, _)| name)
            .collect();
        assert_eq!(warned, ["queues", "lro", "vlan-offload"]);
        it.cpus = 1;
        it.links = &links[..1];
        assert_eq!(queues(&it).status, Status::Ok);
        assert_eq!(
            vlan_offload(&it, Offloads { strips_vlan: true, ..Offloads::default() }).status,
            Status::Ok
        );
    }

    #[test]
    fn merged_packets_are_warned_of_where_the_program_sees_them() {
        let links = [link("eth0", 2)];
        let of = |xdp, merges_behind, merges_in_hardware| {
            let offloads = Offloads { merges_in_hardware, merges_behind, ..Offloads::default() };
            gro(&seen(&links, xdp, Some(ALL)), offloads).status
        };
        assert_eq!(of(Xdp::Native, true, false), Status::Ok);
        assert_eq!(of(Xdp::Generic, true, false), Status::Warning);
        assert_eq!(of(Xdp::Generic, false, false), Status::Ok);
        assert_eq!(of(Xdp::Native, false, true), Status::Warning);
    }

    #[test]
    fn vlans_and_members_of_bonds_are_sent_where_xdp_belongs() {
        let vlan = Link { kind: Some("vlan".into()), below: Some(2), ..link("eth0.7", 3) };
        let outcome = membership(&seen(&[vlan, link("eth0", 2)], Xdp::Native, None));
        assert!(outcome.fix.is_some_and(|fix| fix.starts_with("guard eth0:")));

        let member = |name, ifindex| Link { bond: Some(9), ..link(name, ifindex) };
        let bond = Link { kind: Some("bond".into()), ..link("bond0", 9) };
        let links = [member("eth0", 2), member("eth1", 3), bond];
        let mut it = seen(&links, Xdp::Native, None);
        let outcome = membership(&it);
        assert_eq!(outcome.status, Status::Warning);
        assert_eq!(outcome.fix.as_deref(), Some("guard the bond, bond0, or all of eth0, eth1"));
        it.is_guarded = &|_| true;
        assert_eq!(membership(&it).status, Status::Ok);
    }
}
