//! Numbers that stay with names.

use std::collections::{BTreeMap, BTreeSet};

use limiter_common::abi::{ClassId, CounterShape, MAX_INTERFACES, Slot};

use super::{MapSizes, sizes};
use crate::config::Pattern;

/// Which number each class and each interface has in the running datapath.
///
/// Buckets and counters carry these numbers, so a name keeps its number over reloads. The number
/// of a name that went away stays reserved for it: should it come back, it finds its counters, and
/// nobody else's counters jump. Only when no number is free that the maps have room for, a new
/// name takes the lowest reserved one. (It then meets buckets and counters of the old name: the
/// buckets are clamped to the new limits at their first packet, and the agent tells the counters
/// apart.) The numbers are kept beside the maps, so that a restart finds them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    classes: Numbers,
    slots: Numbers,
}

/// The names in use.
pub(super) struct Live<'a> {
    pub(super) classes: Vec<&'a str>,
    pub(super) interfaces: Vec<&'a str>,
}

impl Names {
    /// Numbers for all of `live`, those in `previous` as they are.
    pub(super) fn assign(previous: Option<&Self>, live: &Live<'_>) -> Self {
        let none = Self::default();
        let previous = previous.unwrap_or(&none);
        let slots = sizes::slots(live.interfaces.len());
        let most = u32::try_from(MAX_INTERFACES - 1).unwrap_or(u32::MAX);
        Self {
            classes: previous.classes.next(
                &live.classes,
                sizes::class_ids(live.classes.len()) - 1,
                u32::MAX,
            ),
            slots: previous.slots.next(&live.interfaces, slots - 1, most),
        }
    }

    /// The numbers that a datapath with maps of these `sizes` was left with.
    pub(crate) fn restored(
        classes: impl Iterator<Item = (String, ClassId)>,
        slots: impl Iterator<Item = (String, Slot)>,
        sizes: &MapSizes,
    ) -> Self {
        let CounterShape { slots: slot_count, classes: class_count } = sizes.counters;
        Self {
            classes: Numbers {
                numbers: classes.map(|(name, id)| (name, id.0)).collect(),
                room: class_count.saturating_sub(1),
            },
            slots: Numbers {
                numbers: slots.map(|(name, slot)| (name, slot.0)).collect(),
                room: slot_count.saturating_sub(1),
            },
        }
    }

    /// The number of a class; [`ClassId::NONE`] if it has none.
    #[must_use]
    pub fn class(&self, name: &str) -> ClassId {
        ClassId(self.classes.get(name))
    }

    /// The number of an interface; [`Slot::UNKNOWN`] if it has none.
    #[must_use]
    pub fn slot(&self, interface: &str) -> Slot {
        Slot(self.slots.get(interface))
    }

    /// The classes by number, for reading counters; those that went away as well.
    pub fn classes(&self) -> impl Iterator<Item = (&str, ClassId)> {
        self.classes.numbers.iter().map(|(name, number)| (name.as_str(), ClassId(*number)))
    }

    /// The interfaces by number, for reading counters; those that went away as well.
    pub fn slots(&self) -> impl Iterator<Item = (&str, Slot)> {
        self.slots.numbers.iter().map(|(name, number)| (name.as_str(), Slot(*number)))
    }

    /// Whether an interface that `pattern` matches has been guarded.
    pub(super) fn has_interface(&self, pattern: &Pattern) -> bool {
        self.slots.numbers.keys().any(|name| pattern.matches(name))
    }

    /// The class ids that counters need, [`ClassId::NONE`] included.
    pub(super) fn class_ids(&self) -> u32 {
        self.classes.highest() + 1
    }

    /// The slots that counters need, [`Slot::UNKNOWN`] included.
    pub(super) fn slot_count(&self) -> u32 {
        self.slots.highest() + 1
    }
}

/// Numbers from 1 on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Numbers {
    numbers: BTreeMap<String, u32>,
    /// The highest number that the maps of the first plan have room for.
    room: u32,
}

impl Numbers {
    fn next(&self, live: &[&str], room: u32, most: u32) -> Self {
        let room = if self.room == 0 { room } else { self.room }.min(most);
        let mut numbers = self.numbers.clone();
        let mut used: BTreeSet<u32> = numbers.values().copied().collect();
        for name in live {
            if numbers.contains_key(*name) {
                continue;
            }
            let free = (1..=room).find(|number| !used.contains(number));
            let number = free.unwrap_or_else(|| {
                let gone = numbers.iter().filter(|(known, _)| !live.contains(&known.as_str()));
                let lowest = gone.map(|(known, number)| (*number, known.clone())).min();
                match lowest {
                    Some((number, known)) => {
                        numbers.remove(&known);
                        number
                    }
                    None => used.last().map_or(1, |last| last + 1),
                }
            });
            used.insert(number);
            numbers.insert((*name).to_owned(), number);
        }
        Self { numbers, room }
    }

    fn get(&self, name: &str) -> u32 {
        self.numbers.get(name).copied().unwrap_or(0)
    }

    fn highest(&self) -> u32 {
        self.numbers.values().copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(previous: &Numbers, live: &[&str]) -> Numbers {
        previous.next(live, 3, u32::MAX)
    }

    #[test]
    fn a_name_keeps_its_number_and_a_lost_one_is_reserved() {
        let first = next(&Numbers::default(), &["a", "b"]);
        let second = next(&first, &["c", "b"]);
        assert_eq!([first.get("a"), first.get("b")], [1, 2]);
        assert_eq!([second.get("b"), second.get("c")], [2, 3]);
        assert_eq!(next(&second, &["a", "b"]).get("a"), 1);
    }

    #[test]
    fn a_reserved_number_is_taken_only_where_no_other_is_free() {
        let first = next(&Numbers::default(), &["a", "b", "c"]);
        let second = next(&first, &["d", "c"]);
        assert_eq!([second.get("c"), second.get("d")], [3, 1]);
        assert_eq!(second.get("a"), 0);
        assert_eq!(second.highest(), 3);
        let too_many = next(&first, &["a", "b", "c", "d"]);
        assert_eq!(too_many.get("d"), 4, "it does not fit, and says so by its number");
    }
}
