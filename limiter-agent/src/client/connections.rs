//! `limiter-agent connections`.

use axum::http::Method;
use clap::Args;
use hyper::body::Bytes;

use super::{ask, print, print_json};
use crate::cli::{ClientArgs, Failure};
use crate::connections::{LONGEST_PAGE, Page};

/// Arguments of `limiter-agent connections`.
#[derive(Clone, Debug, Args)]
pub struct ConnectionsArgs {
    /// Show so many sources at most
    #[arg(long, value_name = "N", default_value_t = 20,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: u32,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Asks for as many pages as it takes.
///
/// # Errors
/// [`Failure::Machine`] if no agent answers, or it does not count.
pub fn connections(args: &ConnectionsArgs) -> Result<(), Failure> {
    let wanted = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let mut whole: Option<Page> = None;
    loop {
        let (found, after) =
            whole.as_ref().map_or((0, None), |page| (page.connections.len(), page.next.as_deref()));
        let limit = (wanted - found).min(LONGEST_PAGE);
        let after = after.map(|after| format!("&after={after}")).unwrap_or_default();
        let path = format!("/v1/connections?limit={limit}{after}");
        let answer = ask(&args.client.control_socket, Method::GET, &path, Bytes::new())?;
        answer.check(&args.client)?;
        let page: Page = answer.read()?;
        let whole = whole.get_or_insert_with(|| Page { connections: Vec::new(), ..page.clone() });
        whole.next = page.next;
        whole.connections.extend(page.connections);
        if whole.next.is_none() || whole.connections.len() >= wanted {
            return if args.client.json { print_json(whole) } else { print(&whole.to_string()) };
        }
    }
}
