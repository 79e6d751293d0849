//! What XDP an interface's driver offers, by the kernel's own account: the generic netlink family
//! `netdev` (`linux/netdev.h`), of Linux 6.3 and newer.

use std::io;

use netlink_packet_core::{
    NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage, NetlinkPayload,
    NetlinkSerializable, NlasIterator,
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_GENERIC};
use nix::sys::{
    socket::{setsockopt, sockopt::ReceiveTimeout},
    time::{TimeVal, TimeValLike as _},
};

/// What a driver's XDP can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpFeatures {
    /// Run in the driver, that is in native mode.
    pub native: bool,
    /// Take frames that lie in more than one buffer.
    pub frags: bool,
}

/// What the driver of the interface of this index offers; none if the kernel does not say.
#[must_use]
pub fn xdp_features(ifindex: u32) -> Option<XdpFeatures> {
    const PASS_AND_DROP: u64 = 1 << 0; // NETDEV_XDP_ACT_BASIC
    const FRAGS: u64 = 1 << 5; // NETDEV_XDP_ACT_RX_SG
    let bits = ask(ifindex).ok().flatten()?;
    Some(XdpFeatures { native: bits & PASS_AND_DROP != 0, frags: bits & FRAGS != 0 })
}

/// `NETDEV_A_DEV_XDP_FEATURES` of the interface.
fn ask(ifindex: u32) -> io::Result<Option<u64>> {
    /// `GENL_ID_CTRL`, the family that knows the numbers of all others.
    const CONTROL: u16 = 16;
    let mut socket = Socket::new(NETLINK_GENERIC)?;
    // The kernel answers at once.
    setsockopt(&socket, ReceiveTimeout, &TimeVal::seconds(5)).map_err(io::Error::from)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;

    // CTRL_CMD_GETFAMILY with CTRL_ATTR_FAMILY_NAME; CTRL_ATTR_FAMILY_ID.
    let family = request(&socket, Message::new(CONTROL, 3, 2, b"netdev\0"))?;
    let Some(family) =
        family.attribute(1).and_then(|id| Some(u16::from_ne_bytes(id.try_into().ok()?)))
    else {
        return Ok(None);
    };
    // NETDEV_CMD_DEV_GET with NETDEV_A_DEV_IFINDEX; NETDEV_A_DEV_XDP_FEATURES.
    let device = request(&socket, Message::new(family, 1, 1, &ifindex.to_ne_bytes()))?;
    Ok(device.attribute(3).and_then(|value| Some(u64::from_ne_bytes(value.try_into().ok()?))))
}

fn request(socket: &Socket, message: Message) -> io::Result<Message> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    let (answer, _) = socket.recv_from_full()?;
    let answer = NetlinkMessage::<Message>::deserialize(&answer).map_err(io::Error::other)?;
    #[expect(clippy::wildcard_enum_match_arm, reason = "the enum is non-exhaustive")]
    match answer.payload {
        NetlinkPayload::InnerMessage(message) => Ok(message),
        NetlinkPayload::Error(error) => Err(error.to_io()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// A message of generic netlink: its family, and what follows the netlink header, which is a
/// command, a version, two bytes of nothing, and attributes.
struct Message {
    family: u16,
    body: Vec<u8>,
}

impl Message {
    const HEADER: usize = 4;

    /// A command with one attribute.
    fn new(family: u16, command: u8, kind: u16, value: &[u8]) -> Self {
        let mut body = vec![command, 1, 0, 0];
        let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
        body.extend(length.to_ne_bytes());
        body.extend(kind.to_ne_bytes());
        body.extend(value);
        body.resize(body.len().next_multiple_of(4), 0);
        Self { family, body }
    }

    fn attribute(&self, kind: u16) -> Option<Vec<u8>> {
        let attributes = NlasIterator::new(self.body.get(Self::HEADER..)?);
        let mut attributes = attributes.filter_map(Result::ok);
        attributes.find(|it| it.kind() == kind).map(|it| it.value().to_owned())
    }
}

impl NetlinkSerializable for Message {
    fn message_type(&self) -> u16 {
        self.family
    }

    fn buffer_len(&self) -> usize {
        self.body.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.body);
    }
}

impl NetlinkDeserializable for Message {
    type Error = std::convert::Infallible;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, Self::Error> {
        Ok(Self { family: header.message_type, body: payload.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_is_found_behind_others() {
        let mut message = Message::new(20, 1, 7, b"abc");
        let second = Message::new(20, 1, 3, &33_u64.to_ne_bytes());
        message.body.extend(&second.body[Message::HEADER..]);
        assert_eq!(message.body.len(), 4 + 8 + 12);
        assert_eq!(message.attribute(7), Some(b"abc".to_vec()));
        assert_eq!(message.attribute(3), Some(33_u64.to_ne_bytes().to_vec()));
        assert_eq!(message.attribute(1), None);
    }
}
