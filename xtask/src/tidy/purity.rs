//! Pure crates reach for nothing outside of their inputs.
//!
//! Answers: does a crate that says `[package.metadata.style] pure = true` depend only on pure
//! crates, and call nothing that reads a clock, the environment, a socket, a file, chance or a
//! log? The first is asked from cargo, over the whole closure of dependencies; the second from the
//! text of its sources, tests left out.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value as Json;

use crate::tidy::Finding;
use crate::tree::Tree;

/// Crates from outside that a pure crate may end up with. Each is a function of its inputs.
const ALLOWED: &[&str] = &[
    "autocfg",
    "bytes",
    "cfg-if",
    "foldhash",
    "hashbrown",
    "itoa",
    "libm",
    "memchr",
    "ryu",
    // Memory kept until no reader can see it, and its locks: epochs and atomics, nothing ambient.
    "saa",
    "sdd",
    "serde",
    "serde_core",
    "serde_json",
    "smallvec",
    "thiserror",
    "xxhash-rust",
    "zmij",
];

/// The platform that dependencies are looked at for.
const PLATFORM: &str = "x86_64-unknown-linux-gnu";

/// What a pure crate must not name, and what to do instead.
const AMBIENT: &[(&str, &str)] = &[
    ("std::time::Instant", "take `now: Time`"),
    ("Instant::now", "take `now: Time`"),
    ("SystemTime", "take the time as a value"),
    ("std::env", "take a value; options come from kvasir-config"),
    ("std::fs", "take the content"),
    ("std::net", "sockets belong in an edge crate"),
    ("std::process", "processes belong in an edge crate"),
    ("std::io::stdin", "take the content"),
    ("thread::spawn", "the host has the threads"),
    ("thread::sleep", "return a deadline"),
    ("tokio::", "tasks belong in an edge crate"),
    ("tracing::", "return what is worth telling"),
    ("log::", "return what is worth telling"),
    ("println!", "return what is worth telling"),
    ("eprintln!", "return what is worth telling"),
    ("rand::", "use kvasir_types::Rng, seeded, held in state"),
    ("thread_rng", "use kvasir_types::Rng, seeded, held in state"),
    ("getrandom", "use kvasir_types::Rng, seeded, held in state"),
];

/// Folders of the crates that call themselves pure.
fn pure_folders(tree: &Tree) -> Vec<String> {
    let pure = |text: &str| {
        let after = text
            .split_once("[package.metadata.style]")
            .map(|(_, after)| after);
        after.is_some_and(|after| after.trim_start().starts_with("pure = true"))
    };
    tree.texts()
        .filter(|(path, text)| {
            path.starts_with("crates/") && path.ends_with("/Cargo.toml") && pure(text)
        })
        .map(|(path, _)| path.trim_end_matches("Cargo.toml").to_owned())
        .collect()
}

/// Calls in pure crates that reach outside.
pub(crate) fn ambient_calls(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for folder in pure_folders(tree) {
        let sources = format!("{folder}src/");
        let own = |(path, _): &(&str, &str)| path.starts_with(&sources) && !is_test_file(path);
        for (path, text) in tree.sources().filter(own) {
            found.extend(calls_in(path, text));
        }
    }
    found
}

fn is_test_file(path: &str) -> bool {
    path.ends_with("/tests.rs") || path.contains("/tests/")
}

fn calls_in(path: &str, text: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        // By house style the tests of a module stand at its end.
        if line.trim() == "#[cfg(test)]" {
            break;
        }
        let code = line.split("//").next().unwrap_or_default();
        if let Some((call, instead)) = AMBIENT.iter().find(|(call, _)| names(code, call)) {
            let text = format!("a pure crate must not use `{call}`; {instead}");
            found.push(Finding::new(path, index + 1, text));
        }
    }
    found
}

/// Whether the call stands there as a word of its own, outside of quotes.
fn names(code: &str, call: &str) -> bool {
    code.match_indices(call).any(|(at, _)| {
        let before = code.get(..at).unwrap_or_default();
        let inside_word = before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let inside_text = before.matches('"').count() % 2 == 1;
        !inside_word && !inside_text
    })
}

/// What the program is made of, as cargo resolves it: pure crates stay pure, nothing comes twice.
pub(crate) fn dependencies(tree: &Tree) -> Vec<Finding> {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version",
            "1",
            "--all-features",
            "--locked",
            "--filter-platform",
            PLATFORM,
        ])
        .current_dir(&tree.root)
        .output();
    let metadata = match output {
        Ok(output) if output.status.success() => serde_json::from_slice::<Json>(&output.stdout),
        Ok(output) => {
            let reason = String::from_utf8_lossy(&output.stderr).into_owned();
            return vec![Finding::new(
                "Cargo.toml",
                0,
                format!("cargo metadata failed: {reason}"),
            )];
        }
        Err(error) => {
            return vec![Finding::new(
                "Cargo.toml",
                0,
                format!("cannot run cargo: {error}"),
            )];
        }
    };
    match metadata {
        Ok(metadata) => {
            let graph = Graph::of(&metadata);
            let mut found = impure(&graph);
            found.extend(twice(&graph, tree.text("deny.toml").unwrap_or_default()));
            found
        }
        Err(error) => vec![Finding::new(
            "Cargo.toml",
            0,
            format!("cargo metadata: {error}"),
        )],
    }
}

#[derive(Debug, Default)]
struct Package {
    name: String,
    version: String,
    /// In this workspace.
    local: bool,
    pure: bool,
    /// Runs in the compiler and leaves nothing of itself in the program.
    proc_macro: bool,
    /// Ids of what it is built with; tests and build scripts left out.
    needs: Vec<String>,
}

/// Packages by id.
#[derive(Debug, Default)]
struct Graph(BTreeMap<String, Package>);

impl Graph {
    fn of(metadata: &Json) -> Self {
        let mut graph = Self::default();
        for package in array(&metadata["packages"]) {
            let kinds = array(&package["targets"])
                .iter()
                .flat_map(|target| array(&target["kind"]));
            let made = Package {
                name: text(&package["name"]),
                version: text(&package["version"]),
                local: package["source"].is_null(),
                pure: package["metadata"]["style"]["pure"] == true,
                proc_macro: kinds.into_iter().any(|kind| kind == "proc-macro"),
                needs: Vec::new(),
            };
            graph.0.insert(text(&package["id"]), made);
        }
        for node in array(&metadata["resolve"]["nodes"]) {
            let normal = |need: &&Json| {
                array(&need["dep_kinds"])
                    .iter()
                    .any(|kind| kind["kind"].is_null())
            };
            let needs = array(&node["deps"])
                .iter()
                .filter(normal)
                .map(|need| text(&need["pkg"]));
            if let Some(package) = graph.0.get_mut(&text(&node["id"])) {
                package.needs = needs.collect();
            }
        }
        graph
    }
}

fn array(value: &Json) -> &[Json] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Json) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Every pure crate whose closure holds something that is not pure.
fn impure(graph: &Graph) -> Vec<Finding> {
    let mut found = Vec::new();
    for (id, package) in graph.0.iter().filter(|(_, package)| package.pure) {
        let mut seen = BTreeSet::new();
        let mut open = vec![(id.as_str(), package.name.clone())];
        while let Some((id, path)) = open.pop() {
            let Some(at) = graph.0.get(id) else { continue };
            for need in at.needs.iter().filter(|need| seen.insert(need.as_str())) {
                let Some(next) = graph.0.get(need) else {
                    continue;
                };
                let way = format!("{path} → {}", next.name);
                let fine = if next.local {
                    next.pure
                } else {
                    ALLOWED.contains(&next.name.as_str())
                };
                if next.proc_macro {
                    continue;
                }
                if !fine {
                    let text = format!(
                        "pure crates depend on pure ones only: {way}; drop it, or show that it is \
                         a function of its inputs and add it to ALLOWED in xtask"
                    );
                    found.push(Finding::new(&manifest_of(&package.name), 0, text));
                    continue;
                }
                open.push((need, way));
            }
        }
    }
    found
}

/// Crates of which the program holds two versions without a reason in `deny.toml`.
fn twice(graph: &Graph, deny: &str) -> Vec<Finding> {
    let members = graph
        .0
        .iter()
        .filter(|(_, package)| package.local)
        .map(|(id, _)| id.as_str());
    let mut open: Vec<&str> = members.collect();
    let mut seen: BTreeSet<&str> = open.iter().copied().collect();
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    while let Some(package) = open.pop().and_then(|id| graph.0.get(id)) {
        if package.proc_macro {
            continue;
        }
        versions
            .entry(&package.name)
            .or_default()
            .insert(&package.version);
        open.extend(
            package
                .needs
                .iter()
                .map(String::as_str)
                .filter(|need| seen.insert(need)),
        );
    }
    let unexplained = |(name, versions): &(&str, BTreeSet<&str>)| {
        versions.len() > 1 && !deny.contains(&format!("crate = \"{name}@"))
    };
    versions
        .into_iter()
        .filter(unexplained)
        .map(|(name, versions)| {
            let versions: Vec<_> = versions.into_iter().collect();
            let text = format!(
                "{name} comes in versions {}; bring them together, or give a reason under skip",
                versions.join(" and ")
            );
            Finding::new("deny.toml", 0, text)
        })
        .collect()
}

fn manifest_of(package: &str) -> String {
    format!(
        "crates/{}/Cargo.toml",
        package.trim_start_matches("kvasir-")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const PURE: &str = "[package]\nname = \"a\"\n\n[package.metadata.style]\npure = true\n";

    #[test]
    fn ambient_calls_are_found_outside_of_tests_comments_and_texts() {
        let source = "\
//! H. Never calls Instant::now.
fn f() { let t = std::time::Instant::now(); } // Instant::now
fn g() -> &'static str { \"std::fs\" }
fn h() { my_tracing::x(); }
#[cfg(test)]
mod tests { use std::fs; }
";
        let tree = Tree::of(&[
            ("crates/a/Cargo.toml", PURE),
            ("crates/a/src/lib.rs", source),
            ("crates/a/src/x/tests.rs", "use std::fs;"),
            ("crates/b/Cargo.toml", "[package]\n"),
            ("crates/b/src/lib.rs", source),
        ]);
        let found = ambient_calls(&tree);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            (found[0].path.as_str(), found[0].line),
            ("crates/a/src/lib.rs", 2)
        );
    }

    fn package(name: &str, source: &Json, pure: bool, kind: &str) -> Json {
        json!({
            "id": name, "name": name, "source": source, "targets": [{"kind": [kind]}],
            "metadata": {"style": {"pure": pure}},
        })
    }

    /// Two versions that the program holds are found; one behind a macro, or with a reason, is not.
    #[test]
    fn a_crate_that_comes_twice_needs_a_reason() {
        let versioned = |id: &str, name: &str, version: &str, kind: &str| {
            let mut made = package(name, &json!("registry"), false, kind);
            made["id"] = id.into();
            made["version"] = version.into();
            made
        };
        let metadata = json!({
            "packages": [
                package("kvasir-cli", &Json::Null, false, "lib"),
                versioned("a1", "a", "1.0.0", "lib"),
                versioned("a2", "a", "2.0.0", "lib"),
                versioned("m", "m", "1.0.0", "proc-macro"),
                versioned("s1", "s", "1.0.0", "lib"),
                versioned("s2", "s", "2.0.0", "lib"),
            ],
            "resolve": {"nodes": [
                node("kvasir-cli", &[("a1", Json::Null), ("m", Json::Null), ("s1", Json::Null)]),
                node("a1", &[("a2", Json::Null)]),
                node("m", &[("s2", Json::Null)]),
            ]},
        });
        let graph = Graph::of(&metadata);
        let found = twice(&graph, "");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0]
                .text
                .starts_with("a comes in versions 1.0.0 and 2.0.0"),
            "{found:?}"
        );
        assert_eq!(twice(&graph, "{ crate = \"a@1\", reason = \"x\" }"), []);
    }

    fn node(id: &str, needs: &[(&str, Json)]) -> Json {
        let needs: Vec<_> = needs
            .iter()
            .map(|(to, kind)| json!({"pkg": to, "dep_kinds": [{"kind": kind}]}))
            .collect();
        json!({"id": id, "deps": needs})
    }

    #[test]
    fn a_forbidden_crate_is_found_through_others_and_not_through_tests_or_macros() {
        let registry = json!("registry");
        let metadata = json!({
            "packages": [
                package("kvasir-index", &Json::Null, true, "lib"),
                package("kvasir-types", &Json::Null, true, "lib"),
                package("kvasir-transport", &Json::Null, false, "lib"),
                package("serde", &registry, false, "lib"),
                package("serde_derive", &registry, false, "proc-macro"),
                package("mio", &registry, false, "lib"),
                package("tokio", &registry, false, "lib"),
                package("syn", &registry, false, "lib"),
            ],
            "resolve": {"nodes": [
                node("kvasir-index", &[("kvasir-types", Json::Null), ("tokio", json!("dev"))]),
                node("kvasir-types", &[("serde", Json::Null), ("serde_derive", Json::Null)]),
                node("serde", &[("mio", Json::Null)]),
                node("serde_derive", &[("syn", Json::Null)]),
                node("kvasir-transport", &[("tokio", Json::Null)]),
            ]},
        });
        let found = impure(&Graph::of(&metadata));
        let texts: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(texts.len(), 2, "{texts:?}");
        assert!(
            texts[0].contains("kvasir-index → kvasir-types → serde → mio"),
            "{texts:?}"
        );
        assert!(texts[1].contains("kvasir-types → serde → mio"), "{texts:?}");
    }
}
