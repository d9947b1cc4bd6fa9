//! What model cards decide: which workers serve together, when a model is listed, and which namespaces count.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvasir_discovery::{Namespaces, WorkerType};
use kvasir_frontend::DiscoveryOptions;
use kvasir_host::{HicachePool, HostContext, SharedCache};
use kvasir_router::{RouterConfig, RouterMode};
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, MetricOptions, Metrics};
use kvasir_transport::zmq::{ZmqLimits, ZmqPublisher};
use serde_json::{Value, json};

use crate::discovery::{Discovered, MODEL, card};
use crate::rig::{Setup, in_time, until};

fn plain() -> Value {
    card(MODEL).into_card().unwrap().to_json()
}

impl Discovered {
    /// Names of the models that clients are told of.
    async fn listed(&self) -> Vec<String> {
        let mut client = self.rig.client().await;
        client
            .send("GET /v1/models HTTP/1.1\r\nhost: door\r\n\r\n")
            .await;
        let list = client.answer().await.json();
        let names = list["data"].as_array().unwrap().iter();
        names
            .map(|m| m["id"].as_str().unwrap().to_owned())
            .collect()
    }

    async fn until_listed(&self, names: &[&str]) {
        in_time("models are listed", async {
            while self.listed().await != names {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
    }

    fn ids(&self) -> Vec<u64> {
        let model = self.rig.app.models().get("m");
        let specs = model.map(|model| model.specs()).unwrap_or_default();
        specs.iter().map(|spec| spec.id.0).collect()
    }
}

#[tokio::test]
async fn a_worker_with_another_card_waits_until_the_set_has_gone() {
    let fleet = Discovered::new(0).await;
    let first = fleet.join(card(MODEL)).await;
    fleet.until_served(1).await;
    let mut other = card(MODEL);
    other.context_length = 2048;
    let stranger = fleet.join(other).await;
    // One that fits comes after it: what is brought then was seen by then.
    let alike = fleet.join(card(MODEL)).await;
    fleet.until_served(2).await;
    assert!(!fleet.ids().contains(&stranger.lease.id()));
    assert!(fleet.serves().await);
    first.lease.revoke().await.unwrap();
    alike.lease.revoke().await.unwrap();
    let id = stranger.lease.id();
    until("the stranger serves", || fleet.ids() == [id]).await;
    assert!(fleet.serves().await);
    assert_eq!(fleet.rig.model().context_length, 2048);
}

#[tokio::test]
async fn a_model_is_listed_while_the_roles_are_there_that_it_needs() {
    let options = DiscoveryOptions::default();
    let fleet = Discovered::with(options, Setup::usual(), |fleet| fleet).await;
    let mut needy = card(MODEL);
    needy.needs = vec![vec![WorkerType::Encode], vec![WorkerType::Prefill]];
    let _needy = fleet.join(needy).await;
    let mut prefill = plain();
    prefill["worker_type"] = "prefill".into();
    prefill["model_type"] = "".into();
    prefill["needs"] = json!([]);
    // A prefill worker of another namespace is no help.
    let elsewhere = fleet.join_at("ns2", "prefill", prefill.clone()).await;
    assert!(fleet.listed().await.is_empty());
    let prefill = fleet.join_at("ns", "prefill", prefill).await;
    fleet.until_listed(&["m"]).await;
    prefill.lease.revoke().await.unwrap();
    fleet.until_listed(&[]).await;
    elsewhere.lease.revoke().await.unwrap();
}

/// As workers wrote them before they named their roles: flags as a number, no role, no needs; a prefill worker says so by its type.
#[tokio::test]
async fn older_cards_are_served_and_their_prefill_workers_get_no_requests() {
    let fleet = Discovered::new(0).await;
    let mut old = plain();
    let fields = old.as_object_mut().unwrap();
    fields.remove("worker_type");
    fields.remove("needs");
    let mut prefill = old.clone();
    prefill["model_type"] = "Prefill".into();
    let _prefill = fleet.join_at("ns", "prefill", prefill).await;
    old["model_type"] = 3.into();
    let aggregated = fleet.join_at("ns", "backend", old).await;
    fleet.until_listed(&["m"]).await;
    for _ in 0..4 {
        assert!(fleet.serves().await);
    }
    aggregated.lease.revoke().await.unwrap();
    in_time("nobody is left who answers", async {
        while fleet.serves().await {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn namespaces_count_whole_or_by_their_beginning() {
    for (namespaces, served) in [
        (Namespaces::One("ns".into()), 1),
        (Namespaces::Prefix("ns".into()), 2),
        (Namespaces::All, 3),
    ] {
        let options = DiscoveryOptions {
            namespaces: namespaces.clone(),
            ..DiscoveryOptions::default()
        };
        let fleet = Discovered::with(options, Setup::usual(), |fleet| fleet).await;
        let mut workers = Vec::new();
        // The one that always counts comes last: when it serves, the others were seen.
        for namespace in ["other", "ns2", "ns"] {
            workers.push(fleet.join_at(namespace, "backend", plain()).await);
        }
        let last = workers.last().unwrap().lease.id();
        until("the last is there", || fleet.ids().contains(&last)).await;
        until("those that count", || fleet.ids().len() == served).await;
        assert!(fleet.serves().await, "{namespaces:?}");
    }
}

/// A card says how its worker names pages in a store; the store's events make them count.
#[tokio::test]
async fn pages_in_a_store_that_cards_name_are_credited() {
    let tasks = Tasks::new();
    let free = "tcp://127.0.0.1:0".parse().unwrap();
    let store = ZmqPublisher::bind(&tasks, &free, ZmqLimits::default());
    let store = store.await.unwrap();
    let context = HostContext {
        clock: Clock::new(),
        metrics: Metrics::new(&MetricOptions::default()).unwrap(),
        tasks: tasks.clone(),
    };
    let pool = HicachePool::new(&context, None);
    let setup = Setup {
        router: RouterConfig {
            router_mode: RouterMode::Kv,
            ..RouterConfig::default()
        },
        shared_cache: Some(SharedCache::new(
            Arc::clone(&pool) as _,
            Duration::from_secs(10),
        )),
        ..Setup::usual()
    };
    let options = DiscoveryOptions::default();
    let fleet = Discovered::with(options, setup, |fleet| fleet.with_hicache(pool)).await;
    let mut card = plain();
    let at = format!("tcp://{}", store.address());
    let data = json!({"backend": "mooncake", "page_size": 16, "is_mla_model": true, "kv_events_endpoint": at});
    card["runtime_config"]["runtime_data"] = json!({"sglang_hicache_mooncake": data});
    let _worker = fleet.join_at("ns", "backend", card).await;
    fleet.until_served(1).await;
    until("the store is followed", || store.subscribers() == 1).await;
    // The SHA-256 of the tokens 0 to 15, each in four bytes.
    let page = "5d85718ec594b982c252d0279e5966ffca33a5eaf2a455038d3ab331fde70cea";
    let key = format!("{page}__k");
    // MessagePack: a time, one event as a list, a rank.
    let length = [0xd9, u8::try_from(key.len()).unwrap()];
    let payload: Vec<u8> = [&[0x93, 1, 0x91, 0x93, 0xa6], &b"stored"[..], &length].concat();
    let payload = [
        payload.as_slice(),
        key.as_bytes(),
        &[0xa7],
        b"default",
        &[0],
    ]
    .concat();
    let number = Bytes::from_static(&[0; 8]);
    store.publish(&[Bytes::new(), number, payload.into()]);
    let tokens: Vec<u32> = (0..40).collect();
    let body = json!({"model": "m", "prompt": tokens, "max_tokens": 1}).to_string();
    in_time("the page counts", async {
        loop {
            assert_eq!(fleet.rig.post("/v1/completions", &body).await.status, 200);
            let mut client = fleet.rig.client().await;
            client
                .send("GET /decisions?limit=1 HTTP/1.1\r\nhost: door\r\n\r\n")
                .await;
            let list = client.answer().await.json();
            let terms = &list["decisions"][0]["candidates"][0]["terms"];
            if terms["shared_blocks"] == 0.5 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}
