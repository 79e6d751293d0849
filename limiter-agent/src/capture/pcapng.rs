//! Captured packets as a pcapng file (draft-ietf-opsawg-pcapng), with what was decided as a comment.

use std::borrow::Cow;
use std::io::{self, Write};
use std::time::{Duration, SystemTime};

use limiter_common::abi::SAMPLE_BYTES;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::pcapng::{PcapNgBlock, PcapNgWriter};
use pcap_file::{DataLink, PcapError};

use super::output::bytes;
use crate::api::CapturedPacket;

/// A file that is being written.
pub(super) struct Pcapng<W: Write> {
    writer: PcapNgWriter<W>,
    /// The interfaces described so far, by their numbers in the file.
    interfaces: Vec<String>,
}

impl<W: Write> Pcapng<W> {
    pub(super) fn new(writer: W) -> io::Result<Self> {
        let writer = PcapNgWriter::new(writer).map_err(io_error)?;
        Ok(Self { writer, interfaces: Vec::new() })
    }

    pub(super) fn write(&mut self, packet: &CapturedPacket) -> io::Result<()> {
        let interface = self.interface(&packet.interface)?;
        let block = EnhancedPacketBlock {
            interface_id: interface,
            timestamp: since_epoch(&packet.time),
            original_len: packet.length,
            data: Cow::Owned(bytes(packet)),
            options: vec![EnhancedPacketOption::Comment(Cow::Owned(comment(packet)))],
        };
        self.writer.write_block(&block.into_block()).map_err(io_error)?;
        Ok(())
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.writer.get_mut().flush()
    }

    /// The number of an interface in the file, where it is described before its first packet.
    fn interface(&mut self, name: &str) -> io::Result<u32> {
        /// Times are written in nanoseconds: 10⁻⁹ s.
        const NANOSECONDS: u8 = 9;
        let index = self.interfaces.iter().position(|known| known == name);
        let index = index.unwrap_or(self.interfaces.len());
        if index == self.interfaces.len() {
            let block = InterfaceDescriptionBlock {
                linktype: DataLink::ETHERNET,
                snaplen: u32::try_from(SAMPLE_BYTES).unwrap_or(0),
                options: vec![
                    InterfaceDescriptionOption::IfName(Cow::Owned(name.to_owned())),
                    InterfaceDescriptionOption::IfTsResol(NANOSECONDS),
                ],
            };
            self.writer.write_block(&block.into_block()).map_err(io_error)?;
            self.interfaces.push(name.to_owned());
        }
        Ok(u32::try_from(index).unwrap_or(u32::MAX))
    }
}

/// What was decided, in words that a display filter can look for.
fn comment(packet: &CapturedPacket) -> String {
    let CapturedPacket { interface, class, reason, action, weight, .. } = packet;
    format!(
        "action={action} reason={reason} class={class} interface={interface} stands_for={weight}"
    )
}

fn since_epoch(time: &str) -> Duration {
    let time = humantime::parse_rfc3339(time).unwrap_or(SystemTime::UNIX_EPOCH);
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

fn io_error(error: PcapError) -> io::Error {
    if let PcapError::IoError(error) = error { error } else { io::Error::other(error) }
}

#[cfg(test)]
mod tests {
    use pcap_file::pcapng::PcapNgReader;
    use pcap_file::pcapng::blocks::Block;

    use super::super::output::tests::packet;
    use super::*;

    #[test]
    fn packets_are_read_back_with_their_reasons() {
        let mut file = Vec::new();
        let mut pcapng = Pcapng::new(&mut file).expect("is written");
        let second = CapturedPacket { interface: "eth1".into(), ..packet() };
        for packet in [&packet(), &second, &packet()] {
            pcapng.write(packet).expect("is written");
        }
        let mut reader = PcapNgReader::new(&file[..]).expect("is of the format");
        let (mut names, mut packets) = (Vec::new(), Vec::new());
        while let Some(block) = reader.next_block() {
            #[expect(clippy::wildcard_enum_match_arm, reason = "no other is written")]
            match block.expect("is of the format").into_owned() {
                Block::InterfaceDescription(it) => names.push(it.options[0].clone()),
                Block::EnhancedPacket(it) => packets.push(it),
                other => panic!("{other:?}"),
            }
        }
        let name = |name: &'static str| InterfaceDescriptionOption::IfName(name.into());
        assert_eq!(names, [name("eth0"), name("eth1")]);
        let numbers: Vec<_> = packets.iter().map(|it| it.interface_id).collect();
        assert_eq!(numbers, [0, 1, 0]);
        let EnhancedPacketBlock { timestamp, original_len, data, options, .. } = &packets[0];
        assert_eq!((timestamp.subsec_nanos(), *original_len, data.len()), (5, 1514, 42));
        let comment = "action=drop reason=packet_rate class=dns interface=eth0 stands_for=7";
        assert_eq!(options[..], [EnhancedPacketOption::Comment(comment.into())]);
    }
}
