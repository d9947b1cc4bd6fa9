//! What a model card says.
//!
//! Answers one question: which model does a worker serve, and what must a frontend know to serve it? A card is JSON that workers of
//! many versions write. It is kept whole, so that what is not known here is passed on as it came; what is known is read once, and
//! leniently: a member that is missing has its default, one of another shape than expected is missing.
//!
//! What always holds: a card has a usable name; two cards with the same [`Card::checksum`] are served alike.
//!
//! Elsewhere: loading the files that a card names (`frontend`), which workers belong together ([`crate::fleet`]).

mod checksum;
mod kinds;

use std::sync::Arc;

use serde_json::{Map, Value, json};

pub use self::kinds::{ModelInput, ModelType, WorkerType};
use kvasir_types::ModelCard;

/// Aliases of a model, and entries of its `needs` and taints, that are read.
const LIST_MAX: usize = 64;
/// Longest text that is read from a card, such as a path.
const TEXT_BYTES_MAX: usize = 4096;

/// Why a card cannot be used. The worker that wrote it is at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CardError {
    /// It is not a JSON object.
    #[error("the card is not a JSON object")]
    NotAnObject,
    /// `display_name` is missing, or cannot be the name of a model.
    #[error("display_name is missing, empty, too long, or has control characters")]
    BadName,
}

/// A model card. See the module.
#[derive(Clone, Debug, PartialEq)]
pub struct Card {
    raw: Map<String, Value>,
    /// The name that requests use.
    pub name: String,
    /// Further names.
    pub aliases: Vec<String>,
    /// What it can be asked for.
    pub model_type: ModelType,
    /// What its workers take.
    pub model_input: ModelInput,
    /// Which part of a request its workers compute; none in older cards.
    pub worker_type: Option<WorkerType>,
    /// Any of these sets of other workers has to be there for it to serve; empty: it serves alone.
    pub needs: Vec<Vec<WorkerType>>,
    /// Tokens in a block.
    pub kv_cache_block_size: u32,
    /// Longest sequence, prompt and answer together.
    pub context_length: Option<u32>,
    /// How often a request may move to another worker mid-stream.
    pub migration_limit: u32,
    /// The adapter that it is, if it is one.
    pub lora: Option<String>,
    /// Where the worker took the model from.
    pub source_path: Option<String>,
    /// What the worker says of its engine.
    pub runtime: RuntimeConfig,
}

/// What a worker says of its engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeConfig {
    /// KV blocks of a rank.
    pub total_kv_blocks: Option<u64>,
    /// Sequences that run at once.
    pub max_num_seqs: Option<u64>,
    /// Tokens computed in one step.
    pub max_num_batched_tokens: Option<u64>,
    /// The first data-parallel rank.
    pub data_parallel_start_rank: u32,
    /// How many there are.
    pub data_parallel_size: u32,
    /// Whether the worker answers questions about its events.
    pub enable_local_indexer: bool,
    /// Whether it publishes cache events; none if it does not say.
    pub kv_event_publishing_enabled: Option<bool>,
    /// How tool calls are found in its answers.
    pub tool_call_parser: Option<String>,
    /// How reasoning is found in its answers.
    pub reasoning_parser: Option<String>,
    /// Whether blocks are named with the next token, as speculative decoding needs it.
    pub enable_eagle: bool,
    /// Labels that requests may require or prefer.
    pub taints: Vec<String>,
    /// Where decode workers meet a prefill worker.
    pub bootstrap: Option<(String, u16)>,
    /// Which places the worker is in: a kind of place (`zone`) and its name.
    pub topology: Vec<(String, String)>,
    /// Where those are to be that take a prefill worker's prompts over.
    pub transfer: Option<TransferDomain>,
}

/// The kind of place that a prompt's two workers are to share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferDomain {
    /// Which kind, such as `zone`.
    pub domain: String,
    /// By how much workers of the same place are preferred, in thousandths; none: others are not asked.
    pub preferred: Option<u16>,
}

/// Ranks of a worker that are believed.
const RANKS_MAX: u32 = 1024;

/// A file that a card names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artefact {
    /// What it is, as the card says: `hf_tokenizer_json`.
    pub kind: String,
    /// A path on the worker's machine, or a URL.
    pub path: String,
    /// `blake3:` and 64 hexadecimal digits.
    pub checksum: Option<String>,
    /// Its length in bytes.
    pub size: Option<u64>,
}

impl Artefact {
    /// A file of this kind, at this place, that has these bytes.
    #[must_use]
    pub fn new(kind: &str, path: &str, bytes: &[u8]) -> Self {
        Self {
            kind: kind.into(),
            path: path.into(),
            checksum: Some(format!("blake3:{}", blake3::hash(bytes).to_hex())),
            size: Some(bytes.len() as u64),
        }
    }

    /// The name of the file itself.
    #[must_use]
    pub fn file_name(&self) -> &str {
        let path = self.path.split(['?', '#']).next().unwrap_or_default();
        path.rsplit('/').next().unwrap_or_default()
    }

    /// Whether it is fetched over HTTP.
    #[must_use]
    pub fn is_url(&self) -> bool {
        self.path.starts_with("http://") || self.path.starts_with("https://")
    }

    /// Whether these bytes are the file that the card means. A card without a checksum means any.
    #[must_use]
    pub fn matches(&self, bytes: &[u8]) -> bool {
        let Some(checksum) = &self.checksum else {
            return true;
        };
        let hex = checksum.strip_prefix("blake3:").unwrap_or(checksum);
        blake3::hash(bytes).to_hex().eq_ignore_ascii_case(hex)
    }

    fn read(slot: &Value) -> Option<Self> {
        let (kind, file) = slot.as_object()?.iter().next()?;
        Self::read_file(kind, file)
    }

    fn read_file(kind: &str, file: &Value) -> Option<Self> {
        // A template may come with a note beside its file; older cards have the path alone.
        let file = file.get("file").unwrap_or(file);
        let path = file.as_str().or_else(|| text(file.get("path")))?;
        (!path.is_empty() && path.len() <= TEXT_BYTES_MAX).then(|| Self {
            kind: kind.into(),
            path: path.into(),
            checksum: text(file.get("checksum")).map(Into::into),
            size: file.get("size").and_then(Value::as_u64),
        })
    }
}

impl Card {
    /// How its workers are to be chosen, if it says so, as `--router-mode` names it. Cards write `k_v` and `power_of_two_choices`.
    pub(crate) fn router_mode(&self) -> Option<Arc<str>> {
        let mode = self
            .raw
            .get("router_config")?
            .get("router_mode")?
            .as_str()?;
        Some(match mode {
            "k_v" => "kv".into(),
            "power_of_two_choices" => "power-of-two".into(),
            other => other.replace('_', "-").into(),
        })
    }

    /// Reads a card.
    pub fn parse(card: &Value) -> Result<Self, CardError> {
        let raw = card.as_object().ok_or(CardError::NotAnObject)?;
        let name = raw.get("display_name").and_then(Value::as_str);
        let name = name.filter(|name| ModelCard::is_name(name));
        let name = name.ok_or(CardError::BadName)?;
        let runtime = raw.get("runtime_config").unwrap_or(&Value::Null);
        let model_type = ModelType::read(raw.get("model_type"));
        let context_length = [
            runtime.get("context_length"),
            raw.get("context_length"),
            raw.get("architectural_max_context_length"),
        ];
        let aliases = texts(raw.get("aliases"));
        Ok(Self {
            name: name.into(),
            aliases: aliases.filter(|alias| ModelCard::is_name(alias)).collect(),
            model_input: ModelInput::read(raw.get("model_input")),
            worker_type: WorkerType::read(raw.get("worker_type"))
                .or(model_type.is_prefill().then_some(WorkerType::Prefill)),
            model_type,
            needs: needs(raw.get("needs")),
            kv_cache_block_size: uint(raw.get("kv_cache_block_size")).unwrap_or(0),
            context_length: context_length
                .into_iter()
                .find_map(|value| uint(value).filter(|&length| length > 0)),
            migration_limit: uint(raw.get("migration_limit")).unwrap_or(0),
            lora: text(raw.get("lora").and_then(|lora| lora.get("name"))).map(Into::into),
            source_path: text(raw.get("source_path")).map(Into::into),
            runtime: RuntimeConfig::read(runtime),
            raw: raw.clone(),
        })
    }

    /// The card as JSON, with all that it came with.
    #[must_use]
    pub fn to_json(&self) -> Value {
        Value::Object(self.raw.clone())
    }

    /// The part of a request that its workers compute; all of it, if an older card does not say.
    #[must_use]
    pub fn role(&self) -> WorkerType {
        self.worker_type.unwrap_or(WorkerType::Aggregated)
    }

    /// Whether it is of the shape that workers wrote before they named their role.
    #[must_use]
    pub const fn is_old(&self) -> bool {
        self.worker_type.is_none()
    }

    /// What the worker's engine says of itself under this name, as it said it.
    #[must_use]
    pub fn runtime_data(&self, name: &str) -> Option<&Value> {
        let runtime = self.raw.get("runtime_config")?;
        let data = runtime.get("runtime_data")?.get(name)?;
        (!data.is_null()).then_some(data)
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> Option<Artefact> {
        self.artefact("tokenizer")
    }

    /// Every file that a tokenizer and a template are made from; the same file once.
    #[must_use]
    pub fn artefacts(&self) -> Vec<Artefact> {
        let slots = [
            "model_info",
            "tokenizer",
            "prompt_formatter",
            "chat_template_file",
            "gen_config",
        ];
        let mut found: Vec<Artefact> = slots
            .iter()
            .filter_map(|slot| self.artefact(slot))
            .collect();
        let extra = self.raw.get("extra_files").and_then(Value::as_array);
        let extra = extra.into_iter().flatten().take(LIST_MAX);
        found.extend(extra.filter_map(|file| Artefact::read_file("extra_file", file)));
        found.dedup_by(|one, other| one.path == other.path);
        found
    }

    /// Names the tokenizer and the template: cards that have it in common can share them.
    #[must_use]
    pub fn text_key(&self) -> String {
        let slots = ["tokenizer", "prompt_formatter", "chat_template_file"];
        let files = slots.iter().filter_map(|slot| self.artefact(slot));
        let names: Vec<String> = files
            .map(|file| file.checksum.unwrap_or(file.path))
            .collect();
        match names.is_empty() {
            true => self.source_path.clone().unwrap_or_default(),
            false => names.join(" "),
        }
    }

    /// The file in a slot of the card, such as `tokenizer`, if it names one.
    #[must_use]
    pub fn artefact(&self, slot: &str) -> Option<Artefact> {
        Artefact::read(self.raw.get(slot)?)
    }

    /// Names what is served: cards that differ in it are not served as one model. As Dynamo computes its `mdc_sum`: 64
    /// hexadecimal digits.
    #[must_use]
    pub fn checksum(&self) -> String {
        checksum::of(self)
    }
}

impl RuntimeConfig {
    fn read(value: &Value) -> Self {
        let number = |name: &str| value.get(name).and_then(Value::as_u64);
        let known = |name: &str| number(name).filter(|&count| count > 0);
        let flag = |name: &str| value.get(name).and_then(Value::as_bool);
        let words = |name: &str| text(value.get(name)).map(Into::into);
        let bootstrap = value.get("disaggregated_endpoint").and_then(|endpoint| {
            let host = text(endpoint.get("bootstrap_host"))?;
            let port = endpoint.get("bootstrap_port").and_then(Value::as_u64)?;
            Some((host.into(), u16::try_from(port).ok()?))
        });
        Self {
            total_kv_blocks: known("total_kv_blocks"),
            max_num_seqs: known("max_num_seqs"),
            max_num_batched_tokens: known("max_num_batched_tokens"),
            data_parallel_start_rank: uint(value.get("data_parallel_start_rank")).unwrap_or(0),
            data_parallel_size: uint(value.get("data_parallel_size"))
                .unwrap_or(1)
                .clamp(1, RANKS_MAX),
            enable_local_indexer: flag("enable_local_indexer").unwrap_or(true),
            kv_event_publishing_enabled: flag("kv_event_publishing_enabled"),
            tool_call_parser: words("tool_call_parser"),
            reasoning_parser: words("reasoning_parser"),
            enable_eagle: flag("enable_eagle").unwrap_or(false),
            taints: texts(value.get("taints")).collect(),
            bootstrap,
            topology: topology(value.get("topology_domains")),
            transfer: TransferDomain::read(value),
        }
    }
}

/// What a preference weighs that has no weight, and the most that one weighs: all of it.
const WEIGHT_MAX: u16 = 1000;

impl TransferDomain {
    fn read(runtime: &Value) -> Option<Self> {
        let domain = text(runtime.get("kv_transfer_domain"))?;
        // What is not called a preference is meant.
        let is_preference = text(runtime.get("kv_transfer_enforcement")) == Some("preferred");
        let weight = runtime.get("kv_transfer_preferred_weight");
        let weight = weight.and_then(Value::as_f64);
        let thousandths = |weight: f64| (weight.clamp(0.0, 1.0) * f64::from(WEIGHT_MAX)) as u16;
        Some(Self {
            domain: domain.into(),
            preferred: is_preference.then(|| weight.map_or(WEIGHT_MAX, thousandths)),
        })
    }
}

fn topology(value: Option<&Value>) -> Vec<(String, String)> {
    let domains = value.and_then(Value::as_object).into_iter().flatten();
    let read = |(domain, name): (&String, &Value)| Some((domain.clone(), text(Some(name))?.into()));
    domains.take(LIST_MAX).filter_map(read).collect()
}

/// What a worker of ours writes into its card. [`Self::into_card`] makes it.
#[derive(Clone, Debug)]
pub struct NewCard {
    /// The name that requests use.
    pub name: String,
    /// Further names.
    pub aliases: Vec<String>,
    /// What it can be asked for.
    pub model_type: ModelType,
    /// What the worker takes.
    pub model_input: ModelInput,
    /// Which part of a request the worker computes.
    pub worker_type: WorkerType,
    /// Who else has to be there.
    pub needs: Vec<Vec<WorkerType>>,
    /// Tokens in a block.
    pub kv_cache_block_size: u32,
    /// Longest sequence.
    pub context_length: u32,
    /// How often a request may move mid-stream.
    pub migration_limit: u32,
    /// Where the model came from.
    pub source_path: String,
    /// Slot (`tokenizer`) and file.
    pub artefacts: Vec<(&'static str, Artefact)>,
    /// What the worker says of its engine, as JSON.
    pub runtime_config: Value,
}

impl NewCard {
    /// The card.
    pub fn into_card(self) -> Result<Card, CardError> {
        let mut card = json!({
            "display_name": self.name,
            "slug": slug(&self.name),
            "source_path": self.source_path,
            "architectural_max_context_length": self.context_length,
            "context_length": self.context_length,
            "kv_cache_block_size": self.kv_cache_block_size,
            "migration_limit": self.migration_limit,
            "model_type": self.model_type.to_string(),
            "model_input": self.model_input.name(),
            "worker_type": self.worker_type.name(),
            "needs": self.needs.iter().map(|set| set.iter().map(|w| w.name()).collect()).collect::<Vec<Vec<_>>>(),
            "runtime_config": self.runtime_config,
            "media_decoder": null,
            "media_fetcher": null,
        });
        if let Some(card) = card.as_object_mut() {
            if !self.aliases.is_empty() {
                card.insert("aliases".into(), json!(self.aliases));
            }
            for (slot, file) in self.artefacts {
                let kind = file.kind;
                let file = json!({"path": file.path, "checksum": file.checksum, "size": file.size});
                // Of a template readers also want to know who chose it.
                let file = match slot {
                    "chat_template_file" => json!({"is_custom": false, "file": file}),
                    _ => file,
                };
                card.insert(slot.into(), json!({kind: file}));
            }
        }
        Card::parse(&card)
    }
}

/// A name as a part of URLs and keys: what is not a letter, a digit, `-` or `_` becomes `_`.
#[must_use]
pub fn slug(name: &str) -> String {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let slug = |c: char| if fits(c) { c.to_ascii_lowercase() } else { '_' };
    name.chars().map(slug).collect()
}

fn text(value: Option<&Value>) -> Option<&str> {
    let text = value?.as_str()?;
    (!text.is_empty() && text.len() <= TEXT_BYTES_MAX).then_some(text)
}

fn texts(value: Option<&Value>) -> impl Iterator<Item = String> {
    let list = value.and_then(Value::as_array).into_iter().flatten();
    let texts = list.take(LIST_MAX).filter_map(|value| text(Some(value)));
    texts.map(Into::into)
}

fn uint(value: Option<&Value>) -> Option<u32> {
    u32::try_from(value?.as_u64()?).ok()
}

fn needs(value: Option<&Value>) -> Vec<Vec<WorkerType>> {
    let sets = value.and_then(Value::as_array).into_iter().flatten();
    let of = |set: &Value| {
        let set = set.as_array().into_iter().flatten().take(LIST_MAX);
        set.filter_map(|kind| WorkerType::read(Some(kind)))
            .collect()
    };
    sets.take(LIST_MAX).map(of).collect()
}

#[cfg(test)]
mod tests;
