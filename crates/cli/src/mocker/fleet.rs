//! `kvasir mocker` in a fleet: mock engines that take tokens, found through discovery as Dynamo's workers are.

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvasir_config::{PlaneCodec, Settings, keys};
use kvasir_discovery::{Card, Store};
use kvasir_mocker::{
    CacheFaults, Fault, Faults, MockServer, MockServerOptions, Observer, PlaneEngine,
    PlaneReporter, Worker, WorkerOptions,
};
use kvasir_planes::event_carrier;
use kvasir_tasks::Tasks;
use kvasir_telemetry::Clock;
use kvasir_transport::local_address;
use kvasir_types::Codec;
use kvasir_worker::{EngineFacts, MemberOptions, Membership, RequestServer, card_of_folder};

use crate::planes;
use crate::wiring::{self, BadConfig, Failure};

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
    worker: WorkerOptions,
    door: MockServerOptions,
    event_faults: Vec<Fault>,
    requests_max: Option<usize>,
    clock: Clock,
    tasks: Tasks,
}

/// Serves until a signal.
pub(super) async fn run(settings: &Settings) -> Result<(), Failure> {
    let tasks = Tasks::new();
    let plan = Plan::read(settings, &tasks).await?;
    let mut members = Vec::new();
    for at in 0..settings.get(keys::WORKERS) {
        let door = match settings.is_set(keys::HTTP_PORT) {
            true => Some(super::nth(wiring::listen_address(settings)?, at)?),
            false => None,
        };
        members.push(plan.start(at, door).await?);
    }
    super::told_to_end(settings).await?;
    for member in &members {
        member.membership.leave().await;
    }
    let timeout = settings.get(keys::HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS);
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
    Ok(())
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
        let card = card_of_folder(Path::new(&folder), &door.model, &facts)
            .map_err(|error| BadConfig(format!("--model-path {folder}: {error}")))?;
        let card = with_parsers(&card, settings)?;
        let host = settings.get(keys::TCP_RPC_HOST);
        let host = host.unwrap_or_else(|| local_address().to_string());
        let link = planes::nats_link(settings, tasks)?;
        let server = kvasir_planes::listen(settings, &host, &link, tasks).await?;
        let endpoint = kvasir_planes::endpoint(settings);
        let faults = settings.get(keys::EVENT_FAULT_AT_START);
        let faults: Result<Vec<Fault>, _> = faults.iter().map(|text| text.parse()).collect();
        Ok(Self {
            store,
            server,
            member: MemberOptions {
                carrier: event_carrier(settings, &endpoint, &host, &link, tasks),
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
        let options = MemberOptions {
            outbox: Some(Arc::clone(&cache_faults) as _),
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
        let engine = Arc::new(engine.with_requests_max(self.requests_max));
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

/// The same card, which says how calls of tools and reasoning are found in the answers.
fn with_parsers(card: &Card, settings: &Settings) -> Result<Card, Failure> {
    let mut json = card.to_json();
    for (field, named) in [
        ("tool_call_parser", keys::DYN_TOOL_CALL_PARSER),
        ("reasoning_parser", keys::DYN_REASONING_PARSER),
    ] {
        if let Some(name) = settings.get(named)
            && let Some(runtime) = json.get_mut("runtime_config")
        {
            runtime[field] = name.into();
        }
    }
    Ok(Card::parse(&json)?)
}
