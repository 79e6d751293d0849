//! Test harness of limiter: network namespaces, a frame generator, an honest client, kernels in a
//! VM and a driver for the agent. Everything here needs root, makes its own namespaces, and leaves
//! the one it was started in as it was.

pub mod agent;
pub mod bpffs;
pub mod browser;
pub mod client;
pub mod frames;
pub mod generator;
pub mod http;
pub mod model;
pub mod netns;
pub mod process;
pub mod prometheus;
pub mod scrape;
pub mod vm;
