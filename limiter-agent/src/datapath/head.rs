//! Which settings hold, and until when: the variable of the program, as the agent writes it.

use std::{
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use aya::{
    Ebpf,
    maps::{Array, MapData},
};
use limiter_common::{
    abi::{self, Bank, map},
    time::Nanos,
};

use super::{DatapathError, pins};
use crate::host;

/// The variable. Clones are handles to the same one, so that whoever says that the agent lives need not
/// wait for whoever changes settings.
#[derive(Clone)]
pub struct Head(Arc<Mutex<State>>);

struct State {
    map: Array<MapData, abi::Head>,
    active: u64,
    epoch: u32,
    /// After so long without a sign of life nothing is dropped; none to go on for ever.
    lease: Option<Nanos>,
    /// When the settings of which bank hold again, unless the present ones are confirmed.
    fallback: Option<(Nanos, Bank)>,
}

impl Head {
    /// Takes the variable of a loaded object.
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, DatapathError> {
        let failed = |error| DatapathError::map(map::HEAD, error);
        let map = ebpf.take_map(map::HEAD).ok_or(DatapathError::MissingMap(map::HEAD))?;
        let map: Array<_, abi::Head> = map.try_into().map_err(failed)?;
        let head = map.get(&0, 0).map_err(failed)?;
        let active = effective(&head, host::monotonic());
        let epoch = u32::try_from(head.epoch).unwrap_or(0);
        Ok(Self(Arc::new(Mutex::new(State { map, active, epoch, lease: None, fallback: None }))))
    }

    /// What the variable in these pinned maps holds; without what no longer does.
    pub(super) fn left(maps: &Path) -> Result<abi::Head, DatapathError> {
        let failed = |error| DatapathError::map(map::HEAD, error);
        let head: abi::Head =
            pins::array(maps, map::HEAD).map_err(failed)?.get(&0, 0).map_err(failed)?;
        Ok(abi::Head { active: effective(&head, host::monotonic()), ..head })
    }

    /// The bank that the settings in force belong to.
    pub(super) fn bank(&self) -> Bank {
        Bank::of_place(self.state().active)
    }

    /// The bank whose settings are in force, if nothing but the agent's end can change that.
    pub(super) fn settled(&self) -> Option<Bank> {
        let state = self.state();
        let bank = Bank::of_place(state.active);
        (state.fallback.is_none() && state.active == u64::from(bank.index())).then_some(bank)
    }

    /// The epoch of the settings that were written last.
    pub(super) fn epoch(&self) -> u32 {
        self.state().epoch
    }

    /// Puts the settings of `bank`, written with this `epoch`, in force, with `lease` from now on; with a
    /// `deadline` only until then, unless [`confirm`](Self::confirm) comes.
    pub(super) fn switch(
        &self,
        bank: Bank,
        epoch: u32,
        lease: Option<Nanos>,
        deadline: Option<Nanos>,
    ) -> Result<(), DatapathError> {
        let mut state = self.state();
        state.epoch = epoch;
        let fallback = deadline.map(|deadline| (deadline, Bank::of_place(state.active)));
        let active = u64::from(bank.index());
        state.write(active, lease, fallback)
    }

    /// Lets the settings in force hold for ever.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the variable cannot be written.
    pub fn confirm(&self) -> Result<(), DatapathError> {
        let mut state = self.state();
        let (active, lease) = (state.active, state.lease);
        state.write(active, lease, None)
    }

    /// Says that the agent lives, which holds for as long as the lease.
    ///
    /// # Errors
    /// [`DatapathError::Map`] when the variable cannot be written.
    pub fn beat(&self) -> Result<(), DatapathError> {
        let mut state = self.state();
        if state.lease.is_none() {
            return Ok(());
        }
        let (active, lease, fallback) = (state.active, state.lease, state.fallback);
        state.write(active, lease, fallback)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Whoever panicked left words that were all written before.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((deadline, bank)) = state.fallback
            && host::monotonic() > deadline
        {
            // The program went back by itself.
            (state.active, state.fallback) = (bank.index().into(), None);
        }
        state
    }
}

impl State {
    /// Writes the variable; keeps what it stands for if that succeeds.
    fn write(
        &mut self,
        active: u64,
        lease: Option<Nanos>,
        fallback: Option<(Nanos, Bank)>,
    ) -> Result<(), DatapathError> {
        let head = words(
            active,
            self.epoch,
            lease.map(|lease| Nanos(host::monotonic().0.saturating_add(lease.0))),
            fallback,
        );
        self.map.set(0, head, 0).map_err(|error| DatapathError::map(map::HEAD, error))?;
        (self.active, self.lease, self.fallback) = (active, lease, fallback);
        Ok(())
    }
}

/// The variable for settings at `active`, a lease that ends at `lease`, and a fallback. Whoever reaches
/// one of the two times has no agent: had it one, that would have moved the lease on, or switched. So
/// with a lease both lead to the variant that drops nothing, of the settings that were confirmed.
fn words(
    active: u64,
    epoch: u32,
    lease: Option<Nanos>,
    fallback: Option<(Nanos, Bank)>,
) -> abi::Head {
    let confirmed = fallback.map_or(Bank::of_place(active), |(_, bank)| bank);
    let deadline = fallback.map(|(deadline, _)| deadline);
    let (until, after) = match (lease, deadline) {
        (None, None) => (Nanos(u64::MAX), confirmed.index()),
        (None, Some(deadline)) => (deadline, confirmed.index()),
        (Some(lease), deadline) => {
            (deadline.map_or(lease, |deadline| deadline.min(lease)), confirmed.variant())
        }
    };
    abi::Head { active, until, after: after.into(), epoch: epoch.into() }
}

/// The place of the settings that hold at `now`.
pub(super) fn effective(head: &abi::Head, now: Nanos) -> u64 {
    if now <= head.until { head.active } else { head.after }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATER: Option<Nanos> = Some(Nanos(30));

    #[test]
    fn settings_hold_for_ever_without_a_reason_not_to() {
        let head = words(1, 7, None, None);
        assert_eq!(head.until, Nanos(u64::MAX));
        assert_eq!(effective(&head, Nanos(u64::MAX - 1)), 1);
    }

    #[test]
    fn what_is_not_confirmed_ends_without_an_agent() {
        let head = words(1, 7, None, Some((Nanos(10), Bank::First)));
        assert_eq!([effective(&head, Nanos(10)), effective(&head, Nanos(11))], [1, 0]);
    }

    #[test]
    fn after_the_lease_the_confirmed_settings_are_only_observed() {
        let variant = |bank: Bank| u64::from(bank.variant());
        assert_eq!(effective(&words(1, 7, LATER, None), Nanos(31)), variant(Bank::Second));
        let pending = words(1, 7, LATER, Some((Nanos(50), Bank::First)));
        assert_eq!(effective(&pending, Nanos(31)), variant(Bank::First));
        let pending = words(1, 7, LATER, Some((Nanos(20), Bank::First)));
        assert_eq!(effective(&pending, Nanos(21)), variant(Bank::First));
    }
}
