//! `[lease]`.

use std::time::Duration;

use super::*;

const LEASE: &str = r#"[lease]
listen = "0.0.0.0:9479"
certificate = "/c.crt"
key = "/c.key"
client_ca = "/ca.crt"
[[lease.grant]]
name = "billing.example"
interface = "eth0"
ports = [443, "8000-8100"]
cap = { rate = "50000/s", burst = 100000 }
owner = "platform"
"#;

#[test]
fn a_grant_is_read_with_its_defaults() {
    let config = parse(&with(LEASE)).unwrap();
    let lease = config.lease.expect("is there");
    assert_eq!(lease.listen.port(), 9479);
    assert_eq!((lease.crl, lease.token_key, lease.revoked.len()), (None, None, 0));
    let grant = &lease.grants[0];
    assert_eq!(grant.ports, [443..=443, 8000..=8100]);
    assert_eq!((grant.tcp, grant.udp, grant.addresses), (true, true, 1));
    assert_eq!(grant.max_duration, Duration::from_mins(5));
    assert_eq!(parse(&with("")).unwrap().lease, None);
}

#[test]
fn what_is_wrong_is_named_with_its_cure() {
    let at = |from: &str, to: &str| {
        let text = with(&LEASE.replace(from, to));
        parse(&text).expect_err(to).to_string()
    };
    for (from, to, expected) in [
        (
            "cap = { rate = \"50000/s\", burst = 100000 }\n",
            "",
            "lease.grant[0] \"billing.example\" cap: missing; add cap = { rate = \"50000/s\", burst = \
             100000 }: the address can be forged",
        ),
        (
            "client_ca = \"/ca.crt\"\n",
            "",
            "lease: no credential would be taken; add client_ca = \"…\" for certificates, or \
             token_key = \"…\" for signed tokens",
        ),
        (
            "client_ca = \"/ca.crt\"",
            "token_key = \"/t.pub\"\ncrl = \"/ca.crl\"",
            "lease.crl: there are no certificates that could be revoked; add client_ca, or remove crl",
        ),
        (
            "\"eth0\"\nports",
            "\"eth9\"\nports",
            "interface: no [[interface]] is called \"eth9\"; write one of",
        ),
        (
            "\"/c.key\"",
            "\"c.key\"",
            "lease.key: \"c.key\" is no absolute path; write an absolute path",
        ),
        ("0.0.0.0:9479", "localhost", "lease.listen: \"localhost\" is not a socket address; write"),
        (
            "owner = ",
            "max_duration = \"1d\"\nowner = ",
            "max_duration: \"1d\" is no duration of a lease; write from \"5s\" to \"1h\"",
        ),
        (
            "[443, \"8000-8100\"]",
            "[1, 3, 5, 7, 9, 11, 13]",
            "ports: 7 separate ranges of ports; write at most 6",
        ),
        ("client_ca", "revoked = []\nclient_ca", "lease.revoked: an empty list matches nothing"),
        ("[[lease.grant]]", "[[lease.grand]]", "lease.grand: unknown key; did you mean \"grant\"?"),
        ("key = ", "kee = ", "lease.kee: unknown key; did you mean \"key\"?"),
    ] {
        let errors = at(from, to);
        assert!(errors.contains(expected), "{to}: {errors}");
        assert!(errors.starts_with("limiter.toml:"), "{errors}");
    }
    let twice = LEASE.split_once("[[lease.grant]]").unwrap().1;
    let text = with(&format!("{LEASE}[[lease.grant]]{twice}"));
    let errors = parse(&text).expect_err("twice").to_string();
    assert!(errors.contains("the same name is already at line"), "{errors}");
}
