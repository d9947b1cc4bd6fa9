//! How does a task wait for something rare without asking about it each time that it runs?
//!
//! A task that waits for two futures polls both whenever either wakes it. To poll a wait for shutdown takes locks that
//! all tasks of the process share, and a task runs several times for each request. [`OnWake`] polls its future once,
//! and again only after that future was woken itself.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// A future that is polled only when it was woken.
#[derive(Debug)]
pub struct OnWake<F> {
    future: F,
    signal: Arc<Signal>,
    /// Wakes through `signal`.
    waker: Waker,
    /// The waker that `signal` has.
    task: Option<Waker>,
}

/// What the future wakes.
#[derive(Debug, Default)]
struct Signal {
    woken: AtomicBool,
    task: Mutex<Option<Waker>>,
}

impl Signal {
    fn set_task(&self, task: Waker) {
        *self.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
    }
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // First the mark, then the task: a task that changed its waker meanwhile sees the mark.
        self.woken.store(true, Ordering::Release);
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(task) = &*task {
            task.wake_by_ref();
        }
    }
}

impl<F: Future + Unpin> OnWake<F> {
    /// Nothing is polled yet.
    #[must_use]
    pub fn new(future: F) -> Self {
        let signal = Arc::new(Signal::default());
        Self {
            future,
            waker: Waker::from(Arc::clone(&signal)),
            signal,
            task: None,
        }
    }

    /// Runs `main` to its end, or until this future ends: then its output is the error.
    pub async fn interrupt<M: Future + Unpin>(
        &mut self,
        mut main: M,
    ) -> Result<M::Output, F::Output> {
        poll_fn(|cx| match Pin::new(&mut *self).poll(cx) {
            Poll::Ready(output) => Poll::Ready(Err(output)),
            Poll::Pending => Pin::new(&mut main).poll(cx).map(Ok),
        })
        .await
    }
}

impl<F: Future + Unpin> Future for OnWake<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        let known = this.task.as_ref();
        if !known.is_some_and(|task| task.will_wake(cx.waker())) {
            let is_first = known.is_none();
            this.signal.set_task(cx.waker().clone());
            this.task = Some(cx.waker().clone());
            if is_first {
                this.signal.woken.store(true, Ordering::Relaxed);
            }
        }
        if !this.signal.woken.load(Ordering::Relaxed) {
            return Poll::Pending;
        }
        this.signal.woken.swap(false, Ordering::Acquire);
        Pin::new(&mut this.future).poll(&mut Context::from_waker(&this.waker))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::sync::oneshot;

    use super::*;

    struct Count(AtomicBool);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    fn task() -> (Arc<Count>, Waker) {
        let count = Arc::new(Count(AtomicBool::new(false)));
        (Arc::clone(&count), Waker::from(count))
    }

    #[test]
    fn it_is_polled_first_and_when_it_was_woken_and_not_otherwise() {
        let (send, mut receive) = oneshot::channel::<()>();
        let polls = Cell::new(0);
        let mut on_wake = OnWake::new(poll_fn(|cx| {
            polls.set(polls.get() + 1);
            Pin::new(&mut receive).poll(cx)
        }));
        let (woken, waker) = task();
        let mut poll = |waker: &Waker| Pin::new(&mut on_wake).poll(&mut Context::from_waker(waker));
        for _ in 0..3 {
            assert!(poll(&waker).is_pending());
        }
        assert_eq!(polls.get(), 1);
        // It goes on in another task.
        let (woken_there, waker_there) = task();
        assert!(poll(&waker_there).is_pending());
        send.send(()).unwrap();
        assert!(woken_there.0.load(Ordering::SeqCst));
        assert!(!woken.0.load(Ordering::SeqCst), "the task that is left");
        assert!(poll(&waker_there).is_ready());
        assert_eq!(polls.get(), 2);
    }

    #[tokio::test]
    async fn whichever_ends_first_is_the_end() {
        let (send, receive) = oneshot::channel::<u8>();
        let mut side = OnWake::new(receive);
        assert_eq!(side.interrupt(Box::pin(async { 1 })).await, Ok(1));
        let main = Box::pin(async {
            send.send(2).unwrap();
            std::future::pending::<u8>().await
        });
        assert_eq!(side.interrupt(main).await, Err(Ok(2)));
    }
}
