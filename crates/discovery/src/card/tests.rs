//! Cards of several versions, and what names them.

use super::*;

fn card(json: &Value) -> Card {
    Card::parse(json).unwrap()
}

#[test]
fn a_card_without_newer_members_is_read_with_defaults() {
    let old = card(&json!({"display_name": "m", "model_type": 3, "kv_cache_block_size": 16}));
    assert_eq!(old.model_type.to_string(), "Chat | Completions");
    assert!(old.is_old() && old.role() == WorkerType::Aggregated && old.needs.is_empty());
    assert_eq!(
        (old.runtime.data_parallel_size, old.context_length),
        (1, None)
    );
    assert!(old.runtime.enable_local_indexer && old.tokenizer().is_none());
    let prefill = card(&json!({"display_name": "m", "model_type": "Prefill"}));
    assert_eq!(prefill.role(), WorkerType::Prefill);
    let backend = card(&json!({"display_name": "m", "model_type": "Backend"}));
    assert_eq!(backend.model_type, ModelType::TEXT);
    let odd = json!({"display_name": "m", "aliases": "x", "needs": 3, "lora": [], "tokenizer": "t",
        "runtime_config": [1], "migration_limit": -1, "kv_cache_block_size": 1e30, "model_input": {}});
    let odd = card(&odd);
    assert_eq!((odd.migration_limit, odd.kv_cache_block_size), (0, 0));
    assert!(odd.artefacts().is_empty());
}

#[test]
fn a_card_without_a_usable_name_is_refused() {
    assert_eq!(Card::parse(&json!([])), Err(CardError::NotAnObject));
    for bad in [
        json!({}),
        json!({"display_name": ""}),
        json!({"display_name": "a\nb"}),
    ] {
        assert_eq!(Card::parse(&bad), Err(CardError::BadName));
    }
}

#[test]
fn model_types_are_read_in_every_form_and_written_as_text() {
    for (form, text) in [
        (json!("Chat | Completions"), "Chat | Completions"),
        (json!("completions|CHAT"), "Chat | Completions"),
        (json!(""), ""),
        (json!(4), "Embedding"),
        (json!({"bits": 17}), "Chat | Prefill"),
        (json!("Chat | Telepathy"), "Chat | Telepathy"),
        (json!(null), ""),
        (json!(4_294_967_296_u64), ""),
    ] {
        let read = ModelType::read(Some(&form));
        assert_eq!(read.to_string(), text, "{form}");
        assert_eq!(ModelType::from_text(text), read);
    }
}

#[test]
fn files_are_found_in_every_shape() {
    let files = card(&json!({
        "display_name": "m",
        "tokenizer": {"hf_tokenizer_json": {"path": "/m/tokenizer.json", "checksum": "blake3:ab", "size": 3}},
        "chat_template_file": {"hf_chat_template_jinja": {"is_custom": true, "file": {"path": "/t/chat.jinja"}}},
        "model_info": {"HfConfigJson": "/m/config.json"},
        "extra_files": [{"path": "http://h/v1/extra.json?x=1", "checksum": "blake3:cd"}],
    }));
    let names: Vec<String> = files
        .artefacts()
        .iter()
        .map(|a| a.file_name().into())
        .collect();
    assert_eq!(
        names,
        ["config.json", "tokenizer.json", "chat.jinja", "extra.json"]
    );
    assert!(files.artefacts()[3].is_url() && !files.artefacts()[0].is_url());
    let good = Artefact {
        checksum: Some(format!("blake3:{}", blake3::hash(b"x").to_hex())),
        ..files.tokenizer().unwrap()
    };
    assert!(good.matches(b"x") && !good.matches(b"y"));
}

#[test]
fn what_decides_how_a_model_is_served_changes_its_checksum_and_nothing_else_does() {
    let base = json!({
        "display_name": "m", "source_path": "/m", "kv_cache_block_size": 16, "worker_type": "decode",
        "needs": [["prefill"]],
        "tokenizer": {"hf_tokenizer_json": {"path": "/a/tokenizer.json", "checksum": "blake3:ab"}},
    });
    let sum = card(&base).checksum();
    assert_eq!(sum.len(), 64);
    let with = |name: &str, value: Value| {
        let mut other = base.clone();
        other[name] = value;
        card(&other).checksum()
    };
    for (name, value) in [
        ("display_name", json!("n")),
        ("kv_cache_block_size", json!(32)),
        ("worker_type", json!("aggregated")),
        ("needs", json!([])),
        ("aliases", json!(["b"])),
        ("router_config", json!({"mode": "kv"})),
        ("architectural_max_context_length", json!(5)),
        (
            "tokenizer",
            json!({"hf_tokenizer_json": {"path": "/a/tokenizer.json", "checksum": "blake3:cd"}}),
        ),
    ] {
        assert_ne!(with(name, value), sum, "{name}");
    }
    for (name, value) in [
        ("user_data", json!({"a": 1})),
        (
            "tokenizer",
            json!({"hf_tokenizer_json": {"path": "http://h/t.json", "checksum": "blake3:ab"}}),
        ),
    ] {
        assert_eq!(with(name, value), sum, "{name}");
    }
}

#[test]
fn a_new_card_reads_as_it_was_written() {
    let new = NewCard {
        name: "Org/Model-7B".into(),
        aliases: vec!["m".into()],
        model_type: ModelType::TEXT,
        model_input: ModelInput::Tokens,
        worker_type: WorkerType::Decode,
        needs: vec![vec![WorkerType::Prefill]],
        kv_cache_block_size: 64,
        context_length: 32768,
        migration_limit: 1,
        source_path: "/m".into(),
        artefacts: vec![(
            "tokenizer",
            Artefact {
                kind: "hf_tokenizer_json".into(),
                path: "/m/tokenizer.json".into(),
                checksum: None,
                size: Some(1),
            },
        )],
        runtime_config: json!({"total_kv_blocks": 10, "data_parallel_size": 2, "taints": ["a"],
            "disaggregated_endpoint": {"bootstrap_host": "h", "bootstrap_port": 9}}),
    };
    let card = new.into_card().unwrap();
    assert_eq!(card.to_json()["slug"], "org_model-7b");
    assert_eq!(card, Card::parse(&card.to_json()).unwrap());
    assert_eq!(card.needs, [[WorkerType::Prefill]]);
    assert_eq!(card.context_length, Some(32768));
    assert_eq!(card.runtime.total_kv_blocks, Some(10));
    assert_eq!(card.runtime.bootstrap, Some(("h".into(), 9)));
    assert_eq!(card.tokenizer().unwrap().path, "/m/tokenizer.json");
}

/// As 1.6.1 writes it.
#[test]
fn a_card_may_say_how_its_workers_are_chosen() {
    let mode = |said: &str| {
        let mut value = json!({"display_name": "m"});
        value["router_config"] = json!({"router_mode": said, "kv_router_config": {}});
        card(&value).router_mode()
    };
    for (said, name) in [
        ("k_v", "kv"),
        ("round_robin", "round-robin"),
        ("power_of_two_choices", "power-of-two"),
        ("direct", "direct"),
    ] {
        assert_eq!(mode(said).as_deref(), Some(name));
    }
    assert_eq!(card(&json!({"display_name": "m"})).router_mode(), None);
}
