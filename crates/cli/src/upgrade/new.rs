//! The process that takes over: what it is handed, and when it may open its doors.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, IsTerminal};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use kvasir_frontend::{App, SourceState};
use kvasir_host::LoadedSnapshot;
use kvasir_router::{Input, ThresholdUpdate};
use kvasir_transport::SharedHome;
use kvasir_types::WorkerId;
use kvasir_upstream::{parse_api_key, parse_remote_worker, set_api_key};
use tokio::time::{Instant, timeout};

use super::TAKE_OVER;
use super::channel::{Channel, take_files};
use super::load::OthersLoad;
use super::message::{AddedWorker, FileRole, Hello, Message};
use super::old::Handed;
use crate::sockets::{self, InnerSockets};
use crate::wiring::Failure;

/// The old process has so long to say anything.
const HEAR_TIMEOUT: Duration = Duration::from_secs(30);
/// The workers that the old process has are waited for so long.
const WORKERS_TIMEOUT: Duration = Duration::from_secs(60);
/// A worker that nobody has named here for so long, and no source may still name, is none of ours.
const UNNAMED_TIMEOUT: Duration = Duration::from_secs(2);
/// Between two looks at who serves.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A process that takes over from another.
pub(crate) struct TakeOver {
    channel: Channel,
    hello: Box<Hello>,
    clients: Option<(SocketAddr, TcpListener)>,
    operators: Option<(SocketAddr, TcpListener)>,
    inner: InnerSockets,
    index: Option<File>,
    load: OthersLoad,
}

impl TakeOver {
    /// What the process that started this one hands over; `None` if this one is not to take over.
    pub(crate) async fn begin() -> Result<Option<Self>, Failure> {
        if !sockets::is_told(TAKE_OVER) {
            return Ok(None);
        }
        let begun = Self::hear_first().await;
        let begun = begun.map_err(|error| {
            format!("{TAKE_OVER} is set, but standard input hands nothing over ({error}); unset it to start alone")
        })?;
        let (pid, version) = (begun.hello.pid, &begun.hello.version);
        tracing::info!(pid, version, "taking over from the running process");
        Ok(Some(begun))
    }

    async fn hear_first() -> io::Result<Self> {
        let stdin = io::stdin();
        if stdin.is_terminal() {
            return Err(io::Error::other("it is a terminal"));
        }
        let socket = UnixStream::from(stdin.as_fd().try_clone_to_owned()?);
        socket.set_read_timeout(Some(HEAR_TIMEOUT))?;
        let files = take_files(&socket)?;
        let mut channel = Channel::new(socket)?;
        let Some(Message::Hello(hello)) = hear(&mut channel).await? else {
            return Err(io::Error::other("the other end says no hello"));
        };
        let load = OthersLoad::new(hello.replica);
        let mut begun = Self {
            channel,
            hello,
            clients: None,
            operators: None,
            inner: InnerSockets::default(),
            index: None,
            load,
        };
        begun.take(files);
        Ok(begun)
    }

    fn take(&mut self, files: Vec<OwnedFd>) {
        let (mut answers, mut answers_link) = (None, None);
        for (role, file) in self.hello.files.iter().zip(files) {
            match role {
                FileRole::Clients { asked } => self.clients = Some((*asked, file.into())),
                FileRole::Operators { asked } => self.operators = Some((*asked, file.into())),
                FileRole::Index => self.index = Some(file.into()),
                FileRole::Answers { asked } => answers = Some((*asked, file)),
                FileRole::AnswersLink => answers_link = Some(file),
                FileRole::Peers { asked } => self.inner.peers = Some((*asked, file.into())),
                FileRole::Unknown => {}
            }
        }
        let answers = answers.zip(answers_link);
        self.inner.answers =
            answers.map(|((asked, listener), link)| (asked, SharedHome { listener, link }));
    }

    /// The listeners that are not for clients or operators.
    pub(crate) fn inner_sockets(&mut self) -> InnerSockets {
        std::mem::take(&mut self.inner)
    }

    /// The listeners, as far as our options ask for the same addresses.
    pub(crate) fn sockets(
        &mut self,
        clients: SocketAddr,
        operators: Option<SocketAddr>,
    ) -> sockets::OpenSockets {
        let same = |taken: Option<(SocketAddr, TcpListener)>, asked: Option<SocketAddr>| {
            taken
                .filter(|(was, _)| Some(*was) == asked)
                .map(|(_, listener)| listener)
        };
        sockets::OpenSockets {
            clients: same(self.clients.take(), Some(clients)),
            operators: same(self.operators.take(), operators),
        }
    }

    /// The old process's index. One that cannot be used is learned anew.
    pub(crate) async fn index(&mut self) -> Option<LoadedSnapshot> {
        let file = self.index.take()?;
        let read = tokio::task::spawn_blocking(move || {
            let mut file = file;
            io::Seek::rewind(&mut file)?;
            LoadedSnapshot::read(file)
        });
        match read.await {
            Ok(Ok(index)) => Some(index),
            Ok(Err(error)) => {
                tracing::warn!(%error, "the old process's index is not taken over: it is learned from events");
                None
            }
            Err(_) => None,
        }
    }

    /// Adds the workers that operators added there.
    pub(crate) fn add_workers(&mut self, app: &App) {
        let added = std::mem::take(&mut self.hello.workers);
        let parse = |worker: AddedWorker| {
            let mut record = parse_remote_worker(&worker.address).ok()?;
            if let Some(key) = worker.api_key {
                set_api_key(&mut record, parse_api_key(&key).ok()?).ok()?;
            }
            Some(record)
        };
        app.add_operators_workers(added.into_iter().filter_map(parse).collect());
    }

    /// Waits until the workers that serve there serve here, says so, and counts what runs there.
    pub(crate) async fn prepare(&mut self, app: &App) -> Result<(), Failure> {
        let missing = self.wait_for_workers(app).await;
        if !missing.is_empty() {
            let serves = app.models().all().iter().any(|model| model.is_ready());
            let text = format!(
                "{} workers of the running process are not reached: {missing:?}",
                missing.len()
            );
            match serves {
                true => tracing::warn!("{text}; taking over without them"),
                false => return Err(text.into()),
            }
        }
        self.set_thresholds(app);
        self.channel.say(&Message::Ready).await?;
        loop {
            match hear(&mut self.channel).await? {
                Some(Message::Load(news)) => {
                    self.load.apply(&**app.models(), news);
                    tracing::info!(
                        running = self.load.len(),
                        "requests of the old process are counted"
                    );
                    return Ok(());
                }
                Some(_) => {}
                None => return Err("the old process is gone".into()),
            }
        }
    }

    /// Those that are not here in time.
    async fn wait_for_workers(&self, app: &App) -> BTreeSet<u64> {
        let start = Instant::now();
        loop {
            let missing = self.missing(app, start.elapsed());
            if missing.is_empty() || start.elapsed() > WORKERS_TIMEOUT {
                return missing;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Workers of the old process that do not serve here, though they may.
    fn missing(&self, app: &App, waited: Duration) -> BTreeSet<u64> {
        let mut missing = BTreeSet::new();
        for served in &self.hello.served {
            let here: BTreeSet<u64> = match app.models().get(&served.model) {
                Some(model) => model.specs().iter().map(|spec| spec.id.0).collect(),
                None => BTreeSet::new(),
            };
            missing.extend(served.workers.iter().filter(|id| !here.contains(id)));
        }
        let sources = app.members().sources();
        let all_said = !sources
            .iter()
            .any(|(_, state)| *state == SourceState::Starting);
        if all_said && waited > UNNAMED_TIMEOUT {
            missing.retain(|id| app.members().get(WorkerId(*id)).is_some());
        }
        missing
    }

    fn set_thresholds(&self, app: &App) {
        for changed in &self.hello.thresholds {
            if let Some(model) = app.models().get(&changed.model) {
                model.host.tell(Input::Thresholds(ThresholdUpdate {
                    active_decode_blocks: Some(changed.decode_blocks),
                    active_prefill_tokens: Some(changed.prefill_tokens),
                    active_prefill_tokens_frac: Some(changed.prefill_tokens_frac),
                }));
            }
        }
    }

    /// The doors are open: says so, and follows the old process's load until that is gone.
    pub(crate) async fn serving(
        mut self,
        app: &Arc<App>,
        handed: &Arc<Handed>,
    ) -> Result<(), Failure> {
        self.channel.say(&Message::Serving).await?;
        let (models, handed) = (Arc::clone(app.models()), Arc::clone(handed));
        handed.set_predecessor(true);
        app.tasks().background().spawn(async move {
            let (mut channel, mut load) = (self.channel, self.load);
            loop {
                match channel.hear().await {
                    Ok(Some(Message::Load(news))) => load.apply(&*models, news),
                    Ok(Some(_)) => {}
                    Ok(None) | Err(_) => break,
                }
            }
            tracing::info!(
                pid = self.hello.pid,
                running = load.len(),
                "the old process is gone"
            );
            load.end();
            handed.set_predecessor(false);
        });
        Ok(())
    }
}

async fn hear(channel: &mut Channel) -> io::Result<Option<Message>> {
    match timeout(HEAR_TIMEOUT, channel.hear()).await {
        Ok(heard) => heard,
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}
