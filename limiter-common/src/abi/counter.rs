//! The counters: one cell per (interface slot, family, class, reason, action) and CPU.

use super::{ClassId, Pace};
use crate::verdict::{Action, Family, Outcome, Reason};

/// One counter cell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Count {
    /// Packets.
    pub packets: u64,
    /// Bytes of whole frames, from the Ethernet header, without the FCS.
    pub bytes: u64,
}

/// What lies in the map: a count, and when its next packet is an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CounterCell {
    /// What was counted.
    pub count: Count,
    /// See [`pace`](crate::pace).
    pub pace: Pace,
}

/// How the counter map is laid out; its size follows from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterShape {
    /// Interface slots, the unknown one included.
    pub slots: u32,
    /// Class ids, [`ClassId::NONE`] included.
    pub classes: u32,
}

impl CounterShape {
    /// How many cells the map needs.
    #[must_use]
    pub const fn cells(self) -> u32 {
        self.slots * Family::COUNT * self.classes * Reason::COUNT * Action::COUNT
    }

    /// The cell of `outcome`. An outcome outside of the shape has none (and is counted in cell 0,
    /// which is [`Outcome::NO_SETTINGS`]).
    #[inline(always)]
    #[must_use]
    pub const fn cell(self, outcome: &Outcome) -> u32 {
        /// Cells of one class.
        const BLOCK: u32 = Reason::COUNT * Action::COUNT;
        let Outcome { slot, family, class, reason, action } = outcome;
        if slot.0 >= self.slots || class.0 >= self.classes {
            return 0;
        }
        // Written as a sum, whose parts a processor works out at once.
        let block = (slot.0 * Family::COUNT + *family as u32) * (self.classes * BLOCK);
        block + class.0 * BLOCK + (*reason as u32 * Action::COUNT + *action as u32)
    }

    /// The outcome that is counted in `cell`; the inverse of [`cell`](Self::cell).
    #[must_use]
    pub fn outcome(self, cell: u32) -> Option<Outcome> {
        let (rest, action) = (cell / Action::COUNT, cell % Action::COUNT);
        let (rest, reason) = (rest / Reason::COUNT, rest % Reason::COUNT);
        let (rest, class) = (rest / self.classes, rest % self.classes);
        let (slot, family) = (rest / Family::COUNT, rest % Family::COUNT);
        (slot < self.slots).then_some(())?;
        Some(Outcome {
            slot: super::Slot(slot),
            family: *Family::ALL.get(family as usize)?,
            class: ClassId(class),
            reason: *Reason::ALL.get(reason as usize)?,
            action: *Action::ALL.get(action as usize)?,
        })
    }
}

const _: () = assert!(size_of::<Count>() == 16);
const _: () = assert!(size_of::<CounterCell>() == 32);
