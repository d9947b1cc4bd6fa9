//! One router of a program, over the workers of one endpoint.
//!
//! Answers one question: how long does a router inside a program follow its workers? How it does is the host's
//! ([`kvasir_host::EndpointFleet`]), as in the server.
//!
//! What always holds: several routers in one process share nothing but the planes; a router that is dropped stops listening, and nobody
//! else notices.

use std::ops::Deref;
use std::sync::Arc;

use kvasir_discovery::EndpointName;
use kvasir_host::{EndpointFleet, EndpointFleetOptions, HostContext, RouterSetup};
use kvasir_tasks::Tasks;

use crate::{EmbedError, ProcessPlanes};

/// Workers of an endpoint, and the router that chooses among them; followed until it is dropped.
pub struct ProcessFleet {
    workers: Arc<EndpointFleet>,
    /// The planes that its workers are found and called by.
    pub planes: Arc<ProcessPlanes>,
    /// Those of this router alone.
    tasks: Tasks,
}

impl ProcessFleet {
    /// Follows an endpoint's workers from now on.
    pub async fn open(
        planes: &Arc<ProcessPlanes>,
        endpoint: EndpointName,
        block_size: u32,
        setup: RouterSetup,
    ) -> Result<Arc<Self>, EmbedError> {
        let tasks = Tasks::new();
        let context = HostContext {
            tasks: tasks.clone(),
            ..planes.context.clone()
        };
        let (clients, nats) = planes.clients().await?;
        let options = EndpointFleetOptions {
            endpoint,
            block_size,
            store: Arc::clone(&planes.store),
            clients: clients.clone(),
            nats: nats.clone(),
            log: None,
            replicas: None,
            threads: None,
            seed: setup.config.router_seed,
            setup,
        };
        Ok(Arc::new(Self {
            workers: EndpointFleet::start(&context, options),
            planes: Arc::clone(planes),
            tasks,
        }))
    }

    /// The workers and their router, for whoever sends to them.
    #[must_use]
    pub const fn workers(&self) -> &Arc<EndpointFleet> {
        &self.workers
    }
}

impl Deref for ProcessFleet {
    type Target = EndpointFleet;

    fn deref(&self) -> &EndpointFleet {
        &self.workers
    }
}

impl Drop for ProcessFleet {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}
