//! Does an answer belong to its request, and has it one end?

use serde_json::Value;

use crate::plan::{Ask, answer};
use crate::response::Response;

/// How a request ended for its client.
#[derive(Debug, PartialEq)]
pub(crate) enum Verdict {
    /// All of the answer.
    Whole,
    /// All of the answer but for the usage, since the engine failed before it told that.
    WithoutUsage,
    /// A right beginning, then an error that was told.
    Broken,
    /// An error with this status.
    Refused(u16),
    /// A right beginning; the client did not stay for more.
    Begun,
    /// An answer in one piece that was cut off, and cannot be taken for complete.
    Cut,
}

/// Judges what a client got. `stayed`: it waited for the end.
pub(crate) fn judge(ask: &Ask, response: &Response, stayed: bool) -> Result<Verdict, String> {
    if let Some(id) = response.header("x-request-id")
        && id != format!("r{}", ask.n)
    {
        return Err(format!("its request id is {id}"));
    }
    match response.status {
        200 if ask.stream => stream(ask, response, stayed),
        200 => unary(ask, response, stayed),
        status => refusal(ask, status, response),
    }
}

fn refusal(ask: &Ask, status: u16, response: &Response) -> Result<Verdict, String> {
    let body = String::from_utf8_lossy(&response.body);
    let engines = names_request(&body, ask.n)?;
    match status {
        429 | 500..=504 => Ok(Verdict::Refused(status)),
        400 if engines => Ok(Verdict::Refused(status)),
        _ => Err(format!("status {status} for a right request")),
    }
}

/// Whether a message of an engine names the request; an error if it names another.
fn names_request(text: &str, n: u64) -> Result<bool, String> {
    let Some((_, rest)) = text.split_once(" q") else {
        return Ok(false);
    };
    let Some((number, _)) = rest.split_once('|') else {
        return Ok(false);
    };
    match number.parse() == Ok(n) {
        true => Ok(true),
        false => Err(format!("an error of request {number}")),
    }
}

fn unary(ask: &Ask, response: &Response, stayed: bool) -> Result<Verdict, String> {
    if !response.whole {
        return Ok(if stayed { Verdict::Cut } else { Verdict::Begun });
    }
    let body: Value = serde_json::from_slice(&response.body)
        .map_err(|error| format!("a whole answer that is not JSON ({error})"))?;
    let choice = &body["choices"][0];
    let text = match ask.chat {
        true => &choice["message"]["content"],
        false => &choice["text"],
    };
    if text.as_str() != Some(&answer(&ask.prompt(), ask.n, ask.tokens)) {
        return Err("another text".into());
    }
    usage(ask, &body)?;
    Ok(Verdict::Whole)
}

fn usage(ask: &Ask, body: &Value) -> Result<(), String> {
    match body["usage"]["completion_tokens"].as_u64() == Some(u64::from(ask.tokens)) {
        true => Ok(()),
        false => Err(format!("usage {} for {} tokens", body["usage"], ask.tokens)),
    }
}

/// What the events of a stream came to.
#[derive(Default)]
struct Seen {
    text: String,
    finished: u32,
    usages: u32,
    errors: u32,
    done: u32,
}

fn stream(ask: &Ask, response: &Response, stayed: bool) -> Result<Verdict, String> {
    let mut seen = Seen::default();
    let body = String::from_utf8_lossy(&response.body);
    let mut events: Vec<&str> = body.split("\n\n").collect();
    // What follows the last blank line is no event yet.
    let rest = events.pop().unwrap_or_default();
    if response.whole && !rest.is_empty() {
        return Err(format!("an event without an end: {rest:.100}"));
    }
    for event in events {
        read_event(ask, event, &mut seen)?;
    }
    let whole = answer(&ask.prompt(), ask.n, ask.tokens);
    if !whole.starts_with(&seen.text) {
        return Err("another text".into());
    }
    if seen.finished > 1 || seen.usages > 1 || seen.errors > 1 {
        return Err("an end that came twice".into());
    }
    match (seen.done, response.whole, stayed) {
        (_, false, false) => return Ok(Verdict::Begun),
        (1, true, _) => {}
        (1, false, true) => {
            return Err("[DONE], but the connection ended without the end of the body".into());
        }
        (0, true, _) => return Err("a complete body without [DONE]".into()),
        (0, false, true) => return Err("a stream that was cut without [DONE]".into()),
        (done, ..) => return Err(format!("{done} times [DONE]")),
    }
    if seen.errors == 1 {
        return Ok(Verdict::Broken);
    }
    if seen.text != whole || seen.finished != 1 {
        return Err("[DONE] before the answer was complete, and no error".into());
    }
    match (ask.usage, seen.usages) {
        (false, 0) | (true, 1) => Ok(Verdict::Whole),
        (true, 0) => Ok(Verdict::WithoutUsage),
        _ => Err("usage that was not asked for".into()),
    }
}

fn read_event(ask: &Ask, event: &str, seen: &mut Seen) -> Result<(), String> {
    if seen.done > 0 {
        return Err(format!("an event after [DONE]: {event:.100}"));
    }
    let Some(data) = event.strip_prefix("data: ") else {
        return match event.starts_with(':') {
            true => Ok(()),
            false => Err(format!("an odd event: {event:.100}")),
        };
    };
    if data == "[DONE]" {
        seen.done += 1;
        return Ok(());
    }
    if seen.errors > 0 {
        return Err(format!("an event after an error: {event:.100}"));
    }
    let data: Value = serde_json::from_str(data)
        .map_err(|_| format!("an event that is not JSON: {event:.100}"))?;
    if data.get("error").is_some() {
        names_request(&data["error"].to_string(), ask.n)?;
        seen.errors += 1;
        return Ok(());
    }
    let Some(choice) = data["choices"].get(0) else {
        usage(ask, &data)?;
        seen.usages += 1;
        return Ok(());
    };
    let text = match ask.chat {
        true => &choice["delta"]["content"],
        false => &choice["text"],
    };
    seen.text += text.as_str().unwrap_or_default();
    seen.finished += u32::from(!choice["finish_reason"].is_null());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(stream: bool) -> Ask {
        let mut all = (0..).map(|n| Ask::new(7, n, false));
        all.find(|ask| ask.stream == stream && ask.chat && !ask.usage && ask.tokens == 2)
            .unwrap()
    }

    fn response(status: u16, body: &str) -> Response {
        Response {
            status,
            body: body.into(),
            whole: true,
            ..Response::default()
        }
    }

    fn event(text: &str, finish: &str) -> String {
        format!(
            "data: {{\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":{finish}}}]}}\n\n"
        )
    }

    /// The judge can fail: every way in which an answer may be wrong is named.
    #[test]
    fn wrong_answers_are_named() {
        let ask = ask(true);
        let (one, two) = (
            answer(&ask.prompt(), ask.n, 1),
            answer(&ask.prompt(), ask.n, 2),
        );
        let second = two.strip_prefix(&one).unwrap();
        let done = "data: [DONE]\n\n";
        let good = [
            event(&one, "null"),
            event(second, "null"),
            event("", "\"length\""),
        ]
        .concat();
        let told = |body: &str| judge(&ask, &response(200, body), true).unwrap_err();
        let right = judge(&ask, &response(200, &format!("{good}{done}")), true);
        assert_eq!(right, Ok(Verdict::Whole));
        assert!(told(&good).contains("without [DONE]"));
        assert!(told(&format!("{good}{done}{done}")).contains("after [DONE]"));
        assert!(told(&format!("{}{done}", event(&one, "null"))).contains("before the answer"));
        assert!(told(&format!("{}{done}", event(" 1:0:0", "null"))).contains("another text"));
        assert!(told(&format!("{}{good}{done}", event(&one, "null"))).contains("another text"));
        let other = format!("no to q{}|", ask.n + 1);
        let error = format!("data: {{\"error\":{{\"message\":\"{other}\"}}}}\n\n");
        assert!(told(&format!("{error}{done}")).contains("an error of request"));
        let error = "data: {\"error\":{}}\n\n";
        let broken = judge(&ask, &response(200, &format!("{error}{done}")), true);
        assert_eq!(broken, Ok(Verdict::Broken));
        assert!(told(&format!("{error}{good}{done}")).contains("after an error"));
        let refused = judge(&ask, &response(503, "{}"), true);
        assert_eq!(refused, Ok(Verdict::Refused(503)));
        assert!(judge(&ask, &response(400, "{}"), true).is_err());
        assert!(judge(&ask, &response(500, &other), true).is_err());
    }

    #[test]
    fn a_body_that_was_cut_is_not_taken_for_complete() {
        let ask = ask(false);
        let mut cut = response(200, "{\"choices\":");
        assert!(judge(&ask, &cut, true).is_err());
        cut.whole = false;
        assert_eq!(judge(&ask, &cut, true), Ok(Verdict::Cut));
        assert_eq!(judge(&ask, &cut, false), Ok(Verdict::Begun));
    }
}
