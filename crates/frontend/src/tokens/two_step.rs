//! A prompt that one token worker computes and another answers.
//!
//! [`TwoStep`] decides what follows what; here it is done: a prefill worker is booked in its own pool and asked for one token, the
//! decode worker is told where the prompt is, and whatever fails on the way is told to [`TwoStep`].
//!
//! What always holds: the booking of each worker ends with its part of the request; a prefill that a decode worker waits for is
//! stopped when that one is given up; a prompt that was computed is fetched by a decode worker even if the client has left, since
//! only that frees it.

use std::collections::VecDeque;
use std::sync::Arc;

use kvasir_host::{Booking, UsageReport};
use kvasir_openai::ApiError;
use kvasir_router::{
    Attempts, DecodeMode, Handoff, Leg, NextStep, Outcome, Overrides, Pin, PoolState, PrefillEnd,
    Trouble, TwoStep, TwoStepAction, TwoStepFailure, TwoStepInput,
};
use kvasir_transport::{PlaneError, TokenStream, token_stream};
use kvasir_types::{
    AttemptError as _, BootstrapAddress, BootstrapRoom, DpRank, FailureCause, FinishReason,
    PrefillResult, RequestId, Time, TokenItem, TransportKind, WorkerId, WorkerRank,
};
use tokio::sync::oneshot;

use crate::App;
use crate::attempts::{self, OpenAttempt, UnplacedRequest};
use crate::models::ServedModel;
use crate::request::ask;
use crate::request::migrate::Migration;
use crate::tokens::job::Job;
use crate::tokens::lane::{self, Lane, TokenAttempt};

/// Where a prompt is that another worker has computed, or computes.
#[derive(Clone, Debug)]
pub(crate) struct Transfer {
    /// Who.
    pub(crate) prefill: WorkerRank,
    /// Where the two meet.
    pub(crate) bootstrap: Option<BootstrapRoom>,
    /// What it said.
    pub(crate) result: Option<PrefillResult>,
}

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
    /// Tokens of the prompt that it found in its cache, where it says so.
    pub(crate) cached_tokens: Option<u32>,
}

/// What prefill workers of a pool said, or where they are met.
enum PrefillAnswer {
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

/// A prefill leg that was opened.
struct PrefillLeg {
    booking: Booking,
    answer: PrefillAnswer,
    summary: PrefillSummary,
}

/// A prefill that runs beside its decode worker. Dropped before [`Self::detach`], it is stopped.
struct RunningPrefill {
    stop: Option<oneshot::Sender<()>>,
    /// Told when it fails.
    failed: oneshot::Receiver<Trouble>,
}

impl RunningPrefill {
    /// The decode worker has it: the rest of its stream is read without anybody waiting for it.
    fn detach(mut self) {
        self.stop = None;
    }

    /// Waits until it fails; for ever if it ends well.
    async fn failure(&mut self) -> Trouble {
        match (&mut self.failed).await {
            Ok(trouble) => trouble,
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for RunningPrefill {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }
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
    attempt: TokenAttempt,
    id: RequestId,
    attempts: Attempts,
    mut migration: Option<Migration>,
) -> Result<Lane, ApiError> {
    let (app, job) = (Arc::clone(attempt.app()), Arc::clone(attempt.job()));
    let pool = app.prefill_pool(&job.model.name);
    let terms = app.options().two_step;
    let state = match &pool {
        Some(pool) => PoolState::Active.with_workers(usize::from(pool.is_ready())),
        None => PoolState::Pending,
    };
    if state != PoolState::Active && (terms.serves_alone || !job.model.links().has_decode()) {
        let mut attempt = attempt;
        return attempt.run(id, attempts, migration, None).await;
    }
    let (mut request, first) = TwoStep::start(terms, state);
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
                    Ok(lane) => return Ok(lane),
                    Err(told) => Some(told),
                }
            }
            TwoStepAction::End(Leg::Prefill) => {
                driver.end_prefill();
                None
            }
            // Its bookings ended with its attempts, and this future is the client's.
            TwoStepAction::End(Leg::Decode) | TwoStepAction::Detach => None,
            TwoStepAction::AnswerPrefill => return driver.answer_prefill(attempts),
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
        let (job, tokens) = (&self.job, self.attempt.tokens());
        let blocks = pool.name_blocks(tokens, job.salt().unwrap_or_default());
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
        };
        let mut attempts = Attempts::new(attempts::limits(&self.app, &pool), true);
        if self.app.options().two_step.falls_back {
            attempts.ask_once_each();
        }
        let unplaced = UnplacedRequest {
            app: &self.app,
            model: &pool,
            arrival: &arrival,
            blocks: &blocks,
            migration: None,
        };
        let opened = attempts::run(unplaced, &mut attempts, &mut opener).await;
        let dispatched = opener.dispatched;
        let (mut booking, answer) = match opened {
            Ok(opened) => opened,
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
                });
                let prompt = u32::try_from(self.attempt.tokens().len()).unwrap_or(u32::MAX);
                let (stop, stopped) = oneshot::channel();
                let (tell, failed) = oneshot::channel();
                let drain = drain(leg.booking, stream, prompt, stopped, tell);
                self.app.tasks().spawn(drain);
                self.running = Some(RunningPrefill {
                    stop: Some(stop),
                    failed,
                });
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
            // A task of its own: a client that leaves does not stop it before the prompt was fetched.
            None => match self.app.tasks().spawn(lane).await {
                Ok(Some(lane)) => lane,
                Ok(None) | Err(_) => {
                    return Err(TwoStepInput::DecodeRefused(Trouble::Cancelled));
                }
            },
            Some(running) => tokio::select! {
                lane = lane => lane,
                trouble = running.failure() => {
                    return Err(TwoStepInput::PrefillEnded(PrefillEnd::Failed(trouble)));
                }
            },
        };
        if let (Ok(_), Some(running)) = (&lane, self.running.take()) {
            running.detach();
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

/// An attempt at a prefill worker.
struct PrefillAttempt<'a> {
    app: &'a Arc<App>,
    pool: &'a Arc<ServedModel>,
    attempt: &'a TokenAttempt,
    /// When the last of them was asked.
    dispatched: Time,
}

impl OpenAttempt for PrefillAttempt<'_> {
    type Answer = PrefillAnswer;
    type Error = PlaneError;

    async fn open(&mut self, booking: &Booking, _: &Attempts) -> Result<PrefillAnswer, PlaneError> {
        let target = booking.target();
        let room = self.room(target);
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

impl PrefillAttempt<'_> {
    /// Where a decode worker meets this one for the request, if it says where it is met. The rank of the prompt follows from the
    /// number of the room.
    fn room(&self, target: WorkerRank) -> Option<BootstrapRoom> {
        let address = self.pool.links().bootstrap(target.worker)?;
        let ranks = u64::from(self.pool.ranks_of(target.worker).max(1));
        let observer = self.app.observer();
        let drawn = (observer.new_request_id().0 >> 65) as u64;
        let room = (drawn / ranks).max(1) * ranks + u64::from(target.rank.0) % ranks;
        Some(BootstrapRoom {
            address,
            room,
            handoff: Some(observer.new_request_id().0),
        })
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

/// Reads a prefill's stream to its end; its booking ends with it. Ends early if it is to stop.
async fn drain(
    mut booking: Booking,
    mut stream: TokenStream,
    prompt: u32,
    stopped: oneshot::Receiver<()>,
    failed: oneshot::Sender<Trouble>,
) {
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
    let stop = async {
        if stopped.await.is_err() {
            std::future::pending().await
        }
    };
    let ended = tokio::select! {
        ended = read => ended,
        () = stop => return,
    };
    match ended {
        Ok(whole) => {
            booking.reported(UsageReport {
                prompt,
                cached: whole.cached_tokens,
                output: 1,
            });
            booking.finish(Outcome::Completed { output_tokens: 1 });
        }
        Err(error) => {
            tracing::warn!(worker = %booking.target(), %error, "prefill failed beside its decode worker");
            let cause = error.failure_cause();
            booking.finish(Outcome::of_failure(cause));
            let trouble = match cause {
                FailureCause::Overloaded => Trouble::Overloaded,
                _ => Trouble::Failed,
            };
            let _ = failed.send(trouble);
        }
    }
}

/// The meeting that an engine puts into what it says of its memory, if it does.
fn bootstrap_in(disaggregated_params: &str) -> Option<BootstrapRoom> {
    let params: serde_json::Value = serde_json::from_str(disaggregated_params).ok()?;
    let port = params.get("bootstrap_port")?.as_u64()?;
    Some(BootstrapRoom {
        address: BootstrapAddress {
            host: params.get("bootstrap_host")?.as_str()?.into(),
            port: u16::try_from(port).ok()?,
        },
        room: params.get("bootstrap_room")?.as_u64()?,
        handoff: None,
    })
}

/// How the router is to place an answer whose prompt comes from elsewhere: what its worker has cached saves nothing, and there is
/// no prompt to compute.
pub(crate) fn decode_overrides(overrides: &mut Overrides) {
    overrides.overlap_score_credit = Some(0.0);
    overrides.overlap_score_weight = None;
    overrides.assume_kv_reuse = Some(false);
    overrides.track_prefill_tokens = Some(false);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_meeting_is_found_in_what_an_engine_says() {
        let said = r#"{"bootstrap_host":"h","bootstrap_port":8998,"bootstrap_room":7,"x":[1]}"#;
        let room = bootstrap_in(said).unwrap();
        assert_eq!((&*room.address.host, room.address.port), ("h", 8998));
        assert_eq!((room.room, room.handoff), (7, None));
        for other in [
            r#""dummy""#,
            "{",
            "null",
            r#"{"bootstrap_host":"h"}"#,
            r#"{"bootstrap_host":"h","bootstrap_port":70000,"bootstrap_room":1}"#,
        ] {
            assert_eq!(bootstrap_in(other), None, "{other}");
        }
    }
}
