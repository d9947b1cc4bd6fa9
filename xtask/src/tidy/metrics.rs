//! Every series of the metric table is written by something that runs.
//!
//! Answers: is there a row that the reference page documents and no code touches? A row is written where a crate other
//! than `telemetry` names its field outside of tests; a handle that is made and then not used is the compiler's to find.

use crate::tidy::Finding;
use crate::tree::Tree;

const TABLE: &str = "crates/telemetry/src/metric_table.rs";

/// Rows that nobody writes.
pub(crate) fn unwritten(tree: &Tree) -> Vec<Finding> {
    let rows = tree
        .sources()
        .filter(|(path, _)| *path == TABLE)
        .flat_map(|(_, text)| fields(text));
    let written: Vec<&str> = tree
        .sources()
        .filter(|(path, _)| writes(path))
        .map(|(_, text)| before_tests(text))
        .collect();
    rows.filter(|(_, field)| !written.iter().any(|text| names(text, field)))
        .map(|(line, field)| {
            let text = format!(
                "no crate writes `{field}`: write it where it happens, or take the row out"
            );
            Finding::new(TABLE, line, text)
        })
        .collect()
}

fn writes(path: &str) -> bool {
    path.starts_with("crates/")
        && path.contains("/src/")
        && !path.starts_with("crates/telemetry/")
        && !path.ends_with("/tests.rs")
        && !path.contains("/tests/")
}

fn before_tests(text: &str) -> &str {
    text.split_once("#[cfg(test)]")
        .map_or(text, |(before, _)| before)
}

/// The fields of the table, with their lines.
fn fields(table: &str) -> impl Iterator<Item = (usize, &str)> {
    table.lines().zip(1..).filter_map(|(line, number)| {
        let mut words = line.split_whitespace();
        let kind = words.next()?;
        let field = words.next()?;
        let row = ["counter", "gauge", "histogram"].contains(&kind) && words.next() == Some("=");
        row.then_some((number, field))
    })
}

/// Whether a text names the field of something.
fn names(text: &str, field: &str) -> bool {
    let part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.match_indices(field).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + field.len()..]);
        before.trim_end().ends_with('.') && !after.starts_with(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: &str = "        /// Two.\n        counter one_total = \"one_total\" [];\n        gauge two = \"two\" [\"model\"];\n";

    fn found(source: (&str, &str)) -> Vec<String> {
        let tree = Tree::of(&[(TABLE, ROWS), source]);
        let lines = unwritten(&tree).into_iter();
        lines
            .map(|finding| format!("{} {}", finding.line, finding.text))
            .collect()
    }

    #[test]
    fn a_row_that_nobody_writes_is_found() {
        let both = "fn f(m: &M) { m.one_total.inc(); m\n    .two\n    .set(1.0); }";
        assert!(found(("crates/a/src/a.rs", both)).is_empty());
        let one = "fn f(m: &M) { m.one_total.inc(); m.two_or_more.set(1.0); }";
        let complaints = found(("crates/a/src/a.rs", one));
        assert_eq!(complaints.len(), 1, "{complaints:?}");
        assert!(
            complaints[0].starts_with("3 no crate writes `two`"),
            "{complaints:?}"
        );
    }

    #[test]
    fn tests_write_nothing() {
        let tested = "fn f() {}\n#[cfg(test)]\nmod tests { fn f(m: &M) { m.one_total.inc(); m.two.inc(); } }";
        for source in [
            ("crates/a/src/a.rs", tested),
            ("crates/a/tests/it/a.rs", "m.one_total.inc(); m.two.inc();"),
            (
                "crates/telemetry/src/a.rs",
                "m.one_total.inc(); m.two.inc();",
            ),
        ] {
            assert_eq!(found(source).len(), 2, "{source:?}");
        }
    }
}
