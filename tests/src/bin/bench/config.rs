//! The shipped configuration, with the few changes that a measurement needs.

use std::time::SystemTime;

use anyhow::{Context as _, Result, ensure};
use limiter_agent::{
    config::Config,
    datapath::Datapath,
    plan::{Host, HostInterface, Plan, plan},
};
use limiter_common::{packet::Source, time::Nanos};
use limiter_tests::generator::monotonic;

static SHIPPED: &str = include_str!("../../../../deploy/limiter.toml");

/// What the class of the flood lets a source send, as shipped: packets per second and at once.
pub(crate) const SHIPPED_LIMIT: (u32, u32) = (10_000, 20_000);

/// Buckets of each family in the shipped configuration.
pub(crate) const SHIPPED_SOURCES: u32 = 1_000_000;

/// A budget that nothing here exhausts.
pub(crate) const UNLIMITED: &str = "{ rate = \"30000000/s\", burst = 4000000000 }";

/// The text of a configuration.
#[derive(Clone, Debug)]
pub(crate) struct Shipped(String);

impl Shipped {
    /// As shipped, but enforcing, and on this interface.
    pub(crate) fn on(interface: &str) -> Result<Self> {
        let text = replaced(SHIPPED, "mode = \"observe\"", "mode = \"enforce\"")?;
        let (rate, burst) = SHIPPED_LIMIT;
        let limit =
            format!("name = \"rest\"\npackets = {{ rate = \"{rate}/s\", burst = {burst} }}");
        ensure!(text.contains(&limit), "deploy/limiter.toml no longer has the limit {limit:?}");
        Ok(Self(replaced(&text, "name = \"eth0\"", &format!("name = \"{interface}\""))?))
    }

    /// With `keys` as all that the class of the flood has.
    pub(crate) fn rest(&self, keys: &str) -> Result<Self> {
        self.block("[[class]]\nname = \"rest\"\n", keys)
    }

    /// With `packets` as the limit of each source and nothing that bounds all sources together.
    pub(crate) fn unbounded(&self, packets: &str, sources: u32) -> Result<Self> {
        let table = format!(
            "ipv4_sources = {sources}\nipv6_sources = {sources}\nnew_sources = {UNLIMITED}\n\n\
             [aggregate]\nipv6_48_new_sources = {UNLIMITED}"
        );
        self.rest(&format!("packets = {packets}"))?.table(&table)
    }

    /// With `keys` as all that `[table]` has.
    pub(crate) fn table(&self, keys: &str) -> Result<Self> {
        self.block("[table]\n", keys)
    }

    /// Without the class that limits bytes.
    pub(crate) fn without_bytes(&self) -> Result<Self> {
        let limit = "bytes = { rate = \"4Mbit/s\", burst = \"256KiB\" }\n";
        Ok(Self(replaced(&self.0, limit, "")?))
    }

    /// What the datapath is to hold for it on a host with that interface.
    pub(crate) fn plan(&self, interface: &str, ifindex: u32) -> Result<Plan> {
        let config = Config::parse("limiter.toml", &self.0, SystemTime::now())
            .with_context(|| format!("this configuration:\n{}", self.0))?;
        let interface =
            HostInterface { name: interface.to_owned(), ifindex, mtu: 1500, bond: None };
        let host = Host {
            interfaces: vec![interface],
            monotonic: now()?,
            tick: limiter_agent::host::tick(),
            wall: SystemTime::now(),
        };
        Ok(plan(&config, &host, None)?)
    }

    /// With the lines from behind `head` to the next empty one replaced by `keys`.
    fn block(&self, head: &str, keys: &str) -> Result<Self> {
        let missing = || format!("deploy/limiter.toml has no {head:?}");
        let (before, after) = self.0.split_once(head).with_context(missing)?;
        let (_, after) = after.split_once("\n\n").with_context(missing)?;
        Ok(Self(format!("{before}{head}{keys}\n\n{after}")))
    }
}

/// Proves the `count` sources from `first` on.
pub(crate) fn prove(datapath: &Datapath, count: u32, source: impl Fn(u32) -> Source) -> Result<()> {
    let now = now()?;
    (0..count).for_each(|index| datapath.prove(source(index), now));
    Ok(())
}

/// Now, by the clock of the datapath.
pub(crate) fn now() -> Result<Nanos> {
    Ok(Nanos(u64::try_from(monotonic()?.as_nanos())?))
}

fn replaced(text: &str, from: &str, to: &str) -> Result<String> {
    ensure!(text.matches(from).count() == 1, "deploy/limiter.toml does not have one {from:?}");
    Ok(text.replace(from, to))
}
