//! The operator's TOML, validated.
//!
//! [`Config::parse`] turns text into a [`Config`] in which every value can be enforced, or into
//! [`ConfigErrors`]: all that is wrong with the file, each with its place, its cause and a cure.
//! Nothing here looks at the host or at the kernel. `docs/limiter.toml.md` is the reference for
//! people; a test holds it and [`keys`] together.

mod application;
mod budget;
mod cidr;
mod class;
mod connections;
mod error;
mod established;
mod expiry;
mod interface;
mod keys;
mod lease;
mod matcher;
mod model;
mod policy;
mod reader;
mod reserve;
mod service;
#[cfg(test)]
mod tests;
mod units;

use std::path::Path;
use std::time::SystemTime;

use ipnet::IpNet;

pub use error::{ConfigErrors, Diagnostic, LoadError};
pub use lease::{Grant, Leasing, SHORTEST as SHORTEST_LEASE};
pub(crate) use matcher::accepting;
pub use matcher::{Flags, Header, L4, Match, PortSet};
pub use model::{
    Allowance, Block, Bridge, Budget, Ceilings, Class, Config, Established, Exemption, FaultAction,
    Faults, Interface, Mode, Neighbours, Pattern, Prefix, Reserve, TableSizes, Xdp,
};
use reader::Reader;

impl Config {
    /// Reads `text`, naming it `file_name` in what it reports. `now` tells which expiry times have
    /// passed (a warning, not an error).
    ///
    /// # Errors
    /// Everything that is wrong with the text. If it is not TOML, only that is reported: what the
    /// rest would mean is a guess.
    pub fn parse(file_name: &str, text: &str, now: SystemTime) -> Result<Self, ConfigErrors> {
        let reader = Reader::new(file_name, text);
        let document = reader.document()?;
        let config = read(&reader.root(&document), now);
        reader.finish(config)
    }

    /// Reads the file at `path`.
    ///
    /// # Errors
    /// [`LoadError`] if it cannot be read or is not valid.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        let text = read_text(path)?;
        Ok(Self::parse(&path.display().to_string(), &text, SystemTime::now())?)
    }
}

/// The text of the file at `path`, whatever it says.
///
/// # Errors
/// [`LoadError`] if it cannot be read or is not text.
pub fn read_text(path: &Path) -> Result<String, LoadError> {
    let bytes =
        std::fs::read(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
    String::from_utf8(bytes).map_err(|error| {
        let text = String::from_utf8_lossy(&error.as_bytes()[..error.utf8_error().valid_up_to()]);
        Reader::new(&path.display().to_string(), &text).not_text().into()
    })
}

/// The network that is written as `text`, by the rules of `cidr = …`.
///
/// # Errors
/// What is wrong with it and what to write, in a sentence.
pub fn network(text: &str) -> Result<IpNet, String> {
    cidr::parse(text).map_err(|(cause, cure)| format!("{cause}; {cure}"))
}

/// The whole file; `None` only if something was reported.
fn read(root: &reader::Table<'_>, now: SystemTime) -> Option<Config> {
    let mode = service::mode(root, "mode");
    let interfaces = interface::read(root);
    let table = service::table(root);
    let ceilings = service::ceilings(root, table);
    let established = established::read(root);
    let neighbours = service::neighbours(root);
    let faults = service::faults(root);
    let agent_loss = service::agent_loss(root);
    let classes = class::read(root);
    let reserves = reserve::read(root, &classes, &interfaces);
    let prefixes = policy::prefixes(root, &classes);
    let exemptions = policy::exemptions(root, &interfaces, now);
    let blocks = policy::blocks(root, now);
    let lease = lease::read(root, &interfaces);
    let metrics = service::metrics(root);
    let control = service::control(root);
    let application = application::read(root);
    Some(Config {
        file: root.place().file().to_owned(),
        mode: mode?.unwrap_or(Mode::Observe),
        interfaces: interfaces.into_iter().collect::<Option<_>>()?,
        table: table?,
        ceilings: ceilings?,
        established: established?,
        neighbours: neighbours?,
        faults: faults?,
        agent_loss: agent_loss?,
        reserves: reserves?,
        classes: classes.into_iter().map(|class| class.model).collect::<Option<_>>()?,
        prefixes: prefixes?,
        exemptions: exemptions?,
        blocks: blocks?,
        lease: lease?,
        metrics: metrics?,
        control: control.clone()?.0,
        control_group: control?.1,
        application: application?,
        warnings: Vec::new(),
    })
}
