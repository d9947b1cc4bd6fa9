//! What a developer has changed.
//!
//! Answers: which packages have a file that differs from main, or from the last commit where there is no main to compare with?

use std::collections::BTreeSet;
use std::process::Command;

use crate::tree::Tree;

/// The changed packages that are still there, each once.
pub(crate) fn packages(tree: &Tree) -> Vec<String> {
    let git = |args: &[&str]| {
        let output = Command::new("git")
            .args(args)
            .current_dir(&tree.root)
            .output();
        let told = output.ok().filter(|output| output.status.success());
        told.map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let base = git(&["merge-base", "HEAD", "origin/main"]);
    let base = base.as_deref().map_or("HEAD", str::trim);
    let differ = git(&["diff", "--name-only", base]).unwrap_or_default();
    let new = git(&["ls-files", "--others", "--exclude-standard"]).unwrap_or_default();
    owners(tree, differ.lines().chain(new.lines()))
}

/// The packages that files belong to.
fn owners<'a>(tree: &Tree, paths: impl Iterator<Item = &'a str>) -> Vec<String> {
    let owner = |path: &str| {
        let (folder, name) = match path.split('/').collect::<Vec<_>>()[..] {
            ["crates", name, _, ..] => (format!("crates/{name}"), format!("kvasir-{name}")),
            ["bench", "faults", _, ..] => ("bench/faults".into(), "kvasir-faults".into()),
            ["xtask", "src", ..] => ("xtask".into(), "xtask".into()),
            _ => return None,
        };
        let is_there = tree.text(&format!("{folder}/Cargo.toml")).is_some();
        is_there.then(|| name.replace('_', "-"))
    };
    let names: BTreeSet<String> = paths.filter_map(owner).collect();
    names.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_changes_its_package() {
        let tree = Tree::of(&[
            ("crates/kv_events/Cargo.toml", ""),
            ("bench/faults/Cargo.toml", ""),
            ("xtask/Cargo.toml", ""),
        ]);
        let paths = [
            "crates/kv_events/src/lib.rs",
            "crates/kv_events/Cargo.toml",
            "crates/gone/src/lib.rs",
            "bench/faults/src/main.rs",
            "docs/guide/a.md",
            "xtask/book.py",
        ];
        let found = owners(&tree, paths.into_iter());
        assert_eq!(found, ["kvasir-faults", "kvasir-kv-events"]);
    }
}
