//! Rules on single files: who may import what, sizes, and what must not be written anywhere.

use std::path::Path;

use super::{
    File, Problem,
    code::{bracketed, has_word, line_of, without_comments_and_strings},
};

const MAX_SIZE: usize = 512 * 1024;
const MAX_RUST_LINES: usize = 600;
const MAX_EBPF_MAIN_LINES: usize = 60;

/// Files that rules speak of by name. Were one renamed, its rule would check nothing.
const NAMED: &[&str] = &[COMMON_LIB, POD, EBPF_MAIN, EBPF_VIEW, PLAN];
const COMMON_LIB: &str = "limiter-common/src/lib.rs";
const POD: &str = "limiter-common/src/abi/pod.rs";
const EBPF_MAIN: &str = "limiter-ebpf/src/main.rs";
const EBPF_VIEW: &str = "limiter-ebpf/src/view.rs";
const PLAN: &str = "limiter-agent/src/plan/mod.rs";

/// Words that have no place in a file: input and output, the clock, the kernel.
const IMPURE: &[&str] = &[
    "Instant::now",
    "SystemTime::now",
    "TcpListener",
    "TcpStream",
    "ToSocketAddrs",
    "UdpSocket",
    "UnixListener",
    "UnixStream",
    "aya",
    "env",
    "fs",
    "io",
    "libc",
    "nix",
    "process",
    "tokio",
];

/// The problems of one file.
pub(super) fn check_file(file: &File) -> Vec<Problem> {
    let mut problems = Problems { path: &file.path, list: Vec::new() };
    if file.size > MAX_SIZE {
        problems.add(0, format!("{} KiB; the limit is {} KiB", file.size / 1024, MAX_SIZE / 1024));
    }
    machine_paths(&file.text, &mut problems);
    if Path::new(&file.path).extension().is_some_and(|extension| extension == "rs") {
        let code = without_comments_and_strings(&file.text);
        lengths(&file.path, &file.text, &mut problems);
        words(&file.path, &code, &mut problems);
        allows(&code, &mut problems);
        default_passes(&file.path, &code, &mut problems);
        if file.path == COMMON_LIB && !declares_no_std(&code) {
            problems.add(0, "must declare #![no_std]");
        }
    }
    problems.list
}

/// A problem for each file that a rule names and that is not there.
pub(super) fn check_presence(files: &[File]) -> impl Iterator<Item = Problem> {
    NAMED.iter().filter(|name| files.iter().all(|file| file.path != **name)).map(|name| {
        let what = "is missing; if it moved, its rule in xtask/src/tidy/rules.rs must follow";
        Problem { path: (*name).to_owned(), line: 0, what: what.to_owned() }
    })
}

struct Problems<'a> {
    path: &'a str,
    list: Vec<Problem>,
}

impl Problems<'_> {
    fn add(&mut self, line: usize, what: impl Into<String>) {
        self.list.push(Problem { path: self.path.to_owned(), line, what: what.into() });
    }
}

fn machine_paths(text: &str, problems: &mut Problems<'_>) {
    // In two pieces, or this file would break its own rule.
    const ROOTS: &[&str] = &[concat!("/wo", "rk/"), concat!("/ro", "ot/")];
    for (number, line) in text.lines().enumerate() {
        for root in ROOTS {
            let is_path = |(at, _): (usize, &str)| {
                !line[..at].ends_with(|c: char| c.is_alphanumeric() || "_.-~}".contains(c))
            };
            if line.match_indices(root).any(is_path) {
                problems.add(number + 1, format!("{root} is a path of one machine"));
            }
        }
    }
}

fn lengths(path: &str, text: &str, problems: &mut Problems<'_>) {
    let lines = text.lines().count();
    if lines >= MAX_RUST_LINES {
        problems.add(0, format!("{lines} lines; files stay under {MAX_RUST_LINES}"));
    }
    if path == EBPF_MAIN && lines > MAX_EBPF_MAIN_LINES {
        problems.add(0, format!("{lines} lines; the entry has at most {MAX_EBPF_MAIN_LINES}"));
    }
}

/// Words that belong to some files only.
fn words(path: &str, code: &str, problems: &mut Problems<'_>) {
    let in_datapath =
        path.starts_with("limiter-agent/src/datapath/") || path == "limiter-agent/src/datapath.rs";
    let outside_datapath = path.starts_with("limiter-agent/src/") && !in_datapath;
    let safe_common = path.starts_with("limiter-common/src/") && path != POD;
    let ebpf_without_view = path.starts_with("limiter-ebpf/src/") && path != EBPF_VIEW;
    let in_plan = path.starts_with("limiter-agent/src/plan/") && !path.ends_with("/tests.rs");
    let rules: &[(bool, &[&str], &str)] = &[
        (outside_datapath, &["aya", "aya_log"], "belongs to limiter-agent/src/datapath/ only"),
        (safe_common, &["unsafe"], "belongs to limiter-common/src/abi/pod.rs only"),
        (ebpf_without_view, &["data_end"], "belongs to limiter-ebpf/src/view.rs only"),
        (in_plan, IMPURE, "has no place in the plan, which is a pure function"),
    ];
    for (_, words, what) in rules.iter().filter(|(applies, ..)| *applies) {
        for (number, line) in code.lines().enumerate() {
            for word in words.iter().filter(|word| has_word(line, word)) {
                problems.add(number + 1, format!("`{word}` {what}"));
            }
        }
    }
}

fn allows(code: &str, problems: &mut Problems<'_>) {
    for (at, _) in code.match_indices("[allow(") {
        let attribute = bracketed(&code[at..], '[', ']');
        if !has_word(attribute, "reason") {
            problems.add(line_of(code, at), "`allow` without a reason; better, `expect` with one");
        }
    }
}

/// Whether a fault passes or drops is for the table of reasons to say, not for a fallback.
fn default_passes(path: &str, code: &str, problems: &mut Problems<'_>) {
    if !path.starts_with("limiter-ebpf/") && !path.starts_with("limiter-common/src/") {
        return;
    }
    for (at, call) in code.match_indices("unwrap_or") {
        let after = &code[at + call.len()..];
        let Some(open) = after.find('(') else {
            continue;
        };
        let argument = bracketed(&after[open..], '(', ')');
        if ["XDP_", "::Pass", "::PASS", "::Drop", "::DROP"].iter().any(|v| argument.contains(v)) {
            problems.add(line_of(code, at), "a verdict as a fallback; give the fault a `Reason`");
        }
    }
}

fn declares_no_std(code: &str) -> bool {
    code.contains("#![no_std]") || code.contains("#![cfg_attr(not(test), no_std)]")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(path: &str, text: &str) -> Vec<String> {
        let file = File { path: path.to_owned(), size: text.len(), text: text.to_owned() };
        check_file(&file).iter().map(ToString::to_string).collect()
    }

    #[track_caller]
    fn assert_clean(path: &str, text: &str) {
        assert_eq!(problems(path, text), Vec::<String>::new());
    }

    /// `text` breaks one rule, on line `line`, in `path`.
    #[track_caller]
    fn assert_broken(path: &str, text: &str, line: usize) {
        let found = problems(path, text);
        assert_eq!(found.len(), 1, "{found:?}");
        let at = if line == 0 { format!("{path}: ") } else { format!("{path}:{line}: ") };
        assert!(found[0].starts_with(&at), "{found:?}");
    }

    #[test]
    fn only_the_datapath_imports_aya() {
        assert_broken("limiter-agent/src/api.rs", "\nuse aya::Ebpf;", 2);
        assert_broken("limiter-agent/src/api.rs", "use aya_log::EbpfLogger;", 1);
        assert_broken("limiter-agent/src/datapathology.rs", "use {aya as x};", 1);
        assert_clean("limiter-agent/src/datapath/load.rs", "use aya::Ebpf;");
        assert_clean("limiter-agent/src/api.rs", "// like aya::Ebpf\nlet a = \"aya::Ebpf\";");
        assert_clean("tests/src/lib.rs", "use aya::Ebpf;");
    }

    #[test]
    fn common_is_no_std_and_safe() {
        assert_clean(COMMON_LIB, "#![no_std]\n#![forbid(unsafe_code)]");
        assert_broken(COMMON_LIB, "// #![no_std]\n", 0);
        assert_broken("limiter-common/src/bucket.rs", "fn f() {\n    unsafe { g() }\n}", 2);
        assert_clean(POD, "unsafe impl Pod for Key {}");
    }

    #[test]
    fn packet_pointers_stay_in_the_view() {
        assert_broken("limiter-ebpf/src/env.rs", "let end = ctx.data_end();", 1);
        assert_clean(EBPF_VIEW, "let end = ctx.data_end();");
    }

    #[test]
    fn the_plan_is_pure() {
        assert_broken(PLAN, "use std::{collections::BTreeMap, fs};", 1);
        assert_broken(PLAN, "use tokio::time;", 1);
        assert_broken(PLAN, "let now = std::time::Instant::now();", 1);
        assert_broken("limiter-agent/src/plan/diff.rs", "nix::unistd::getpid();", 1);
        assert_clean(PLAN, "use std::{net::IpAddr, time::SystemTime};");
    }

    #[test]
    fn files_stay_small() {
        let lines = |count| "fn f() {}\n".repeat(count);
        assert_clean(EBPF_MAIN, &lines(MAX_EBPF_MAIN_LINES));
        assert_broken(EBPF_MAIN, &lines(MAX_EBPF_MAIN_LINES + 1), 0);
        assert_clean("xtask/src/x.rs", &lines(MAX_RUST_LINES - 1));
        assert_broken("xtask/src/x.rs", &lines(MAX_RUST_LINES), 0);
        assert_clean("x.bin", &"x".repeat(MAX_SIZE));
        assert_broken("x.bin", &"x".repeat(MAX_SIZE + 1), 0);
    }

    #[test]
    fn no_paths_of_one_machine() {
        assert_broken("README.md", concat!("\nsee /wo", "rk/x"), 2);
        assert_broken("a.rs", concat!("const A: &str = \"/ro", "ot/.cargo\";"), 1);
        assert_clean("README.md", concat!("https://example.org/a/wo", "rk/x"));
    }

    #[test]
    fn an_allow_has_a_reason() {
        assert_broken("a.rs", "\n#[allow(dead_code)]\nfn f() {}", 2);
        assert_broken("a.rs", "#![allow(\n    dead_code\n)]", 1);
        assert_clean("a.rs", "#[allow(dead_code, reason = \"x\")]\nfn f() {}");
    }

    #[test]
    fn no_verdict_is_a_fallback() {
        let ebpf = "limiter-ebpf/src/env.rs";
        assert_broken(ebpf, "try_it()\n    .unwrap_or(xdp_action::XDP_PASS)", 2);
        assert_broken(ebpf, "try_it().unwrap_or_else(|_| Action::Pass)", 1);
        assert_clean(ebpf, "limit.unwrap_or(0)");
    }

    #[test]
    fn a_file_with_a_rule_of_its_own_is_there() {
        let all: Vec<_> = NAMED
            .iter()
            .map(|name| File { path: (*name).to_owned(), size: 0, text: String::new() })
            .collect();
        assert_eq!(check_presence(&all).count(), 0);
        assert_eq!(check_presence(&all[1..]).count(), 1);
    }
}
