//! Metric families as the `prometheus` crate encodes them, built from plain values.

use prometheus::proto::{Counter, Gauge, LabelPair, Metric, MetricFamily, MetricType};

/// Families in the order of their making.
#[derive(Default)]
pub(super) struct Exposition(Vec<MetricFamily>);

/// Whether a family only grows.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    Counter,
    Gauge,
}

/// A family that takes samples.
pub(super) struct Family<'a> {
    family: &'a mut MetricFamily,
    kind: Kind,
}

impl Exposition {
    /// A new family.
    pub(super) fn family(&mut self, name: &str, help: &str, kind: Kind) -> Family<'_> {
        let mut family = MetricFamily::default();
        family.set_name(name.to_owned());
        family.set_help(help.to_owned());
        family.set_field_type(match kind {
            Kind::Counter => MetricType::COUNTER,
            Kind::Gauge => MetricType::GAUGE,
        });
        self.0.push(family);
        let last = self.0.len() - 1;
        Family { family: &mut self.0[last], kind }
    }

    /// The families that have samples; the format knows no others.
    pub(super) fn families(mut self) -> Vec<MetricFamily> {
        self.0.retain(|family| !family.get_metric().is_empty());
        self.0
    }
}

impl Family<'_> {
    /// Adds a sample.
    pub(super) fn sample(&mut self, labels: &[(&str, String)], value: f64) {
        let pairs = labels.iter().map(|(name, value)| {
            let mut pair = LabelPair::default();
            pair.set_name((*name).to_owned());
            pair.set_value(value.clone());
            pair
        });
        let mut metric = Metric::from_label(pairs.collect());
        match self.kind {
            Kind::Counter => {
                let mut counter = Counter::default();
                counter.set_value(value);
                metric.set_counter(counter);
            }
            Kind::Gauge => {
                let mut gauge = Gauge::default();
                gauge.set_value(value);
                metric.set_gauge(gauge);
            }
        }
        self.family.mut_metric().push(metric);
    }
}
