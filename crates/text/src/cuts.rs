//! Where a text can be cut without changing its tokens.
//!
//! Answers one question: at which places does `encode(a + b) = encode(a) + encode(b)` hold, whatever follows? Three
//! things must hold at a cut: no added token spans it, normalisation does not act across it, and the pattern
//! that splits text into words ends a match there and still ends it when the text stops there.
//!
//! Two kinds of place have all three, for the patterns listed here and for no other:
//! after an ASCII letter or digit when a space or line end follows (a run of letters or digits ends there in
//! every alternative, and no look-ahead reaches to the left); and, for patterns that treat line ends as a group, after
//! a line end when a visible character follows.
//!
//! Elsewhere: what is done with the pieces (`prefix`). A tokenizer that is not recognised is never cut.

use serde::Deserialize;
use serde_json::Value;

/// The rules by which one tokenizer's texts can be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CutRules {
    /// Cutting after a line end is safe too.
    after_line: bool,
}

/// Patterns whose alternatives were read and tested. The second value: line ends form a group of their own.
pub(crate) const PATTERNS: [(&str, bool); 7] = [
    // GPT-2
    (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        false,
    ),
    // cl100k, Llama 3
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        true,
    ),
    // Qwen 2 and 3
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        true,
    ),
    // Qwen 3.5
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        true,
    ),
    // o200k
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        true,
    ),
    // Mistral's Tekken
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        true,
    ),
    // The built-in tokenizer
    (
        r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s",
        true,
    ),
];

impl CutRules {
    /// Reads a `tokenizer.json`; none if cutting is not known to be safe.
    pub(crate) fn of(json: &[u8]) -> Option<Self> {
        let file: TokenizerFile = serde_json::from_slice(json).ok()?;
        let composes_only = match &file.normalizer {
            None | Some(Value::Null) => true,
            Some(normalizer) => normalizer["type"] == "NFC",
        };
        let model = &file.model;
        let plain_bpe = model.kind.as_deref() == Some("BPE")
            && model.dropout.is_none_or(|d| d == 0.0)
            && unset(&model.continuing_subword_prefix)
            && unset(&model.end_of_word_suffix);
        let after_line = line_rule(file.pre_tokenizer.as_ref()?)?;
        let harmless = file.added_tokens.iter().all(AddedToken::is_harmless);
        (composes_only && plain_bpe && harmless).then_some(Self { after_line })
    }

    /// The first safe cut at or after byte `from`, inside the text.
    pub(crate) fn next(self, text: &str, from: usize) -> Option<usize> {
        let bytes = text.as_bytes();
        (from.max(1)..bytes.len()).find(|at| self.is_cut(text, bytes, *at))
    }

    /// Whether the text can be cut at byte `at`.
    pub(crate) fn is_safe(self, text: &str, at: usize) -> bool {
        let bytes = text.as_bytes();
        (1..bytes.len()).contains(&at) && self.is_cut(text, bytes, at)
    }

    fn is_cut(self, text: &str, bytes: &[u8], at: usize) -> bool {
        let (before, after) = (bytes[at - 1], bytes[at]);
        if matches!(after, b' ' | b'\n') {
            return before.is_ascii_alphanumeric();
        }
        if before != b'\n' || !self.after_line || after == b'/' {
            return false;
        }
        if after.is_ascii() {
            return after.is_ascii_graphic();
        }
        let next = text.get(at..).and_then(|rest| rest.chars().next());
        next.is_some_and(char::is_alphabetic)
    }
}

/// Whether line ends form a group, for a pre-tokenizer that is one known pattern and then bytes.
fn line_rule(pre_tokenizer: &Value) -> Option<bool> {
    let bytes = |step: &Value, own_pattern: bool| {
        step["type"] == "ByteLevel"
            && step["add_prefix_space"] == false
            && step["use_regex"].as_bool().unwrap_or(true) == own_pattern
    };
    if bytes(pre_tokenizer, true) {
        return Some(PATTERNS[0].1);
    }
    let [split, last] = &pre_tokenizer["pretokenizers"].as_array()?[..] else {
        return None;
    };
    let isolates = split["type"] == "Split"
        && match split["behavior"].as_str() {
            Some("Isolated") => true,
            Some("Removed") => split["invert"] == true,
            _ => false,
        };
    let pattern = split["pattern"]["Regex"].as_str()?;
    let known = PATTERNS.iter().find(|(known, _)| *known == pattern)?;
    (isolates && bytes(last, false)).then_some(known.1)
}

fn unset(text: &Option<String>) -> bool {
    text.as_deref().unwrap_or_default().is_empty()
}

#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    normalizer: Option<Value>,
    #[serde(default)]
    pre_tokenizer: Option<Value>,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f64>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

#[derive(Deserialize)]
struct AddedToken {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

impl AddedToken {
    /// It neither reaches past its own text nor has a cut inside it.
    fn is_harmless(&self) -> bool {
        let space_inside = self.content.bytes().any(|b| matches!(b, b' ' | b'\n'));
        !(self.single_word || self.lstrip || self.rstrip || space_inside)
    }
}

#[cfg(test)]
pub(crate) mod tests;
