//! The two banks of settings: the inactive one is written, then a single word switches.

use std::collections::HashSet;
use std::time::Duration;

use aya::{
    Ebpf,
    maps::{Array, LpmTrie, MapData, lpm_trie::Key},
};
use limiter_common::{
    abi::{Bank, LimitsIndex, Policy, PolicyId, PrefixKey, Settings, map},
    units::Limits,
};

use super::{DatapathError, clock};
use crate::plan::{MapSizes, Plan};

/// Where the share of `bank` begins in a map of `size` entries for both.
const fn base(bank: Bank, size: u32) -> u32 {
    bank.index() * (size / 2)
}

/// What lies in the banks.
#[derive(Default)]
pub(super) struct Banks {
    /// The bank in force; none before the first plan.
    active: Option<Bank>,
    epoch: u32,
    /// The prefixes of each bank: their bits and key.
    prefixes: [HashSet<(u32, PrefixKey)>; 2],
}

impl Banks {
    /// Writes `plan` into the bank that is not in force, switches to it, and waits until no packet
    /// is decided under the other any more. An error leaves the old bank in force.
    pub(super) fn install(
        &mut self,
        ebpf: &mut Ebpf,
        sizes: &MapSizes,
        plan: &Plan,
    ) -> Result<(), DatapathError> {
        let bank = self.active.map_or(Bank::First, Bank::other);
        let epoch = self.epoch.wrapping_add(1);

        self.write_prefixes(ebpf, bank, plan)?;
        write_policies(ebpf, bank, sizes, plan)?;
        let limits = base(bank, sizes.limits);
        write(&mut array::<Limits>(ebpf, map::LIMITS)?, map::LIMITS, limits, &plan.limits)?;
        let settings = Box::new(Settings {
            coarse_origin: clock::origin(ebpf)?,
            epoch,
            bank: bank.index(),
            policies: base(bank, sizes.policies),
            ..*plan.settings
        });
        write(
            &mut array(ebpf, map::SETTINGS)?,
            map::SETTINGS,
            bank.index(),
            std::slice::from_ref(&*settings),
        )?;

        write(&mut array(ebpf, map::ACTIVE)?, map::ACTIVE, 0, &[u64::from(bank.index())])?;
        self.active = Some(bank);
        self.epoch = epoch;
        wait_for_packets();
        Ok(())
    }

    /// Whether buckets last used under old epochs are soon taken for current.
    pub(super) fn comes_round(&self) -> bool {
        self.epoch % 128 == 127
    }

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
        let number = u8::from(bank == Bank::Second);
        let written = &mut self.prefixes[usize::from(number)];
        let wanted: HashSet<_> = plan
            .prefixes
            .iter()
            .map(|prefix| {
                (PrefixKey::FIXED_BITS + prefix.bits, PrefixKey::new(number, prefix.address))
            })
            .collect();
        let stale: Vec<_> = written.difference(&wanted).copied().collect();
        for prefix in stale {
            trie.remove(&Key::new(prefix.0, prefix.1)).map_err(failed)?;
            written.remove(&prefix);
        }
        for prefix in &plan.prefixes {
            let bits = PrefixKey::FIXED_BITS + prefix.bits;
            let key = PrefixKey::new(number, prefix.address);
            trie.insert(&Key::new(bits, key), prefix.policy, 0).map_err(failed)?;
            written.insert((bits, key));
        }
        Ok(())
    }
}

/// The plan's policies, with their limits found where this bank's limits lie.
fn write_policies(
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
    write(&mut array(ebpf, map::POLICIES)?, map::POLICIES, first, &policies)
}

fn array<'a, V: aya::Pod>(
    ebpf: &'a mut Ebpf,
    name: &'static str,
) -> Result<Array<&'a mut MapData, V>, DatapathError> {
    let map = ebpf.map_mut(name).ok_or(DatapathError::MissingMap(name))?;
    map.try_into().map_err(|error| DatapathError::map(name, error))
}

fn write<V: aya::Pod>(
    array: &mut Array<&mut MapData, V>,
    name: &'static str,
    first: u32,
    values: &[V],
) -> Result<(), DatapathError> {
    for (place, value) in (first..).zip(values) {
        array.set(place, value, 0).map_err(|error| DatapathError::map(name, error))?;
    }
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
