//! The model that the binary carries.

use kvasir_text::{ChatInput, TextModel};

#[test]
fn it_is_small_and_complete() {
    let json = include_bytes!("../../src/builtin/tokenizer.json");
    assert!(json.len() < 200 << 10, "{}", json.len());
    let model = TextModel::builtin().unwrap();
    assert_eq!(model.tokenizer().vocabulary_size(), 4096);
    assert_eq!(model.context_length(), Some(32_768));
    assert_eq!(
        model.eos(),
        [model.tokenizer().id_of("<|im_end|>").unwrap()]
    );
}

#[test]
fn text_survives_the_round_trip() {
    let model = TextModel::builtin().unwrap();
    let tokenizer = model.tokenizer();
    for text in [
        "",
        "Hello, world!",
        "  two  spaces\n\n\tand tabs\r\n",
        "fn main() { println!(\"{}\", 1 + 2); }",
        "Ærøskøbing, 東京, 🚀🧭, e\u{301}",
        "\u{0}\u{1f}\u{7f}",
    ] {
        let ids = tokenizer.encode(text, false).unwrap();
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        tokenizer.check(&ids).unwrap();
    }
    let ids = tokenizer
        .encode("The router sends each request to one worker.", false)
        .unwrap();
    assert!(
        ids.len() <= 10,
        "common words are one token each: {}",
        ids.len()
    );
    assert!(tokenizer.check(&[4096]).is_err());
}

/// Each turn's prompt begins with the prompt before it: what a prefix cache lives on.
#[test]
fn turns_share_their_prefix() {
    let model = TextModel::builtin().unwrap();
    let render = |messages: &str, prompt: bool| {
        let input = ChatInput {
            messages,
            add_generation_prompt: prompt,
            ..ChatInput::default()
        };
        let text = model.render(&input).unwrap();
        (model.encode_chat(&text).unwrap(), text)
    };
    let first = r#"[{"role":"system","content":"Be brief."},{"role":"user","content":"Hello!"}]"#;
    let (ids, text) = render(first, true);
    assert_eq!(
        text,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    );
    let second = r#"[{"role":"system","content":"Be brief."},{"role":"user","content":"Hello!"},{"role":"assistant","content":"Hi."},{"role":"user","content":"Bye."}]"#;
    let (longer, _) = render(second, true);
    assert_eq!(longer[..ids.len()], ids);
}

#[test]
fn tools_and_calls_render() {
    let model = TextModel::builtin().unwrap();
    let input = ChatInput {
        messages: r#"[{"role":"user","content":"w?"},{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]},{"role":"tool","content":"ok"}]"#,
        tools: Some(r#"[{"type":"function","function":{"name":"f"}}]"#),
        ..ChatInput::default()
    };
    let text = model.render(&input).unwrap();
    assert!(
        text.contains(r#"{"type": "function", "function": {"name": "f", "description": null, "parameters": null}}"#),
        "{text}"
    );
    assert!(
        text.contains(
            "<|im_start|>assistant\n\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}<|im_end|>"
        ),
        "{text}"
    );
}
