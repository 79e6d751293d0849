//! The two banks of settings: the inactive one is written, then a single word switches.

use std::collections::HashMap;
use std::time::Duration;

use aya::{
    Ebpf,
    maps::{Array, LpmTrie, MapData, lpm_trie::Key},
};
use limiter_common::{
    abi::{Bank, LimitsIndex, Mode, Policy, PolicyId, PrefixKey, Settings, map},
    time::Nanos,
    units::Limits,
};

use super::{DatapathError, Head, array, clock};
use crate::plan::{MapSizes, Plan, Prefix};

/// Where the share of `bank` begins in a map of `size` entries for both.
const fn base(bank: Bank, size: u32) -> u32 {
    bank.index() * (size / 2)
}

/// What lies in the banks.
pub(super) struct Banks {
    head: Head,
    written: [Written; 2],
    /// What of the plan in force is no matter of single prefixes; none if another agent put it in force.
    common: Option<Common>,
}

/// What of a plan concerns all sources.
#[derive(PartialEq)]
struct Common {
    settings: Box<Settings>,
    limits: Vec<Limits>,
    lease: Option<Nanos>,
}

/// Bits and key of a prefix.
pub(super) type Place = (u32, PrefixKey);

/// What was written into a bank, so that only what differs is written again. Nothing is known of the
/// policies and limits that another agent wrote.
#[derive(Default)]
struct Written {
    /// Bits and key of each prefix, and its policy.
    prefixes: HashMap<Place, PolicyId>,
    policies: Vec<Policy>,
    limits: Vec<Limits>,
}

impl Banks {
    /// Of maps that are new, or as another agent left them.
    pub(super) fn new(ebpf: &Ebpf, head: Head) -> Result<Self, DatapathError> {
        let mut written = [Written::default(), Written::default()];
        for (bits, key, policy) in prefixes(ebpf)? {
            written[usize::from(key.bank() & 1)].prefixes.insert((bits, key), policy);
        }
        Ok(Self { head, written, common: None })
    }

    /// Writes `plan` into the bank that is not in force, switches to it, and waits until no packet
    /// is decided under the other any more. An error leaves the old bank in force. With a `deadline`,
    /// the old bank is in force again from then on, unless that is confirmed.
    pub(super) fn install(
        &mut self,
        ebpf: &mut Ebpf,
        sizes: &MapSizes,
        plan: &Plan,
        deadline: Option<Nanos>,
    ) -> Result<(), DatapathError> {
        let bank = self.head.bank().other();
        let epoch = self.head.epoch().wrapping_add(1);

        let written = &mut self.written[usize::from(bank.number())];
        written.write_prefixes(ebpf, places(bank, plan, |policy| policy))?;
        let policies = policies(bank, sizes, plan);
        // The first place of a bank is the default policy's, which has no record.
        let first = base(bank, sizes.policies) + 1;
        write(ebpf, map::POLICIES, first, &policies, &mut written.policies)?;
        let limits = base(bank, sizes.limits);
        write(ebpf, map::LIMITS, limits, &plan.limits, &mut written.limits)?;
        let mut settings = plan.settings.clone();
        settings.coarse_origin = clock::origin(ebpf)?;
        settings.epoch = epoch;
        settings.bank = bank.index();
        settings.policies = base(bank, sizes.policies);
        let failed = |error| DatapathError::map(map::SETTINGS, error);
        let mut array: Array<_, Settings> = array(ebpf, map::SETTINGS)?;
        array.set(bank.index(), settings.as_ref(), 0).map_err(failed)?;
        settings.override_mode(Mode::OBSERVE);
        array.set(bank.variant(), settings.as_ref(), 0).map_err(failed)?;

        self.head.switch(bank, epoch, plan.lease, deadline)?;
        self.common = Some(Common::of(plan));
        wait_for_packets();
        Ok(())
    }

    /// Writes `plan` into the bank in force where it differs from what is there in a few prefixes only, and
    /// waits until no packet knows those as they were. Returns them: whoever has cached their policies must
    /// forget them. None if the plan has to be [installed](Self::install).
    pub(super) fn amend(
        &mut self,
        ebpf: &mut Ebpf,
        sizes: &MapSizes,
        plan: &Plan,
    ) -> Result<Option<Vec<Place>>, DatapathError> {
        /// Each costs a comparison for each bucket of the table.
        const MOST: usize = 64;
        let Some(bank) = self.head.settled().filter(|_| self.common == Some(Common::of(plan)))
        else {
            return Ok(None);
        };
        let written = &mut self.written[usize::from(bank.number())];
        let room = usize::try_from(sizes.policies / 2).unwrap_or(0).saturating_sub(1);
        let Some((policies, numbers)) = written.numbers(bank, sizes, plan, room) else {
            return Ok(None);
        };
        let number = |policy: PolicyId| match policy {
            PolicyId::DEFAULT => policy,
            PolicyId(id) => numbers[id as usize - 1],
        };
        let wanted = places(bank, plan, number);
        let gone = written.prefixes.keys().filter(|place| !wanted.contains_key(place));
        let changed =
            wanted.iter().filter(|(place, policy)| written.prefixes.get(place) != Some(policy));
        let changed: Vec<_> = gone.chain(changed.map(|(place, _)| place)).copied().collect();
        if changed.len() > MOST {
            return Ok(None);
        }
        // Nobody refers to the new ones before their prefixes do.
        write(
            ebpf,
            map::POLICIES,
            base(bank, sizes.policies) + 1,
            &policies,
            &mut written.policies,
        )?;
        written.write_prefixes(ebpf, wanted)?;
        wait_for_packets();
        Ok(Some(changed))
    }

    /// Whether buckets last used under old epochs are soon taken for current.
    pub(super) fn comes_round(&self) -> bool {
        self.head.epoch() % 128 == 127
    }
}

impl Written {
    fn write_prefixes(
        &mut self,
        ebpf: &mut Ebpf,
        wanted: HashMap<Place, PolicyId>,
    ) -> Result<(), DatapathError> {
        let failed = |error| DatapathError::map(map::PREFIXES, error);
        let map = ebpf.map_mut(map::PREFIXES).ok_or(DatapathError::MissingMap(map::PREFIXES))?;
        let mut trie: LpmTrie<&mut MapData, PrefixKey, PolicyId> =
            map.try_into().map_err(failed)?;
        let stale: Vec<_> =
            self.prefixes.keys().filter(|prefix| !wanted.contains_key(prefix)).copied().collect();
        for prefix in stale {
            trie.remove(&Key::new(prefix.0, prefix.1)).map_err(failed)?;
            self.prefixes.remove(&prefix);
        }
        for (prefix, policy) in wanted {
            if self.prefixes.get(&prefix) != Some(&policy) {
                trie.insert(&Key::new(prefix.0, prefix.1), policy, 0).map_err(failed)?;
                self.prefixes.insert(prefix, policy);
            }
        }
        Ok(())
    }

    /// The policies of the bank with those of `plan` that are not there yet behind them, and where each of
    /// the plan's is, so that all others stay as they are. None if there is no `room`.
    fn numbers(
        &self,
        bank: Bank,
        sizes: &MapSizes,
        plan: &Plan,
        room: usize,
    ) -> Option<(Vec<Policy>, Vec<PolicyId>)> {
        /// Times of the wall clock are read by the other one anew each time.
        const MARGIN: Nanos = Nanos(100_000_000);
        let mut all = self.policies.clone();
        let mut numbers = Vec::with_capacity(plan.policies.len());
        for policy in policies(bank, sizes, plan) {
            let place =
                all.iter().position(|known| known.is_about(&policy, MARGIN)).unwrap_or_else(|| {
                    all.push(policy);
                    all.len() - 1
                });
            numbers.push(PolicyId(u32::try_from(place + 1).ok()?));
        }
        (all.len() <= room).then_some((all, numbers))
    }
}

impl Common {
    fn of(plan: &Plan) -> Self {
        Self { settings: plan.settings.clone(), limits: plan.limits.clone(), lease: plan.lease }
    }
}

/// The prefixes of `plan` as `bank` has them, and what `number` makes of their policies.
fn places(
    bank: Bank,
    plan: &Plan,
    number: impl Fn(PolicyId) -> PolicyId,
) -> HashMap<Place, PolicyId> {
    let place = |prefix: &Prefix| {
        let key = PrefixKey::new(bank.number(), prefix.address);
        ((PrefixKey::FIXED_BITS + prefix.bits, key), number(prefix.policy))
    };
    plan.prefixes.iter().map(place).collect()
}

/// The policies of `plan`, with their limits found where those of `bank` lie.
fn policies(bank: Bank, sizes: &MapSizes, plan: &Plan) -> Vec<Policy> {
    let rows = base(bank, sizes.limits);
    let placed = |policy: &Policy| match policy.limits {
        LimitsIndex::CLASS => *policy,
        LimitsIndex(index) => {
            Policy::new(policy.blocked_until, policy.exempt, LimitsIndex(rows + index))
        }
    };
    plan.policies.iter().map(placed).collect()
}

/// Bits, key and policy of all prefixes that are in the map.
fn prefixes(ebpf: &Ebpf) -> Result<Vec<(u32, PrefixKey, PolicyId)>, DatapathError> {
    let failed = |error| DatapathError::map(map::PREFIXES, error);
    let map = ebpf.map(map::PREFIXES).ok_or(DatapathError::MissingMap(map::PREFIXES))?;
    let trie: LpmTrie<&MapData, PrefixKey, PolicyId> = map.try_into().map_err(failed)?;
    let prefix = |(key, policy): (Key<PrefixKey>, _)| (key.prefix_len(), key.data(), policy);
    trie.iter().map(|entry| entry.map(prefix).map_err(failed)).collect()
}

/// Writes those of `values` that differ from what was `written` there.
fn write<V: aya::Pod + PartialEq>(
    ebpf: &mut Ebpf,
    name: &'static str,
    first: u32,
    values: &[V],
    written: &mut Vec<V>,
) -> Result<(), DatapathError> {
    let mut array = array::<V>(ebpf, name)?;
    // If it fails in the middle, nobody knows what is there.
    let before = std::mem::take(written);
    for (index, (place, value)) in (first..).zip(values).enumerate() {
        if before.get(index) != Some(value) {
            array.set(place, value, 0).map_err(|error| DatapathError::map(name, error))?;
        }
    }
    values.clone_into(written);
    Ok(())
}

/// Returns when every packet that may have read the old bank's number has been decided.
///
/// membarrier(2)'s global command waits for an RCU grace period, and XDP programs run inside RCU
/// read sections. It is refused on kernels with `nohz_full` CPUs; there a pause, thousands of times
/// as long as a packet takes, has to do.
fn wait_for_packets() {
    // SAFETY: membarrier(2) takes three integers and touches no memory of ours.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if result != 0 {
        std::thread::sleep(Duration::from_millis(100));
    }
}
