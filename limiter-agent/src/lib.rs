//! The parts of `limiter-agent`.

pub mod config;
pub mod plan;
