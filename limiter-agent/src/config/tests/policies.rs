//! What is wrong with prefixes, exemptions and blocks.

use super::*;

#[test]
fn networks() {
    let cases = [
        ("10.0.0.1/8", "write \"10.0.0.0/8\""),
        ("2001:db8::1/32", "write \"2001:db8::/32\""),
        ("10.0.0.0/33", "is not a network"),
        ("example.org", "is not a network; write a network such as"),
        ("2001:db8::/65", "IPv6 is limited per /64; write \"2001:db8::/64\""),
        ("2001:db8::5", "write \"2001:db8::/64\""),
        ("2002:c000:200:1::/64", "write \"2002:c000:200::/48\""),
        ("64:ff9b::/95", "write \"64:ff9b::/64\""),
    ];
    for (cidr, part) in cases {
        let text = with(&format!("[[block]]\ncidr = \"{cidr}\""));
        one_error(&text, &format!("7:8: block[0] \"{cidr}\" cidr"), &[part]);
    }
    for cidr in ["64:ff9b::c000:0201", "64:ff9b::/96", "fe80::1", "2002:c000:200::/48", "::/0"] {
        let text = with(&format!("[[block]]\ncidr = \"{cidr}\""));
        assert_eq!(parse(&text).err(), None, "{cidr}");
    }
}

#[test]
fn prefixes() {
    let cases = [
        (
            "scale = 1\n[[prefix]]\ncidr = \"10.0.0.0/8\"\nscale = 2",
            "9:1: prefix[1] \"10.0.0.0/8\"",
            "already at line 6; make one entry",
        ),
        ("", "6:1: prefix[0] \"10.0.0.0/8\"", "it says nothing about the network; add scale"),
        (
            "scale = 0",
            "8:9: prefix[0] \"10.0.0.0/8\" scale",
            "0 is out of range; write a whole number from 1",
        ),
        ("scale = 1.5", "8:9: prefix[0] \"10.0.0.0/8\" scale", "found a decimal number"),
        (
            "scale = 5000",
            "8:9: prefix[0] \"10.0.0.0/8\" scale",
            "5000 times the packets of class \"rest\": faster than \"30000000/s\" cannot be enforced; write a smaller scale",
        ),
        ("class = []", "6:1: prefix[0] \"10.0.0.0/8\"", "the list of its own limits is empty"),
        (
            "[[prefix.class]]\nname = \"rest\"",
            "8:1: prefix[0] \"10.0.0.0/8\" class[0] \"rest\"",
            "neither packets nor bytes",
        ),
        (
            "[[prefix.class]]\nname = \"rst\"\npackets = { rate = \"1/s\", burst = 1 }",
            "9:8: prefix[0] \"10.0.0.0/8\" class[0] \"rst\" name",
            "there is no class \"rst\"; did you mean \"rest\"?",
        ),
        (
            "scale = 2\n[[prefix.class]]\nname = \"rest\"\npackets = { rate = \"1/s\", burst = 1 }",
            "8:9: prefix[0] \"10.0.0.0/8\" scale",
            "exclude each other; remove scale",
        ),
    ];
    for (rest, place, part) in cases {
        one_error(&with(&format!("[[prefix]]\ncidr = \"10.0.0.0/8\"\n{rest}")), place, &[part]);
    }
}

#[test]
fn exemptions() {
    let owner = "owner = \"platform\"";
    let cases = [
        (
            owner.to_owned(),
            "6:1: exempt[0] \"10.0.0.0/8\"",
            "add interface = \"…\", or spoofable = true",
        ),
        (format!("{owner}\nspoofable = false"), "6:1: exempt[0] \"10.0.0.0/8\"", "can be forged"),
        (
            format!("{owner}\ninterface = \"eth1\""),
            "9:13: exempt[0] \"10.0.0.0/8\" interface",
            "no [[interface]] is called \"eth1\"; write one of eth0, or add",
        ),
        (
            "interface = \"eth0\"".to_owned(),
            "6:1: exempt[0] \"10.0.0.0/8\" owner",
            "missing; add owner",
        ),
        (
            "interface = \"eth0\"\nowner = \" \"".to_owned(),
            "9:9: exempt[0] \"10.0.0.0/8\" owner",
            "nobody owns it",
        ),
        (
            format!("{owner}\ninterface = \"eth0\"\nexpires = \"tomorrow\""),
            "10:11: exempt[0] \"10.0.0.0/8\" expires",
            "not an instant in time; write date, time and UTC",
        ),
        (
            format!("{owner}\ninterface = \"eth0\"\nexpires = 2027-01-01"),
            "10:11: exempt[0] \"10.0.0.0/8\" expires",
            "2027-01-01T00:00:00Z",
        ),
        (
            format!("{owner}\ninterface = \"eth0\"\nexpires = 60"),
            "10:11: exempt[0] \"10.0.0.0/8\" expires",
            "expected a date and time",
        ),
        (
            format!(
                "{owner}\ninterface = \"eth0\"\n[[exempt]]\ncidr = \"10.0.0.0/8\"\n{owner}\ninterface = \"eth0\""
            ),
            "10:1: exempt[1] \"10.0.0.0/8\"",
            "already at line 6",
        ),
    ];
    for (rest, place, part) in cases {
        one_error(&with(&format!("[[exempt]]\ncidr = \"10.0.0.0/8\"\n{rest}")), place, &[part]);
    }
    let glob = with("[[exempt]]\ncidr = \"10.0.0.0/8\"\ninterface = \"eth*\"\nowner = \"x\"");
    assert_eq!(parse(&glob).err(), None);
}

#[test]
fn a_block_of_everything_is_a_warning() {
    let config = parse(&with("[[block]]\ncidr = \"0.0.0.0/0\"")).unwrap();
    assert!(config.warnings[0].to_string().contains("6:1: block[0] \"0.0.0.0/0\": blocks every"));
}
