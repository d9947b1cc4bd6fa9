//! Rows: models, tokenizers, details of responses.

use crate::choice::{ChatProcessor, ReasoningField, TokenizerBackend};
use crate::command::Scope;
use crate::spec::{Group, options, var};

options! { MODEL_ROWS, Group::Model, Scope::SERVE;

    /// Name under which the model is served.
    MODEL_NAME: Option<String> = "model-name" =>
        scope(Scope::SERVE.and(Scope::MOCKER).and(Scope::DOCTOR)).env(&[var("DYN_MODEL_NAME")])
        .aliases(&["served-model-name"]).default_note("what the workers announce").metavar("NAME")
        .common().effective();

    /// Directory with the model's tokenizer and templates; `NAME=PATH,NAME=PATH` for several models.
    MODEL_PATH: Option<String> = "model-path" =>
        scope(Scope::FRONTEND.and(Scope::MOCKER).and(Scope::DOCTOR)).env(&[var("DYN_MODEL_PATH")])
        .default_note("what the workers announce").metavar("PATH").common().effective();

    /// Tokenizer library.
    TOKENIZER: TokenizerBackend = "tokenizer" => env(&[var("DYN_TOKENIZER")]).default("default");

    /// Use the default library where the chosen one cannot read a model's file.
    TOKENIZER_FALLBACK: bool = "tokenizer-fallback" =>
        env(&[var("DYN_TOKENIZER_FALLBACK")]).default("true");

    /// Run code that a model repository contains.
    TRUST_REMOTE_CODE: bool = "trust-remote-code" =>
        env(&[var("DYN_TRUST_REMOTE_CODE")]).default("false");

    /// Which preprocessor turns chats into tokens.
    DYN_CHAT_PROCESSOR: ChatProcessor = "dyn-chat-processor" =>
        env(&[var("DYN_CHAT_PROCESSOR")]).default("dynamo");

    /// Preprocessing processes; 0 preprocesses in this process.
    DYN_PREPROCESS_WORKERS: u32 = "dyn-preprocess-workers" =>
        env(&[var("DYN_PREPROCESS_WORKERS")]).default("0");

    /// Log a time breakdown of each request.
    DYN_DEBUG_PERF: bool = "dyn-debug-perf" => env(&[var("DYN_DEBUG_PERF")]).default("false");

    /// Response field that carries reasoning text.
    REASONING_FIELD_NAME: ReasoningField = "reasoning-field-name" =>
        env(&[var("DYN_REASONING_FIELD_NAME")]).default("reasoning_content").effective();

    /// Leave tools out of the prompt when `tool_choice` is `none`.
    EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE: bool = "exclude-tools-when-tool-choice-none" =>
        env(&[var("DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE")]).default("true").effective();

    /// Serve the Anthropic API at `/v1/messages`.
    ENABLE_ANTHROPIC_API: bool = "enable-anthropic-api" =>
        env(&[var("DYN_ENABLE_ANTHROPIC_API")]).default("false").effective();

    /// Remove the client's preamble from Anthropic requests.
    STRIP_ANTHROPIC_PREAMBLE: bool = "strip-anthropic-preamble" =>
        env(&[var("DYN_STRIP_ANTHROPIC_PREAMBLE")]).default("false");

    /// Send a stream event `tool_call_dispatch` as soon as a tool call of a token worker is complete.
    ENABLE_STREAMING_TOOL_DISPATCH: bool = "enable-streaming-tool-dispatch" =>
        env(&[var("DYN_ENABLE_STREAMING_TOOL_DISPATCH")]).default("false").effective();

    /// Send a stream event `reasoning_dispatch` as soon as the reasoning of a token worker is complete.
    ENABLE_STREAMING_REASONING_DISPATCH: bool = "enable-streaming-reasoning-dispatch" =>
        env(&[var("DYN_ENABLE_STREAMING_REASONING_DISPATCH")]).default("false").effective();

    /// Chat with the model on the terminal.
    INTERACTIVE: bool = "interactive" => short('i').env(&[var("DYN_INTERACTIVE")]).default("false");
}
