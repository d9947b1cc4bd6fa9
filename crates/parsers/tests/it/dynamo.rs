//! What Dynamo 1.6.1 made of the same texts.

use kvasir_parsers::{AnswerForm, CallForm, ReasoningFormat, ToolFormat};
use serde_json::Value;

use crate::cases::{read, schemas};

/// Texts that are read otherwise here, and why.
const OTHERWISE: &[(&str, &str)] = &[
    (
        "a <tool_call>no json",
        "it drops what looked like a call; here it stays content",
    ),
    ("\"city\": \"Ro", "it closes arguments that were cut off"),
    (
        "{\"name\": \"other\"",
        "a call without a mark must be of a function of the request",
    ),
    (
        "[TOOL_CALLS]get_weather{",
        "it does not know the newer form of Mistral",
    ),
    (
        "<|channel|>",
        "it reads tokens of gpt-oss, which this text was not made of",
    ),
];

#[test]
fn answers_are_those_of_dynamo() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../testdata/dynamo-answers/answers.jsonl"
    );
    let recorded = std::fs::read_to_string(path).unwrap();
    let schemas = schemas();
    let mut same = 0;
    for line in recorded.lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        let text = case["text"].as_str().unwrap();
        // Its parser of this name reads neither form of Qwen's; answers that were cut off or forced are the frontend's matter.
        let is_elsewhere = case["tool_call_parser"] == "qwen3"
            || ["max_tokens", "parallel_tool_calls"]
                .iter()
                .any(|key| case.get(key).is_some())
            || case["tool_choice"].is_object();
        if is_elsewhere || OTHERWISE.iter().any(|(part, _)| text.contains(part)) {
            continue;
        }
        let native = case["tool_call_parser"]
            .as_str()
            .and_then(ToolFormat::named);
        let form = AnswerForm {
            tools: match case["tool_choice"].as_str() {
                Some("none") => None,
                Some("required") => Some(CallForm::Required(&schemas)),
                _ if case["tools"] == true => {
                    native.map(|format| CallForm::Native(format, &schemas))
                }
                _ => None,
            },
            reasoning: case["reasoning_parser"]
                .as_str()
                .and_then(ReasoningFormat::named),
            reasoning_off: case.get("chat_template_kwargs").is_some(),
            prompt_end: "<|im_start|>assistant\n",
        };
        let ours = read(&form, &[text]);
        let message = &case["message"];
        let said = |key: &str| message[key].as_str().unwrap_or_default();
        assert_eq!(ours.content, said("content"), "{case}");
        assert_eq!(ours.reasoning, said("reasoning_content"), "{case}");
        let theirs = message["tool_calls"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        assert_eq!(ours.calls.len(), theirs.len(), "{case}");
        for ((name, id, arguments, _), theirs) in ours.calls.iter().zip(&theirs) {
            assert_eq!(*name, theirs["function"]["name"], "{case}");
            let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
            let their_arguments = theirs["function"]["arguments"].as_str().unwrap();
            assert_eq!(json(arguments), json(their_arguments), "{case}");
            if let Some(id) = id {
                assert_eq!(*id, theirs["id"], "{case}");
            }
        }
        same += 1;
    }
    assert!(same >= 24, "{same} were compared");
}
