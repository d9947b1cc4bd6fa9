//! Keeps a log short: a snapshot now and then, purged of what it tells; and without the consumers of dead routers.
//!
//! Answers one question: when is a snapshot due, and in which steps is it taken so that a router that dies between any two of them loses nothing? The steps are the
//! [`RoundState`]s. Until `Published` nothing has changed that anybody reads; from then on the new snapshot tells all that the old one and the purged messages
//! told. A lock in etcd keeps routers from doing the same work; what keeps them from undoing each other's is that a snapshot is replaced only by who has read it.
//!
//! What always holds: messages are purged up to what the stored snapshot tells, and never before every live router has read them.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvasir_discovery::{Claim, ClaimKind, StoreError};
use kvasir_telemetry::Clock;
use kvasir_transport::jetstream::{JetStreamError, ObjectHead, StreamState};
use kvasir_types::WorkerRank;
use tokio::time::Instant;

use super::LogPlace;
use super::shared::{LogRank, LogShared, Reading, STRANGER_AGE};
use super::snapshot::{LABEL_CREATED, LABEL_SEQUENCE, LogSnapshot, OBJECT, RankPart};
use super::source::Mark;
use super::steps::LogStep;

/// How often it is looked whether something is to be done.
const EVERY: Duration = Duration::from_secs(1);
/// A tenth of it more or less, so that routers do not look at once.
const JITTER_MS: u64 = 200;
/// A consumer whose router is not registered for this long belongs to nobody.
const ORPHAN_AGE: Duration = Duration::from_secs(5);

/// Why nothing was done.
#[derive(Debug, thiserror::Error)]
enum UpkeepError {
    #[error("{0}")]
    JetStream(#[from] JetStreamError),
    #[error("{0}")]
    Store(#[from] StoreError),
}

pub(super) struct Upkeep {
    place: LogPlace,
    shared: Weak<LogShared>,
    clock: Clock,
    /// Since when the stream has messages that the stored snapshot does not tell.
    behind: Option<(u64, Instant)>,
    /// Consumers whose routers are not registered, and since when.
    orphans: BTreeMap<String, Instant>,
    /// Ranks of the stored snapshot that nobody here listens to, and since when.
    absent: BTreeMap<WorkerRank, Instant>,
    told: bool,
}

/// Up to which message of which stream the stored snapshot tells all.
struct Told {
    created: String,
    sequence: u64,
}

/// A snapshot on its way, and the lock under which it is taken, as long as it is held.
struct Round {
    lock: Option<Box<dyn Claim>>,
    state: RoundState,
}

/// What has been done last.
enum RoundState {
    Locked,
    HeadRead {
        head: ObjectHead,
        before: LogSnapshot,
    },
    Captured {
        head: ObjectHead,
        snapshot: LogSnapshot,
    },
    Uploaded {
        head: ObjectHead,
        snapshot: LogSnapshot,
        chunks: String,
        bytes: Vec<u8>,
    },
    Published {
        replaced: ObjectHead,
        told: Told,
    },
    Swept {
        told: Told,
    },
    Purged,
    Unlocked,
}

impl RoundState {
    const fn step(&self) -> LogStep {
        match self {
            Self::Locked => LogStep::Locked,
            Self::HeadRead { .. } => LogStep::HeadRead,
            Self::Captured { .. } => LogStep::Captured,
            Self::Uploaded { .. } => LogStep::Uploaded,
            Self::Published { .. } => LogStep::Published,
            Self::Swept { .. } => LogStep::Swept,
            Self::Purged => LogStep::Purged,
            Self::Unlocked => LogStep::Unlocked,
        }
    }
}

impl Upkeep {
    pub(super) fn new(place: LogPlace, shared: &Arc<LogShared>, clock: Clock) -> Self {
        Self {
            place,
            shared: Arc::downgrade(shared),
            clock,
            behind: None,
            orphans: BTreeMap::new(),
            absent: BTreeMap::new(),
            told: false,
        }
    }

    pub(super) async fn run(mut self) {
        loop {
            let jitter = RandomState::new().build_hasher().finish() % JITTER_MS;
            let pause = EVERY + Duration::from_millis(jitter);
            tokio::time::sleep(pause.saturating_sub(Duration::from_millis(JITTER_MS / 2))).await;
            let Some(shared) = self.shared.upgrade() else {
                return;
            };
            let reading = shared.reading();
            // Only who has seen all that a snapshot would tell can take one.
            if reading.since.is_none() || !shared.has_listeners() {
                continue;
            }
            let done = self.look(&shared, &reading).await;
            let was_told = std::mem::replace(&mut self.told, done.is_err());
            if let Err(error) = done
                && !was_told
            {
                let stream = &self.place.names.stream;
                tracing::warn!(stream, %error, "the stream of cache events cannot be kept short; it is tried again");
            }
        }
    }

    async fn look(&mut self, shared: &LogShared, reading: &Reading) -> Result<(), UpkeepError> {
        let stream = &self.place.names.stream;
        let state = match self.place.jetstream.stream_info(stream).await {
            // Somebody deleted it; who reads it makes it anew.
            Err(JetStreamError::NotFound(_)) => return Ok(()),
            found => found?,
        };
        self.clean_up().await?;
        if state.created != reading.created {
            return Ok(());
        }
        let head = self.place.snapshots.head(OBJECT).await?;
        if !self.is_due(&state, &head, reading) {
            return Ok(());
        }
        let Some(mut round) = self.lock().await? else {
            return Ok(());
        };
        loop {
            self.place.steps.after(round.state.step()).await;
            if matches!(round.state, RoundState::Unlocked) {
                return Ok(());
            }
            round = self.advance(round, shared).await?;
        }
    }

    /// Whether there is something to be done about a stream in this state.
    fn is_due(&mut self, state: &StreamState, head: &ObjectHead, reading: &Reading) -> bool {
        let stored = told_by(head, &state.created);
        let told = stored.unwrap_or(0);
        let behind = match self.behind.filter(|(of, _)| *of == told) {
            Some((_, since)) => since.elapsed(),
            None => {
                self.behind = Some((told, Instant::now()));
                Duration::ZERO
            }
        };
        let news = reading.position > told;
        let is_long = state.messages > self.place.options.snapshot_threshold;
        let is_torn = match stored {
            // Messages were taken away that no snapshot tells.
            Some(told) => state.first > told + 1,
            // None is stored of this stream, and the stream alone does not tell all.
            None => head.is_there() || reading.is_anew || state.first > 1,
        };
        // Before the first of them is too old to be kept.
        let is_late = news && !state.max_age.is_zero() && behind > state.max_age / 2;
        let can_purge = state.first <= told;
        (is_long && (news || can_purge))
            || (is_torn && reading.position + 1 >= state.first)
            || is_late
    }

    /// Takes the lock; none if another router has it.
    async fn lock(&self) -> Result<Option<Round>, UpkeepError> {
        let state = RoundState::Locked;
        let Some(coordination) = &self.place.options.coordination else {
            return Ok(Some(Round { lock: None, state }));
        };
        let name = &self.place.names.snapshot_lock;
        let lock = coordination.claim(name, ClaimKind::Lock).await?;
        Ok(lock.map(|lock| Round {
            lock: Some(lock),
            state,
        }))
    }

    /// Takes the next step. An error, or a death, leaves the lock to expire and everything else as it is.
    async fn advance(&mut self, round: Round, shared: &LogShared) -> Result<Round, UpkeepError> {
        let Round { mut lock, state } = round;
        let state = match state {
            RoundState::Locked => self.read_head().await?,
            RoundState::HeadRead { head, before } => self.capture(shared, head, before).await,
            RoundState::Captured { head, snapshot } => self.upload(head, snapshot).await?,
            RoundState::Uploaded {
                head,
                snapshot,
                chunks,
                bytes,
            } => self.publish(head, &snapshot, &chunks, &bytes).await?,
            RoundState::Published { replaced, told } => {
                let now = self.clock.unix_millis(self.clock.now());
                self.place.snapshots.sweep(OBJECT, &replaced, now).await?;
                RoundState::Swept { told }
            }
            RoundState::Swept { told } => {
                self.purge(&told).await?;
                RoundState::Purged
            }
            RoundState::Purged | RoundState::Unlocked => {
                if let Some(lock) = lock.take() {
                    lock.release().await?;
                }
                RoundState::Unlocked
            }
        };
        Ok(Round { lock, state })
    }

    async fn read_head(&self) -> Result<RoundState, UpkeepError> {
        let found = self.place.snapshots.get(OBJECT).await?;
        let (head, bytes) = match found {
            Some(found) => found,
            None => (self.place.snapshots.head(OBJECT).await?, Vec::new()),
        };
        // One that cannot be read, or of another stream, tells nothing.
        let before = LogSnapshot::decode(&bytes).unwrap_or_default();
        Ok(RoundState::HeadRead { head, before })
    }

    async fn upload(
        &self,
        head: ObjectHead,
        snapshot: LogSnapshot,
    ) -> Result<RoundState, UpkeepError> {
        let bytes = snapshot.encode();
        let chunks = self.chunks_name();
        // Somebody may have deleted the bucket.
        self.place.snapshots.ensure().await?;
        self.place.snapshots.upload(&chunks, &bytes).await?;
        Ok(RoundState::Uploaded {
            head,
            snapshot,
            chunks,
            bytes,
        })
    }

    /// Names the chunks of an upload: when it began, and by chance.
    fn chunks_name(&self) -> String {
        let now = self.clock.unix_millis(self.clock.now());
        let chance = RandomState::new().build_hasher().finish();
        format!("{now:012x}{chance:016x}")
    }

    /// Writes down what all ranks hold. If that is no more than is stored, the stored one stays.
    async fn capture(
        &mut self,
        shared: &LogShared,
        head: ObjectHead,
        before: LogSnapshot,
    ) -> RoundState {
        let reading = shared.reading();
        let is_stored = before.created == reading.created;
        let told = if is_stored { before.sequence } else { 0 };
        let stays = |created| RoundState::Swept {
            told: Told {
                created,
                sequence: told,
            },
        };
        // Who joined after the snapshot that is there now has not seen what it tells.
        if is_stored && reading.since.is_none_or(|since| since > told) {
            return stays(reading.created);
        }
        let (floor, given) = shared.floor();
        let captured = capture_ranks(shared.ranks(), floor, &given, reading.generation).await;
        let Some((ranks, sequence)) = captured else {
            return stays(reading.created);
        };
        if sequence <= told && head.is_there() && is_stored {
            return stays(reading.created);
        }
        let mut snapshot = LogSnapshot {
            created: reading.created,
            sequence,
            ranks,
        };
        if is_stored {
            self.carry(before, &mut snapshot);
        }
        RoundState::Captured { head, snapshot }
    }

    /// Takes over what an earlier snapshot tells of ranks that nobody here listens to: their workers may not have been found yet.
    fn carry(&mut self, before: LogSnapshot, snapshot: &mut LogSnapshot) {
        let here: BTreeSet<WorkerRank> = snapshot.ranks.iter().map(|part| part.rank).collect();
        self.absent.retain(|rank, _| !here.contains(rank));
        for part in before.ranks {
            if here.contains(&part.rank) {
                continue;
            }
            let since = self.absent.entry(part.rank).or_insert_with(Instant::now);
            if since.elapsed() < STRANGER_AGE {
                snapshot.ranks.push(part);
            } else {
                self.absent.remove(&part.rank);
            }
        }
    }

    async fn publish(
        &self,
        head: ObjectHead,
        snapshot: &LogSnapshot,
        chunks: &str,
        bytes: &[u8],
    ) -> Result<RoundState, UpkeepError> {
        let labels = BTreeMap::from([
            (LABEL_CREATED.to_owned(), snapshot.created.clone()),
            (LABEL_SEQUENCE.to_owned(), snapshot.sequence.to_string()),
        ]);
        let store = &self.place.snapshots;
        let published = store.publish(OBJECT, &head, chunks, bytes, &labels).await;
        match published {
            // Another router was first; what we uploaded is swept one day.
            Err(JetStreamError::Conflict(_)) => return Ok(RoundState::Purged),
            published => published?,
        }
        let (stream, ranks) = (&self.place.names.stream, snapshot.ranks.len());
        let sequence = snapshot.sequence;
        tracing::info!(
            stream,
            sequence,
            ranks,
            bytes = bytes.len(),
            "snapshot of the index stored"
        );
        Ok(RoundState::Published {
            replaced: head,
            told: Told {
                created: snapshot.created.clone(),
                sequence,
            },
        })
    }

    /// Takes away messages that the stored snapshot tells and every router has read.
    async fn purge(&self, told: &Told) -> Result<(), UpkeepError> {
        let (jetstream, stream) = (&self.place.jetstream, &self.place.names.stream);
        let consumers = jetstream.durable_consumers(stream).await?;
        let read = consumers.iter().map(|consumer| consumer.ack_floor);
        let until = read.fold(told.sequence, u64::min);
        // One that was made anew meanwhile counts from the start.
        let is_same = jetstream.stream_info(stream).await?.created == told.created;
        if until > 0 && is_same {
            jetstream.purge_stream(stream, Some(until + 1)).await?;
        }
        Ok(())
    }

    /// Takes away consumers whose routers are not there any more.
    async fn clean_up(&mut self) -> Result<(), UpkeepError> {
        let Some(coordination) = &self.place.options.coordination else {
            return Ok(());
        };
        let (jetstream, names) = (&self.place.jetstream, &self.place.names);
        let consumers = jetstream.durable_consumers(&names.stream).await?;
        let live = coordination.names(&names.routers).await?;
        let live: BTreeSet<&str> = live
            .iter()
            .filter_map(|name| name.strip_prefix(&names.routers))
            .collect();
        let own = &self.place.options.router;
        let orphans = consumers.into_iter().map(|consumer| consumer.name);
        let orphans: BTreeSet<String> = orphans
            .filter(|name| !live.contains(&**name) && name != own)
            .collect();
        self.orphans.retain(|name, _| orphans.contains(name));
        for name in orphans {
            let since = self
                .orphans
                .entry(name.clone())
                .or_insert_with(Instant::now);
            if since.elapsed() < ORPHAN_AGE {
                continue;
            }
            let lock = coordination
                .claim(&names.cleanup_lock, ClaimKind::Lock)
                .await?;
            let Some(lock) = lock else { continue };
            let removed = jetstream.delete_consumer(&names.stream, &name).await;
            self.place.steps.after(LogStep::ConsumerRemoved).await;
            lock.release().await?;
            removed?;
            tracing::info!(
                stream = names.stream,
                consumer = name,
                "consumer of a router that is gone was removed"
            );
        }
        Ok(())
    }
}

/// Up to which message a stored snapshot tells all; none if there is none of this stream.
fn told_by(head: &ObjectHead, created: &str) -> Option<u64> {
    let label = |name| head.labels.get(name).map(String::as_str);
    match label(LABEL_CREATED) == Some(created) {
        true => label(LABEL_SEQUENCE).and_then(|text| text.parse().ok()),
        false => None,
    }
}

/// What ranks hold, each while it is paused, and up to which message that tells all: at most `floor`, when ranks had been `given` messages up to those. None if
/// one of them cannot say now.
async fn capture_ranks(
    ranks: BTreeMap<WorkerRank, LogRank>,
    floor: u64,
    given: &BTreeMap<WorkerRank, Mark>,
    generation: u64,
) -> Option<(Vec<RankPart>, u64)> {
    let (mut parts, mut sequence) = (Vec::new(), floor);
    for (rank, open) in ranks {
        // One that was not told anything yet: the earlier snapshot and the stream have it.
        if open.newest.is_none() {
            continue;
        }
        let (index, stream) = open.into?;
        let (_, paused) = stream.pause().await?;
        let status = stream.read(|state| state.status);
        if status.recovering.is_some() {
            return None;
        }
        let (taken, event) = open.progress.taken();
        if given.get(&rank).is_some_and(|given| taken < *given) {
            sequence = sequence.min(taken.sequence_in(generation));
        }
        let blocks = index.dump_rank(rank).into_iter().map(|(_, event)| event);
        parts.push(RankPart {
            rank,
            event,
            sequence: taken.sequence_in(generation),
            exact: status.exact,
            blocks: blocks.collect(),
        });
        drop(paused);
    }
    Some((parts, sequence))
}
