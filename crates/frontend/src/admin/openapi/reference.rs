//! The page `docs/reference/admin-api.md`, written from what `/openapi.json` says.
//!
//! `UPDATE_EXPECT=1 cargo test -p kvasir-frontend admin_reference` writes it anew.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::Value;

use super::{Scope, document};
use crate::http::routes::Paths;

const HEAD: &str = "\
# Admin API

Made from the table of routes; `GET /openapi.json` of a running frontend says the same for programs. Operators' routes
are on the clients' port unless `--admin-port` moves them; `--admin-token-file` or `KVASIR_ADMIN_TOKEN` asks for
`authorization: Bearer TOKEN`; `DYN_DISABLE_FRONTEND_ADMIN_API` takes them away. Probes are open to everyone.
Errors are `{\"message\": …, \"type\": …, \"code\": …}`.
";

const SCOPE: Scope = Scope {
    clients: false,
    operators: true,
    client_key: false,
    operator_key: true,
};

fn page() -> String {
    let document = document(&Paths::default(), SCOPE);
    let mut out = String::from(HEAD);
    let mut named = BTreeSet::new();
    for (tag, title) in [("admin", "Operators"), ("health", "Probes")] {
        let _ = write!(
            out,
            "\n## {title}\n\n| route | what it does | body | answer |\n|---|---|---|---|\n"
        );
        for (path, methods) in document["paths"].as_object().into_iter().flatten() {
            for (method, operation) in methods.as_object().into_iter().flatten() {
                if operation["tags"][0] == tag {
                    route(&mut out, &mut named, path, method, operation);
                }
            }
        }
    }
    schemas(&mut out, named, &document["components"]["schemas"]);
    out
}

fn route(out: &mut String, named: &mut BTreeSet<String>, path: &str, method: &str, op: &Value) {
    let mut link = |content: &Value| {
        let kind = content.as_object().and_then(|kinds| kinds.values().next());
        let name = kind.and_then(|kind| schema_name(&kind["schema"]));
        match name {
            Some("Any" | "Text" | "Page" | "EventStream") | None => "-".to_owned(),
            Some(name) => {
                named.insert(name.to_owned());
                format!("[{name}](#{})", name.to_lowercase())
            }
        }
    };
    let body = link(&op["requestBody"]["content"]);
    let answers = op["responses"].as_object();
    let done = answers.and_then(|all| all.iter().find(|(status, _)| *status != "default"));
    let (status, answer) = done.map_or(("-", "-".to_owned()), |(status, answer)| {
        (status.as_str(), link(&answer["content"]))
    });
    let query = op["parameters"].as_array().into_iter().flatten();
    let query: String = query
        .filter(|parameter| parameter["in"] == "query")
        .map(|p| format!("; `?{}`: {}", text(&p["name"]), text(&p["description"])))
        .collect();
    let method = method.to_uppercase();
    let summary = text(&op["summary"]);
    let _ = writeln!(
        out,
        "| `{method} {path}` | {summary}{query} | {body} | {status} {answer} |"
    );
}

/// A table for each schema that is named, and for those that they name.
fn schemas(out: &mut String, mut wanted: BTreeSet<String>, all: &Value) {
    let mut told = BTreeSet::new();
    out.push_str("\n## Bodies\n");
    while let Some(name) = wanted.pop_first() {
        if !told.insert(name.clone()) {
            continue;
        }
        let schema = &all[&name];
        let _ = write!(
            out,
            "\n### {name}\n\n| field | type | meaning |\n|---|---|---|\n"
        );
        let required: BTreeSet<&str> = strings(&schema["required"]).collect();
        for (field, of) in schema["properties"].as_object().into_iter().flatten() {
            let needed = if required.contains(&**field) { "" } else { "?" };
            let kind = kind(of, &mut wanted);
            let _ = writeln!(
                out,
                "| `{field}`{needed} | {kind} | {} |",
                text(&of["description"])
            );
        }
    }
}

fn kind(of: &Value, wanted: &mut BTreeSet<String>) -> String {
    if let Some(name) = schema_name(of) {
        wanted.insert(name.to_owned());
        return format!("[{name}](#{})", name.to_lowercase());
    }
    if let Some(values) = of["enum"].as_array() {
        return values
            .iter()
            .map(|v| format!("`{}`", text(v)))
            .collect::<Vec<_>>()
            .join(", ");
    }
    if let Some(either) = of["anyOf"].as_array() {
        return either
            .iter()
            .map(|of| kind(of, wanted))
            .collect::<Vec<_>>()
            .join(" or ");
    }
    match &of["type"] {
        Value::Array(kinds) => kinds.iter().map(text).collect::<Vec<_>>().join(" or "),
        Value::String(array) if array == "array" => {
            format!("list of {}", kind(&of["items"], wanted))
        }
        Value::String(name) => name.clone(),
        _ => "any".to_owned(),
    }
}

fn schema_name(of: &Value) -> Option<&str> {
    of["$ref"].as_str()?.rsplit('/').next()
}

fn strings(of: &Value) -> impl Iterator<Item = &str> {
    of.as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
}

fn text(of: &Value) -> &str {
    of.as_str().unwrap_or_default()
}

#[test]
fn admin_reference_is_as_the_routes_are() {
    expect_test::expect_file!["../../../../../docs/reference/admin-api.md"].assert_eq(&page());
}
