//! How much may a `tokenizer.json` make a tokenizer do?
//!
//! The file comes from an engine's folder, so it is input. It is looked at before any library builds something of it: the
//! counts of what it lists, the lengths of what it inserts, and how much longer its steps can make a text. Padding
//! and truncation are taken out, since they are not for prompts.
//!
//! What always holds: the libraries see only what was looked at here. The limits are far above every tokenizer in use:
//! those have up to 300,000 tokens, 70,000 added ones and a handful of steps.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::error::TextError;

/// Entries of the vocabulary, and as many merges.
const ENTRIES_MAX: usize = 1 << 21;
/// Bytes of all that a model says beside those.
const MODEL_REST_BYTES_MAX: usize = 64 << 10;
/// Tokens that are found before the text is split.
const ADDED_MAX: usize = 1 << 17;
/// Bytes of one of them.
const ADDED_BYTES_MAX: usize = 4 << 10;
/// Bytes of the list of them.
const ADDED_LIST_BYTES_MAX: usize = 32 << 20;
/// Bytes of normalizer, pre-tokenizer, post-processor and decoder, each; real ones have up to 400 KB, which is a table.
const PART_BYTES_MAX: usize = 4 << 20;
/// Things that each of those lists.
const PIECES_MAX: usize = 256;
/// How many times longer a text may become, at worst, before it is tokenized.
const GROWTH_MAX: u64 = 1 << 14;
/// How many times longer the decoder may make a token.
const DECODED_GROWTH_MAX: u64 = 64;
/// Bytes that a text may come to, at worst.
const NORMALIZED_BYTES_MAX: u64 = 128 << 20;

/// The parts whose steps change a text.
const PARTS: [&str; 4] = ["normalizer", "pre_tokenizer", "post_processor", "decoder"];
/// What is not for prompts: a file that pads to a petabyte ends the process.
const LEFT_OUT: [&str; 2] = ["padding", "truncation"];

/// A `tokenizer.json` within the limits.
#[derive(Debug)]
pub(crate) struct CheckedFile {
    /// Its text, without padding and truncation.
    pub(crate) json: Vec<u8>,
    /// How many times longer a text can become before it is tokenized.
    growth: u64,
}

impl CheckedFile {
    /// Looks at a file.
    ///
    /// # Errors
    /// It is no JSON object, or passes a limit: which.
    pub(crate) fn new(json: &[u8]) -> Result<Self, TextError> {
        let mut fields: BTreeMap<String, &RawValue> =
            serde_json::from_slice(json).map_err(|e| broken(&e))?;
        fields.retain(|name, _| !LEFT_OUT.contains(&name.as_str()));
        if let Some(model) = fields.get("model") {
            check_model(model.get())?;
        }
        let mut parts: BTreeMap<String, Value> = BTreeMap::new();
        for name in PARTS {
            if let Some(raw) = fields.remove(name) {
                parts.insert(name.to_owned(), part(name, raw.get())?);
            }
        }
        let growth = |name: &str| parts.get(name).map_or(1, growth_of);
        let decoded = growth("decoder");
        within(
            "times that the decoder lengthens a token",
            decoded,
            DECODED_GROWTH_MAX,
        )?;
        let growth = growth("normalizer").saturating_mul(growth("pre_tokenizer"));
        within("times that a text becomes longer", growth, GROWTH_MAX)?;
        if let Some(added) = fields.get("added_tokens") {
            check_added(added.get(), growth)?;
        }
        let json = joined(&fields, &parts)?;
        Ok(Self { json, growth })
    }

    /// The longest text that is tokenized at once.
    pub(crate) fn text_bytes_max(&self) -> usize {
        usize::try_from(NORMALIZED_BYTES_MAX / self.growth.max(1)).unwrap_or(usize::MAX)
    }
}

fn joined(
    fields: &BTreeMap<String, &RawValue>,
    parts: &BTreeMap<String, Value>,
) -> Result<Vec<u8>, TextError> {
    /// The two as one object.
    #[derive(serde::Serialize)]
    struct Whole<'a> {
        #[serde(flatten)]
        fields: &'a BTreeMap<String, &'a RawValue>,
        #[serde(flatten)]
        parts: &'a BTreeMap<String, Value>,
    }
    serde_json::to_vec(&Whole { fields, parts }).map_err(|e| broken(&e))
}

/// One of the four parts, if it lists few things.
fn part(name: &str, raw: &str) -> Result<Value, TextError> {
    within(
        &format!("bytes of the {name}"),
        raw.len() as u64,
        PART_BYTES_MAX as u64,
    )?;
    let part = serde_json::from_str(raw).map_err(|e| broken(&e))?;
    let pieces = pieces_of(&part) as u64;
    within(&format!("pieces of the {name}"), pieces, PIECES_MAX as u64)?;
    Ok(part)
}

/// How many things the lists in a part have together.
fn pieces_of(part: &Value) -> usize {
    match part {
        Value::Array(items) => items.len() + items.iter().map(pieces_of).sum::<usize>(),
        Value::Object(fields) => fields.values().map(pieces_of).sum(),
        _ => 0,
    }
}

/// How many times longer a part can make a text, in bytes: its own step, times those that it lists.
fn growth_of(part: &Value) -> u64 {
    let Value::Object(fields) = part else {
        return 1;
    };
    let text = |name: &str| fields.get(name).and_then(Value::as_str);
    let own = match text("type") {
        // Once for each place where a text is cut, which may be every byte.
        Some("Prepend") => 1 + text("prepend").map_or(0, |t| t.len() as u64),
        Some("Replace") => replaced(fields.get("pattern"), text("content").unwrap_or_default()),
        Some("Precompiled") => longest_entry(text("precompiled_charsmap").unwrap_or_default()),
        Some("NFKC" | "NFKD") => 11,
        Some("NFC" | "NFD") => 3,
        Some("Lowercase") => 2,
        Some("BertNormalizer") => 16,
        Some("ByteLevel") if fields.get("add_prefix_space") == Some(&Value::Bool(true)) => 4,
        Some("ByteLevel") => 2,
        Some("Metaspace") => 6,
        Some(_) => 1,
        // Old files do not name the kind.
        None => 6,
    };
    let lists = fields.values().filter_map(Value::as_array).flatten();
    lists.fold(own, |product, step| product.saturating_mul(growth_of(step)))
}

fn replaced(pattern: Option<&Value>, content: &str) -> u64 {
    let content = content.len() as u64;
    match pattern.and_then(|p| p.get("String")?.as_str()) {
        Some(text) if !text.is_empty() => content.div_ceil(text.len() as u64).max(1),
        // It may match everywhere, and nothing.
        _ => 1 + content,
    }
}

/// The longest text that a table of characters has: after the table's length and the table, texts that end with a zero.
fn longest_entry(table: &str) -> u64 {
    let Ok(bytes) = STANDARD.decode(table) else {
        return 1; // The library refuses it.
    };
    let texts = bytes.split_first_chunk::<4>().and_then(|(size, rest)| {
        let size = usize::try_from(u32::from_le_bytes(*size)).ok()?;
        rest.get(size..)
    });
    let texts = texts.unwrap_or(&bytes).split(|byte| *byte == 0);
    texts
        .map(|text| text.len() as u64)
        .max()
        .unwrap_or(1)
        .max(1)
}

fn check_added(raw: &str, growth: u64) -> Result<(), TextError> {
    within(
        "bytes of the added tokens",
        raw.len() as u64,
        ADDED_LIST_BYTES_MAX as u64,
    )?;
    /// What counts of an added token.
    #[derive(Deserialize)]
    struct Added {
        content: String,
    }
    let count: Count = serde_json::from_str(raw).map_err(|e| broken(&e))?;
    within("added tokens", count.0 as u64, ADDED_MAX as u64)?;
    let added: Option<Vec<Added>> = serde_json::from_str(raw).map_err(|e| broken(&e))?;
    let added = added.unwrap_or_default();
    let longest = added.iter().map(|a| a.content.len()).max().unwrap_or(0);
    within(
        "bytes of an added token",
        longest as u64,
        ADDED_BYTES_MAX as u64,
    )?;
    let sum: usize = added.iter().map(|a| a.content.len()).sum();
    let normalized = growth.saturating_mul(sum as u64);
    within(
        "bytes of the added tokens as normalized",
        normalized,
        NORMALIZED_BYTES_MAX,
    )
}

/// Looks at the vocabulary and the merges by their counts, and at all else by its bytes.
fn check_model(raw: &str) -> Result<(), TextError> {
    let shape: ModelShape = serde_json::from_str(raw).map_err(|e| broken(&e))?;
    within(
        "tokens of the vocabulary",
        shape.vocab as u64,
        ENTRIES_MAX as u64,
    )?;
    within("merges", shape.merges as u64, ENTRIES_MAX as u64)?;
    within(
        "bytes of the model's other fields",
        shape.rest as u64,
        MODEL_REST_BYTES_MAX as u64,
    )
}

/// How large the parts of a model are; a field that is there twice counts twice.
#[derive(Default)]
struct ModelShape {
    vocab: usize,
    merges: usize,
    rest: usize,
}

impl<'de> Deserialize<'de> for ModelShape {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = ModelShape;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a model")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ModelShape, A::Error> {
                let mut shape = ModelShape::default();
                while let Some(name) = map.next_key::<String>()? {
                    match name.as_str() {
                        "vocab" => shape.vocab += map.next_value::<Count>()?.0,
                        "merges" => shape.merges += map.next_value::<Count>()?.0,
                        _ => shape.rest += name.len() + map.next_value::<&RawValue>()?.get().len(),
                    }
                }
                Ok(shape)
            }
        }
        from.deserialize_map(Fields)
    }
}

/// The length of a list or an object, or nothing.
struct Count(usize);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Count;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a list or an object")
            }
            fn visit_unit<E>(self) -> Result<Count, E> {
                Ok(Count(0))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Count, A::Error> {
                let mut count = 0;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Count(count))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Count, A::Error> {
                let mut count = 0;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Count(count))
            }
        }
        from.deserialize_any(Entries)
    }
}

fn within(what: &str, found: u64, max: u64) -> Result<(), TextError> {
    if found <= max {
        return Ok(());
    }
    let reason = format!("{what}: {found}; the limit is {max}");
    Err(TextError::Tokenizer(reason))
}

fn broken(error: &serde_json::Error) -> TextError {
    TextError::Tokenizer(error.to_string())
}

#[cfg(test)]
mod tests;
