//! The parts of a body that routing needs; the engine judges the rest.
//!
//! Answers two questions: what does the router need to know of it, and which bytes must change? Unknown
//! fields, odd values and new features pass untouched; a field of the wrong type is as if it were absent.
//!
//! Invariant: outside the spans that an edit names, the bytes that go out are the bytes that came in.

use std::borrow::Cow;

use bytes::{Bytes, BytesMut};
use serde::Deserialize;

use crate::completion::{Prompt, first_prompt, prompts};
use crate::contents::{content_spans, contents_at};
use crate::object::{JsonError, Object, Span, text_of};
use crate::walk;

/// What the router reads of a body that it does not judge.
#[derive(Clone, Debug)]
pub struct Scan<'a> {
    object: Object<'a>,
    /// Where the texts of the messages are in them, where that is clear.
    contents: Option<Vec<Span>>,
}

impl<'a> Scan<'a> {
    /// Reads the top level.
    ///
    /// # Errors
    /// Not UTF-8, not JSON, or not an object: no engine could read it either.
    pub fn parse(body: &'a [u8]) -> Result<Self, JsonError> {
        let body = text_of(body)?;
        // Most of a body is its messages: one walk finds where they end and what is in them.
        let (mut contents, mut lists) = (None, 0);
        let object = Object::parse_with(body, |key, at| {
            if key == "messages" {
                lists += 1;
                if let Some((end, spans)) = contents_at(body, at) {
                    contents = spans;
                    return Some(end);
                }
                contents = None;
            }
            walk::value(body.as_bytes(), at)
        })?;
        // What the quick reader saw counts if it saw all: a later one of the same name counts instead.
        let named = object.fields().iter().filter(|f| f.key == "messages");
        if lists != 1 || named.count() != 1 {
            contents = object.get("messages").and_then(|f| content_spans(f.value));
        }
        Ok(Self { object, contents })
    }

    /// Where in [`Self::messages`] the contents that are strings stand, as [`content_spans`] finds them.
    #[must_use]
    pub fn content_spans(&self) -> Option<&[Span]> {
        self.contents.as_deref()
    }

    /// All fields.
    #[must_use]
    pub fn object(&self) -> &Object<'a> {
        &self.object
    }

    /// The model's name.
    #[must_use]
    pub fn model(&self) -> Option<Cow<'a, str>> {
        self.text("model")
    }

    /// Whether the answer is to be streamed.
    #[must_use]
    pub fn stream(&self) -> bool {
        self.read("stream").unwrap_or(false)
    }

    /// Whether the client asked for usage at the end of its stream.
    #[must_use]
    pub fn include_usage(&self) -> bool {
        self.stream_options()
            .and_then(|o| read(o.get("include_usage")?.value))
            .unwrap_or(false)
    }

    /// Whether the client asked for usage with every chunk of its stream, as engines offer it.
    #[must_use]
    pub fn continuous_usage(&self) -> bool {
        self.stream_options()
            .and_then(|o| read(o.get("continuous_usage_stats")?.value))
            .unwrap_or(false)
    }

    /// The `messages` as JSON text.
    #[must_use]
    pub fn messages(&self) -> Option<&'a str> {
        self.raw("messages")
    }

    /// The `tools` as JSON text.
    #[must_use]
    pub fn tools(&self) -> Option<&'a str> {
        self.raw("tools")
    }

    /// The `documents` as JSON text.
    #[must_use]
    pub fn documents(&self) -> Option<&'a str> {
        self.raw("documents")
    }

    /// The variables for the chat template, as JSON text.
    #[must_use]
    pub fn template_kwargs(&self) -> Option<&'a str> {
        self.raw("chat_template_kwargs")
    }

    /// The client's own template; prompts made with it cannot be predicted from the model's.
    #[must_use]
    pub fn chat_template(&self) -> Option<Cow<'a, str>> {
        self.text("chat_template")
    }

    /// How hard to think, for templates that know it.
    #[must_use]
    pub fn reasoning_effort(&self) -> Option<Cow<'a, str>> {
        self.text("reasoning_effort")
    }

    /// Whether the prompt ends with the opening of an answer.
    #[must_use]
    pub fn add_generation_prompt(&self) -> bool {
        self.read("add_generation_prompt").unwrap_or(true)
    }

    /// Whether the last message is to be continued.
    #[must_use]
    pub fn continue_final_message(&self) -> bool {
        self.read("continue_final_message").unwrap_or(false)
    }

    /// Whether the tokenizer adds its own special tokens; none when the client does not say.
    #[must_use]
    pub fn add_special_tokens(&self) -> Option<bool> {
        self.read("add_special_tokens")
    }

    /// The prompts of a completion, if they have one of the forms of the API.
    #[must_use]
    pub fn prompts(&self) -> Option<Vec<Prompt>> {
        prompts(self.raw("prompt")?)
    }

    /// The first prompt of a completion, and whether it is the only one and was read to its end. Of ids at most `ids_max`
    /// are read.
    #[must_use]
    pub fn first_prompt(&self, ids_max: usize) -> Option<(Prompt, bool)> {
        first_prompt(self.raw("prompt")?, ids_max)
    }

    /// Most tokens of the answer; the newer name wins.
    #[must_use]
    pub fn max_tokens(&self) -> Option<u32> {
        self.read("max_completion_tokens")
            .or_else(|| self.read("max_tokens"))
    }

    /// Choices per prompt.
    #[must_use]
    pub fn n(&self) -> u32 {
        self.read("n").unwrap_or(1)
    }

    /// Cache namespace from the top level; empty is none.
    #[must_use]
    pub fn cache_salt(&self) -> Option<Cow<'a, str>> {
        self.text("cache_salt").filter(|s| !s.is_empty())
    }

    /// Priority from the top level.
    #[must_use]
    pub fn priority(&self) -> Option<i32> {
        self.read("priority")
    }

    /// The extension object as JSON text, for [`crate::Nvext::parse`].
    #[must_use]
    pub fn nvext(&self) -> Option<&'a str> {
        self.raw("nvext")
    }

    /// The text of a field; `null` is absent.
    #[must_use]
    pub fn raw(&self, key: &str) -> Option<&'a str> {
        let value = self.object.get(key)?.value;
        (value != "null").then_some(value)
    }

    fn read<T: Deserialize<'a>>(&self, key: &str) -> Option<T> {
        read(self.raw(key)?)
    }

    fn text(&self, key: &str) -> Option<Cow<'a, str>> {
        let raw = self.raw(key)?;
        let inner = raw.strip_prefix('"')?.strip_suffix('"')?;
        if inner.contains('\\') {
            return read::<String>(raw).map(Cow::Owned);
        }
        Some(Cow::Borrowed(inner))
    }

    fn stream_options(&self) -> Option<Object<'a>> {
        Object::parse_str(self.raw("stream_options")?).ok()
    }

    /// Starts a list of changes.
    #[must_use]
    pub fn edit(&self) -> Edits<'_, 'a> {
        Edits::of(&self.object)
    }
}

fn read<'a, T: Deserialize<'a>>(text: &'a str) -> Option<T> {
    serde_json::from_str(text).ok()
}

/// Changes to a body, made all at once by [`Edits::apply`].
#[derive(Clone, Debug)]
pub struct Edits<'o, 'a> {
    object: &'o Object<'a>,
    removed: Vec<bool>,
    replaced: Vec<(Span, String)>,
    added: Vec<(&'static str, String)>,
}

impl<'o, 'a> Edits<'o, 'a> {
    /// No change yet.
    pub(crate) fn of(object: &'o Object<'a>) -> Self {
        Self {
            object,
            removed: vec![false; object.fields().len()],
            replaced: Vec::new(),
            added: Vec::new(),
        }
    }

    /// What is changed.
    pub(crate) fn object(&self) -> &'o Object<'a> {
        self.object
    }

    /// Takes out every field named `key`, each with its comma.
    pub fn remove(&mut self, key: &str) -> &mut Self {
        self.remove_where(|name| name == key)
    }

    /// Takes out every field whose name is one of those, each with its comma.
    pub(crate) fn remove_where(&mut self, is: impl Fn(&str) -> bool) -> &mut Self {
        for (gone, field) in self.removed.iter_mut().zip(self.object.fields()) {
            *gone |= is(&field.key);
        }
        self
    }

    /// Sets field `key` (a plain ASCII name) to the JSON text `value`: its last value is replaced, or it is
    /// put in front. Set a field once.
    pub fn set(&mut self, key: &'static str, value: &str) -> &mut Self {
        match self.object.get(key) {
            Some(field) => self.replaced.push((field.span.clone(), value.to_owned())),
            None => self.added.push((key, value.to_owned())),
        }
        self
    }

    /// Puts `value` where `span` is; the caller sees to it that spans do not overlap.
    pub(crate) fn replace(&mut self, span: Span, value: &str) {
        self.replaced.push((span, value.to_owned()));
    }

    /// Asks the engine for usage at the end of the stream and, if `each`, with every chunk; keeps the client's
    /// other stream options.
    pub fn ask_usage(&mut self, each: bool) -> &mut Self {
        const END: &str = "{\"include_usage\":true}";
        const EACH: &str = "{\"include_usage\":true,\"continuous_usage_stats\":true}";
        let whole = if each { EACH } else { END };
        let given = self.object.get("stream_options");
        let Some(field) = given.filter(|field| field.value != "null") else {
            return self.set("stream_options", whole);
        };
        let Ok(inner) = Object::parse_str(field.value) else {
            return self; // Not what it must be: the engine says so.
        };
        let base = field.span.start;
        let mut missing = Vec::new();
        let keys = ["include_usage", "continuous_usage_stats"];
        for key in keys.into_iter().take(if each { 2 } else { 1 }) {
            match inner.get(key) {
                Some(asked) => {
                    let span = base + asked.span.start..base + asked.span.end;
                    self.replaced.push((span, "true".to_owned()));
                }
                None => missing.push(format!("\"{key}\":true")),
            }
        }
        if !missing.is_empty() {
            let at = base + inner.opening();
            let comma = if inner.fields().is_empty() { "" } else { "," };
            self.replaced.push((at..at, missing.join(",") + comma));
        }
        self
    }

    /// Whether the body goes out as it came.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.replaced.is_empty() && self.added.is_empty() && !self.removed.contains(&true)
    }

    /// The body to send: the same bytes when nothing changed, else one copy with the changes in it.
    /// `body` is the buffer that was scanned.
    #[must_use]
    pub fn apply(&self, body: &Bytes) -> Bytes {
        if self.is_empty() {
            return body.clone();
        }
        let mut changes = self.cuts();
        changes.extend(self.replaced.iter().cloned());
        if !self.added.is_empty() {
            let at = self.object.opening();
            changes.push((at..at, self.insertion()));
        }
        changes.sort_by_key(|(span, _)| (span.start, span.end));
        let grown: usize = changes.iter().map(|(_, text)| text.len()).sum();
        let mut out = BytesMut::with_capacity(body.len() + grown);
        let mut done = 0;
        for (span, text) in &changes {
            if span.start < done {
                continue;
            }
            out.extend_from_slice(body.get(done..span.start).unwrap_or_default());
            out.extend_from_slice(text.as_bytes());
            done = span.end;
        }
        out.extend_from_slice(body.get(done..).unwrap_or_default());
        out.freeze()
    }

    fn insertion(&self) -> String {
        let mut text = String::new();
        for (i, (key, value)) in self.added.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            text += &format!("{comma}\"{key}\":{value}");
        }
        if self.removed.contains(&false) {
            text.push(',');
        }
        text
    }

    /// The spans that removed fields and their commas take, one for each run of removed fields.
    fn cuts(&self) -> Vec<(Span, String)> {
        let fields = self.object.fields();
        let mut cuts = Vec::new();
        let mut at = 0;
        while at < fields.len() {
            if !self.removed[at] {
                at += 1;
                continue;
            }
            let first = at;
            while self.removed.get(at) == Some(&true) {
                at += 1;
            }
            let span = match (first.checked_sub(1), fields.get(at)) {
                (_, Some(next)) => fields[first].key_span.start..next.key_span.start,
                (Some(before), None) => fields[before].span.end..fields[at - 1].span.end,
                (None, None) => fields[first].key_span.start..fields[at - 1].span.end,
            };
            cuts.push((span, String::new()));
        }
        cuts
    }
}

#[cfg(test)]
mod tests;
