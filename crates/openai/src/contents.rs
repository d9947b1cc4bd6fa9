//! The texts of a conversation, apart from the rest of it.
//!
//! Answers one question: where in a list of messages do the contents stand that are plain strings? What lies between
//! them says the same for every text: who speaks, which tools are called, whether there are pictures.

use crate::object::{Span, span_in};
use crate::walk::{self, JsonField};

/// Where in `messages` (a JSON list) the contents that are strings stand, between their quotes, in order. `None`
/// where that is not clear: it is no list of objects, or a message has two contents.
///
/// ```
/// # use kvasir_openai::content_spans;
/// let messages = r#"[{"role":"user","content":"Hi"},{"content":null},{"content":["a"]}]"#;
/// let spans = content_spans(messages).unwrap();
/// assert_eq!(spans.len(), 1);
/// assert_eq!(&messages[spans[0].clone()], "Hi");
/// ```
#[must_use]
pub fn content_spans(messages: &str) -> Option<Vec<Span>> {
    let bytes = messages.as_bytes();
    let start = walk::blank(bytes, 0);
    let (end, spans) = contents_at(messages, start)?;
    let mut spans = spans.filter(|_| walk::blank(bytes, end) == bytes.len())?;
    for span in &mut spans {
        *span = span.start + start..span.end + start;
    }
    Some(spans)
}

/// Where the list of messages that begins at `at` ends, and the contents in it, from there. `None` where it is no list that
/// the quick reader is sure of.
pub(crate) fn contents_at(json: &str, at: usize) -> Option<(usize, Option<Vec<Span>>)> {
    let mut spans = Vec::with_capacity(8);
    let (mut clear, mut last) = (true, None);
    let mut others = false;
    let field = |message, JsonField { key, value }| {
        if key != "content" {
            return;
        }
        clear &= last.replace(message) != Some(message);
        let text = value.strip_prefix('"').and_then(|v| v.strip_suffix('"'));
        let within = |text| {
            let span = span_in(json, text);
            span.start - at..span.end - at
        };
        spans.extend(text.map(within));
    };
    let end = walk::objects(json, at, field, || others = true)?;
    Some((end, (clear && !others).then_some(spans)))
}

/// Whether `word` stands in `messages` outside of `spans`.
#[must_use]
pub fn is_outside(messages: &str, spans: &[Span], word: &str) -> bool {
    let ends = spans.iter().map(|span| span.start);
    let starts = std::iter::once(0).chain(spans.iter().map(|span| span.end));
    starts
        .zip(ends.chain(std::iter::once(messages.len())))
        .any(|(start, end)| {
            messages
                .get(start..end)
                .is_none_or(|part| part.contains(word))
        })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;
    use crate::walk::tests::near_json;

    /// The texts of a list of messages, as a whole parse finds them.
    fn texts(messages: &Value) -> Vec<&str> {
        let list = messages.as_array().map_or(&[][..], Vec::as_slice);
        list.iter().filter_map(|m| m["content"].as_str()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn texts_are_where_a_parse_finds_them(
            parts in prop::collection::vec((near_json(), any::<String>(), 0..4u8), 0..4),
        ) {
            let message = |(other, text, kind): (String, String, u8)| match kind {
                0 => other,
                1 => format!("{{\"content\": {}}}", Value::from(text)),
                2 => format!(" {{\"role\":\"a\\n\",\"content\":{} , \"x\":[{{}}]}}", Value::from(text)),
                _ => format!("{{\"content\":[{}]}}", Value::from(text)),
            };
            let list: Vec<String> = parts.into_iter().map(message).collect();
            let messages = format!("[{}]", list.join(","));
            // A whole parse refuses numbers and escapes that are not read here.
            if let Some(spans) = content_spans(&messages)
                && let Ok(parsed) = serde_json::from_str::<Value>(&messages)
            {
                let decoded: Vec<String> = spans
                    .iter()
                    .map(|s| serde_json::from_str(&format!("\"{}\"", &messages[s.clone()])).unwrap())
                    .collect();
                prop_assert_eq!(texts(&parsed), decoded, "{}", messages);
            }
        }
    }

    #[test]
    fn unclear_lists_have_no_spans() {
        for messages in [
            "",
            "{}",
            "[1]",
            "[{\"content\":\"a\",\"content\":\"b\"}]",
            "[{\"cont\\u0065nt\":\"a\"}]",
            "[{\"content\":\"a\"}] x",
            "[{\"content\":\"a\"},]",
        ] {
            assert_eq!(content_spans(messages), None, "{messages}");
        }
        assert_eq!(content_spans(" [ ] "), Some(Vec::new()));
    }

    #[test]
    fn words_in_texts_are_not_outside() {
        let messages = r#"[{"content":"image_url"},{"content":[{"type":"text"}]}]"#;
        let spans = content_spans(messages).unwrap();
        assert!(!is_outside(messages, &spans, "image_url"));
        assert!(is_outside(messages, &spans, "\"text\""));
    }
}
