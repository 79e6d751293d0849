//! What was decided about a packet, and why.

use crate::abi::{ClassId, Mode, Slot};

/// Why a packet passed or was dropped. Every packet has exactly one.
///
/// The numbers are part of the counter map's layout; new reasons go at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reason {
    /// The datapath has no settings (or cannot read its maps): a fault.
    NoSettings = 0,
    /// Within the limits of its source.
    Conform = 1,
    /// Over the packet rate of its source.
    PacketRate = 2,
    /// Over the byte rate of its source.
    ByteRate = 3,
    /// The source is blocked.
    Blocked = 4,
    /// The source is exempt on this interface.
    Exempt = 5,
    /// Truncated, over-long or self-contradicting headers.
    Malformed = 6,
    /// Neither IPv4, IPv6 nor ARP.
    NonIp = 7,
    /// ARP or neighbour discovery, within its cap.
    Neighbour = 8,
    /// ARP or neighbour discovery, over its cap.
    NeighbourRate = 9,
    /// The mode is bypass: nothing is limited.
    Bypass = 10,
    /// No bucket could be had for the source: a fault.
    TableFull = 11,
    /// The source is new, and the budget for new sources is spent.
    NewSource = 12,
    /// An address that no packet can come from: loopback, multicast, or one of this host's own.
    Martian = 13,
    /// Over what the source's wider prefix may send.
    Ceiling = 14,
    /// The source has proven nothing, and the class's sum for such sources is used up.
    Unproven = 15,
    /// The class's sum is used up.
    Total = 16,
    /// It would be dropped, but belongs to a flow that this host opened.
    Established = 17,
    /// The same, over the limit of all such flows.
    EstablishedRate = 18,
    /// Within the limits of its source, of which more than four fifths of a burst are used: a warning.
    NearLimit = 19,
}

impl Reason {
    /// All reasons, in the order of their numbers.
    pub const ALL: [Self; Self::COUNT as usize] = [
        Self::NoSettings,
        Self::Conform,
        Self::PacketRate,
        Self::ByteRate,
        Self::Blocked,
        Self::Exempt,
        Self::Malformed,
        Self::NonIp,
        Self::Neighbour,
        Self::NeighbourRate,
        Self::Bypass,
        Self::TableFull,
        Self::NewSource,
        Self::Martian,
        Self::Ceiling,
        Self::Unproven,
        Self::Total,
        Self::Established,
        Self::EstablishedRate,
        Self::NearLimit,
    ];
    /// How many there are.
    pub const COUNT: u32 = 20;

    /// The one table of what each reason does unless the operator says otherwise: true drops.
    /// [`Settings`](crate::abi::Settings) carries it as a bit set, with the two that are
    /// configurable ([`Malformed`](Self::Malformed), [`TableFull`](Self::TableFull)) as configured.
    #[must_use]
    pub const fn drops_by_default(self) -> bool {
        match self {
            Self::PacketRate
            | Self::ByteRate
            | Self::Blocked
            | Self::Malformed
            | Self::NeighbourRate
            | Self::NewSource
            | Self::Martian
            | Self::Ceiling
            | Self::Unproven
            | Self::Total
            | Self::EstablishedRate => true,
            Self::NoSettings
            | Self::Conform
            | Self::Exempt
            | Self::NonIp
            | Self::Neighbour
            | Self::Bypass
            | Self::TableFull
            | Self::Established
            | Self::NearLimit => false,
        }
    }

    /// The value of the `reason` label in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::NoSettings => "no_settings",
            Self::Conform => "conform",
            Self::PacketRate => "packet_rate",
            Self::ByteRate => "byte_rate",
            Self::Blocked => "blocked",
            Self::Exempt => "exempt",
            Self::Malformed => "malformed",
            Self::NonIp => "non_ip",
            Self::Neighbour => "neighbour",
            Self::NeighbourRate => "neighbour_rate",
            Self::Bypass => "bypass",
            Self::TableFull => "table_full",
            Self::NewSource => "new_source",
            Self::Martian => "martian",
            Self::Ceiling => "ceiling",
            Self::Unproven => "unproven",
            Self::Total => "total",
            Self::Established => "established",
            Self::EstablishedRate => "established_rate",
            Self::NearLimit => "near_limit",
        }
    }

    /// Whether a packet that it would drop is first looked up among the flows that this host opened: the
    /// reasons that are about how much there is, and not about what it is.
    #[inline(always)]
    #[must_use]
    pub const fn gives_way(self) -> bool {
        const ALL: u32 = Reason::PacketRate.bit()
            | Reason::ByteRate.bit()
            | Reason::TableFull.bit()
            | Reason::NewSource.bit()
            | Reason::Ceiling.bit()
            | Reason::Unproven.bit()
            | Reason::Total.bit();
        ALL & self.bit() != 0
    }

    /// Whether the packet is within the limits of its source.
    #[inline(always)]
    #[must_use]
    pub const fn conforms(self) -> bool {
        (Reason::Conform.bit() | Reason::NearLimit.bit()) & self.bit() != 0
    }

    /// This reason's bit in [`Settings::drops`](crate::abi::Settings::drops).
    #[inline(always)]
    #[must_use]
    pub const fn bit(self) -> u32 {
        1 << self as u32
    }

    /// What to do with a packet of this reason in `mode`, where `drops` holds the bits of the
    /// reasons that drop.
    #[inline(always)]
    #[must_use]
    pub const fn action(self, mode: Mode, drops: u32) -> Action {
        if drops & self.bit() == 0 {
            return Action::Pass;
        }
        match mode {
            Mode::ENFORCE => Action::Drop,
            Mode::OBSERVE => Action::WouldDrop,
            // Bypass, and any value that this version does not know: let traffic through.
            _ => Action::Pass,
        }
    }
}

/// What happens to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Action {
    /// It goes on to the kernel.
    Pass = 0,
    /// It is dropped.
    Drop = 1,
    /// It goes on, and would be dropped in enforce mode.
    WouldDrop = 2,
}

impl Action {
    /// All actions, in the order of their numbers.
    pub const ALL: [Self; Self::COUNT as usize] = [Self::Pass, Self::Drop, Self::WouldDrop];
    /// How many there are.
    pub const COUNT: u32 = 3;

    /// The value of the `action` label in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Drop => "drop",
            Self::WouldDrop => "would_drop",
        }
    }
}

/// The address family that a packet is counted under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Family {
    /// IPv4.
    Ipv4 = 0,
    /// IPv6.
    Ipv6 = 1,
    /// ARP, non-IP, and frames too short to tell.
    Other = 2,
}

impl Family {
    /// All families, in the order of their numbers.
    pub const ALL: [Self; Self::COUNT as usize] = [Self::Ipv4, Self::Ipv6, Self::Other];
    /// How many there are.
    pub const COUNT: u32 = 3;

    /// The value of the `family` label in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Ipv4 => "ipv4",
            Self::Ipv6 => "ipv6",
            Self::Other => "other",
        }
    }
}

/// The decision about one packet: what is done, and all that it is counted under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Where it came in.
    pub slot: Slot,
    /// Its address family.
    pub family: Family,
    /// Its class; [`ClassId::NONE`] where no class was consulted.
    pub class: ClassId,
    /// Why.
    pub reason: Reason,
    /// What is done.
    pub action: Action,
}

impl Outcome {
    /// The outcome where the datapath could not get at its settings: the packet passes.
    pub const NO_SETTINGS: Self = Self {
        slot: Slot::UNKNOWN,
        family: Family::Other,
        class: ClassId::NONE,
        reason: Reason::NoSettings,
        action: Action::Pass,
    };
}
