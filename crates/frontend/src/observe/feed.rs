//! Who watches the dashboard?
//!
//! One task makes the events (`admin::dashboard`); each viewer has a short queue of events that all share. A
//! viewer that does not read loses its stream and comes back with the id of the last event it saw.
//!
//! What always holds: [`VIEWERS_MAX`] streams at most, [`EVENTS_WAITING_MAX`] events wait in each; nobody waits for a
//! viewer.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::sync::mpsc;

use crate::http::reply::{ByteSource, Cut};

/// Streams that are open at once.
pub(crate) const VIEWERS_MAX: usize = 64;
/// Events that wait for one viewer.
const EVENTS_WAITING_MAX: usize = 40;
/// Viewers that wait to be taken in.
const JOINS_MAX: usize = 16;

/// A viewer that wants to be taken in.
#[derive(Debug)]
pub(crate) struct Join {
    /// Where its events go.
    pub(crate) to: mpsc::Sender<Bytes>,
    /// The last event that it saw on an earlier stream.
    pub(crate) after: Option<Box<str>>,
}

/// Where viewers come in.
#[derive(Debug, Default)]
pub(crate) struct Feed {
    joins: OnceLock<mpsc::Sender<Join>>,
    viewers: Arc<AtomicUsize>,
}

/// Why there is no stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoStream {
    /// Too many watch already.
    Full,
    /// Nobody makes events: the server does not serve, or no more.
    Ended,
}

impl Feed {
    /// Where viewers come out; once.
    pub(crate) fn start(&self) -> Option<mpsc::Receiver<Join>> {
        let (to, joins) = mpsc::channel(JOINS_MAX);
        self.joins.set(to).ok().map(|()| joins)
    }

    /// One more viewer, who saw everything up to the event `after`.
    pub(crate) fn open(&self, after: Option<&str>) -> Result<Viewer, NoStream> {
        let joins = self.joins.get().ok_or(NoStream::Ended)?;
        let place = Place::take(&self.viewers).ok_or(NoStream::Full)?;
        let (to, events) = mpsc::channel(EVENTS_WAITING_MAX);
        let after = after.map(Into::into);
        joins
            .try_send(Join { to, after })
            .map_err(|error| match error {
                mpsc::error::TrySendError::Full(_) => NoStream::Full,
                mpsc::error::TrySendError::Closed(_) => NoStream::Ended,
            })?;
        Ok(Viewer {
            events,
            _place: place,
        })
    }

    /// How many watch.
    #[cfg(test)]
    fn viewers(&self) -> usize {
        self.viewers.load(Ordering::Relaxed)
    }
}

/// One of the places for viewers, until it is dropped.
#[derive(Debug)]
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(viewers: &Arc<AtomicUsize>) -> Option<Self> {
        let next = |now: usize| (now < VIEWERS_MAX).then_some(now + 1);
        let taken = viewers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        taken.ok().map(|_| Self(Arc::clone(viewers)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The stream of one viewer.
#[derive(Debug)]
pub(crate) struct Viewer {
    events: mpsc::Receiver<Bytes>,
    _place: Place,
}

impl ByteSource for Viewer {
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        self.events.poll_recv(cx).map(|event| event.map(Ok))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn places_are_bounded_and_come_back() {
        let feed = Feed::default();
        assert_eq!(feed.open(None).err(), Some(NoStream::Ended));
        let mut joins = feed.start().unwrap();
        assert!(feed.start().is_none(), "one task makes the events");
        let mut viewers = Vec::new();
        for _ in 0..VIEWERS_MAX {
            viewers.push(feed.open(Some("1-2")).unwrap());
            assert_eq!(joins.recv().await.unwrap().after.as_deref(), Some("1-2"));
        }
        assert_eq!(feed.open(None).err(), Some(NoStream::Full));
        viewers.pop();
        assert_eq!(feed.viewers(), VIEWERS_MAX - 1);
        assert!(feed.open(None).is_ok());
        drop((joins, viewers));
        assert_eq!(feed.open(None).err(), Some(NoStream::Ended));
        assert_eq!(feed.viewers(), 0);
    }
}
