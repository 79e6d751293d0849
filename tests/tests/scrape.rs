//! What a scrape of `/metrics` holds and costs while a million sources attack.

use std::{
    io::Write as _,
    time::{Duration, SystemTime},
};

use anyhow::Result;
use limiter_agent::config::Config;
use limiter_common::Reason;
use limiter_tests::scrape;

/// The most series of one interface.
const SERIES: usize = 2_000;

/// Far above what is measured, and far below what it would cost to read the table and the counters one by one
/// in a build without optimisation. How fast it is, `cargo xtask bench` says.
const CPU: Duration = Duration::from_millis(250);

#[test]
fn a_scrape_under_attack_has_few_series_and_is_cheap() -> Result<()> {
    let scraped = scrape::under_attack(20)?;
    let (series, median) = (scraped.series(), scraped.median());
    let all = scraped.text.lines().filter(|line| line.starts_with("limiter_")).count();
    let tracked = scraped.tracked()?;
    writeln!(
        std::io::stdout(),
        "{series} series of the interface, {all} in all; {tracked} tracked of {}; CPU {median:?}, at most {:?}",
        scraped.sent,
        scraped.cpu.iter().max()
    )?;
    assert!((500..SERIES).contains(&series), "{series} series");
    assert!(median < CPU, "{:?}", scraped.cpu);
    // An estimate: three times its standard error, and those that found no slot, or a ring that was full. Of
    // the attack that goes on, another class has some tens of thousands.
    let sources = f64::from(scrape::SOURCES);
    assert!((0.97..1.15).contains(&(tracked / sources)), "{tracked} of {sources} tracked");
    Ok(())
}

/// Whatever comes in: if each class and reserve met each reason in both families, in one mode.
#[test]
fn no_traffic_makes_more_series_than_that() -> Result<()> {
    let class = |number| {
        format!(
            "[[class]]\nname = \"c{number}\"\nmatch = {{ protocol = \"udp\", ports = [{number}] }}\n"
        )
    };
    let limit = "packets = { rate = \"10/s\", burst = 10 }\n";
    let classes: String = (1..16).map(|number| class(number) + limit).collect();
    let text =
        format!("[[interface]]\nname = \"edge0\"\n{classes}[[class]]\nname = \"rest\"\n{limit}");
    let config = Config::parse("scrape.toml", &text, SystemTime::now())?;
    let classes = config.rules().count();
    let without_class = [
        Reason::NoSettings,
        Reason::Malformed,
        Reason::NonIp,
        Reason::Neighbour,
        Reason::NeighbourRate,
    ];
    let reasons = Reason::ALL.iter().filter(|reason| !without_class.contains(reason)).count();
    // Packets and bytes; of those without a class there are three families.
    let series = 2 * (2 * classes * reasons + 3 * without_class.len());
    writeln!(
        std::io::stdout(),
        "{classes} classes and reserves, {reasons} reasons: {series} series"
    )?;
    assert!(classes >= 16 && series < SERIES, "{series}");
    Ok(())
}
