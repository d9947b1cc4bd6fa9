//! The card of a model that lies in a folder.

use std::io;
use std::path::Path;

use kvasir_discovery::{Artefact, Card, ModelInput, ModelType, NewCard, WorkerType};
use kvasir_types::BootstrapAddress;
use serde_json::json;

/// Slot in a card, kind, and file of a model's folder.
pub(crate) const FILES: [(&str, &str, &str); 5] = [
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

/// Which part of requests a worker computes, as its card says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CardRole {
    /// All of it.
    #[default]
    Aggregated,
    /// The prompt; decode workers meet it there, or learn from its answer where the prompt is.
    Prefill(Option<BootstrapAddress>),
    /// The answer.
    Decode,
}

/// The card of the model in `folder`, served under `name` in a role. Readers are to find the folder under the same path.
pub fn card_of_folder(
    folder: &Path,
    name: &str,
    facts: &EngineFacts,
    role: &CardRole,
) -> io::Result<Card> {
    let folder = folder.canonicalize()?;
    let artefacts = folder_artefacts(&folder)?;
    let card = NewCard {
        name: name.into(),
        aliases: Vec::new(),
        model_type: match role {
            CardRole::Prefill(_) => ModelType::NONE,
            CardRole::Aggregated | CardRole::Decode => ModelType::TEXT,
        },
        model_input: ModelInput::Tokens,
        worker_type: match role {
            CardRole::Aggregated => WorkerType::Aggregated,
            CardRole::Prefill(_) => WorkerType::Prefill,
            CardRole::Decode => WorkerType::Decode,
        },
        needs: match role {
            CardRole::Aggregated => Vec::new(),
            CardRole::Prefill(_) => vec![vec![WorkerType::Decode]],
            CardRole::Decode => vec![vec![WorkerType::Prefill]],
        },
        kv_cache_block_size: facts.block_size,
        context_length: facts.context_length,
        migration_limit: facts.migration_limit,
        source_path: folder.to_string_lossy().into_owned(),
        artefacts,
        runtime_config: runtime_config(facts, role),
    };
    card.into_card()
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}

/// The files of a model's folder that a card names: slot and file, with its checksum.
pub fn folder_artefacts(folder: &Path) -> io::Result<Vec<(&'static str, Artefact)>> {
    let mut artefacts = Vec::new();
    for (slot, kind, file) in FILES {
        let path = folder.join(file);
        match std::fs::read(&path) {
            Ok(bytes) => {
                let file = Artefact::new(kind, &path.to_string_lossy(), &bytes);
                artefacts.push((slot, file));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(artefacts)
}

/// As Dynamo's own workers write it.
fn runtime_config(facts: &EngineFacts, role: &CardRole) -> serde_json::Value {
    let mut config = json!({
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
    });
    if let (CardRole::Prefill(Some(address)), Some(members)) = (role, config.as_object_mut()) {
        let meeting = json!({"bootstrap_host": &*address.host, "bootstrap_port": address.port});
        members.insert("disaggregated_endpoint".to_owned(), meeting);
    }
    config
}
