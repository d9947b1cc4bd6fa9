//! NATS with JetStream, etcd, a worker that writes to a stream, and routers that die.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvasir_discovery::{EtcdOptions, EtcdStore, Store};
use kvasir_host::{
    EndpointRecovery, EventLogOptions, EventPlane, EventPlaneOptions, HostContext, HostOptions,
    LogStep, PlaneChange, PlaneWorker, RouterHost, StepFuture, StepHook,
};
use kvasir_index::IndexOptions;
use kvasir_kv_events::publisher::RankPublisher;
use kvasir_router::{Input, RouterConfig, RouterMode, WorkerSpec};
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, MetricOptions, Metrics};
use kvasir_transport::jetstream::{JetStream, LogPublisher, LogPublisherOptions, ObjectStore};
use kvasir_transport::nats::{NatsLink, NatsOptions};
use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerId, WorkerRank};
use kvasir_wire::native::{
    Encoding, LogNames, RecoveryReply, RecoveryRequest, RouterEvent, encode_router_event,
};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Nothing here takes as long, however slow the machine is.
pub(crate) const SOON: Duration = Duration::from_secs(180);
pub(crate) const NAMESPACE: &str = "test";
/// Messages past which a snapshot is taken.
pub(crate) const THRESHOLD: u64 = 8;

/// A server that is ended with the test.
pub(crate) struct ServerProcess {
    process: Option<Child>,
    command: Vec<String>,
    folder: PathBuf,
    pub(crate) port: u16,
}

/// A port that nobody listens on, and that no connection of another test is given: a server that is started again finds it free.
fn free_port() -> u16 {
    static TAKEN: AtomicU64 = AtomicU64::new(0);
    loop {
        let taken = TAKEN.fetch_add(1, Ordering::Relaxed);
        let number = u64::from(std::process::id()) * 41 + taken;
        let port = 12_000 + (number % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

impl ServerProcess {
    fn start(tool: &str, args: impl FnOnce(u16, u16, &str) -> Vec<String>) -> Option<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvasir-{tool}-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let (port, other) = (free_port(), free_port());
        let mut command = vec![tool.to_owned()];
        command.extend(args(port, other, &folder.display().to_string()));
        let mut this = Self {
            process: None,
            command,
            folder,
            port,
        };
        this.run().then_some(this)
    }

    /// NATS with JetStream; none, and a line that says so, if it is not installed.
    fn nats() -> Option<Self> {
        Self::start("nats-server", |port, _, folder| {
            let port = port.to_string();
            ["-js", "-a", "127.0.0.1", "-p", &port, "-sd", folder]
                .map(str::to_owned)
                .to_vec()
        })
    }

    /// etcd; none, and a line that says so, if it is not installed.
    fn etcd() -> Option<Self> {
        Self::start("etcd", |port, peer, folder| {
            let (client, peer) = (
                format!("http://127.0.0.1:{port}"),
                format!("http://127.0.0.1:{peer}"),
            );
            let cluster = format!("default={peer}");
            [
                "--data-dir",
                folder,
                "--listen-client-urls",
                &client,
                "--advertise-client-urls",
                &client,
                "--listen-peer-urls",
                &peer,
                "--initial-advertise-peer-urls",
                &peer,
                "--initial-cluster",
                &cluster,
            ]
            .map(str::to_owned)
            .to_vec()
        })
    }

    #[expect(clippy::print_stdout, reason = "what is skipped is said")]
    pub(crate) fn run(&mut self) -> bool {
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]);
        match command.stdout(Stdio::null()).stderr(Stdio::null()).spawn() {
            Ok(process) => {
                self.process = Some(process);
                true
            }
            Err(error) => {
                println!("SKIPPED: {} cannot be run ({error})", self.command[0]);
                false
            }
        }
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    pub(crate) fn wipe(&self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.kill();
        self.wipe();
    }
}

/// The servers of a test.
pub(crate) struct Servers {
    pub(crate) nats: ServerProcess,
    etcd: Option<ServerProcess>,
}

impl Servers {
    /// NATS alone; none if it is not installed.
    pub(crate) fn nats() -> Option<Self> {
        let nats = ServerProcess::nats()?;
        Some(Self { nats, etcd: None })
    }

    /// NATS and etcd; none if one of them is not installed.
    pub(crate) fn nats_and_etcd() -> Option<Self> {
        let etcd = Some(ServerProcess::etcd()?);
        let nats = ServerProcess::nats()?;
        Some(Self { nats, etcd })
    }

    /// Routers that use them.
    pub(crate) fn setup(&self) -> RouterSetup {
        RouterSetup {
            nats: self.nats.port,
            etcd: self.etcd.as_ref().map(|etcd| etcd.port),
            ..RouterSetup::default()
        }
    }
}

pub(crate) fn link(port: u16, tasks: &Tasks) -> NatsLink {
    let options = NatsOptions {
        servers: vec![format!("nats://127.0.0.1:{port}")],
        ..NatsOptions::default()
    };
    NatsLink::new(&options, tasks).unwrap()
}

/// What a cache holds: each block with its tokens.
pub(crate) type Blocks = BTreeSet<(u64, u64)>;

fn blocks<'e>(events: impl Iterator<Item = &'e KvEvent>) -> Blocks {
    let stored = events.filter_map(|event| match event {
        KvEvent::Stored { blocks, .. } => Some(blocks),
        _ => None,
    });
    let blocks = stored.flatten();
    blocks
        .map(|block| (block.engine.0, block.local.0))
        .collect()
}

/// A worker of one rank, whose engine stores chains and drops old blocks.
pub(crate) struct Worker {
    pub(crate) rank: WorkerRank,
    cache: RankPublisher,
    log: LogPublisher,
    next: u64,
    pub(crate) jetstream: JetStream,
    pub(crate) names: LogNames,
    runtime: Option<Runtime>,
}

impl Worker {
    pub(crate) fn new(nats: u16, worker: u64, component: &str) -> Self {
        let runtime = runtime();
        let tasks = Tasks::new();
        let names = LogNames::of(NAMESPACE, component);
        let _entered = runtime.enter();
        let jetstream = JetStream::new(link(nats, &tasks));
        let options = LogPublisherOptions {
            stream: names.stream.clone(),
            subject: names.subject.clone(),
            max_age: Duration::from_secs(3600),
            publisher: worker,
        };
        let rank = WorkerRank::new(worker, 0);
        Self {
            rank,
            cache: RankPublisher::new(rank),
            log: LogPublisher::start(jetstream.clone(), options, &tasks),
            next: 0,
            jetstream,
            names,
            runtime: Some(runtime),
        }
    }

    /// Does something with the server, from outside of any runtime.
    pub(crate) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        let runtime = self.runtime.as_ref().unwrap();
        let done = runtime.block_on(async { tokio::time::timeout(SOON, future).await });
        done.expect("the server does not answer")
    }

    /// Changes the cache so many times: each a message of its own, which the server has when this returns. Every third step the oldest chain goes.
    pub(crate) fn work(&mut self, steps: u64) {
        for _ in 0..steps {
            let last = self.last();
            self.change();
            let written = async {
                while self.last_written().await <= last {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            };
            self.block_on(written);
        }
    }

    /// The next change, told without waiting.
    pub(crate) fn change(&mut self) {
        const CHAIN: u64 = 4;
        self.next += 1;
        let first = self.next * 100;
        let chain = |first: u64| (first..first + CHAIN).map(EngineHash);
        let event = match self.next % 3 {
            0 => KvEvent::Removed {
                tier: Tier::Device,
                blocks: chain((self.next - 2) * 100).rev().collect(),
            },
            _ => KvEvent::Stored {
                tier: Tier::Device,
                parent: None,
                blocks: chain(first)
                    .map(|engine| StoredBlock {
                        engine,
                        local: LocalHash(engine.0 * 7 + self.rank.worker.0),
                    })
                    .collect(),
            },
        };
        let mut out = Vec::new();
        self.cache.push(event, &mut out);
        self.cache.flush(&mut out);
        out.iter().for_each(|event| self.write(event));
    }

    pub(crate) fn write(&self, event: &RouterEvent) {
        let mut payload = Vec::new();
        encode_router_event(Encoding::Json, event, &mut payload);
        assert!(self.log.publish(payload.into()));
    }

    /// Its engine begins anew, without a word.
    pub(crate) fn restart(&mut self) {
        self.cache = RankPublisher::new(self.rank);
    }

    async fn last_written(&self) -> u64 {
        let state = self.jetstream.stream_info(&self.names.stream).await;
        state.map_or(0, |state| state.last)
    }

    fn last(&self) -> u64 {
        self.block_on(self.last_written())
    }

    /// What it holds.
    pub(crate) fn truth(&self) -> Blocks {
        let request = RecoveryRequest::new(self.rank, None);
        match self.cache.answer(&request) {
            RecoveryReply::TreeDump { events, .. } => blocks(events.iter().map(|e| &e.event)),
            other => panic!("{other:?}"),
        }
    }

    /// Takes all messages away, as an operator may.
    pub(crate) fn purge_stream(&self) {
        let purged = self.jetstream.purge_stream(&self.names.stream, None);
        self.block_on(purged).unwrap();
    }

    pub(crate) fn delete_stream(&self) {
        let deleted = self.jetstream.delete_stream(&self.names.stream);
        self.block_on(deleted).unwrap();
    }

    pub(crate) fn delete_bucket(&self) {
        let bucket = ObjectStore::new(&self.jetstream, &self.names.bucket);
        self.block_on(bucket.delete()).unwrap();
    }

    pub(crate) fn delete_consumers(&self) {
        let stream = &self.names.stream;
        self.block_on(async {
            for consumer in self.jetstream.durable_consumers(stream).await.unwrap() {
                let deleted = self.jetstream.delete_consumer(stream, &consumer.name);
                deleted.await.unwrap();
            }
        });
    }

    /// Whether a snapshot of the stream is stored.
    pub(crate) fn has_snapshot(&self) -> bool {
        let bucket = ObjectStore::new(&self.jetstream, &self.names.bucket);
        self.block_on(async {
            let stream = self.jetstream.stream_info(&self.names.stream).await;
            let head = bucket.head("kvasir-index").await;
            let (Ok(stream), Ok(head)) = (stream, head) else {
                return false;
            };
            head.labels.get("stream-created") == Some(&stream.created)
        })
    }

    /// Messages that the stream holds.
    pub(crate) fn messages(&self) -> u64 {
        let state = self.block_on(self.jetstream.stream_info(&self.names.stream));
        state.unwrap().messages
    }

    pub(crate) fn member(&self, host: &Arc<RouterHost>) -> PlaneWorker {
        PlaneWorker {
            id: self.rank.worker,
            host: Arc::clone(host),
            ranks: vec![self.rank],
            url: "test".to_owned(),
            events: true,
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(1).enable_all().build().unwrap()
}

/// Stops a router at a step, for ever.
#[derive(Default)]
pub(crate) struct StopAt {
    step: Option<LogStep>,
    pub(crate) seen: Mutex<BTreeSet<LogStep>>,
    is_there: Notify,
}

impl StopAt {
    pub(crate) fn has_seen(&self, step: LogStep) -> bool {
        self.seen.lock().unwrap().contains(&step)
    }
}

impl StepHook for StopAt {
    fn after(&self, step: LogStep) -> StepFuture<'_> {
        self.seen.lock().unwrap().insert(step);
        if self.step != Some(step) {
            return Box::pin(std::future::ready(()));
        }
        self.is_there.notify_one();
        Box::pin(std::future::pending())
    }
}

/// One router in a process of its own, as far as anybody can tell: it ends with [`Self::crash`] in the middle of whatever it does.
pub(crate) struct Router {
    runtime: Option<Runtime>,
    pub(crate) host: Arc<RouterHost>,
    plane: EventPlane,
    pub(crate) steps: Arc<StopAt>,
}

/// How a router is started.
#[derive(Clone, Copy, Default)]
pub(crate) struct RouterSetup {
    pub(crate) nats: u16,
    pub(crate) etcd: Option<u16>,
    pub(crate) stop_at: Option<LogStep>,
    pub(crate) reset: bool,
}

/// Seconds that a dead router's locks outlive it, as etcd rounds them up.
const LEASE_TTL: u64 = 1;

impl Router {
    pub(crate) fn start(setup: RouterSetup, component: &str, workers: &[&Worker]) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let runtime = runtime();
        let entered = runtime.enter();
        let context = HostContext {
            clock: Clock::new(),
            metrics: Metrics::new(&MetricOptions::default()).unwrap(),
            tasks: Tasks::new(),
        };
        let config = RouterConfig {
            router_mode: RouterMode::Kv,
            ..RouterConfig::default()
        };
        let options = HostOptions::new(config, IndexOptions::default());
        let host = RouterHost::start(&Arc::from("m"), options, &context);
        let etcd = setup.etcd.map(|port| {
            let options = EtcdOptions {
                endpoints: format!("http://127.0.0.1:{port}"),
                lease_ttl: LEASE_TTL,
                ..EtcdOptions::default()
            };
            EtcdStore::new(options, &context.tasks).unwrap()
        });
        let steps = Arc::new(StopAt {
            step: setup.stop_at,
            ..StopAt::default()
        });
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let options = EventPlaneOptions {
            recovery: Arc::new(EndpointRecovery::new(Default::default(), 1)),
            nats: link(setup.nats, &context.tasks),
            log: Some(EventLogOptions {
                router: format!("router-{number}"),
                snapshot_threshold: THRESHOLD,
                max_age: Duration::from_secs(3600),
                reset: setup.reset,
                coordination: etcd.and_then(|store| store.coordination()),
                hook: Some(Arc::clone(&steps) as _),
            }),
            replicas: None,
            threads: None,
            seed: number,
        };
        let plane = EventPlane::start(&context, options);
        drop(entered);
        let this = Self {
            runtime: Some(runtime),
            host,
            plane,
            steps,
        };
        workers
            .iter()
            .for_each(|worker| this.add(worker, component));
        this
    }

    pub(crate) fn add(&self, worker: &Worker, component: &str) {
        self.host
            .tell(Input::Joined(WorkerSpec::new(worker.rank.worker)));
        self.plane.join(worker.member(&self.host));
        let change = PlaneChange::Component {
            worker: worker.rank.worker,
            namespace: NAMESPACE.to_owned(),
            component: component.to_owned(),
        };
        self.block_on(self.plane.tell(change));
    }

    pub(crate) fn remove(&self, worker: WorkerId) {
        self.plane.leave(worker);
        self.host.leave(worker);
    }

    pub(crate) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        let runtime = self.runtime.as_ref().unwrap();
        let done = runtime.block_on(async { tokio::time::timeout(SOON, future).await });
        done.expect("not within the time of a slow machine")
    }

    /// Waits until it stands at the step that it was to stop at.
    pub(crate) fn until_stopped(&self) {
        self.block_on(self.steps.is_there.notified());
    }

    /// What it knows of a rank.
    pub(crate) fn knows(&self, rank: WorkerRank) -> Blocks {
        let dump = self.host.index().dump_rank(rank);
        blocks(dump.iter().map(|(_, event)| event))
    }

    /// Waits until it knows what a worker holds.
    pub(crate) fn until_knows(&self, worker: &Worker) {
        let truth = worker.truth();
        self.until(
            || self.knows(worker.rank) == truth,
            || {
                let knows = self.knows(worker.rank);
                format!("knows {} blocks of {}", knows.len(), truth.len())
            },
        );
    }

    pub(crate) fn until(&self, mut holds: impl FnMut() -> bool, told: impl Fn() -> String) {
        let end = Instant::now() + SOON;
        while !holds() {
            assert!(Instant::now() < end, "{}", told());
            self.block_on(async { tokio::time::sleep(Duration::from_millis(5)).await });
        }
    }

    pub(crate) fn until_seen(&self, step: LogStep) {
        self.until(
            || self.steps.has_seen(step),
            || format!("never came to {step:?}"),
        );
    }

    /// Forgets which steps were taken.
    pub(crate) fn forget_steps(&self) {
        self.steps.seen.lock().unwrap().clear();
    }

    /// Ends in the middle of whatever it does.
    pub(crate) fn crash(mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
