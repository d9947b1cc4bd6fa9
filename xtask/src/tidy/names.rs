//! A type has a name of its own within its crate.
//!
//! Answers: which `pub` structs, enums, traits and type aliases of one crate share a name? Whatever their visibility,
//! two types of one name in a crate are told apart only by their paths, which a reader does not see. Tests are left
//! out.

use std::collections::{BTreeMap, BTreeSet};

use crate::tidy::Finding;
use crate::tidy::words::{self, Word};
use crate::tree::Tree;

/// Names that may be declared twice. None is left.
const LEFT: &[&str] = &[];

/// Names that one crate declares more than once.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    check_but_for(tree, LEFT)
}

/// How many names are declared more than once, as one line.
pub(crate) fn state(tree: &Tree) -> String {
    let count = twice(tree).len();
    format!(
        "{count} type names are used twice in a crate, {} allowed",
        LEFT.len()
    )
}

fn check_but_for(tree: &Tree, left: &[&str]) -> Vec<Finding> {
    let found = twice(tree)
        .into_iter()
        .filter(|twice| !left.contains(&twice.name));
    found
        .map(|twice| {
            let Twice { name, places } = twice;
            let others: Vec<_> = places[1..]
                .iter()
                .map(|(path, line)| format!("{path}:{line}"))
                .collect();
            let text = format!(
                "type `{name}` is also declared in {}; rename one of them",
                others.join(", ")
            );
            Finding::new(&places[0].0, places[0].1, text)
        })
        .collect()
}

/// A name with every place of its declaration.
struct Twice<'a> {
    name: &'a str,
    places: Vec<(String, usize)>,
}

fn twice(tree: &Tree) -> Vec<Twice<'_>> {
    let crates: BTreeSet<&str> = tree
        .names()
        .filter_map(|path| path.strip_suffix("/Cargo.toml"))
        .collect();
    let mut found = Vec::new();
    for folder in crates {
        let mut places: BTreeMap<&str, Vec<(String, usize)>> = BTreeMap::new();
        for (name, words) in words::sources(tree, folder) {
            for declared in declarations(&words) {
                let place = (format!("{folder}/src/{name}"), declared.line);
                places.entry(declared.text).or_default().push(place);
            }
        }
        let several = places.into_iter().filter(|(_, places)| places.len() > 1);
        found.extend(several.map(|(name, places)| Twice { name, places }));
    }
    found
}

/// The names of types that are declared with `pub`, `pub(crate)` or `pub(super)`.
fn declarations<'a>(words: &[Word<'a>]) -> Vec<Word<'a>> {
    let text = |at: usize| words.get(at).map_or("", |word| word.text);
    let mut found = Vec::new();
    for (at, word) in words.iter().enumerate() {
        if word.text != "pub" {
            continue;
        }
        let mut kind = at + 1;
        if text(kind) == "(" {
            while !matches!(text(kind), ")" | "") {
                kind += 1;
            }
            kind += 1;
        }
        // A macro's variable is no name.
        if matches!(text(kind), "struct" | "enum" | "trait" | "type" | "union")
            && text(kind + 1) != "$"
        {
            found.extend(words.get(kind + 1).copied());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(files: &[(&str, &str)], left: &[&str]) -> Vec<String> {
        let found = check_but_for(&Tree::of(files), left);
        found.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_name_is_declared_once_in_a_crate_whatever_its_visibility() {
        let files = [
            ("crates/a/Cargo.toml", ""),
            (
                "crates/a/src/lib.rs",
                "pub struct One;\npub(crate) enum Two {}\npub trait Three {}\nstruct Four;\n",
            ),
            (
                "crates/a/src/x.rs",
                "pub(super) type Two = u8;\npub struct Four; // pub struct One;\n\"pub struct One;\"\n",
            ),
            (
                "crates/a/src/y.rs",
                "pub(in crate::y) struct Two;\n#[cfg(test)]\npub struct Three;\nfn f(pub_struct: One) {}",
            ),
            ("crates/a/src/y/tests.rs", "pub struct Four;"),
            (
                "crates/a/src/z.rs",
                "#[cfg(test)]\nmod tests;\nmacro_rules! m { () => { pub struct $name; pub enum $name {} } }",
            ),
            ("crates/a/src/z/tests.rs", "pub struct One;"),
            ("crates/b/Cargo.toml", ""),
            ("crates/b/src/lib.rs", "pub struct One;"),
            ("crates/b/tests/it/main.rs", "pub struct One;"),
        ];
        let found = texts(&files[..4], &[]);
        assert_eq!(
            found,
            [
                "crates/a/src/lib.rs:2: type `Two` is also declared in crates/a/src/x.rs:1, crates/a/src/y.rs:1; rename one of them"
            ]
        );
        assert_eq!(texts(&files, &["Two", "Four"]), [""; 0]);
        assert_eq!(texts(&files, &["One", "Four"]).len(), 1);
    }
}
