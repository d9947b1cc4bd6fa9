//! Where records are kept, by the options.

use std::path::PathBuf;
use std::sync::Arc;

use kvasir_config::{DiscoveryBackend, Settings, keys};
use kvasir_discovery::{
    EtcdOptions, EtcdOptionsError, EtcdStore, FileStore, KubernetesOptions, KubernetesOptionsError,
    KubernetesStore, MemStore, Namespaces, PodIdentity, Store,
};
use kvasir_tasks::Tasks;

use crate::SetupError;

/// The folder of `file` discovery in the temporary directory, where `--file-kv` names none.
const FILE_KV: &str = "dynamo_store_kv";

/// A store, and the option that says where it is.
pub type NamedStore = (Arc<dyn Store>, &'static str);

/// Where workers are looked for; none if all are named.
pub fn store(settings: &Settings, tasks: &Tasks) -> Result<Option<NamedStore>, SetupError> {
    let store: NamedStore = match settings.get(keys::DISCOVERY_BACKEND) {
        DiscoveryBackend::File => (
            Arc::new(FileStore::new(file_kv(settings), tasks)),
            "--file-kv",
        ),
        DiscoveryBackend::Mem => (Arc::new(MemStore::new()), "--discovery-backend"),
        DiscoveryBackend::Etcd => {
            let store = EtcdStore::new(etcd_options(settings), tasks);
            let bad = |error: EtcdOptionsError| match &error {
                EtcdOptionsError::BadEndpoint(_) => format!("--etcd-endpoints: {error}"),
                EtcdOptionsError::BadFile { .. } => format!("--etcd-auth-*: {error}"),
            };
            let store = store.map_err(|error| SetupError::Option(bad(error)))?;
            (Arc::new(store), "--etcd-endpoints")
        }
        DiscoveryBackend::Kubernetes => {
            let store = kubernetes_store(settings, tasks)?;
            (Arc::new(store), "--kubeconfig or --kube-namespace")
        }
        DiscoveryBackend::Static => return Ok(None),
    };
    Ok(Some(store))
}

fn etcd_options(settings: &Settings) -> EtcdOptions {
    let user = settings.get(keys::ETCD_AUTH_USERNAME);
    let password = settings.get(keys::ETCD_AUTH_PASSWORD).unwrap_or_default();
    let certificate = settings.get(keys::ETCD_AUTH_CLIENT_CERT);
    EtcdOptions {
        endpoints: settings.get(keys::ETCD_ENDPOINTS),
        user: user.map(|user| (user, password)),
        authority: settings.get(keys::ETCD_AUTH_CA),
        identity: certificate.zip(settings.get(keys::ETCD_AUTH_CLIENT_KEY)),
        lease_ttl: settings.get(keys::ETCD_LEASE_TTL),
    }
}

fn file_kv(settings: &Settings) -> PathBuf {
    let named = settings.get(keys::FILE_KV);
    named.unwrap_or_else(|| std::env::temp_dir().join(FILE_KV))
}

/// The store in the API server; what cannot be used is said with the option that names it.
fn kubernetes_store(settings: &Settings, tasks: &Tasks) -> Result<KubernetesStore, SetupError> {
    let name = settings.get(keys::POD_NAME);
    let uid = settings.get(keys::POD_UID);
    let pod = name.zip(uid).map(|(name, uid)| PodIdentity { name, uid });
    let store = KubernetesStore::new(kubernetes_options(settings), pod, tasks);
    store.map_err(|error| {
        let option = match error {
            KubernetesOptionsError::NoServer(_) => "--discovery-backend kubernetes",
            _ => "--kubeconfig",
        };
        SetupError::Option(format!("{option}: {error}"))
    })
}

/// How the API server is reached.
#[must_use]
pub fn kubernetes_options(settings: &Settings) -> KubernetesOptions {
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

/// Whose workers count.
#[must_use]
pub fn namespaces(settings: &Settings) -> Namespaces {
    match (
        settings.get(keys::NAMESPACE_PREFIX),
        settings.get(keys::NAMESPACE),
    ) {
        (Some(prefix), _) => Namespaces::Prefix(prefix),
        (None, Some(name)) => Namespaces::One(name),
        (None, None) => Namespaces::All,
    }
}
