//! Our client with a real Dynamo worker. Needs `KVASIR_TEST_DYNAMO_KV`, the folder of its file discovery.

use std::sync::Arc;
use std::time::Duration;

use kvasir_msgpack::Value;
use kvasir_protocol::Payload;
use kvasir_tasks::Tasks;
use kvasir_transport::tcp::{TcpClient, TcpOptions};
use kvasir_transport::{CallContext, EndpointClient, PlaneError, RequestPlane, TokenPlane};
use kvasir_types::{Codec, DpRank, FinishReason, PlaneEndpoint, RequestId, TokenRequest, WorkerId};

use crate::rpc::{home, read, request};

/// The instances that are registered, as their endpoint, worker and address.
fn instances(folder: &str) -> Vec<(String, WorkerId, PlaneEndpoint)> {
    let files = std::fs::read_dir(format!("{folder}/v1/instances")).unwrap();
    let files = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
    let found = files.map(|text| {
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let codec = json["request_plane_codec"]
            .as_str()
            .and_then(Codec::from_name);
        let endpoint = PlaneEndpoint {
            plane: "tcp".into(),
            address: json["transport"]["tcp"].as_str().unwrap().into(),
            codec: codec.unwrap_or_default(),
        };
        let worker = WorkerId(json["instance_id"].as_u64().unwrap());
        (
            json["endpoint"].as_str().unwrap().to_owned(),
            worker,
            endpoint,
        )
    });
    found.collect()
}

fn ask(id: u128, max_tokens: u32) -> TokenRequest {
    TokenRequest {
        id: RequestId(id),
        rank: DpRank(0),
        ..request(max_tokens)
    }
}

#[tokio::test]
async fn a_real_worker_answers() {
    #[expect(clippy::disallowed_methods, reason = "where the test's worker is")]
    let Ok(folder) = std::env::var("KVASIR_TEST_DYNAMO_KV") else {
        println!("skipped: KVASIR_TEST_DYNAMO_KV is not set");
        return;
    };
    let tasks = Tasks::new();
    let options = TcpOptions {
        call_home_timeout: Duration::from_secs(5),
        ..TcpOptions::default()
    };
    let client = TcpClient::new(home(&tasks).await, options, &tasks);
    let all = instances(&folder);
    let (_, worker, endpoint) = all.iter().find(|(name, ..)| name == "generate").unwrap();
    for codec in [Codec::MessagePack, Codec::Json] {
        let mut endpoint = endpoint.clone();
        endpoint.codec = codec;
        let plane = TokenPlane::new(Arc::new(client.clone()), endpoint);
        let mut stream = plane.send(*worker, ask(1, 5)).await.unwrap();
        let mut tokens = 0;
        let mut cached = None;
        let mut finish = None;
        while let Some(item) = stream.next().await {
            let item = item.unwrap();
            tokens += item.tokens.len();
            cached = cached.or(item.cached_tokens);
            finish = item.finish;
        }
        assert_eq!((tokens, finish), (5, Some(FinishReason::Length)));
        assert!(cached.is_some());
    }
    let plane = TokenPlane::new(Arc::new(client.clone()), endpoint.clone());
    // Left early, many times: the worker goes on serving.
    for id in 10..20 {
        let mut stream = plane.send(*worker, ask(id, 4000)).await.unwrap();
        stream.next().await.unwrap().unwrap();
    }
    // A prompt that is too long for it.
    let mut long = ask(30, 5);
    long.tokens = (0..4_000_000).collect();
    let stream = plane.send(*worker, long).await.unwrap();
    let (tokens, end) = read(stream).await;
    assert!(tokens.is_empty());
    assert!(matches!(end, Err(PlaneError::Engine(_))), "{end:?}");
    let unknown = PlaneEndpoint {
        address: format!("{}x", endpoint.address).into(),
        ..endpoint.clone()
    };
    let plane = TokenPlane::new(Arc::new(client.clone()), unknown);
    let refused = plane.send(*worker, ask(40, 1)).await.err().unwrap();
    assert!(matches!(refused, PlaneError::Refused { .. }), "{refused:?}");

    let query = all
        .iter()
        .find(|(name, ..)| name.starts_with("worker_kv_query"));
    let (_, worker, endpoint) = query.unwrap();
    let question = Value::Map(vec![
        ("worker_id".into(), Value::Uint(worker.0)),
        ("dp_rank".into(), Value::Uint(0)),
    ]);
    let payload = Payload::of_value(endpoint.codec, &question);
    let context = CallContext::new(*worker, RequestId(50));
    let mut answer = client.call(endpoint, payload, context).await.unwrap();
    let dump = answer.next().await.unwrap().unwrap().value().unwrap();
    assert!(dump.get("TreeDump").is_some(), "{dump:?}");
    assert!(answer.next().await.is_none());
}
