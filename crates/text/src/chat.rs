//! A conversation as a chat template wants it.
//!
//! Answers one question: what does the engine hand to its template for these messages? Templates expect
//! strings where the API allows lists of parts, and objects where it has JSON in strings. Engines bridge that
//! before they render; a router that predicts their tokens has to bridge it the same way.

use std::fmt;
use std::ops::Range;

use minijinja::Value;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};

use crate::error::TextError;

/// A conversation to be rendered, its parts still JSON text.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChatInput<'a> {
    /// JSON list of messages.
    pub messages: &'a str,
    /// Where in `messages` the contents that are strings stand, between their quotes, if the caller knows. All of
    /// them, in order: with it a prompt can be put together from what the template printed before.
    pub contents: Option<&'a [Range<usize>]>,
    /// JSON list of tools.
    pub tools: Option<&'a str>,
    /// JSON list of documents.
    pub documents: Option<&'a str>,
    /// JSON object of variables for the template.
    pub kwargs: Option<&'a str>,
    /// How hard to think, for templates that know it.
    pub reasoning_effort: Option<&'a str>,
    /// End with the opening of an answer.
    pub add_generation_prompt: bool,
    /// End inside the last message, so that it is continued.
    pub continue_final_message: bool,
    /// The time for templates that print the date: Unix seconds, shifted to the engine's time zone.
    pub now_unix: i64,
    /// Whose habits to follow.
    pub dialect: Dialect,
}

impl ChatInput<'_> {
    /// Bytes of everything that the template is given.
    pub(crate) fn bytes(&self) -> usize {
        let others = [self.tools, self.documents, self.kwargs];
        let others = others.into_iter().flatten().map(str::len);
        self.messages.len() + others.sum::<usize>()
    }
}

/// What an engine does to a request before its template sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// Tools pass through the API's schema, which orders known fields and fills in `null`s: Dynamo, and our own
    /// token workers.
    #[default]
    Schema,
    /// As `Schema`, and a template that reads parts never sees a string: vLLM.
    Vllm,
    /// Tools as they were sent.
    Verbatim,
}

/// How a template reads a message's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContentStyle {
    /// As one string; text parts are joined with newlines.
    Text,
    /// As a string or as a list of parts.
    Parts,
    /// As a list of parts; strings become one part.
    PartsOnly,
}

/// Reads messages and makes their contents what `style` wants.
pub(crate) fn messages(json: &str, style: ContentStyle) -> Result<Vec<Message>, TextError> {
    let mut messages: Vec<Message> = serde_json::from_str(json).map_err(|e| bad("messages", &e))?;
    for message in &mut messages {
        message.normalise(style);
    }
    Ok(messages)
}

pub(crate) fn bad(what: &str, error: &serde_json::Error) -> TextError {
    TextError::Template(format!("{what}: {error}"))
}

/// A message as a list of fields, in the order they were sent.
#[derive(Debug)]
pub(crate) struct Message {
    fields: Vec<(String, Field)>,
}

#[derive(Debug)]
enum Field {
    Plain(Value),
    Content(Content),
    Calls(Vec<Call>),
}

#[derive(Debug)]
enum Content {
    None,
    Text(String),
    Parts(Vec<Value>),
}

/// A tool call as a list of fields, the function apart.
#[derive(Debug)]
struct Call {
    fields: Vec<(String, Value)>,
    function: Vec<(String, Value)>,
}

impl Message {
    fn normalise(&mut self, style: ContentStyle) {
        let mut seen = false;
        for (_, field) in &mut self.fields {
            if let Field::Content(content) = field {
                content.normalise(style);
                seen = true;
            }
        }
        if !seen {
            let mut empty = Content::None;
            empty.normalise(style);
            self.fields.push(("content".into(), Field::Content(empty)));
        }
    }

    /// Appends to the text of the message, for finding its end in the rendered prompt.
    pub(crate) fn append(&mut self, tail: &str) {
        for (_, field) in &mut self.fields {
            match field {
                Field::Content(Content::Text(text)) => text.push_str(tail),
                Field::Content(Content::Parts(parts)) => {
                    let Some(last) = parts.last_mut() else {
                        continue;
                    };
                    let text = last.get_attr("text").unwrap_or_default();
                    let text = format!("{}{tail}", text.as_str().unwrap_or_default());
                    *last = Value::from_pairs([("type", "text".to_owned()), ("text", text)]);
                }
                _ => {}
            }
        }
    }

    pub(crate) fn into_value(self) -> Value {
        let fields = self.fields.into_iter();
        Value::from_pairs(fields.map(|(key, field)| (key, field.into_value())))
    }
}

impl Field {
    fn into_value(self) -> Value {
        match self {
            Self::Plain(value) => value,
            Self::Content(Content::None) => Value::from(()),
            Self::Content(Content::Text(text)) => Value::from(text),
            Self::Content(Content::Parts(parts)) => Value::from(parts),
            Self::Calls(calls) => calls.into_iter().map(Call::into_value).collect(),
        }
    }
}

impl Content {
    fn normalise(&mut self, style: ContentStyle) {
        *self = match (std::mem::replace(self, Self::None), style) {
            (Self::None, ContentStyle::PartsOnly) => Self::Parts(Vec::new()),
            (Self::None, _) => Self::Text(String::new()),
            (Self::Parts(parts), ContentStyle::Text) => {
                let texts: Vec<String> = parts.iter().filter_map(part_text).collect();
                Self::Text(texts.join("\n"))
            }
            (Self::Text(text), ContentStyle::PartsOnly) => {
                let part = Value::from_pairs([("type", "text".to_owned()), ("text", text)]);
                Self::Parts(vec![part])
            }
            (as_it_is, _) => as_it_is,
        };
    }
}

/// The text of a part; parts of other kinds have none.
fn part_text(part: &Value) -> Option<String> {
    if let Some(text) = part.as_str() {
        return Some(text.to_owned());
    }
    for key in ["text", "refusal", "thinking"] {
        let value = part.get_attr(key).ok();
        if let Some(text) = value.as_ref().and_then(Value::as_str) {
            return Some(text.to_owned());
        }
    }
    None
}

impl Call {
    /// `arguments` is JSON in a string; templates want the object. Text that is no JSON stays text.
    fn into_value(self) -> Value {
        let mut fields = self.fields;
        if !self.function.is_empty() {
            let function = self.function.into_iter().map(|(key, value)| {
                let parsed = (key == "arguments")
                    .then(|| value.as_str())
                    .flatten()
                    .and_then(|text| serde_json::from_str(text).ok());
                (key, parsed.unwrap_or(value))
            });
            fields.push(("function".to_owned(), Value::from_pairs(function)));
        }
        Value::from_pairs(fields)
    }
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Message;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a message object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Message, A::Error> {
                let mut fields = Vec::with_capacity(2);
                while let Some(key) = map.next_key::<String>()? {
                    let field = match &*key {
                        "content" => Field::Content(map.next_value()?),
                        "tool_calls" => match map.next_value::<Option<Vec<Call>>>()? {
                            Some(calls) => Field::Calls(calls),
                            None => continue,
                        },
                        _ => Field::Plain(map.next_value()?),
                    };
                    fields.push((key, field));
                }
                Ok(Message { fields })
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of parts")
            }

            fn visit_unit<E>(self) -> Result<Content, E> {
                Ok(Content::None)
            }

            fn visit_str<E>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.to_owned()))
            }

            fn visit_string<E>(self, text: String) -> Result<Content, E> {
                Ok(Content::Text(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Content, A::Error> {
                let mut parts = Vec::new();
                while let Some(part) = seq.next_element()? {
                    parts.push(part);
                }
                Ok(Content::Parts(parts))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

impl<'de> Deserialize<'de> for Call {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let all = Pairs::deserialize(deserializer)?.0;
        let mut call = Self {
            fields: Vec::with_capacity(all.len()),
            function: Vec::new(),
        };
        for (key, value) in all {
            if key == "function" {
                call.function = pairs(&value);
            } else {
                call.fields.push((key, value));
            }
        }
        Ok(call)
    }
}

/// The fields of an object in order.
struct Pairs(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Value::deserialize(deserializer).map(|object| Self(pairs(&object)))
    }
}

fn pairs(object: &Value) -> Vec<(String, Value)> {
    let Ok(keys) = object.try_iter() else {
        return Vec::new();
    };
    keys.filter_map(|key| {
        let value = object.get_item(&key).ok()?;
        Some((key.as_str()?.to_owned(), value))
    })
    .collect()
}

/// Reads tools the way `dialect` hands them to its template.
pub(crate) fn tools(json: &str, dialect: Dialect) -> Result<Value, TextError> {
    let tools: Value = serde_json::from_str(json).map_err(|e| bad("tools", &e))?;
    if dialect == Dialect::Verbatim {
        return Ok(tools);
    }
    let Ok(list) = tools.try_iter() else {
        return Ok(tools);
    };
    Ok(list.map(|tool| schema_tool(&tool)).collect())
}

/// Known fields first and in their schema's order, absent ones `null`, extra ones after them.
fn schema_tool(tool: &Value) -> Value {
    let kind = tool.get_attr("type").unwrap_or_default();
    let function = tool.get_attr("function").unwrap_or_default();
    let function = ordered(&function, &["name", "description", "parameters"]);
    let mut fields = vec![("type".to_owned(), kind), ("function".to_owned(), function)];
    let extra = pairs(tool).into_iter();
    fields.extend(extra.filter(|(key, _)| key != "type" && key != "function"));
    Value::from_pairs(fields)
}

fn ordered(object: &Value, known: &[&str]) -> Value {
    let all = pairs(object);
    let mut fields: Vec<(String, Value)> = known
        .iter()
        .map(|key| {
            let value = all.iter().find(|(k, _)| k == key).map(|(_, v)| v.clone());
            ((*key).to_owned(), value.unwrap_or_else(|| Value::from(())))
        })
        .collect();
    fields.extend(all.into_iter().filter(|(k, _)| !known.contains(&&**k)));
    Value::from_pairs(fields)
}
