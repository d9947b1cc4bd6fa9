//! One router in the real world: runs the brain on the caller's thread and hands its outputs to those who wait.
//!
//! What always holds: `step` is called under one short lock and never across an await; a request that was
//! sent is represented by one [`Booking`], whose end, whichever way it comes, frees it exactly once; a
//! caller that stops waiting is taken out of the queue.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use kvasir_index::{Index, IndexOptions, Matches};
use kvasir_router::{
    Arrival, Input, Lookup, Observation, Outcome, Output, Overlap, PotentialLoad, RouteError,
    Router, RouterConfig, RouterMode, Sent, SessionStep,
};
use kvasir_telemetry::Clock;
use kvasir_trust::{Cause, TrustRecord};
use kvasir_types::{RequestId, Time, WorkerId, WorkerRank};
use tokio::sync::{Notify, oneshot};

use crate::booking::Booking;
use crate::context::HostContext;
use crate::events::EventPool;
use crate::meters::RouterMeters;
use crate::prefill_times::PrefillTimes;
use crate::view::{CacheView, CacheViews, cacheable_tokens};

/// Where the cost of each candidate is logged: `--log-level info,kvasir_router=debug` shows it.
const FORMULAS: &str = "kvasir_router::formula";

/// The timer wakes at least this often; what routing decisions taught the index for less time than this may be
/// believed for so long.
const TICK_EVERY: Duration = Duration::from_secs(1);

/// What a router is made from.
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// The router's settings.
    pub config: RouterConfig,
    /// What its index remembers.
    pub index: IndexOptions,
    /// Whether decisions are recorded for ranks whose cache events are trusted, too
    /// (`--router-predicted-ttl-secs`); for the others they always are.
    pub predict_all: bool,
}

impl HostOptions {
    /// A router whose decisions are recorded for every rank, as far as its settings record any.
    #[must_use]
    pub fn new(config: RouterConfig, index: IndexOptions) -> Self {
        Self {
            config,
            index,
            predict_all: true,
        }
    }

    /// The same, predicting a rank that publishes no events for as long as an approximate index would: what is sent
    /// there is remembered for `ttl`.
    #[must_use]
    pub fn predicting_silent_ranks(mut self, ttl: Duration) -> Self {
        self.predict_all = self.config.records_decisions();
        if !self.predict_all && self.config.needs_index() {
            self.index.predicted_ttl = Some(ttl);
            self.config.router_predicted_ttl_secs = Some(ttl.as_secs_f64());
        }
        self
    }
}

/// The router of some workers, its index, and who waits for it. Models that the same workers serve share it.
#[derive(Debug)]
pub struct RouterHost {
    name: Arc<str>,
    inner: Mutex<Inner>,
    index: Arc<Index>,
    views: CacheViews,
    prefill_times: PrefillTimes,
    needs: Needs,
    predict_all: bool,
    /// Tokens in a block.
    block_size: u32,
    context: HostContext,
    meters: Arc<RouterMeters>,
    /// Where the cache events of workers in this process go.
    events: OnceLock<EventPool>,
    /// The brain wants to be ticked earlier than the timer thinks.
    sooner: Arc<Notify>,
}

/// Which names of a prompt's blocks the router asks for; follows from its settings and never changes.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    /// For the index.
    pub index: bool,
    /// For the ledger, or for the index to remember decisions by.
    pub sequence: bool,
}

impl Needs {
    /// Whether it asks for any.
    #[must_use]
    pub fn any(self) -> bool {
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
    lookup: Lookup,
}

/// What the router says to a request.
type Verdict = Result<Sent, RouteError>;

/// A request that takes a step: most have their verdict when it ends, and need nobody to wait for it.
#[derive(Debug)]
struct Step<'l> {
    id: RequestId,
    /// For looking it up again.
    lookup: &'l Lookup,
    verdict: Option<Verdict>,
}

impl RouterHost {
    /// A router with its timer running. `name` is the model under whose name its series are: the first that its
    /// workers serve.
    #[must_use]
    pub fn start(name: &Arc<str>, options: HostOptions, context: &HostContext) -> Arc<Self> {
        let HostOptions {
            config,
            index,
            predict_all,
        } = options;
        let (needs, block_size) = (Needs::of(&config), config.kv_cache_block_size);
        let meters = RouterMeters::new(&context.metrics, name, config.router_mode);
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
            index: Arc::new(Index::with_options(&index)),
            views: CacheViews::default(),
            prefill_times: PrefillTimes::default(),
            needs,
            predict_all,
            block_size,
            context: context.clone(),
            meters,
            events: OnceLock::new(),
            sooner: Arc::default(),
        });
        let timer = keep_time(Arc::downgrade(&host), Arc::clone(&host.sooner));
        context.tasks.background().spawn(timer);
        host
    }

    /// Applies the cache events of workers in this process on so many threads from now on.
    pub fn start_events(&self, threads: usize) -> io::Result<()> {
        let (name, metrics) = (Arc::clone(&self.name), &self.context.metrics);
        let events = EventPool::start(name, &self.index, metrics, threads)?;
        let _ = self.events.set(events);
        Ok(())
    }

    /// Where the cache events of workers in this process go, if anybody takes them.
    #[must_use]
    pub fn events(&self) -> Option<&EventPool> {
        self.events.get()
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

    /// Tokens in a block.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// How far the index is trusted.
    #[must_use]
    pub fn views(&self) -> &CacheViews {
        &self.views
    }

    /// How fast its ranks compute prompts.
    #[must_use]
    pub fn prefill_times(&self) -> &PrefillTimes {
        &self.prefill_times
    }

    /// Which names of a prompt's blocks it asks for.
    #[must_use]
    pub fn needs(&self) -> Needs {
        self.needs
    }

    /// Its surroundings.
    #[must_use]
    pub fn context(&self) -> &HostContext {
        &self.context
    }

    /// What is counted of it.
    #[must_use]
    pub fn meters(&self) -> &Arc<RouterMeters> {
        &self.meters
    }

    pub(crate) fn predicts_all(&self) -> bool {
        self.predict_all
    }

    /// A rank is there and is judged from now on; `unusable` says why its events cannot be used, if they cannot.
    /// `known` is how it stood before this process was started, if its view was kept.
    pub fn judge(
        &self,
        rank: WorkerRank,
        unusable: Option<Cause>,
        known: Option<TrustRecord>,
    ) -> Arc<CacheView> {
        self.views.join(self, rank, unusable, known)
    }

    /// A worker is gone: its bookings and what was known of its cache go with it.
    pub fn leave(&self, worker: WorkerId) {
        self.tell(Input::Left(worker));
        self.views.leave(worker);
        match self.events() {
            Some(events) => events.worker_gone(worker),
            None => self.index.remove_worker(worker),
        }
    }

    /// What of a prompt counts as cached, and where.
    pub(crate) fn find(&self, lookup: &Lookup, matches: &mut Matches) -> Overlap {
        match lookup.locals.is_empty() {
            true => Overlap::none(),
            false => lookup.find(&self.index, &self.views.trust(), matches),
        }
    }

    /// Remembers where a request went, if the index is to learn from it.
    pub(crate) fn record(&self, now: Time, sent: &Sent, lookup: &Lookup) {
        if sent.record {
            lookup.record(now, sent, &self.index, &self.views.trust());
        }
    }

    /// Chooses a worker for `arrival` and books it; waits while the router holds the request back.
    /// `lookup` is looked up again while it waits. Dropping the future takes it out.
    pub(crate) async fn route(
        self: &Arc<Self>,
        arrival: Arrival,
        lookup: &Lookup,
    ) -> Result<Booking, RouteError> {
        let cacheable = cacheable_tokens(arrival.isl_tokens, self.block_size);
        let mut step = Step {
            id: arrival.id,
            lookup,
            verdict: None,
        };
        let later = self.step_with(Input::Arrived(Box::new(arrival)), Some(&mut step));
        let verdict = match (step.verdict, later) {
            (Some(verdict), _) => verdict,
            (None, Some(later)) => self.await_verdict(step.id, later).await,
            (None, None) => Err(RouteError::DuplicateRequest),
        };
        Ok(Booking::new(self, verdict?, cacheable))
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
    pub fn watch(&self, worker: WorkerId, watcher: &Arc<Notify>) {
        self.lock().watchers.insert(worker, Arc::clone(watcher));
    }

    /// Nobody is woken any more.
    pub fn unwatch(&self, worker: WorkerId) {
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

    /// One step. `request` is the one that takes it; if the step leaves it without a verdict, the verdict
    /// comes later.
    fn step_with(
        &self,
        input: Input,
        mut request: Option<&mut Step<'_>>,
    ) -> Option<oneshot::Receiver<Verdict>> {
        let mut inner = self.lock();
        let mut refresh = Vec::new();
        let clock = &self.context.clock;
        inner.step(clock, input, request.as_deref_mut(), &mut refresh);
        let later = request.and_then(|request| inner.await_later(request));
        // Only then: the timer is a task elsewhere, and waking it costs more than a step.
        let deadline = inner.router.next_deadline();
        let sooner = deadline.is_some_and(|deadline| deadline < inner.ticks_at);
        drop(inner);
        if sooner {
            self.sooner.notify_one();
        }
        for (id, lookup) in refresh {
            let overlap = Some(self.find(&lookup, &mut Matches::new()));
            self.step_with(Input::Refreshed { id, overlap }, None);
        }
        later
    }

    /// What is due by now; how long the timer may sleep then.
    async fn due(&self) -> Duration {
        // Requests come first: what has expired goes in small parts.
        while self.index.expire_some(self.context.clock.now()) {
            tokio::task::yield_now().await;
        }
        let now = self.context.clock.now();
        self.views.tick(now);
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
        mut request: Option<&mut Step<'_>>,
        refresh: &mut Vec<(RequestId, Lookup)>,
    ) {
        let (mut next, mut more) = (Some(input), Vec::new());
        while let Some(input) = next {
            let mut outputs = std::mem::take(&mut self.outputs);
            self.router.step(clock.now(), input, &mut outputs);
            for output in outputs.drain(..) {
                match output {
                    Output::Send(sent) => more.extend(self.deliver(sent, request.as_deref_mut())),
                    Output::Refuse { id, error } => {
                        self.answer(id, Err(error), request.as_deref_mut());
                    }
                    Output::Refresh { id } => {
                        let own = request.as_deref().filter(|request| request.id == id);
                        let waiter = self.waiting.get(&id).map(|waiter| &waiter.lookup);
                        let lookup = own.map(|request| request.lookup).or(waiter);
                        refresh.extend(lookup.map(|lookup| (id, lookup.clone())));
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
    fn answer(&mut self, id: RequestId, verdict: Verdict, own: Option<&mut Step<'_>>) -> bool {
        match own.filter(|own| own.id == id && own.verdict.is_none()) {
            Some(own) => {
                own.verdict = Some(verdict);
                true
            }
            None => {
                let waiter = self.waiting.remove(&id);
                waiter.is_some_and(|waiter| waiter.verdict.send(verdict).is_ok())
            }
        }
    }

    /// Lets a request wait for the verdict that its step did not bring.
    fn await_later(&mut self, request: &Step<'_>) -> Option<oneshot::Receiver<Verdict>> {
        if request.verdict.is_some() {
            return None;
        }
        let (verdict, later) = oneshot::channel();
        let lookup = request.lookup.clone();
        self.waiting.insert(request.id, Waiter { verdict, lookup });
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
    fn deliver(&mut self, sent: Sent, request: Option<&mut Step<'_>>) -> Option<Input> {
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
        let taken = self.answer(id, Ok(sent), request);
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
