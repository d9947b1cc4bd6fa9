//! The published form: `{"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [..]}`.
//!
//! An id stands for one block of a prompt *and all before it*; the last one may be partial. Tokens are
//! not published: an id becomes the same made-up tokens wherever it stands, so that equal prefixes stay
//! equal at any engine block size.

use kvasir_types::{Rng, Time};
use serde_json::Value;

use super::read::{Entry, TOKENS_MAX, count, millis, moment, priority, session};
use super::{TraceOptions, TraceRequest};
use crate::{Piece, PromptSource};

pub(super) fn entry(value: &Value, options: &TraceOptions, line: u64) -> Result<Entry, String> {
    let at = moment(value, &["timestamp", "created_time"])?;
    let session = session(value);
    let Some(at) = at.or(session.as_ref().map(|_| Time::ZERO)) else {
        return Err("`timestamp` is missing".to_owned());
    };
    let input = count(value, &["input_length", "input_tokens"], TOKENS_MAX)?;
    let output = count(value, &["output_length", "output_tokens"], TOKENS_MAX)?;
    if input == 0 {
        return Err("`input_length` is 0; a prompt has at least one token".to_owned());
    }
    let request = TraceRequest {
        at,
        prompt: PromptSource::Pieces(pieces(value, input, options)?),
        output_tokens: output.max(1),
        answer_seed: Rng::new(options.seed ^ line.rotate_left(32) ^ 0xA5).next_u64(),
        follows: None,
        priority: priority(value)?,
    };
    let delay = millis(value, &["delay", "delay_ms"])?.unwrap_or_default();
    Ok(Entry {
        request,
        session,
        delay,
    })
}

fn pieces(value: &Value, input: u32, options: &TraceOptions) -> Result<Box<[Piece]>, String> {
    let Some(ids) = value.get("hash_ids").and_then(Value::as_array) else {
        return Err("`hash_ids` is missing or no list".to_owned());
    };
    let size = options.trace_block_size.max(1);
    let needed = input.div_ceil(size) as usize;
    if ids.len() != needed {
        return Err(format!(
            "`hash_ids` has {} ids and `input_length` {input} needs {needed} of {size} tokens each; \
             is the trace's block size another one (--trace-block-size)?",
            ids.len()
        ));
    }
    let mut left = input;
    let mut pieces = Vec::with_capacity(ids.len());
    for id in ids {
        let Some(number) = id.as_i64().map(|n| n as u64).or_else(|| id.as_u64()) else {
            return Err(format!("`hash_ids` has {id}; ids are whole numbers"));
        };
        let len = left.min(size);
        left -= len;
        let seed = Rng::new(options.seed ^ number).next_u64();
        pieces.push(Piece { seed, len });
    }
    Ok(pieces.into())
}
