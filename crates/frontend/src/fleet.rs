//! Watching OpenAI workers: what each serves, whether it answers, how busy it is.
//!
//! Follows the list of members ([`Members`]). Each has one task that asks gently and for ever. A worker
//! that answers joins the models that it serves; one that does not answer several times in a row leaves them and
//! is asked again later. One that no source has any more gets nothing new and leaves when what it has is done.

mod context;
mod describe;
mod file;
mod health;
mod listen;
pub(crate) mod members;
mod roster;
mod serving;

pub use context::FleetContext;
pub use file::{WorkersFile, WorkersFileError};

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_host::{LoadedSnapshot, RouterSetup, SnapshotWriter};
use kvasir_router::Input;
use kvasir_text::ModelFolders;
use kvasir_transport::Tasks;
use kvasir_types::{HttpEndpoint, WorkerId, WorkerRecord};
use kvasir_upstream::{
    Bounds, EngineKind, Facts, Pool, RankLoad, UpstreamError, WorkerTls, page_text, read_load,
    read_loads,
};
use tokio::sync::{Notify, watch};

use self::listen::Ears;
use self::roster::Claims;
use self::serving::Membership;
use crate::fleet::members::{Change, JoinOutcome, MemberState, Members, SourceName, WorkerSource};
use crate::http::cores::Cores;
use crate::models::{Backend, ServedModel};

/// Between two questions about load, unless a fleet is told otherwise.
const LOAD_EVERY: Duration = Duration::from_secs(2);
/// Questions about load between two about everything else.
const LOADS_PER_PROBE: u32 = 5;
/// What a question to a worker may take, unless a fleet is told otherwise.
const QUESTION: Bounds = Bounds {
    timeout: Duration::from_secs(2),
    answer_bytes_max: 4 << 20,
};
/// Failures in a row after which a worker leaves.
const FAILURES_MAX: u32 = 3;
/// Between two looks whether a worker on its way out still has something to do.
const DRAIN_LOOK: Duration = Duration::from_millis(50);
/// Tokens in a block where neither the engine nor its user says.
const BLOCK_SIZE: u32 = 16;
/// Longest sequence where the engine does not say.
const CONTEXT_LENGTH: u32 = u32::MAX;

/// Workers that are watched. Clones are one fleet.
#[derive(Clone)]
pub struct Fleet {
    context: FleetContext,
    /// How the routers of new models are made.
    setup: Arc<RouterSetup>,
    /// Tokenizers and templates of models.
    folders: Arc<ModelFolders>,
    /// Whether workers' cache events are listened to.
    events: bool,
    /// Where; on the caller's runtime if nowhere else.
    event_threads: Option<Arc<Cores>>,
    /// Between two questions about load.
    every: Duration,
    /// What a question may take.
    question: Bounds,
    /// Which workers are believed to be who they are.
    tls: WorkerTls,
    /// What each watcher is to do; it takes itself out when it has ended.
    watchers: Arc<Mutex<BTreeMap<WorkerId, watch::Sender<Goal>>>>,
    /// What `--worker` names.
    flags: Arc<WorkerSource>,
    /// What an earlier process kept.
    snapshot: Arc<LoadedSnapshot>,
    /// Who claims which model; held while one is made: two workers that come at once share it.
    claims: Arc<Mutex<Claims>>,
}

/// What is to become of a worker.
#[derive(Clone, Debug)]
enum Goal {
    /// It is to serve.
    Serve(Arc<WorkerRecord>),
    /// It is to end what it has and go.
    Drain,
    /// It is to go, and what runs there is cut off.
    Cut,
}

impl Fleet {
    /// A fleet without workers; [`Self::start`] lets it follow the list of members.
    #[must_use]
    pub fn new(context: FleetContext, setup: RouterSetup) -> Self {
        let flags = SourceName::new("flag", "--worker");
        Self {
            flags: Arc::new(context.members.source(flags)),
            context,
            setup: Arc::new(setup),
            folders: Arc::default(),
            events: true,
            event_threads: None,
            every: LOAD_EVERY,
            question: QUESTION,
            tls: WorkerTls::default(),
            watchers: Arc::default(),
            snapshot: Arc::default(),
            claims: Arc::default(),
        }
    }

    /// The same, with the tokenizers and templates of these folders (`--model-path`).
    #[must_use]
    pub fn with_model_folders(self, folders: ModelFolders) -> Self {
        Self {
            folders: Arc::new(folders),
            ..self
        }
    }

    /// The same, without listening to cache events (`--no-router-kv-events`).
    #[must_use]
    pub fn without_events(self) -> Self {
        Self {
            events: false,
            ..self
        }
    }

    /// The same, listening to cache events and applying them on these threads (`--router-event-threads`).
    #[must_use]
    pub fn with_event_threads(self, threads: Cores) -> Self {
        Self {
            event_threads: Some(Arc::new(threads)),
            ..self
        }
    }

    /// The same, asking each worker so often how busy it is, and at a fifth of that what it is.
    #[must_use]
    pub fn asking_every(self, every: Duration) -> Self {
        Self { every, ..self }
    }

    /// The same, giving each answer so long to come.
    #[must_use]
    pub fn waiting(self, timeout: Duration) -> Self {
        let question = Bounds {
            timeout,
            ..self.question
        };
        Self { question, ..self }
    }

    /// The same, believing others (`--worker-tls-ca-path`).
    #[must_use]
    pub fn with_tls(self, tls: WorkerTls) -> Self {
        Self { tls, ..self }
    }

    /// The same, with the index that an earlier process kept.
    #[must_use]
    pub fn with_snapshot(self, snapshot: LoadedSnapshot) -> Self {
        Self {
            snapshot: Arc::new(snapshot),
            ..self
        }
    }

    /// Keeps the index for a later process, in the file at `path`.
    #[must_use]
    pub fn snapshot_writer(&self, path: PathBuf) -> Arc<SnapshotWriter> {
        let routers = Arc::clone(&self.context.models) as _;
        SnapshotWriter::new(
            &self.context.host,
            routers,
            Arc::clone(&self.snapshot),
            path,
        )
    }

    /// Follows the list of members from now on.
    pub fn start(&self) {
        let mut changes = self.members().follow();
        self.snapshot.wait_for_models(self.tasks());
        let (fleet, tasks) = (self.clone(), self.tasks().clone());
        self.tasks().spawn(async move {
            loop {
                // In this order: sources that end with the process change nothing any more.
                let change = tokio::select! {
                    biased;
                    () = tasks.draining() => return,
                    change = changes.next() => change,
                };
                match change {
                    Some(change) => fleet.follow(change),
                    None => return,
                }
            }
        });
    }

    /// Adds a worker, as `--worker` does; false if it is there already.
    pub fn watch(&self, worker: WorkerRecord) -> bool {
        self.flags.join(worker) == Ok(JoinOutcome::New)
    }

    /// Lets go of a worker: it gets nothing new, what runs there goes on. False if it is not there.
    pub fn forget(&self, worker: WorkerId) -> bool {
        let leaving = |m: members::Member| m.state == MemberState::Draining;
        let known = self.members().get(worker).is_some_and(|m| !leaving(m));
        known && self.members().remove(worker, false) == Ok(true)
    }

    /// Who is to serve, whether it answers or not.
    #[must_use]
    pub fn workers(&self) -> Vec<Arc<WorkerRecord>> {
        let all = self.members().list().into_iter().map(|(_, member)| member);
        let stay = all.filter(|member| member.state != MemberState::Draining);
        stay.map(|member| member.record).collect()
    }

    fn members(&self) -> &Members {
        &self.context.members
    }

    fn tasks(&self) -> &Tasks {
        &self.context.host.tasks
    }

    /// Makes one change true.
    fn follow(&self, change: Change) {
        let (worker, goal) = match change {
            Change::Joined(record) | Change::Updated(record) => (record.id, Goal::Serve(record)),
            Change::Left { worker, force } => match force {
                true => (worker, Goal::Cut),
                false => (worker, Goal::Drain),
            },
        };
        let mut watchers = self.watchers();
        if let Some(watcher) = watchers.get(&worker) {
            watcher.send_replace(goal);
            return;
        }
        let Goal::Serve(record) = &goal else {
            return self.members().gone(worker);
        };
        let Some(watcher) = Watcher::new(record, self) else {
            return;
        };
        let (sender, goals) = watch::channel(goal);
        watchers.insert(worker, sender);
        let tasks = self.tasks().clone();
        self.tasks().spawn(async move {
            tokio::select! {
                () = watcher.run(goals) => {}
                () = tasks.draining() => {}
            }
        });
    }

    /// Takes a watcher out that has nothing left to do, unless it was given something meanwhile.
    fn is_done(&self, worker: WorkerId, goals: &watch::Receiver<Goal>) -> bool {
        let mut watchers = self.watchers();
        if goals.has_changed().unwrap_or(false) {
            return false;
        }
        watchers.remove(&worker);
        self.members().gone(worker);
        true
    }

    fn pool(&self, endpoint: HttpEndpoint) -> Pool {
        let via = self.context.via.clone();
        Pool::with_via(endpoint, self.tls.clone(), Some(via))
    }

    pub(super) fn snapshot(&self) -> &LoadedSnapshot {
        &self.snapshot
    }

    fn watchers(&self) -> MutexGuard<'_, BTreeMap<WorkerId, watch::Sender<Goal>>> {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Watches one worker.
struct Watcher {
    id: WorkerId,
    /// What counts about it.
    record: Arc<WorkerRecord>,
    pool: Pool,
    /// Earlier pools, from before its record changed, on which something may still run.
    retired: Vec<Pool>,
    /// What it said of itself last.
    known: Facts,
    fleet: Fleet,
    /// The routers that it is a member of.
    routers: Vec<Membership>,
    /// The models that it serves there, by name.
    serves: BTreeMap<Arc<str>, Arc<ServedModel>>,
    /// The models that it said last it serves.
    claimed: BTreeSet<Arc<str>>,
    /// How many that it listed are not served.
    refused: usize,
    /// Who listens to its cache events.
    ears: Ears,
    /// Questions in a row that it did not answer.
    failures: u32,
    /// Times in a row that it was not well.
    unwell: u32,
    /// Questions in a row that nobody answered, while nothing else came from it either.
    quiet: u32,
    /// A router has ejected it.
    faulted: Arc<Notify>,
    /// What was last said about it.
    described: String,
}

impl Watcher {
    fn new(record: &Arc<WorkerRecord>, fleet: &Fleet) -> Option<Self> {
        let endpoint = record.transport.http()?;
        Some(Self {
            id: record.id,
            record: Arc::clone(record),
            pool: fleet.pool(endpoint.clone()),
            retired: Vec::new(),
            known: Facts::default(),
            fleet: fleet.clone(),
            routers: Vec::new(),
            serves: BTreeMap::new(),
            claimed: BTreeSet::new(),
            refused: 0,
            ears: Ears::default(),
            failures: 0,
            unwell: 0,
            quiet: 0,
            faulted: Arc::default(),
            described: String::new(),
        })
    }

    /// Pursues each goal until the worker is gone.
    async fn run(mut self, mut goals: watch::Receiver<Goal>) {
        loop {
            let goal = goals.borrow_and_update().clone();
            let leaves = match goal {
                Goal::Serve(record) => {
                    self.serve_as(&record);
                    tokio::select! {
                        () = self.serve() => false,
                        _ = goals.changed() => false,
                    }
                }
                Goal::Drain => tokio::select! {
                    () = self.drain() => true,
                    _ = goals.changed() => false,
                },
                Goal::Cut => {
                    self.pool.close();
                    self.retired.drain(..).for_each(|pool| pool.close());
                    true
                }
            };
            if leaves {
                self.leave();
                self.disclaim(|_| true);
                self.ears.settle().await;
                if self.fleet.is_done(self.id, &goals) {
                    return;
                }
            }
        }
    }

    /// Takes over what is said about the worker now. One that was on its way out is back.
    fn serve_as(&mut self, record: &Arc<WorkerRecord>) {
        self.pool.set_draining(false);
        if let Some(endpoint) = record.transport.http()
            && (self.pool.is_closed() || self.record != *record)
        {
            let new = self.fleet.pool(endpoint.clone());
            // Until it has said what it is, it is taken for what it was.
            new.set_larger_first(self.pool.larger_first());
            new.set_returns_token_ids(self.pool.returns_token_ids());
            let old = std::mem::replace(&mut self.pool, new);
            self.retired.retain(|pool| pool.in_flight() > 0);
            self.retired.push(old);
            self.record = Arc::clone(record);
            self.known = Facts::default();
            for model in self.serves.values() {
                if let Backend::OpenAi { workers, .. } = &model.backend {
                    workers.insert(self.id, self.pool.clone());
                }
            }
        }
        for membership in &self.routers {
            let draining = |router: &kvasir_router::Router| {
                let member = router.fleet().member(self.id);
                member.is_some_and(|member| member.is_draining())
            };
            if membership.host().ask(draining) {
                tracing::info!(worker = %self.pool.endpoint(), "worker is a member again");
                membership
                    .host()
                    .tell(Input::Joined(membership.spec().clone()));
            }
        }
    }

    async fn serve(&mut self) {
        loop {
            let mut check = self.check().await;
            let facts = match check.mute.take() {
                // It would be as mute about what it is.
                Some(error) => Err(error),
                None => {
                    let told_events = self.record.events.publish().is_some();
                    let question = self.fleet.question;
                    self.pool.facts(&self.known, told_events, question).await
                }
            };
            match facts {
                Ok(facts) => {
                    self.known = facts;
                    self.failures = 0;
                    self.ears.settle().await;
                    self.join();
                }
                Err(error) => self.failed(&error),
            }
            self.give_up_if_quiet();
            self.tell_health(&check);
            self.fleet.members().report(self.id, self.state());
            self.look_on().await;
        }
    }

    /// Looks at the worker's load and health until it is time to ask everything again. One that does not
    /// answer is asked again soon: it stays no longer than it must.
    async fn look_on(&mut self) {
        let looks = match self.is_doubtful() {
            true => 1,
            false => LOADS_PER_PROBE,
        };
        for _ in 0..looks {
            if !self.pause(self.fleet.every).await {
                return;
            }
            self.pool.sweep();
            if self.serves.is_empty() || self.quiet > 0 {
                return;
            }
            match self.load().await {
                Ok(load) => self.report_load(&load),
                Err(error) if error.is_answer() => {}
                // It may only be slow to write that page.
                Err(_) => {
                    if !self.check_again().await {
                        return;
                    }
                }
            }
        }
    }

    /// How busy each rank says it is; SGLang says it without metrics, too, which it has only if told.
    async fn load(&self) -> Result<BTreeMap<u32, RankLoad>, UpstreamError> {
        let question = self.fleet.question;
        let page = self.pool.get("/metrics", question).await;
        match page {
            Err(error) if self.known.kind == EngineKind::Sglang && error.is_answer() => {
                let page = self.pool.get("/v1/loads?include=core", question).await;
                page.map(|page| read_loads(&page))
            }
            page => page.map(|page| read_load(&page_text(&page))),
        }
    }

    fn state(&self) -> MemberState {
        match (self.serves.is_empty(), self.failures) {
            (false, _) if self.is_ejected() => MemberState::Unhealthy,
            (false, _) => MemberState::Serving,
            (true, 0) => MemberState::Joining,
            (true, _) => MemberState::Unreachable,
        }
    }

    /// Takes the worker out of every choice and waits until it has nothing left to do.
    async fn drain(&self) {
        tracing::info!(worker = %self.pool.endpoint(), "worker is draining");
        self.pool.set_draining(true);
        self.tell(|_| Input::Draining(self.id));
        let running =
            || self.pool.in_flight() + self.retired.iter().map(Pool::in_flight).sum::<usize>();
        while self.booked() > 0 || running() > 0 {
            tokio::time::sleep(DRAIN_LOOK).await;
        }
    }

    fn failed(&mut self, error: &UpstreamError) {
        self.failures = self.failures.saturating_add(1);
        // It may be another when it is back.
        self.known.info.is_read = false;
        if self.failures == 1 && health::is_ourselves(error) {
            tracing::error!(worker = %self.pool.endpoint(),
                "this worker is this frontend itself, or a router that leads back to it: it is not used");
        } else if self.failures == 1 {
            tracing::warn!(worker = %self.pool.endpoint(), %error, "worker does not answer");
        }
        if self.failures >= FAILURES_MAX {
            self.known = Facts::default();
            self.leave();
        }
    }
}

#[cfg(test)]
mod tests {
    use kvasir_telemetry::{Clock, MetricOptions, Metrics};
    use kvasir_transport::Tasks;

    use super::*;
    use crate::{App, AppOptions};

    #[test]
    fn a_worker_of_which_other_things_are_said_is_taken_for_what_it_was() {
        let metrics = Metrics::new(&MetricOptions::default()).unwrap();
        let app = App::new(AppOptions::default(), metrics, Clock::new(), Tasks::new());
        let setup = RouterSetup::new(Default::default(), Default::default());
        let fleet = Fleet::new(app.fleet_context(), setup);
        let said = |text: &str| Arc::new(kvasir_upstream::parse_worker(text).unwrap());
        for is in [true, false] {
            let mut watcher = Watcher::new(&said("http://127.0.0.1:9"), &fleet).unwrap();
            watcher.pool.set_larger_first(is);
            watcher.pool.set_returns_token_ids(is);
            watcher.serve_as(&said("http://127.0.0.1:9,block-size=32"));
            assert_eq!(
                (watcher.record.block_size, watcher.retired.len()),
                (Some(32), 1)
            );
            assert_eq!(watcher.pool.larger_first(), is);
            assert_eq!(watcher.pool.returns_token_ids(), is);
        }
    }
}
