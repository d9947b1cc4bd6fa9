//! How the workers of a model write calls of tools and reasoning into their answers.

use kvasir_parsers::{ReasoningFormat, ToolFormat};

/// What a model's card says of it. None: text is content.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AnswerFormats {
    /// How calls are written.
    pub(crate) tools: Option<ToolFormat>,
    /// How reasoning is written.
    pub(crate) reasoning: Option<ReasoningFormat>,
}

impl AnswerFormats {
    /// By the names of a card.
    pub(crate) fn named(model: &str, tools: Option<&str>, reasoning: Option<&str>) -> Self {
        let formats = Self {
            tools: tools.and_then(ToolFormat::named),
            reasoning: reasoning.and_then(ReasoningFormat::named),
        };
        if let (Some(name), None) = (tools, formats.tools) {
            tracing::warn!(model, tool_call_parser = %name.escape_debug(),
                "the model's card names a form of tool calls that is not known: they stay text");
        }
        if let (Some(name), None) = (reasoning, formats.reasoning) {
            tracing::warn!(model, reasoning_parser = %name.escape_debug(),
                "the model's card names a form of reasoning that is not known: it stays text");
        }
        formats
    }
}
