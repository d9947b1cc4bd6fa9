//! Records in Kubernetes.
//!
//! Answers one question: who is there, where the API server of a cluster says so? Two ways. As a store: the pod of a worker writes its
//! records into a custom resource, `DynamoWorkerMetadata`, and they count while a slice of endpoints says that the pod is ready. And
//! without any resource of ours: pods with given labels are engine servers ([`KubernetesStore::watch_pods`]).
//!
//! What always holds: what is listed and heard is joined into what differs; an API server that cannot be asked takes nothing away; a
//! resource belongs to its pod and goes with it.
//!
//! Elsewhere: what objects say (`object`), requests (`client`), listing and watching (`reflector`), credentials (`access`). Why the
//! client is our own: decision 0147.

mod access;
mod client;
mod engines;
mod join;
mod kubeconfig;
mod lease;
mod object;
mod reflector;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvasir_tasks::Tasks;

use self::access::Access;
pub use self::access::{KubernetesOptions, KubernetesOptionsError, SERVICE_ACCOUNT};
use self::client::{ApiClient, ApiError};
pub use self::engines::{PodPort, PodSelector};
use self::join::{Join, Step};
use self::lease::KubernetesLease;
pub use self::lease::PodIdentity;
use self::object::{EndpointSlice, WorkerResource};
use self::reflector::{Collection, Told, follow};
use crate::record::Bucket;
use crate::store::{Feed, Lease, Store, StoreError, StoreFuture, Watch, watch};

/// Where slices of endpoints stand.
const SLICES_GROUP: &str = "apis/discovery.k8s.io/v1";
const SLICES_PLURAL: &str = "endpointslices";
/// The labels of slices that name pods of workers.
const SLICES_SELECTOR: &str = "nvidia.com/dynamo-discovery-enabled=true";
/// Where workers' resources stand.
const WORKER_GROUP: &str = "apis/nvidia.com/v1alpha1";
const WORKER_PLURAL: &str = "dynamoworkermetadatas";
const WORKER_KIND: &str = "DynamoWorkerMetadata";

/// A store in the API server of a cluster. Clones are one.
#[derive(Clone)]
pub struct KubernetesStore {
    client: ApiClient,
    /// The API server and the namespace, for messages.
    address: Arc<str>,
    /// The pod that we are, where we announce something.
    pod: Option<PodIdentity>,
    /// The pod has its worker.
    is_taken: Arc<AtomicBool>,
    tasks: Tasks,
}

impl KubernetesStore {
    /// The store of these credentials, which are read once to see that they can be; the API server is reached when it is first
    /// needed. `tasks` keep it in step. `pod` is who announces itself there, if anybody does.
    pub fn new(
        options: KubernetesOptions,
        pod: Option<PodIdentity>,
        tasks: &Tasks,
    ) -> Result<Self, KubernetesOptionsError> {
        let access = Access::load(&options)?;
        let tasks = tasks.background();
        Ok(Self {
            address: format!("{} namespace {}", access.server, access.namespace).into(),
            client: ApiClient::new(options, &tasks),
            pod,
            is_taken: Arc::default(),
            tasks,
        })
    }

    fn error(&self, error: &ApiError) -> StoreError {
        let (address, cause) = (self.address(), error.to_string());
        match error {
            ApiError::Refused { .. } | ApiError::Credentials(_) => {
                StoreError::Refused { address, cause }
            }
            ApiError::Unreachable(_) | ApiError::BadAnswer(_) => {
                StoreError::Unreachable { address, cause }
            }
        }
    }

    /// Follows slices and resources until nobody reads any more.
    async fn feed(self, buckets: Vec<Bucket>, feed: Feed) {
        let slices = Collection {
            group: SLICES_GROUP,
            plural: SLICES_PLURAL,
            selector: Some(SLICES_SELECTOR.into()),
        };
        let resources = Collection {
            group: WORKER_GROUP,
            plural: WORKER_PLURAL,
            selector: None,
        };
        let joined = Mutex::new(Joined {
            join: Join::default(),
            buckets,
            feed: feed.clone(),
            is_reached: [false; 2],
        });
        let lock = || joined.lock().unwrap_or_else(PoisonError::into_inner);
        let of_slices = follow(&self.client, &slices, |told| lock().slices(told));
        let of_resources = follow(&self.client, &resources, |told| lock().resources(told));
        tokio::select! {
            () = of_slices => {}
            () = of_resources => {}
            () = feed.closed() => {}
        }
    }
}

/// Which of the two that are followed.
const SLICES: usize = 0;
const RESOURCES: usize = 1;

/// What is followed, and who is told.
struct Joined {
    join: Join,
    buckets: Vec<Bucket>,
    feed: Feed,
    is_reached: [bool; 2],
}

impl Joined {
    fn slices(&mut self, told: Told<EndpointSlice>) {
        let steps = match told {
            Told::Listed(items) => self.join.list_slices(items),
            Told::Put(item) => self.join.put_slice(item),
            Told::Deleted(name) => self.join.delete_slice(&name),
            Told::Reached => return self.reached(SLICES),
            Told::Lost(error) => return self.lost(SLICES, &error),
        };
        self.tell(steps);
    }

    fn resources(&mut self, told: Told<WorkerResource>) {
        let steps = match told {
            Told::Listed(items) => self.join.list_resources(items),
            Told::Put(item) => self.join.put_resource(item),
            Told::Deleted(name) => self.join.delete_resource(&name),
            Told::Reached => return self.reached(RESOURCES),
            Told::Lost(error) => return self.lost(RESOURCES, &error),
        };
        self.tell(steps);
    }

    fn tell(&self, steps: Vec<Step>) {
        for step in steps {
            match step {
                Step::Put(key, value) if self.buckets.contains(&key.bucket) => {
                    self.feed.put(&key, &value);
                }
                Step::Delete(key) if self.buckets.contains(&key.bucket) => self.feed.delete(&key),
                _ => {}
            }
        }
    }

    fn reached(&mut self, which: usize) {
        self.is_reached[which] = true;
        if self.is_reached == [true; 2] {
            self.feed.synced();
        }
    }

    fn lost(&mut self, which: usize, error: &ApiError) {
        self.is_reached[which] = false;
        let hint = match error.is_not_found() && which == RESOURCES {
            true => ": is the resource definition of DynamoWorkerMetadata installed?",
            false => "",
        };
        self.feed.lost(&format!("{error}{hint}"));
    }
}

impl Store for KubernetesStore {
    fn backend(&self) -> &'static str {
        "kubernetes"
    }

    fn address(&self) -> String {
        self.address.to_string()
    }

    fn watch(&self, buckets: &[Bucket]) -> Watch {
        let (feed, watch) = watch(&self.address);
        self.tasks.spawn(self.clone().feed(buckets.to_vec(), feed));
        watch
    }

    fn lease(&self) -> StoreFuture<'_, Result<Arc<dyn Lease>, StoreError>> {
        let refused = |cause: &str| StoreError::Refused {
            address: self.address(),
            cause: cause.to_owned(),
        };
        let lease = match &self.pod {
            None => Err(refused(
                "a worker is announced by its pod: set POD_NAME and POD_UID from the pod's own fields",
            )),
            Some(_) if self.is_taken.swap(true, Ordering::AcqRel) => Err(refused(
                "a pod is one worker, whose id follows from the pod's name: start one worker in each pod",
            )),
            Some(pod) => {
                let lease: Arc<dyn Lease> = KubernetesLease::start(pod.clone(), self);
                Ok(lease)
            }
        };
        Box::pin(std::future::ready(lease))
    }
}
