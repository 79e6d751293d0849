//! `packets = { rate = …, burst = … }` and `bytes = { … }`.

use limiter_common::units::{LimitError, Rate};

use super::reader::{Table, Value};
use super::units::{self, Unit};
use super::{Allowance, Budget, connections};

/// `packets` and `bytes` of `table`, at least one of which must be there, and `connections`, which will
/// do for a network (`of_network`); `None` only if something was noted.
pub(super) fn allowance(table: &Table<'_>, of_network: bool) -> Option<Allowance> {
    let (packets, bytes) = (table.get("packets"), table.get("bytes"));
    let connections = connections::read(table);
    let is_enough = of_network && connections != Some(None);
    if packets.is_none() && bytes.is_none() && !is_enough {
        if table.misspells("packets") || table.misspells("bytes") {
            return None;
        }
        table.place().error(
            "neither packets nor bytes is limited",
            r#"add packets = { rate = "1000/s", burst = 2000 }, or bytes"#,
        );
        return None;
    }
    let packets = packets.map(|value| budget(value, Unit::Packets));
    let bytes = bytes.map(|value| budget(value, Unit::Bytes));
    let (packets, bytes) = (transpose(packets), transpose(bytes));
    Some(Allowance { packets: packets?, bytes: bytes?, connections: connections? })
}

/// One budget; `None` only if something was noted.
pub(super) fn budget(value: Value<'_>, unit: Unit) -> Option<Budget> {
    let example = match unit {
        Unit::Packets => r#"write { rate = "1000/s", burst = 2000 }"#,
        Unit::Bytes => r#"write { rate = "4Mbit/s", burst = "256KiB" }"#,
    };
    let table = value.table(example)?;
    let (rate_example, burst_example) = match unit {
        Unit::Packets => (r#"rate = "1000/s""#, "burst = 2000"),
        Unit::Bytes => (r#"rate = "4Mbit/s""#, r#"burst = "256KiB""#),
    };
    let rate_value = table.require("rate", rate_example);
    let burst_value = table.require("burst", burst_example);
    let rate = rate_value.as_ref().and_then(|value| rate(value, unit));
    let burst_read = burst_value.as_ref().and_then(|value| burst(value, unit));
    let (rate, burst, burst_value) = (rate?, burst_read?, burst_value?);
    match unit.check(rate, burst) {
        Ok(()) => Some(Budget { rate, burst }),
        Err(error) => {
            let (cause, cure) = explain(error, unit);
            burst_value.place().error(cause, cure);
            None
        }
    }
}

/// The cause and cure of a budget that cannot be enforced.
pub(super) fn explain(error: LimitError, unit: Unit) -> (String, String) {
    let (fastest, slowest) = unit.range();
    let allowed = format!("write a rate from \"{slowest}\" to \"{fastest}\"");
    match error {
        LimitError::ZeroRate => (
            "a rate of 0 passes nothing".to_owned(),
            format!("{allowed}; to drop a network altogether, use [[block]]"),
        ),
        LimitError::ZeroBurst => (
            "a burst of 0 passes nothing".to_owned(),
            format!("write a burst of at least {}", unit.min_burst()),
        ),
        LimitError::TooFast => (format!("faster than \"{fastest}\" cannot be enforced"), allowed),
        LimitError::TooSlow => (format!("slower than \"{slowest}\" cannot be enforced"), allowed),
        LimitError::TooLong => (
            "at this rate a full burst takes more than 208 days to come back".to_owned(),
            "write a smaller burst or a faster rate".to_owned(),
        ),
    }
}

fn rate(value: &Value<'_>, unit: Unit) -> Option<Rate> {
    let text = value.string(unit.rate_cure())?;
    let Some(rate) = unit.rate(text) else {
        let kind = match unit {
            Unit::Packets => "a rate",
            Unit::Bytes => "a byte rate",
        };
        value.place().error(format!("\"{text}\" is not {kind}"), unit.rate_cure());
        return None;
    };
    // With the least burst, only the rate itself can be at fault.
    let checked = rate.and_then(|rate| unit.check(rate, unit.min_burst()).map(|()| rate));
    match checked {
        Ok(rate) => Some(rate),
        Err(error) => {
            let (cause, cure) = explain(error, unit);
            value.place().error(format!("\"{text}\": {cause}"), cure);
            None
        }
    }
}

fn burst(value: &Value<'_>, unit: Unit) -> Option<u64> {
    let least = unit.min_burst();
    // 0 is in it, since that is answered in better words below.
    let number = || {
        let cure = format!("write a whole number, {least} or more");
        value.integer_or(0..=u64::MAX >> 1, &cure)
    };
    let burst = match (unit, value.raw().as_str()) {
        (Unit::Packets, _) => number()?,
        (Unit::Bytes, None) if value.raw().is_integer() => number()?,
        (Unit::Bytes, None) => {
            value.mistyped("a size", SIZE_CURE);
            return None;
        }
        (Unit::Bytes, Some(text)) => {
            let size = units::size(text);
            if size.is_none() {
                value.place().error(format!("\"{text}\" is not a size"), SIZE_CURE);
            }
            size?
        }
    };
    if burst < least {
        let (cause, cure) = match unit {
            Unit::Packets => ("a burst of 0 passes nothing", "write 1 or more".to_owned()),
            Unit::Bytes => (
                "a burst below one full frame never lets one through",
                format!("write at least {least} (bytes), and more where the MTU is above 1500"),
            ),
        };
        value.place().error(cause, cure);
        return None;
    }
    Some(burst)
}

const SIZE_CURE: &str = r#"write bytes as a number or in B, kB, MB, GB, KiB, MiB or GiB: "256KiB""#;

/// An absent budget is fine, a wrong one is not.
#[expect(clippy::option_option, reason = "absent and wrong are two things")]
pub(super) fn transpose(read: Option<Option<Budget>>) -> Option<Option<Budget>> {
    match read {
        None => Some(None),
        Some(budget) => budget.map(Some),
    }
}
