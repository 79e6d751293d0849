//! The ABI version moves whenever its sources do: an agent refuses pins of another version, so a
//! changed layout under an old version would be read wrongly.

use std::fs;

use anyhow::{Context as _, Result};
use xtask::workspace_root;

use super::{File, Problem, code};

const SOURCES: &str = "limiter-common/src/abi/";
const LOCK: &str = "limiter-common/abi.lock";

/// What the sources say now, or what was written down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Abi {
    version: u32,
    hash: u64,
}

/// Compares the ABI's sources with what is written down; with `bless`, writes them down, unless the
/// version has yet to be raised.
///
/// # Errors
/// When it cannot be written.
pub(super) fn check(files: &[File], bless: bool) -> Result<Option<Problem>> {
    let sources = files.iter().filter(|file| file.path.starts_with(SOURCES));
    let Some(now) = Abi::of(sources) else {
        return Ok(Some(problem(SOURCES, "no `ABI_VERSION: … = <number>` here")));
    };
    let locked =
        files.iter().find(|file| file.path == LOCK).and_then(|file| Abi::parse(&file.text));
    let complaint = complaint(now, locked);
    if bless && complaint != Some(NOT_RAISED) {
        fs::write(workspace_root().join(LOCK), now.lock())
            .with_context(|| format!("cannot write {LOCK}"))?;
        return Ok(None);
    }
    Ok(complaint.map(|what| problem(LOCK, what)))
}

const NOT_RAISED: &str = "the sources of the ABI changed, but ABI_VERSION did not: \
     raise it, then run `cargo xtask tidy --bless`";
const NOT_WRITTEN: &str = "does not hold this ABI_VERSION yet: run `cargo xtask tidy --bless`";

/// `locked` is `None` without a readable lock file.
fn complaint(now: Abi, locked: Option<Abi>) -> Option<&'static str> {
    match locked {
        Some(locked) if locked == now => None,
        Some(locked) if locked.version == now.version => Some(NOT_RAISED),
        Some(_) | None => Some(NOT_WRITTEN),
    }
}

impl Abi {
    fn of<'a>(sources: impl Iterator<Item = &'a File>) -> Option<Self> {
        let mut sources: Vec<_> = sources.collect();
        sources.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        let mut version = None;
        let mut hash = FNV_BASIS;
        for source in sources {
            let normalised = normalise(&source.text);
            version = version.or_else(|| version_in(&normalised));
            hash = fnv1a(hash, source.path.as_bytes());
            hash = fnv1a(hash, normalised.as_bytes());
        }
        Some(Self { version: version?, hash })
    }

    fn parse(lock: &str) -> Option<Self> {
        let field = |name: &str| {
            lock.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_prefix("= "))
        };
        Some(Self {
            version: field("version")?.parse().ok()?,
            hash: u64::from_str_radix(field("sources")?, 16).ok()?,
        })
    }

    fn lock(self) -> String {
        let Self { version, hash } = self;
        format!(
            "# Written by `cargo xtask tidy --bless`: the ABI version and a hash of \
             {SOURCES}\n# without comments, spaces and tests.\nversion = {version}\nsources = {hash:016x}\n"
        )
    }
}

/// Comments, white space and a closing test module do not change a layout.
fn normalise(source: &str) -> String {
    let mut code = code::without_comments(source);
    code.retain(|c| !c.is_whitespace());
    // Trailing commas come and go with the formatter.
    let mut code = code.replace(",}", "}").replace(",)", ")");
    if let Some(tests) = code.find("#[cfg(test)]mod") {
        code.truncate(tests);
    }
    code
}

fn version_in(normalised: &str) -> Option<u32> {
    let (_, declaration) = normalised.split_once("constABI_VERSION:")?;
    let (_, value) = declaration.split_once('=')?;
    let (value, _) = value.split_once(';')?;
    value.parse().ok()
}

const FNV_BASIS: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a: stable between Rust versions, which the standard library's hashes need not be. It guards
/// against forgetting, not against an enemy.
fn fnv1a(basis: u64, bytes: &[u8]) -> u64 {
    const PRIME: u64 = 0x0100_0000_01b3;
    bytes.iter().fold(basis, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME))
}

fn problem(path: &str, what: &str) -> Problem {
    Problem { path: path.to_owned(), line: 0, what: what.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn abi(text: &str) -> Option<Abi> {
        let path = format!("{SOURCES}mod.rs");
        Abi::of([File { path, size: text.len(), text: text.to_owned() }].iter())
    }

    const BEFORE: &str = "pub const ABI_VERSION: u32 = 3;\npub struct Key { a: u8 }\n";

    #[test]
    fn a_change_needs_a_new_version_and_a_new_version_a_blessing() {
        let before = abi(BEFORE).unwrap();
        let changed = abi(&BEFORE.replace("u8", "u16")).unwrap();
        let raised = abi(&BEFORE.replace("u8", "u16").replace('3', "4")).unwrap();
        assert_eq!(complaint(before, Some(before)), None);
        assert_eq!(complaint(changed, Some(before)), Some(NOT_RAISED));
        assert_eq!(complaint(raised, Some(before)), Some(NOT_WRITTEN));
        assert_eq!(complaint(before, None), Some(NOT_WRITTEN));
    }

    #[test]
    fn comments_spaces_and_tests_are_no_change() {
        let same = "// Why.\npub const ABI_VERSION: u32 = 3;\npub struct Key {\n    a: u8,\n}\n\
                    #[cfg(test)]\nmod tests { fn f() {} }";
        assert_eq!(abi(same), abi(BEFORE));
    }

    #[test]
    fn sources_without_a_version_are_noticed() {
        assert_eq!(abi("pub struct Key { a: u8 }"), None);
    }

    #[test]
    fn the_lock_reads_back() {
        let before = abi(BEFORE).unwrap();
        assert_eq!(Abi::parse(&before.lock()), Some(before));
        assert_eq!(Abi::parse("version = x"), None);
    }
}
