//! The router's host: runs the brain on the caller's thread and hands its outputs to those who wait.
//!
//! What always holds: `step` is called under one short lock and never across an await; a request that was
//! sent is represented by one [`Booking`], whose end, whichever way it comes, frees it exactly once; a
//! caller that stops waiting is taken out of the queue.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use kvasir_index::{Index, Matches};
use kvasir_router::{
    Arrival, Input, Observation, Outcome, Output, Overlap, PotentialLoad, RouteError, Router,
    RouterConfig, RouterMode, Sent, SessionStep,
};
use kvasir_telemetry::Clock;
use kvasir_transport::Tasks;
use kvasir_types::{LocalHash, RequestId, Time, WorkerId, WorkerRank};
use tokio::sync::{Notify, oneshot};

use crate::pace::Paces;
use crate::picture::{Forecast, Pictures, Report, cacheable_tokens};

/// Where the cost of each candidate is logged: `--log-level info,kvasir_router=debug` shows it.
const FORMULAS: &str = "kvasir_router::formula";

/// The timer wakes at least this often; what routing decisions taught the index for less time than this may be
/// believed for so long.
const TICK_EVERY: Duration = Duration::from_secs(1);

/// The router of some workers, its index, and who waits for it. Models that the same workers serve share it.
#[derive(Debug)]
pub struct RouterHost {
    name: Arc<str>,
    inner: Mutex<Inner>,
    index: Arc<Index>,
    pictures: Pictures,
    paces: Paces,
    needs: Needs,
    /// Tokens in a block.
    block_size: u32,
    clock: Clock,
    /// The brain wants to be ticked earlier than the timer thinks.
    sooner: Arc<Notify>,
}

/// Which names of a prompt's blocks the router asks for; follows from its settings and never changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    /// For the index.
    pub(crate) index: bool,
    /// For the ledger, or for the index to remember decisions by.
    pub(crate) sequence: bool,
}

impl Needs {
    /// Whether it asks for any.
    pub(crate) fn any(self) -> bool {
        self.index || self.sequence
    }

    fn of(config: &RouterConfig) -> Self {
        let index = config.needs_index();
        let ledger = config.router_mode == RouterMode::Kv && config.router_track_active_blocks;
        Self {
            index,
            sequence: index || ledger,
        }
    }
}

#[derive(Debug)]
struct Inner {
    router: Router,
    waiting: HashMap<RequestId, Waiter>,
    /// Who is to look at a worker that is ejected.
    watchers: HashMap<WorkerId, Arc<Notify>>,
    /// Reused by every step.
    outputs: Vec<Output>,
    /// When the timer ticks at the latest.
    ticks_at: Time,
}

#[derive(Debug)]
struct Waiter {
    verdict: oneshot::Sender<Verdict>,
    looked_up: LookedUp,
}

/// What the router says to a request.
type Verdict = Result<Sent, RouteError>;

/// A request that takes a step: most have their verdict when it ends, and need nobody to wait for it.
#[derive(Debug)]
struct Asking {
    id: RequestId,
    looked_up: LookedUp,
    verdict: Option<Verdict>,
}

/// What was looked up for a request, for looking it up again.
#[derive(Clone, Debug)]
pub(crate) struct LookedUp {
    /// The prompt's blocks.
    pub(crate) prompt: Arc<[LocalHash]>,
    /// Our own decisions count for every rank.
    pub(crate) routed: bool,
}

impl RouterHost {
    /// A host for a router of `config`, with its timer running in `tasks`. `name` is the model under whose name its
    /// series are: the first that its workers serve.
    pub fn start(
        name: &Arc<str>,
        config: RouterConfig,
        index: Arc<Index>,
        clock: Clock,
        tasks: &Tasks,
    ) -> Arc<Self> {
        let (needs, block_size) = (Needs::of(&config), config.kv_cache_block_size);
        let inner = Inner {
            router: Router::new(config),
            waiting: HashMap::new(),
            watchers: HashMap::new(),
            outputs: Vec::new(),
            ticks_at: Time::ZERO,
        };
        let host = Arc::new(Self {
            name: Arc::clone(name),
            inner: Mutex::new(inner),
            index,
            pictures: Pictures::default(),
            paces: Paces::default(),
            needs,
            block_size,
            clock,
            sooner: Arc::default(),
        });
        let timer = keep_time(Arc::downgrade(&host), Arc::clone(&host.sooner));
        tasks.background().spawn(timer);
        host
    }

    /// The model under whose name its series are.
    #[must_use]
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// The index that this router asks.
    #[must_use]
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// How far the index is believed.
    pub(crate) fn pictures(&self) -> &Pictures {
        &self.pictures
    }

    /// How fast its ranks compute prompts.
    pub(crate) fn paces(&self) -> &Paces {
        &self.paces
    }

    /// Which names of a prompt's blocks it asks for.
    pub(crate) fn needs(&self) -> Needs {
        self.needs
    }

    /// Chooses a worker for `arrival` and books it; waits while the router holds the request back.
    /// `looked_up` is looked up again while it waits. Dropping the future takes it out.
    pub(crate) async fn route(
        self: &Arc<Self>,
        arrival: Arrival,
        looked_up: LookedUp,
    ) -> Result<Booking, RouteError> {
        let cacheable = cacheable_tokens(arrival.isl_tokens, self.block_size);
        let mut asking = Asking {
            id: arrival.id,
            looked_up,
            verdict: None,
        };
        let later = self.step_with(Input::Arrived(Box::new(arrival)), Some(&mut asking));
        let verdict = match (asking.verdict, later) {
            (Some(verdict), _) => verdict,
            (None, Some(later)) => self.await_verdict(asking.id, later).await,
            (None, None) => Err(RouteError::DuplicateRequest),
        };
        let sent = verdict?;
        Ok(Booking {
            host: Arc::clone(self),
            sent,
            cacheable,
            forecast: None,
            finished: false,
        })
    }

    async fn await_verdict(&self, id: RequestId, later: oneshot::Receiver<Verdict>) -> Verdict {
        let mut guard = Waiting {
            host: self,
            id,
            done: false,
        };
        let verdict = later.await.unwrap_or(Err(RouteError::DuplicateRequest));
        guard.done = true;
        verdict
    }

    /// Tells the router of anything else that happened.
    pub fn tell(&self, input: Input) {
        self.step_with(input, None);
    }

    /// From now on `watcher` is woken when this worker is ejected.
    pub(crate) fn watch(&self, worker: WorkerId, watcher: &Arc<Notify>) {
        self.lock().watchers.insert(worker, Arc::clone(watcher));
    }

    /// Nobody is woken any more.
    pub(crate) fn unwatch(&self, worker: WorkerId) {
        self.lock().watchers.remove(&worker);
    }

    /// Asks the router something, between two steps.
    pub fn ask<T>(&self, question: impl FnOnce(&Router) -> T) -> T {
        question(&self.lock().router)
    }

    /// How loaded each rank is now.
    pub fn loads(&self, now: Time, out: &mut Vec<PotentialLoad>) {
        self.lock()
            .router
            .potential_loads(now, 0, &Overlap::none(), &[], out);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One step. `asking` is the request that takes it; if the step leaves it without a verdict, the verdict
    /// comes later.
    fn step_with(
        &self,
        input: Input,
        mut asking: Option<&mut Asking>,
    ) -> Option<oneshot::Receiver<Verdict>> {
        let mut inner = self.lock();
        let mut refresh = Vec::new();
        inner.step(&self.clock, input, asking.as_deref_mut(), &mut refresh);
        let later = asking.and_then(|asking| inner.await_later(asking));
        // Only then: the timer is a task elsewhere, and waking it costs more than a step.
        let deadline = inner.router.next_deadline();
        let sooner = deadline.is_some_and(|deadline| deadline < inner.ticks_at);
        drop(inner);
        if sooner {
            self.sooner.notify_one();
        }
        for (id, LookedUp { prompt, routed }) in refresh {
            let mut matches = Matches::new();
            self.index.find(&prompt, &mut matches);
            let overlap = Some(self.pictures.overlap(&matches, routed));
            self.step_with(Input::Refreshed { id, overlap }, None);
        }
        later
    }

    /// What is due by now; how long the timer may sleep then.
    async fn due(&self) -> Duration {
        // Requests come first: what has expired goes in small parts.
        while self.index.expire_some(self.clock.now()) {
            tokio::task::yield_now().await;
        }
        let now = self.clock.now();
        self.pictures.tick(now);
        let expiry = self.index.next_expiry();
        self.lock().wait(now, expiry)
    }
}

/// The timer: goes on for as long as somebody holds the host.
async fn keep_time(host: Weak<RouterHost>, sooner: Arc<Notify>) {
    loop {
        let Some(held) = host.upgrade() else {
            return;
        };
        let wait = held.due().await;
        drop(held);
        tokio::select! {
            () = tokio::time::sleep(wait) => {
                if let Some(host) = host.upgrade() {
                    host.tell(Input::Tick);
                }
            }
            () = sooner.notified() => {}
        }
    }
}

impl Inner {
    /// How long the timer may sleep at `now` if the index has something to forget at `expiry`; whoever needs it
    /// sooner wakes it.
    fn wait(&mut self, now: Time, expiry: Option<Time>) -> Duration {
        let deadlines = [self.router.next_deadline(), expiry, Some(now + TICK_EVERY)];
        self.ticks_at = deadlines.into_iter().flatten().min().unwrap_or(now);
        self.ticks_at - now
    }

    /// One step, and those that follow from it: a verdict that nobody takes is a request that ended.
    fn step(
        &mut self,
        clock: &Clock,
        input: Input,
        mut asking: Option<&mut Asking>,
        refresh: &mut Vec<(RequestId, LookedUp)>,
    ) {
        let (mut next, mut more) = (Some(input), Vec::new());
        while let Some(input) = next {
            let mut outputs = std::mem::take(&mut self.outputs);
            self.router.step(clock.now(), input, &mut outputs);
            for output in outputs.drain(..) {
                match output {
                    Output::Send(sent) => more.extend(self.deliver(sent, asking.as_deref_mut())),
                    Output::Refuse { id, error } => {
                        self.answer(id, Err(error), asking.as_deref_mut());
                    }
                    Output::Refresh { id } => {
                        let own = asking.as_deref().filter(|asking| asking.id == id);
                        let waiter = self.waiting.get(&id).map(|waiter| &waiter.looked_up);
                        let prompt = own.map(|asking| &asking.looked_up).or(waiter);
                        refresh.extend(prompt.map(|prompt| (id, prompt.clone())));
                    }
                    Output::Queued { id, depth } => tracing::debug!(%id, depth, "request waits"),
                    Output::CloseSession { .. } => {}
                    Output::Observe(observation) => {
                        observe(&observation);
                        self.wake(&observation);
                    }
                }
            }
            self.outputs = outputs;
            next = more.pop();
        }
    }

    /// Gives a verdict to whoever asked for it. Says whether somebody took it.
    fn answer(&mut self, id: RequestId, verdict: Verdict, asking: Option<&mut Asking>) -> bool {
        match asking.filter(|asking| asking.id == id && asking.verdict.is_none()) {
            Some(asking) => {
                asking.verdict = Some(verdict);
                true
            }
            None => {
                let waiter = self.waiting.remove(&id);
                waiter.is_some_and(|waiter| waiter.verdict.send(verdict).is_ok())
            }
        }
    }

    /// Lets a request wait for the verdict that its step did not bring.
    fn await_later(&mut self, asking: &Asking) -> Option<oneshot::Receiver<Verdict>> {
        if asking.verdict.is_some() {
            return None;
        }
        let (verdict, later) = oneshot::channel();
        let looked_up = asking.looked_up.clone();
        self.waiting
            .insert(asking.id, Waiter { verdict, looked_up });
        Some(later)
    }

    /// Whoever watches a worker that is ejected looks at it now.
    fn wake(&self, observation: &Observation) {
        if let Observation::Down { worker, down: true } = observation
            && let Some(watcher) = self.watchers.get(worker)
        {
            watcher.notify_one();
        }
    }

    /// Gives a booking to the one who waits for it; if nobody does, it is to be freed.
    fn deliver(&mut self, sent: Sent, asking: Option<&mut Asking>) -> Option<Input> {
        if tracing::enabled!(target: FORMULAS, tracing::Level::DEBUG)
            && let Some(decision) = self.router.explain(sent.id)
        {
            for formula in decision.formulas() {
                tracing::debug!(target: FORMULAS, request = %sent.id, "{formula}");
            }
        }
        if sent.session != SessionStep::None {
            tracing::warn!(request = %sent.id, session = ?sent.session,
                "no worker serves session_control: opening and closing are ignored, bind works");
        }
        let (id, target) = (sent.id, sent.target);
        let taken = self.answer(id, Ok(sent), asking);
        let ended = Input::Finished {
            id,
            on: Some(target),
            outcome: Outcome::Cancelled,
        };
        (!taken).then_some(ended)
    }
}

fn observe(observation: &Observation) {
    match observation {
        Observation::Busy { worker, busy: true } => tracing::info!(%worker, "worker is busy"),
        Observation::Busy { worker, .. } => tracing::info!(%worker, "worker is free again"),
        Observation::Down { worker, down: true } => tracing::warn!(%worker, "worker ejected"),
        Observation::Down { worker, .. } => tracing::info!(%worker, "worker readmitted"),
        Observation::Expired { id, target } => {
            tracing::warn!(%id, %target, "booking expired: nothing was heard of it for too long");
        }
        other => tracing::debug!(?other, "router"),
    }
}

/// A request that waits for its worker.
struct Waiting<'h> {
    host: &'h RouterHost,
    id: RequestId,
    done: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.done {
            let outcome = Outcome::Cancelled;
            self.host.tell(Input::Finished {
                id: self.id,
                on: None,
                outcome,
            });
            self.host.lock().waiting.remove(&self.id);
        }
    }
}

/// A request's place on a worker. Dropped without an end, it counts as cancelled.
#[derive(Debug)]
pub struct Booking {
    host: Arc<RouterHost>,
    sent: Sent,
    /// Most tokens of the prompt that an engine can find cached.
    cacheable: u32,
    /// What was foretold about it, to be compared with what comes.
    forecast: Option<Forecast>,
    finished: bool,
}

impl Booking {
    /// Where the request goes.
    #[must_use]
    pub fn target(&self) -> WorkerRank {
        self.sent.target
    }

    /// What the router decided.
    #[must_use]
    pub fn sent(&self) -> &Sent {
        &self.sent
    }

    /// Tokens of the prompt that are expected in the worker's cache, as its engine would report them.
    pub(crate) fn predicted_tokens(&self) -> u32 {
        self.sent.cached_tokens.min(self.cacheable)
    }

    /// The first tokens came.
    pub fn first_token(&self) {
        if let Some(forecast) = &self.forecast {
            forecast.begun(self.host.clock.now());
        }
        self.host.tell(Input::FirstToken { id: self.sent.id });
    }

    /// Its prompt is likely computed, though nothing has come.
    pub(crate) fn likely_begun(&self) {
        self.host.tell(Input::Prefilled { id: self.sent.id });
    }

    /// Keeps what was foretold until [`Self::reported`] compares it.
    pub(crate) fn foretell(&mut self, forecast: Forecast) {
        self.forecast = Some(forecast);
    }

    /// The engine said what it found.
    pub(crate) fn reported(&mut self, report: Report) {
        if let Some(forecast) = self.forecast.take() {
            forecast.answered(self.host.clock.now(), report);
        }
    }

    /// `generated` tokens came until now.
    pub fn tokens(&self, generated: u32) {
        self.host.tell(Input::Tokens {
            id: self.sent.id,
            generated,
        });
    }

    /// The attempt ended.
    pub fn finish(mut self, outcome: Outcome) {
        self.end(outcome);
    }

    fn end(&mut self, outcome: Outcome) {
        if !std::mem::replace(&mut self.finished, true) {
            let (id, on) = (self.sent.id, Some(self.sent.target));
            self.host.tell(Input::Finished { id, on, outcome });
        }
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.end(Outcome::Cancelled);
    }
}
