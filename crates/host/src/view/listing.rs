//! A cache view as operators see it: the workers listing and the metrics.

use std::collections::BTreeSet;

use kvasir_kv_events::Counts;
use kvasir_trust::{Cause, Finding, TrustLevel};
use serde_json::{Value, json};

use super::{CacheView, CacheViews};
use crate::meters::RouterMeters;

/// What goes wrong with a stream, and how often it did.
fn faults(counts: &Counts) -> [(&'static str, u64); 10] {
    [
        ("missed", counts.missed),
        ("repaired", counts.repaired),
        ("duplicate", counts.duplicates),
        ("stale", counts.stale),
        ("unreadable", counts.refused),
        ("restart", counts.restarts),
        ("replay_too_short", counts.replays_too_short),
        ("replay_failed", counts.recoveries_failed),
        ("block_size", counts.block_size_differs),
        ("orphan_dropped", counts.orphans_dropped),
    ]
}

/// Event sockets of some ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventSockets {
    /// Those that are connected.
    pub connected: u64,
    /// Those that are listened to and not connected now.
    pub away: u64,
}

impl CacheViews {
    /// Brings the metrics of a router's ranks up to date; what their event sockets are like.
    pub(crate) fn measure(&self, meters: &RouterMeters) -> EventSockets {
        let mut sockets = EventSockets::default();
        let mut without_events = BTreeSet::new();
        for view in self.all() {
            match view.measure() {
                Some(true) => sockets.connected += 1,
                Some(false) => sockets.away += 1,
                None if view.is_without_events() => {
                    without_events.insert(view.rank.worker);
                }
                None => {}
            }
        }
        meters.without_events(without_events.len());
        sockets
    }
}

impl CacheView {
    /// For the workers listing.
    #[must_use]
    pub fn row(&self) -> Value {
        let events = self.subscription().map(|subscription| {
            let snapshot = subscription.stream.snapshot();
            let (status, counts) = (snapshot.status, snapshot.status.counts);
            let found = faults(&counts).into_iter().filter(|(_, count)| *count > 0);
            let found: serde_json::Map<String, Value> = found
                .map(|(kind, count)| (kind.into(), count.into()))
                .collect();
            json!({
                "address": &*subscription.address,
                "connected": status.connected,
                "error": snapshot.fault.map(|fault| fault.to_string()),
                "recovering": status.recovering.map(|cause| format!("{cause:?}").to_lowercase()),
                "complete": status.exact,
                "sequence": status.cursor.map(|cursor| cursor.sequence),
                "batches": counts.batches,
                "delay_ms": self.event_delay().as_millis() as u64,
                "faults": found,
            })
        });
        let inner = self.lock();
        let (level, trust) = (inner.trust.level(), &inner.trust);
        let causes: serde_json::Map<String, Value> = trust
            .error_by_cause()
            .map(|(cause, part)| (cause.name().into(), part.into()))
            .collect();
        json!({
            "state": level.state.name(),
            "cause": level.cause.map(Cause::name),
            "advice": level.cause.map(Cause::advice),
            "credit": level.credit(),
            "error": trust.error(),
            "error_by_cause": causes,
            "answers": trust.samples(),
            "last_fault": inner.last_fault,
            "events": events,
        })
    }

    /// Brings its metrics up to date; whether its event socket is connected, if it has one.
    fn measure(&self) -> Option<bool> {
        let status = self
            .subscription()
            .map(|subscription| subscription.stream.read(|snapshot| snapshot.status));
        let mut inner = self.lock();
        if inner.gone {
            return None;
        }
        let (worker, rank) = (self.rank.worker.to_string(), self.rank.rank.to_string());
        let labels = [&*self.model, &worker, &rank];
        let metrics = self.metrics();
        if let Some(status) = status {
            let connected = if status.connected { 1.0 } else { 0.0 };
            metrics
                .worker_events_connected
                .with_label_values(&labels)
                .set(connected);
            let before = std::mem::replace(&mut inner.counted, status.counts);
            if self.by_cache {
                let batches = status.counts.batches.saturating_sub(before.batches);
                metrics.router_kv_zmq_ingress_batches_total.inc_by(batches);
            }
            for ((kind, now), (_, before)) in
                faults(&status.counts).into_iter().zip(faults(&before))
            {
                let labels = [labels[0], labels[1], labels[2], kind];
                let faults = metrics.kv_event_faults_total.with_label_values(&labels);
                faults.inc_by(now.saturating_sub(before));
            }
        }
        let trust = inner.trust.level();
        metrics
            .worker_cache_credit
            .with_label_values(&labels)
            .set(trust.credit());
        let state = |t: TrustLevel| [t.state.name(), t.cause.map_or("", Cause::name)];
        if let Some(shown) = inner.shown.replace(trust).filter(|shown| *shown != trust) {
            let [state, cause] = state(shown);
            let labels = [labels[0], labels[1], labels[2], state, cause];
            let _ = metrics.worker_cache_state.remove_label_values(&labels);
        }
        let [state, cause] = state(trust);
        let state = [labels[0], labels[1], labels[2], state, cause];
        metrics
            .worker_cache_state
            .with_label_values(&state)
            .set(1.0);
        for cause in CAUSES {
            let part = inner.trust.error_by_cause().find(|(c, _)| *c == cause);
            let labels = [labels[0], labels[1], labels[2], cause.name()];
            let error = metrics.worker_prediction_error.with_label_values(&labels);
            error.set(part.map_or(0.0, |(_, part)| part));
        }
        status.map(|status| status.connected)
    }

    /// Its worker has left: nothing more is judged, and its rows leave the metrics page.
    pub(super) fn leave(&self) {
        let mut inner = self.lock();
        inner.gone = true;
        self.shared.set(self.rank, None);
        self.foreign.forget(self.rank);
        let (worker, rank) = (self.rank.worker.to_string(), self.rank.rank.to_string());
        let labels = [&*self.model, &worker, &rank];
        let metrics = self.metrics();
        let _ = metrics.worker_cache_credit.remove_label_values(&labels);
        let _ = metrics.worker_events_connected.remove_label_values(&labels);
        for cause in CAUSES {
            let labels = [labels[0], labels[1], labels[2], cause.name()];
            let _ = metrics.worker_prediction_error.remove_label_values(&labels);
        }
        for finding in FINDINGS {
            let labels = [labels[0], labels[1], labels[2], finding.name()];
            let _ = metrics
                .worker_predictions_total
                .remove_label_values(&labels);
        }
        for (kind, _) in faults(&Counts::default()) {
            let labels = [labels[0], labels[1], labels[2], kind];
            let _ = metrics.kv_event_faults_total.remove_label_values(&labels);
        }
        if let Some(shown) = inner.shown.take() {
            let cause = shown.cause.map_or("", Cause::name);
            let labels = [labels[0], labels[1], labels[2], shown.state.name(), cause];
            let _ = metrics.worker_cache_state.remove_label_values(&labels);
        }
    }
}

/// What answers can show.
const FINDINGS: [Finding; 8] = [
    Finding::Right,
    Finding::Late,
    Finding::Wrong(Cause::EventsMissing),
    Finding::Wrong(Cause::EventsLate),
    Finding::Wrong(Cause::Tokenization),
    Finding::Wrong(Cause::OtherEngine),
    Finding::Wrong(Cause::SilentEviction),
    Finding::Wrong(Cause::Hybrid),
];
/// Causes that answers can show.
const CAUSES: [Cause; 6] = [
    Cause::EventsMissing,
    Cause::EventsLate,
    Cause::Tokenization,
    Cause::OtherEngine,
    Cause::SilentEviction,
    Cause::Hybrid,
];
