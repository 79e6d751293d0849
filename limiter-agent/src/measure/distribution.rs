//! Distributions of rates: histograms with a fixed relative error, and what is read from them.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// A distribution of whole numbers. Its buckets are 1/16 wide at most, and a value counts as the highest of
/// its bucket: never too low. Below 2⁴⁰ it takes less than 2.5 KB.
#[derive(Clone, Debug)]
pub struct Distribution {
    values: Histogram<u32>,
    /// Exactly.
    highest: u64,
}

/// What is shown of a distribution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quantiles {
    /// Half of all are at most that.
    pub p50: u64,
    /// 90 % are.
    pub p90: u64,
    /// 99 % are.
    pub p99: u64,
    /// 99.9 % are.
    pub p999: u64,
    /// The highest.
    pub max: u64,
}

/// How high a limit must be that nobody meets but outliers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Followed {
    /// The highest value that is followed.
    pub highest: u64,
    /// How many are so far above all others that they are not followed.
    pub outliers: u64,
}

impl Default for Distribution {
    fn default() -> Self {
        Self { values: empty(), highest: 0 }
    }
}

/// It grows as it needs to.
fn empty() -> Histogram<u32> {
    let mut values = Histogram::new_with_bounds(1, 2, 1).unwrap_or_else(|error| {
        unreachable!("the bounds are constants that the library allows: {error}")
    });
    values.auto(true);
    values
}

impl Distribution {
    /// Nothing is higher: it would be a source faster than any link.
    const HIGHEST: u64 = 1 << 40;
    /// Outliers are further than this above the highest of the others.
    pub const OUTLIER: u64 = 10;

    /// Adds a value.
    pub fn record(&mut self, value: u64) {
        let value = value.min(Self::HIGHEST);
        // It fails beyond what a resize can hold, which the line above keeps away.
        if self.values.record(value).is_ok() {
            self.highest = self.highest.max(value);
        }
    }

    /// Adds all values of another.
    pub fn add(&mut self, other: &Self) {
        if self.values.add(&other.values).is_ok() {
            self.highest = self.highest.max(other.highest);
        }
    }

    /// How many values there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.values.len()
    }

    /// The highest value, exactly.
    #[must_use]
    pub const fn max(&self) -> u64 {
        self.highest
    }

    /// Its quantiles.
    #[must_use]
    pub fn quantiles(&self) -> Quantiles {
        let at = |quantile| self.values.value_at_quantile(quantile).min(self.highest);
        Quantiles { p50: at(0.5), p90: at(0.9), p99: at(0.99), p999: at(0.999), max: self.highest }
    }

    /// How many values are above `limit`, within the width of its bucket.
    #[must_use]
    pub fn above(&self, limit: u64) -> u64 {
        if limit >= self.highest {
            return 0;
        }
        let buckets = self.values.iter_recorded();
        let above = buckets.filter(|it| it.value_iterated_to() > limit);
        above.map(|it| it.count_since_last_iteration()).sum()
    }

    /// The highest value but for outliers: of the `few` highest, or of one in a thousand if that is more,
    /// those that are more than [`OUTLIER`](Self::OUTLIER) times what the next one has. So as many forged
    /// sources cannot move it, however much they send, and at most a quarter of all are ever disregarded.
    #[must_use]
    pub fn followed(&self, few: u64) -> Followed {
        let count = self.count();
        let disregarded = few.max(count / 1_000).min(count / 4);
        let mut rank = count - disregarded;
        let mut reference = None;
        let mut followed = Followed::default();
        for bucket in self.values.iter_recorded() {
            let value = bucket.value_iterated_to().min(self.highest);
            let inside = bucket.count_since_last_iteration();
            if reference.is_none() && rank <= inside {
                reference = Some(value.max(1));
            }
            rank = rank.saturating_sub(inside);
            let most = reference.map_or(u64::MAX, |it| it.saturating_mul(Self::OUTLIER));
            if value <= most {
                followed.highest = value;
            } else {
                followed.outliers += inside;
            }
        }
        followed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: impl IntoIterator<Item = u64>) -> Distribution {
        let mut distribution = Distribution::default();
        for value in values {
            distribution.record(value);
        }
        distribution
    }

    #[test]
    fn quantiles_are_never_too_low_and_within_a_sixteenth() {
        let quantiles = of(1..=10_000).quantiles();
        for (found, true_value) in
            [(quantiles.p50, 5_000), (quantiles.p99, 9_900), (quantiles.p999, 9_990)]
        {
            assert!((true_value..=true_value * 17 / 16).contains(&found), "{found} {true_value}");
        }
        assert_eq!(quantiles.max, 10_000);
        assert_eq!(of([]).quantiles(), Quantiles::default());
        assert_eq!(of([u64::MAX]).max(), 1 << 40);
    }

    #[test]
    fn a_handful_is_not_followed_and_more_is() {
        let honest = || (0..200).map(|number| 20 + number % 30);
        let alone = of(honest()).followed(5);
        assert_eq!((alone.highest, alone.outliers), (49, 0));
        let forged = |count| of(honest().chain(std::iter::repeat_n(100_000, count)));
        let handful = forged(5).followed(5);
        assert!((49..=52).contains(&handful.highest), "{handful:?}");
        assert_eq!(handful.outliers, 5);
        let many = forged(60).followed(5);
        assert_eq!((many.highest, many.outliers), (100_000, 0));
        // One that sends some times more than others is not far above them.
        assert_eq!(of(honest().chain([300])).followed(5).highest, 300);
    }

    #[test]
    fn of_few_at_most_a_quarter_is_disregarded() {
        assert_eq!(of([10, 10, 10, 5_000]).followed(5).outliers, 1);
        assert_eq!(of([10, 10, 5_000, 5_000]).followed(5).outliers, 0);
        assert_eq!(of([]).followed(5), Followed::default());
    }

    #[test]
    fn many_that_send_little_do_not_hide_those_who_send_more() {
        // One honest source in five hundred.
        let values = (0..5_000).map(|number| if number % 500 == 0 { 80 } else { 2 });
        assert_eq!(of(values).followed(5).highest, 80);
    }

    #[test]
    fn values_above_a_limit_are_counted() {
        let distribution = of((1..=100).chain([5_000, 6_000]));
        assert_eq!(distribution.above(1_000), 2);
        assert_eq!(distribution.above(6_000), 0);
    }

    #[test]
    fn distributions_add_up() {
        let mut sum = of([1, 2, 3]);
        sum.add(&of([1_000_000]));
        assert_eq!((sum.count(), sum.max()), (4, 1_000_000));
    }
}
