//! Tokenizers and templates that model cards name.
//!
//! Answers one question: what is the text of a model whose worker was discovered? A card names files: on this machine, or at the
//! worker's own HTTP server. They are read, compared with the checksums that the card gives, and made into a tokenizer on a thread of
//! its own. What fails is tried again, after longer and longer pauses.
//!
//! What always holds: a file that is not what its card says is not used; a file is read up to [`FILE_BYTES_MAX`]; each text is loaded
//! once, however many workers have it; at most [`UNUSED_MAX`] texts are kept that nobody has any more.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Uri};
use kvasir_discovery::{Artefact, Card};
use kvasir_tasks::Tasks;
use kvasir_text::{LoadError, TextFiles, TextModel};
use kvasir_upstream::{Bounds, Pool, UpstreamError, WorkerTls, parse_url};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

/// Longest file of a model that is read; real tokenizers are under 40 MB.
const FILE_BYTES_MAX: u64 = 512 << 20;
/// A worker has so long to hand over one file.
const FETCH_TIMEOUT: Duration = Duration::from_secs(120);
/// Before the second try; doubled after each.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Between two tries at most.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Texts that are kept though no worker has them: a model that is restarted need not be loaded again.
const UNUSED_MAX: usize = 4;
/// Texts that wait to be taken.
const LOADED_MAX: usize = 16;

/// Why a text cannot be had.
#[derive(Debug, thiserror::Error)]
enum CardTextError {
    #[error("the card names no tokenizer; give the model's folder with --model-path")]
    NoTokenizer,
    #[error(
        "{path} is not on this machine ({cause}): mount the model's folder at the same place, name it with --model-path, or start \
         the worker with DYN_SYSTEM_PORT so that it hands out its files"
    )]
    NotHere { path: String, cause: std::io::Error },
    #[error("{0} cannot be fetched: {1}")]
    Fetch(String, UpstreamError),
    #[error("{0} is no URL")]
    BadUrl(String),
    #[error("{0} is not the file that the card means: its checksum differs")]
    OtherFile(String),
    #[error("{0} is longer than {FILE_BYTES_MAX} bytes")]
    TooLong(String),
    #[error("{0}")]
    Load(#[from] LoadError),
    #[error("loading panicked")]
    Panicked,
}

/// The texts of cards, loaded or on their way.
pub(super) struct CardTexts {
    tasks: Tasks,
    tls: WorkerTls,
    by_key: BTreeMap<String, TextState>,
    loaded: mpsc::Receiver<(String, Arc<TextModel>)>,
    sender: mpsc::Sender<(String, Arc<TextModel>)>,
}

enum TextState {
    Loading(AbortHandle),
    Loaded(Arc<TextModel>),
}

impl CardTexts {
    pub(super) fn new(tasks: &Tasks, tls: &WorkerTls) -> Self {
        let (sender, loaded) = mpsc::channel(LOADED_MAX);
        Self {
            tasks: tasks.clone(),
            tls: tls.clone(),
            by_key: BTreeMap::new(),
            loaded,
            sender,
        }
    }

    /// The text of a card, if it is loaded; else it is being loaded from now on.
    pub(super) fn of(&mut self, key: &str, card: &Arc<Card>) -> Option<Arc<TextModel>> {
        match self.by_key.get(key) {
            Some(TextState::Loaded(text)) => return Some(Arc::clone(text)),
            Some(TextState::Loading(_)) => return None,
            None => {}
        }
        let (card, tls, sender) = (Arc::clone(card), self.tls.clone(), self.sender.clone());
        let name = key.to_owned();
        let task = self.tasks.spawn(async move {
            let text = load_until_done(&card, &tls).await;
            let _ = sender.send((name, text)).await;
        });
        let loading = TextState::Loading(task.abort_handle());
        self.by_key.insert(key.to_owned(), loading);
        None
    }

    /// Whether any is on its way.
    pub(super) fn is_loading(&self) -> bool {
        let is_loading = |state: &TextState| matches!(state, TextState::Loading(_));
        self.by_key.values().any(is_loading)
    }

    /// Waits until another is loaded.
    pub(super) async fn next_loaded(&mut self) {
        if let Some((key, text)) = self.loaded.recv().await
            && let Some(state) = self.by_key.get_mut(&key)
        {
            *state = TextState::Loaded(text);
        }
    }

    /// Lets go of what nobody has any more.
    pub(super) fn keep(&mut self, used: &BTreeSet<&str>) {
        let mut unused = 0;
        self.by_key.retain(|key, state| match state {
            _ if used.contains(key.as_str()) => true,
            TextState::Loading(task) => {
                task.abort();
                false
            }
            TextState::Loaded(_) => {
                unused += 1;
                unused <= UNUSED_MAX
            }
        });
    }
}

impl Drop for CardTexts {
    fn drop(&mut self) {
        self.keep(&BTreeSet::new());
    }
}

/// Loads the text of a card, and tries until that is done.
pub(crate) async fn load_until_done(card: &Card, tls: &WorkerTls) -> Arc<TextModel> {
    let mut pause = FIRST_PAUSE;
    loop {
        match load(card, tls).await {
            Ok(text) => {
                tracing::info!(model = %card.name, "tokenizer of the model card loaded");
                return Arc::new(text);
            }
            Err(error) => {
                let retry_secs = pause.as_secs();
                tracing::error!(model = %card.name, %error, retry_secs,
                    "the files of a model card cannot be used: the model is not served");
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

async fn load(card: &Card, tls: &WorkerTls) -> Result<TextModel, CardTextError> {
    let load = match card.tokenizer() {
        Some(_) => {
            let files = files(card, tls).await?;
            tokio::task::spawn_blocking(move || TextModel::of_files(&files))
        }
        None => {
            let folder = folder(card).ok_or(CardTextError::NoTokenizer)?;
            tokio::task::spawn_blocking(move || TextModel::load(&folder))
        }
    };
    let loaded = load.await.map_err(|_| CardTextError::Panicked)?;
    Ok(loaded?)
}

/// The folder that an older card names instead of its files, if it is on this machine.
fn folder(card: &Card) -> Option<PathBuf> {
    let folder = Path::new(card.source_path.as_deref()?);
    let is_here = folder.is_absolute() && folder.join("tokenizer.json").is_file();
    is_here.then(|| folder.to_owned())
}

/// All that the card names, read and compared.
async fn files(card: &Card, tls: &WorkerTls) -> Result<TextFiles, CardTextError> {
    let mut files = TextFiles {
        folder: card.source_path.clone().unwrap_or_default().into(),
        ..TextFiles::default()
    };
    for artefact in card.artefacts() {
        let slot = match Slot::of(&artefact) {
            Some(slot) => slot,
            // Pictures, sound, licences: nothing that makes tokens.
            None => continue,
        };
        let bytes = match artefact.is_url() {
            true => fetch(&artefact, tls).await?,
            false => read(&artefact).await?,
        };
        if !artefact.matches(&bytes) {
            return Err(CardTextError::OtherFile(artefact.path));
        }
        match slot {
            Slot::Tokenizer => files.tokenizer = bytes,
            Slot::TokenizerConfig => files.tokenizer_config = Some(bytes),
            Slot::GenerationConfig => files.generation_config = Some(bytes),
            Slot::Config => files.config = Some(bytes),
            Slot::Template => files.chat_template = Some(bytes),
            Slot::TemplateJson => files.chat_template = template_of(&bytes).or(files.chat_template),
        }
    }
    match files.tokenizer.is_empty() {
        true => Err(CardTextError::NoTokenizer),
        false => Ok(files),
    }
}

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Tokenizer,
    TokenizerConfig,
    GenerationConfig,
    Config,
    Template,
    TemplateJson,
}

impl Slot {
    /// By the card's word for it, else by its name.
    fn of(artefact: &Artefact) -> Option<Self> {
        let kind = artefact.kind.replace('_', "").to_ascii_lowercase();
        match (&*kind, artefact.file_name()) {
            ("hftokenizerjson", _) | (_, "tokenizer.json") => Some(Self::Tokenizer),
            ("hftokenizerconfigjson", _) | (_, "tokenizer_config.json") => {
                Some(Self::TokenizerConfig)
            }
            ("hfgenerationconfigjson", _) | (_, "generation_config.json") => {
                Some(Self::GenerationConfig)
            }
            ("hfconfigjson", _) | (_, "config.json") => Some(Self::Config),
            ("hfchattemplate" | "hfchattemplatejinja", _) | (_, "chat_template.jinja") => {
                Some(Self::Template)
            }
            ("hfchattemplatejson", _) | (_, "chat_template.json") => Some(Self::TemplateJson),
            _ => None,
        }
    }
}

/// The template in a file of JSON.
fn template_of(json: &[u8]) -> Option<Vec<u8>> {
    let json: serde_json::Value = serde_json::from_slice(json).ok()?;
    Some(json.get("chat_template")?.as_str()?.as_bytes().to_vec())
}

async fn read(artefact: &Artefact) -> Result<Vec<u8>, CardTextError> {
    let path = artefact.path.clone();
    let read = move || -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let file = std::fs::File::open(path)?;
        file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let read = tokio::task::spawn_blocking(read).await;
    let bytes = read.map_err(|_| CardTextError::Panicked)?;
    let path = || artefact.path.clone();
    let bytes = bytes.map_err(|cause| CardTextError::NotHere {
        path: path(),
        cause,
    })?;
    match bytes.len() as u64 > FILE_BYTES_MAX {
        true => Err(CardTextError::TooLong(path())),
        false => Ok(bytes),
    }
}

async fn fetch(artefact: &Artefact, tls: &WorkerTls) -> Result<Vec<u8>, CardTextError> {
    let bad = || CardTextError::BadUrl(artefact.path.clone());
    let (scheme, rest) = artefact.path.split_once("://").ok_or_else(bad)?;
    let (authority, path) = rest.split_once('/').ok_or_else(bad)?;
    let endpoint = parse_url(&format!("{scheme}://{authority}")).map_err(|_| bad())?;
    let mut request = Request::new(Bytes::new());
    *request.method_mut() = Method::GET;
    *request.uri_mut() = format!("/{path}").parse::<Uri>().map_err(|_| bad())?;
    let size = artefact.size.unwrap_or(FILE_BYTES_MAX).min(FILE_BYTES_MAX);
    let bounds = Bounds {
        timeout: FETCH_TIMEOUT,
        answer_bytes_max: usize::try_from(size).unwrap_or(usize::MAX),
    };
    let pool = Pool::new(endpoint, tls.clone());
    match pool.fetch_ok(request, bounds).await {
        Ok(bytes) => Ok(bytes.to_vec()),
        Err(error) => Err(CardTextError::Fetch(artefact.path.clone(), error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_known_by_the_cards_word_or_by_their_name() {
        for (kind, path, slot) in [
            ("hf_tokenizer_json", "/x/anything", Some(Slot::Tokenizer)),
            ("HfConfigJson", "/x/c", Some(Slot::Config)),
            (
                "extra_file",
                "/x/tokenizer_config.json",
                Some(Slot::TokenizerConfig),
            ),
            (
                "hf_chat_template_jinja",
                "/x/my.jinja",
                Some(Slot::Template),
            ),
            (
                "hf_chat_template_json",
                "/x/t.json",
                Some(Slot::TemplateJson),
            ),
            ("extra_file", "http://h/v1/preprocessor_config.json", None),
        ] {
            let artefact = Artefact {
                kind: kind.into(),
                path: path.into(),
                checksum: None,
                size: None,
            };
            assert_eq!(Slot::of(&artefact), slot, "{kind} {path}");
        }
        assert_eq!(template_of(br#"{"chat_template":"x"}"#).unwrap(), b"x");
    }
}
