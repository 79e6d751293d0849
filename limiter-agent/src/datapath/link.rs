//! Attachments of the program to interfaces.

use std::{collections::HashMap, fs};

use aya::programs::{Xdp, XdpMode, links::FdLink, loaded_programs, xdp::XdpLink};

use super::{DatapathError, Pins, error::of_program};
use crate::{
    config::Xdp as Mode,
    host::{Link, RealMode},
    plan::Guarded,
};

/// How the kernel holds an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// A `bpf_link`: it ends with the agent, and nobody else can replace it.
    BpfLink,
    /// Plain netlink, which aya falls back to on EINVAL: others can replace it.
    Netlink,
}

/// An attachment that was made.
#[derive(Debug)]
pub struct Attachment {
    /// The mode that the kernel took, native or generic.
    pub mode: Mode,
    /// How it holds it.
    pub kind: LinkKind,
    /// Why native mode was refused, where `auto` fell back to generic.
    pub native_refused: Option<DatapathError>,
}

/// The name of a loaded program that is not ours to replace, by its id.
#[must_use]
pub fn foreign_program(id: u32) -> Option<String> {
    let program = loaded_programs().filter_map(Result::ok).find(|program| program.id() == id)?;
    program.name_as_str().map(ToOwned::to_owned)
}

/// The attachments by interface index. Dropping one detaches it, unless it is pinned.
#[derive(Default)]
pub(super) struct Links {
    held: HashMap<u32, XdpLink>,
    /// Those that an earlier agent left, with its program.
    left: Vec<(Guarded, FdLink)>,
}

impl Links {
    /// Takes the attachment that is pinned for the interface, if it is there and in the right mode:
    /// [`swap`](Self::swap) gives it our program. Any other pin of that name is removed, which
    /// detaches.
    pub(super) fn adopt(&mut self, pins: &Pins, interface: &Guarded, present: &Link) -> bool {
        let Some(link) = pins.link(&interface.name) else { return false };
        let program = link.info().ok().map(|info| info.program_id());
        let is_there = program.is_some() && program == present.program;
        let is_right = match interface.xdp {
            Mode::Auto => true,
            Mode::Native => present.xdp == Some(RealMode::Native),
            Mode::Generic => present.xdp == Some(RealMode::Generic),
        };
        if is_there && is_right {
            self.left.push((interface.clone(), link));
            return true;
        }
        pins.drop_link(&interface.name);
        false
    }

    /// Puts our program in the place of the earlier agent's, on each interface in one step: no packet
    /// goes past both.
    pub(super) fn swap(&mut self, program: &mut Xdp) -> Result<(), DatapathError> {
        for (interface, link) in self.left.drain(..) {
            let refused =
                |source| DatapathError::Attach { interface: interface.name.clone(), source };
            let link = XdpLink::try_from(link).map_err(|error| refused(of_program(error)))?;
            let id = program.attach_to_link(link).map_err(refused)?;
            let link = program.take_link(id).map_err(DatapathError::Program)?;
            self.held.insert(interface.ifindex, link);
        }
        Ok(())
    }

    /// Attaches the program to an interface; a `bpf_link` is pinned, if there is where.
    pub(super) fn attach(
        &mut self,
        program: &mut Xdp,
        interface: &Guarded,
        pins: Option<&Pins>,
    ) -> Result<Attachment, DatapathError> {
        // One that somebody detached by force would be counted below, and would detach on its drop.
        self.held.remove(&interface.ifindex);
        let id = program.info().map_err(DatapathError::Program)?.id();
        let links_before = bpf_links(id);
        let (link, mode, native_refused) = match interface.xdp {
            Mode::Native => (attach(program, interface, XdpMode::Driver)?, Mode::Native, None),
            Mode::Generic => (attach(program, interface, XdpMode::Skb)?, Mode::Generic, None),
            Mode::Auto => match attach(program, interface, XdpMode::Driver) {
                Ok(link) => (link, Mode::Native, None),
                Err(refusal) => {
                    let link = attach(program, interface, XdpMode::Skb)?;
                    (link, Mode::Generic, Some(refusal))
                }
            },
        };
        let kind = if bpf_links(id) > links_before { LinkKind::BpfLink } else { LinkKind::Netlink };
        let link = match pins {
            // Of the other kind there is nothing that could be pinned.
            Some(pins) if kind == LinkKind::BpfLink => {
                let refused =
                    |source| DatapathError::Attach { interface: interface.name.clone(), source };
                let link = FdLink::try_from(link).map_err(|error| refused(of_program(error)))?;
                let link = pins.keep_link(&interface.name, link)?;
                XdpLink::try_from(link).map_err(|error| refused(of_program(error)))?
            }
            _ => link,
        };
        self.held.insert(interface.ifindex, link);
        Ok(Attachment { mode, kind, native_refused })
    }

    pub(super) fn detach(&mut self, ifindex: u32) {
        self.held.remove(&ifindex);
    }
}

fn attach(program: &mut Xdp, interface: &Guarded, mode: XdpMode) -> Result<XdpLink, DatapathError> {
    let refused = |source| DatapathError::Attach { interface: interface.name.clone(), source };
    let id = program.attach_to_if_index(interface.ifindex, mode).map_err(refused)?;
    program.take_link(id).map_err(DatapathError::Program)
}

/// How many XDP links to our program this process holds. aya does not say when it has made none and
/// used netlink instead, so the kernel is asked: by the descriptors, since listing all links of the
/// host takes `CAP_SYS_ADMIN`.
fn bpf_links(program: u32) -> usize {
    let program = format!("prog_id:\t{program}");
    let is_link = |text: &String| {
        let has = |line: &str| text.lines().any(|found| found == line);
        has("link_type:\txdp") && has(&program)
    };
    let descriptors = fs::read_dir("/proc/self/fdinfo").into_iter().flatten().flatten();
    descriptors
        .filter_map(|descriptor| fs::read_to_string(descriptor.path()).ok())
        .filter(is_link)
        .count()
}
