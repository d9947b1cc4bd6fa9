//! Every shell block of a guide is run, or says why it is not.
//!
//! Answers: which commands on a page does nobody run? `tests/e2e/test_guides.py` runs each block in the language `sh` or
//! `console`, unless the line before it is `<!-- not run: REASON -->`. So commands must not hide in blocks of other languages
//! or in indented ones, and a reason must stand where it says something.

use crate::tidy::Finding;
use crate::tree::{Tree, has_extension};

/// Folders and pages whose blocks are run; the test has the same list.
const PAGES: &[&str] = &[
    "README.md",
    "deploy/README.md",
    "docs/start/",
    "docs/guide/",
];

/// What the run blocks are written as.
const SHELLS: &[&str] = &["sh", "console"];

/// Other names of the same.
const OTHER_SHELLS: &[&str] = &["bash", "shell", "zsh", "shell-session"];

/// What a line begins with that somebody is to type.
const COMMANDS: &[&str] = &[
    "$ ",
    "kvasir ",
    "./test",
    "cargo ",
    "curl ",
    "docker ",
    "export ",
    "helm ",
    "kubectl ",
    "pip ",
    "python ",
    "systemctl ",
    "vllm ",
];

const REASON_OPENS: &str = "<!-- not run";

/// Checks every guide.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    tree.texts()
        .filter(|(path, _)| is_guide(path))
        .flat_map(|(path, text)| page(path, text))
        .collect()
}

fn is_guide(path: &str) -> bool {
    let listed = |page: &&str| path == *page || (page.ends_with('/') && path.starts_with(*page));
    has_extension(path, "md") && PAGES.iter().any(listed)
}

fn page(path: &str, text: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut tell = |line: usize, text: &str| found.push(Finding::new(path, line, text));
    let mut language: Option<&str> = None;
    let mut before = "";
    for (number, line) in text
        .lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line))
    {
        let bare = line.trim();
        match (language, bare.strip_prefix("```")) {
            (None, Some(name)) => {
                if OTHER_SHELLS.contains(&name) {
                    tell(number, "write `sh` or `console`, which are run");
                }
                language = Some(name);
            }
            (Some(_), Some(_)) => language = None,
            (Some(name), None) => {
                if !SHELLS.contains(&name) && is_command(bare) {
                    let text = "a command in a block that nobody runs; make it `sh` or `console`";
                    tell(number, text);
                }
            }
            (None, None) => {
                let indented = line.starts_with("    ") && before.is_empty();
                if indented && is_command(bare) {
                    tell(
                        number,
                        "a command in an indented block; make it a fenced `sh`",
                    );
                }
            }
        }
        if before.starts_with(REASON_OPENS) {
            if !has_reason(before) {
                tell(number - 1, "write `<!-- not run: REASON -->`");
            }
            if !language.is_some_and(|name| SHELLS.contains(&name)) {
                tell(number - 1, "a reason that stands before no shell block");
            }
        }
        before = bare;
    }
    found
}

fn is_command(line: &str) -> bool {
    COMMANDS.iter().any(|command| line.starts_with(command))
}

fn has_reason(comment: &str) -> bool {
    let reason = comment
        .strip_prefix(REASON_OPENS)
        .and_then(|rest| rest.strip_prefix(": "))
        .and_then(|rest| rest.strip_suffix(" -->"));
    reason.is_some_and(|reason| !reason.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(text: &str) -> Vec<String> {
        let tree = Tree::of(&[("docs/guide/a.md", text), ("docs/b.md", text)]);
        check(&tree).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn commands_that_nobody_runs_are_found() {
        let page = "\
```text
INFO listening
kvasir frontend
```

    curl localhost

```bash
ls
```
";
        assert_eq!(
            told(page),
            [
                "docs/guide/a.md:3: a command in a block that nobody runs; make it `sh` or `console`",
                "docs/guide/a.md:6: a command in an indented block; make it a fenced `sh`",
                "docs/guide/a.md:8: write `sh` or `console`, which are run",
            ]
        );
    }

    #[test]
    fn a_reason_is_a_reason_and_stands_before_a_shell_block() {
        let page = "\
<!-- not run: needs a GPU -->
```sh
vllm serve
```
<!-- not run -->
```console
$ ls
```
<!-- not run: no shell -->
```json
{}
```
";
        assert_eq!(
            told(page),
            [
                "docs/guide/a.md:5: write `<!-- not run: REASON -->`",
                "docs/guide/a.md:9: a reason that stands before no shell block",
            ]
        );
    }
}
