//! The text of an answer: what it says does not depend on how it comes, and nothing is lost.

use kvasir_parsers::{
    AnswerEvent, AnswerForm, AnswerParser, CallForm, ReasoningFormat, TextParser, ToolFormat,
    ToolSchemas, limits,
};

use crate::pieces::ways;

pub(crate) const WORDS: &[&str] = &[
    "{\"name\": \"now\", \"arguments\": {\"a\": 1}}",
    "\"name\"",
    "\"arguments\"",
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "functools[",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "```json\n",
    "<｜DSML｜function_calls>",
    "<｜DSML｜invoke name=\"now\">",
    "<｜DSML｜parameter name=\"a\" string=\"true\">",
    "<function=now>",
    "<parameter=a>\n",
    "\n</parameter>",
    "</function>",
    "<invoke name=\"now\">",
    "<arg_key>a</arg_key>",
    "<arg_value>",
    "<|tool_call_begin|>functions.now:0",
    "<|tool_call_argument_begin|>",
    "[now(a='b')]",
    "<|channel|>analysis<|message|>",
    "<|channel|>commentary to=functions.now<|message|>",
    "<|end|>",
    "<|start|>assistant",
    "<think>",
    "</think>",
    "Here is my response:",
];

const TOOLS: [&str; 18] = [
    "hermes",
    "llama3_json",
    "mistral",
    "nemotron_deci",
    "phi4",
    "jamba",
    "default",
    "deepseek_v3",
    "deepseek_v3_1",
    "deepseek_v3_2",
    "deepseek_v4",
    "qwen3_coder",
    "minimax_m2",
    "gemma4",
    "glm45",
    "kimi_k2",
    "pythonic",
    "harmony",
];
const REASONING: [&str; 8] = [
    "qwen3",
    "deepseek_r1",
    "kimi_k25",
    "kimi",
    "mistral",
    "granite",
    "gpt_oss",
    "minimax_append_think",
];

/// What a client puts together.
#[derive(Debug, Default, PartialEq)]
struct Said {
    content: String,
    reasoning: String,
    calls: Vec<(String, String, bool)>,
}

/// The first byte chooses how calls are written, the second how reasoning is; beyond the names: not at all.
pub(crate) fn check(bytes: &[u8]) -> bool {
    let [tools, reasoning, text @ ..] = bytes else {
        return false;
    };
    let schemas = ToolSchemas::of_json(
        r#"[{"function":{"name":"now","parameters":{"properties":{"a":{"type":"integer"}}}}}]"#,
    );
    let tools = TOOLS.get(usize::from(*tools) % (TOOLS.len() + 1));
    let reasoning = REASONING.get(usize::from(*reasoning) % (REASONING.len() + 1));
    let form = AnswerForm {
        tools: tools
            .and_then(|name| ToolFormat::named(name))
            .map(|format| CallForm::Native(format, &schemas)),
        reasoning: reasoning.and_then(|name| ReasoningFormat::named(name)),
        ..AnswerForm::default()
    };
    let text = String::from_utf8_lossy(text);
    let [whole, single, random] = ways(text.as_bytes()).map(|pieces| read(&form, &pieces));
    assert_eq!(whole, single, "other pieces, another answer");
    assert_eq!(whole, random, "other pieces, another answer");
    assert!(whole.calls.len() <= limits::CALLS_MAX as usize);
    assert!(whole.calls.iter().all(|(_, _, ended)| *ended));
    let is_split = reasoning.is_some() || tools.is_some_and(|name| *name == "harmony");
    if whole.calls.is_empty() && !is_split {
        assert_eq!(whole.content, text, "text was lost or added");
    }
    !whole.calls.is_empty() || !whole.reasoning.is_empty()
}

fn read(form: &AnswerForm<'_>, pieces: &[&[u8]]) -> Said {
    let mut said = Said::default();
    let Some(mut parser) = AnswerParser::new(form) else {
        said.content = String::from_utf8_lossy(&pieces.concat()).into_owned();
        return said;
    };
    let mut events = Vec::new();
    let mut held = Vec::new();
    for piece in pieces {
        // A character comes whole.
        held.extend_from_slice(piece);
        let whole = match std::str::from_utf8(&held) {
            Ok(text) => text.len(),
            Err(error) => error.valid_up_to(),
        };
        let text: Vec<u8> = held.drain(..whole).collect();
        parser.push(&String::from_utf8_lossy(&text), &mut events);
    }
    parser.finish(&mut events);
    for event in events {
        match event {
            AnswerEvent::Content(text) => said.content.push_str(&text),
            AnswerEvent::Reasoning(text) => said.reasoning.push_str(&text),
            AnswerEvent::CallStart { index, name, .. } => {
                assert_eq!(index as usize, said.calls.len(), "calls in another order");
                said.calls.push((name, String::new(), false));
            }
            AnswerEvent::Arguments { index, text } => {
                if let Some(call) = said.calls.get_mut(index as usize) {
                    assert!(!call.2, "a call goes on after its end");
                    call.1.push_str(&text);
                }
            }
            AnswerEvent::CallEnd { index } => {
                if let Some(call) = said.calls.get_mut(index as usize) {
                    call.2 = true;
                }
            }
        }
    }
    said
}
