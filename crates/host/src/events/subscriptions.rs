//! Which event streams run, and which are ending.

use std::collections::BTreeMap;

use kvasir_tasks::{RuntimeThreads, ThreadSlot};
use tokio::task::JoinHandle;

use super::{EventStream, EventStreamHandle};

/// Event streams by key, each with where its events come from.
#[derive(Debug)]
pub struct Subscriptions<K, O> {
    open: BTreeMap<K, OpenStream<O>>,
    /// Streams that are ending.
    closing: Vec<JoinHandle<Option<()>>>,
}

#[derive(Debug)]
struct OpenStream<O> {
    origin: O,
    stream: EventStream,
    /// On which thread.
    _slot: Option<ThreadSlot>,
}

impl<K, O> Default for Subscriptions<K, O> {
    fn default() -> Self {
        Self {
            open: BTreeMap::new(),
            closing: Vec::new(),
        }
    }
}

impl<K: Ord, O> Subscriptions<K, O> {
    /// Starts a stream on the thread of `threads` that has the fewest, or on the caller's runtime without any.
    pub fn open(
        &mut self,
        key: K,
        origin: O,
        threads: Option<&RuntimeThreads>,
        start: impl FnOnce() -> Option<EventStream>,
    ) {
        let slot = threads.and_then(RuntimeThreads::slot);
        let started = {
            let _entered = slot.as_ref().map(|slot| slot.handle.enter());
            start()
        };
        let Some(stream) = started else { return };
        let opened = OpenStream {
            origin,
            stream,
            _slot: slot,
        };
        let before = self.open.insert(key, opened);
        self.closing
            .extend(before.map(|before| before.stream.stop()));
    }

    /// Where the events of `key` come from, if it is subscribed.
    pub fn origin(&self, key: &K) -> Option<&O> {
        self.open.get(key).map(|open| &open.origin)
    }

    /// Who else may command the stream of `key`, if it is subscribed.
    pub fn handle(&self, key: &K) -> Option<EventStreamHandle> {
        self.open.get(key).map(|open| open.stream.handle())
    }

    /// Ends the streams that `gone` names. Their ranks are forgotten when [`Self::settle`] returns.
    pub fn close(&mut self, mut gone: impl FnMut(&K, &O) -> bool) {
        let closed = self
            .open
            .extract_if(.., |key, open| gone(key, &open.origin));
        let ending = closed.map(|(_, open)| open.stream.stop());
        self.closing.extend(ending);
    }

    /// Whether streams are ending.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        !self.closing.is_empty()
    }

    /// Waits until what was closed is forgotten, so that nothing new is forgotten with it.
    pub async fn settle(&mut self) {
        for ended in self.take_closing() {
            let _ = ended.await;
        }
    }

    pub(super) fn take_closing(&mut self) -> Vec<JoinHandle<Option<()>>> {
        std::mem::take(&mut self.closing)
    }
}
