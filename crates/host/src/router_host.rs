//! One router in the real world: runs the brain on the caller's thread and hands its outputs to those who wait.
//!
//! What always holds: `step` is called under one short lock and never across an await; a request that was
//! sent is represented by one [`Booking`], whose end, whichever way it comes, frees it exactly once; a
//! caller that stops waiting is taken out of the queue.

mod brain;
mod options;
mod presumed;

pub use options::{HostOptions, Needs};

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use kvasir_index::{Index, Match, Matches};
use kvasir_router::{
    Arrival, Input, LearnedRecord, Lookup, Outcome, Overlap, Placement, PotentialLoad, RouteError,
    Router,
};
use kvasir_trust::{Cause, TrustRecord};
use kvasir_types::{RequestId, SequenceHash, Time, WorkerId, WorkerRank};
use tokio::sync::{Notify, oneshot};

use crate::booking::Booking;
use crate::context::HostContext;
use crate::events::LocalStreams;
use crate::meters::RouterMeters;
use crate::prefill_times::PrefillTimes;
use crate::remote_index::RemoteIndex;
use crate::replica::Replicas;
use crate::session_link::SessionLinks;
use crate::shared_cache::SharedCache;
use crate::view::{CacheView, CacheViews, cacheable_tokens};
use brain::{Brain, Step, Verdict};

/// The router of some workers, its index, and who waits for it. Models that the same workers serve share it.
#[derive(Debug)]
pub struct RouterHost {
    name: Arc<str>,
    brain: Mutex<Brain>,
    index: Arc<Index>,
    views: CacheViews,
    prefill_times: PrefillTimes,
    needs: Needs,
    predict_all: bool,
    /// What workers hold is known from their events.
    by_events: bool,
    /// Tokens in a block.
    block_size: u32,
    context: HostContext,
    meters: Arc<RouterMeters>,
    /// The event streams of workers in this process.
    local_streams: LocalStreams,
    /// How its engines learn of sessions.
    sessions: SessionLinks,
    /// Another process has taken the sessions over: engines are not told of those that expire here.
    sessions_elsewhere: AtomicBool,
    /// A cache that all workers share.
    shared_cache: Option<Arc<SharedCache>>,
    /// Indexes of other routers, which are asked instead of ours.
    remote_index: Option<RemoteIndex>,
    /// What its model is called there, if that is not its name.
    remote_name: OnceLock<Arc<str>>,
    /// The brain wants to be ticked earlier than the timer thinks.
    sooner: Arc<Notify>,
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
            shared_cache,
            remote_index,
        } = options;
        let (needs, block_size) = (Needs::of(&config), config.kv_cache_block_size);
        let by_events = config.router_kv_events;
        let (mode, role) = (config.router_mode, config.router_role);
        let meters = RouterMeters::new(&context.metrics, name, mode, role);
        let views = CacheViews::default();
        let host = Arc::new(Self {
            name: Arc::clone(name),
            brain: Mutex::new(Brain::new(config, views.urls().clone())),
            index: Arc::new(Index::with_options(&index)),
            views,
            prefill_times: PrefillTimes::default(),
            needs,
            predict_all,
            by_events,
            block_size,
            context: context.clone(),
            meters,
            local_streams: LocalStreams::default(),
            sessions: SessionLinks::default(),
            sessions_elsewhere: AtomicBool::new(false),
            shared_cache,
            remote_index,
            remote_name: OnceLock::new(),
            sooner: Arc::default(),
        });
        let timer = keep_time(Arc::downgrade(&host), Arc::clone(&host.sooner));
        context.tasks.background().spawn(timer);
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

    pub(crate) fn sessions(&self) -> &SessionLinks {
        &self.sessions
    }

    pub(crate) fn local_streams(&self) -> &LocalStreams {
        &self.local_streams
    }

    /// The cache that all workers share, where there is one that counts.
    pub(crate) fn shared_cache(&self) -> Option<&Arc<SharedCache>> {
        self.shared_cache.as_ref()
    }

    /// The indexes of other routers, where those are asked.
    #[must_use]
    pub fn remote_index(&self) -> Option<&RemoteIndex> {
        self.remote_index.as_ref()
    }

    /// What other indexes call its model, if that is not its name; the first word counts.
    pub(crate) fn set_remote_name(&self, name: &str) {
        self.remote_name.get_or_init(|| name.into());
    }

    /// What other indexes hold of a prompt; none if they do not say, or nobody is asked.
    pub(crate) async fn ask_remote(&self, lookup: &Lookup) -> Option<Vec<Match>> {
        let remote = self.remote_index.as_ref();
        let remote = remote.filter(|_| !lookup.locals.is_empty())?;
        let model = self.remote_name.get().unwrap_or(&self.name);
        remote.find(model, lookup).await
    }

    /// What of a prompt counts as cached by what another index found; ours has only what we sent ourselves.
    pub(crate) fn credit_remote(
        &self,
        lookup: &Lookup,
        found: &[Match],
        matches: &mut Matches,
    ) -> Overlap {
        self.index.find(&lookup.locals, matches);
        matches.set_events(found);
        lookup.credit_of(matches, &self.views.trust())
    }

    pub(crate) fn predicts_all(&self) -> bool {
        self.predict_all
    }

    /// A rank of the worker at `url` is there and is judged from now on; `unusable` says why its events cannot be used, if they cannot.
    /// `known` is how it stood before this process was started, if its view was kept.
    pub fn judge(
        &self,
        rank: WorkerRank,
        url: &str,
        unusable: Option<Cause>,
        known: Option<TrustRecord>,
    ) -> Arc<CacheView> {
        self.views.join(self, rank, url, unusable, known)
    }

    /// A worker is gone: its bookings and what was known of its cache go with it.
    pub fn leave(&self, worker: WorkerId) {
        self.tell(Input::Left(worker));
        self.views.leave(worker);
        self.local_streams.leave(worker);
        self.index.remove_worker(worker);
    }

    /// What of a prompt counts as cached, and where.
    pub(crate) fn find(&self, lookup: &Lookup, matches: &mut Matches) -> Overlap {
        match lookup.locals.is_empty() {
            true => Overlap {
                shared: lookup.shared.to_vec(),
                ..Overlap::none()
            },
            false => lookup.find(&self.index, &self.views.trust(), matches),
        }
    }

    /// Remembers where a request went, if the index is to learn from it.
    pub(crate) fn record(&self, now: Time, sent: &Placement, lookup: &Lookup) {
        if !sent.record {
            return;
        }
        match &self.remote_index {
            // Such an index learns from decisions, and is not here.
            Some(remote) if !self.by_events => {
                let model = self.remote_name.get().unwrap_or(&self.name);
                remote.record(model, sent, lookup);
            }
            _ => lookup.record(now, sent, &self.index, &self.views.trust()),
        }
    }

    /// Chooses a worker for `arrival` and books it; waits while the router holds the request back.
    /// `lookup` is looked up again while it waits. Dropping the future takes it out.
    pub(crate) async fn route(
        self: &Arc<Self>,
        arrival: Box<Arrival>,
        lookup: &Lookup,
    ) -> Result<Booking, RouteError> {
        let cacheable = cacheable_tokens(arrival.isl_tokens, self.block_size);
        let mut step = Step {
            id: arrival.id,
            lookup,
            verdict: None,
        };
        let later = self.step_with(Input::Arrived(arrival), Some(&mut step));
        let verdict = match (step.verdict, later) {
            (Some(verdict), _) => verdict,
            (None, Some(later)) => self.await_verdict(step.id, later).await,
            (None, None) => Err(RouteError::DuplicateRequest),
        };
        Ok(Booking::new(self, verdict?, cacheable))
    }

    async fn await_verdict(&self, id: RequestId, later: oneshot::Receiver<Verdict>) -> Verdict {
        let mut guard = QueueGuard {
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

    /// What is booked here is told to other replicas from now on (`--router-replica-sync`).
    pub(crate) fn share(&self, replicas: &Replicas) {
        let mut brain = self.lock();
        if brain.replicas.is_none() && brain.router.config().router_replica_sync {
            brain.replicas = Some((replicas.clone(), Arc::clone(&self.name)));
        }
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
        question(&self.lock_current().router)
    }

    /// Goes on from what another process had learned of its engines. Says whether that is of use.
    pub fn resume_learned(&self, record: &LearnedRecord) -> bool {
        self.lock().router.resume_learned(record)
    }

    /// Another process has taken the sessions over, or has not: whether engines are told when one expires here.
    pub fn set_sessions_elsewhere(&self, elsewhere: bool) {
        self.sessions_elsewhere.store(elsewhere, Ordering::Relaxed);
    }

    /// Whether a request would be refused by load alone, whatever its prompt is.
    pub fn refuses(&self, arrival: &Arrival) -> bool {
        let mut brain = self.lock_current();
        brain.router.refusal_by_load(arrival).is_some()
    }

    /// How loaded each rank is now.
    pub fn loads(&self, now: Time, out: &mut Vec<PotentialLoad>) {
        self.lock_current()
            .router
            .potential_loads(now, 0, &Overlap::none(), &[], out);
    }

    /// What each rank would have to do if a prompt went there.
    pub fn potential_loads(
        &self,
        isl_tokens: u32,
        overlap: &Overlap,
        sequence: &[SequenceHash],
        out: &mut Vec<PotentialLoad>,
    ) {
        let now = self.context.clock.now();
        let mut brain = self.lock_current();
        brain
            .router
            .potential_loads(now, isl_tokens, overlap, sequence, out);
    }

    /// Blocks that running requests of a rank would hold with this prompt among them.
    #[must_use]
    pub fn potential_blocks(&self, rank: WorkerRank, sequence: &[SequenceHash]) -> u64 {
        let mut loads = Vec::new();
        self.potential_loads(0, &Overlap::none(), sequence, &mut loads);
        let found = loads.iter().find(|load| load.rank == rank);
        found.map_or(0, |load| load.potential_decode_blocks)
    }

    fn lock(&self) -> MutexGuard<'_, Brain> {
        self.brain.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The brain, after what is presumed done by now.
    fn lock_current(&self) -> MutexGuard<'_, Brain> {
        let brain = self.lock();
        let presumed = brain.presumed.next();
        if presumed.is_none_or(|at| at > self.context.clock.now()) {
            return brain;
        }
        drop(brain);
        self.tell(Input::Tick);
        self.lock()
    }

    /// The prompt of a request is taken for computed after `span`, if nothing is heard of it until then.
    pub(crate) fn presume_prefill(&self, id: RequestId, span: Duration) {
        let at = self.context.clock.now() + span;
        let mut brain = self.lock();
        let early = brain.presumed.push(at, id);
        let late = brain.is_late();
        drop(brain);
        if let Some(id) = early {
            self.tell(Input::Prefilled { id });
        } else if late {
            self.sooner.notify_one();
        }
    }

    /// One step. `request` is the one that takes it; if the step leaves it without a verdict, the verdict
    /// comes later.
    fn step_with(
        &self,
        input: Input,
        mut request: Option<&mut Step<'_>>,
    ) -> Option<oneshot::Receiver<Verdict>> {
        let mut brain = self.lock();
        let mut refresh = Vec::new();
        let clock = &self.context.clock;
        brain.step(clock, input, request.as_deref_mut(), &mut refresh);
        let later = request.and_then(|request| brain.await_later(request));
        // Only then: the timer is a task elsewhere, and waking it costs more than a step.
        let late = brain.is_late();
        let ended = std::mem::take(&mut brain.ended_sessions);
        drop(brain);
        if late {
            self.sooner.notify_one();
        }
        for (id, target) in ended {
            if !self.sessions_elsewhere.load(Ordering::Relaxed) {
                self.close_session(&id, target);
            }
        }
        for (id, lookup) in refresh {
            // Others are not asked again: what they said when the request came stays.
            let is_here = self.remote_index.is_none();
            let overlap = is_here.then(|| self.find(&lookup, &mut Matches::new()));
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

/// A request that waits for its worker: dropped before the verdict, it leaves the queue.
struct QueueGuard<'h> {
    host: &'h RouterHost,
    id: RequestId,
    done: bool,
}

impl Drop for QueueGuard<'_> {
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
