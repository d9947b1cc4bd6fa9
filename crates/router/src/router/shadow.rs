//! The shadow's choice for a placement that was just made.

use kvasir_placement::{
    FleetView, Gate, Overlap, PlacementRequest, SlotSet, TimePolicy, TimedRequest, WinReason,
};
use kvasir_types::{SequenceHash, WorkerRank};

use super::Router;
use super::place::placement_request;
use crate::request_settings::RequestSettings;
use crate::shadow::{Shadow, ShadowChoice};
use crate::{Arrival, Reason, ShadowStats};

impl Router {
    /// The shadow policy's name and what it has made of placements, if there is one.
    #[must_use]
    pub fn shadow(&self) -> Option<(&str, &ShadowStats)> {
        let shadow = self.shadow.as_ref()?;
        Some((&shadow.name, shadow.stats()))
    }

    /// Lets the shadow decide what was decided, before it is booked.
    pub(super) fn consult_shadow(
        &mut self,
        arrival: &Arrival,
        slot: u32,
        reason: Reason,
    ) -> Option<ShadowChoice> {
        let free = !matches!(reason, Reason::Pinned | Reason::Session);
        if !free || arrival.query_only || self.eligible.candidates.count() < 2 {
            return None;
        }
        let now = self.now;
        let mut shadow = self.shadow.take_if(|shadow| shadow.takes(now))?;
        let choice = self.shadow_choice(&mut shadow, arrival, slot);
        if let Some(choice) = &choice {
            shadow.record(choice);
        }
        self.shadow = Some(shadow);
        choice
    }

    fn shadow_choice(
        &mut self,
        shadow: &mut Shadow,
        arrival: &Arrival,
        live: u32,
    ) -> Option<ShadowChoice> {
        let settings = RequestSettings::of(&shadow.config, &arrival.overrides);
        let tracked = shadow.config.router_track_active_blocks && self.tracks_blocks();
        let sequence: &[SequenceHash] = if tracked { &arrival.sequence } else { &[] };
        let mut request = placement_request(arrival, sequence, &settings, Gate::default());
        let nothing = Overlap::none();
        if !shadow.config.needs_index() {
            request.prompt.overlap = &nothing;
        }
        let times = self.time.as_mut().or(self.judge.as_mut())?;
        let mut view = FleetView {
            now: self.now,
            fleet: &self.fleet,
            ledger: &mut self.ledger,
            scorer: &mut self.scorer,
        };
        times.sync(view.fleet, view.ledger);
        let osl = arrival.hints.osl;
        let eligible = &self.eligible.candidates;
        shadow.kept.clear();
        let (slot, won) = match shadow.config.counts_seconds() {
            true => {
                let timed = TimedRequest {
                    request: &request,
                    osl,
                };
                let kept = Some(&mut shadow.kept);
                times.choose(&mut view, &timed, eligible, &mut shadow.rng, kept)?
            }
            false => {
                let (rng, kept) = (&mut shadow.rng, &mut shadow.kept);
                let chosen = shadow
                    .policy
                    .choose(&mut view, &request, eligible, rng, kept);
                chosen?
            }
        };
        let rank = view.fleet.rank(slot)?;
        let live_rank = view.fleet.rank(live)?;
        let agrees = slot == live || equals(shadow, won, rank, live_rank);
        let mut choice = ShadowChoice {
            rank,
            disagrees: !agrees,
            regret_s: 0.0,
        };
        if choice.disagrees {
            // What the cost really is, whatever the shadow makes of caches.
            let settings = RequestSettings::of(&self.config, &arrival.overrides);
            let request = placement_request(arrival, &arrival.sequence, &settings, Gate::default());
            choice.regret_s = regret(times, &mut view, shadow, &request, (osl, live, slot))?;
        }
        Some(choice)
    }
}

/// Whether the live choice is one of those among which the shadow drew.
fn equals(shadow: &Shadow, won: WinReason, rank: WorkerRank, live: WorkerRank) -> bool {
    let cost = |of: WorkerRank| {
        let found = shadow.kept.iter().find(|kept| kept.rank == of);
        found.map(|kept| kept.terms.cost)
    };
    matches!(won, WinReason::Tie { .. }) && cost(live).is_some() && cost(live) == cost(rank)
}

/// What the live choice costs beyond the shadow's, in seconds of the time model.
fn regret(
    times: &TimePolicy,
    view: &mut FleetView<'_>,
    shadow: &mut Shadow,
    request: &PlacementRequest<'_>,
    (osl, live, other): (Option<u32>, u32, u32),
) -> Option<f32> {
    let pair = &mut shadow.pair;
    pair.copy_from(&SlotSet::default());
    pair.set(live, true);
    pair.set(other, true);
    let timed = TimedRequest { request, osl };
    let kept = &mut shadow.kept;
    times.choose(view, &timed, pair, &mut shadow.rng, Some(kept))?;
    let cost = |slot: u32| {
        let rank = view.fleet.rank(slot);
        let found = kept.iter().find(|kept| Some(kept.rank) == rank);
        found.map(|kept| kept.terms.cost)
    };
    Some((cost(live)? - cost(other)?) as f32).filter(|regret| regret.is_finite())
}
