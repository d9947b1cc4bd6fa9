//! How many requests are under way, and when the last one has ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;

/// Counts requests between their first byte and the last byte of their answer. Clones count together.
#[derive(Clone, Debug, Default)]
pub struct InFlight {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    count: AtomicUsize,
    emptied: Notify,
}

/// One request under way; dropping it ends it.
#[derive(Debug)]
pub struct Ticket {
    inner: Arc<Inner>,
}

impl InFlight {
    /// Counts one more, until the ticket is dropped.
    #[must_use]
    pub fn enter(&self) -> Ticket {
        self.inner.count.fetch_add(1, Ordering::Relaxed);
        Ticket {
            inner: Arc::clone(&self.inner),
        }
    }

    /// How many are under way.
    #[must_use]
    pub fn count(&self) -> usize {
        self.inner.count.load(Ordering::Acquire)
    }

    /// Waits until none is under way.
    pub async fn emptied(&self) {
        loop {
            let notified = self.inner.emptied.notified();
            if self.count() == 0 {
                return;
            }
            notified.await;
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.inner.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.inner.emptied.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_last_ticket_wakes_the_waiter() {
        let in_flight = InFlight::default();
        let (first, second) = (in_flight.enter(), in_flight.enter());
        assert_eq!(in_flight.count(), 2);
        drop(first);
        tokio::join!(in_flight.emptied(), async { drop(second) });
        assert_eq!(in_flight.count(), 0);
        in_flight.emptied().await;
    }
}
