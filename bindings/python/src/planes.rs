//! A process's store, planes and lease, for Python: what `DistributedRuntime` is made from.
//!
//! Answers one question: how does this program find workers, call them, and take calls? The options are those of `kvasir`, read from
//! the environment (`DYN_*`, `ETCD_ENDPOINTS`, `NATS_SERVER`, ...), and mean the same.
//!
//! What always holds: nothing is connected, bound or announced before something needs it; all of it ends with the runtime.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvasir_config::{Environment, Invocation, Settings, keys};
use kvasir_discovery::{EndpointName, Lease, MemStore, Store};
use kvasir_host::HostContext;
use kvasir_planes::Clients;
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, MetricOptions, Metrics, log};
use kvasir_transport::local_address;
use kvasir_transport::nats::NatsLink;
use kvasir_types::Codec;
use kvasir_worker::{EndpointMember, RequestServer};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::sync::OnceCell;

use crate::errors::Failure;
use crate::process;

/// Longest time that the end of a process waits for its store.
const END: Duration = Duration::from_secs(2);

/// What several runtimes of one process find each other in, if they have no store outside.
static MEMORY: OnceLock<Arc<MemStore>> = OnceLock::new();

/// Store, planes and lease of one runtime.
pub(crate) struct Planes {
    settings: Settings,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) context: HostContext,
    clients: OnceCell<(Clients, NatsLink)>,
    server: OnceCell<RequestServer>,
    lease: OnceCell<Arc<dyn Lease>>,
}

impl Planes {
    /// Who calls endpoints, by the name of their request plane.
    pub(crate) async fn clients(&self) -> Result<&(Clients, NatsLink), Failure> {
        let made = kvasir_planes::clients(&self.settings, &self.context.tasks);
        let found = self.clients.get_or_try_init(|| made).await;
        Ok(found?)
    }

    /// Under which this process announces itself.
    pub(crate) async fn lease(&self) -> Result<&Arc<dyn Lease>, Failure> {
        let lease = self.lease.get_or_try_init(|| self.store.lease()).await;
        lease.map_err(|error| {
            let backend = self.store.backend();
            let text = format!(
                "{error}: no place to announce this process; is {backend} up, or is another one meant (DYN_DISCOVERY_BACKEND)?"
            );
            Failure::Named("CannotConnect", text)
        })
    }

    /// An endpoint of this process.
    pub(crate) async fn member(&self, endpoint: &EndpointName) -> Result<EndpointMember, Failure> {
        let (_, link) = self.clients().await?;
        let tasks = &self.context.tasks;
        let host = self.settings.get(keys::TCP_RPC_HOST);
        let host = host.unwrap_or_else(|| local_address().to_string());
        let listen = kvasir_planes::listen(&self.settings, &host, link, tasks);
        let server = self.server.get_or_try_init(|| listen).await?;
        Ok(EndpointMember {
            lease: Arc::clone(self.lease().await?),
            endpoint: endpoint.clone(),
            server: server.clone(),
            carrier: kvasir_planes::event_carrier(&self.settings, endpoint, &host, link, tasks),
            device: Some("cuda".into()),
            codec: Codec::MessagePack,
            clock: self.context.clock,
            tasks: tasks.clone(),
        })
    }

    /// Calls that this process answers now.
    pub(crate) fn answering(&self) -> usize {
        self.server.get().map_or(0, RequestServer::active)
    }

    /// Takes back all that was announced, and stops.
    pub(crate) async fn end(&self) {
        if let Some(lease) = self.lease.get() {
            // A store that is away forgets the lease by itself.
            let _ = lease.revoke().await;
        }
        self.context.tasks.stop();
    }
}

/// Reads the options of a worker: those of `kvasir mocker`, which takes calls and publishes as a worker does.
fn settings(words: &[(&str, Option<&str>)]) -> Result<Settings, String> {
    let mut line = vec!["mocker".to_owned()];
    for (option, value) in words {
        if let Some(value) = value {
            line.push(format!("--{option}={value}"));
        }
    }
    let line = line.into_iter().map(Into::into);
    let none = |_: &std::path::Path| Err(std::io::ErrorKind::NotFound.into());
    match kvasir_config::parse(line, &Environment::from_process(), none) {
        Ok(Invocation::Run(run)) => Ok(run.settings),
        Ok(Invocation::Print(_)) => Err("no options".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// A process among others: what `kvasir.runtime.DistributedRuntime` is made from.
#[pyclass(frozen, module = "kvasir._core")]
pub(crate) struct Runtime {
    pub(crate) planes: Arc<Planes>,
}

#[pymethods]
impl Runtime {
    #[new]
    #[pyo3(signature = (discovery_backend=None, request_plane=None, event_plane=None))]
    fn new(
        discovery_backend: Option<&str>,
        request_plane: Option<&str>,
        event_plane: Option<&str>,
    ) -> PyResult<Self> {
        let (handle, _) = process::runtime()?;
        let given = [
            ("discovery-backend", discovery_backend),
            ("request-plane", request_plane),
            ("event-plane", event_plane),
        ];
        let settings = settings(&given).map_err(PyValueError::new_err)?;
        say_log_lines(&settings);
        let _entered = handle.enter();
        let tasks = Tasks::new();
        let bad = |error: kvasir_planes::SetupError| PyValueError::new_err(error.to_string());
        let found = kvasir_planes::store(&settings, &tasks).map_err(bad)?;
        let store = match found {
            Some((store, _)) if store.backend() == "mem" => {
                let shared = MEMORY.get_or_init(|| Arc::new(MemStore::new()));
                Arc::clone(shared) as Arc<dyn Store>
            }
            Some((store, _)) => store,
            None => {
                let text = "discovery_backend cannot be static: nobody finds anybody there; etcd, file, kubernetes or mem";
                return Err(PyValueError::new_err(text));
            }
        };
        let metrics = Metrics::new(&MetricOptions::default())
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let context = HostContext {
            clock: Clock::new(),
            metrics,
            tasks,
        };
        let planes = Planes {
            settings,
            store,
            context,
            clients: OnceCell::new(),
            server: OnceCell::new(),
            lease: OnceCell::new(),
        };
        Ok(Self {
            planes: Arc::new(planes),
        })
    }

    /// The id that this process announces itself under.
    fn connection_id(&self, py: Python<'_>) -> PyResult<u64> {
        process::wait(py, async { Ok(self.planes.lease().await?.id()) })
    }

    /// Which store this is.
    #[getter]
    fn discovery_backend(&self) -> &'static str {
        self.planes.store.backend()
    }

    /// Calls that this process answers now.
    #[getter]
    fn answering(&self) -> usize {
        self.planes.answering()
    }

    /// Takes back all that was announced, and stops; for the end of the process. Waits for a store no longer than [`END`].
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        process::wait(py, async {
            let _ = tokio::time::timeout(END, self.planes.end()).await;
            Ok(())
        })
    }
}

/// Endpoints and routers may use the planes longer than their runtime; whoever is last ends them.
impl Drop for Planes {
    fn drop(&mut self) {
        self.context.tasks.stop();
    }
}

/// Log lines go to standard error, from warnings on unless `DYN_LOG` or `KVASIR_LOG` says otherwise.
fn say_log_lines(settings: &Settings) {
    let level = match settings.is_set(keys::LOG_LEVEL) {
        true => settings.get(keys::LOG_LEVEL),
        false => "warn".to_owned(),
    };
    // A program that has set up its own keeps it.
    let _ = log::init(&level, log::Format::Text);
}
