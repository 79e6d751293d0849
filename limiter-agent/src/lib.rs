//! The parts of `limiter-agent`.

pub mod agent;
pub mod api;
pub mod capture;
pub mod check;
pub mod cli;
pub mod client;
pub mod config;
pub mod connections;
pub mod datapath;
pub mod doctor;
pub mod events;
pub mod host;
pub mod lease;
pub mod limits;
pub mod measure;
pub mod memory;
pub mod page;
pub mod plan;
pub mod run;
pub mod service;
pub mod sources;
pub mod state;
pub mod status;
pub mod telemetry;
pub mod top;
pub mod unattended;
