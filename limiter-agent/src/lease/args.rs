//! The grammar of the commands about leases.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::cli::ClientArgs;

/// Arguments of `limiter-agent lease`.
#[derive(Clone, Debug, Args)]
pub struct LeaseArgs {
    /// Where the limiting host takes requests for leases
    #[arg(long, value_name = "HOST:PORT")]
    pub server: String,
    /// Who signs that host's certificate, PEM
    #[arg(long, value_name = "FILE")]
    pub ca: PathBuf,
    /// The name in that host's certificate [default: HOST]
    #[arg(long, value_name = "NAME")]
    pub server_name: Option<String>,
    /// This service's certificate, PEM
    #[arg(long, value_name = "FILE", requires = "key", required_unless_present = "token_file")]
    pub cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub key: Option<PathBuf>,
    /// A file with a signed token, read again for each request
    #[arg(long, value_name = "FILE", conflicts_with = "cert")]
    pub token_file: Option<PathBuf>,
    /// How long one lease lasts: 60s, 5m [default: as long as the grant allows]; it is renewed in time
    #[arg(long = "for", value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub duration: Option<Duration>,
    /// The address to connect from, which is what is exempt
    #[arg(long, value_name = "ADDR")]
    pub from: Option<IpAddr>,
    /// Answer in JSON, a line for each renewal
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `limiter-agent leases`.
#[derive(Clone, Debug, Args)]
pub struct LeasesArgs {
    /// Show so many at most
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub limit: u32,
    /// Only what comes after this address in order
    #[arg(long, value_name = "ADDR")]
    pub after: Option<IpAddr>,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Arguments of `limiter-agent revoke`.
#[derive(Clone, Debug, Args)]
pub struct RevokeArgs {
    /// The name of a grant, or an address
    #[arg(value_name = "NAME|ADDR")]
    pub subject: String,
    /// How long it gets no lease: 10m, 2h; without it until `--undo`
    #[arg(long = "for", value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub duration: Option<Duration>,
    /// Take the revocation back
    #[arg(long, conflicts_with = "duration")]
    pub undo: bool,
    #[command(flatten)]
    pub client: ClientArgs,
}
