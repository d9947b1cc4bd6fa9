//! Serving until a signal: what `frontend` and `demo` have in common.

use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvasir_config::{DiscoveryBackend, Settings, keys};
use kvasir_frontend::{App, Fleet, MemberState, Server, http_threads};
use kvasir_host::{LoadedSnapshot, RemoteIndex, SnapshotWriter};
use kvasir_tasks::{RuntimeThreads, Tasks};
use kvasir_telemetry::{Clock, Metrics, log};
use tokio::signal::unix::{SignalKind, signal};

use crate::sockets::{self, AskedAddresses, InnerSockets, OpenSockets};
use crate::upgrade::{Handed, TakeOver, Upgrades};
use crate::wiring::{self, Failure};
use crate::{cluster, descriptors, planes, shared_cache, traces};

/// How often it is looked whether the first workers are there.
const WORKERS_POLL: Duration = Duration::from_millis(50);

/// The application with the settings of its HTTP side.
pub(crate) fn app(settings: &Settings, clock: Clock) -> Result<Arc<App>, Failure> {
    let options = wiring::metric_options(settings, u64::from(std::process::id()));
    let metrics = Metrics::new(&options).map_err(|error| {
        format!(
            "--metrics-prefix {}: not a metric name ({error})",
            options.identity.frontend_prefix
        )
    })?;
    log::count_drops(&metrics.log_lines_dropped);
    Ok(App::new(
        wiring::app_options(settings)?,
        metrics,
        clock,
        Tasks::new(),
    ))
}

/// Where the options say to listen.
fn asked_addresses(settings: &Settings) -> Result<AskedAddresses, Failure> {
    Ok(AskedAddresses {
        clients: Some(wiring::listen_address(settings)?),
        operators: wiring::admin_address(settings)?,
        answers: Some(kvasir_planes::answers_address(settings)),
        peers: planes::peer_address(settings)?,
    })
}

/// Listens on the configured address, or at the sockets that the service manager has opened; an error names it.
pub(crate) async fn listen(app: &Arc<App>, settings: &Settings) -> Result<Server, Failure> {
    let opened = sockets::take(wiring::admin_address(settings)?.is_some())?;
    listen_at(app, settings, opened).await
}

/// The same, at sockets that are open already.
async fn listen_at(
    app: &Arc<App>,
    settings: &Settings,
    opened: OpenSockets,
) -> Result<Server, Failure> {
    let address = wiring::listen_address(settings)?;
    let admin = wiring::admin_address(settings)?;
    let threads = wiring::http_threads(settings);
    let threads = http_threads(threads)
        .map_err(|error| format!("--http-threads {threads}: the threads did not start: {error}"))?;
    let started = match opened.clients {
        Some(socket) => Server::start_at(threads, Arc::clone(app), socket),
        None => Server::start_on(threads, Arc::clone(app), address).await,
    };
    let mut server = started.map_err(|error| {
        format!("cannot listen on {address}: {error}; choose another port with --http-port")
    })?;
    if let Some(address) = admin {
        let started = match opened.operators {
            Some(socket) => server.start_admin_at(socket),
            None => server.start_admin(address).await,
        };
        started.map_err(|error| {
            format!("cannot listen on {address}: {error}; choose another port with --admin-port")
        })?;
    }
    warn_of_open_routes(app, &server);
    Ok(server)
}

fn say_where(server: &Server) {
    tracing::info!(address = %server.address(), "listening");
    if let Some(address) = server.admin_address() {
        tracing::info!(%address, "listening for operators");
    }
}

/// Says that whoever reaches the port can change the workers, if that is so.
fn warn_of_open_routes(app: &App, server: &Server) {
    let options = app.options();
    let address = server.admin_address().unwrap_or(server.address());
    let asks =
        !options.admin_token.is_empty() || (!options.admin_apart && !options.keys.is_empty());
    if options.admin_enabled && !asks && !address.ip().is_loopback() {
        tracing::warn!(%address, "operators' routes are open to the network without a token: whoever reaches this port \
            can add and remove workers; set KVASIR_ADMIN_TOKEN or --admin-token-file, or move them with --admin-port");
    }
}

/// Waits for SIGINT or SIGTERM, then drains; after SIGTERM not before those who send requests had time to notice. A
/// second signal ends at once. The index goes to `snapshot`, once there is one. Or another process takes over by `upgrades`, and
/// nothing is left to do here.
pub(crate) async fn until_signal(
    server: Server,
    settings: &Settings,
    snapshot: &OnceLock<Arc<SnapshotWriter>>,
    upgrades: Option<Upgrades>,
) -> Result<(), Failure> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut next = async || {
        tokio::select! {
            _ = interrupt.recv() => Duration::ZERO,
            _ = terminate.recv() => settings.get(keys::GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS),
        }
    };
    let drain = settings.get(keys::HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS);
    let replaced = async {
        match upgrades {
            Some(upgrades) => upgrades.run(&server, snapshot, drain).await,
            None => std::future::pending().await,
        }
    };
    let grace = tokio::select! {
        grace = next() => grace,
        () = replaced => {
            let cut = server.shut_down(Duration::ZERO).await;
            return all_served(cut);
        }
    };
    // Behind our sockets another process serves: nobody has to look elsewhere.
    let is_handed_over = server.service().is_handed_over();
    if !grace.is_zero() && !is_handed_over {
        let grace_secs = grace.as_secs_f64();
        tracing::info!(grace_secs, "leaving; a second signal drains at once");
        server.service().start_leaving();
        let _ = tokio::time::timeout(grace, next()).await;
    }
    let timeout = drain;
    tracing::info!(
        timeout_secs = timeout.as_secs(),
        "draining; a second signal ends at once"
    );
    let drained = async {
        // The index of a process that was replaced is the other's to keep.
        let timeout = match snapshot.get().filter(|_| !is_handed_over) {
            Some(snapshot) => keep_index(&server, snapshot, timeout).await,
            None => timeout,
        };
        server.shut_down(timeout).await
    };
    tokio::select! {
        cut = drained => all_served(cut),
        _ = next() => Err("ended by a second signal".into()),
    }
}

/// Whether the end cut nobody off.
fn all_served(cut: usize) -> Result<(), Failure> {
    match cut {
        0 => Ok(()),
        cut => Err(format!("{cut} requests were still running when the timeout ended").into()),
    }
}

/// Writes the index down when the last request has ended: no event can follow that matters. Returns how much of the
/// timeout is left.
async fn keep_index(server: &Server, snapshot: &SnapshotWriter, timeout: Duration) -> Duration {
    let app = server.service();
    app.start_draining();
    snapshot.pause();
    let emptied = tokio::time::timeout(timeout, app.in_flight().emptied()).await;
    let shown = snapshot.path().display();
    match snapshot.finish().await {
        Ok(saved) => {
            tracing::info!(path = %shown, streams = saved.streams, left_out = saved.left_out,
            bytes = saved.bytes, "index snapshot written")
        }
        Err(error) => {
            tracing::error!(path = %shown, %error, "index snapshot failed: the next start is a cold one")
        }
    }
    match emptied {
        Ok(()) => timeout,
        Err(_) => Duration::ZERO,
    }
}

/// What an earlier process kept in `--index-snapshot`. A file that cannot be used costs a cold start, no more.
fn load_snapshot(path: &Path) -> Option<LoadedSnapshot> {
    let shown = path.display();
    match LoadedSnapshot::load(path) {
        Ok(Some(snapshot)) => return Some(snapshot),
        Ok(None) => tracing::info!(path = %shown, "no index snapshot: starting cold"),
        Err(error) => {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            tracing::warn!(path = %shown, %error, cause, "index snapshot refused: starting cold");
        }
    }
    None
}

/// Threads for the cache events of engines.
pub(crate) fn event_threads(settings: &Settings) -> Result<RuntimeThreads, Failure> {
    let threads = settings.get(keys::ROUTER_EVENT_THREADS) as usize;
    RuntimeThreads::start("events", threads, |_| {}).map_err(|error| {
        format!("--router-event-threads {threads}: the threads did not start: {error}").into()
    })
}

/// `kvasir frontend`. It listens before it reads what may take long: tokenizers and the index snapshot.
pub(crate) async fn run(settings: &Settings) -> Result<(), Failure> {
    let app = app(settings, Clock::new())?;
    let workers = wiring::workers(settings)?;
    let file = wiring::workers_file(settings)?;
    wiring::probe_snapshot(settings)?;
    wiring::say_how(settings);
    descriptors::say(settings);
    let mut setup = wiring::router_setup(settings)?;
    setup.silent_rank_ttl = Some(settings.get(keys::ROUTER_TTL_SECS));
    let tls = wiring::worker_tls(settings)?;
    let shared = shared_cache::of(settings, app.context(), &tls)?;
    setup.shared_cache = shared.cache;
    if settings.get(keys::USE_REMOTE_INDEXER) {
        let remote = RemoteIndex::new(app.context(), wiring::process_id());
        setup.remote_index = Some(remote);
    }
    let mut fleet = Fleet::new(app.fleet_context(), setup).with_tls(tls);
    if let Some(pool) = shared.hicache {
        fleet = fleet.with_hicache(pool);
    }
    let listens = settings.get(keys::ROUTER_KV_EVENTS) && !settings.get(keys::USE_REMOTE_INDEXER);
    fleet = match listens {
        true => fleet.with_event_threads(event_threads(settings)?),
        false => fleet.without_events(),
    };
    // Workers may be named from now on; the fleet follows them when it begins.
    let _named = app.members().follow();
    for worker in workers {
        let shown = worker.transport.to_string();
        if !fleet.watch(worker) {
            tracing::warn!(worker = shown, "--worker names it twice");
        }
    }
    if let Some(file) = file {
        file.start(app.members(), app.metrics(), app.tasks());
    }
    // Those that are discovered come later, and discovery says what stands in its way.
    let is_discovering = settings.get(keys::DISCOVERY_BACKEND) != DiscoveryBackend::Static
        && settings.is_set(keys::DISCOVERY_BACKEND);
    if app.members().list().is_empty() && !is_discovering && !settings.is_set(keys::WORKER_SELECTOR)
    {
        tracing::warn!(
            "no workers yet: give --worker, --workers-file, --worker-selector, `kvasir workers add URL`, or say with --discovery-backend where \
             workers announce themselves"
        );
    }
    app.set_loading(true);
    let parts = FleetParts::default();
    let upgrades = Upgrades::new(&app, asked_addresses(settings)?, Arc::clone(&parts.handed))?;
    let ended = match TakeOver::begin().await? {
        Some(taken) => {
            let server = take_over(taken, &app, fleet, settings, &parts).await?;
            until_signal(server, settings, &parts.snapshot, upgrades).await
        }
        None => {
            let server = listen(&app, settings).await?;
            say_where(&server);
            sockets::notify("READY=1");
            serve_while_loading(&app, &fleet, server, settings, &parts, upgrades).await
        }
    };
    traces::flush(&app).await;
    ended
}

/// What there is once a fleet has begun.
#[derive(Default)]
struct FleetParts {
    /// What writes its index to a file, where that is wanted.
    snapshot: OnceLock<Arc<SnapshotWriter>>,
    /// What another process needs.
    handed: Arc<Handed>,
}

/// Lets a fleet begin with what the old process has, and opens the doors when it serves what that one does.
async fn take_over(
    mut taken: TakeOver,
    app: &Arc<App>,
    fleet: Fleet,
    settings: &Settings,
    parts: &FleetParts,
) -> Result<Server, Failure> {
    let index = taken.index().await;
    let inner = taken.inner_sockets();
    start_fleet(fleet, settings, app, (index, inner), parts).await?;
    taken.add_workers(app);
    app.set_loading(false);
    taken.prepare(app).await?;
    let asked = asked_addresses(settings)?;
    let clients = wiring::listen_address(settings)?;
    let opened = taken.sockets(clients, asked.operators);
    let server = listen_at(app, settings, opened).await?;
    say_where(&server);
    taken.serving(app, &parts.handed).await?;
    Ok(server)
}

/// Serves until a signal, and lets the fleet begin when what it needs was read. What cannot be used ends the process.
async fn serve_while_loading(
    app: &App,
    fleet: &Fleet,
    server: Server,
    settings: &Settings,
    parts: &FleetParts,
    upgrades: Option<Upgrades>,
) -> Result<(), Failure> {
    let mut serving = pin!(until_signal(server, settings, &parts.snapshot, upgrades));
    let loading = async {
        let nothing = (None, InnerSockets::default());
        start_fleet(fleet.clone(), settings, app, nothing, parts).await?;
        first_workers(app, settings).await;
        app.set_loading(false);
        Ok(())
    };
    let loaded = tokio::select! {
        // In this order: a signal is heard from the first moment on.
        biased;
        ended = &mut serving => return ended,
        loaded = loading => loaded,
    };
    match loaded {
        Ok(()) => serving.await,
        Err(error) => Err(error),
    }
}

/// Waits until as many workers that are named serve as are to be there first (`--router-min-initial-workers`). Discovery holds back
/// models of its own accord.
async fn first_workers(app: &App, settings: &Settings) {
    let first = settings.get(keys::ROUTER_MIN_INITIAL_WORKERS) as usize;
    if settings.get(keys::DISCOVERY_BACKEND) != DiscoveryBackend::Static {
        return;
    }
    let serving = || {
        let members = app.members().list();
        let serving = members.iter();
        serving
            .filter(|(_, member)| member.state == MemberState::Serving)
            .count()
    };
    if serving() < first {
        tracing::info!(workers = first, "waiting for the first workers");
    }
    while serving() < first {
        tokio::time::sleep(WORKERS_POLL).await;
    }
}

/// Reads what the fleet needs, and lets it begin, with the index and the listeners of the process before it if there is one.
async fn start_fleet(
    mut fleet: Fleet,
    settings: &Settings,
    app: &App,
    (index, mut inner): (Option<LoadedSnapshot>, InnerSockets),
    parts: &FleetParts,
) -> Result<(), Failure> {
    fleet = planes::with_planes(fleet, settings, app.tasks(), &parts.handed, &mut inner).await?;
    if let Some(replica) = fleet.replica_id() {
        let _ = parts.handed.replica.set(replica);
    }
    fleet = fleet.with_model_folders(wiring::model_folders(settings, app.clock()).await?);
    let path = settings.get(keys::INDEX_SNAPSHOT);
    let by_events = settings.get(keys::ROUTER_KV_EVENTS);
    let fetched = match planes::peer_options(settings, app.tasks(), &mut inner)? {
        None => None,
        Some(options) => {
            let listen = options.listen;
            let bytes_max = settings.get(keys::INDEX_MAX_BYTES).0;
            let linked = fleet.link_peers(options, bytes_max).await;
            linked.map_err(|error| match listen {
                Some(address) => format!("--router-peer-listen {address}: {error}"),
                None => format!("--router-peers: {error}"),
            })?
        }
    };
    let kept = path.clone().filter(|_| by_events);
    let index = match (index.or(fetched.filter(|_| by_events)), kept) {
        (Some(index), _) => Some(index),
        (None, Some(path)) => {
            let loaded = tokio::task::spawn_blocking(move || load_snapshot(&path)).await;
            loaded.ok().flatten()
        }
        (None, None) => None,
    };
    if let Some(index) = index {
        fleet = fleet.with_snapshot(index);
    }
    fleet.start();
    fleet.serve_peers(kvasir_frontend::read_worker);
    if let Some(store) = planes::discover(&fleet, settings, app.tasks())? {
        planes::serve_index(&fleet, app, store, settings).await?;
    }
    cluster::follow_pods(&fleet, settings, app.tasks())?;
    let writer = fleet.snapshot_writer(path.clone().unwrap_or_default());
    if let Some(links) = fleet.peer_links() {
        let _ = parts.handed.peers.set(links.clone());
    }
    let _ = parts.handed.index.set(Arc::clone(&writer));
    if path.is_some() {
        writer.start(settings.get(keys::INDEX_SNAPSHOT_INTERVAL_SECS));
        let _ = parts.snapshot.set(writer);
    }
    Ok(())
}
