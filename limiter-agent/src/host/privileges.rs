//! Giving up what is not needed after the start.

use caps::errors::CapsError;
use caps::{CapSet, Capability, CapsHashSet};

/// What the running agent needs: to read and write maps, and to attach to interfaces that a reload adds.
pub(super) const NEEDED: [Capability; 3] =
    [Capability::CAP_BPF, Capability::CAP_PERFMON, Capability::CAP_NET_ADMIN];

/// Keeps of this thread's capabilities those that the running agent needs, or what stands for them on
/// a host that grants `CAP_SYS_ADMIN` only. They cannot be had back.
///
/// # Errors
/// [`CapsError`] if the kernel refuses.
pub fn drop_privileges() -> Result<(), CapsError> {
    let held = caps::read(None, CapSet::Permitted)?;
    let mut kept: CapsHashSet = NEEDED.into_iter().filter(|needed| held.contains(needed)).collect();
    if kept.len() < NEEDED.len() && held.contains(&Capability::CAP_SYS_ADMIN) {
        kept.insert(Capability::CAP_SYS_ADMIN);
    }
    caps::clear(None, CapSet::Inheritable)?;
    caps::set(None, CapSet::Effective, &kept)?;
    caps::set(None, CapSet::Permitted, &kept)
}
