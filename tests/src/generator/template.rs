//! The frame that a flood is made of.

use std::net::Ipv6Addr;

use anyhow::{Context as _, Result, ensure};

use super::{
    halves,
    shared::{FAMILY_IPV4, FAMILY_IPV6, MAX_SOURCE_OFFSET},
};

/// Where a frame carries its source.
#[derive(Default)]
pub(super) struct Template {
    pub(super) family: u32,
    pub(super) source_offset: u32,
    pub(super) checksum_base: u32,
    /// The source itself, in halves; an IPv4 address in the lower.
    pub(super) source: [u64; 2],
    /// The destination port behind a header without options or extensions.
    pub(super) port: u16,
}

impl Template {
    pub(super) fn parse(frame: &[u8]) -> Result<Self> {
        let word = |offset: usize| {
            let bytes = frame.get(offset..offset + 2).context("the template is too short")?;
            Ok::<_, anyhow::Error>(u16::from_be_bytes([bytes[0], bytes[1]]))
        };
        let mut ethertype = 12;
        while matches!(word(ethertype)?, 0x8100 | 0x88a8) {
            ethertype += 4;
        }
        let header = ethertype + 2;
        let template = match word(ethertype)? {
            0x0800 => {
                let words = usize::from(word(header)? >> 8 & 0xf) * 2;
                let mut sum = 0;
                // The checksum and the source are words 5 to 7 (RFC 791 §3.1).
                for index in (0..words).filter(|index| !(5..8).contains(index)) {
                    sum += u32::from(word(header + 2 * index)?);
                }
                sum = (sum >> 16) + (sum & 0xffff);
                Self {
                    family: FAMILY_IPV4,
                    source_offset: u32::try_from(header + 12)?,
                    checksum_base: sum,
                    source: [
                        0,
                        u64::from(word(header + 12)?) << 16 | u64::from(word(header + 14)?),
                    ],
                    port: word(header + 22).unwrap_or_default(),
                }
            }
            0x86dd => {
                let address = frame.get(header + 8..header + 24).context("a truncated header")?;
                Self {
                    family: FAMILY_IPV6,
                    source_offset: u32::try_from(header + 8)?,
                    checksum_base: 0,
                    source: halves(Ipv6Addr::from(<[u8; 16]>::try_from(address)?)),
                    port: word(header + 42).unwrap_or_default(),
                }
            }
            _ => Self::default(),
        };
        ensure!(template.source_offset <= MAX_SOURCE_OFFSET, "too many VLAN tags in the template");
        Ok(template)
    }
}

#[cfg(test)]
mod tests {
    use crate::generator::Honest;

    #[test]
    fn honest_frames_are_shared_out_in_turn() {
        let honest = Honest { every: 10, sources: 3, flood_port: 9 };
        // Frames 0, 10, 20, … 90: ten of them, of sources 0, 1, 2, 0, …
        assert_eq!([0, 1, 2].map(|source| honest.sent_by(source, 100)), [4, 3, 3]);
        assert_eq!([0, 1, 2].map(|source| honest.sent_by(source, 1)), [1, 0, 0]);
        assert_eq!([0, 1, 2].map(|source| honest.sent_by(source, 0)), [0, 0, 0]);
    }
}
