//! What workers say beside cache events: how loaded they are, and which prompts are computed.

use kvasir_msgpack::{DecodeError, Value};
use kvasir_router::{Input, LoadReport};
use kvasir_tasks::Tasks;
use kvasir_telemetry::Clock;
use kvasir_transport::event_plane::ChannelAddress;
use kvasir_transport::{EventSource, SourceEvent, next_event};
use kvasir_types::RequestId;
use kvasir_wire::native::{ActiveLoad, SequenceChange, SequenceEvent, Topic};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::members::WorkerRouters;

/// Listens to one channel until it is dropped.
pub(super) struct Listener {
    pub(super) address: ChannelAddress,
    _stop: DropGuard,
}

impl Listener {
    pub(super) fn start(
        tasks: &Tasks,
        address: ChannelAddress,
        topic: Topic,
        source: impl EventSource + 'static,
        workers: WorkerRouters,
        clock: Clock,
    ) -> Self {
        let stop = CancellationToken::new();
        let listen = listen(topic, source, workers, clock);
        tasks.spawn(stop.clone().run_until_cancelled_owned(listen));
        Self {
            address,
            _stop: stop.drop_guard(),
        }
    }
}

async fn listen(topic: Topic, mut source: impl EventSource, workers: WorkerRouters, clock: Clock) {
    let mut said = false;
    loop {
        let refused = match next_event(&mut source).await {
            SourceEvent::Live(frame) => take(topic, &frame.payload, &workers, &clock).err(),
            SourceEvent::Refused(error) => Some(error),
            _ => None,
        };
        if let Some(error) = refused
            && !std::mem::replace(&mut said, true)
        {
            tracing::warn!(%topic, %error, "unreadable message on the event plane; more are not logged");
        }
    }
}

/// Tells the router of the worker that a message is about.
fn take(
    topic: Topic,
    payload: &[u8],
    workers: &WorkerRouters,
    clock: &Clock,
) -> Result<(), DecodeError> {
    let value = read(payload)?;
    match topic {
        Topic::KvMetrics => {
            let load = ActiveLoad::from_value(&value)?;
            if let Some(member) = workers.get(load.rank.worker) {
                member.host.tell(Input::Load(LoadReport {
                    rank: load.rank,
                    active_decode_blocks: load.active_decode_blocks,
                    active_prefill_tokens: load.active_prefill_tokens,
                    kv_used_blocks: load.used_blocks,
                    waiting: None,
                    asked: clock.now(),
                }));
            }
        }
        Topic::ActiveSequences => {
            for event in SequenceEvent::list_from_value(&value)? {
                take_sequence(&event, workers);
            }
        }
        _ => {}
    }
    Ok(())
}

/// A worker's own word that a prompt is computed. What routers say to each other is not for us.
fn take_sequence(event: &SequenceEvent, workers: &WorkerRouters) {
    if event.change != SequenceChange::PrefillCompleted || event.router != event.rank.worker.0 {
        return;
    }
    let id = RequestId::parse(&event.request);
    if let (Some(id), Some(member)) = (id, workers.get(event.rank.worker)) {
        member.host.tell(Input::Prefilled { id });
    }
}

/// A payload in either encoding: no MessagePack of ours begins as JSON does.
fn read(payload: &[u8]) -> Result<Value, DecodeError> {
    match payload.first() {
        Some(b'{' | b'[') => Value::from_json(payload),
        _ => Value::from_msgpack(payload),
    }
}
