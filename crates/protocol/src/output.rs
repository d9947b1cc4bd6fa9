//! What `generate` answers: some tokens, how likely they were, why there are no more.

use bytes::Bytes;
use kvasir_msgpack::{DecodeError, Kind, Reader};
use kvasir_types::Token;

use crate::read::{self, Result, map, map_or_nil, option};
use crate::{Payload, PayloadWriter};

/// Tokens in one item.
const ITEM_TOKENS_MAX: usize = 1 << 20;
/// Likeliest tokens that are read for each place; the rest is read past.
const TOP_MAX: usize = 64;

/// One item of a worker's answer, as it travels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    /// New tokens.
    pub token_ids: Vec<Token>,
    /// Sum of the logarithms so far.
    pub cum_log_probs: Option<f64>,
    /// How likely each new token was.
    pub log_probs: Option<Vec<f64>>,
    /// The likeliest in place of each.
    pub top_logprobs: Option<Vec<Vec<TopLogprob>>>,
    /// Why it ended; the last item only.
    pub finish_reason: Option<Finish>,
    /// Which of several answers this is.
    pub index: Option<u32>,
    /// What the next worker needs to go on with.
    pub disaggregated_params: Option<Payload>,
    /// Tokens so far; usually in the first and the last item.
    pub usage: Option<Usage>,
}

/// One of the likeliest tokens in a place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TopLogprob {
    /// 1 is the likeliest.
    pub rank: u32,
    /// Which token.
    pub token_id: Token,
    /// Natural logarithm of its probability.
    pub logprob: f64,
}

/// Why an answer ended, in the worker's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model's own end.
    Eos,
    /// As many tokens as were asked for.
    Length,
    /// A stop token or string.
    Stop,
    /// It was cancelled.
    Cancelled,
    /// A filter of the engine ended it.
    ContentFilter,
    /// The engine failed; its own words.
    Error(String),
}

const FINISHES: [(&str, Finish); 5] = [
    ("eos", Finish::Eos),
    ("length", Finish::Length),
    ("stop", Finish::Stop),
    ("cancelled", Finish::Cancelled),
    ("content_filter", Finish::ContentFilter),
];

/// How many tokens a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompt.
    pub prompt_tokens: u32,
    /// Of the answer so far.
    pub completion_tokens: u32,
    /// Both.
    pub total_tokens: u32,
    /// Of the prompt, found in the cache.
    pub cached_tokens: Option<u32>,
}

impl Output {
    /// Reads it from the front of `reader`, which reads from `all`.
    pub(crate) fn read(reader: &mut Reader<'_>, all: &Bytes) -> Result<Self> {
        let mut output = Self::default();
        map(reader, |reader, name| {
            match name {
                b"token_ids" => {
                    let tokens = option(reader, |r| read::tokens(r, ITEM_TOKENS_MAX, "token_ids"))?;
                    output.token_ids = tokens.unwrap_or_default();
                }
                b"finish_reason" => output.finish_reason = option(reader, Finish::read)?,
                b"completion_usage" => output.usage = option(reader, Usage::read)?,
                b"log_probs" => output.log_probs = option(reader, floats)?,
                b"top_logprobs" => output.top_logprobs = option(reader, tops)?,
                b"cum_log_probs" => output.cum_log_probs = option(reader, Reader::float)?,
                b"index" => output.index = read::u32(reader, "index")?,
                b"disaggregated_params" if !read::is_nil(reader)? => {
                    output.disaggregated_params = Some(read::raw(reader, all)?);
                }
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        Ok(output)
    }

    /// Writes it with the members that Dynamo's workers write.
    pub fn write(&self, w: &mut PayloadWriter) {
        let more = usize::from(self.disaggregated_params.is_some());
        w.map(9 + more + usize::from(self.usage.is_some()));
        w.key("token_ids");
        w.tokens(&self.token_ids);
        w.key("tokens");
        w.nil();
        w.key("text");
        w.nil();
        w.key("output_type");
        w.text("text");
        w.key("cum_log_probs");
        w.option(self.cum_log_probs, PayloadWriter::float);
        w.key("log_probs");
        w.option(self.log_probs.as_deref(), |w, all| {
            w.list(all.len());
            all.iter().for_each(|one| w.float(*one));
            w.end_list();
        });
        w.key("top_logprobs");
        w.option(self.top_logprobs.as_deref(), |w, all| {
            w.list(all.len());
            all.iter().for_each(|top| write_top(w, top));
            w.end_list();
        });
        w.key("finish_reason");
        w.option(self.finish_reason.as_ref(), |w, finish| finish.write(w));
        w.key("index");
        w.option(self.index.map(u64::from), PayloadWriter::uint);
        if let Some(params) = &self.disaggregated_params {
            w.key("disaggregated_params");
            w.payload(params);
        }
        if let Some(usage) = &self.usage {
            w.key("completion_usage");
            usage.write(w);
        }
        w.end_map();
    }
}

fn floats(reader: &mut Reader<'_>) -> Result<Vec<f64>> {
    (0..reader.array()?).map(|_| reader.float()).collect()
}

fn tops(reader: &mut Reader<'_>) -> Result<Vec<Vec<TopLogprob>>> {
    (0..reader.array()?).map(|_| top(reader)).collect()
}

fn top(reader: &mut Reader<'_>) -> Result<Vec<TopLogprob>> {
    let mut out = Vec::new();
    for _ in 0..reader.array()? {
        if out.len() == TOP_MAX {
            reader.skip()?;
            continue;
        }
        let mut one = TopLogprob::default();
        map(reader, |reader, name| {
            match name {
                b"rank" => one.rank = read::u32(reader, "rank")?.unwrap_or_default(),
                b"token_id" => one.token_id = reader.u32("token_id")?,
                b"logprob" => one.logprob = option(reader, Reader::float)?.unwrap_or_default(),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        out.push(one);
    }
    Ok(out)
}

fn write_top(w: &mut PayloadWriter, top: &[TopLogprob]) {
    w.list(top.len());
    for one in top {
        w.map(5);
        w.key("rank");
        w.uint(u64::from(one.rank));
        w.key("token_id");
        w.uint(u64::from(one.token_id));
        w.key("token");
        w.nil();
        w.key("logprob");
        w.float(one.logprob);
        w.key("bytes");
        w.nil();
        w.end_map();
    }
    w.end_list();
}

impl Finish {
    fn read(reader: &mut Reader<'_>) -> Result<Self> {
        if reader.peek()? == Kind::Map {
            let mut error = None;
            map(reader, |reader, name| {
                match name {
                    b"error" => error = read::text(reader)?,
                    _ => reader.skip()?,
                }
                Ok(())
            })?;
            return Ok(Self::Error(error.unwrap_or_default()));
        }
        let name = reader.str()?;
        let found = FINISHES.into_iter().find(|(known, _)| *known == name);
        // A release may end answers for reasons of its own: what matters is that it ended.
        Ok(found.map_or(Self::Stop, |(_, finish)| finish))
    }

    fn write(&self, w: &mut PayloadWriter) {
        match self {
            Self::Error(text) => {
                w.map(1);
                w.key("error");
                w.text(text);
                w.end_map();
            }
            other => {
                let found = FINISHES.iter().find(|(_, finish)| finish == other);
                w.text(found.map_or("stop", |(name, _)| name));
            }
        }
    }
}

impl Usage {
    fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let mut usage = Self::default();
        let number = |reader: &mut Reader<'_>| -> std::result::Result<u32, DecodeError> {
            Ok(read::u32(reader, "completion_usage")?.unwrap_or_default())
        };
        map(reader, |reader, name| {
            match name {
                b"prompt_tokens" => usage.prompt_tokens = number(reader)?,
                b"completion_tokens" => usage.completion_tokens = number(reader)?,
                b"total_tokens" => usage.total_tokens = number(reader)?,
                b"prompt_tokens_details" => map_or_nil(reader, |reader, name| {
                    match name {
                        b"cached_tokens" => {
                            usage.cached_tokens = read::u32(reader, "cached_tokens")?;
                        }
                        _ => reader.skip()?,
                    }
                    Ok(())
                })?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        Ok(usage)
    }

    fn write(&self, w: &mut PayloadWriter) {
        w.map(4);
        w.key("prompt_tokens");
        w.uint(u64::from(self.prompt_tokens));
        w.key("completion_tokens");
        w.uint(u64::from(self.completion_tokens));
        w.key("total_tokens");
        w.uint(u64::from(self.total_tokens));
        w.key("prompt_tokens_details");
        w.map(2);
        w.key("audio_tokens");
        w.nil();
        w.key("cached_tokens");
        w.option(self.cached_tokens.map(u64::from), PayloadWriter::uint);
        w.end_map();
        w.end_map();
    }
}
