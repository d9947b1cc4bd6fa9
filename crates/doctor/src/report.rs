//! Findings as a table for people, and as JSON for programs.

use std::fmt::{self, Write as _};

use serde::Serialize;

use crate::advice::quoted;
use crate::finding::{Advice, AdviceTarget, Finding, Outcome};

/// What was found at one worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WorkerReport {
    /// Its address.
    pub worker: String,
    /// One for each check, in order.
    pub checks: Vec<Finding>,
}

/// All findings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// One for each worker, in the order asked.
    pub workers: Vec<WorkerReport>,
}

impl Report {
    /// Whether nothing failed.
    #[must_use]
    pub fn is_well(&self) -> bool {
        self.count(Outcome::Fail) == 0
    }

    fn count(&self, outcome: Outcome) -> usize {
        let checks = self.workers.iter().flat_map(|w| &w.checks);
        checks.filter(|finding| finding.outcome == outcome).count()
    }

    /// `{"ok":…,"passed":…,"failed":…,"skipped":…,"workers":[…]}`, in one line.
    #[must_use]
    pub fn to_json(&self) -> String {
        #[derive(Serialize)]
        struct JsonReport<'r> {
            ok: bool,
            passed: usize,
            failed: usize,
            skipped: usize,
            workers: &'r [WorkerReport],
        }
        let whole = JsonReport {
            ok: self.is_well(),
            passed: self.count(Outcome::Pass),
            failed: self.count(Outcome::Fail),
            skipped: self.count(Outcome::Skip),
            workers: &self.workers,
        };
        serde_json::to_string(&whole).unwrap_or_default()
    }
}

/// The table.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for examined in &self.workers {
            writeln!(f, "{}", examined.worker)?;
            for finding in &examined.checks {
                row(f, finding)?;
            }
            writeln!(f)?;
        }
        let mut line = format!("{} passed", self.count(Outcome::Pass));
        for (outcome, word) in [(Outcome::Fail, "failed"), (Outcome::Skip, "skipped")] {
            match self.count(outcome) {
                0 => {}
                count => write!(line, ", {count} {word}")?,
            }
        }
        writeln!(f, "{line}")
    }
}

fn row(f: &mut fmt::Formatter<'_>, finding: &Finding) -> fmt::Result {
    let word = match finding.outcome {
        Outcome::Pass => "pass",
        Outcome::Fail => "FAIL",
        Outcome::Skip => "skip",
    };
    writeln!(f, "  {word}  {:<15} {}", finding.check.name(), finding.why)?;
    for advice in &finding.advice {
        writeln!(f, "        {:<15} {}", "", advised(advice))?;
    }
    Ok(())
}

fn advised(advice: &Advice) -> String {
    let whose = match advice.whose {
        AdviceTarget::Engine => "engine",
        AdviceTarget::Kvasir => "kvasir",
    };
    let words: Vec<String> = advice.args.iter().map(|word| quoted(word)).collect();
    match words.is_empty() {
        true => format!("{whose}: {}", advice.text),
        false => format!("{whose}: {}   ({})", words.join(" "), advice.text),
    }
}
