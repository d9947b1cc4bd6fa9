//! A model's folder.
//!
//! Answers one question: what do the files beside `tokenizer.json` say? This is the only place that reads
//! files. A file that is absent says nothing; a file that is there and broken is an error, since a silent guess
//! would route by wrong tokens.

use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};

use kvasir_types::Token;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::error::LoadError;
use crate::model::GenerationDefaults;

/// The largest `tokenizer.json` that is read; real ones are under 40 MB.
const TOKENIZER_BYTES_MAX: u64 = 128 << 20;
/// The largest of the other files; real ones are under 2 MB.
const FILE_BYTES_MAX: u64 = 16 << 20;
/// `model_max_length` above this means that nobody set it.
const CONTEXT_UNSET: f64 = 1e9;

/// The files of a model, unread.
#[derive(Clone, Debug, Default)]
pub struct TextFiles {
    /// Where they came from, for messages.
    pub folder: PathBuf,
    /// `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<Vec<u8>>,
    /// `generation_config.json`.
    pub generation_config: Option<Vec<u8>>,
    /// `config.json`.
    pub config: Option<Vec<u8>>,
    /// `chat_template.jinja`.
    pub chat_template: Option<Vec<u8>>,
}

impl TextFiles {
    /// Those of the small model that the binary carries.
    #[must_use]
    pub fn builtin() -> Self {
        crate::builtin::files()
    }
}

/// What the files say.
#[derive(Debug, Default)]
pub(crate) struct Config {
    /// Templates by name.
    pub(crate) templates: Vec<(String, String)>,
    /// Special tokens by their variable's name.
    pub(crate) specials: Vec<(String, String)>,
    pub(crate) eos_token: Option<String>,
    pub(crate) eos_ids: Vec<Token>,
    pub(crate) context_length: Option<u32>,
    pub(crate) defaults: GenerationDefaults,
}

impl TextFiles {
    pub(crate) fn read(folder: &Path) -> Result<Self, LoadError> {
        let optional = |name: &str| match read(&folder.join(name), FILE_BYTES_MAX) {
            Err(LoadError::Read { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        };
        Ok(Self {
            folder: folder.to_owned(),
            tokenizer: read(&folder.join("tokenizer.json"), TOKENIZER_BYTES_MAX)?,
            tokenizer_config: optional("tokenizer_config.json")?,
            generation_config: optional("generation_config.json")?,
            config: optional("config.json")?,
            chat_template: optional("chat_template.jinja")?,
        })
    }

    pub(crate) fn parse(&self) -> Result<Config, LoadError> {
        let tokenizer: Map<String, Value> = self.json("tokenizer_config.json")?;
        let generation: Generation = self.json("generation_config.json")?;
        let model: ModelConfig = self.json("config.json")?;
        let specials = specials(&tokenizer);
        let eos_ids = generation.eos_token_id.or(model.eos_token_id);
        let eos = specials.iter().find(|(name, _)| name == "eos_token");
        let text = model.text_config.and_then(|t| t.max_position_embeddings);
        let unset = |length: &f64| *length < CONTEXT_UNSET;
        let stated = tokenizer.get("model_max_length").and_then(Value::as_f64);
        let stated = stated.filter(unset).map(|length| length as u32);
        Ok(Config {
            templates: self.templates(&tokenizer)?,
            eos_token: eos.map(|(_, token)| token.clone()),
            eos_ids: eos_ids.map(Ids::into_vec).unwrap_or_default(),
            context_length: model.max_position_embeddings.or(text).or(stated),
            defaults: GenerationDefaults {
                temperature: generation.temperature,
                top_p: generation.top_p,
                top_k: generation.top_k,
                repetition_penalty: generation.repetition_penalty,
            },
            specials,
        })
    }

    /// The file `chat_template.jinja`, else the template or the named templates in the tokenizer's config.
    fn templates(&self, config: &Map<String, Value>) -> Result<Vec<(String, String)>, LoadError> {
        let parse = |reason: &str| LoadError::Parse {
            path: self.folder.join("tokenizer_config.json"),
            reason: reason.to_owned(),
        };
        if let Some(bytes) = &self.chat_template {
            let source = String::from_utf8(bytes.clone()).map_err(|_| LoadError::Parse {
                path: self.folder.join("chat_template.jinja"),
                reason: "not UTF-8".into(),
            })?;
            return Ok(vec![("default".into(), source)]);
        }
        match config.get("chat_template") {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(Value::String(source)) => Ok(vec![("default".into(), source.clone())]),
            Some(list) => Vec::<NamedTemplate>::deserialize(list)
                .map(|list| list.into_iter().map(|t| (t.name, t.template)).collect())
                .map_err(|_| parse("chat_template is neither a string nor a list of templates")),
        }
    }

    fn json<T: Default + for<'a> Deserialize<'a>>(&self, name: &str) -> Result<T, LoadError> {
        let bytes = match name {
            "tokenizer_config.json" => &self.tokenizer_config,
            "generation_config.json" => &self.generation_config,
            _ => &self.config,
        };
        let Some(bytes) = bytes else {
            return Ok(T::default());
        };
        serde_json::from_slice(bytes).map_err(|e| LoadError::Parse {
            path: self.folder.join(name),
            reason: e.to_string(),
        })
    }
}

/// Reads at most so many bytes, whatever kind of file it is.
fn read(path: &Path, bytes_max: u64) -> Result<Vec<u8>, LoadError> {
    let fail = |source| LoadError::Read {
        path: path.to_owned(),
        source,
    };
    let file = std::fs::File::open(path).map_err(fail)?;
    let size = file.metadata().map_err(fail)?.len();
    let mut bytes = Vec::new();
    if size <= bytes_max {
        bytes.reserve_exact(size as usize);
        let mut part = file.take(bytes_max + 1);
        part.read_to_end(&mut bytes).map_err(fail)?;
    }
    if size.max(bytes.len() as u64) > bytes_max {
        return Err(LoadError::Parse {
            path: path.to_owned(),
            reason: format!("longer than {bytes_max} bytes, which is the limit"),
        });
    }
    Ok(bytes)
}

/// `bos_token`, `eos_token` and their like: a string, or an object with its text in `content`.
fn specials(config: &Map<String, Value>) -> Vec<(String, String)> {
    let tokens = config.iter().filter(|(key, _)| key.ends_with("_token"));
    tokens
        .filter_map(|(key, value)| {
            let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
            Some((key.clone(), text.to_owned()))
        })
        .collect()
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

#[derive(Default, Deserialize)]
struct Generation {
    eos_token_id: Option<Ids>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i32>,
    repetition_penalty: Option<f32>,
}

#[derive(Default, Deserialize)]
struct ModelConfig {
    eos_token_id: Option<Ids>,
    max_position_embeddings: Option<u32>,
    text_config: Option<TextConfig>,
}

#[derive(Deserialize)]
struct TextConfig {
    max_position_embeddings: Option<u32>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(Token),
    Many(Vec<Token>),
}

impl Ids {
    fn into_vec(self) -> Vec<Token> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}
