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
use crate::plan::{MapSizes, Plan};

/// Where the share of `bank` begins in a map of `size` entries for both.
const fn base(bank: Bank, size: u32) -> u32 {
    bank.index() * (size / 2)
}

/// What lies in the banks.
pub(super) struct Banks {
    head: Head,
    epoch: u32,
    written: [Written; 2],
}

/// What was written into a bank, so that only what differs is written again. Nothing is known of the
/// policies and limits that another agent wrote.
#[derive(Default)]
struct Written {
    /// Bits and key of each prefix, and its policy.
    prefixes: HashMap<(u32, PrefixKey), PolicyId>,
    policies: Vec<Policy>,
    limits: Vec<Limits>,
}

impl Banks {
    /// Of maps that are new, or as another agent left them.
    pub(super) fn new(ebpf: &Ebpf, head: Head) -> Result<Self, DatapathError> {
        let failed = |error| DatapathError::map(map::SETTINGS, error);
        let settings = ebpf.map(map::SETTINGS).ok_or(DatapathError::MissingMap(map::SETTINGS))?;
        let settings: Array<_, Settings> = settings.try_into().map_err(failed)?;
        let epoch = |bank: Bank| settings.get(&bank.index(), 0).map(|settings| settings.epoch);
        let (first, second) =
            (epoch(Bank::First).map_err(failed)?, epoch(Bank::Second).map_err(failed)?);
        // The later of the two; the count may have come round in between.
        let epoch = if first.wrapping_sub(second).cast_signed() > 0 { first } else { second };
        let mut written = [Written::default(), Written::default()];
        for (bits, key, policy) in prefixes(ebpf)? {
            written[usize::from(key.bank() & 1)].prefixes.insert((bits, key), policy);
        }
        Ok(Self { head, epoch, written })
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
        let epoch = self.epoch.wrapping_add(1);

        let written = &mut self.written[usize::from(bank.number())];
        written.write_prefixes(ebpf, bank, plan)?;
        written.write_policies(ebpf, bank, sizes, plan)?;
        let limits = base(bank, sizes.limits);
        write(ebpf, map::LIMITS, limits, &plan.limits, &mut written.limits)?;
        let mut settings = Box::new(Settings {
            coarse_origin: clock::origin(ebpf)?,
            epoch,
            bank: bank.index(),
            policies: base(bank, sizes.policies),
            ..*plan.settings
        });
        let failed = |error| DatapathError::map(map::SETTINGS, error);
        let mut array: Array<_, Settings> = array(ebpf, map::SETTINGS)?;
        array.set(bank.index(), *settings, 0).map_err(failed)?;
        settings.override_mode(Mode::OBSERVE);
        array.set(bank.variant(), *settings, 0).map_err(failed)?;

        self.head.switch(bank, plan.lease, deadline)?;
        self.epoch = epoch;
        wait_for_packets();
        Ok(())
    }

    /// Whether buckets last used under old epochs are soon taken for current.
    pub(super) fn comes_round(&self) -> bool {
        self.epoch % 128 == 127
    }
}

impl Written {
    fn write_prefixes(
        &mut self,
        ebpf: &mut Ebpf,
        bank: Bank,
        plan: &Plan,
    ) -> Result<(), DatapathError> {
        let failed = |error| DatapathError::map(map::PREFIXES, error);
        let map = ebpf.map_mut(map::PREFIXES).ok_or(DatapathError::MissingMap(map::PREFIXES))?;
        let mut trie: LpmTrie<&mut MapData, PrefixKey, PolicyId> =
            map.try_into().map_err(failed)?;
        let wanted: HashMap<_, _> = plan
            .prefixes
            .iter()
            .map(|prefix| {
                let key = PrefixKey::new(bank.number(), prefix.address);
                ((PrefixKey::FIXED_BITS + prefix.bits, key), prefix.policy)
            })
            .collect();
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

    /// The plan's policies, with their limits found where this bank's limits lie.
    fn write_policies(
        &mut self,
        ebpf: &mut Ebpf,
        bank: Bank,
        sizes: &MapSizes,
        plan: &Plan,
    ) -> Result<(), DatapathError> {
        let rows = base(bank, sizes.limits);
        let policies: Vec<Policy> = plan
            .policies
            .iter()
            .map(|policy| match policy.limits {
                LimitsIndex::CLASS => *policy,
                LimitsIndex(index) => {
                    Policy::new(policy.blocked_until, policy.exempt, LimitsIndex(rows + index))
                }
            })
            .collect();
        // The first place of a bank is the default policy's, which has no record.
        let first = base(bank, sizes.policies) + 1;
        write(ebpf, map::POLICIES, first, &policies, &mut self.policies)
    }
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
