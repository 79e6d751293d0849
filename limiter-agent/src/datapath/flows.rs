//! The programs that hear of the UDP flows of this host.

use std::fs::File;

use aya::{
    Ebpf,
    maps::Array,
    programs::{
        CgroupAttachMode, CgroupSkb, CgroupSkbAttachType, CgroupSock, CgroupSockAddr, Program,
        ProgramError,
        links::{FdLink, LinkError},
    },
};
use limiter_common::abi::{FLOW_BINDS, FLOW_PACKETS, FLOW_SOCKETS, PortBits, map};

use super::{DatapathError, HandshakesError, cgroup, error::of_program};

/// Loads the programs and attaches them to the root of the cgroup v2 hierarchy, where they hear of the
/// sockets of all processes, in whatever network namespace. The links come with their programs' names;
/// dropping them detaches, in this order.
pub(super) fn attach(ebpf: &mut Ebpf) -> Result<Vec<(&'static str, FdLink)>, HandshakesError> {
    let path = cgroup()?;
    let open = || File::open(&path);
    let cgroup = open().map_err(|error| HandshakesError::Open { path: path.clone(), error })?;
    let failed = |error| HandshakesError::Attach { path: path.clone(), error };

    let packets: &mut CgroupSkb = program(ebpf, FLOW_PACKETS)?;
    packets.load().map_err(HandshakesError::Load)?;
    for name in FLOW_BINDS {
        let bind: &mut CgroupSockAddr = program(ebpf, name)?;
        bind.load().map_err(HandshakesError::Load)?;
    }
    let sockets: &mut CgroupSock = program(ebpf, FLOW_SOCKETS)?;
    sockets.load().map_err(HandshakesError::Load)?;

    // A link always leaves room for others; the flag that asks for it is refused (EINVAL).
    let mode = CgroupAttachMode::Single;
    // First who forgets servers, then who remembers clients: between the two, a server's socket would
    // be taken for a client's.
    let mut bind = |name| {
        let bind: &mut CgroupSockAddr = program(ebpf, name)?;
        let link = bind.attach(&cgroup, mode).and_then(|link| bind.take_link(link));
        held(link.map_err(failed)?).map_err(failed)
    };
    let binds = [bind(FLOW_BINDS[0])?, bind(FLOW_BINDS[1])?];
    let sockets: &mut CgroupSock = program(ebpf, FLOW_SOCKETS)?;
    let sockets =
        sockets.attach(&cgroup, mode).and_then(|link| sockets.take_link(link)).map_err(failed)?;
    let packets: &mut CgroupSkb = program(ebpf, FLOW_PACKETS)?;
    let packets = packets
        .attach(&cgroup, CgroupSkbAttachType::Egress, mode)
        .and_then(|link| packets.take_link(link))
        .map_err(failed)?;
    let [first, second] = binds;
    Ok(vec![
        (FLOW_PACKETS, held(packets).map_err(failed)?),
        (FLOW_SOCKETS, held(sockets).map_err(failed)?),
        (FLOW_BINDS[0], first),
        (FLOW_BINDS[1], second),
    ])
}

fn held<L>(link: L) -> Result<FdLink, ProgramError>
where
    FdLink: TryFrom<L, Error = LinkError>,
{
    FdLink::try_from(link).map_err(of_program)
}

fn program<'a, P>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut P, HandshakesError>
where
    &'a mut P: TryFrom<&'a mut Program, Error = ProgramError>,
{
    let program = ebpf.program_mut(name).ok_or(ProgramError::NotLoaded);
    program.and_then(TryInto::try_into).map_err(HandshakesError::Load)
}

/// Says on which ports the sockets are clients' although they were bound to the port.
pub(super) fn set_client_ports(ebpf: &mut Ebpf, ports: &PortBits) -> Result<(), DatapathError> {
    let failed = |error| DatapathError::map(map::CLIENT_PORTS, error);
    let map =
        ebpf.map_mut(map::CLIENT_PORTS).ok_or(DatapathError::MissingMap(map::CLIENT_PORTS))?;
    let mut array: Array<_, PortBits> = map.try_into().map_err(failed)?;
    array.set(0, ports, 0).map_err(failed)
}
