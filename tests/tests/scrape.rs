//! What a scrape of `/metrics` holds and costs while a million sources attack.

use std::{io::Write as _, time::Duration};

use anyhow::Result;
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
