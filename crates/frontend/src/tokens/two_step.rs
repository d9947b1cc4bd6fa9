//! A prompt that one token worker computes and another answers.
//!
//! [`TwoStep`] decides what follows what; here it is done: a prefill worker is booked in its own pool and asked for one token, the
//! decode worker is told where the prompt is, and whatever fails on the way is told to [`TwoStep`].
//!
//! What always holds: the booking of each worker ends with its part of the request; a prefill that a decode worker waits for is
//! stopped when that one is given up; a prompt that was computed is fetched by a decode worker even if the client has left, since
//! only that frees it.

mod prefill;
mod transfer;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use kvasir_host::{Booking, UsageReport};
use kvasir_openai::ApiError;
use kvasir_router::{
    Attempts, DecodeMode, Handoff, Leg, Outcome, Pin, PoolState, PrefillEnd, Trouble, TwoStep,
    TwoStepAction, TwoStepFailure, TwoStepInput,
};
use kvasir_transport::token_stream;
use kvasir_types::{DpRank, RequestId, TransferRule, TransportKind, WorkerId};

use prefill::{PrefillAnswer, PrefillAttempt, drain};
pub(crate) use transfer::Transfer;
use transfer::bootstrap_in;

use crate::App;
use crate::attempts::{self, UnplacedRequest};
use crate::models::ServedModel;
use crate::request::ask;
use crate::request::migrate::Migration;
use crate::request::two_step::RunningPrefill;
pub(crate) use crate::request::two_step::{PrefillSummary, decode_overrides};
use crate::request::two_step::{count_path, path_of};
use crate::tokens::bypass;
use crate::tokens::job::Job;
use crate::tokens::lane::{Lane, TokenAttempt};

/// How long a decode worker may take to fetch a prompt whose client has left.
const FETCH_TIME: Duration = Duration::from_secs(60);

/// A prefill leg that was opened.
struct PrefillLeg {
    booking: Booking,
    answer: PrefillAnswer,
    summary: PrefillSummary,
    /// Who may take the prompt over.
    rule: Option<TransferRule>,
}

/// One request on its way.
struct Driver {
    app: Arc<App>,
    job: Arc<Job>,
    id: RequestId,
    attempt: TokenAttempt,
    pool: Option<Arc<ServedModel>>,
    leg: Option<PrefillLeg>,
    running: Option<RunningPrefill>,
    transfer: Option<Transfer>,
    summary: Option<PrefillSummary>,
    /// What the client is told if nothing else comes.
    error: ApiError,
}

/// Starts an answer over a prefill and a decode worker, or over one that does both.
pub(crate) async fn run(
    mut attempt: TokenAttempt,
    id: RequestId,
    attempts: Attempts,
    migration: Option<Migration>,
) -> Result<Lane, ApiError> {
    let (app, job) = (attempt.app(), attempt.job());
    let pool = app.prefill_pool(&job.model.name);
    let terms = app.options().two_step;
    let state = match &pool {
        Some(pool) => PoolState::Active.with_workers(usize::from(pool.is_ready())),
        None => PoolState::Pending,
    };
    if state != PoolState::Active && (terms.serves_alone || !job.model.links().has_decode()) {
        return attempt.run(id, attempts, migration, None).await;
    }
    // In a box: most requests need no second worker.
    Box::pin(run_both(attempt, id, attempts, migration, pool, state)).await
}

/// The same where there are prefill workers, or have to be.
async fn run_both(
    mut attempt: TokenAttempt,
    id: RequestId,
    attempts: Attempts,
    mut migration: Option<Migration>,
    pool: Option<Arc<ServedModel>>,
    state: PoolState,
) -> Result<Lane, ApiError> {
    if state == PoolState::Active
        && migration.is_none()
        && let Some(pool) = &pool
        && let Some(lane) = bypass::run(&mut attempt, pool, id).await
    {
        return lane;
    }
    let (app, job) = (Arc::clone(attempt.app()), Arc::clone(attempt.job()));
    let (mut request, first) = TwoStep::start(app.options().two_step, state);
    let mut driver = Driver {
        error: ApiError::unavailable(),
        attempt,
        id,
        app,
        job,
        pool,
        leg: None,
        running: None,
        transfer: None,
        summary: None,
    };
    let (mut todo, mut out) = (VecDeque::from([first]), Vec::new());
    while let Some(action) = todo.pop_front() {
        let told = match action {
            TwoStepAction::BookPrefill => Some(driver.prefill().await),
            TwoStepAction::SendPrefill => driver.prefill_sent(),
            TwoStepAction::Decode(mode) => {
                match driver.decode(mode, &attempts, migration.take()).await {
                    Ok(lane) => {
                        let path = path_of(mode);
                        count_path(driver.app.metrics(), &driver.job.model.name, path);
                        return Ok(lane);
                    }
                    Err(told) => Some(told),
                }
            }
            TwoStepAction::End(Leg::Prefill) => {
                driver.end_prefill();
                None
            }
            // Its bookings ended with its attempts, and this future is the client's.
            TwoStepAction::End(Leg::Decode) | TwoStepAction::Detach => None,
            TwoStepAction::AnswerPrefill => {
                count_path(driver.app.metrics(), &driver.job.model.name, "whole");
                return driver.answer_prefill(attempts);
            }
            TwoStepAction::Fail(why) => return Err(driver.failure(why)),
        };
        if let Some(told) = told {
            // What a leg that was given up had still to do is not done.
            request.step(told, &mut out);
            todo.extend(out.drain(..));
        }
    }
    Err(driver.error)
}

impl Driver {
    /// Books a prefill worker and asks it for one token, one worker after another until one takes it.
    async fn prefill(&mut self) -> TwoStepInput {
        let Some(pool) = self.pool.clone() else {
            return TwoStepInput::PrefillRefused(Trouble::Failed);
        };
        let blocks = self.attempt.blocks_in(&pool);
        let (job, tokens) = (&self.job, self.attempt.tokens());
        let mut arrival = ask::arrival(self.id, tokens.len(), &job.nvext, &job.headers);
        arrival.constraints.transport = Some(TransportKind::Plane);
        arrival.pin = Pin {
            worker: job.nvext.prefill_worker_id.map(WorkerId),
            rank: job.nvext.prefill_dp_rank.map(DpRank),
        };
        arrival.session = None;
        let mut opener = PrefillAttempt {
            app: &self.app,
            pool: &pool,
            attempt: &self.attempt,
            dispatched: self.app.clock().now(),
            rule: None,
            is_placeless: false,
        };
        let mut attempts = Attempts::new(attempts::limits(&self.app, &pool), true);
        if self.app.options().two_step.falls_back {
            // Who answers can compute the prompt, too: nobody is asked who has just failed.
            attempts.ask_once_each();
            arrival.dispensable = true;
        }
        let unplaced = UnplacedRequest {
            app: &self.app,
            model: &pool,
            arrival: &arrival,
            blocks: &blocks,
            migration: None,
        };
        let opened = attempts::run(unplaced, &mut attempts, &mut opener).await;
        let (dispatched, rule) = (opener.dispatched, opener.rule.take());
        let (mut booking, answer) = match opened {
            Ok(opened) => opened,
            Err(_) if opener.is_placeless => {
                self.error = ApiError::unavailable();
                return TwoStepInput::PrefillRefused(Trouble::Constraint);
            }
            Err(error) => return TwoStepInput::PrefillRefused(self.note(error, Leg::Prefill)),
        };
        let now = self.app.clock().now();
        let (ended, handoff) = match &answer {
            PrefillAnswer::Ended { .. } => (Some(now), Handoff::Answer),
            PrefillAnswer::Meeting { .. } => (None, Handoff::Bootstrap),
        };
        let waited = (now - dispatched, ended.is_some());
        let hit_rate =
            pool.placements
                .begun(booking.placement(), tokens.len(), pool.block_size, waited);
        if let PrefillAnswer::Ended { item, .. } = &answer {
            booking.reported(UsageReport {
                prompt: arrival.isl_tokens,
                cached: item.cached_tokens,
                output: 1,
            });
        }
        let summary = PrefillSummary {
            target: booking.target(),
            dispatched,
            ended,
            hit_rate,
            predicted_tokens: booking.predicted_tokens(),
            cached_tokens: match &answer {
                PrefillAnswer::Ended { item, .. } => item.cached_tokens,
                PrefillAnswer::Meeting { .. } => None,
            },
        };
        self.summary = Some(summary);
        self.leg = Some(PrefillLeg {
            booking,
            answer,
            summary,
            rule,
        });
        TwoStepInput::PrefillBooked(handoff)
    }

    /// Takes what the prefill worker said, or lets it run.
    fn prefill_sent(&mut self) -> Option<TwoStepInput> {
        let leg = self.leg.take()?;
        let target = leg.booking.target();
        match leg.answer {
            PrefillAnswer::Ended { end, item, result } => {
                let bootstrap = result
                    .as_ref()
                    .and_then(|result| bootstrap_in(&result.disaggregated_params));
                self.transfer = Some(Transfer {
                    prefill: target,
                    // What has a meeting in it is that meeting.
                    result: result.filter(|_| bootstrap.is_none()),
                    bootstrap,
                    rule: leg.rule.clone(),
                });
                let answer = PrefillAnswer::Ended {
                    end,
                    item,
                    result: None,
                };
                self.leg = Some(PrefillLeg { answer, ..leg });
                Some(TwoStepInput::PrefillEnded(end))
            }
            PrefillAnswer::Meeting { stream, room } => {
                self.transfer = Some(Transfer {
                    prefill: target,
                    bootstrap: Some(room),
                    result: None,
                    rule: leg.rule,
                });
                let prompt = u32::try_from(self.attempt.tokens().len()).unwrap_or(u32::MAX);
                let drain = drain(leg.booking, stream, prompt);
                self.running = Some(RunningPrefill::new(drain));
                None
            }
        }
    }

    /// Frees what the prefill worker has, or stops it.
    fn end_prefill(&mut self) {
        self.running = None;
        let is_terminal = |leg: &mut PrefillLeg| {
            let end = PrefillEnd::Terminal;
            matches!(&leg.answer, PrefillAnswer::Ended { end: e, .. } if *e == end)
        };
        // What is all of the answer is kept for it.
        if let Some(leg) = self.leg.take_if(|leg| !is_terminal(leg)) {
            leg.booking.finish(Outcome::Completed { output_tokens: 1 });
        }
    }

    /// Asks a decode worker for the answer.
    async fn decode(
        &mut self,
        mode: DecodeMode,
        attempts: &Attempts,
        migration: Option<Migration>,
    ) -> Result<Lane, TwoStepInput> {
        let transfer = self.transfer.take();
        let (id, mut attempts) = (self.id, attempts.clone());
        let Some(transfer) = transfer.filter(|_| mode != DecodeMode::Alone) else {
            let lane = self.attempt.run(id, attempts, migration, None).await;
            return lane.map_err(|error| self.refused(error));
        };
        attempts.begin_transfer();
        // Should it be sent again, then under another name.
        let named = self.attempt.clone();
        self.attempt.rename();
        let (mut attempt, summary) = (named, self.summary);
        attempt.set_transfer(transfer);
        let lane = async move { attempt.run(id, attempts, migration, summary).await };
        let lane = match self.running.as_mut() {
            // A client that leaves does not stop it before the prompt was fetched.
            None => self.app.tasks().outliving(lane, FETCH_TIME).await,
            Some(running) => match running.beside(std::pin::pin!(lane)).await {
                Ok(lane) => lane,
                Err(trouble) => {
                    return Err(TwoStepInput::PrefillEnded(PrefillEnd::Failed(trouble)));
                }
            },
        };
        if let (Ok(_), Some(running)) = (&lane, self.running.take()) {
            running.detach(self.app.tasks());
        }
        lane.map_err(|error| self.refused(error))
    }

    fn refused(&mut self, error: ApiError) -> TwoStepInput {
        TwoStepInput::DecodeRefused(self.note(error, Leg::Decode))
    }

    /// The prefill worker's one token is all of the answer.
    fn answer_prefill(&mut self, attempts: Attempts) -> Result<Lane, ApiError> {
        let leg = self.leg.take().ok_or_else(ApiError::internal)?;
        let PrefillAnswer::Ended { item, .. } = leg.answer else {
            return Err(ApiError::internal());
        };
        let (_, ended) = token_stream(leg.booking.target().worker);
        Ok(Lane {
            stream: ended,
            first: *item,
            prompt_tokens: u32::try_from(self.attempt.tokens().len()).unwrap_or(u32::MAX),
            hit_rate: leg.summary.hit_rate,
            dispatched: leg.summary.dispatched,
            first_token: self.app.clock().now(),
            attempts,
            prefill: None,
            bypassed: false,
            booking: leg.booking,
        })
    }

    /// Keeps what the client is told of a failure, and says what it means.
    fn note(&mut self, error: ApiError, leg: Leg) -> Trouble {
        let trouble = match error.is_overload() {
            true => Trouble::Overloaded,
            false => Trouble::Failed,
        };
        tracing::warn!(request = %self.id, leg = ?leg, ?trouble, status = error.status, "a leg of the request failed");
        self.error = error;
        trouble
    }

    fn failure(&self, why: TwoStepFailure) -> ApiError {
        match why {
            TwoStepFailure::NoPrefill => ApiError::model_not_ready(&self.job.model.name),
            TwoStepFailure::Leg(..) => self.error.clone(),
        }
    }
}
