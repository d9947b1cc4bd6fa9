//! Tasks that end when the process is told to end.

use std::future::Future;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::on_wake::OnWake;

/// The tasks of one server: where they are spawned, told to stop and waited for. Clones are one set.
///
/// Shutdown has two stages. *Draining* asks tasks to finish what they have and take nothing new;
/// *stopping* drops what is left at its next await.
///
/// Tasks of the [background](Self::background) have nothing to finish: nobody waits for them to drain.
#[derive(Clone, Debug, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    background: TaskTracker,
    draining: CancellationToken,
    stopping: CancellationToken,
}

impl Tasks {
    /// An empty set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs `future` until it ends or the set is stopped.
    #[expect(clippy::disallowed_methods, reason = "the one place that spawns")]
    pub fn spawn<F>(&self, future: F) -> JoinHandle<Option<F::Output>>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        // In boxes: a task that is made of nested futures has the room of its work four times.
        let (work, stopped) = (Box::pin(future), self.stopping.clone().cancelled_owned());
        let mut stopped = OnWake::new(Box::pin(stopped));
        tokio::spawn(
            self.tracker
                .track_future(async move { stopped.interrupt(work).await.ok() }),
        )
    }

    /// As [`Self::spawn`], on another runtime than the caller's.
    pub fn spawn_on<F>(&self, runtime: &Handle, future: F) -> JoinHandle<Option<F::Output>>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let _entered = runtime.enter();
        self.spawn(future)
    }

    /// The same set, for tasks that run as long as the process does and have nothing to finish: they run through
    /// the draining and are dropped when the others have ended.
    #[must_use]
    pub fn background(&self) -> Self {
        Self {
            tracker: self.background.clone(),
            ..self.clone()
        }
    }

    /// Asks every task to finish what it has.
    pub fn drain(&self) {
        self.draining.cancel();
    }

    /// Whether [`Self::drain`] was called.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Waits until [`Self::drain`] is called.
    pub async fn draining(&self) {
        self.draining.cancelled().await;
    }

    /// Drops whatever still runs, at its next await.
    pub fn stop(&self) {
        self.draining.cancel();
        self.stopping.cancel();
    }

    /// How many tasks run, those of the background included.
    #[must_use]
    pub fn len(&self) -> usize {
        match TaskTracker::ptr_eq(&self.tracker, &self.background) {
            true => self.tracker.len(),
            false => self.tracker.len() + self.background.len(),
        }
    }

    /// Whether no task runs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tracker.is_empty() && self.background.is_empty()
    }

    /// Drains, waits at most `timeout` for the tasks to end, then stops the rest. Returns how many had
    /// to be stopped.
    pub async fn shut_down(&self, timeout: Duration) -> usize {
        self.drain();
        self.tracker.close();
        self.background.close();
        let _ = tokio::time::timeout(timeout, self.tracker.wait()).await;
        let left = self.tracker.len();
        self.stop();
        self.tracker.wait().await;
        self.background.wait().await;
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_the_background() {
        let tasks = Tasks::new();
        let inner = tasks.clone();
        let slow = tasks.spawn(async move {
            inner.draining().await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        });
        let behind = tasks.background().spawn(std::future::pending::<()>());
        assert_eq!((tasks.len(), tasks.background().len()), (2, 1));
        let start = tokio::time::Instant::now();
        assert_eq!(tasks.shut_down(Duration::from_secs(60)).await, 0);
        assert_eq!(
            start.elapsed(),
            Duration::from_secs(1),
            "time stands still otherwise"
        );
        assert_eq!(
            (slow.await.unwrap(), behind.await.unwrap()),
            (Some(()), None)
        );
        assert!(tasks.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_drained_task_ends_and_a_deaf_one_is_stopped() {
        let tasks = Tasks::new();
        let inner = tasks.clone();
        let polite = tasks.spawn(async move { inner.draining().await });
        let deaf = tasks.spawn(std::future::pending::<()>());
        assert_eq!(tasks.len(), 2);
        assert_eq!(tasks.shut_down(Duration::from_secs(5)).await, 1);
        assert_eq!(polite.await.unwrap(), Some(()));
        assert_eq!(deaf.await.unwrap(), None);
        assert!(tasks.is_empty());
    }
}
