//! Every page of the documents is in the site.
//!
//! Answers: which page does `docs/SUMMARY.md`, from which mdbook builds the site, leave out? Decisions are put in by `xtask/book.py`.

use crate::tidy::Finding;
use crate::tree::{Tree, has_extension};

const SUMMARY: &str = "docs/SUMMARY.md";

/// Checks that each page is listed.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let Some(summary) = tree.text(SUMMARY) else {
        return Vec::new();
    };
    tree.names()
        .filter_map(|path| Some((path, path.strip_prefix("docs/")?)))
        .filter(|(path, page)| {
            has_extension(page, "md") && *path != SUMMARY && !page.starts_with("decisions/")
        })
        .filter(|(_, page)| !summary.contains(&format!("]({page})")))
        .map(|(path, page)| {
            let text = format!("not in the site; add [title]({page}) to {SUMMARY}");
            Finding::new(path, 0, text)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_not_listed_is_found() {
        let summary = "- [A](guide/a.md)\n";
        let tree = Tree::of(&[
            (SUMMARY, summary),
            ("docs/guide/a.md", ""),
            ("docs/guide/b.md", ""),
            ("docs/decisions/0001-x.md", ""),
            ("docs/images/c.png", ""),
        ]);
        let told: Vec<_> = check(&tree).iter().map(ToString::to_string).collect();
        let line = "docs/guide/b.md: not in the site; add [title](guide/b.md) to docs/SUMMARY.md";
        assert_eq!(told, [line]);
    }
}
