//! What was measured, for people and for programs.

use std::fmt;

use serde_json::{Value, json};

/// Several measurements of the same thing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// None if there is none.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            sorted[middle]
        } else {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        };
        Some(Self { median, min, max })
    }

    pub(crate) fn json(&self) -> Value {
        json!({ "median": self.median, "min": self.min, "max": self.max })
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(1);
        let Self { median, min, max } = self;
        if min.total_cmp(max).is_eq() {
            return write!(f, "{median:.digits$}");
        }
        write!(f, "{median:.digits$} ({min:.digits$}..{max:.digits$})")
    }
}

/// A target of the benchmark.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) bound: Bound,
    /// What was measured, or why nothing was.
    pub(crate) measured: Result<f64, String>,
}

/// What a target asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bound {
    AtMost(f64),
    AtLeast(f64),
    Within(f64, f64),
}

impl Bound {
    fn holds(self, value: f64) -> bool {
        match self {
            Self::AtMost(most) => value <= most,
            Self::AtLeast(least) => value >= least,
            Self::Within(least, most) => (least..=most).contains(&value),
        }
    }

    /// The bound that `value` is nearest to, which a miss is a multiple of.
    fn edge(self, value: f64) -> f64 {
        match self {
            Self::AtMost(edge) | Self::AtLeast(edge) => edge,
            Self::Within(least, most) => {
                if value < least {
                    least
                } else {
                    most
                }
            }
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(most) => write!(f, "≤ {most}"),
            Self::AtLeast(least) => write!(f, "≥ {least}"),
            Self::Within(least, most) => write!(f, "{least:.4}–{most:.4}"),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, bound, measured } = self;
        match measured {
            Ok(value) if bound.holds(*value) => {
                write!(f, "met      {name}: {value:.4} (target {bound})")
            }
            Ok(value) => {
                let edge = bound.edge(*value);
                write!(f, "missed   {name}: {value:.4} (target {bound}")?;
                if edge > 0.0 {
                    write!(f, "; {:.2} × that)", value / edge)
                } else {
                    write!(f, ")")
                }
            }
            Err(reason) => write!(f, "skipped  {name}: {reason} (target {bound})"),
        }
    }
}

/// All that one run found.
#[derive(Default)]
pub(crate) struct Report {
    sections: serde_json::Map<String, Value>,
    targets: Vec<Target>,
}

impl Report {
    /// Prints a table, and keeps its rows under `key`.
    pub(crate) fn table(&mut self, key: &str, title: &str, head: &[&str], rows: &[Row]) {
        println!("\n{title}");
        let head: Vec<_> = head.iter().map(|&cell| cell.to_owned()).collect();
        let lines: Vec<_> = [&head].into_iter().chain(rows.iter().map(|row| &row.cells)).collect();
        let width = |column: usize| {
            let cells = lines.iter().filter_map(|line| line.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or_default()
        };
        for line in &lines {
            let cells = line.iter().enumerate().map(|(column, cell)| {
                let width = width(column);
                // What a row is about on the left, numbers on the right.
                if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            });
            println!("  {}", cells.collect::<Vec<_>>().join("  ").trim_end());
        }
        self.keep(key, rows.iter().map(|row| row.json.clone()).collect());
    }

    /// Keeps a value under `key`.
    pub(crate) fn keep(&mut self, key: &str, value: Value) {
        self.sections.insert(key.to_owned(), value);
    }

    /// Compares with a target.
    pub(crate) fn target(
        &mut self,
        name: impl Into<String>,
        bound: Bound,
        measured: Result<f64, String>,
    ) {
        self.targets.push(Target { name: name.into(), bound, measured });
    }

    /// Prints the targets.
    pub(crate) fn print_targets(&self) {
        println!("\nTargets");
        self.targets.iter().for_each(|target| println!("  {target}"));
    }

    pub(crate) fn json(&self) -> Value {
        let targets = self.targets.iter().map(|Target { name, bound, measured }| {
            let value = measured.as_ref().ok();
            json!({
                "name": name,
                "target": bound.to_string(),
                "value": value,
                "met": value.map(|value| bound.holds(*value)),
                "skipped": measured.as_ref().err(),
            })
        });
        let mut all = self.sections.clone();
        all.insert("targets".into(), targets.collect());
        Value::Object(all)
    }
}

/// One line of a table, and the same for programs.
pub(crate) struct Row {
    pub(crate) cells: Vec<String>,
    pub(crate) json: Value,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_the_median_and_the_ends() {
        let spread = Spread::of(&[3.0, 1.0, 2.0, 10.0]).expect("there are samples");
        assert_eq!(spread.to_string(), "2.5 (1.0..10.0)");
        assert_eq!(format!("{:.0}", Spread::of(&[7.0]).expect("there is one")), "7");
        assert!(Spread::of(&[]).is_none());
    }

    #[test]
    fn a_miss_says_how_far_off() {
        let target = |measured| Target { name: "x".into(), bound: Bound::AtMost(2.0), measured };
        assert_eq!(target(Ok(2.0)).to_string(), "met      x: 2.0000 (target ≤ 2)");
        let missed = target(Ok(3.0)).to_string();
        assert_eq!(missed, "missed   x: 3.0000 (target ≤ 2; 1.50 × that)");
        assert!(target(Err("why".into())).to_string().starts_with("skipped  x: why"));
        assert!(Bound::Within(0.99, 1.0).holds(0.995) && !Bound::Within(0.99, 1.0).holds(1.01));
        assert!(!Bound::AtMost(1.0).holds(f64::NAN) && !Bound::AtLeast(1.0).holds(f64::NAN));
    }
}
