//! Kubernetes, from the options.

use kvasir_config::{Settings, keys};
use kvasir_discovery::{
    KubernetesOptions, KubernetesOptionsError, KubernetesStore, PodIdentity, PodPort, PodSelector,
};
use kvasir_frontend::Fleet;
use kvasir_tasks::Tasks;

use crate::wiring::{self, BadConfig, Failure};

/// The store in the API server; what cannot be used is said with the option that names it.
pub(crate) fn store(settings: &Settings, tasks: &Tasks) -> Result<KubernetesStore, Failure> {
    let name = settings.get(keys::POD_NAME);
    let uid = settings.get(keys::POD_UID);
    let pod = name.zip(uid).map(|(name, uid)| PodIdentity { name, uid });
    let store = KubernetesStore::new(options(settings), pod, tasks);
    store.map_err(|error| {
        let option = match error {
            KubernetesOptionsError::NoServer(_) => "--discovery-backend kubernetes",
            _ => "--kubeconfig",
        };
        BadConfig(format!("{option}: {error}")).into()
    })
}

fn options(settings: &Settings) -> KubernetesOptions {
    let host = settings.get(keys::KUBERNETES_SERVICE_HOST);
    let port = settings.get(keys::KUBERNETES_SERVICE_PORT);
    KubernetesOptions {
        kubeconfig: settings.get(keys::KUBECONFIG),
        context: settings.get(keys::KUBE_CONTEXT),
        namespace: settings.get(keys::KUBE_NAMESPACE),
        service: host.map(|host| (host, port)),
        ..KubernetesOptions::default()
    }
}

/// Lets a fleet follow the pods that `--worker-selector` names.
pub(crate) fn follow_pods(
    fleet: &Fleet,
    settings: &Settings,
    tasks: &Tasks,
) -> Result<(), Failure> {
    let Some(labels) = settings.get(keys::WORKER_SELECTOR) else {
        return Ok(());
    };
    let store = KubernetesStore::new(options(settings), None, tasks)
        .map_err(|error| BadConfig(format!("--worker-selector {labels}: {error}")))?;
    let port = settings.get(keys::WORKER_PORT);
    let port = port.map(|port| PodPort::parse(&port));
    let pods = store.watch_pods(PodSelector { labels, port });
    fleet.follow_pods(pods, wiring::worker_key(settings)?);
    Ok(())
}
