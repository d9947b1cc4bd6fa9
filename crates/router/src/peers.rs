//! What other replicas of this router have booked, and what they are to be told of ours.
//!
//! Answers one question: whose is a booking? Requests of two replicas may have one id, so a peer's booking stands in the ledger under a
//! key made of both. Where replicas are told, what they were told of each own request is kept until it ends: one that comes late asks
//! for it.
//!
//! What always holds: at most [`REPLICAS_MAX`] replicas with [`PEER_BOOKINGS_MAX`] bookings each; a booking of a peer is never told on.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvasir_placement::{Booking, FastMap};
use kvasir_types::{RequestId, SequenceHash, WorkerRank};

use crate::{PeerChange, PeerEvent, ReplicaId};

/// Replicas whose bookings are kept.
pub const REPLICAS_MAX: usize = 256;
/// Bookings that are kept of one replica.
pub const PEER_BOOKINGS_MAX: usize = 100_000;
/// Ends that came before the bookings that they end.
const EARLY_ENDS_MAX: usize = 8192;

/// An own request, as peers were told of it.
#[derive(Clone, Debug)]
struct OwnBooking {
    target: WorkerRank,
    sequence: Arc<[SequenceHash]>,
    prefill_tokens: u32,
    prefill_duration: Option<Duration>,
    osl: Option<u32>,
    computed: bool,
}

impl OwnBooking {
    fn added(&self) -> PeerChange {
        PeerChange::Add {
            sequence: Arc::clone(&self.sequence),
            prefill_tokens: match self.computed {
                true => 0,
                false => self.prefill_tokens,
            },
            prefill_duration: self.prefill_duration.filter(|_| !self.computed),
            osl: self.osl,
        }
    }
}

/// The replicas, as one of them knows them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Peers {
    /// Whether peers are told.
    tells: bool,
    own: FastMap<RequestId, OwnBooking>,
    /// Whose a booking is, by its key.
    owners: FastMap<RequestId, ReplicaId>,
    /// How many bookings each replica has.
    replicas: BTreeMap<ReplicaId, usize>,
    /// Keys of requests that ended before they were heard of, oldest first.
    early_ends: VecDeque<RequestId>,
}

impl Peers {
    pub(crate) fn new(tells: bool) -> Self {
        Self {
            tells,
            ..Self::default()
        }
    }

    /// Under which id a peer's request stands in the ledger.
    pub(crate) fn key(replica: ReplicaId, id: RequestId) -> RequestId {
        if replica == ReplicaId::HOST {
            return id;
        }
        // Odd, so that no two replicas share a pattern; one more, so that none has the pattern of our own.
        const SPREAD: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
        RequestId(id.0 ^ (u128::from(replica.0) + 1).wrapping_mul(SPREAD))
    }

    /// The keys under which a request of this id may stand, beside its own.
    pub(crate) fn keys_of(&self, id: RequestId) -> Vec<RequestId> {
        let replicas = self.replicas.keys();
        replicas.map(|replica| Self::key(*replica, id)).collect()
    }

    /// Whether a replica may book one more.
    pub(crate) fn has_room(&self, replica: ReplicaId) -> bool {
        match self.replicas.get(&replica) {
            Some(bookings) => *bookings < PEER_BOOKINGS_MAX,
            None => self.replicas.len() < REPLICAS_MAX,
        }
    }

    /// A replica has booked something.
    pub(crate) fn booked(&mut self, replica: ReplicaId, key: RequestId) {
        if self.owners.insert(key, replica).is_none() {
            *self.replicas.entry(replica).or_default() += 1;
        }
    }

    /// A request ended of which nothing was known.
    pub(crate) fn ended_early(&mut self, key: RequestId) {
        if self.early_ends.len() >= EARLY_ENDS_MAX {
            self.early_ends.pop_front();
        }
        self.early_ends.push_back(key);
    }

    /// Whether a request is known to have ended before it was heard of.
    pub(crate) fn has_ended(&self, key: RequestId) -> bool {
        self.early_ends.contains(&key)
    }

    /// The keys of all that a replica has booked; it is forgotten.
    pub(crate) fn forget(&mut self, replica: ReplicaId) -> Vec<RequestId> {
        self.replicas.remove(&replica);
        let gone = self.owners.extract_if(|_, owner| *owner == replica);
        gone.map(|(key, _)| key).collect()
    }

    /// Notes an own booking; what peers are told of it.
    pub(crate) fn add(
        &mut self,
        id: RequestId,
        target: WorkerRank,
        booking: &Booking,
    ) -> Option<PeerEvent> {
        if !self.tells {
            return None;
        }
        let own = OwnBooking {
            target,
            sequence: Arc::clone(&booking.sequence),
            prefill_tokens: booking.prefill_tokens,
            prefill_duration: booking.prefill_duration.filter(|_| booking.decays),
            osl: booking.osl,
            computed: false,
        };
        let change = own.added();
        self.own.insert(id, own);
        Some(PeerEvent { id, target, change })
    }

    /// Notes what became of a booking; what peers are told of it, if it is an own one and that is news.
    pub(crate) fn note(&mut self, id: RequestId, change: PeerChange) -> Option<PeerEvent> {
        if let Some(replica) = self.owners.get(&id).copied() {
            if change == PeerChange::Free {
                self.owners.remove(&id);
                if let Some(bookings) = self.replicas.get_mut(&replica) {
                    *bookings = bookings.saturating_sub(1);
                }
            }
            return None;
        }
        let target = match change {
            PeerChange::Free => self.own.remove(&id)?.target,
            _ => {
                let own = self.own.get_mut(&id)?;
                if std::mem::replace(&mut own.computed, true) {
                    return None;
                }
                own.target
            }
        };
        Some(PeerEvent { id, target, change })
    }

    /// Whether a booking is another replica's.
    pub(crate) fn is_peers(&self, key: RequestId) -> bool {
        self.owners.contains_key(&key)
    }

    /// The keys of all that a replica has booked.
    pub(crate) fn of(&self, replica: ReplicaId) -> Vec<RequestId> {
        let theirs = self.owners.iter().filter(|(_, owner)| **owner == replica);
        theirs.map(|(key, _)| *key).collect()
    }

    /// The own bookings, as a peer is told that asks for them.
    pub(crate) fn in_flight(&self) -> Vec<PeerEvent> {
        let event = |(id, own): (&RequestId, &OwnBooking)| PeerEvent {
            id: *id,
            target: own.target,
            change: own.added(),
        };
        self.own.iter().map(event).collect()
    }

    /// The replicas of which something was booked, and how much is.
    pub(crate) fn replicas(&self) -> impl Iterator<Item = (ReplicaId, usize)> {
        self.replicas.iter().map(|(id, bookings)| (*id, *bookings))
    }
}
