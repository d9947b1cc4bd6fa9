//! A prompt that one engine behind HTTP computes and another answers.
//!
//! Answers one question: what does each of the two get, and what is done when one of them fails? Two families of engines: vLLM with a connector says in
//! its answer where the prompt is, and the other engine is asked afterwards; SGLang's engines meet, and are asked at once. `two_step::drive` decides what follows
//! what.
//!
//! What always holds: what one engine says of its memory goes to an engine and to nobody else; the booking of each engine ends with its part of the request.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use http::StatusCode;
use kvasir_host::{Booking, PromptBlocks, UsageReport};
use kvasir_openai::{
    ApiError, BootstrapFields, Endpoint, Nvext, Scan, bootstrap_leg, is_response_transferable,
    is_transferable,
};
use kvasir_router::{
    AttemptLimits, Attempts, DecodeMode, Handoff, Leg, Outcome, Pin, PoolState, PrefillEnd,
    Trouble, TwoStepFailure, TwoStepInput, TwoStepTerms,
};
use kvasir_types::{
    AttemptError as _, BootstrapRoom, DpRank, FailureCause, Time, Token, TransferRule,
    TransportKind, WorkerId, WorkerRank,
};

use super::kept_prompt::{DecodeLeg, KeptPrompt};
use super::prefill::{ComputedPrompt, PrefillBeside, PromptAttempt};
use super::{EngineAnswer, HttpAttempt, PreparedRequest};
use crate::App;
use crate::attempts::{self, UnplacedRequest};
use crate::http::reply::Reply;
use crate::http::routes::{MESSAGES, RESPONSES};
use crate::models::ServedModel;
use crate::request::bypass;
use crate::request::two_step::{self, Legs, PrefillSummary, RunningPrefill, count_path, path_of};

/// The client's error when an engine refuses its prompt.
const REFUSED: &str = "The engine that computes prompts refuses the request";

/// The status of a request that may have been run and is not sent again.
const MAY_HAVE_RUN: u16 = 502;

/// How a request is computed by two engines.
pub(crate) struct PrefillPlan {
    /// Who computes prompts, if anybody ever did.
    pool: Option<Arc<ServedModel>>,
    state: PoolState,
    terms: TwoStepTerms,
    /// The prompt, as those know it.
    blocks: PromptBlocks,
    pin: Pin,
}

/// On which terms this model's requests are served by two engines. Engines that compute no prompts serve nothing alone.
fn terms(app: &App, model: &ServedModel) -> TwoStepTerms {
    let links = model.links();
    match links.needs_prefill() && links.only(true).is_none() {
        true => TwoStepTerms {
            serves_alone: false,
            falls_back: false,
        },
        false => app.options().two_step,
    }
}

/// The engines that compute prompts for those of a model, if some do now.
pub(super) fn active_pool(app: &App, model: &ServedModel) -> Option<Arc<ServedModel>> {
    let pool = app.prefill_pool(&model.name)?;
    (pool.links().transports().has_http() && pool.is_ready()).then_some(pool)
}

/// Whether a model's engines are asked for prompt and answer at once, and meet.
pub(super) fn meets(model: &ServedModel, pool: Option<&Arc<ServedModel>>) -> bool {
    model.links().needs_prefill() || pool.is_some_and(|pool| pool.links().has_bootstrap())
}

impl PrefillPlan {
    /// For a request; none if one engine computes all of it.
    pub(super) fn of(
        app: &App,
        model: &ServedModel,
        (scan, endpoint): (&Scan<'_>, Endpoint),
        nvext: &Nvext,
        prompt: (&[Token], &str, bool),
    ) -> Option<Box<Self>> {
        let mut plan = Self::by(app, model, is_transferable(scan, endpoint))?;
        plan.name(prompt, nvext);
        Some(plan)
    }

    /// For a request to a route that only engines know; its prompt is not read, so engines are chosen by load.
    pub(super) fn passed(
        app: &App,
        model: &ServedModel,
        path: &str,
        scan: &Scan<'_>,
    ) -> Option<Box<Self>> {
        match path {
            MESSAGES => Self::by(app, model, true),
            RESPONSES => Self::by(app, model, is_response_transferable(scan)),
            _ => None,
        }
    }

    /// `fits`: an engine can answer from a prompt that another has computed.
    fn by(app: &App, model: &ServedModel, fits: bool) -> Option<Box<Self>> {
        let pool = app.prefill_pool(&model.name);
        let pool = pool.filter(|pool| pool.links().transports().has_http());
        let state = match &pool {
            Some(pool) => PoolState::Active.with_workers(usize::from(pool.is_ready())),
            None => PoolState::Pending,
        };
        let (terms, links) = (terms(app, model), model.links());
        if state != PoolState::Active && (terms.serves_alone || !links.has_decode()) {
            return None;
        }
        // An engine that answers several choices fetches the prompt for each, which is gone after the first.
        if !meets(model, pool.as_ref()) && !fits {
            return None;
        }
        Some(Box::new(Self {
            pool,
            state,
            terms,
            blocks: PromptBlocks::none(),
            pin: Pin::default(),
        }))
    }

    /// The prompt, as those know it who compute prompts.
    fn name(&mut self, (tokens, salt, guessed): (&[Token], &str, bool), nvext: &Nvext) {
        if let Some(pool) = &self.pool {
            self.blocks = pool.name_blocks(tokens, salt);
        }
        self.blocks.set_guessed(guessed);
        self.pin = Pin {
            worker: nvext.prefill_worker_id.map(WorkerId),
            rank: nvext.prefill_dp_rank.map(DpRank),
        };
    }
}

/// A prefill leg that was booked.
struct PrefillLeg {
    booking: Booking,
    /// What both engines get, if they meet.
    meeting: Option<Bytes>,
}

/// How the answer's engine gets the prompt.
enum Transfer {
    Kept(KeptPrompt),
    Meeting(Bytes),
}

/// An answer that has begun, of which engine, and what was tried before.
struct Answered {
    answer: EngineAnswer,
    target: WorkerRank,
    booking: Option<Booking>,
    attempts: Attempts,
}

/// One request on its way.
struct Driver {
    ready: Box<PreparedRequest>,
    plan: Box<PrefillPlan>,
    /// Those at the prompt's engines, over all pairs.
    prefill_attempts: Attempts,
    /// Those at the answer's, before the first.
    attempts: Attempts,
    /// An engine may have run a request that is not to be run twice.
    may_have_run: bool,
    leg: Option<PrefillLeg>,
    running: Option<RunningPrefill>,
    transfer: Option<Transfer>,
    summary: Option<PrefillSummary>,
    /// Who may take the prompt over, if not everybody.
    rule: Option<TransferRule>,
    /// What an engine said that refused the prompt beside the other.
    refusal: Arc<OnceLock<StatusCode>>,
    /// What the client is told if nothing else comes.
    error: ApiError,
}

/// Has a request answered by two engines, or by one that does both, and passes the answer on.
pub(super) async fn run(
    ready: Box<PreparedRequest>,
    plan: Box<PrefillPlan>,
) -> Result<Reply, ApiError> {
    let (forward, terms) = (Arc::clone(&ready.forward), plan.terms);
    let limits = attempts::limits(&forward.app, &forward.model);
    let mut state = plan.state;
    let mut driver = Driver {
        prefill_attempts: Attempts::new(limits, true),
        attempts: Attempts::new(limits, forward.is_idempotent()),
        may_have_run: false,
        leg: None,
        running: None,
        transfer: None,
        summary: None,
        rule: None,
        refusal: Arc::default(),
        error: ApiError::unavailable(),
        ready,
        plan,
    };
    // Where no engine does both, another pair is tried.
    let mut pairs_left = match !terms.serves_alone && forward.model.links().needs_prefill() {
        true => limits.retries,
        false => 0,
    };
    let bypassed = match state {
        PoolState::Active if driver.goes_to_whole().await => {
            driver.decode(DecodeMode::Alone).await.ok()
        }
        PoolState::Active => driver.bypass().await,
        _ => None,
    };
    let found = loop {
        if let Some(found) = bypassed {
            break Ok(found);
        }
        match two_step::drive(&mut driver, terms, state).await {
            Err(error) if pairs_left > 0 && driver.may_pair_again(&error) => {
                pairs_left -= 1;
                state = driver.pool_state();
            }
            found => break found,
        }
    };
    let PreparedRequest {
        forward,
        arrival,
        record,
        ..
    } = *driver.ready;
    match found {
        Ok(found) => {
            let place = (found.target, found.booking);
            Ok(forward.reply(found.answer, place, record, (arrival, found.attempts)))
        }
        Err(error) => Err(record.fail(error)),
    }
}

impl Legs for Driver {
    type Answer = Answered;

    async fn prefill(&mut self) -> TwoStepInput {
        let Some(pool) = self.plan.pool.clone() else {
            return TwoStepInput::PrefillRefused(Trouble::Failed);
        };
        let forward = Arc::clone(&self.ready.forward);
        let mut arrival = self.ready.arrival.clone();
        arrival.constraints.transport = Some(TransportKind::Http);
        (arrival.pin, arrival.session) = (self.plan.pin, None);
        let mut attempts = self.prefill_attempts.clone();
        if self.plan.terms.falls_back {
            // Who answers can compute the prompt, too: nobody is asked who has just failed.
            attempts.ask_once_each();
            arrival.dispensable = true;
        }
        let mut opener = PromptAttempt {
            forward: &forward,
            pool: &pool,
            body: None,
            dispatched: forward.app.clock().now(),
        };
        let unplaced = UnplacedRequest {
            app: &forward.app,
            model: &pool,
            arrival: &arrival,
            blocks: &self.plan.blocks,
            migration: None,
        };
        let opened = attempts::run(unplaced, &mut attempts, &mut opener).await;
        let dispatched = opener.dispatched;
        match opened {
            Ok((booking, answer)) => {
                let prompt = arrival.isl_tokens;
                self.prefilled(&pool, booking, answer, (prompt, dispatched))
                    .await
            }
            Err(error) => TwoStepInput::PrefillRefused(self.note(error, Leg::Prefill)),
        }
    }

    fn prefill_sent(&mut self) -> Option<TwoStepInput> {
        let PrefillLeg { booking, meeting } = self.leg.take()?;
        let Some(body) = meeting else {
            let end = match self.transfer {
                Some(_) => PrefillEnd::Ready,
                None => PrefillEnd::NoTransfer,
            };
            let meeting = None;
            self.leg = Some(PrefillLeg { booking, meeting });
            return Some(TwoStepInput::PrefillEnded(end));
        };
        self.transfer = Some(Transfer::Meeting(body.clone()));
        let beside = PrefillBeside {
            pool: self.plan.pool.clone()?,
            booking,
            body,
            refusal: Arc::clone(&self.refusal),
        };
        let forward = Arc::clone(&self.ready.forward);
        self.running = Some(RunningPrefill::new(beside.run(forward)));
        None
    }

    fn end_prefill(&mut self) {
        self.running = None;
        if let Some(leg) = self.leg.take() {
            let outcome = Outcome::Completed { output_tokens: 1 };
            leg.booking.finish(outcome);
        }
    }

    async fn decode(&mut self, mode: DecodeMode) -> Result<Answered, TwoStepInput> {
        if self.may_have_run {
            return Err(TwoStepInput::DecodeRefused(Trouble::Failed));
        }
        let transfer = self.transfer.take().filter(|_| mode != DecodeMode::Alone);
        let forward = Arc::clone(&self.ready.forward);
        let mut attempts = self.attempts.clone();
        let leg = match (transfer, self.summary) {
            (Some(transfer), Some(prefill)) => {
                attempts.begin_transfer();
                transfer.into_leg(prefill).await
            }
            _ => None,
        };
        let prefilled = leg.as_ref().map(|leg| leg.prefill.record());
        self.ready.record.prefilled(prefilled);
        let mut arrival = self.ready.arrival.clone();
        if leg.is_some() {
            let keeps_credit = forward.app.options().bypass.is_some();
            two_step::decode_overrides(&mut arrival.overrides, keeps_credit);
            two_step::constrain(self.rule.as_ref(), &mut arrival.constraints);
        }
        arrival.constraints.allowed = forward.model.links().only(leg.is_none());
        let tokens = arrival.isl_tokens;
        let mut opener = HttpAttempt::new(&forward, tokens, &mut self.ready.record);
        opener.transfer(leg);
        let unplaced = UnplacedRequest {
            app: &forward.app,
            model: &forward.model,
            arrival: &arrival,
            blocks: &self.ready.blocks,
            migration: None,
        };
        let found = {
            let answer = std::pin::pin!(attempts::run(unplaced, &mut attempts, &mut opener));
            match self.running.as_mut() {
                None => Ok(answer.await),
                Some(running) => running.beside(answer).await,
            }
        };
        let found = match found {
            Ok(found) => found,
            Err(trouble) => {
                drop(opener);
                self.blame_prefill();
                return Err(TwoStepInput::PrefillEnded(PrefillEnd::Failed(trouble)));
            }
        };
        let unavailable = opener.into_unavailable();
        attempts.end_transfer();
        let is_met = self.running.is_some();
        let (answer, target, booking) = match (found, unavailable) {
            (Ok((booking, answer)), _) => (answer, booking.target(), Some(booking)),
            (Err(_), Some((answer, target))) if !is_met => (answer, target, None),
            (Err(error), _) => {
                self.may_have_run = !forward.is_idempotent() && error.status == MAY_HAVE_RUN;
                // One that waits for a prompt fails when that does not come, and may say so first.
                if is_met {
                    self.blame_prefill();
                }
                return Err(TwoStepInput::DecodeRefused(self.note(error, Leg::Decode)));
            }
        };
        count_path(forward.app.metrics(), &forward.model.name, path_of(mode));
        // One whose engine refuses the answer waits for nobody.
        if let Some(running) = self.running.take()
            && answer.head.status.is_success()
        {
            running.detach(forward.app.tasks());
        }
        Ok(Answered {
            answer,
            target,
            booking,
            attempts,
        })
    }

    /// Engines say the one token of a prompt again.
    fn answer_prefill(&mut self) -> Result<Answered, ApiError> {
        Err(ApiError::internal())
    }

    fn failure(&mut self, why: TwoStepFailure) -> ApiError {
        match (why, self.refusal.get()) {
            (TwoStepFailure::NoPrefill, _) => {
                ApiError::model_not_ready(&self.ready.forward.model.name)
            }
            (TwoStepFailure::Leg(..), Some(status)) => ApiError::new(status.as_u16(), REFUSED),
            (TwoStepFailure::Leg(..), None) => self.error.clone(),
        }
    }
}

impl Driver {
    /// Whether an engine that computes all of a request is the best one for it, where some need another for the prompt.
    async fn goes_to_whole(&mut self) -> bool {
        let model = &self.ready.forward.model;
        let Some(whole) = model.links().only(true) else {
            return false;
        };
        let arrival = Box::new(self.ready.arrival.clone());
        let placed = model.peek(arrival, &self.ready.blocks).await;
        placed.is_ok_and(|placed| whole.contains(&placed.target.worker))
    }

    /// Has the prompt computed by who answers, if that is better; none if it is to go the usual way.
    async fn bypass(&mut self) -> Option<Answered> {
        let forward = Arc::clone(&self.ready.forward);
        let (app, model) = (&forward.app, &forward.model);
        let terms = app.options().bypass?;
        let pool = self.plan.pool.as_ref()?;
        // A client that names a prefill engine wants it used.
        if self.plan.pin.worker.is_some()
            || model.links().needs_prefill()
            || !forward.is_idempotent()
        {
            return None;
        }
        let mut arrival = self.ready.arrival.clone();
        let judged = bypass::judge(
            &terms,
            (model, pool),
            arrival.clone(),
            &self.ready.blocks,
            || self.plan.blocks.clone(),
        );
        let (target, reason) = judged.await?;
        arrival.pin = Pin {
            worker: Some(target.worker),
            rank: Some(target.rank),
        };
        let limits = AttemptLimits {
            retries: 0,
            ..attempts::limits(app, model)
        };
        let mut attempts = Attempts::new(limits, true);
        let tokens = arrival.isl_tokens;
        let mut opener = HttpAttempt::new(&forward, tokens, &mut self.ready.record);
        let unplaced = UnplacedRequest {
            app,
            model,
            arrival: &arrival,
            blocks: &self.ready.blocks,
            migration: None,
        };
        let found = attempts::run(unplaced, &mut attempts, &mut opener).await;
        let (status, cause) = match found {
            Ok((booking, mut answer)) => {
                let cause = answer.failure().map(|error| error.failure_cause());
                match cause {
                    // Everybody would refuse it.
                    None | Some(FailureCause::Rejected) => {
                        count_path(app.metrics(), &model.name, reason.name());
                        answer.bypassed = true;
                        return Some(Answered {
                            target: booking.target(),
                            answer,
                            booking: Some(booking),
                            attempts,
                        });
                    }
                    Some(cause) => {
                        booking.finish(Outcome::of_failure(cause));
                        (answer.head.status.as_u16(), Some(cause))
                    }
                }
            }
            Err(error) => (error.status, None),
        };
        let request = arrival.id;
        tracing::warn!(%request, worker = %target, %reason, status, ?cause,
            "a prompt did not get past the prefill engines: it takes the usual way");
        None
    }

    /// A prefill engine took the request.
    async fn prefilled(
        &mut self,
        pool: &Arc<ServedModel>,
        mut booking: Booking,
        answer: ComputedPrompt,
        (prompt, dispatched): (u32, Time),
    ) -> TwoStepInput {
        let forward = Arc::clone(&self.ready.forward);
        let now = forward.app.clock().now();
        let target = booking.target();
        let ended = matches!(answer, ComputedPrompt::Ended { .. }).then_some(now);
        let mut summary = PrefillSummary {
            target,
            dispatched,
            ended,
            hit_rate: 0.0,
            predicted_tokens: booking.predicted_tokens(),
            cached_tokens: None,
        };
        let mut meeting = None;
        match answer {
            ComputedPrompt::Placeless => {
                self.error = ApiError::unavailable();
                return TwoStepInput::PrefillRefused(Trouble::Constraint);
            }
            ComputedPrompt::Refused(status) => {
                tracing::warn!(worker = %target, status = status.as_u16(), "a prompt was refused");
                booking.finish(Outcome::Failed);
                self.error = ApiError::new(status.as_u16(), REFUSED);
                return TwoStepInput::PrefillRefused(Trouble::Failed);
            }
            ComputedPrompt::Ended { kept, usage } => {
                match kept {
                    Some(kept) => self.transfer = Some(Transfer::Kept(kept)),
                    None => {
                        tracing::warn!(worker = %target, "a prefill engine does not say where the prompt is: it has no KV connector, or one that needs no such word");
                    }
                }
                let uncached = prompt.saturating_sub(booking.placement().cached_tokens);
                pool.host
                    .prefill_times()
                    .learn(target, uncached, now - dispatched);
                booking.first_token();
                let count = |tokens: u64| u32::try_from(tokens).unwrap_or(u32::MAX);
                summary.cached_tokens = usage.cached_tokens.map(count);
                booking.reported(UsageReport {
                    prompt: count(usage.prompt_tokens),
                    cached: summary.cached_tokens,
                    output: 1,
                });
            }
            ComputedPrompt::Meeting(room) => {
                let ranks = pool.has_ranks(target.worker);
                let rank = ranks.then_some(target.rank.0);
                meeting = forward
                    .edited(move |body| meeting_body(body, &room, rank))
                    .await;
                if meeting.is_none() {
                    return TwoStepInput::PrefillRefused(Trouble::Failed);
                }
            }
        }
        let waited = (now - dispatched, ended.is_some());
        let (tokens, block) = (prompt as usize, pool.block_size);
        summary.hit_rate = pool
            .placements
            .begun(booking.placement(), tokens, block, waited);
        let handoff = match &meeting {
            Some(_) => Handoff::Bootstrap,
            None => Handoff::Answer,
        };
        self.summary = Some(summary);
        self.rule = pool.links().transfer_rule(target.worker);
        self.leg = Some(PrefillLeg { booking, meeting });
        TwoStepInput::PrefillBooked(handoff)
    }

    /// The prompt's engine is not asked again, if another is there.
    fn blame_prefill(&mut self) {
        if let Some(prefill) = self.summary {
            let worker = prefill.target.worker;
            self.prefill_attempts
                .fail(worker, FailureCause::Disconnected);
        }
    }

    /// Whether other engines may do what these did not.
    fn may_pair_again(&self, error: &ApiError) -> bool {
        self.refusal.get().is_none() && error.status >= 500 && !error.is_overload()
    }

    fn pool_state(&self) -> PoolState {
        let pool = self.plan.pool.as_ref();
        let workers = pool.is_some_and(|pool| pool.is_ready());
        PoolState::Active.with_workers(usize::from(workers))
    }

    /// Keeps what the client is told of a failure, and says what it means.
    fn note(&mut self, error: ApiError, leg: Leg) -> Trouble {
        let trouble = match error.is_overload() {
            true => Trouble::Overloaded,
            false => Trouble::Failed,
        };
        let request = self.ready.arrival.id;
        tracing::warn!(%request, leg = ?leg, ?trouble, status = error.status, "a leg of the request failed");
        self.error = error;
        trouble
    }
}

/// What both engines get that meet.
fn meeting_body(body: &Bytes, room: &BootstrapRoom, prefill_rank: Option<u32>) -> Option<Bytes> {
    let fields = BootstrapFields {
        host: &room.address.host,
        port: room.address.port,
        room: room.room,
        prefill_rank,
    };
    bootstrap_leg(body, fields)
}

impl Transfer {
    /// What the answer's engine is sent.
    async fn into_leg(self, prefill: PrefillSummary) -> Option<DecodeLeg> {
        match self {
            Self::Kept(kept) => kept.into_leg(prefill).await,
            Self::Meeting(body) => Some(DecodeLeg {
                body,
                prefill,
                kept: None,
            }),
        }
    }
}
