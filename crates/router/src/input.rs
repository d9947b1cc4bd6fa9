//! What can happen to the router.

use std::sync::Arc;
use std::time::Duration;

use kvasir_placement::{Constraints, Hints, Overlap, Overrides, Pin, WorkerSpec};
use kvasir_types::{RequestId, SequenceHash, Time, WorkerId, WorkerRank};

/// Something that happened. Unknown ids are no-ops everywhere: news may come late.
#[derive(Clone, Debug)]
pub enum Input {
    /// A worker is there, or is back: a fault mark on it is lifted, and it is not on its way out.
    Joined(WorkerSpec),
    /// A worker's facts changed. Ranks that are gone lose their bookings; the others keep theirs.
    Updated(WorkerSpec),
    /// A worker is on its way out: it gets nothing new, its bookings end as they would.
    Draining(WorkerId),
    /// A worker is gone. Its bookings are forgotten.
    Left(WorkerId),
    /// A request wants a worker: a new one, or the same id again after its attempt was `Finished`.
    Arrived(Box<Arrival>),
    /// The answer to [`Output::Refresh`](crate::Output::Refresh).
    Refreshed {
        /// The waiting request.
        id: RequestId,
        /// What a new lookup found; `None` if it failed and the old answer stays.
        overlap: Option<Overlap>,
    },
    /// The first item *with token ids* came back: the prompt is computed.
    FirstToken {
        /// The request.
        id: RequestId,
    },
    /// The prompt is likely computed, though nothing has come. Says nothing about the worker.
    Prefilled {
        /// The request.
        id: RequestId,
    },
    /// An item came back. Needed only with `router-track-output-blocks`; also keeps a long stream from
    /// expiring.
    Tokens {
        /// The request.
        id: RequestId,
        /// Tokens generated until now, in all.
        generated: u32,
    },
    /// An attempt ended, whichever way, or the client of a waiting request left. Frees what was booked.
    Finished {
        /// The request.
        id: RequestId,
        /// Where the attempt ran; a booking elsewhere is then left alone. `None` frees whatever is there.
        on: Option<WorkerRank>,
        /// How it ended.
        outcome: Outcome,
    },
    /// A worker says how loaded it is.
    Load(LoadReport),
    /// The host has asked a worker whether it is well.
    Probed(Probe),
    /// The host has asked a worker for one token, and got it, or cannot ask it so. Told of one that
    /// [`Router::awaits_token`](crate::Router::awaits_token); as long as it fails, nothing is told.
    Generated(TokenProbe),
    /// Busy thresholds change. Takes effect with the next load report, as bookings change, or on `Tick`.
    Thresholds(ThresholdUpdate),
    /// News about a session's state in its engine.
    Session(SessionEvent),
    /// Another router replica booked or freed something.
    Peer {
        /// Which one.
        from: ReplicaId,
        /// What it did.
        event: Box<PeerEvent>,
        /// Whether it was asked what it has under way: an end that was heard before outweighs it.
        recalled: bool,
    },
    /// Another router replica has said all that it has under way.
    PeerRecalled(Box<PeerRecall>),
    /// Another router replica is gone, and what it had booked with it.
    PeerGone(ReplicaId),
    /// Only time has passed; send one when [`Router::next_deadline`](crate::Router::next_deadline) is due.
    Tick,
}

impl Input {
    /// A booking that the host itself makes, or what became of it, under an id that no other request here has.
    #[must_use]
    pub fn by_host(event: PeerEvent) -> Self {
        Self::Peer {
            from: ReplicaId::HOST,
            event: Box::new(event),
            recalled: false,
        }
    }
}

/// A request that wants a worker.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// Its id, the same for all its attempts.
    pub id: RequestId,
    /// The model that it asks for, where workers of one router serve different ones; `None` suits all.
    pub model: Option<Arc<str>>,
    /// Tokens of the prompt; 0 is refused.
    pub isl_tokens: u32,
    /// What the index holds of it, looked up just before.
    pub overlap: Overlap,
    /// Chained hashes of its complete blocks, for load tracking; empty switches that off for it.
    pub sequence: Arc<[SequenceHash]>,
    /// A worker it must go to.
    pub pin: Pin,
    /// Workers it may go to.
    pub constraints: Constraints,
    /// What the client knows.
    pub hints: Hints,
    /// Settings of its own.
    pub overrides: Overrides,
    /// The session it belongs to.
    pub session: Option<SessionRequest>,
    /// The policy family or class it names (`x-dynamo-meta-policy-class`).
    pub policy_class: Option<Arc<str>>,
    /// Workers that failed it already, oldest first; not chosen again.
    pub failed: Vec<WorkerId>,
    /// Unless nobody else is left: then the one that failed it longest ago.
    pub again: bool,
    /// Who sends it can do without: no worker is asked that something speaks against.
    pub dispensable: bool,
    /// The last of those had begun to answer: another is to go on from there.
    pub resumed: bool,
    /// How the last of those failed.
    pub last_failure: Option<Outcome>,
    /// Its answer comes in one piece: no first token will be seen.
    pub silent: bool,
    /// Nobody could say what workers hold of its prompt: the index of another router did not answer.
    pub cache_unknown: bool,
    /// Only asks: nothing is booked, nothing is queued, the answer is immediate.
    pub query_only: bool,
}

impl Arrival {
    /// A plain request of `isl_tokens` prompt tokens of which nothing is cached or tracked.
    #[must_use]
    pub fn new(id: RequestId, isl_tokens: u32) -> Self {
        Self {
            id,
            model: None,
            isl_tokens,
            overlap: Overlap::none(),
            sequence: Arc::from([]),
            pin: Pin::default(),
            constraints: Constraints::default(),
            hints: Hints::default(),
            overrides: Overrides::default(),
            session: None,
            policy_class: None,
            failed: Vec::new(),
            again: false,
            dispensable: false,
            resumed: false,
            last_failure: None,
            silent: false,
            cache_unknown: false,
            query_only: false,
        }
    }
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The answer is complete.
    Completed {
        /// Tokens generated.
        output_tokens: u32,
    },
    /// The client left.
    Cancelled,
    /// The worker could not be reached, broke off or shut down: it is ejected for a while.
    Unreachable,
    /// The worker refused because it is full, or says so. Several in a row, while others serve, eject it:
    /// whoever refuses everything looks idle and would be asked first for ever.
    Overloaded,
    /// The worker answered with an error that says nothing about its health.
    Failed,
    /// The worker answered that it failed. That may be the request's fault: two in a row, or one that came faster than any answer did,
    /// eject it until it generates a token.
    Broken,
    /// Nothing was sent: this machine had no descriptor, port or memory left. It says nothing about the worker.
    NotSent,
}

/// What came of asking a worker whether it is well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The worker.
    pub worker: WorkerId,
    /// When it was asked: an answer outweighs only failures from before.
    pub asked: Time,
    /// Whether it is. If not, it is ejected until a probe says that it is.
    pub healthy: bool,
}

/// What came of asking a worker for one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenProbe {
    /// The worker.
    pub worker: WorkerId,
    /// When it was asked: an answer outweighs only failures from before.
    pub asked: Time,
    /// Whether it has a route that generates: if so it gave a token, if not it is ejected for a span that ends by itself.
    pub supported: bool,
}

/// How loaded a rank says it is. Absent figures leave what is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// The rank.
    pub rank: WorkerRank,
    /// Blocks that running requests hold, as its publisher counts them.
    pub active_decode_blocks: Option<u64>,
    /// Prompt tokens not yet computed.
    pub active_prefill_tokens: Option<u64>,
    /// KV blocks in use.
    pub kv_used_blocks: Option<u64>,
    /// Requests that wait in it to be computed.
    pub waiting: Option<u64>,
    /// When it was asked.
    pub asked: Time,
}

/// New busy thresholds. `None` leaves a threshold as it is, `Some(None)` switches it off.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ThresholdUpdate {
    /// `active-decode-blocks-threshold`.
    pub active_decode_blocks: Option<Option<f64>>,
    /// `active-prefill-tokens-threshold`.
    pub active_prefill_tokens: Option<Option<u64>>,
    /// `active-prefill-tokens-threshold-frac`.
    pub active_prefill_tokens_frac: Option<Option<f64>>,
}

/// What a request wants of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionRequest {
    /// The session's name.
    pub id: Arc<str>,
    /// What to do with it.
    pub action: SessionAction,
}

/// What to do with a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionAction {
    /// `session_control` without an action: follow the binding if there is one.
    Use,
    /// Remember where this request went.
    Bind {
        /// Forget it when unused for this long.
        timeout: Duration,
    },
    /// The engine opens a session there first; the binding comes with [`SessionEvent::Opened`].
    Open {
        /// Forget it when unused for this long.
        timeout: Duration,
    },
    /// Forget the binding; the engine closes its session after this request.
    Close,
    /// The session header: bind after the first dispatch that succeeds, for
    /// `router-session-affinity-ttl-secs`; ignored while that is unset.
    Header,
}

/// News about a session's state in its engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionEvent {
    /// The engine opened it: bind.
    Opened {
        /// The session.
        id: Arc<str>,
        /// Where.
        target: WorkerRank,
        /// Forget it when unused for this long.
        timeout: Duration,
    },
    /// The process before this one had bound it. A binding of our own stays.
    Inherited {
        /// The session.
        id: Arc<str>,
        /// Where.
        target: WorkerRank,
        /// Whether the engine holds a session, too.
        in_engine: bool,
        /// Whether the session header bound it.
        by_header: bool,
        /// Forget it when unused for this long.
        timeout: Duration,
    },
    /// A peer bound it, or uses it. Of two live bindings the older one counts, so that all replicas come to agree.
    PeerBound {
        /// The session.
        id: Arc<str>,
        /// Where.
        target: WorkerRank,
        /// Since when.
        since: Time,
    },
}

/// A replica of this router. Not a worker's id, though drawn from the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaId(pub u64);

impl ReplicaId {
    /// Not a replica: the host, whose requests stand under their own ids and count as those of this router.
    pub const HOST: Self = Self(u64::MAX);
}

/// What a replica did.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerEvent {
    /// Its request. Two replicas may have requests of one id: their bookings are two.
    pub id: RequestId,
    /// Where.
    pub target: WorkerRank,
    /// What.
    pub change: PeerChange,
}

/// All that a replica has under way on some workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRecall {
    /// Which replica.
    pub from: ReplicaId,
    /// When it was asked: what it began later may be missing here.
    pub asked: Time,
    /// The workers that it speaks of.
    pub workers: Vec<WorkerId>,
    /// Its requests.
    pub requests: Vec<RequestId>,
}

/// What a replica did with a request.
#[derive(Clone, Debug, PartialEq)]
pub enum PeerChange {
    /// It booked one.
    Add {
        /// Tracked blocks; empty if the peer tracks none.
        sequence: Arc<[SequenceHash]>,
        /// Prompt tokens booked; 0 if the peer tracks none.
        prefill_tokens: u32,
        /// How long it expects the prompt to take.
        prefill_duration: Option<Duration>,
        /// Tokens it expects to be generated.
        osl: Option<u32>,
    },
    /// Its prompt is computed.
    PrefillCompleted,
    /// It ended.
    Free,
}
