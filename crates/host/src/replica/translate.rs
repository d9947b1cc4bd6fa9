//! What replicas say, between the words of the router and those of the event plane.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use kvasir_router::{PeerChange, PeerEvent, ReplicaId, SessionEvent};
use kvasir_telemetry::Clock;
use kvasir_types::{RequestId, Time, WorkerRank};
use kvasir_wire::native::{PrefillHint, SequenceChange, SequenceEvent, SessionBinding};

/// The id of a request that its frontend named so; most are UUIDs.
pub(crate) fn request_id(name: &str) -> RequestId {
    RequestId::parse(name).unwrap_or_else(|| {
        let half = |which: u8| {
            let mut hasher = DefaultHasher::new();
            (which, name).hash(&mut hasher);
            u128::from(hasher.finish())
        };
        RequestId(half(0) << 64 | half(1))
    })
}

/// What the router is told of a peer's request.
#[must_use]
pub fn heard(event: &SequenceEvent) -> PeerEvent {
    let change = match &event.change {
        SequenceChange::Added {
            blocks,
            track_prefill,
            expected_output_tokens,
            prefill,
        } => {
            let prefill = prefill.filter(|_| *track_prefill);
            let tokens = prefill.map_or(0, |hint| hint.tokens);
            let blocks = blocks.as_deref().unwrap_or_default();
            PeerChange::Add {
                sequence: blocks.into(),
                prefill_tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
                prefill_duration: prefill.and_then(|hint| hint.duration),
                osl: expected_output_tokens.and_then(|tokens| u32::try_from(tokens).ok()),
            }
        }
        SequenceChange::PrefillCompleted => PeerChange::PrefillCompleted,
        SequenceChange::Freed => PeerChange::Free,
    };
    PeerEvent {
        id: request_id(&event.request),
        target: event.rank,
        change,
    }
}

/// What peers are told of a request of ours.
pub(crate) fn told(event: &PeerEvent, router: ReplicaId) -> SequenceEvent {
    let change = match &event.change {
        PeerChange::Add {
            sequence,
            prefill_tokens,
            prefill_duration,
            osl,
        } => SequenceChange::Added {
            blocks: (!sequence.is_empty()).then(|| sequence.to_vec()),
            track_prefill: true,
            expected_output_tokens: osl.map(u64::from),
            prefill: (*prefill_tokens > 0).then_some(PrefillHint {
                tokens: u64::from(*prefill_tokens),
                duration: *prefill_duration,
            }),
        },
        PeerChange::PrefillCompleted => SequenceChange::PrefillCompleted,
        PeerChange::Free => SequenceChange::Freed,
    };
    SequenceEvent {
        request: event.id.to_string(),
        rank: event.target,
        router: router.0,
        lora: None,
        change,
    }
}

/// What the router is told of a session that a peer uses.
pub(crate) fn heard_session(binding: &SessionBinding, clock: &Clock) -> SessionEvent {
    // One from before this process began is older than any of ours.
    let began = clock.unix_nanos(Time::ZERO);
    SessionEvent::PeerBound {
        id: binding.session.as_str().into(),
        target: binding.rank,
        since: Time::from_nanos(binding.sequence.saturating_sub(began)),
    }
}

/// What peers are told of a session.
pub(crate) fn told_session(
    id: &Arc<str>,
    target: WorkerRank,
    since: Time,
    router: ReplicaId,
    clock: &Clock,
) -> SessionBinding {
    SessionBinding {
        session: id.as_ref().to_owned(),
        rank: target,
        sequence: clock.unix_nanos(since),
        writer: router.0,
    }
}
