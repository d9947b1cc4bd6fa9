//! What is said beside cache events: how loaded workers are, which prompts are computed, and what other replicas book.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use kvasir_msgpack::{DecodeError, Value};
use kvasir_router::{Input, LoadReport, ReplicaId};
use kvasir_tasks::{Tasks, ThreadSlot};
use kvasir_telemetry::Clock;
use kvasir_transport::event_plane::ChannelAddress;
use kvasir_transport::{EventSource, SourceEvent, next_event};
use kvasir_wire::native::{
    ActiveLoad, ReplicaMessage, SequenceChange, SequenceEvent, SessionBinding, Topic,
};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::PlaneChannel;
use super::members::WorkerRouters;
use crate::replica::{Replicas, request_id};

/// Who is told what is heard.
#[derive(Clone)]
pub(super) struct Audience {
    pub(super) workers: WorkerRouters,
    /// Where what other replicas say counts.
    pub(super) replicas: Option<Replicas>,
    pub(super) clock: Clock,
}

/// Listens to one channel until it is dropped. Replicas that spoke on it are gone then.
pub(super) struct Listener {
    pub(super) address: ChannelAddress,
    publisher: u64,
    replicas: Option<Replicas>,
    heard: Arc<Mutex<BTreeSet<ReplicaId>>>,
    /// On which thread.
    _slot: Option<ThreadSlot>,
    _stop: DropGuard,
}

impl Listener {
    pub(super) fn start(
        tasks: &Tasks,
        channel: PlaneChannel,
        source: impl EventSource + 'static,
        audience: Audience,
        slot: Option<ThreadSlot>,
    ) -> Self {
        let stop = CancellationToken::new();
        let (replicas, heard) = (audience.replicas.clone(), Arc::default());
        let hearing = Hearing {
            topic: channel.topic,
            publisher: channel.publisher,
            audience,
            heard: Arc::clone(&heard),
        };
        let listen = listen(hearing, source);
        tasks.spawn(stop.clone().run_until_cancelled_owned(listen));
        Self {
            address: channel.address,
            publisher: channel.publisher,
            replicas,
            heard,
            _slot: slot,
            _stop: stop.drop_guard(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Some(replicas) = &self.replicas else {
            return;
        };
        replicas.channel_down(self.publisher);
        let heard = self.heard.lock();
        for replica in heard.unwrap_or_else(PoisonError::into_inner).iter() {
            replicas.lost(*replica);
        }
    }
}

async fn listen(hearing: Hearing, mut source: impl EventSource) {
    let mut said = false;
    loop {
        let refused = match next_event(&mut source).await {
            SourceEvent::Live(frame) => hearing.take(&frame.payload).err(),
            SourceEvent::Refused(error) => Some(error),
            SourceEvent::Connected => {
                hearing.connected();
                None
            }
            _ => None,
        };
        if let Some(error) = refused
            && !std::mem::replace(&mut said, true)
        {
            let topic = hearing.topic;
            tracing::warn!(%topic, %error, "unreadable message on the event plane; more are not logged");
        }
    }
}

/// One channel that is listened to.
struct Hearing {
    topic: Topic,
    publisher: u64,
    audience: Audience,
    /// The replicas that spoke here.
    heard: Arc<Mutex<BTreeSet<ReplicaId>>>,
}

impl Hearing {
    fn connected(&self) {
        // What was said before is asked for, on whichever channel it was missed.
        match (self.topic, &self.audience.replicas) {
            (Topic::Replicas, Some(replicas)) => replicas.channel_up(self.publisher),
            (Topic::ActiveSequences, Some(replicas)) => replicas.ask(),
            _ => {}
        }
    }

    /// Tells the router of the worker that a message is about.
    fn take(&self, payload: &[u8]) -> Result<(), DecodeError> {
        let value = read(payload)?;
        match self.topic {
            Topic::KvMetrics => self.take_load(&ActiveLoad::from_value(&value)?),
            Topic::ActiveSequences => {
                for event in SequenceEvent::list_from_value(&value)? {
                    self.take_sequence(&event);
                }
            }
            Topic::SessionAffinity => {
                let binding = SessionBinding::from_value(&value)?;
                if let Some(replicas) = &self.audience.replicas {
                    self.note(binding.writer);
                    replicas.hear_session(&binding, None);
                }
            }
            Topic::Replicas => {
                let message = ReplicaMessage::from_value(&value)?;
                if let Some(replicas) = &self.audience.replicas {
                    let (ReplicaMessage::Ask { from } | ReplicaMessage::State { from, .. }) =
                        &message;
                    self.note(*from);
                    replicas.hear_replica(self.publisher, &message);
                }
            }
            Topic::KvEvents | Topic::ForwardPass => {}
        }
        Ok(())
    }

    fn take_load(&self, load: &ActiveLoad) {
        if let Some(member) = self.audience.workers.get(load.rank.worker) {
            member.host.tell(Input::Load(LoadReport {
                rank: load.rank,
                active_decode_blocks: load.active_decode_blocks,
                active_prefill_tokens: load.active_prefill_tokens,
                kv_used_blocks: load.used_blocks,
                waiting: None,
                asked: self.audience.clock.now(),
            }));
        }
    }

    /// A worker's own word that a prompt is computed, or what a replica does.
    fn take_sequence(&self, event: &SequenceEvent) {
        if event.router != event.rank.worker.0 {
            if let Some(replicas) = &self.audience.replicas {
                self.note(event.router);
                replicas.hear(event, None, false);
            }
            return;
        }
        if event.change != SequenceChange::PrefillCompleted {
            return;
        }
        if let Some(member) = self.audience.workers.get(event.rank.worker) {
            let id = request_id(&event.request);
            member.host.tell(Input::Prefilled { id });
        }
    }

    fn note(&self, replica: u64) {
        let heard = self.heard.lock();
        let mut heard = heard.unwrap_or_else(PoisonError::into_inner);
        if heard.len() < kvasir_router::REPLICAS_MAX {
            heard.insert(ReplicaId(replica));
        }
    }
}

/// A payload in either encoding: no MessagePack of ours begins as JSON does.
fn read(payload: &[u8]) -> Result<Value, DecodeError> {
    match payload.first() {
        Some(b'{' | b'[') => Value::from_json(payload),
        _ => Value::from_msgpack(payload),
    }
}
