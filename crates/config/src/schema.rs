//! The JSON schema of the `--config` file, `kvasir config schema`.
//!
//! Answers: which keys and values may a file have, for editors and validators? Written from the table; what the
//! schema takes, the loader takes. The loader takes a little more: numbers and switches as text.

use serde_json::{Map, Value as Json, json};

use crate::spec::Spec;
use crate::table;
use crate::value::{self, Kind, Value};

/// The schema, as text.
pub(crate) fn page() -> String {
    let mut properties = Map::new();
    for spec in table::all().filter(|spec| spec.sources.file) {
        properties.insert(spec.name.to_owned(), property(spec));
        for alias in spec.aliases {
            let same = json!({
                "$ref": format!("#/properties/{}", spec.name),
                "deprecated": true,
            });
            properties.insert((*alias).to_owned(), same);
        }
    }
    let schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Kvasir configuration",
        "description": "The file that --config names. Keys are the names of flags without dashes.",
        "type": "object",
        "additionalProperties": false,
        "properties": properties,
    });
    format!("{schema:#}\n")
}

fn property(spec: &Spec) -> Json {
    let one = kind(&spec.kind);
    let mut out = match (spec.repeated, spec.nullable) {
        (true, _) => json!({ "anyOf": [{ "type": "array", "items": one }, one] }),
        (false, true) => json!({ "anyOf": [one, { "enum": ["none", ""] }] }),
        (false, false) => one,
    };
    let mut text = spec.summary();
    for details in spec.details() {
        text.push(' ');
        text.push_str(&details);
    }
    if let Some(status) = crate::help::status(spec) {
        text.push(' ');
        text.push_str(&status);
    }
    out["description"] = text.into();
    if let Some(default) = default(spec) {
        out["default"] = default;
    }
    if spec.deprecated.is_some() {
        out["deprecated"] = true.into();
    }
    if spec.secret {
        out["writeOnly"] = true.into();
    }
    out
}

/// What a single value may be. Forms of texts are checked by the loader; only that they are not blank is said here.
fn kind(kind: &Kind) -> Json {
    match *kind {
        Kind::Bool => json!({ "type": "boolean" }),
        Kind::Int { min, max } => json!({ "type": "integer", "minimum": min, "maximum": max }),
        Kind::Float {
            min,
            max,
            above_min,
        } => {
            let mut out = json!({ "type": "number" });
            if min.is_finite() {
                let name = if above_min {
                    "exclusiveMinimum"
                } else {
                    "minimum"
                };
                out[name] = min.into();
            }
            if max.is_finite() {
                out["maximum"] = max.into();
            }
            out
        }
        Kind::Bytes => json!({ "anyOf": [
            { "type": "integer", "minimum": 0 },
            { "type": "string", "pattern": "^[0-9]+ *(KiB|MiB|GiB|TiB|kB|MB|GB|TB|B)?$" },
        ] }),
        Kind::Text(_) => json!({ "type": "string", "pattern": "\\S" }),
        Kind::Path => json!({ "type": "string", "minLength": 1 }),
        Kind::Choice(choices) => {
            let names: Vec<_> = choices.iter().map(|choice| choice.name).collect();
            json!({ "enum": names })
        }
    }
}

fn default(spec: &Spec) -> Option<Json> {
    let parsed = value::parse(&spec.kind, spec.default?)?;
    Some(match parsed {
        Value::Bool(yes) => yes.into(),
        Value::Int(number) => number.into(),
        Value::Float(number) => number.into(),
        Value::Text(text) => text.into(),
        Value::Choice(name) => name.into(),
        Value::List(items) => items.into(),
        Value::Unset => return None,
    })
}
