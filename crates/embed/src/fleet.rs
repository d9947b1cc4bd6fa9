//! One router of a program, over the workers of one endpoint.
//!
//! Answers one question: how long does a router inside a program follow its workers? How it does is the host's
//! ([`kvasir_host::EndpointFleet`]), as in the server.
//!
//! What always holds: several routers in one process share nothing but the planes; a router that is dropped stops listening, and nobody
//! else notices.

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::Arc;

use kvasir_config::keys;
use kvasir_discovery::EndpointName;
use kvasir_host::{
    EndpointFleet, EndpointFleetOptions, HostContext, IndexEndpoints, RemoteIndex,
    ReplicaAnnouncer, RouterSetup,
};
use kvasir_tasks::Tasks;
use tokio::sync::watch;

use crate::runtime::running;
use crate::sharing::chance;
use crate::{EmbedError, IndexServer, ProcessPlanes, Sharing, event_log, replica_carrier};

/// Workers of an endpoint, and the router that chooses among them; followed until it is dropped.
pub struct ProcessFleet {
    workers: Arc<EndpointFleet>,
    /// The planes that its workers are found and called by.
    pub planes: Arc<ProcessPlanes>,
    /// Those of this router alone.
    tasks: Tasks,
    /// Something is announced that has to be taken back.
    announces: bool,
}

impl ProcessFleet {
    /// Follows an endpoint's workers from now on.
    pub async fn open(
        planes: &Arc<ProcessPlanes>,
        endpoint: EndpointName,
        block_size: u32,
        mut setup: RouterSetup,
        sharing: Sharing,
    ) -> Result<Arc<Self>, EmbedError> {
        let tasks = Tasks::new();
        let context = HostContext {
            tasks: tasks.clone(),
            ..planes.context.clone()
        };
        let (clients, nats) = planes.clients().await?;
        let settings = planes.settings();
        setup.config.router_replica_sync = sharing.replicas;
        if sharing.remote_index {
            setup.remote_index = Some(RemoteIndex::new(&context, chance()));
        }
        let replicas = sharing.replicas.then(|| {
            let carrier = replica_carrier(settings, nats, &tasks);
            ReplicaAnnouncer::new(&context, Some(carrier), sharing.sessions)
        });
        let log = sharing.log.map(|reading| {
            let max_age = settings.get(keys::NATS_STREAM_MAX_AGE);
            event_log(reading, max_age, planes.store.coordination())
        });
        let records = !setup.config.router_kv_events;
        let options = EndpointFleetOptions {
            endpoint: endpoint.clone(),
            block_size,
            store: Arc::clone(&planes.store),
            clients: clients.clone(),
            nats: nats.clone(),
            log,
            replicas,
            threads: None,
            seed: setup.config.router_seed,
            setup,
        };
        let workers = EndpointFleet::start(&context, options);
        let fleet = Self {
            workers,
            planes: Arc::clone(planes),
            tasks,
            announces: sharing.announces(),
        };
        if sharing.serves_index {
            fleet.serve_index(endpoint, records, &context).await?;
        }
        if fleet.announces {
            planes.ends_with(&fleet.tasks);
        }
        Ok(Arc::new(fleet))
    }

    /// Lets other routers ask this one's index.
    async fn serve_index(
        &self,
        endpoint: EndpointName,
        records: bool,
        context: &HostContext,
    ) -> Result<(), EmbedError> {
        let (_, nats) = self.planes.clients().await?;
        let workers = Arc::downgrade(&self.workers);
        let find = move |model: &str| {
            let fleet = workers.upgrade()?;
            let is_served = fleet.serves(model);
            is_served.then(|| Arc::clone(&fleet.model.host))
        };
        let index = IndexEndpoints::new(context, records, find);
        let (server, host) = self.planes.server().await?;
        let (settings, store) = (self.planes.settings(), Arc::clone(&self.planes.store));
        let server = IndexServer::new(settings, index, store, server, (&host, nats), context);
        let (said, endpoints) = watch::channel(BTreeSet::from([endpoint]));
        server.start(endpoints);
        // One endpoint for good.
        drop(said);
        Ok(())
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
        // What was announced is taken back, on the process's own time.
        match running().filter(|_| self.announces) {
            Some((handle, process)) => {
                let tasks = self.tasks.clone();
                process.spawn_on(&handle, async move { ProcessPlanes::end_of(&tasks).await });
            }
            None => self.tasks.stop(),
        }
    }
}
