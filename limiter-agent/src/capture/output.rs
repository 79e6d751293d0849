//! Where captured packets go: a file, a pipe, or text for people.

use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, IsTerminal, Write};
use std::net::IpAddr;
use std::path::Path;

use limiter_common::PacketView;
use limiter_common::abi::{AddressFamily, SourceAddress};
use limiter_common::packet::{Frame, parse};

use super::pcapng::Pcapng;
use crate::api::{CapturedPacket, Line};
use crate::cli::{CaptureArgs, Failure};

/// Captured packets on their way out.
pub(super) enum Output {
    /// To a file or a pipe, for tcpdump and Wireshark.
    Pcapng(Pcapng<BufWriter<Box<dyn Write>>>, String),
    /// To standard output, a line for each.
    Text,
    /// To standard output, as the agent says it.
    Json,
}

/// Whether whoever reads wants more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    Yes,
    /// The reader of a pipe has gone.
    Unwanted,
}

impl Output {
    pub(super) fn open(args: &CaptureArgs) -> Result<Self, Failure> {
        let Some(path) = &args.write else {
            return Ok(if args.client.json { Self::Json } else { Self::Text });
        };
        let (name, writer): (_, Box<dyn Write>) = if path == Path::new("-") {
            if io::stdout().is_terminal() {
                return Err(Failure::Request(
                    "-w - writes packets to standard output, which is a terminal: pipe it into \
                     `tcpdump -r -` or `tshark -r -`, or leave -w away to read about them"
                        .to_owned(),
                ));
            }
            ("standard output".to_owned(), Box::new(io::stdout()))
        } else {
            let name = path.display().to_string();
            let file = File::create(path).map_err(|error| failed(&name, &error))?;
            (name, Box::new(file))
        };
        let pcapng = Pcapng::new(BufWriter::new(writer)).map_err(|error| failed(&name, &error))?;
        Ok(Self::Pcapng(pcapng, name))
    }

    pub(super) fn write(&mut self, line: &Line) -> Result<Written, Failure> {
        let Line::Packet(packet) = line else { return Ok(Written::Yes) };
        match self {
            Self::Pcapng(pcapng, name) => outcome(pcapng.write(packet), name),
            Self::Text => print(&text(packet)),
            Self::Json => print(&serde_json::to_string(packet).unwrap_or_default()),
        }
    }

    /// Hands on what has been written.
    pub(super) fn flush(&mut self) -> Result<Written, Failure> {
        match self {
            Self::Pcapng(pcapng, name) => outcome(pcapng.flush(), name),
            Self::Text | Self::Json => Ok(Written::Yes),
        }
    }

    pub(super) fn finish(mut self) -> Result<(), Failure> {
        self.flush().map(drop)
    }
}

fn failed(name: &str, error: &io::Error) -> Failure {
    Failure::Machine(format!("cannot write {name}: {error}"))
}

/// A closed pipe is no error.
fn outcome(written: io::Result<()>, name: &str) -> Result<Written, Failure> {
    match written {
        Ok(()) => Ok(Written::Yes),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(Written::Unwanted),
        Err(error) => Err(failed(name, &error)),
    }
}

fn print(line: &str) -> Result<Written, Failure> {
    outcome(writeln!(io::stdout(), "{line}"), "standard output")
}

/// One line about a packet.
fn text(packet: &CapturedPacket) -> String {
    let CapturedPacket { time, interface, class, reason, action, length, .. } = packet;
    let bytes = bytes(packet);
    let sender = sender(&Beginning { bytes: &bytes, length: *length });
    let sender = sender.unwrap_or_else(|| "?".to_owned());
    format!("{time} {interface} {class} {reason} {action} {length} bytes from {sender}")
}

/// The bytes of a packet that were captured.
pub(super) fn bytes(packet: &CapturedPacket) -> Vec<u8> {
    let digits = packet.bytes.as_bytes().chunks_exact(2);
    let digits = digits.filter_map(|pair| str::from_utf8(pair).ok());
    digits.filter_map(|pair| u8::from_str_radix(pair, 16).ok()).collect()
}

/// Source and ports, if it is an IP packet.
fn sender(frame: &Beginning<'_>) -> Option<String> {
    let Frame::Ip(packet) = parse(frame) else { return None };
    let address = address(packet.address);
    Some(match packet.ports {
        Some(ports) => format!("{address} port {} to port {}", ports.source, ports.destination),
        None => address.to_string(),
    })
}

fn address(SourceAddress { family, high, low }: SourceAddress) -> IpAddr {
    let bits = u128::from(high) << 64 | u128::from(low);
    match family {
        AddressFamily::Ipv4 => u32::try_from(high >> 32).unwrap_or_default().to_be_bytes().into(),
        AddressFamily::Ipv6 => bits.to_be_bytes().into(),
    }
}

/// A frame of which the beginning was captured.
struct Beginning<'a> {
    bytes: &'a [u8],
    length: u32,
}

impl PacketView for Beginning<'_> {
    fn length(&self, _end: u32) -> u32 {
        self.length
    }

    fn read<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        self.bytes.read(offset)
    }

    fn words<const N: usize>(&self, offset: u32) -> Option<[u64; N]> {
        self.bytes.words(offset)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// An Ethernet, IPv4 and UDP header, of a datagram longer than what was captured.
    const HEADERS: &str = "02000000000102000000000208004500\
                           05dc00000000401100000a000001c0000202\
                           9c4000350\
                           5c80000";

    pub(in super::super) fn packet() -> CapturedPacket {
        CapturedPacket {
            time: "2026-12-01T01:02:03.000000005Z".into(),
            interface: "eth0".into(),
            family: "ipv4".into(),
            class: "dns".into(),
            reason: "packet_rate".into(),
            action: "drop".into(),
            weight: 7,
            length: 1514,
            bytes: HEADERS.into(),
        }
    }

    #[test]
    fn a_line_names_the_sender_though_the_packet_is_cut() {
        assert_eq!(
            text(&packet()),
            "2026-12-01T01:02:03.000000005Z eth0 dns packet_rate drop 1514 bytes from 10.0.0.1 port \
             40000 to port 53"
        );
        let cut = CapturedPacket { bytes: HEADERS[..40].into(), ..packet() };
        assert!(text(&cut).ends_with("from ?"));
    }

    #[test]
    fn an_address_is_written_as_it_is() {
        for text in ["192.0.2.7", "2001:db8::7"] {
            let written: IpAddr = text.parse().expect("is an address");
            assert_eq!(address(written.into()), written);
        }
    }
}
