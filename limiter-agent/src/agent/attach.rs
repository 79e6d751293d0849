//! Attaching to interfaces, and seeing what came of it.

use log::{info, warn};

use crate::config::Xdp;
use crate::datapath::{Datapath, DatapathError, LinkKind, foreign_program};
use crate::host::{self, Link, RealMode, Refusal};
use crate::plan::{Guarded, Plan};

/// An interface with our program.
#[derive(Clone, Debug)]
pub(super) struct Attached {
    pub(super) name: String,
    pub(super) ifindex: u32,
    /// How it was asked for.
    pub(super) asked: Xdp,
    /// How the kernel really runs it.
    pub(super) mode: RealMode,
    /// Empty if the interface does not say.
    pub(super) driver: String,
    pub(super) kind: LinkKind,
    /// The program's id.
    program: Option<u32>,
}

impl Attached {
    /// What is wrong with the attachment, seen on the host's present `links`.
    pub(super) fn problem(&self, links: &[Link]) -> Option<String> {
        let name = &self.name;
        match links.iter().find(|link| link.ifindex == self.ifindex) {
            None => Some(format!("{name} is gone")),
            Some(link) if link.program != self.program => {
                Some(format!("the program is no longer attached to {name}"))
            }
            Some(_) => None,
        }
    }
}

/// Attaches to each of `interfaces` or, on failure, to none. `file` is the configuration's, for what
/// is said.
///
/// # Errors
/// One sentence with the cause and the fix.
pub(super) async fn attach(
    datapath: &mut Datapath,
    interfaces: &[Guarded],
    links: &[Link],
    file: &str,
) -> Result<Vec<Attached>, String> {
    let outcome = attach_each(datapath, interfaces, links, file).await;
    if outcome.is_err() {
        for interface in interfaces {
            datapath.detach(&interface.name, interface.ifindex);
        }
    }
    outcome
}

/// What is attached at the start: new attachments to `interfaces` that have none, and those of an agent
/// before this one, whose place is taken. On failure that agent's stay as they are, and no new one.
///
/// # Errors
/// One sentence with the cause and the fix.
pub(super) async fn start(
    datapath: &mut Datapath,
    plan: &Plan,
    links: &[Link],
    file: &str,
) -> Result<Vec<Attached>, String> {
    let (old, new): (Vec<_>, Vec<_>) = plan.interfaces.iter().cloned().partition(|interface| {
        links
            .iter()
            .find(|link| link.ifindex == interface.ifindex)
            .is_some_and(|link| datapath.adopt(interface, link))
    });
    // An attachment in another mode than is asked for was let go.
    let links = host::links().await.map_err(|error| error.to_string())?;
    let mut attached = attach(datapath, &new, &links, file).await?;
    if let Err(error) = datapath.take_over(plan) {
        for interface in &new {
            datapath.detach(&interface.name, interface.ifindex);
        }
        return Err(error.to_string());
    }
    let links = host::links().await.map_err(|error| error.to_string())?;
    for interface in &old {
        attached.push(verify(interface, LinkKind::BpfLink, &links)?);
    }
    Ok(attached)
}

async fn attach_each(
    datapath: &mut Datapath,
    interfaces: &[Guarded],
    links: &[Link],
    file: &str,
) -> Result<Vec<Attached>, String> {
    let mut kinds = Vec::new();
    for interface in interfaces {
        let link = links
            .iter()
            .find(|link| link.ifindex == interface.ifindex)
            .ok_or_else(|| format!("{} is gone", interface.name))?;
        kinds.push(attach_one(datapath, interface, link, file)?);
    }
    let links = host::links().await.map_err(|error| error.to_string())?;
    interfaces.iter().zip(kinds).map(|(interface, kind)| verify(interface, kind, &links)).collect()
}

fn attach_one(
    datapath: &mut Datapath,
    interface: &Guarded,
    link: &Link,
    file: &str,
) -> Result<LinkKind, String> {
    host::unclaimed(link, foreign_program).map_err(|unfit| unfit.to_string())?;
    let driver = host::driver(&link.name);
    let refusal = |error: &DatapathError, native| match error.attach_errno() {
        Some(errno) => {
            let words = error.to_string();
            let said = host::kernel_words(&words);
            Refusal { link, driver: driver.as_deref(), native, errno, said, file }.to_string()
        }
        None => error.to_string(),
    };
    // With `auto`, the error that is left is generic mode's.
    let attachment = datapath
        .attach(interface)
        .map_err(|error| refusal(&error, interface.xdp == Xdp::Native))?;
    if let Some(error) = &attachment.native_refused {
        warn!("{}; attached in generic mode, which is slower", refusal(error, true));
    }
    Ok(attachment.kind)
}

/// What netlink says came of the attachment.
fn verify(interface: &Guarded, kind: LinkKind, links: &[Link]) -> Result<Attached, String> {
    let Guarded { name, ifindex, xdp, .. } = interface;
    let link = links.iter().find(|link| link.ifindex == *ifindex);
    let Some((link, mode)) = link.and_then(|link| Some((link, link.xdp?))) else {
        return Err(format!("the kernel took the program for {name} but does not show it there"));
    };
    let driver = host::driver(name).unwrap_or_default();
    let said = if driver.is_empty() { "unknown" } else { &driver };
    info!("attached to {name} (index {ifindex}, driver {said}): {mode} XDP");
    if kind == LinkKind::Netlink {
        warn!(
            "{name}: the kernel gave no bpf_link; attached over netlink, so the program stays if \
             the agent is killed (`ip link set dev {name} {} off` removes it)",
            mode.keyword()
        );
    }
    if *xdp == Xdp::Native && mode != RealMode::Native {
        warn!("{name}: native mode was asked for, and the kernel runs {mode}");
    }
    Ok(Attached {
        name: name.clone(),
        ifindex: *ifindex,
        asked: *xdp,
        mode,
        driver,
        kind,
        program: link.program,
    })
}
