//! Prompts from known shapes, without running the template.
//!
//! Answers one question: what does a template print for a conversation, if it printed another before that differs
//! only in the texts of its messages? For templates that pass texts on without looking inside (`text_use`), a
//! conversation is run once with a mark in place of each text; what comes out around the marks is kept, and later
//! conversations of that shape are that and their own texts.
//!
//! Invariants: what is put together is what the template prints: a shape is kept only after it has been compared with
//! the real prompt of the conversation it was learnt from, one use in ten thousand is compared again, and the first
//! difference disables it for that model; memory stays under [`SHAPES_BYTES_MAX`]; no lock is held while rendering.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use xxhash_rust::xxh3::xxh3_64;

use super::text_use::TextRequirements;
use crate::chat::ChatInput;
use crate::error::TextError;
use crate::scratch;

/// Memory for shapes; when it is used up, all are forgotten.
const SHAPES_BYTES_MAX: usize = 8 << 20;
/// A conversation with more than this beside its texts is rendered.
const KEY_BYTES_MAX: usize = 64 << 10;
/// What a kept shape costs beside its key and text.
const SHAPE_OVERHEAD: usize = 128;
/// Shapes seen lately, by hash: one is learnt when it comes the second time.
const SEEN: usize = 4096;
/// Of this many uses one is rendered too and compared.
const CHECK_EVERY: u64 = 10_000;

/// A mark is an opening, the number of the text in base 16, and an end; all from the private use area.
const OPEN: char = '\u{e000}';
const CLOSE: char = '\u{e001}';
const DIGIT: u32 = 0xe010;

/// Whether marks are made of this character.
pub(super) fn is_mark(c: char) -> bool {
    ('\u{e000}'..='\u{e01f}').contains(&c)
}

/// A prompt that a template printed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderedPrompt {
    pub(crate) text: String,
    /// Where in it texts of messages begin, as far as that is known: what lies before is likely to come again.
    pub(crate) begins: Vec<usize>,
}

impl RenderedPrompt {
    /// Its text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Its text, alone.
    pub(crate) fn into_text(mut self) -> String {
        std::mem::take(&mut self.text)
    }
}

impl Drop for RenderedPrompt {
    fn drop(&mut self) {
        scratch::give_text(std::mem::take(&mut self.text));
    }
}

impl From<String> for RenderedPrompt {
    fn from(text: String) -> Self {
        Self {
            text,
            begins: Vec::new(),
        }
    }
}

/// The shapes of one model's conversations.
pub(super) struct ShapeCache {
    requirements: TextRequirements,
    shapes: RwLock<Shapes>,
    seen: Box<[AtomicU64]>,
    uses: AtomicU64,
    disabled: AtomicBool,
}

#[derive(Default)]
struct Shapes {
    by_hash: HashMap<u64, Arc<Shape>>,
    used: usize,
}

/// What a template prints around texts.
#[derive(Debug, PartialEq, Eq)]
struct Shape {
    /// Everything of the request that the prompt depends on, but for the texts.
    key: Box<[u8]>,
    printed: String,
    /// Where in `printed` which text goes, in order.
    texts: Vec<(usize, usize)>,
}

/// A conversation, its texts apart from the rest.
struct ConversationParts<'a> {
    key: Vec<u8>,
    /// The messages that have a text, with what takes its place: a mark, or the text itself.
    texts: Vec<Text<'a>>,
}

/// A text as it stands in the messages. Where the template requirements nothing of it, it is decoded when a prompt is
/// made of it and not before: a conversation whose shape is new then costs little more than rendering it.
struct Text<'a> {
    span: Range<usize>,
    /// The JSON string, with its quotes.
    quoted: &'a str,
    decoded: Option<Cow<'a, str>>,
    /// Whether a mark takes its place.
    marked: bool,
}

impl ShapeCache {
    /// For a template that asks this of texts.
    pub(super) fn new(requirements: TextRequirements) -> Self {
        Self {
            requirements,
            shapes: RwLock::default(),
            seen: (0..SEEN).map(|_| AtomicU64::new(0)).collect(),
            uses: AtomicU64::new(0),
            disabled: AtomicBool::new(false),
        }
    }

    /// The prompt of `input`; `render` runs the template with the messages it is given.
    pub(super) fn render(
        &self,
        input: &ChatInput<'_>,
        render: impl Fn(&str) -> Result<String, TextError>,
    ) -> Result<RenderedPrompt, TextError> {
        let parts = match input.contents {
            Some(spans) if !self.disabled.load(Ordering::Relaxed) => self.split(input, spans),
            _ => None,
        };
        let Some(parts) = parts else {
            return render(input.messages).map(RenderedPrompt::from);
        };
        let hash = xxh3_64(&parts.key);
        if let Some(shape) = self.find(hash, &parts.key) {
            return self.use_shape(&shape, &parts, || render(input.messages));
        }
        let prompt = render(input.messages)?;
        let slot = self.seen.get(hash as usize % SEEN);
        let known = slot.is_some_and(|slot| slot.swap(hash, Ordering::Relaxed) == hash);
        if known && !mentions_marks(&parts.key) {
            self.learn(hash, parts, input.messages, &prompt, render);
        }
        Ok(prompt.into())
    }

    /// Takes the texts out of a conversation; `None` if it is to be rendered.
    fn split<'a>(
        &self,
        input: &ChatInput<'a>,
        spans: &[Range<usize>],
    ) -> Option<ConversationParts<'a>> {
        if input.continue_final_message {
            return None;
        }
        let messages = input.messages;
        let mut texts = Vec::with_capacity(spans.len());
        let mut key = Vec::with_capacity(256);
        key.push(input.dialect as u8);
        key.push(u8::from(input.add_generation_prompt));
        if self.requirements.time {
            key.extend_from_slice(&input.now_unix.to_le_bytes());
        }
        let rest = [
            input.tools,
            input.documents,
            input.kwargs,
            input.reasoning_effort,
        ];
        for part in rest {
            let len = part.map_or(u64::MAX, |part| part.len() as u64);
            key.extend_from_slice(&len.to_le_bytes());
            key.extend_from_slice(part.unwrap_or_default().as_bytes());
        }
        let mut done = 0;
        for span in spans {
            let quoted = messages.get(span.start.checked_sub(1)?..span.end + 1)?;
            let decoded = match self.requirements.need_the_text() {
                true => Some(decode(quoted)?),
                false => None,
            };
            let meets = decoded.as_deref().is_none_or(|text| self.meets(text));
            let marked = !span.is_empty() && meets;
            if marked {
                // No JSON has this byte in it.
                key.extend_from_slice(messages.get(done..span.start)?.as_bytes());
                key.push(0);
                done = span.end;
            }
            texts.push(Text {
                span: span.clone(),
                quoted,
                decoded,
                marked,
            });
        }
        key.extend_from_slice(messages.get(done..)?.as_bytes());
        (key.len() <= KEY_BYTES_MAX).then_some(ConversationParts { key, texts })
    }

    /// Whether a text is as the template requirements.
    fn meets(&self, text: &str) -> bool {
        let TextRequirements {
            trimmed, without, ..
        } = &self.requirements;
        let blank = char::is_whitespace;
        let untrimmed = *trimmed && (text.starts_with(blank) || text.ends_with(blank));
        let mut words = without.iter();
        !untrimmed && words.all(|word| !text.contains(word.as_str()))
    }

    fn find(&self, hash: u64, key: &[u8]) -> Option<Arc<Shape>> {
        let shapes = self.shapes.read().unwrap_or_else(PoisonError::into_inner);
        let shape = shapes.by_hash.get(&hash)?;
        (*shape.key == *key).then(|| Arc::clone(shape))
    }

    fn use_shape(
        &self,
        shape: &Shape,
        parts: &ConversationParts<'_>,
        render: impl FnOnce() -> Result<String, TextError>,
    ) -> Result<RenderedPrompt, TextError> {
        let Some(prompt) = shape.fill(&parts.texts) else {
            return render().map(RenderedPrompt::from);
        };
        let number = self.uses.fetch_add(1, Ordering::Relaxed);
        if number % CHECK_EVERY != CHECK_EVERY - 1 {
            return Ok(prompt);
        }
        let wanted = render()?;
        self.compare(&prompt.text, &wanted);
        Ok(wanted.into())
    }

    fn compare(&self, prompt: &str, wanted: &str) -> bool {
        let same = prompt == wanted;
        if !same {
            self.disabled.store(true, Ordering::Relaxed);
        }
        same
    }

    fn learn(
        &self,
        hash: u64,
        parts: ConversationParts<'_>,
        messages: &str,
        prompt: &str,
        render: impl Fn(&str) -> Result<String, TextError>,
    ) {
        let Ok(printed) = render(&with_marks(messages, &parts.texts)) else {
            return;
        };
        let Some(shape) = Shape::read(parts.key, &printed) else {
            return;
        };
        let Some(filled) = shape.fill(&parts.texts) else {
            return;
        };
        if self.compare(&filled.text, prompt) {
            let mut shapes = self.shapes.write().unwrap_or_else(PoisonError::into_inner);
            shapes.insert(hash, shape);
        }
    }
}

impl Shapes {
    fn insert(&mut self, hash: u64, shape: Shape) {
        if self.used + shape.cost() > SHAPES_BYTES_MAX {
            *self = Self::default();
        }
        self.used += shape.cost();
        if let Some(gone) = self.by_hash.insert(hash, Arc::new(shape)) {
            self.used -= gone.cost();
        }
    }
}

impl Shape {
    fn cost(&self) -> usize {
        let texts = size_of_val(self.texts.as_slice());
        self.key.len() + self.printed.len() + texts + SHAPE_OVERHEAD
    }

    /// Takes the marks out of what was printed; `None` if one is not whole.
    fn read(key: Vec<u8>, printed: &str) -> Option<Self> {
        let mut shape = Self {
            key: key.into_boxed_slice(),
            printed: String::with_capacity(printed.len()),
            texts: Vec::new(),
        };
        let mut rest = printed;
        while let Some((before, after)) = rest.split_once(OPEN) {
            let (number, after) = after.split_once(CLOSE)?;
            shape.printed.push_str(before);
            shape
                .texts
                .push((shape.printed.len(), read_number(number)?));
            rest = after;
        }
        shape.printed.push_str(rest);
        (!shape.printed.contains(is_mark)).then_some(shape)
    }

    /// What is printed, with these texts; `None` if one is no JSON string.
    fn fill(&self, texts: &[Text<'_>]) -> Option<RenderedPrompt> {
        let decoded = texts.iter().map(|text| match &text.decoded {
            Some(text) => Some(Cow::Borrowed(&**text)),
            None => decode(text.quoted),
        });
        let decoded: Vec<Cow<'_, str>> = decoded.collect::<Option<_>>()?;
        let text = |at: usize| decoded.get(at).map_or("", |text| &**text);
        let longer: usize = self
            .texts
            .iter()
            .map(|(_, number)| text(*number).len())
            .sum();
        let mut prompt = scratch::take_text(self.printed.len() + longer);
        let mut begins = Vec::with_capacity(self.texts.len());
        let mut done = 0;
        for (at, number) in &self.texts {
            prompt.push_str(self.printed.get(done..*at).unwrap_or_default());
            begins.push(prompt.len());
            prompt.push_str(text(*number));
            done = *at;
        }
        prompt.push_str(self.printed.get(done..).unwrap_or_default());
        Some(RenderedPrompt {
            text: prompt,
            begins,
        })
    }
}

/// The text that a JSON string stands for.
fn decode(quoted: &str) -> Option<Cow<'_, str>> {
    if memchr::memchr(b'\\', quoted.as_bytes()).is_none() {
        return quoted.get(1..quoted.len() - 1).map(Cow::Borrowed);
    }
    serde_json::from_str(quoted).ok().map(Cow::Owned)
}

/// Whether something that is not a text could be taken for a mark, written out or escaped.
fn mentions_marks(key: &[u8]) -> bool {
    let open = OPEN.to_string();
    let written = key.windows(open.len()).any(|part| part == open.as_bytes());
    written
        || key
            .windows(4)
            .any(|part| part.eq_ignore_ascii_case(b"e000"))
}

/// The messages with marks in place of texts.
fn with_marks(messages: &str, texts: &[Text<'_>]) -> String {
    let mut marked = String::with_capacity(messages.len());
    let mut done = 0;
    for (number, text) in texts.iter().enumerate().filter(|(_, text)| text.marked) {
        marked.push_str(messages.get(done..text.span.start).unwrap_or_default());
        marked.push(OPEN);
        write_number(&mut marked, number);
        marked.push(CLOSE);
        done = text.span.end;
    }
    marked + messages.get(done..).unwrap_or_default()
}

fn write_number(out: &mut String, mut number: usize) {
    loop {
        out.extend(char::from_u32(DIGIT + number as u32 % 16));
        number /= 16;
        if number == 0 {
            return;
        }
    }
}

/// Lowest digit first.
fn read_number(digits: &str) -> Option<usize> {
    let mut number = 0usize;
    for digit in digits.chars().rev() {
        let digit = u32::from(digit).checked_sub(DIGIT).filter(|d| *d < 16)?;
        number = number.checked_mul(16)?.checked_add(digit as usize)?;
    }
    Some(number)
}

#[cfg(test)]
mod tests;
