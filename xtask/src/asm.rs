//! `cargo xtask asm`: how many instructions each eBPF function has, to compare changes.

use std::fs;

use anyhow::{Context as _, Result};
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, SectionKind, SymbolKind};
use xtask::{
    bpf::{self, Toolchain},
    workspace_root,
};

/// Every BPF instruction has this size in bytes; a 64-bit immediate load counts as two.
const INSTRUCTION_SIZE: u64 = 8;

const OBJECTS: &[(&str, &str)] = &[
    ("limiter-ebpf", "limiter"),
    ("limiter-tests-ebpf", "generator"),
    ("limiter-tests-ebpf", "bench"),
];

/// Builds the eBPF objects and prints their functions' sizes.
///
/// # Errors
/// When an object cannot be built or read.
pub(crate) fn run() -> Result<()> {
    let toolchain = Toolchain::find()?;
    for (package, bin) in OBJECTS {
        let path = bpf::build(&toolchain, package, bin, &workspace_root().join("target/asm"))?;
        let data = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        println!("{package}:");
        for line in functions(&data)? {
            println!("{line}");
        }
    }
    Ok(())
}

/// One line for each section with code and, indented, for each function in it, in order of names.
fn functions(data: &[u8]) -> Result<Vec<String>> {
    let file = object::File::parse(data).context("not an object file")?;
    let mut lines = Vec::new();
    for section in file.sections().filter(|section| section.kind() == SectionKind::Text) {
        let name = section.name().context("a section without a name")?;
        if section.size() == 0 {
            continue;
        }
        lines.push((name, "", section.size() / INSTRUCTION_SIZE));
        for symbol in file.symbols() {
            if symbol.kind() == SymbolKind::Text && symbol.section_index() == Some(section.index())
            {
                let function = symbol.name().context("a function without a name")?;
                lines.push((name, function, symbol.size() / INSTRUCTION_SIZE));
            }
        }
    }
    lines.sort_unstable();
    let line = |(section, function, count): (&str, &str, u64)| {
        if function.is_empty() {
            format!("{count:>8}  section {section}")
        } else {
            format!("{count:>8}    {function}")
        }
    };
    Ok(lines.into_iter().map(line).collect())
}
