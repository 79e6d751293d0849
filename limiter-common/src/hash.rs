//! Where the state of a source lies: a keyed hash, so that nobody who lacks the key can aim.

use crate::abi::ClassId;
use crate::flows::Flow;
use crate::packet::Source;

/// The secret of one host. Made at random by the agent, known to the kernel and the agent only.
///
/// The hash is multiply–fold–multiply with random odd factors. Multiplication by a random odd number
/// is universal: for any two different sources, chosen without the key, the upper bits agree with at
/// most twice the probability of chance (Dietzfelbinger et al., "A reliable randomized algorithm for
/// the closest-pair problem", 1997). Sources that collide under one key do not under another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashKey {
    /// Keeps the spaces of sources apart.
    pub offset: u64,
    /// Odd.
    pub first: u64,
    /// Odd.
    pub second: u64,
}

impl HashKey {
    /// A key of three random numbers.
    #[inline(always)]
    #[must_use]
    pub const fn new(random: [u64; 3]) -> Self {
        let [offset, first, second] = random;
        Self { offset, first: first | 1, second: second | 1 }
    }

    /// The hash of a source, whatever its class.
    #[inline(always)]
    #[must_use]
    pub const fn source(&self, source: Source) -> SourceHash {
        let space = self.offset.wrapping_mul(source.space as u64 + 1);
        let mixed = fold((source.bits ^ space).wrapping_mul(self.first));
        SourceHash(fold(mixed.wrapping_mul(self.second)))
    }

    /// The hash of a flow, by which it has a place and a mark as a source does.
    #[inline(always)]
    #[must_use]
    pub const fn flow(&self, flow: &Flow) -> SourceHash {
        let Flow { remote, .. } = flow;
        let high = fold((remote.high ^ self.offset).wrapping_mul(self.first));
        let low = fold((high ^ remote.low).wrapping_mul(self.second));
        SourceHash(fold((low ^ flow.rest()).wrapping_mul(self.first)))
    }

    /// The hash of a source in a class.
    #[inline(always)]
    #[must_use]
    pub const fn bucket(&self, source: SourceHash, class: ClassId) -> BucketHash {
        BucketHash((source.0 ^ class.0 as u64).wrapping_mul(self.first))
    }
}

#[inline(always)]
const fn fold(value: u64) -> u64 {
    value ^ value >> 32
}

/// The hash of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceHash(u64);

impl SourceHash {
    /// One of `count` places.
    #[inline(always)]
    #[must_use]
    pub const fn place(self, count: u32) -> u32 {
        scale(self.0 >> 32, count)
    }

    /// Twelve bits that are independent of [`place`](Self::place).
    #[inline(always)]
    #[must_use]
    pub const fn low(self) -> u64 {
        self.0 & 0xfff
    }

    /// Whether it is of the sample that has none of the bits of `mask`, of which there are twenty: nearly
    /// independent of [`place`](Self::place) and [`low`](Self::low).
    #[inline(always)]
    #[must_use]
    pub const fn is_sampled(self, mask: u32) -> bool {
        self.0 >> 12 & mask as u64 == 0
    }
}

/// The hash of a source in a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketHash(u64);

impl BucketHash {
    /// The line, of `lines`, that is looked at first.
    #[inline(always)]
    #[must_use]
    pub const fn first(self, lines: u32) -> u32 {
        scale(self.0 >> 32, lines)
    }

    /// The other line that it may lie in.
    #[inline(always)]
    #[must_use]
    pub const fn second(self, lines: u32) -> u32 {
        scale(self.0 & 0xffff_ffff, lines)
    }
}

/// A number below 2³² as one below `count`, evenly.
#[inline(always)]
const fn scale(number: u64, count: u32) -> u32 {
    ((number * count as u64) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::packet::Space;

    fn key() -> impl Strategy<Value = HashKey> {
        any::<[u64; 3]>().prop_map(HashKey::new)
    }

    proptest! {
        #[test]
        fn places_are_in_range(key in key(), bits in any::<u64>(), count in 1..u32::MAX, class in 1..64_u32) {
            let hash = key.source(Source { space: Space::Ipv6, bits });
            prop_assert!(hash.place(count) < count);
            let bucket = key.bucket(hash, ClassId(class));
            prop_assert!(bucket.first(count) < count && bucket.second(count) < count);
        }

        /// What an attacker found to collide under one key is of no use under another.
        #[test]
        fn collisions_do_not_outlive_a_key(one in key(), other in key(), first in any::<u32>()) {
            const LINES: u32 = 1 << 12;
            prop_assume!(one != other);
            let line = |key: &HashKey, address: u32| {
                let hash = key.source(Source::ipv4(address));
                key.bucket(hash, ClassId(1)).first(LINES)
            };
            let aim = line(&one, first);
            let found = (1..1_u32 << 20).map(|i| first.wrapping_add(i));
            let found: std::vec::Vec<_> = found.filter(|it| line(&one, *it) == aim).take(100).collect();
            let aim = line(&other, first);
            let still = found.iter().filter(|address| line(&other, **address) == aim).count();
            prop_assert!(still <= 3, "{still} of {} still collide", found.len());
        }
    }

    /// Neighbouring addresses spread as evenly as chance has it.
    #[test]
    fn neighbours_are_spread() {
        const LINES: u32 = 4_096;
        let key =
            HashKey::new([0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb]);
        let mut counts = std::vec![[0_u32; 2]; LINES as usize];
        for address in 0..LINES * 16 {
            let hash = key.bucket(key.source(Source::ipv4(0x0a00_0000 + address)), ClassId(1));
            counts[hash.first(LINES) as usize][0] += 1;
            counts[hash.second(LINES) as usize][1] += 1;
        }
        for half in 0..2 {
            // A mean of 16: with Poisson's distribution, more than 48 has a probability of 10⁻¹⁰.
            let most = counts.iter().map(|count| count[half]).max();
            assert!(most < Some(48), "{most:?}");
        }
    }
}
