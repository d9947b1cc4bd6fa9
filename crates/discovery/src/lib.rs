//! Which endpoints, models and event channels a fleet has, and how a process announces its own.
//!
//! Answers one question: who is there? Workers write records into a store (a folder, etcd, Kubernetes, this process); whoever
//! wants to know them watches it. Records and keys are those of Dynamo 1.6.1, so its workers and frontends share a store with
//! ours.
//!
//! Pure parts: [`record`] (values and keys), [`card`] (what a model card says), [`fleet`] (records joined into workers and
//! models), [`mirror`] (a store's content as a watcher knows it). Edges: [`store`] (the trait), [`mem`], [`file`], `etcd`,
//! `kubernetes`. Beside them [`pods`]: engine servers that a cluster runs and that announce nothing.
//!
//! What always holds: a store that is out of reach takes nothing away from whoever watches it; a value that cannot be read
//! leaves the one before it; what a store holds is bounded in number and size before it is kept.
//!
//! Elsewhere: how a worker is reached (`transport`), what is made of its records (`frontend`).

pub mod card;
pub mod coordination;
#[cfg(feature = "etcd")]
pub mod etcd;
pub mod file;
pub mod fleet;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
pub mod mem;
pub mod mirror;
pub mod pods;
pub mod record;
pub mod store;

pub use card::{Artefact, Card, CardError, ModelInput, ModelType, NewCard, WorkerType, slug};
pub use coordination::{Claim, ClaimKind, Coordination};
#[cfg(feature = "etcd")]
pub use etcd::{EtcdOptions, EtcdOptionsError, EtcdStore};
pub use file::FileStore;
pub use fleet::{FleetJoin, FleetNote, FleetView, FoundWorker, Namespaces, SetName};
#[cfg(feature = "kubernetes")]
pub use kubernetes::{
    KubernetesOptions, KubernetesOptionsError, KubernetesStore, PodIdentity, PodPort, PodSelector,
};
pub use mem::MemStore;
pub use mirror::{Change, Mirror};
pub use pods::{PodEngine, PodView, PodWatch};
pub use record::{
    Bucket, EndpointName, EventChannel, EventScope, EventSource, EventTransport, Instance,
    KvSource, ModelEntry, Record, RecordError, RecordKey, RequestTransport,
};
pub use store::{Lease, RESTORE_GRACE, Store, StoreError, StoreFuture, Watch};
