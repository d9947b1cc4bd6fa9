//! The top level of a JSON body, without rebuilding it.
//!
//! Answers one question: which fields does this object have, and which bytes is each? Both readings of a
//! body start here, so the router and the engine behind it can never disagree about what a field says.
//!
//! Invariants: every span lies inside the body and on UTF-8 borders; keys are decoded, values are not.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde::Deserializer as _;
use serde::de::{Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::walk::{self, JsonField};

/// Bytes `start..end` of a body.
pub type Span = Range<usize>;

/// Fields that one object may have; the API has about eighty.
const FIELDS_MAX: usize = 1024;

/// One `"key": value` of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field<'a> {
    /// The key, its escapes decoded.
    pub key: Cow<'a, str>,
    /// Where the key with its quotes stands.
    pub key_span: Span,
    /// The value as it was written.
    pub value: &'a str,
    /// Where the value stands.
    pub span: Span,
}

/// A JSON object, its fields in the order they were written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Object<'a> {
    body: &'a str,
    fields: Vec<Field<'a>>,
}

/// A body that is not the JSON we need. Displays what is wrong, with line and column in the whole body.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} at line {line} column {column}")]
pub struct JsonError {
    message: String,
    line: usize,
    column: usize,
    syntax: bool,
}

impl JsonError {
    /// Whether this is no JSON at all, rather than JSON of the wrong shape.
    #[must_use]
    pub fn is_syntax(&self) -> bool {
        self.syntax
    }

    pub(crate) fn at_end(body: &str, message: impl fmt::Display) -> Self {
        let (line, column) = position(body, body.trim_end().len());
        Self {
            message: message.to_string(),
            line,
            column,
            syntax: false,
        }
    }

    /// This error was found in a part of `body` that begins at `offset`, the value of `path`.
    pub(crate) fn shift(self, body: &str, offset: usize, path: &str) -> Self {
        let (line, column) = position(body, offset);
        Self {
            message: format!("{path}: {}", self.message),
            column: self.column + if self.line > 1 { 0 } else { column },
            line: line + self.line.saturating_sub(1),
            syntax: self.syntax,
        }
    }

    /// `error` came from parsing a part of `body` that begins at `offset`.
    pub(crate) fn within(
        body: &str,
        offset: usize,
        path: Option<&str>,
        error: &serde_json::Error,
    ) -> Self {
        let text = error.to_string();
        let message = text.rfind(" at line ").map_or(&*text, |cut| &text[..cut]);
        let (line, column) = position(body, offset);
        Self {
            message: path.map_or_else(|| message.to_owned(), |p| format!("{p}: {message}")),
            line: line + error.line().saturating_sub(1),
            column: error.column() + if error.line() > 1 { 0 } else { column },
            syntax: !error.is_data(),
        }
    }
}

/// Line from 1, and columns before `offset` on that line, as `serde_json` counts them.
fn position(body: &str, offset: usize) -> (usize, usize) {
    let head = body.as_bytes().get(..offset).unwrap_or_default();
    let line = memchr::memchr_iter(b'\n', head).count() + 1;
    let column = head.len() - memchr::memrchr(b'\n', head).map_or(0, |at| at + 1);
    (line, column)
}

/// The text that a body is.
pub(crate) fn text_of(body: &[u8]) -> Result<&str, JsonError> {
    std::str::from_utf8(body).map_err(|error| {
        let head = std::str::from_utf8(&body[..error.valid_up_to()]).unwrap_or_default();
        JsonError::at_end(head, "the body is not UTF-8")
    })
}

impl<'a> Object<'a> {
    /// Reads the top level of `body`. Values are checked to be well-formed JSON and are not decoded.
    ///
    /// ```
    /// # use kvasir_openai::Object;
    /// let object = Object::parse(br#"{"model": "m", "n": [1, 2]}"#)?;
    /// assert_eq!(object.get("n").map(|f| f.value), Some("[1, 2]"));
    /// # Ok::<(), kvasir_openai::JsonError>(())
    /// ```
    ///
    /// # Errors
    /// Not UTF-8, not JSON, not an object, or more than 1024 fields.
    pub fn parse(body: &'a [u8]) -> Result<Self, JsonError> {
        Self::parse_str(text_of(body)?)
    }

    /// As [`Object::parse`], for text known to be UTF-8.
    ///
    /// # Errors
    /// As [`Object::parse`].
    pub fn parse_str(body: &'a str) -> Result<Self, JsonError> {
        Self::parse_with(body, |_, at| walk::value(body.as_bytes(), at))
    }

    /// As [`Object::parse_str`]; `end` finds where the value ends that has this key and begins there.
    pub(crate) fn parse_with(
        body: &'a str,
        end: impl FnMut(&'a str, usize) -> Option<usize>,
    ) -> Result<Self, JsonError> {
        match Self::walk(body, end) {
            Some(object) => Ok(object),
            None => Self::read(body),
        }
    }

    /// The quick reading; `None` where it is not sure.
    fn walk(body: &'a str, end: impl FnMut(&'a str, usize) -> Option<usize>) -> Option<Self> {
        let mut fields = Vec::with_capacity(16);
        let span = |part: &str| span_in(body, part);
        walk::fields_with(body, end, |JsonField { key, value }| {
            let inner = span(key);
            fields.push(Field {
                key: Cow::Borrowed(key),
                key_span: inner.start.saturating_sub(1)..inner.end + 1,
                value,
                span: span(value),
            });
        })?;
        (fields.len() <= FIELDS_MAX).then_some(Self { body, fields })
    }

    /// The reading that is always right, and says what is wrong.
    fn read(body: &'a str) -> Result<Self, JsonError> {
        let mut json = serde_json::Deserializer::from_str(body);
        let fields = json
            .deserialize_map(FieldsVisitor { body })
            .and_then(|fields| json.end().map(|()| fields))
            .map_err(|e| JsonError::within(body, 0, None, &e))?;
        Ok(Self { body, fields })
    }

    /// The whole text.
    #[must_use]
    pub fn body(&self) -> &'a str {
        self.body
    }

    /// All fields in written order, duplicates included.
    #[must_use]
    pub fn fields(&self) -> &[Field<'a>] {
        &self.fields
    }

    /// The field named `key`; of duplicates the last, as JSON readers do.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Field<'a>> {
        self.fields.iter().rev().find(|f| f.key == key)
    }

    /// Just after the opening brace: where a field can be put in.
    #[must_use]
    pub fn opening(&self) -> usize {
        self.body.find('{').map_or(0, |at| at + 1)
    }
}

struct FieldsVisitor<'a> {
    body: &'a str,
}

/// Where `part`, a slice of `body`, stands in it.
pub(crate) fn span_in(body: &str, part: &str) -> Span {
    let start = (part.as_ptr() as usize).saturating_sub(body.as_ptr() as usize);
    start..start + part.len()
}

impl<'a> Visitor<'a> for FieldsVisitor<'a> {
    type Value = Vec<Field<'a>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Vec::with_capacity(16);
        while let Some(key) = map.next_key::<&'a RawValue>()? {
            let value = map.next_value::<&'a RawValue>()?.get();
            if fields.len() == FIELDS_MAX {
                return Err(A::Error::custom(format_args!(
                    "more than {FIELDS_MAX} fields"
                )));
            }
            fields.push(Field {
                key: decode_key(key.get()).map_err(A::Error::custom)?,
                key_span: span_in(self.body, key.get()),
                value,
                span: span_in(self.body, value),
            });
        }
        Ok(fields)
    }
}

fn decode_key(quoted: &str) -> Result<Cow<'_, str>, serde_json::Error> {
    if quoted.contains('\\') {
        return serde_json::from_str::<String>(quoted).map(Cow::Owned);
    }
    Ok(Cow::Borrowed(
        quoted
            .strip_prefix('"')
            .and_then(|q| q.strip_suffix('"'))
            .unwrap_or(quoted),
    ))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::walk::tests::near_json;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// The quick reading is the careful one, or none.
        #[test]
        fn both_readings_agree(body in near_json()) {
            if let Some(quick) = Object::walk(&body, |_, at| walk::value(body.as_bytes(), at)) {
                prop_assert_eq!(Ok(quick), Object::read(&body), "{}", body);
            }
        }
    }
}
