//! One rank's cache: what speaks for and against what we know of it, and the subscription to its events.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use crate::events::{EventStream, EventStreamHandle, PauseGuard, StreamState};
use kvasir_index::Index;
use kvasir_kv_events::{Counts, Cursor, Resync, StreamCheckpoint};
use kvasir_telemetry::Metrics;
use kvasir_trust::{
    Action, Answer, CacheState, Cause, Evidence, Finding, Trust, TrustLevel, TrustOptions,
    TrustRecord,
};
use kvasir_types::{Time, WorkerRank};

use super::looks::{ForeignPrompts, Looks};
use super::prediction::EventTotals;
use super::{SharedTrust, WorkerUrls};
use crate::context::HostContext;
use crate::log_limit::LogLimit;
use crate::router_host::RouterHost;

/// What is known of one rank's cache.
pub struct CacheView {
    pub(super) rank: WorkerRank,
    /// The name of its router, which its series have.
    pub(super) model: Arc<str>,
    block_size: u32,
    pub(super) index: Arc<Index>,
    /// Requests are routed by it.
    pub(super) by_cache: bool,
    pub(super) context: HostContext,
    pub(super) shared: SharedTrust,
    pub(super) foreign: ForeignPrompts,
    urls: WorkerUrls,
    pub(super) inner: Mutex<Inner>,
    subscription: RwLock<Option<Subscription>>,
    pub(super) looks: Mutex<Looks>,
}

/// The stream of its events, and where it comes from.
#[derive(Clone, Debug)]
pub(super) struct Subscription {
    pub(super) address: Arc<str>,
    pub(super) stream: EventStreamHandle,
}

pub(super) struct Inner {
    pub(super) trust: Trust,
    /// Its worker has left: what still comes in from it changes nothing.
    pub(super) gone: bool,
    /// Why events cannot be used, as far as membership knows.
    unusable: Option<Cause>,
    /// Events came with blocks of another size.
    pub(super) other_block_size: bool,
    /// What last went wrong with the stream of events.
    pub(super) last_fault: Option<&'static str>,
    /// What was counted of the stream already.
    pub(super) counted: Counts,
    /// The state under which it is in the metrics.
    pub(super) shown: Option<TrustLevel>,
    pub(super) log_limit: LogLimit,
    /// Where its events come from.
    pub(super) address: Option<Arc<str>>,
}

impl std::fmt::Debug for CacheView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rank = &self.rank;
        f.debug_struct("CacheView")
            .field("rank", rank)
            .finish_non_exhaustive()
    }
}

impl CacheView {
    pub(super) fn new(
        host: &RouterHost,
        rank: WorkerRank,
        shared: SharedTrust,
        foreign: ForeignPrompts,
        known: Option<TrustRecord>,
    ) -> Self {
        let options = TrustOptions::new(host.block_size().max(1));
        let trust = match known {
            Some(record) => Trust::resume(options, record),
            None => Trust::new(options),
        };
        shared.set(rank, Some(trust.level()));
        Self {
            rank,
            model: Arc::clone(host.name()),
            block_size: host.block_size(),
            index: Arc::clone(host.index()),
            by_cache: host.meters().by_cache(),
            context: host.context().clone(),
            shared,
            foreign,
            urls: host.views().urls().clone(),
            inner: Mutex::new(Inner {
                gone: false,
                trust,
                unusable: None,
                other_block_size: false,
                last_fault: None,
                counted: Counts::default(),
                shown: None,
                log_limit: LogLimit::default(),
                address: None,
            }),
            subscription: RwLock::new(None),
            looks: Mutex::default(),
        }
    }

    pub(super) fn metrics(&self) -> &Metrics {
        &self.context.metrics
    }

    pub(super) fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Which rank it is of.
    #[must_use]
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// How far it is trusted, for keeping.
    pub(crate) fn record(&self) -> TrustRecord {
        self.lock().trust.record()
    }

    /// Its events come from `address` from now on, through what `start` starts.
    ///
    /// It is away until that connects, which may happen on another thread before `start` returns: so
    /// everything about the new stream is set before it begins.
    pub fn subscribe(&self, address: &str, start: impl FnOnce() -> EventStream) -> EventStream {
        let address: Arc<str> = Arc::from(address);
        let mut inner = self.lock();
        inner.counted = Counts::default();
        inner.address = Some(Arc::clone(&address));
        drop(inner);
        self.count_lifecycle("started");
        self.show(Evidence::Link(false));
        let stream = start();
        let subscription = Subscription {
            address,
            stream: stream.handle(),
        };
        let mut current = self
            .subscription
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *current = Some(subscription);
        drop(current);
        stream
    }

    /// Whether nobody listens to its events although the router would go by them.
    pub(super) fn is_without_events(&self) -> bool {
        self.by_cache && self.lock().unusable == Some(Cause::NoEvents)
    }

    pub(super) fn count_lifecycle(&self, action: &str) {
        if self.by_cache {
            let lifecycle = &self.metrics().router_kv_zmq_ingress_lifecycle_total;
            lifecycle.with_label_values(&[action]).inc();
        }
    }

    pub(super) fn subscription(&self) -> Option<Subscription> {
        self.current().clone()
    }

    fn current(&self) -> RwLockReadGuard<'_, Option<Subscription>> {
        self.subscription
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn read<T: Default>(&self, part: impl FnOnce(&StreamState) -> T) -> T {
        let current = self.current();
        let stream = current.as_ref().map(|current| &current.stream);
        stream.map(|stream| stream.read(part)).unwrap_or_default()
    }

    /// Ends its stream and leaves its blocks in the index; what a later stream needs to go on.
    pub(crate) async fn freeze(&self) -> Option<StreamCheckpoint> {
        self.subscription()?.stream.freeze().await
    }

    /// Lets its stream stand still; what a later stream would need to go on, if it is worth keeping.
    pub(crate) async fn hold(&self) -> Option<(Option<StreamCheckpoint>, PauseGuard)> {
        self.subscription()?.stream.pause().await
    }

    /// How far its stream is.
    pub(crate) fn cursor(&self) -> Option<Cursor> {
        self.read(|snapshot| snapshot.status.cursor)
    }

    /// What events have said so far.
    pub(super) fn event_totals(&self) -> EventTotals {
        self.read(|snapshot| EventTotals::from(&snapshot.status.counts))
    }

    /// Why events cannot be used, as far as membership knows.
    pub(super) fn set_unusable(&self, cause: Option<Cause>) {
        let mut inner = self.lock();
        inner.unusable = cause;
        self.step_unusable(&mut inner);
    }

    pub(super) fn step_unusable(&self, inner: &mut Inner) {
        let size = inner.other_block_size.then_some(Cause::BlockSize);
        let cause = inner.unusable.or(size);
        self.step(inner, Evidence::Unusable(cause));
    }

    /// Whether an answer is off in a way that events on their way may explain.
    pub(super) fn is_open(&self, answer: &Answer) -> bool {
        self.lock().trust.is_open(answer)
    }

    /// Something speaks for or against what is known.
    pub(super) fn judge(&self, now: Time, evidence: Evidence) {
        let mut inner = self.lock();
        self.step_at(&mut inner, now, Evidence::Recovering(self.is_recovering()));
        self.step_at(&mut inner, now, evidence);
    }

    pub(super) fn now(&self) -> Time {
        self.context.clock.now()
    }

    /// Where its worker is, for people.
    pub(super) fn url(&self) -> Arc<str> {
        self.urls.get(self.rank.worker)
    }

    /// Whether its events are listened to.
    pub(super) fn is_listening(&self) -> bool {
        self.lock().unusable.is_none()
    }

    /// The longest lag of its events of late.
    pub(super) fn lag(&self) -> Duration {
        self.read(|snapshot| snapshot.status.lag)
    }

    /// Whether blocks wait for others that were never announced.
    pub(super) fn has_orphans(&self) -> bool {
        self.read(|snapshot| snapshot.status.orphan_blocks) > 0
    }

    fn is_recovering(&self) -> bool {
        self.read(|snapshot| snapshot.status.recovering.is_some())
    }

    pub(super) fn tick(&self, now: Time) {
        self.log_withheld();
        self.step_at(&mut self.lock(), now, Evidence::Tick);
    }

    pub(super) fn show(&self, evidence: Evidence) {
        self.step(&mut self.lock(), evidence);
    }

    pub(super) fn step(&self, inner: &mut Inner, evidence: Evidence) {
        self.step_at(inner, self.context.clock.now(), evidence);
    }

    fn step_at(&self, inner: &mut Inner, now: Time, evidence: Evidence) {
        if inner.gone {
            return;
        }
        let mut actions = Vec::new();
        inner.trust.step(now, evidence, &mut actions);
        for action in actions {
            self.act(action);
        }
    }

    fn act(&self, action: Action) {
        match action {
            Action::Judged(finding) => self.count(finding),
            Action::Changed(trust) => self.changed(trust),
            Action::Verify => self.mend("asking whether events were missed", Resync::Verify),
            Action::Resync(Cause::SilentEviction) => {
                self.mend("replaying the engine's events", Resync::Replay);
            }
            Action::Resync(_) => self.mend("replaying the engine's events", Resync::Fill),
            Action::Forget => self.mend("forgetting its blocks", Resync::Forget),
        }
    }

    fn mend(&self, what: &'static str, how: Resync) {
        let Some(subscription) = self.subscription() else {
            return;
        };
        match how {
            Resync::Verify => {
                tracing::debug!(rank = %self.rank, url = %self.url(), "cache view: {what}");
            }
            _ => {
                let (rank, url) = (self.rank, self.url());
                tracing::warn!(%rank, %url, "cache view was wrong too often: {what}");
            }
        }
        subscription.stream.resync(how);
    }

    fn changed(&self, trust: TrustLevel) {
        self.shared.set(self.rank, Some(trust));
        let (rank, url, state) = (self.rank, self.url(), trust.state.name());
        match trust.cause {
            None => tracing::info!(%rank, %url, state, "cache view trusted"),
            Some(Cause::Starting | Cause::Forced) if trust.state == CacheState::Approximate => {
                tracing::info!(%rank, %url, state, "cache view starts anew");
            }
            Some(cause) => {
                let (cause, advice) = (cause.name(), cause.advice());
                tracing::warn!(%rank, %url, state, cause, advice, "cache view not trusted");
            }
        }
    }

    fn count(&self, finding: Finding) {
        let (worker, rank) = (self.rank.worker.to_string(), self.rank.rank.to_string());
        self.metrics()
            .worker_predictions_total
            .with_label_values(&[&*self.model, &worker, &rank, finding.name()])
            .inc();
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use kvasir_kv_events::{EventFormat, Sequencer, StreamOptions};
    use kvasir_transport::memory_source;

    use super::*;
    use crate::events::StreamObserver;
    use crate::testing::{context, host};

    /// A stream runs on a thread of its own: it may be connected before its starter knows of it.
    #[tokio::test]
    async fn a_connection_made_at_once_is_not_overlooked() {
        let context = context();
        let (host, rank) = (host(&context), WorkerRank::new(1, 0));
        let view = CacheView::new(
            &host,
            rank,
            SharedTrust::default(),
            ForeignPrompts::default(),
            None,
        );
        let view = Arc::new(view);
        let clock = context.clock;
        let start = |connects: bool| {
            let sequencer =
                Sequencer::new(EventFormat::EngineBatches { rank }, StreamOptions::new(16));
            let now = Arc::new(move || clock.now());
            let (_engine, source) = memory_source();
            let (index, witness) = (Arc::clone(host.index()), Arc::clone(&view));
            let stream = EventStream::spawn(&context.tasks, source, sequencer, index, now, witness);
            if connects {
                view.link(None);
            }
            stream
        };
        let later = || clock.now() + Duration::from_secs(60);
        let cause = || view.lock().trust.level().cause;

        let _at_once = view.subscribe("tcp://engine", || start(true));
        view.tick(later());
        assert_eq!(cause(), Some(Cause::Starting));
        let _never = view.subscribe("tcp://engine", || start(false));
        view.tick(later());
        assert_eq!(cause(), Some(Cause::Unreachable));
    }
}
