//! Who has which lease, and who may have one. The kernel has the same, and outlives this.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, SystemTime};

use limiter_common::abi::{
    AddressFamily, Lease, Leaseholder, MAX_LEASES, Name, PortRange, SourceAddress,
};
use limiter_common::flows::Transport;
use limiter_common::time::Nanos;
use log::{info, warn};

use super::credentials::{Identity, Serial, hex};
use super::outcome::{Outcome, Refusal};
use super::revocations::Revocations;
use crate::config::{Grant, Leasing, SHORTEST_LEASE};
use crate::datapath::{DatapathError, Leases as Maps};
use crate::host;
use crate::plan::Guarded;

/// The leases and the grants.
pub(super) struct Ledger {
    maps: Maps,
    held: BTreeMap<IpAddr, Held>,
    free: BTreeSet<u32>,
    grants: Vec<Granted>,
    /// Names and serial numbers, in lower case, as the configuration has them.
    revoked: HashSet<String>,
    /// Serial numbers of the list of revocations.
    revoked_serials: HashSet<Serial>,
    /// What commands said.
    pub(super) revocations: Revocations,
}

/// A grant, and the interfaces that it is about now.
#[derive(Clone, Debug)]
pub(super) struct Granted {
    pub(super) grant: Grant,
    slots: u32,
    pub(super) interfaces: Vec<String>,
}

/// A lease.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) name: String,
    pub(super) until: SystemTime,
    place: u32,
    serial: Serial,
    /// The end on the kernel's clock.
    ends: Nanos,
}

/// A lease as it was given.
pub(super) struct Given {
    pub(super) is_new: bool,
    pub(super) granted: Granted,
    pub(super) until: SystemTime,
    pub(super) lasts: Duration,
}

impl Ledger {
    /// The leases that an agent before this one gave.
    pub(super) fn adopt(maps: Maps, revocations: Revocations) -> Result<Self, DatapathError> {
        let (now, wall) = host::clocks();
        let (mut held, mut over) = (BTreeMap::new(), Vec::new());
        for (source, Leaseholder { place, serial, name }, ends) in maps.all()? {
            let lasts = Duration::from_nanos(ends.0.saturating_sub(now.0));
            match name.text().filter(|_| !lasts.is_zero()) {
                Some(name) => {
                    let name = name.to_owned();
                    let it = Held { name, until: wall + lasts, place, serial, ends };
                    held.insert(address(source), it);
                }
                None => over.push((source, place)),
            }
        }
        let taken: BTreeSet<_> = held.values().map(|it| it.place).collect();
        let last = u32::try_from(MAX_LEASES).unwrap_or(0);
        let free = (Lease::ALL + 1..last).filter(|place| !taken.contains(place)).collect();
        let (grants, revoked, revoked_serials) = (Vec::new(), HashSet::new(), HashSet::new());
        let mut ledger = Self { maps, held, free, grants, revoked, revoked_serials, revocations };
        for (source, place) in over {
            // It holds no more in any case.
            let _ = ledger.maps.end(source, place);
        }
        ledger.set_latest();
        Ok(ledger)
    }

    /// Puts another configuration in force: leases without a grant end, the others change with theirs.
    pub(super) fn configure(
        &mut self,
        config: Option<&Leasing>,
        interfaces: &[Guarded],
        revoked: HashSet<Serial>,
    ) {
        let grants = config.map_or(&[][..], |config| &config.grants);
        let granted = grants.iter().map(|grant| {
            let on = interfaces.iter().filter(|it| grant.interface.matches(&it.name));
            let (mut slots, mut names) = (0, Vec::new());
            for it in on {
                slots |= 1_u32.checked_shl(it.slot.0).unwrap_or(0);
                names.push(it.name.clone());
            }
            Granted { grant: grant.clone(), slots, interfaces: names }
        });
        self.grants = granted.collect();
        self.revoked =
            config.map_or(HashSet::new(), |config| config.revoked.iter().cloned().collect());
        self.revoked_serials = revoked;
        let held: Vec<_> = self.held.iter().map(|(at, it)| (*at, it.clone())).collect();
        for (address, it) in held {
            let granted = self.grants.iter().find(|known| known.grant.name == it.name).cloned();
            if self.is_revoked(&it.name, &it.serial, address) {
                self.end(address, "its credential is revoked");
            } else if let Some(granted) = granted {
                self.maps.set_terms(it.place, &granted.terms(it.ends));
            } else {
                self.end(address, "it has no grant any more");
            }
        }
    }

    /// Gives or renews a lease.
    pub(super) fn give(
        &mut self,
        identity: &Identity,
        address: IpAddr,
        asked: Option<Duration>,
    ) -> Result<Given, Refusal> {
        self.prune();
        let (now, wall) = host::clocks();
        if self.is_identity_revoked(identity, address) {
            return Err(Refusal::new(Outcome::Revoked, "the credential is revoked"));
        }
        if identity.until <= wall {
            return Err(Refusal::new(Outcome::Expired, "the credential's time is over"));
        }
        let granted = self.granted(identity)?.clone();
        let source = SourceAddress::from(address);
        if source.is_martian() {
            return Err(Refusal::new(
                Outcome::BadRequest,
                format!("no packet comes from {address}"),
            ));
        }
        let name = granted.grant.name.clone();
        let place = match self.held.get(&address) {
            Some(it) if it.name == name => it.place,
            Some(_) => {
                let why = format!("another service has a lease for {address}");
                return Err(Refusal::new(Outcome::TooMany, why));
            }
            None => {
                let others = self.held.values().filter(|it| it.name == name).count();
                if others as u64 >= granted.grant.addresses {
                    let why = format!("{name} has its leases from other addresses already");
                    return Err(Refusal::new(Outcome::TooMany, why));
                }
                let full = || Refusal::new(Outcome::TooMany, "there is no room for a lease");
                self.free.first().copied().ok_or_else(full)?
            }
        };
        let longest = granted.grant.max_duration;
        let lasts = asked.unwrap_or(longest).clamp(SHORTEST_LEASE.min(longest), longest);
        let left = identity.until.duration_since(wall).unwrap_or_default();
        // A token is only good for asking; a certificate must be good as long as the lease.
        let lasts = if identity.is_token { lasts } else { lasts.min(left) };
        let lasting = u64::try_from(lasts.as_nanos()).unwrap_or(u64::MAX);
        let ends = Nanos(now.0.saturating_add(lasting));
        let is_new = !self.held.contains_key(&address);
        let (until, serial) = (wall + lasts, identity.serial);
        // First, so that what is read by it is found.
        self.maps.set_until(Lease::ALL, ends.max(self.latest()));
        let holder = Leaseholder { place, serial, name: Name::new(&name) };
        if is_new {
            let failed = |error: DatapathError| {
                warn!("lease: {error}");
                Refusal::new(Outcome::Failed, "the kernel refuses; the agent's log says why")
            };
            self.maps.grant(source, &holder, &granted.terms(ends)).map_err(failed)?;
            self.free.remove(&place);
        } else {
            self.maps.set_terms(place, &granted.terms(ends));
        }
        self.held.insert(address, Held { name, until, place, serial, ends });
        self.set_latest();
        Ok(Given { is_new, granted, until, lasts })
    }

    /// Takes back the lease that the holder has from `address`; false if there is none.
    pub(super) fn release(
        &mut self,
        identity: &Identity,
        address: IpAddr,
    ) -> Result<bool, Refusal> {
        let name = self.granted(identity)?.grant.name.clone();
        self.prune();
        let is_held = self.held.get(&address).is_some_and(|it| it.name == name);
        if is_held {
            self.end(address, "it was given back");
        }
        Ok(is_held)
    }

    /// The lease that the holder has from `address`.
    pub(super) fn show(
        &mut self,
        identity: &Identity,
        address: IpAddr,
    ) -> Result<Option<(Granted, SystemTime)>, Refusal> {
        self.prune();
        let granted = self.granted(identity)?.clone();
        let held = self.held.get(&address).filter(|it| it.name == granted.grant.name);
        Ok(held.map(|it| (granted, it.until)))
    }

    /// Ends all leases of a name or an address, and says which.
    pub(super) fn end_all(&mut self, subject: &str, why: &str) -> Vec<IpAddr> {
        self.prune();
        let of = |(at, it): (&IpAddr, &Held)| {
            (it.name.eq_ignore_ascii_case(subject) || at.to_string() == subject).then_some(*at)
        };
        let ended: Vec<_> = self.held.iter().filter_map(of).collect();
        for address in &ended {
            self.end(*address, why);
        }
        ended
    }

    /// Forgets what is over.
    pub(super) fn prune(&mut self) {
        let now = host::monotonic();
        let over = self.held.iter().filter(|(_, it)| it.ends <= now).map(|(at, _)| *at);
        for address in over.collect::<Vec<_>>() {
            self.end(address, "its time is over");
        }
    }

    pub(super) fn held(&self) -> impl Iterator<Item = (&IpAddr, &Held)> {
        self.held.iter()
    }

    pub(super) fn grant_of(&self, held: &Held) -> Option<&Granted> {
        self.grants.iter().find(|known| known.grant.name == held.name)
    }

    /// Whether a name is known of which something could be revoked.
    pub(super) fn knows(&self, subject: &str) -> bool {
        self.grants.iter().any(|known| known.grant.name.eq_ignore_ascii_case(subject))
    }

    fn granted(&self, identity: &Identity) -> Result<&Granted, Refusal> {
        let is_its = |known: &&Granted| {
            identity.names.iter().any(|name| name.eq_ignore_ascii_case(&known.grant.name))
        };
        self.grants.iter().find(is_its).ok_or_else(|| {
            Refusal::new(Outcome::NotGranted, "no [[lease.grant]] has the credential's name")
        })
    }

    fn is_identity_revoked(&self, identity: &Identity, address: IpAddr) -> bool {
        identity.names.iter().any(|name| self.is_revoked(name, &identity.serial, address))
    }

    fn is_revoked(&self, name: &str, serial: &Serial, address: IpAddr) -> bool {
        let hex = hex(serial);
        let has_serial = *serial != Serial::default();
        // As viewers write it: with colons, 0x or zeros before it.
        let bare = |serial: &str| {
            serial.trim_start_matches("0x").replace(':', "").trim_start_matches('0').to_owned()
        };
        let hex = bare(&hex);
        let is_its = |revoked: &String| {
            *revoked == name.to_lowercase() || has_serial && bare(revoked) == hex
        };
        self.revoked.iter().any(is_its)
            || has_serial && self.revoked_serials.contains(serial)
            || self.revocations.holds(name, address, SystemTime::now())
    }

    fn end(&mut self, address: IpAddr, why: &str) {
        let Some(it) = self.held.remove(&address) else { return };
        if let Err(error) = self.maps.end(address.into(), it.place) {
            warn!("lease: {error}");
        }
        self.free.insert(it.place);
        self.set_latest();
        info!("lease: that of {} for {address} ended: {why}", it.name);
    }

    fn latest(&self) -> Nanos {
        self.held.values().map(|it| it.ends).max().unwrap_or(Nanos(0))
    }

    fn set_latest(&self) {
        self.maps.set_until(Lease::ALL, self.latest());
    }
}

impl Granted {
    /// What a lease allows that ends at `until`.
    fn terms(&self, until: Nanos) -> Lease {
        let Grant { cap, tcp, udp, .. } = &self.grant;
        // It could be enforced when the configuration was read.
        let cap = cap.packets().unwrap_or_default();
        let mut lease = Lease { until, cap, slots: self.slots, ..Lease::NONE };
        for (at, range) in self.grant.ports.iter().take(lease.ports.len()).enumerate() {
            lease.ports[at] = PortRange { first: *range.start(), last: *range.end() };
            for (transport, is_wanted) in [(Transport::Tcp, *tcp), (Transport::Udp, *udp)] {
                if is_wanted {
                    lease.protocols |= Lease::protocol(transport, at);
                }
            }
        }
        lease
    }
}

fn address(source: SourceAddress) -> IpAddr {
    match source.family {
        AddressFamily::Ipv4 => {
            Ipv4Addr::from_bits(u32::try_from(source.high >> 32).unwrap_or(0)).into()
        }
        AddressFamily::Ipv6 => {
            Ipv6Addr::from_bits(u128::from(source.high) << 64 | u128::from(source.low)).into()
        }
    }
}
