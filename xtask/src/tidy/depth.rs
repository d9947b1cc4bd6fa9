//! How many crates of ours stand on each other.
//!
//! Answers: how long is the longest chain of our own crates, each a dependency of the one before? A change at the
//! bottom of a long chain rebuilds everything in turn, and a reader must know each step of it.

use std::collections::BTreeMap;

use toml::de::{DeTable, DeValue};

use crate::tidy::Finding;
use crate::tree::Tree;

/// Crates in the longest chain, both ends counted.
const DEPTH_MAX: usize = 7;

type Edges = BTreeMap<String, Vec<String>>;

/// The longest chain, if it is too long.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let manifests = tree.texts().filter(|(path, _)| {
        (path.starts_with("crates/") || path.starts_with("bindings/"))
            && path.ends_with("/Cargo.toml")
    });
    let edges: Edges = manifests.filter_map(|(_, text)| edges_of(text)).collect();
    let mut known = BTreeMap::new();
    let longest = edges
        .keys()
        .map(|name| chain(name, &edges, &mut known))
        .max_by_key(Vec::len)
        .unwrap_or_default();
    if longest.len() <= DEPTH_MAX {
        return Vec::new();
    }
    let text = format!(
        "{} crates stand on each other, at most {DEPTH_MAX} may: {}",
        longest.len(),
        longest.join(" > ")
    );
    vec![Finding::new("Cargo.toml", 0, text)]
}

/// A crate's name and those of ours that it needs when it is built for use.
fn edges_of(manifest: &str) -> Option<(String, Vec<String>)> {
    let parsed = DeTable::parse(manifest).ok()?.into_inner();
    let table = |name: &str| match parsed.get(name).map(|value| value.get_ref()) {
        Some(DeValue::Table(table)) => Some(table),
        _ => None,
    };
    let Some(DeValue::String(name)) = table("package")?.get("name").map(|v| v.get_ref()) else {
        return None;
    };
    let needs = table("dependencies").into_iter().flat_map(|needs| {
        let names = needs.keys().map(|name| name.get_ref().as_ref());
        names
            .filter(|name| name.starts_with("kvasir-"))
            .map(str::to_owned)
    });
    Some((name.to_string(), needs.collect()))
}

/// The longest chain that begins at `name`. Cargo refuses cycles, so this ends.
fn chain(name: &str, edges: &Edges, known: &mut BTreeMap<String, Vec<String>>) -> Vec<String> {
    if let Some(chain) = known.get(name) {
        return chain.clone();
    }
    let needs = edges.get(name).map(Vec::as_slice).unwrap_or_default();
    let below = needs
        .iter()
        .map(|need| chain(need, edges, known))
        .max_by_key(Vec::len)
        .unwrap_or_default();
    let whole: Vec<_> = std::iter::once(name.to_owned()).chain(below).collect();
    known.insert(name.to_owned(), whole.clone());
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(crates: usize) -> Vec<Finding> {
        let manifest = |at: usize| {
            let need = if at + 1 < crates {
                format!("kvasir-{}.workspace = true", at + 1)
            } else {
                String::new()
            };
            format!("[package]\nname = \"kvasir-{at}\"\n[dependencies]\n{need}\n")
        };
        let files: Vec<_> = (0..crates)
            .map(|at| (format!("crates/{at}/Cargo.toml"), manifest(at)))
            .collect();
        let files: Vec<_> = files
            .iter()
            .map(|(path, text)| (path.as_str(), text.as_str()))
            .collect();
        check(&Tree::of(&files))
    }

    #[test]
    fn a_chain_of_seven_passes_and_one_of_eight_is_named() {
        assert_eq!(found(7), []);
        let chain =
            "kvasir-0 > kvasir-1 > kvasir-2 > kvasir-3 > kvasir-4 > kvasir-5 > kvasir-6 > kvasir-7";
        let text = format!("8 crates stand on each other, at most 7 may: {chain}");
        assert_eq!(found(8), [Finding::new("Cargo.toml", 0, text)]);
    }

    #[test]
    fn what_only_tests_need_does_not_count() {
        let text =
            "[package]\nname = \"kvasir-a\"\n[dev-dependencies]\nkvasir-b.workspace = true\n";
        let (name, needs) = edges_of(text).unwrap();
        assert_eq!((name.as_str(), needs), ("kvasir-a", Vec::new()));
    }
}
