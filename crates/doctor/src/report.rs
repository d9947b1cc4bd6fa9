//! Findings as a table for people, and as JSON for programs.

use std::borrow::Cow;
use std::fmt::{self, Write as _};

use serde::Serialize;

use crate::advice::quoted;
use crate::finding::{Advice, AdviceTarget, Finding, Outcome};

/// Longest text of one row.
const LINE_BYTES_MAX: usize = 2048;

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
            writeln!(f, "{}", one_line(&examined.worker))?;
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
    let why = one_line(&finding.why);
    writeln!(f, "  {word}  {:<15} {why}", finding.check.name())?;
    for advice in &finding.advice {
        writeln!(f, "        {:<15} {}", "", one_line(&advised(advice)))?;
    }
    Ok(())
}

/// A text as one line that no terminal obeys: engines write some of it.
fn one_line(text: &str) -> Cow<'_, str> {
    // Those that turn the direction of what follows are no control characters by their class.
    let obeyed =
        |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let end = text.floor_char_boundary(LINE_BYTES_MAX);
    let (shown, rest) = text.split_at(end);
    if rest.is_empty() && !shown.contains(obeyed) {
        return Cow::Borrowed(text);
    }
    let mut line = String::with_capacity(shown.len());
    for c in shown.chars() {
        match obeyed(c) {
            true => line.extend(c.escape_default()),
            false => line.push(c),
        }
    }
    if !rest.is_empty() {
        line.push('…');
    }
    Cow::Owned(line)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Check;

    /// An engine that answers with escapes of terminals, lines of its own or a very long text gets one plain row.
    #[test]
    fn no_text_of_an_engine_reaches_the_terminal_raw() {
        let finding = Finding {
            check: Check::Version,
            outcome: Outcome::Fail,
            why: format!(
                "\u{1b}[2J\u{1b}]0;owned\u{7}\n  pass  reachable\u{202e}{}",
                "x".repeat(100_000)
            ),
            advice: vec![Advice {
                whose: AdviceTarget::Engine,
                args: vec!["--served-model-name".into(), "\u{9b}31mred".into()],
                text: "a\rb".into(),
            }],
        };
        let report = Report {
            workers: vec![WorkerReport {
                worker: "http://a".into(),
                checks: vec![finding],
            }],
        };
        let text = report.to_string();
        assert!(text.len() < 3 * LINE_BYTES_MAX, "{}", text.len());
        assert!(!text.contains(|c: char| c.is_control() && c != '\n' || c == '\u{202e}'));
        assert_eq!(text.lines().count(), 5, "{text}");
        assert!(text.contains(r"\u{1b}[2J") && text.contains(r"\n  pass  reachable\u{202e}xx"));
    }
}
