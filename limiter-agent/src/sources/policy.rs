//! Which entries say what applies to a source.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::SystemTime;

use ipnet::IpNet;
use limiter_common::units::Limits;

use super::{BlockReport, PrefixReport};
pub(super) use crate::agent::source_network;
use crate::config::Prefix;
use crate::status::{Exemption, utc};

/// What is said about networks, to be found by address.
pub(super) struct Nets<T> {
    by_net: HashMap<IpNet, Vec<T>>,
    /// The lengths of IPv4 and IPv6 prefixes that there are.
    lengths: [BTreeSet<u8>; 2],
}

/// A `[[prefix]]`.
pub(super) struct PrefixSeen {
    cidr: IpNet,
    scale: Option<u32>,
    pub(super) limits: Vec<Limits>,
    owner: Option<String>,
    comment: Option<String>,
}

/// A block, of the file or by command.
#[derive(Clone, Debug)]
pub(crate) struct BlockSeen {
    pub(crate) cidr: IpNet,
    pub(crate) expires: Option<SystemTime>,
    pub(crate) reason: Option<String>,
    pub(crate) by: Option<String>,
    pub(crate) penalty: Option<u32>,
}

impl<T> Nets<T> {
    pub(super) fn new(all: impl Iterator<Item = (IpNet, T)>) -> Self {
        let mut nets = Self { by_net: HashMap::new(), lengths: Default::default() };
        for (net, said) in all {
            nets.lengths[family(&net)].insert(net.prefix_len());
            nets.by_net.entry(net).or_default().push(said);
        }
        nets
    }

    /// What is said about networks that `source` lies in, the narrowest first. At most one look for each
    /// length that there is.
    pub(super) fn around<'a>(&'a self, source: &'a IpNet) -> impl Iterator<Item = &'a T> {
        let lengths = self.lengths[family(source)].range(..=source.prefix_len()).rev();
        lengths
            .filter_map(|length| {
                let net = IpNet::new(source.network(), *length).ok()?.trunc();
                self.by_net.get(&net)
            })
            .flatten()
    }

    /// The same, and about networks within `source`.
    pub(super) fn touching<'a>(&'a self, source: &'a IpNet) -> impl Iterator<Item = &'a T> {
        // Nothing is narrower than a source, but for addresses of spaces that have no /64 in common.
        let is_whole = source.prefix_len() == source.max_prefix_len();
        let within = self.by_net.iter().filter(move |(net, _)| {
            !is_whole && net.prefix_len() > source.prefix_len() && source.contains(*net)
        });
        self.around(source).chain(within.flat_map(|(_, said)| said))
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &T> {
        self.by_net.values().flatten()
    }
}

fn family(net: &IpNet) -> usize {
    usize::from(net.network().is_ipv6())
}

impl From<&Prefix> for PrefixSeen {
    fn from(prefix: &Prefix) -> Self {
        let Prefix { cidr, scale, limits, owner, comment } = prefix.clone();
        Self { cidr, scale, limits, owner, comment }
    }
}

impl From<&PrefixSeen> for PrefixReport {
    fn from(prefix: &PrefixSeen) -> Self {
        Self {
            cidr: prefix.cidr.to_string(),
            scale: prefix.scale,
            owner: prefix.owner.clone(),
            comment: prefix.comment.clone(),
        }
    }
}

impl BlockSeen {
    pub(super) fn report(&self) -> BlockReport {
        BlockReport {
            cidr: self.cidr.to_string(),
            until: self.expires.map(utc),
            reason: self.reason.clone(),
            by: self.by.clone(),
        }
    }

    pub(super) fn in_words(&self) -> String {
        let end = ends(self.expires);
        let whose = if self.by.is_some() { "an operator" } else { "the configuration" };
        format!("{} is blocked by {whose} {end}", self.cidr)
    }
}

/// When something ends, in words.
pub(super) fn ends(at: Option<SystemTime>) -> String {
    at.map_or("without an end".to_owned(), |at| format!("until {}", utc(at)))
}

/// What it all comes to. `end` is that of the blocks in words, if there are any.
pub(super) fn summary(
    exemptions: &[Exemption],
    end: Option<String>,
    prefix: Option<&PrefixSeen>,
) -> String {
    let mut parts = Vec::new();
    for exemption in exemptions {
        let Exemption { cidr, interface, owner, .. } = exemption;
        let place = interface.as_ref().map_or("everywhere".to_owned(), |it| format!("on {it}"));
        parts.push(format!("exempt {place} as {cidr} (owner {owner})"));
    }
    if let Some(end) = end {
        let beside = if exemptions.is_empty() { "" } else { " elsewhere" };
        parts.push(format!("blocked{beside} {end}"));
    }
    parts.push(match prefix {
        Some(PrefixSeen { cidr, scale: Some(scale), .. }) => {
            format!("{scale} times the limits of the classes, as {cidr}")
        }
        Some(PrefixSeen { cidr, .. }) => format!("the limits of {cidr}"),
        None => "the limits of the classes".to_owned(),
    });
    parts.join("; ")
}

/// Whether one of `nets` has an address in common with `source`.
#[must_use]
pub(crate) fn touches(nets: &[IpNet], source: &IpNet) -> Option<IpNet> {
    nets.iter().find(|net| net.contains(source) || source.contains(*net)).copied()
}

/// Whether one of `addresses` is of `source`.
#[must_use]
pub(crate) fn is_among(addresses: &[IpAddr], source: &IpNet) -> Option<IpAddr> {
    addresses.iter().find(|address| source.contains(*address)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().expect("is a network")
    }

    #[test]
    fn networks_around_a_source_come_narrowest_first() {
        let all = ["10.0.0.0/8", "10.1.2.0/24", "10.1.2.3/32", "10.1.3.0/24", "2001:db8::/32"];
        let nets = Nets::new(all.into_iter().map(|it| (net(it), it)));
        let around = |source: &str| nets.around(&net(source)).copied().collect::<Vec<_>>();
        assert_eq!(around("10.1.2.3/32"), ["10.1.2.3/32", "10.1.2.0/24", "10.0.0.0/8"]);
        assert_eq!(around("10.1.4.1/32"), ["10.0.0.0/8"]);
        assert_eq!(around("2001:db8:0:1::/64"), ["2001:db8::/32"]);
        assert_eq!(around("192.0.2.1/32"), Vec::<&str>::new());
    }

    #[test]
    fn a_proxy_within_a_sources_network_is_met() {
        let proxies = [net("2001:db8::7/128"), net("10.0.0.0/8")];
        assert_eq!(touches(&proxies, &net("2001:db8::/64")), Some(proxies[0]));
        assert_eq!(touches(&proxies, &net("10.1.1.1/32")), Some(proxies[1]));
        assert_eq!(touches(&proxies, &net("192.0.2.1/32")), None);
    }
}
