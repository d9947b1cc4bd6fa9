//! Tasks of the repository: `cargo xtask tidy | docs | dashboard | ci`.
//!
//! Answers: is the tree as the house wants it, are generated pages fresh, does everything pass?
//!
//! Elsewhere: preparing a machine (`./test`). Nothing here is needed to build or run Kvasir.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a tool for the terminal"
)]

mod c_header;
mod changed;
mod ci;
mod dashboard;
mod docs;
mod tidy;
mod tree;

use std::process::ExitCode;

use tree::Tree;

const USAGE: &str = "\
Usage: cargo xtask <task>

  tidy                 check the house rules
  docs [--check]       write the generated pages, or only compare them
  dashboard            compile the dashboard's TypeScript into dashboard/dist
  ci [--quick]         everything a change must pass; --quick what takes five minutes and needs no tools
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let tree = match Tree::open() {
        Ok(tree) => tree,
        Err(error) => {
            eprintln!("xtask: {error}");
            return ExitCode::from(2);
        }
    };
    let passed = match words[..] {
        ["tidy"] => tidy::run(&tree),
        ["docs"] => docs::write(&tree),
        ["docs", "--check"] => docs::check_and_tell(&tree),
        ["dashboard"] => dashboard::write(&tree),
        ["ci"] => ci::run(&tree, ci::Extent::Full),
        ["ci", "--quick"] => ci::run(&tree, ci::Extent::Quick),
        _ => {
            eprint!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
