//! A request's place on a worker.
//!
//! What always holds: a booking is freed exactly once, by its end or by its drop.

use std::sync::Arc;
use std::time::Duration;

use kvasir_router::{Input, Outcome, Placement, SessionCommand};
use kvasir_types::WorkerRank;

use crate::router_host::RouterHost;
use crate::view::{PendingPrediction, UsageReport};

/// A request's place on a worker. Dropped without an end, it counts as cancelled.
#[derive(Debug)]
pub struct Booking {
    host: Arc<RouterHost>,
    placement: Placement,
    /// Most tokens of the prompt that an engine can find cached.
    cacheable: u32,
    /// What was predicted of it, to be compared with what comes.
    prediction: Option<PendingPrediction>,
    finished: bool,
}

impl Booking {
    pub(crate) fn new(host: &Arc<RouterHost>, placement: Placement, cacheable: u32) -> Self {
        Self {
            host: Arc::clone(host),
            placement,
            cacheable,
            prediction: None,
            finished: false,
        }
    }

    /// Where the request goes.
    #[must_use]
    pub fn target(&self) -> WorkerRank {
        self.placement.target
    }

    /// What the router decided.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Tokens of the prompt that are expected in the worker's cache, as its engine would report them.
    #[must_use]
    pub fn predicted_tokens(&self) -> u32 {
        self.placement.predicted.total().min(self.cacheable)
    }

    /// The first tokens came.
    pub fn first_token(&self) {
        if let Some(prediction) = &self.prediction {
            prediction.answering(self.host.context().clock.now());
        }
        self.host.tell(Input::FirstToken {
            id: self.placement.id,
        });
    }

    /// Its prompt is taken for computed after `span`, though nothing has come by then.
    pub fn presume_prefill(&self, span: Duration) {
        self.host.presume_prefill(self.placement.id, span);
    }

    /// Keeps what was predicted until [`Self::reported`] compares it.
    pub(crate) fn predict(&mut self, prediction: PendingPrediction) {
        self.prediction = Some(prediction);
    }

    /// The engine said what it found.
    pub fn reported(&mut self, report: UsageReport) {
        if let Some(prediction) = self.prediction.take() {
            prediction.compare(self.host.context().clock.now(), report);
        }
    }

    /// `generated` tokens came until now.
    pub fn tokens(&self, generated: u32) {
        if let Some(prediction) = &self.prediction {
            prediction.answering(self.host.context().clock.now());
        }
        self.host.tell(Input::Tokens {
            id: self.placement.id,
            generated,
        });
    }

    /// The attempt ended.
    pub fn finish(mut self, outcome: Outcome) {
        self.end(outcome);
    }

    fn end(&mut self, outcome: Outcome) {
        if !std::mem::replace(&mut self.finished, true) {
            let (id, on) = (self.placement.id, Some(self.placement.target));
            self.host.tell(Input::Finished { id, on, outcome });
            if let SessionCommand::Close { id } = &self.placement.session {
                self.host.close_session(id, self.placement.target);
            }
        }
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.end(Outcome::Cancelled);
    }
}
