//! A process's store, planes and lease, for a program that is not the server.
//!
//! Answers one question: how does this program find workers, call them, and take calls? The options are those of `kvasir`, read from
//! the environment (`DYN_*`, `ETCD_ENDPOINTS`, `NATS_SERVER`, ...), and mean the same.
//!
//! What always holds: nothing is connected, bound or announced before something needs it; all of it ends with the planes.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use kvasir_config::{Environment, Invocation, RequestPlane, Settings, keys};
use kvasir_discovery::{EndpointName, Lease, MemStore, Store};
use kvasir_host::HostContext;
use kvasir_planes::{Clients, SetupError};
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, MetricOptions, Metrics, log};
use kvasir_transport::local_address;
use kvasir_transport::nats::NatsLink;
use kvasir_types::Codec;
use kvasir_worker::{EndpointMember, RequestServer};
use tokio::sync::OnceCell;

use crate::EmbedError;

/// Longest time that the end of a process waits for its store.
const END: Duration = Duration::from_secs(2);

/// Longest wait for the NATS server that requests are to come from: a program is told, and may try again.
const NATS_TIMEOUT: Duration = Duration::from_secs(10);

/// What several programs' parts in one process find each other in, if they have no store outside.
static MEMORY: OnceLock<Arc<MemStore>> = OnceLock::new();

/// Store, planes and lease of one part of a process.
pub struct ProcessPlanes {
    settings: Settings,
    /// Where records are kept.
    pub store: Arc<dyn Store>,
    /// The time, the metrics, and where tasks run.
    pub context: HostContext,
    clients: OnceCell<(Clients, NatsLink)>,
    server: OnceCell<RequestServer>,
    lease: OnceCell<Arc<dyn Lease>>,
    /// Tasks of routers that have announced something of their own.
    announcing: Mutex<Vec<Tasks>>,
}

/// The options of a subcommand as the environment has them, with some said by hand.
pub fn settings_of(command: &str, words: &[(&str, Option<&str>)]) -> Result<Settings, SetupError> {
    let mut line = vec![command.to_owned()];
    for (option, value) in words {
        if let Some(value) = value {
            line.push(format!("--{option}={value}"));
        }
    }
    let line = line.into_iter().map(Into::into);
    let none = |_: &std::path::Path| Err(std::io::ErrorKind::NotFound.into());
    match kvasir_config::parse(line, &Environment::from_process(), none) {
        Ok(Invocation::Run(run)) => Ok(run.settings),
        Ok(Invocation::Print(_)) => Err(SetupError::Option("no options".into())),
        Err(error) => Err(SetupError::Option(error.to_string())),
    }
}

/// Log lines go to standard error, from warnings on unless `DYN_LOG` or `KVASIR_LOG` says otherwise.
pub fn say_log_lines(settings: &Settings) {
    let level = match settings.is_set(keys::LOG_LEVEL) {
        true => settings.get(keys::LOG_LEVEL),
        false => "warn".to_owned(),
    };
    // A program that has set up its own keeps it.
    let _ = log::init(&level, log::Format::Text);
}

impl ProcessPlanes {
    /// What `settings` name. Called where a runtime is entered.
    pub fn open(settings: Settings) -> Result<Self, EmbedError> {
        let tasks = Tasks::new();
        let store = match kvasir_planes::store(&settings, &tasks)? {
            Some((store, _)) if store.backend() == "mem" => {
                let shared = MEMORY.get_or_init(|| Arc::new(MemStore::new()));
                Arc::clone(shared) as Arc<dyn Store>
            }
            Some((store, _)) => store,
            None => {
                let text = "discovery_backend cannot be static: nobody finds anybody there; etcd, file, kubernetes or mem";
                return Err(SetupError::Option(text.into()).into());
            }
        };
        let metrics = Metrics::new(&MetricOptions::default())
            .map_err(|error| SetupError::System(error.to_string()))?;
        let context = HostContext {
            clock: Clock::new(),
            metrics,
            tasks,
        };
        Ok(Self {
            settings,
            store,
            context,
            clients: OnceCell::new(),
            server: OnceCell::new(),
            lease: OnceCell::new(),
            announcing: Mutex::default(),
        })
    }

    /// The options that they were opened by.
    #[must_use]
    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Who calls endpoints, by the name of their request plane.
    pub async fn clients(&self) -> Result<&(Clients, NatsLink), EmbedError> {
        let made = kvasir_planes::clients(&self.settings, &self.context.tasks);
        let found = self.clients.get_or_try_init(|| made).await;
        Ok(found?)
    }

    /// Under which this process announces itself.
    pub async fn lease(&self) -> Result<&Arc<dyn Lease>, EmbedError> {
        let lease = self.lease.get_or_try_init(|| self.store.lease()).await;
        lease.map_err(|cause| EmbedError::Announce {
            backend: self.store.backend(),
            cause,
        })
    }

    /// Where calls come in, and the host at which others reach it.
    pub(crate) async fn server(&self) -> Result<(RequestServer, String), EmbedError> {
        let (_, link) = self.clients().await?;
        if self.settings.get(keys::REQUEST_PLANE) == RequestPlane::Nats
            && !link.reach_within(NATS_TIMEOUT).await
        {
            return Err(EmbedError::Nats(link.servers().to_owned()));
        }
        let host = self.settings.get(keys::TCP_RPC_HOST);
        let host = host.unwrap_or_else(|| local_address().to_string());
        let listen = kvasir_planes::listen(&self.settings, &host, link, &self.context.tasks);
        let server = self.server.get_or_try_init(|| listen).await?;
        Ok((server.clone(), host))
    }

    /// The end of these planes waits for what tasks have announced.
    pub(crate) fn ends_with(&self, tasks: &Tasks) {
        let mut known = self
            .announcing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        known.retain(|tasks| !tasks.is_draining());
        known.push(tasks.clone());
    }

    /// Lets tasks take back what they announced, then stops them. Waits for a store no longer than two seconds.
    pub(crate) async fn end_of(tasks: &Tasks) {
        tasks.shut_down(END).await;
    }

    /// An endpoint of this process.
    pub async fn member(&self, endpoint: &EndpointName) -> Result<EndpointMember, EmbedError> {
        let (_, link) = self.clients().await?;
        let tasks = &self.context.tasks;
        let (server, host) = self.server().await?;
        Ok(EndpointMember {
            lease: Arc::clone(self.lease().await?),
            endpoint: endpoint.clone(),
            server,
            carrier: kvasir_planes::event_carrier(&self.settings, endpoint, &host, link, tasks),
            device: Some("cuda".into()),
            codec: Codec::MessagePack,
            clock: self.context.clock,
            tasks: tasks.clone(),
        })
    }

    /// Calls that this process answers now.
    #[must_use]
    pub fn answering(&self) -> usize {
        self.server.get().map_or(0, RequestServer::active)
    }

    /// Takes back all that was announced, and stops. Waits for a store no longer than two seconds.
    pub async fn end(&self) {
        let announcing = std::mem::take(
            &mut *self
                .announcing
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        for tasks in &announcing {
            Self::end_of(tasks).await;
        }
        if let Some(lease) = self.lease.get() {
            // A store that is away forgets the lease by itself.
            let _ = tokio::time::timeout(END, lease.revoke()).await;
        }
        self.context.tasks.stop();
    }
}

/// Endpoints and routers may use the planes longer than whoever opened them; the last one ends them.
impl Drop for ProcessPlanes {
    fn drop(&mut self) {
        self.context.tasks.stop();
    }
}
