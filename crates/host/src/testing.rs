//! Surroundings and a router for tests.

use std::sync::Arc;

use kvasir_index::IndexOptions;
use kvasir_router::{RouterConfig, RouterMode};
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, MetricOptions, Metrics};

use crate::{HostContext, HostOptions, RouterHost};

/// Surroundings of their own.
pub(crate) fn context() -> HostContext {
    HostContext {
        clock: Clock::new(),
        metrics: Metrics::new(&MetricOptions::default()).unwrap(),
        tasks: Tasks::new(),
    }
}

/// A router without workers.
pub(crate) fn host(context: &HostContext) -> Arc<RouterHost> {
    let config = RouterConfig {
        router_mode: RouterMode::Kv,
        ..RouterConfig::default()
    };
    let options = HostOptions::new(config, IndexOptions::default());
    RouterHost::start(&Arc::from("m"), options, context)
}
