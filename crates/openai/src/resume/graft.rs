//! The rest of an answer as chunks of the stream that the client already reads.

use bytes::{Bytes, BytesMut};
use serde_json::Value;

use super::Progress;
use super::progress::Head;
use crate::answer::Endpoint;
use crate::object::Object;
use crate::scan::Scan;
use crate::sse::Event;
use crate::usage::{Usage, find_usage};

/// Makes an engine's chunks the continuation of what came from another.
#[derive(Clone, Debug)]
pub struct Graft {
    head: Head,
    /// Tokens of the client's prompt, if the first engine said.
    prompt_tokens: Option<u64>,
    /// Those of them that it found cached, if it said. What the next one finds is what it was sent again.
    cached_tokens: Option<u64>,
    /// Tokens that had come.
    tokens: u64,
    /// The client has white space, and the engine begins anew: what it begins with is left out up to its first word.
    skips_space: bool,
}

impl Graft {
    /// Continues from `progress`; none if nothing has come.
    #[must_use]
    pub fn new(progress: &Progress) -> Option<Self> {
        Some(Self {
            head: progress.head()?.clone(),
            prompt_tokens: progress.usage().map(|usage| usage.prompt_tokens),
            cached_tokens: progress.usage().and_then(|usage| usage.cached_tokens),
            tokens: u64::from(progress.tokens()),
            skips_space: false,
        })
    }

    /// The same where the answer is asked for from its beginning ([`starts_over`](super::starts_over)).
    #[must_use]
    pub fn starting_over(progress: &Progress) -> Option<Self> {
        Some(Self {
            tokens: 0,
            skips_space: !progress.text().is_empty(),
            ..Self::new(progress)?
        })
    }

    /// What the whole answer took, when its last part took `usage`: that engine's prompt held what came before.
    #[must_use]
    pub fn usage(&self, usage: Usage) -> Usage {
        let without = usage.prompt_tokens.saturating_sub(self.tokens);
        let prompt_tokens = self.prompt_tokens.unwrap_or(without);
        Usage {
            prompt_tokens,
            completion_tokens: usage.completion_tokens.saturating_add(self.tokens),
            cached_tokens: self.cached_tokens,
        }
    }

    /// An event of the engine that resumes, as the client gets it; none if it holds only the role, or white space that the client has.
    #[must_use]
    pub fn event(&mut self, event: Event) -> Option<Event> {
        let Some(data) = event.data().map(|data| Bytes::copy_from_slice(&data)) else {
            return Some(event);
        };
        let Ok(scan) = Scan::parse(&data) else {
            return Some(event);
        };
        let mut edits = scan.edit();
        let fields = [
            ("id", &self.head.id),
            ("created", &self.head.created),
            ("model", &self.head.model),
        ];
        for (key, value) in fields {
            if let (Some(value), Some(_)) = (value, scan.raw(key)) {
                edits.set(key, value);
            }
        }
        if let Some(found) = find_usage(&data)
            && let Some(text) = scan
                .raw("usage")
                .and_then(|text| self.counted(text, found.usage))
        {
            edits.set("usage", &text);
        }
        let mut choices = match speaker(&scan) {
            Speaker::None => None,
            Speaker::Alone => return None,
            Speaker::Within(choices) => Some(choices),
        };
        if self.skips_space {
            let shown = choices.as_deref().or(scan.raw("choices"));
            match shown.and_then(without_space) {
                None => {}
                Some(Words::None) => return None,
                Some(Words::Ended(rest)) => choices = Some(rest),
                Some(Words::Begun(rest)) => {
                    self.skips_space = false;
                    choices = Some(rest);
                }
            }
        }
        if let Some(choices) = &choices {
            edits.set("choices", choices);
        }
        Some(Event {
            raw: frame(&edits.apply(&data)),
        })
    }

    /// The engine's usage with the whole answer's counts in it.
    fn counted(&self, text: &str, usage: Usage) -> Option<String> {
        let whole = self.usage(usage);
        let total = whole.prompt_tokens.saturating_add(whole.completion_tokens);
        let text = Bytes::copy_from_slice(text.as_bytes());
        let scan = Scan::parse(&text).ok()?;
        let mut edits = scan.edit();
        edits.set("prompt_tokens", &whole.prompt_tokens.to_string());
        edits.set("completion_tokens", &whole.completion_tokens.to_string());
        edits.set("total_tokens", &total.to_string());
        if usage.cached_tokens.is_some() && whole.cached_tokens.is_none() {
            edits.set("prompt_tokens_details", "null");
        } else if let (Some(cached), Some(details)) =
            (whole.cached_tokens, scan.raw("prompt_tokens_details"))
        {
            let details = Bytes::copy_from_slice(details.as_bytes());
            let inner = Scan::parse(&details).ok()?;
            let inner = inner
                .edit()
                .set("cached_tokens", &cached.to_string())
                .apply(&details);
            edits.set("prompt_tokens_details", std::str::from_utf8(&inner).ok()?);
        }
        String::from_utf8(edits.apply(&text).to_vec()).ok()
    }

    /// The chunk that says that the answer ended because it is as long as it may be.
    #[must_use]
    pub fn length_event(&self, endpoint: Endpoint) -> Bytes {
        let choice = match endpoint {
            Endpoint::Chat => "\"delta\":{}",
            Endpoint::Completions => "\"text\":\"\"",
        };
        let choice =
            format!("{{\"index\":0,{choice},\"logprobs\":null,\"finish_reason\":\"length\"}}");
        self.chunk(&choice, "")
    }

    /// The chunk that says what the answer took, as its engine last counted.
    #[must_use]
    pub fn usage_event(&self) -> Option<Bytes> {
        let (prompt, answer) = (self.prompt_tokens?, self.tokens);
        let total = prompt.saturating_add(answer);
        Some(self.chunk(
            "",
            &format!(
                ",\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{total},\"completion_tokens\":{answer}}}"
            ),
        ))
    }

    fn chunk(&self, choices: &str, more: &str) -> Bytes {
        let mut json = String::from("{");
        let fields = [
            ("id", &self.head.id),
            ("object", &self.head.object),
            ("created", &self.head.created),
            ("model", &self.head.model),
        ];
        for (key, value) in fields {
            if let Some(value) = value {
                json += &format!("\"{key}\":{value},");
            }
        }
        json += &format!("\"choices\":[{choices}]{more}}}");
        frame(json.as_bytes())
    }
}

fn frame(json: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(json.len() + 8);
    for line in json.split(|b| matches!(b, b'\n' | b'\r')) {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(line);
        out.extend_from_slice(b"\n");
    }
    out.extend_from_slice(b"\n");
    out.freeze()
}

/// What a list of choices says after the white space that it begins with.
enum Words {
    /// Nothing.
    None,
    /// Nothing, and the answer ends: the list without the white space.
    Ended(String),
    /// Words: the list without the white space.
    Begun(String),
}

/// A list of choices without the white space that its text begins with; none if it has no text.
fn without_space(choices: &str) -> Option<Words> {
    let mut list: Vec<Value> = serde_json::from_str(choices).ok()?;
    let choice = list.first_mut()?;
    let ended = choice.get("finish_reason").is_some_and(|f| !f.is_null());
    let has_text = choice.get("text").is_some();
    let text = match has_text {
        true => choice.get_mut("text")?,
        false => choice.get_mut("delta")?.get_mut("content")?,
    };
    let words = text.as_str()?.trim_start().to_owned();
    let said = !words.is_empty();
    *text = Value::String(words);
    let rest = serde_json::to_string(&list).ok()?;
    Some(match (said, ended) {
        (true, _) => Words::Begun(rest),
        (false, true) => Words::Ended(rest),
        (false, false) => Words::None,
    })
}

/// Whether a chunk names who speaks, which the client has heard.
enum Speaker {
    /// It does not.
    None,
    /// It says nothing else.
    Alone,
    /// It says more; this is its list of choices without the name.
    Within(String),
}

fn speaker(scan: &Scan<'_>) -> Speaker {
    let said = || {
        let choices = scan.raw("choices")?;
        let choice = choices.trim().strip_prefix('[')?.strip_suffix(']')?.trim();
        let object = Object::parse_str(choice).ok()?;
        let delta = object.get("delta")?;
        let inner = Scan::parse(delta.value.as_bytes()).ok()?;
        inner.raw("role")?;
        let silent = |field: &crate::Field<'_>| {
            field.key == "role" || matches!(field.value, "null" | "\"\"" | "[]")
        };
        let ended = object
            .get("finish_reason")
            .is_some_and(|f| f.value != "null");
        if inner.object().fields().iter().all(silent) && !ended {
            return Some(Speaker::Alone);
        }
        let text = Bytes::copy_from_slice(delta.value.as_bytes());
        let rest = inner.edit().remove("role").apply(&text);
        let rest = std::str::from_utf8(&rest).ok()?;
        let (before, after) = (
            choice.get(..delta.span.start)?,
            choice.get(delta.span.end..)?,
        );
        Some(Speaker::Within(format!("[{before}{rest}{after}]")))
    };
    said().unwrap_or(Speaker::None)
}
