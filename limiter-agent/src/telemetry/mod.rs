//! Metrics in the Prometheus text format.
//!
//! Nothing is kept here: each scrape reads the kernel's counters into a [`Snapshot`] and writes it
//! out. No label holds an address, so the number of series is bounded by the configurations since
//! the start.

mod exposition;

use std::time::SystemTime;

use limiter_common::abi::{Count, SampleCount};
use prometheus::TextEncoder;

use crate::host::Discard;

use exposition::{Exposition, Kind};

/// All that one scrape says.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a metric of its own")]
pub struct Snapshot {
    /// The non-zero counters.
    pub packets: Vec<PacketCount>,
    /// Bucket tables: family and capacity.
    pub capacities: Vec<(&'static str, u32)>,
    /// Buckets in use: family, standing of their sources, how many.
    pub sources: Vec<(&'static str, &'static str, u64)>,
    /// How much of a shared budget is used up, from 0 to 1: the class (`none` for the budget for new
    /// sources of all classes), and the most used of its budgets.
    pub pressures: Vec<(String, f64)>,
    /// What can prove that a source is not forged, and whether it does.
    pub proofs: Vec<(&'static str, bool)>,
    /// The protocols of which the host's own flows can be known, and whether they are.
    pub own_flows: Vec<(&'static str, bool)>,
    /// Buckets ever created, by family.
    pub created: Vec<(&'static str, u64)>,
    /// The guarded interfaces.
    pub interfaces: Vec<InterfaceInfo>,
    /// What their NICs discarded before the program saw it.
    pub discards: Vec<Discard>,
    /// Samples of dropped packets: written, and lost for want of room.
    pub samples: SampleCount,
    /// Events, of which there always are some: written, and lost for want of room.
    pub events: SampleCount,
    /// The global mode.
    pub mode: &'static str,
    /// Whether a command, and not the configuration, says so.
    pub mode_overridden: bool,
    /// Whether an applied configuration waits to be confirmed.
    pub pending: bool,
    /// Whether the settings in force are older ones than were wanted.
    pub rolled_back: bool,
    /// Event and action of each failure policy.
    pub failure_policies: Vec<(&'static str, &'static str)>,
    /// Whether the last reload (or the start) succeeded.
    pub reload_successful: bool,
    /// When the settings in force were read.
    pub reload_success: SystemTime,
    /// `[[exempt]]` entries that hold now.
    pub exemptions: usize,
    /// Blocks that hold now, of the configuration and by command.
    pub blocks: usize,
    /// The agent's version.
    pub version: &'static str,
    /// The version of the layout shared with the kernel.
    pub abi: u32,
}

/// One counter with its labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PacketCount {
    /// The interface's name; `unknown` for one that is not configured.
    pub interface: String,
    /// The address family.
    pub family: &'static str,
    /// The class's name; `none` where no class was consulted.
    pub class: String,
    /// Why.
    pub reason: &'static str,
    /// What was done.
    pub action: &'static str,
    /// How many.
    pub count: Count,
}

/// A guarded interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceInfo {
    /// Its name.
    pub interface: String,
    /// How the kernel runs the program.
    pub mode: &'static str,
    /// Its driver; empty if it does not say.
    pub driver: String,
}

/// The modes, for `limiter_mode`.
const MODES: [&str; 3] = ["observe", "enforce", "bypass"];

impl Snapshot {
    /// The snapshot in the text format, version 0.0.4.
    ///
    /// # Errors
    /// [`prometheus::Error`] if a family breaks the format's rules: a bug here.
    pub fn encode(&self) -> Result<String, prometheus::Error> {
        let mut out = Exposition::default();
        self.traffic(&mut out);
        self.tables(&mut out);
        self.state(&mut out);
        TextEncoder::new().encode_to_string(&out.families())
    }

    fn traffic(&self, out: &mut Exposition) {
        let mut rows: Vec<_> = self.packets.iter().collect();
        rows.sort_by_key(|row| (&row.interface, row.family, &row.class, row.reason, row.action));
        let labels = |row: &PacketCount| {
            [
                ("interface", row.interface.clone()),
                ("family", row.family.to_owned()),
                ("class", row.class.clone()),
                ("reason", row.reason.to_owned()),
                ("action", row.action.to_owned()),
            ]
        };
        let help = "Packets received, by what was done with them and why.";
        let mut packets = out.family("limiter_packets_total", help, Kind::Counter);
        for row in &rows {
            packets.sample(&labels(row), count(row.count.packets));
        }
        let help = "Bytes of the frames received (from the Ethernet header, without the FCS), by \
                    what was done with them and why.";
        let mut bytes = out.family("limiter_bytes_total", help, Kind::Counter);
        for row in &rows {
            bytes.sample(&labels(row), count(row.count.bytes));
        }
    }

    fn tables(&self, out: &mut Exposition) {
        let help = "Sources that the bucket table can hold.";
        let mut capacity = out.family("limiter_table_capacity", help, Kind::Gauge);
        for (family, value) in &self.capacities {
            capacity.sample(&[("family", (*family).to_owned())], f64::from(*value));
        }
        let help = "Buckets in use: sources that are not at rest, one for each class they send in.";
        let mut tracked = out.family("limiter_tracked_sources", help, Kind::Gauge);
        for (family, _) in &self.capacities {
            let of_family = self.sources.iter().filter(|(it, _, _)| it == family);
            let sum = of_family.map(|(_, _, value)| value).sum();
            tracked.sample(&[("family", (*family).to_owned())], count(sum));
        }
        let help = "Buckets in use by what their sources have shown: proven (a completed TCP \
                    handshake) or seen.";
        let mut sources = out.family("limiter_sources", help, Kind::Gauge);
        for (family, standing, value) in &self.sources {
            let labels = [("family", (*family).to_owned()), ("standing", (*standing).to_owned())];
            sources.sample(&labels, count(*value));
        }
        let help = "Share of the most used budget that all sources of a class have together; class \
                    none is the budget for new sources of all classes.";
        let mut pressure = out.family("limiter_pressure", help, Kind::Gauge);
        for (class, value) in &self.pressures {
            pressure.sample(&[("class", class.clone())], *value);
        }
        let help = "Whether sources are proven by this (a completed TCP handshake); where not, they \
                    stay at most seen.";
        let mut proofs = out.family("limiter_proofs", help, Kind::Gauge);
        for (source, works) in &self.proofs {
            proofs.sample(&[("source", (*source).to_owned())], flag(*works));
        }
        let help = "Whether the flows of this protocol are known that this host opens; where not, what \
                    comes back on them falls under the limits of its sources.";
        let mut own = out.family("limiter_own_flows", help, Kind::Gauge);
        for (protocol, works) in &self.own_flows {
            own.sample(&[("protocol", (*protocol).to_owned())], flag(*works));
        }
        let help = "Buckets created: sources that were new to the table, or had been displaced.";
        let mut created = out.family("limiter_sources_created_total", help, Kind::Counter);
        for (family, value) in &self.created {
            created.sample(&[("family", (*family).to_owned())], count(*value));
        }
    }

    fn state(&self, out: &mut Exposition) {
        let help = "Guarded interfaces, with the mode in which the kernel really runs the program.";
        let mut info = out.family("limiter_interface_info", help, Kind::Gauge);
        for InterfaceInfo { interface, mode, driver } in &self.interfaces {
            let labels = [
                ("interface", interface.clone()),
                ("mode", (*mode).to_owned()),
                ("driver", driver.clone()),
            ];
            info.sample(&labels, 1.0);
        }
        let help = "Frames that the NIC or its host discarded before the program saw them, by the name \
                    of the driver's counter; some count the same frame.";
        let mut discards = out.family("limiter_nic_rx_discards_total", help, Kind::Counter);
        for Discard { interface, counter, value } in &self.discards {
            let labels = [("interface", interface.clone()), ("counter", counter.clone())];
            discards.sample(&labels, count(*value));
        }
        let streams = [("top", self.events), ("capture", self.samples)];
        let help = "Samples of packets that are dropped, would be, or soon will be: stream top is \
                    always on, capture only while somebody captures.";
        let mut written = out.family("limiter_events_total", help, Kind::Counter);
        for (stream, samples) in streams {
            written.sample(&[("stream", stream.to_owned())], count(samples.written));
        }
        let help = "The same that were lost because nobody read them in time.";
        let mut lost = out.family("limiter_events_lost_total", help, Kind::Counter);
        for (stream, samples) in streams {
            lost.sample(&[("stream", stream.to_owned())], count(samples.lost));
        }
        let help = "1 for the mode in force, 0 for the others; a class may have a mode of its own.";
        let mut mode = out.family("limiter_mode", help, Kind::Gauge);
        for it in MODES {
            mode.sample(&[("mode", it.to_owned())], flag(it == self.mode));
        }
        let help = "Whether a command outranks the mode of the configuration.";
        out.family("limiter_mode_overridden", help, Kind::Gauge)
            .sample(&[], flag(self.mode_overridden));
        let help = "Whether an applied configuration waits to be confirmed.";
        out.family("limiter_config_pending", help, Kind::Gauge).sample(&[], flag(self.pending));
        let help = "Whether the last confirmed configuration is in force instead of a later one that \
                    was not confirmed.";
        out.family("limiter_config_rolled_back", help, Kind::Gauge)
            .sample(&[], flag(self.rolled_back));
        let help = "What happens to packets that cannot be judged.";
        let mut policy = out.family("limiter_failure_policy", help, Kind::Gauge);
        for (event, action) in &self.failure_policies {
            let labels = [("event", (*event).to_owned()), ("action", (*action).to_owned())];
            policy.sample(&labels, 1.0);
        }
        let help = "Whether the configuration was valid when it was last read; 0 means that older \
                    settings are in force.";
        out.family("limiter_config_last_reload_successful", help, Kind::Gauge)
            .sample(&[], flag(self.reload_successful));
        let help = "When the settings in force were read.";
        out.family("limiter_config_last_reload_success_timestamp_seconds", help, Kind::Gauge)
            .sample(&[], seconds(self.reload_success));
        out.family("limiter_exemptions", "Exemptions in force.", Kind::Gauge)
            .sample(&[], count(self.exemptions as u64));
        out.family("limiter_blocks", "Blocks in force.", Kind::Gauge)
            .sample(&[], count(self.blocks as u64));
        let labels = [("version", self.version.to_owned()), ("abi", self.abi.to_string())];
        out.family("limiter_build_info", "The running version.", Kind::Gauge).sample(&labels, 1.0);
    }
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus values are floats, exact up to 2⁵³")]
const fn count(value: u64) -> f64 {
    value as f64
}

const fn flag(value: bool) -> f64 {
    if value { 1.0 } else { 0.0 }
}

fn seconds(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |age| count(age.as_secs()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn snapshot() -> Snapshot {
        Snapshot {
            packets: vec![PacketCount {
                interface: "eth0".into(),
                family: "ipv4",
                class: "odd\"name".into(),
                reason: "packet_rate",
                action: "drop",
                count: Count { packets: 12_345_678_901, bytes: 740_740_734_060 },
            }],
            capacities: vec![("ipv4", 1000), ("ipv6", 2000)],
            sources: vec![("ipv4", "proven", 3), ("ipv4", "seen", 4)],
            pressures: vec![("none".into(), 0.5)],
            proofs: vec![("handshakes", true)],
            own_flows: vec![("tcp", true), ("udp", false)],
            created: vec![("ipv4", 7), ("ipv6", 0)],
            interfaces: vec![InterfaceInfo {
                interface: "eth0".into(),
                mode: "generic",
                driver: "veth".into(),
            }],
            discards: vec![Discard {
                interface: "eth0".into(),
                counter: "rx_missed_errors".into(),
                value: 5,
            }],
            samples: SampleCount { offered: 9, written: 3, lost: 1, since: 2 },
            events: SampleCount { offered: 90, written: 30, lost: 10, since: 0 },
            mode: "enforce",
            mode_overridden: true,
            pending: false,
            rolled_back: true,
            failure_policies: vec![("malformed", "drop"), ("table_full", "pass")],
            reload_successful: false,
            reload_success: SystemTime::UNIX_EPOCH + Duration::from_hours(500_000),
            exemptions: 2,
            blocks: 0,
            version: "0.1.0",
            abi: 1,
        }
    }

    #[test]
    fn the_text_format_holds_each_metric() {
        let text = snapshot().encode().expect("encodes");
        for line in [
            r#"limiter_packets_total{interface="eth0",family="ipv4",class="odd\"name",reason="packet_rate",action="drop"} 12345678901"#,
            r#"limiter_bytes_total{interface="eth0",family="ipv4",class="odd\"name",reason="packet_rate",action="drop"} 740740734060"#,
            r#"limiter_table_capacity{family="ipv6"} 2000"#,
            r#"limiter_tracked_sources{family="ipv4"} 7"#,
            r#"limiter_sources{family="ipv4",standing="proven"} 3"#,
            r#"limiter_pressure{class="none"} 0.5"#,
            r#"limiter_proofs{source="handshakes"} 1"#,
            r#"limiter_own_flows{protocol="udp"} 0"#,
            r#"limiter_sources_created_total{family="ipv4"} 7"#,
            r#"limiter_interface_info{interface="eth0",mode="generic",driver="veth"} 1"#,
            r#"limiter_nic_rx_discards_total{interface="eth0",counter="rx_missed_errors"} 5"#,
            r#"limiter_events_total{stream="top"} 30"#,
            r#"limiter_events_total{stream="capture"} 3"#,
            r#"limiter_events_lost_total{stream="top"} 10"#,
            r#"limiter_events_lost_total{stream="capture"} 1"#,
            r#"limiter_mode{mode="observe"} 0"#,
            r#"limiter_mode{mode="enforce"} 1"#,
            "limiter_mode_overridden 1",
            "limiter_config_pending 0",
            "limiter_config_rolled_back 1",
            r#"limiter_failure_policy{event="table_full",action="pass"} 1"#,
            "limiter_config_last_reload_successful 0",
            "limiter_config_last_reload_success_timestamp_seconds 1800000000",
            "limiter_exemptions 2",
            "limiter_blocks 0",
            r#"limiter_build_info{version="0.1.0",abi="1"} 1"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn a_host_without_traffic_has_no_empty_families() {
        let text = Snapshot { packets: vec![], ..snapshot() }.encode().expect("encodes");
        assert!(!text.contains("limiter_packets_total"));
    }
}
