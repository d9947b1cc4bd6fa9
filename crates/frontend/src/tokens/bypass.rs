//! A prompt that goes past the prefill workers (`--router-conditional-disagg`).
//!
//! `request::bypass` judges. A bypass that fails before its first token is none: the request takes the usual way.

use std::sync::Arc;

use kvasir_openai::ApiError;
use kvasir_router::{AttemptLimits, Attempts};
use kvasir_types::{RequestId, TransportKind};

use crate::attempts;
use crate::models::ServedModel;
use crate::request::ask;
use crate::request::bypass::judge;
use crate::request::two_step::count_path;
use crate::tokens::lane::{Lane, TokenAttempt};

pub(crate) use crate::request::bypass::ANNOTATION;

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
    let mut arrival = ask::arrival(id, attempt.tokens().len(), &job.nvext, &job.headers);
    arrival.constraints.transport = Some(TransportKind::Plane);
    let blocks = attempt.blocks();
    let pool_blocks = || attempt.blocks_in(pool);
    let judged = judge(&terms, (&job.model, pool), arrival, &blocks, pool_blocks);
    let (target, reason) = judged.await?;
    let limits = AttemptLimits {
        retries: 0,
        ..attempts::limits(&app, &job.model)
    };
    let mut bypassing = attempt.bypassing(target);
    let attempts = Attempts::new(limits, true);
    match bypassing.run(id, attempts, None, None).await {
        Ok(lane) => {
            count_path(app.metrics(), &job.model.name, reason.name());
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
