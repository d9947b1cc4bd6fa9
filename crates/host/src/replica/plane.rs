//! Replicas on the event plane: what is published, and what is asked.
//!
//! One task publishes for all routers, on the channels of the endpoint that a worker serves, in the order in which things happened. A
//! replica that comes late asks the others what they have under way (`Topic::Replicas`, ours alone), and again when it hears of a worker
//! or of a replica, until all have answered or it has asked often enough.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kvasir_msgpack::Value;
use kvasir_router::{Input, PEER_BOOKINGS_MAX, PeerRecall, ReplicaId};
use kvasir_transport::event_plane::PlanePublisher;
use kvasir_types::RequestId;
use kvasir_wire::native::{ReplicaMessage, SequenceEvent, SessionBinding};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::{NEWS_MAX, PlaneEnds, ReplicaNews, Replicas, request_id, translate};

/// Events in one message, as Dynamo batches them.
const BATCH_MAX: usize = 256;
/// Commands that wait.
const COMMANDS_MAX: usize = 1024;
/// How long after there is something to ask about it is asked, and again.
const ASK_AFTER: [Duration; 5] = [
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_millis(400),
    Duration::from_millis(800),
    Duration::from_millis(1600),
];
/// Answers that are being put together from their parts.
const RECALLS_MAX: usize = 1024;
/// A replica is answered at most this often: its questions come at least so far apart.
const ANSWER_EVERY: Duration = Duration::from_millis(100);

/// The channels on which this replica speaks about the workers of one endpoint.
#[derive(Debug)]
pub struct ReplicaChannels {
    /// What is booked, `active_sequences_events`.
    pub sequences: PlanePublisher,
    /// Where sessions live, `session_affinity_events`; none where sessions are not bound by header.
    pub sessions: Option<PlanePublisher>,
    /// What replicas ask each other.
    pub replicas: PlanePublisher,
}

impl ReplicaChannels {
    fn publishers(&self) -> impl Iterator<Item = u64> {
        let all = [Some(&self.sequences), self.sessions.as_ref()];
        let all = all.into_iter().flatten().chain([&self.replicas]);
        all.map(PlanePublisher::publisher)
    }
}

/// What the publishing task is told.
#[derive(Debug)]
pub(super) enum PlaneCommand {
    /// The channels of an endpoint are open.
    Open(Arc<str>, Box<ReplicaChannels>),
    /// There is something to ask about.
    Ask,
    /// A channel on which a replica answers is listened to.
    Peer(u64),
    /// It is not any more.
    PeerGone(u64),
    /// A replica asks.
    Asked(ReplicaId),
    /// A replica has answered, on this channel.
    Answered(u64),
}

impl Replicas {
    /// Begins to publish on the event plane, on channels that [`Self::publish_on`] brings.
    pub fn start_plane(&self) {
        let (news, waiting) = mpsc::channel(NEWS_MAX);
        let (commands, told) = mpsc::channel(COMMANDS_MAX);
        if self.shared.plane.set(PlaneEnds { news, commands }).is_ok() {
            let task = PlaneTask {
                replicas: self.clone(),
                channels: BTreeMap::new(),
                peers: BTreeSet::new(),
                question: None,
                answered_at: BTreeMap::new(),
            };
            let tasks = self.shared.context.tasks.background();
            tasks.spawn(task.run(waiting, told));
        }
    }

    /// From now on what concerns workers of an endpoint is published on these channels.
    pub async fn publish_on(&self, scope: &Arc<str>, channels: ReplicaChannels) {
        super::lock(&self.shared.own).extend(channels.publishers());
        if let Some(plane) = self.shared.plane.get() {
            let open = PlaneCommand::Open(Arc::clone(scope), Box::new(channels));
            let _ = plane.commands.send(open).await;
        }
    }

    /// Something may have been missed: others are asked what they have under way.
    pub(crate) fn ask(&self) {
        self.command(PlaneCommand::Ask);
    }

    /// A channel of `Topic::Replicas` is listened to.
    pub(crate) fn channel_up(&self, publisher: u64) {
        self.command(PlaneCommand::Peer(publisher));
    }

    /// It is not any more.
    pub(crate) fn channel_down(&self, publisher: u64) {
        self.command(PlaneCommand::PeerGone(publisher));
    }

    /// A replica asks or answers, on this channel.
    pub(crate) fn hear_replica(&self, publisher: u64, message: &ReplicaMessage) {
        match message {
            ReplicaMessage::Ask { from } if *from != self.shared.id.0 => {
                self.command(PlaneCommand::Asked(ReplicaId(*from)));
            }
            ReplicaMessage::State {
                from,
                to,
                scope,
                last,
                requests,
                sessions,
            } if *to == self.shared.id.0 => {
                requests
                    .iter()
                    .for_each(|event| self.hear(event, None, true));
                sessions
                    .iter()
                    .for_each(|binding| self.hear_session(binding, None));
                let ids = requests.iter().map(|event| request_id(&event.request));
                self.recall(ReplicaId(*from), scope, ids, *last);
                if *last {
                    self.command(PlaneCommand::Answered(publisher));
                }
            }
            _ => {}
        }
    }

    /// Notes a part of what a replica has under way on the workers of an endpoint; of the last one routers are told.
    fn recall(
        &self,
        from: ReplicaId,
        scope: &str,
        ids: impl Iterator<Item = RequestId>,
        last: bool,
    ) {
        let key = (from.0, Arc::from(scope));
        let mut recalls = super::lock(&self.shared.recalls);
        if recalls.len() >= RECALLS_MAX {
            recalls.clear();
        }
        let told: &mut Vec<RequestId> = recalls.entry(key.clone()).or_default();
        told.extend(ids.take(PEER_BOOKINGS_MAX.saturating_sub(told.len())));
        if !last {
            return;
        }
        let requests = recalls.remove(&key).unwrap_or_default();
        drop(recalls);
        let recall = PeerRecall {
            from,
            asked: *super::lock(&self.shared.asked),
            workers: self.workers_in(scope),
            requests,
        };
        for host in self.hosts() {
            host.tell(Input::PeerRecalled(Box::new(recall.clone())));
        }
    }
}

/// What was asked, and who has not answered.
#[derive(Debug)]
struct Question {
    tries: usize,
    next: Instant,
    answered: BTreeSet<u64>,
}

struct PlaneTask {
    replicas: Replicas,
    /// By endpoint.
    channels: BTreeMap<Arc<str>, Box<ReplicaChannels>>,
    /// Channels on which replicas answer.
    peers: BTreeSet<u64>,
    question: Option<Question>,
    /// When replicas that asked were answered.
    answered_at: BTreeMap<ReplicaId, Instant>,
}

impl PlaneTask {
    async fn run(
        mut self,
        mut news: mpsc::Receiver<ReplicaNews>,
        mut commands: mpsc::Receiver<PlaneCommand>,
    ) {
        let mut batch = Vec::with_capacity(BATCH_MAX);
        loop {
            let asks = self.question.as_ref().map(|question| question.next);
            let asks_at = asks.unwrap_or_else(Instant::now);
            tokio::select! {
                got = news.recv_many(&mut batch, BATCH_MAX) => match got {
                    0 => return,
                    _ => self.publish(batch.drain(..)),
                },
                command = commands.recv() => match command {
                    Some(command) => self.follow(command),
                    None => return,
                },
                () = tokio::time::sleep_until(asks_at), if asks.is_some() => self.ask(),
            }
        }
    }

    fn now_ms(&self) -> u64 {
        let clock = &self.replicas.shared.context.clock;
        clock.unix_millis(clock.now())
    }

    fn publish(&self, news: impl Iterator<Item = ReplicaNews>) {
        let (id, clock) = (self.replicas.id(), &self.replicas.shared.context.clock);
        let mut requests: BTreeMap<Arc<str>, Vec<SequenceEvent>> = BTreeMap::new();
        for news in news {
            let Some(scope) = self.replicas.scope_of(news.worker()) else {
                continue;
            };
            match &news {
                ReplicaNews::Request(event) => {
                    let events = requests.entry(scope).or_default();
                    events.push(translate::told(event, id));
                }
                ReplicaNews::Session {
                    id: session,
                    target,
                    since,
                } => {
                    let channels = self.channels.get(&scope);
                    if let Some(channel) = channels.and_then(|c| c.sessions.as_ref()) {
                        let binding = translate::told_session(session, *target, *since, id, clock);
                        self.send(channel, &binding.to_value(), 1);
                    }
                }
            }
        }
        for (scope, events) in requests {
            let Some(channels) = self.channels.get(&scope) else {
                continue; // Whoever finds the channel asks for what it missed.
            };
            let channel = &channels.sequences;
            match channel.is_bare() {
                true => events
                    .iter()
                    .for_each(|event| self.send(channel, &event.to_value(), 1)),
                false => {
                    let batch = SequenceEvent::batch_to_value(&events);
                    self.send(channel, &batch, events.len());
                }
            }
        }
    }

    fn send(&self, channel: &PlanePublisher, value: &Value, events: usize) {
        let mut payload = Vec::new();
        value.to_msgpack(&mut payload);
        let missed = channel.publish(payload, self.now_ms());
        self.replicas.count("sent", events);
        if missed > 0 {
            self.replicas.count("dropped", events);
        }
    }

    fn follow(&mut self, command: PlaneCommand) {
        match command {
            PlaneCommand::Open(scope, channels) => {
                self.channels.insert(scope, channels);
                self.begin_asking();
            }
            PlaneCommand::Ask => self.begin_asking(),
            PlaneCommand::Peer(publisher) => {
                self.peers.insert(publisher);
                self.begin_asking();
            }
            PlaneCommand::PeerGone(publisher) => {
                self.peers.remove(&publisher);
            }
            PlaneCommand::Asked(replica) => self.answer(replica),
            PlaneCommand::Answered(publisher) => {
                let Some(question) = &mut self.question else {
                    return;
                };
                question.answered.insert(publisher);
                if self.peers.is_subset(&question.answered) {
                    self.question = None;
                }
            }
        }
    }

    fn begin_asking(&mut self) {
        self.question = Some(Question {
            tries: 0,
            next: Instant::now() + ASK_AFTER[0],
            answered: BTreeSet::new(),
        });
    }

    fn ask(&mut self) {
        let from = self.replicas.id().0;
        let is_alone = self.peers.is_empty();
        let Some(question) = &mut self.question else {
            return;
        };
        question.tries += 1;
        match ASK_AFTER.get(question.tries) {
            Some(after) => question.next = Instant::now() + *after,
            None => self.question = None,
        }
        if is_alone {
            return;
        }
        *super::lock(&self.replicas.shared.asked) = self.replicas.shared.context.clock.now();
        let ask = ReplicaMessage::Ask { from }.to_value();
        for channels in self.channels.values() {
            self.send(&channels.replicas, &ask, 0);
        }
    }

    /// Tells one that asks what is under way here, a part at a time.
    fn answer(&mut self, to: ReplicaId) {
        let now = Instant::now();
        self.answered_at
            .retain(|_, at| now.duration_since(*at) < ANSWER_EVERY);
        if self.answered_at.contains_key(&to) {
            return;
        }
        self.answered_at.insert(to, now);
        let (requests, sessions) = self.replicas.in_flight();
        let in_scope =
            |worker, scope: &Arc<str>| self.replicas.scope_of(worker).as_ref() == Some(scope);
        for (scope, channels) in &self.channels {
            let requests = requests.iter().filter(|r| in_scope(r.rank.worker, scope));
            let sessions = sessions.iter().filter(|s| in_scope(s.worker(), scope));
            let requests: Vec<SequenceEvent> = requests.cloned().collect();
            let sessions: Vec<SessionBinding> = sessions.cloned().collect();
            let parts = parts(&requests, &sessions);
            let count = parts.len();
            for (number, (requests, sessions)) in parts.into_iter().enumerate() {
                let state = ReplicaMessage::State {
                    from: self.replicas.id().0,
                    to: to.0,
                    scope: scope.to_string(),
                    last: number + 1 == count,
                    requests,
                    sessions,
                };
                self.send(&channels.replicas, &state.to_value(), 0);
            }
        }
    }
}

/// Requests and sessions of one message.
type StatePart = (Vec<SequenceEvent>, Vec<SessionBinding>);

/// An answer in messages of a bounded size; at least one.
fn parts(requests: &[SequenceEvent], sessions: &[SessionBinding]) -> Vec<StatePart> {
    let requests = requests.chunks(BATCH_MAX);
    let mut parts: Vec<StatePart> = requests.map(|part| (part.to_vec(), Vec::new())).collect();
    let sessions = sessions.chunks(BATCH_MAX * 16);
    parts.extend(sessions.map(|part| (Vec::new(), part.to_vec())));
    if parts.is_empty() {
        parts.push(StatePart::default());
    }
    parts
}
