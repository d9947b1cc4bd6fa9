//! The status of an option says what is true.
//!
//! Answers: does anything read the options that claim to work, and does nothing read those that
//! claim to have no effect yet? A key is read where a crate other than `config` says
//! `keys::NAME`, or where the rules inside `config` act on it.

use std::collections::BTreeMap;

use kvasir_config::{Effect, Spec};

use crate::tidy::Finding;
use crate::tree::Tree;

const TABLE: &str = "crates/config/src/table/";
/// Parts of `config` that act on options themselves.
const ACTING: &[&str] = &["crates/config/src/rules.rs", "crates/config/src/invoke.rs"];

/// Compares every option's status with the sources.
pub(crate) fn statuses(tree: &Tree) -> Vec<Finding> {
    let readers = readers(tree);
    kvasir_config::options()
        .filter_map(|spec| complaint(spec, &readers, tree))
        .collect()
}

/// First reader of each key outside of `config`, and in its acting parts.
#[derive(Debug, Default)]
struct Readers {
    outside: BTreeMap<String, String>,
    inside: BTreeMap<String, String>,
}

fn readers(tree: &Tree) -> Readers {
    let mut readers = Readers::default();
    for (path, text) in tree.sources() {
        let into = if ACTING.contains(&path) {
            &mut readers.inside
        } else if path.starts_with("crates/config/") || is_test(path) {
            continue;
        } else {
            &mut readers.outside
        };
        for (index, line) in text.lines().enumerate() {
            for rest in line.split("keys::").skip(1) {
                let upper = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
                let key: String = rest.chars().take_while(|c| upper(*c)).collect();
                into.entry(key)
                    .or_insert_with(|| format!("{path}:{}", index + 1));
            }
        }
    }
    readers
}

fn is_test(path: &str) -> bool {
    path.contains("/tests/") || path.ends_with("/tests.rs")
}

fn complaint(spec: &Spec, readers: &Readers, tree: &Tree) -> Option<Finding> {
    let key = spec.name.to_uppercase().replace('-', "_");
    let outside = readers.outside.get(&key);
    let text = match (spec.effect, outside, readers.inside.get(&key)) {
        (Effect::Now | Effect::Partly(_), None, None) => format!(
            "--{} is marked effective, but no crate reads keys::{key}; read it or drop .effective()",
            spec.name
        ),
        (Effect::NotYet, Some(reader), _) => format!(
            "--{} is marked as without effect, but {reader} reads it; add .effective(), or \
             .partly(\"…\"), and run cargo xtask docs",
            spec.name
        ),
        _ => return None,
    };
    let (path, line) = row_of(tree, spec.name);
    Some(Finding::new(&path, line, text))
}

/// Where the row of an option stands.
fn row_of(tree: &Tree, name: &str) -> (String, usize) {
    let quoted = format!("= \"{name}\"");
    tree.sources()
        .filter(|(path, _)| path.starts_with(TABLE))
        .find_map(|(path, text)| {
            let line = text.lines().position(|line| line.contains(&quoted))?;
            Some((path.to_owned(), line + 1))
        })
        .unwrap_or_else(|| (TABLE.to_owned(), 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_false_status_is_found_either_way() {
        let not_yet = kvasir_config::options()
            .find(|spec| spec.effect == Effect::NotYet)
            .expect("some feature is always still to come");
        let key = not_yet.name.to_uppercase().replace('-', "_");
        let source = format!("//! H.\nfn f() {{ settings.get(keys::{key}) }}\n");
        let row = format!("X: bool = \"{}\";\n", not_yet.name);
        let tree = Tree::of(&[
            ("crates/a/src/lib.rs", &source),
            ("crates/config/src/table/t.rs", &row),
        ]);
        let found: Vec<_> = statuses(&tree).iter().map(ToString::to_string).collect();
        let about = |name: &str| {
            found
                .iter()
                .find(|text| text.contains(&format!("--{name} ")))
        };
        let text = about(not_yet.name).expect("a reader without .effective()");
        assert!(
            text.starts_with("crates/config/src/table/t.rs:1: "),
            "{text}"
        );
        assert!(text.contains("crates/a/src/lib.rs:2 reads it"), "{text}");
        let text = about("load-aware").expect("effective, and nobody reads it in this tree");
        assert!(text.contains("no crate reads keys::LOAD_AWARE"), "{text}");
    }
}
