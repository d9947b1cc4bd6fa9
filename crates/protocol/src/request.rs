//! A request to `generate`, as it travels.
//!
//! Every member of Dynamo's `PreprocessedRequest` that concerns us has its own field; what else comes is kept as it came
//! and goes out again behind the rest.

use std::sync::Arc;

use bytes::Bytes;
use kvasir_msgpack::Reader;
use kvasir_types::{Codec, Token};

use crate::read::{self, Result, map, map_or_nil, option};
use crate::{Payload, PayloadWriter, ProtocolError, RoutingHints};

/// Tokens in a prompt; far above any model's context.
pub const TOKENS_MAX: usize = 8 << 20;
/// Tokens in a list of stop tokens.
const STOP_TOKENS_MAX: usize = 1 << 16;
/// Members that are kept as they came.
const REST_MAX: usize = 64;

const REQUEST: &str = "a request to generate";

/// A request to `generate`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerateRequest {
    /// The served model's name.
    pub model: String,
    /// The prompt.
    pub token_ids: Arc<[Token]>,
    /// When to stop.
    pub stop: StopConditions,
    /// How to draw.
    pub sampling: SamplingOptions,
    /// What to tell.
    pub output: OutputOptions,
    /// The model's end-of-sequence tokens.
    pub eos_token_ids: Vec<Token>,
    /// Checksum of the model card.
    pub mdc_sum: Option<String>,
    /// What the client wants to be told beside the answer.
    pub annotations: Vec<String>,
    /// What the router and its clients said about where it goes.
    pub routing: Option<RoutingHints>,
    /// All other members, such as `extra_args` or `bootstrap_info`.
    pub rest: Vec<(String, Payload)>,
}

/// When an answer stops.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopConditions {
    /// After this many tokens.
    pub max_tokens: Option<u32>,
    /// Before one of these texts.
    pub stop: Option<Vec<String>>,
    /// At one of these tokens.
    pub stop_token_ids: Option<Vec<Token>>,
    /// At one of these tokens, which is part of the answer.
    pub stop_token_ids_visible: Option<Vec<Token>>,
    /// At one of these tokens, which is not.
    pub stop_token_ids_hidden: Option<Vec<Token>>,
    /// Not before this many tokens.
    pub min_tokens: Option<u32>,
    /// Go on past the model's own end.
    pub ignore_eos: Option<bool>,
    /// Most tokens of thinking.
    pub max_thinking_tokens: Option<u32>,
}

/// How tokens are drawn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingOptions {
    /// How many answers.
    pub n: Option<u32>,
    /// How many are drawn to choose from.
    pub best_of: Option<u32>,
    /// Against tokens that came at all.
    pub presence_penalty: Option<f32>,
    /// Against tokens by how often they came.
    pub frequency_penalty: Option<f32>,
    /// Divides the odds of tokens that came.
    pub repetition_penalty: Option<f32>,
    /// 0 draws the likeliest.
    pub temperature: Option<f32>,
    /// Nucleus share.
    pub top_p: Option<f32>,
    /// Among this many.
    pub top_k: Option<i32>,
    /// At least this likely, relative to the likeliest.
    pub min_p: Option<f32>,
    /// Search for the likeliest answer.
    pub use_beam_search: Option<bool>,
    /// For long answers, in such a search.
    pub length_penalty: Option<f32>,
    /// Fixes the draw.
    pub seed: Option<i64>,
    /// The stop text is part of the answer.
    pub include_stop_str_in_output: Option<bool>,
    /// The form that the answer must have.
    pub guided_decoding: Option<Payload>,
    /// Added to the odds of these tokens. Dynamo has no such member; it is written when there are any.
    pub logit_bias: Vec<(Token, f32)>,
}

/// What a worker tells beside tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutputOptions {
    /// How likely tokens were, with this many alternatives.
    pub logprobs: Option<u32>,
    /// The same for the prompt.
    pub prompt_logprobs: Option<u32>,
    /// Special tokens stay out of text.
    pub skip_special_tokens: Option<bool>,
    /// The prompt as text.
    pub formatted_prompt: Option<bool>,
    /// Tokens in place of text.
    pub return_tokens_as_token_ids: Option<bool>,
}

impl GenerateRequest {
    /// Reads it. Only `token_ids` is needed.
    pub fn decode(payload: &Payload) -> std::result::Result<Self, ProtocolError> {
        let all = payload.to_msgpack()?;
        let mut reader = Reader::new(&all);
        let mut request = Self::default();
        let mut has_tokens = false;
        let read = map(&mut reader, |reader, name| {
            has_tokens |= name == b"token_ids";
            request.member(reader, name, &all)
        });
        let read = read.and_then(|()| reader.finish());
        read.map_err(ProtocolError::decode(REQUEST))?;
        match has_tokens {
            true => Ok(request),
            false => Err(ProtocolError::Missing {
                what: REQUEST,
                member: "token_ids",
            }),
        }
    }

    fn member(&mut self, reader: &mut Reader<'_>, name: &[u8], all: &Bytes) -> Result<()> {
        match name {
            b"model" => self.model = read::text(reader)?.unwrap_or_default(),
            b"token_ids" => self.token_ids = read::tokens(reader, TOKENS_MAX, "token_ids")?.into(),
            b"stop_conditions" => self.stop.read(reader)?,
            b"sampling_options" => self.sampling.read(reader, all)?,
            b"output_options" => self.output.read(reader)?,
            b"eos_token_ids" => {
                let tokens = option(reader, |r| stop_tokens(r, "eos_token_ids"))?;
                self.eos_token_ids = tokens.unwrap_or_default();
            }
            b"mdc_sum" => self.mdc_sum = read::text(reader)?,
            b"annotations" => {
                self.annotations = option(reader, read::texts)?.unwrap_or_default();
            }
            b"routing" => {
                self.routing = option(reader, |reader| RoutingHints::read(reader, all))?;
            }
            _ => keep(&mut self.rest, reader, name, all)?,
        }
        Ok(())
    }

    /// Writes it, with the members in the order in which Dynamo writes them.
    #[must_use]
    pub fn encode(&self, codec: Codec) -> Payload {
        let room = Vec::with_capacity(768 + self.token_ids.len() * 5);
        let mut w = PayloadWriter::reuse(codec, room);
        w.map(8 + usize::from(self.routing.is_some()) + self.rest.len());
        w.key("model");
        w.text(&self.model);
        w.key("token_ids");
        w.tokens(&self.token_ids);
        w.key("stop_conditions");
        self.stop.write(&mut w);
        w.key("sampling_options");
        self.sampling.write(&mut w);
        w.key("output_options");
        self.output.write(&mut w);
        w.key("eos_token_ids");
        w.tokens(&self.eos_token_ids);
        w.key("mdc_sum");
        w.option(self.mdc_sum.as_deref(), PayloadWriter::text);
        w.key("annotations");
        write_texts(&mut w, &self.annotations);
        if let Some(routing) = &self.routing {
            w.key("routing");
            routing.write(&mut w);
        }
        write_rest(&mut w, &self.rest);
        w.end_map();
        w.finish()
    }

    /// The member of this name among those that are kept as they came.
    #[must_use]
    pub fn rest(&self, name: &str) -> Option<&Payload> {
        let found = self.rest.iter().find(|(known, _)| known == name);
        found.map(|(_, payload)| payload)
    }
}

pub(crate) fn keep(
    rest: &mut Vec<(String, Payload)>,
    reader: &mut Reader<'_>,
    name: &[u8],
    all: &Bytes,
) -> Result<()> {
    let payload = read::raw(reader, all)?;
    if rest.len() < REST_MAX {
        rest.push((String::from_utf8_lossy(name).into_owned(), payload));
    }
    Ok(())
}

pub(crate) fn write_rest(w: &mut PayloadWriter, rest: &[(String, Payload)]) {
    for (name, payload) in rest {
        w.key(name);
        w.payload(payload);
    }
}

fn write_texts(w: &mut PayloadWriter, texts: &[String]) {
    w.list(texts.len());
    texts.iter().for_each(|text| w.text(text));
    w.end_list();
}

fn stop_tokens(reader: &mut Reader<'_>, field: &'static str) -> Result<Vec<Token>> {
    read::tokens(reader, STOP_TOKENS_MAX, field)
}

impl StopConditions {
    fn read(&mut self, reader: &mut Reader<'_>) -> Result<()> {
        let tokens = |r: &mut Reader<'_>| option(r, |r| stop_tokens(r, "stop_token_ids"));
        map_or_nil(reader, |reader, name| {
            match name {
                b"max_tokens" => self.max_tokens = read::u32(reader, "max_tokens")?,
                b"stop" => self.stop = option(reader, read::texts)?,
                b"stop_token_ids" => self.stop_token_ids = tokens(reader)?,
                b"stop_token_ids_visible" => self.stop_token_ids_visible = tokens(reader)?,
                b"stop_token_ids_hidden" => self.stop_token_ids_hidden = tokens(reader)?,
                b"min_tokens" => self.min_tokens = read::u32(reader, "min_tokens")?,
                b"ignore_eos" => self.ignore_eos = read::bool(reader)?,
                b"max_thinking_tokens" => {
                    self.max_thinking_tokens = read::u32(reader, "max_thinking_tokens")?;
                }
                _ => reader.skip()?,
            }
            Ok(())
        })
    }

    fn write(&self, w: &mut PayloadWriter) {
        w.map(8);
        uint(w, "max_tokens", self.max_tokens);
        w.key("stop");
        w.option(self.stop.as_deref(), write_texts);
        for (name, tokens) in [
            ("stop_token_ids", &self.stop_token_ids),
            ("stop_token_ids_visible", &self.stop_token_ids_visible),
            ("stop_token_ids_hidden", &self.stop_token_ids_hidden),
        ] {
            w.key(name);
            w.option(tokens.as_deref(), PayloadWriter::tokens);
        }
        uint(w, "min_tokens", self.min_tokens);
        boolean(w, "ignore_eos", self.ignore_eos);
        uint(w, "max_thinking_tokens", self.max_thinking_tokens);
        w.end_map();
    }
}

impl SamplingOptions {
    fn read(&mut self, reader: &mut Reader<'_>, all: &Bytes) -> Result<()> {
        map_or_nil(reader, |reader, name| {
            match name {
                b"n" => self.n = read::u32(reader, "n")?,
                b"best_of" => self.best_of = read::u32(reader, "best_of")?,
                b"presence_penalty" => self.presence_penalty = read::f32(reader)?,
                b"frequency_penalty" => self.frequency_penalty = read::f32(reader)?,
                b"repetition_penalty" => self.repetition_penalty = read::f32(reader)?,
                b"temperature" => self.temperature = read::f32(reader)?,
                b"top_p" => self.top_p = read::f32(reader)?,
                b"top_k" => self.top_k = read::i32(reader, "top_k")?,
                b"min_p" => self.min_p = read::f32(reader)?,
                b"use_beam_search" => self.use_beam_search = read::bool(reader)?,
                b"length_penalty" => self.length_penalty = read::f32(reader)?,
                b"seed" => {
                    self.seed = option(reader, Reader::int)?.map(|int| int.bits().cast_signed());
                }
                b"include_stop_str_in_output" => {
                    self.include_stop_str_in_output = read::bool(reader)?;
                }
                b"guided_decoding" if !read::is_nil(reader)? => {
                    self.guided_decoding = Some(read::raw(reader, all)?);
                }
                b"logit_bias" => map_or_nil(reader, |reader, token| {
                    let token = std::str::from_utf8(token).unwrap_or_default().parse();
                    if let (Ok(token), Some(bias)) = (token, read::f32(reader)?) {
                        self.logit_bias.push((token, bias));
                    }
                    Ok(())
                })?,
                _ => reader.skip()?,
            }
            Ok(())
        })
    }

    fn write(&self, w: &mut PayloadWriter) {
        w.map(14 + usize::from(!self.logit_bias.is_empty()));
        uint(w, "n", self.n);
        uint(w, "best_of", self.best_of);
        for (name, value) in [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
            ("repetition_penalty", self.repetition_penalty),
            ("temperature", self.temperature),
            ("top_p", self.top_p),
        ] {
            float(w, name, value);
        }
        w.key("top_k");
        w.option(self.top_k.map(i64::from), PayloadWriter::sint);
        float(w, "min_p", self.min_p);
        boolean(w, "use_beam_search", self.use_beam_search);
        float(w, "length_penalty", self.length_penalty);
        w.key("seed");
        w.option(self.seed, PayloadWriter::sint);
        let include = self.include_stop_str_in_output;
        boolean(w, "include_stop_str_in_output", include);
        w.key("guided_decoding");
        w.option(self.guided_decoding.as_ref(), PayloadWriter::payload);
        if !self.logit_bias.is_empty() {
            w.key("logit_bias");
            w.map(self.logit_bias.len());
            for (token, bias) in &self.logit_bias {
                float(w, &token.to_string(), Some(*bias));
            }
            w.end_map();
        }
        w.end_map();
    }
}

impl OutputOptions {
    fn read(&mut self, reader: &mut Reader<'_>) -> Result<()> {
        map_or_nil(reader, |reader, name| {
            match name {
                b"logprobs" => self.logprobs = read::u32(reader, "logprobs")?,
                b"prompt_logprobs" => self.prompt_logprobs = read::u32(reader, "prompt_logprobs")?,
                b"skip_special_tokens" => self.skip_special_tokens = read::bool(reader)?,
                b"formatted_prompt" => self.formatted_prompt = read::bool(reader)?,
                b"return_tokens_as_token_ids" => {
                    self.return_tokens_as_token_ids = read::bool(reader)?;
                }
                _ => reader.skip()?,
            }
            Ok(())
        })
    }

    fn write(&self, w: &mut PayloadWriter) {
        w.map(5);
        uint(w, "logprobs", self.logprobs);
        uint(w, "prompt_logprobs", self.prompt_logprobs);
        boolean(w, "skip_special_tokens", self.skip_special_tokens);
        boolean(w, "formatted_prompt", self.formatted_prompt);
        let as_ids = self.return_tokens_as_token_ids;
        boolean(w, "return_tokens_as_token_ids", as_ids);
        w.end_map();
    }
}

fn uint(w: &mut PayloadWriter, name: &str, value: Option<u32>) {
    w.key(name);
    w.option(value.map(u64::from), PayloadWriter::uint);
}

fn boolean(w: &mut PayloadWriter, name: &str, value: Option<bool>) {
    w.key(name);
    w.option(value, PayloadWriter::bool);
}

fn float(w: &mut PayloadWriter, name: &str, value: Option<f32>) {
    w.key(name);
    w.option(value, PayloadWriter::float32);
}
