//! The choice for one request, its booking and its record.

use std::time::Duration;

use kvasir_placement::{
    Booking, Candidate, CostTerms, FleetView, Gate, PlacementRequest, Prompt, ScoringContext,
    TimedRequest, WinReason,
};
use kvasir_types::{SequenceHash, Time, WorkerRank};

use super::{PinnedRank, Router, cached_tokens};
use crate::filter;
use crate::predicted::RankInFlight;
use crate::request_settings::RequestSettings;
use crate::{
    Arrival, Decision, Output, Placement, PredictedTokens, Reason, RouteError, SessionCommand,
};

/// A request as the policy sees it.
pub(super) fn placement_request<'a>(
    arrival: &'a Arrival,
    sequence: &'a [SequenceHash],
    settings: &RequestSettings,
    gate: Gate,
) -> PlacementRequest<'a> {
    PlacementRequest {
        prompt: Prompt {
            isl_tokens: arrival.isl_tokens,
            overlap: &arrival.overlap,
            sequence,
            shares: settings.shares,
            preferred_taints: &arrival.constraints.preferred_taints,
        },
        weights: settings.weights,
        temperature: settings.temperature,
        gate,
    }
}

impl Router {
    /// Chooses, books, records and sends, or says why not. `entered` is when the request began to wait.
    pub(super) fn place(
        &mut self,
        arrival: &Arrival,
        pin: Option<PinnedRank>,
        entered: Option<Time>,
        out: &mut Vec<Output>,
    ) {
        let pin = self.still_bound(arrival, pin);
        let filled = self.fill(arrival, pin);
        self.place_filled(arrival, pin, filled, entered, out);
    }

    /// A session's worker may leave while a request waits for it: then the request is as free as any.
    pub(super) fn still_bound(
        &self,
        arrival: &Arrival,
        pin: Option<PinnedRank>,
    ) -> Option<PinnedRank> {
        let follows = |rank| self.takes_new(rank) && self.serves_model(arrival, rank);
        pin.filter(|pin| !pin.by_session || follows(pin.rank))
    }

    /// Whether a rank is there and its worker not on its way out.
    pub(super) fn takes_new(&self, rank: WorkerRank) -> bool {
        let member = self.fleet.member(rank.worker);
        member.is_some_and(|m| !m.is_draining()) && self.fleet.slot(rank).is_some()
    }

    /// Whether the model that a request asks for is served there.
    pub(super) fn serves_model(&self, arrival: &Arrival, rank: WorkerRank) -> bool {
        let slot = self.fleet.slot(rank);
        slot.is_some_and(|slot| filter::serves(&self.fleet, arrival, slot))
    }

    /// The same, given who is eligible.
    pub(super) fn place_filled(
        &mut self,
        arrival: &Arrival,
        pin: Option<PinnedRank>,
        filled: Result<(), RouteError>,
        entered: Option<Time>,
        out: &mut Vec<Output>,
    ) {
        let settings = RequestSettings::of(&self.config, &arrival.overrides);
        let chosen = filled.and_then(|()| self.choose(arrival, pin, &settings));
        match chosen {
            Ok((slot, reason)) => self.send(arrival, slot, reason, &settings, entered, out),
            Err(error) => {
                let error = self.with_retry_after(error);
                self.record_refusal(arrival, &error, entered, true);
                let id = arrival.id;
                out.push(Output::Refuse { id, error });
            }
        }
    }

    pub(super) fn choose(
        &mut self,
        arrival: &Arrival,
        pin: Option<PinnedRank>,
        settings: &RequestSettings,
    ) -> Result<(u32, Reason), RouteError> {
        let tracked = self.tracks_blocks();
        let sequence: &[SequenceHash] = if tracked { &arrival.sequence } else { &[] };
        let request = placement_request(arrival, sequence, settings, Gate::default());
        let mut view = FleetView {
            now: self.now,
            fleet: &self.fleet,
            ledger: &mut self.ledger,
            scorer: &mut self.scorer,
        };
        self.kept.clear();
        if let Some(time) = &mut self.time {
            time.sync(view.fleet, view.ledger);
            let osl = arrival.hints.osl;
            let timed = TimedRequest {
                request: &request,
                osl,
            };
            let eligible = match pin {
                Some(_) => &self.eligible.routable,
                None => &self.eligible.candidates,
            };
            let kept = Some(&mut self.kept);
            let choice = time.choose(&mut view, &timed, eligible, &mut self.rng, kept);
            let (slot, won) = choice.ok_or_else(|| filter::no_endpoints(&self.fleet, arrival))?;
            return Ok((slot, self.reason(pin, won)));
        }
        if let (Some(pin), Some(slot)) = (pin, self.eligible.pinned()) {
            if self.policy.weighs_load() {
                let context = ScoringContext {
                    now: view.now,
                    weights: &request.weights,
                    prompt: &request.prompt,
                    fleet: view.fleet,
                };
                let terms = view.scorer.one(&context, slot, view.ledger);
                let rank = pin.rank;
                self.kept.push(Candidate {
                    rank,
                    terms,
                    ..Candidate::default()
                });
            }
            return Ok((slot, self.reason(Some(pin), WinReason::Rule)));
        }
        let candidates = &self.eligible.candidates;
        let choice = self.policy.choose(
            &mut view,
            &request,
            candidates,
            &mut self.rng,
            &mut self.kept,
        );
        let (slot, won) = choice.ok_or_else(|| filter::no_endpoints(&self.fleet, arrival))?;
        Ok((slot, self.reason(pin, won)))
    }

    fn reason(&self, pin: Option<PinnedRank>, won: WinReason) -> Reason {
        match (pin, won) {
            (Some(pin), _) if pin.by_session => Reason::Session,
            (Some(_), _) => Reason::Pinned,
            _ if self.eligible.is_last_resort() => Reason::LastResort,
            (_, WinReason::LowestCost) => Reason::LowestCost,
            (_, WinReason::Tie { among }) => Reason::Tie { among },
            (_, WinReason::Sampled { probability }) => Reason::Sampled { probability },
            (_, WinReason::Rule) => Reason::Rule,
        }
    }

    pub(super) fn send(
        &mut self,
        arrival: &Arrival,
        slot: u32,
        reason: Reason,
        settings: &RequestSettings,
        entered: Option<Time>,
        out: &mut Vec<Output>,
    ) {
        let target = self.fleet.rank(slot).unwrap_or_default();
        let terms = self.terms_of(target);
        let cached = cached_tokens(terms.cached_blocks, arrival.isl_tokens, &self.config);
        let most = match reason {
            Reason::LowestCost | Reason::Tie { .. } | Reason::Sampled { .. } => {
                self.scorer.most_held().max(terms.cached_blocks)
            }
            _ => terms.cached_blocks,
        };
        let predicted = self.predict(arrival, slot, cached, settings);
        let shadow = self.consult_shadow(arrival, slot, reason);
        self.record(arrival, settings, target, reason, entered, predicted);
        if let Some(decision) = self.ring.latest().filter(|_| shadow.is_some()) {
            decision.shadow = shadow;
        }
        let mut sent = Placement {
            id: arrival.id,
            target,
            booked: false,
            record: false,
            overlap_blocks: terms.cached_blocks.round() as u32,
            cached_tokens: cached,
            predicted,
            best_cached_tokens: cached_tokens(most, arrival.isl_tokens, &self.config),
            overlap_lost: most - terms.cached_blocks,
            queued: entered.map_or(Duration::ZERO, |at| self.now - at),
            session: SessionCommand::None,
        };
        if !arrival.query_only {
            self.placed_timed(arrival, (slot, terms.cached_blocks), reason);
            sent.booked = true;
            sent.record = self.config.records_decisions();
            self.book(arrival, slot, cached, settings, out);
            sent.session = self.bind_session(arrival, target, out);
            self.load_changed(slot, out);
        }
        out.push(Output::Send(sent));
    }

    /// What the engine should find cached: `indexed` tokens, with what requests under way there change.
    fn predict(
        &mut self,
        arrival: &Arrival,
        slot: u32,
        indexed: u32,
        settings: &RequestSettings,
    ) -> PredictedTokens {
        let known = self.tracks_blocks() && self.policy.weighs_load();
        if !known || !settings.shares {
            let in_flight = RankInFlight::default();
            return PredictedTokens::new(indexed, self.config.kv_cache_block_size, in_flight);
        }
        let member = self.fleet.member_of(slot);
        let mut depth = 0;
        self.ledger.depths(&arrival.sequence, |found, at| {
            if found == slot {
                depth = depth.max(at);
            }
            true
        });
        let in_flight = RankInFlight {
            depth,
            active_blocks: self.ledger.load(slot, self.now).active_blocks,
            total_blocks: member.and_then(|member| member.spec.kv_total_blocks),
        };
        PredictedTokens::new(indexed, self.config.kv_cache_block_size, in_flight)
    }

    fn terms_of(&self, rank: WorkerRank) -> CostTerms {
        let found = self.kept.iter().find(|found| found.rank == rank);
        found.map_or_else(CostTerms::default, |found| found.terms)
    }

    fn book(
        &mut self,
        arrival: &Arrival,
        slot: u32,
        cached: u32,
        settings: &RequestSettings,
        out: &mut Vec<Output>,
    ) {
        // Thresholds, gauges and pages count in every mode, whether or not the choice asks for load.
        let prefill = match settings.weights.track_prefill_tokens {
            true => arrival.isl_tokens - cached,
            false => 0,
        };
        let modelled = match (prefill, self.fleet.rank(slot)) {
            (1.., Some(rank)) if self.time.is_none() => {
                self.model.predict(rank.worker, prefill, cached)
            }
            _ => None,
        };
        // What a shadow's judge counts in seconds changes no charge.
        let decays = modelled.is_some() || self.time.is_some();
        let predicted = modelled.or_else(|| match prefill {
            0 => None,
            _ => self.own_time(arrival, slot, cached, settings),
        });
        let shadowed = self.shadow.as_ref().is_some_and(|s| s.weighs_load());
        let weighs_load = self.policy.weighs_load() || shadowed;
        let booking = Booking {
            sequence: match weighs_load && self.tracks_blocks() {
                true => arrival.sequence.clone(),
                false => self.nothing.clone(),
            },
            unnamed_blocks: match !weighs_load && self.tracks_blocks() {
                true => arrival.isl_tokens / self.config.kv_cache_block_size.max(1),
                false => 0,
            },
            shares: settings.shares,
            isl_tokens: arrival.isl_tokens,
            prefill_tokens: prefill,
            prefill_duration: predicted,
            decays,
            osl: arrival.hints.osl,
            silent: arrival.silent,
        };
        let booked = self.ledger.book(self.now, arrival.id, slot, &booking);
        self.admission.booked(self.now, slot);
        debug_assert!(booked, "duplicates were refused before");
        self.tell_booked(arrival.id, slot, &booking, out);
    }

    fn record(
        &mut self,
        arrival: &Arrival,
        settings: &RequestSettings,
        target: WorkerRank,
        reason: Reason,
        entered: Option<Time>,
        predicted: PredictedTokens,
    ) {
        let Some(decision) = self.ring.record(arrival.id) else {
            return;
        };
        begin(decision, arrival, entered, self.now, &self.config);
        decision.predicted = predicted;
        decision.prefill_load_scale = settings.weights.prefill_load_scale;
        decision.temperature = settings.temperature;
        decision.eligible = self.eligible.candidates.count();
        decision.winner = Some((target, reason));
        std::mem::swap(&mut decision.candidates, &mut self.kept);
        self.eligible
            .excluded(&self.fleet, arrival, &mut decision.excluded);
    }

    /// `filtered` says whether the filters were run for this very request.
    pub(super) fn record_refusal(
        &mut self,
        arrival: &Arrival,
        error: &RouteError,
        entered: Option<Time>,
        filtered: bool,
    ) {
        let Some(decision) = self.ring.record(arrival.id) else {
            return;
        };
        begin(decision, arrival, entered, self.now, &self.config);
        decision.error = Some(error.clone());
        if filtered {
            self.eligible
                .excluded(&self.fleet, arrival, &mut decision.excluded);
        }
    }
}

/// Fills what every record has; keeps the memory of the one it replaces.
fn begin(
    decision: &mut Decision,
    arrival: &Arrival,
    entered: Option<Time>,
    now: Time,
    config: &crate::RouterConfig,
) {
    let mut candidates = std::mem::take(&mut decision.candidates);
    let mut excluded = std::mem::take(&mut decision.excluded);
    candidates.clear();
    excluded.count = 0;
    excluded.named.clear();
    *decision = Decision {
        id: arrival.id,
        model: arrival.model.clone(),
        failed_before: u32::try_from(arrival.failed.len()).unwrap_or(u32::MAX),
        resumed: arrival.resumed,
        cache_unknown: arrival.cache_unknown,
        at: now,
        queued: entered.map_or(Duration::ZERO, |at| now - at),
        mode: config.router_mode,
        isl_tokens: arrival.isl_tokens,
        request_blocks: arrival
            .isl_tokens
            .div_ceil(config.kv_cache_block_size.max(1)),
        candidates,
        excluded,
        ..Decision::default()
    };
}
