//! Who is a worker, and who says so.
//!
//! Answers one question: which workers are there to be? Any number of sources say so: flags, the workers file, operators,
//! a discovery backend. Each holds a [`WorkerSource`], which is a snapshot with a lifetime of its own. One list collects them
//! all; whoever follows its changes ([`Fleet`](crate::Fleet)) makes them true and reports what became of them.
//!
//! Invariants:
//! - A worker is a member as long as some source has it. One that no source has drains, and stays in the list until what
//!   runs there has ended.
//! - A source that withdraws, or is dropped, takes back what it brought and nothing else.
//! - Of several records of one worker the latest counts. When its source takes it back, the one before it counts again.
//! - The follower is told what each worker is to be now, not every step on the way. So at most one change of a row waits,
//!   and no source ever waits for the follower.
//! - The list has at most [`Members::MAX`] rows, and a source remembers at most as many.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_types::{ApiKey, WorkerId, WorkerRecord};
use kvasir_upstream::default_api_key;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Where records come from: a kind of source that operators know by name, and which one of that kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceName {
    /// What operators see: `flag`, `file`, `api`, and whatever a discovery backend is called.
    pub kind: &'static str,
    /// Which of its kind, such as a path or an endpoint.
    pub instance: String,
}

impl SourceName {
    /// The `instance` of a `kind`.
    pub fn new(kind: &'static str, instance: impl Into<String>) -> Self {
        Self {
            kind,
            instance: instance.into(),
        }
    }

    /// Whether it is elsewhere, and so can be lost.
    #[must_use]
    pub fn is_backend(&self) -> bool {
        matches!(self.kind, "discovery" | "kubernetes")
    }
}

impl fmt::Display for SourceName {
    /// As operators see it: `discovery etcd http://localhost:2379`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.instance)
    }
}

/// What a source is like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SourceState {
    /// What it brought is what it has.
    #[default]
    Ready,
    /// It has not said yet whom it has.
    Starting,
    /// It is out of reach, and why: what it brought last stays.
    Lost(String),
}

/// What a worker is to be from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is new, or back while it was leaving.
    Joined(Arc<WorkerRecord>),
    /// What is said about it has changed.
    Updated(Arc<WorkerRecord>),
    /// No source has it any more.
    Left {
        /// Which.
        worker: WorkerId,
        /// Whether what runs there is cut off, too.
        force: bool,
    },
}

/// How far a member is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberState {
    /// It has not answered yet.
    Joining,
    /// It serves its models.
    Serving,
    /// It serves its models, but its health check fails.
    Unhealthy,
    /// It does not answer.
    Unreachable,
    /// It ends what it has and gets nothing new.
    Draining,
}

impl MemberState {
    /// All there are.
    pub const ALL: [Self; 5] = [
        Self::Joining,
        Self::Serving,
        Self::Unhealthy,
        Self::Unreachable,
        Self::Draining,
    ];

    /// Its name for operators.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Serving => "serving",
            Self::Unhealthy => "unhealthy",
            Self::Unreachable => "unreachable",
            Self::Draining => "draining",
        }
    }
}

/// What a join did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinOutcome {
    /// The worker is new, or back while it was leaving.
    New,
    /// It was there; what counts about it is new.
    Changed,
    /// It was there, just so.
    Same,
}

/// Why the list cannot be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MembersError {
    /// Nobody follows.
    #[error("the workers of this server cannot be changed at run time")]
    Fixed,
    /// Too many rows.
    #[error("there are {} workers already, which is the limit", Members::MAX)]
    Full,
}

/// Part of a snapshot was refused; the next one tries it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{records} workers were refused: {cause}")]
pub struct SnapshotRefused {
    /// How many records.
    pub records: usize,
    /// Why.
    pub cause: MembersError,
}

/// One row of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// What counts about it.
    pub record: Arc<WorkerRecord>,
    /// The sources that have it, oldest first; none, once it is leaving.
    pub sources: Vec<Arc<SourceName>>,
    /// How far it is.
    pub state: MemberState,
    /// Whether it has ever served a model.
    pub has_served: bool,
}

/// The list. Clones are one.
#[derive(Clone, Debug, Default)]
pub struct Members {
    inner: Arc<Mutex<Inner>>,
}

/// Sources in the order in which they came.
type SourceKey = u64;

#[derive(Debug, Default)]
struct Inner {
    rows: BTreeMap<WorkerId, Row>,
    sources: BTreeMap<SourceKey, Snapshot>,
    /// Sources and records are numbered by this, in the order in which they come.
    last_number: u64,
    /// Rows of which the follower has to be told, each once.
    waiting: VecDeque<WorkerId>,
    follower: Option<Arc<Notify>>,
}

/// What a source said last.
#[derive(Debug)]
struct Snapshot {
    name: Arc<SourceName>,
    /// The records of its last snapshot that were taken. An operator may have removed some: they come back when the source
    /// says something else about them.
    taken: BTreeMap<WorkerId, WorkerRecord>,
    state: SourceState,
}

#[derive(Debug)]
struct Row {
    /// What each source says, and when it said so.
    records: BTreeMap<SourceKey, (u64, WorkerRecord)>,
    /// The one that counts; the last one that did, if there is none.
    record: Arc<WorkerRecord>,
    state: MemberState,
    has_served: bool,
    /// When it was first named.
    named: Instant,
    /// It stands in `waiting`.
    waits: bool,
    /// The follower knows it as a member.
    is_followed: bool,
    /// What runs there is to be cut off when it leaves.
    force: bool,
}

impl Members {
    /// Workers in the list, those that are leaving included.
    pub const MAX: usize = 4096;
    /// How long a worker that has never answered may still be loading its model, beside others that serve.
    pub const AWAITED: Duration = Duration::from_secs(30 * 60);

    /// A source that has brought nothing yet.
    #[must_use]
    pub fn source(&self, name: SourceName) -> WorkerSource {
        let mut inner = self.lock();
        let key = inner.next_number();
        let snapshot = Snapshot {
            name: Arc::new(name),
            taken: BTreeMap::new(),
            state: SourceState::Ready,
        };
        inner.sources.insert(key, snapshot);
        drop(inner);
        WorkerSource {
            key,
            members: self.clone(),
            is_detached: false,
        }
    }

    /// Every change from now on, beginning with those who are there. The list is for one follower: a second takes it over.
    #[must_use]
    pub fn follow(&self) -> Changes {
        let wake = Arc::new(Notify::new());
        let mut inner = self.lock();
        inner.follower = Some(Arc::clone(&wake));
        let known: Vec<WorkerId> = inner.rows.keys().copied().collect();
        for worker in known {
            if let Some(row) = inner.rows.get_mut(&worker) {
                row.is_followed = false;
            }
            inner.tell(worker);
        }
        drop(inner);
        Changes {
            members: self.clone(),
            wake,
        }
    }

    /// A worker leaves, whichever sources have it. Says whether it was there; one that is leaving already can still be cut.
    pub fn remove(&self, worker: WorkerId, force: bool) -> Result<bool, MembersError> {
        let mut inner = self.lock();
        let is_fixed = inner.follower.is_none();
        let Some(row) = inner.rows.get_mut(&worker) else {
            return Ok(false);
        };
        if row.records.is_empty() && !force {
            return Ok(true);
        }
        if is_fixed {
            return Err(MembersError::Fixed);
        }
        row.records.clear();
        row.force |= force;
        row.state = MemberState::Draining;
        inner.tell(worker);
        Ok(true)
    }

    /// The rows, by id.
    #[must_use]
    pub fn list(&self) -> Vec<(WorkerId, Member)> {
        let inner = self.lock();
        let rows = inner.rows.iter();
        rows.map(|(id, row)| (*id, inner.member(row))).collect()
    }

    /// The sources, oldest first.
    #[must_use]
    pub fn sources(&self) -> Vec<(Arc<SourceName>, SourceState)> {
        let inner = self.lock();
        let sources = inner.sources.values();
        sources
            .map(|source| (Arc::clone(&source.name), source.state.clone()))
            .collect()
    }

    /// The row of a worker.
    #[must_use]
    pub fn get(&self, worker: WorkerId) -> Option<Member> {
        let inner = self.lock();
        inner.rows.get(&worker).map(|row| inner.member(row))
    }

    /// The follower says how far a worker is. One that is leaving stays so.
    pub(crate) fn report(&self, worker: WorkerId, state: MemberState) {
        if let Some(row) = self.lock().rows.get_mut(&worker)
            && !row.records.is_empty()
        {
            row.state = state;
            row.has_served |= matches!(state, MemberState::Serving | MemberState::Unhealthy);
        }
    }

    /// The members that have not served anything yet and may still bring a model that nobody knows.
    ///
    /// While nobody has served, all of them are waited for; beside workers that serve, each for [`Self::AWAITED`].
    #[must_use]
    pub fn awaited(&self) -> Vec<Arc<WorkerRecord>> {
        let inner = self.lock();
        let alone = !inner.rows.values().any(|row| row.has_served);
        let is_awaited = |row: &&Row| {
            let in_time = alone || row.named.elapsed() < Self::AWAITED;
            !row.has_served && !row.records.is_empty() && in_time
        };
        let rows = inner.rows.values().filter(is_awaited);
        rows.map(|row| Arc::clone(&row.record)).collect()
    }

    /// The follower says that a worker that was leaving is gone; its row stays if it is a member again.
    pub(crate) fn gone(&self, worker: WorkerId) {
        let mut inner = self.lock();
        if let Entry::Occupied(row) = inner.rows.entry(worker)
            && row.get().records.is_empty()
        {
            row.remove();
            inner.waiting.retain(|id| *id != worker);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One source of records: what it has brought stays until it takes that back, or is dropped.
///
/// A source that knows all of its workers at once says so with [`Self::replace`], one that hears of them one by one with
/// [`Self::join`] and [`Self::leave`]. How long a backend may be out of reach before its source is dropped is for its owner
/// to say: the list has no clock for that.
#[derive(Debug)]
pub struct WorkerSource {
    key: SourceKey,
    members: Members,
    is_detached: bool,
}

impl WorkerSource {
    /// The source has this worker.
    pub fn join(&self, record: WorkerRecord) -> Result<JoinOutcome, MembersError> {
        let mut inner = self.members.lock();
        inner.forget_taken(self.key, record.id);
        inner.join(self.key, record)
    }

    /// The source has this worker no longer. It leaves when no other has it; says whether it leaves.
    pub fn leave(&self, worker: WorkerId) -> bool {
        let mut inner = self.members.lock();
        inner.forget_taken(self.key, worker);
        inner.leave(self.key, worker)
    }

    /// The source has these workers and no others. Only what differs from its last snapshot acts, so that a worker which an
    /// operator removed stays removed until the source says something else about it.
    pub fn replace(
        &self,
        snapshot: impl IntoIterator<Item = WorkerRecord>,
    ) -> Result<(), SnapshotRefused> {
        let records = snapshot.into_iter().map(|record| (record.id, record));
        self.members.lock().replace(self.key, records.collect())
    }

    /// What it has brought and not taken back.
    #[must_use]
    pub fn records(&self) -> Vec<WorkerRecord> {
        let inner = self.members.lock();
        let brought = inner
            .rows
            .values()
            .filter_map(|row| row.records.get(&self.key));
        brought.map(|(_, record)| record.clone()).collect()
    }

    /// Says what the source is like. What it brought stays.
    pub fn report(&self, state: SourceState) {
        if let Some(source) = self.members.lock().sources.get_mut(&self.key) {
            source.state = state;
        }
    }

    /// What it was last said to be like.
    #[must_use]
    pub fn state(&self) -> SourceState {
        let inner = self.members.lock();
        let source = inner.sources.get(&self.key);
        source
            .map(|source| source.state.clone())
            .unwrap_or_default()
    }

    /// Takes back all that the source has brought.
    pub fn withdraw(&self) {
        let _ = self.replace([]);
    }

    /// Ends without taking anything back, in a process that is ending itself.
    pub fn detach(mut self) {
        self.is_detached = true;
    }
}

impl Drop for WorkerSource {
    fn drop(&mut self) {
        if !self.is_detached {
            self.withdraw();
            self.members.lock().sources.remove(&self.key);
        }
    }
}

/// What the follower of the list has to make true.
#[derive(Debug)]
pub struct Changes {
    members: Members,
    wake: Arc<Notify>,
}

impl Changes {
    /// The next change; waits for one. `None` if another follows the list now.
    pub async fn next(&mut self) -> Option<Change> {
        loop {
            if !self.is_current() {
                return None;
            }
            match self.try_next() {
                Some(change) => return Some(change),
                None => self.wake.notified().await,
            }
        }
    }

    /// The next change, if one waits already.
    pub fn try_next(&mut self) -> Option<Change> {
        if !self.is_current() {
            return None;
        }
        self.members.lock().next_change()
    }

    fn is_current(&self) -> bool {
        let inner = self.members.lock();
        let follower = inner.follower.as_ref();
        follower.is_some_and(|wake| Arc::ptr_eq(wake, &self.wake))
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        if self.is_current() {
            self.members.lock().follower = None;
        }
    }
}

impl Inner {
    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    fn join(
        &mut self,
        source: SourceKey,
        record: WorkerRecord,
    ) -> Result<JoinOutcome, MembersError> {
        if self.follower.is_none() {
            return Err(MembersError::Fixed);
        }
        let (worker, number) = (record.id, self.next_number());
        let is_full = self.rows.len() >= Members::MAX;
        let outcome = match self.rows.entry(worker) {
            Entry::Vacant(_) if is_full => return Err(MembersError::Full),
            Entry::Vacant(place) => {
                place.insert(Row::new(source, number, record));
                JoinOutcome::New
            }
            Entry::Occupied(mut row) => row.get_mut().join(source, number, record),
        };
        if outcome != JoinOutcome::Same {
            self.tell(worker);
        }
        Ok(outcome)
    }

    /// Says whether the worker leaves.
    fn leave(&mut self, source: SourceKey, worker: WorkerId) -> bool {
        let Some(row) = self.rows.get_mut(&worker) else {
            return false;
        };
        if row.records.remove(&source).is_none() {
            return false;
        }
        let leaves = row.records.is_empty();
        let changed = match leaves {
            true => {
                row.state = MemberState::Draining;
                true
            }
            false => row.settle(),
        };
        if changed {
            self.tell(worker);
        }
        leaves
    }

    fn replace(
        &mut self,
        source: SourceKey,
        snapshot: BTreeMap<WorkerId, WorkerRecord>,
    ) -> Result<(), SnapshotRefused> {
        let Some(known) = self.sources.get_mut(&source) else {
            return Ok(());
        };
        let mut taken = std::mem::take(&mut known.taken);
        taken.retain(|worker, record| snapshot.get(worker) == Some(record));
        let has = |row: &Row| row.records.contains_key(&source);
        let brought = self.rows.iter().filter(|(_, row)| has(row));
        let gone = brought
            .map(|(id, _)| *id)
            .filter(|id| !snapshot.contains_key(id));
        for worker in gone.collect::<Vec<_>>() {
            self.leave(source, worker);
        }
        let mut refused = None;
        for (worker, record) in snapshot {
            if taken.contains_key(&worker) {
                continue;
            }
            let joined = match taken.len() < Members::MAX {
                true => self.join(source, record.clone()),
                false => Err(MembersError::Full),
            };
            match joined {
                Ok(_) => {
                    taken.insert(worker, record);
                }
                Err(cause) => {
                    let records = refused.map_or(0, |refused: SnapshotRefused| refused.records) + 1;
                    refused = Some(SnapshotRefused { records, cause });
                }
            }
        }
        if let Some(known) = self.sources.get_mut(&source) {
            known.taken = taken;
        }
        refused.map_or(Ok(()), Err)
    }

    /// The source speaks of one worker alone: its next snapshot is compared with that, not with its last one.
    fn forget_taken(&mut self, source: SourceKey, worker: WorkerId) {
        if let Some(snapshot) = self.sources.get_mut(&source) {
            snapshot.taken.remove(&worker);
        }
    }

    /// The follower has to be told of a row.
    fn tell(&mut self, worker: WorkerId) {
        if let Some(row) = self.rows.get_mut(&worker)
            && !std::mem::replace(&mut row.waits, true)
        {
            self.waiting.push_back(worker);
        }
        if let Some(follower) = &self.follower {
            follower.notify_one();
        }
    }

    fn next_change(&mut self) -> Option<Change> {
        let worker = self.waiting.pop_front()?;
        let row = self.rows.get_mut(&worker)?;
        row.waits = false;
        if row.records.is_empty() {
            row.is_followed = false;
            let force = std::mem::take(&mut row.force);
            return Some(Change::Left { worker, force });
        }
        row.force = false;
        let record = Arc::clone(&row.record);
        Some(match std::mem::replace(&mut row.is_followed, true) {
            true => Change::Updated(record),
            false => Change::Joined(record),
        })
    }

    fn member(&self, row: &Row) -> Member {
        let name = |key: &SourceKey| Some(Arc::clone(&self.sources.get(key)?.name));
        Member {
            record: Arc::clone(&row.record),
            sources: row.records.keys().filter_map(name).collect(),
            state: row.state,
            has_served: row.has_served,
        }
    }
}

impl Row {
    fn new(source: SourceKey, number: u64, record: WorkerRecord) -> Self {
        Self {
            record: Arc::new(record.clone()),
            records: BTreeMap::from([(source, (number, record))]),
            state: MemberState::Joining,
            has_served: false,
            named: Instant::now(),
            waits: false,
            is_followed: false,
            force: false,
        }
    }

    fn join(&mut self, source: SourceKey, number: u64, mut record: WorkerRecord) -> JoinOutcome {
        let was_leaving = self.records.is_empty();
        // Whoever does not speak of the key does not take it away.
        let before = match was_leaving {
            true => Some(&*self.record),
            false => self.records.get(&source).map(|(_, record)| record),
        };
        default_api_key(&mut record, before.and_then(key_of));
        self.records.insert(source, (number, record));
        match (self.settle(), was_leaving) {
            (_, true) => JoinOutcome::New,
            (true, false) => JoinOutcome::Changed,
            (false, false) => JoinOutcome::Same,
        }
    }

    /// Works out which record counts: the latest, with the latest key where it says none. Says whether that is new.
    fn settle(&mut self) -> bool {
        let mut latest: Vec<&(u64, WorkerRecord)> = self.records.values().collect();
        latest.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
        let Some((_, record)) = latest.first() else {
            return false;
        };
        let mut counts = record.clone();
        let key = latest.iter().find_map(|(_, record)| key_of(record));
        default_api_key(&mut counts, key);
        let is_new = *self.record != counts;
        if is_new {
            self.record = Arc::new(counts);
        }
        is_new
    }
}

fn key_of(record: &WorkerRecord) -> Option<&ApiKey> {
    record.transport.http()?.api_key.as_ref()
}

#[cfg(test)]
mod tests;
