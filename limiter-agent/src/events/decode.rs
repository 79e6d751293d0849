//! What the frame of an event says.

use limiter_common::PacketView;
use limiter_common::abi::{Event, L4Index, SourceAddress};
use limiter_common::packet::{Frame, Packet, Ports, parse};

/// Who sent the packet of an event, and what it was; nothing of what is no IP packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Headers {
    /// Its source address.
    pub(super) source: Option<SourceAddress>,
    /// Its protocol, as IANA numbers them.
    pub(super) protocol: Option<u8>,
    /// Its ports, if it has any.
    pub(super) ports: Option<Ports>,
}

impl Headers {
    /// Those of an event's frame, of which the beginning is enough.
    #[must_use]
    pub(super) fn of(event: &Event) -> Self {
        let captured = usize::try_from(event.captured).unwrap_or(usize::MAX);
        let bytes = event.bytes.get(..captured).unwrap_or(&event.bytes);
        let view = Beginning { bytes, length: event.length };
        match parse(&view) {
            Frame::Ip(Packet { address, protocol, ports, .. }) => {
                Self { source: Some(address), protocol: Some(number(protocol)), ports }
            }
            Frame::NonIp | Frame::Neighbour(_) => Self::default(),
            // Malformed, or longer than what was captured.
            Frame::Malformed(_) => Self { source: source(bytes), ..Self::default() },
        }
    }
}

/// The beginning of a frame of this length.
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

/// The protocol's number.
fn number(protocol: L4Index) -> u8 {
    match u8::try_from(protocol.index() % 256) {
        Ok(number) => match protocol.index() / 256 % 4 {
            0 => number,
            1 => 6,
            2 => 1,
            _ => 58,
        },
        Err(_) => 0,
    }
}

/// The source address of an IP packet whose other headers make no sense.
fn source(frame: &[u8]) -> Option<SourceAddress> {
    let mut offset = 12;
    let mut kind = u16::from_be_bytes(frame.read(offset)?);
    while (kind == 0x8100 || kind == 0x88a8) && offset < 20 {
        offset += 4;
        kind = u16::from_be_bytes(frame.read(offset)?);
    }
    match kind {
        0x0800 => Some(SourceAddress::ipv4(u32::from_be_bytes(frame.read(offset + 2 + 12)?))),
        0x86dd => {
            let [high, low] = frame.words(offset + 2 + 8)?;
            Some(SourceAddress::ipv6(high, low))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use limiter_common::abi::{EVENT_BYTES, SampledOutcome};
    use limiter_common::time::Nanos;

    use super::*;

    /// A frame of this length that begins with `bytes`.
    fn event(bytes: &[u8], length: u32) -> Event {
        let mut event = Event {
            at: Nanos(0),
            outcome: SampledOutcome::default(),
            weight: 1,
            length,
            captured: u32::try_from(bytes.len()).expect("is short"),
            pad: 0,
            bytes: [0xff; EVENT_BYTES],
        };
        event.bytes[..bytes.len()].copy_from_slice(bytes);
        event
    }

    fn ipv4(total: u16, protocol: u8) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([0x08, 0, 0x45, 0]);
        frame.extend(total.to_be_bytes());
        frame.extend([0, 0, 0, 0, 64, protocol, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]);
        frame.extend([0x12, 0x34, 0, 53, 0, 8, 0, 0]);
        frame
    }

    #[test]
    fn the_beginning_of_a_long_frame_says_who_sent_it() {
        let mut frame = ipv4(1400, 17);
        frame[38..40].copy_from_slice(&1380_u16.to_be_bytes());
        let headers = Headers::of(&event(&frame, 1414));
        assert_eq!(headers.source, Some(SourceAddress::ipv4(0xc000_0201)));
        assert_eq!(headers.protocol, Some(17));
        assert_eq!(headers.ports, Some(Ports { source: 0x1234, destination: 53 }));
    }

    #[test]
    fn a_malformed_packet_still_has_a_source() {
        // Longer than its frame.
        let headers = Headers::of(&event(&ipv4(2000, 17), 60));
        let source = Some(SourceAddress::ipv4(0xc000_0201));
        assert_eq!(headers, Headers { source, ..Headers::default() });
        assert_eq!(Headers::of(&event(&[0; 13], 13)), Headers::default());
        assert_eq!(Headers::of(&event(&[0; 14], 14)), Headers::default());
    }

    #[test]
    fn tcp_and_icmp_have_their_numbers() {
        for (index, expected) in [
            (L4Index::tcp(0x12), 6),
            (L4Index::icmp(3).fragment(), 1),
            (L4Index::icmpv6(128), 58),
            (L4Index::other(47).fragment(), 47),
        ] {
            assert_eq!(number(index), expected);
        }
    }
}
