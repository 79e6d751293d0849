//! Marks the types of the ABI as plain data for aya's map wrappers.
#![cfg(feature = "aya")]
#![allow(
    unsafe_code,
    reason = "aya::Pod is an unsafe marker trait; this file is the only place for it"
)]

use super::{
    Budget, Count, CounterCell, Head, Identity, LineV4, LineV6, Name, OwnAddress, Policy, PolicyId,
    PrefixKey, SampleCount, Sampling, Settings, Shape,
};
use crate::units::Limits;

macro_rules! pod {
    ($($type:ty),*) => {$(
        // SAFETY: `repr(C)` or `repr(transparent)`, made of integers only, and without padding
        // (the size asserts beside each type).
        unsafe impl aya::Pod for $type {}
    )*};
}

pod!(
    Budget,
    Count,
    CounterCell,
    Head,
    Identity,
    Limits,
    LineV4,
    LineV6,
    Name,
    OwnAddress,
    Policy,
    PolicyId,
    PrefixKey,
    SampleCount,
    Sampling,
    Settings,
    Shape
);
