//! How much memory is left.

use std::fs;
use std::path::{Path, PathBuf};

/// Memory that may still be taken, in bytes: what the kernel calls available, or what is left to this
/// process's memory cgroup, or one around it, if that is less. None if the kernel does not say.
#[must_use]
pub fn available_memory() -> Option<u64> {
    let host = fs::read_to_string("/proc/meminfo").ok().and_then(|text| available(&text));
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let groups = directories(&groups, Path::new("/sys/fs/cgroup"));
    let left = groups.iter().filter_map(|directory| left_in(directory));
    left.chain(host).min()
}

/// `MemAvailable` of `/proc/meminfo`.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The directories of the memory cgroups that `/proc/self/cgroup` names, each with those around it.
/// Some need not be there: a container sees its own cgroup as the uppermost.
fn directories(groups: &str, root: &Path) -> Vec<PathBuf> {
    let mut directories = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        // Version 2 has one hierarchy, which has no name; version 1 has one for the controller.
        let root = match controllers {
            "" => root.to_owned(),
            _ if controllers.split(',').any(|it| it == "memory") => root.join("memory"),
            _ => continue,
        };
        let path = Path::new(path.trim_start_matches('/'));
        directories.extend(path.ancestors().map(|path| root.join(path)));
    }
    directories
}

/// What a cgroup may still take; none if it has no limit.
fn left_in(directory: &Path) -> Option<u64> {
    let read = |name| fs::read_to_string(directory.join(name)).ok();
    let limit = read("memory.max").or_else(|| read("memory.limit_in_bytes"))?;
    let usage = read("memory.current").or_else(|| read("memory.usage_in_bytes"))?;
    left(&limit, &usage, &read("memory.stat").unwrap_or_default())
}

/// The same from the contents of its files. What is cached of files can be given back.
fn left(limit: &str, usage: &str, stat: &str) -> Option<u64> {
    let limit: u64 = limit.trim().parse().ok()?;
    let usage: u64 = usage.trim().parse().ok()?;
    let has_totals = stat.lines().any(|line| line.starts_with("total_inactive_file "));
    let names = if has_totals {
        ["total_inactive_file", "total_active_file"]
    } else {
        ["inactive_file", "active_file"]
    };
    let cached: u64 = stat
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(name, _)| names.contains(name))
        .filter_map(|(_, value)| value.parse::<u64>().ok())
        .sum();
    Some(limit.saturating_sub(usage.saturating_sub(cached)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_what_is_available() {
        let text = "MemTotal:       1000 kB\nMemAvailable:    640 kB\nSwapTotal: 0 kB\n";
        assert_eq!(available(text), Some(640 << 10));
        assert_eq!(available("MemTotal: 1000 kB\n"), None);
    }

    #[test]
    fn cgroups_are_found_with_those_around_them() {
        let root = Path::new("/c");
        let all = |text| -> Vec<String> {
            directories(text, root).iter().map(|it| it.display().to_string()).collect()
        };
        assert_eq!(
            all("0::/system.slice/limiter.service\n"),
            ["/c/system.slice/limiter.service", "/c/system.slice", "/c/"]
        );
        assert_eq!(all("5:cpu,cpuacct:/x\n4:memory:/x\n"), ["/c/memory/x", "/c/memory/"]);
    }

    #[test]
    fn a_cgroup_has_left_what_its_limit_leaves() {
        let stat = "anon 60\ninactive_file 20\nactive_file 10\nfile 30\n";
        assert_eq!(left("100\n", "90\n", stat), Some(40));
        assert_eq!(left("max\n", "90\n", stat), None);
        assert_eq!(left("50\n", "90\n", stat), Some(0));
        // Version 1 counts what is below a group apart.
        let stat = "inactive_file 0\ntotal_inactive_file 20\ntotal_active_file 10\n";
        assert_eq!(left("100\n", "90\n", stat), Some(40));
    }
}
