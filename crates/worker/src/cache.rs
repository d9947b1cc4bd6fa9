//! What one rank tells of its cache, and the endpoint that answers for what was told.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_kv_events::publisher::RankPublisher;
use kvasir_protocol::Payload;
use kvasir_transport::jetstream::LogPublisher;
use kvasir_transport::{EndpointHandler, HandlerFuture, IncomingCall};
use kvasir_types::{Codec, KvEvent, WorkerRank};
use kvasir_wire::native::{
    Encoding, RecoveryReply, RecoveryRequest, RouterEvent, encode_router_event,
    encode_router_events,
};

use crate::CacheOutbox;
use crate::channels::Channel;

/// Where a rank's events go.
enum Output {
    /// To whoever listens.
    Channel(Channel),
    /// Into a stream that is kept, which answers in the rank's place.
    Log(LogPublisher),
}

/// One rank's events.
pub(crate) struct RankCache {
    publisher: Mutex<RankPublisher>,
    output: Output,
    outbox: Option<Arc<dyn CacheOutbox>>,
}

impl RankCache {
    pub(crate) fn new(
        rank: WorkerRank,
        channel: Channel,
        outbox: Option<Arc<dyn CacheOutbox>>,
    ) -> Self {
        Self {
            publisher: Mutex::new(RankPublisher::new(rank)),
            output: Output::Channel(channel),
            outbox,
        }
    }

    /// A rank whose events are kept in a stream: it keeps no index of its own and is not asked.
    pub(crate) fn logged(
        rank: WorkerRank,
        log: LogPublisher,
        outbox: Option<Arc<dyn CacheOutbox>>,
    ) -> Self {
        Self {
            publisher: Mutex::new(RankPublisher::unanswering(rank)),
            output: Output::Log(log),
            outbox,
        }
    }

    /// A rank that keeps no index of its own and cannot be asked.
    pub(crate) fn unanswering(rank: WorkerRank, channel: Channel) -> Self {
        Self {
            publisher: Mutex::new(RankPublisher::unanswering(rank)),
            ..Self::new(rank, channel, None)
        }
    }

    /// Its channel, if it has one.
    pub(crate) const fn channel(&self) -> Option<&Channel> {
        match &self.output {
            Output::Channel(channel) => Some(channel),
            Output::Log(_) => None,
        }
    }

    /// A change of the cache. It goes out with the step that made it.
    pub(crate) fn push(&self, event: KvEvent) {
        let mut publisher = self.lock();
        let mut out = Vec::new();
        publisher.push(event, &mut out);
        self.send(&publisher, out);
    }

    /// A change that an engine told itself.
    pub(crate) fn relay(&self, event: KvEvent) {
        let mut publisher = self.lock();
        let mut out = Vec::new();
        publisher.relay(event, &mut out);
        publisher.flush(&mut out);
        self.send(&publisher, out);
    }

    /// The step that the last changes came from is over.
    pub(crate) fn flush(&self) {
        let mut publisher = self.lock();
        let mut out = Vec::new();
        publisher.flush(&mut out);
        self.send(&publisher, out);
    }

    /// The engine began anew, with an empty cache and without a word to anybody.
    pub(crate) fn restart(&self) {
        let mut publisher = self.lock();
        *publisher = match &self.output {
            Output::Channel(_) => RankPublisher::new(publisher.rank()),
            Output::Log(_) => RankPublisher::unanswering(publisher.rank()),
        };
    }

    fn answer(&self, request: &RecoveryRequest) -> RecoveryReply {
        self.lock().answer(request)
    }

    /// Sends events under the lock that numbered them: in their order, and after they can be asked for.
    fn send(&self, publisher: &MutexGuard<'_, RankPublisher>, events: Vec<RouterEvent>) {
        if events.is_empty() {
            return;
        }
        let messages = match &self.outbox {
            Some(outbox) => outbox.pass(publisher.rank(), events),
            None => vec![events],
        };
        for events in messages {
            match &self.output {
                Output::Channel(channel) => {
                    let mut payload = Vec::new();
                    encode_router_events(Encoding::MessagePack, &events, &mut payload);
                    channel.publish(payload);
                }
                Output::Log(log) => events.iter().for_each(|event| write(log, event)),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, RankPublisher> {
        self.publisher
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// What finds no room is missing, and the numbers show it.
fn write(log: &LogPublisher, event: &RouterEvent) {
    let mut payload = Vec::new();
    encode_router_event(Encoding::Json, event, &mut payload);
    log.publish(payload.into());
}

/// Answers routers that missed events of a rank.
pub(crate) struct CacheQuery(pub(crate) Arc<RankCache>);

impl EndpointHandler for CacheQuery {
    fn handle(&self, call: IncomingCall) -> HandlerFuture {
        let cache = Arc::clone(&self.0);
        Box::pin(async move {
            let IncomingCall {
                payload, mut reply, ..
            } = call;
            if !reply.start().await {
                return;
            }
            let encoding = match payload.codec {
                Codec::Json => Encoding::Json,
                Codec::MessagePack => Encoding::MessagePack,
            };
            let answer = match RecoveryRequest::decode(encoding, &payload.bytes) {
                Ok(request) => cache.answer(&request),
                Err(error) => RecoveryReply::Error(format!("the question cannot be read: {error}")),
            };
            let mut bytes = Vec::new();
            answer.encode(encoding, &mut bytes);
            if reply.send(&Payload::new(payload.codec, bytes.into())).await {
                reply.finish().await;
            }
        })
    }
}
