//! Blocks that were asked for while the agent runs, beside those of the file.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::penalties::{Penalty, PenaltyOrder};
use super::{Blame, Refused};
use crate::config::{Block, network};
use crate::host;
use crate::status::utc;

/// Where an operator's session mostly ends.
const SSH: u16 = 22;

/// The longest that a block with an end may last: ten years.
const LONGEST: Duration = Duration::from_hours(10 * 365 * 24);

/// A block that was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RuntimeBlock {
    /// Never if none.
    pub(super) expires: Option<SystemTime>,
    pub(super) reason: Option<String>,
    pub(super) since: SystemTime,
    pub(super) by: String,
    /// The level, if it is a penalty.
    #[serde(default)]
    pub(super) penalty: Option<u32>,
}

/// All that have not been taken back, by network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Blocks(BTreeMap<IpNet, RuntimeBlock>);

/// A block as it is wanted, which does no harm that can be known.
#[derive(Clone, Debug)]
pub struct BlockOrder {
    cidr: IpNet,
    /// For ever if none.
    duration: Option<Duration>,
    reason: Option<String>,
    warnings: Vec<String>,
}

impl BlockOrder {
    /// Reads what was asked for and looks at what it would hit.
    ///
    /// # Errors
    /// In a sentence: it is no network, is all of its family, covers an address of this host, or
    /// lasts for no time or too long.
    pub async fn new(
        cidr: &str,
        duration: Option<Duration>,
        reason: Option<String>,
    ) -> Result<Self, String> {
        let cidr = network(cidr)?;
        if cidr.prefix_len() == 0 {
            return Err(format!(
                "{cidr} is every address of its family, your own among them; block networks"
            ));
        }
        if let Some(own) = host::own_addresses().iter().find(|own| cidr.contains(*own)) {
            return Err(format!(
                "{cidr} covers {own}, an address of this host, and so its neighbours; block a \
                 network without it"
            ));
        }
        if duration.is_some_and(|duration| duration.is_zero() || duration > LONGEST) {
            return Err(
                "a block lasts from 1s to 10 years; leave --for out for one without an end"
                    .to_owned(),
            );
        }
        Ok(Self { cidr, duration, reason, warnings: warnings(&cidr).await })
    }
}

impl BlockOrder {
    pub(super) fn cidr(&self) -> &IpNet {
        &self.cidr
    }
}

impl Blocks {
    /// Blocks a network, or extends its block: the later end holds.
    pub(super) fn add(
        &mut self,
        order: &BlockOrder,
        now: SystemTime,
        by: &str,
    ) -> (String, Vec<String>) {
        let BlockOrder { cidr, duration, reason, warnings } = order;
        let expires = duration.map(|duration| whole_second(now + duration));
        let mut warnings = warnings.clone();
        let said = match self.0.get_mut(cidr).filter(|known| known.holds(now)) {
            None => {
                let (reason, by) = (reason.clone(), by.to_owned());
                let block = RuntimeBlock { expires, reason, since: now, by, penalty: None };
                self.0.insert(*cidr, block);
                format!("{cidr} is blocked {}", ends(expires))
            }
            Some(known) => {
                let later = known.expires.zip(expires).map(|(known, new)| known.max(new));
                let extended = later != known.expires;
                if expires.is_some() && !extended && later != expires {
                    warnings.push(format!(
                        "a block is never shortened: unblock {cidr} first for an earlier end"
                    ));
                }
                known.expires = later;
                // Who was penalised is blocked by an operator now.
                known.penalty = None;
                if let Some(reason) = reason {
                    known.reason = Some(reason.clone());
                }
                let word = if extended { "is extended" } else { "stays" };
                format!("{cidr} was blocked already; its block {word} {}", ends(later))
            }
        };
        (said, warnings)
    }

    /// Blocks a source for as long as `next` says, unless it is blocked already: a penalty that holds is
    /// what it is, since what is reported meanwhile was under way before it.
    pub(super) fn penalise(
        &mut self,
        order: &PenaltyOrder,
        now: SystemTime,
        by: &str,
        next: impl FnOnce() -> Result<Penalty, Refused>,
    ) -> Result<(String, Penalty), Refused> {
        let PenaltyOrder { net: source, reason, .. } = order;
        if let Some(known) = self.0.get(source).filter(|known| known.holds(now)) {
            let (Some(level), Some(until)) = (known.penalty, known.expires) else {
                return Err((Blame::Request, vec![format!("an operator has blocked {source}")]));
            };
            let seconds = until.duration_since(now).unwrap_or_default().as_secs_f64().ceil();
            let seconds = Duration::from_secs_f64(seconds).as_secs();
            let said = format!("{source} is penalised already, {}", ends(Some(until)));
            return Ok((said, Penalty { until, seconds, level }));
        }
        let penalty = next()?;
        let until = whole_second(penalty.until);
        let block = RuntimeBlock {
            expires: Some(until),
            reason: reason.clone(),
            since: now,
            by: by.to_owned(),
            penalty: Some(penalty.level),
        };
        self.0.insert(*source, block);
        let said = format!("{source} is penalised {}, level {}", ends(Some(until)), penalty.level);
        Ok((said, Penalty { until, ..penalty }))
    }

    /// When the block of exactly this network ends.
    pub(super) fn end(&self, cidr: &IpNet) -> Option<SystemTime> {
        self.0.get(cidr)?.expires
    }

    /// How many penalties hold.
    pub(super) fn penalties(&self) -> usize {
        self.0.values().filter(|it| it.penalty.is_some()).count()
    }

    /// Takes the block of exactly this network back.
    pub(super) fn remove(&mut self, cidr: &IpNet) -> Result<String, (Blame, Vec<String>)> {
        if self.0.remove(cidr).is_some() {
            return Ok(format!("{cidr} is no longer blocked"));
        }
        let around: Vec<_> =
            self.0.keys().filter(|known| known.contains(cidr)).map(ToString::to_string).collect();
        let cure = if around.is_empty() {
            "`status` lists what is blocked; a [[block]] is taken out of the file".to_owned()
        } else {
            format!("unblock {}, which covers it", around.join(", "))
        };
        Err((Blame::Request, vec![format!("nobody blocked {cidr} by a command; {cure}")]))
    }

    /// Forgets those that are over.
    pub(super) fn prune(&mut self, now: SystemTime) {
        self.0.retain(|_, block| block.holds(now));
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&IpNet, &RuntimeBlock)> {
        self.0.iter()
    }

    /// As if they stood in the file.
    pub(super) fn as_config(&self) -> impl Iterator<Item = Block> {
        self.0.iter().map(|(cidr, block)| Block {
            cidr: *cidr,
            expires: block.expires,
            reason: block.reason.clone(),
        })
    }

    /// For the state directory, where a network is text.
    pub(super) fn saved(&self) -> BTreeMap<String, RuntimeBlock> {
        self.0.iter().map(|(cidr, block)| (cidr.to_string(), block.clone())).collect()
    }

    /// From there; what is no network any more is left out.
    pub(super) fn restored(saved: BTreeMap<String, RuntimeBlock>) -> Self {
        let known =
            saved.into_iter().filter_map(|(cidr, block)| Some((network(&cidr).ok()?, block)));
        Self(known.collect())
    }
}

impl RuntimeBlock {
    pub(super) fn holds(&self, now: SystemTime) -> bool {
        self.expires.is_none_or(|at| now < at)
    }
}

/// Blocks asked for within a second end together, which makes one policy of them.
pub(super) fn whole_second(time: SystemTime) -> SystemTime {
    let age = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let seconds = age.as_secs() + u64::from(age.subsec_nanos() > 0);
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

/// When something ends, in words.
pub(super) fn ends(expires: Option<SystemTime>) -> String {
    expires.map_or("without an end".to_owned(), |at| format!("until {}", utc(at)))
}

/// What the block hits that somebody may not have meant.
async fn warnings(cidr: &IpNet) -> Vec<String> {
    let hit = |address: &IpAddr| cidr.contains(address);
    match host::peers_of(|ours, _| ours == SSH).await {
        Ok(peers) => {
            let hit: Vec<_> =
                peers.iter().filter(|peer| hit(peer)).map(ToString::to_string).collect();
            if hit.is_empty() {
                return vec![];
            }
            let hit = hit.join(", ");
            vec![format!("{cidr} covers {hit}, from where an ssh session to this host is open")]
        }
        Err(error) => vec![format!("whether it covers an ssh session is not known: {error}")],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(cidr: &str, seconds: Option<u64>) -> BlockOrder {
        BlockOrder {
            cidr: network(cidr).expect("is a network"),
            duration: seconds.map(Duration::from_secs),
            reason: None,
            warnings: vec![],
        }
    }

    fn end(blocks: &Blocks) -> Option<SystemTime> {
        blocks.iter().next().expect("is there").1.expires
    }

    #[test]
    fn a_repeated_block_is_extended_and_never_shortened() {
        let (start, by) = (SystemTime::UNIX_EPOCH, "uid 0");
        let at = |seconds| Some(start + Duration::from_secs(seconds));
        let mut blocks = Blocks::default();
        blocks.add(&order("192.0.2.0/24", Some(60)), start, by);
        assert_eq!(end(&blocks), at(60));
        let (said, warnings) = blocks.add(&order("192.0.2.0/24", Some(10)), start, by);
        assert!(said.contains("stays") && warnings.len() == 1, "{said}");
        assert_eq!(end(&blocks), at(60));
        blocks.add(&order("192.0.2.0/24", Some(90)), start, by);
        assert_eq!(end(&blocks), at(90));
        blocks.add(&order("192.0.2.0/24", None), start, by);
        assert_eq!(end(&blocks), None);
        blocks.add(&order("192.0.2.0/24", Some(90)), start, by);
        assert_eq!(end(&blocks), None);
    }

    #[test]
    fn one_that_is_over_is_not_extended_but_new() {
        let start = SystemTime::UNIX_EPOCH;
        let mut blocks = Blocks::default();
        blocks.add(&order("192.0.2.0/24", Some(10)), start, "one");
        blocks.add(&order("192.0.2.0/24", Some(10)), start + Duration::from_secs(20), "other");
        assert_eq!(blocks.iter().next().map(|(_, it)| it.by.as_str()), Some("other"));
        blocks.prune(start + Duration::from_secs(30));
        assert_eq!(blocks, Blocks::default());
    }

    #[test]
    fn ends_are_whole_seconds_and_not_early() {
        let time = SystemTime::UNIX_EPOCH + Duration::from_millis(1500);
        assert_eq!(whole_second(time), SystemTime::UNIX_EPOCH + Duration::from_secs(2));
    }
}
