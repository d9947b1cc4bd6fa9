//! `kvasir mocker` in a fleet: mock engines that take tokens, found through discovery as Dynamo's workers are.

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvasir_config::{DisaggregationMode, PlaneCodec, Settings, keys};
use kvasir_discovery::{Card, EndpointName, Store};
use kvasir_mocker::{
    CacheFaults, Fault, Faults, MeetingPoint, MockServer, MockServerOptions, Observer, Part,
    PlaneEngine, PlaneReporter, PrefillPart, Worker, WorkerOptions,
};
use kvasir_planes::{event_carrier, event_log};
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, Metrics};
use kvasir_transport::local_address;
use kvasir_types::{BootstrapAddress, Codec};
use kvasir_worker::{
    CardRole, EngineFacts, HostedFiles, MemberOptions, Membership, RequestServer, card_of_folder,
    hosted_card,
};
use serde_json::Value;

use super::topology;
use crate::endpoint_meters::EndpointMeters;
use crate::planes;
use crate::system_status::{StatusSource, SystemStatus};
use crate::wiring::{self, BadConfig, Failure};

/// The component of those who compute prompts for others.
const PREFILL_COMPONENT: &str = "prefill";
/// Requests are taken for at least this long after the worker has left, from those who have not heard of it.
const LEAVE_GRACE: Duration = Duration::from_millis(500);
/// How often it is looked whether all is answered.
const IDLE_POLL: Duration = Duration::from_millis(20);

/// One mock engine of this process.
struct Member {
    membership: Membership,
    /// Faults are set here; none without `--http-port`.
    _door: Option<MockServer>,
}

/// What the mock engines of this process have in common.
struct Plan {
    store: Arc<dyn Store>,
    server: RequestServer,
    member: MemberOptions,
    /// What the card of each of them is made of.
    card: CardPlan,
    worker: WorkerOptions,
    door: MockServerOptions,
    event_faults: Vec<Fault>,
    requests_max: Option<usize>,
    clock: Clock,
    tasks: Tasks,
}

/// What a card is made of, and which part of requests its worker computes.
struct CardPlan {
    folder: String,
    facts: EngineFacts,
    mode: DisaggregationMode,
    /// The first one's port where decode workers meet it.
    bootstrap_port: Option<u16>,
    /// Where others reach this process.
    host: String,
    /// The component and endpoint of the card's worker.
    endpoint: EndpointName,
    /// The status server, from which frontends get the model's files, if there is one.
    files_at: Option<String>,
    /// How long handing over a token of a prompt takes.
    per_token: Duration,
    /// Fields of what the card says of the engine, beside what every card has.
    runtime: Vec<(&'static str, Value)>,
}

/// Serves until a signal.
pub(super) async fn run(settings: &Settings) -> Result<(), Failure> {
    let tasks = Tasks::new();
    let mut plan = Plan::read(settings, &tasks).await?;
    let status = status(settings, &plan).await?;
    plan.card.files_at = status.as_ref().map(|status| {
        let host = kvasir_worker::in_url(&plan.card.host);
        format!("{host}:{}", status.port())
    });
    let mut members = Vec::new();
    for at in 0..settings.get(keys::WORKERS) {
        let door = match settings.is_set(keys::HTTP_PORT) {
            true => Some(super::nth(wiring::listen_address(settings)?, at)?),
            false => None,
        };
        members.push(plan.start(at, door).await?);
    }
    if let Some(status) = &status {
        status.set_ready(true);
    }
    super::told_to_end(settings).await?;
    if let Some(status) = &status {
        status.set_ready(false);
    }
    for member in &members {
        member.membership.leave().await;
    }
    let timeout = settings.get(keys::RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS);
    let active = plan.server.active();
    tracing::info!(active, "left the fleet; a second signal ends at once");
    tokio::select! {
        () = idle(&plan.server, timeout) => {}
        _ = super::signalled() => return Ok(()),
    }
    drop(members);
    drop(plan);
    tokio::select! {
        _ = tasks.shut_down(timeout) => {}
        _ = super::signalled() => {}
    }
    if let Some(status) = status {
        status.end().await;
    }
    Ok(())
}

/// The status server, where one is wanted, and what it says of calls.
async fn status(settings: &Settings, plan: &Plan) -> Result<Option<SystemStatus>, Failure> {
    let mut options = wiring::metric_options(settings, u64::from(std::process::id()));
    let endpoint = &plan.member.endpoint;
    options.identity.namespace.clone_from(&endpoint.namespace);
    options.identity.component.clone_from(&endpoint.component);
    let metrics = Metrics::new(&options).map_err(|error| error.to_string())?;
    plan.server
        .observe(EndpointMeters::new(&metrics, plan.clock));
    let source = StatusSource {
        metrics,
        clock: plan.clock,
        endpoints: vec![endpoint.endpoint.clone()],
        measure: Box::new(|| {}),
        files: HostedFiles::of(&plan.member.card, endpoint),
    };
    SystemStatus::start(settings, source).await
}

/// Waits until everything is answered, at most `timeout`.
async fn idle(server: &RequestServer, timeout: Duration) {
    tokio::time::sleep(LEAVE_GRACE.min(timeout)).await;
    let answered = async {
        while server.active() > 0 {
            tokio::time::sleep(IDLE_POLL).await;
        }
    };
    let _ = tokio::time::timeout(timeout, answered).await;
}

impl Plan {
    async fn read(settings: &Settings, tasks: &Tasks) -> Result<Self, Failure> {
        let Some((store, _)) = planes::store(settings, tasks)? else {
            let text =
                "--discovery-backend: mock engines announce themselves in file, etcd or kubernetes";
            return Err(BadConfig(text.to_owned()).into());
        };
        let Some(folder) = settings.get(keys::MODEL_PATH) else {
            let text = "--model-path is needed with --discovery-backend: frontends read the tokenizer that the worker's card names";
            return Err(BadConfig(text.to_owned()).into());
        };
        let (door, mut worker) = super::options(settings)?;
        worker.engine.event_tokens = false;
        let engine = &worker.engine;
        let facts = EngineFacts {
            block_size: engine.block_size,
            total_kv_blocks: engine.num_blocks.into(),
            max_num_seqs: engine.max_num_seqs.into(),
            max_num_batched_tokens: engine.max_num_batched_tokens.into(),
            context_length: engine.max_model_len,
            ranks: worker.ranks,
            migration_limit: settings.get(keys::MIGRATION_LIMIT),
        };
        let host = settings.get(keys::TCP_RPC_HOST);
        let host = host.unwrap_or_else(|| local_address().to_string());
        let mut runtime = topology::fields(settings).await?;
        runtime.extend(parsers(settings));
        let endpoint = endpoint(settings);
        let card_plan = CardPlan {
            folder,
            facts,
            mode: settings.get(keys::DISAGGREGATION_MODE),
            bootstrap_port: settings.get(keys::BOOTSTRAP_PORTS),
            host: host.clone(),
            endpoint: endpoint.clone(),
            files_at: None,
            per_token: transfer_time(settings),
            runtime,
        };
        let card = card_plan.card(&door.model, None)?;
        let link = planes::nats_link(settings, tasks)?;
        let server = kvasir_planes::listen(settings, &host, &link, tasks).await?;
        let faults = settings.get(keys::EVENT_FAULT_AT_START);
        let faults: Result<Vec<Fault>, _> = faults.iter().map(|text| text.parse()).collect();
        Ok(Self {
            store,
            server,
            member: MemberOptions {
                carrier: event_carrier(settings, &endpoint, &host, &link, tasks),
                log: event_log(settings, &endpoint, &link, tasks),
                endpoint,
                card,
                ranks: worker.ranks,
                device: Some("cuda".into()),
                codec: match settings.get(keys::REQUEST_PLANE_CODEC) {
                    PlaneCodec::Json => Codec::Json,
                    PlaneCodec::Msgpack => Codec::MessagePack,
                },
                outbox: None,
            },
            card: card_plan,
            worker,
            door,
            event_faults: faults?,
            requests_max: requests_max(settings),
            clock: Clock::new(),
            tasks: tasks.clone(),
        })
    }

    /// Starts mock engine number `at`, and a door for HTTP beside it if an address is given.
    async fn start(&self, at: u32, http: Option<SocketAddr>) -> Result<Member, Failure> {
        let cache_faults = Arc::new(CacheFaults::default());
        for fault in &self.event_faults {
            if !cache_faults.inject(*fault) {
                let text =
                    format!("--event-fault-at-start: {fault:?} cannot go wrong on the event plane");
                return Err(BadConfig(text).into());
            }
        }
        let meeting = self.card.meeting(at, &self.tasks).await?;
        let options = MemberOptions {
            outbox: Some(Arc::clone(&cache_faults) as _),
            card: self.card.card(&self.door.model, meeting.as_deref())?,
            ..self.member.clone()
        };
        let membership = Membership::open(&*self.store, options, self.clock, &self.tasks).await?;
        let reports = Arc::clone(membership.reports());
        let observer: Arc<dyn Observer> = Arc::new(PlaneReporter::new(reports));
        let id = membership.id();
        let worker = Worker::spawn(&self.tasks, id, self.worker.clone(), &observer)?;
        let seed = self.door.seed.wrapping_add(u64::from(at));
        let door = MockServerOptions {
            seed,
            ..self.door.clone()
        };
        let faults = door.faults.clone();
        let door = match http {
            None => None,
            Some(address) => {
                let server = MockServer::start(&self.tasks, address, worker.clone(), door).await;
                let server = server.map_err(|error| {
                    format!(
                        "cannot listen on {address}: {error}; choose another port with --http-port"
                    )
                })?;
                server.take_event_faults(cache_faults);
                Some(server)
            }
        };
        let faults = match &door {
            Some(door) => door.faults(),
            None => Arc::new(Faults::new(faults, seed)),
        };
        let engine = PlaneEngine::new(worker, faults, &self.tasks);
        let engine = engine.with_requests_max(self.requests_max);
        let engine = Arc::new(engine.computing(self.card.part(meeting)));
        membership.announce(&self.server, engine).await?;
        self.say(&membership, door.as_ref());
        let _door = door;
        Ok(Member { membership, _door })
    }

    fn say(&self, membership: &Membership, door: Option<&MockServer>) {
        let (id, endpoint) = (membership.id(), &self.member.endpoint);
        let at = door.map_or_else(String::new, |door| format!(", http://{}", door.address()));
        let line = format!(
            "{} as worker {id} of {endpoint}, found through {} {}{at}\n",
            self.door.model,
            self.store.backend(),
            self.store.address(),
        );
        let _ = std::io::stdout().write_all(line.as_bytes());
    }
}

/// Requests that a worker takes at once: those that its engine runs, and those that it lets wait.
fn requests_max(settings: &Settings) -> Option<usize> {
    let running = settings.get(keys::ENGINE_REQUEST_LIMIT)?;
    let waiting = settings.get(keys::DYNAMO_REQUEST_QUEUE_LIMIT);
    Some((running as usize).saturating_add(waiting as usize))
}

/// How calls of tools and reasoning are found in the answers.
fn parsers(settings: &Settings) -> Vec<(&'static str, Value)> {
    let named = [
        ("tool_call_parser", settings.get(keys::DYN_TOOL_CALL_PARSER)),
        ("reasoning_parser", settings.get(keys::DYN_REASONING_PARSER)),
    ];
    let named = named.into_iter();
    named
        .filter_map(|(field, name)| Some((field, name?.into())))
        .collect()
}

impl CardPlan {
    /// The card of a worker that is met there, if anywhere.
    fn card(&self, model: &str, meeting: Option<&MeetingPoint>) -> Result<Card, Failure> {
        let address = meeting.map(|meeting| BootstrapAddress {
            host: self.host.as_str().into(),
            port: meeting.address().port(),
        });
        let role = match self.mode {
            DisaggregationMode::Agg => CardRole::Aggregated,
            DisaggregationMode::Prefill => CardRole::Prefill(address),
            DisaggregationMode::Decode => CardRole::Decode,
        };
        let folder = &self.folder;
        let card = card_of_folder(Path::new(folder), model, &self.facts, &role)
            .map_err(|error| BadConfig(format!("--model-path {folder}: {error}")))?;
        let card = match &self.files_at {
            Some(server) => hosted_card(&card, &self.endpoint, server)?,
            None => card,
        };
        let mut json = card.to_json();
        for (field, value) in &self.runtime {
            if let Some(runtime) = json.get_mut("runtime_config") {
                runtime[*field] = value.clone();
            }
        }
        Ok(Card::parse(&json)?)
    }

    /// Where decode workers meet worker number `at`, if they do.
    async fn meeting(&self, at: u32, tasks: &Tasks) -> Result<Option<Arc<MeetingPoint>>, Failure> {
        let first = self.bootstrap_port;
        let Some(first) = first.filter(|_| self.mode == DisaggregationMode::Prefill) else {
            return Ok(None);
        };
        let any = SocketAddr::from(([0, 0, 0, 0], first));
        let address = super::nth(any, at)?;
        let meeting = MeetingPoint::open_at(address, tasks).await;
        let meeting = meeting.map_err(|error| {
            format!(
                "cannot listen on {address}: {error}; choose another port with --bootstrap-ports"
            )
        })?;
        Ok(Some(meeting))
    }

    /// What a worker computes that is met there, if anywhere.
    fn part(&self, meeting: Option<Arc<MeetingPoint>>) -> Part {
        match self.mode {
            DisaggregationMode::Agg => Part::Whole,
            DisaggregationMode::Prefill => Part::Prefill(PrefillPart {
                per_token: self.per_token,
                meeting,
            }),
            DisaggregationMode::Decode => Part::Decode,
        }
    }
}

/// How long handing over a token of a prompt takes.
pub(super) fn transfer_time(settings: &Settings) -> Duration {
    let gigabytes = settings.get(keys::KV_TRANSFER_BANDWIDTH);
    let bytes = settings.get(keys::KV_BYTES_PER_TOKEN) as f64;
    match gigabytes > 0.0 {
        true => Duration::try_from_secs_f64(bytes / (gigabytes * 1e9)).unwrap_or_default(),
        false => Duration::ZERO,
    }
}

/// Where it is found: as the options say, else as Dynamo has it for what it computes.
fn endpoint(settings: &Settings) -> EndpointName {
    let mut endpoint = kvasir_planes::endpoint(settings);
    let prefill = settings.get(keys::DISAGGREGATION_MODE) == DisaggregationMode::Prefill;
    if prefill && settings.get(keys::ENDPOINT).is_none() {
        endpoint.component = PREFILL_COMPONENT.to_owned();
    }
    endpoint
}
