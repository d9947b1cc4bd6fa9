//! Whoever needs the brain and its books gets no HTTP server with them.
//!
//! Answers: does `crates/host`, with all of its features, bring anything that only the HTTP server needs? Cargo is
//! asked for what that crate alone is built with: in the workspace as a whole the features of all members are one.

use std::process::Command;

use crate::tidy::Finding;
use crate::tree::Tree;

/// The crate that is looked at.
const MANIFEST: &str = "crates/host/Cargo.toml";
const PACKAGE: &str = "kvasir-host";

/// Crates, with a feature or as a whole, that must not be among its dependencies.
const FORBIDDEN: &[(&str, Option<&str>)] = &[
    ("hyper", Some("server")),
    ("hyper-util", Some("server")),
    ("kvasir-frontend", None),
    ("kvasir-openai", None),
    ("kvasir-upstream", None),
];

/// What the crate must not bring; nothing as long as there is no such crate.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    if !tree.has(MANIFEST) {
        return Vec::new();
    }
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--locked", "--package", PACKAGE, "--all-features"])
        .args([
            "--edges", "normal", "--prefix", "depth", "--format", "|{p}|{f}",
        ])
        .args(["--target", "all"])
        .current_dir(&tree.root)
        .output();
    match output {
        Ok(output) if output.status.success() => {
            forbidden(&String::from_utf8_lossy(&output.stdout))
        }
        Ok(output) => {
            let reason = String::from_utf8_lossy(&output.stderr).into_owned();
            vec![Finding::new(
                MANIFEST,
                0,
                format!("cargo tree failed: {reason}"),
            )]
        }
        Err(error) => vec![Finding::new(
            MANIFEST,
            0,
            format!("cannot run cargo: {error}"),
        )],
    }
}

/// Reads what cargo lists: depth, package with version, features.
fn forbidden(listing: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut way: Vec<&str> = Vec::new();
    for line in listing.lines() {
        let mut fields = line.split('|');
        let depth = fields.next().and_then(|depth| depth.parse().ok());
        let (Some(depth), Some(package)) = (depth, fields.next()) else {
            continue;
        };
        let name = package.split(' ').next().unwrap_or_default();
        // Behind the features stands `(*)` where the package was listed before.
        let features = fields
            .next()
            .unwrap_or_default()
            .split(' ')
            .next()
            .unwrap_or_default();
        way.truncate(depth);
        way.push(name);
        let rule = FORBIDDEN.iter().find(|(forbidden, feature)| {
            *forbidden == name
                && feature.is_none_or(|feature| features.split(',').any(|has| has == feature))
        });
        if let Some((_, feature)) = rule {
            let what = feature.map_or(String::new(), |feature| format!(" with `{feature}`"));
            let text = format!(
                "must not link the HTTP server: {}{what}; a service or a binding that depends on it would carry it too",
                way.join(" → ")
            );
            found.push(Finding::new(MANIFEST, 0, text));
        }
    }
    if way.is_empty() {
        found.push(Finding::new(MANIFEST, 0, "cargo tree lists nothing"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLEAN: &str = "\
0|kvasir-host v0.1.0 (path)|
1|hyper v1.12.0|client,http1
2|bytes v1.12.0|default,std
1|kvasir-router v0.1.0 (path)|
";

    fn texts(listing: &str) -> Vec<String> {
        forbidden(listing).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_client_is_no_server() {
        assert_eq!(texts(CLEAN), [""; 0]);
        assert_eq!(check(&Tree::of(&[("crates/router/Cargo.toml", "")])), []);
    }

    #[test]
    fn the_server_and_the_frontend_are_found_with_their_way() {
        let server = CLEAN.replace("client,http1", "client,http1,server (*)");
        let found = texts(&server);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].contains("kvasir-host → hyper with `server`;"),
            "{found:?}"
        );
        let deep =
            format!("{CLEAN}2|kvasir-upstream v0.1.0 (path)|\n1|kvasir-openai v0.1.0 (path)|\n");
        let found = texts(&deep);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0].contains("kvasir-host → kvasir-router → kvasir-upstream;"),
            "{found:?}"
        );
        assert!(
            found[1].contains("kvasir-host → kvasir-openai;"),
            "{found:?}"
        );
    }

    #[test]
    fn an_empty_listing_proves_nothing() {
        assert_eq!(texts("").len(), 1);
    }
}
