//! What names a card: the parts that decide how its model is served, and not where its files lie.
//!
//! The order and the form of the parts are those of Dynamo 1.6.1, whose frontend sends the result to workers as `mdc_sum`: compared with
//! what a real one sent for cards that differ in their context lengths.

use serde_json::Value;

use super::{Card, WorkerType};

pub(super) fn of(card: &Card) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(card.name.as_bytes());
    hasher.update(card.source_path.as_deref().unwrap_or_default().as_bytes());
    for slot in [
        "model_info",
        "tokenizer",
        "prompt_formatter",
        "chat_template_file",
        "gen_config",
    ] {
        if let Some(sum) = card.artefact(slot).and_then(|file| file.checksum) {
            hasher.update(sum.as_bytes());
        }
    }
    for (name, sum) in extra_files(card) {
        hasher.update(name.as_bytes());
        hasher.update(&[0]);
        hasher.update(sum.as_bytes());
    }
    hasher.update(&card.context_length.unwrap_or(0).to_be_bytes());
    hasher.update(&card.kv_cache_block_size.to_be_bytes());
    hasher.update(&[declared(card).map_or(0, WorkerType::ordinal)]);
    hasher.update(&length(card.needs.len()));
    for set in &card.needs {
        hasher.update(&length(set.len()));
        for kind in set {
            hasher.update(&[kind.ordinal()]);
        }
    }
    if let Some(router) = card
        .raw
        .get("router_config")
        .filter(|value| !value.is_null())
    {
        hasher.update(blake3::hash(router.to_string().as_bytes()).as_bytes());
    }
    if !card.aliases.is_empty() {
        hasher.update(&length(card.aliases.len()));
        for alias in &card.aliases {
            hasher.update(&length(alias.len()));
            hasher.update(alias.as_bytes());
        }
    }
    hasher.finalize().to_hex().to_string()
}

/// The role that the card names, and not one that was read out of its type.
fn declared(card: &Card) -> Option<WorkerType> {
    WorkerType::read(card.raw.get("worker_type"))
}

fn extra_files(card: &Card) -> Vec<(String, String)> {
    let files = card.raw.get("extra_files").and_then(Value::as_array);
    let read = |file: &Value| super::Artefact::read_file("extra_file", file);
    let named = files.into_iter().flatten().filter_map(read).map(|file| {
        let sum = file.checksum.clone().unwrap_or_default();
        let sum = sum.strip_prefix("blake3:").unwrap_or(&sum).to_owned();
        (file.file_name().to_owned(), sum)
    });
    let mut named: Vec<_> = named.collect();
    named.sort_unstable();
    named
}

fn length(count: usize) -> [u8; 4] {
    u32::try_from(count).unwrap_or(u32::MAX).to_be_bytes()
}
