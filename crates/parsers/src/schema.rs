//! Of which types the arguments of the request's functions are.
//!
//! Some models write arguments without quotes, between marks. Whether `12` is then a number or a text is a question of the schema.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

/// Nested choices (`anyOf`) of a type that are looked at.
const DEPTH_MAX: u32 = 4;

/// The functions that a request has. Clones are one.
#[derive(Clone, Debug, Default)]
pub struct ToolSchemas {
    by_name: Arc<BTreeMap<String, BTreeMap<String, Types>>>,
}

impl ToolSchemas {
    /// Of the request's list of tools, as JSON text. What is not understood is left out.
    #[must_use]
    pub fn of_json(tools: &str) -> Self {
        let list: Vec<Value> = serde_json::from_str(tools).unwrap_or_default();
        let function = |tool: &Value| {
            let function = tool.get("function")?;
            let name = function.get("name")?.as_str()?.to_owned();
            let properties = function.get("parameters").and_then(|p| p.get("properties"));
            let properties = properties.and_then(Value::as_object);
            let types = properties.into_iter().flatten();
            let types = types.map(|(key, schema)| (key.clone(), Types::of(schema, DEPTH_MAX)));
            Some((name, types.collect()))
        };
        Self {
            by_name: Arc::new(list.iter().filter_map(function).collect()),
        }
    }

    /// Whether the request has this function.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// The types that an argument may have; text if nothing is said.
    pub(crate) fn types(&self, function: &str, argument: &str) -> Types {
        let types = self.by_name.get(function);
        let types = types.and_then(|types| types.get(argument));
        types.copied().unwrap_or(Types::TEXT)
    }
}

/// A set of JSON types.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Types {
    text: bool,
    integer: bool,
    number: bool,
    boolean: bool,
    null: bool,
    /// Objects and lists.
    nested: bool,
}

impl Types {
    /// Text and nothing else.
    pub(crate) const TEXT: Self = Self {
        text: true,
        integer: false,
        number: false,
        boolean: false,
        null: false,
        nested: false,
    };
    /// Anything but text, where it can be read as that.
    pub(crate) const JSON: Self = Self {
        text: false,
        integer: true,
        number: true,
        boolean: true,
        null: true,
        nested: true,
    };

    fn of(schema: &Value, depth: u32) -> Self {
        let mut types = Self::default();
        match schema.get("type") {
            Some(Value::String(name)) => types.add(name),
            Some(Value::Array(names)) => {
                names
                    .iter()
                    .filter_map(Value::as_str)
                    .for_each(|name| types.add(name));
            }
            _ => {}
        }
        let choices = ["anyOf", "oneOf", "allOf"].into_iter();
        let choices = choices
            .filter_map(|key| schema.get(key)?.as_array())
            .flatten();
        for choice in choices.filter(|_| depth > 0) {
            types = types.or(Self::of(choice, depth - 1));
        }
        if types == Self::default() {
            let values = schema.get("enum").and_then(Value::as_array);
            let is_text = values.is_none_or(|values| values.iter().any(Value::is_string));
            return match schema.get("properties").is_some() {
                true => Self::JSON,
                false if is_text => Self::TEXT,
                false => Self::JSON,
            };
        }
        types
    }

    fn add(&mut self, name: &str) {
        match name {
            "integer" => self.integer = true,
            "number" => self.number = true,
            "boolean" => self.boolean = true,
            "null" => self.null = true,
            "object" | "array" => self.nested = true,
            _ => self.text = true,
        }
    }

    fn or(self, other: Self) -> Self {
        Self {
            text: self.text || other.text,
            integer: self.integer || other.integer,
            number: self.number || other.number,
            boolean: self.boolean || other.boolean,
            null: self.null || other.null,
            nested: self.nested || other.nested,
        }
    }

    /// Whether every value is text, so that it can be passed on as it comes.
    pub(crate) fn is_text(self) -> bool {
        self == Self::TEXT
    }

    /// A value as JSON: of the first type that it can be read as, else a string.
    pub(crate) fn to_json(self, value: &str) -> String {
        let word = value.trim();
        let read: Option<Value> = serde_json::from_str(word).ok();
        let fits = |read: &Value| match read {
            Value::Null => self.null,
            Value::Bool(_) => self.boolean,
            Value::Number(n) => self.number || (self.integer && !n.is_f64()),
            Value::Array(_) | Value::Object(_) => self.nested,
            Value::String(_) => false,
        };
        if read.as_ref().is_some_and(fits) {
            return word.to_owned();
        }
        match word {
            "True" if self.boolean => "true".into(),
            "False" if self.boolean => "false".into(),
            "None" | "NULL" | "Null" if self.null => "null".into(),
            _ => match (read, self.text) {
                // A string that came with its quotes.
                (Some(Value::String(_)), false) => word.to_owned(),
                _ => Value::from(value).to_string(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_the_type_that_the_schema_says() {
        let tools = r#"[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{
            "s":{"type":"string"},"i":{"type":"integer"},"x":{"type":"number"},"b":{"type":"boolean"},"o":{"type":"object"},
            "n":{"anyOf":[{"type":"string"},{"type":"null"}]},"u":{"type":["integer","null"]},"e":{"enum":[1,2]}}}}}]"#;
        let schemas = ToolSchemas::of_json(tools);
        let json = |argument: &str, value: &str| schemas.types("f", argument).to_json(value);
        assert_eq!(json("s", "12"), "\"12\"");
        assert_eq!(json("i", " 12\n"), "12");
        assert_eq!(json("i", "1.5"), "\"1.5\"");
        assert_eq!(json("x", "1.5"), "1.5");
        assert_eq!(json("b", "True"), "true");
        assert_eq!(json("o", "{\"a\": [1]}"), "{\"a\": [1]}");
        assert_eq!(json("o", "{broken"), "\"{broken\"");
        assert_eq!(json("n", "null"), "null");
        assert_eq!(json("n", "12"), "\"12\"");
        assert_eq!(json("u", "None"), "null");
        assert_eq!(json("e", "2"), "2");
        assert_eq!(json("other", "x\"y"), "\"x\\\"y\"");
        assert!(schemas.has("f") && !schemas.has("g"));
        assert!(!ToolSchemas::of_json("no list").has("f"));
    }
}
