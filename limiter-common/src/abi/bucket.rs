//! Keys and values of the bucket table.

use super::PolicyId;

/// The key of an IPv4 bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct V4Key {
    address: u32,
    class: u32,
}

impl V4Key {
    /// The bucket of `address` (host order) in the class with the number `class`.
    #[inline(always)]
    #[must_use]
    pub const fn new(address: u32, class: u32) -> Self {
        Self { address, class }
    }
}

/// The key of an IPv6 bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct V6Key {
    bits: u64,
    space: u32,
    class: u32,
}

impl V6Key {
    /// The bucket of `bits` (see [`Source`](crate::packet::Source)) of the key space `space` in
    /// the class with the number `class`.
    #[inline(always)]
    #[must_use]
    pub const fn new(bits: u64, space: u32, class: u32) -> Self {
        Self { bits, space, class }
    }
}

/// A bucket as it lies in the map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct BucketState {
    /// Theoretical arrival time of the packet bucket, a [`Tick`](crate::time::Tick).
    pub packets: u64,
    /// Theoretical arrival time of the byte bucket, a [`Tick`](crate::time::Tick).
    pub bytes: u64,
    /// The policy that was last resolved for the source.
    pub resolution: Resolution,
}

/// A budget that many CPUs look at, alone on its cache line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Budget {
    /// Theoretical arrival time, a [`Tick`](crate::time::Tick).
    pub tat: u64,
    pad: [u64; 7],
}

/// A resolved policy and the settings epoch it was resolved under, in one word so that it is read
/// and written whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Resolution(u64);

impl Resolution {
    /// `policy` as of `epoch`.
    #[inline(always)]
    #[must_use]
    pub const fn new(epoch: u32, policy: PolicyId) -> Self {
        Self((epoch as u64) << 32 | policy.0 as u64)
    }

    /// The policy, if it was resolved under `epoch`.
    #[inline(always)]
    #[must_use]
    pub const fn policy(self, epoch: u32) -> Option<PolicyId> {
        #[expect(clippy::cast_possible_truncation, reason = "the halves of the word")]
        if (self.0 >> 32) as u32 == epoch { Some(PolicyId(self.0 as u32)) } else { None }
    }
}

const _: () = assert!(size_of::<V4Key>() == 8);
const _: () = assert!(size_of::<V6Key>() == 16);
const _: () = assert!(size_of::<BucketState>() == 24);
const _: () = assert!(size_of::<Budget>() == 64);
