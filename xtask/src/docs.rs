//! Generated pages.
//!
//! Answers: which pages come from code, and are they as the code would write them now?

use crate::tidy::Finding;
use crate::tree::Tree;

/// Every generated page: its path and what it should say.
fn pages() -> Vec<(&'static str, String)> {
    let metrics = kvasir_telemetry::metrics_reference(kvasir_telemetry::SPECS);
    vec![
        ("docs/reference/metrics.md", metrics),
        ("docs/reference/options.md", kvasir_config::reference_page()),
    ]
}

/// Writes the pages that differ; true unless a file cannot be written.
pub(crate) fn write(tree: &Tree) -> bool {
    let mut written = true;
    for (path, text) in pages() {
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
    pages()
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
        let fresh: Vec<_> = pages();
        let files: Vec<_> = fresh
            .iter()
            .map(|(path, text)| (*path, text.as_str()))
            .collect();
        assert_eq!(stale(&Tree::of(&files)), []);
        let changed: Vec<_> = fresh.iter().map(|(path, _)| (*path, "edited")).collect();
        assert_eq!(stale(&Tree::of(&changed)).len(), fresh.len());
        assert_eq!(stale(&Tree::of(&[])).len(), fresh.len());
    }
}
