//! What is needed to resume an answer at another worker, and how long its worker may be silent.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use kvasir_router::{Attempts, GiveUp, NextStep};
use kvasir_types::{FailureCause, RequestId, Token, WorkerId};
use tokio::time::{Instant, Sleep};

use crate::App;
use crate::attempts;
use crate::request::migrate::{self, MigrationOptions, ResumeObstacle};
use crate::tokens::job::Job;
use crate::tokens::lane::{BrokenAnswer, Lane};

/// The tokens of one choice, as long as it could be resumed.
pub(super) struct ChoiceResumeState {
    options: MigrationOptions,
    prompt: Arc<[Token]>,
    /// Every token that came, or why they are not kept.
    generated: Result<Vec<Token>, ResumeObstacle>,
    attempts: Attempts,
    /// Tokens that had come when another worker was last asked for the rest.
    resumed_at: usize,
}

impl ChoiceResumeState {
    /// Of choice `index`, which `lane` begins.
    pub(super) fn new(index: u32, lane: &Lane, app: &App, job: &Job) -> Self {
        let options = app.options().migration;
        let legal = job
            .obstacle()
            .map_or(Ok(Vec::new()), |why| Err(ResumeObstacle::NotLegal(why)));
        let generated = match options.limit_of(&job.model) {
            0 => Err(ResumeObstacle::Limit),
            _ => legal,
        };
        let prompt = job.prompt_of(index).filter(|_| generated.is_ok());
        let mut state = Self {
            options,
            prompt: prompt.cloned().unwrap_or_else(|| Arc::from([])),
            generated,
            attempts: lane.attempts.clone(),
            resumed_at: 0,
        };
        state.add(&[], app, &job.model.name);
        state
    }

    /// More tokens came.
    pub(super) fn add(&mut self, tokens: &[Token], app: &App, model: &str) {
        let Ok(generated) = &mut self.generated else {
            return;
        };
        generated.extend_from_slice(tokens);
        let since = generated.len().saturating_sub(self.resumed_at);
        self.attempts
            .progressed(u32::try_from(since).unwrap_or(u32::MAX));
        let count = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
        if self
            .options
            .is_too_long(count(self.prompt.len()), count(generated.len()))
        {
            self.generated = Err(ResumeObstacle::TooLong);
            migrate::count_too_long(app.observer(), model);
        }
    }

    /// Its worker failed: what another one is asked.
    pub(super) fn after_failure(
        &mut self,
        id: RequestId,
        worker: WorkerId,
        cause: FailureCause,
    ) -> Result<BrokenAnswer, ResumeObstacle> {
        let generated = self.generated.as_ref().map_err(|obstacle| *obstacle)?;
        match self.attempts.fail(worker, cause).1 {
            NextStep::TryNext => self.resumed_at = generated.len(),
            NextStep::GiveUp(GiveUp::FailedTwice) => {
                attempts::warn_failed_twice(id, &self.attempts, worker);
                return Err(ResumeObstacle::FailedTwice);
            }
            NextStep::GiveUp(_) => return Err(ResumeObstacle::Limit),
        }
        Ok(BrokenAnswer {
            id,
            tokens: [&self.prompt, &**generated].concat().into(),
            generated: u32::try_from(generated.len()).unwrap_or(u32::MAX),
            attempts: self.attempts.clone(),
        })
    }

    /// Another worker has taken over.
    pub(super) fn resumed(&mut self, attempts: Attempts) {
        self.attempts = attempts;
    }
}

/// How long a worker may be silent. Its timer is not reset by items, so that an item costs a look at the time and no more.
pub(super) struct SilenceTimer {
    limit: Duration,
    received: Instant,
    timer: Pin<Box<Sleep>>,
}

impl SilenceTimer {
    pub(super) fn new(limit: Duration) -> Self {
        Self {
            limit,
            received: Instant::now(),
            timer: Box::pin(tokio::time::sleep(limit)),
        }
    }

    /// An item came.
    pub(super) fn reset(&mut self) {
        self.received = Instant::now();
    }

    /// Ready when it has been silent for too long.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            std::task::ready!(self.timer.as_mut().poll(cx));
            let ends = self.received + self.limit;
            if Instant::now() >= ends {
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(ends);
        }
    }
}
