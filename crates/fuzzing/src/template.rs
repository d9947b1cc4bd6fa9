//! A model's chat template and a conversation: rendering is a function of the two, whatever was rendered before.

use kvasir_openai::content_spans;
use kvasir_text::{ChatInput, ChatTemplate};

pub(crate) const WORDS: &[&str] = &[
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if m.content is string %}",
    "{% else %}",
    "{% elif loop.last %}",
    "{% endif %}",
    "{{ m['content'] }}",
    "{{ m.content | trim }}",
    "{{ m.content[0] }}",
    "{{ m.content | length }}",
    "{{ messages | tojson }}",
    "{{ bos_token }}",
    "{%- set x = m.content + 'a' -%}",
    "{{ x.split('a')[-1] }}",
    "{{ raise_exception('no') }}",
    "{{ strftime_now('%d %b %Y') }}",
    "{% macro f(a) %}{{ a }}{% endmacro %}",
    "{{ f(m) }}",
    "not ",
    "\"content\":\"\\u00e9\"",
    "{\"role\":\"user\",\"content\":\"hi\"},",
    "<|im_start|>",
];
/// What is between the template and the messages.
const BETWEEN: u8 = 0;

pub(crate) fn check(bytes: &[u8]) -> bool {
    let Some(cut) = bytes.iter().position(|byte| *byte == BETWEEN) else {
        return false;
    };
    let source = std::str::from_utf8(&bytes[..cut]);
    let messages = std::str::from_utf8(&bytes[cut + 1..]);
    let (Ok(source), Ok(messages)) = (source, messages) else {
        return false;
    };
    let Some(template) = template(source) else {
        return false;
    };
    let spans = content_spans(messages);
    let mut accepted = false;
    for way in 0..4 {
        let plain = ChatInput {
            messages,
            add_generation_prompt: way & 1 > 0,
            continue_final_message: way & 2 > 0,
            now_unix: 1_763_000_000,
            ..ChatInput::default()
        };
        let quick = ChatInput {
            contents: spans.as_deref(),
            ..plain
        };
        let alone = self::template(source).map(|fresh| fresh.render(&plain).ok());
        let first = template.render(&quick).ok();
        assert_eq!(Some(&first), alone.as_ref(), "another prompt with spans");
        let again = template.render(&quick).ok();
        assert_eq!(first, again, "another prompt the second time");
        assert_eq!(
            first,
            template.render(&plain).ok(),
            "another prompt without spans"
        );
        accepted |= first.is_some();
    }
    accepted
}

fn template(source: &str) -> Option<ChatTemplate> {
    let templates = vec![("default".to_owned(), source.to_owned())];
    let specials = vec![("bos_token".to_owned(), "<s>".to_owned())];
    ChatTemplate::new(templates, specials).ok()
}
