//! The card of a model that lies in a folder.

use std::io;
use std::path::Path;

use kvasir_discovery::{Card, ModelInput, ModelType, WorkerType};
use serde_json::json;

/// Slot in a card, kind, and file of a model's folder.
const FILES: [(&str, &str, &str); 5] = [
    ("model_info", "hf_config_json", "config.json"),
    ("tokenizer", "hf_tokenizer_json", "tokenizer.json"),
    (
        "prompt_formatter",
        "hf_tokenizer_config_json",
        "tokenizer_config.json",
    ),
    (
        "gen_config",
        "hf_generation_config_json",
        "generation_config.json",
    ),
    (
        "chat_template_file",
        "hf_chat_template_jinja",
        "chat_template.jinja",
    ),
];

/// What a worker says of its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineFacts {
    /// Tokens in a block.
    pub block_size: u32,
    /// Blocks of one rank.
    pub total_kv_blocks: u64,
    /// Requests in a batch.
    pub max_num_seqs: u64,
    /// Tokens computed in a step.
    pub max_num_batched_tokens: u64,
    /// Longest request, prompt and answer together.
    pub context_length: u32,
    /// Data-parallel ranks.
    pub ranks: u32,
    /// How often a request may move to another worker mid-stream.
    pub migration_limit: u32,
}

/// The card of the model in `folder`, served under `name`. Readers are to find the folder under the same path.
pub fn card_of_folder(folder: &Path, name: &str, facts: &EngineFacts) -> io::Result<Card> {
    let folder = folder.canonicalize()?;
    let mut card = json!({
        "display_name": name,
        "slug": slug(name),
        "source_path": folder.to_string_lossy(),
        "architectural_max_context_length": facts.context_length,
        "context_length": facts.context_length,
        "kv_cache_block_size": facts.block_size,
        "migration_limit": facts.migration_limit,
        "model_type": ModelType::TEXT.to_string(),
        "model_input": ModelInput::Tokens.name(),
        "worker_type": WorkerType::Aggregated.name(),
        "needs": [],
        "runtime_config": runtime_config(facts),
        "media_decoder": null,
        "media_fetcher": null,
    });
    for (slot, kind, file) in FILES {
        let path = folder.join(file);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let checksum = format!("blake3:{}", blake3::hash(&bytes).to_hex());
        let file =
            json!({"path": path.to_string_lossy(), "checksum": checksum, "size": bytes.len()});
        if let Some(card) = card.as_object_mut() {
            card.insert(slot.into(), json!({ kind: file }));
        }
    }
    Card::parse(&card).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}

/// A name as a part of URLs and keys.
fn slug(name: &str) -> String {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let slug = |c: char| if fits(c) { c.to_ascii_lowercase() } else { '_' };
    name.chars().map(slug).collect()
}

/// As Dynamo's own workers write it.
fn runtime_config(facts: &EngineFacts) -> serde_json::Value {
    json!({
        "context_length": facts.context_length,
        "total_kv_blocks": facts.total_kv_blocks,
        "max_num_seqs": facts.max_num_seqs,
        "max_num_batched_tokens": facts.max_num_batched_tokens,
        "tool_call_parser": null,
        "reasoning_parser": null,
        "tool_call_arguments_format": "json_string",
        "structural_tag_mode": "off",
        "structural_tag_scope": "auto",
        "structural_tag_schema": "auto",
        "exclude_tools_when_tool_choice_none": true,
        "data_parallel_start_rank": 0,
        "data_parallel_size": facts.ranks,
        "enable_local_indexer": true,
        "kv_event_publishing_enabled": true,
        "runtime_data": {},
        "enable_eagle": false,
    })
}
