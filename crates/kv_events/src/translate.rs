//! Which of an engine's events count, and what their blocks are called in the index.
//!
//! Answers one question: what does this batch change in the cache of one rank? A [`Translator`] holds what
//! later events of the same rank leave out: the kind of each group of layers, and the salt that a
//! sequence's first block named.
//!
//! Invariants: a block is never given a local hash under fewer keys than the engine computed it with
//! (an unknown adapter or key costs a missed hit, never a false one); no allocation per event.
//!
//! Elsewhere: bytes (`kvasir-wire`), order and loss of batches (`batches`).

use std::collections::HashMap;
use std::fmt::Write as _;
use std::mem;
use std::sync::Arc;

use kvasir_hash::{BlockHasher, Scope, normalize_media_runs};
use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, Token};
use kvasir_wire::engine::{Adapter, Attention, Batch, Event, Removed, Stored};

/// Salted blocks remembered per rank, for their children. Past it, salted sequences are left out.
pub const SALTED_BLOCKS_MAX: usize = 1 << 20;
/// Groups of layers remembered per rank. Known models have fewer than ten.
pub const GROUPS_MAX: u32 = 256;

/// What the operator or the engine's own answers say about a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TranslateOptions {
    /// Tokens per block that the index of this model uses.
    pub block_size: u32,
    /// The model's image placeholder: its runs are replaced by pad tokens, on the request side too.
    pub image_token: Option<Token>,
}

/// Why an event of a well-formed batch does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Skip {
    /// The engine's blocks have another size: its events cannot be used at all.
    BlockSize {
        /// Tokens per block in the engine.
        engine: u32,
    },
    /// It lies in a place that we do not know.
    Medium,
    /// It lies with somebody else.
    Remote,
    /// A group of layers whose blocks are no whole prefixes.
    Group,
    /// Names and tokens do not fit together.
    Shape,
    /// More salted blocks than [`SALTED_BLOCKS_MAX`].
    Salts,
    /// A kind of event that this release does not know.
    Unknown,
}

/// What became of one event.
#[derive(Clone, Copy, Debug)]
pub enum Translation<'a> {
    /// It changes the rank's cache.
    Event(&'a KvEvent),
    /// It does not count.
    Skipped(Skip),
}

/// What a [`Translator`] knows, to be saved while the router is restarted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TranslatorState {
    /// Groups of layers by number: whether their blocks are whole prefixes; `None` where it was never said.
    pub groups: Vec<Option<bool>>,
    /// Salted blocks: name, salt, times stored less times removed.
    pub salts: Vec<(EngineHash, Arc<str>, u32)>,
}

#[derive(Clone, Debug)]
struct SaltCount {
    salt: Arc<str>,
    /// Times stored less times removed, as the index counts.
    count: u32,
}

/// Turns one rank's batches into index events.
#[derive(Clone, Debug)]
pub struct Translator {
    options: TranslateOptions,
    groups: Vec<Attention>,
    salts: HashMap<EngineHash, SaltCount>,
    pairs_seen: bool,
    blocks: Vec<StoredBlock>,
    names: Vec<EngineHash>,
    locals: Vec<LocalHash>,
    media: Vec<u64>,
    tokens: Vec<Token>,
    adapter: String,
}

impl Translator {
    /// Nothing learned yet.
    #[must_use]
    pub fn new(options: TranslateOptions) -> Self {
        Self {
            options,
            groups: Vec::new(),
            salts: HashMap::new(),
            pairs_seen: false,
            blocks: Vec::new(),
            names: Vec::new(),
            locals: Vec::new(),
            media: Vec::new(),
            tokens: Vec::new(),
            adapter: String::new(),
        }
    }

    /// What is known so far.
    #[must_use]
    pub fn state(&self) -> TranslatorState {
        let kind = |attention: &Attention| match attention {
            Attention::Full => Some(true),
            Attention::Other => Some(false),
            Attention::Unsaid => None,
        };
        let salted = |(name, s): (&EngineHash, &SaltCount)| (*name, Arc::clone(&s.salt), s.count);
        let mut salts: Vec<_> = self.salts.iter().map(salted).collect();
        salts.sort_unstable_by_key(|(name, ..)| *name);
        TranslatorState {
            groups: self.groups.iter().map(kind).collect(),
            salts,
        }
    }

    /// Takes over what an earlier translator of the same rank knew.
    pub fn restore(&mut self, state: &TranslatorState) {
        let kind = |whole: &Option<bool>| match whole {
            Some(true) => Attention::Full,
            Some(false) => Attention::Other,
            None => Attention::Unsaid,
        };
        let groups = state.groups.iter().take(GROUPS_MAX as usize);
        self.groups = groups.map(kind).collect();
        let salts = state.salts.iter().take(SALTED_BLOCKS_MAX);
        let salted = |(name, salt, count): &(EngineHash, Arc<str>, u32)| {
            let (salt, count) = (Arc::clone(salt), *count);
            (*name, SaltCount { salt, count })
        };
        self.salts = salts.map(salted).collect();
    }

    /// Forgets what the rank's cache held; what it said about its groups stays true.
    pub fn reset(&mut self) {
        self.salts.clear();
    }

    /// Whether the engine sent tokens as pairs: then requests must be hashed with the Eagle window.
    #[must_use]
    pub const fn pairs_seen(&self) -> bool {
        self.pairs_seen
    }

    /// Salted blocks remembered.
    #[must_use]
    pub fn salted_blocks(&self) -> usize {
        self.salts.len()
    }

    /// Whether a block is known to be salted; its children are hashed under its salt.
    #[must_use]
    pub fn is_salted(&self, block: EngineHash) -> bool {
        self.salts.contains_key(&block)
    }

    /// Hands every event of `batch` to `sink`, in order.
    pub fn translate(&mut self, batch: &Batch, mut sink: impl FnMut(Translation<'_>)) {
        for event in batch.events() {
            match event {
                Event::Stored(event) => self.stored(&event, &mut sink),
                Event::Removed(event) => self.removed(&event, &mut sink),
                Event::Cleared => {
                    self.salts.clear();
                    sink(Translation::Event(&KvEvent::Cleared { tier: None }));
                }
                Event::Ignored => {}
                Event::Unknown => sink(Translation::Skipped(Skip::Unknown)),
            }
        }
    }

    fn stored(&mut self, event: &Stored<'_>, sink: &mut impl FnMut(Translation<'_>)) {
        let tier = match self.admit(event) {
            Ok(tier) => tier,
            Err(skip) => return sink(Translation::Skipped(skip)),
        };
        self.pairs_seen |= event.pairs;
        let salt = match self.salt(event) {
            Ok(salt) => salt,
            Err(skip) => return sink(Translation::Skipped(skip)),
        };
        self.hash(event, salt.as_deref().or(event.salt).unwrap_or_default());
        let mut blocks = mem::take(&mut self.blocks);
        blocks.clear();
        blocks.extend(
            event
                .hashes
                .iter()
                .zip(&self.locals)
                .map(|(&engine, &local)| StoredBlock { engine, local }),
        );
        let event = KvEvent::Stored {
            tier,
            parent: event.parent,
            blocks,
        };
        sink(Translation::Event(&event));
        if let KvEvent::Stored { blocks, .. } = event {
            self.blocks = blocks;
        }
    }

    /// Whether the event counts, and in which tier.
    fn admit(&mut self, event: &Stored<'_>) -> Result<Tier, Skip> {
        let tier = place(event.medium.tier(), event.remote)?;
        self.learn(event.group, event.attention);
        if self.filters(tier) && !self.whole_prefixes(event.group, event.attention) {
            return Err(Skip::Group);
        }
        if event.block_size != self.options.block_size {
            return Err(Skip::BlockSize {
                engine: event.block_size,
            });
        }
        let extra = usize::from(event.pairs && !event.tokens.is_empty());
        let expected = event.hashes.len().checked_mul(event.block_size as usize);
        if expected != Some(event.tokens.len() - extra) {
            return Err(Skip::Shape);
        }
        Ok(tier)
    }

    /// Groups are a matter of memory near the device; offloaded blocks are whole ones.
    const fn filters(&self, tier: Tier) -> bool {
        matches!(tier, Tier::Device | Tier::HostPinned)
    }

    fn learn(&mut self, group: Option<u32>, attention: Attention) {
        let Some(group) = group.filter(|g| *g < GROUPS_MAX) else {
            return;
        };
        if attention == Attention::Unsaid {
            return;
        }
        let at = group as usize;
        if self.groups.len() <= at {
            self.groups.resize(at + 1, Attention::Unsaid);
        }
        self.groups[at] = attention;
    }

    /// Without any word on kinds (vLLM 0.20, 0.21, and mock engines) the first group counts.
    fn whole_prefixes(&self, group: Option<u32>, attention: Attention) -> bool {
        let learned = group.and_then(|g| self.groups.get(g as usize).copied());
        match (attention, learned.unwrap_or_default()) {
            (Attention::Full, _) | (Attention::Unsaid, Attention::Full) => true,
            (Attention::Other, _) | (Attention::Unsaid, Attention::Other) => false,
            (Attention::Unsaid, Attention::Unsaid) => group.is_none_or(|g| g == 0),
        }
    }

    /// The salt of the event's blocks, remembered for their children.
    fn salt(&mut self, event: &Stored<'_>) -> Result<Option<Arc<str>>, Skip> {
        let salt = match (event.salt, event.parent) {
            (Some(""), _) => None,
            (Some(salt), _) => Some(Arc::from(salt)),
            (None, Some(_)) if self.salts.is_empty() => None,
            (None, Some(parent)) => self.salts.get(&parent).map(|s| Arc::clone(&s.salt)),
            (None, None) => None,
        };
        let Some(salt) = salt else {
            return Ok(None);
        };
        if self.salts.len() + event.hashes.len() > SALTED_BLOCKS_MAX {
            return Err(Skip::Salts);
        }
        for &name in event.hashes {
            let fresh = || SaltCount {
                salt: Arc::clone(&salt),
                count: 0,
            };
            self.salts.entry(name).or_insert_with(fresh).count += 1;
        }
        Ok(Some(salt))
    }

    /// Fills `locals` with one local hash per block.
    fn hash(&mut self, event: &Stored<'_>, salt: &str) {
        self.adapter.clear();
        let lora = match event.adapter {
            Adapter::Base => "",
            Adapter::Named(name) => name,
            Adapter::Numbered(id) => {
                // No client can ask for this name, so such blocks are never a false hit.
                let _ = write!(self.adapter, "\u{0}lora-id:{id}");
                &self.adapter
            }
        };
        let scope = Scope {
            lora,
            salt,
            eagle: event.pairs,
        };
        let size = event.block_size as usize;
        let hasher = BlockHasher::new(size, &scope);
        self.locals.clear();
        if event.media.is_empty() {
            return hasher.extend(event.tokens, &mut self.locals);
        }
        for block in 0..event.hashes.len() {
            self.media.clear();
            let own = event.media.iter().filter(|m| m.block as usize == block);
            self.media.extend(own.map(|m| m.hash));
            let end = (block + 1) * size + usize::from(event.pairs);
            let window = event.tokens.get(block * size..end).unwrap_or_default();
            let Some(image) = self.options.image_token else {
                hasher.extend_with_media(window, |_| &self.media, &mut self.locals);
                continue;
            };
            self.tokens.clear();
            self.tokens.extend_from_slice(window);
            normalize_media_runs(&mut self.tokens, image, &self.media);
            hasher.extend(&self.tokens, &mut self.locals);
        }
    }

    fn removed(&mut self, event: &Removed<'_>, sink: &mut impl FnMut(Translation<'_>)) {
        let tier = match place(event.medium.tier(), event.remote) {
            Ok(tier) => tier,
            Err(skip) => return sink(Translation::Skipped(skip)),
        };
        if self.filters(tier) && !self.whole_prefixes(event.group, Attention::Unsaid) {
            return sink(Translation::Skipped(Skip::Group));
        }
        if !self.salts.is_empty() {
            self.forget_salts(event.hashes);
        }
        let mut blocks = mem::take(&mut self.names);
        blocks.clear();
        blocks.extend_from_slice(event.hashes);
        let event = KvEvent::Removed { tier, blocks };
        sink(Translation::Event(&event));
        if let KvEvent::Removed { blocks, .. } = event {
            self.names = blocks;
        }
    }

    fn forget_salts(&mut self, names: &[EngineHash]) {
        for name in names {
            match self.salts.get_mut(name) {
                Some(salted) if salted.count > 1 => salted.count -= 1,
                Some(_) => drop(self.salts.remove(name)),
                None => {}
            }
        }
    }
}

fn place(tier: Option<Tier>, remote: bool) -> Result<Tier, Skip> {
    match (tier, remote) {
        (_, true) => Err(Skip::Remote),
        (None, _) => Err(Skip::Medium),
        (Some(tier), false) => Ok(tier),
    }
}
