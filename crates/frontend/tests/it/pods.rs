//! Engine servers in pods: from what a cluster says of them to answers, and while it says nothing.

use std::sync::Arc;

use kvasir_discovery::{PodEngine, PodView, PodWatch};
use tokio::sync::watch;

use crate::engine::{ANSWER, DONE, Engine, LAST, Stage, Step, chunk, first_event};
use crate::rig::{ASK, ASK_STREAM, CHAT, Rig, Setup, in_time, until};

/// A frontend that follows pods, and the end that says which there are.
struct Pods {
    rig: Rig,
    says: watch::Sender<Arc<PodView>>,
}

fn engine_of(pod: &str, uid: &str, engine: &Engine) -> PodEngine {
    let url = engine.url();
    let (host, port) = url.trim_start_matches("http://").split_once(':').unwrap();
    PodEngine {
        pod: pod.into(),
        uid: uid.into(),
        host: host.into(),
        port: port.parse().unwrap(),
        tls: false,
        role: kvasir_types::Role::Aggregated,
    }
}

impl Pods {
    async fn new() -> Self {
        let rig = Rig::with(0, Setup::usual()).await;
        let (says, hears) = watch::channel(Arc::new(PodView::default()));
        rig.fleet
            .follow_pods(PodWatch::new(hears, "the cluster".into()), None);
        Self { rig, says }
    }

    fn say(&self, engines: &[&PodEngine], lost: Option<&str>) {
        let view = PodView {
            engines: engines.iter().copied().cloned().collect(),
            is_listed: true,
            lost: lost.map(str::to_owned),
            ..PodView::default()
        };
        self.says.send_replace(Arc::new(view));
    }

    async fn state(&self) -> String {
        let mut client = self.rig.client().await;
        client
            .send("GET /health HTTP/1.1\r\nhost: door\r\n\r\n")
            .await;
        let health = client.answer().await.json();
        assert_eq!(health["discovery"][0]["source"], "the cluster");
        health["discovery"][0]["state"].as_str().unwrap().to_owned()
    }

    async fn until_state(&self, wanted: &str) {
        in_time(wanted, async {
            while self.state().await != wanted {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
}

#[tokio::test]
async fn pods_join_and_drain_and_go_on_while_the_cluster_is_lost() {
    let pods = Pods::new().await;
    let (stage, rig) = (Stage::new(), &pods.rig);
    let (one, two) = (Engine::start(&stage).await, Engine::start(&stage).await);
    let (a, b) = (engine_of("a", "1", &one), engine_of("b", "2", &two));
    assert_eq!(pods.state().await, "starting");
    pods.say(&[&a], None);
    rig.joined(1).await;
    assert_eq!(pods.state().await, "ready");
    let rows = rig.workers().await;
    assert_eq!(rows[0]["origins"], serde_json::json!(["kubernetes"]));
    assert_eq!(rows[0]["url"], one.url());
    // A stream that runs on a pod that ends goes on to its end; nothing new comes there.
    let rest = [
        chunk(LAST.as_bytes()),
        chunk(DONE.as_bytes()),
        b"0\r\n\r\n".to_vec(),
    ]
    .concat();
    stage.play(vec![first_event(), Step::Gate, Step::Write(rest)]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK_STREAM).await;
    assert!(client.read_until("\n\n").await);
    pods.say(&[&b], None);
    until("the second serves alone", || {
        let rows = rig.app.models().get("m").unwrap().specs();
        rows.len() == 2 && rows.iter().filter(|spec| rig.is_draining(spec.id)).count() == 1
    })
    .await;
    for _ in 0..4 {
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
        assert_eq!(stage.seen().last().unwrap().port, b.port);
    }
    stage.gate.add_permits(1);
    let streamed = in_time("the stream ends", client.answer()).await;
    assert!(streamed.whole && streamed.text().ends_with(DONE));
    rig.joined(1).await;
    // The cluster says nothing more: who was known serves.
    pods.say(&[&b], Some("connection refused"));
    pods.until_state("lost").await;
    let up = r#"kvasir_discovery_up{backend="worker-selector"}"#;
    assert_eq!(rig.metric(up).await, 0.0);
    assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    pods.say(&[&b], None);
    pods.until_state("ready").await;
    assert_eq!(rig.metric(up).await, 1.0);
}

/// A pod that has the address of an earlier one is another worker: what the earlier one had cached is gone.
#[tokio::test]
async fn a_pod_at_the_address_of_another_is_another_worker() {
    let pods = Pods::new().await;
    let stage = Stage::new();
    let engine = Engine::start(&stage).await;
    pods.say(&[&engine_of("a", "1", &engine)], None);
    pods.rig.joined(1).await;
    let first = pods.rig.workers().await[0]["worker_id"].clone();
    pods.say(&[&engine_of("a", "2", &engine)], None);
    in_time("the second takes over", async {
        loop {
            let rows = pods.rig.workers().await;
            let ids: Vec<_> = rows.iter().map(|row| row["worker_id"].clone()).collect();
            if !ids.is_empty() && !ids.contains(&first) {
                return;
            }
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(pods.rig.post(CHAT, ASK).await.text(), ANSWER);
}
