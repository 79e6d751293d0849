//! What was found, for people and for programs.

use std::fmt;

use serde::Serialize;

/// All checks.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    checks: Vec<Check>,
    pub(super) failed: usize,
    warnings: usize,
}

/// One check.
#[derive(Debug, Serialize)]
pub(super) struct Check {
    pub(super) name: &'static str,
    /// The interface; none if it is about the machine.
    pub(super) subject: Option<String>,
    #[serde(flatten)]
    pub(super) outcome: Outcome,
}

/// What came of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Outcome {
    pub(super) status: Status,
    pub(super) finding: String,
    pub(super) fix: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Status {
    /// As it should be.
    Ok,
    /// The agent runs, slower or with less.
    Warning,
    /// `run` would refuse.
    Failed,
}

impl Report {
    pub(super) fn new(checks: Vec<Check>) -> Self {
        let count = |status| checks.iter().filter(|it| it.outcome.status == status).count();
        let (failed, warnings) = (count(Status::Failed), count(Status::Warning));
        Self { checks, failed, warnings }
    }
}

impl Outcome {
    pub(super) fn ok(finding: impl Into<String>) -> Self {
        Self { status: Status::Ok, finding: finding.into(), fix: None }
    }

    pub(super) fn new(status: Status, finding: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { status, finding: finding.into(), fix: Some(fix.into()) }
    }

    pub(super) fn warning(finding: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::new(Status::Warning, finding, fix)
    }

    pub(super) fn failed(finding: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::new(Status::Failed, finding, fix)
    }

    /// What `run` would say: a sentence with `; fix: ` between cause and cure, as those errors have it
    /// that something outside of the configuration can mend.
    pub(super) fn said(status: Status, error: &impl fmt::Display) -> Self {
        let text = error.to_string();
        match text.split_once("; fix: ") {
            Some((finding, fix)) => Self::new(status, finding, fix),
            None => Self { status, finding: text, fix: None },
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Check { name, subject, outcome } in &self.checks {
            let Outcome { status, finding, fix } = outcome;
            let status = match status {
                Status::Ok => "ok",
                Status::Warning => "warning",
                Status::Failed => "failed",
            };
            let subject = subject.as_ref().map(|it| format!("{it} ")).unwrap_or_default();
            writeln!(out, "{status:<8} {subject}{name}: {finding}")?;
            if let Some(fix) = fix {
                writeln!(out, "         fix: {fix}")?;
            }
        }
        writeln!(out, "failed: {}, warnings: {}", self.failed, self.warnings)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::host::Unfit;

    fn report() -> Report {
        let bpffs = Outcome::said(Status::Failed, &Unfit::NoBpffs);
        let lro = Outcome::warning("on", "ethtool");
        Report::new(vec![
            Check { name: "kernel", subject: None, outcome: Outcome::ok("Linux 6.1") },
            Check { name: "bpffs", subject: None, outcome: bpffs },
            Check { name: "lro", subject: Some("eth0".into()), outcome: lro },
        ])
    }

    #[test]
    fn text_has_a_line_for_each_check_and_one_for_each_fix() {
        let text = report().to_string();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "ok       kernel: Linux 6.1");
        assert_eq!(lines[1], "failed   bpffs: no BPF file system is mounted at /sys/fs/bpf");
        assert!(lines[2].starts_with("         fix: mount -t bpf bpf /sys/fs/bpf"), "{text}");
        assert_eq!(
            &lines[3..],
            ["warning  eth0 lro: on", "         fix: ethtool", "failed: 1, warnings: 1"]
        );
    }

    #[test]
    fn json_has_the_documented_shape() {
        let json = serde_json::to_value(report()).expect("is written");
        assert_eq!((&json["failed"], &json["warnings"]), (&json!(1), &json!(1)));
        let first = json!({
            "name": "kernel", "subject": null, "status": "ok", "finding": "Linux 6.1", "fix": null,
        });
        assert_eq!(json["checks"][0], first);
        assert_eq!(json["checks"][2]["subject"], "eth0");
    }
}
