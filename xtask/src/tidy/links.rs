//! Every path and every heading that a page names exists.
//!
//! Answers: which pages send their reader to a file or a place in it that is not there? Looked at are
//! links of Markdown, and words in backticks whose first part is a folder of the repository.

use crate::tidy::Finding;
use crate::tree::{Tree, has_extension};

/// Names that appear when the repository is used and are not kept in it.
const MADE_LATER: &[&str] = &["target", ".venv", ".test-tools", ".cargo-home"];

/// Checks every page of the repository.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, text) in tree.texts().filter(|(path, _)| is_page(path)) {
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let mut in_code = false;
        for (index, line) in text.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                in_code = !in_code;
                continue;
            }
            if in_code {
                continue;
            }
            let dead_links = links(line).filter(|link| !exists(tree, path, folder, link));
            let dead_words =
                words(line).filter(|word| is_path(tree, word) && !tree.has(bare(word)));
            for dead in dead_links.chain(dead_words) {
                let text = format!("`{dead}` does not exist; mend the path or take it out");
                found.push(Finding::new(path, index + 1, text));
            }
        }
    }
    found
}

fn is_page(path: &str) -> bool {
    let skipped = path.starts_with("changelog.d/") || path.starts_with("testdata/");
    has_extension(path, "md") && !skipped && path != "CHANGELOG.md"
}

/// Targets of links on a line, those into the web left out.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .filter(|link| !link.contains("://") && !link.starts_with("mailto:"))
}

fn exists(tree: &Tree, page: &str, folder: &str, link: &str) -> bool {
    let (target, place) = link.split_once('#').unwrap_or((link, ""));
    let target = match target {
        "" => page.to_owned(),
        target => resolve(folder, target),
    };
    let is_there = target.is_empty() || tree.has(&target);
    is_there && (place.is_empty() || headings(tree, &target).any(|heading| heading == place))
}

/// A path from the root of the repository.
fn resolve(folder: &str, target: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            name => parts.push(name),
        }
    }
    parts.join("/")
}

/// What links call the headings of a page: as web sites for Markdown and mdbook make it from their text.
fn headings<'a>(tree: &'a Tree, page: &str) -> impl Iterator<Item = String> + 'a {
    let mut in_code = false;
    let lines = tree.text(page).unwrap_or_default().lines();
    lines.filter_map(move |line| {
        in_code ^= line.trim_start().starts_with("```");
        let title = line.trim_start_matches('#').strip_prefix(' ')?;
        (!in_code && line.starts_with('#')).then(|| place_of(title))
    })
}

fn place_of(title: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || " -_".contains(*c);
    let lower = title.trim().to_lowercase();
    lower
        .chars()
        .filter(kept)
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

/// Words in backticks on a line.
fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// Whether a word means a path here: of plain characters, and below a folder that exists.
fn is_path(tree: &Tree, word: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    let Some((first, rest)) = bare(word).split_once('/') else {
        return false;
    };
    let usual = !rest.is_empty() && word.chars().all(plain) && !word.contains("NNNN");
    usual && !MADE_LATER.contains(&first) && !first.is_empty() && tree.has(first)
}

fn bare(word: &str) -> &str {
    word.trim_start_matches("./")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_links_and_paths_are_found_and_others_are_not() {
        let page = "\
[here](../crates/a/src/lib.rs) [gone](../crates/b) [web](https://x.example/y)
`crates/a/src/lib.rs` `crates/a/` `crates/b/src` `--flag` `a/b` `docs/decisions/NNNN-title.md`
```
`crates/c/src`
```
`crates/a/*.rs` `target/release/kvasir`
";
        let tree = Tree::of(&[("docs/guide.md", page), ("crates/a/src/lib.rs", "")]);
        let texts: Vec<_> = check(&tree).iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                "docs/guide.md:1: `../crates/b` does not exist; mend the path or take it out",
                "docs/guide.md:2: `crates/b/src` does not exist; mend the path or take it out",
            ]
        );
    }

    #[test]
    fn headings_are_found_as_links_call_them() {
        let page = "\
# Health: `/live`, and the end
[a](#health-live-and-the-end) [b](#top) [c](b.md#two_words-here) [d](b.md#code)
";
        let other = "## Two_words-here\n```sh\n# code\n```\n";
        let tree = Tree::of(&[("docs/a.md", page), ("docs/b.md", other)]);
        let texts: Vec<_> = check(&tree).iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                "docs/a.md:2: `#top` does not exist; mend the path or take it out",
                "docs/a.md:2: `b.md#code` does not exist; mend the path or take it out",
            ]
        );
    }
}
