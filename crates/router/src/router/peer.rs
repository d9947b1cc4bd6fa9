//! What replicas say of their requests, and what they are told of ours.

use std::collections::BTreeSet;

use kvasir_placement::Booking;
use kvasir_types::RequestId;

use super::{FreedCapacity, Router};
use crate::peers::Peers;
use crate::{Observation, Output, PeerChange, PeerEvent, PeerRecall, ReplicaId};

impl Router {
    pub(super) fn peer(
        &mut self,
        from: ReplicaId,
        event: &PeerEvent,
        recalled: bool,
        out: &mut Vec<Output>,
    ) {
        let key = Peers::key(from, event.id);
        match &event.change {
            PeerChange::Add { .. } => {
                if !(recalled && self.peers.has_ended(key)) {
                    self.peer_booked(from, key, event, out);
                }
            }
            PeerChange::PrefillCompleted => self.first_token(key, out),
            PeerChange::Free => match self.ledger.slot_of(key) {
                Some(_) => self.free(key, true, out),
                None => self.peers.ended_early(key),
            },
        }
    }

    fn peer_booked(
        &mut self,
        from: ReplicaId,
        key: RequestId,
        event: &PeerEvent,
        out: &mut Vec<Output>,
    ) {
        let PeerChange::Add {
            sequence,
            prefill_tokens,
            prefill_duration,
            osl,
        } = &event.change
        else {
            return;
        };
        let Some(slot) = self.fleet.slot(event.target) else {
            return;
        };
        match self.ledger.slot_of(key) {
            // Told again, as to one that asks.
            Some(here) if here == slot => return,
            // The end of its first attempt was not heard.
            Some(_) => self.free(key, false, out),
            None => {}
        }
        let is_peer = from != ReplicaId::HOST;
        if is_peer && !self.peers.has_room(from) {
            let refused = Observation::PeerRefused { replica: from };
            return out.push(Output::Observe(refused));
        }
        let blocks = sequence.len() as u32;
        let isl_tokens = blocks.saturating_mul(self.config.kv_cache_block_size);
        let isl_tokens = isl_tokens.max(*prefill_tokens);
        let cached = isl_tokens.saturating_sub(*prefill_tokens);
        self.goes_on(sequence, cached / self.config.kv_cache_block_size.max(1));
        let times = self.time.as_ref().or(self.judge.as_ref());
        let learned = times.and_then(|t| t.others_prompt(slot, *prefill_tokens, cached));
        let (said, counts) = (*prefill_duration, self.time.is_some());
        let booking = Booking {
            sequence: sequence.clone(),
            unnamed_blocks: 0,
            shares: true,
            isl_tokens,
            prefill_tokens: *prefill_tokens,
            prefill_duration: match counts {
                true => learned.or(said),
                false => said.or(learned),
            },
            decays: counts || said.is_some(),
            osl: *osl,
            silent: false,
        };
        if self.ledger.book(self.now, key, slot, &booking) {
            if is_peer {
                self.peers.booked(from, key);
            }
            self.admission.booked(self.now, slot);
        }
        self.load_changed(slot, out);
    }

    /// A replica is gone: nobody will say when its requests end.
    pub(super) fn peer_gone(&mut self, replica: ReplicaId, out: &mut Vec<Output>) {
        for key in self.peers.forget(replica) {
            self.free(key, false, out);
        }
        self.freed = FreedCapacity::Anything;
    }

    /// A replica has said all that it has under way on some workers: what was heard of before it was asked, and is not in it, has ended.
    pub(super) fn peer_recalled(&mut self, recall: &PeerRecall, out: &mut Vec<Output>) {
        let named = recall
            .requests
            .iter()
            .map(|id| Peers::key(recall.from, *id));
        let named: BTreeSet<RequestId> = named.collect();
        for key in self.peers.of(recall.from) {
            let slot = self.ledger.slot_of(key);
            let rank = slot.and_then(|slot| self.fleet.rank(slot));
            let is_spoken_of = rank.is_some_and(|rank| recall.workers.contains(&rank.worker));
            let booked = self.ledger.booked_at(key);
            let is_old = booked.is_some_and(|booked| booked < recall.asked);
            if is_spoken_of && is_old && !named.contains(&key) {
                self.free(key, false, out);
            }
        }
    }

    /// Tells replicas what was booked here.
    pub(super) fn tell_booked(
        &mut self,
        id: RequestId,
        slot: u32,
        booking: &Booking,
        out: &mut Vec<Output>,
    ) {
        let Some(target) = self.fleet.rank(slot) else {
            return;
        };
        let told = self.peers.add(id, target, booking);
        out.extend(told.map(|event| Output::Tell(Box::new(event))));
    }

    /// Tells replicas what became of a booking, if it is one of ours.
    pub(super) fn tell(&mut self, id: RequestId, change: PeerChange, out: &mut Vec<Output>) {
        let told = self.peers.note(id, change);
        out.extend(told.map(|event| Output::Tell(Box::new(event))));
    }

    /// What is booked here and has not ended, as peers were told it (`router-replica-sync`); in no order.
    #[must_use]
    pub fn in_flight(&self) -> Vec<PeerEvent> {
        self.peers.in_flight()
    }

    /// The replicas that have booked something, and how many of their bookings have not ended.
    pub fn replicas(&self) -> impl Iterator<Item = (ReplicaId, usize)> {
        self.peers.replicas()
    }
}
