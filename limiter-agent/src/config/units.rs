//! Rates and sizes as people write them.

use limiter_common::units::{ByteLimit, LimitError, PacketLimit, Rate};

/// The shortest burst that lets a full Ethernet frame through: 1,500 bytes and the header.
pub(super) const MIN_BYTES: u64 = 1514;

/// What a budget counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Packets,
    Bytes,
}

/// A unit's name, and what one of it is: a numerator and a denominator.
type Scale = (&'static str, u64, u64);

const PACKET_RATES: &[Scale] = &[("/s", 1, 1), ("/m", 1, 60), ("/h", 1, 3600)];
const BYTE_RATES: &[Scale] = &[
    ("kbit/s", 1_000, 8),
    ("Mbit/s", 1_000_000, 8),
    ("Gbit/s", 1_000_000_000, 8),
    ("bit/s", 1, 8),
    ("KiB/s", 1 << 10, 1),
    ("MiB/s", 1 << 20, 1),
    ("GiB/s", 1 << 30, 1),
    ("B/s", 1, 1),
];
const SIZES: &[Scale] = &[
    ("KiB", 1 << 10, 1),
    ("MiB", 1 << 20, 1),
    ("GiB", 1 << 30, 1),
    ("kB", 1_000, 1),
    ("MB", 1_000_000, 1),
    ("GB", 1_000_000_000, 1),
    ("B", 1, 1),
];

impl Unit {
    /// `text` as a rate, exactly: `None` if it is not one.
    pub(super) fn rate(self, text: &str) -> Option<Result<Rate, LimitError>> {
        let scales = match self {
            Self::Packets => PACKET_RATES,
            Self::Bytes => BYTE_RATES,
        };
        let (count, seconds) = quantity(text, scales)?;
        let divisor = gcd(count, seconds);
        let rate = match (u64::try_from(count / divisor), u64::try_from(seconds / divisor)) {
            (Ok(count), Ok(seconds)) => Rate::new(count, seconds),
            _ => Err(LimitError::TooFast),
        };
        Some(rate)
    }

    /// What to write for a rate.
    pub(super) const fn rate_cure(self) -> &'static str {
        match self {
            Self::Packets => r#"write a count per second, minute or hour: "1000/s""#,
            Self::Bytes => {
                r#"write it in bit/s, kbit/s, Mbit/s, Gbit/s, B/s, KiB/s, MiB/s or GiB/s: "4Mbit/s""#
            }
        }
    }

    /// The least burst.
    pub(super) const fn min_burst(self) -> u64 {
        match self {
            Self::Packets => 1,
            Self::Bytes => MIN_BYTES,
        }
    }

    /// Whether the datapath can enforce it.
    pub(super) fn check(self, rate: Rate, burst: u64) -> Result<(), LimitError> {
        match self {
            Self::Packets => PacketLimit::new(rate, burst).map(|_| ()),
            Self::Bytes => ByteLimit::new(rate, burst).map(|_| ()),
        }
    }

    /// The fastest rate that can be enforced, and the slowest.
    pub(super) const fn range(self) -> (&'static str, &'static str) {
        match self {
            Self::Packets => ("30000000/s", "1/h"),
            Self::Bytes => ("200Gbit/s", "8kbit/s"),
        }
    }

    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Packets => "packets",
            Self::Bytes => "bytes",
        }
    }
}

/// `text` as a size in bytes, which must be whole: `None` if it is not one.
pub(super) fn size(text: &str) -> Option<u64> {
    let (count, divisor) = quantity(text, SIZES)?;
    (count % divisor == 0).then_some(())?;
    u64::try_from(count / divisor).ok()
}

/// The fraction that a number with one of these units is.
fn quantity(text: &str, scales: &[Scale]) -> Option<(u128, u128)> {
    let (number, up, down) =
        scales.iter().find_map(|(unit, up, down)| Some((text.strip_suffix(unit)?, *up, *down)))?;
    let (count, parts) = decimal(number)?;
    Some((count.checked_mul(up.into())?, parts * u128::from(down)))
}

/// A decimal number as a fraction: `"0.5"` is 5/10. At most six decimals, so that nothing overflows
/// and nobody means them.
fn decimal(text: &str) -> Option<(u128, u128)> {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !is_number(whole) || !is_number(decimals) || decimals.len() > 6 {
        return None;
    }
    let parts = 10_u128.pow(u32::try_from(decimals.len()).ok()?);
    let count = whole.parse::<u64>().ok()?;
    Some((u128::from(count) * parts + decimals.parse::<u128>().ok()?, parts))
}

fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_rate(unit: Unit, text: &str, count: u64, seconds: u64) -> bool {
        unit.rate(text) == Some(Rate::new(count, seconds))
    }

    #[test]
    fn rates_are_exact_fractions() {
        assert!(is_rate(Unit::Packets, "1000/s", 1000, 1));
        assert!(is_rate(Unit::Packets, "0.5/s", 1, 2));
        assert!(is_rate(Unit::Packets, "90/m", 3, 2));
        assert!(is_rate(Unit::Packets, "1/h", 1, 3600));
        assert!(is_rate(Unit::Bytes, "4Mbit/s", 500_000, 1));
        assert!(is_rate(Unit::Bytes, "12bit/s", 3, 2));
        assert!(is_rate(Unit::Bytes, "1.5MiB/s", 3 << 19, 1));
        assert!(is_rate(Unit::Bytes, "200Gbit/s", 25_000_000_000, 1));
    }

    #[test]
    fn what_is_not_a_rate() {
        for text in ["", "/s", "1000", "1000/x", "-1/s", "1e3/s", "1./s", ".5/s", "1 /s", "1_0/s"] {
            assert_eq!(Unit::Packets.rate(text), None, "{text}");
        }
        for text in ["1000/s", "4mbit/s", "4Mb/s", "4 Mbit/s", "0.0000001B/s"] {
            assert_eq!(Unit::Bytes.rate(text), None, "{text}");
        }
    }

    #[test]
    fn extreme_rates_do_not_overflow() {
        assert_eq!(Unit::Packets.rate("0/s"), Some(Err(LimitError::ZeroRate)));
        let most = format!("{}.999999Gbit/s", u64::MAX);
        assert_eq!(Unit::Bytes.rate(&most), Some(Err(LimitError::TooFast)));
    }

    #[test]
    fn sizes() {
        assert_eq!(size("256KiB"), Some(262_144));
        assert_eq!(size("64kB"), Some(64_000));
        assert_eq!(size("1.5MiB"), Some(1_572_864));
        assert_eq!(size("2000B"), Some(2_000));
        assert_eq!(size("0.3B"), None);
        assert_eq!(size("256K"), None);
    }

    #[test]
    fn the_ranges_in_messages_are_the_ones_enforced() {
        let ends = [
            (Unit::Packets, PacketLimit::FASTEST, PacketLimit::SLOWEST),
            (Unit::Bytes, ByteLimit::FASTEST, ByteLimit::SLOWEST),
        ];
        for (unit, fastest, slowest) in ends {
            let (high, low) = unit.range();
            assert_eq!(unit.rate(high), Some(Ok(fastest)));
            assert_eq!(unit.rate(low), Some(Ok(slowest)));
        }
    }
}
