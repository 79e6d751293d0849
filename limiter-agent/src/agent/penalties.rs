//! Penalties that applications ask for: blocks of single sources that always end, and last longer for who
//! comes again.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, SystemTime};

use ipnet::{IpNet, Ipv6Net};
use limiter_common::packet::{Source, Space};

use crate::config::Bridge;

/// Sources whose penalties are remembered. Beyond that, the one is forgotten whose penalty ended first.
const REMEMBERED: usize = 16_384;

/// A source that is to be penalised.
#[derive(Clone, Debug)]
pub struct PenaltyOrder {
    /// All that shares its bucket.
    pub net: IpNet,
    /// Why.
    pub reason: Option<String>,
    /// From 0 to 1, by chance: those who are penalised together do not come back together.
    pub draw: f64,
}

/// A penalty that was given, or that holds on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Penalty {
    /// Its end.
    pub until: SystemTime,
    /// How long that is from now, in seconds.
    pub seconds: u64,
    /// The how manieth in a row it is.
    pub level: u32,
}

/// What is remembered of those who were penalised.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Penalties(BTreeMap<IpNet, Memory>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Memory {
    level: u32,
    until: SystemTime,
}

impl Penalties {
    /// The next penalty of a source, which has none at `now`: twice as long as the one before, up to the
    /// longest, less up to an eighth by `draw`. It is remembered.
    pub(super) fn next(
        &mut self,
        order: &PenaltyOrder,
        terms: &Bridge,
        now: SystemTime,
    ) -> Penalty {
        let level = self.0.get(&order.net).map_or(0, |it| it.level_at(now, terms)) + 1;
        let doubled =
            2_u32.checked_pow(level - 1).and_then(|it| terms.first_penalty.checked_mul(it));
        let whole = doubled.unwrap_or(terms.longest_penalty).min(terms.longest_penalty);
        let less = whole.mul_f64(order.draw.clamp(0.0, 1.0) / 8.0);
        let seconds = whole.saturating_sub(less).as_secs_f64().ceil();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "1 to 86,400, as the configuration has it"
        )]
        let seconds = (seconds as u64).max(1);
        let until = now + Duration::from_secs(seconds);
        self.remember(order.net, Memory { level, until }, terms, now);
        Penalty { until, seconds, level }
    }

    /// Forgets what a source was penalised for.
    pub(super) fn pardon(&mut self, net: &IpNet) {
        self.0.remove(net);
    }

    fn remember(&mut self, net: IpNet, memory: Memory, terms: &Bridge, now: SystemTime) {
        if self.0.len() >= REMEMBERED && !self.0.contains_key(&net) {
            self.0.retain(|_, it| it.level_at(now, terms) > 0);
        }
        if self.0.len() >= REMEMBERED && !self.0.contains_key(&net) {
            let oldest = self.0.iter().min_by_key(|(_, it)| it.until).map(|(net, _)| *net);
            oldest.map(|oldest| self.0.remove(&oldest));
        }
        self.0.insert(net, memory);
    }
}

impl Memory {
    /// The level at `now`: one less for each time that passed since the end without a penalty.
    fn level_at(&self, now: SystemTime, terms: &Bridge) -> u32 {
        let idle = now.duration_since(self.until).unwrap_or_default();
        let forgotten = idle.as_secs() / terms.penalty_memory.as_secs().max(1);
        self.level.saturating_sub(u32::try_from(forgotten).unwrap_or(u32::MAX))
    }
}

/// The network of all addresses that share a bucket with `address`: itself, or its IPv6 /64. An IPv4 peer of
/// a socket of both families is an IPv4 address.
#[must_use]
pub fn source_network(address: IpAddr) -> IpNet {
    let address = address.to_canonical();
    let IpAddr::V6(v6) = address else { return address.into() };
    let (v6, bits) = match Source::from(address).space {
        Space::LinkLocal => (link_local(v6), 128),
        Space::Ipv4 | Space::Nat64 => (v6, 128),
        Space::SixToFour => (v6, 48),
        Space::Ipv6 => (v6, 64),
    };
    Ipv6Net::new(v6, bits).map_or_else(|_| address.into(), |net| net.trunc().into())
}

/// As prefixes see it.
fn link_local(address: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c, d] = address.segments();
    Ipv6Addr::new(0xfe80, 0, 0, 0, a, b, c, d)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn terms() -> Bridge {
        let text = r#"
[[interface]]
name = "eth0"
[application]
first_penalty = "10s"
longest_penalty = "60s"
penalty_memory = "5m"
[[class]]
name = "rest"
packets = { rate = "10/s", burst = 10 }
"#;
        Config::parse("test", text, SystemTime::UNIX_EPOCH).expect("is valid").application
    }

    fn order(net: &str, draw: f64) -> PenaltyOrder {
        PenaltyOrder { net: net.parse().expect("is a network"), reason: None, draw }
    }

    #[test]
    fn penalties_double_up_to_the_longest_and_are_forgotten_one_by_one() {
        let (terms, mut penalties) = (terms(), Penalties::default());
        let mut now = SystemTime::UNIX_EPOCH;
        for (level, seconds) in [(1, 10), (2, 20), (3, 40), (4, 60), (5, 60)] {
            let penalty = penalties.next(&order("192.0.2.1/32", 0.0), &terms, now);
            assert_eq!((penalty.level, penalty.seconds), (level, seconds));
            now = penalty.until;
        }
        // Two of five are forgotten.
        let later = now + Duration::from_mins(11);
        let penalty = penalties.next(&order("192.0.2.1/32", 0.0), &terms, later);
        assert_eq!((penalty.level, penalty.seconds), (4, 60));
        let later = penalty.until + Duration::from_hours(1);
        assert_eq!(penalties.next(&order("192.0.2.1/32", 0.0), &terms, later).level, 1);
        assert_eq!(penalties.next(&order("192.0.2.2/32", 0.0), &terms, later).level, 1);
    }

    #[test]
    fn chance_shortens_by_an_eighth_at_most() {
        let mut penalties = Penalties::default();
        let mut seconds = |draw| {
            let order = order("192.0.2.1/32", draw);
            penalties.pardon(&order.net);
            penalties.next(&order, &terms(), SystemTime::UNIX_EPOCH).seconds
        };
        assert_eq!([0.0, 0.5, 1.0, 7.0].map(&mut seconds), [10, 10, 9, 9]);
    }

    #[test]
    fn the_memory_is_bounded() {
        let (terms, mut penalties) = (terms(), Penalties::default());
        let now = SystemTime::UNIX_EPOCH;
        for number in 0..u32::try_from(REMEMBERED).expect("fits") + 100 {
            let net = IpAddr::from(number.to_be_bytes()).into();
            let order = PenaltyOrder { net, reason: None, draw: 0.0 };
            penalties.next(&order, &terms, now + Duration::from_millis(number.into()));
        }
        assert_eq!(penalties.0.len(), REMEMBERED);
        assert!(!penalties.0.contains_key(&IpAddr::from([0, 0, 0, 0]).into()), "the oldest went");
    }

    #[test]
    fn a_source_is_all_that_shares_its_bucket() {
        for (address, net) in [
            ("192.0.2.1", "192.0.2.1/32"),
            ("::ffff:192.0.2.1", "192.0.2.1/32"),
            ("2001:db8::1:2:3:4", "2001:db8::/64"),
            ("fe80:0:0:7::1", "fe80::1/128"),
            ("64:ff9b::c000:201", "64:ff9b::c000:201/128"),
            ("2002:c000:201:5::1", "2002:c000:201::/48"),
        ] {
            let found = source_network(address.parse().expect("is an address"));
            assert_eq!(found.to_string(), net, "{address}");
        }
    }
}
