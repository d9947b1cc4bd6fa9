//! Kubernetes, from the options.

use kvasir_config::{Settings, keys};
use kvasir_discovery::{KubernetesStore, PodPort, PodSelector};
use kvasir_frontend::Fleet;
use kvasir_planes::kubernetes_options;
use kvasir_tasks::Tasks;

use crate::wiring::{self, BadConfig, Failure};

/// Lets a fleet follow the pods that `--worker-selector` names.
pub(crate) fn follow_pods(
    fleet: &Fleet,
    settings: &Settings,
    tasks: &Tasks,
) -> Result<(), Failure> {
    let Some(labels) = settings.get(keys::WORKER_SELECTOR) else {
        return Ok(());
    };
    let store = KubernetesStore::new(kubernetes_options(settings), None, tasks)
        .map_err(|error| BadConfig(format!("--worker-selector {labels}: {error}")))?;
    let port = settings.get(keys::WORKER_PORT);
    let port = port.map(|port| PodPort::parse(&port));
    let pods = store.watch_pods(PodSelector { labels, port });
    fleet.follow_pods(pods, wiring::worker_key(settings)?);
    Ok(())
}
