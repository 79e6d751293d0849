//! What outlives the agent: whose maps these are, how large they are, and which settings hold.

use super::{ClassId, MAX_CLASS_IDS, MAX_INTERFACES, Slot};
use crate::hash::HashKey;
use crate::time::Nanos;

/// Which settings hold, and until when: the program's only variable. The agent writes it whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Head {
    /// The place of the settings in force.
    pub active: u64,
    /// Until then, by the coarse clock. An agent that is well moves it on.
    pub until: Nanos,
    /// The place of the settings that hold afterwards.
    pub after: u64,
    /// The epoch of the settings that were written last. Of no interest to the program.
    pub epoch: u64,
}

impl Head {
    /// The settings in the first place, for ever.
    pub const FIRST: Self = Self { active: 0, until: Nanos(u64::MAX), after: 0, epoch: 0 };

    /// The settings at `active`, for ever.
    #[must_use]
    pub const fn lasting(self, active: u32) -> Self {
        let active = active as u64;
        Self { active, until: Nanos(u64::MAX), after: active, ..self }
    }
}

/// Whose maps these are. Agents of every version read it, so its layout never changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Identity {
    /// The [`ABI_VERSION`](super::ABI_VERSION) of all the others.
    pub version: u32,
    /// Their [`CARRIED_VERSION`](super::CARRIED_VERSION).
    pub carried: u32,
    /// The parts of the [`HashKey`].
    pub key: [u64; 3],
    /// The ids of the programs that use the maps: the last one, and the one before, which may still
    /// be attached somewhere if an agent was ended between two interfaces.
    pub programs: [u32; 2],
}

impl Identity {
    /// The key as the hash takes it.
    #[must_use]
    pub const fn key(&self) -> HashKey {
        HashKey::new(self.key)
    }
}

/// How large the maps were made, in the numbers that the agent sizes them by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Shape {
    /// Sources that the IPv4 table was made for.
    pub ipv4_sources: u32,
    /// Sources that the IPv6 table was made for.
    pub ipv6_sources: u32,
    /// Whether there are byte buckets, 0 or 1.
    pub bytes: u32,
    /// Whether there is a table of ceilings, 0 or 1.
    pub ceilings: u32,
    /// Networks, both banks.
    pub prefixes: u32,
    /// Policies, both banks.
    pub policies: u32,
    /// Rows of limits, both banks.
    pub limits: u32,
    /// Slots of the counters.
    pub slots: u32,
    /// Class ids of the counters.
    pub classes: u32,
}

/// The name that a number belongs to, in UTF-8, filled up with zeros; empty if it belongs to none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Name(pub [u8; 64]);

impl Name {
    /// No name.
    pub const NONE: Self = Self([0; 64]);
    /// Places for names: of classes, then of interfaces.
    pub const COUNT: usize = MAX_CLASS_IDS + MAX_INTERFACES;
    #[expect(clippy::cast_possible_truncation, reason = "seven bits")]
    const CLASSES: u32 = MAX_CLASS_IDS as u32;

    /// The name, cut off where it is too long.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let mut bytes = [0; 64];
        for (byte, &letter) in bytes.iter_mut().zip(name.as_bytes()) {
            *byte = letter;
        }
        Self(bytes)
    }

    /// The text; none if it is empty.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        let length = self.0.iter().position(|&byte| byte == 0).unwrap_or(self.0.len());
        core::str::from_utf8(&self.0[..length]).ok().filter(|text| !text.is_empty())
    }

    /// The place of a class's name.
    #[must_use]
    pub const fn of_class(class: ClassId) -> u32 {
        class.0 % Self::CLASSES
    }

    /// The place of an interface's name.
    #[must_use]
    pub const fn of_slot(slot: Slot) -> u32 {
        Self::CLASSES + slot.0
    }
}

const _: () = assert!(size_of::<Head>() == 32);
const _: () = assert!(size_of::<Identity>() == 40);
const _: () = assert!(size_of::<Shape>() == 36);
const _: () = assert!(size_of::<Name>() == 64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_comes_back() {
        assert_eq!(Name::new("rest").text(), Some("rest"));
        assert_eq!(Name::NONE.text(), None);
        assert_ne!(Name::of_class(ClassId(1)), Name::of_slot(Slot(1)));
    }
}
