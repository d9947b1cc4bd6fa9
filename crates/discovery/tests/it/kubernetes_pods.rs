//! Engine servers in pods that have labels and nothing else.

use std::sync::Arc;

use kvasir_discovery::{PodSelector, PodView, PodWatch};
use serde_json::{Value, json};

use crate::api_server::{ApiServer, Fault, On, PODS, SLICES};
use crate::kubernetes::Cluster;
use crate::rig::SOON;

fn slice(name: &str, endpoints: &[(&str, &str, bool)]) -> Value {
    let endpoints: Vec<Value> = endpoints
        .iter()
        .map(|(pod, address, ready)| {
            json!({"addresses": [address], "conditions": {"ready": ready, "terminating": !ready},
                "targetRef": {"kind": "Pod", "name": pod, "uid": format!("{pod}-1")}})
        })
        .collect();
    json!({"metadata": {"name": name, "labels": {"app": "vllm"}}, "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000}], "endpoints": endpoints})
}

fn pod(name: &str, ip: &str) -> Value {
    json!({"metadata": {"name": name, "uid": format!("{name}-1"), "labels": {"app": "vllm"}},
        "spec": {"containers": [{"ports": [{"containerPort": 8000}]}]},
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]}})
}

/// Waits for a view of which this holds.
async fn until(watch: &mut PodWatch, holds: impl Fn(&PodView) -> bool) -> Arc<PodView> {
    let found = async {
        loop {
            let view = watch.next().await.unwrap();
            if holds(&view) {
                return view;
            }
        }
    };
    tokio::time::timeout(SOON, found).await.unwrap()
}

async fn until_at(watch: &mut PodWatch, addresses: &[&str]) -> Arc<PodView> {
    until(watch, |view| {
        let found = view.engines.iter().map(|engine| &*engine.host);
        view.is_listed && found.collect::<Vec<_>>() == addresses
    })
    .await
}

fn follow(cluster: &Cluster) -> PodWatch {
    cluster.store().watch_pods(PodSelector {
        labels: "app=vllm".into(),
        port: None,
    })
}

fn other(server: &ApiServer) {
    let mut other = slice("other", &[("x", "10.0.0.99", true)]);
    other["metadata"]["labels"]["app"] = json!("other");
    server.put(SLICES, other);
}

#[tokio::test]
async fn engines_are_found_by_the_labels_of_their_service() {
    let mut cluster = Cluster::start().await;
    cluster.server.cut_into(1, 5);
    other(&cluster.server);
    cluster
        .server
        .put(SLICES, slice("a", &[("p", "10.0.0.1", true)]));
    let mut watch = follow(&cluster);
    until_at(&mut watch, &["10.0.0.1"]).await;
    cluster.server.put(
        SLICES,
        slice("a", &[("p", "10.0.0.1", true), ("q", "10.0.0.2", true)]),
    );
    until_at(&mut watch, &["10.0.0.1", "10.0.0.2"]).await;
    // One that ends is no longer there.
    cluster.server.put(
        SLICES,
        slice("a", &[("p", "10.0.0.1", false), ("q", "10.0.0.2", true)]),
    );
    let view = until_at(&mut watch, &["10.0.0.2"]).await;
    assert_eq!(view.lost, None);
    cluster.server.stop().await;
    let view = until(&mut watch, |view| view.lost.is_some()).await;
    assert_eq!(view.engines.len(), 1, "what was known stays");
    cluster
        .server
        .put(SLICES, slice("a", &[("r", "10.0.0.3", true)]));
    cluster.server.forget();
    cluster.server.restart().await;
    let view = until(&mut watch, |view| view.lost.is_none()).await;
    if view.engines.iter().all(|engine| engine.host != "10.0.0.3") {
        until_at(&mut watch, &["10.0.0.3"]).await;
    }
}

#[tokio::test]
async fn pods_without_a_service_are_found_by_their_own_labels() {
    let cluster = Cluster::start().await;
    cluster.server.put(PODS, pod("p", "10.0.0.1"));
    let mut watch = follow(&cluster);
    until_at(&mut watch, &["10.0.0.1"]).await;
    cluster.server.put(PODS, pod("q", "10.0.0.2"));
    until_at(&mut watch, &["10.0.0.1", "10.0.0.2"]).await;
    let mut ending = pod("p", "10.0.0.1");
    ending["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    cluster.server.put(PODS, ending);
    until_at(&mut watch, &["10.0.0.2"]).await;
}

/// Without the right to read pods, those of labelled Services are found all the same.
#[tokio::test]
async fn who_may_not_read_pods_reads_slices() {
    let cluster = Cluster::start().await;
    for _ in 0..2 {
        let forbidden = Fault::Status(403, None);
        cluster.server.fail(PODS, On::List, forbidden);
    }
    cluster
        .server
        .put(SLICES, slice("a", &[("p", "10.0.0.1", true)]));
    let mut watch = follow(&cluster);
    let view = until_at(&mut watch, &["10.0.0.1"]).await;
    assert_eq!(view.lost, None);
}
