//! A door in front of scripted engines.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvasir_frontend::{App, AppOptions, Fleet, Limits, ServedModel, Server, http_threads};
use kvasir_host::{RouterSetup, SharedCache};
use kvasir_index::IndexOptions;
use kvasir_router::{Load, Router, RouterConfig, RouterMode};
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, MetricOptions, Metrics};
use kvasir_types::{DpRank, WorkerId, WorkerRank};
use kvasir_upstream::parse_worker;

use crate::client::{Answer, Client};
use crate::engine::{ANSWER, Engine, Stage};

/// Nothing here takes this long unless it hangs.
const HANGS: Duration = Duration::from_secs(20);
/// Between two looks at something that will come.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const ASK: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#;
pub(crate) const ASK_STREAM: &str =
    r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}"#;

/// Waits for something that must come.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    };
    in_time(what, wait).await;
}

/// Waits for a future that must end.
pub(crate) async fn in_time<T>(what: &str, wait: impl Future<Output = T>) -> T {
    let waited = tokio::time::timeout(HANGS, wait).await;
    waited.unwrap_or_else(|_| panic!("{what}: still waiting after {HANGS:?}"))
}

/// How a rig differs from the usual one.
#[derive(Clone, Default)]
pub(crate) struct Setup {
    pub(crate) options: AppOptions,
    pub(crate) router: RouterConfig,
    /// What is said about each worker after its URL.
    pub(crate) additions: String,
    /// Serves on a thread of its own, on which this runs too.
    pub(crate) probe: Option<Probe>,
    /// A cache that all engines share.
    pub(crate) shared_cache: Option<Arc<SharedCache>>,
}

/// How long a thread computes at a stretch: between two turns of a timer of a millisecond. Counted in time on the
/// processor, so that others who want it too do not count.
#[derive(Clone, Debug, Default)]
pub(crate) struct Probe {
    worst_nanos: Arc<AtomicU64>,
}

impl Probe {
    /// The longest stretch until now; the next one begins.
    pub(crate) fn take(&self) -> Duration {
        Duration::from_nanos(self.worst_nanos.swap(0, Ordering::SeqCst))
    }

    async fn watch(self) {
        let mut before = Self::computed();
        loop {
            tokio::time::sleep(Duration::from_millis(1)).await;
            let now = Self::computed();
            self.worst_nanos.fetch_max(now - before, Ordering::SeqCst);
            before = now;
        }
    }

    /// Nanoseconds that this thread has had a processor.
    fn computed() -> u64 {
        let line = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        let first = line.split(' ').next();
        first.and_then(|nanos| nanos.parse().ok()).unwrap_or(0)
    }
}

impl Setup {
    pub(crate) fn limits(limits: Limits) -> Self {
        Self::options(AppOptions {
            limits,
            ..AppOptions::default()
        })
    }

    pub(crate) fn options(options: AppOptions) -> Self {
        Self {
            options,
            ..Self::usual()
        }
    }

    pub(crate) fn usual() -> Self {
        Self::in_mode(RouterMode::RoundRobin)
    }

    pub(crate) fn in_mode(mode: RouterMode) -> Self {
        let router = RouterConfig {
            router_mode: mode,
            ..RouterConfig::default()
        };
        Self {
            options: AppOptions::default(),
            router,
            additions: String::new(),
            probe: None,
            shared_cache: None,
        }
    }
}

/// A door, its engines, and what it is to be like when nothing runs.
pub(crate) struct Rig {
    pub(crate) app: Arc<App>,
    pub(crate) fleet: Fleet,
    pub(crate) stage: Arc<Stage>,
    pub(crate) engines: Vec<Engine>,
    pub(crate) server: Server,
    at_rest: usize,
}

impl Rig {
    pub(crate) async fn of(engines: usize) -> Self {
        Self::with(engines, Setup::usual()).await
    }

    pub(crate) async fn with(engines: usize, setup: Setup) -> Self {
        Self::with_fleet(engines, setup, |fleet| fleet).await
    }

    /// With a fleet that differs, too.
    pub(crate) async fn with_fleet(
        engines: usize,
        setup: Setup,
        change: impl FnOnce(Fleet) -> Fleet,
    ) -> Self {
        Self::on(Stage::new(), engines, setup, change).await
    }

    /// With engines that are told something before they are asked anything.
    pub(crate) async fn of_stage(engines: usize, setup: Setup, tell: impl FnOnce(&Stage)) -> Self {
        let stage = Stage::new();
        tell(&stage);
        Self::on(stage, engines, setup, |fleet| fleet).await
    }

    async fn on(
        stage: Arc<Stage>,
        engines: usize,
        setup: Setup,
        change: impl FnOnce(Fleet) -> Fleet,
    ) -> Self {
        let mut all = Vec::new();
        for _ in 0..engines {
            all.push(Engine::start(&stage).await);
        }
        let metrics = Metrics::new(&MetricOptions::default()).unwrap();
        let app = App::new(setup.options, metrics, Clock::new(), Tasks::new());
        let ttl = setup.router.router_predicted_ttl_secs;
        let index = IndexOptions {
            predicted_ttl: ttl.map(Duration::from_secs_f64),
            ..IndexOptions::default()
        };
        let routers = RouterSetup {
            shared_cache: setup.shared_cache,
            ..RouterSetup::new(setup.router, index)
        };
        let fleet = Fleet::new(app.fleet_context(), routers);
        let fleet = change(fleet);
        fleet.start();
        for engine in &all {
            let said = [engine.url(), setup.additions.clone()].concat();
            assert!(fleet.watch(parse_worker(&said).unwrap()));
        }
        let (door, free) = (Arc::clone(&app), "127.0.0.1:0".parse().unwrap());
        let server = match setup.probe {
            None => Server::start(door, free).await.unwrap(),
            Some(probe) => {
                let threads = http_threads(1).unwrap();
                threads.on_each(|| probe.clone().watch());
                Server::start_on(threads, door, free).await.unwrap()
            }
        };
        let mut rig = Self {
            app,
            fleet,
            stage,
            engines: all,
            server,
            at_rest: 0,
        };
        if engines > 0 {
            rig.joined(engines).await;
        }
        rig.at_rest = rig.app.tasks().len();
        rig
    }

    /// One more engine, and waits until it serves.
    pub(crate) async fn add_engine(&mut self) {
        let engine = Engine::start(&self.stage).await;
        let address = parse_worker(&engine.url()).unwrap();
        assert!(self.fleet.watch(address));
        self.engines.push(engine);
        self.joined(self.engines.len()).await;
        self.at_rest = self.app.tasks().len();
    }

    /// Waits until so many workers serve the model.
    pub(crate) async fn joined(&self, workers: usize) {
        until("workers join", || {
            let model = self.app.models().get("m");
            // One that nobody serves is forgotten.
            model.map_or(0, |m| m.specs().len()) == workers
        })
        .await;
    }

    pub(crate) fn model(&self) -> Arc<ServedModel> {
        self.app.models().get("m").unwrap()
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.server.address()
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(self.address()).await
    }

    /// One request on a connection of its own.
    pub(crate) async fn post(&self, path: &str, body: impl AsRef<[u8]>) -> Answer {
        let mut client = self.client().await;
        client.post(path, "connection: close\r\n", body).await;
        in_time("answer", client.answer()).await
    }

    /// The next requests are served, and none of them asks the engine at this port.
    pub(crate) async fn only_others_serve(&self, port: u16) {
        let before = self.stage.seen().len();
        for _ in 0..6 {
            assert_eq!(self.post(CHAT, ASK).await.text(), ANSWER);
        }
        let asked = &self.stage.seen()[before..];
        assert!(asked.iter().all(|seen| seen.port != port));
    }

    /// What runs now is taken for what runs at rest.
    pub(crate) fn rest_now(&mut self) {
        self.at_rest = self.app.tasks().len();
    }

    /// Nothing is booked, under way or running that was not before.
    pub(crate) async fn at_rest(&self) {
        until("requests end", || self.app.in_flight().count() == 0).await;
        until("bookings end", || self.booked() == 0).await;
        until("tasks end", || self.app.tasks().len() <= self.at_rest).await;
    }

    /// Everything that the router thinks is running: requests, their blocks, their prompt tokens.
    pub(crate) fn booked(&self) -> u64 {
        self.loads(|load| u64::from(load.requests) + load.active_blocks + load.prefill_tokens)
    }

    /// Requests that the router thinks are running.
    pub(crate) fn booked_requests(&self) -> u64 {
        self.loads(|load| u64::from(load.requests))
    }

    /// Prompt tokens that the router thinks are to be computed.
    pub(crate) fn booked_prefill(&self) -> u64 {
        self.loads(|load| load.prefill_tokens)
    }

    fn loads(&self, of: impl Fn(Load) -> u64) -> u64 {
        let Some(model) = self.app.models().get("m") else {
            return 0;
        };
        let specs: Vec<_> = model.specs().iter().map(|spec| spec.id).collect();
        model.host.ask(|router| {
            let ranks = specs.iter().map(|worker| WorkerRank {
                worker: *worker,
                rank: DpRank(0),
            });
            ranks.filter_map(|rank| router.load(rank)).map(of).sum()
        })
    }

    /// Whether the worker of an engine is ejected.
    pub(crate) fn is_ejected(&self, engine: usize) -> bool {
        let worker = parse_worker(&self.engines[engine].url()).unwrap();
        let ejected_until =
            |router: &Router| Some(router.fleet().member(worker.id)?.ejected_until());
        self.model().host.ask(ejected_until).flatten().is_some()
    }

    /// Whether a worker is on its way out.
    pub(crate) fn is_draining(&self, worker: WorkerId) -> bool {
        let draining = |router: &Router| Some(router.fleet().member(worker)?.is_draining());
        self.model().host.ask(draining) == Some(true)
    }

    /// What `GET /workers` lists.
    pub(crate) async fn workers(&self) -> Vec<serde_json::Value> {
        let list = self.get("/workers").await.json();
        list["workers"].as_array().unwrap().clone()
    }

    /// One page.
    pub(crate) async fn get(&self, path: &str) -> Answer {
        let mut client = self.client().await;
        let head = format!("GET {path} HTTP/1.1\r\nhost: door\r\n\r\n");
        client.send(head).await;
        client.answer().await
    }

    /// The metrics page.
    pub(crate) async fn page(&self) -> String {
        self.get("/metrics").await.text().to_owned()
    }

    /// A counter or gauge of the metrics page, summed over its labels.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let page = self.page().await;
        let of_name = |line: &&str| {
            line.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with([' ', '{']))
        };
        let value = |line: &str| line.rsplit_once(' ')?.1.parse::<f64>().ok();
        page.lines().filter(of_name).filter_map(value).sum()
    }
}
