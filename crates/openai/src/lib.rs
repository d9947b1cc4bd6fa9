//! The OpenAI API as bytes.
//!
//! Answers one question: what does a client's body ask for, and what bytes answer it? Request bodies in two
//! readings (strict for token workers, a scan for engines that judge for themselves), `nvext` and its header
//! forms, answers whole and streamed, server-sent events, error bodies, the small admin bodies.
//!
//! Invariants: no input panics; a scanned body is never rebuilt, only cut at byte spans; a writer adds whole
//! JSON documents or frames and nothing else; every list taken from a client has a named limit.
//!
//! Elsewhere: which worker answers (`router`), templates and tokens (`text`), sockets (`frontend`).

mod admin;
mod answer;
mod batch;
mod chat;
mod completion;
mod contents;
mod error;
mod form;
mod json;
mod legs;
mod logprobs;
mod next_turn;
mod nvext;
mod object;
mod options;
mod parts;
pub mod resume;
mod scan;
mod sse;
mod strict;
mod transfer;
mod usage;
mod walk;

pub use admin::{
    BusyError, BusyThreshold, BusyUpdate, DiscoveryHealth, Health, ModelInfo, busy_thresholds,
    live, models, not_ready,
};
pub use answer::{AnswerHead, Choice, Endpoint, StreamWriter, write_unary};
pub use batch::{
    BodyPart, PartAnswer, UsageSum, answer_name, join_answers, numbered_event, split_body,
    usage_event,
};
pub use chat::{ChatRequest, ToolChoice, Tools};
pub use completion::{CompletionRequest, Prompt};
pub use contents::{content_spans, is_outside};
pub use error::{ApiError, DEFAULT_OVERLOAD_STATUS};
pub use form::Form;
pub use json::{JsonText, write_json_str};
pub use legs::{
    BootstrapFields, LegApi, PrefillAnswer, answers_wanted, bootstrap_leg, decode_leg,
    has_plain_answers, is_response_transferable, is_transferable, prefill_leg, release_leg,
};
pub use logprobs::{Logprob, TokenLogprob};
pub use next_turn::{answer_text, next_turn};
pub use nvext::{
    AgentHints, Extra, Nvext, ResponseNvext, RouterOverrides, RoutingConstraints, SessionAction,
    SessionControl, SessionHeaders, Timing, WorkerIds,
    headers::HeaderHints,
    lift::{ask_token_ids, asks_token_ids},
};
pub use object::{Field, JsonError, Object, Span};
pub use options::Options;
pub use parts::{AnswerParts, CallPart, ReasoningField};
pub use scan::{Edits, Scan};
pub use sse::{
    Event, EventParser, SseError, write_annotation, write_comment, write_done, write_llm_metrics,
};
pub use strict::Unknown;
pub use transfer::{
    TransferFilter, is_override_header, is_transfer_name, names_transfer, without_transfer,
};
pub use usage::{Usage, UsageChunk, find_usage, without_usage};
pub use walk::count_values;
