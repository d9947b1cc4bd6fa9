//! From a request for answers to its answer, whole or streamed, struck by faults or not.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use kvasir_transport::{PlaneError, token_stream};
use kvasir_types::{RequestContext, TokenRequest};

use super::answer::{Head, Usage, Whole, framed};
use super::ask::Ask;
use super::body::{BrokenOff, Pieces, Reply, json, stream};
use super::choice::{Choice, Piece, next_of};
use super::error::Refusal;
use super::fault::HttpFaultKind;
use super::server::{Hangup, Mock};
use super::transfer::{self, Arrangement};
use crate::plane::OpenRoom;

/// Half an event has this long to leave the socket's buffer before the connection is cut.
const BEFORE_CUT: Duration = Duration::from_millis(20);

/// Answers a request, as the fault that strikes it allows.
pub(crate) async fn answer(
    mock: &Arc<Mock>,
    headers: &HeaderMap,
    body: &[u8],
    chat: bool,
) -> Result<Reply, Hangup> {
    let fault = mock.faults.strike();
    match fault {
        Some(HttpFaultKind::Refuse) => return Err(Hangup),
        Some(HttpFaultKind::Stall) => std::future::pending::<()>().await,
        Some(HttpFaultKind::Status(status)) => {
            let refusal = Refusal::server(status, "The mock engine fails, as it was told to.");
            return Ok(refusal.reply());
        }
        Some(HttpFaultKind::Slow(_) | HttpFaultKind::Die(_) | HttpFaultKind::Cut(_)) | None => {}
    }
    let ask = match Ask::read(mock, headers, body, chat) {
        Ok(ask) => ask,
        Err(refusal) => return Ok(refusal.reply()),
    };
    let arrangement = match transfer::arrange(mock, &ask).await {
        Ok(arrangement) => arrangement,
        Err(refusal) if ask.stream && ask.chat => return Ok(failed_stream(mock, &ask, &refusal)),
        Err(refusal) => return Ok(refusal.reply()),
    };
    let job = Job::start(Arc::clone(mock), ask, headers, (fault, arrangement));
    if job.ask.stream {
        return Ok(job.stream());
    }
    job.whole().await
}

/// A request under way.
struct Job {
    mock: Arc<Mock>,
    ask: Ask,
    head: Head,
    choices: Vec<Choice>,
    fault: Option<HttpFaultKind>,
    /// Where its prompt is handed over when it is computed.
    rooms: Vec<OpenRoom>,
}

impl Job {
    fn start(
        mock: Arc<Mock>,
        ask: Ask,
        headers: &HeaderMap,
        (fault, arrangement): (Option<HttpFaultKind>, Arrangement),
    ) -> Self {
        let prefix = if ask.chat { "chatcmpl" } else { "cmpl" };
        let given = headers.get("x-request-id").and_then(|v| v.to_str().ok());
        let name = given.map_or_else(|| mock.next_name(), str::to_owned);
        let head = head(&mock, &ask, format!("{prefix}-{name}"));
        let transferred = matches!(arrangement, Arrangement::TakenOver);
        let choices = (0..ask.prompts.len())
            .map(|at| begin(&mock, &ask, at, transferred))
            .collect();
        Self {
            mock,
            ask,
            head,
            choices,
            fault,
            rooms: match arrangement {
                Arrangement::HandedOver(rooms) => rooms,
                Arrangement::Here | Arrangement::TakenOver => Vec::new(),
            },
        }
    }

    /// Keeps the prompt for another, or hands it over, as the request says. What the answer says of it.
    async fn give_prompt(&self) -> Option<String> {
        transfer::hand_over(&self.mock, &self.ask, &self.rooms).await;
        let cached = self.choices.iter().map(|c| u64::from(c.cached)).sum();
        transfer::keep(&self.mock, &self.ask, &self.head.id, cached)
    }

    fn usage(&self) -> Usage {
        let prompts = &self.ask.prompts;
        // A prompt with several answers is counted once.
        let is_first = |at: &usize| {
            let before = at.checked_sub(1).and_then(|before| prompts.get(before));
            !before.is_some_and(|before| Arc::ptr_eq(before, &prompts[*at]))
        };
        let firsts = || (0..prompts.len()).filter(is_first);
        let cached = || {
            let choices = firsts().filter_map(|at| self.choices.get(at));
            choices.map(|choice| u64::from(choice.cached)).sum()
        };
        Usage {
            prompt: firsts().map(|at| prompts[at].len() as u64).sum(),
            completion: self.choices.iter().map(|c| u64::from(c.generated)).sum(),
            cached: self.mock.prompt_tokens_details.then(cached),
        }
    }

    /// Tokens after which the connection is cut.
    fn breaks_after(&self) -> Option<u64> {
        match self.fault {
            Some(HttpFaultKind::Die(tokens) | HttpFaultKind::Cut(tokens)) => Some(tokens.into()),
            _ => None,
        }
    }

    fn delay(&self) -> Duration {
        match self.fault {
            Some(HttpFaultKind::Slow(delay)) => delay,
            _ => Duration::ZERO,
        }
    }

    async fn whole(mut self) -> Result<Reply, Hangup> {
        let mut done = vec![Whole::default(); self.choices.len()];
        while let Some((at, piece)) = next_of(&mut self.choices).await {
            let piece = match piece {
                Ok(piece) => piece,
                Err(error) => return failed(&error),
            };
            self.mock.stats.saw(&mut self.choices[at], &piece);
            done[at].text += &piece.text;
            done[at].tokens.extend(piece.tokens);
            done[at].end = piece.end.or(done[at].end.take());
        }
        tokio::time::sleep(self.delay()).await;
        let given = self.give_prompt().await;
        let prompt = self
            .ask
            .prompts
            .first()
            .filter(|_| self.ask.return_token_ids);
        let document =
            self.head
                .document(&done, self.usage(), prompt.map(|p| &**p), given.as_deref());
        match self.fault {
            Some(HttpFaultKind::Die(_)) => Err(Hangup),
            Some(HttpFaultKind::Cut(_)) => Ok(half(&self.mock, document)),
            _ => Ok(json(StatusCode::OK, document)),
        }
    }

    fn stream(self) -> Reply {
        let (pieces, reply) = stream();
        let tasks = self.mock.tasks.clone();
        tasks.spawn(async move {
            let gone = pieces.clone();
            tokio::select! {
                () = gone.closed() => {} // the client left: dropping the choices cancels them
                outcome = self.feed(&pieces) => {
                    if outcome.is_err() {
                        let _ = pieces.send(Err(BrokenOff)).await;
                    }
                }
            }
        });
        reply
    }

    /// Sends events until the end, or until the fault.
    async fn feed(mut self, pieces: &Pieces) -> Result<(), BrokenOff> {
        // As vLLM does, roles come with the first token and not before, and count none.
        let roles = self.role_events();
        let mut next = next_of(&mut self.choices).await;
        if self.ask.chat && !matches!(next, Some((_, Err(_)))) {
            for event in roles {
                self.send(pieces, event).await?;
            }
        }
        while let Some((at, piece)) = next {
            let event = match piece {
                Ok(piece) => self.event(at, &piece),
                Err(PlaneError::Disconnected(_) | PlaneError::Gone(_)) => return Err(BrokenOff),
                Err(error) => framed(&refusal(&error).json()),
            };
            let generated: u64 = self.choices.iter().map(|c| u64::from(c.generated)).sum();
            if self.breaks_after().is_some_and(|limit| generated > limit) {
                return self.break_off(pieces, event).await;
            }
            self.send(pieces, event).await?;
            next = next_of(&mut self.choices).await;
        }
        // A stream does not say where its prompt is.
        self.give_prompt().await;
        if self.ask.include_usage {
            let event = self.head.usage_event(self.usage());
            self.send(pieces, event).await?;
        }
        self.send(pieces, "data: [DONE]\n\n".to_owned()).await
    }

    fn role_events(&self) -> Vec<String> {
        let event = |at: usize| {
            let prompts = &self.ask.prompts;
            let prompt = prompts.get(at).filter(|_| self.ask.return_token_ids);
            let usage = self.ask.continuous_usage.then(|| self.usage());
            self.head.role_event(at, prompt.map(|p| &**p), usage)
        };
        (0..self.choices.len()).map(event).collect()
    }

    fn event(&mut self, at: usize, piece: &Piece) -> String {
        self.mock.stats.saw(&mut self.choices[at], piece);
        let usage = self.ask.continuous_usage.then(|| self.usage());
        self.head.piece_event(
            self.choices[at].index,
            piece,
            self.ask.return_token_ids,
            usage,
        )
    }

    async fn send(&self, pieces: &Pieces, event: String) -> Result<(), BrokenOff> {
        if !self.delay().is_zero() {
            tokio::time::sleep(self.delay()).await;
        }
        pieces
            .send(Ok(Bytes::from(event)))
            .await
            .map_err(|_| BrokenOff)
    }

    async fn break_off(&self, pieces: &Pieces, mut event: String) -> Result<(), BrokenOff> {
        if let Some(HttpFaultKind::Cut(_)) = self.fault {
            event.truncate(event.floor_char_boundary(event.len() / 2));
            self.send(pieces, event).await?;
            tokio::time::sleep(BEFORE_CUT).await;
        }
        Err(BrokenOff)
    }
}

fn head(mock: &Mock, ask: &Ask, id: String) -> Head {
    Head {
        chat: ask.chat,
        id,
        created: mock.unix_secs(),
        model: ask.adapter.as_ref().unwrap_or(&mock.model).to_string(),
    }
}

/// A stream whose prompt could not be taken over: the role, then why.
fn failed_stream(mock: &Mock, ask: &Ask, refusal: &Refusal) -> Reply {
    let head = head(mock, ask, format!("chatcmpl-{}", mock.next_name()));
    let events = [
        head.role_event(0, None, None),
        framed(&refusal.json()),
        "data: [DONE]\n\n".to_owned(),
    ];
    let (pieces, reply) = stream();
    mock.tasks.spawn(async move {
        let _ = pieces.send(Ok(Bytes::from(events.concat()))).await;
    });
    reply
}

fn begin(mock: &Mock, ask: &Ask, index: usize, transferred: bool) -> Choice {
    let (sink, tokens) = token_stream(mock.worker.id());
    let request = TokenRequest {
        id: mock.next_id(),
        model: Arc::clone(&mock.model),
        tokens: ask.prompts[index].clone(),
        sampling: ask.sampling.clone(),
        rank: ask.rank,
        priority: ask.priority,
        lora: ask.adapter.clone(),
        salt: ask.salt.clone(),
        context: RequestContext::default(),
    };
    match transferred {
        true => mock.worker.submit_transferred(&request, sink),
        false => mock.worker.submit(&request, sink),
    }
    Choice::new(index, tokens, ask.detokenizer(mock), ask.stop.clone())
}

fn refusal(error: &PlaneError) -> Refusal {
    match error {
        PlaneError::Rejected(message) => Refusal::bad(message.clone(), None),
        PlaneError::Overloaded(_) => Refusal::server(
            StatusCode::SERVICE_UNAVAILABLE,
            "The engine's queue is full.",
        ),
        other => Refusal::server(StatusCode::INTERNAL_SERVER_ERROR, &other.to_string()),
    }
}

fn failed(error: &PlaneError) -> Result<Reply, Hangup> {
    match error {
        PlaneError::Disconnected(_) | PlaneError::Gone(_) => Err(Hangup),
        other => Ok(refusal(other).reply()),
    }
}

/// Half a document, then nothing.
fn half(mock: &Mock, mut document: String) -> Reply {
    document.truncate(document.floor_char_boundary(document.len() / 2));
    let (pieces, reply) = stream();
    mock.tasks.spawn(async move {
        let _ = pieces.send(Ok(Bytes::from(document))).await;
        tokio::time::sleep(BEFORE_CUT).await;
        let _ = pieces.send(Err(BrokenOff)).await;
    });
    reply
}
