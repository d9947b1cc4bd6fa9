//! Tests of prompts put together: they are what the template prints.

use kvasir_openai::content_spans;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::chat::Dialect;
use crate::template::ChatTemplate;

/// Habits of real templates: plain, trimming, searching for words, collecting, with tools and the date.
const SOURCES: [&str; 5] = [
    include_str!("../../builtin/chat_template.jinja"),
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>{% endfor %}{{ tools }}",
    "{% for m in messages %}{% set text = m.content %}{% if '</think>' in text %}\
     {% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}{% if text %}\
     {{ '[' + m.role + ']' + text.strip() + '\n' }}{% else %}none{% endif %}{% endfor %}",
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}\
     {% set ns.system = ns.system + m.content %}{% endif %}{% endfor %}{{ ns.system }}{{ ns.system }}\
     {% for m in messages %}{% if loop.nextitem is defined %}{{ m.content }}|{% endif %}{% endfor %}",
    "{{ strftime_now('%S') }}{{ thinking }}{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson \
     if m.tool_calls else '' }}{% endfor %}",
];

fn template(source: &str) -> ChatTemplate {
    let template = ChatTemplate::new(vec![("default".into(), source.into())], Vec::new()).unwrap();
    assert!(template.shapes.is_some(), "{source}");
    template
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(String::new()),
        "[a-z ]{1,12}",
        "\\PC{1,8}",
        "[ \n]{0,2}[a-z\"\\\\]{0,6}[ \n\u{3000}]{0,2}",
        "(a|</think>|<think>|\n){1,5}",
        "[\u{e000}\u{e001}\u{e010}\u{e011}a]{1,5}",
    ]
}

fn message() -> impl Strategy<Value = Value> {
    let role = prop::sample::select(vec!["system", "user", "assistant", "tool"]);
    let calls = json!([{"type": "function", "function": {"name": "f", "arguments": "{\"a\": \"\u{e000}\"}"}}]);
    (role, text(), 0..8u8).prop_map(move |(role, text, kind)| match kind {
        0 => json!({"role": role, "content": null, "tool_calls": calls}),
        1 => json!({"role": role}),
        2 => json!({"content": text, "role": role, "name": "n"}),
        3 => json!({"role": role, "content": [{"type": "text", "text": text}]}),
        _ => json!({"role": role, "content": text}),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever was put together before, with the same texts or others: always what the template prints.
    #[test]
    fn prompts_are_what_the_template_prints(
        list in prop::collection::vec(message(), 1..4),
        other in prop::collection::vec(text(), 4..5),
        source in 0..SOURCES.len(),
        tools in prop::option::of(Just("[{\"function\":{\"name\":\"f\"}}]")),
        kwargs in prop::option::of(Just("{\"thinking\":\"\\ue000\"}")),
        add_generation_prompt: bool,
        now_unix in 0..3i64,
    ) {
        let template = template(SOURCES[source]);
        let mut changed = list.clone();
        for (message, text) in changed.iter_mut().zip(other) {
            if message["content"].is_string() {
                message["content"] = text.into();
            }
        }
        for list in [&list, &list, &list, &changed, &changed, &changed, &list] {
            let messages = serde_json::to_string(list).unwrap();
            let spans = content_spans(&messages).unwrap();
            let input = ChatInput {
                messages: &messages,
                tools,
                kwargs,
                add_generation_prompt,
                now_unix,
                dialect: Dialect::Vllm,
                ..ChatInput::default()
            };
            let put_together = template.render(&ChatInput { contents: Some(&spans), ..input });
            prop_assert_eq!(put_together, template.render(&input), "{}", messages);
        }
        let shapes = template.shapes.as_ref().unwrap();
        prop_assert!(!shapes.disabled.load(Ordering::Relaxed));
    }
}

fn uses(template: &ChatTemplate) -> u64 {
    let shapes = template.shapes.as_ref().unwrap();
    shapes.uses.load(Ordering::Relaxed)
}

fn render(template: &ChatTemplate, messages: &str) -> String {
    let spans = content_spans(messages).unwrap();
    let input = ChatInput {
        messages,
        contents: Some(&spans),
        ..ChatInput::default()
    };
    template.render(&input).unwrap()
}

/// The first conversation of a shape is rendered, the second teaches it, later ones are put together.
#[test]
fn a_shape_is_learnt_at_its_second_conversation() {
    let template = template(SOURCES[0]);
    for (number, wanted) in [0, 0, 1, 2].into_iter().enumerate() {
        let messages = format!(r#"[{{"role":"user","content":"number \"{number}\"\n"}}]"#);
        let prompt = render(&template, &messages);
        assert_eq!(
            prompt,
            format!("<|im_start|>user\nnumber \"{number}\"\n<|im_end|>\n")
        );
        assert_eq!(uses(&template), wanted);
    }
    // An empty text is another shape.
    assert!(render(&template, r#"[{"role":"user","content":""}]"#).contains("user\n<|im_end|>"));
    assert_eq!(uses(&template), 2);
}

/// A template that is wrongly taken for one that passes texts on is found out when a shape is learnt.
#[test]
fn the_first_difference_ends_it() {
    let mut template = template(SOURCES[1]);
    template.shapes = Some(ShapeCache::new(TextRequirements::default()));
    for _ in 0..4 {
        let prompt = render(&template, r#"[{"role":"user","content":" a "}]"#);
        assert_eq!(prompt, "<|start|>user\na<|end|>None");
    }
    let shapes = template.shapes.as_ref().unwrap();
    assert!(shapes.disabled.load(Ordering::Relaxed));
    assert_eq!(uses(&template), 0);
}

#[test]
fn shapes_stay_within_their_memory() {
    let mut shapes = Shapes::default();
    for number in 0..100u64 {
        let shape = Shape {
            key: vec![0; 200_000].into(),
            printed: String::new(),
            texts: vec![(0, 0)],
        };
        shapes.insert(number, shape);
        let held: usize = shapes.by_hash.values().map(|shape| shape.cost()).sum();
        assert_eq!(shapes.used, held);
        assert!(held <= SHAPES_BYTES_MAX);
    }
}

#[test]
fn numbers_of_marks_read_back() {
    for number in [0, 1, 15, 16, 17, 4095, 70_000] {
        let mut digits = String::new();
        write_number(&mut digits, number);
        assert!(digits.chars().all(is_mark));
        assert_eq!(read_number(&digits), Some(number));
    }
    assert_eq!(read_number("a"), None);
}
