//! The brain under its lock: one step, and who is told what came of it.
//!
//! What always holds: a verdict that nobody takes is a request that ended, and its booking is freed in the same step.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kvasir_router::{
    Input, Lookup, Observation, Outcome, Output, Placement, RouteError, Router, RouterConfig,
};
use kvasir_telemetry::Clock;
use kvasir_types::{RequestId, Time, WorkerId, WorkerRank};
use tokio::sync::{Notify, oneshot};

use super::presumed::PresumedPrefills;
use crate::replica::{ReplicaNews, Replicas};
use crate::view::WorkerUrls;

/// Where the cost of each candidate is logged: `--log-level info,kvasir_router=debug` shows it.
const FORMULAS: &str = "kvasir_router::formula";

/// The timer wakes at least this often; what routing decisions taught the index for less time than this may be
/// believed for so long.
const TICK_EVERY: Duration = Duration::from_secs(1);

/// The router, and who waits for it.
#[derive(Debug)]
pub(super) struct Brain {
    pub(super) router: Router,
    pub(super) waiting: HashMap<RequestId, Waiter>,
    /// Who is to look at a worker that is ejected.
    pub(super) watchers: HashMap<WorkerId, Arc<Notify>>,
    pub(super) presumed: PresumedPrefills,
    /// Sessions that expired and whose engines are to be told.
    pub(super) ended_sessions: Vec<(Arc<str>, WorkerRank)>,
    /// Who else is told what is booked.
    pub(super) replicas: Option<(Replicas, Arc<str>)>,
    /// For log lines.
    urls: WorkerUrls,
    /// Reused by every step.
    outputs: Vec<Output>,
    /// When the timer ticks at the latest.
    pub(super) ticks_at: Time,
}

#[derive(Debug)]
pub(super) struct Waiter {
    verdict: oneshot::Sender<Verdict>,
    lookup: Lookup,
}

/// What the router says to a request.
pub(super) type Verdict = Result<Placement, RouteError>;

/// A request that takes a step: most have their verdict when it ends, and need nobody to wait for it.
#[derive(Debug)]
pub(super) struct Step<'l> {
    pub(super) id: RequestId,
    /// For looking it up again.
    pub(super) lookup: &'l Lookup,
    pub(super) verdict: Option<Verdict>,
}

impl Brain {
    pub(super) fn new(config: RouterConfig, urls: WorkerUrls) -> Self {
        Self {
            router: Router::new(config),
            waiting: HashMap::new(),
            watchers: HashMap::new(),
            presumed: PresumedPrefills::default(),
            ended_sessions: Vec::new(),
            replicas: None,
            urls,
            outputs: Vec::new(),
            ticks_at: Time::ZERO,
        }
    }

    /// How long the timer may sleep at `now` if the index has something to forget at `expiry`; whoever needs it
    /// sooner wakes it.
    pub(super) fn wait(&mut self, now: Time, expiry: Option<Time>) -> Duration {
        let deadlines = [self.next_deadline(), expiry, Some(now + TICK_EVERY)];
        self.ticks_at = deadlines.into_iter().flatten().min().unwrap_or(now);
        self.ticks_at - now
    }

    /// Whether the timer is to tick earlier than it will.
    pub(super) fn is_late(&self) -> bool {
        self.next_deadline()
            .is_some_and(|deadline| deadline < self.ticks_at)
    }

    /// When something is due that somebody waits for.
    fn next_deadline(&self) -> Option<Time> {
        let presumed = self.presumed.next();
        let awaited = presumed.filter(|_| self.router.queued().0 > 0);
        let deadlines = [self.router.next_deadline(), awaited];
        deadlines.into_iter().flatten().min()
    }

    /// One step, after those for prompts that are presumed done by now.
    pub(super) fn step(
        &mut self,
        clock: &Clock,
        input: Input,
        request: Option<&mut Step<'_>>,
        refresh: &mut Vec<(RequestId, Lookup)>,
    ) {
        if self.presumed.next().is_some() {
            let now = clock.now();
            while let Some(id) = self.presumed.pop_due(now) {
                self.run(clock, Input::Prefilled { id }, None, refresh);
            }
        }
        self.run(clock, input, request, refresh);
    }

    /// One step, and those that follow from it: a verdict that nobody takes is a request that ended.
    fn run(
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
                    Output::CloseSession { id, target } => self.ended_sessions.push((id, target)),
                    Output::Tell(event) => self.tell(ReplicaNews::Request(event)),
                    Output::Observe(Observation::SessionBound { id, target, since }) => {
                        self.tell(ReplicaNews::Session { id, target, since });
                    }
                    Output::Observe(observation) => {
                        observe(&observation, &self.urls);
                        self.wake(&observation);
                    }
                }
            }
            self.outputs = outputs;
            next = more.pop();
        }
    }

    /// Tells other replicas, if there are to be any.
    fn tell(&self, news: ReplicaNews) {
        if let Some((replicas, router)) = &self.replicas {
            replicas.tell(router, news);
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
    pub(super) fn await_later(&mut self, request: &Step<'_>) -> Option<oneshot::Receiver<Verdict>> {
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
    fn deliver(&mut self, sent: Placement, request: Option<&mut Step<'_>>) -> Option<Input> {
        if tracing::enabled!(target: FORMULAS, tracing::Level::DEBUG)
            && let Some(decision) = self.router.explain(sent.id)
        {
            for formula in decision.formulas() {
                tracing::debug!(target: FORMULAS, request = %sent.id, "{formula}");
            }
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

fn observe(observation: &Observation, urls: &WorkerUrls) {
    match observation {
        Observation::Busy { worker, busy } => {
            let url = urls.field(*worker);
            match busy {
                true => tracing::info!(%worker, url, "worker is busy"),
                false => tracing::info!(%worker, url, "worker is free again"),
            }
        }
        Observation::Down { worker, down } => {
            let url = urls.field(*worker);
            match down {
                true => tracing::warn!(%worker, url, "worker ejected"),
                false => tracing::info!(%worker, url, "worker readmitted"),
            }
        }
        Observation::Expired { id, target } => {
            let url = urls.field(target.worker);
            tracing::warn!(%id, %target, url, "booking expired: nothing was heard of it for too long");
        }
        Observation::PeerRefused { replica } => {
            tracing::debug!(
                replica = replica.0,
                "a booking of another replica is left out: there are too many"
            );
        }
        other => tracing::debug!(?other, "router"),
    }
}
