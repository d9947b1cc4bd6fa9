//! One rank's picture: what is known for and against it, and who listens to its events.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use kvasir_index::{Index, Matches};
use kvasir_ingest::{Counts, Cursor, Kept, Notice, Resync};
use kvasir_intake::{Intake, IntakeHandle, Pause, Snapshot, Witness};
use kvasir_telemetry::{Clock, Metrics};
use kvasir_transport::{SourceFault, Tasks};
use kvasir_trust::{
    Action, Answer, Appeared, Doubt, Evidence, Finding, Level, Opinion, Standing, Trust,
    TrustOptions,
};
use kvasir_types::{LocalHash, Time, WorkerRank};
use kvasir_wire::Skip;

use super::Opinions;
use super::forecast::Told;
use crate::App;
use crate::models::ServedModel;

/// So long after an answer its blocks must have appeared.
const LOOK_AFTER: Duration = Duration::from_secs(1);

/// One rank's picture.
pub(crate) struct Picture {
    pub(super) rank: WorkerRank,
    /// The name of its router, which its series have.
    pub(super) model: Arc<str>,
    block_size: u32,
    index: Arc<Index>,
    pub(super) metrics: Metrics,
    /// Requests are routed by it.
    pub(super) by_cache: bool,
    clock: Clock,
    tasks: Tasks,
    pub(super) opinions: Opinions,
    pub(super) inner: Mutex<Inner>,
    ear: RwLock<Option<Ear>>,
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
    sent: Told,
}

/// Who listens, and where.
#[derive(Clone, Debug)]
pub(super) struct Ear {
    pub(super) address: Arc<str>,
    pub(super) intake: IntakeHandle,
}

pub(super) struct Inner {
    pub(super) trust: Trust,
    /// Its worker has left: what still comes in from it changes nothing.
    pub(super) gone: bool,
    /// Why events cannot be used, as far as membership knows.
    bar: Option<Doubt>,
    /// Events came with blocks of another size.
    other_block_size: bool,
    /// What last went wrong with the stream of events.
    pub(super) last_fault: Option<&'static str>,
    /// What was counted of the stream already.
    pub(super) counted: Counts,
    /// The state under which it is in the metrics.
    pub(super) shown: Option<Opinion>,
}

impl std::fmt::Debug for Picture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rank = &self.rank;
        f.debug_struct("Picture")
            .field("rank", rank)
            .finish_non_exhaustive()
    }
}

impl Picture {
    pub(super) fn new(
        app: &App,
        model: &ServedModel,
        rank: WorkerRank,
        opinions: Opinions,
        known: Option<Standing>,
    ) -> Self {
        let options = TrustOptions::new(model.block_size.max(1));
        let trust = match known {
            Some(standing) => Trust::resume(options, standing),
            None => Trust::new(options),
        };
        opinions.set(rank, Some(trust.opinion()));
        Self {
            rank,
            model: Arc::clone(model.host.name()),
            block_size: model.block_size,
            index: Arc::clone(model.host.index()),
            metrics: app.metrics().clone(),
            by_cache: model.meters.by_cache(),
            clock: app.clock(),
            tasks: app.tasks().clone(),
            opinions,
            inner: Mutex::new(Inner {
                gone: false,
                trust,
                bar: None,
                other_block_size: false,
                last_fault: None,
                counted: Counts::default(),
                shown: None,
            }),
            ear: RwLock::new(None),
            looks: Mutex::default(),
        }
    }

    pub(super) fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Which rank it is of.
    pub(crate) fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// How it stands, for keeping.
    pub(crate) fn standing(&self) -> Standing {
        self.lock().trust.standing()
    }

    /// Its events come from `address` from now on, through what `start` starts.
    ///
    /// It is away until that connects, which may happen on another thread before `start` returns: so
    /// everything about the new stream is set before it begins.
    pub(crate) fn listen(&self, address: &str, start: impl FnOnce() -> Intake) -> Intake {
        self.lock().counted = Counts::default();
        self.count_lifecycle("started");
        self.show(Evidence::Link(false));
        let intake = start();
        let mut ear = self.ear.write().unwrap_or_else(PoisonError::into_inner);
        *ear = Some(Ear {
            address: Arc::from(address),
            intake: intake.handle(),
        });
        intake
    }

    /// Whether nobody listens to its events although the router would go by them.
    pub(super) fn is_unheard(&self) -> bool {
        self.by_cache && self.lock().bar == Some(Doubt::NoEvents)
    }

    fn count_lifecycle(&self, action: &str) {
        if self.by_cache {
            let lifecycle = &self.metrics.router_kv_zmq_ingress_lifecycle_total;
            lifecycle.with_label_values(&[action]).inc();
        }
    }

    pub(super) fn ear(&self) -> Option<Ear> {
        let ear = self.ear.read().unwrap_or_else(PoisonError::into_inner);
        ear.clone()
    }

    fn read<T: Default>(&self, part: impl FnOnce(&Snapshot) -> T) -> T {
        let ear = self.ear.read().unwrap_or_else(PoisonError::into_inner);
        ear.as_ref()
            .map(|ear| ear.intake.read(part))
            .unwrap_or_default()
    }

    /// Ends its stream and leaves its blocks in the index; what a later stream needs to go on.
    pub(crate) async fn freeze(&self) -> Option<Kept> {
        self.ear()?.intake.freeze().await
    }

    /// Lets its stream stand still; what a later stream would need to go on, if it is worth keeping.
    pub(crate) async fn hold(&self) -> Option<(Option<Kept>, Pause)> {
        self.ear()?.intake.hold().await
    }

    /// How far its stream is.
    pub(crate) fn cursor(&self) -> Option<Cursor> {
        self.read(|snapshot| snapshot.status.cursor)
    }

    /// What events have told so far.
    pub(super) fn told(&self) -> Told {
        self.read(|snapshot| Told::from(&snapshot.status.counts))
    }

    /// Why events cannot be used, as far as membership knows.
    pub(super) fn set_bar(&self, bar: Option<Doubt>) {
        let mut inner = self.lock();
        inner.bar = bar;
        self.step_bar(&mut inner);
    }

    fn step_bar(&self, inner: &mut Inner) {
        let size = inner.other_block_size.then_some(Doubt::BlockSize);
        let bar = inner.bar.or(size);
        self.step(inner, Evidence::Barred(bar));
    }

    /// An answer came.
    pub(super) fn answered(&self, now: Time, answer: Answer) {
        let mut inner = self.lock();
        self.step_at(&mut inner, now, Evidence::Recovering(self.is_recovering()));
        self.step_at(&mut inner, now, Evidence::Answer(answer));
    }

    /// Looks, in a while, whether the first `blocks` of an answered prompt have appeared.
    pub(super) fn look_later(self: &Arc<Self>, prompt: Arc<[LocalHash]>, blocks: u32, sent: Told) {
        if blocks == 0 || self.lock().bar.is_some() {
            return;
        }
        let answered = self.clock.now();
        let mut looks = self.looks();
        looks.next = Some(Look {
            answered,
            prompt,
            blocks,
            sent,
        });
        if !std::mem::replace(&mut looks.running, true) {
            self.tasks
                .background()
                .spawn(Arc::clone(self).keep_looking());
        }
    }

    async fn keep_looking(self: Arc<Self>) {
        while let Some(look) = self.next_look() {
            tokio::time::sleep((look.answered + LOOK_AFTER) - self.clock.now()).await;
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
        let told = self.told();
        let appeared = Appeared {
            expected: look.blocks,
            found: ours.map_or(0, |s| s.events.disk_cumulative()),
            stored: told.stored_since(&look.sent),
            removed: told.removed_since(&look.sent),
            orphans: self.read(|s| s.status.orphan_blocks) > 0,
        };
        let mut inner = self.lock();
        self.step(&mut inner, Evidence::Recovering(self.is_recovering()));
        self.step(&mut inner, Evidence::Appeared(appeared));
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
        self.step_at(inner, self.clock.now(), evidence);
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
            Action::Changed(opinion) => self.changed(opinion),
            Action::Verify => self.mend("asking whether events were missed", Resync::Verify),
            Action::Resync(Doubt::SilentEviction) => {
                self.mend("replaying the engine's events", Resync::Replay);
            }
            Action::Resync(_) => self.mend("replaying the engine's events", Resync::Fill),
            Action::Forget => self.mend("forgetting the picture", Resync::Forget),
        }
    }

    fn mend(&self, what: &'static str, how: Resync) {
        let Some(ear) = self.ear() else { return };
        match how {
            Resync::Verify => tracing::debug!(rank = %self.rank, "cache picture: {what}"),
            _ => tracing::warn!(rank = %self.rank, "cache picture was wrong too often: {what}"),
        }
        ear.intake.resync(how);
    }

    fn changed(&self, opinion: Opinion) {
        self.opinions.set(self.rank, Some(opinion));
        let (rank, state) = (self.rank, opinion.level.name());
        match opinion.doubt {
            None => tracing::info!(%rank, state, "cache picture proves right"),
            Some(Doubt::Starting | Doubt::Forced) if opinion.level == Level::Approximate => {
                tracing::info!(%rank, state, "cache picture starts anew");
            }
            Some(doubt) => {
                let (cause, advice) = (doubt.name(), doubt.advice());
                tracing::warn!(%rank, state, cause, advice, "cache picture not trusted");
            }
        }
    }

    fn count(&self, finding: Finding) {
        let (worker, rank) = (self.rank.worker.to_string(), self.rank.rank.to_string());
        self.metrics
            .worker_predictions_total
            .with_label_values(&[&*self.model, &worker, &rank, finding.name()])
            .inc();
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Witness for Picture {
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
                self.step_bar(&mut inner);
            }
            Notice::BlockSizeFits => {
                inner.other_block_size = false;
                self.step_bar(&mut inner);
            }
            _ => {}
        }
    }

    fn link(&self, fault: Option<&SourceFault>) {
        let rank = self.rank;
        match fault {
            None => tracing::info!(%rank, "event socket connected"),
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
pub(super) mod tests {
    use kvasir_index::IndexOptions;
    use kvasir_ingest::{Ingest, IngestOptions};
    use kvasir_router::{RouterConfig, RouterMode};
    use kvasir_telemetry::MetricOptions;
    use kvasir_transport::memory_source;
    use kvasir_types::DpRank;

    use super::*;
    use crate::AppOptions;
    use crate::Backend;
    use crate::ModelMeters;
    use crate::RouterHost;

    /// A model without workers.
    pub(crate) fn model(app: &App) -> ServedModel {
        let (name, router): (Arc<str>, _) = (Arc::from("m"), RouterConfig::default());
        let index = Arc::new(Index::with_options(&IndexOptions::default()));
        ServedModel {
            meters: ModelMeters::new(app.metrics(), &name, RouterMode::Kv),
            events: None,
            host: RouterHost::start(&name, router, index, app.clock(), app.tasks()),
            name,
            block_size: 16,
            context_length: 4096,
            lora: None,
            created: 1,
            backend: Backend::OpenAi {
                workers: Default::default(),
                tokens: Default::default(),
            },
            predict_heard: true,
            workers: Default::default(),
        }
    }

    /// A stream runs on a thread of its own: it may be connected before its starter knows of it.
    #[tokio::test]
    async fn a_connection_made_at_once_is_not_overlooked() {
        let metrics = Metrics::new(&MetricOptions::default()).unwrap();
        let app = App::new(AppOptions::default(), metrics, Clock::new(), Tasks::new());
        let (model, rank) = (model(&app), WorkerRank::new(1, 0));
        let picture = Arc::new(Picture::new(&app, &model, rank, Opinions::default(), None));
        let start = |connects: bool| {
            let ingest = Ingest::new(rank.worker, DpRank(0), IngestOptions::new(16));
            let (witness, clock) = (Arc::clone(&picture), app.clock());
            let now = Arc::new(move || clock.now());
            let (_engine, source) = memory_source();
            let index = Arc::clone(model.host.index());
            let intake = Intake::spawn(app.tasks(), source, ingest, index, now, witness);
            if connects {
                picture.link(None);
            }
            intake
        };
        let later = || app.clock().now() + Duration::from_secs(60);
        let doubt = || picture.lock().trust.opinion().doubt;

        let _at_once = picture.listen("tcp://engine", || start(true));
        picture.tick(later());
        assert_eq!(doubt(), Some(Doubt::Starting));
        let _never = picture.listen("tcp://engine", || start(false));
        picture.tick(later());
        assert_eq!(doubt(), Some(Doubt::Unreachable));
    }
}
