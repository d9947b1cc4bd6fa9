//! A prompt that goes past the prefill workers (`--router-conditional-disagg`).
//!
//! [`BypassTerms`](kvasir_router::BypassTerms) judges; here both routers are asked, without booking, where the prompt would go. A bypass that
//! fails before its first token is none: the request takes the usual way.

use std::sync::Arc;

use kvasir_openai::ApiError;
use kvasir_router::{AttemptLimits, Attempts, BypassReason, BypassTerms, BypassView, WorkerSpec};
use kvasir_types::{RequestId, TransportKind, WorkerRank};

use crate::attempts;
use crate::models::ServedModel;
use crate::request::ask;
use crate::tokens::lane::{Lane, TokenAttempt};
use crate::tokens::two_step;

/// What workers are told of a request that goes past the prefill workers, and clients who want to know. Only we say it.
pub(crate) const ANNOTATION: &str = "x-bypass-remote-prefill";

/// Has the prompt computed by who answers, if that is better; none if it is to go the usual way.
pub(super) async fn run(
    attempt: &mut TokenAttempt,
    pool: &Arc<ServedModel>,
    id: RequestId,
) -> Option<Result<Lane, ApiError>> {
    let (app, job) = (Arc::clone(attempt.app()), Arc::clone(attempt.job()));
    let terms = app.options().bypass?;
    // A client that names a prefill worker wants it used.
    if job.nvext.prefill_worker_id.is_some() {
        return None;
    }
    let (target, reason) = judge(&terms, attempt, pool, id).await?;
    let limits = AttemptLimits {
        retries: 0,
        ..attempts::limits(&app, &job.model)
    };
    let mut bypassing = attempt.bypassing(target);
    let attempts = Attempts::new(limits, true);
    match bypassing.run(id, attempts, None, None).await {
        Ok(lane) => {
            two_step::count_path(&app, &job.model.name, reason.name());
            Some(Ok(lane))
        }
        // Everybody would refuse it.
        Err(error) if (400..500).contains(&error.status) && !error.is_overload() => {
            Some(Err(error))
        }
        Err(error) => {
            tracing::warn!(request = %id, worker = %target, %reason, status = error.status,
                "a prompt did not get past the prefill workers: it takes the usual way");
            None
        }
    }
}

/// Where the prompt should be computed past the prefill workers, and why.
async fn judge(
    terms: &BypassTerms,
    attempt: &mut TokenAttempt,
    pool: &Arc<ServedModel>,
    id: RequestId,
) -> Option<(WorkerRank, BypassReason)> {
    let job = Arc::clone(attempt.job());
    let tokens = attempt.tokens().len();
    let mut arrival = ask::arrival(id, tokens, &job.nvext, &job.headers);
    arrival.constraints.transport = Some(TransportKind::Plane);
    let blocks = attempt.blocks();
    let decode = job
        .model
        .peek(Box::new(arrival.clone()), &blocks)
        .await
        .ok()?;
    let target = decode.target;
    let mut view = BypassView {
        prompt_tokens: arrival.isl_tokens,
        cached_tokens: decode.cached_tokens,
        ..BypassView::default()
    };
    if terms.decode_busy.is_some() {
        let loads = job.model.potential_loads(arrival.isl_tokens, &blocks);
        let load = loads.iter().find(|load| load.rank == target)?;
        view.decode_blocks = load.potential_decode_blocks;
        view.decode_blocks_total = job.model.spec_of(target.worker)?.kv_total_blocks;
    }
    if terms.asks_prefill() {
        arrival.pin = Default::default();
        arrival.session = None;
        let blocks = attempt.blocks_in(pool);
        let prefill = pool.peek(Box::new(arrival), &blocks).await.ok()?.target;
        let load = pool.host.ask(|router| router.load(prefill));
        let batch = pool.spec_of(prefill.worker)?.max_num_batched_tokens;
        view.prefill_tokens = load.map_or(0, |load| load.prefill_tokens);
        view.prefill_batch = batch.unwrap_or(WorkerSpec::UNKNOWN_BATCH);
    }
    Some((target, terms.judge(&view)?))
}
