//! One answer as it comes: tokens from the engine, text for the client.

use std::task::{Context, Poll, ready};

use kvasir_text::Detokenizer;
use kvasir_transport::{PlaneError, TokenStream};
use kvasir_types::{FinishReason, Token, TokenItem};
use tokio::time::Instant;

/// How an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) reason: &'static str,
    /// The stop string that ended it.
    pub(crate) stop: Option<String>,
}

/// New tokens and their text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Piece {
    pub(crate) text: String,
    pub(crate) tokens: Vec<Token>,
    pub(crate) end: Option<End>,
}

/// An answer under way. Dropping it cancels it.
pub(crate) struct Choice {
    pub(crate) index: usize,
    stream: TokenStream,
    text: Detokenizer,
    stops: Vec<String>,
    pub(crate) generated: u32,
    pub(crate) cached: u32,
    pub(crate) began: Instant,
    pub(crate) last: Option<Instant>,
    pub(crate) ended: bool,
}

impl Choice {
    pub(crate) fn new(
        index: usize,
        stream: TokenStream,
        text: Detokenizer,
        stops: Vec<String>,
    ) -> Self {
        let began = Instant::now();
        Self {
            index,
            stream,
            text,
            stops,
            generated: 0,
            cached: 0,
            began,
            last: None,
            ended: false,
        }
    }

    /// The next piece; `None` once it has ended.
    pub(crate) fn poll_piece(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Piece, PlaneError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let next = match ready!(self.stream.poll_next(cx)) {
            Some(Ok(item)) => Some(Ok(self.piece(item))),
            Some(Err(error)) => {
                self.ended = true;
                Some(Err(error))
            }
            None => {
                self.ended = true;
                None
            }
        };
        Poll::Ready(next)
    }

    fn piece(&mut self, mut item: TokenItem) -> Piece {
        self.cached = item.cached_tokens.unwrap_or(self.cached);
        let mut piece = Piece::default();
        if let Some(hit) = self.text.push(&item.tokens, &mut piece.text) {
            item.tokens.truncate(hit.tokens_used);
            let stop = self.stops.get(hit.stop).cloned();
            piece.end = Some(End {
                reason: "stop",
                stop,
            });
        } else if let Some(finish) = item.finish {
            self.text.finish(&mut piece.text);
            piece.end = Some(End {
                reason: reason(finish),
                stop: None,
            });
        }
        self.generated += item.tokens.len() as u32;
        self.ended = piece.end.is_some();
        piece.tokens = item.tokens;
        piece
    }
}

fn reason(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "abort",
        FinishReason::Error => "error",
    }
}

/// The next piece of any of `choices`, with the choice's place; `None` once all have ended.
pub(crate) async fn next_of(choices: &mut [Choice]) -> Option<(usize, Result<Piece, PlaneError>)> {
    std::future::poll_fn(|cx| {
        let mut waiting = false;
        for (at, choice) in choices.iter_mut().enumerate() {
            match choice.poll_piece(cx) {
                Poll::Ready(Some(piece)) => return Poll::Ready(Some((at, piece))),
                Poll::Ready(None) => {}
                Poll::Pending => waiting = true,
            }
        }
        if waiting {
            Poll::Pending
        } else {
            Poll::Ready(None)
        }
    })
    .await
}
