//! What an engine writes for one attempt of a request: the answer, and what a fault makes of it.

use std::time::Duration;

use kvasir_types::Rng;

use crate::plan::{EngineFault, MODEL, token};

/// One thing that an engine does.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    Write(Vec<u8>),
    Sleep(Duration),
    /// Nothing until the peer leaves.
    Hang,
    Close,
    Reset,
    /// Waits for a request; after this time it sends the bytes, if there are any, and closes.
    Idle(Duration, &'static [u8]),
}

/// What an attempt asks for.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) n: u64,
    pub(crate) chat: bool,
    pub(crate) stream: bool,
    pub(crate) usage: bool,
    pub(crate) prompt: String,
    /// The first token, and the one after the last.
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// The router's name of the request, which the engine echoes.
    pub(crate) echo: Option<String>,
}

const UNASKED: &[u8] = b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: 45\r\nconnection: close\r\n\r\n{\"error\":\"q999999999| took too long to come\"}";
/// A token of nobody's answer.
const POISON: &str = " 999999999:0:deadbeef";

impl Job {
    /// The steps of an attempt with this fault.
    pub(crate) fn script(&self, fault: EngineFault, rng: &mut Rng) -> Vec<Step> {
        match fault {
            EngineFault::Status(status) => return vec![Step::Write(self.refusal(status))],
            EngineFault::Garbage => return vec![Step::Write(garbage(rng)), Step::Close],
            EngineFault::ErrorEvent(_) if !self.stream => {
                return vec![Step::Write(self.refusal(500))];
            }
            _ => {}
        }
        let framing = match fault {
            EngineFault::UntilClose => Framing::UntilClose,
            EngineFault::LongLength => Framing::TooLong,
            EngineFault::ConnectionClose => Framing::Closes,
            _ => Framing::Usual,
        };
        let mut pieces = match self.stream {
            true => self.events(fault, framing),
            false => vec![self.unary(framing)],
        };
        if rng.below(3) == 0 {
            let all = pieces.concat();
            pieces = vec![all];
        }
        let total: usize = pieces.iter().map(Vec::len).sum();
        let at = |part: u64| (total as u64 * part / 1000) as usize;
        let pause = Duration::from_millis(rng.below(3));
        match fault {
            EngineFault::ResetAt(part) => cut(&pieces, at(part), pause, Some(Step::Reset), false),
            EngineFault::CloseAt(part) => cut(&pieces, at(part), pause, Some(Step::Close), false),
            EngineFault::HangAt(part) => cut(&pieces, at(part), pause, Some(Step::Hang), false),
            EngineFault::StallAt(part, time) => {
                cut(&pieces, at(part), pause, Some(Step::Sleep(time)), true)
            }
            EngineFault::HoldAfterDone(time) if pieces.len() > 1 => {
                let before: usize = pieces.iter().rev().skip(1).map(Vec::len).sum();
                cut(&pieces, before, pause, Some(Step::Sleep(time)), true)
            }
            EngineFault::UntilClose | EngineFault::LongLength | EngineFault::ConnectionClose => {
                cut(&pieces, total, pause, Some(Step::Close), false)
            }
            EngineFault::Unasked408(time) => cut(
                &pieces,
                total,
                pause,
                Some(Step::Idle(time, UNASKED)),
                false,
            ),
            EngineFault::CloseIdle(time) => {
                cut(&pieces, total, pause, Some(Step::Idle(time, b"")), false)
            }
            EngineFault::Surplus | EngineFault::AnswersTwice => {
                let surplus = match fault {
                    EngineFault::Surplus => garbage(rng),
                    _ => self.of_another().whole(),
                };
                let mut steps = cut(&pieces, total, pause, None, false);
                if matches!(steps.last(), Some(Step::Sleep(_))) {
                    steps.pop();
                }
                match (rng.below(3), steps.last_mut()) {
                    (0, Some(Step::Write(last))) => last.extend(surplus),
                    (later, _) => {
                        steps.push(Step::Sleep(Duration::from_millis(later)));
                        steps.push(Step::Write(surplus));
                    }
                }
                steps
            }
            EngineFault::Pieces => {
                let mut bytes = b"HTTP/1.1 100 Continue\r\n\r\n".to_vec();
                bytes.extend(pieces.concat());
                let longest = 1 + bytes.len() as u64 / 20;
                let mut steps = Vec::new();
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    let count = (1 + rng.below(longest) as usize).min(rest.len());
                    steps.push(Step::Write(rest[..count].to_vec()));
                    steps.push(Step::Sleep(Duration::ZERO));
                    rest = &rest[count..];
                }
                steps
            }
            _ => cut(&pieces, total, pause, None, false),
        }
    }

    /// The answer as it should be, in one piece.
    pub(crate) fn whole(&self) -> Vec<u8> {
        match self.stream {
            true => self.events(EngineFault::None, Framing::Usual).concat(),
            false => self.unary(Framing::Usual),
        }
    }

    /// The end of a stream whose engine has failed.
    pub(crate) fn error_end(&self) -> Vec<u8> {
        [
            chunk(&self.error_event()),
            chunk(b"data: [DONE]\n\n"),
            chunk(b""),
        ]
        .concat()
    }

    /// The same question of somebody else, whose answer must reach nobody.
    fn of_another(&self) -> Self {
        Self {
            n: 999_999_999,
            prompt: "q999999999||".into(),
            ..self.clone()
        }
    }

    fn error_event(&self) -> Vec<u8> {
        let n = self.n;
        format!("data: {{\"error\":{{\"message\":\"EngineCore encountered an issue with q{n}|\",\"type\":\"InternalServerError\",\"param\":null,\"code\":500}}}}\n\n").into_bytes()
    }

    fn echo(&self) -> String {
        let echo = self.echo.as_ref();
        echo.map_or(String::new(), |id| format!("x-request-id: {id}\r\n"))
    }

    /// An answer with an error in the engine's own words.
    pub(crate) fn refusal(&self, status: u16) -> Vec<u8> {
        let n = self.n;
        let body = format!(r#"{{"object":"error","message":"no to q{n}|","code":{status}}}"#);
        let (length, echo) = (body.len(), self.echo());
        format!("HTTP/1.1 {status} No\r\ncontent-type: application/json\r\n{echo}content-length: {length}\r\n\r\n{body}").into_bytes()
    }

    fn unary(&self, framing: Framing) -> Vec<u8> {
        let text: String = (self.from..self.to)
            .map(|i| token(&self.prompt, self.n, i))
            .collect();
        let usage = self.usage_object();
        let (object, choice) = match self.chat {
            true => (
                "chat.completion",
                format!(r#""message":{{"role":"assistant","content":"{text}"}}"#),
            ),
            false => ("text_completion", format!(r#""text":"{text}""#)),
        };
        let body = format!(
            r#"{{"id":"{}","object":"{object}","created":1,"model":"{MODEL}","choices":[{{"index":0,{choice},"finish_reason":"length"}}],"usage":{usage}}}"#,
            self.n
        );
        let echo = self.echo();
        let length = match framing {
            Framing::UntilClose => String::new(),
            Framing::TooLong => format!("content-length: {}\r\n", body.len() + 100),
            Framing::Closes => format!("connection: close\r\ncontent-length: {}\r\n", body.len()),
            Framing::Usual => format!("content-length: {}\r\n", body.len()),
        };
        let version = framing.version();
        format!("{version} 200 OK\r\ncontent-type: application/json\r\n{echo}{length}\r\n{body}")
            .into_bytes()
    }

    fn usage_object(&self) -> String {
        let (prompt, tokens) = (self.prompt.len() / 4, self.to - self.from);
        let total = prompt as u64 + u64::from(tokens);
        format!(
            r#"{{"prompt_tokens":{prompt},"completion_tokens":{tokens},"total_tokens":{total}}}"#
        )
    }

    /// The head with the first event, then event by event, and the end at last.
    fn events(&self, fault: EngineFault, framing: Framing) -> Vec<Vec<u8>> {
        let echo = self.echo();
        let coding = match framing {
            Framing::UntilClose => "",
            Framing::Closes => "connection: close\r\ntransfer-encoding: chunked\r\n",
            _ => "transfer-encoding: chunked\r\n",
        };
        let version = framing.version();
        let mut pieces = vec![
            format!("{version} 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n{echo}{coding}\r\n")
                .into_bytes(),
        ];
        let mut put = |event: &[u8]| {
            let piece = match framing {
                Framing::UntilClose => event.to_vec(),
                _ => chunk(event),
            };
            match pieces.as_mut_slice() {
                [head] if pieces_head(head) => head.extend(piece),
                _ => pieces.push(piece),
            }
        };
        let error_at = match fault {
            EngineFault::ErrorEvent(part) => Some(u64::from(self.to - self.from) * part / 1000),
            _ => None,
        };
        for i in self.from..self.to {
            if error_at == Some(u64::from(i - self.from)) {
                break;
            }
            put(&self.token_event(&token(&self.prompt, self.n, i), i == self.from));
        }
        match error_at {
            Some(_) => put(&self.error_event()),
            None => {
                put(&self.finish_event());
                if self.usage {
                    put(&self.usage_event());
                }
            }
        }
        put(b"data: [DONE]\n\n");
        if fault == EngineFault::AfterDone {
            put(&self.token_event(POISON, false));
            put(b"data: [DONE]\n\n");
        }
        if framing == Framing::TooLong {
            pieces.push(b"fff\r\ndata: ".to_vec());
        } else if framing != Framing::UntilClose {
            pieces.push(chunk(b""));
        }
        pieces
    }

    fn token_event(&self, text: &str, first: bool) -> Vec<u8> {
        let role = if first { r#""role":"assistant","# } else { "" };
        let choice = match self.chat {
            true => format!(r#""delta":{{{role}"content":"{text}"}}"#),
            false => format!(r#""text":"{text}""#),
        };
        self.event(&choice, "null")
    }

    fn finish_event(&self) -> Vec<u8> {
        let choice = match self.chat {
            true => r#""delta":{}"#,
            false => r#""text":"""#,
        };
        self.event(choice, "\"length\"")
    }

    fn event(&self, choice: &str, finish: &str) -> Vec<u8> {
        let (n, object) = (self.n, self.object());
        format!("data: {{\"id\":\"{n}\",\"object\":\"{object}\",\"created\":1,\"model\":\"{MODEL}\",\"choices\":[{{\"index\":0,{choice},\"finish_reason\":{finish}}}]}}\n\n").into_bytes()
    }

    fn usage_event(&self) -> Vec<u8> {
        let (n, object, usage) = (self.n, self.object(), self.usage_object());
        format!("data: {{\"id\":\"{n}\",\"object\":\"{object}\",\"created\":1,\"model\":\"{MODEL}\",\"choices\":[],\"usage\":{usage}}}\n\n").into_bytes()
    }

    fn object(&self) -> &'static str {
        match self.chat {
            true => "chat.completion.chunk",
            false => "text_completion",
        }
    }
}

/// How an answer says where it ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Framing {
    Usual,
    UntilClose,
    TooLong,
    Closes,
}

impl Framing {
    fn version(self) -> &'static str {
        match self {
            Self::UntilClose => "HTTP/1.0",
            _ => "HTTP/1.1",
        }
    }
}

/// Whether a piece is a head without an event.
fn pieces_head(piece: &[u8]) -> bool {
    piece.ends_with(b"\r\n\r\n") && piece.starts_with(b"HTTP/")
}

fn chunk(data: &[u8]) -> Vec<u8> {
    let mut out = format!("{:x}\r\n", data.len()).into_bytes();
    out.extend_from_slice(data);
    out.extend_from_slice(b"\r\n");
    out
}

/// Bytes that are no answer.
fn garbage(rng: &mut Rng) -> Vec<u8> {
    match rng.below(4) {
        0 => b"SSH-2.0-OpenSSH_9.9\r\n".to_vec(),
        1 => b"HTTP/1.1 200".to_vec(),
        2 => b"\r\n".to_vec(),
        _ => (0..1 + rng.below(80))
            .map(|_| rng.next_u64() as u8)
            .collect(),
    }
}

/// Writes the pieces with pauses up to byte `at`, then does `then`, then writes the rest if it is `wanted`.
fn cut(
    pieces: &[Vec<u8>],
    at: usize,
    pause: Duration,
    then: Option<Step>,
    rest_wanted: bool,
) -> Vec<Step> {
    let mut steps = Vec::new();
    let (mut seen, mut then) = (0, then);
    for piece in pieces {
        let here = at.saturating_sub(seen).min(piece.len());
        seen += piece.len();
        let (before, after) = piece.split_at(here);
        if !before.is_empty() {
            steps.push(Step::Write(before.to_vec()));
        }
        if seen >= at
            && let Some(then) = then.take()
        {
            steps.push(then);
            if !rest_wanted {
                return steps;
            }
        }
        if !after.is_empty() {
            steps.push(Step::Write(after.to_vec()));
        }
        if !pause.is_zero() {
            steps.push(Step::Sleep(pause));
        }
    }
    steps
}
