//! The store in Kubernetes, against an API server of this test suite that follows the public list and watch contract.

use std::time::Duration;

use kvasir_discovery::{
    Bucket, KubernetesOptions, KubernetesStore, PodIdentity, Record, Store, Watch,
};
use kvasir_tasks::Tasks;
use serde_json::{Value, json};

use crate::api_server::{ApiServer, Fault, On, SLICES, WORKERS};
use crate::rig::{Folder, SOON, endpoint, next};

/// A cluster of this test alone: the server, and the kubeconfig that leads to it.
pub(crate) struct Cluster {
    pub(crate) server: ApiServer,
    pub(crate) folder: Folder,
    pub(crate) tasks: Tasks,
}

impl Cluster {
    pub(crate) async fn start() -> Self {
        let cluster = Self {
            server: ApiServer::start().await,
            folder: Folder::new(),
            tasks: Tasks::new(),
        };
        std::fs::create_dir_all(cluster.folder.path()).unwrap();
        cluster.write_config("tokenFile: token");
        cluster.write("token", "first");
        cluster
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        std::fs::write(self.folder.path().join(name), text).unwrap();
    }

    pub(crate) fn write_config(&self, user: &str) {
        let server = self.server.url();
        let config = format!(
            "current-context: test\n\
             contexts: [{{name: test, context: {{cluster: test, user: test, namespace: ns}}}}]\n\
             clusters: [{{name: test, cluster: {{server: \"{server}\"}}}}]\n\
             users: [{{name: test, user: {{{user}}}}}]\n"
        );
        self.write("config", &config);
    }

    pub(crate) fn options(&self) -> KubernetesOptions {
        let config = self.folder.path().join("config");
        KubernetesOptions {
            kubeconfig: Some(config.display().to_string()),
            ..KubernetesOptions::default()
        }
    }

    pub(crate) fn store(&self) -> KubernetesStore {
        let pod = PodIdentity {
            name: "worker-0".into(),
            uid: "pod-uid".into(),
        };
        KubernetesStore::new(self.options(), Some(pod), &self.tasks).unwrap()
    }

    /// A worker's resource with one endpoint.
    fn announce(&self, pod: &str, id: u64, address: &str) {
        self.server.put(WORKERS, resource(pod, id, address));
    }

    fn ready(&self, pods: &[(&str, bool)]) {
        self.server.put(SLICES, slice("slice", pods));
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

fn resource(pod: &str, id: u64, address: &str) -> Value {
    let record = serde_json::to_value(endpoint(id, address)).unwrap();
    let key = endpoint(id, address).key().key;
    json!({"metadata": {"name": pod, "uid": format!("{pod}-uid")}, "spec": {"data": {"endpoints": {key: record}}}})
}

fn slice(name: &str, pods: &[(&str, bool)]) -> Value {
    let endpoints: Vec<Value> = pods
        .iter()
        .map(|(pod, ready)| {
            json!({"addresses": ["10.0.0.1"], "conditions": {"ready": ready}, "targetRef": {"kind": "Pod", "name": pod}})
        })
        .collect();
    let labels = json!({"nvidia.com/dynamo-discovery-enabled": "true"});
    json!({"metadata": {"name": name, "labels": labels}, "addressType": "IPv4", "endpoints": endpoints})
}

/// The next changes, as many as are named, in any order.
async fn expect(watch: &mut Watch, wanted: &[&str]) {
    let mut told = Vec::new();
    for _ in wanted {
        told.push(next(watch).await);
    }
    told.sort();
    let mut wanted = wanted.to_vec();
    wanted.sort_unstable();
    assert_eq!(told, wanted);
}

fn added(id: u64, address: &str) -> String {
    format!("+dynamo/backend/generate/{id:x} {address}")
}

/// Waits until the server has seen so many watches of a kind.
async fn watches(server: &ApiServer, path: &str, count: usize) {
    let seen = async {
        while server
            .seen(path)
            .iter()
            .filter(|seen| seen.is_watch())
            .count()
            < count
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, seen).await.unwrap();
}

#[tokio::test]
async fn a_worker_counts_while_its_pod_is_ready() {
    let cluster = Cluster::start().await;
    // Lines come in pieces of three bytes, lists in pages of two.
    cluster.server.cut_into(2, 3);
    for id in 1..=5 {
        cluster.announce(&format!("pod-{id}"), id, "a");
    }
    cluster.ready(&[("pod-1", true), ("pod-2", false), ("pod-9", true)]);
    let store = cluster.store();
    let mut watch = store.watch(&Bucket::ALL);
    expect(&mut watch, &[&added(1, "a"), "synced"]).await;
    assert_eq!(cluster.server.lists(WORKERS), 1);
    cluster.ready(&[("pod-1", true), ("pod-2", true)]);
    assert_eq!(next(&mut watch).await, added(2, "a"));
    cluster.announce("pod-2", 2, "b");
    assert_eq!(next(&mut watch).await, "~dynamo/backend/generate/2 b");
    cluster.server.delete(WORKERS, "pod-1");
    assert_eq!(next(&mut watch).await, "-dynamo/backend/generate/1");
    cluster.server.delete(SLICES, "slice");
    assert_eq!(next(&mut watch).await, "-dynamo/backend/generate/2");
}

/// A watch that ends goes on from the last version that was told, be it by a bookmark: nothing is listed again.
#[tokio::test]
async fn a_watch_that_ends_goes_on_from_where_it_was() {
    let cluster = Cluster::start().await;
    cluster.ready(&[("a", true), ("b", true)]);
    let mut watch = cluster.store().watch(&[Bucket::Instances]);
    assert_eq!(next(&mut watch).await, "synced");
    watches(&cluster.server, WORKERS, 1).await;
    cluster.announce("a", 1, "a");
    assert_eq!(next(&mut watch).await, added(1, "a"));
    // Only the bookmark says that nothing else happened up to here.
    cluster.server.bookmark();
    cluster.server.forget();
    cluster.server.end_watches();
    watches(&cluster.server, WORKERS, 2).await;
    cluster.announce("b", 2, "a");
    assert_eq!(next(&mut watch).await, added(2, "a"));
    assert_eq!(cluster.server.lists(WORKERS), 1);
    assert!(watch.try_next().is_none());
}

/// 410 as a status, as an event, and in the middle of a listing: all is listed again, and what differs is told.
#[tokio::test]
async fn what_is_forgotten_is_listed_again() {
    let cluster = Cluster::start().await;
    cluster.ready(&[("a", true), ("b", true), ("c", true)]);
    cluster.announce("a", 1, "a");
    let mut watch = cluster.store().watch(&[Bucket::Instances]);
    expect(&mut watch, &[&added(1, "a"), "synced"]).await;
    watches(&cluster.server, WORKERS, 1).await;
    let fail = |fault| cluster.server.fail(WORKERS, On::Watch, fault);
    fail(Fault::Status(410, None));
    cluster.server.end_watches();
    cluster.announce("b", 2, "a");
    cluster.server.delete(WORKERS, "a");
    expect(&mut watch, &[&added(2, "a"), "-dynamo/backend/generate/1"]).await;
    watches(&cluster.server, WORKERS, 3).await;
    let lists = cluster.server.lists(WORKERS);
    assert!(lists >= 2);
    fail(Fault::ErrorEvent(410));
    cluster.server.end_watches();
    cluster.announce("c", 3, "a");
    assert_eq!(next(&mut watch).await, added(3, "a"));
    assert!(watch.try_next().is_none(), "no loss is told");
}

/// Pages whose list is too old are read again from the first.
#[tokio::test]
async fn a_listing_that_is_forgotten_halfway_begins_anew() {
    let cluster = Cluster::start().await;
    cluster.server.cut_into(1, usize::MAX);
    cluster.ready(&[("a", true), ("b", true)]);
    cluster.announce("a", 1, "a");
    cluster.announce("b", 2, "a");
    let gone = Fault::Status(410, None);
    cluster.server.fail(WORKERS, On::NextPage, gone);
    let mut watch = cluster.store().watch(&[Bucket::Instances]);
    expect(&mut watch, &[&added(1, "a"), &added(2, "a"), "synced"]).await;
    assert_eq!(cluster.server.lists(WORKERS), 2);
}

#[tokio::test]
async fn a_server_that_is_away_takes_nothing_and_its_changes_are_told_when_it_is_back() {
    let mut cluster = Cluster::start().await;
    cluster.ready(&[("a", true), ("b", true)]);
    cluster.announce("a", 1, "a");
    let store = cluster.store();
    let mut watch = store.watch(&[Bucket::Instances]);
    expect(&mut watch, &[&added(1, "a"), "synced"]).await;
    cluster.server.stop().await;
    assert_eq!(next(&mut watch).await, "lost");
    cluster.announce("b", 2, "a");
    cluster.server.delete(WORKERS, "a");
    // The second server has forgotten what the first told.
    cluster.server.forget();
    assert!(watch.try_next().is_none());
    cluster.server.restart().await;
    expect(
        &mut watch,
        &[&added(2, "a"), "-dynamo/backend/generate/1", "restored"],
    )
    .await;
}

/// A token that is refused is read again; a server that is busy is left alone for as long as it asks. Neither is a loss.
#[tokio::test]
async fn a_token_is_renewed_and_a_busy_server_is_left_alone() {
    let cluster = Cluster::start().await;
    cluster.server.ask_for_token("first");
    cluster.ready(&[("a", true)]);
    let mut watch = cluster.store().watch(&[Bucket::Instances]);
    assert_eq!(next(&mut watch).await, "synced");
    watches(&cluster.server, WORKERS, 1).await;
    watches(&cluster.server, SLICES, 1).await;
    cluster.write("token", "second\n");
    cluster.server.ask_for_token("second");
    cluster.server.end_watches();
    watches(&cluster.server, WORKERS, 2).await;
    cluster.announce("a", 1, "a");
    assert_eq!(next(&mut watch).await, added(1, "a"));
    watches(&cluster.server, SLICES, 2).await;
    cluster
        .server
        .fail(WORKERS, On::Watch, Fault::Status(429, Some(1)));
    cluster.server.end_watches();
    watches(&cluster.server, WORKERS, 4).await;
    let seen = cluster.server.seen(WORKERS);
    let times: Vec<_> = seen.iter().rev().take(2).map(|seen| seen.at).collect();
    assert!(times[0] - times[1] >= Duration::from_secs(1));
    cluster.announce("a", 1, "b");
    assert_eq!(next(&mut watch).await, "~dynamo/backend/generate/1 b");
    assert!(watch.try_next().is_none());
}

/// A token that stays refused is a loss, which is told, and ends with the next good one.
#[tokio::test]
async fn a_token_that_stays_refused_is_a_loss() {
    let cluster = Cluster::start().await;
    cluster.server.ask_for_token("other");
    let mut watch = cluster.store().watch(&[Bucket::Instances]);
    assert_eq!(next(&mut watch).await, "lost");
    cluster.write("token", "other");
    expect(&mut watch, &["synced", "restored"]).await;
}

#[tokio::test]
async fn a_worker_announces_itself_as_its_pods_resource() {
    let cluster = Cluster::start().await;
    cluster.ready(&[("worker-0", true)]);
    let store = cluster.store();
    let mut watch = store.watch(&[Bucket::Instances]);
    assert_eq!(next(&mut watch).await, "synced");
    let lease = store.lease().await.unwrap();
    let refused = store.lease().await.err().unwrap().to_string();
    assert!(refused.contains("a pod is one worker"), "{refused}");
    let id = lease.id();
    lease.put(endpoint(id, "a")).await.unwrap();
    assert_eq!(next(&mut watch).await, added(id, "a"));
    let applied = cluster.server.get(WORKERS, "worker-0").unwrap();
    assert_eq!(applied["kind"], "DynamoWorkerMetadata");
    assert_eq!(applied["apiVersion"], "nvidia.com/v1alpha1");
    let owner = &applied["metadata"]["ownerReferences"][0];
    assert_eq!(
        owner,
        &json!({"apiVersion": "v1", "kind": "Pod", "name": "worker-0", "uid": "pod-uid", "controller": true,
            "blockOwnerDeletion": false})
    );
    let seen = cluster.server.seen(&format!("{WORKERS}/worker-0"));
    assert_eq!(seen[0].query["fieldManager"], "dynamo-worker");
    assert_eq!(seen[0].query["force"], "true");
    lease.remove(endpoint(id, "a").key()).await.unwrap();
    assert_eq!(
        next(&mut watch).await,
        format!("-dynamo/backend/generate/{id:x}")
    );
    lease.put(endpoint(id, "b")).await.unwrap();
    assert_eq!(next(&mut watch).await, added(id, "b"));
    lease.revoke().await.unwrap();
    assert_eq!(
        next(&mut watch).await,
        format!("-dynamo/backend/generate/{id:x}")
    );
    assert!(cluster.server.get(WORKERS, "worker-0").is_none());
    assert!(lease.put(endpoint(id, "a")).await.is_err());
}

/// What could not be written is, as soon as the API server is back.
#[tokio::test]
async fn what_was_announced_while_the_server_was_away_is_applied_later() {
    let mut cluster = Cluster::start().await;
    cluster.ready(&[("worker-0", true)]);
    let store = cluster.store();
    let lease = store.lease().await.unwrap();
    cluster.server.stop().await;
    let error = lease.put(endpoint(1, "a")).await.err().unwrap().to_string();
    assert!(error.contains("cannot be reached"), "{error}");
    cluster.server.restart().await;
    let mut watch = store.watch(&[Bucket::Instances]);
    while next(&mut watch).await != added(1, "a") {}
}

/// A resource as Dynamo 1.6.1 writes it, as the worker of the pod `worker-0`: testdata/README.md says how it was recorded.
#[test]
fn recorded_resources_are_read_and_their_ids_follow_from_the_pods_name() {
    let text = include_str!("../../testdata/dynamo-worker-metadata.json");
    let recorded: Value = serde_json::from_str(text).unwrap();
    let pod = PodIdentity {
        name: "worker-0".into(),
        uid: String::new(),
    };
    let mut read = Vec::new();
    for (section, bucket) in [
        ("endpoints", Bucket::Instances),
        ("model_cards", Bucket::Models),
        ("event_channels", Bucket::EventChannels),
        ("event_sources", Bucket::EventSources),
    ] {
        let records = recorded["spec"]["data"][section].as_object().unwrap();
        for (key, value) in records {
            let record = Record::parse(bucket, value.to_string().as_bytes()).unwrap();
            assert_eq!(&record.key().key, key);
            read.push(section);
            if bucket == Bucket::Instances || bucket == Bucket::Models {
                assert_eq!(value["instance_id"], pod.instance_id());
            }
        }
    }
    assert_eq!(read, ["endpoints", "model_cards", "event_channels"]);
}
