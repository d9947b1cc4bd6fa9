//! The house rules, as code.
//!
//! Answers: where does the tree break a rule, and what is to be done there? Each rule is a
//! function from the [`Tree`] to findings; each has a test that it can fail.
//!
//! Elsewhere: what the compiler and clippy check already (`Cargo.toml`, `clippy.toml`).

mod blocks;
mod book;
mod changelog;
mod cycles;
mod depth;
mod host;
mod links;
mod manifest;
mod metrics;
mod names;
mod options;
mod purity;
mod source;
mod words;

use std::fmt;

use crate::docs;
use crate::tree::Tree;

/// A broken rule: where, what, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    pub(crate) path: String,
    /// From 1; 0 means the file as a whole.
    pub(crate) line: usize,
    pub(crate) text: String,
}

impl Finding {
    pub(crate) fn new(path: &str, line: usize, text: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            line,
            text: text.into(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.text),
            line => write!(f, "{}:{line}: {}", self.path, self.text),
        }
    }
}

/// Runs every rule and prints what it finds; true when the tree is tidy.
pub(crate) fn run(tree: &Tree) -> bool {
    let findings = findings(tree);
    for finding in &findings {
        eprintln!("{finding}");
    }
    println!("tidy: {}", cycles::state(tree));
    println!("tidy: {}", names::state(tree));
    match findings.len() {
        0 => println!("tidy: {} files, nothing to say", tree.names().count()),
        count => eprintln!("tidy: {count} to mend"),
    }
    findings.is_empty()
}

fn findings(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    found.extend(source::headers(tree));
    found.extend(source::open_ends(tree));
    found.extend(source::lengths(tree));
    found.extend(source::places(tree));
    found.extend(source::test_binaries(tree));
    found.extend(manifest::check(tree));
    found.extend(purity::ambient_calls(tree));
    found.extend(purity::dependencies(tree));
    found.extend(host::check(tree));
    found.extend(cycles::check(tree));
    found.extend(depth::check(tree));
    found.extend(names::check(tree));
    found.extend(links::check(tree));
    found.extend(blocks::check(tree));
    found.extend(book::check(tree));
    found.extend(changelog::fragments(tree));
    found.extend(changelog::decisions(tree));
    found.extend(changelog::recordings(tree));
    found.extend(options::statuses(tree));
    found.extend(metrics::unwritten(tree));
    found.extend(docs::stale(tree));
    found.sort();
    found
}
