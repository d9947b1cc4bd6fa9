//! The events of the stream: all that is known at first, then what changed, once a second.
//!
//! What always holds: an event is encoded once, however many watch; the events of the last half minute are kept for those
//! who come back, in at most [`RING_BYTES_MAX`]; what a viewer has is what it was told in its first event and those after.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::TICK;
use super::fleet::{self, FleetHits};
use super::latest::LatestDecisions;
use crate::App;
use crate::observe::feed::Join;
use crate::observe::traffic::{COLUMNS, STEP, STEPS, TrafficHistory, TrafficReading};

/// Events that are kept for those who come back.
const RING_MAX: usize = 30;
/// Bytes of them.
const RING_BYTES_MAX: usize = 4 << 20;

/// Makes the events.
#[derive(Debug, Default)]
pub(super) struct Encoder {
    history: TrafficHistory,
    viewers: Vec<mpsc::Sender<Bytes>>,
    /// The number of the last event.
    number: u64,
    ring: VecDeque<(u64, Bytes)>,
    /// Whether what follows is what viewers know.
    is_current: bool,
    fleet: BTreeMap<String, String>,
    left_out: usize,
    models: String,
    latest: LatestDecisions,
    /// What came of the latest requests.
    hits: FleetHits,
}

impl Encoder {
    /// A second has passed.
    pub(super) fn tick(&mut self, app: &App) {
        self.observe(app);
        self.viewers.retain(|viewer| !viewer.is_closed());
        if self.viewers.is_empty() {
            // Nobody may have to be told what changed: the next viewer is told everything.
            self.is_current = false;
            self.ring.clear();
            return;
        }
        let event = self.changes(app);
        self.number += 1;
        let event = framed("tick", &self.id(app), &event);
        self.ring.push_back((self.number, event.clone()));
        while self.ring.len() > RING_MAX || bytes_of(&self.ring) > RING_BYTES_MAX {
            self.ring.pop_front();
        }
        self.viewers.retain(|viewer| {
            let taken = viewer.try_send(event.clone());
            if matches!(taken, Err(mpsc::error::TrySendError::Full(_))) {
                app.http().limit_reached("dashboard_events");
            }
            taken.is_ok()
        });
    }

    /// One more viewer: it gets what it has missed, or everything.
    pub(super) fn join(&mut self, app: &App, join: &Join) {
        let missed = join.after.as_deref().and_then(|id| self.missed(app, id));
        let events = match missed {
            Some(events) => events,
            None => vec![self.everything(app)],
        };
        if events
            .into_iter()
            .all(|event| join.to.try_send(event).is_ok())
        {
            self.viewers.push(join.to.clone());
        }
    }

    /// The events after this one, if all of them are kept.
    fn missed(&self, app: &App, id: &str) -> Option<Vec<Bytes>> {
        let (epoch, number) = id.split_once('-')?;
        let last: u64 = number.parse().ok()?;
        if !self.is_current || epoch != self.epoch(app) || last > self.number {
            return None;
        }
        let oldest = self
            .ring
            .front()
            .map_or(self.number + 1, |(number, _)| *number);
        let after = self.ring.iter().filter(|(number, _)| *number > last);
        (last + 1 >= oldest).then(|| after.map(|(_, event)| event.clone()).collect())
    }

    /// Reads traffic into the history.
    fn observe(&mut self, app: &App) {
        let mut read = TrafficReading::take(app.metrics());
        let mut routers = app.models().of_routers();
        routers.extend(app.prefill_pools().of_routers());
        let held = |router: &kvasir_router::Router| router.queued().0 as u64;
        read.all.held = routers.iter().map(|model| model.host.ask(held)).sum();
        self.history.observe(app.clock().now(), read);
    }

    /// The first event of a viewer.
    fn everything(&mut self, app: &App) -> Bytes {
        if !self.is_current {
            self.is_current = true;
            self.observe(app);
            self.latest.restart();
            self.fleet.clear();
            self.models.clear();
            self.changes(app);
        }
        let rows: Vec<&str> = self.fleet.values().map(String::as_str).collect();
        let head = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "at": app.clock().unix_millis(app.clock().now()),
            "started": app.clock().unix_millis(kvasir_types::Time::ZERO),
            "tick_ms": TICK.as_millis() as u64,
            "step_ms": STEP.as_millis() as u64,
            "steps": STEPS,
            "columns": COLUMNS,
            "can_act": !app.options().admin_token.is_empty(),
            "draining": app.http().is_leaving(),
            "history": self.history.rows(),
            "traffic": self.history.latest(),
            "decisions": self.latest.all(),
            "left_out": self.left_out,
        });
        let text = head.to_string();
        let text = text.strip_suffix('}').unwrap_or(&text);
        let models = &self.models;
        let event = format!(
            "{text},\"models\":{models},\"fleet\":[{}]}}",
            rows.join(",")
        );
        framed("hello", &self.id(app), &event)
    }

    /// What changed since the last event.
    fn changes(&mut self, app: &App) -> String {
        let (decided, skipped) = self.latest.decided(app);
        let ended = self.latest.ended(app, |_| ());
        self.hits.clear();
        let hits = &mut self.hits;
        app.observer()
            .outcomes()
            .since(0, |ended| fleet::add_hit(hits, ended));
        let (rows, left_out) = fleet::rows(app, &self.hits);
        let changed: Vec<&str> = rows
            .iter()
            .filter(|(key, row)| self.fleet.get(*key) != Some(row))
            .map(|(_, row)| row.as_str())
            .collect();
        let gone: Vec<&String> = self
            .fleet
            .keys()
            .filter(|key| !rows.contains_key(*key))
            .collect();
        let models = models(app).to_string();
        let head = json!({
            "at": app.clock().unix_millis(app.clock().now()),
            "draining": app.http().is_leaving(),
            "traffic": self.history.latest(),
            "gone": gone,
            "left_out": left_out,
            "decisions": decided,
            "skipped": skipped,
            "ended": ended,
        });
        let text = head.to_string();
        let text = text.strip_suffix('}').unwrap_or(&text);
        let mut event = format!("{text},\"fleet\":[{}]", changed.join(","));
        if models != self.models {
            event.push_str(",\"models\":");
            event.push_str(&models);
        }
        event.push('}');
        (self.fleet, self.left_out, self.models) = (rows, left_out, models);
        event
    }

    /// The name of the last event: ids of an earlier process are told apart.
    fn id(&self, app: &App) -> String {
        format!("{}-{}", self.epoch(app), self.number)
    }

    fn epoch(&self, app: &App) -> String {
        format!("{:x}", app.clock().unix_millis(kvasir_types::Time::ZERO))
    }
}

fn bytes_of(ring: &VecDeque<(u64, Bytes)>) -> usize {
    ring.iter().map(|(_, event)| event.len()).sum()
}

/// An event of the stream; JSON has no line ends.
fn framed(name: &str, id: &str, data: &str) -> Bytes {
    format!("event: {name}\nid: {id}\ndata: {data}\n\n").into()
}

/// What is served, and how requests for it are routed.
fn models(app: &App) -> Value {
    let row = |model: &std::sync::Arc<crate::models::ServedModel>| {
        let specs = model.specs();
        let pool = app.prefill_pool(&model.name);
        let prefill_workers = pool.map_or(0, |pool| pool.specs().len());
        model.host.ask(|router| {
            let (config, thresholds) = (router.config(), router.thresholds());
            json!({
                "name": &*model.name,
                "router": &**model.host.name(),
                "mode": config.router_mode.name(),
                "policy": config.router_policy.name(),
                "block_size": model.block_size,
                "context_length": model.context_length,
                "tokens_from": model.tokens_from(),
                "workers": specs.len(),
                "prefill_workers": prefill_workers,
                "sessions": router.sessions(),
                "held": router.queued().0,
                "weights": {
                    "overlap_score_credit": config.router_kv_overlap_score_credit,
                    "overlap_score_credit_decay": config.router_kv_overlap_score_credit_decay,
                    "prefill_load_scale": config.router_prefill_load_scale,
                    "decode_active_request_weight": config.router_decode_active_request_weight,
                },
                "thresholds": {
                    "active_decode_blocks_threshold": thresholds.active_decode_blocks,
                    "active_prefill_tokens_threshold": thresholds.active_prefill_tokens,
                    "active_prefill_tokens_threshold_frac": thresholds.active_prefill_tokens_frac,
                },
            })
        })
    };
    app.models().all().iter().map(row).collect()
}
