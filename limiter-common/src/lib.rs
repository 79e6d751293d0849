//! The packet decision of `limiter`, and the types the kernel and the agent share.
//!
//! Everything here is `no_std`, free of clocks, maps and `unsafe` (but for the plain-data markers
//! in [`abi`]), so that the very code that decides in the XDP program also runs under host tests.
//! [`decide()`] is the entry: it reads a [`PacketView`], asks an [`Env`] for state, and answers
//! with an [`Outcome`].
#![no_std]
#![deny(unsafe_code)]
#![warn(missing_docs)]
#![allow(
    clippy::inline_always,
    reason = "the BPF program is one function: a call costs registers and hides bounds from the verifier"
)]

#[cfg(test)]
extern crate std;

pub mod abi;
pub mod bucket;
pub mod classify;
pub mod decide;
pub mod env;
pub mod flows;
pub mod hash;
pub mod known;
pub mod pace;
pub mod packet;
pub mod table;
pub mod time;
pub mod units;
pub mod verdict;

pub use decide::{Decision, decide};
pub use env::{Bucket, Env};
pub use packet::PacketView;
pub use verdict::{Action, Family, Outcome, Reason};
