//! Reservations: bookings in the router's ledger under the names that clients give them.
//!
//! What always holds: a reservation that is freed, or whose worker left, or of which nobody spoke for too long, weighs nothing.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError};

use kvasir_host::Booking;
use kvasir_router::{Input, Outcome, PeerChange, PeerEvent};
use kvasir_types::{RequestId, SequenceHash, WorkerRank};
use serde::{Deserialize, Serialize};

use super::selections::{Selection, Selections};
use super::{SelectGroup, Selector};
use crate::api::Answer;
use crate::group::{GroupKey, is_name};
use crate::reading::Hashes;

/// Reservations at once.
const RESERVATIONS_MAX: usize = 1 << 20;
/// Reservations beyond twice those that are booked, before the ones that expired are forgotten.
const STALE_MAX: usize = 1024;

/// One reservation.
pub(super) struct Reservation {
    group: Arc<SelectGroup>,
    id: RequestId,
    target: WorkerRank,
    /// Blocks of its answer so far.
    output_blocks: u32,
    /// Of one that the router chose; one whose place the client named has none.
    booking: Option<Booking>,
}

/// A reservation of an earlier selection, or one whose place is named.
#[derive(Deserialize)]
pub(super) struct ReserveAsk {
    selection_id: String,
    model_name: String,
    #[serde(default = "crate::group::default_group")]
    routing_group: String,
    worker_id: Option<u64>,
    #[serde(default)]
    dp_rank: u32,
    sequence_hashes: Option<Hashes>,
    isl_tokens: Option<u32>,
    effective_prefill_tokens: Option<u32>,
    track_prefill_tokens: Option<bool>,
    expected_output_tokens: Option<u32>,
}

/// One more block of an answer.
#[derive(Default, Deserialize)]
pub(super) struct OutputBlock {
    decay_fraction: Option<f64>,
}

#[derive(Serialize)]
struct Reserved<'s> {
    selection_id: &'s str,
    model_name: &'s str,
    routing_group: &'s str,
    worker_id: u64,
    dp_rank: u32,
    endpoint: String,
}

impl Reservation {
    fn is_booked(&self) -> bool {
        let id = self.id;
        let rank = self.group.model.host.ask(|router| router.rank_of(id));
        rank.is_some()
    }

    fn tell(&self, change: PeerChange) {
        let (id, target) = (self.id, self.target);
        let event = PeerEvent { id, target, change };
        self.group.model.host.tell(Input::by_host(event));
    }
}

impl Selector {
    pub(super) fn selections(&self) -> MutexGuard<'_, Selections> {
        self.selections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn reservations(&self) -> MutexGuard<'_, HashMap<String, Reservation>> {
        self.reservations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a name is free for a reservation.
    pub(super) fn check_free(&self, name: &str) -> Result<(), Answer> {
        let mut reservations = self.reservations();
        if reservations.get(name).is_some_and(Reservation::is_booked) {
            return Err(Answer::error(
                409,
                format_args!("reservation {name} already exists"),
            ));
        }
        let booked = || {
            let groups = self.groups();
            let booked = groups
                .values()
                .map(|group| group.model.host.ask(|router| router.booked()));
            booked.sum::<usize>()
        };
        let count = reservations.len();
        if count > STALE_MAX && count.is_power_of_two() && count > 2 * booked() {
            reservations.retain(|_, reservation| reservation.is_booked());
        }
        match reservations.len() < RESERVATIONS_MAX {
            true => Ok(()),
            false => Err(Answer::error(
                503,
                format_args!("there are {RESERVATIONS_MAX} reservations already"),
            )),
        }
    }

    /// Keeps what the router booked.
    pub(super) fn keep(
        &self,
        name: &str,
        group: Arc<SelectGroup>,
        booking: Booking,
    ) -> Result<(), Answer> {
        let placed = booking.placement();
        let (id, target) = (placed.id, placed.target);
        let reservation = Reservation {
            group,
            id,
            target,
            output_blocks: 0,
            booking: Some(booking),
        };
        let mut reservations = self.reservations();
        if reservations.get(name).is_some_and(Reservation::is_booked) {
            return Err(Answer::error(
                409,
                format_args!("reservation {name} already exists"),
            ));
        }
        reservations.insert(name.to_owned(), reservation);
        Ok(())
    }

    /// Books what was selected before, or where the client says.
    pub(super) fn reserve(&self, ask: &ReserveAsk) -> Result<Answer, Answer> {
        let name = &ask.selection_id;
        if !is_name(name) {
            return Err(Answer::error(
                400,
                "selection_id has 1 to 256 bytes without control characters",
            ));
        }
        let selection = match ask.worker_id {
            Some(worker) => self.explicit(ask, worker)?,
            None => self.selected(ask)?,
        };
        self.check_free(name)?;
        let group = selection.group;
        let reservation = Reservation {
            group: Arc::clone(&group),
            id: self.next_id(),
            target: selection.target,
            output_blocks: 0,
            booking: None,
        };
        let change = PeerChange::Add {
            sequence: selection.sequence,
            prefill_tokens: selection.prefill_tokens,
            prefill_duration: None,
            osl: selection.osl,
        };
        self.tell_peers(&group, (name, selection.target), &change);
        reservation.tell(change);
        let answer = Answer::json(
            201,
            &Reserved {
                selection_id: name,
                model_name: &group.key.model_name,
                routing_group: &group.key.routing_group,
                worker_id: selection.target.worker.0,
                dp_rank: selection.target.rank.0,
                endpoint: group.endpoint_of(selection.target.worker),
            },
        );
        self.reservations().insert(name.clone(), reservation);
        Ok(answer)
    }

    fn key(ask: &ReserveAsk) -> GroupKey {
        GroupKey {
            model_name: ask.model_name.clone(),
            routing_group: ask.routing_group.clone(),
        }
    }

    /// What was selected under this name, which can be used once.
    fn selected(&self, ask: &ReserveAsk) -> Result<Selection, Answer> {
        let (key, name) = (Self::key(ask), &ask.selection_id);
        let found = self.selections().take(self.context.clock.now(), name);
        found.filter(|found| found.group.key == key).ok_or_else(|| {
            let text = format!(
                "no pending selection {name} for {key} (expired, already used, or never selected)"
            );
            Answer::error(404, text)
        })
    }

    fn explicit(&self, ask: &ReserveAsk, worker: u64) -> Result<Selection, Answer> {
        let key = Self::key(ask);
        let group = self.groups().get(&key).cloned();
        let group = group
            .ok_or_else(|| Answer::error(503, format_args!("no schedulable workers for {key}")))?;
        let target = WorkerRank::new(worker, ask.dp_rank);
        let host = &group.model.host;
        if host.ask(|router| router.fleet().slot(target)).is_none() {
            return Err(Answer::error(
                404,
                format_args!("worker {worker} has no dp_rank {}", ask.dp_rank),
            ));
        }
        let isl = ask.isl_tokens.unwrap_or(0);
        let prefill = ask.effective_prefill_tokens.unwrap_or(isl);
        if prefill > isl {
            let text = "effective_prefill_tokens must not exceed isl_tokens";
            return Err(Answer::error(400, text));
        }
        let sequence = ask.sequence_hashes.clone().unwrap_or_default();
        Ok(Selection {
            target,
            sequence: sequence.named(SequenceHash),
            prefill_tokens: if ask.track_prefill_tokens == Some(false) {
                0
            } else {
                prefill
            },
            osl: ask.expected_output_tokens,
            group,
        })
    }

    pub(super) fn prefill_complete(&self, name: &str) -> Result<Answer, Answer> {
        let reservations = self.reservations();
        let reservation = reservations.get(name).ok_or_else(|| not_found(name))?;
        match &reservation.booking {
            Some(booking) => booking.first_token(),
            None => reservation.tell(PeerChange::PrefillCompleted),
        }
        let change = PeerChange::PrefillCompleted;
        self.tell_peers(&reservation.group, (name, reservation.target), &change);
        Ok(Answer::done(200))
    }

    pub(super) fn output_block(&self, name: &str, asked: &OutputBlock) -> Result<Answer, Answer> {
        let decay = asked.decay_fraction.unwrap_or(1.0);
        if !(0.0..=1.0).contains(&decay) {
            return Err(Answer::error(400, "decay_fraction must be between 0 and 1"));
        }
        let mut reservations = self.reservations();
        let reservation = reservations.get_mut(name).ok_or_else(|| not_found(name))?;
        reservation.output_blocks = reservation.output_blocks.saturating_add(1);
        let model = &reservation.group.model;
        let generated = reservation.output_blocks.saturating_mul(model.block_size);
        let id = reservation.id;
        model.host.tell(Input::Tokens { id, generated });
        Ok(Answer::done(200))
    }

    pub(super) fn free(&self, name: &str) -> Result<Answer, Answer> {
        let freed = self.reservations().remove(name);
        let mut freed = freed.ok_or_else(|| not_found(name))?;
        let tokens = freed
            .output_blocks
            .saturating_mul(freed.group.model.block_size);
        match freed.booking.take() {
            Some(booking) => booking.finish(Outcome::Completed {
                output_tokens: tokens,
            }),
            None => freed.tell(PeerChange::Free),
        }
        self.tell_peers(&freed.group, (name, freed.target), &PeerChange::Free);
        Ok(Answer::done(200))
    }
}

fn not_found(name: &str) -> Answer {
    Answer::error(404, format_args!("reservation {name} not found"))
}
