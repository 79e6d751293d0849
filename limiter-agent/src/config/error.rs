//! What is wrong with a file, for people and for scripts.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

/// One thing that is wrong with, or noteworthy in, a configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Diagnostic {
    /// The file, as it was named to the parser.
    pub file: String,
    /// Counted from 1.
    pub line: usize,
    /// In characters, counted from 1.
    pub column: usize,
    /// The path of the key, lists counted from 0: `class[2] "dns" packets.rate`. Empty where the
    /// text is not TOML.
    pub key: String,
    /// What is wrong.
    pub cause: String,
    /// What to write instead.
    pub cure: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, column, key, cause, cure } = self;
        write!(f, "{file}:{line}:{column}: ")?;
        if !key.is_empty() {
            write!(f, "{key}: ")?;
        }
        write!(f, "{cause}; {cure}")
    }
}

/// All that is wrong with a file: one or more, in the order of lines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct ConfigErrors(Vec<Diagnostic>);

impl ConfigErrors {
    pub(super) fn new(mut errors: Vec<Diagnostic>) -> Self {
        errors.sort_by(|a, b| (a.line, a.column, &a.key).cmp(&(b.line, b.column, &b.key)));
        Self(errors)
    }

    /// The errors, in the order of lines.
    #[must_use]
    pub fn as_slice(&self) -> &[Diagnostic] {
        &self.0
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, error) in self.0.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            write!(f, "{error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}

/// Why a file gave no configuration.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It was read and is not valid.
    #[error(transparent)]
    Invalid(#[from] ConfigErrors),
}
