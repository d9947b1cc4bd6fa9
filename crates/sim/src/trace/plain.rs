//! Our own form, one object per line:
//! `{"at_ms": t, "output_tokens": m, ...}` with one of
//! `"tokens": [..]`, `"text": "..."`, or `"local_hashes": [..], "block_size": b, "input_tokens": n`.
//!
//! The last one is what a router can record without keeping anybody's words: the hashes it routed by.
//! Text is not tokenized: four bytes count as one token, equal text is equal tokens.

use std::sync::Arc;

use kvasir_types::{LocalHash, Rng, Time, Token};
use serde_json::Value;

use super::read::{Entry, TOKENS_MAX, count, millis, moment, priority, session};
use super::{TraceOptions, TraceRequest};
use crate::PromptSource;
use crate::prompt::VOCABULARY;

/// Bytes of text that count as one token.
const BYTES_PER_TOKEN: usize = 4;

pub(super) fn entry(value: &Value, options: &TraceOptions, line: u64) -> Result<Entry, String> {
    let at = moment(value, &["at_ms", "timestamp"])?;
    let session = session(value);
    let Some(at) = at.or(session.as_ref().map(|_| Time::ZERO)) else {
        return Err("`at_ms` is missing".to_owned());
    };
    let prompt = prompt(value)?;
    if prompt.is_empty() {
        return Err("the prompt is empty".to_owned());
    }
    let names = ["output_tokens", "max_tokens", "output_length"];
    let request = TraceRequest {
        at,
        prompt,
        output_tokens: count(value, &names, TOKENS_MAX)?.max(1),
        answer_seed: Rng::new(options.seed ^ line.rotate_left(32) ^ 0x5A).next_u64(),
        follows: None,
        priority: priority(value)?,
    };
    let delay = millis(value, &["delay_ms", "delay"])?.unwrap_or_default();
    Ok(Entry {
        request,
        session,
        delay,
    })
}

fn prompt(value: &Value) -> Result<PromptSource, String> {
    if let Some(tokens) = value.get("tokens") {
        let read = |t: &Value| t.as_u64().and_then(|t| Token::try_from(t).ok());
        let list = tokens.as_array().ok_or("`tokens` is no list")?;
        let tokens: Option<Box<[Token]>> = list.iter().map(read).collect();
        return Ok(PromptSource::Tokens(
            tokens.ok_or("`tokens` has something that is no token id")?,
        ));
    }
    if let Some(text) = value.get("text") {
        let text = text.as_str().ok_or("`text` is no string")?;
        return Ok(PromptSource::Tokens(text_tokens(text)));
    }
    let Some(hashes) = value.get("local_hashes") else {
        return Err("one of `tokens`, `text`, `local_hashes` or `hash_ids` is needed".to_owned());
    };
    let list = hashes.as_array().ok_or("`local_hashes` is no list")?;
    let read = |h: &Value| {
        h.as_u64()
            .or_else(|| Some(h.as_i64()? as u64))
            .map(LocalHash)
    };
    let locals: Option<Arc<[LocalHash]>> = list.iter().map(read).collect();
    let locals = locals.ok_or("`local_hashes` has something that is no 64-bit number")?;
    let block_size = count(value, &["block_size"], 1 << 20)?;
    let len = count(value, &["input_tokens", "input_length"], TOKENS_MAX)?;
    if block_size == 0 || (len / block_size) as usize != locals.len() {
        return Err(format!(
            "{len} tokens in blocks of {block_size} do not have {} complete blocks",
            locals.len()
        ));
    }
    Ok(PromptSource::Hashes {
        block_size,
        len,
        locals,
    })
}

fn text_tokens(text: &str) -> Box<[Token]> {
    let token = |piece: &[u8]| {
        let number = piece.iter().fold(0u64, |n, byte| n << 8 | u64::from(*byte));
        Rng::new(number).below(u64::from(VOCABULARY)) as Token
    };
    text.as_bytes().chunks(BYTES_PER_TOKEN).map(token).collect()
}
