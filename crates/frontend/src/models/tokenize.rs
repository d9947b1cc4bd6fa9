//! Where the tokens of a prompt come from, for engines that tokenize it themselves.
//!
//! Answers one question: which tokens will the engine see for this body? In this order: the client's own ids;
//! the tokenizer in the folder that the operator named; the one in the folder that the engine names as its
//! model's, where that is on this machine; the engine's `/tokenize`; and, where nobody can tell, the bytes of
//! the text, which are no tokens but are the same for the same beginnings.
//!
//! What always holds: no source fails a request or holds it up for longer than [`remote::TIMEOUT`]; each
//! request is counted under the source that it was read by.

mod remote;
mod text_work;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use kvasir_openai::{Endpoint, Nvext, Prompt, Scan, Span};
use kvasir_tasks::Tasks;
use kvasir_text::{Effort, TextModel};
use kvasir_types::{Token, WorkerId};

use crate::http::long_work::LongWork;
use crate::models::answer_formats::AnswerFormats;
use crate::models::prompt::{PromptError, ReadTerms};
use crate::models::{ServedModel, prompt};
use crate::observe::token_source::TokenSource;
use remote::Remote;
use text_work::TextStanding;
pub(crate) use text_work::TextWork;

/// Bytes of text that count as one token where no tokenizer is at hand.
pub(crate) const BYTES_PER_TOKEN: usize = 4;

/// Bytes of text that may stand for one token of a prompt that still fits its model. No text comes near that; one
/// longer than the model's length times this cannot be served, and only so much of its beginning is read.
const FITTING_BYTES_PER_TOKEN: usize = 16;
/// Longest text that is read to its end where nobody says how long prompts may be.
const TEXT_BYTES_MAX: usize = 16 << 20;
/// Most ids of a prompt that are read there.
const IDS_MAX: usize = 4 << 20;
/// Prompts in a row that must be read by another source before that is said: one that fails now and then is no news.
const SAY_AFTER: u32 = 16;

/// How the prompts of one model become tokens.
#[derive(Default)]
pub struct TokenSources {
    text: OnceLock<(Arc<TextModel>, TokenSource)>,
    /// Names the card that the tokenizer comes from.
    card_sum: Option<Arc<str>>,
    /// How its workers write calls and reasoning.
    formats: AnswerFormats,
    /// How template and tokenizer have done so far.
    standing: Arc<TextStanding>,
    /// The folder that an engine named was looked at.
    looked: AtomicBool,
    remote: Box<Remote>,
    /// The source that was last said aloud, and how many prompts in a row were read by another.
    said: AtomicU8,
    unlike: AtomicU32,
}

impl From<Option<Arc<TextModel>>> for TokenSources {
    /// With the tokenizer of the folder that the operator named, if there is one.
    fn from(text: Option<Arc<TextModel>>) -> Self {
        let sources = Self::default();
        if let Some(text) = text {
            let _ = sources.text.set((text, TokenSource::Folder));
        }
        sources
    }
}

impl TokenSources {
    /// With the tokenizer that the card of a discovered model names; `sum` names the card.
    pub(crate) fn of_card(text: Arc<TextModel>, sum: Arc<str>) -> Self {
        let sources = Self {
            card_sum: Some(sum),
            ..Self::default()
        };
        let _ = sources.text.set((text, TokenSource::Announced));
        sources
    }

    /// With workers that write calls and reasoning in the forms of these names, as cards name them. One that is not known is said.
    #[must_use]
    pub fn with_formats(
        mut self,
        model: &str,
        tools: Option<&str>,
        reasoning: Option<&str>,
    ) -> Self {
        self.formats = AnswerFormats::named(model, tools, reasoning);
        self
    }

    /// How its workers write calls and reasoning.
    pub(crate) fn formats(&self) -> AnswerFormats {
        self.formats
    }

    /// What names the model's card, if it was discovered.
    pub(crate) fn card_sum(&self) -> Option<&Arc<str>> {
        self.card_sum.as_ref()
    }

    /// The tokenizer, where one is loaded.
    pub(crate) fn text(&self) -> Option<&Arc<TextModel>> {
        self.text.get().map(|(text, _)| text)
    }

    /// What the next prompt would be read by.
    pub(crate) fn best(&self) -> TokenSource {
        match self.text.get() {
            Some(_) if self.standing.is_resting() => TokenSource::Bytes,
            Some((_, source)) => *source,
            None if self.remote.is_offered() => TokenSource::Engine,
            None => TokenSource::Bytes,
        }
    }
}

/// An engine says that its model comes from `root`: a folder, or a name that only it can resolve. A folder
/// with a tokenizer in it is loaded, once, on a thread of its own.
pub(crate) fn announce(tasks: &Tasks, model: &Arc<ServedModel>, root: &str) {
    let tokens = model.tokens();
    let folder = PathBuf::from(root);
    if !folder.is_absolute() || tokens.text.get().is_some() {
        return;
    }
    if tokens.looked.swap(true, Ordering::Relaxed) {
        return;
    }
    let model = Arc::clone(model);
    tasks.spawn(async move {
        let load = move || load_announced(&model, &folder);
        if let Err(error) = tokio::task::spawn_blocking(load).await {
            tracing::error!(%error, "loading a tokenizer panicked");
        }
    });
}

fn load_announced(model: &ServedModel, folder: &Path) {
    let tokens = model.tokens();
    if !folder.join("tokenizer.json").is_file() {
        return;
    }
    let clock = model.host.context().clock;
    let start = clock.now();
    tracing::info!(model = %model.name, folder = %folder.display(),
        "loading the tokenizer from the folder that the engine names");
    match TextModel::load(folder) {
        Ok(text) => {
            let _ = tokens.text.set((Arc::new(text), TokenSource::Announced));
            tracing::info!(model = %model.name, took_secs = (clock.now() - start).as_secs_f64(),
                "tokenizer loaded from the folder that the engine names");
        }
        Err(error) => tracing::warn!(model = %model.name, folder = %folder.display(), %error,
            "the folder that the engine names has no usable tokenizer"),
    }
}

/// A prompt as far as we can read it.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    pub(crate) tokens: Vec<Token>,
    pub(crate) source: TokenSource,
    /// The engine must see and count the same tokens, once, and look for them in its cache.
    pub(crate) certain: bool,
}

impl Reading {
    /// Whether the tokens are a stand-in.
    pub(crate) fn guessed(&self) -> bool {
        self.source == TokenSource::Bytes
    }
}

/// The prompt's tokens as the engine will see them, or a stand-in. `body` is the buffer that was scanned.
pub(crate) async fn read(
    pool: &LongWork,
    model: &ServedModel,
    endpoint: Endpoint,
    scan: &Scan<'_>,
    body: &Bytes,
    nvext: &Nvext,
) -> Reading {
    let reading = find(pool, model, endpoint, scan, body, nvext).await;
    model.meters.prompt_read(reading.source);
    // A tokenizer that rests has said so.
    if !model.tokens().standing.is_resting() {
        say(model, reading.source);
    }
    reading
}

/// Whether a prompt is read by asking an engine, which then has to answer before it is known whether there is a worker.
pub(crate) fn asks_an_engine(model: &ServedModel, nvext: &Nvext) -> bool {
    nvext.token_data.is_none() && model.text().is_none() && model.host.needs().any()
}

/// The prompt of a request that nobody reads, since it is likely to be refused: a stand-in.
pub(crate) fn unread(model: &ServedModel, endpoint: Endpoint, scan: &Scan<'_>) -> Reading {
    bytes(scan, endpoint, fitting(model.context_length))
}

async fn find(
    pool: &LongWork,
    model: &ServedModel,
    endpoint: Endpoint,
    scan: &Scan<'_>,
    body: &Bytes,
    nvext: &Nvext,
) -> Reading {
    let ids_max = fitting_ids(model.context_length);
    if let Some(tokens) = &nvext.token_data {
        return Reading {
            tokens: tokens.iter().copied().take(ids_max).collect(),
            source: TokenSource::Client,
            certain: false,
        };
    }
    let spans = scan.content_spans();
    let reading = |tokens, source, alone: bool| Reading {
        tokens,
        source,
        certain: alone && prompt::is_plain(scan, spans),
    };
    let chat = endpoint == Endpoint::Chat;
    if let Some((tokens, alone)) = by_ids(scan, chat, ids_max) {
        return reading(tokens, TokenSource::Client, alone);
    }
    let tokens = model.tokens();
    if let Some((text, source)) = tokens.text.get() {
        let found = by_text(pool, model, text, scan, spans, body, chat).await;
        if let Some((tokens, alone)) = found {
            return reading(tokens, *source, alone);
        }
    } else if model.host.needs().any()
        // In a box: prompts that are read here do not carry its room.
        && let Some((tokens, alone)) =
            Box::pin(tokens.remote.tokens(model.links(), scan, endpoint, up(model))).await
    {
        return reading(tokens, TokenSource::Engine, alone);
    }
    bytes(scan, endpoint, fitting(model.context_length))
}

/// Whether a worker may be asked for tokens: nothing is held against it, unless something is against everybody.
fn up(model: &ServedModel) -> impl Fn(WorkerId) -> bool + use<> {
    let ejected: BTreeSet<WorkerId> = model.host.ask(|router| {
        let fleet = router.fleet();
        let ejected = fleet.members().filter(|m| m.ejected_until().is_some());
        match fleet.up().is_empty() {
            true => BTreeSet::new(),
            false => ejected.map(|m| m.spec.id).collect(),
        }
    });
    move |worker| !ejected.contains(&worker)
}

/// Bytes of text that a prompt of a model may have to be read to its end.
pub(crate) fn fitting(context_length: u32) -> usize {
    (context_length as usize)
        .saturating_mul(FITTING_BYTES_PER_TOKEN)
        .min(TEXT_BYTES_MAX)
}

/// Ids that a prompt of a model may have to be read to its end: more of them cannot be served.
fn fitting_ids(context_length: u32) -> usize {
    (context_length as usize).min(IDS_MAX)
}

/// A completion's prompt that came as ids, and whether it is the only one and was read to its end.
fn by_ids(scan: &Scan<'_>, chat: bool, ids_max: usize) -> Option<(Vec<Token>, bool)> {
    // Text is not parsed twice.
    let listed = scan.raw("prompt").is_some_and(|raw| raw.starts_with('['));
    if chat || !listed {
        return None;
    }
    match scan.first_prompt(ids_max)? {
        (Prompt::Tokens(tokens), alone) => Some((tokens, alone)),
        (Prompt::Text(_), _) => None,
    }
}

/// By the tokenizer; on a thread of its own where that takes long, or may.
async fn by_text(
    pool: &LongWork,
    model: &ServedModel,
    text: &Arc<TextModel>,
    scan: &Scan<'_>,
    spans: Option<&[Span]>,
    body: &Bytes,
    chat: bool,
) -> Option<(Vec<Token>, bool)> {
    let clock = model.host.context().clock;
    let start = clock.now();
    let mut terms = ReadTerms {
        chat,
        now_unix: clock.unix_secs(start),
        bytes_max: fitting(model.context_length),
        effort: Effort::Brief,
    };
    let work = TextWork::new(pool, model);
    let mut found = None;
    if !text.is_long(body.len()) && work.is_quick() {
        found = work.inline(|effort| {
            terms.effort = effort;
            let mut printed = None;
            let read = prompt::of_scan(text, scan, spans, &terms, || printed = Some(clock.now()));
            read.map(|read| (read, printed))
        });
    }
    let read: Result<_, PromptError> = match found {
        Some(read) => read,
        None => {
            terms.effort = Effort::Full;
            let (text, body, bytes) = (Arc::clone(text), body.clone(), body.len());
            let read = move || {
                let scan = Scan::parse(&body).map_err(|_| PromptError::Unknown)?;
                let spans = scan.content_spans();
                let mut printed = None;
                let rendered = || printed = Some(clock.now());
                let read = prompt::of_scan(&text, &scan, spans, &terms, rendered)?;
                Ok((read, printed))
            };
            work.elsewhere(bytes, read).await??
        }
    };
    let (found, printed) = read.ok()?;
    model.meters.tokenized(start, printed, clock.now());
    Some(found)
}

/// Tokens made of the text's bytes: no engine knows them, but equal beginnings give equal blocks.
fn bytes(scan: &Scan<'_>, endpoint: Endpoint, bytes_max: usize) -> Reading {
    let text = match endpoint {
        Endpoint::Chat => scan.messages(),
        Endpoint::Completions => scan.raw("prompt"),
    };
    let text = prompt::beginning(text.unwrap_or_default(), bytes_max);
    Reading {
        tokens: kvasir_text::approximate_tokens(text),
        source: TokenSource::Bytes,
        certain: false,
    }
}

/// Says aloud what prompts are read by, when that changes.
fn say(model: &ServedModel, source: TokenSource) {
    let tokens = model.tokens();
    if source == TokenSource::Client {
        return;
    }
    let said = tokens.said.load(Ordering::Relaxed);
    if said == source as u8 {
        tokens.unlike.store(0, Ordering::Relaxed);
        return;
    }
    let unlike = tokens
        .unlike
        .fetch_add(1, Ordering::Relaxed)
        .saturating_add(1);
    if said != 0 && unlike < SAY_AFTER {
        return;
    }
    tokens.unlike.store(0, Ordering::Relaxed);
    if tokens.said.swap(source as u8, Ordering::Relaxed) == source as u8 {
        return;
    }
    if source == TokenSource::Bytes {
        tracing::warn!(model = %model.name, source = source.name(),
            "no tokenizer: prompts are compared by their bytes, and cache events cannot be matched; \
             give the model's folder with --model-path");
    } else {
        tracing::info!(model = %model.name, source = source.name(), "prompts become tokens");
    }
}
