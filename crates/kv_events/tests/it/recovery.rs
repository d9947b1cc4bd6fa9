//! Router events over a plane that loses, repeats, reorders and delays, with workers that come and go and answer when they like:
//! in the end the index is what the workers hold. By seed; and one test per way in which an answer matters.

mod late_events;
mod log;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use kvasir_index::{Index, Matches};
use kvasir_kv_events::publisher::{RING_EVENTS, RankPublisher};
use kvasir_kv_events::{
    Encoding, EventFormat, Notice, Output, RecoveryCause, Resync, Sequencer, SourceEvent,
    SourceFault, StreamOptions,
};
use kvasir_types::{EngineHash, KvEvent, LocalHash, Rng, StoredBlock, Tier, Time, WorkerRank};
use kvasir_wire::native::{RecoveryReply, RecoveryRequest, RouterEvent};

/// Children that a block may have.
const SYMBOLS: u64 = 3;
const DEPTH_MAX: usize = 6;

/// A worker's rank: what it holds, by path, with how many copies; and what it publishes.
struct Worker {
    held: BTreeMap<Vec<u64>, u32>,
    publisher: RankPublisher,
}

/// An engine's name of a block: its path, read as a number.
fn name(path: &[u64]) -> EngineHash {
    EngineHash(path.iter().fold(1, |name, symbol| name * 7 + symbol + 1))
}

fn removed(path: &[u64]) -> KvEvent {
    KvEvent::Removed {
        tier: Tier::Device,
        blocks: vec![name(path)],
    }
}

impl Worker {
    fn new(rank: WorkerRank) -> Self {
        Self {
            held: BTreeMap::new(),
            publisher: RankPublisher::new(rank),
        }
    }

    fn rank(&self) -> WorkerRank {
        self.publisher.rank()
    }

    /// Does something to its cache; what it publishes.
    fn act(&mut self, rng: &mut Rng) -> Vec<RouterEvent> {
        let mut out = Vec::new();
        for _ in 0..=rng.below(3) {
            let event = match rng.below(40) {
                0 => {
                    self.held.clear();
                    Some(KvEvent::Cleared { tier: None })
                }
                1..=14 => self.evict(rng),
                _ => self.store(rng),
            };
            if let Some(event) = event {
                self.publisher.push(event, &mut out);
            }
        }
        self.publisher.flush(&mut out);
        out
    }

    fn store(&mut self, rng: &mut Rng) -> Option<KvEvent> {
        let parents: Vec<&Vec<u64>> = self.held.keys().collect();
        let mut path = match rng.below(parents.len() as u64 + 1) as usize {
            0 => Vec::new(),
            at => parents[at - 1].clone(),
        };
        let parent = (!path.is_empty()).then(|| name(&path));
        let mut blocks = Vec::new();
        for _ in 0..=rng.below(2) {
            if path.len() >= DEPTH_MAX {
                break;
            }
            let symbol = rng.below(SYMBOLS);
            path.push(symbol);
            *self.held.entry(path.clone()).or_default() += 1;
            blocks.push(StoredBlock {
                engine: name(&path),
                local: LocalHash(symbol + 1),
            });
        }
        (!blocks.is_empty()).then_some(KvEvent::Stored {
            tier: Tier::Device,
            parent,
            blocks,
        })
    }

    /// Drops a copy of a block that nothing hangs on, or that is there twice.
    fn evict(&mut self, rng: &mut Rng) -> Option<KvEvent> {
        let is_leaf = |path: &[u64]| {
            let below = |other: &Vec<u64>| other.len() > path.len() && other.starts_with(path);
            !self.held.keys().any(below)
        };
        let may_go = self
            .held
            .iter()
            .filter(|(path, copies)| **copies > 1 || is_leaf(path));
        let may_go: Vec<Vec<u64>> = may_go.map(|(path, _)| path.clone()).collect();
        let path = may_go.get(rng.below(may_go.len() as u64) as usize)?.clone();
        let copies = self.held.get_mut(&path)?;
        *copies -= 1;
        if *copies == 0 {
            self.held.remove(&path);
        }
        Some(removed(&path))
    }
}

/// A question on its way, or its answer on the way back.
enum Asked {
    Question(RecoveryRequest),
    Answer(RecoveryReply),
}

/// The router's side, and all that is under way.
struct World {
    rng: Rng,
    now: Time,
    sequencer: Sequencer,
    index: Index,
    workers: Vec<Worker>,
    next_worker: u64,
    live: VecDeque<Vec<RouterEvent>>,
    asked: BTreeMap<u64, Asked>,
    questions: u64,
    dumps: u64,
}

impl World {
    fn new(seed: u64, held_bytes_max: usize) -> Self {
        let format = EventFormat::RouterEvents(Encoding::MessagePack);
        let options = StreamOptions {
            held_bytes_max,
            ..StreamOptions::router_events(16, seed)
        };
        let mut world = Self {
            rng: Rng::new(seed),
            now: Time::ZERO,
            sequencer: Sequencer::new(format, options),
            index: Index::new(),
            workers: Vec::new(),
            next_worker: 1,
            live: VecDeque::new(),
            asked: BTreeMap::new(),
            questions: 0,
            dumps: 0,
        };
        (0..3).for_each(|_| world.join());
        world.input(SourceEvent::Connected);
        world
    }

    fn join(&mut self) {
        let rank = WorkerRank::new(self.next_worker, self.rng.below(2) as u32);
        self.next_worker += 1;
        self.workers.push(Worker::new(rank));
        self.sequencer.add_rank(rank);
    }

    /// A worker goes and another comes; some of its messages are still under way.
    fn restart_worker(&mut self) {
        let at = self.rng.below(self.workers.len() as u64) as usize;
        let gone = self.workers.swap_remove(at).rank();
        self.sequencer.remove_worker(gone.worker, &self.index);
        self.join();
    }

    fn input(&mut self, event: SourceEvent) {
        let mut out = Vec::new();
        let (now, index) = (self.now, &self.index);
        self.sequencer.step(now, event, index, &mut out);
        self.take(out);
    }

    fn pass_time(&mut self, by: Duration) {
        self.now += by;
        let mut out = Vec::new();
        self.sequencer.tick(self.now, &self.index, &mut out);
        self.take(out);
    }

    fn take(&mut self, out: Vec<Output>) {
        for output in out {
            match output {
                Output::Query { attempt, request } => {
                    self.questions += 1;
                    self.asked.insert(attempt, Asked::Question(request));
                }
                Output::CancelReplay { attempt } => {
                    self.asked.remove(&attempt);
                }
                Output::Replay { .. } => panic!("router events have no replay"),
                Output::Notice(_) => {}
            }
        }
    }

    /// The path takes a message, and may misbehave.
    fn publish(&mut self, message: Vec<RouterEvent>) {
        match self.rng.below(10) {
            0 => {}
            1 => self.live.extend([message.clone(), message]),
            2 => {
                let before = self.live.pop_back();
                self.live.push_back(message);
                self.live.extend(before);
            }
            _ => self.live.push_back(message),
        }
    }

    fn deliver_one(&mut self) {
        if let Some(message) = self.live.pop_front() {
            self.input(SourceEvent::Events(message));
        }
    }

    /// Some question gets a step further.
    fn answer_one(&mut self, faults: bool) {
        let Some((&attempt, _)) = self.asked.iter().next() else {
            return;
        };
        let Some(asked) = self.asked.remove(&attempt) else {
            return;
        };
        match asked {
            Asked::Question(_) if faults && self.rng.below(5) == 0 => {
                let fault = SourceFault::Silent;
                self.input(SourceEvent::ReplayFailed { attempt, fault });
            }
            Asked::Question(request) => {
                let of = |worker: &&Worker| worker.rank() == request.rank;
                let reply = match self.workers.iter().find(of) {
                    Some(worker) => worker.publisher.answer(&request),
                    None => RecoveryReply::Error("gone".to_owned()),
                };
                self.dumps += u64::from(matches!(reply, RecoveryReply::TreeDump { .. }));
                self.asked.insert(attempt, Asked::Answer(reply));
            }
            Asked::Answer(reply) => self.input(SourceEvent::Answered { attempt, reply }),
        }
    }

    fn step(&mut self) {
        match self.rng.below(100) {
            0 => self.restart_worker(),
            1 => {
                self.input(SourceEvent::Disconnected(SourceFault::Silent));
                self.live.clear();
                self.input(SourceEvent::Connected);
            }
            2..=39 => {
                let at = self.rng.below(self.workers.len() as u64) as usize;
                let message = self.workers[at].act(&mut self.rng);
                if !message.is_empty() {
                    self.publish(message);
                }
            }
            40..=69 => self.deliver_one(),
            70..=89 => self.answer_one(true),
            90 => self.pass_time(Duration::from_secs(31)),
            _ => self.pass_time(Duration::from_millis(150)),
        }
    }

    /// Everything arrives, everything is answered, and a quiet minute passes.
    fn settle(&mut self) {
        for _ in 0..4 {
            while !self.live.is_empty() {
                self.deliver_one();
            }
            for _ in 0..40 {
                while !self.asked.is_empty() {
                    self.answer_one(false);
                }
                self.pass_time(Duration::from_secs(2));
            }
        }
    }

    fn check(&self, seed: u64) {
        let mut matches = Matches::new();
        let mut entries = 0;
        for worker in &self.workers {
            entries += worker.held.len() as u64;
            for path in worker.held.keys() {
                let locals: Vec<LocalHash> = path.iter().map(|s| LocalHash(s + 1)).collect();
                self.index.find(&locals, &mut matches);
                let found = matches.get(worker.rank()).map_or(0, |m| m.device);
                assert_eq!(
                    found as usize,
                    path.len(),
                    "seed {seed}: {:?}",
                    worker.rank()
                );
            }
        }
        assert_eq!(self.index.stats().entries, entries, "seed {seed}");
        let status = self.sequencer.status();
        assert!(status.exact, "seed {seed}: {status:?}");
        assert_eq!(
            (status.recovering, status.held_bytes),
            (None, 0),
            "seed {seed}"
        );
    }
}

fn run(seed: u64, held_bytes_max: usize) -> World {
    let mut world = World::new(seed, held_bytes_max);
    for _ in 0..600 {
        world.step();
    }
    world.settle();
    world.check(seed);
    world
}

#[test]
fn whatever_the_plane_does_the_index_becomes_what_the_workers_hold() {
    let (mut questions, mut dumps) = (0, 0);
    for seed in 0..150 {
        let world = run(seed, 16 << 20);
        questions += world.questions;
        dumps += world.dumps;
    }
    assert!(questions > 1000 && dumps > 100, "{questions} {dumps}");
}

/// With room for next to nothing: what had to be dropped is asked for again.
#[test]
fn live_events_that_find_no_room_are_asked_for_again() {
    let mut dropped = 0;
    for seed in 1000..1060 {
        let world = run(seed, 600);
        dropped += world.sequencer.status().counts.held_dropped;
    }
    assert!(dropped > 100, "{dropped}");
}

/// Many seeds: `cargo test -p kvasir-kv-events -- --ignored many_seeds`.
#[test]
#[ignore = "takes minutes"]
fn many_seeds_of_a_plane_that_misbehaves() {
    for seed in 10_000..20_000 {
        run(seed, if seed % 2 == 0 { 16 << 20 } else { 1000 });
    }
}

const RANK: WorkerRank = WorkerRank {
    worker: kvasir_types::WorkerId(1),
    rank: kvasir_types::DpRank(0),
};

/// One rank, its worker, and what was asked and said.
struct One {
    now: Time,
    sequencer: Sequencer,
    index: Index,
    publisher: RankPublisher,
    chain: u64,
}

impl One {
    fn new() -> Self {
        let format = EventFormat::RouterEvents(Encoding::MessagePack);
        let options = StreamOptions {
            start_jitter: Duration::ZERO,
            ..StreamOptions::router_events(16, 1)
        };
        let mut sequencer = Sequencer::new(format, options);
        sequencer.add_rank(RANK);
        Self {
            now: Time::ZERO,
            sequencer,
            index: Index::new(),
            publisher: RankPublisher::new(RANK),
            chain: 0,
        }
    }

    /// The worker stores the next block of its one chain.
    fn publish(&mut self) -> RouterEvent {
        self.chain += 1;
        let mut out = Vec::new();
        let stored = KvEvent::Stored {
            tier: Tier::Device,
            parent: (self.chain > 1).then(|| EngineHash(self.chain - 1)),
            blocks: vec![StoredBlock {
                engine: EngineHash(self.chain),
                local: LocalHash(self.chain),
            }],
        };
        self.publisher.push(stored, &mut out);
        self.publisher.flush(&mut out);
        out.remove(0)
    }

    fn step(&mut self, event: SourceEvent) -> Vec<Output> {
        let mut out = Vec::new();
        self.sequencer.step(self.now, event, &self.index, &mut out);
        out
    }

    fn live(&mut self, event: RouterEvent) -> Vec<Output> {
        self.step(SourceEvent::Events(vec![event]))
    }

    fn pass(&mut self, by: Duration) -> Vec<Output> {
        self.now += by;
        let mut out = Vec::new();
        self.sequencer.tick(self.now, &self.index, &mut out);
        out
    }

    /// The worker's own answer to the only question in `out`.
    fn answer(&mut self, out: &[Output]) -> Vec<Output> {
        let (attempt, request) = question(out);
        let reply = self.publisher.answer(&request);
        self.step(SourceEvent::Answered { attempt, reply })
    }

    fn depth(&self) -> u32 {
        let locals: Vec<LocalHash> = (1..=self.chain).map(LocalHash).collect();
        let mut matches = Matches::new();
        self.index.find(&locals, &mut matches);
        matches.get(RANK).map_or(0, |m| m.device)
    }

    fn is_exact(&self) -> bool {
        self.sequencer.status().exact
    }
}

fn question(out: &[Output]) -> (u64, RecoveryRequest) {
    let asked = out.iter().find_map(|output| match output {
        Output::Query { attempt, request } => Some((*attempt, *request)),
        _ => None,
    });
    asked.unwrap_or_else(|| panic!("nothing was asked: {out:?}"))
}

fn recovered(cause: RecoveryCause, messages: u64) -> Output {
    Output::Notice(Notice::Recovered { cause, messages })
}

fn whole() -> Output {
    Output::Notice(Notice::Whole { rank: RANK })
}

/// A router that comes late has everything from the first answer on, and what came live meanwhile.
#[test]
fn a_late_router_asks_for_the_whole_state_and_keeps_what_comes_live() {
    let mut one = One::new();
    (0..5).for_each(|_| drop(one.publish()));
    let asked = one.step(SourceEvent::Connected);
    let (attempt, request) = question(&asked);
    assert_eq!(request, RecoveryRequest::new(RANK, None));
    let reply = one.publisher.answer(&request);
    let live = one.publish();
    assert_eq!(one.live(live), []);
    assert_eq!(one.depth(), 0, "nothing is built on what is not known");
    let out = one.step(SourceEvent::Answered { attempt, reply });
    assert_eq!(out, [recovered(RecoveryCause::Join, 1), whole()]);
    assert_eq!(one.depth(), 6);
    assert!(one.is_exact());
}

/// A gap is asked for by number; while the question is out, nothing of the rank is forgotten.
#[test]
fn a_gap_is_filled_by_the_events_that_are_missing() {
    let mut one = One::new();
    let joined = one.step(SourceEvent::Connected);
    one.answer(&joined);
    let events: Vec<RouterEvent> = (0..6).map(|_| one.publish()).collect();
    one.live(events[0].clone());
    let out = one.live(events[3].clone());
    let (_, request) = question(&out);
    assert_eq!(request.start, Some(2));
    assert_eq!(one.depth(), 1);
    assert_eq!(one.live(events[5].clone()), []);
    let out = one.answer(&out);
    assert_eq!(out, [recovered(RecoveryCause::Gap, 5)]);
    assert_eq!(one.depth(), 6);
    assert!(one.is_exact());
    assert_eq!(one.sequencer.status().counts.repaired, 5);
}

/// What only came late needs no answer.
#[test]
fn a_gap_that_closes_by_itself_takes_its_question_back() {
    let mut one = One::new();
    let joined = one.step(SourceEvent::Connected);
    one.answer(&joined);
    let events: Vec<RouterEvent> = (0..3).map(|_| one.publish()).collect();
    one.live(events[0].clone());
    let (attempt, _) = question(&one.live(events[2].clone()));
    let out = one.live(events[1].clone());
    let cancelled = Output::CancelReplay { attempt };
    assert_eq!(out, [cancelled, recovered(RecoveryCause::Gap, 0)]);
    assert_eq!((one.depth(), one.sequencer.status().recovering), (3, None));
}

/// Past the worker's ring the answer is its whole state, which replaces the rank.
#[test]
fn a_gap_that_the_worker_cannot_fill_is_answered_by_its_whole_state() {
    let mut one = One::new();
    let joined = one.step(SourceEvent::Connected);
    one.answer(&joined);
    let first = one.publish();
    one.live(first);
    for _ in 0..RING_EVENTS + 10 {
        one.publish();
    }
    let last = one.publish();
    let out = one.live(last);
    let (attempt, request) = question(&out);
    let reply = one.publisher.answer(&request);
    assert!(matches!(reply, RecoveryReply::TreeDump { .. }));
    one.step(SourceEvent::Answered { attempt, reply });
    assert_eq!(one.depth(), RING_EVENTS as u32 + 12);
    assert!(one.is_exact());
}

/// Eight attempts, pauses from 200 ms on that double, 30 s for each; then live events go on alone, and the next gap asks
/// again.
#[test]
fn a_worker_that_never_answers_is_given_up_and_asked_at_the_next_gap() {
    let mut one = One::new();
    let joined = one.step(SourceEvent::Connected);
    one.answer(&joined);
    let events: Vec<RouterEvent> = (0..9).map(|_| one.publish()).collect();
    one.live(events[0].clone());
    let mut out = one.live(events[2].clone());
    let mut pauses = Vec::new();
    for attempt in 1..=8 {
        assert_eq!(question(&out).1.start, Some(2), "attempt {attempt}");
        assert_eq!(one.pass(Duration::from_secs(29)), []);
        let after = one.pass(Duration::from_secs(1));
        if attempt == 8 {
            let (rank, cause) = (RANK, RecoveryCause::Gap);
            let failed = Output::Notice(Notice::QueryFailed { rank, cause });
            assert!(after.contains(&failed), "{after:?}");
            break;
        }
        let wait = one.sequencer.next_deadline().unwrap() - one.now;
        pauses.push(wait.as_millis());
        out = one.pass(wait);
    }
    assert_eq!(pauses, [200, 400, 800, 1600, 3200, 6400, 12_800]);
    assert_eq!(
        one.depth(),
        0,
        "the rank may know less than its worker, never more"
    );
    assert!(!one.is_exact());
    assert_eq!(one.live(events[3].clone()), [], "live events go on");
    let out = one.live(events[7].clone());
    assert_eq!(question(&out).1.start, Some(5));
    one.answer(&out);
    assert!(one.sequencer.status().recovering.is_none());
}

/// The last message of a quiet worker was lost: nobody notices but by asking.
#[test]
fn a_quiet_rank_is_compared_now_and_then() {
    let mut one = One::new();
    let joined = one.step(SourceEvent::Connected);
    one.answer(&joined);
    let first = one.publish();
    one.live(first);
    one.publish();
    assert_eq!(one.pass(Duration::from_secs(59)), []);
    let out = one.pass(Duration::from_secs(1));
    assert_eq!(question(&out).1.start, Some(2));
    let out = one.answer(&out);
    assert_eq!(out, [recovered(RecoveryCause::Verify, 1)]);
    assert_eq!(one.depth(), 2);
    let out = one.pass(Duration::from_secs(60));
    assert_eq!(one.answer(&out), [], "nothing is missing: nothing is said");
    // A comparison that fails changes nothing, and live events do not wait for it.
    let out = one.pass(Duration::from_secs(60));
    let third = one.publish();
    one.live(third);
    assert_eq!(one.depth(), 3);
    let (attempt, fault) = (question(&out).0, SourceFault::Silent);
    one.step(SourceEvent::ReplayFailed { attempt, fault });
    assert_eq!((one.depth(), one.is_exact()), (3, true));
}

/// A worker that counts from the start again under its old name has another cache.
#[test]
fn a_worker_that_began_again_is_asked_for_its_whole_state() {
    let mut one = One::new();
    let joined = one.step(SourceEvent::Connected);
    one.answer(&joined);
    for _ in 0..5 {
        let event = one.publish();
        one.live(event);
    }
    (one.publisher, one.chain) = (RankPublisher::new(RANK), 0);
    one.publish();
    one.step(SourceEvent::Disconnected(SourceFault::Silent));
    let out = one.step(SourceEvent::Connected);
    assert_eq!(question(&out).1.start, Some(6));
    let out = one.answer(&out);
    assert!(out.contains(&Output::Notice(Notice::Restarted)), "{out:?}");
    one.answer(&out);
    one.chain = 5;
    assert_eq!(one.depth(), 1);
    assert!(one.is_exact());
}

/// A view that was found wrong is replaced, not forgotten first; one whose events are wrong is forgotten.
#[test]
fn a_wrong_view_is_replaced_by_what_the_worker_says() {
    let mut one = One::new();
    let joined = one.step(SourceEvent::Connected);
    one.answer(&joined);
    let first = one.publish();
    one.live(first);
    let resync = |one: &mut One, how| {
        let mut out = Vec::new();
        one.sequencer.resync(one.now, how, &one.index, &mut out);
        out
    };
    let out = resync(&mut one, Resync::Fill);
    assert_eq!(question(&out).1.start, None);
    assert_eq!(one.depth(), 1);
    one.answer(&out);
    assert_eq!(one.depth(), 1);
    assert_eq!(resync(&mut one, Resync::Forget), []);
    assert_eq!(one.depth(), 0);
}

/// An answer that cannot be right ends in a way: the live stream is believed.
#[test]
fn a_worker_that_denies_what_it_published_is_not_asked_for_ever() {
    let mut one = One::new();
    let joined = one.step(SourceEvent::Connected);
    one.answer(&joined);
    let events: Vec<RouterEvent> = (0..5).map(|_| one.publish()).collect();
    one.live(events[0].clone());
    let mut out = one.live(events[4].clone());
    let mut asked = 0;
    while out.iter().any(|o| matches!(o, Output::Query { .. })) {
        asked += 1;
        assert!(asked < 20);
        let (attempt, request) = question(&out);
        let reply = match request.start {
            Some(start) => RecoveryReply::TooNew {
                start,
                end: start - 1,
                newest: start - 1,
            },
            None => RecoveryReply::TreeDump {
                events: vec![events[0].clone()],
                last: 1,
            },
        };
        out = one.step(SourceEvent::Answered { attempt, reply });
    }
    assert!(one.sequencer.status().recovering.is_none());
    assert_eq!(one.sequencer.status().held_bytes, 0);
    assert!(!one.is_exact());
}

/// Numbers at their end, from a worker that makes them up.
#[test]
fn numbers_at_their_end_overflow_nothing() {
    let mut one = One::new();
    let joined = one.step(SourceEvent::Connected);
    let (attempt, _) = question(&joined);
    let (events, last) = (vec![], u64::MAX);
    let reply = RecoveryReply::TreeDump { events, last };
    one.step(SourceEvent::Answered { attempt, reply });
    let mut event = one.publish();
    event.id = u64::MAX;
    one.live(event.clone());
    event.id = 0;
    one.live(event);
    one.pass(Duration::from_secs(61));
    one.pass(Duration::from_secs(61));
}
