//! `kvasir router`: the router on the request plane, without an HTTP API of its own.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvasir_config::{Settings, keys};
use kvasir_discovery::{EndpointName, Lease, Store, StoreError};
use kvasir_embed::{IndexServer, codec, replica_carrier};
use kvasir_host::{
    EndpointFleet, EndpointFleetOptions, HostContext, IndexEndpoints, RemoteIndex,
    ReplicaAnnouncer, RouterSetup,
};
use kvasir_planes::event_carrier;
use kvasir_services::PlaneRouter;
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, Metrics, log};
use kvasir_transport::nats::NatsLink;
use kvasir_transport::{ServedEndpoint, local_address};
use kvasir_types::Codec;
use kvasir_worker::{EndpointMember, HostedFiles, JoinError, RequestServer};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::endpoint_meters::EndpointMeters;
use crate::system_status::{StatusSource, SystemStatus};
use crate::wiring::{self, BadConfig, Failure};
use crate::{planes, serve, shared_cache, sockets};

/// The component under which it serves, as Dynamo's router does.
const COMPONENT: &str = "router";
/// Between two tries to announce the endpoints.
const ANNOUNCE_EVERY: Duration = Duration::from_secs(1);
/// How often it is looked whether all is answered.
const IDLE_POLL: Duration = Duration::from_millis(20);

/// Routes until a signal.
pub(crate) async fn run(settings: &Settings) -> Result<(), Failure> {
    let workers = worker_endpoint(settings)?;
    let context = context(settings, &workers)?;
    let tasks = context.tasks.clone();
    let Some((store, _)) = planes::store(settings, &tasks)? else {
        let text = "--discovery-backend: a router finds its workers in file, etcd or kubernetes, and is found there";
        return Err(BadConfig(text.to_owned()).into());
    };
    wiring::say_how(settings);
    // Requests come in at the port that is named; answers of workers at one of their own.
    let (clients, link) = kvasir_planes::clients_at(settings, 0, &tasks).await?;
    let seed = wiring::process_id();
    let fleet = EndpointFleet::start(
        &context,
        EndpointFleetOptions {
            endpoint: workers.clone(),
            block_size: settings.get(keys::BLOCK_SIZE),
            setup: setup(settings, &context)?,
            store: Arc::clone(&store),
            clients,
            nats: link.clone(),
            log: planes::event_log(settings, &tasks)?,
            replicas: replicas(settings, &context, &link),
            threads: event_threads(settings)?,
            seed,
        },
    );
    let router = PlaneRouter::new(Arc::clone(&fleet), settings.get(keys::RETRY_LIMIT), seed);
    let door = Door::open(settings, &workers.namespace, store, &link, &tasks).await?;
    door.serve_index(settings, &fleet, &workers, &context);
    let meters = EndpointMeters::new(&context.metrics, context.clock);
    door.server.observe(meters);
    let status = status(settings, &context, &router, &fleet).await?;
    let mut signals = Signals::new()?;
    let served = tokio::select! {
        served = door.serve(&router, &fleet, settings) => served?,
        _ = signals.next() => return Ok(()),
    };
    if let Some(status) = &status {
        status.set_ready(true);
    }
    sockets::notify("READY=1");
    let is_graceful = signals.next().await;
    if let Some(status) = &status {
        status.set_ready(false);
    }
    let left = tokio::select! {
        left = door.leave(served, settings, is_graceful, &tasks) => left,
        _ = signals.next() => return Err("ended by a second signal".into()),
    };
    if let Some(status) = status {
        status.end().await;
    }
    match left {
        0 => Ok(()),
        cut => Err(format!("{cut} requests were still running when the timeout ended").into()),
    }
}

/// The endpoint of the workers; `--namespace` names where it is looked for.
fn worker_endpoint(settings: &Settings) -> Result<EndpointName, Failure> {
    // Without an endpoint the options were refused.
    let mut endpoint = kvasir_planes::endpoint(settings);
    if let Some(namespace) = settings.get(keys::NAMESPACE) {
        endpoint = EndpointName::new(&namespace, &endpoint.component, &endpoint.endpoint);
    }
    if endpoint.component == COMPONENT {
        let text = format!(
            "--endpoint {endpoint}: that is where a router serves; name the endpoint of the workers"
        );
        return Err(BadConfig(text).into());
    }
    Ok(endpoint)
}

fn context(settings: &Settings, workers: &EndpointName) -> Result<HostContext, Failure> {
    let mut options = wiring::metric_options(settings, u64::from(std::process::id()));
    options.identity.namespace.clone_from(&workers.namespace);
    COMPONENT.clone_into(&mut options.identity.component);
    let metrics = Metrics::new(&options).map_err(|error| error.to_string())?;
    log::count_drops(&metrics.log_lines_dropped);
    Ok(HostContext {
        clock: Clock::new(),
        metrics,
        tasks: Tasks::new(),
    })
}

fn setup(settings: &Settings, context: &HostContext) -> Result<RouterSetup, Failure> {
    let mut setup = wiring::router_setup(settings)?;
    setup.silent_rank_ttl = Some(settings.get(keys::ROUTER_TTL_SECS));
    let shared = shared_cache::of(settings, context, &wiring::worker_tls(settings)?)?;
    if shared.hicache.is_some() && settings.get(keys::SHARED_CACHE_URL).is_none() {
        let text = "--shared-cache-type hicache needs --shared-cache-url in kvasir router";
        return Err(BadConfig(text.to_owned()).into());
    }
    setup.shared_cache = shared.cache;
    if settings.get(keys::USE_REMOTE_INDEXER) {
        setup.remote_index = Some(RemoteIndex::new(context, wiring::process_id()));
    }
    Ok(setup)
}

fn replicas(
    settings: &Settings,
    context: &HostContext,
    link: &NatsLink,
) -> Option<ReplicaAnnouncer> {
    let sessions = settings
        .get(keys::ROUTER_SESSION_AFFINITY_TTL_SECS)
        .is_some();
    settings.get(keys::ROUTER_REPLICA_SYNC).then(|| {
        let carrier = replica_carrier(settings, link, &context.tasks);
        ReplicaAnnouncer::new(context, Some(carrier), sessions)
    })
}

fn event_threads(
    settings: &Settings,
) -> Result<Option<Arc<kvasir_tasks::RuntimeThreads>>, Failure> {
    match settings.get(keys::ROUTER_KV_EVENTS) {
        true => Ok(Some(Arc::new(serve::event_threads(settings)?))),
        false => Ok(None),
    }
}

/// The status server, where one is wanted.
async fn status(
    settings: &Settings,
    context: &HostContext,
    router: &PlaneRouter,
    fleet: &Arc<EndpointFleet>,
) -> Result<Option<SystemStatus>, Failure> {
    let fleet = Arc::clone(fleet);
    let endpoints = router.endpoints().map(|(name, _)| name.to_owned());
    let source = StatusSource {
        metrics: context.metrics.clone(),
        clock: context.clock,
        endpoints: endpoints.into(),
        measure: Box::new(move || fleet.measure()),
        files: HostedFiles::default(),
    };
    SystemStatus::start(settings, source).await
}

/// Signals that end the process.
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> Result<Self, Failure> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    /// Waits for one: true if callers are to have time to notice.
    async fn next(&mut self) -> bool {
        tokio::select! {
            _ = self.interrupt.recv() => false,
            _ = self.terminate.recv() => true,
        }
    }
}

/// What is announced: dropped, the endpoints are served no more.
struct Served {
    lease: Arc<dyn Lease>,
    endpoints: Vec<ServedEndpoint>,
}

/// Where calls come in, and how the process is found.
struct Door {
    namespace: String,
    store: Arc<dyn Store>,
    server: RequestServer,
    codec: Codec,
    host: String,
    link: NatsLink,
    tasks: Tasks,
}

impl Door {
    async fn open(
        settings: &Settings,
        namespace: &str,
        store: Arc<dyn Store>,
        link: &NatsLink,
        tasks: &Tasks,
    ) -> Result<Self, Failure> {
        let host = settings.get(keys::TCP_RPC_HOST);
        let host = host.unwrap_or_else(|| local_address().to_string());
        Ok(Self {
            namespace: namespace.to_owned(),
            store,
            server: kvasir_planes::listen(settings, &host, link, tasks).await?,
            codec: codec(settings),
            host,
            link: link.clone(),
            tasks: tasks.clone(),
        })
    }

    /// Answers other routers that ask for the index (`--serve-indexer`).
    fn serve_index(
        &self,
        settings: &Settings,
        fleet: &Arc<EndpointFleet>,
        workers: &EndpointName,
        context: &HostContext,
    ) {
        if !settings.get(keys::SERVE_INDEXER) {
            return;
        }
        let fleet = Arc::clone(fleet);
        let find = move |model: &str| {
            let is_served = fleet.serves(model);
            is_served.then(|| Arc::clone(&fleet.model.host))
        };
        let records = !settings.get(keys::ROUTER_KV_EVENTS);
        let index = IndexEndpoints::new(context, records, find);
        let (store, server) = (Arc::clone(&self.store), self.server.clone());
        let at = (self.host.as_str(), &self.link);
        let server = IndexServer::new(settings, index, store, server, at, context);
        let endpoints = BTreeSet::from([workers.clone()]);
        server.start(watch::channel(endpoints).1);
    }

    /// Waits for the first workers, then serves the endpoints and says so in the store, as soon as that is there.
    async fn serve(
        &self,
        router: &PlaneRouter,
        fleet: &EndpointFleet,
        settings: &Settings,
    ) -> Result<Served, Failure> {
        let first = settings.get(keys::ROUTER_MIN_INITIAL_WORKERS) as usize;
        if first > 0 {
            tracing::info!(workers = first, "waiting for the first workers");
            fleet.wait_for(first).await;
        }
        let mut was_said = false;
        loop {
            match self.announce(router, settings).await {
                Ok(served) => return Ok(served),
                Err(JoinError::Store(error @ StoreError::Unreachable { .. })) => {
                    if !std::mem::replace(&mut was_said, true) {
                        tracing::warn!(%error, "waiting for the discovery store: start it, or see --discovery-backend and --etcd-endpoints, --file-kv or --kubeconfig");
                    }
                }
                Err(error) => return Err(error.into()),
            }
            tokio::time::sleep(ANNOUNCE_EVERY).await;
        }
    }

    async fn announce(
        &self,
        router: &PlaneRouter,
        settings: &Settings,
    ) -> Result<Served, JoinError> {
        let lease = self.store.lease().await?;
        let mut endpoints = Vec::new();
        for (name, handler) in router.endpoints() {
            let endpoint = EndpointName::new(&self.namespace, COMPONENT, name);
            let (link, tasks) = (&self.link, &self.tasks);
            let member = EndpointMember {
                lease: Arc::clone(&lease),
                carrier: event_carrier(settings, &endpoint, &self.host, link, tasks),
                server: self.server.clone(),
                device: None,
                codec: self.codec,
                // Nothing is published, so nothing is timed.
                clock: Clock::new(),
                tasks: tasks.clone(),
                endpoint,
            };
            endpoints.push(member.serve(handler).await?);
            tracing::info!(endpoint = %member.endpoint, id = member.id().0, "serving");
        }
        Ok(Served { lease, endpoints })
    }

    /// Takes the endpoints back, and ends when what runs has ended. Returns how many requests were cut off.
    async fn leave(
        &self,
        served: Served,
        settings: &Settings,
        is_graceful: bool,
        tasks: &Tasks,
    ) -> usize {
        if let Err(error) = served.lease.revoke().await {
            tracing::warn!(%error, "the endpoints stay announced until they expire");
        }
        if is_graceful {
            let grace = settings.get(keys::GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS);
            let grace_secs = grace.as_secs_f64();
            tracing::info!(grace_secs, "leaving; a second signal ends at once");
            tokio::time::sleep(grace).await;
        }
        drop(served.endpoints);
        let timeout = settings.get(keys::RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS);
        let running = self.server.active();
        tracing::info!(running, timeout_secs = timeout.as_secs(), "draining");
        let answered = async {
            while self.server.active() > 0 {
                tokio::time::sleep(IDLE_POLL).await;
            }
        };
        let _ = tokio::time::timeout(timeout, answered).await;
        let cut = self.server.active();
        tasks.shut_down(ANNOUNCE_EVERY).await;
        cut
    }
}
