//! What one worker has announced in Kubernetes: the custom resource of its pod.
//!
//! The resource belongs to the pod, so that it goes with it. It is applied as a whole whenever a record changes, and again every
//! [`ASSERT_EVERY`], which costs the API server a comparison and brings back one that somebody deleted.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use http::Method;
use serde_json::{Map, Value, json};
use tokio::sync::Mutex as AsyncMutex;

use super::client::{ApiClient, ApiError, encode};
use super::join::section;
use super::{KubernetesStore, WORKER_GROUP, WORKER_KIND, WORKER_PLURAL};
use crate::record::{Bucket, Record, RecordKey};
use crate::store::{Lease, StoreError, StoreFuture};

/// Between two times that the resource is applied though nothing changed.
const ASSERT_EVERY: Duration = Duration::from_secs(60);
/// Before a resource that could not be applied is tried again.
const RETRY_EVERY: Duration = Duration::from_secs(1);
/// Who applies, in the words of Kubernetes: fields of the same manager that are not applied again go.
const FIELD_MANAGER: &str = "dynamo-worker";
/// Ids fit into the whole numbers that a float holds.
const ID_BITS: u64 = (1 << 53) - 1;

/// The pod that we are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodIdentity {
    /// Its name (`POD_NAME`).
    pub name: String,
    /// Its unique id (`POD_UID`).
    pub uid: String,
}

impl PodIdentity {
    /// The worker's id, which follows from the pod's name.
    #[must_use]
    pub fn instance_id(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.name.hash(&mut hasher);
        hasher.finish() & ID_BITS
    }
}

/// The records of one worker.
pub(super) struct KubernetesLease {
    pod: PodIdentity,
    client: ApiClient,
    store: KubernetesStore,
    content: Mutex<Announced>,
    /// One change at a time: the last one applied is the last one made.
    turn: AsyncMutex<()>,
}

#[derive(Default)]
struct Announced {
    records: BTreeMap<RecordKey, Value>,
    has_ended: bool,
    /// It could not be applied: it is tried again.
    is_behind: bool,
}

impl KubernetesLease {
    pub(super) fn start(pod: PodIdentity, store: &KubernetesStore) -> Arc<Self> {
        let lease = Arc::new(Self {
            pod,
            client: store.client.clone(),
            store: store.clone(),
            content: Mutex::default(),
            turn: AsyncMutex::default(),
        });
        store.tasks.spawn(keep(Arc::downgrade(&lease)));
        lease
    }

    fn content(&self) -> MutexGuard<'_, Announced> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies all that is announced.
    async fn apply(&self) -> Result<(), ApiError> {
        let _turn = self.turn.lock().await;
        let data = {
            let content = self.content();
            if content.has_ended {
                return Ok(());
            }
            data(&content.records)
        };
        let pod = &self.pod;
        let body = json!({
            "apiVersion": "nvidia.com/v1alpha1",
            "kind": WORKER_KIND,
            "metadata": {
                "name": pod.name,
                "ownerReferences": [{
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "name": pod.name,
                    "uid": pod.uid,
                    "controller": true,
                    "blockOwnerDeletion": false,
                }],
            },
            "spec": {"data": data},
        });
        let query = format!("?fieldManager={FIELD_MANAGER}&force=true");
        let body = (
            "application/apply-patch+yaml",
            body.to_string().into_bytes(),
        );
        let applied = self.change(Method::PATCH, &query, Some(body)).await;
        self.note(&applied);
        applied
    }

    /// One change of the resource; credentials that are refused are read once more.
    async fn change(
        &self,
        method: Method,
        query: &str,
        body: Option<(&'static str, Vec<u8>)>,
    ) -> Result<(), ApiError> {
        let changed = self.try_change(&method, query, body.clone()).await;
        match changed {
            Err(error) if error.is_unauthorized() => self.try_change(&method, query, body).await,
            changed => changed,
        }
    }

    async fn try_change(
        &self,
        method: &Method,
        query: &str,
        body: Option<(&'static str, Vec<u8>)>,
    ) -> Result<(), ApiError> {
        let mut connection = self.client.connect().await?;
        let (namespace, name) = (encode(connection.namespace()), encode(&self.pod.name));
        let path = format!("/{WORKER_GROUP}/namespaces/{namespace}/{WORKER_PLURAL}/{name}{query}");
        let answer = connection.call(method.clone(), &path, body).await;
        answer.map(drop)
    }

    /// Says once that nothing can be announced, and that it can again.
    fn note(&self, applied: &Result<(), ApiError>) {
        let was_behind = std::mem::replace(&mut self.content().is_behind, applied.is_err());
        let (store, resource) = (&self.store.address, &self.pod.name);
        match applied {
            Err(error) if !was_behind => tracing::error!(%error, %store, resource,
                "our resource cannot be applied: nobody learns what changed here; it is tried until it can"),
            Ok(()) if was_behind => {
                tracing::info!(%store, resource, "our resource is applied again");
            }
            _ => {}
        }
    }
}

/// The records as a resource holds them. All kinds are there, be they empty.
fn data(records: &BTreeMap<RecordKey, Value>) -> Value {
    let sections = Bucket::ALL.into_iter().map(|bucket| {
        let of_bucket = records.iter().filter(|(key, _)| key.bucket == bucket);
        let values = of_bucket.map(|(key, value)| (key.key.clone(), value.clone()));
        let values: Map<String, Value> = values.collect();
        (section(bucket).to_owned(), Value::Object(values))
    });
    Value::Object(sections.collect())
}

async fn keep(lease: Weak<KubernetesLease>) {
    let mut quiet = Duration::ZERO;
    loop {
        tokio::time::sleep(RETRY_EVERY).await;
        let Some(lease) = lease.upgrade() else {
            return;
        };
        let (has_ended, is_behind, is_empty) = {
            let content = lease.content();
            (
                content.has_ended,
                content.is_behind,
                content.records.is_empty(),
            )
        };
        if has_ended {
            return;
        }
        quiet += RETRY_EVERY;
        if is_behind || (quiet >= ASSERT_EVERY && !is_empty) {
            quiet = Duration::ZERO;
            let _ = lease.apply().await;
        }
    }
}

impl Lease for KubernetesLease {
    fn id(&self) -> u64 {
        self.pod.instance_id()
    }

    fn put(&self, record: Record) -> StoreFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            {
                let mut content = self.content();
                if content.has_ended {
                    return Err(StoreError::Ended);
                }
                let value = serde_json::to_value(&record).unwrap_or_default();
                content.records.insert(record.key(), value);
            }
            let applied = self.apply().await;
            applied.map_err(|error| self.store.error(&error))
        })
    }

    fn remove(&self, key: RecordKey) -> StoreFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.content().records.remove(&key);
            let applied = self.apply().await;
            applied.map_err(|error| self.store.error(&error))
        })
    }

    fn revoke(&self) -> StoreFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            {
                let mut content = self.content();
                content.has_ended = true;
                content.records.clear();
            }
            let _turn = self.turn.lock().await;
            match self.change(Method::DELETE, "", None).await {
                Err(error) if !error.is_not_found() => Err(self.store.error(&error)),
                _ => Ok(()),
            }
        })
    }
}
