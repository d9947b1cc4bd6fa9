//! One answer of each form, and what becomes of answers that are broken.

use expect_test::{Expect, expect};
use kvasir_parsers::{
    AnswerEvent, AnswerForm, AnswerParser, CallForm, ReasoningFormat, TextParser, ToolFormat,
    ToolSchemas,
};

/// The tools of these requests.
pub(crate) fn schemas() -> ToolSchemas {
    ToolSchemas::of_json(
        r#"[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":{
            "city":{"type":"string"},"days":{"type":"integer"},"exact":{"type":"boolean"},"where":{"type":"object"}}}}},
           {"type":"function","function":{"name":"now"}}]"#,
    )
}

/// An answer as a client puts it together.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Read {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    pub(crate) calls: Vec<(String, Option<String>, String, bool)>,
}

impl Read {
    pub(crate) fn add(&mut self, events: &[AnswerEvent]) {
        for event in events {
            match event {
                AnswerEvent::Content(text) => self.content.push_str(text),
                AnswerEvent::Reasoning(text) => self.reasoning.push_str(text),
                AnswerEvent::CallStart { index, id, name } => {
                    assert_eq!(
                        *index as usize,
                        self.calls.len(),
                        "calls are numbered in order"
                    );
                    self.calls
                        .push((name.clone(), id.clone(), String::new(), false));
                }
                AnswerEvent::Arguments { index, text } => {
                    let call = &mut self.calls[*index as usize];
                    assert!(!call.3, "nothing follows the end of a call");
                    call.2.push_str(text);
                }
                AnswerEvent::CallEnd { index } => self.calls[*index as usize].3 = true,
            }
        }
    }

    fn show(&self) -> String {
        let mut lines = Vec::new();
        if !self.reasoning.is_empty() {
            lines.push(format!("reasoning {:?}", self.reasoning));
        }
        if !self.content.is_empty() {
            lines.push(format!("content {:?}", self.content));
        }
        for (name, id, arguments, ended) in &self.calls {
            let id = id
                .as_ref()
                .map(|id| format!(" id {id:?}"))
                .unwrap_or_default();
            let end = if *ended { "" } else { " (open)" };
            lines.push(format!("call {name}{id} {arguments}{end}"));
        }
        lines.join("\n") + "\n"
    }
}

pub(crate) fn read(form: &AnswerForm<'_>, pieces: &[&str]) -> Read {
    let mut read = Read::default();
    let Some(mut parser) = AnswerParser::new(form) else {
        read.content = pieces.concat();
        return read;
    };
    let mut events = Vec::new();
    for piece in pieces {
        events.clear();
        parser.push(piece, &mut events);
        read.add(&events);
    }
    events.clear();
    parser.finish(&mut events);
    read.add(&events);
    read
}

fn calls(tools: &str, text: &str, expected: &Expect) {
    both(Some(tools), None, "", text, expected);
}

fn both(tools: Option<&str>, reasoning: Option<&str>, prompt: &str, text: &str, expected: &Expect) {
    let schemas = schemas();
    let form = AnswerForm {
        tools: tools.map(|name| CallForm::Native(ToolFormat::named(name).unwrap(), &schemas)),
        reasoning: reasoning.map(|name| ReasoningFormat::named(name).unwrap()),
        prompt_end: prompt,
        reasoning_off: false,
    };
    let whole = read(&form, &[text]);
    expected.assert_eq(&whole.show());
    let letters: Vec<String> = text.chars().map(String::from).collect();
    let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
    assert_eq!(read(&form, &letters), whole, "letter by letter");
}

#[test]
fn hermes() {
    let two = "Let me look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"K\u{f6}ln </tool_call>\"}}\n</tool_call>\n\
               <tool_call>\n{\"arguments\": {}, \"name\": \"now\"}\n</tool_call>\nDone.";
    calls(
        "hermes",
        two,
        &expect![[r#"
            content "Let me look.\n\n\nDone."
            call get_weather {"city": "Köln </tool_call>"}
            call now {}
        "#]],
    );
    calls(
        "qwen25",
        "<tool_call>{\"name\":\"now\"}",
        &expect![[r#"
        call now {}
    "#]],
    );
    calls(
        "hermes",
        "<tool_call>{\"name\":\"now\",\"arguments\":\"{\\\"a\\\": 1}\"}</tool_call>",
        &expect![[r#"
        call now {"a": 1}
    "#]],
    );
    calls(
        "hermes",
        "a <tool_call>no json</tool_call> b",
        &expect![[r#"
        content "a <tool_call>no json</tool_call> b"
    "#]],
    );
    calls(
        "hermes",
        "<tool_call>{\"nam\": 1}</tool_call>",
        &expect![[r#"
        content "<tool_call>{\"nam\": 1}</tool_call>"
    "#]],
    );
    calls(
        "hermes",
        "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"K",
        &expect![[r#"
        call get_weather {"city": "K
    "#]],
    );
    calls(
        "hermes",
        "<tool_call>{\"name\":\"now\",\"arguments\":{\"a\":1}\n</tool_call>x",
        &expect![[r#"
        content "x"
        call now {"a":1}
    "#]],
    );
    calls(
        "hermes",
        "just <b>text</b> \n",
        &expect![[r#"
        content "just <b>text</b> \n"
    "#]],
    );
}

#[test]
fn llama3_json() {
    calls(
        "llama3_json",
        "<|python_tag|>{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Paris\"}}; {\"name\": \"now\", \"parameters\": {}}",
        &expect![[r#"
        call get_weather {"city": "Paris"}
        call now {}
    "#]],
    );
    calls(
        "llama3_json",
        " {\"type\": \"function\", \"name\": \"now\", \"parameters\": null}",
        &expect![[r#"
        call now {}
    "#]],
    );
    calls(
        "llama3_json",
        "{\"name\": \"unknown\", \"parameters\": {}}",
        &expect![[r#"
        content "{\"name\": \"unknown\", \"parameters\": {}}"
    "#]],
    );
    calls(
        "llama3_json",
        "{\"answer\": 42}",
        &expect![[r#"
        content "{\"answer\": 42}"
    "#]],
    );
}

#[test]
fn mistral() {
    calls(
        "mistral",
        "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}, {\"name\": \"now\", \"arguments\": {}}]",
        &expect![[r#"
        call get_weather {"city": "Oslo"}
        call now {}
    "#]],
    );
    calls(
        "mistral",
        "Yes.[TOOL_CALLS]get_weather[ARGS]{\"city\": \"Oslo\"}[TOOL_CALLS]now{}",
        &expect![[r#"
        content "Yes."
        call get_weather {"city": "Oslo"}
        call now {}
    "#]],
    );
    calls(
        "mistral",
        "[TOOL_CALLS] [{\"name\": \"now\", \"arguments\": {}}][/TOOL_CALLS] ok",
        &expect![[r#"
            content " ok"
            call now {}
        "#]],
    );
}

#[test]
fn other_json_forms() {
    calls(
        "nemotron_deci",
        "<TOOLCALL>[{\"name\": \"now\", \"arguments\": {}}]</TOOLCALL>",
        &expect![[r#"
        call now {}
    "#]],
    );
    calls(
        "phi4",
        "functools[{\"name\": \"now\", \"arguments\": {\"a\": [1, {}]}}]",
        &expect![[r#"
        call now {"a": [1, {}]}
    "#]],
    );
    calls(
        "phi4",
        "I love functools and more.",
        &expect![[r#"
        content "I love functools and more."
    "#]],
    );
    calls(
        "jamba",
        "<tool_calls>[\n{\"name\": \"now\", \"arguments\": {}}\n]</tool_calls>",
        &expect![[r#"
        call now {}
    "#]],
    );
}

#[test]
fn deepseek() {
    calls(
        "deepseek_v3",
        "Sure.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Rom\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        &expect![[r#"
            content "Sure.\n"
            call get_weather {"city": "Rom"}
            call now {}
        "#]],
    );
    calls(
        "deepseek_v3_1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Rom\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        &expect![[r#"
        call get_weather {"city": "Rom"}
        call now {}
    "#]],
    );
    calls(
        "deepseek_v3_2",
        "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Rom</｜DSML｜parameter>\n<｜DSML｜parameter name=\"other\" string=\"false\">[1, 2]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        &expect![[r#"
        call get_weather {"city":"Rom","other":[1, 2]}
    "#]],
    );
    calls(
        "deepseek_v4",
        "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        &expect![[r#"
        call now {}
    "#]],
    );
    calls(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>broken",
        &expect![[r#"
        content "<｜tool▁calls▁begin｜>broken"
    "#]],
    );
}

#[test]
fn calls_as_elements() {
    calls(
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew \"York\"\nCity\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=exact>True</parameter>\n<parameter=where>\n{\"a\": 1}\n</parameter>\n</function>\n</tool_call>",
        &expect![[r#"
            content "I look.\n\n"
            call get_weather {"city":"New \"York\"\nCity","days":3,"exact":true,"where":{"a": 1}}
        "#]],
    );
    calls(
        "qwen3_coder",
        "<function=now>\n</function>",
        &expect![[r#"
        call now {}
    "#]],
    );
    calls(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOsl",
        &expect![[r#"
        call get_weather {"city":"Osl"}
    "#]],
    );
    calls(
        "qwen3_coder",
        "if a <tool_call b",
        &expect![[r#"
        content "if a <tool_call b"
    "#]],
    );
    calls(
        "minimax_m2",
        "<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Rom</parameter>\n<parameter name=\"days\">2</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
        &expect![[r#"
        call get_weather {"city":"Rom","days":2}
        call now {}
    "#]],
    );
    calls(
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rom</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        &expect![[r#"
            content "\n"
            call get_weather {"city":"Rom","days":2}
            call now {}
        "#]],
    );
    calls(
        "glm47",
        "<tool_call>{\"name\": 1}</tool_call>",
        &expect![[r#"
        content "<tool_call>{\"name\": 1}</tool_call>"
    "#]],
    );
}

#[test]
fn kimi_keeps_the_ids_of_the_model() {
    calls(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"Rom\"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        &expect![[r#"
        call get_weather id "functions.get_weather:0" {"city": "Rom"}
        call now id "functions.now:1" {}
    "#]],
    );
}

#[test]
fn gemma4() {
    calls(
        "gemma4",
        "Let me see.<|tool_call>call:get_weather{city:<|\"|>Rom, {\"IT\"}<|\"|>,days:2,exact:true,where:{a:[1,<|\"|>x<|\"|>,{}],b:[]},unit:celsius}<tool_call|><|tool_call>call:now{}<tool_call|>",
        &expect![[r#"
        content "Let me see."
        call get_weather {"city":"Rom, {\"IT\"}","days":2,"exact":true,"where":{"a":[1,"x",{}],"b":[]},"unit":"celsius"}
        call now {}
    "#]],
    );
    // Names between the marks of texts; the end is missing.
    calls(
        "gemma4",
        "<|tool_call>call:now{<|\"|>a b<|\"|>:1,c:[2<tool_call|>",
        &expect![[r#"
        call now {"a b":1,"c":[2]}
    "#]],
    );
    calls(
        "gemma4",
        "<|tool_call>nothing of the kind<tool_call|>",
        &expect![[r#"
        content "<|tool_call>nothing of the kind<tool_call|>"
    "#]],
    );
    both(
        Some("gemma4"),
        Some("gemma4"),
        "",
        "<|channel>thought\nIt is late.<channel|><|tool_call>call:now{}<tool_call|>",
        &expect![[r#"
        reasoning "\nIt is late."
        call now {}
    "#]],
    );
}

#[test]
fn pythonic() {
    calls(
        "pythonic",
        "[get_weather(city='Rom (IT)', days=-3, exact=True, where={'a': [1, None]}), now()]",
        &expect![[r#"
        call get_weather {"city":"Rom (IT)","days":-3,"exact":true,"where":{"a":[1,null]}}
        call now {}
    "#]],
    );
    calls(
        "pythonic",
        "[1, 2, 3] is a list",
        &expect![[r#"
        content "[1, 2, 3] is a list"
    "#]],
    );
    calls(
        "pythonic",
        "[now(1)]",
        &expect![[r#"
        content "[now(1)]"
    "#]],
    );
}

#[test]
fn harmony() {
    let text = "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Rom\"}<|call|>";
    both(
        Some("harmony"),
        Some("gpt_oss"),
        "",
        text,
        &expect![[r#"
        reasoning "Need weather."
        call get_weather {"city": "Rom"}
    "#]],
    );
    both(
        None,
        Some("gpt_oss"),
        "",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>",
        &expect![[r#"
        reasoning "Hm."
        content "Hello!"
    "#]],
    );
    both(
        Some("harmony"),
        Some("gpt_oss"),
        "",
        "<|channel|>commentary<|message|>I will call.<|end|><|start|>assistant to=functions.now<|channel|>analysis json<|message|>{}",
        &expect![[r#"
        content "I will call."
        call now {}
    "#]],
    );
    both(
        Some("harmony"),
        Some("gpt_oss"),
        "",
        "plain text <|channel|>oops",
        &expect![[r#"
        content "plain text <|channel|>oops"
    "#]],
    );
}

#[test]
fn reasoning() {
    let think = |name: &str, prompt: &str, text: &str, expected: &Expect| {
        both(None, Some(name), prompt, text, expected);
    };
    think(
        "qwen3",
        "",
        "<think>\nI think.\n</think>\n\nHello",
        &expect![[r#"
            reasoning "\nI think.\n"
            content "\n\nHello"
        "#]],
    );
    think(
        "qwen3",
        "",
        "no marks at all",
        &expect![[r#"
        content "no marks at all"
    "#]],
    );
    think(
        "qwen3",
        "<|im_start|>assistant\n<think>\n",
        "I think.</think>Hello",
        &expect![[r#"
        reasoning "I think."
        content "Hello"
    "#]],
    );
    think(
        "deepseek_r1",
        "",
        "I think.</think>Hello <think>again</think> you",
        &expect![[r#"
            reasoning "I think.again"
            content "Hello  you"
        "#]],
    );
    // A mark that closes nothing is taken out.
    think(
        "qwen3",
        "",
        "a</think>b",
        &expect![[r#"
            content "ab"
        "#]],
    );
    think(
        "deepseek_r1",
        "",
        "<think>cut of",
        &expect![[r#"
        reasoning "cut of"
    "#]],
    );
    think(
        "deepseek_r1",
        "assistant</think>",
        "Hello",
        &expect![[r#"
        content "Hello"
    "#]],
    );
    think(
        "granite",
        "",
        "Here is my thought process: hm. Here is my response: yes",
        &expect![[r#"
            reasoning " hm. "
            content " yes"
        "#]],
    );
    think(
        "kimi",
        "",
        "◁think▷a◁/think▷b",
        &expect![[r#"
        reasoning "a"
        content "b"
    "#]],
    );
    think(
        "mistral",
        "",
        "[THINK]a[/THINK]b",
        &expect![[r#"
        reasoning "a"
        content "b"
    "#]],
    );
    think(
        "minimax_append_think",
        "",
        "a</think>b",
        &expect![[r#"
        content "<think>a</think>b"
    "#]],
    );
    both(
        Some("hermes"),
        Some("qwen3"),
        "",
        "<think>call?</think>\n\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
        &expect![[r#"
            reasoning "call?"
            content "\n\n"
            call now {}
        "#]],
    );
    both(
        Some("kimi_k2"),
        Some("kimi_k25"),
        "",
        "hm <|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        &expect![[r#"
            reasoning "hm "
            call now id "functions.now:0" {}
        "#]],
    );
}

#[test]
fn calls_that_were_asked_for() {
    let schemas = schemas();
    let form = AnswerForm {
        tools: Some(CallForm::Named("get_weather")),
        ..AnswerForm::default()
    };
    let named = read(&form, &[" ", "{\"city\"", ": 1}"]);
    expect![[r#"
        call get_weather {"city": 1}
    "#]]
    .assert_eq(&named.show());
    let form = AnswerForm {
        tools: Some(CallForm::Required(&schemas)),
        reasoning: Some(ReasoningFormat::ThinkFirst),
        ..AnswerForm::default()
    };
    let list = read(
        &form,
        &[
            "[{\"name\": \"now\", \"parameters\": {}}, {\"name\": \"get_weather\",\"parameters\":{\"city\":\"x\"}}]",
        ],
    );
    expect![[r#"
        call now {}
        call get_weather {"city":"x"}
    "#]]
    .assert_eq(&list.show());
}

#[test]
fn limits_hold() {
    let schemas = schemas();
    let form = AnswerForm {
        tools: Some(CallForm::Native(ToolFormat::Hermes, &schemas)),
        ..AnswerForm::default()
    };
    // One call more than there may be.
    let call = "<tool_call>{\"name\":\"now\",\"arguments\":{}}</tool_call>";
    let text = call.repeat(kvasir_parsers::limits::CALLS_MAX as usize + 1);
    let many = read(&form, &[&text]);
    assert_eq!(many.calls.len(), kvasir_parsers::limits::CALLS_MAX as usize);
    assert_eq!(many.content, call);
    // Arguments that stand before the name, longer than is held back.
    let long = "x".repeat(kvasir_parsers::limits::HELD_BYTES_MAX);
    let text =
        format!("<tool_call>{{\"arguments\":{{\"a\":\"{long}\"}},\"name\":\"now\"}}</tool_call>");
    let held = read(&form, &[&text]);
    assert_eq!((held.calls.len(), held.content), (0, text));
    // After the name they may have any length.
    let text =
        format!("<tool_call>{{\"name\":\"now\",\"arguments\":{{\"a\":\"{long}\"}}}}</tool_call>");
    assert_eq!(read(&form, &[&text]).calls[0].2.len(), long.len() + 8);
    // A value of unknown type that is too long is a text.
    let form = AnswerForm {
        tools: Some(CallForm::Native(ToolFormat::Qwen3Coder, &schemas)),
        ..AnswerForm::default()
    };
    let digits = "1".repeat(kvasir_parsers::limits::VALUE_BYTES_MAX + 1);
    let text = format!(
        "<tool_call><function=get_weather><parameter=days>{digits}</parameter></function></tool_call>"
    );
    let typed = read(&form, &[&text]);
    assert_eq!(typed.calls[0].2, format!("{{\"days\":\"{digits}\"}}"));
}
