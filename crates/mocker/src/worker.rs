//! A worker: its ranks, and how requests reach them.

use std::fmt;
use std::sync::Arc;

use kvasir_engine::{ConfigError, Engine, EngineConfig, EngineRequest, OutputTokens, Prompt};
use kvasir_hash::Scope;
use kvasir_tasks::Tasks;
use kvasir_transport::{Call, MemoryPlane, PlaneError, TokenSink, WorkerInbox};
use kvasir_types::{DpRank, TokenRequest, WorkerId, WorkerRank};
use tokio::sync::{mpsc, oneshot};

use crate::rank::{Command, Rank, RankHandle};
use crate::{Observer, Status};

/// What a worker answers: the tokens, before the request's own limits are applied.
pub type AnswerFn = dyn Fn(&TokenRequest) -> OutputTokens + Send + Sync;

/// An answer that follows from the request's seed, or else from its id: tokens below `vocabulary`.
#[must_use]
pub fn seeded_answer(vocabulary: u32) -> Arc<AnswerFn> {
    Arc::new(move |request| OutputTokens::Seeded {
        seed: request.sampling.seed.unwrap_or(request.id.0 as u64),
        vocabulary,
    })
}

/// A worker to be.
#[derive(Clone)]
pub struct WorkerOptions {
    /// Each of its ranks.
    pub engine: EngineConfig,
    /// How many ranks; at least 1.
    pub ranks: u32,
    /// What it answers.
    pub answer: Arc<AnswerFn>,
}

impl fmt::Debug for WorkerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerOptions")
            .field("engine", &self.engine)
            .field("ranks", &self.ranks)
            .finish_non_exhaustive()
    }
}

/// A running mock engine. Clones are one worker; when the last one is dropped and everything asked is
/// answered, its tasks end.
#[derive(Clone)]
pub struct Worker {
    id: WorkerId,
    ranks: Arc<[RankHandle]>,
    options: Arc<WorkerOptions>,
    observer: Arc<dyn Observer>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Worker").field(&self.id).finish()
    }
}

impl Worker {
    /// Starts the engines of worker `id`.
    pub fn spawn(
        tasks: &Tasks,
        id: WorkerId,
        options: WorkerOptions,
        observer: &Arc<dyn Observer>,
    ) -> Result<Self, ConfigError> {
        let mut ranks = Vec::new();
        for rank in 0..options.ranks.max(1) {
            let engine = Engine::new(options.engine.clone())?;
            let name = WorkerRank {
                worker: id,
                rank: DpRank(rank),
            };
            let (rank, handle) = Rank::new(name, engine, Arc::clone(observer));
            tasks.spawn(rank.run());
            ranks.push(handle);
        }
        Ok(Self {
            id,
            ranks: ranks.into(),
            options: Arc::new(options),
            observer: Arc::clone(observer),
        })
    }

    /// Who it is.
    #[must_use]
    pub fn id(&self) -> WorkerId {
        self.id
    }

    /// What it is made of.
    #[must_use]
    pub fn options(&self) -> &WorkerOptions {
        &self.options
    }

    /// How each rank is doing.
    pub fn status(&self) -> impl ExactSizeIterator<Item = Status> {
        self.ranks.iter().map(RankHandle::status)
    }

    /// Takes a request; its tokens, or why there are none, go to `sink`.
    pub fn submit(&self, request: &TokenRequest, sink: TokenSink) {
        self.enqueue(request, sink, false);
    }

    /// The same of a request whose prompt another engine has computed.
    pub fn submit_transferred(&self, request: &TokenRequest, sink: TokenSink) {
        self.enqueue(request, sink, true);
    }

    fn enqueue(&self, request: &TokenRequest, sink: TokenSink, transferred: bool) {
        let Some(rank) = self.ranks.get(request.rank.0 as usize) else {
            let ranks = self.ranks.len();
            let error = format!(
                "rank {} is asked for; this worker has {ranks}",
                request.rank
            );
            return sink.fail(PlaneError::Rejected(error));
        };
        let name = WorkerRank {
            worker: self.id,
            rank: request.rank,
        };
        self.observer.admitted(name, request);
        let mut admission = self.admission(request);
        if transferred {
            admission.prompt = admission.prompt.transferred();
        }
        let command = Command::Admit(Box::new(admission), sink);
        match rank.commands.try_send(command) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(Command::Admit(_, sink))) => {
                sink.fail(PlaneError::Overloaded(self.id));
            }
            Err(_) => {} // the engine is gone: its dropped sink says so
        }
    }

    fn admission(&self, request: &TokenRequest) -> EngineRequest {
        let engine = &self.options.engine;
        let scope = Scope {
            lora: request.lora.as_deref().unwrap_or_default(),
            salt: request.salt.as_deref().unwrap_or_default(),
            ..Scope::default()
        };
        let prompt = Prompt::new(&request.tokens, engine.block_size, &scope);
        EngineRequest {
            id: request.id,
            prompt: match engine.event_tokens {
                true => prompt.keep_tokens(Arc::clone(&request.tokens)),
                false => prompt,
            },
            output: limit(&(self.options.answer)(request), request),
            max_tokens: request.sampling.max_tokens,
            priority: request.priority,
            announce_hits: false,
        }
    }

    /// Empties the cache of every rank; false if one has requests.
    pub async fn clear_cache(&self) -> bool {
        let mut all = true;
        for rank in self.ranks.iter() {
            let (done, answer) = oneshot::channel();
            let sent = rank.commands.send(Command::Clear(done)).await.is_ok();
            all &= sent && answer.await.unwrap_or(false);
        }
        all
    }

    /// Makes no more steps, or makes them again.
    pub async fn stall(&self, stalled: bool) {
        self.command(|| Command::Stall(stalled)).await;
    }

    /// Forgets requests and cache, as a killed and restarted process does: readers see a disconnection.
    pub async fn restart(&self) {
        self.command(|| Command::Restart).await;
    }

    async fn command(&self, command: impl Fn() -> Command) {
        for rank in self.ranks.iter() {
            let _ = rank.commands.send(command()).await;
        }
    }
}

/// Applies the request's stop tokens to a given answer.
fn limit(answer: &OutputTokens, request: &TokenRequest) -> OutputTokens {
    let sampling = &request.sampling;
    match answer {
        OutputTokens::Given(tokens) if sampling.ignore_eos => {
            OutputTokens::Repeated(Arc::clone(tokens))
        }
        OutputTokens::Given(tokens) => {
            let stops = |at: usize| {
                at + 1 >= sampling.min_tokens as usize
                    && tokens
                        .get(at)
                        .is_some_and(|t| sampling.stop_tokens.contains(t))
            };
            match (0..tokens.len()).find(|at| stops(*at)) {
                Some(last) => OutputTokens::Given(tokens.iter().take(last + 1).copied().collect()),
                None => OutputTokens::Given(Arc::clone(tokens)),
            }
        }
        OutputTokens::Seeded { .. } | OutputTokens::Repeated(_) => answer.clone(),
    }
}

/// A worker with a place on the request plane.
#[derive(Clone, Debug)]
pub struct TokenWorker {
    worker: Worker,
}

impl TokenWorker {
    /// Starts worker `id` and joins `plane`. It leaves the plane when `tasks` drain, and ends when
    /// everything it took is answered.
    pub fn spawn(
        tasks: &Tasks,
        plane: &MemoryPlane,
        id: WorkerId,
        options: WorkerOptions,
        observer: &Arc<dyn Observer>,
    ) -> Result<Self, ConfigError> {
        let worker = Worker::spawn(tasks, id, options, observer)?;
        let inbox = plane.join(id);
        tasks.spawn(forward(tasks.clone(), inbox, worker.clone()));
        Ok(Self { worker })
    }

    /// The worker itself.
    #[must_use]
    pub fn worker(&self) -> &Worker {
        &self.worker
    }
}

async fn forward(tasks: Tasks, mut inbox: WorkerInbox, worker: Worker) {
    loop {
        tokio::select! {
            biased;
            () = tasks.draining() => break,
            call = inbox.next() => match call {
                Some(Call { request, reply }) => worker.submit(&request, reply),
                None => return,
            },
        }
    }
    while let Some(Call { request, reply }) = inbox.try_next() {
        worker.submit(&request, reply);
    }
}
