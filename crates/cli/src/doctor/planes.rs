//! `kvasir doctor` on planes: what a frontend with these options would find in its store, and which flag mends what it would not.
//!
//! Answers one question for each step of a request's way: is the store there, does it name workers, can their cards be read, does each
//! worker answer, do its events arrive, does it say what its cache holds? A worker is asked for one token of a prompt that nobody has.
//!
//! What always holds: every question has a time limit, and at most [`WORKERS_MAX`] workers are asked; nothing is announced.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kvasir_config::{Settings, keys};
use kvasir_discovery::{
    Bucket, Change, FleetJoin, FleetView, FoundWorker, Namespaces, Record, RecordKey, Store,
};
use kvasir_doctor::{Advice, AdviceTarget, Check, Finding, Outcome, WorkerReport};
use kvasir_host::{
    EndpointRecovery, EventPlane, EventPlaneOptions, HostContext, HostOptions, PlaneWorker,
    RouterHost, plane_change,
};
use kvasir_router::{RouterConfig, RouterMode};
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, Metrics};
use kvasir_transport::jetstream::{JetStream, StreamState};
use kvasir_transport::{PlaneError, RequestPlane, TokenPlane};
use kvasir_types::{
    PlaneEndpoint, RequestContext, RequestId, Rng, Sampling, Token, TokenRequest, Transport,
    WorkerRank,
};
use kvasir_wire::native::LogNames;
use serde_json::Value;
use tokio::time::{Instant, timeout};

use crate::planes::{self, Clients};
use crate::wiring::Failure;

/// Workers that are asked; the rest is taken to be like them.
const WORKERS_MAX: usize = 16;
/// Tokens in a block where a card says nothing.
const BLOCK_SIZE: u32 = 16;
/// Blocks of a prompt that nobody has.
const PROMPT_BLOCKS: u32 = 4;
/// Every vocabulary has so many tokens.
const TOKENS: u64 = 1000;
/// An event comes within milliseconds; longest wait for one.
const EVENT_TIMEOUT_MAX: Duration = Duration::from_secs(5);
/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// All that a store holds.
type Records = BTreeMap<RecordKey, Arc<Record>>;

/// What is used to ask workers.
struct Asker {
    context: HostContext,
    clients: Clients,
    events: EventPlane,
    /// Where workers may keep their events, if a NATS server is named.
    jetstream: Option<JetStream>,
    timeout: Duration,
    rng: Rng,
}

/// Looks at the store that the options name, and at the workers in it; nothing if they name none.
pub(super) async fn look(settings: &Settings, tasks: &Tasks) -> Result<Vec<WorkerReport>, Failure> {
    let Some((store, flag)) = planes::store(settings, tasks)? else {
        return Ok(Vec::new());
    };
    let namespaces = planes::namespaces(settings);
    let limit = settings.get(keys::TIMEOUT_SECS);
    let listed = list(&*store, limit).await;
    let title = format!("discovery {} {}", store.backend(), store.address());
    let (backend, records) = (store.backend(), listed.as_ref().ok());
    let view = records.map(|records| joined(records, &namespaces));
    let checks = vec![
        reachable(&listed, flag),
        keys_seen(records, &namespaces, backend, flag),
        cards(view.as_ref()),
    ];
    let mut reports = vec![WorkerReport {
        worker: title,
        checks,
    }];
    let (Some(records), Some(view)) = (records, view) else {
        return Ok(reports);
    };
    let mut asker = Asker::new(settings, tasks, limit).await?;
    for record in records.values() {
        if let Some(change) = plane_change(record).filter(|_| namespaces.holds(record.namespace()))
        {
            asker.events.tell(change).await;
        }
    }
    for found in view.workers.values().take(WORKERS_MAX) {
        reports.push(asker.look_at(found).await);
    }
    Ok(reports)
}

/// Reads all that a store holds, or why that cannot be.
async fn list(store: &dyn Store, limit: Duration) -> Result<Records, String> {
    let mut watch = store.watch(&Bucket::ALL);
    let mut records = Records::new();
    let read = async {
        loop {
            match watch.next().await {
                Change::Added(key, record) | Change::Updated(key, record) => {
                    records.insert(key, record);
                }
                Change::Removed(key) => drop(records.remove(&key)),
                Change::Lost(why) => return Err(why),
                Change::Synced => return Ok(()),
                Change::Restored => {}
            }
        }
    };
    match timeout(limit, read).await {
        Ok(read) => read.map(|()| records),
        Err(_) => Err(format!("no answer within {} s", limit.as_secs_f64())),
    }
}

fn joined(records: &Records, namespaces: &Namespaces) -> FleetView {
    let mut join = FleetJoin::new(namespaces.clone());
    for (key, record) in records {
        join.apply(&Change::Added(key.clone(), Arc::clone(record)));
    }
    join.view()
}

fn reachable(listed: &Result<Records, String>, flag: &str) -> Finding {
    match listed {
        Ok(_) => finding(Check::Discovery, Outcome::Pass, "it answers".into()),
        Err(why) => finding(Check::Discovery, Outcome::Fail, why.clone())
            .with(kvasir(
                &[flag, "ADDRESS"],
                "where the store is; or start it there",
            ))
            .with(kvasir(
                &["--discovery-backend", "BACKEND"],
                "if workers announce themselves elsewhere",
            )),
    }
}

fn keys_seen(
    records: Option<&Records>,
    namespaces: &Namespaces,
    backend: &str,
    flag: &str,
) -> Finding {
    let Some(records) = records else {
        return finding(Check::Keys, Outcome::Skip, "the store is not there".into());
    };
    let of = |bucket: Bucket| {
        let ours = records
            .iter()
            .filter(|(key, record)| key.bucket == bucket && namespaces.holds(record.namespace()));
        ours.count()
    };
    let why = format!(
        "{} endpoints, {} model cards, {} event channels, {} event sources",
        of(Bucket::Instances),
        of(Bucket::Models),
        of(Bucket::EventChannels),
        of(Bucket::EventSources),
    );
    if of(Bucket::Instances) > 0 && of(Bucket::Models) > 0 {
        return finding(Check::Keys, Outcome::Pass, why);
    }
    let elsewhere: BTreeSet<&str> = records.values().map(|record| record.namespace()).collect();
    let other = elsewhere.into_iter().find(|name| !namespaces.holds(name));
    match other {
        Some(name) => finding(
            Check::Keys,
            Outcome::Fail,
            format!("{why}; others are in namespace {name}"),
        )
        .with(kvasir(
            &["--namespace", name],
            "the namespace that workers are in",
        )),
        None => finding(
            Check::Keys,
            Outcome::Fail,
            format!("{why}: no worker announces itself here"),
        )
        .with(engine(
            &["--discovery-backend", backend],
            "start workers with the same store",
        ))
        .with(kvasir(
            &[flag, "ADDRESS"],
            "the store that they announce themselves in",
        )),
    }
}

fn cards(view: Option<&FleetView>) -> Finding {
    let Some(view) = view.filter(|view| !view.workers.is_empty() || !view.notes.is_empty()) else {
        return finding(Check::Cards, Outcome::Skip, "there is none".into());
    };
    let names = view
        .workers
        .values()
        .map(|worker| worker.card.name.as_str());
    let names: Vec<&str> = names.collect::<BTreeSet<_>>().into_iter().collect();
    let why = format!("{} workers serve {}", view.workers.len(), names.join(", "));
    let refusals = view.notes.iter().filter(|note| note.is_refusal());
    let refusals: Vec<String> = refusals.map(ToString::to_string).collect();
    match refusals.is_empty() && !view.workers.is_empty() {
        true => finding(Check::Cards, Outcome::Pass, why),
        false => {
            let notes = view.notes.iter().map(ToString::to_string);
            let advice = notes.map(|note| engine(&[], &note));
            let mut found = finding(Check::Cards, Outcome::Fail, why);
            found.advice.extend(advice);
            found
        }
    }
}

impl Asker {
    async fn new(settings: &Settings, tasks: &Tasks, timeout: Duration) -> Result<Self, Failure> {
        let clock = Clock::new();
        let seed = clock.unix_nanos(clock.now()) ^ u64::from(std::process::id()) << 32;
        let (clients, nats) = planes::clients(settings, tasks).await?;
        let context = HostContext {
            clock,
            metrics: Metrics::new(&Default::default())?,
            tasks: tasks.clone(),
        };
        let named = settings.is_set(keys::NATS_SERVER);
        let jetstream = named.then(|| JetStream::new(nats.clone()));
        let options = EventPlaneOptions {
            recovery: Arc::new(EndpointRecovery::new(clients.clone(), seed)),
            nats,
            log: None,
            replicas: None,
            threads: None,
            seed,
        };
        Ok(Self {
            events: EventPlane::start(&context, options),
            context,
            clients,
            jetstream,
            timeout,
            rng: Rng::new(seed),
        })
    }

    /// Asks one worker everything.
    async fn look_at(&mut self, found: &FoundWorker) -> WorkerReport {
        let record = &found.record;
        let worker = format!(
            "worker {} at {} ({})",
            record.id, record.transport, found.card.name
        );
        let block_size = record.block_size.unwrap_or(BLOCK_SIZE);
        let rank = WorkerRank {
            worker: record.id,
            rank: record.first_rank,
        };
        let config = RouterConfig {
            router_mode: RouterMode::Kv,
            kv_cache_block_size: block_size,
            ..RouterConfig::default()
        };
        let options = HostOptions::new(config, Default::default());
        let name = Arc::from(record.id.to_string());
        let host = RouterHost::start(&name, options, &self.context);
        self.events.join(PlaneWorker {
            id: record.id,
            host: Arc::clone(&host),
            ranks: vec![rank],
            url: record.transport.to_string(),
            events: true,
        });
        let wait = self.timeout.min(EVENT_TIMEOUT_MAX);
        let is_whole = until(wait, || is(&host, rank, "complete")).await;
        let channel = channel(&host, rank, is_whole || is(&host, rank, "connected"));
        if events(&host, rank).is_none()
            && let Some(before) = self.log_of(found).await
        {
            let checks = self.look_at_log(found, rank, block_size, before).await;
            self.events.leave(record.id);
            return WorkerReport { worker, checks };
        }
        let before = host.index().stats().entries;
        let (requests, answered) = self.ask(found, rank, block_size).await;
        let arrived = answered && until(wait, || host.index().stats().entries > before).await;
        let checks = vec![
            requests,
            channel,
            recovery(&host, rank, is_whole),
            arrive(&host, rank, answered, arrived),
        ];
        self.events.leave(record.id);
        WorkerReport { worker, checks }
    }

    /// The stream in which events of a worker's component are kept, if there is one.
    async fn log_of(&self, found: &FoundWorker) -> Option<StreamState> {
        let names = LogNames::of(&found.endpoint.namespace, &found.endpoint.component);
        let asked = self.jetstream.as_ref()?.stream_info(&names.stream);
        let wait = self.timeout.min(EVENT_TIMEOUT_MAX);
        timeout(wait, asked).await.ok()?.ok()
    }

    /// Asks a worker that writes its events to a stream.
    async fn look_at_log(
        &mut self,
        found: &FoundWorker,
        rank: WorkerRank,
        size: u32,
        before: StreamState,
    ) -> Vec<Finding> {
        let (requests, answered) = self.ask(found, rank, size).await;
        let end = Instant::now() + self.timeout.min(EVENT_TIMEOUT_MAX);
        let mut written = false;
        while answered && !written && Instant::now() < end {
            let now = self.log_of(found).await;
            written = now.is_some_and(|now| now.last > before.last);
            tokio::time::sleep(LOOK_EVERY).await;
        }
        let names = LogNames::of(&found.endpoint.namespace, &found.endpoint.component);
        let stream = format!("jetstream {}", names.stream);
        let text = "routers read what it holds from JetStream, with --router-durable-kv-events";
        let arrive = match (answered, written) {
            (false, _) => finding(
                Check::EventsArrive,
                Outcome::Skip,
                "nothing was computed".into(),
            ),
            (true, true) => {
                let why = "the blocks of a request were written to the stream".to_owned();
                finding(Check::EventsArrive, Outcome::Pass, why)
            }
            (true, false) => {
                let why = "nothing was written to the stream for a request that was answered";
                finding(Check::EventsArrive, Outcome::Fail, why.into()).with(engine(
                    &["--durable-kv-events"],
                    "let it write its events there; or let it publish them, with a local indexer",
                ))
            }
        };
        vec![
            requests,
            finding(Check::EventSocket, Outcome::Pass, stream),
            finding(Check::Recovery, Outcome::Skip, text.into()),
            arrive,
        ]
    }

    /// Asks for one token; whether it came.
    async fn ask(&mut self, found: &FoundWorker, rank: WorkerRank, size: u32) -> (Finding, bool) {
        let Transport::Plane(endpoint) = &found.record.transport else {
            let why = "it is no token worker".into();
            return (finding(Check::Requests, Outcome::Skip, why), false);
        };
        let Some(client) = self.clients.get(&*endpoint.plane) else {
            let why = format!("request plane `{}` is not served here", endpoint.plane);
            return (finding(Check::Requests, Outcome::Fail, why), false);
        };
        let plane = TokenPlane::new(Arc::clone(client), endpoint.clone());
        let request = self.request(found, rank, size);
        let started = Instant::now();
        let answer = async {
            let mut answer = plane.send(rank.worker, request).await?;
            while let Some(item) = answer.next().await {
                item?;
            }
            Ok::<(), PlaneError>(())
        };
        match timeout(self.timeout, answer).await {
            Ok(Ok(())) => {
                let ms = started.elapsed().as_millis();
                let why = format!("a token after {ms} ms, over {}", endpoint.plane);
                (finding(Check::Requests, Outcome::Pass, why), true)
            }
            Ok(Err(error)) => (refused(endpoint, &error), false),
            Err(_) => {
                let secs = self.timeout.as_secs_f64();
                let why = format!("no answer within {secs} s");
                (silent(endpoint, why), false)
            }
        }
    }

    fn request(&mut self, found: &FoundWorker, rank: WorkerRank, size: u32) -> TokenRequest {
        let length = PROMPT_BLOCKS * size + 1;
        let token = |_| Token::try_from(self.rng.below(TOKENS)).unwrap_or_default() + 1;
        let tokens: Vec<Token> = (0..length).map(token).collect();
        let id = u128::from(self.rng.next_u64()) << 64 | u128::from(self.rng.next_u64());
        TokenRequest {
            id: RequestId(id),
            model: found.card.name.as_str().into(),
            tokens: tokens.into(),
            sampling: Sampling {
                max_tokens: 1,
                ..Sampling::default()
            },
            rank: rank.rank,
            priority: 0,
            lora: None,
            salt: None,
            context: RequestContext::default(),
        }
    }
}

fn refused(endpoint: &PlaneEndpoint, error: &PlaneError) -> Finding {
    match error {
        PlaneError::Timeout { .. } => silent(endpoint, error.to_string()),
        PlaneError::Connect { .. } | PlaneError::Gone(_) => {
            let text = match &*endpoint.plane {
                "nats" => "the NATS server that the worker takes requests from",
                _ => {
                    "the address that it announces is not reached from here: DYN_TCP_RPC_HOST of the worker"
                }
            };
            let found = finding(Check::Requests, Outcome::Fail, error.to_string());
            match &*endpoint.plane {
                "nats" => found.with(kvasir(&["--nats-server", "URL"], text)),
                _ => found.with(engine(&[], text)),
            }
        }
        _ => finding(Check::Requests, Outcome::Fail, error.to_string())
            .with(engine(&[], "its log says more")),
    }
}

/// It took the request and did not bring the answer.
fn silent(endpoint: &PlaneEndpoint, why: String) -> Finding {
    let found = finding(Check::Requests, Outcome::Fail, why);
    let found = found.with(kvasir(
        &["--tcp-rpc-host", "ADDRESS"],
        "an address of this machine that the worker reaches: it brings answers there",
    ));
    match &*endpoint.plane {
        "nats" => found.with(kvasir(&["--nats-server", "URL"], "the worker's own server")),
        _ => found,
    }
}

fn channel(host: &RouterHost, rank: WorkerRank, connected: bool) -> Finding {
    let events = events(host, rank);
    let text = |name: &str| Some(events.as_ref()?.get(name)?.as_str()?.to_owned());
    let Some(address) = text("address") else {
        let why = "no event channel and source of it are announced".to_owned();
        return finding(Check::EventSocket, Outcome::Fail, why).with(engine(
            &[],
            "let it publish KV events, with a local indexer",
        ));
    };
    if connected {
        return finding(Check::EventSocket, Outcome::Pass, address);
    }
    let why = text("error").unwrap_or_else(|| "no connection yet".to_owned());
    let found = finding(
        Check::EventSocket,
        Outcome::Fail,
        format!("{address}: {why}"),
    );
    match address.starts_with("nats") {
        true => found.with(kvasir(
            &["--nats-server", "URL"],
            "the server that it publishes to",
        )),
        false => found.with(engine(
            &[],
            "its event address is not reached from here: DYN_EVENT_PLANE_HOST of the worker",
        )),
    }
}

fn recovery(host: &RouterHost, rank: WorkerRank, is_whole: bool) -> Finding {
    if events(host, rank).is_none() {
        return finding(
            Check::Recovery,
            Outcome::Skip,
            "it publishes no events".into(),
        );
    }
    if is_whole {
        let blocks = host.index().stats().entries;
        let why = format!("it said what its cache holds: {blocks} blocks");
        return finding(Check::Recovery, Outcome::Pass, why);
    }
    let why = "it does not say what its cache holds".to_owned();
    finding(Check::Recovery, Outcome::Fail, why).with(engine(
        &[],
        "its endpoint worker_kv_query_source_… must be reached as its generate is; a frontend that starts late knows nothing of its cache until then",
    ))
}

fn arrive(host: &RouterHost, rank: WorkerRank, answered: bool, arrived: bool) -> Finding {
    if !answered || events(host, rank).is_none() {
        let why = "nothing was computed, or nothing is published".to_owned();
        return finding(Check::EventsArrive, Outcome::Skip, why);
    }
    if arrived {
        let why = "the blocks of a request are known".to_owned();
        return finding(Check::EventsArrive, Outcome::Pass, why);
    }
    let why = "no event of a request that was answered came".to_owned();
    finding(Check::EventsArrive, Outcome::Fail, why).with(engine(
        &["--enable-prefix-caching"],
        "turn it on, and let it publish KV events",
    ))
}

/// What is known of a rank's events; nothing if none are announced.
fn events(host: &RouterHost, rank: WorkerRank) -> Option<Value> {
    let row = host.views().get(rank)?.row();
    row.get("events")
        .filter(|events| !events.is_null())
        .cloned()
}

fn is(host: &RouterHost, rank: WorkerRank, what: &str) -> bool {
    let events = events(host, rank);
    events.is_some_and(|events| events.get(what).and_then(Value::as_bool) == Some(true))
}

/// Waits until something holds; whether it came to.
async fn until(limit: Duration, holds: impl Fn() -> bool) -> bool {
    let wait = async {
        while !holds() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    timeout(limit, wait).await.is_ok()
}

fn finding(check: Check, outcome: Outcome, why: String) -> Finding {
    Finding::new(check, outcome, why)
}

fn kvasir(args: &[&str], text: &str) -> Advice {
    advice(AdviceTarget::Kvasir, args, text)
}

fn engine(args: &[&str], text: &str) -> Advice {
    advice(AdviceTarget::Engine, args, text)
}

fn advice(whose: AdviceTarget, args: &[&str], text: &str) -> Advice {
    Advice {
        whose,
        args: args.iter().map(|word| (*word).to_owned()).collect(),
        text: text.to_owned(),
    }
}
