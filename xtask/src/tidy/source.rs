//! Rules about single source files: header, open ends, length, machine paths, test layout.

use crate::tidy::Finding;
use crate::tree::Tree;

/// Lines a source file may have.
const LINES_MAX: usize = 700;
/// Files that were longer when the rule came, with the length they may not exceed. Only shrink it.
const LONGER: &[(&str, usize)] = &[];

/// Every source says first which question it answers.
pub(crate) fn headers(tree: &Tree) -> Vec<Finding> {
    let bare = |(_, text): &(&str, &str)| !text.starts_with("//!");
    tree.sources()
        .filter(bare)
        .map(|(path, _)| {
            let text = "begin the file with a //! header: which question does it answer?";
            Finding::new(path, 1, text)
        })
        .collect()
}

/// A note of work to do says where that work is written down.
pub(crate) fn open_ends(tree: &Tree) -> Vec<Finding> {
    // Spelled apart, so that this file does not find itself.
    let words = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("XX", "X"),
        concat!("HA", "CK"),
    ];
    let mut found = Vec::new();
    for (path, text) in tree.sources() {
        for (index, line) in text.lines().enumerate() {
            let Some(word) = words.iter().find(|word| is_open_end(line, word)) else {
                continue;
            };
            let text = format!(
                "{word} without a place where it is written down; write {word}(docs/…) or do it"
            );
            found.push(Finding::new(path, index + 1, text));
        }
    }
    found
}

/// Whether the word stands in a comment, as a word, without a bracket behind it.
fn is_open_end(line: &str, word: &str) -> bool {
    let Some((_, comment)) = line.split_once("//") else {
        return false;
    };
    let Some((before, after)) = comment.split_once(word) else {
        return false;
    };
    let inside = |c: char| c.is_alphanumeric() || c == '_' || c == '`';
    !before.ends_with(inside) && !after.starts_with(|c| inside(c) || c == '(')
}

/// Files of a few hundred lines.
pub(crate) fn lengths(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, text) in tree.sources() {
        let lines = text.lines().count();
        let allowed = LONGER
            .iter()
            .find(|(name, _)| *name == path)
            .map_or(LINES_MAX, |(_, lines)| *lines);
        if lines > allowed {
            let text = format!("{lines} lines, {allowed} allowed; split it by question");
            found.push(Finding::new(path, 0, text));
        }
    }
    for (path, _) in LONGER.iter().filter(|(path, _)| !tree.has(path)) {
        found.push(Finding::new(
            path,
            0,
            "gone; take it out of LONGER in xtask",
        ));
    }
    found
}

/// Places that exist on one machine only, and hosts of package registries.
fn private_places() -> Vec<String> {
    let joined = |parts: &[&str]| parts.concat();
    vec![
        joined(&["/ho", "me/"]),
        joined(&["/ro", "ot/"]),
        joined(&["/Us", "ers/"]),
        joined(&["/wo", "rk/"]),
        joined(&["/tmp", "/k/"]),
        joined(&["../sha", "red"]),
        joined(&["registry.npm", "js.org"]),
        joined(&["py", "pi.org"]),
        joined(&["files.python", "hosted.org"]),
        joined(&["index.crates", ".io"]),
        joined(&["static.crates", ".io"]),
        joined(&["proxy.gol", "ang.org"]),
    ]
}

/// Nothing in the repository depends on one machine or names a registry host.
pub(crate) fn places(tree: &Tree) -> Vec<Finding> {
    let private = private_places();
    let mut found = Vec::new();
    let checked = |(path, _): &(&str, &str)| *path != "Cargo.lock" && !is_recording(path);
    for (path, text) in tree.texts().filter(checked) {
        for (index, line) in text.lines().enumerate() {
            if let Some(place) = private.iter().find(|place| names_place(line, place)) {
                let text =
                    format!("`{place}` is a place of one machine or a registry; leave it out");
                found.push(Finding::new(path, index + 1, text));
            }
        }
    }
    found
}

/// Whether the place begins a path here, and is not the middle of a longer one.
fn names_place(line: &str, place: &str) -> bool {
    line.match_indices(place).any(|(at, _)| {
        let before = line.get(..at).and_then(|text| text.chars().next_back());
        let inside = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | '}');
        !place.starts_with('/') || !before.is_some_and(inside)
    })
}

/// Captures and raw results are kept as they were made.
fn is_recording(path: &str) -> bool {
    let data = path.starts_with("testdata/") || path.starts_with("bench/");
    data && !path.ends_with("README.md")
}

/// One integration binary a crate: one link step, not ten.
pub(crate) fn test_binaries(tree: &Tree) -> Vec<Finding> {
    let extra = |path: &&str| {
        let parts: Vec<_> = path.split('/').collect();
        let in_tests = matches!(parts[..], ["crates", _, "tests", _]);
        let other_folder =
            matches!(parts[..], ["crates", _, "tests", folder, "main.rs"] if folder != "it");
        (in_tests && path.ends_with(".rs")) || other_folder
    };
    tree.names()
        .filter(extra)
        .map(|path| {
            let text = "a second integration binary; make it a module of tests/it/main.rs";
            Finding::new(path, 0, text)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(found: &[Finding]) -> Vec<(&str, usize)> {
        found
            .iter()
            .map(|finding| (finding.path.as_str(), finding.line))
            .collect()
    }

    #[test]
    fn a_source_without_header_is_found() {
        let tree = Tree::of(&[
            ("a.rs", "//! Yes.\n"),
            ("b.rs", "use a;\n"),
            ("c.md", "no\n"),
        ]);
        assert_eq!(lines(&headers(&tree)), [("b.rs", 1)]);
    }

    #[test]
    fn open_ends_need_a_place() {
        let todo = concat!("TO", "DO");
        let text =
            format!("//! H.\n// {todo}: later\n// {todo}(docs/x.md) fine\nlet {todo} = 1;\n");
        let tree = Tree::of(&[("a.rs", text.as_str())]);
        assert_eq!(lines(&open_ends(&tree)), [("a.rs", 2)]);
    }

    #[test]
    fn long_files_are_found_at_the_bound() {
        let at = "//! H.\n".repeat(LINES_MAX);
        let over = format!("{at}x\n");
        let tree = Tree::of(&[("at.rs", &at), ("over.rs", &over)]);
        assert_eq!(lines(&lengths(&tree)), [("over.rs", 0)]);
    }

    #[test]
    fn machine_places_are_found_and_urls_are_not() {
        let home = concat!("/ho", "me/x");
        let text = format!("see {home}\nhttps://a.example{home}\n");
        let tree = Tree::of(&[("a.md", text.as_str()), ("testdata/b.txt", text.as_str())]);
        assert_eq!(lines(&places(&tree)), [("a.md", 1)]);
    }

    #[test]
    fn only_one_integration_binary() {
        let tree = Tree::of(&[
            ("crates/a/tests/it/main.rs", ""),
            ("crates/a/tests/it/more.rs", ""),
            ("crates/a/tests/other.rs", ""),
            ("crates/a/tests/two/main.rs", ""),
        ]);
        let found = test_binaries(&tree);
        assert_eq!(
            lines(&found),
            [
                ("crates/a/tests/other.rs", 0),
                ("crates/a/tests/two/main.rs", 0)
            ]
        );
    }
}
