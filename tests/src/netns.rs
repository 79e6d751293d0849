//! Network namespaces that live as long as their handle, and veth pairs between them.
//!
//! A namespace is held by a file descriptor, without a name under `/run/netns`: nothing is left
//! behind when a test dies. Threads and child processes enter with `setns` alone; `ip netns exec`
//! would also remount `/sys` and so hide bpffs.

use std::{
    fs::{self, File},
    net::IpAddr,
    os::fd::{AsRawFd as _, OwnedFd},
    os::unix::process::CommandExt as _,
    panic,
    path::PathBuf,
    process::{self, Command},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use nix::sched::{CloneFlags, setns, unshare};
use serde_json::Value;

/// A network namespace of our own. Clones share it; it goes away with the last clone, and with it
/// the interfaces inside.
#[derive(Clone, Debug)]
pub struct Netns {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: String,
    fd: OwnedFd,
}

impl Netns {
    /// Makes a namespace with its loopback interface up and IPv6 kept quiet: no duplicate address
    /// detection, no router solicitations, so that tests may count packets exactly. `label` only
    /// shows in messages.
    ///
    /// # Errors
    /// If the kernel refuses, as it does without root.
    pub fn new(label: &str) -> Result<Self> {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{label}-{}-{number}", process::id());
        let fd = in_new_thread(|| -> Result<OwnedFd> {
            unshare(CloneFlags::CLONE_NEWNET).context("unshare")?;
            Ok(File::open("/proc/thread-self/ns/net")?.into())
        })
        .with_context(|| format!("cannot make the network namespace {name} (are you root?)"))?;
        let netns = Self { inner: Arc::new(Inner { name, fd }) };
        for (key, value) in
            [("dad_transmits", "0"), ("accept_ra", "0"), ("router_solicitations", "0")]
        {
            netns.set_sysctl(&format!("net/ipv6/conf/default/{key}"), value)?;
        }
        netns.ip(&["link", "set", "dev", "lo", "up"])?;
        Ok(netns)
    }

    /// The label it was made with, the process id and a number: unique on this machine.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// A path that names the namespace to other processes while this handle lives, e.g. for
    /// `nsenter --net=PATH`.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", process::id(), self.inner.fd.as_raw_fd()))
    }

    /// Runs `work` on a thread of its own inside the namespace and waits for it. A panic in `work`
    /// goes on in the caller.
    ///
    /// # Panics
    /// If the namespace cannot be entered, which cannot be while the handle lives and we are root.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        in_new_thread(|| {
            self.enter();
            work()
        })
    }

    /// Like [`Netns::run`], without waiting.
    #[must_use = "a panic of the thread shows only when it is joined"]
    pub fn spawn<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> thread::JoinHandle<T> {
        let netns = self.clone();
        thread::spawn(move || {
            netns.enter();
            work()
        })
    }

    /// A command that will run inside the namespace, with everything else as here.
    #[must_use]
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let inner = Arc::clone(&self.inner);
        let mut command = Command::new(program);
        // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(move || Ok(setns(&inner.fd, CloneFlags::CLONE_NEWNET)?));
        }
        command
    }

    /// Runs iproute2's `ip` with `arguments` inside the namespace and returns what it printed.
    ///
    /// # Errors
    /// If it cannot be started or fails; its own message is in the error.
    pub fn ip(&self, arguments: &[&str]) -> Result<String> {
        let what = || format!("ip {} (in {})", arguments.join(" "), self.name());
        let output = self.command("ip").args(arguments).output().with_context(what)?;
        ensure!(
            output.status.success(),
            "{}: {}",
            what(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Writes a setting below `/proc/sys` inside the namespace; `key` has slashes.
    ///
    /// # Errors
    /// If there is no such setting or the value is refused.
    pub fn set_sysctl(&self, key: &str, value: &str) -> Result<()> {
        let path = PathBuf::from("/proc/sys").join(key);
        self.run(|| fs::write(&path, value))
            .with_context(|| format!("{} = {value}", path.display()))
    }

    /// Moves the calling thread into the namespace, for good.
    ///
    /// # Panics
    /// If that fails, which cannot be while the handle lives and we are root.
    pub fn enter(&self) {
        setns(&self.inner.fd, CloneFlags::CLONE_NEWNET)
            .unwrap_or_else(|errno| panic!("cannot enter {}: {errno}", self.name()));
    }
}

/// How a veth pair is made.
#[derive(Clone, Copy, Debug)]
pub struct VethOptions {
    /// Receive and transmit queues of each end. Frames sent on CPU n arrive on receive queue
    /// n modulo this, and are handled on that CPU.
    pub queues: u32,
    /// Of each end, in bytes. Native XDP without multi-buffer support needs at most about 3,500.
    pub mtu: u32,
}

impl Default for VethOptions {
    fn default() -> Self {
        Self { queues: 2, mtu: 1500 }
    }
}

/// A network interface inside a namespace.
#[derive(Clone, Debug)]
pub struct Interface {
    /// Where it is.
    pub netns: Netns,
    /// Its name there.
    pub name: String,
    /// Its index there.
    pub index: u32,
    /// Its Ethernet address.
    pub mac: [u8; 6],
}

/// The kernel's counters of an interface, since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets received.
    pub rx_packets: u64,
    /// Packets lost on receiving.
    pub rx_dropped: u64,
    /// Packets sent; for a veth end, those the other end took from its ring.
    pub tx_packets: u64,
    /// Packets lost on sending; for a veth end, those that found the other end's ring full.
    pub tx_dropped: u64,
}

impl Interface {
    /// Adds an address such as `10.0.0.1/24` or `fd00::1/64`, usable at once.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn add_address(&self, cidr: &str) -> Result<()> {
        let mut arguments = vec!["address", "add", cidr, "dev", &self.name];
        if cidr.contains(':') {
            arguments.push("nodad");
        }
        self.netns.ip(&arguments)?;
        Ok(())
    }

    /// Gives the interface an address that `peer`, at the other end, need not ask for.
    ///
    /// # Errors
    /// If `ip` refuses.
    pub fn add_known_address(&self, address: IpAddr, length: u8, peer: &Self) -> Result<()> {
        self.add_address(&format!("{address}/{length}"))?;
        peer.add_neighbour(address, self.mac)
    }

    /// Adds a permanent neighbour, so that no ARP or neighbour discovery is needed.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn add_neighbour(&self, address: IpAddr, mac: [u8; 6]) -> Result<()> {
        let address = address.to_string();
        self.netns.ip(&[
            "neighbour",
            "replace",
            &address,
            "lladdr",
            &mac_text(mac),
            "dev",
            &self.name,
            "nud",
            "permanent",
        ])?;
        Ok(())
    }

    /// Turns generic receive offload on or off. A veth end receives frames sent by XDP only while
    /// it has GRO on or an XDP program of its own.
    ///
    /// # Errors
    /// If `ethtool` fails or is missing.
    pub fn set_gro(&self, on: bool) -> Result<()> {
        let value = if on { "on" } else { "off" };
        let status = self
            .netns
            .command("ethtool")
            .args(["-K", &self.name, "gro", value])
            .status()
            .context("ethtool")?;
        ensure!(status.success(), "ethtool -K {} gro {value}: {status}", self.name);
        Ok(())
    }

    /// Reads the kernel's counters.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn counters(&self) -> Result<Counters> {
        let link = link_json(&self.netns, &self.name)?;
        let read = |direction: &str, counter: &str| {
            link["stats64"][direction][counter]
                .as_u64()
                .ok_or_else(|| anyhow!("ip reports no {direction} {counter} for {}", self.name))
        };
        Ok(Counters {
            rx_packets: read("rx", "packets")?,
            rx_dropped: read("rx", "dropped")?,
            tx_packets: read("tx", "packets")?,
            tx_dropped: read("tx", "dropped")?,
        })
    }
}

/// Joins two namespaces by a veth pair with the given interface names; both ends are up, without
/// addresses, not even link-local ones.
///
/// # Errors
/// If `ip` fails.
pub fn veth(
    near: (&Netns, &str),
    far: (&Netns, &str),
    options: VethOptions,
) -> Result<(Interface, Interface)> {
    let (near, near_name) = near;
    let (far, far_name) = far;
    let queues = options.queues.to_string();
    let mtu = options.mtu.to_string();
    let far_path = far.path();
    let far_path = far_path.to_str().context("the path of a namespace is ASCII")?;
    near.ip(&[
        "link",
        "add",
        near_name,
        "numtxqueues",
        &queues,
        "numrxqueues",
        &queues,
        "mtu",
        &mtu,
        "type",
        "veth",
        "peer",
        "name",
        far_name,
        "numtxqueues",
        &queues,
        "numrxqueues",
        &queues,
        "mtu",
        &mtu,
        "netns",
        far_path,
    ])?;
    Ok((bring_up(near, near_name)?, bring_up(far, far_name)?))
}

fn bring_up(netns: &Netns, name: &str) -> Result<Interface> {
    netns.ip(&["link", "set", "dev", name, "addrgenmode", "none"])?;
    netns.ip(&["link", "set", "dev", name, "up"])?;
    let link = link_json(netns, name)?;
    let index = link["ifindex"].as_u64().and_then(|index| u32::try_from(index).ok());
    let mac = link["address"].as_str().and_then(parse_mac);
    Ok(Interface {
        netns: netns.clone(),
        name: name.to_owned(),
        index: index.with_context(|| format!("ip reports no index for {name}"))?,
        mac: mac.with_context(|| format!("ip reports no Ethernet address for {name}"))?,
    })
}

fn link_json(netns: &Netns, name: &str) -> Result<Value> {
    let text = netns.ip(&["-json", "-statistics", "link", "show", "dev", name])?;
    let mut links: Vec<Value> = serde_json::from_str(&text).context("the output of ip")?;
    links.pop().with_context(|| format!("ip shows no link {name}"))
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Option<Vec<u8>> =
        text.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    bytes?.try_into().ok()
}

fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn in_new_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| match scope.spawn(work).join() {
        Ok(value) => value,
        Err(cause) => panic::resume_unwind(cause),
    })
}
