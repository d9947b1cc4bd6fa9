//! Speculative prefill of the next turn by an engine behind HTTP.

use std::sync::Arc;

use bytes::Bytes;
use kvasir_host::PromptBlocks;
use kvasir_openai::{Endpoint, Nvext, Scan, next_turn};
use kvasir_router::{Arrival, Outcome, Pin};
use kvasir_types::WorkerRank;

use super::Forward;
use crate::http::long_work;
use crate::models::tokenize;
use crate::observe::outcomes::{self, REQUEST_ID};
use crate::request::speculative_prefill::{self, PrefillOutcome};

/// Longest answer to a request for one token.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// The last in vLLM's order, which takes the smaller first; the other end is the last in SGLang's.
const LAST: i32 = i32::MAX;

/// A turn whose next one is to be prefilled.
pub(crate) struct NextTurn {
    pub(super) forward: Arc<Forward>,
    pub(super) target: WorkerRank,
}

impl NextTurn {
    /// The turn ended with the answer `said`.
    pub(crate) fn prefill(self, said: &str) {
        let forward = self.forward;
        let (app, model) = (Arc::clone(&forward.app), Arc::clone(&forward.model));
        let work = run(forward, self.target, said.to_owned());
        speculative_prefill::start(
            (app.prefill_slots(), app.tasks()),
            &model,
            self.target,
            work,
        );
    }
}

/// The body of the next turn, and its prompt; none if that cannot be told.
async fn next(forward: Arc<Forward>, said: String) -> Option<(Bytes, u32, PromptBlocks)> {
    let scan = Scan::parse(&forward.body).ok();
    let body = scan.and_then(|scan| next_turn(&scan, &said))?;
    let body = least_urgent(&forward.body, body);
    let (app, model) = (&forward.app, &forward.model);
    let scan = Scan::parse(&body).ok()?;
    let pool = app.long_work();
    let nvext = Nvext::default();
    let reading = tokenize::read(pool, model, Endpoint::Chat, &scan, &body, &nvext).await;
    let length = u32::try_from(reading.tokens.len()).unwrap_or(u32::MAX);
    let salt = scan.cache_salt();
    let mut blocks = model.name_blocks(&reading.tokens, salt.as_deref().unwrap_or_default());
    blocks.set_guessed(reading.guessed());
    drop(scan);
    Some((body, length, blocks))
}

/// The body with the least urgency there is, as vLLM writes it. Only where the turn said a priority: an engine
/// without a policy for them refuses any.
fn least_urgent(turn: &Bytes, body: Bytes) -> Bytes {
    let said = |body: &Bytes| Some(Scan::parse(body).ok()?.raw("priority").is_some());
    if said(turn) != Some(true) {
        return body;
    }
    match Scan::parse(&body) {
        Ok(scan) => scan.edit().set("priority", &LAST.to_string()).apply(&body),
        Err(_) => body,
    }
}

async fn run(forward: Arc<Forward>, target: WorkerRank, said: String) -> PrefillOutcome {
    let (app, model) = (&forward.app, &forward.model);
    let work = next(Arc::clone(&forward), said);
    let next = match long_work::is_long(forward.body.len()) {
        false => work.await,
        true => app.long_work().drive(work).await.flatten(),
    };
    let Some((body, length, blocks)) = next else {
        return PrefillOutcome::Failed;
    };
    let arrival = Arrival {
        pin: Pin {
            worker: Some(target.worker),
            rank: Some(target.rank),
        },
        ..Arrival::new(app.observer().new_request_id(), length.max(1))
    };
    let mut headers = forward.headers.clone();
    headers.insert(REQUEST_ID, outcomes::name_of(arrival.id));
    let Some(booking) = speculative_prefill::placed(model.book(Box::new(arrival), &blocks)).await
    else {
        return PrefillOutcome::Dropped;
    };
    let answer = async {
        let sent = forward.send_as(target, &headers, &body, Some(i32::MIN));
        let response = sent.await.ok()?;
        let well = response.status().is_success();
        response.into_body().collect(ANSWER_BYTES_MAX).await.ok()?;
        well.then_some(())
    };
    if answer.await.is_none() {
        booking.finish(Outcome::Failed);
        return PrefillOutcome::Failed;
    }
    booking.first_token();
    booking.finish(Outcome::Completed { output_tokens: 1 });
    PrefillOutcome::Done
}
