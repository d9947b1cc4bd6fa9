//! An engine's event stream, running.
//!
//! Answers one question: who moves what a source tells into the state machine, wakes it when a deadline is
//! due, and does what it asks? One task per stream.
//!
//! Invariants: the machine is stepped by its own task alone; when an [`Intake`] is dropped, its ranks are
//! forgotten after its last event was applied, never before, unless it was frozen; reading the status waits
//! for nobody.
//!
//! Elsewhere: what an event means (`kvasir-ingest`), where it comes from (`kvasir-transport`).

mod handle;

pub use handle::{IntakeHandle, Pause};

use std::sync::Arc;

use handle::Ask;
use kvasir_ingest::{Cache, Ingest, Input, Kept, Notice, Output, Resync, Status};
use kvasir_transport::{EventSource, SourceEvent, SourceFault, Tasks, next_event};
use kvasir_types::Time;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Questions that wait for the machine. One is enough; more say the same.
const ASKS_MAX: usize = 4;

/// Reads the host's clock.
pub type Now = dyn Fn() -> Time + Send + Sync;

/// Who wants to know what is noticed. Called from the stream's task: must not wait.
pub trait Witness: Send + Sync + 'static {
    /// Something an operator may want to read once.
    fn notice(&self, notice: &Notice);
    /// The event socket was reached, or was lost.
    fn link(&self, fault: Option<&SourceFault>);
}

/// Nobody does.
impl Witness for () {
    fn notice(&self, _: &Notice) {}
    fn link(&self, _: Option<&SourceFault>) {}
}

/// How a stream stands.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The machine's own view.
    pub status: Status,
    /// Why the event socket is not connected.
    pub fault: Option<SourceFault>,
}

/// One running stream. Dropping it ends the stream and forgets its ranks.
#[derive(Debug)]
pub struct Intake {
    handle: IntakeHandle,
    stop: DropGuard,
    task: JoinHandle<Option<()>>,
}

impl Intake {
    /// Runs `ingest` on what `source` tells, writing to `cache`.
    pub fn spawn<S, C>(
        tasks: &Tasks,
        source: S,
        ingest: Ingest,
        cache: Arc<C>,
        now: Arc<Now>,
        witness: Arc<dyn Witness>,
    ) -> Self
    where
        S: EventSource + 'static,
        C: Cache + Send + Sync + 'static,
    {
        let (asks, asked) = mpsc::channel(ASKS_MAX);
        let first = Snapshot {
            status: ingest.status(),
            fault: None,
        };
        let (publish, snapshot) = watch::channel(first);
        let stop = CancellationToken::new();
        let stream = Stream {
            source,
            ingest,
            cache,
            now,
            witness,
            publish,
            fault: None,
            out: Vec::new(),
        };
        let task = tasks.spawn(stream.run(asked, stop.clone()));
        Self {
            handle: IntakeHandle { asks, snapshot },
            stop: stop.drop_guard(),
            task,
        }
    }

    /// Has a wrong picture mended.
    pub fn resync(&self, how: Resync) {
        self.handle.resync(how);
    }

    /// Who else may ask the stream.
    #[must_use]
    pub fn handle(&self) -> IntakeHandle {
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
    pub fn snapshot(&self) -> Snapshot {
        self.handle.snapshot()
    }

    /// Waits until `done` holds; for tests and for start-up.
    pub async fn until(&mut self, done: impl FnMut(&Snapshot) -> bool) {
        let _ = self.handle.snapshot.wait_for(done).await;
    }
}

struct Stream<S, C> {
    source: S,
    ingest: Ingest,
    cache: Arc<C>,
    now: Arc<Now>,
    witness: Arc<dyn Witness>,
    publish: watch::Sender<Snapshot>,
    fault: Option<SourceFault>,
    out: Vec<Output>,
}

impl<S: EventSource, C: Cache> Stream<S, C> {
    async fn run(mut self, mut asked: mpsc::Receiver<Ask>, stop: CancellationToken) {
        loop {
            let input = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(ask) = asked.recv() => match ask {
                    Ask::Resync(resync) => Input::Resync(resync),
                    Ask::Freeze(done) => {
                        let _ = done.send(self.ingest.keep());
                        return;
                    }
                    Ask::Hold(done) => {
                        tokio::select! {
                            () = stop.cancelled() => break,
                            () = hold(self.ingest.keep(), done) => continue,
                        }
                    }
                },
                event = next_event(&mut self.source) => self.input(event),
                () = until((self.now)(), self.ingest.next_deadline()) => Input::Tick,
            };
            self.step(input);
        }
        self.ingest.leave(self.cache.as_ref());
    }

    fn input(&mut self, event: SourceEvent) -> Input {
        match event {
            SourceEvent::Connected => {
                self.fault = None;
                self.witness.link(None);
                Input::Connected
            }
            SourceEvent::Disconnected(fault) => {
                self.witness.link(Some(&fault));
                self.fault = Some(fault);
                Input::Disconnected
            }
            SourceEvent::Live(frame) => Input::Live(frame),
            SourceEvent::Refused(error) => Input::Refused(error),
            SourceEvent::Replayed { attempt, frame } => Input::Replayed { attempt, frame },
            SourceEvent::ReplayEnded { attempt } => Input::ReplayEnded { attempt },
            SourceEvent::ReplayFailed { attempt, .. } => Input::ReplayFailed { attempt },
        }
    }

    fn step(&mut self, input: Input) {
        let now = (self.now)();
        self.ingest
            .step(now, input, self.cache.as_ref(), &mut self.out);
        for output in self.out.drain(..) {
            match output {
                Output::Replay { attempt, from } => self.source.replay(attempt, from),
                Output::CancelReplay { attempt } => self.source.cancel_replay(attempt),
                Output::Notice(notice) => self.witness.notice(&notice),
            }
        }
        let (status, fault) = (self.ingest.status(), &self.fault);
        self.publish.send_modify(|snapshot| {
            snapshot.status = status;
            if snapshot.fault != *fault {
                snapshot.fault.clone_from(fault);
            }
        });
    }
}

/// Stands still until the one who asked has seen enough.
async fn hold(kept: Option<Kept>, asked: oneshot::Sender<(Option<Kept>, Pause)>) {
    let (over, wait) = oneshot::channel();
    let pause = Pause { _over: over };
    let _ = asked.send((kept, pause));
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
