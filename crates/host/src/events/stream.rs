//! A stream of KV events, running.
//!
//! Answers one question: who hands what a source says to the sequencer, wakes it when a deadline is due, and
//! does what it asks? One task per stream.
//!
//! Invariants: the sequencer is stepped by its own task alone; when an [`EventStream`] is dropped, its ranks are
//! forgotten after its last event was applied, never before, unless it was frozen; reading the status waits
//! for nobody.
//!
//! Elsewhere: what an event means (`kvasir-kv-events`), where it comes from (`kvasir-transport`).

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use kvasir_kv_events::{Cache, Notice, Output, Resync, Sequencer, StreamCheckpoint, StreamStatus};
use kvasir_tasks::Tasks;
use kvasir_transport::{EventSource, SourceEvent, SourceFault, next_event};
use kvasir_types::Time;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::handle::{Command, EventStreamHandle, PauseGuard};

/// Commands that wait for the stream. One is enough; more say the same.
const COMMANDS_MAX: usize = 4;
/// Events taken in one go, before commands and other streams of the thread get their turn.
const EVENTS_PER_TURN: usize = 64;

/// Reads the host's clock.
pub type Now = dyn Fn() -> Time + Send + Sync;

/// Who wants to know what a stream reports. Called from the stream's task: must not wait.
pub trait StreamObserver: Send + Sync + 'static {
    /// Something an operator may want to read once.
    fn notice(&self, notice: &Notice);
    /// The source was reached, or was lost.
    fn link(&self, fault: Option<&SourceFault>);
}

/// Nobody does.
impl StreamObserver for () {
    fn notice(&self, _: &Notice) {}
    fn link(&self, _: Option<&SourceFault>) {}
}

/// How a stream stands.
#[derive(Clone, Debug)]
pub struct StreamState {
    /// The sequencer's own view.
    pub status: StreamStatus,
    /// Why the source is not connected.
    pub fault: Option<SourceFault>,
}

/// One running stream. Dropping it ends the stream and forgets its ranks.
#[derive(Debug)]
pub struct EventStream {
    handle: EventStreamHandle,
    stop: DropGuard,
    task: JoinHandle<Option<()>>,
}

impl EventStream {
    /// Runs `sequencer` on what `source` says, writing to `cache`.
    pub fn spawn<S, C>(
        tasks: &Tasks,
        source: S,
        sequencer: Sequencer,
        cache: Arc<C>,
        now: Arc<Now>,
        observer: Arc<dyn StreamObserver>,
    ) -> Self
    where
        S: EventSource + 'static,
        C: Cache + Send + Sync + 'static,
    {
        let (commands, received) = mpsc::channel(COMMANDS_MAX);
        let first = StreamState {
            status: sequencer.status(),
            fault: None,
        };
        let (publish, snapshot) = watch::channel(first);
        let stop = CancellationToken::new();
        let runner = Runner {
            source,
            sequencer,
            cache,
            now,
            observer,
            publish,
            fault: None,
            out: Vec::new(),
        };
        let task = tasks.spawn(runner.run(received, stop.clone()));
        Self {
            handle: EventStreamHandle { commands, snapshot },
            stop: stop.drop_guard(),
            task,
        }
    }

    /// Has a wrong cache view repaired.
    pub fn resync(&self, how: Resync) {
        self.handle.resync(how);
    }

    /// Who else may command the stream.
    #[must_use]
    pub fn handle(&self) -> EventStreamHandle {
        self.handle.clone()
    }

    /// Ends the stream. When the handle is done, its ranks are forgotten and another stream of the same
    /// ranks may begin.
    #[must_use]
    pub fn stop(self) -> JoinHandle<Option<()>> {
        drop(self.stop);
        self.task
    }

    /// How the stream stands.
    #[must_use]
    pub fn snapshot(&self) -> StreamState {
        self.handle.snapshot()
    }

    /// Waits until `done` holds; for tests and for start-up.
    pub async fn until(&mut self, done: impl FnMut(&StreamState) -> bool) {
        let _ = self.handle.snapshot.wait_for(done).await;
    }
}

/// What woke the stream.
enum Wake {
    Command(Command),
    Event(SourceEvent),
    Deadline,
    Stop,
}

struct Runner<S, C> {
    source: S,
    sequencer: Sequencer,
    cache: Arc<C>,
    now: Arc<Now>,
    observer: Arc<dyn StreamObserver>,
    publish: watch::Sender<StreamState>,
    fault: Option<SourceFault>,
    out: Vec<Output>,
}

impl<S: EventSource, C: Cache> Runner<S, C> {
    async fn run(mut self, mut commands: mpsc::Receiver<Command>, stop: CancellationToken) {
        loop {
            let wake = tokio::select! {
                biased;
                () = stop.cancelled() => Wake::Stop,
                Some(command) = commands.recv() => Wake::Command(command),
                event = next_event(&mut self.source) => Wake::Event(event),
                () = until((self.now)(), self.sequencer.next_deadline()) => Wake::Deadline,
            };
            match wake {
                Wake::Stop => break,
                Wake::Command(Command::Freeze(done)) => {
                    let _ = done.send(self.sequencer.checkpoint());
                    return;
                }
                Wake::Command(Command::Pause(done)) => {
                    let paused = pause(self.sequencer.checkpoint(), done);
                    if stop.run_until_cancelled(paused).await.is_none() {
                        break;
                    }
                    continue;
                }
                Wake::Command(command) => self.obey(command),
                Wake::Event(event) => self.take_turn(event).await,
                Wake::Deadline => {
                    let now = (self.now)();
                    let (cache, out) = (self.cache.as_ref(), &mut self.out);
                    self.sequencer.tick(now, cache, out);
                    self.act();
                }
            }
            self.report();
        }
        self.sequencer.leave(self.cache.as_ref());
    }

    fn obey(&mut self, command: Command) {
        let (cache, out) = (self.cache.as_ref(), &mut self.out);
        match command {
            Command::Resync(how) => {
                self.sequencer.resync((self.now)(), how, cache, out);
                self.act();
            }
            Command::AddWorker(worker) => self.sequencer.add_worker(worker),
            Command::RemoveWorker(worker, done) => {
                self.sequencer.remove_worker(worker, cache);
                let _ = done.send(());
            }
            // They end the loop or stop it.
            Command::Freeze(_) | Command::Pause(_) => {}
        }
    }

    /// Applies an event, and those that are there already.
    async fn take_turn(&mut self, first: SourceEvent) {
        let now = (self.now)();
        self.step(now, first);
        for _ in 1..EVENTS_PER_TURN {
            let source = &mut self.source;
            let waiting = poll_fn(|cx| Poll::Ready(source.poll_next(cx)));
            let Poll::Ready(event) = waiting.await else {
                return;
            };
            self.step(now, event);
        }
    }

    fn step(&mut self, now: Time, event: SourceEvent) {
        self.note_link(&event);
        let (cache, out) = (self.cache.as_ref(), &mut self.out);
        self.sequencer.step(now, event, cache, out);
        self.act();
    }

    fn note_link(&mut self, event: &SourceEvent) {
        match event {
            SourceEvent::Connected => {
                self.fault = None;
                self.observer.link(None);
            }
            SourceEvent::Disconnected(fault) => {
                self.observer.link(Some(fault));
                self.fault = Some(fault.clone());
            }
            _ => {}
        }
    }

    /// Does what the sequencer asked for.
    fn act(&mut self) {
        for output in self.out.drain(..) {
            match output {
                Output::Replay { attempt, from } => self.source.replay(attempt, from),
                Output::Query { attempt, request } => self.source.query(attempt, request),
                Output::CancelReplay { attempt } => self.source.cancel_replay(attempt),
                Output::Notice(notice) => self.observer.notice(&notice),
            }
        }
    }

    fn report(&self) {
        let (status, fault) = (self.sequencer.status(), &self.fault);
        self.publish.send_modify(|snapshot| {
            snapshot.status = status;
            if snapshot.fault != *fault {
                snapshot.fault.clone_from(fault);
            }
        });
    }
}

/// Waits until the one who asked has dropped the guard.
async fn pause(
    checkpoint: Option<StreamCheckpoint>,
    asked: oneshot::Sender<(Option<StreamCheckpoint>, PauseGuard)>,
) {
    let (over, wait) = oneshot::channel();
    let guard = PauseGuard { _over: over };
    let _ = asked.send((checkpoint, guard));
    let _ = wait.await;
}

/// Sleeps until `deadline`; for ever without one.
async fn until(now: Time, deadline: Option<Time>) {
    match deadline {
        Some(deadline) => tokio::time::sleep(deadline - now).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
