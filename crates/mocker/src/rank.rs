//! One engine on the real clock: a task that steps it, waits as long as the step takes, and hands out
//! what came of it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvasir_engine::{
    AdmitError, CacheEvent, Counters, Engine, EngineConfig, EngineRequest, Load, Step,
};
use kvasir_transport::{PlaneError, TokenSink};
use kvasir_types::{RequestId, TokenItem, TokenRequest, WorkerRank};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

/// Commands that wait at one engine; past this it is overloaded.
pub(crate) const COMMANDS_MAX: usize = 4096;
/// Waits shorter than this are saved up: timers are not finer.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);
/// Steps that come later than this are not made up for.
const LAG_MAX: Duration = Duration::from_millis(100);

/// Who wants to know what engines do. Called from the engine's task: must not wait.
pub trait Observer: Send + Sync + 'static {
    /// One change of a rank's cache; `id` counts from 0 and restarts with the engine.
    fn cache_event(&self, rank: WorkerRank, id: u64, event: &CacheEvent);
    /// The step that the last cache events came from is over.
    fn step_ended(&self, rank: WorkerRank) {
        let _ = rank;
    }
    /// A step is over, with or without cache events.
    fn stepped(&self, rank: WorkerRank, step: &Step, load: &Load) {
        let _ = (rank, step, load);
    }
    /// The first token of a request is about to be handed out.
    fn first_token(&self, rank: WorkerRank, request: RequestId) {
        let _ = (rank, request);
    }
    /// A request was handed to a rank.
    fn admitted(&self, rank: WorkerRank, request: &TokenRequest) {
        let _ = (rank, request);
    }
    /// A rank's load has changed.
    fn load(&self, rank: WorkerRank, load: &Load);
    /// A rank began anew with an empty cache and without a word to anybody, as a restarted process does.
    fn restarted(&self, rank: WorkerRank) {
        let _ = rank;
    }
}

/// Nobody does.
impl Observer for () {
    fn cache_event(&self, _: WorkerRank, _: u64, _: &CacheEvent) {}
    fn load(&self, _: WorkerRank, _: &Load) {}
}

/// How an engine is doing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Status {
    /// How busy it is.
    pub load: Load,
    /// Sums since it began.
    pub counters: Counters,
}

/// What a host asks of a rank.
#[derive(Debug)]
pub(crate) enum Command {
    Admit(Box<EngineRequest>, TokenSink),
    /// Empty the cache; answers whether that was possible.
    Clear(oneshot::Sender<bool>),
    /// Make no steps, or make them again.
    Stall(bool),
    /// Forget everything, as if the process had been killed and started again.
    Restart,
}

/// A rank, seen from outside. Clones are one rank.
#[derive(Clone, Debug)]
pub(crate) struct RankHandle {
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) status: Arc<Mutex<Status>>,
}

impl RankHandle {
    pub(crate) fn status(&self) -> Status {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A rank, inside its task.
pub(crate) struct Rank {
    name: WorkerRank,
    config: EngineConfig,
    engine: Engine,
    step: Step,
    live: BTreeMap<RequestId, TokenSink>,
    commands: mpsc::Receiver<Command>,
    status: Arc<Mutex<Status>>,
    observer: Arc<dyn Observer>,
    next_event: u64,
    stalled: bool,
}

impl Rank {
    pub(crate) fn new(
        name: WorkerRank,
        engine: Engine,
        observer: Arc<dyn Observer>,
    ) -> (Self, RankHandle) {
        let (sender, commands) = mpsc::channel(COMMANDS_MAX);
        let status = Arc::new(Mutex::new(Status {
            load: engine.load(),
            counters: *engine.counters(),
        }));
        let handle = RankHandle {
            commands: sender,
            status: Arc::clone(&status),
        };
        let rank = Self {
            name,
            config: engine.config().clone(),
            engine,
            step: Step::default(),
            live: BTreeMap::new(),
            commands,
            status,
            observer,
            next_event: 0,
            stalled: false,
        };
        (rank, handle)
    }

    /// Runs until nobody can ask for anything any more and everything asked is answered.
    pub(crate) async fn run(mut self) {
        let mut due = Instant::now();
        loop {
            while let Ok(command) = self.commands.try_recv() {
                self.obey(command);
            }
            self.cancel_abandoned();
            if self.engine.is_idle() || self.stalled {
                self.report();
                let Some(command) = self.commands.recv().await else {
                    return;
                };
                self.obey(command);
                due = Instant::now();
                continue;
            }
            self.engine.step(&mut self.step);
            due = wait(due, self.step.duration).await;
            self.deliver();
            self.report();
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Admit(admission, sink) => self.admit(*admission, sink),
            Command::Clear(done) => drop(done.send(self.engine.clear_cache())),
            Command::Stall(stalled) => self.stalled = stalled,
            Command::Restart => self.restart(),
        }
    }

    fn admit(&mut self, admission: EngineRequest, sink: TokenSink) {
        let id = admission.id;
        match self.engine.admit(admission) {
            Ok(()) => drop(self.live.insert(id, sink)),
            Err(AdmitError::QueueFull(_)) => sink.fail(PlaneError::Overloaded(self.name.worker)),
            Err(error) => sink.fail(PlaneError::Rejected(error.to_string())),
        }
    }

    fn restart(&mut self) {
        self.live.clear();
        if let Ok(engine) = Engine::new(self.config.clone()) {
            self.engine = engine;
        }
        self.next_event = 0;
        self.observer.restarted(self.name);
    }

    fn cancel_abandoned(&mut self) {
        let engine = &mut self.engine;
        self.live.retain(|id, sink| {
            let gone = sink.is_closed();
            if gone {
                engine.cancel(*id);
            }
            !gone
        });
    }

    fn deliver(&mut self) {
        for event in &self.step.events {
            self.observer.cache_event(self.name, self.next_event, event);
            self.next_event += 1;
        }
        if !self.step.events.is_empty() {
            self.observer.step_ended(self.name);
        }
        self.observer
            .stepped(self.name, &self.step, &self.engine.load());
        for output in &self.step.outputs {
            let Some(sink) = self.live.get(&output.id) else {
                continue;
            };
            if output.cached_tokens.is_some() {
                self.observer.first_token(self.name, output.id);
            }
            sink.push(TokenItem {
                tokens: vec![output.token],
                cached_tokens: output.cached_tokens,
                finish: output.finish,
                ..TokenItem::default()
            });
            if output.finish.is_some() {
                self.live.remove(&output.id);
            }
        }
    }

    fn report(&mut self) {
        let load = self.engine.load();
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = status.load != load;
        *status = Status {
            load,
            counters: *self.engine.counters(),
        };
        drop(status);
        if changed {
            self.observer.load(self.name, &load);
        }
    }
}

/// Waits until `duration` after `due`, and says when that was; short waits are saved up, long delays
/// forgotten.
async fn wait(due: Instant, duration: Duration) -> Instant {
    let now = Instant::now();
    let due = due.max(now.checked_sub(LAG_MAX).unwrap_or(now)) + duration;
    if due >= now + SHORTEST_WAIT {
        tokio::time::sleep_until(due).await;
    } else {
        tokio::task::yield_now().await;
    }
    due
}
