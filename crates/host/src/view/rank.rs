//! One rank's cache: what speaks for and against what we know of it, and the subscription to its events.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use crate::events::{EventStream, EventStreamHandle, PauseGuard, StreamObserver, StreamState};
use kvasir_index::{Index, Matches};
use kvasir_kv_events::{Counts, Cursor, Notice, Resync, StreamCheckpoint};
use kvasir_telemetry::Metrics;
use kvasir_transport::SourceFault;
use kvasir_trust::{
    Action, Answer, CacheState, Cause, Evidence, Finding, StoredCheck, Trust, TrustLevel,
    TrustOptions, TrustRecord,
};
use kvasir_types::{LocalHash, Time, WorkerRank};
use kvasir_wire::Skip;

use super::SharedTrust;
use super::prediction::EventTotals;
use crate::context::HostContext;
use crate::router_host::RouterHost;

/// So long after an answer its blocks must have appeared.
const LOOK_AFTER: Duration = Duration::from_secs(1);

/// What is known of one rank's cache.
pub struct CacheView {
    pub(super) rank: WorkerRank,
    /// The name of its router, which its series have.
    pub(super) model: Arc<str>,
    block_size: u32,
    index: Arc<Index>,
    /// Requests are routed by it.
    pub(super) by_cache: bool,
    context: HostContext,
    pub(super) shared: SharedTrust,
    pub(super) inner: Mutex<Inner>,
    subscription: RwLock<Option<Subscription>>,
    looks: Mutex<Looks>,
}

/// Whose blocks are looked for. One at a time; of those that come meanwhile the last.
#[derive(Debug, Default)]
struct Looks {
    running: bool,
    next: Option<Look>,
}

/// A prompt whose blocks must have appeared by and by.
#[derive(Debug)]
struct Look {
    answered: Time,
    prompt: Arc<[LocalHash]>,
    blocks: u32,
    sent: EventTotals,
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
    other_block_size: bool,
    /// What last went wrong with the stream of events.
    pub(super) last_fault: Option<&'static str>,
    /// What was counted of the stream already.
    pub(super) counted: Counts,
    /// The state under which it is in the metrics.
    pub(super) shown: Option<TrustLevel>,
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
            inner: Mutex::new(Inner {
                gone: false,
                trust,
                unusable: None,
                other_block_size: false,
                last_fault: None,
                counted: Counts::default(),
                shown: None,
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
        self.lock().counted = Counts::default();
        self.count_lifecycle("started");
        self.show(Evidence::Link(false));
        let stream = start();
        let subscription = Subscription {
            address: Arc::from(address),
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

    fn count_lifecycle(&self, action: &str) {
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

    fn step_unusable(&self, inner: &mut Inner) {
        let size = inner.other_block_size.then_some(Cause::BlockSize);
        let cause = inner.unusable.or(size);
        self.step(inner, Evidence::Unusable(cause));
    }

    /// An answer came.
    pub(super) fn answered(&self, now: Time, answer: Answer) {
        let mut inner = self.lock();
        self.step_at(&mut inner, now, Evidence::Recovering(self.is_recovering()));
        self.step_at(&mut inner, now, Evidence::Answer(answer));
    }

    /// Looks, in a while, whether the first `blocks` of an answered prompt have appeared.
    pub(super) fn look_later(
        self: &Arc<Self>,
        prompt: Arc<[LocalHash]>,
        blocks: u32,
        sent: EventTotals,
    ) {
        if blocks == 0 || self.lock().unusable.is_some() {
            return;
        }
        let answered = self.context.clock.now();
        let mut looks = self.looks();
        looks.next = Some(Look {
            answered,
            prompt,
            blocks,
            sent,
        });
        if !std::mem::replace(&mut looks.running, true) {
            self.context
                .tasks
                .background()
                .spawn(Arc::clone(self).keep_looking());
        }
    }

    async fn keep_looking(self: Arc<Self>) {
        while let Some(look) = self.next_look() {
            tokio::time::sleep((look.answered + LOOK_AFTER) - self.context.clock.now()).await;
            self.look(&look);
        }
    }

    fn next_look(&self) -> Option<Look> {
        let mut looks = self.looks();
        let next = looks.next.take();
        looks.running = next.is_some();
        next
    }

    fn looks(&self) -> MutexGuard<'_, Looks> {
        self.looks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self, look: &Look) {
        let mut matches = Matches::new();
        self.index.find(&look.prompt, &mut matches);
        let ours = matches.sources().find(|s| s.events.rank == self.rank);
        let totals = self.event_totals();
        let check = StoredCheck {
            expected: look.blocks,
            found: ours.map_or(0, |s| s.events.disk_cumulative()),
            stored: totals.stored_since(&look.sent),
            removed: totals.removed_since(&look.sent),
            orphans: self.read(|s| s.status.orphan_blocks) > 0,
        };
        let mut inner = self.lock();
        self.step(&mut inner, Evidence::Recovering(self.is_recovering()));
        self.step(&mut inner, Evidence::Stored(check));
    }

    fn is_recovering(&self) -> bool {
        self.read(|snapshot| snapshot.status.recovering.is_some())
    }

    pub(super) fn tick(&self, now: Time) {
        self.step_at(&mut self.lock(), now, Evidence::Tick);
    }

    fn show(&self, evidence: Evidence) {
        self.step(&mut self.lock(), evidence);
    }

    fn step(&self, inner: &mut Inner, evidence: Evidence) {
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
            Resync::Verify => tracing::debug!(rank = %self.rank, "cache view: {what}"),
            _ => tracing::warn!(rank = %self.rank, "cache view was wrong too often: {what}"),
        }
        subscription.stream.resync(how);
    }

    fn changed(&self, trust: TrustLevel) {
        self.shared.set(self.rank, Some(trust));
        let (rank, state) = (self.rank, trust.state.name());
        match trust.cause {
            None => tracing::info!(%rank, state, "cache view trusted"),
            Some(Cause::Starting | Cause::Forced) if trust.state == CacheState::Approximate => {
                tracing::info!(%rank, state, "cache view starts anew");
            }
            Some(cause) => {
                let (cause, advice) = (cause.name(), cause.advice());
                tracing::warn!(%rank, state, cause, advice, "cache view not trusted");
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

impl StreamObserver for CacheView {
    fn notice(&self, notice: &Notice) {
        let rank = self.rank;
        match notice {
            Notice::Recovered { .. }
            | Notice::Cleared { .. }
            | Notice::Pairs
            | Notice::BlockSizeFits => tracing::info!(%rank, "cache events: {notice}"),
            _ => tracing::warn!(%rank, "cache events: {notice}"),
        }
        let mut inner = self.lock();
        inner.last_fault = fault_name(notice).or(inner.last_fault);
        match notice {
            Notice::Restarted => self.step(&mut inner, Evidence::Restarted),
            Notice::Recovered { messages: 1.., .. } => self.step(&mut inner, Evidence::Mended),
            Notice::Skipped(Skip::BlockSize { .. }) => {
                inner.other_block_size = true;
                self.step_unusable(&mut inner);
            }
            Notice::BlockSizeFits => {
                inner.other_block_size = false;
                self.step_unusable(&mut inner);
            }
            _ => {}
        }
    }

    fn link(&self, fault: Option<&SourceFault>) {
        let rank = self.rank;
        match fault {
            None => tracing::info!(%rank, "event socket connected"),
            Some(fault @ SourceFault::Local(_)) => {
                tracing::debug!(%rank, %fault, "event socket not connected");
                return self.show(Evidence::LocalFault);
            }
            Some(fault) => tracing::warn!(%rank, %fault, "event socket not connected"),
        }
        self.count_lifecycle(if fault.is_none() {
            "activated"
        } else {
            "disconnected"
        });
        self.show(Evidence::Link(fault.is_none()));
    }
}

/// What a notice is called in listings, if it is a fault.
fn fault_name(notice: &Notice) -> Option<&'static str> {
    Some(match notice {
        Notice::Gap { .. } | Notice::GapWithoutReplay => "gap",
        Notice::Restarted => "restart",
        Notice::ReplayTooShort { .. } => "replay_too_short",
        Notice::RecoveryFailed { .. } => "replay_failed",
        Notice::Refused(_) => "unreadable",
        Notice::Skipped(Skip::BlockSize { .. }) => "block_size",
        Notice::Orphans { .. } => "orphans",
        Notice::HeldDropped => "overflow",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use kvasir_kv_events::{EventFormat, Sequencer, StreamOptions};
    use kvasir_transport::memory_source;

    use super::*;
    use crate::testing::{context, host};

    /// A stream runs on a thread of its own: it may be connected before its starter knows of it.
    #[tokio::test]
    async fn a_connection_made_at_once_is_not_overlooked() {
        let context = context();
        let (host, rank) = (host(&context), WorkerRank::new(1, 0));
        let view = CacheView::new(&host, rank, SharedTrust::default(), None);
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
