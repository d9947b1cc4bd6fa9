//! The connection of a process to NATS.
//!
//! It is made when the first part of the process needs it, and made again for as long as the process runs. Whoever uses it
//! is told whether it stands ([`NatsLinkState`]): what is published while it does not waits or is lost, and who cannot have
//! that waits for it first.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_nats::{Client, ConnectOptions, Event, ServerAddr};
use kvasir_tasks::Tasks;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::SourceFault;
use crate::tcp::any_certificate;

/// Messages that wait in one subscription; the next one is lost.
pub(crate) const QUEUE_MESSAGES_MAX: usize = 4096;
/// Pause between attempts to connect again, at most.
const RECONNECT_MAX: Duration = Duration::from_secs(2);
/// Longest time for a connection and its handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// For so long a server that is away is waited for, unless told otherwise.
const OUTAGE_TIMEOUT: Duration = Duration::from_secs(60);

/// Where the server is, and how it is told who we are.
#[derive(Clone, Debug)]
pub struct NatsOptions {
    /// Addresses, such as `nats://localhost:4222`; a user and a password may stand before the host.
    pub servers: Vec<String>,
    /// The authority to believe instead of those of the system, in PEM.
    pub tls_ca: Option<PathBuf>,
    /// Believe any certificate.
    pub tls_insecure: bool,
    /// Requests wait for a server that has been away for less than this; then they fail at once. The time is held against
    /// no worker.
    pub outage_timeout: Duration,
}

impl Default for NatsOptions {
    fn default() -> Self {
        Self {
            servers: Vec::new(),
            tls_ca: None,
            tls_insecure: false,
            outage_timeout: OUTAGE_TIMEOUT,
        }
    }
}

/// Why no server can be looked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NatsOptionsError {
    /// A text is no address. It is not shown: it may hold a password.
    #[error("address number {0} is not of the form nats://host:port")]
    BadAddress(usize),
    /// There is no address.
    #[error("no address of a server is given")]
    NoAddress,
}

/// Whether the server is reached.
#[derive(Clone, Debug)]
pub struct NatsLinkState {
    /// Why not, if it is not.
    pub reached: Result<(), SourceFault>,
    /// How many connections there have been, this one included.
    pub connections: u64,
    /// When it became so.
    pub(crate) since: Instant,
}

/// The connection of a process to NATS. Clones are one.
#[derive(Clone, Debug)]
pub struct NatsLink {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// The hosts, for people: without users and passwords.
    servers: String,
    outage_timeout: Duration,
    /// Somebody needs the connection.
    wanted: CancellationToken,
    /// Since when.
    wanted_since: OnceLock<Instant>,
    client: watch::Receiver<Option<Client>>,
    state: watch::Receiver<NatsLinkState>,
}

impl NatsLink {
    /// A connection that is made when it is needed, by a task of `tasks` on the runtime of the caller.
    pub fn new(options: &NatsOptions, tasks: &Tasks) -> Result<Self, NatsOptionsError> {
        let mut servers = Vec::new();
        for (at, server) in options.servers.iter().enumerate() {
            let server: Result<ServerAddr, _> = server.parse();
            servers.push(server.map_err(|_| NatsOptionsError::BadAddress(at + 1))?);
        }
        if servers.is_empty() {
            return Err(NatsOptionsError::NoAddress);
        }
        let shown = servers
            .iter()
            .map(|server| format!("{}:{}", server.host(), server.port()))
            .collect::<Vec<_>>()
            .join(", ");
        let unreached = SourceFault::Unreachable("not yet".to_owned());
        let (told, state) = watch::channel(NatsLinkState {
            reached: Err(unreached),
            connections: 0,
            since: Instant::now(),
        });
        let (connected, client) = watch::channel(None);
        let wanted = CancellationToken::new();
        let (needed, connect) = (wanted.clone(), connect_options(options, told));
        tasks.background().spawn(async move {
            needed.cancelled().await;
            // It retries for ever: only addresses that are none could make it fail, and those were read already.
            if let Ok(client) = connect.connect(servers).await {
                connected.send_replace(Some(client));
                connected.closed().await;
            }
        });
        Ok(Self {
            shared: Arc::new(Shared {
                servers: shown,
                outage_timeout: options.outage_timeout,
                wanted,
                wanted_since: OnceLock::new(),
                client,
                state,
            }),
        })
    }

    /// Connects now, not only when somebody needs it.
    pub fn connect(&self) {
        self.shared.wanted_since.get_or_init(Instant::now);
        self.shared.wanted.cancel();
    }

    /// Whether anybody has needed the connection yet.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.shared.wanted.is_cancelled()
    }

    /// Waits until somebody needs the connection.
    pub async fn wanted(&self) {
        self.shared.wanted.cancelled().await;
    }

    /// Where the servers are, for people.
    #[must_use]
    pub fn servers(&self) -> &str {
        &self.shared.servers
    }

    /// For so long a server that is away is waited for.
    pub(crate) fn outage_timeout(&self) -> Duration {
        self.shared.outage_timeout
    }

    /// When nobody waits for the server any longer; some time from now while it is reached.
    pub(crate) fn outage_end(&self) -> Instant {
        let state = self.shared.state.borrow();
        let began = match (&state.reached, state.connections) {
            (Ok(()), _) => Instant::now(),
            (Err(_), 0) => *self.shared.wanted_since.get_or_init(Instant::now),
            (Err(_), _) => state.since,
        };
        began + self.shared.outage_timeout
    }

    /// Whether the server is reached, from now on.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<NatsLinkState> {
        self.shared.state.clone()
    }

    /// The client, whether or not the server is reached; none if the process ends.
    pub(crate) async fn client(&self) -> Option<Client> {
        self.connect();
        self.wanted_client().await
    }

    /// The client as soon as somebody needs one.
    pub(crate) async fn wanted_client(&self) -> Option<Client> {
        let mut client = self.shared.client.clone();
        let made = client.wait_for(Option::is_some).await.ok()?;
        made.clone()
    }

    /// Waits until the server is reached; none if the process ends.
    pub(crate) async fn reached(&self) -> Option<NatsLinkState> {
        let mut state = self.watch();
        let reached = state.wait_for(|state| state.reached.is_ok()).await.ok()?;
        Some(reached.clone())
    }

    /// Connects, and waits at most so long for the server; whether it was reached.
    pub async fn reach_within(&self, time: Duration) -> bool {
        self.connect();
        let reached = tokio::time::timeout(time, self.reached()).await;
        matches!(reached, Ok(Some(_)))
    }

    /// Waits until connection number `connections` is lost.
    pub(crate) async fn lost(&self, connections: u64) {
        let mut state = self.watch();
        let other =
            |state: &NatsLinkState| state.reached.is_err() || state.connections != connections;
        let _ = state.wait_for(other).await;
    }
}

fn connect_options(options: &NatsOptions, told: watch::Sender<NatsLinkState>) -> ConnectOptions {
    let connect = ConnectOptions::new()
        .name("kvasir")
        .retry_on_initial_connect()
        .connection_timeout(CONNECT_TIMEOUT)
        .subscription_capacity(QUEUE_MESSAGES_MAX)
        .reconnect_delay_callback(|attempts| {
            let doubled = Duration::from_millis(50 << attempts.min(6));
            doubled.min(RECONNECT_MAX)
        })
        .event_callback(move |event| {
            match event {
                Event::Connected => told.send_modify(|state| {
                    state.reached = Ok(());
                    state.connections += 1;
                    state.since = Instant::now();
                }),
                Event::Disconnected => told.send_modify(|state| {
                    state.reached = Err(SourceFault::Closed("the NATS server is gone".to_owned()));
                    state.since = Instant::now();
                }),
                _ => {}
            }
            std::future::ready(())
        });
    match (&options.tls_ca, options.tls_insecure) {
        (_, true) => connect.tls_client_config(any_certificate()),
        (Some(ca), false) => connect.add_root_certificates(ca.clone()),
        (None, false) => connect,
    }
}
