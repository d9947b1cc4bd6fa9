//! Reads a log for as long as somebody listens, and hands each rank its part.
//!
//! What always holds: a rank is given the events of the stream in their order, all after what it was told before; a rank that has not asked is given none, and is
//! remembered as a stranger.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use kvasir_discovery::{Claim, ClaimKind};
use kvasir_transport::SourceEvent;
use kvasir_transport::jetstream::{JetStreamError, PullConsumer, Pulled};
use kvasir_types::WorkerRank;
use kvasir_wire::native::{Encoding, RecoveryReply, RouterEvent, decode_router_events};
use tokio::time::Instant;

use super::LogPlace;
use super::catch_up::{CatchUp, piece};
use super::shared::{LogRank, LogShared, Question, Reading};
use super::snapshot::{LogSnapshot, OBJECT};
use super::source::Piece;
use super::steps::LogStep;

/// Ranks that ask at about the same time are told in one reading.
const GATHER: Duration = Duration::from_millis(20);
/// Between two times that the server is told how far we are.
const ACKNOWLEDGE_EVERY: Duration = Duration::from_millis(100);
/// Between two tries to read a log that cannot be read.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// Snapshots that are read anew because the stream no longer reaches back to them.
const SNAPSHOTS_MAX: usize = 5;

pub(super) struct Reader {
    place: LogPlace,
    shared: Weak<LogShared>,
    /// Says that this router is there.
    presence: Option<Box<dyn Claim>>,
    has_reset: bool,
    /// That the log cannot be read was said.
    told: bool,
    /// An unreadable message was spoken of.
    told_unreadable: bool,
}

impl Reader {
    pub(super) fn new(place: LogPlace, shared: &Arc<LogShared>) -> Self {
        Self {
            place,
            shared: Arc::downgrade(shared),
            presence: None,
            has_reset: false,
            told: false,
            told_unreadable: false,
        }
    }

    pub(super) async fn run(mut self) {
        while let Some(shared) = self.shared.upgrade() {
            if !shared.has_listeners() {
                let woken = tokio::time::timeout(RETRY_PAUSE, shared.wake.notified());
                let _ = woken.await;
                continue;
            }
            match self.read(&shared).await {
                Ok(()) => {}
                Err(error) => {
                    self.tell(Some(&error));
                    drop(shared);
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        }
        if let Some(presence) = self.presence.take() {
            let _ = presence.release().await;
        }
    }

    /// Says once that the log cannot be read, and once that it can.
    fn tell(&mut self, error: Option<&JetStreamError>) {
        let was_told = std::mem::replace(&mut self.told, error.is_some());
        let stream = &self.place.names.stream;
        match error {
            Some(error) if !was_told => {
                tracing::warn!(stream, %error, "cache events cannot be read from JetStream; it is tried again");
            }
            None if was_told => {
                tracing::info!(stream, "cache events are read from JetStream again")
            }
            _ => {}
        }
    }

    /// Reads the log until that cannot go on: the server is away, or the consumer is gone.
    async fn read(&mut self, shared: &Arc<LogShared>) -> Result<(), JetStreamError> {
        self.reset().await?;
        self.register().await;
        let mut consumer = self.attach(shared).await?;
        self.tell(None);
        let mut link = self.place.jetstream.link().watch();
        link.mark_unchanged();
        let mut acknowledge = tokio::time::interval(ACKNOWLEDGE_EVERY);
        acknowledge.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut acknowledged = 0;
        loop {
            if link.borrow().reached.is_ok() {
                tell_link(shared, &SourceEvent::Connected).await;
            }
            if shared.has_questions() {
                tokio::time::sleep(GATHER).await;
                self.answer(shared).await?;
            }
            tokio::select! {
                pulled = consumer.next() => match pulled? {
                    Pulled::Message(message) => {
                        self.deliver(shared, message.sequence, &message.payload).await;
                    }
                    Pulled::Gone => {
                        let (stream, consumer) = (&self.place.names.stream, &self.place.options.router);
                        tracing::info!(stream, consumer, "the consumer of this router is gone; it is made anew");
                        // A server that is deleting the stream needs its time before that can be made anew.
                        tokio::time::sleep(RETRY_PAUSE).await;
                        return Ok(());
                    }
                },
                () = shared.wake.notified() => {}
                _ = acknowledge.tick() => {
                    let (floor, _) = shared.floor();
                    if floor > acknowledged {
                        acknowledged = floor;
                        consumer.acknowledge(floor).await;
                        self.place.steps.after(LogStep::Acknowledged).await;
                    }
                    if !shared.has_listeners() {
                        return self.detach(shared).await;
                    }
                }
                changed = link.changed() => {
                    if changed.is_err() {
                        return Err(JetStreamError::Unreachable("the process ends".to_owned()));
                    }
                    let fault = link.borrow_and_update().reached.clone().err();
                    if let Some(fault) = fault {
                        tell_link(shared, &SourceEvent::Disconnected(fault)).await;
                    }
                }
            }
        }
    }

    async fn reset(&mut self) -> Result<(), JetStreamError> {
        if self.has_reset || !self.place.options.reset {
            return Ok(());
        }
        let (jetstream, stream) = (&self.place.jetstream, &self.place.names.stream);
        jetstream.purge_stream(stream, None).await?;
        self.place.steps.after(LogStep::ResetStream).await;
        self.place.snapshots.delete().await?;
        self.place.steps.after(LogStep::ResetSnapshots).await;
        self.has_reset = true;
        tracing::warn!(
            stream,
            "stream and snapshot were emptied (--router-reset-states): other routers of this component may know more than there is"
        );
        Ok(())
    }

    /// Lets the others know that this router is there, before it has a consumer.
    async fn register(&mut self) {
        let Some(coordination) = &self.place.options.coordination else {
            return;
        };
        if self.presence.is_some() {
            return;
        }
        let name = format!("{}{}", self.place.names.routers, self.place.options.router);
        match coordination.claim(&name, ClaimKind::Presence).await {
            Ok(claim) => self.presence = claim,
            // Without it the others take our consumer away, and we make it anew.
            Err(error) => {
                tracing::warn!(%error, "other routers cannot be told that this one reads the stream")
            }
        }
        self.place.steps.after(LogStep::Registered).await;
    }

    /// Has stream, bucket and consumer, and knows from where on messages are read.
    async fn attach(&mut self, shared: &LogShared) -> Result<PullConsumer, JetStreamError> {
        let LogPlace {
            jetstream,
            snapshots,
            names,
            options,
            steps,
        } = &self.place;
        let state = jetstream
            .ensure_stream(&names.stream, options.max_age, true)
            .await?;
        steps.after(LogStep::StreamReady).await;
        snapshots.ensure().await?;
        steps.after(LogStep::BucketReady).await;
        let reading = shared.reading();
        let is_first = reading.created.is_empty();
        let is_same = reading.created == state.created && reading.position <= state.last;
        let position = match (is_first, is_same) {
            // What there is already is read when the first rank asks.
            (true, _) => state.last,
            (false, true) => reading.position,
            // Another stream: what it holds follows what we know, or its numbers tell that something is missing.
            (false, false) => 0,
        };
        let (stream, router) = (&names.stream, &options.router);
        let consumer = PullConsumer::durable(jetstream, stream, router, position + 1).await?;
        shared.set_reading(|reading| {
            if !is_same {
                reading.since = (!is_first).then_some(0);
                reading.is_anew = !is_first;
                reading.generation += 1;
            }
            reading.created.clone_from(&state.created);
            reading.position = position;
        });
        steps.after(LogStep::ConsumerReady).await;
        if !is_first && !is_same {
            tracing::warn!(
                stream,
                "the stream was deleted and is made anew; this router goes on with what it knows, and stores that as a snapshot"
            );
        }
        tracing::info!(
            stream,
            consumer = router,
            from = position + 1,
            "reading cache events from JetStream"
        );
        Ok(consumer)
    }

    /// Nobody listens any more: nothing is to wait for this router.
    async fn detach(&self, shared: &LogShared) -> Result<(), JetStreamError> {
        shared.set_reading(|reading| {
            *reading = Reading {
                generation: reading.generation,
                ..Reading::default()
            };
        });
        let (stream, router) = (&self.place.names.stream, &self.place.options.router);
        self.place.jetstream.delete_consumer(stream, router).await
    }

    /// Hands a message on.
    async fn deliver(&mut self, shared: &LogShared, sequence: u64, payload: &Bytes) {
        for (rank, events) in self.by_rank(payload) {
            let open = shared.rank(rank).filter(|open| open.newest.is_some());
            let Some(open) = open else {
                shared.note_stranger(rank, sequence);
                continue;
            };
            let newest = events.last().map_or(0, |event| event.id);
            shared.set_newest(rank, open.number, newest);
            send(shared, &open, piece(sequence, events)).await;
        }
        shared.set_reading(|reading| reading.position = sequence);
    }

    /// The events of a message, by rank.
    fn by_rank(&mut self, payload: &Bytes) -> BTreeMap<WorkerRank, Vec<RouterEvent>> {
        let mut events = Vec::new();
        if let Err(error) = decode_router_events(Encoding::Json, payload, &mut events)
            && !std::mem::replace(&mut self.told_unreadable, true)
        {
            let stream = &self.place.names.stream;
            tracing::warn!(stream, %error, "unreadable message in the stream; more are not logged");
        }
        let mut ranks: BTreeMap<WorkerRank, Vec<RouterEvent>> = BTreeMap::new();
        for event in events {
            ranks.entry(event.rank).or_default().push(event);
        }
        ranks
    }

    /// Tells ranks what they want to know.
    async fn answer(&mut self, shared: &Arc<LogShared>) -> Result<(), JetStreamError> {
        let questions = shared.take_questions();
        let told = self.answer_all(shared, &questions).await;
        if told.is_err() {
            // They are put again, as far as nobody has taken them back or put another one.
            for (rank, question) in questions {
                if shared
                    .rank(rank)
                    .is_some_and(|open| open.number == question.number)
                {
                    shared.ask(rank, question);
                }
            }
        }
        told
    }

    async fn answer_all(
        &mut self,
        shared: &LogShared,
        questions: &BTreeMap<WorkerRank, Question>,
    ) -> Result<(), JetStreamError> {
        let mut asking = BTreeMap::new();
        for (rank, question) in questions {
            let Some(open) = shared.rank(*rank) else {
                continue;
            };
            if open.number != question.number {
                continue;
            }
            let newest = open.newest;
            match question.start {
                // It has all that we have.
                Some(start) if newest.is_some_and(|newest| newest + 1 == start) => {
                    let reply = RecoveryReply::TooNew {
                        start,
                        end: start,
                        newest: start - 1,
                    };
                    let attempt = question.attempt;
                    let event = SourceEvent::Answered { attempt, reply };
                    send(shared, &open, silent(event)).await;
                }
                _ => {
                    asking.insert(*rank, (open, *question));
                }
            }
        }
        if asking.is_empty() {
            return Ok(());
        }
        let began = Instant::now();
        let (snapshot, first) = self.snapshot(shared).await?;
        self.place.steps.after(LogStep::SnapshotRead).await;
        let is_sure = first <= snapshot.sequence + 1;
        let mut ranks: BTreeMap<WorkerRank, _> = BTreeMap::new();
        for (rank, (open, question)) in asking {
            let catch_up = CatchUp::new(question.attempt, snapshot.part(rank), is_sure);
            ranks.insert(rank, (open, catch_up));
        }
        let messages = self.read_since(shared, &snapshot, &mut ranks).await?;
        let count = ranks.len();
        for (rank, (open, mut catch_up)) in ranks {
            for piece in catch_up.finish() {
                send(shared, &open, piece).await;
            }
            shared.set_newest(rank, open.number, catch_up.newest());
        }
        shared.set_reading(|reading| {
            let since = snapshot.sequence.min(reading.since.unwrap_or(u64::MAX));
            reading.since = Some(since);
        });
        self.place.steps.after(LogStep::CaughtUp).await;
        let (stream, seconds) = (&self.place.names.stream, began.elapsed().as_secs_f64());
        tracing::info!(
            stream,
            ranks = count,
            snapshot = snapshot.sequence,
            messages,
            seconds,
            "ranks were read from JetStream"
        );
        Ok(())
    }

    /// The stored snapshot, and the number of the first message that the stream holds. Of another stream it counts as none.
    async fn snapshot(&self, shared: &LogShared) -> Result<(LogSnapshot, u64), JetStreamError> {
        let created = shared.reading().created;
        let mut best = (LogSnapshot::default(), 0);
        let mut seen = None;
        for _ in 0..SNAPSHOTS_MAX {
            let found = self.place.snapshots.get(OBJECT).await?;
            let bytes = found.map(|(_, bytes)| bytes);
            let read = bytes.map(|bytes| LogSnapshot::decode(&bytes));
            let snapshot = match read {
                Some(Ok(snapshot)) if snapshot.created == created => snapshot,
                Some(Err(error)) => {
                    tracing::error!(bucket = self.place.names.bucket, %error, "starting from the stream alone");
                    LogSnapshot::default()
                }
                _ => LogSnapshot::default(),
            };
            let stream = &self.place.names.stream;
            let first = self.place.jetstream.stream_info(stream).await?.first;
            let sequence = snapshot.sequence;
            best = (snapshot, first);
            // One that the stream does not reach back to has been replaced, or nobody is there who could.
            if first <= sequence + 1 || seen.replace(sequence) == Some(sequence) {
                break;
            }
        }
        Ok(best)
    }

    /// Hands what the stream holds since the snapshot, up to where it is read anyway, to ranks that ask. Says how many messages that were.
    async fn read_since(
        &mut self,
        shared: &LogShared,
        snapshot: &LogSnapshot,
        ranks: &mut BTreeMap<WorkerRank, (LogRank, CatchUp)>,
    ) -> Result<u64, JetStreamError> {
        let end = shared.reading().position;
        if end <= snapshot.sequence {
            return Ok(0);
        }
        let (jetstream, stream) = (
            self.place.jetstream.clone(),
            self.place.names.stream.clone(),
        );
        if jetstream.stream_info(&stream).await?.first > end {
            return Ok(0);
        }
        let mut consumer = PullConsumer::once(&jetstream, &stream, snapshot.sequence + 1).await?;
        let mut messages = 0;
        loop {
            let message = match consumer.next().await? {
                Pulled::Message(message) => message,
                Pulled::Gone => {
                    let why = "a consumer vanished while it was read".to_owned();
                    return Err(JetStreamError::Unreachable(why));
                }
            };
            if message.sequence > end {
                break;
            }
            messages += 1;
            for (rank, events) in self.by_rank(&message.payload) {
                match ranks.get_mut(&rank) {
                    Some((open, catch_up)) => {
                        for piece in catch_up.take(message.sequence, events) {
                            send(shared, open, piece).await;
                        }
                    }
                    None if shared.rank(rank).is_none_or(|open| open.newest.is_none()) => {
                        shared.note_stranger(rank, message.sequence);
                    }
                    None => {}
                }
            }
            if message.sequence == end || message.pending == 0 {
                break;
            }
        }
        Ok(messages)
    }
}

/// Waits until a rank has room for a piece; one that is gone needs none.
async fn send(shared: &LogShared, open: &LogRank, mut piece: Piece) {
    piece.generation = shared.generation();
    if let Some((sequence, _)) = piece.until {
        open.progress.note_queued(sequence, piece.generation);
    }
    let _ = open.queue.send(piece).await;
}

/// A piece that tells no events.
const fn silent(event: SourceEvent) -> Piece {
    Piece {
        event,
        until: None,
        generation: 0,
    }
}

/// Tells ranks that the log is being read, or that it is not.
async fn tell_link(shared: &LogShared, event: &SourceEvent) {
    let is_connected = matches!(event, SourceEvent::Connected);
    for queue in shared.tell_link(is_connected) {
        let _ = queue.send(silent(event.clone())).await;
    }
}
