//! What the kernel's refusal to attach means, and what to do about it.

use std::fmt;

use nix::errno::Errno;

use super::Link;
use super::preflight::detaching;

/// The kernel's refusal of one attachment; displays as one sentence with the cause and the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal<'a> {
    /// The interface.
    pub link: &'a Link,
    /// Its driver, if it says.
    pub driver: Option<&'a str>,
    /// Whether native mode was asked for; generic if not.
    pub native: bool,
    /// The error number of the system call.
    pub errno: i32,
    /// What the driver said in words (netlink's extended acknowledgement), if it did.
    pub said: Option<&'a str>,
    /// The configuration file, where `xdp` is set.
    pub file: &'a str,
}

/// The driver's words in the text of an attach error: aya writes netlink's extended acknowledgement
/// as `netlink error: ["…"]` and keeps it to itself otherwise.
#[must_use]
pub fn kernel_words(error: &str) -> Option<&str> {
    let (_, rest) = error.split_once("netlink error: [\"")?;
    let (words, _) = rest.split_once("\"]")?;
    Some(words)
}

/// How to do without native mode on the interface called `name`.
#[must_use]
pub fn other_mode(name: &str, file: &str) -> String {
    format!(
        "set xdp = \"generic\" (slower) or \"auto\" in the [[interface]] entry of {name} in {file}, or \
         give --xdp"
    )
}

impl fmt::Display for Refusal<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { link, driver, native, errno, said, file } = self;
        let mode = if *native { "native" } else { "generic" };
        let errno = Errno::from_raw(*errno);
        write!(out, "{mode} XDP on {} refused", link.name)?;
        if let Some(driver) = driver {
            write!(out, " by driver {driver}")?;
        }
        write!(out, " ({errno:?}")?;
        if let Some(said) = said {
            write!(out, ", \"{said}\"")?;
        }
        let (cause, fix) = self.cause(errno);
        write!(out, "): {cause}; fix: ")?;
        let name = &link.name;
        // Generic mode asks nothing of the driver.
        let settings = (*native && concerns_driver(errno)).then(|| other_mode(name, file));
        match (fix, settings) {
            (Some(fix), Some(settings)) => write!(out, "{fix}, or {settings}"),
            (Some(only), None) | (None, Some(only)) => out.write_str(&only),
            (None, None) => out.write_str("see `dmesg`"),
        }
    }
}

impl Refusal<'_> {
    /// What it means, and what mends it other than another mode.
    fn cause(&self, errno: Errno) -> (String, Option<String>) {
        let Link { name, mtu, .. } = self.link;
        #[expect(clippy::wildcard_enum_match_arm, reason = "there are over a hundred")]
        let (cause, fix) = match errno {
            Errno::EBUSY | Errno::EEXIST => (
                "another XDP program is attached".to_owned(),
                format!("`bpftool net show dev {name}` gives its id; {}", detaching(name, "xdp", "ID")),
            ),
            Errno::EINVAL | Errno::ERANGE | Errno::EMSGSIZE => (
                format!("the driver cannot run XDP at MTU {mtu} (its own or its peer's) or with its present settings"),
                format!("`ip link set dev {name} mtu 1500`"),
            ),
            // No hardware merges packets there.
            Errno::EOPNOTSUPP if self.link.is_virtual() => {
                return ("it has no native XDP".to_owned(), None);
            }
            Errno::EOPNOTSUPP => (
                "the driver has no native XDP, or not together with LRO".to_owned(),
                format!("`ethtool -K {name} lro off`"),
            ),
            Errno::ENOMEM | Errno::ENOSPC => (
                "the device has too few queues: drivers want a spare TX queue per CPU, and as many RX as TX queues".to_owned(),
                format!("fewer channels in use, or more in the device: `ethtool -l {name}`, then `ethtool -L {name} combined N`"),
            ),
            Errno::EPERM | Errno::EACCES => (
                "the kernel does not let this process attach".to_owned(),
                "run as root, or with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN".to_owned(),
            ),
            Errno::ENODEV | Errno::ENXIO => (
                "the interface is gone".to_owned(),
                "start again when it is back".to_owned(),
            ),
            other => return (other.desc().to_owned(), None),
        };
        (cause, Some(fix))
    }
}

/// Whether generic mode, which asks nothing of the driver, is a way out.
const fn concerns_driver(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::EINVAL
            | Errno::ERANGE
            | Errno::EMSGSIZE
            | Errno::EOPNOTSUPP
            | Errno::ENOMEM
            | Errno::ENOSPC
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(errno: Errno, native: bool) -> String {
        let link = Link { name: "eth0".into(), mtu: 9000, ..Link::default() };
        let (driver, errno) = (Some("ixgbe"), errno as i32);
        Refusal { link: &link, driver, native, errno, said: None, file: "limiter.toml" }.to_string()
    }

    #[test]
    fn each_refusal_names_interface_driver_and_fix() {
        for (errno, cause, fix) in [
            (Errno::EINVAL, "MTU 9000", "mtu 1500"),
            (Errno::ERANGE, "MTU 9000", "mtu 1500"),
            (Errno::EOPNOTSUPP, "LRO", "lro off"),
            (Errno::ENOMEM, "queues", "ethtool -L"),
            (Errno::EBUSY, "another XDP program", "bpftool link detach"),
            (Errno::ENODEV, "gone", "start again"),
        ] {
            let text = text(errno, true);
            assert!(text.starts_with("native XDP on eth0 refused by driver ixgbe"), "{text}");
            assert!(text.contains(cause) && text.contains(fix), "{text}");
        }
    }

    #[test]
    fn generic_is_offered_only_where_it_helps() {
        let offered = "xdp = \"generic\" (slower) or \"auto\" in the [[interface]] entry of eth0 in limiter.toml";
        assert!(text(Errno::EOPNOTSUPP, true).contains(offered));
        assert!(!text(Errno::EBUSY, true).contains("xdp = \"generic\""));
        assert!(!text(Errno::EINVAL, false).contains("xdp = \"generic\""));
    }

    #[test]
    fn what_has_no_lro_is_not_told_to_turn_it_off() {
        let veth = Link { name: "v0".into(), kind: Some("ifb".into()), ..Link::default() };
        for link in [Link { name: "lo".into(), ..Link::default() }, veth] {
            let errno = Errno::EOPNOTSUPP as i32;
            let refusal = Refusal {
                link: &link,
                driver: None,
                native: true,
                errno,
                said: None,
                file: "a.toml",
            };
            let text = refusal.to_string();
            assert!(!text.contains("LRO") && !text.contains("lro"), "{text}");
            assert!(text.contains("it has no native XDP; fix: set xdp = "), "{text}");
        }
    }

    #[test]
    fn the_kernels_own_words_are_passed_on() {
        let link = Link { name: "v0".into(), mtu: 9000, ..Link::default() };
        let said = kernel_words(
            "cannot attach to v0: netlink error: [\"Peer MTU is too large to set XDP\"]: Numerical",
        );
        let refusal = Refusal {
            link: &link,
            driver: None,
            native: true,
            errno: Errno::ERANGE as i32,
            said,
            file: "",
        };
        assert!(refusal.to_string().contains("(ERANGE, \"Peer MTU is too large to set XDP\")"));
    }
}
