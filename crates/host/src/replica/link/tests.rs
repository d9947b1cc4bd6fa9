//! Links over real sockets: who is let in, what each end learns, and what a dead, silent or lying peer costs.

use kvasir_discovery::{Bucket, Change, EndpointName, MemStore, Store};
use kvasir_index::{IndexOptions, Matches};
use kvasir_kv_events::StreamOptions;
use kvasir_router::{Arrival, Input, Lookup, RouterConfig, RouterMode, WorkerSpec};
use kvasir_transport::{MemoryPublisher, SourceEvent, memory_source};
use kvasir_types::{EngineHash, LocalHash, RequestId, SequenceHash, Token, WorkerId, WorkerRank};
use kvasir_wire::engine::{Dialect, Event, Stored, encode_batch};
use kvasir_wire::frame::Frame;
use kvasir_wire::native::{SequenceChange, SequenceEvent, SessionBinding};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::message::RankDigest;
use super::*;
use crate::events::EventStream;
use crate::router_host::RouterHost;
use crate::{Booking, HostOptions, testing};

const RANK: WorkerRank = WorkerRank {
    worker: WorkerId(9),
    rank: kvasir_types::DpRank(0),
};

/// One process.
struct Process {
    host: Arc<RouterHost>,
    replicas: Replicas,
    links: PeerLinks,
    notes: Arc<Notes>,
}

/// What a fleet would answer.
#[derive(Default)]
struct Notes {
    index: Mutex<Option<Vec<u8>>>,
    kept: Mutex<Vec<WorkerNote>>,
}

impl ReplicaFleet for Notes {
    fn snapshot(&self) -> SnapshotFuture<'_> {
        Box::pin(std::future::ready(lock(&self.index).clone()))
    }

    fn notes(&self) -> Vec<WorkerNote> {
        lock(&self.kept).clone()
    }

    fn heard(&self, notes: Vec<WorkerNote>) -> Vec<WorkerNote> {
        let mut kept = lock(&self.kept);
        let news: Vec<WorkerNote> = notes.into_iter().filter(|n| !kept.contains(n)).collect();
        kept.extend(news.clone());
        news
    }
}

fn local() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

impl Process {
    async fn start(id: u64, secret: &str, peers: &[SocketAddr]) -> Self {
        let context = testing::context();
        let config = RouterConfig {
            router_mode: RouterMode::Kv,
            router_replica_sync: true,
            kv_cache_block_size: 4,
            ..RouterConfig::default()
        };
        let options = HostOptions::new(config, IndexOptions::default());
        let host = RouterHost::start(&Arc::from("m"), options, &context);
        host.tell(Input::Joined(WorkerSpec::new(RANK.worker)));
        let replicas = Replicas::new(ReplicaId(id), &context);
        replicas.join(RANK.worker, &host, None);
        let options = PeerOptions {
            secret: PeerSecret::new(secret),
            listen: Some(local()),
            opened: None,
            peers: peers.iter().map(ToString::to_string).collect(),
            store: None,
        };
        let links = PeerLinks::start(&replicas, options).await.unwrap();
        let notes = Arc::new(Notes::default());
        Self {
            host,
            replicas,
            links,
            notes,
        }
    }

    fn address(&self) -> SocketAddr {
        self.links.address().unwrap()
    }

    async fn book(&self, id: u128) -> Booking {
        let lookup = Lookup {
            locals: Arc::from([]),
            sequence: (0..4).map(|n| SequenceHash(id as u64 * 10 + n)).collect(),
            predict_all: false,
            shared: Arc::default(),
        };
        let arrival = Arrival {
            sequence: Arc::clone(&lookup.sequence),
            ..Arrival::new(RequestId(id), 16)
        };
        self.host.route(Box::new(arrival), &lookup).await.unwrap()
    }

    fn requests(&self) -> u32 {
        self.host.ask(|router| router.load(RANK)).unwrap().requests
    }

    async fn until_requests(&self, wanted: u32) {
        until(&format!("{wanted} requests"), || self.requests() == wanted).await;
    }

    async fn until_linked(&self, wanted: usize) {
        until(&format!("{wanted} links"), || {
            self.links.rows().len() == wanted
        })
        .await;
    }

    /// The end of a process, as others see it.
    fn kill(&self) {
        self.replicas.shared.context.tasks.stop();
    }

    /// Its rank's engine publishes from now on.
    fn listen(&self) -> (MemoryPublisher, EventStream) {
        let host = &self.host;
        host.judge(RANK, "http://engine", None, None);
        let (engine, source) = memory_source();
        let options = StreamOptions::new(4);
        let stream = host.subscribe(RANK, "tcp://engine", options, None, |_| source);
        (engine, stream.unwrap())
    }

    fn holds(&self, first: Token) -> bool {
        let tokens: Vec<Token> = (first..first + 4).collect();
        let mut matches = Matches::new();
        let locals: Vec<LocalHash> = kvasir_hash::local_hashes(&tokens, 4, &Default::default());
        self.host.index().find(&locals, &mut matches);
        matches.get(RANK).is_some()
    }

    fn checks(&self, outcome: &str) -> u64 {
        let metrics = &self.replicas.shared.context.metrics;
        let counter = &metrics.replica_index_checks_total;
        counter.with_label_values(&[outcome]).get()
    }
}

async fn until(what: &str, holds: impl Fn() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(30), wait).await;
    assert!(waited.is_ok(), "{what}");
}

async fn pair() -> (Process, Process) {
    let a = Process::start(1, "one secret of us", &[]).await;
    let b = Process::start(2, "one secret of us", &[a.address()]).await;
    a.until_linked(1).await;
    b.until_linked(1).await;
    (a, b)
}

#[tokio::test]
async fn load_is_told_from_the_first_moment_and_goes_with_its_replica() {
    let a = Process::start(1, "one secret of us", &[]).await;
    let before = a.book(1).await;
    let b = Process::start(2, "one secret of us", &[a.address()]).await;
    b.until_requests(1).await;
    let after = b.book(2).await;
    a.until_requests(2).await;
    drop(before);
    b.until_requests(1).await;
    let _lost = a.book(3).await;
    b.until_requests(2).await;
    a.kill();
    b.until_requests(1).await;
    b.until_linked(0).await;
    drop(after);
    assert_eq!(b.requests(), 0);
}

/// More waits for a peer than may: that is counted, its connection ends, and over the next one it is told all that is under way.
#[tokio::test]
async fn a_peer_that_does_not_keep_up_begins_anew() {
    let (a, b) = pair().await;
    let _booked = a.book(1).await;
    b.until_requests(1).await;
    let since = || a.links.rows().first().map(|row| row.since);
    let before = since().unwrap();
    // The one thread of this test takes nothing out meanwhile.
    for _ in 0..=QUEUE_MAX {
        a.links.send_all(&LinkMessage::Workers(Vec::new()));
    }
    let counter = &a.replicas.shared.context.metrics.replica_events_total;
    assert!(counter.with_label_values(&["dropped"]).get() >= 1);
    until("a new connection", || {
        since().is_some_and(|now| now > before)
    })
    .await;
    b.until_requests(1).await;
}

/// Each lists all, itself included: two of them have one connection.
#[tokio::test]
async fn two_replicas_have_one_connection() {
    let free = || {
        let listener = std::net::TcpListener::bind(local()).unwrap();
        listener.local_addr().unwrap()
    };
    let (one, two) = (free(), free());
    let start = async |id, listen| {
        let mut process = Process::start(id, "one secret of us", &[]).await;
        let options = PeerOptions {
            secret: PeerSecret::new("one secret of us"),
            listen: Some(listen),
            opened: None,
            peers: vec![one.to_string(), two.to_string()],
            store: None,
        };
        let replicas = Replicas::new(ReplicaId(id), &process.replicas.shared.context);
        replicas.join(RANK.worker, &process.host, None);
        process.links = PeerLinks::start(&replicas, options).await.unwrap();
        process.replicas = replicas;
        process
    };
    let (a, b) = (start(1, one).await, start(2, two).await);
    a.until_linked(1).await;
    b.until_linked(1).await;
    // Nobody is dialed again and again.
    let made = || a.links.number() + b.links.number();
    until("rest", {
        let last = std::cell::Cell::new((made(), Duration::ZERO));
        move || {
            let (seen, waited) = last.get();
            let now = made();
            let still = now <= seen + 2;
            let waited = if still {
                waited + Duration::from_millis(5)
            } else {
                Duration::ZERO
            };
            last.set((now, waited));
            waited >= Duration::from_secs(2)
        }
    })
    .await;
    assert_eq!((a.links.rows().len(), b.links.rows().len()), (1, 1));
}

/// Nobody is named: each finds the others where it writes its own address.
#[tokio::test]
async fn replicas_find_each_other_in_a_store() {
    let store: Arc<dyn Store> = Arc::new(MemStore::new());
    let start = async |id, name: &str| {
        let mut process = Process::start(id, "one secret of us", &[]).await;
        let options = PeerOptions {
            secret: PeerSecret::new("one secret of us"),
            listen: Some(local()),
            opened: None,
            peers: Vec::new(),
            store: Some(PeerStore {
                store: Arc::clone(&store),
                endpoint: EndpointName::new(name, "kvasir-frontend", "peer"),
                host: "127.0.0.1".to_owned(),
            }),
        };
        let context = testing::context();
        let replicas = Replicas::new(ReplicaId(id), &context);
        replicas.join(RANK.worker, &process.host, None);
        process.links = PeerLinks::start(&replicas, options).await.unwrap();
        process.replicas = replicas;
        (process, context.tasks)
    };
    let (a, _) = start(1, "one").await;
    let (b, leaving) = start(2, "one").await;
    let (stranger, _) = start(3, "another").await;
    a.until_linked(1).await;
    b.until_linked(1).await;
    // The address of one that leaves is taken back; the others find whoever comes next.
    let mut written = store.watch(&[Bucket::Instances]);
    leaving.drain();
    while !matches!(written.next().await, Change::Removed(_)) {}
    let (c, _) = start(4, "one").await;
    let has = |process: &Process, id| {
        process
            .links
            .rows()
            .iter()
            .any(|row| row.id == ReplicaId(id))
    };
    until("both know of each other", || has(&c, 1) && has(&a, 4)).await;
    assert_eq!(stranger.links.rows(), []);
}

#[tokio::test]
async fn who_has_another_secret_or_speaks_something_else_is_not_let_in() {
    let a = Process::start(1, "one secret of us", &[]).await;
    let stranger = Process::start(2, "another secret..", &[a.address()]).await;
    let mut noise = TcpStream::connect(a.address()).await.unwrap();
    noise.write_all(&[0x47; 4096]).await.unwrap();
    let mut silent = TcpStream::connect(a.address()).await.unwrap();
    let friend = Process::start(3, "one secret of us", &[a.address()]).await;
    friend.until_linked(1).await;
    assert_eq!(a.links.rows().len(), 1);
    assert!(stranger.links.rows().is_empty());
    // It says hello, and nothing before who is there has proved anything.
    let mut hello = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(20), silent.read_to_end(&mut hello));
    assert!(read.await.is_ok() && hello.len() < 100);
}

#[tokio::test]
async fn a_replica_that_starts_takes_the_index_of_another() {
    let a = Process::start(1, "one secret of us", &[]).await;
    let index: Vec<u8> = (0..3 * PART_BYTES + 7).map(|n| n as u8).collect();
    *lock(&a.notes.index) = Some(index.clone());
    a.links.serve(a.notes.clone());
    let closed = {
        let listener = std::net::TcpListener::bind(local()).unwrap();
        listener.local_addr().unwrap()
    };
    let long = Duration::from_secs(60);
    let b = Process::start(2, "one secret of us", &[closed, a.address()]).await;
    assert_eq!(b.links.fetch_index(long, 1 << 30).await, Some(index));
    assert_eq!(b.links.fetch_index(long, 1000).await, None, "too large");
    let empty = Process::start(3, "one secret of us", &[b.address()]).await;
    assert_eq!(
        empty.links.fetch_index(long, 1 << 30).await,
        None,
        "it has none yet"
    );
    let alone = Process::start(4, "one secret of us", &[closed]).await;
    assert_eq!(alone.links.fetch_index(long, 1 << 30).await, None);
    // One that takes connections and says nothing.
    let mute = TcpListener::bind(local()).await.unwrap();
    let dumb = mute.local_addr().unwrap();
    let patient = Process::start(5, "one secret of us", &[dumb]).await;
    let short = Duration::from_millis(200);
    assert_eq!(patient.links.fetch_index(short, 1 << 30).await, None);
}

#[tokio::test]
async fn what_operators_say_reaches_all_once() {
    let (a, b) = pair().await;
    let c = Process::start(3, "one secret of us", &[b.address()]).await;
    c.until_linked(1).await;
    for process in [&a, &b, &c] {
        process.links.serve(process.notes.clone());
    }
    let note = WorkerNote {
        url: "http://10.0.0.7:8000".to_owned(),
        added: Some("{}".to_owned()),
        at: 7,
    };
    a.links.tell_notes(std::slice::from_ref(&note));
    until("c", || *lock(&c.notes.kept) == [note.clone()]).await;
    // One that hears it before it has a fleet to tell.
    let late = Process::start(4, "one secret of us", &[c.address()]).await;
    let early = || lock(&late.links.inner.early_notes).len();
    until("heard early", || early() == 1).await;
    late.links.serve(late.notes.clone());
    until("late", || *lock(&late.notes.kept) == [note.clone()]).await;
}

fn frame(sequence: u64, first: Token) -> SourceEvent {
    let tokens: Vec<Token> = (first..first + 4).collect();
    let hashes = [EngineHash(u64::from(first))];
    let stored = Event::Stored(Stored {
        hashes: &hashes,
        tokens: &tokens,
        block_size: 4,
        ..Stored::default()
    });
    let (mut payload, events) = (Vec::new(), [stored].into_iter());
    encode_batch(
        Dialect::Vllm24,
        sequence as f64,
        events,
        Some(0),
        &mut payload,
    );
    let payload = payload.into();
    SourceEvent::Live(Frame { sequence, payload })
}

#[tokio::test]
async fn a_part_of_the_index_that_differs_is_noticed_and_mended() {
    let (a, b) = pair().await;
    let (mut at_a, _stream_a) = a.listen();
    let (mut at_b, _stream_b) = b.listen();
    for engine in [&mut at_a, &mut at_b] {
        engine.events.send(SourceEvent::Connected).await.unwrap();
        let attempt = engine.requests.recv().await.unwrap().attempt;
        let ended = SourceEvent::ReplayEnded { attempt };
        engine.events.send(ended).await.unwrap();
        for sequence in 0..3 {
            let event = frame(sequence, 100 * sequence as Token);
            engine.events.send(event).await.unwrap();
        }
    }
    until("both know", || a.holds(200) && b.holds(200)).await;
    until("they agree", || {
        a.checks("agreed") > 0 && b.checks("agreed") > 0
    })
    .await;
    let rows = a.links.rows();
    assert_eq!((rows[0].ranks_agreed, rows[0].ranks_differing), (1, 0));
    // Something goes wrong in the one that began later; nobody knows, and the stream goes on.
    b.host.index().remove_rank(RANK);
    assert!(!b.holds(200));
    for engine in [&at_a, &at_b] {
        engine.events.send(frame(3, 300)).await.unwrap();
    }
    until("mended", || b.checks("mended") == 1).await;
    assert!([0, 100, 200, 300].into_iter().all(|first| b.holds(first)));
    until("they agree again", || {
        a.links.rows()[0].ranks_differing == 0 && b.links.rows()[0].ranks_differing == 0
    })
    .await;
    assert!(b.checks("differed") > 0 && a.checks("mended") == 0);
}

#[tokio::test]
async fn a_frame_that_was_changed_or_repeated_ends_the_connection() {
    let secret = PeerSecret::new("one secret of us");
    let of = |id| Introduction {
        id: ReplicaId(id),
        began: id,
    };
    for change in 0..3 {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let (from, to) = tokio::io::split(ours);
        let (their_from, their_to) = tokio::io::split(theirs);
        let dial = secure::introduce(from, to, Side::Dialer, of(1), &secret);
        let accept = secure::introduce(their_from, their_to, Side::Acceptor, of(2), &secret);
        let (dialed, accepted) = tokio::join!(dial, accept);
        let (peer, _reader, mut writer) = dialed.unwrap();
        let (_, mut reader, _writer) = accepted.unwrap();
        assert_eq!(peer, of(2));
        writer.write(b"hello").await.unwrap();
        assert_eq!(reader.read().await.unwrap(), b"hello");
        match change {
            0 => writer.skip(),
            1 => writer.write_raw(b"hello").await.unwrap(),
            _ => writer.lie().await.unwrap(),
        }
        let _ = writer.write(b"again").await;
        assert!(reader.read().await.is_err(), "{change}");
    }
}

#[test]
fn every_message_reads_as_it_was_written() {
    let digest = RankDigest {
        sequence: u64::MAX,
        message: 1,
        blocks: 2,
        digest: 3,
    };
    let event = SequenceEvent {
        request: "r".to_owned(),
        rank: RANK,
        router: 7,
        lora: None,
        change: SequenceChange::PrefillCompleted,
    };
    let binding = SessionBinding {
        session: "s".to_owned(),
        rank: RANK,
        sequence: 5,
        writer: 7,
    };
    let router = || "m".to_owned();
    let messages = [
        LinkMessage::Requests {
            router: router(),
            recalled: true,
            events: vec![event],
        },
        LinkMessage::Sessions {
            router: router(),
            bindings: vec![binding],
        },
        LinkMessage::Workers(vec![WorkerNote {
            url: "u".to_owned(),
            added: None,
            at: 5,
        }]),
        LinkMessage::AskIndex,
        LinkMessage::Index {
            last: true,
            bytes: vec![1, 2],
        },
        LinkMessage::Digests {
            router: router(),
            ranks: vec![(RANK, digest)],
        },
        LinkMessage::AskRank {
            router: router(),
            rank: RANK,
        },
        LinkMessage::Rank {
            router: router(),
            rank: RANK,
            at: digest,
            last: false,
            bytes: vec![],
        },
        LinkMessage::Ping,
    ];
    for message in messages {
        let bytes = message.encode();
        assert_eq!(LinkMessage::decode(&bytes), Ok(message));
        for end in 0..bytes.len() {
            assert!(LinkMessage::decode(&bytes[..end]).is_err());
        }
    }
}
