//! Rules about manifests: lints and versions come from the workspace.

use toml::de::{DeTable, DeValue};

use crate::tidy::Finding;
use crate::tree::Tree;

/// Every member uses the workspace's lints, package fields and versions.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let member = |path: &&str| {
        let of_ours = ["bindings/", "crates/", "xtask/"];
        of_ours.iter().any(|folder| path.starts_with(folder)) && path.ends_with("/Cargo.toml")
    };
    let manifests = tree.texts().filter(|(path, _)| member(path));
    let mut found: Vec<_> = manifests
        .flat_map(|(path, text)| check_one(path, text))
        .collect();
    found.extend(
        tree.text("Cargo.toml")
            .and_then(|text| order("Cargo.toml", text)),
    );
    found
}

fn check_one(path: &str, text: &str) -> Vec<Finding> {
    let parsed = match DeTable::parse(text) {
        Ok(parsed) => parsed.into_inner(),
        Err(error) => {
            return vec![Finding::new(
                path,
                0,
                format!("not TOML: {}", error.message()),
            )];
        }
    };
    let mut found = Vec::new();
    let lints =
        table(parsed.get("lints").map(|v| v.get_ref())).and_then(|lints| lints.get("workspace"));
    if !matches!(lints.map(|v| v.get_ref()), Some(DeValue::Boolean(true))) {
        found.push(Finding::new(path, 0, "add [lints] workspace = true"));
    }
    let package = table(parsed.get("package").map(|v| v.get_ref()));
    for field in ["version", "edition", "rust-version", "license", "publish"] {
        let value = package.and_then(|package| package.get(field));
        if !matches!(value.map(|v| v.get_ref()), Some(DeValue::Table(_))) {
            found.push(Finding::new(
                path,
                0,
                format!("write {field}.workspace = true"),
            ));
        }
    }
    for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
        let Some(entries) = table(parsed.get(section).map(|v| v.get_ref())) else {
            continue;
        };
        for (name, value) in entries {
            let from_workspace = table(Some(value.get_ref()))
                .and_then(|entry| entry.get("workspace"))
                .is_some_and(|flag| matches!(flag.get_ref(), DeValue::Boolean(true)));
            if !from_workspace {
                let line = line_of(text, name.span().start);
                let name = name.get_ref();
                let text = format!(
                    "{name}: put the version in [workspace.dependencies] and write \
                     {name}.workspace = true"
                );
                found.push(Finding::new(path, line, text));
            }
        }
    }
    found
}

/// Names in `[workspace.dependencies]` stand in alphabetical order, ours first.
fn order(path: &str, text: &str) -> Option<Finding> {
    let parsed = DeTable::parse(text).ok()?.into_inner();
    let workspace = table(parsed.get("workspace").map(|v| v.get_ref()))?;
    let entries = table(workspace.get("dependencies").map(|v| v.get_ref()))?;
    let mut names: Vec<_> = entries
        .keys()
        .map(|name| (name.span().start, name.get_ref().as_ref()))
        .collect();
    names.sort_unstable();
    let rank = |name: &str| (!name.starts_with("kvasir-"), name.to_owned());
    let wrong = names
        .windows(2)
        .find(|pair| rank(pair[0].1) > rank(pair[1].1))?;
    let line = line_of(text, wrong[1].0);
    Some(Finding::new(
        path,
        line,
        format!("{} is out of alphabetical order", wrong[1].1),
    ))
}

fn table<'a, 'i>(value: Option<&'a DeValue<'i>>) -> Option<&'a DeTable<'i>> {
    if let Some(DeValue::Table(table)) = value {
        Some(table)
    } else {
        None
    }
}

fn line_of(text: &str, offset: usize) -> usize {
    text.get(..offset)
        .map_or(1, |before| before.matches('\n').count() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "\
[package]
name = \"a\"
version.workspace = true
edition.workspace = true
rust-version.workspace = true
license.workspace = true
publish.workspace = true

[dependencies]
x.workspace = true
y = { workspace = true, optional = true }

[lints]
workspace = true
";

    fn texts(manifest: &str) -> Vec<String> {
        let tree = Tree::of(&[("crates/a/Cargo.toml", manifest)]);
        check(&tree).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_good_manifest_passes() {
        assert_eq!(texts(GOOD), [""; 0]);
    }

    #[test]
    fn versions_and_own_lints_are_found_with_their_line() {
        let own = GOOD
            .replace("x.workspace = true", "x = \"1.0\"")
            .replace("[lints]\nworkspace = true", "");
        let found = texts(&own);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("[lints]"), "{found:?}");
        assert!(
            found[1].starts_with("crates/a/Cargo.toml:10: x: put"),
            "{found:?}"
        );
        assert!(
            texts(&GOOD.replace("edition.workspace = true", "edition = \"2021\""))[0]
                .contains("edition")
        );
    }

    #[test]
    fn workspace_dependencies_are_in_order() {
        let root = "[workspace.dependencies]\nkvasir-b = \"1\"\na = \"1\"\nc = \"1\"\nb = \"1\"\n";
        let tree = Tree::of(&[("Cargo.toml", root)]);
        assert_eq!(
            check(&tree),
            [Finding::new(
                "Cargo.toml",
                5,
                "b is out of alphabetical order"
            )]
        );
    }
}
