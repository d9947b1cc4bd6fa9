//! Joins of records, in any order, with everything that may stand in the way.

use serde_json::{Value, json};

use super::*;
use crate::record::ModelEntry;

struct Rig(FleetJoin);

impl Rig {
    fn new() -> Self {
        Self(FleetJoin::new(Namespaces::All))
    }

    fn put(&mut self, record: Record) {
        let key = record.key();
        self.0.apply(&Change::Added(key, Arc::new(record)));
    }

    fn worker(&mut self, component: &str, id: u64, card: Value) {
        self.put(endpoint("ns", component, id));
        self.put(model("ns", component, id, None, card));
    }

    fn leave(&mut self, component: &str, id: u64) {
        for bucket in [Bucket::Instances, Bucket::Models] {
            let key = format!("ns/{component}/generate/{id:x}");
            self.0.apply(&Change::Removed(RecordKey::new(bucket, key)));
        }
    }

    fn ids(&mut self) -> Vec<u64> {
        self.0.view().workers.into_keys().collect()
    }
}

fn endpoint(namespace: &str, component: &str, id: u64) -> Record {
    Record::Endpoint(Instance {
        component: component.into(),
        endpoint: "generate".into(),
        namespace: namespace.into(),
        instance_id: id,
        transport: RequestTransport::Tcp(format!("h:1/{id:x}/{namespace}/{component}/generate")),
        device_type: Some("cuda".into()),
        request_plane_codec: Some("msgpack".into()),
    })
}

fn model(namespace: &str, component: &str, id: u64, suffix: Option<&str>, card: Value) -> Record {
    Record::Model(ModelEntry {
        namespace: namespace.into(),
        component: component.into(),
        endpoint: "generate".into(),
        instance_id: id,
        card_json: card,
        model_suffix: suffix.map(Into::into),
    })
}

fn card() -> Value {
    json!({
        "display_name": "m", "model_type": "Chat | Completions", "model_input": "Tokens",
        "worker_type": "aggregated", "needs": [], "kv_cache_block_size": 64,
        "architectural_max_context_length": 32768,
        "tokenizer": {"hf_tokenizer_json": {"path": "/m/tokenizer.json", "checksum": "blake3:ab"}},
        "runtime_config": {"total_kv_blocks": 100, "max_num_seqs": 8, "max_num_batched_tokens": 512,
            "data_parallel_start_rank": 2, "data_parallel_size": 4, "taints": ["b", "a", "b"]},
    })
}

fn with(name: &str, value: Value) -> Value {
    let mut card = card();
    card[name] = value;
    card
}

fn in_role(role: &str, needs: Value) -> Value {
    let mut card = with("worker_type", role.into());
    card["needs"] = needs;
    card
}

#[test]
fn an_endpoint_and_its_card_are_a_worker_whichever_comes_first() {
    let mut rig = Rig::new();
    rig.put(model("ns", "backend", 7, None, card()));
    assert!(rig.ids().is_empty());
    rig.put(endpoint("ns", "backend", 7));
    let view = rig.0.view();
    assert!(view.notes.is_empty(), "{:?}", view.notes);
    let record = &view.workers[&7].record;
    assert_eq!(
        record.transport.to_string(),
        "tcp:h:1/7/ns/backend/generate"
    );
    let Transport::Plane(endpoint) = &record.transport else {
        panic!("not on a plane");
    };
    assert_eq!(endpoint.codec, Codec::MessagePack);
    assert_eq!((record.first_rank, record.ranks), (DpRank(2), Some(4)));
    assert_eq!(
        (record.block_size, record.role),
        (Some(64), Role::Aggregated)
    );
    assert_eq!(record.capacity.kv_blocks, Some(100));
    assert_eq!(record.taints, ["a".into(), "b".into()]);
    assert_eq!(record.device, Some(Device::Accelerator));
    assert_eq!(record.models[0].max_model_len, Some(32768));
    rig.leave("backend", 7);
    assert!(rig.ids().is_empty());
}

#[test]
fn a_set_keeps_the_card_that_it_began_with_until_its_last_worker_has_gone() {
    let mut rig = Rig::new();
    rig.worker("backend", 1, card());
    assert_eq!(rig.ids(), [1]);
    rig.worker("backend", 2, with("kv_cache_block_size", 16.into()));
    rig.worker("backend", 3, with("kv_cache_block_size", 16.into()));
    let view = rig.0.view();
    assert_eq!(view.workers.into_keys().collect::<Vec<_>>(), [1]);
    let notes: Vec<String> = view.notes.iter().map(ToString::to_string).collect();
    assert_eq!(notes.len(), 2);
    assert!(
        notes[0].starts_with("v1/mdc/ns/backend/generate/2: its card differs"),
        "{notes:?}"
    );
    rig.leave("backend", 1);
    assert_eq!(rig.ids(), [2, 3]);
    // Found at once: most have it.
    let mut rig = Rig::new();
    rig.worker("backend", 1, card());
    rig.worker("backend", 2, with("kv_cache_block_size", 16.into()));
    rig.worker("backend", 3, with("kv_cache_block_size", 16.into()));
    assert_eq!(rig.ids(), [2, 3]);
    // Another endpoint is another set.
    rig.worker("other", 4, card());
    assert_eq!(rig.ids(), [2, 3, 4]);
}

#[test]
fn workers_of_one_model_have_one_tokenizer_wherever_they_are() {
    let mut rig = Rig::new();
    rig.worker("backend", 1, card());
    assert_eq!(rig.ids(), [1]);
    let other =
        json!({"hf_tokenizer_json": {"path": "/m/tokenizer.json", "checksum": "blake3:cd"}});
    rig.worker("another", 2, with("tokenizer", other));
    let view = rig.0.view();
    assert_eq!(view.workers.len(), 1);
    assert!(
        view.notes
            .first()
            .unwrap()
            .to_string()
            .contains("tokenizer or template is not that of m")
    );
    rig.leave("backend", 1);
    assert_eq!(rig.ids(), [2]);
}

#[test]
fn a_role_is_there_when_those_that_it_needs_are() {
    let mut rig = Rig::new();
    let mut prefill = in_role("prefill", json!([["decode"]]));
    prefill["model_type"] = "".into();
    prefill["runtime_config"]["disaggregated_endpoint"] =
        json!({"bootstrap_host": "10.0.0.2", "bootstrap_port": 9411});
    rig.worker("prefill", 2, prefill);
    let view = rig.0.view();
    assert!(view.workers.is_empty() && !view.notes.first().unwrap().is_refusal());
    // Who answers needs nobody: it can compute prompts, too.
    rig.worker("backend", 1, in_role("decode", json!([["prefill"]])));
    let view = rig.0.view();
    let bootstrap = view.workers[&2].record.bootstrap.clone().unwrap();
    assert_eq!((&*bootstrap.host, bootstrap.port), ("10.0.0.2", 9411));
    rig.leave("prefill", 2);
    assert_eq!(rig.ids(), [1]);
    rig.worker("prefill", 2, {
        let mut prefill = in_role("prefill", json!([["decode"]]));
        prefill["model_type"] = "".into();
        prefill
    });
    let view = rig.0.view();
    assert_eq!(view.workers[&1].record.role, Role::Decode);
    assert_eq!(view.workers[&2].record.role, Role::Prefill);
    rig.leave("backend", 1);
    assert!(rig.ids().is_empty());
}

#[test]
fn older_cards_are_served_in_compatibility_mode() {
    let mut rig = Rig::new();
    rig.worker(
        "backend",
        1,
        json!({"display_name": "m", "model_type": 3, "kv_cache_block_size": 16}),
    );
    let view = rig.0.view();
    assert_eq!(view.workers[&1].record.ranks, Some(1));
    assert!(
        view.notes
            .first()
            .unwrap()
            .to_string()
            .contains("compatibility mode")
    );
    rig.worker(
        "prefill",
        2,
        json!({"display_name": "m", "model_type": "Prefill"}),
    );
    assert_eq!(rig.0.view().workers[&2].record.role, Role::Prefill);
}

#[test]
fn adapters_and_aliases_are_models_of_the_same_worker() {
    let mut rig = Rig::new();
    rig.worker("backend", 1, with("aliases", json!(["n"])));
    let mut adapter = with("display_name", "ada".into());
    adapter["lora"] = json!({"name": "ada"});
    rig.put(model("ns", "backend", 1, Some("ada"), adapter));
    let view = rig.0.view();
    let models = &view.workers[&1].record.models;
    let named: Vec<_> = models
        .iter()
        .map(|m| (&*m.name, m.parent.as_deref()))
        .collect();
    assert_eq!(named, [("m", None), ("n", None), ("ada", Some("m"))]);
}

#[test]
fn what_this_frontend_cannot_serve_is_said() {
    let mut rig = Rig::new();
    rig.worker("a", 1, with("model_input", "Text".into()));
    rig.worker("b", 2, with("model_type", "Embedding".into()));
    rig.worker("c", 3, json!({"display_name": ""}));
    rig.worker("d", 4, in_role("encode", json!([])));
    rig.worker("e", 5, card());
    rig.worker("f", 5, card());
    let view = rig.0.view();
    assert_eq!(view.workers.into_keys().collect::<Vec<_>>(), [5]);
    assert_eq!(view.notes.len(), 5);
    assert!(view.notes.iter().all(FleetNote::is_refusal));
}

#[test]
fn only_wanted_namespaces_count() {
    for (namespaces, expected) in [
        (Namespaces::All, vec![1, 2, 3]),
        (Namespaces::One("ns".into()), vec![1]),
        (Namespaces::Prefix("ns".into()), vec![1, 2]),
    ] {
        let mut rig = Rig(FleetJoin::new(namespaces));
        for (id, namespace) in [(1, "ns"), (2, "ns2"), (3, "other")] {
            rig.put(endpoint(namespace, "backend", id));
            rig.put(model(namespace, "backend", id, None, card()));
        }
        assert_eq!(rig.ids(), expected);
    }
}
