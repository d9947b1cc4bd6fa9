//! Rules about records: changelog fragments, decisions, recordings.

use std::collections::BTreeMap;

use crate::tidy::Finding;
use crate::tree::Tree;

/// Lines a fragment may have.
const FRAGMENT_LINES_MAX: usize = 6;

/// Fragments are one or two sentences in a file named after their topic.
pub(crate) fn fragments(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for path in tree.names().filter(|path| path.starts_with("changelog.d/")) {
        let name = path.trim_start_matches("changelog.d/");
        if name == "README.md" {
            continue;
        }
        let topic = name.strip_suffix(".md").unwrap_or_default();
        if topic.is_empty() || !is_kebab(topic) {
            found.push(Finding::new(
                path,
                0,
                "name it <topic>.md, lower case, words joined by -",
            ));
            continue;
        }
        let text = tree.text(path).unwrap_or_default().trim();
        let complaint = match text {
            "" => "say what changed for a user",
            text if text.starts_with('#') => "no heading; the topic is the file name",
            text if !text.ends_with('.') => "write sentences that end with a full stop",
            text if text.lines().count() > FRAGMENT_LINES_MAX => "one or two sentences are enough",
            _ => continue,
        };
        found.push(Finding::new(path, 1, complaint));
    }
    found
}

fn is_kebab(word: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && part
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
    };
    word.split('-').all(part)
}

/// Decisions are numbered once and begin with their title.
pub(crate) fn decisions(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut numbers: BTreeMap<&str, &str> = BTreeMap::new();
    let folder = "docs/decisions/";
    for (path, text) in tree.texts().filter(|(path, _)| path.starts_with(folder)) {
        let name = path.trim_start_matches(folder);
        if name == "README.md" {
            continue;
        }
        let parts = name
            .strip_suffix(".md")
            .and_then(|stem| stem.split_once('-'));
        let Some((number, _)) = parts.filter(|(number, title)| {
            number.len() == 4 && number.chars().all(|c| c.is_ascii_digit()) && is_kebab(title)
        }) else {
            found.push(Finding::new(
                path,
                0,
                "name it NNNN-title.md: four digits, then words",
            ));
            continue;
        };
        if let Some(other) = numbers.insert(number, path) {
            let text = format!("number {number} is taken by {other}");
            found.push(Finding::new(path, 0, text));
        }
        if !text.starts_with("# ") {
            found.push(Finding::new(path, 1, "begin with the title as a heading"));
        }
    }
    found
}

/// Every recording has a line on where it came from.
pub(crate) fn recordings(tree: &Tree) -> Vec<Finding> {
    let origins = tree.text("testdata/README.md").unwrap_or_default();
    let mut entries: Vec<&str> = tree
        .names()
        .filter_map(|path| path.strip_prefix("testdata/")?.split('/').next())
        .filter(|entry| *entry != "README.md")
        .collect();
    entries.dedup();
    entries
        .into_iter()
        .filter(|entry| !origins.contains(&format!("`{entry}")))
        .map(|entry| {
            let text = format!("say where testdata/{entry} came from");
            Finding::new("testdata/README.md", 0, text)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(found: &[Finding]) -> Vec<String> {
        found.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn fragments_have_a_form() {
        let tree = Tree::of(&[
            ("changelog.d/README.md", "# How"),
            ("changelog.d/good-one.md", "It is new.\n"),
            ("changelog.d/Bad_Name.md", "It is new.\n"),
            ("changelog.d/empty.md", "\n"),
            ("changelog.d/heading.md", "# New\nIt is.\n"),
            ("changelog.d/open.md", "it is new\n"),
            ("changelog.d/long.md", "a.\nb.\nc.\nd.\ne.\nf.\ng.\n"),
        ]);
        let found = texts(&fragments(&tree));
        assert_eq!(found.len(), 5, "{found:?}");
        assert!(
            found
                .iter()
                .all(|text| !text.contains("good-one") && !text.contains("README"))
        );
    }

    #[test]
    fn decisions_are_numbered_once() {
        let tree = Tree::of(&[
            ("docs/decisions/0001-a.md", "# A\n"),
            ("docs/decisions/0001-b.md", "# B\n"),
            ("docs/decisions/2-c.md", "# C\n"),
            ("docs/decisions/0003-d.md", "D\n"),
        ]);
        let found = texts(&decisions(&tree));
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(
            found[0].contains("0001-b.md: number 0001 is taken"),
            "{found:?}"
        );
    }

    #[test]
    fn recordings_have_an_origin() {
        let tree = Tree::of(&[
            ("testdata/README.md", "- `a`: made by us\n"),
            ("testdata/a/x", ""),
            ("testdata/b/x", ""),
            ("testdata/b/y", ""),
        ]);
        assert_eq!(
            texts(&recordings(&tree)),
            ["testdata/README.md: say where testdata/b came from"]
        );
    }
}
