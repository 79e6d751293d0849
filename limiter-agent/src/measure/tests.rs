use limiter_common::packet::Source;

use super::*;

const CONFIG: &str = r#"
mode = "observe"
[[interface]]
name = "eth0"
[[class]]
name = "dns"
match = { protocol = "udp" }
packets = { rate = "10/s", burst = 10 }
[[class]]
name = "rest"
packets = { rate = "10/s", burst = 10 }
"#;
const CLASS: ClassId = ClassId(1);
const SECOND: Duration = Duration::from_millis(1_010);

fn config(text: &str) -> Config {
    Config::parse("test", text, SystemTime::UNIX_EPOCH).expect("is valid")
}

fn measure() -> Measure {
    Measure::new(&config(CONFIG), SystemTime::UNIX_EPOCH)
}

fn source(number: u32) -> WatchedSource {
    WatchedSource::new(Source::ipv4(number), CLASS)
}

/// A reading of sources with so many packets of 100 bytes in all; those below 1000 are proven.
fn read(measure: &mut Measure, elapsed: Duration, full: bool, totals: &[(u32, u64)]) -> Orders {
    let counts = totals.iter().map(|(number, packets)| {
        (source(*number), WatchedCount { packets: *packets, bytes: packets * 100 })
    });
    measure.read(&mut Reading {
        counts: &mut counts.collect::<Vec<_>>().into_iter(),
        elapsed,
        observed: &BTreeSet::from([CLASS]),
        is_full: full,
        unwatched: 0,
        is_proven: &|it| it.bits < 1000,
        is_apart: &|it| it.bits == 7,
        is_sampled: &|it, mask| it.bits & u64::from(mask) == 0,
    })
}

fn class(measure: &Measure) -> ClassHour {
    measure.classes().remove(&CLASS).expect("was measured")
}

#[test]
fn the_highest_second_of_each_source_counts_and_the_proven_are_apart() {
    let mut measure = measure();
    read(&mut measure, SECOND, false, &[(1, 10), (2000, 5), (3000, 1), (7, 900)]);
    read(&mut measure, SECOND, false, &[(1, 50), (2000, 6), (3000, 1), (7, 1900)]);
    read(&mut measure, SECOND, false, &[(1, 60), (2000, 7), (3000, 1), (7, 1900)]);
    let class = class(&measure);
    assert_eq!((class.proven.sources(), class.proven.packets.max()), (1, 40));
    assert_eq!(class.proven.bytes.max(), 4_000);
    assert_eq!(class.proven.sustained_packets.max(), 6);
    assert_eq!((class.others.sources(), class.others.packets.max()), (1, 5));
    assert_eq!((class.others.singles, class.apart), (1, 1));
    assert_eq!(class.new.max(), 4);
    assert_eq!(class.proven.top.len(), 1);
}

#[test]
fn what_was_sent_in_a_long_time_says_nothing_of_a_second() {
    let mut measure = measure();
    read(&mut measure, SECOND, false, &[(1, 10)]);
    read(&mut measure, Duration::from_mins(1), false, &[(1, 6_000)]);
    read(&mut measure, SECOND, false, &[(1, 6_020)]);
    assert_eq!(class(&measure).proven.packets.max(), 20);
    assert_eq!(class(&measure).time, 2 * SECOND);
}

#[test]
fn a_full_map_halves_the_sample_and_keeps_what_was_measured() {
    let mut measure = measure();
    let totals: Vec<_> = (0..100).map(|number| (2_000 + number, 5)).collect();
    let orders = read(&mut measure, SECOND, true, &totals);
    assert_eq!((orders.mask, orders.forget.len(), measure.one_in()), (1, 50, 2));
    assert_eq!(class(&measure).others.sources(), 100);
    for _ in 0..60 {
        read(&mut measure, SECOND, false, &[]);
    }
    assert_eq!(measure.one_in(), 1, "there was room for a minute");
}

#[test]
fn hours_go_and_the_memory_is_bounded() {
    let mut measure = measure();
    for second in 1..=(HOURS as u64 + 6) * 3_600 / 2 {
        read(&mut measure, 2 * WINDOW, false, &[(1, 10 * second)]);
    }
    assert_eq!(measure.hours.len(), HOURS);
    assert_eq!(class(&measure).hours, HOURS as u64);
    assert!(class(&measure).time <= HOUR * 24);
}

#[test]
fn other_limits_change_nothing_and_other_classes_all() {
    let mut measure = measure();
    read(&mut measure, SECOND, false, &[(1, 10)]);
    let now = SystemTime::UNIX_EPOCH;
    assert!(measure.goes_on_under(&config(&CONFIG.replace("10/s", "99/s")), now));
    assert_eq!(class(&measure).proven.sources(), 1);
    assert!(!measure.goes_on_under(&config(&CONFIG.replace("udp", "tcp")), now));
    assert!(measure.classes().is_empty());
}
