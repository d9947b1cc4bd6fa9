//! The folders of the frontend depend on one another in one direction.
//!
//! Answers: which top-level modules of the crate need each other in a circle, and by which lines? An edge is a path
//! from one of them into another: `crate::…`, `super::…` that leaves the module, or a name that `lib.rs` takes over
//! from a module. `lib.rs` itself is no module. Tests are left out.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::tidy::Finding;
use crate::tidy::words::{self, Word};
use crate::tree::Tree;

/// The crate that is looked at.
const CRATE: &str = "crates/frontend";
/// Modules that the largest circle may have. Only lower it; the aim is 0.
const ALLOWED: usize = 0;

/// A circle that is larger than it may be.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    check_below(&Edges::of(tree, CRATE), ALLOWED)
}

/// How large the largest circle is, as one line.
pub(crate) fn state(tree: &Tree) -> String {
    let edges = Edges::of(tree, CRATE);
    let (size, all) = (edges.largest_circle().len(), edges.modules.len());
    format!("{CRATE}: {size} of {all} modules in the largest cycle, {ALLOWED} allowed")
}

fn check_below(edges: &Edges, allowed: usize) -> Vec<Finding> {
    let circle = edges.largest_circle();
    if circle.len() <= allowed {
        return Vec::new();
    }
    let members: Vec<_> = circle.iter().map(String::as_str).collect();
    let text = format!(
        "{} modules depend on each other in a cycle, {allowed} allowed: {}; the shortest: {}; hand over what is \
         used, or move it to the folder that uses it",
        circle.len(),
        members.join(", "),
        edges.shortest_round(&circle)
    );
    vec![Finding::new(&format!("{CRATE}/src"), 0, text)]
}

/// Which top-level modules name which others, and where first.
#[derive(Debug, Default)]
struct Edges {
    modules: BTreeSet<String>,
    needs: BTreeMap<String, BTreeMap<String, String>>,
}

impl Edges {
    fn of(tree: &Tree, folder: &str) -> Self {
        let sources = words::sources(tree, folder);
        let modules: BTreeSet<String> = sources
            .iter()
            .filter_map(|(name, _)| module_path(name).first().map(ToString::to_string))
            .collect();
        let root = sources
            .iter()
            .find(|(name, _)| *name == "lib.rs")
            .map_or(&[][..], |(_, words)| words);
        let taken_over = taken_over(root, &modules);
        let mut edges = Self {
            modules,
            needs: BTreeMap::new(),
        };
        for (name, words) in &sources {
            let module = module_path(name);
            let Some(from) = module.first() else { continue };
            for path in paths(words, &module) {
                let Some(first) = path.parts.first() else {
                    continue;
                };
                let to = match edges.modules.get(*first) {
                    Some(module) => module,
                    None => match taken_over.get(*first) {
                        Some(module) => module,
                        None => continue,
                    },
                };
                if to != from {
                    let place = format!("{name}:{}", path.line);
                    let needs = edges.needs.entry((*from).to_owned()).or_default();
                    needs.entry(to.clone()).or_insert(place);
                }
            }
        }
        edges
    }

    fn next(&self, from: &str) -> impl Iterator<Item = (&str, &str)> {
        let needs = self.needs.get(from).into_iter().flatten();
        needs.map(|(to, place)| (to.as_str(), place.as_str()))
    }

    fn reached_from(&self, from: &str) -> BTreeSet<&str> {
        let mut seen = BTreeSet::new();
        let mut open: Vec<&str> = self.next(from).map(|(to, _)| to).collect();
        while let Some(at) = open.pop() {
            if seen.insert(at) {
                open.extend(self.next(at).map(|(to, _)| to));
            }
        }
        seen
    }

    /// The most modules of which each reaches each other one; none where there is no circle.
    fn largest_circle(&self) -> BTreeSet<String> {
        let reached: BTreeMap<&str, BTreeSet<&str>> = self
            .modules
            .iter()
            .map(|module| (module.as_str(), self.reached_from(module)))
            .collect();
        let circle = |start: &str| -> BTreeSet<String> {
            let back = |module: &&&str| reached.get(**module).is_some_and(|r| r.contains(start));
            let members = reached.get(start).into_iter().flatten().filter(back);
            members.map(ToString::to_string).collect()
        };
        let circles = self.modules.iter().map(|module| circle(module));
        circles.max_by_key(BTreeSet::len).unwrap_or_default()
    }

    /// The fewest steps from a member to itself, with the line that takes each.
    fn shortest_round(&self, circle: &BTreeSet<String>) -> String {
        let rounds = circle.iter().filter_map(|start| self.round(start));
        let shortest = rounds.min_by_key(Vec::len).unwrap_or_default();
        let first = shortest.first().map_or("", |(from, _)| from);
        let steps: Vec<_> = shortest
            .iter()
            .map(|(from, place)| format!("{from} → ({place})"))
            .collect();
        format!("{} {first}", steps.join(" "))
    }

    /// The way from a module to itself: each module left, and where.
    fn round(&self, start: &str) -> Option<Vec<(&str, &str)>> {
        let mut came: BTreeMap<&str, (&str, &str)> = BTreeMap::new();
        let mut open = VecDeque::from([start]);
        while let Some(at) = open.pop_front() {
            for (to, place) in self.next(at) {
                if came.contains_key(to) {
                    continue;
                }
                let (from, _) = self.needs.get_key_value(at)?;
                came.insert(to, (from, place));
                open.push_back(to);
            }
        }
        let mut way = Vec::new();
        let mut at = start;
        loop {
            let (from, place) = came.get(at)?;
            way.push((*from, *place));
            at = from;
            if at == start {
                way.reverse();
                return Some(way);
            }
        }
    }
}

/// The module that a file is: `[]` for `lib.rs`, `["a", "b"]` for `a/b.rs`.
fn module_path(name: &str) -> Vec<&str> {
    let mut parts: Vec<&str> = name.trim_end_matches(".rs").split('/').collect();
    if matches!(parts[..], ["lib" | "main"]) || parts.last() == Some(&"mod") {
        parts.pop();
    }
    parts
}

/// Names that `lib.rs` has from a module: `pub use app::App` makes `crate::App` one of `app`.
fn taken_over(root: &[Word<'_>], modules: &BTreeSet<String>) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for (at, word) in root.iter().enumerate() {
        if word.text != "use" {
            continue;
        }
        let mut start = at + 1;
        while matches!(text(root, start), "crate" | "self" | "::") {
            start += 1;
        }
        let mut leaves = Vec::new();
        leaves_of(root, start, &[], &mut leaves);
        for (parts, _) in leaves {
            if let [first, .., last] = parts[..]
                && let Some(module) = modules.get(first)
            {
                found.insert(last.to_owned(), module.clone());
            }
        }
    }
    found
}

/// A path from the root of the crate.
struct Path<'a> {
    parts: Vec<&'a str>,
    line: usize,
}

/// Every path of a file that begins with `crate`, `self` or `super`, seen from the root.
fn paths<'a>(words: &[Word<'a>], module: &[&'a str]) -> Vec<Path<'a>> {
    let mut found = Vec::new();
    // Modules that are written out in the file, and other braces.
    let mut blocks: Vec<Option<&str>> = Vec::new();
    let mut at = 0;
    while let Some(word) = words.get(at) {
        match word.text {
            "{" => {
                let named = at >= 2 && text(words, at - 2) == "mod";
                blocks.push(named.then(|| text(words, at - 1)));
            }
            "}" => {
                blocks.pop();
            }
            "crate" | "self" | "super" if text(words, at + 1) == "::" => {
                let mut base: Vec<&str> = match word.text {
                    "crate" => Vec::new(),
                    _ => module
                        .iter()
                        .copied()
                        .chain(blocks.iter().flatten().copied())
                        .collect(),
                };
                if word.text == "super" {
                    base.pop();
                }
                at += 2;
                while text(words, at) == "super" {
                    base.pop();
                    at += 2;
                }
                let mut leaves = Vec::new();
                at = leaves_of(words, at, &base, &mut leaves);
                found.extend(leaves.into_iter().map(|(parts, line)| Path { parts, line }));
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    found
}

fn text<'a>(words: &[Word<'a>], at: usize) -> &'a str {
    words.get(at).map_or("", |word| word.text)
}

/// Reads a path or a tree of them from `at` on; the leaves go to `leaves` under the name they get. Returns where it
/// ends.
fn leaves_of<'a>(
    words: &[Word<'a>],
    mut at: usize,
    base: &[&'a str],
    leaves: &mut Vec<(Vec<&'a str>, usize)>,
) -> usize {
    let mut parts = base.to_vec();
    loop {
        let Some(word) = words.get(at) else { return at };
        if word.text == "{" {
            at += 1;
            while !matches!(text(words, at), "}" | "") {
                let before = at;
                at = leaves_of(words, at, &parts, leaves);
                if text(words, at) == "," || at == before {
                    at += 1;
                }
            }
            return at + 1;
        }
        match word.text {
            // `{self}` is what stands before it.
            "self" => {}
            "super" => {
                parts.pop();
            }
            name => parts.push(name),
        }
        at += 1;
        if text(words, at) == "::" && text(words, at + 1) != "<" {
            at += 1;
            continue;
        }
        if text(words, at) == "as" {
            parts.pop();
            parts.push(text(words, at + 1));
            at += 2;
        }
        leaves.push((parts, word.line));
        return at;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edges(files: &[(&str, &str)]) -> Edges {
        let named: Vec<_> = files
            .iter()
            .map(|(name, text)| (format!("{CRATE}/src/{name}"), *text))
            .collect();
        let files: Vec<_> = named
            .iter()
            .map(|(name, text)| (name.as_str(), *text))
            .collect();
        Edges::of(&Tree::of(&files), CRATE)
    }

    fn shown(edges: &Edges) -> Vec<String> {
        let show = |(from, needs): (&String, &BTreeMap<String, String>)| {
            let each = needs
                .iter()
                .map(|(to, place)| format!("{from}→{to} {place}"));
            each.collect::<Vec<_>>()
        };
        edges.needs.iter().flat_map(show).collect()
    }

    #[test]
    fn every_form_of_a_path_is_an_edge() {
        let edges = edges(&[
            (
                "lib.rs",
                "mod a; mod b; pub use self::a::{One, inner::{self, Two as Three}};",
            ),
            ("a.rs", "//! crate::zero\nuse crate::{b::X,\n c};\n"),
            (
                "b/mod.rs",
                "fn f() { super::d::g::<u8>(\"crate::h\"); self::inner::x(); }",
            ),
            (
                "b/deep.rs",
                "use super::{mod_item, super::e};\nuse super::super::f;",
            ),
            ("c.rs", "fn f() -> crate::One { crate::Three::new() }"),
            ("d.rs", "mod g { use super::h; use super::super::i; }"),
            ("e.rs", "use kvasir_types::b; use other::crate_b;"),
            ("f.rs", "#[cfg(test)]\nmod tests { use crate::a; }"),
            ("i.rs", "pub(crate) struct I;"),
        ]);
        assert_eq!(
            shown(&edges),
            [
                "a→b a.rs:2",
                "a→c a.rs:3",
                "b→d b/mod.rs:1",
                "b→e b/deep.rs:1",
                "b→f b/deep.rs:2",
                "c→a c.rs:1",
                "d→i d.rs:1",
            ]
        );
    }

    #[test]
    fn the_largest_circle_is_found_and_a_line_of_modules_is_none() {
        let line = edges(&[
            ("a.rs", "use crate::b;"),
            ("b.rs", "use crate::c;"),
            ("c.rs", ""),
        ]);
        assert_eq!(line.largest_circle().len(), 0);
        assert_eq!(check_below(&line, 0), []);

        let circles = edges(&[
            ("a.rs", "use crate::b;"),
            ("b.rs", "use crate::a;"),
            ("x.rs", "use crate::y;"),
            ("y.rs", "\nuse crate::z;"),
            ("z.rs", "use crate::x;\nuse crate::a;"),
        ]);
        let circle: Vec<_> = circles.largest_circle().into_iter().collect();
        assert_eq!(circle, ["x", "y", "z"]);
        assert_eq!(check_below(&circles, 3), []);
        let [finding] = &check_below(&circles, 2)[..] else {
            panic!("one finding")
        };
        let shortest = "the shortest: x → (x.rs:1) y → (y.rs:2) z → (z.rs:1) x;";
        assert!(
            finding
                .text
                .starts_with("3 modules depend on each other in a cycle, 2 allowed: x, y, z;")
        );
        assert!(finding.text.contains(shortest), "{finding}");
    }
}
