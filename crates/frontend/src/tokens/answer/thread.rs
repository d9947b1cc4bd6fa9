//! The thread of an answer: what it takes to go on with it at another worker, and when its worker is silent.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use kvasir_router::Outcome;
use kvasir_types::{RequestId, Token, WorkerId};
use tokio::time::{Instant, Sleep};

use crate::App;
use crate::request::migrate::{self, MigrationOptions, Stay};
use crate::tokens::job::Job;
use crate::tokens::lane::{Broken, Lane};

/// What one choice has said, as long as it could go on elsewhere.
pub(super) struct Thread {
    options: MigrationOptions,
    prompt: Arc<[Token]>,
    /// Every token that came, or why they are not kept.
    said: Result<Vec<Token>, Stay>,
    failed: Vec<WorkerId>,
    moves: u32,
}

impl Thread {
    /// Of choice `index`, which `lane` begins.
    pub(super) fn new(index: u32, lane: &Lane, app: &App, job: &Job) -> Self {
        let options = app.options().migration;
        let legal = job
            .obstacle()
            .map_or(Ok(Vec::new()), |why| Err(Stay::NotLegal(why)));
        let said = match options.limit {
            0 => Err(Stay::Limit),
            _ => legal,
        };
        let prompt = job.prompt_of(index).filter(|_| said.is_ok());
        let mut thread = Self {
            options,
            prompt: prompt.cloned().unwrap_or_else(|| Arc::from([])),
            said,
            failed: lane.failed.clone(),
            moves: 0,
        };
        thread.add(&[], app, &job.model.name);
        thread
    }

    /// More tokens came.
    pub(super) fn add(&mut self, tokens: &[Token], app: &App, model: &str) {
        let Ok(said) = &mut self.said else {
            return;
        };
        said.extend_from_slice(tokens);
        let count = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
        if self
            .options
            .is_too_long(count(self.prompt.len()), count(said.len()))
        {
            self.said = Err(Stay::TooLong);
            migrate::count_too_long(app.observer(), model);
        }
    }

    /// Its worker failed: what another one is asked.
    pub(super) fn go_on(
        &mut self,
        id: RequestId,
        worker: WorkerId,
        outcome: Outcome,
    ) -> Result<Broken, Stay> {
        let said = self.said.as_ref().map_err(|stay| *stay)?;
        let tries = self.options.limit.saturating_sub(self.moves);
        if tries == 0 {
            return Err(Stay::Limit);
        }
        self.failed.push(worker);
        Ok(Broken {
            id,
            tokens: [&self.prompt, &**said].concat().into(),
            generated: u32::try_from(said.len()).unwrap_or(u32::MAX),
            failed: self.failed.clone(),
            outcome,
            tries,
        })
    }

    /// Another worker goes on, after `tried` were asked and those in `failed` have failed it.
    pub(super) fn moved(&mut self, tried: u32, failed: Vec<WorkerId>) {
        self.moves = self.moves.saturating_add(tried);
        self.failed = failed;
    }
}

/// How long a worker may be silent. Its timer runs on, so that an item costs a look at the time and no more.
pub(super) struct Silence {
    limit: Duration,
    heard: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Silence {
    pub(super) fn new(limit: Duration) -> Self {
        Self {
            limit,
            heard: Instant::now(),
            timer: Box::pin(tokio::time::sleep(limit)),
        }
    }

    /// The worker was heard.
    pub(super) fn heard(&mut self) {
        self.heard = Instant::now();
    }

    /// Ready when it has been silent for too long.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            std::task::ready!(self.timer.as_mut().poll(cx));
            let ends = self.heard + self.limit;
            if Instant::now() >= ends {
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(ends);
        }
    }
}
