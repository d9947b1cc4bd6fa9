//! What request `n` asks, how its client behaves, and what engines do to it: all drawn from the seed.

use std::time::Duration;

use kvasir_types::Rng;

/// The model that all engines serve.
pub(crate) const MODEL: &str = "m";

/// Most attempts of one request that engines may see: the first, two retries, three continuations, and as many sent
/// again because a kept connection was closed.
pub(crate) const ATTEMPTS_MAX: u8 = 12;

/// One request.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) n: u64,
    pub(crate) chat: bool,
    pub(crate) stream: bool,
    /// The client wants usage at the end of its stream.
    pub(crate) usage: bool,
    /// Tokens of the answer.
    pub(crate) tokens: u32,
    /// What the prompt consists of, and what is wrong with the client.
    filler: usize,
    pub(crate) client: ClientFault,
}

/// What a client does that it should not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ClientFault {
    None,
    /// Leaves after a time.
    CancelAfter(Duration, Leaving),
    /// Leaves after so many bytes of the answer.
    CancelAtByte(usize, Leaving),
    /// Reads so many bytes at a time, with pauses.
    SlowReader(usize),
    /// Sends a part of its body (per mille) and leaves.
    HalfBody(u64, Leaving),
    /// Sends so many more requests before it reads.
    Pipelined(u64),
    /// Sends what is no request.
    Garbage,
    /// Sends its request in tiny pieces.
    Dribbled,
    /// Sends its body in chunks.
    Chunked,
    /// Ends its side of the connection after the request.
    HalfClose,
}

/// How a client leaves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Leaving {
    Close,
    Reset,
}

/// What an engine does that it should not, in one attempt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum EngineFault {
    None,
    /// Resets the connection at this part (per mille) of the answer.
    ResetAt(u64),
    /// Closes it there.
    CloseAt(u64),
    /// Says nothing for a time at this part.
    StallAt(u64, Duration),
    /// Says nothing for ever after this part. Only where the client leaves by itself.
    HangAt(u64),
    /// Answers with this status.
    Status(u16),
    /// Answers with what is not HTTP.
    Garbage,
    /// Ends the stream with an error event at this part.
    ErrorEvent(u64),
    /// Sends bytes after its answer.
    Surplus,
    /// Sends another request's answer after its own.
    AnswersTwice,
    /// Sends more events and a second `[DONE]` after `[DONE]`.
    AfterDone,
    /// Takes a time between `[DONE]` and the end of the stream.
    HoldAfterDone(Duration),
    /// Sends a 408 that nobody asked for on the idle connection.
    Unasked408(Duration),
    /// Closes the idle connection.
    CloseIdle(Duration),
    /// Says a length that is too great, and closes.
    LongLength,
    /// Answers by HTTP/1.0, to the end of the connection.
    UntilClose,
    /// Says that it closes, and does.
    ConnectionClose,
    /// Sends its answer in random pieces, after `100 Continue`.
    Pieces,
}

/// A generator for one purpose.
pub(crate) fn rng(seed: u64, n: u64, purpose: u64) -> Rng {
    let mut rng = Rng::new(seed ^ n.wrapping_mul(0x9E6D_62D0_6F6A_9A9B) ^ (purpose << 56));
    rng.next_u64();
    rng.fork()
}

fn millis(rng: &mut Rng, below: u64) -> Duration {
    Duration::from_micros(rng.below(below * 1000))
}

fn leaving(rng: &mut Rng) -> Leaving {
    match rng.below(2) {
        0 => Leaving::Close,
        _ => Leaving::Reset,
    }
}

impl Ask {
    /// Request `n`; without faults of its client unless `faults`.
    pub(crate) fn new(seed: u64, n: u64, faults: bool) -> Self {
        // Apart, so that the request is the same whoever sends it.
        let mut fate = rng(seed, n, 250);
        let mut rng = rng(seed, n, 0);
        let client = match faults {
            true => client_fault(&mut fate),
            false => ClientFault::None,
        };
        let filler = match rng.below(50) {
            0 => 20_000 + rng.below(60_000),
            _ => rng.below(300),
        };
        Self {
            n,
            chat: rng.below(3) > 0,
            stream: rng.below(3) > 0,
            usage: rng.below(2) == 0,
            tokens: 1 + rng.below(40) as u32,
            filler: filler as usize,
            client,
        }
    }

    /// The prompt: it names the request, and ends with `|`.
    pub(crate) fn prompt(&self) -> String {
        let words = ["kv ", "prefix ", "block \\\" ", "überlauf ", "\n"];
        let mut text = format!("q{}|", self.n);
        let mut at = self.n as usize;
        while text.len() < self.filler {
            text += words[at % words.len()];
            at += 3;
        }
        text + "|"
    }

    /// The body of the request.
    pub(crate) fn body(&self) -> Vec<u8> {
        let prompt = serde_json::Value::from(self.prompt());
        let prompt = match self.chat {
            true => format!(r#""messages":[{{"role":"user","content":{prompt}}}]"#),
            false => format!(r#""prompt":{prompt}"#),
        };
        let stream = match (self.stream, self.usage) {
            (true, true) => r#","stream":true,"stream_options":{"include_usage":true}"#,
            (true, false) => r#","stream":true"#,
            (false, _) => "",
        };
        let tokens = self.tokens;
        format!(r#"{{"model":"{MODEL}",{prompt},"max_tokens":{tokens}{stream}}}"#).into_bytes()
    }

    /// Whether the client leaves by itself.
    pub(crate) fn leaves(&self) -> bool {
        matches!(self.client, ClientFault::CancelAfter(..))
    }
}

fn client_fault(rng: &mut Rng) -> ClientFault {
    match rng.below(100) {
        0..10 => ClientFault::CancelAfter(millis(rng, 60), leaving(rng)),
        10..18 => ClientFault::CancelAtByte(rng.below(6000) as usize, leaving(rng)),
        18..23 => ClientFault::SlowReader(16 + rng.below(400) as usize),
        23..28 => ClientFault::HalfBody(rng.below(1000), leaving(rng)),
        28..31 => ClientFault::Pipelined(1 + rng.below(3)),
        31..35 => ClientFault::Garbage,
        35..38 => ClientFault::Dribbled,
        38..41 => ClientFault::Chunked,
        41..43 => ClientFault::HalfClose,
        _ => ClientFault::None,
    }
}

/// Token `i` of the answer to a prompt: it names the request, its place and the prompt's checksum.
pub(crate) fn token(prompt: &str, n: u64, i: u32) -> String {
    let sum = xxhash_rust::xxh3::xxh3_64(prompt.as_bytes()) as u32;
    format!(" {n}:{i}:{sum:08x}")
}

/// The first `count` tokens.
pub(crate) fn answer(prompt: &str, n: u64, count: u32) -> String {
    (0..count).map(|i| token(prompt, n, i)).collect()
}

/// What an engine does to the given attempt of a request.
pub(crate) fn engine_fault(seed: u64, ask: &Ask, attempt: u8) -> EngineFault {
    let mut rng = rng(seed, ask.n, 1 + u64::from(attempt));
    let part = rng.below(1001);
    match rng.below(100) {
        0..4 => EngineFault::ResetAt(part),
        4..8 => EngineFault::CloseAt(part),
        8..12 => EngineFault::StallAt(part, millis(&mut rng, 700)),
        12..14 if ask.leaves() => EngineFault::HangAt(part),
        14..18 => {
            let all = [500, 500, 502, 503, 503, 504, 429, 400];
            EngineFault::Status(all[rng.below(all.len() as u64) as usize])
        }
        18..19 => EngineFault::Garbage,
        19..21 => EngineFault::ErrorEvent(part),
        21..23 => EngineFault::Surplus,
        23..26 => EngineFault::AnswersTwice,
        26..29 => EngineFault::AfterDone,
        29..31 => EngineFault::HoldAfterDone(millis(&mut rng, 400)),
        31..34 => EngineFault::Unasked408(millis(&mut rng, 30)),
        34..37 => EngineFault::CloseIdle(millis(&mut rng, 10)),
        37..38 => EngineFault::LongLength,
        38..41 => EngineFault::UntilClose,
        41..43 => EngineFault::ConnectionClose,
        43..49 => EngineFault::Pieces,
        _ => EngineFault::None,
    }
}
