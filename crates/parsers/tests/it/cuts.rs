//! Where the text was cut does not matter, and nothing is lost.

use kvasir_parsers::{AnswerForm, CallForm, ReasoningFormat, ToolFormat};
use proptest::prelude::*;

use crate::cases::{read, schemas};

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
    "gemma4",
    "gpt_oss",
];

/// Pieces that answers are made of, right and wrong.
const WORDS: &[&str] = &[
    "a",
    " ",
    "\n",
    "}",
    "{",
    "]",
    "[",
    ",",
    ":",
    "\"",
    "\\",
    "<",
    ">",
    "é",
    "1",
    ";",
    "(",
    ")",
    "=",
    "`",
    "name",
    "\"name\"",
    "\"now\"",
    "\"arguments\"",
    "{\"a\": 1}",
    "true",
    "null",
    "now",
    "get_weather",
    "city",
    "{\"name\": \"now\", \"arguments\": {\"a\": 1}}",
    "{\"name\": \"now\", \"parameters\": {}}",
    "[now()]",
    "now(city='x')",
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[/TOOL_CALLS]",
    "[ARGS]",
    "<TOOLCALL>",
    "</TOOLCALL>",
    "functools",
    "<tool_calls>",
    "</tool_calls>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "function",
    "```json\n",
    "```",
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    "<｜DSML｜tool_calls>",
    "<｜DSML｜invoke name=",
    "\"now\">",
    "</｜DSML｜invoke>",
    "<｜DSML｜parameter name=",
    "\"city\" string=\"true\">",
    "</｜DSML｜parameter>",
    "<function=",
    "<function=now>",
    "</function>",
    "<parameter=",
    "<parameter=city>",
    "<parameter=days>",
    "</parameter>",
    "<|channel>thought",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "call:now{",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<invoke name=",
    "</invoke>",
    "<parameter name=",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "functions.now:0",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<|start|>",
    "assistant",
    "<|channel|>",
    "analysis",
    "commentary",
    "final",
    " to=functions.now",
    "<|constrain|>json",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<think>",
    "</think>",
    "◁think▷",
    "◁/think▷",
    "[THINK]",
    "[/THINK]",
    "Here is my thought process:",
    "Here is my response:",
];

/// Whole answers, which are cut short, joined, and have words put into them.
const ANSWERS: &[&str] = &[
    "Yes.\n<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": \"b\"}}\n</tool_call>\n",
    "<|python_tag|>{\"name\": \"now\", \"parameters\": {\"a\": 1}}; {\"name\": \"now\", \"parameters\": {}}",
    "{\"name\": \"now\", \"parameters\": {\"a\": 1}}",
    "[TOOL_CALLS][{\"name\": \"now\", \"arguments\": {\"a\": 1}}]",
    "[TOOL_CALLS]now[ARGS]{\"a\": 1}[TOOL_CALLS]now{}",
    "<TOOLCALL>[{\"name\": \"now\", \"arguments\": {}}]</TOOLCALL>",
    "functools[{\"arguments\": {\"a\": 1}, \"name\": \"now\"}]",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{\"a\": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"now\">\n<｜DSML｜parameter name=\"a\" string=\"false\">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRom\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "<|tool_call>call:get_weather{city:<|\"|>Rom, {\"IT\"}<|\"|>,days:2,at:[1,{x:true}]}<tool_call|>",
    "<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Rom</parameter>\n</invoke>\n</minimax:tool_call>",
    "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|><|tool_calls_section_end|>",
    "[get_weather(city='Rom', days=3), now()]",
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
    "<think>\nI think.\n</think>\n\nHello",
    "Here is my thought process: hm. Here is my response: yes",
];

fn changed_answer() -> impl Strategy<Value = String> {
    let part = (
        proptest::sample::select(ANSWERS),
        0_usize..200,
        proptest::bool::weighted(0.4),
        proptest::sample::select(WORDS),
        0_usize..200,
    );
    let part = part.prop_map(|(answer, end, is_cut, word, at)| {
        let end = if is_cut {
            end.min(answer.len())
        } else {
            answer.len()
        };
        let mut text = answer[..answer.floor_char_boundary(end)].to_owned();
        if at < text.len() {
            text.insert_str(text.floor_char_boundary(at), word);
        }
        text
    });
    proptest::collection::vec(part, 1..4).prop_map(|parts| parts.concat())
}

fn answer() -> impl Strategy<Value = String> {
    let words = proptest::collection::vec(proptest::sample::select(WORDS), 0..24);
    prop_oneof![
        words.prop_map(|words| words.concat()),
        changed_answer(),
        changed_answer()
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn any_cut_gives_the_same(
        text in answer(),
        tools in proptest::option::of(proptest::sample::select(&TOOLS[..])),
        reasoning in proptest::option::of(proptest::sample::select(&REASONING[..])),
        cuts in proptest::collection::vec(0_usize..400, 0..8),
        prompt in proptest::sample::select(&["", "<think>\n", "</think>\n\n"][..]),
    ) {
        let schemas = schemas();
        let form = AnswerForm {
            tools: tools.map(|name| CallForm::Native(ToolFormat::named(name).unwrap(), &schemas)),
            reasoning: reasoning.map(|name| ReasoningFormat::named(name).unwrap()),
            prompt_end: prompt,
            reasoning_off: false,
        };
        let whole = read(&form, &[&text]);
        let mut cuts: Vec<usize> = cuts.iter().map(|&at| text.floor_char_boundary(at.min(text.len()))).collect();
        cuts.sort_unstable();
        let mut pieces = Vec::new();
        let mut from = 0;
        for at in cuts {
            pieces.push(&text[from..at]);
            from = at;
        }
        pieces.push(&text[from..]);
        prop_assert_eq!(&read(&form, &pieces), &whole);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        prop_assert_eq!(&read(&form, &letters), &whole);
        prop_assert!(whole.calls.iter().all(|call| call.3), "every call ends");
        if whole.calls.is_empty() && reasoning.is_none() && tools != Some("harmony") {
            prop_assert_eq!(&whole.content, &text, "without a call nothing is taken out");
        }
    }
}
