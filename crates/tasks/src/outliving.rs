//! How is work done to its end whose caller may leave, without a task for each caller that stays?
//!
//! [`Outliving`] is polled by its caller like any future. Dropped before its end it goes on as a task.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::runtime::Handle;

use crate::Tasks;

/// Work that goes on as a task if it is dropped before its end. What comes of it then is dropped.
#[derive(Debug)]
pub struct Outliving<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    /// None once it has ended.
    work: Option<Pin<Box<F>>>,
    tasks: Tasks,
    /// How long it may go on.
    grace: Duration,
}

impl Tasks {
    /// `work`, which goes on as a task of this set for at most `grace` if whoever awaits it leaves.
    pub fn outliving<F>(&self, work: F, grace: Duration) -> Outliving<F>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        Outliving {
            work: Some(Box::pin(work)),
            tasks: self.clone(),
            grace,
        }
    }
}

impl<F> Future for Outliving<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let Some(work) = &mut self.work else {
            return Poll::Pending;
        };
        let output = std::task::ready!(work.as_mut().poll(cx));
        self.work = None;
        Poll::Ready(output)
    }
}

impl<F> Drop for Outliving<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn drop(&mut self) {
        // Outside a runtime the process is about to end.
        let work = self.work.take().filter(|_| Handle::try_current().is_ok());
        if let Some(work) = work {
            self.tasks.spawn(tokio::time::timeout(self.grace, work));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    const GRACE: Duration = Duration::from_secs(1);

    /// Counts its end after `takes`.
    fn work(takes: Duration, ended: &Arc<AtomicU32>) -> impl Future<Output = u32> + Send + 'static {
        let ended = Arc::clone(ended);
        async move {
            tokio::time::sleep(takes).await;
            ended.fetch_add(1, Ordering::Relaxed);
            7
        }
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_stays_gets_what_comes_and_there_is_no_task() {
        let (tasks, ended) = (Tasks::new(), Arc::default());
        let waits = tasks.outliving(work(GRACE * 2, &ended), GRACE);
        assert_eq!((waits.await, tasks.len()), (7, 0));
        assert_eq!(ended.load(Ordering::Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn it_goes_on_without_its_caller_as_long_as_it_may() {
        for (takes, ends) in [(GRACE / 2, 1), (GRACE * 2, 0)] {
            let (tasks, ended) = (Tasks::new(), Arc::default());
            let mut waits = tasks.outliving(work(takes, &ended), GRACE);
            let poll = std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut waits).poll(cx)));
            assert!(poll.await.is_pending());
            drop(waits);
            assert_eq!(tasks.len(), 1);
            assert_eq!(tasks.shut_down(GRACE * 4).await, 0);
            assert_eq!(ended.load(Ordering::Relaxed), ends);
        }
    }

    #[test]
    fn outside_a_runtime_it_ends() {
        let ended = Arc::default();
        drop(Tasks::new().outliving(work(GRACE, &ended), GRACE));
        assert_eq!(ended.load(Ordering::Relaxed), 0);
    }
}
