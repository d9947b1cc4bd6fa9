//! The dashboard's compiled files.
//!
//! Answers: is `dashboard/dist` what the TypeScript compiler makes of `dashboard/src` now? The compiler is the one that
//! `./test` brings; nothing else of npm is used.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::tree::Tree;

/// Where the compiler is, and what it reads and writes.
const COMPILER: &str = ".test-tools/typescript/bin/tsc";
const PROJECT: &str = "dashboard";
const COMPILED: &str = "dashboard/dist";

/// Whether the compiler is here.
pub(crate) fn has_compiler(tree: &Tree) -> bool {
    tree.root.join(COMPILER).is_file()
}

/// Compiles into `dashboard/dist`; true if that worked.
pub(crate) fn write(tree: &Tree) -> bool {
    if !has_compiler(tree) {
        eprintln!("no {COMPILER}; ./test brings it");
        return false;
    }
    let to = tree.root.join(COMPILED);
    if let Err(error) = fs::remove_dir_all(&to)
        && error.kind() != io::ErrorKind::NotFound
    {
        eprintln!("{COMPILED}: {error}");
        return false;
    }
    compile(tree, &to)
}

/// Compiles elsewhere and compares; says which files are stale.
pub(crate) fn check(tree: &Tree) -> bool {
    let fresh = tree.root.join("target/dashboard-check");
    let _ = fs::remove_dir_all(&fresh);
    if !compile(tree, &fresh) {
        return false;
    }
    let kept = tree.root.join(COMPILED);
    let names: BTreeSet<PathBuf> = [&fresh, &kept]
        .into_iter()
        .flat_map(|folder| names(folder))
        .collect();
    let stale = |name: &&PathBuf| fs::read(fresh.join(name)).ok() != fs::read(kept.join(name)).ok();
    let stale: Vec<_> = names.iter().filter(stale).collect();
    for name in &stale {
        eprintln!(
            "{COMPILED}/{}: not what {PROJECT}/src compiles to; run cargo xtask dashboard",
            name.display()
        );
    }
    stale.is_empty()
}

fn names(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().into()).collect()
}

fn compile(tree: &Tree, to: &Path) -> bool {
    let status = Command::new("node")
        .arg(COMPILER)
        .args(["--project", PROJECT, "--outDir"])
        .arg(to)
        .current_dir(&tree.root)
        .status();
    match status {
        Ok(status) => status.success(),
        Err(error) => {
            eprintln!("node: {error}");
            false
        }
    }
}
