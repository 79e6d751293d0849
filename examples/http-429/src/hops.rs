//! Whose request it is.

use std::net::IpAddr;

use axum::http::HeaderMap;
use ipnet::IpNet;

/// The client's address: the connection's peer, or, if that is a trusted proxy, the right-most hop of
/// X-Forwarded-For that is not one. Whatever stands left of it was written by the client itself.
pub(crate) fn client(peer: IpAddr, headers: &HeaderMap, trusted: &[IpNet]) -> IpAddr {
    let is_trusted = |address: &IpAddr| trusted.iter().any(|network| network.contains(address));
    let mut client = peer;
    // Several headers are one list (RFC 9110 §5.3).
    let lists: Vec<_> =
        headers.get_all("x-forwarded-for").iter().filter_map(|list| list.to_str().ok()).collect();
    for hop in lists.iter().rev().flat_map(|list| list.rsplit(',')) {
        if !is_trusted(&client) {
            break;
        }
        let Ok(hop) = hop.trim().parse::<IpAddr>() else { break };
        client = hop.to_canonical();
    }
    client
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client_of(peer: &str, lists: &[&str]) -> String {
        let mut headers = HeaderMap::new();
        for list in lists {
            headers.append("x-forwarded-for", list.parse().expect("a header"));
        }
        let trusted = ["10.0.0.0/8".parse().expect("a network")];
        client(peer.parse().expect("an address"), &headers, &trusted).to_string()
    }

    #[test]
    fn only_what_a_trusted_proxy_has_written_is_believed() {
        // Straight from somebody who claims to be somebody else.
        assert_eq!(client_of("192.0.2.1", &["203.0.113.9"]), "192.0.2.1");
        assert_eq!(client_of("10.0.0.1", &["203.0.113.9"]), "203.0.113.9");
        // The client's own claim stands left of what the proxy saw.
        assert_eq!(client_of("10.0.0.1", &["198.51.100.7, 203.0.113.9"]), "203.0.113.9");
        assert_eq!(client_of("10.0.0.1", &["198.51.100.7", "203.0.113.9"]), "203.0.113.9");
        // Two proxies in a row.
        assert_eq!(client_of("10.0.0.1", &["203.0.113.9, 10.0.0.2"]), "203.0.113.9");
        // Nobody else, or nonsense: the proxy itself.
        assert_eq!(client_of("10.0.0.1", &[]), "10.0.0.1");
        assert_eq!(client_of("10.0.0.1", &["203.0.113.9, unknown"]), "10.0.0.1");
    }
}
