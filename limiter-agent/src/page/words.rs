//! Numbers as people read them.

/// With three digits: `0`, `0.25`, `42`, `1.20 k`, `3.46 M`.
pub(super) fn short(value: f64) -> String {
    let (value, unit) = scaled(value);
    format!("{}{unit}", three_digits(value))
}

/// Packets per second.
pub(super) fn packets(rate: f64) -> String {
    format!("{}/s", short(rate))
}

/// Bytes per second as bits per second.
pub(super) fn bits(bytes: f64) -> String {
    let (value, unit) = scaled(bytes * 8.0);
    // `k` and not a space at the end: `0 bit/s`, `1.20 kbit/s`.
    let unit = unit.trim_start();
    format!("{}\u{a0}{unit}bit/s", three_digits(value))
}

/// A share from 0 to 1 in percent; what is above 0 never reads as 0, nor what is below 1 as 100.
pub(super) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if share > 0.0 && percent < 1.0 {
        "under 1\u{a0}%".to_owned()
    } else if share < 1.0 && percent > 99.0 {
        "99\u{a0}%".to_owned()
    } else {
        format!("{percent:.0}\u{a0}%")
    }
}

/// An exact number in groups of three digits.
pub(super) fn exact(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            // Narrow, and never broken.
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

fn scaled(value: f64) -> (f64, &'static str) {
    // What would be rounded up to 1000 already has the next unit.
    const UNITS: [(f64, &str); 4] =
        [(1e12, "\u{a0}T"), (1e9, "\u{a0}G"), (1e6, "\u{a0}M"), (1e3, "\u{a0}k")];
    let unit = UNITS.iter().find(|(size, _)| value >= size * 0.9995);
    unit.map_or((value, ""), |(size, unit)| (value / size, unit))
}

fn three_digits(value: f64) -> String {
    if value == 0.0 {
        "0".to_owned()
    } else if value < 0.005 {
        "<\u{202f}0.01".to_owned()
    } else if value < 9.995 {
        let text = format!("{value:.2}");
        text.strip_suffix(".00").map_or(text.clone(), str::to_owned)
    } else if value < 99.95 {
        let text = format!("{value:.1}");
        text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
    } else {
        format!("{value:.0}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (0.001, "<\u{202f}0.01"),
            (0.25, "0.25"),
            (1.0, "1"),
            (42.0, "42"),
            (99.96, "100"),
            (999.4, "999"),
            (999.6, "1\u{a0}k"),
            (1204.0, "1.20\u{a0}k"),
            (34_567_890.0, "34.6\u{a0}M"),
            (1.5e12, "1.50\u{a0}T"),
        ] {
            assert_eq!(short(value), text, "{value}");
        }
        assert_eq!(bits(150.0), "1.20\u{a0}kbit/s");
        assert_eq!(bits(0.0), "0\u{a0}bit/s");
        assert_eq!(exact(1_234_567), "1\u{202f}234\u{202f}567");
        assert_eq!(exact(999), "999");
    }

    #[test]
    fn a_share_is_never_rounded_away() {
        for (share, text) in
            [(0.0, "0"), (0.001, "under 1"), (0.5, "50"), (0.9999, "99"), (1.0, "100")]
        {
            assert_eq!(percent(share), format!("{text}\u{a0}%"));
        }
    }
}
