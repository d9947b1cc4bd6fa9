//! Prompts that one engine keeps for another.
//!
//! Answers one question: who frees a prompt that was computed? vLLM keeps it until another engine has fetched it, or for 30 seconds.
//!
//! What always holds: it is fetched at most once, since what is there afterwards may be another prompt; one that no engine answers is fetched to be
//! thrown away.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvasir_openai::{decode_leg, release_leg};
use kvasir_types::{AttemptError as _, DpRank, Retry, Time, WorkerRank};
use kvasir_upstream::UpstreamError;

use super::Forward;
use crate::request::two_step::PrefillSummary;

/// A prompt that is kept longer is taken for gone. vLLM does not say so when it reads what is there afterwards.
const KEPT_MAX: Duration = Duration::from_secs(20);
/// Engines that are asked to fetch a prompt that nobody wants.
const RELEASE_TRIES: usize = 3;
/// What that may take.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// A prompt that an engine keeps for another.
pub(super) struct KeptPrompt {
    forward: Arc<Forward>,
    /// What the engine says of where it is.
    params: Arc<str>,
    since: Time,
    /// It is fetched, or was, or is gone.
    is_over: bool,
}

impl KeptPrompt {
    /// What an engine says in these words of where the prompt of this request is, since now.
    pub(super) fn new(forward: &Arc<Forward>, params: String, since: Time) -> Self {
        Self {
            forward: Arc::clone(forward),
            params: params.into(),
            since,
            is_over: false,
        }
    }

    /// What an engine is sent that answers it.
    pub(super) async fn into_leg(self, prefill: PrefillSummary) -> Option<DecodeLeg> {
        let params = Arc::clone(&self.params);
        let body = self
            .forward
            .edited(move |body| decode_leg(body, &params))
            .await?;
        Some(DecodeLeg {
            body,
            prefill,
            kept: Some(self),
        })
    }
}

impl Drop for KeptPrompt {
    fn drop(&mut self) {
        if !self.is_over {
            let release = release(Arc::clone(&self.forward), Arc::clone(&self.params));
            self.forward.app.tasks().spawn(release);
        }
    }
}

/// Lets an engine fetch a prompt and throw it away.
async fn release(forward: Arc<Forward>, params: Arc<str>) {
    let api = forward.leg_api();
    let edit = move |body: &Bytes| release_leg(body, &params, api);
    let Some(body) = forward.edited(edit).await else {
        return;
    };
    for turn in 0..RELEASE_TRIES {
        let Some((worker, _)) = forward.model.links().any_http(turn, |_| true) else {
            return;
        };
        let target = WorkerRank {
            worker,
            rank: DpRank(0),
        };
        let fetch = forward.fetch(&forward.model, target, &body, RELEASE_TIMEOUT);
        match fetch.await {
            Err(error) if error.retry() == Retry::Elsewhere => {}
            outcome => {
                let status = outcome.map(|(status, _)| status.as_u16()).ok();
                tracing::debug!(%worker, status, "a prompt that nobody answers was fetched to free it");
                return;
            }
        }
    }
}

/// What an engine is sent that answers a prompt which another computes.
pub(crate) struct DecodeLeg {
    pub(super) body: Bytes,
    pub(super) prefill: PrefillSummary,
    pub(super) kept: Option<KeptPrompt>,
}

impl DecodeLeg {
    /// It is about to be sent. What is no longer there is not asked for.
    pub(super) fn begin(&mut self, forward: &Forward) {
        let now = forward.app.clock().now();
        let Some(kept) = &mut self.kept else {
            return;
        };
        kept.is_over = true;
        if now - kept.since > KEPT_MAX {
            self.body = forward.body.clone();
            self.kept = None;
        }
    }

    /// It failed so. What was not sent can be sent to another engine.
    pub(super) fn failed(&mut self, error: &UpstreamError) {
        let was_not_sent = error.retry() == Retry::Elsewhere;
        if let Some(kept) = self.kept.as_mut().filter(|_| was_not_sent) {
            kept.is_over = false;
        }
    }
}
