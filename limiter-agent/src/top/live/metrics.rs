//! Rates from two scrapes.

use std::collections::BTreeMap;
use std::time::Duration;

/// One scrape: each sample by its name and labels.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Scrape(Vec<(String, BTreeMap<String, String>, f64)>);

/// How much of something there is in a second.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Rate {
    pub(super) class: String,
    pub(super) reason: String,
    pub(super) action: String,
    pub(super) packets: f64,
    pub(super) bytes: f64,
}

impl Scrape {
    /// What is in the Prometheus text format; lines that are not of it are left out.
    pub(super) fn parse(text: &str) -> Self {
        Self(text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect())
    }

    /// The sum of all samples of a name with this label.
    pub(super) fn sum(&self, name: &str, label: Option<(&str, &str)>) -> f64 {
        self.samples(name)
            .filter(|(labels, _)| {
                label.is_none_or(|(key, value)| labels.get(key).is_some_and(|it| it == value))
            })
            .fold(0.0, |sum, (_, value)| sum + value)
    }

    /// The greatest sample of a name, by the value of a label.
    pub(super) fn greatest(&self, name: &str, label: &str) -> Option<(String, f64)> {
        let named =
            self.samples(name).filter_map(|(labels, value)| Some((labels.get(label)?, value)));
        named.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(name, value)| (name.clone(), value))
    }

    /// What came by class, reason and action since `before`, the most packets first.
    pub(super) fn rates(&self, before: &Self, elapsed: Duration) -> Vec<Rate> {
        let mut sums: BTreeMap<[&str; 3], [f64; 2]> = BTreeMap::new();
        let names = ["limiter_packets_total", "limiter_bytes_total"];
        for (sign, scrape) in [(1.0, self), (-1.0, before)] {
            for (place, name) in names.iter().enumerate() {
                for (labels, value) in scrape.samples(name) {
                    let label = |key| labels.get(key).map_or("", |it| it);
                    let key = [label("class"), label("reason"), label("action")];
                    sums.entry(key).or_default()[place] += sign * value;
                }
            }
        }
        let seconds = elapsed.as_secs_f64().max(0.001);
        let rates = sums.into_iter().map(|([class, reason, action], [packets, bytes])| Rate {
            class: class.to_owned(),
            reason: reason.to_owned(),
            action: action.to_owned(),
            packets: (packets / seconds).max(0.0),
            bytes: (bytes / seconds).max(0.0),
        });
        let mut rates: Vec<_> = rates.filter(|rate| rate.packets > 0.0).collect();
        rates.sort_by(|a, b| b.packets.total_cmp(&a.packets));
        rates
    }

    fn samples(&self, name: &str) -> impl Iterator<Item = (&BTreeMap<String, String>, f64)> {
        self.0.iter().filter(move |it| it.0 == name).map(|(_, labels, value)| (labels, *value))
    }
}

fn sample(line: &str) -> Option<(String, BTreeMap<String, String>, f64)> {
    let (name, mut rest) = line.split_at(line.find(['{', ' '])?);
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (key, quoted) = rest.split_once("=\"")?;
            let (value, after) = unquote(quoted)?;
            labels.insert(key.to_owned(), value);
            rest = after.strip_prefix(',').unwrap_or(after);
        }
        rest = rest.strip_prefix('}')?;
    }
    Some((name.to_owned(), labels, rest.trim().parse().ok()?))
}

/// The text up to the closing quote, and what follows that.
fn unquote(quoted: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((place, character)) = characters.next() {
        match character {
            '"' => return Some((value, quoted.get(place + 1..)?)),
            '\\' => value.push(match characters.next()?.1 {
                'n' => '\n',
                escaped => escaped,
            }),
            plain => value.push(plain),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scrape(drops: u32, passes: u32) -> Scrape {
        Scrape::parse(&format!(
            "# HELP limiter_packets_total Packets.\n\
             limiter_packets_total{{interface=\"a\",class=\"d\\\"ns\",reason=\"packet_rate\",action=\"drop\"}} {drops}\n\
             limiter_packets_total{{interface=\"b\",class=\"d\\\"ns\",reason=\"packet_rate\",action=\"drop\"}} {drops}\n\
             limiter_packets_total{{interface=\"a\",class=\"rest\",reason=\"conform\",action=\"pass\"}} {passes}\n\
             limiter_pressure{{class=\"none\"}} 0.25\nlimiter_pressure{{class=\"rest\"}} 0.5\n\
             limiter_blocks 2\nnonsense\n"
        ))
    }

    #[test]
    fn rates_are_sums_over_interfaces() {
        let rates = scrape(300, 50).rates(&scrape(100, 50), Duration::from_secs(2));
        assert_eq!(rates.len(), 1, "what does not move is left out");
        assert_eq!((rates[0].class.as_str(), rates[0].packets), ("d\"ns", 200.0));
        let scrape = scrape(1, 1);
        assert_eq!(scrape.greatest("limiter_pressure", "class"), Some(("rest".to_owned(), 0.5)));
        assert!((scrape.sum("limiter_pressure", Some(("class", "none"))) - 0.25).abs() < 1e-9);
        assert!((scrape.sum("limiter_blocks", None) - 2.0).abs() < 1e-9);
    }
}
