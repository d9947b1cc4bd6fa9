//! Reading a body field by field.
//!
//! Answers one question: is each field of the right type, and did the client send one that is not read? A
//! reader takes fields by name; what is left at the end is unknown. Errors name the field and its place in
//! the whole body.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::object::{JsonError, Object};
use crate::{ApiError, JsonText};

/// Unknown names that an error lists before it stops.
const UNKNOWN_LISTED_MAX: usize = 16;
/// Characters of a client's text that an error repeats.
pub(crate) const ECHO_CHARS_MAX: usize = 64;

/// What to do with top-level fields that are not read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unknown {
    /// Answer 400 and name them.
    #[default]
    Refuse,
    /// Drop them (`DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS`).
    Ignore,
}

/// Takes the fields of one object, each at most once.
pub(crate) struct Reader<'o, 'a> {
    /// The outermost text, for positions.
    body: &'a str,
    /// Where `object` begins in `body`.
    offset: usize,
    object: &'o Object<'a>,
    taken: Vec<bool>,
    /// Path of `object` in `body`; empty for the body itself.
    path: &'static str,
}

impl<'o, 'a> Reader<'o, 'a> {
    pub(crate) fn new(object: &'o Object<'a>) -> Result<Self, JsonError> {
        Self::nested(object.body(), 0, object, "")
    }

    /// A reader of an object inside `body`, found at `path`.
    pub(crate) fn nested(
        body: &'a str,
        offset: usize,
        object: &'o Object<'a>,
        path: &'static str,
    ) -> Result<Self, JsonError> {
        let mut seen = BTreeSet::new();
        for field in object.fields() {
            if !seen.insert(&*field.key) {
                let message =
                    format_args!("{}duplicate field `{}`", before(path), echo(&field.key));
                return Err(JsonError::at_end(
                    &body[..offset + field.key_span.end],
                    message,
                ));
            }
        }
        Ok(Self {
            body,
            offset,
            object,
            taken: vec![false; object.fields().len()],
            path,
        })
    }

    /// The outermost text.
    pub(crate) fn body(&self) -> &'a str {
        self.body
    }

    /// Takes the text of field `key`; absent and `null` are the same.
    pub(crate) fn raw(&mut self, key: &str) -> Option<(&'a str, usize)> {
        let at = self.object.fields().iter().position(|f| f.key == key)?;
        if let Some(taken) = self.taken.get_mut(at) {
            *taken = true;
        }
        let field = self.object.fields().get(at)?;
        (field.value != "null").then_some((field.value, self.offset + field.span.start))
    }

    /// Takes field `key` as JSON text.
    pub(crate) fn json(&mut self, key: &str) -> Option<JsonText> {
        self.raw(key).map(|(text, _)| JsonText::from_checked(text))
    }

    /// Takes field `key` as a `T`.
    pub(crate) fn take<T: Deserialize<'a>>(&mut self, key: &str) -> Result<Option<T>, JsonError> {
        let Some((text, at)) = self.raw(key) else {
            return Ok(None);
        };
        let dot = if self.path.is_empty() { "" } else { "." };
        let path = format!("{}{dot}{key}", self.path);
        serde_json::from_str(text)
            .map(Some)
            .map_err(|e| JsonError::within(self.body, at, Some(&path), &e))
    }

    /// Takes field `key` as a list of texts, one per element.
    pub(crate) fn list(&mut self, key: &str) -> Result<Option<Vec<&'a RawValue>>, JsonError> {
        self.take::<Vec<&'a RawValue>>(key)
    }

    /// As [`Reader::take`], and the field must be there.
    pub(crate) fn need<T: Deserialize<'a>>(&mut self, key: &str) -> Result<T, JsonError> {
        match self.take(key)? {
            Some(value) => Ok(value),
            None => Err(self.missing(key)),
        }
    }

    pub(crate) fn missing(&self, key: &str) -> JsonError {
        let end = self.offset + self.object.body().trim_end().len();
        JsonError::at_end(
            self.body.get(..end).unwrap_or(self.body),
            format_args!("{}missing field `{key}`", before(self.path)),
        )
    }

    /// An error about the text `part` of this body.
    pub(crate) fn within(&self, path: &str, part: &str, error: &serde_json::Error) -> JsonError {
        let at = (part.as_ptr() as usize).saturating_sub(self.body.as_ptr() as usize);
        JsonError::within(self.body, at, Some(path), error)
    }

    /// Refuses fields that were not read, as the API's validation.
    pub(crate) fn finish(self, unknown: Unknown) -> Result<(), ApiError> {
        if unknown == Unknown::Ignore {
            return Ok(());
        }
        let names: Vec<String> = self
            .left()
            .take(UNKNOWN_LISTED_MAX)
            .map(|f| format!("`{}`", echo(&f.key)))
            .collect();
        if names.is_empty() {
            return Ok(());
        }
        let list = names.join(", ");
        Err(ApiError::validation(format_args!(
            "Unsupported parameter(s): {list}"
        )))
    }

    /// Refuses fields that were not read, naming the ones that exist.
    pub(crate) fn finish_listing(self, accepted: &[&str]) -> Result<(), JsonError> {
        let Some(field) = self.left().next() else {
            return Ok(());
        };
        let names: Vec<String> = accepted.iter().map(|a| format!("`{a}`")).collect();
        Err(JsonError::at_end(
            &self.body[..self.offset + field.key_span.end],
            format_args!(
                "{}unknown field `{}`, expected one of {}",
                before(self.path),
                echo(&field.key),
                names.join(", ")
            ),
        ))
    }

    fn left(&self) -> impl Iterator<Item = &crate::Field<'a>> {
        let fields = self.object.fields().iter().zip(&self.taken);
        fields.filter(|(_, taken)| !**taken).map(|(f, _)| f)
    }
}

/// A client's text, short enough for an error message.
pub(crate) fn echo(text: &str) -> String {
    let mut short: String = text.chars().take(ECHO_CHARS_MAX).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

/// A path as it stands before an error's text.
fn before(path: &str) -> String {
    if path.is_empty() {
        return String::new();
    }
    format!("{path}: ")
}
