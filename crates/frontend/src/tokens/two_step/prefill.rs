//! The leg of a request that computes its prompt: one worker after another is asked for one token.
//!
//! Where the worker names an address, its stream is read beside the decode leg ([`drain`]); else it is read to its end here.

use std::sync::Arc;

use kvasir_host::{Booking, UsageReport};
use kvasir_openai::ApiError;
use kvasir_router::{Attempts, NextStep, Outcome, PrefillEnd, Trouble};
use kvasir_transport::{PlaneError, TokenStream};
use kvasir_types::{
    AttemptError as _, BootstrapRoom, FailureCause, FinishReason, PrefillResult, Time, TokenItem,
    TransferRule,
};

use super::transfer::is_usable;
use crate::App;
use crate::attempts::OpenAttempt;
use crate::models::ServedModel;
use crate::request::two_step;
use crate::tokens::lane::{self, TokenAttempt};

/// What prefill workers of a pool said, or where they are met.
pub(super) enum PrefillAnswer {
    /// It has ended.
    Ended {
        end: PrefillEnd,
        item: Box<TokenItem>,
        result: Option<PrefillResult>,
    },
    /// It was asked, and is to be met there.
    Meeting {
        stream: TokenStream,
        room: BootstrapRoom,
    },
}

/// An attempt at a prefill worker.
pub(super) struct PrefillAttempt<'a> {
    pub(super) app: &'a Arc<App>,
    pub(super) pool: &'a Arc<ServedModel>,
    pub(super) attempt: &'a TokenAttempt,
    /// When the last of them was asked.
    pub(super) dispatched: Time,
    /// Who may take its prompt over.
    pub(super) rule: Option<TransferRule>,
    /// Only workers of its own place may, and it does not say where that is.
    pub(super) is_placeless: bool,
}

impl OpenAttempt for PrefillAttempt<'_> {
    type Answer = PrefillAnswer;
    type Error = PlaneError;

    async fn open(&mut self, booking: &Booking, _: &Attempts) -> Result<PrefillAnswer, PlaneError> {
        let target = booking.target();
        match two_step::transfer_rule(self.pool, target.worker) {
            Ok(rule) => self.rule = rule,
            Err(why) => {
                self.is_placeless = true;
                return Err(PlaneError::Rejected(why));
            }
        }
        let room = two_step::draw_room(self.app.observer(), self.pool, target);
        let mut request = self.attempt.request(booking);
        request.sampling.max_tokens = 1;
        request.sampling.min_tokens = request.sampling.min_tokens.min(1);
        request.context.pinned = None;
        request.context.prefill = Some(target);
        request.context.bootstrap = room.clone();
        self.dispatched = self.app.clock().now();
        self.pool.placements.dispatched();
        let plane = self.pool.links().plane(target.worker);
        let plane = plane.ok_or(PlaneError::Gone(target.worker))?;
        let mut stream = plane.send(target.worker, request).await?;
        if let Some(room) = room {
            return Ok(PrefillAnswer::Meeting { stream, room });
        }
        let mut whole = TokenItem::default();
        while let Some(item) = stream.next().await {
            let item = item?;
            if whole.tokens.is_empty() {
                booking.first_token();
            }
            add(&mut whole, item);
            if whole.finish.is_some() {
                break;
            }
        }
        let Some(finish) = whole.finish else {
            return Err(PlaneError::Disconnected(target.worker));
        };
        let result = whole
            .disaggregated_params
            .take()
            .filter(|params| is_usable(params))
            .map(|params| PrefillResult {
                disaggregated_params: params,
                cached_tokens: whole.cached_tokens,
            });
        let end = match (finish, &result) {
            (FinishReason::Stop, _) => PrefillEnd::Terminal,
            (_, Some(_)) => PrefillEnd::Ready,
            (_, None) => {
                tracing::warn!(worker = %target, "a prefill worker does not say where the prompt is");
                PrefillEnd::NoTransfer
            }
        };
        Ok(PrefillAnswer::Ended {
            end,
            item: Box::new(whole),
            result,
        })
    }

    fn client_error(&self, error: &PlaneError, _: NextStep) -> ApiError {
        lane::client_error(self.app, error)
    }
}

/// Puts the next item behind what has come.
fn add(whole: &mut TokenItem, item: TokenItem) {
    whole.tokens.extend(item.tokens);
    whole.logprobs.extend(item.logprobs);
    whole.cached_tokens = whole.cached_tokens.or(item.cached_tokens);
    if item.disaggregated_params.is_some() {
        whole.disaggregated_params = item.disaggregated_params;
    }
    whole.finish = item.finish;
}

/// Reads a prefill's stream to its end; its booking ends with it.
pub(super) async fn drain(
    mut booking: Booking,
    mut stream: TokenStream,
    prompt: u32,
) -> Result<(), Trouble> {
    let read = async {
        let mut whole = TokenItem::default();
        while let Some(item) = stream.next().await {
            let item = item?;
            if whole.tokens.is_empty() {
                booking.first_token();
            }
            add(&mut whole, item);
            if whole.finish.is_some() {
                return Ok(whole);
            }
        }
        Err(PlaneError::Disconnected(booking.target().worker))
    };
    match read.await {
        Ok(whole) => {
            booking.reported(UsageReport {
                prompt,
                cached: whole.cached_tokens,
                output: 1,
            });
            booking.finish(Outcome::Completed { output_tokens: 1 });
            Ok(())
        }
        Err(error) => {
            tracing::warn!(worker = %booking.target(), %error, "prefill failed beside its decode worker");
            let cause = error.failure_cause();
            booking.finish(Outcome::of_failure(cause));
            Err(match cause {
                FailureCause::Overloaded => Trouble::Overloaded,
                _ => Trouble::Failed,
            })
        }
    }
}
