//! What the router wants done.

use std::sync::Arc;
use std::time::Duration;

use kvasir_types::{RequestId, Time, WorkerId, WorkerRank};

use crate::{PeerEvent, PredictedTokens, ReplicaId, RouteError};

/// Something for the host to do or to count.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// A request has its worker. Not always the request of the input: capacity that one frees may let
    /// another go.
    Send(Placement),
    /// A request waits. A `Send` or `Refuse` will follow.
    Queued {
        /// The request.
        id: RequestId,
        /// Requests waiting, this one included.
        depth: u32,
    },
    /// A request gets no worker.
    Refuse {
        /// The request.
        id: RequestId,
        /// Why.
        error: RouteError,
    },
    /// A waiting request's overlap is old: look it up again and answer with
    /// [`Input::Refreshed`](crate::Input::Refreshed). It keeps its place meanwhile.
    Refresh {
        /// The request.
        id: RequestId,
    },
    /// An engine-backed session expired: tell its engine, in the background.
    CloseSession {
        /// The session.
        id: Arc<str>,
        /// Where it is.
        target: WorkerRank,
    },
    /// Something to tell other replicas, with `router-replica-sync`.
    Tell(Box<PeerEvent>),
    /// Something to count or to say.
    Observe(Observation),
}

/// A request has its worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// The request.
    pub id: RequestId,
    /// Where it goes.
    pub target: WorkerRank,
    /// Whether something was booked, so that `Finished` must follow. `false` only for `query_only`.
    pub booked: bool,
    /// Whether the host should record it in the approximate or predicted index before dispatch.
    pub record: bool,
    /// Effective blocks the worker holds, rounded.
    pub overlap_blocks: u32,
    /// Prompt tokens the worker need not compute.
    pub cached_tokens: u32,
    /// Prompt tokens that the engine should find cached, with what requests under way change.
    pub predicted: PredictedTokens,
    /// `cached_tokens` of the candidate that holds most of the prompt.
    pub best_cached_tokens: u32,
    /// Effective blocks that candidate holds and this worker does not.
    pub overlap_lost: f64,
    /// How long it waited in the queue.
    pub queued: Duration,
    /// What to do about its session.
    pub session: SessionCommand,
}

/// What the host owes the engine about a session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SessionCommand {
    /// Nothing.
    #[default]
    None,
    /// Before dispatch open it there; on success send
    /// [`SessionEvent::Opened`](crate::SessionEvent::Opened); on failure the request goes out, and nothing is bound.
    Open {
        /// The session.
        id: Arc<str>,
        /// Its timeout as the client asked for it.
        timeout: Duration,
    },
    /// After generation close it there.
    Close {
        /// The session.
        id: Arc<str>,
    },
}

/// Something to count or to say. Never needs an answer.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Observation {
    /// A worker went over its busy thresholds on all ranks, or came back.
    Busy {
        /// The worker.
        worker: WorkerId,
        /// Whether it is busy now.
        busy: bool,
    },
    /// A worker was hidden after a fault, or is shown again.
    Down {
        /// The worker.
        worker: WorkerId,
        /// Whether it is hidden now.
        down: bool,
    },
    /// A booking nobody has spoken of for too long was freed.
    Expired {
        /// The request.
        id: RequestId,
        /// Where it was.
        target: WorkerRank,
    },
    /// A session was forgotten early because there are too many.
    SessionEvicted {
        /// The session.
        id: Arc<str>,
    },
    /// A session was bound, or is used with `router-replica-sync`; replicas tell their peers.
    SessionBound {
        /// The session.
        id: Arc<str>,
        /// Where.
        target: WorkerRank,
        /// Since when.
        since: Time,
    },
    /// A booking of another replica is not kept: there are too many, of it or of replicas.
    PeerRefused {
        /// The replica.
        replica: ReplicaId,
    },
}
