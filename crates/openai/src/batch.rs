//! One body with several prompts or answers as several bodies, and their answers as one.
//!
//! Answers two questions: which bodies ask for the parts, and which bytes is the answer that one engine would have given to the whole?
//!
//! What always holds: but for the prompt, `n`, `seed` and the usage at the end of a stream a part is the client's body; choices have the numbers that they
//! would have had; tokens of a prompt are counted once, however many answers it has.

use bytes::{Bytes, BytesMut};
use serde_json::value::RawValue;

use crate::answer::Endpoint;
use crate::object::Object;
use crate::scan::Scan;
use crate::sse::Event;

/// One part of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyPart {
    /// What asks for it.
    pub body: Bytes,
    /// The number of its choice in the whole.
    pub choice: u32,
    /// It is another answer to the prompt of the part before it.
    pub follows: bool,
}

/// The parts of a body that asks for several answers, each of which is one answer; none if it has fewer than two or more than `most`.
///
/// Engines number the seeds of the answers to one prompt: the second has the seed after the first's.
#[must_use]
pub fn split_body(
    scan: &Scan<'_>,
    body: &Bytes,
    endpoint: Endpoint,
    most: usize,
) -> Option<Vec<BodyPart>> {
    let n = scan.n();
    // What is no number the engine refuses, and no part of it would show that.
    if n == 0 || scan.raw("n").is_some_and(|raw| raw != n.to_string()) {
        return None;
    }
    let prompts = match endpoint {
        Endpoint::Chat => vec![None],
        Endpoint::Completions => prompt_texts(scan)?,
    };
    let count = prompts.len().checked_mul(n as usize)?;
    if count < 2 || count > most {
        return None;
    }
    let seed = scan.raw("seed").and_then(|seed| seed.parse::<i64>().ok());
    let mut parts = Vec::with_capacity(count);
    for prompt in prompts {
        for answer in 0..n {
            let mut edits = scan.edit();
            edits.remove("n");
            if let Some(prompt) = prompt {
                edits.set("prompt", prompt);
            }
            if let Some(seed) = seed.filter(|_| answer > 0) {
                let seed = seed.saturating_add(answer.into());
                edits.set("seed", &seed.to_string());
            }
            if scan.stream() && !scan.include_usage() {
                edits.ask_usage(false);
            }
            parts.push(BodyPart {
                body: edits.apply(body),
                choice: u32::try_from(parts.len()).ok()?,
                follows: answer > 0,
            });
        }
    }
    Some(parts)
}

/// The prompts of a completion as JSON texts; none where there is but one, as the client wrote it.
fn prompt_texts<'a>(scan: &Scan<'a>) -> Option<Vec<Option<&'a str>>> {
    let prompt = scan.raw("prompt")?;
    let is_list = |list: &str| list.trim_start().starts_with(['"', '[']);
    if !prompt.strip_prefix('[').is_some_and(is_list) {
        return Some(vec![None]);
    }
    let prompts: Vec<&'a RawValue> = serde_json::from_str(prompt).ok()?;
    Some(prompts.into_iter().map(|p| Some(p.get())).collect())
}

/// An answer to a part.
#[derive(Clone, Debug)]
pub struct PartAnswer {
    /// All of it.
    pub json: Bytes,
    /// The number of its choice in the whole.
    pub choice: u32,
    /// Its prompt is that of another part.
    pub follows: bool,
}

/// The answer to the whole: the first part's with the choices and the tokens of all. The parts are in the order of their choices.
#[must_use]
pub fn join_answers(parts: &[PartAnswer]) -> Option<Bytes> {
    let first = parts.first()?;
    let scan = Scan::parse(&first.json).ok()?;
    let (mut choices, mut usage) = (Vec::new(), UsageSum::default());
    let mut ids = Vec::new();
    for part in parts {
        let scan = Scan::parse(&part.json).ok()?;
        choices.extend(numbered(scan.raw("choices")?, part.choice)?);
        if let Some(counted) = scan.raw("usage") {
            usage.add(counted, part.follows);
        }
        ids.extend(completion_ids(&scan));
    }
    let mut edits = scan.edit();
    edits.set("choices", &format!("[{}]", choices.join(",")));
    if let Some(usage) = usage.json() {
        edits.set("usage", usage);
    }
    if let Some(nvext) = with_completion_ids(&scan, &ids.join(",")) {
        edits.set("nvext", &nvext);
    }
    Some(edits.apply(&first.json))
}

/// The tokens of an answer, where its `nvext` tells them: what stands between the brackets.
fn completion_ids(scan: &Scan<'_>) -> Option<String> {
    let nvext = Object::parse_str(scan.raw("nvext")?).ok()?;
    let list = nvext.get(COMPLETION_IDS)?.value;
    let inner = list.strip_prefix('[')?.strip_suffix(']')?.trim();
    (!inner.is_empty()).then(|| inner.to_owned())
}

const COMPLETION_IDS: &str = "completion_token_ids";

/// The `nvext` of an answer with other tokens, if it tells tokens.
fn with_completion_ids(scan: &Scan<'_>, ids: &str) -> Option<String> {
    let text = scan.raw("nvext")?;
    let nvext = Object::parse_str(text).ok()?;
    let span = nvext.get(COMPLETION_IDS)?.span.clone();
    let (before, after) = (text.get(..span.start)?, text.get(span.end..)?);
    Some(format!("{before}[{ids}]{after}"))
}

/// The choices of a list, numbered from `first` on.
fn numbered(choices: &str, first: u32) -> Option<Vec<String>> {
    let choices: Vec<&RawValue> = serde_json::from_str(choices).ok()?;
    let renumber = |choice: &RawValue| {
        let text = choice.get();
        let object = Object::parse_str(text).ok()?;
        let index = object.get("index")?;
        let number = index.value.parse::<u32>().ok()?.checked_add(first)?;
        let span = index.span.clone();
        let (before, after) = (text.get(..span.start)?, text.get(span.end..)?);
        Some(format!("{before}{number}{after}"))
    };
    let kept = |choice: &RawValue| renumber(choice).unwrap_or_else(|| choice.get().to_owned());
    Some(choices.into_iter().map(kept).collect())
}

/// An event of a part as one of the whole, under the name `id`: none if it has no choices.
#[must_use]
pub fn numbered_event(event: &Event, choice: u32, id: &str) -> Option<Bytes> {
    let data = Bytes::copy_from_slice(&event.data()?);
    let scan = Scan::parse(&data).ok()?;
    let choices = numbered(scan.raw("choices")?, choice)?;
    let mut edits = scan.edit();
    edits.set("choices", &format!("[{}]", choices.join(",")));
    if scan.raw("id").is_some() {
        edits.set("id", id);
    }
    let json = edits.apply(&data);
    let mut out = BytesMut::with_capacity(json.len() + 64);
    event.write_with(&json, &mut out);
    Some(out.freeze())
}

/// The name of an answer as JSON text, as a chunk tells it.
#[must_use]
pub fn answer_name(json: &[u8]) -> Option<String> {
    let object = Object::parse(json).ok()?;
    object.get("id").map(|id| id.value.to_owned())
}

/// A chunk that has no choice, with these tokens: the last but one of a stream.
#[must_use]
pub fn usage_event(template: &Event, usage: &str, id: Option<&str>) -> Option<Bytes> {
    let data = Bytes::copy_from_slice(&template.data()?);
    let scan = Scan::parse(&data).ok()?;
    let mut edits = scan.edit();
    edits.set("usage", usage);
    if let Some(id) = id.filter(|_| scan.raw("id").is_some()) {
        edits.set("id", id);
    }
    let json = edits.apply(&data);
    let mut out = BytesMut::with_capacity(json.len() + 64);
    template.write_with(&json, &mut out);
    Some(out.freeze())
}

/// Tokens of several parts, in the words of the first.
#[derive(Clone, Debug, Default)]
pub struct UsageSum {
    json: Option<String>,
}

impl UsageSum {
    /// Adds what an engine counted of a part; the prompt of one that `follows` was counted before.
    pub fn add(&mut self, usage: &str, follows: bool) {
        self.json = match self.json.take() {
            None => Some(usage.to_owned()),
            Some(sum) => Some(added(&sum, usage, follows).unwrap_or(sum)),
        };
    }

    /// What all engines counted, as JSON text; none where none did.
    #[must_use]
    pub fn json(&self) -> Option<&str> {
        self.json.as_deref()
    }
}

fn added(sum: &str, more: &str, follows: bool) -> Option<String> {
    let (old, new) = (Object::parse_str(sum).ok()?, Object::parse_str(more).ok()?);
    let (mut out, mut done) = (String::with_capacity(sum.len() + 8), 0);
    for field in old.fields() {
        let is_prompts = field.key.starts_with("prompt_");
        let name = match (follows, &*field.key) {
            (true, _) if is_prompts => continue,
            (true, "total_tokens") => "completion_tokens",
            (_, name) => name,
        };
        let Some(other) = new.get(name) else {
            continue;
        };
        let value = match (field.value.parse::<u64>(), other.value.parse::<u64>()) {
            (Ok(a), Ok(b)) => a.saturating_add(b).to_string(),
            _ if field.value == "null" => other.value.to_owned(),
            _ if field.value.starts_with('{') => match added(field.value, other.value, false) {
                Some(both) => both,
                None => continue,
            },
            _ => continue,
        };
        out += sum.get(done..field.span.start)?;
        out += &value;
        done = field.span.end;
    }
    out += sum.get(done..)?;
    Some(out)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::usage::find_usage;

    fn parts(body: &str, endpoint: Endpoint) -> Option<Vec<(Value, u32, bool)>> {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let scan = Scan::parse(&body).unwrap();
        let parts = split_body(&scan, &body, endpoint, 4)?;
        let read = |part: BodyPart| {
            let body = serde_json::from_slice(&part.body).unwrap();
            (body, part.choice, part.follows)
        };
        Some(parts.into_iter().map(read).collect())
    }

    #[test]
    fn each_prompt_is_a_body() {
        let split = |body| parts(body, Endpoint::Completions);
        assert_eq!(
            split(r#"{"prompt":["a",[1, 2]],"x":1}"#).unwrap(),
            [
                (json!({"prompt": "a", "x": 1}), 0, false),
                (json!({"prompt": [1, 2], "x": 1}), 1, false)
            ]
        );
        for one in [
            r#"{"prompt":"a"}"#,
            r#"{"prompt":["a"],"n":1}"#,
            r#"{"prompt":[1,2,3]}"#,
            r#"{"prompt":[]}"#,
            r#"{"prompt":["a","b"],"n":"2"}"#,
            r#"{"prompt":["a","b"],"n":0}"#,
            // More than may be.
            r#"{"prompt":["1","2","3","4","5"]}"#,
            r#"{"prompt":["1","2","3"],"n":2}"#,
        ] {
            assert_eq!(split(one), None, "{one}");
        }
    }

    /// vLLM counts seeds on from the first.
    #[test]
    fn each_answer_is_a_body() {
        let body = r#"{"messages":[],"n":3,"seed":7,"stream":true}"#;
        let options = json!({"include_usage": true});
        let split = parts(body, Endpoint::Chat).unwrap();
        let part = |at: u32| {
            let body =
                json!({"messages": [], "seed": 7 + at, "stream": true, "stream_options": options});
            (body, at, at > 0)
        };
        assert_eq!(split, [part(0), part(1), part(2)]);
        let two = r#"{"prompt":["a","b"],"n":2}"#;
        let numbers: Vec<_> = parts(two, Endpoint::Completions)
            .unwrap()
            .into_iter()
            .map(|(body, number, follows)| (body["prompt"].clone(), number, follows))
            .collect();
        let expected = [
            ("a", 0, false),
            ("a", 1, true),
            ("b", 2, false),
            ("b", 3, true),
        ];
        assert_eq!(numbers, expected.map(|(p, n, f)| (json!(p), n, f)));
    }

    fn answer(json: &Value, choice: u32, follows: bool) -> PartAnswer {
        PartAnswer {
            json: json.to_string().into(),
            choice,
            follows,
        }
    }

    #[test]
    fn answers_of_parts_are_one_answer() {
        let part = |text: &str, prompt: u32, output: u32| {
            json!({"id": format!("cmpl-{text}"), "choices": [{"index": 0, "text": text}], "usage": {"prompt_tokens": prompt,
                "total_tokens": prompt + output, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": 1, "x": null}},
                "nvext": {"completion_token_ids": [output]}})
        };
        let joined = join_answers(&[
            answer(&part("a", 10, 2), 0, false),
            answer(&part("b", 10, 3), 1, true),
            answer(&part("c", 5, 4), 2, false),
        ]);
        let joined: Value = serde_json::from_slice(&joined.unwrap()).unwrap();
        assert_eq!(
            joined,
            json!({"id": "cmpl-a", "choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}, {"index": 2, "text": "c"}],
                "usage": {"prompt_tokens": 15, "total_tokens": 24, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 2, "x": null}},
                "nvext": {"completion_token_ids": [2, 3, 4]}})
        );
        assert!(join_answers(&[answer(&json!({"error": 1}), 0, false)]).is_none());
    }

    /// What a real server answered to two prompts, put together from its parts.
    #[test]
    fn a_real_batch_is_the_sum_of_its_parts() {
        let whole = r#"{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":"length"},{"index":1,"text":"b","logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":140,"total_tokens":156,"completion_tokens":16,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":null},"completion_tokens_details":null},"kv_transfer_params":null}"#;
        let part = |text: &str| {
            let json = whole
                .replace(
                    r#"{"index":0,"text":"a","logprobs":null,"finish_reason":"length"},"#,
                    "",
                )
                .replace(
                    r#""index":1,"text":"b""#,
                    &format!(r#""index":0,"text":"{text}""#),
                );
            json.replace(":140,", ":70,")
                .replace(":156,", ":78,")
                .replace(":16,", ":8,")
        };
        let parts: Vec<PartAnswer> = [("a", 0), ("b", 1)]
            .map(|(text, choice)| PartAnswer {
                json: part(text).into(),
                choice,
                follows: false,
            })
            .into();
        assert_eq!(join_answers(&parts).unwrap(), whole);
    }

    #[test]
    fn events_of_parts_get_the_numbers_of_the_whole() {
        let event = |data: &str| Event {
            raw: format!("data: {data}\n\n").into(),
        };
        let chunk =
            event(r#"{"id":"x-1","choices":[{"index":0,"delta":{"content":"\"index\":0"}}]}"#);
        assert_eq!(
            numbered_event(&chunk, 3, "\"x\"").unwrap(),
            "data: {\"id\":\"x\",\"choices\":[{\"index\":3,\"delta\":{\"content\":\"\\\"index\\\":0\"}}]}\n\n"
        );
        assert_eq!(numbered_event(&event("[DONE]"), 3, "\"x\""), None);
        let usage = event(r#"{"id":"x-1","choices":[],"usage":{"prompt_tokens":1}}"#);
        let told = usage_event(&usage, r#"{"prompt_tokens":5}"#, Some("\"x\"")).unwrap();
        assert_eq!(
            told,
            "data: {\"id\":\"x\",\"choices\":[],\"usage\":{\"prompt_tokens\":5}}\n\n"
        );
        assert_eq!(find_usage(&told[6..]).unwrap().usage.prompt_tokens, 5);
        assert_eq!(answer_name(br#"{"id":"x"}"#).unwrap(), "\"x\"");
    }
}
