//! Exemptions that were asked for while the agent runs, beside those of the file.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::blocks::{ends, whole_second};
use super::{Blame, Refused};
use crate::config::{Config, Exemption, Pattern, network};

/// The longest that one with an end may last: ten years.
const LONGEST: Duration = Duration::from_hours(10 * 365 * 24);

/// An exemption that was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RuntimeExemption {
    /// Never if none.
    expires: Option<SystemTime>,
    owner: String,
    since: SystemTime,
    by: String,
}

/// All that have not been taken back, by network and interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RuntimeExemptions(BTreeMap<(IpNet, String), RuntimeExemption>);

/// An exemption as it is wanted.
#[derive(Clone, Debug)]
pub struct ExemptOrder {
    cidr: IpNet,
    interface: String,
    owner: Option<String>,
    /// For ever if none.
    duration: Option<Duration>,
}

impl ExemptOrder {
    /// Reads what was asked for.
    ///
    /// # Errors
    /// In a sentence: it is no network, is all of its family, or lasts for no time or too long.
    pub fn new(
        cidr: &str,
        interface: String,
        owner: Option<String>,
        duration: Option<Duration>,
    ) -> Result<Self, String> {
        let cidr = network(cidr)?;
        if cidr.prefix_len() == 0 {
            return Err(format!("{cidr} is every address of its family; exempt networks"));
        }
        if duration.is_some_and(|it| it.is_zero() || it > LONGEST) {
            return Err("an exemption lasts from 1s to 10 years; leave --for out for one without \
                        an end"
                .to_owned());
        }
        Ok(Self { cidr, interface, owner, duration })
    }
}

impl RuntimeExemptions {
    /// Exempts a network on an interface that `file` guards; its end and owner are those asked for last.
    pub(super) fn add(
        &mut self,
        order: &ExemptOrder,
        file: &Config,
        now: SystemTime,
        by: &str,
    ) -> Result<(String, Option<SystemTime>), Refused> {
        let ExemptOrder { cidr, interface, owner, duration } = order;
        if Pattern::new(interface).is_glob() || !is_guarded(interface, file) {
            let guarded: Vec<_> = file.interfaces.iter().map(|it| it.name.as_str()).collect();
            let why = format!(
                "no guarded interface is called \"{interface}\", so it would hold nowhere; guarded \
                 are {}",
                guarded.join(", ")
            );
            return Err((Blame::Request, vec![why]));
        }
        let expires = duration.map(|duration| whole_second(now + duration));
        let owner = owner.clone().unwrap_or_else(|| by.to_owned());
        let exemption = RuntimeExemption { expires, owner, since: now, by: by.to_owned() };
        self.0.insert((*cidr, interface.clone()), exemption);
        Ok((format!("{cidr} is exempt on {interface} {}", ends(expires)), expires))
    }

    /// Takes back what was asked for of exactly this network on this interface.
    pub(super) fn remove(&mut self, cidr: &IpNet, interface: &str) -> Result<String, Refused> {
        if self.0.remove(&(*cidr, interface.to_owned())).is_some() {
            return Ok(format!("{cidr} is no longer exempt on {interface}"));
        }
        let why = format!(
            "nobody exempted {cidr} on {interface} by a command; `status` lists what is exempt, and \
             an [[exempt]] is taken out of the file"
        );
        Err((Blame::Request, vec![why]))
    }

    /// Forgets those that are over.
    pub(super) fn prune(&mut self, now: SystemTime) {
        self.0.retain(|_, it| it.expires.is_none_or(|at| now < at));
    }

    /// As if they stood in `file`. One on an interface that is no longer guarded waits for that.
    pub(super) fn as_config(&self, file: &Config) -> impl Iterator<Item = Exemption> {
        self.0.iter().filter(|((_, interface), _)| is_guarded(interface, file)).map(
            |((cidr, interface), it)| Exemption {
                cidr: *cidr,
                interface: Some(Pattern::new(interface)),
                owner: it.owner.clone(),
                expires: it.expires,
                line: 0,
            },
        )
    }

    /// For the state directory, where a network is text.
    pub(super) fn saved(&self) -> Vec<(String, String, RuntimeExemption)> {
        let saved = self.0.iter();
        saved.map(|((cidr, name), it)| (cidr.to_string(), name.clone(), it.clone())).collect()
    }

    /// From there; what is no network any more is left out.
    pub(super) fn restored(saved: Vec<(String, String, RuntimeExemption)>) -> Self {
        let known = saved.into_iter();
        let known = known.filter_map(|(cidr, name, it)| Some(((network(&cidr).ok()?, name), it)));
        Self(known.collect())
    }
}

fn is_guarded(interface: &str, file: &Config) -> bool {
    file.interfaces.iter().any(|it| it.name.matches(interface))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
[[interface]]
name = "ens*"
[[class]]
name = "rest"
packets = { rate = "10/s", burst = 10 }
"#;

    fn order(interface: &str, seconds: u64) -> ExemptOrder {
        let duration = Some(Duration::from_secs(seconds));
        ExemptOrder::new("10.0.0.0/8", interface.to_owned(), None, duration).expect("is one")
    }

    #[test]
    fn one_holds_on_a_guarded_interface_until_its_end() {
        let (start, by) = (SystemTime::UNIX_EPOCH, "uid 0");
        let file = Config::parse("test", TEXT, start).expect("is valid");
        let mut exemptions = RuntimeExemptions::default();
        let (_, errors) = exemptions.add(&order("eth0", 9), &file, start, by).expect_err("no such");
        assert!(errors[0].contains("guarded are ens*"), "{errors:?}");
        exemptions.add(&order("ens1", 9), &file, start, by).expect("is guarded");
        let held: Vec<_> = exemptions.as_config(&file).collect();
        assert_eq!((held.len(), held[0].owner.as_str(), held[0].is_spoofable()), (1, by, false));
        assert_eq!(RuntimeExemptions::restored(exemptions.saved()), exemptions);
        // A file without the interface is not refused for it.
        let other = Config::parse("test", &TEXT.replace("ens*", "eth0"), start).expect("is valid");
        assert_eq!(exemptions.as_config(&other).count(), 0);
        exemptions.prune(start + Duration::from_secs(9));
        assert_eq!(exemptions, RuntimeExemptions::default());
        let net = "10.0.0.0/8".parse().expect("is a network");
        exemptions.remove(&net, "ens1").expect_err("it is over");
        ExemptOrder::new("0.0.0.0/0", "ens1".to_owned(), None, None).expect_err("is all");
    }
}
