//! What watching a request needs: the clock, the series, the memory of outcomes, the tracer and new ids.

use std::sync::{Arc, OnceLock};

use kvasir_telemetry::{Clock, Metrics, Tracer};
use kvasir_types::RequestId;

use crate::http::ids::RequestIds;
use crate::observe::feed::Feed;
use crate::observe::meter::ModelMeters;
use crate::observe::outcomes::Outcomes;

/// Watches requests from their arrival to their end. One per process.
#[derive(Debug)]
pub(crate) struct Observer {
    clock: Clock,
    metrics: Metrics,
    outcomes: Outcomes,
    tracer: Option<Tracer>,
    ids: RequestIds,
    feed: Feed,
    /// Of requests for models that are not served; made when the first one comes.
    unknown: OnceLock<Arc<ModelMeters>>,
}

impl Observer {
    /// Remembers the outcomes of `outcomes_max` requests.
    pub(crate) fn new(
        clock: Clock,
        metrics: Metrics,
        outcomes_max: usize,
        tracer: Option<Tracer>,
    ) -> Self {
        Self {
            clock,
            metrics,
            outcomes: Outcomes::new(outcomes_max),
            tracer,
            ids: RequestIds::new(),
            feed: Feed::default(),
            unknown: OnceLock::new(),
        }
    }

    /// The time.
    pub(crate) fn clock(&self) -> Clock {
        self.clock
    }

    /// All series.
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// How the latest requests ended.
    pub(crate) fn outcomes(&self) -> &Outcomes {
        &self.outcomes
    }

    /// Who watches the dashboard.
    pub(crate) fn feed(&self) -> &Feed {
        &self.feed
    }

    /// Where spans go.
    pub(crate) fn tracer(&self) -> Option<&Tracer> {
        self.tracer.as_ref()
    }

    /// A new request's id.
    pub(crate) fn new_request_id(&self) -> RequestId {
        self.ids.next()
    }

    /// What is counted of requests for models that are not served.
    pub(crate) fn meters_of_unknown(&self) -> &Arc<ModelMeters> {
        let unknown = || ModelMeters::unknown(&self.metrics);
        self.unknown.get_or_init(unknown)
    }
}
