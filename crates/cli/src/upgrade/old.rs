//! The process that is there: it starts its successor, hands over, and ends what it has.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvasir_frontend::{App, Door, Server, UpgradeAsk};
use kvasir_host::{PeerLinks, Routers, SnapshotWriter};
use kvasir_router::{ReplicaId, Router, Thresholds};
use kvasir_transport::ResponseServer;
use kvasir_types::WorkerRecord;
use kvasir_upstream::worker_words;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::channel::{Channel, send_files};
use super::child::{exit_of, spawn};
use super::load::ToldLoad;
use super::message::{
    AddedWorker, ChangedThresholds, FileRole, Hello, LoadNews, Message, ServedBy,
};
use crate::sockets::{self, AskedAddresses};

/// A successor has so long to read its settings, its tokenizers and the index, and to reach the workers.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// And so long to open its doors then.
const SERVE_TIMEOUT: Duration = Duration::from_secs(30);
/// Between two looks at what has changed of our load.
const TELL_EVERY: Duration = Duration::from_millis(50);
/// Looks at which nothing runs and nobody is connected, until this process is done.
const QUIET_LOOKS: u32 = 2;

/// What it takes to be upgraded.
pub(crate) struct Upgrades {
    signal: Signal,
    asked: mpsc::Receiver<UpgradeAsk>,
    addresses: AskedAddresses,
    handed: Arc<Handed>,
}

/// What a process has, once it has it, that the one after it needs.
#[derive(Default)]
pub(crate) struct Handed {
    /// What copies the index.
    pub(crate) index: OnceLock<Arc<SnapshotWriter>>,
    /// Where workers bring their answers.
    pub(crate) home: OnceLock<ResponseServer>,
    /// The links to other replicas.
    pub(crate) peers: OnceLock<PeerLinks>,
    /// Its name among them.
    pub(crate) replica: OnceLock<ReplicaId>,
    /// The process before it is still there.
    has_predecessor: AtomicBool,
}

impl Handed {
    pub(super) fn set_predecessor(&self, is_there: bool) {
        self.has_predecessor.store(is_there, Ordering::Release);
    }

    /// Whether the process before this one gets answers of workers through it.
    fn passes_answers(&self) -> bool {
        let is_shared = self.home.get().is_some_and(ResponseServer::is_shareable);
        is_shared && self.has_predecessor.load(Ordering::Acquire)
    }

    /// Lets the next process alone accept at the ports that both have, or not any more.
    fn set_left(&self, has_left: bool) {
        if let Some(home) = self.home.get() {
            home.set_left(has_left);
        }
        if let Some(peers) = self.peers.get() {
            peers.set_left(has_left);
        }
    }
}

/// A process that has taken over.
struct Successor {
    child: Child,
    channel: Channel,
    told: ToldLoad,
}

/// Why there is no successor.
#[derive(Debug, thiserror::Error)]
enum UpgradeError {
    #[error("this process is still loading; ask again when /health says that it is ready")]
    Loading,
    #[error("`{program}` cannot be started: {cause}")]
    Spawn { program: String, cause: io::Error },
    #[error("the new process ended before it served ({0}); its log says why")]
    Ended(String),
    #[error("the new process was not ready within {} s and was ended", .0.as_secs())]
    Late(Duration),
    #[error("the hand-over failed: {0}")]
    Io(#[from] io::Error),
}

impl Upgrades {
    /// Listens for the signal and for operators from now on.
    pub(crate) fn new(
        app: &App,
        addresses: AskedAddresses,
        handed: Arc<Handed>,
    ) -> io::Result<Option<Self>> {
        let signal = signal(SignalKind::user_defined2())?;
        Ok(app.take_upgrades().map(|asked| Self {
            signal,
            asked,
            addresses,
            handed,
        }))
    }

    /// Upgrades whenever that is asked for. Returns when another process serves and nothing is left to do here, or when the
    /// time for that is over.
    pub(crate) async fn run(
        mut self,
        server: &Server,
        kept: &OnceLock<Arc<SnapshotWriter>>,
        drain: Duration,
    ) {
        loop {
            let ask = tokio::select! {
                _ = self.signal.recv() => None,
                Some(ask) = self.asked.recv() => Some(ask),
            };
            tracing::info!("upgrade: starting the new process");
            let outcome = self.attempt(server).await;
            let told = match &outcome {
                Ok(successor) => Ok(successor.child.id()),
                Err(error) => {
                    tracing::error!(%error, "upgrade failed: this process goes on as before");
                    Err(error.to_string())
                }
            };
            // Until now both accepted; from here on the new one alone does.
            let successor = outcome.ok().inspect(|_| {
                server.service().set_handed_over(true);
                self.handed.set_left(true);
                if let Some(kept) = kept.get() {
                    kept.pause();
                }
            });
            if let Some(ask) = ask {
                let _ = ask.send(told);
            }
            let Some(successor) = successor else {
                continue;
            };
            if end_here(server.service(), successor, &self.handed, drain).await {
                return;
            }
            server.service().set_handed_over(false);
            self.handed.set_left(false);
            sockets::notify(&format!("MAINPID={}", std::process::id()));
            if let Some(kept) = kept.get() {
                kept.resume();
            }
        }
    }

    /// Starts a process and lets it take over.
    async fn attempt(&self, server: &Server) -> Result<Successor, UpgradeError> {
        let app = server.service();
        let index = self.handed.index.get().ok_or(UpgradeError::Loading)?;
        let copy = anonymous_file()?;
        let saved = index.copy_to(copy.try_clone()?).await;
        let copy = match saved {
            Ok(saved) => {
                tracing::info!(
                    streams = saved.streams,
                    bytes = saved.bytes,
                    "upgrade: index copied"
                );
                Some(OwnedFd::from(copy))
            }
            Err(error) => {
                tracing::warn!(%error, "upgrade: the index is not handed over, the new process learns it from events");
                None
            }
        };
        let (ours, theirs) = UnixStream::pair()?;
        let started = spawn(theirs);
        let mut child =
            started.map_err(|(program, cause)| UpgradeError::Spawn { program, cause })?;
        let handed = async {
            let mut channel = self.introduce(server, ours, copy).await?;
            let mut told = ToldLoad::default();
            until(&mut channel, START_TIMEOUT, |m| matches!(m, Message::Ready)).await?;
            let news = told.news(&**app.models());
            channel.say(&Message::Load(news)).await?;
            until(&mut channel, SERVE_TIMEOUT, |m| {
                matches!(m, Message::Serving)
            })
            .await?;
            Ok((channel, told))
        };
        match handed.await {
            Ok((channel, told)) => Ok(Successor {
                child,
                channel,
                told,
            }),
            Err(Ended::Gone) => Err(UpgradeError::Ended(exit_of(&mut child).await.text())),
            Err(Ended::Late(limit)) => {
                let _ = child.kill();
                exit_of(&mut child).await;
                Err(UpgradeError::Late(limit))
            }
            Err(Ended::Io(error)) => {
                let _ = child.kill();
                exit_of(&mut child).await;
                Err(error.into())
            }
        }
    }

    /// Hands the sockets over, and says what they are.
    async fn introduce(
        &self,
        server: &Server,
        socket: UnixStream,
        index: Option<OwnedFd>,
    ) -> Result<Channel, Ended> {
        let app = server.service();
        let (mut files, mut roles) = (Vec::new(), Vec::new());
        for (door, socket) in server.sockets() {
            let role = match door {
                Door::Data => self
                    .addresses
                    .clients
                    .map(|asked| FileRole::Clients { asked }),
                Door::Admin => self
                    .addresses
                    .operators
                    .map(|asked| FileRole::Operators { asked }),
            };
            if let Some(role) = role {
                files.push(socket);
                roles.push(role);
            }
        }
        if let Some(index) = &index {
            files.push(index.as_fd());
            roles.push(FileRole::Index);
        }
        let inner = self.inner_sockets();
        for (role, socket) in &inner {
            files.push(socket.as_fd());
            roles.push(*role);
        }
        send_files(&socket, &files)?;
        let mut channel = Channel::new(socket)?;
        let hello = Hello {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            files: roles,
            workers: app.operators_workers().iter().filter_map(added).collect(),
            served: served(app),
            thresholds: changed_thresholds(app),
            replica: self.handed.replica.get().map(|replica| replica.0),
        };
        channel.say(&Message::Hello(Box::new(hello))).await?;
        Ok(channel)
    }
}

impl Upgrades {
    /// The listeners that are not for clients or operators. One that cannot be handed over is opened anew by the next process, if that can be.
    fn inner_sockets(&self) -> Vec<(FileRole, OwnedFd)> {
        let (mut sockets, mut failed) = (Vec::new(), None);
        if let (Some(home), Some(asked)) = (self.handed.home.get(), self.addresses.answers) {
            match home.share() {
                Ok(Some(shared)) => {
                    sockets.push((FileRole::Answers { asked }, shared.listener));
                    sockets.push((FileRole::AnswersLink, shared.link));
                }
                Ok(None) => {}
                Err(error) => failed = Some(error),
            }
        }
        if let (Some(peers), Some(asked)) = (self.handed.peers.get(), self.addresses.peers) {
            match peers.share() {
                Ok(Some(listener)) => sockets.push((FileRole::Peers { asked }, listener)),
                Ok(None) => {}
                Err(error) => failed = Some(error),
            }
        }
        if let Some(error) = failed {
            tracing::warn!(%error, "upgrade: a listener for workers or replicas cannot be handed over");
        }
        sockets
    }
}

/// Why a successor does not come as far as it should.
enum Ended {
    Gone,
    Late(Duration),
    Io(io::Error),
}

impl From<io::Error> for Ended {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::Gone,
            _ => Self::Io(error),
        }
    }
}

/// Waits for the message that is meant.
async fn until(
    channel: &mut Channel,
    limit: Duration,
    meant: impl Fn(&Message) -> bool,
) -> Result<(), Ended> {
    let heard = timeout(limit, async {
        loop {
            match channel.hear().await {
                Ok(Some(message)) if meant(&message) => return Ok(()),
                Ok(Some(_)) => {}
                Ok(None) => return Err(Ended::Gone),
                Err(error) => return Err(error.into()),
            }
        }
    });
    heard.await.unwrap_or(Err(Ended::Late(limit)))
}

/// A file without a name, for a copy of the index.
fn anonymous_file() -> io::Result<std::fs::File> {
    #[cfg(target_os = "linux")]
    {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        Ok(rustix::fs::memfd_create("kvasir-index", flags)?.into())
    }
    #[cfg(not(target_os = "linux"))]
    {
        let name = format!("kvasir-index.{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let mut options = std::fs::OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)?;
        std::fs::remove_file(&path)?;
        Ok(file)
    }
}

fn added(worker: &WorkerRecord) -> Option<AddedWorker> {
    let api_key = worker.transport.http()?.api_key.as_ref();
    Some(AddedWorker {
        address: worker_words(worker)?,
        api_key: api_key.map(|key| key.reveal().to_owned()),
    })
}

fn served(app: &App) -> Vec<ServedBy> {
    let models = app.models().all().into_iter();
    let served = models.map(|model| ServedBy {
        model: model.name.to_string(),
        workers: model.specs().iter().map(|spec| spec.id.0).collect(),
    });
    served.filter(|served| !served.workers.is_empty()).collect()
}

/// What operators changed since the start.
fn changed_thresholds(app: &App) -> Vec<ChangedThresholds> {
    let configured = |router: &Router| Thresholds {
        active_decode_blocks: router.config().active_decode_blocks_threshold,
        active_prefill_tokens: router.config().active_prefill_tokens_threshold,
        active_prefill_tokens_frac: router.config().active_prefill_tokens_threshold_frac,
    };
    let changed = app.models().all().into_iter().filter_map(|model| {
        let (now, first) = model
            .host
            .ask(|router| (router.thresholds(), configured(router)));
        (now != first).then(|| ChangedThresholds {
            model: model.name.to_string(),
            decode_blocks: now.active_decode_blocks,
            prefill_tokens: now.active_prefill_tokens,
            prefill_tokens_frac: now.active_prefill_tokens_frac,
        })
    });
    changed.collect()
}

/// Ends what runs here while the successor serves. Says whether that is done; if not, the successor is gone and this process
/// serves again.
async fn end_here(app: &App, successor: Successor, handed: &Handed, drain: Duration) -> bool {
    let pid = successor.child.id();
    sockets::notify(&format!("MAINPID={pid}"));
    let (running, connections) = (app.in_flight().count(), app.open_connections());
    tracing::info!(
        pid,
        running,
        connections,
        timeout_secs = drain.as_secs(),
        "upgrade: the new process serves; ending what runs here"
    );
    let deadline = Instant::now() + drain;
    let mut looks = interval(TELL_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut quiet, mut successor) = (0, Some(successor));
    while quiet < QUIET_LOOKS && Instant::now() < deadline {
        let is_gone = match &successor {
            Some(successor) => tokio::select! {
                () = successor.channel.gone() => true,
                _ = looks.tick() => false,
            },
            None => {
                looks.tick().await;
                false
            }
        };
        if let Some(mut told) = successor.take() {
            if !is_gone && tell(app, &mut told).await.is_ok() {
                successor = Some(told);
            } else if !has_ended(&mut told.child).await {
                return false;
            }
        }
        let is_quiet = app.in_flight().count() == 0 && app.open_connections() == 0;
        quiet = match is_quiet && !handed.passes_answers() {
            true => quiet + 1,
            false => 0,
        };
    }
    true
}

/// Whether a successor that is gone ended because it was told to; then nobody is to serve in its place.
async fn has_ended(child: &mut Child) -> bool {
    let pid = child.id();
    let exit = exit_of(child).await;
    let how = exit.text();
    match exit.is_orderly() {
        true => tracing::info!(
            pid,
            how,
            "upgrade: the new process has ended in its turn; what runs here goes on to its end"
        ),
        false => tracing::error!(
            pid,
            how,
            "upgrade: the new process is gone; this one serves again"
        ),
    }
    exit.is_orderly()
}

/// Tells the successor how our load has changed.
async fn tell(app: &App, successor: &mut Successor) -> io::Result<()> {
    let news: LoadNews = successor.told.news(&**app.models() as &dyn Routers);
    match news.routers.is_empty() {
        true => Ok(()),
        false => successor.channel.say(&Message::Load(news)).await,
    }
}
