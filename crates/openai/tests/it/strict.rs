//! Field by field: each rule of the strict reading at its bound.

use std::fmt::Write as _;

use expect_test::{Expect, expect};
use kvasir_openai::{ChatRequest, CompletionRequest, Prompt, SessionAction, ToolChoice, Unknown};

/// A chat body with `fields` added.
fn chat(fields: &str) -> Result<ChatRequest, String> {
    let body = format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}]{}{fields}}}"#,
        if fields.is_empty() { "" } else { "," }
    );
    ChatRequest::parse(body.as_bytes(), Unknown::Refuse).map_err(|e| e.message.into_owned())
}

fn check(fields: &[&str], want: &Expect) {
    let mut table = String::new();
    for field in fields {
        let result = chat(field).map_or_else(|e| e, |_| "ok".into());
        writeln!(table, "{field} => {result}").unwrap();
    }
    want.assert_eq(&table);
}

#[test]
fn ranges_hold_at_both_ends() {
    check(
        &[
            r#""temperature":2"#,
            r#""temperature":2.1"#,
            r#""top_p":1.0"#,
            r#""top_p":-0.1"#,
            r#""top_k":-1"#,
            r#""top_k":-2"#,
            r#""min_p":1.01"#,
            r#""n":128"#,
            r#""n":129"#,
            r#""n":0"#,
            r#""n":2,"temperature":0"#,
            r#""frequency_penalty":-2.5"#,
            r#""presence_penalty":3"#,
            r#""repetition_penalty":0"#,
            r#""max_tokens":0"#,
            r#""max_completion_tokens":5,"max_tokens":0"#,
            r#""max_tokens":4,"min_tokens":5"#,
            r#""max_tokens":4294967296"#,
            r#""logprobs":true,"top_logprobs":20"#,
            r#""logprobs":true,"top_logprobs":21"#,
            r#""top_logprobs":1"#,
            r#""logit_bias":{"5":100}"#,
            r#""logit_bias":{"5":101}"#,
            r#""seed":-7"#,
            r#""user":" ""#,
        ],
        &expect![[r#"
            "temperature":2 => ok
            "temperature":2.1 => Validation: Temperature must be between 0 and 2, got 2.1
            "top_p":1.0 => ok
            "top_p":-0.1 => Validation: Top_p must be between 0 and 1, got -0.1
            "top_k":-1 => ok
            "top_k":-2 => Validation: Top_k must be -1 or more, got -2
            "min_p":1.01 => Validation: Min_p must be between 0 and 1, got 1.01
            "n":128 => ok
            "n":129 => Validation: n must be between 1 and 128, got 129
            "n":0 => Validation: n must be between 1 and 128, got 0
            "n":2,"temperature":0 => Validation: n above 1 needs a temperature above 0: the choices would be equal
            "frequency_penalty":-2.5 => Validation: Frequency penalty must be between -2 and 2, got -2.5
            "presence_penalty":3 => Validation: Presence penalty must be between -2 and 2, got 3
            "repetition_penalty":0 => Validation: Repetition penalty must be greater than 0, got 0
            "max_tokens":0 => Validation: Max tokens must be greater than 0, got 0
            "max_completion_tokens":5,"max_tokens":0 => ok
            "max_tokens":4,"min_tokens":5 => Validation: min_tokens must not exceed max_tokens, got 5 and 4
            "max_tokens":4294967296 => Failed to deserialize the JSON body into the target type: max_tokens: invalid value: integer `4294967296`, expected u32 at line 1 column 80
            "logprobs":true,"top_logprobs":20 => ok
            "logprobs":true,"top_logprobs":21 => Validation: Top_logprobs must be between 0 and 20, got 21
            "top_logprobs":1 => Validation: `top_logprobs` needs `logprobs` to be true
            "logit_bias":{"5":100} => ok
            "logit_bias":{"5":101} => Validation: Logit bias for token '5' must be between -100 and 100, got 101
            "seed":-7 => ok
            "user":" " => Validation: User ID cannot be empty
        "#]],
    );
}

#[test]
fn shapes() {
    check(
        &[
            r#""stop":"x""#,
            r#""stop":["a","b"]"#,
            r#""stop":[]"#,
            r#""stop":[""]"#,
            r#""stop":[1,2]"#,
            r#""stop":5"#,
            r#""stream":1"#,
            r#""stream":true,"stream_options":{"include_usage":true}"#,
            r#""stream_options":{"include_usage":true}"#,
            r#""response_format":{"type":"json_object"}"#,
            r#""response_format":{"type":"json_schema","json_schema":{"name":"x"}}"#,
            r#""response_format":{"type":"yaml"}"#,
            r#""modalities":["text","audio"]"#,
            r#""nope":1,"nada":2"#,
            r#""model":"again""#,
            r#""chat_template_kwargs":[1]"#,
            r#""nvext":null"#,
            r#""nvext":{"dp_rank":-1}"#,
            r#""nvext":{"token_data":[]}"#,
            r#""nvext":{"agent_hints":{"kv_overlap_score_credit":1.5}}"#,
            r#""nvext":{"agent_hints":{"kv_overlap_score_weight":-1}}"#,
            r#""nvext":{"agent_hints":{"kv_overlap_score_credit":1e300}}"#,
            r#""nvext":{"session_control":{"session_id":""}}"#,
            r#""nvext":{"session_control":{"action":"open"}}"#,
            r#""nvext":{"session_control":{"session_id":"s","action":"swap"}}"#,
            r#""nvext":{"agent_hints":{"speed":1}}"#,
            r#""nvext":{"routing_constraints":{"wanted":[]}}"#,
            r#""nvext":[]"#,
        ],
        &expect![[r#"
            "stop":"x" => ok
            "stop":["a","b"] => ok
            "stop":[] => ok
            "stop":[""] => Validation: Stop sequence cannot be empty
            "stop":[1,2] => ok
            "stop":5 => Failed to deserialize the JSON body into the target type: stop: expected a string, a list of strings or a list of token ids at line 1 column 64
            "stream":1 => Failed to deserialize the JSON body into the target type: stream: invalid type: integer `1`, expected a boolean at line 1 column 67
            "stream":true,"stream_options":{"include_usage":true} => ok
            "stream_options":{"include_usage":true} => Validation: `stream_options` needs `stream` to be true
            "response_format":{"type":"json_object"} => ok
            "response_format":{"type":"json_schema","json_schema":{"name":"x"}} => Validation: `response_format.json_schema.schema` is required for type `json_schema`
            "response_format":{"type":"yaml"} => Failed to deserialize the JSON body into the target type: response_format: unknown variant `yaml`, expected one of `text`, `json_object`, `json_schema` at line 1 column 89
            "modalities":["text","audio"] => Validation: modalities may hold `text` only, got `audio`
            "nope":1,"nada":2 => Validation: Unsupported parameter(s): `nope`, `nada`
            "model":"again" => Failed to deserialize the JSON body into the target type: duplicate field `model` at line 1 column 64
            "chat_template_kwargs":[1] => Validation: chat_template_kwargs must be an object
            "nvext":null => ok
            "nvext":{"dp_rank":-1} => Failed to deserialize the JSON body into the target type: nvext.dp_rank: invalid value: integer `-1`, expected u32 at line 1 column 78
            "nvext":{"token_data":[]} => Validation: nvext.token_data cannot be empty
            "nvext":{"agent_hints":{"kv_overlap_score_credit":1.5}} => Validation: kv_overlap_score_credit must be between 0 and 1, got 1.5
            "nvext":{"agent_hints":{"kv_overlap_score_weight":-1}} => Validation: kv_overlap_score_weight must be at least 0, got -1
            "nvext":{"agent_hints":{"kv_overlap_score_credit":1e300}} => Validation: kv_overlap_score_credit must be between 0 and 1, got 1e300
            "nvext":{"session_control":{"session_id":""}} => Validation: nvext.session_control.session_id cannot be empty
            "nvext":{"session_control":{"action":"open"}} => Failed to deserialize the JSON body into the target type: nvext.session_control: missing field `session_id` at line 1 column 101
            "nvext":{"session_control":{"session_id":"s","action":"swap"}} => Failed to deserialize the JSON body into the target type: nvext.session_control: unknown variant `swap`, expected one of `open`, `bind`, `close` at line 1 column 117
            "nvext":{"agent_hints":{"speed":1}} => Failed to deserialize the JSON body into the target type: nvext.agent_hints: unknown field `speed`, expected one of `priority`, `strict_priority`, `osl`, `speculative_prefill`, `latency_sensitivity`, `kv_overlap_score_credit`, `kv_overlap_score_weight` at line 1 column 88
            "nvext":{"routing_constraints":{"wanted":[]}} => Failed to deserialize the JSON body into the target type: nvext.routing_constraints: unknown field `wanted`, expected `required_taints` or `preferred_taints` at line 1 column 97
            "nvext":[] => Failed to deserialize the JSON body into the target type: nvext: invalid type: sequence, expected a JSON object at line 1 column 65
        "#]],
    );
}

#[test]
fn tools_and_their_choice() {
    let tools = r#""tools":[{"type":"function","function":{"name":"f","parameters":{}}}]"#;
    let with = |choice: &str| chat(&format!("{tools},\"tool_choice\":{choice}"));
    let choice = |r: Result<ChatRequest, String>| r.unwrap().tools.unwrap().choice;
    assert_eq!(choice(chat(tools)), ToolChoice::Auto);
    assert_eq!(choice(with("\"none\"")), ToolChoice::None);
    assert_eq!(choice(with("\"required\"")), ToolChoice::Required);
    let named = r#"{"type":"function","function":{"name":"f"}}"#;
    assert_eq!(choice(with(named)), ToolChoice::Named("f".into()));
    check(
        &[
            r#""tool_choice":"required""#,
            r#""tool_choice":"maybe""#,
            r#""tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"function","function":{"name":"g"}}"#,
            r#""tools":[{"type":"retrieval","function":{"name":"f"}}]"#,
            r#""tools":[{"type":"function","function":{}}]"#,
            r#""tools":[{"type":"function","function":{"name":""}}]"#,
            r#""tools":[]"#,
        ],
        &expect![[r#"
            "tool_choice":"required" => Validation: tool_choice needs `tools`
            "tool_choice":"maybe" => Validation: tool_choice must be `none`, `auto`, `required` or a named function, got `maybe`
            "tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"function","function":{"name":"g"}} => Validation: tool_choice names `g`, which is not in `tools`
            "tools":[{"type":"retrieval","function":{"name":"f"}}] => Validation: tools[0].type must be `function`
            "tools":[{"type":"function","function":{}}] => Failed to deserialize the JSON body into the target type: tools[0]: missing field `name` at line 1 column 98
            "tools":[{"type":"function","function":{"name":""}}] => Validation: a function's name must have 1 to 96 characters, got ``
            "tools":[] => ok
        "#]],
    );
}

#[test]
fn messages() {
    let parse = |messages: &str| {
        let body = format!(r#"{{"model":"m","messages":{messages}}}"#);
        match ChatRequest::parse(body.as_bytes(), Unknown::Refuse) {
            Ok(_) => "ok".to_owned(),
            Err(e) => e.message.into_owned(),
        }
    };
    let mut table = String::new();
    for messages in [
        r#"[{"role":"user","content":[{"type":"text","text":"a"}]}]"#,
        r#"[{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]}]"#,
        r#"[{"role":"user"}]"#,
        r#"[{"content":"x"}]"#,
        r#"[{"role":"robot","content":"x"}]"#,
        r#"[{"role":"user","content":5}]"#,
        r#"[{"role":"user","content":["x"]}]"#,
        r#"[{"role":"user","content":[{"type":"text"}]}]"#,
        r#"[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}]"#,
        r#"["x"]"#,
        r#"{}"#,
    ] {
        writeln!(table, "{messages} => {}", parse(messages)).unwrap();
    }
    expect![[r#"
        [{"role":"user","content":[{"type":"text","text":"a"}]}] => ok
        [{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]}] => ok
        [{"role":"user"}] => Validation: messages[0].content is required
        [{"content":"x"}] => Failed to deserialize the JSON body into the target type: messages[0]: missing field `role` at line 1 column 40
        [{"role":"robot","content":"x"}] => Failed to deserialize the JSON body into the target type: messages[0]: unknown variant `robot`, expected one of `developer`, `system`, `user`, `assistant`, `tool`, `function` at line 1 column 40
        [{"role":"user","content":5}] => Validation: messages[0].content must be a string or a list of parts
        [{"role":"user","content":["x"]}] => Validation: messages[0].content must be a list of objects with a `type`
        [{"role":"user","content":[{"type":"text"}]}] => Validation: messages[0].content has a text part without `text`
        [{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}] => Validation: messages[0].content has a part of type `image_url`; workers of this model take text
        ["x"] => Failed to deserialize the JSON body into the target type: messages[0]: invalid type: string "x", expected a message object at line 1 column 28
        {} => Failed to deserialize the JSON body into the target type: messages: invalid type: map, expected a sequence at line 1 column 24
    "#]].assert_eq(&table);
}

#[test]
fn prompts() {
    let parse = |prompt: &str| {
        let body = format!(r#"{{"model":"m","prompt":{prompt}}}"#);
        CompletionRequest::parse(body.as_bytes(), Unknown::Refuse)
            .map(|r| r.prompts)
            .map_err(|e| e.message.into_owned())
    };
    assert_eq!(parse("\"a\""), Ok(vec![Prompt::Text("a".into())]));
    assert_eq!(parse("[[1],[2,3]]").unwrap().len(), 2);
    assert_eq!(parse("[1,2]"), Ok(vec![Prompt::Tokens(vec![1, 2])]));
    let mut table = String::new();
    let many = format!("[{}]", vec!["\"a\""; 129].join(","));
    for prompt in [
        "\"\"",
        "[]",
        "[\"a\",\"\"]",
        "[[]]",
        "[-1]",
        "{}",
        "null",
        &many,
    ] {
        let result = parse(prompt).map_or_else(|e| e, |_| "ok".into());
        let shown: String = prompt.chars().take(12).collect();
        writeln!(table, "{shown} => {result}").unwrap();
    }
    expect![[r#"
        "" => Validation: Prompt cannot be empty
        [] => Validation: Prompt cannot be empty
        ["a",""] => Validation: Prompt cannot be empty
        [[]] => Validation: Prompt cannot be empty
        [-1] => Failed to deserialize the JSON body into the target type: prompt: expected a string, a list of strings, a list of token ids or a list of lists of token ids at line 1 column 22
        {} => Failed to deserialize the JSON body into the target type: prompt: expected a string, a list of strings, a list of token ids or a list of lists of token ids at line 1 column 22
        null => Failed to deserialize the JSON body into the target type: missing field `prompt` at line 1 column 27
        ["a","a","a" => Validation: prompts times n must be at most 128, got 129 times 1
    "#]].assert_eq(&table);
}

/// A body over several lines: the position is in the whole body, and the field is named.
#[test]
fn errors_say_where() {
    let body = "{\n  \"model\": \"m\",\n  \"messages\": [{\"role\": \"user\", \"content\": \"x\"}],\n  \"nvext\": {\n    \"agent_hints\": {\"osl\": \"long\"}\n  }\n}";
    let error = ChatRequest::parse(body.as_bytes(), Unknown::Refuse).unwrap_err();
    expect![[r#"Failed to deserialize the JSON body into the target type: nvext.agent_hints.osl: invalid type: string "long", expected u32 at line 5 column 33"#]].assert_eq(&error.message);
}

#[test]
fn unknown_fields_may_be_ignored() {
    let body = br#"{"model":"m","messages":[{"role":"user","content":"x"}],"nope":1}"#;
    assert!(ChatRequest::parse(body, Unknown::Refuse).is_err());
    assert!(ChatRequest::parse(body, Unknown::Ignore).is_ok());
}

#[test]
fn hints_and_sessions_are_read() {
    let request = chat(
        r#""nvext":{"agent_hints":{"latency_sensitivity":2.5,"kv_overlap_score_credit":0.5,"kv_overlap_score_weight":2,"strict_priority":1,"osl":9,"speculative_prefill":true},"session_control":{"session_id":"s","action":"bind"},"extra_fields":["worker_id","what"],"annotations":["query_instance_id:"],"routing_constraints":{"required_taints":["gpu"],"preferred_taints":{"near":2}},"decode_worker_id":18446744073709551615}"#,
    )
    .unwrap();
    let nvext = request.nvext;
    assert!((nvext.hints.priority_jump() - 2.5).abs() < f64::EPSILON);
    assert_eq!(nvext.hints.overlap_credit, Some(0.5));
    assert_eq!(nvext.hints.overlap_weight, Some(2.0));
    let session = nvext.session.clone().unwrap();
    assert_eq!(
        (session.action, session.timeout_secs),
        (Some(SessionAction::Bind), 300)
    );
    assert!(nvext.extra.worker_id && !nvext.extra.timing);
    assert!(nvext.query_only());
    assert_eq!(nvext.pinned_worker(), Some(u64::MAX));
    assert_eq!(nvext.constraints.required, ["gpu"]);
}

#[test]
fn sampling_is_bounded_by_the_context() {
    let sampling = |fields: &str| chat(fields).unwrap().options.sampling(100);
    assert_eq!(sampling("").max_tokens, 100);
    assert_eq!(sampling("\"max_tokens\":7").max_tokens, 7);
    assert_eq!(sampling("\"max_tokens\":700").max_tokens, 100);
    let obstacle = |more| chat(more).unwrap().options.obstacle();
    assert_eq!(obstacle(""), None);
    assert_eq!(obstacle("\"n\":2"), Some("choices"));
    assert_eq!(obstacle("\"guided_json\":{}"), Some("guided"));
}

/// A session's id is kept for as long as the session is bound.
#[test]
fn a_long_session_id_is_refused() {
    let nvext = |bytes: usize| {
        let id = "s".repeat(bytes);
        kvasir_openai::Nvext::parse(&format!(r#"{{"session_control":{{"session_id":"{id}"}}}}"#))
    };
    assert!(nvext(1024).is_ok());
    let error = nvext(1025).unwrap_err();
    let text = "nvext.session_control.session_id is longer than 1024 bytes";
    assert!(error.to_string().contains(text), "{error}");
}
