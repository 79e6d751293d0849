//! What the machine is asked, whatever its interfaces. Pure: what was read is an argument.

use super::report::{Outcome, Status};
use crate::memory::{check_memory, map_memory};
use crate::plan::MapSizes;
use crate::status::bytes;

/// `name` as Rust has it.
pub(super) fn architecture(name: &str) -> Outcome {
    if name == "x86_64" {
        return Outcome::ok(name);
    }
    Outcome::warning(
        format!("{name}: only x86-64 is tested"),
        "run the project's tests on it first",
    )
}

pub(super) fn btf(is_there: bool) -> Outcome {
    if is_there {
        return Outcome::ok("the kernel describes its types");
    }
    Outcome::warning(
        "there is no /sys/kernel/btf/vmlinux; kernels without are not tested",
        "a kernel with CONFIG_DEBUG_INFO_BTF",
    )
}

/// `limit` is `RLIMIT_MEMLOCK` in bytes, if there is one.
pub(super) fn memlock(limit: Option<u64>) -> Outcome {
    let limit = limit.map_or_else(|| "unlimited".to_owned(), |limit| format!("{limit} bytes"));
    Outcome::ok(format!(
        "{limit}; it does not matter: since Linux 5.11 maps count towards the memory cgroup"
    ))
}

/// `enabled` is what `/proc/sys/net/core/bpf_jit_enable` holds; other network namespaces than the
/// first do not have it.
pub(super) fn jit(enabled: Option<&str>) -> Outcome {
    let set = "sysctl -w net.core.bpf_jit_enable=1";
    match enabled.map(str::trim) {
        Some("0") => Outcome::warning("off: the program is interpreted, which is slow", set),
        Some(_) => Outcome::ok("on"),
        None => Outcome::warning(
            "whether it is on cannot be read here",
            "as root, in the host's network namespace: sysctl net.core.bpf_jit_enable",
        ),
    }
}

/// `is_fine` says whether `CLOCK_MONOTONIC` has a resolution of 1 ns.
pub(super) fn clock(is_fine: bool) -> Outcome {
    if is_fine {
        return Outcome::ok("CLOCK_MONOTONIC has a resolution of 1 ns");
    }
    Outcome::warning(
        "CLOCK_MONOTONIC moves with the timer's ticks only, so limits are that coarse",
        "boot a kernel with CONFIG_HIGH_RES_TIMERS, and without highres=off",
    )
}

/// The clock source in use and those to be had, as sysfs has them.
pub(super) fn clocksource(current: Option<&str>, available: &str) -> Outcome {
    const DIRECTORY: &str = "/sys/devices/system/clocksource/clocksource0";
    let Some(current) = current.map(str::trim) else {
        return Outcome::warning("it cannot be read", format!("mount sysfs; see {DIRECTORY}"));
    };
    if !["hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit"].contains(&current) {
        return Outcome::ok(current);
    }
    let fast = ["tsc", "kvm-clock"];
    let fix = match available.split_whitespace().find(|it| fast.contains(it)) {
        Some(fast) => format!("echo {fast} > {DIRECTORY}/current_clocksource"),
        None => "`dmesg | grep -i -e tsc -e clocksource` says why the kernel does not trust the \
                 TSC; in a VM, let the hypervisor offer it"
            .to_owned(),
    };
    Outcome::warning(format!("{current}: reading the time is slow, and packets need it"), fix)
}

/// What the maps take against what is available, both in bytes.
pub(super) fn memory(sizes: Option<&MapSizes>, available: Option<u64>) -> Outcome {
    let Some(sizes) = sizes else {
        return Outcome::warning(
            "what the maps take depends on interfaces that are missing",
            "see the interfaces below",
        );
    };
    let needed = bytes(map_memory(sizes));
    let Some(available) = available else {
        return Outcome::warning(
            format!("the maps take about {needed}; what is available cannot be read"),
            "mount /proc",
        );
    };
    match check_memory(sizes, available) {
        Ok(()) => {
            Outcome::ok(format!("the maps take about {needed}, {} available", bytes(available)))
        }
        Err(error) => Outcome::said(Status::Failed, &error),
    }
}

#[cfg(test)]
mod tests {
    use limiter_common::abi::CounterShape;

    use super::*;

    #[test]
    fn slow_clock_sources_are_told_from_others() {
        for fine in ["tsc\n", "kvm-clock\n", "arch_sys_counter\n"] {
            assert_eq!(clocksource(Some(fine), "").status, Status::Ok, "{fine}");
        }
        for slow in ["hpet\n", "acpi_pm\n", "jiffies\n"] {
            let outcome = clocksource(Some(slow), "tsc hpet acpi_pm \n");
            assert_eq!(outcome.status, Status::Warning, "{slow}");
            assert!(outcome.fix.is_some_and(|fix| fix.starts_with("echo tsc > /sys/")), "{slow}");
        }
        let outcome = clocksource(Some("hpet\n"), "hpet acpi_pm\n");
        assert!(outcome.fix.is_some_and(|fix| fix.contains("dmesg")));
        assert_eq!(clocksource(None, "").status, Status::Warning);
    }

    #[test]
    fn what_is_slow_or_untested_is_a_warning() {
        assert_eq!(jit(Some("0\n")).status, Status::Warning);
        assert_eq!(jit(Some("1\n")).status, Status::Ok);
        assert_eq!(jit(None).status, Status::Warning);
        assert_eq!(architecture("x86_64").status, Status::Ok);
        assert_eq!(architecture("aarch64").status, Status::Warning);
        assert_eq!(btf(false).status, Status::Warning);
        assert!(memlock(Some(65_536)).finding.starts_with("65536 bytes; it does not matter"));
        assert!(memlock(None).finding.starts_with("unlimited"));
        assert_eq!(clock(false).status, Status::Warning);
    }

    #[test]
    fn tables_that_do_not_fit_are_refused_as_run_refuses_them() {
        let sizes = MapSizes {
            ipv4_sources: 1 << 20,
            ipv6_sources: 1 << 20,
            bytes: false,
            ceilings: false,
            prefixes: 2048,
            policies: 2048,
            limits: 2048,
            counters: CounterShape { slots: 5, classes: 17 },
        };
        assert_eq!(memory(Some(&sizes), Some(1 << 40)).status, Status::Ok);
        let outcome = memory(Some(&sizes), Some(50 << 20));
        assert_eq!(outcome.status, Status::Failed);
        assert!(outcome.finding.starts_with("[table] ipv4_sources = 1048576"), "{outcome:?}");
        assert!(outcome.fix.is_some_and(|fix| fix.contains("of each family fit")));
    }
}
