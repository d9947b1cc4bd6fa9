//! `/openapi.json`: the routes of this server for programs, made from the table of routes.
//!
//! What an engine answers is the engine's: bodies of completions are described as far as the door reads them.

#[cfg(test)]
mod reference;
mod schemas;

use serde_json::{Map, Value, json};

use crate::http::routes::{Audience, Operation, Paths, ROWS, Row, Tail};

/// The version of the language that it is written in.
const LANGUAGE: &str = "3.1.0";

/// What the description is of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scope {
    /// Whether clients' routes are there.
    pub(crate) clients: bool,
    /// Whether operators' routes are there.
    pub(crate) operators: bool,
    /// Whether clients need a key.
    pub(crate) client_key: bool,
    /// Whether operators need a token.
    pub(crate) operator_key: bool,
}

/// The description.
pub(crate) fn document(paths: &Paths, scope: Scope) -> Value {
    let mut all = Map::new();
    for row in ROWS.iter().filter(|row| scope.has(row.audience)) {
        for path in row.place.paths(paths) {
            let place = all.entry(row.tail.after(&path)).or_insert(json!({}));
            for operation in row.operations {
                place[operation.method] = describe(row, &path, operation, scope);
            }
        }
    }
    json!({
        "openapi": LANGUAGE,
        "info": {
            "title": "Kvasir",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "A KV-cache-aware router in front of OpenAI-compatible engines.",
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "paths": all,
        "components": {
            "schemas": schemas::all(),
            "securitySchemes": { "bearer": { "type": "http", "scheme": "bearer" } },
        },
    })
}

impl Scope {
    fn has(self, audience: Audience) -> bool {
        match audience {
            Audience::Anyone => true,
            Audience::Clients => self.clients,
            Audience::Operators | Audience::Page => self.operators,
        }
    }

    fn needs_key(self, audience: Audience) -> bool {
        match audience {
            Audience::Anyone | Audience::Page => false,
            Audience::Clients => self.client_key,
            Audience::Operators => self.operator_key,
        }
    }
}

impl Tail {
    /// A path with its parameter.
    fn after(self, path: &str) -> String {
        match self {
            Self::None => path.to_owned(),
            Self::Name(name) => format!("{path}/{{{name}}}"),
            Self::NameThen(name, then) => format!("{path}/{{{name}}}{then}"),
        }
    }
}

fn describe(row: &Row, path: &str, operation: &Operation, scope: Scope) -> Value {
    let (status, schema) = operation.gives;
    let mut answers = Map::new();
    answers.insert(status.to_string(), answer("Done", schema));
    answers.insert("default".into(), answer("What went wrong", "Error"));
    let mut out = json!({
        "summary": operation.summary,
        "operationId": operation_id(operation.method, &row.tail.after(path)),
        "tags": [tag(row.audience)],
        "responses": answers,
    });
    let parameters = parameters(row.tail, operation);
    if !parameters.is_empty() {
        out["parameters"] = parameters.into();
    }
    if let Some(schema) = operation.takes {
        out["requestBody"] = json!({ "required": true, "content": content(schema) });
    }
    if scope.needs_key(row.audience) {
        out["security"] = json!([{ "bearer": [] }]);
    }
    out
}

fn tag(audience: Audience) -> &'static str {
    match audience {
        Audience::Anyone => "health",
        Audience::Clients => "inference",
        Audience::Operators | Audience::Page => "admin",
    }
}

fn operation_id(method: &str, path: &str) -> String {
    let words = path.split(|c: char| !c.is_ascii_alphanumeric());
    let words = words.filter(|word| !word.is_empty());
    words.fold(method.to_owned(), |id, word| format!("{id}_{word}"))
}

fn parameters(tail: Tail, operation: &Operation) -> Vec<Value> {
    let mut out = Vec::new();
    if let Tail::Name(name) | Tail::NameThen(name, _) = tail {
        out.push(json!({
            "name": name, "in": "path", "required": true, "schema": { "type": "string" },
        }));
    }
    if operation.method == "delete" && matches!(tail, Tail::Name("worker")) {
        out.push(json!({
            "name": "force", "in": "query", "required": false, "schema": { "type": "boolean" },
            "description": "Cut off what runs there instead of waiting for it",
        }));
    }
    if operation.method == "get" && operation.gives.1 == "Decisions" {
        let query = |name: &str, of: &str, about: &str| {
            json!({
                "name": name, "in": "query", "required": false, "schema": { "type": of },
                "description": about,
            })
        };
        out.push(query("model", "string", "Only decisions about this model"));
        out.push(query("worker", "integer", "Only decisions for this worker"));
        let outcomes = "Only requests that ended so: ok, failed, rejected, cancelled, running";
        out.push(query("outcome", "string", outcomes));
        let role = "`any`: decisions about workers that compute prompts for others, too";
        out.push(query("role", "string", role));
        out.push(query("limit", "integer", "At most so many, up to 100"));
    }
    out
}

fn answer(description: &str, schema: &str) -> Value {
    json!({ "description": description, "content": content(schema) })
}

fn content(schema: &str) -> Value {
    let schema_ref = json!({ "schema": { "$ref": format!("#/components/schemas/{schema}") } });
    match schema {
        "Text" => json!({ "text/plain": schema_ref }),
        "Page" => json!({ "text/html": schema_ref }),
        "EventStream" => json!({ "text/event-stream": schema_ref }),
        "Completion" => json!({
            "application/json": schema_ref,
            "text/event-stream": { "schema": { "type": "string" } },
        }),
        _ => json!({ "application/json": schema_ref }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Scope = Scope {
        clients: true,
        operators: true,
        client_key: false,
        operator_key: true,
    };

    /// Every operation that is described leads to a handler, and every row of the table is described.
    #[test]
    fn it_says_what_is_there_and_all_of_it() {
        let paths = Paths {
            chat: "/moved".into(),
            ..Paths::default()
        };
        let document = document(&paths, ALL);
        let described = document["paths"].as_object().unwrap();
        let mut operations = 0;
        for (path, methods) in described {
            let path = path.replace(['{', '}'], "");
            for method in methods.as_object().unwrap().keys() {
                let method = method.to_uppercase().parse().unwrap();
                assert!(paths.find(&method, &path).is_ok(), "{method} {path}");
                operations += 1;
            }
        }
        let of_row = |row: &Row| row.place.paths(&paths).len() * row.operations.len();
        assert_eq!(operations, ROWS.iter().map(of_row).sum::<usize>());
        assert!(described.contains_key("/moved"));
        assert!(!described.contains_key("/v1/chat/completions"));
    }

    #[test]
    fn every_schema_that_is_named_is_there_and_ids_are_unique() {
        let document = document(&Paths::default(), ALL);
        let text = document.to_string();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        for named in text.split("#/components/schemas/").skip(1) {
            let name = named.split('"').next().unwrap();
            assert!(schemas.contains_key(name), "{name}");
        }
        let mut ids: Vec<&str> = text.split("\"operationId\":\"").skip(1).collect();
        let all = ids.len();
        ids.sort_unstable();
        ids.dedup_by_key(|id| id.split('"').next().unwrap().to_owned());
        assert_eq!(ids.len(), all);
    }

    #[test]
    fn a_door_describes_its_own_routes() {
        let operators = Scope {
            clients: false,
            ..ALL
        };
        let document = document(&Paths::default(), operators);
        let paths = document["paths"].as_object().unwrap();
        assert!(paths.contains_key("/workers") && paths.contains_key("/health"));
        assert!(!paths.contains_key("/v1/chat/completions"));
        assert_eq!(
            paths["/workers"]["get"]["security"],
            json!([{ "bearer": [] }])
        );
        assert!(paths["/health"]["get"].get("security").is_none());
    }
}
