//! Peers that are found where workers are found.
//!
//! Answers one question: where do the other replicas listen? Each writes its own address into the store (`--discovery-backend`), and dials
//! those that the others wrote for as long as they stand there. A connection that is open stays open: a replica that leaves takes its
//! address back when its last request has ended.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use kvasir_discovery::{
    Bucket, Change, EndpointName, Instance, Lease, Record, RecordKey, RequestTransport, Store,
    StoreError,
};
use tokio_util::sync::CancellationToken;

use super::{ADDRESSES_MAX, DIAL_EVERY, PeerLinks, Trial};

/// Where replicas write their addresses.
#[derive(Clone)]
pub struct PeerStore {
    /// The store.
    pub store: Arc<dyn Store>,
    /// Under this name; replicas of one name are peers.
    pub endpoint: EndpointName,
    /// The host by which others reach this process, where it listens on all of its addresses.
    pub host: String,
}

impl std::fmt::Debug for PeerStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} in {}", self.endpoint, self.store.address())
    }
}

impl PeerStore {
    /// What others dial, as `host:port`.
    fn own(&self, listening: SocketAddr) -> String {
        match listening.ip().is_unspecified() {
            true => format!("{}:{}", self.host, listening.port()),
            false => listening.to_string(),
        }
    }

    /// The address that a record of a replica names.
    fn address_in(&self, record: &Record) -> Option<String> {
        let Record::Endpoint(instance) = record else {
            return None;
        };
        let RequestTransport::Tcp(address) = &instance.transport else {
            return None;
        };
        let address = address.split('/').next()?;
        (instance.name() == self.endpoint).then(|| address.to_owned())
    }

    async fn write(&self, address: &str) -> Result<Arc<dyn Lease>, StoreError> {
        let lease = self.store.lease().await?;
        let EndpointName {
            namespace,
            component,
            endpoint,
        } = self.endpoint.clone();
        let record = Record::Endpoint(Instance {
            namespace,
            component,
            endpoint,
            instance_id: lease.id(),
            transport: RequestTransport::Tcp(format!("{address}/")),
            device_type: None,
            request_plane_codec: None,
        });
        lease.put(record).await?;
        Ok(lease)
    }
}

impl PeerLinks {
    /// Writes the address of this process, and takes it back when the process drains.
    pub(super) async fn announce(self, found: PeerStore) {
        let tasks = self.inner.replicas.shared.context.tasks.clone();
        let mut said = false;
        let written = async {
            loop {
                if let Some(listening) = self.address() {
                    match found.write(&found.own(listening)).await {
                        Ok(lease) => return lease,
                        Err(error) if !std::mem::replace(&mut said, true) => {
                            tracing::error!(%error, "other replicas cannot find this one; it is tried until they can: see --router-peer-listen");
                        }
                        Err(_) => {}
                    }
                }
                tokio::time::sleep(DIAL_EVERY).await;
            }
        };
        let lease = tokio::select! {
            () = tasks.draining() => return,
            lease = written => lease,
        };
        tasks.draining().await;
        if let Err(error) = lease.revoke().await {
            tracing::warn!(%error, "where this replica listened stays written until it expires");
        }
    }

    /// Dials the replicas that are written there.
    pub(super) async fn follow_store(self, found: PeerStore, trial: Trial) {
        let mut trial = Some(trial);
        let mut watch = found.store.watch(&[Bucket::Instances]);
        let mut dialed: BTreeMap<RecordKey, CancellationToken> = BTreeMap::new();
        loop {
            match watch.next().await {
                Change::Added(key, record) | Change::Updated(key, record) => {
                    let Some(address) = found.address_in(&record) else {
                        continue;
                    };
                    if let Some(before) = dialed.remove(&key) {
                        before.cancel();
                    }
                    if dialed.len() < ADDRESSES_MAX {
                        let stop = CancellationToken::new();
                        let follow =
                            self.clone()
                                .follow_name(address, Trial::new(&self), stop.clone());
                        self.inner
                            .replicas
                            .shared
                            .context
                            .tasks
                            .background()
                            .spawn(follow);
                        dialed.insert(key, stop);
                    }
                }
                Change::Removed(key) => {
                    if let Some(gone) = dialed.remove(&key) {
                        gone.cancel();
                    }
                }
                Change::Synced => drop(trial.take()),
                // An index is not waited for where the store cannot be reached.
                Change::Lost(_) => drop(trial.take()),
                Change::Restored => {}
            }
        }
    }
}
