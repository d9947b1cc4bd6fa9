//! Generated pages.
//!
//! Answers: which pages come from code, and are they as the code would write them now?

use std::fmt::Write as _;

use crate::c_header;
use crate::tidy::Finding;
use crate::tree::Tree;

const DECISIONS: &str = "docs/decisions/";
const DECISIONS_INDEX: &str = "docs/decisions/README.md";
const DECISIONS_HEAD: &str = "\
# Decisions

One page each: context, choice, what was refused and why, what would change our mind. Numbers are stable; the tens
group what belongs together. Written by `cargo xtask docs`.

| tens | about |
|---|---|
| 00 | hosts of the router, metrics |
| 01 | the index |
| 02 | placement and the router |
| 03 | options, pages, spans |
| 04 | the engine model |
| 05 | bodies, prompts, tokens |
| 06 | event bytes and sockets |
| 07 | HTTP, workers, TLS |
| 08 | trust and warm restart |
| 09, 10 | operation, faults, logs |
| 12 | from 0126 on: the dashboard |
| 15 | from 0154 on: documents, images, sockets of others |

";

/// A line for each decision record, with its title.
fn decisions_index(tree: &Tree) -> String {
    let mut out = String::from(DECISIONS_HEAD);
    for (path, text) in tree.texts().filter(|(path, _)| path.starts_with(DECISIONS)) {
        let file = path.trim_start_matches(DECISIONS);
        let Some((number, _)) = file.split_once('-').filter(|_| path != DECISIONS_INDEX) else {
            continue;
        };
        let title = text.lines().next().unwrap_or_default();
        let title = title.trim_start_matches("# ").trim_start_matches(number);
        let title = title.trim_start_matches([':', ' ']);
        let _ = writeln!(out, "- [{number}]({file}): {title}");
    }
    out
}

/// Every generated page: its path and what it should say.
fn pages(tree: &Tree) -> Vec<(&'static str, String)> {
    let metrics = kvasir_telemetry::metrics_reference(kvasir_telemetry::SPECS);
    vec![
        (DECISIONS_INDEX, decisions_index(tree)),
        ("bindings/c/include/kvasir.h", c_header::page(tree)),
        (
            "docs/reference/coming-from-dynamo.md",
            kvasir_config::coming_from_dynamo_page(),
        ),
        ("docs/reference/metrics.md", metrics),
        ("docs/reference/options.md", kvasir_config::reference_page()),
    ]
}

/// Writes the pages that differ; true unless a file cannot be written.
pub(crate) fn write(tree: &Tree) -> bool {
    let mut written = true;
    for (path, text) in pages(tree) {
        if tree.text(path) == Some(text.as_str()) {
            println!("{path}: fresh");
            continue;
        }
        let full = tree.root.join(path);
        let made = full.parent().map_or(Ok(()), std::fs::create_dir_all);
        match made.and_then(|()| std::fs::write(&full, text)) {
            Ok(()) => println!("{path}: written"),
            Err(error) => {
                eprintln!("{path}: {error}");
                written = false;
            }
        }
    }
    written
}

/// Pages that differ from what the code would write.
pub(crate) fn stale(tree: &Tree) -> Vec<Finding> {
    pages(tree)
        .into_iter()
        .filter(|(path, text)| tree.text(path) != Some(text.as_str()))
        .map(|(path, _)| Finding::new(path, 0, "not as the code has it; run cargo xtask docs"))
        .collect()
}

/// Prints stale pages; true when there are none.
pub(crate) fn check_and_tell(tree: &Tree) -> bool {
    let stale = stale(tree);
    for finding in &stale {
        eprintln!("{finding}");
    }
    stale.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_page_is_stale() {
        let fresh: Vec<_> = pages(&Tree::default());
        let files: Vec<_> = fresh
            .iter()
            .map(|(path, text)| (*path, text.as_str()))
            .collect();
        assert_eq!(stale(&Tree::of(&files)), []);
        let changed: Vec<_> = fresh.iter().map(|(path, _)| (*path, "edited")).collect();
        assert_eq!(stale(&Tree::of(&changed)).len(), fresh.len());
        assert_eq!(stale(&Tree::of(&[])).len(), fresh.len());
    }

    #[test]
    fn every_decision_is_listed_with_its_title() {
        let tree = Tree::of(&[
            ("docs/decisions/0007-one.md", "# 0007: One thing\n"),
            ("docs/decisions/0008-two.md", "# Another\n"),
            (DECISIONS_INDEX, "old"),
        ]);
        let page = decisions_index(&tree);
        assert!(
            page.ends_with("- [0007](0007-one.md): One thing\n- [0008](0008-two.md): Another\n")
        );
    }
}
