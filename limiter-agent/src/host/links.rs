//! Interfaces as the kernel reports them over netlink. Not from `/sys`: that shows the network
//! namespace it was mounted in, which need not be the agent's.

use std::fmt;
use std::time::Duration;

use futures_util::TryStreamExt;
use rtnetlink::packet_route::link::{
    InfoKind, InfoPortKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage, LinkXdp, XdpAttached,
};
use thiserror::Error;

/// An interface of this network namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Its name.
    pub name: String,
    /// Its index.
    pub ifindex: u32,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// What the kernel calls this kind of virtual interface (`veth`, `bond`); none for hardware.
    pub kind: Option<String>,
    /// Whether it is set up.
    pub is_up: bool,
    /// Receive queues that there is room for.
    pub queues: u32,
    /// The index of the interface below it, of those that have one.
    pub below: Option<u32>,
    /// The index of the bond that it is a member of.
    pub bond: Option<u32>,
    /// How an XDP program is attached, if one is.
    pub xdp: Option<RealMode>,
    /// The id of the attached XDP program.
    pub program: Option<u32>,
    /// Frames that the device had no room for (`rx_missed_errors`).
    pub missed: u64,
    /// Frames received and dropped, by the device or by the kernel (`rx_dropped`).
    pub dropped: u64,
}

impl Link {
    /// Whether there is no hardware behind it.
    #[must_use]
    pub fn is_virtual(&self) -> bool {
        self.kind.is_some() || self.name == "lo"
    }
}

/// How the kernel runs an attached XDP program, whatever was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RealMode {
    /// In the driver, before an skb exists.
    Native,
    /// In the stack, after an skb exists: slower.
    Generic,
    /// In the NIC.
    Offload,
    /// Several programs in several modes.
    Multiple,
}

/// The kernel did not list its interfaces.
#[derive(Debug, Error)]
pub enum LinksError {
    /// No netlink socket.
    #[error("cannot open a netlink socket: {0}")]
    Socket(#[from] std::io::Error),
    /// The request failed.
    #[error("cannot list interfaces over netlink: {0}")]
    Request(#[from] rtnetlink::Error),
}

/// Waits until no program is attached to the interfaces of these names, or two seconds: the kernel
/// lets go of an attachment some time after its last pin is removed.
///
/// # Errors
/// [`LinksError`] if netlink does not answer.
pub async fn released(names: &[String]) -> Result<(), LinksError> {
    const LOOKS: u32 = 100;
    for _ in 0..LOOKS {
        let links = links().await?;
        let is_held = |link: &Link| link.program.is_some() && names.contains(&link.name);
        if !links.iter().any(is_held) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// All interfaces of this network namespace.
///
/// # Errors
/// [`LinksError`] if netlink does not answer.
pub async fn links() -> Result<Vec<Link>, LinksError> {
    let (connection, handle, _) = rtnetlink::new_connection()?;
    let connection = tokio::spawn(connection);
    let links = handle.link().get().execute().map_ok(|message| read(&message)).try_collect().await;
    connection.abort();
    Ok(links?)
}

impl RealMode {
    /// The value of the `mode` label in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Generic => "generic",
            Self::Offload => "offload",
            Self::Multiple => "multiple",
        }
    }

    /// The word for it in `ip link set dev NAME … off`, which removes no program of another mode.
    #[must_use]
    pub const fn keyword(self) -> &'static str {
        match self {
            Self::Native => "xdpdrv",
            Self::Generic => "xdpgeneric",
            Self::Offload => "xdpoffload",
            Self::Multiple => "xdp",
        }
    }
}

impl fmt::Display for RealMode {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.label())
    }
}

fn read(message: &LinkMessage) -> Link {
    let header = &message.header;
    let is_up = header.flags.contains(LinkFlags::Up);
    let mut link = Link { ifindex: header.index, is_up, ..Link::default() };
    let (mut controller, mut is_in_bond) = (None, false);
    for attribute in &message.attributes {
        if let LinkAttribute::IfName(name) = attribute {
            link.name.clone_from(name);
        } else if let LinkAttribute::Mtu(mtu) = attribute {
            link.mtu = *mtu;
        } else if let LinkAttribute::LinkInfo(infos) = attribute {
            link.kind = infos.iter().find_map(kind);
            is_in_bond = infos.contains(&LinkInfo::PortKind(InfoPortKind::Bond));
        } else if let LinkAttribute::NumRxQueues(queues) = attribute {
            link.queues = *queues;
        } else if let LinkAttribute::Link(below) = attribute {
            link.below = Some(*below);
        } else if let LinkAttribute::Controller(index) = attribute {
            controller = Some(*index);
        } else if let LinkAttribute::Stats64(stats) = attribute {
            (link.missed, link.dropped) = (stats.rx_missed_errors, stats.rx_dropped);
        } else if let LinkAttribute::Xdp(parts) = attribute {
            (link.xdp, link.program) = xdp(parts);
        }
    }
    link.bond = controller.filter(|_| is_in_bond);
    link
}

fn kind(info: &LinkInfo) -> Option<String> {
    if let LinkInfo::Kind(kind) = info { Some(InfoKind::to_string(kind)) } else { None }
}

fn xdp(parts: &[LinkXdp]) -> (Option<RealMode>, Option<u32>) {
    let (mut mode, mut program) = (None, None);
    for part in parts {
        if let LinkXdp::Attached(attached) = part {
            mode = real_mode(*attached);
        } else if let LinkXdp::ProgId(id) = part {
            program = Some(*id);
        }
    }
    (mode, program)
}

fn real_mode(attached: XdpAttached) -> Option<RealMode> {
    #[expect(clippy::wildcard_enum_match_arm, reason = "the enum is non-exhaustive")]
    match attached {
        XdpAttached::Driver => Some(RealMode::Native),
        XdpAttached::SocketBuffer => Some(RealMode::Generic),
        XdpAttached::Hardware => Some(RealMode::Offload),
        XdpAttached::Multiple => Some(RealMode::Multiple),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(attributes: Vec<LinkAttribute>) -> LinkMessage {
        let mut message = LinkMessage::default();
        message.header.flags = LinkFlags::Up;
        message.attributes = attributes;
        message
    }

    #[test]
    fn a_member_of_a_bond_is_told_from_a_port_of_a_bridge() {
        for (port, bond) in [(InfoPortKind::Bond, Some(9)), (InfoPortKind::Bridge, None)] {
            let info = LinkAttribute::LinkInfo(vec![LinkInfo::PortKind(port)]);
            let link = read(&message(vec![LinkAttribute::Controller(9), info]));
            assert_eq!((link.bond, link.is_up), (bond, true));
        }
    }

    #[test]
    fn a_vlan_knows_what_it_lies_on() {
        let info = LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Vlan)]);
        let link = read(&message(vec![LinkAttribute::Link(4), info]));
        assert_eq!((link.below, link.kind.as_deref()), (Some(4), Some("vlan")));
    }
}
