//! A request whose prompt and answer are computed by different workers, however these are reached.
//!
//! [`TwoStep`] decides what follows what; [`Legs`] says how it is done over one transport, and [`drive`] brings both together.
//!
//! What always holds: what [`TwoStep`] asks for is done in its order, and it is told what came of it; a prefill that a decode worker waits for is
//! stopped when that one is given up.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use kvasir_openai::ApiError;
use kvasir_router::{
    Constraints, DecodeMode, Handoff, Leg, Overrides, PoolState, Trouble, TwoStep, TwoStepAction,
    TwoStepFailure, TwoStepInput, TwoStepTerms,
};
use kvasir_tasks::Tasks;
use kvasir_telemetry::Metrics;
use kvasir_types::{BootstrapRoom, Time, TransferRule, WorkerId, WorkerRank};

use crate::models::ServedModel;
use crate::observe::observer::Observer;
use crate::observe::request_record::PrefilledBy;

/// How the prompt was computed, as clients are told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PrefillSummary {
    /// Who computed it.
    pub(crate) target: WorkerRank,
    /// When it was asked.
    pub(crate) dispatched: Time,
    /// When it had answered; none if both workers were asked at once.
    pub(crate) ended: Option<Time>,
    /// Share of the prompt's blocks that it was expected to hold.
    pub(crate) hit_rate: f64,
    /// Tokens of the prompt that it was expected to find in its cache.
    pub(crate) predicted_tokens: u32,
    /// Tokens of the prompt that it found in its cache, where it says so.
    pub(crate) cached_tokens: Option<u32>,
}

impl PrefillSummary {
    /// What is remembered of it with the request.
    pub(crate) fn record(self) -> PrefilledBy {
        PrefilledBy {
            target: self.target,
            predicted_tokens: self.predicted_tokens,
            cached_tokens: self.cached_tokens,
        }
    }
}

/// Both parts of one request, over one transport.
pub(crate) trait Legs {
    /// An answer that has begun.
    type Answer;

    /// Books a prefill worker and asks it, one after another until one takes it.
    fn prefill(&mut self) -> impl Future<Output = TwoStepInput> + Send;

    /// Takes what the prefill worker said, or lets it run.
    fn prefill_sent(&mut self) -> Option<TwoStepInput>;

    /// Frees what the prefill worker has, or stops it.
    fn end_prefill(&mut self);

    /// Asks a decode worker for the answer.
    fn decode(
        &mut self,
        mode: DecodeMode,
    ) -> impl Future<Output = Result<Self::Answer, TwoStepInput>> + Send;

    /// What the prefill worker said is all of the answer.
    fn answer_prefill(&mut self) -> Result<Self::Answer, ApiError>;

    /// What the client is told.
    fn failure(&mut self, why: TwoStepFailure) -> ApiError;
}

/// Serves a request that came while its model's prefill workers were in this state.
pub(crate) async fn drive<L: Legs>(
    legs: &mut L,
    terms: TwoStepTerms,
    state: PoolState,
) -> Result<L::Answer, ApiError> {
    let (mut request, first) = TwoStep::start(terms, state);
    let (mut todo, mut out) = (VecDeque::from([first]), Vec::new());
    while let Some(action) = todo.pop_front() {
        let told = match action {
            TwoStepAction::BookPrefill => Some(legs.prefill().await),
            TwoStepAction::SendPrefill => legs.prefill_sent(),
            TwoStepAction::Decode(mode) => match legs.decode(mode).await {
                Ok(answer) => return Ok(answer),
                Err(told) => Some(told),
            },
            TwoStepAction::End(Leg::Prefill) => {
                legs.end_prefill();
                None
            }
            // Its bookings ended with its attempts, and this future is the client's.
            TwoStepAction::End(Leg::Decode) | TwoStepAction::Detach => None,
            TwoStepAction::AnswerPrefill => return legs.answer_prefill(),
            TwoStepAction::Fail(why) => return Err(legs.failure(why)),
        };
        if let Some(told) = told {
            // What a leg that was given up had still to do is not done.
            request.step(told, &mut out);
            todo.extend(out.drain(..));
        }
    }
    Err(ApiError::internal())
}

/// Work whose end says whether a prefill failed.
type PrefillWork = Pin<Box<dyn Future<Output = Result<(), Trouble>> + Send>>;

/// A prefill that runs beside its decode worker. Whoever waits for the answer drives it: it has no task of its own. Dropped before
/// [`Self::detach`], it is stopped.
pub(crate) struct RunningPrefill {
    /// None once it has ended.
    work: Option<PrefillWork>,
}

impl RunningPrefill {
    /// One that does this, and frees what it has when it ends or is dropped.
    pub(crate) fn new(work: impl Future<Output = Result<(), Trouble>> + Send + 'static) -> Self {
        Self {
            work: Some(Box::pin(work)),
        }
    }

    /// The decode worker has it: the rest of its answer is read without anybody waiting for it.
    pub(crate) fn detach(self, tasks: &Tasks) {
        if let Some(work) = self.work {
            tasks.spawn(async move {
                let _ = work.await;
            });
        }
    }

    /// Waits for the answer. The error is why the prefill failed: it counts before that of an answer that waited for it.
    pub(crate) async fn beside<T, E>(
        &mut self,
        mut answer: Pin<&mut impl Future<Output = Result<T, E>>>,
    ) -> Result<Result<T, E>, Trouble> {
        poll_fn(|cx| {
            let failed = self.poll_failure(cx);
            match (answer.as_mut().poll(cx), failed) {
                (Poll::Ready(Ok(answer)), _) => Poll::Ready(Ok(Ok(answer))),
                (_, Some(trouble)) => Poll::Ready(Err(trouble)),
                (Poll::Ready(Err(error)), None) => Poll::Ready(Ok(Err(error))),
                (Poll::Pending, None) => Poll::Pending,
            }
        })
        .await
    }

    /// Goes on with it. Why it failed, if it has just done so.
    fn poll_failure(&mut self, cx: &mut Context<'_>) -> Option<Trouble> {
        match self.work.as_mut()?.as_mut().poll(cx) {
            Poll::Pending => None,
            Poll::Ready(ended) => {
                self.work = None;
                ended.err()
            }
        }
    }
}

/// Where a decode worker meets this prefill worker for one request, if it says where it is met. The rank of the prompt follows from the
/// number of the room, and rooms that follow it are free.
pub(crate) fn draw_room(
    observer: &Observer,
    pool: &ServedModel,
    target: WorkerRank,
) -> Option<BootstrapRoom> {
    let address = pool.links().bootstrap(target.worker)?;
    let ranks = u64::from(pool.ranks_of(target.worker).max(1));
    let drawn = (observer.new_request_id().0 >> 65) as u64;
    let room = (drawn / ranks).max(1) * ranks + u64::from(target.rank.0) % ranks;
    Some(BootstrapRoom {
        address,
        room,
        handoff: Some(observer.new_request_id().0),
    })
}

/// How the router is to place an answer whose prompt comes from elsewhere: what its worker has cached saves nothing, and there is
/// no prompt to compute. `keeps_credit`: a prompt may also go past the prefill workers, so that it should go where it is cached.
pub(crate) fn decode_overrides(overrides: &mut Overrides, keeps_credit: bool) {
    if !keeps_credit {
        overrides.overlap_score_credit = Some(0.0);
        overrides.overlap_score_weight = None;
    }
    overrides.assume_kv_reuse = Some(false);
    overrides.track_prefill_tokens = Some(false);
}

/// How the prompt came to be computed, as series name it.
pub(crate) fn path_of(mode: DecodeMode) -> &'static str {
    match mode {
        DecodeMode::Alone => "decode_worker",
        DecodeMode::Transferred(Handoff::Answer) => "answer",
        DecodeMode::Transferred(Handoff::Bootstrap) => "bootstrap",
    }
}

/// Counts a prompt of a model that has prefill workers.
pub(crate) fn count_path(metrics: &Metrics, model: &str, path: &str) {
    let paths = &metrics.prefill_paths_total;
    paths.with_label_values(&[model, path]).inc();
}

/// Who may take over the prompts of a worker, if not everybody. The error says that nobody may, and why.
pub(crate) fn transfer_rule(
    pool: &ServedModel,
    worker: WorkerId,
) -> Result<Option<TransferRule>, String> {
    let rule = pool.links().transfer_rule(worker);
    match &rule {
        Some(rule) if rule.preferred.is_none() && rule.taint.is_none() => Err(format!(
            "worker {worker} hands prompts over only within its {}, and does not say which that is",
            rule.domain
        )),
        _ => Ok(rule),
    }
}

/// Adds where the answer to a prompt may be computed, beside what its client says.
pub(crate) fn constrain(rule: Option<&TransferRule>, constraints: &mut Constraints) {
    let Some((rule, taint)) = rule.and_then(|rule| Some((rule, rule.taint.clone()?))) else {
        return;
    };
    match rule.preferred {
        None => constraints.required_taints.push(taint),
        Some(thousandths) => {
            let weight = f64::from(thousandths) / 1000.0;
            constraints.preferred_taints.push((taint, weight));
        }
    }
}
