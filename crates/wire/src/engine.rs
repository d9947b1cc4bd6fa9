//! A batch of events as vLLM and SGLang publish it, decoded but not yet judged.
//!
//! Answers one question: what does this payload say? One pass over the bytes fills flat buffers that are
//! used again for the next payload, so a batch costs no allocation; nothing of a malformed batch is seen.
//!
//! Elsewhere: which of these events count, and their local hashes (`translate`); the bytes themselves
//! (`decode`, `encode`).

mod decode;
mod encode;

pub use decode::peek_time;
pub use encode::{Dialect, encode_batch};

use std::ops::Range;

use kvasir_types::{EngineHash, Tier, Token};

/// Events in one batch. vLLM sends one batch per scheduler step; far above any step's work.
pub const EVENTS_MAX: usize = 1 << 20;

/// Where an event says its blocks lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Medium {
    /// Nothing said: device memory.
    #[default]
    Unsaid,
    /// A place that we know.
    Known(Tier),
    /// A name that we do not know; such an event must not count.
    Unknown,
}

impl Medium {
    /// Reads an engine's name for a place; case does not matter.
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        const NAMES: [(&str, Tier); 13] = [
            ("GPU", Tier::Device),
            ("DEVICE", Tier::Device),
            ("CPU", Tier::HostPinned),
            ("CPU_PINNED", Tier::HostPinned),
            ("CPU_TIER1", Tier::HostPinned),
            ("CPU_TIER2", Tier::Disk),
            ("DISK", Tier::Disk),
            ("NVME", Tier::Disk),
            ("STORAGE", Tier::Disk),
            ("EXTERNAL", Tier::External),
            ("NETWORK", Tier::External),
            ("REMOTE", Tier::External),
            ("SHARED", Tier::External),
        ];
        let found = NAMES.iter().find(|(n, _)| n.eq_ignore_ascii_case(name));
        found.map_or(Self::Unknown, |(_, tier)| Self::Known(*tier))
    }

    /// The tier, unless the place is unknown.
    #[must_use]
    pub const fn tier(self) -> Option<Tier> {
        match self {
            Self::Unsaid => Some(Tier::Device),
            Self::Known(tier) => Some(tier),
            Self::Unknown => None,
        }
    }
}

/// What kind of attention a group of layers has; decides whether its blocks form whole prefixes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Attention {
    /// Nothing said.
    #[default]
    Unsaid,
    /// Every earlier token is kept: blocks form whole prefixes.
    Full,
    /// Sliding windows, state-space layers, or a kind that we do not know.
    Other,
}

impl Attention {
    /// Reads `kv_cache_spec_kind`.
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        match name {
            "full_attention" | "mla_attention" | "sink_full_attention" => Self::Full,
            _ => Self::Other,
        }
    }
}

/// Under which adapter blocks were computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Adapter<'a> {
    /// The base model.
    #[default]
    Base,
    /// An adapter by its name.
    Named(&'a str),
    /// An adapter of which only the engine's own number is known (vLLM before 0.16, SGLang before 0.5.22).
    Numbered(u64),
}

/// A multimodal object's hash, and the block (counted within its event) that it lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockMedia {
    /// Which block of the event.
    pub block: u32,
    /// The object.
    pub hash: u64,
}

/// `BlockStored`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stored<'a> {
    /// The engine's names, in order. Groups without full attention send fewer than there are blocks.
    pub hashes: &'a [EngineHash],
    /// The block before the first one.
    pub parent: Option<EngineHash>,
    /// Tokens of all blocks; with `pairs` one more than the blocks hold.
    pub tokens: &'a [Token],
    /// Tokens came as pairs (Eagle): a block's window reaches one token into the next block.
    pub pairs: bool,
    /// Tokens per block.
    pub block_size: u32,
    /// Where.
    pub medium: Medium,
    /// Which adapter.
    pub adapter: Adapter<'a>,
    /// The cache salt, where the event says it: engines name it on a sequence's first block only.
    pub salt: Option<&'a str>,
    /// Multimodal objects, ascending by block.
    pub media: &'a [BlockMedia],
    /// Which group of layers.
    pub group: Option<u32>,
    /// That group's kind.
    pub attention: Attention,
    /// The blocks lie with somebody else.
    pub remote: bool,
}

/// `BlockRemoved`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Removed<'a> {
    /// The engine's names.
    pub hashes: &'a [EngineHash],
    /// Where they lay.
    pub medium: Medium,
    /// Which group of layers.
    pub group: Option<u32>,
    /// The blocks lay with somebody else.
    pub remote: bool,
}

/// One event of a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event<'a> {
    /// Blocks appeared.
    Stored(Stored<'a>),
    /// Blocks went away.
    Removed(Removed<'a>),
    /// Everything went away.
    Cleared,
    /// A kind that says nothing about blocks, sent on purpose.
    Ignored,
    /// A kind that this release does not know.
    Unknown,
}

/// A decoded batch; a buffer to be used again.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    at: f64,
    rank: Option<u32>,
    events: Vec<RawEvent>,
    hashes: Vec<EngineHash>,
    tokens: Vec<Token>,
    media: Vec<BlockMedia>,
    text: String,
}

/// Where in the flat buffers an event's parts lie.
#[derive(Clone, Debug)]
enum RawEvent {
    Stored(RawStored),
    Removed(RawRemoved),
    Cleared,
    Ignored,
    Unknown,
}

#[derive(Clone, Debug, Default)]
struct RawStored {
    hashes: Range<usize>,
    parent: Option<EngineHash>,
    tokens: Range<usize>,
    pairs: bool,
    block_size: u32,
    medium: Medium,
    lora_id: Option<u64>,
    lora_name: Option<Range<usize>>,
    salt: Option<Range<usize>>,
    media: Range<usize>,
    group: Option<u32>,
    attention: Attention,
    remote: bool,
}

#[derive(Clone, Debug, Default)]
struct RawRemoved {
    hashes: Range<usize>,
    medium: Medium,
    group: Option<u32>,
    remote: bool,
}

impl Batch {
    /// An empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// When the engine made it, in seconds of the engine's own Unix clock.
    #[must_use]
    pub const fn at(&self) -> f64 {
        self.at
    }

    /// The data-parallel rank, where the batch says it.
    #[must_use]
    pub const fn rank(&self) -> Option<u32> {
        self.rank
    }

    /// How many events it has.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.events.len()
    }

    /// Whether it has none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// The events in the engine's order.
    pub fn events(&self) -> impl ExactSizeIterator<Item = Event<'_>> {
        self.events.iter().map(|event| self.view(event))
    }

    fn view<'s>(&'s self, event: &RawEvent) -> Event<'s> {
        match event {
            RawEvent::Stored(raw) => Event::Stored(self.view_stored(raw)),
            RawEvent::Removed(raw) => Event::Removed(Removed {
                hashes: self.hashes.get(raw.hashes.clone()).unwrap_or_default(),
                medium: raw.medium,
                group: raw.group,
                remote: raw.remote,
            }),
            RawEvent::Cleared => Event::Cleared,
            RawEvent::Ignored => Event::Ignored,
            RawEvent::Unknown => Event::Unknown,
        }
    }

    fn view_stored<'s>(&'s self, raw: &RawStored) -> Stored<'s> {
        let name = raw.lora_name.clone().map(|name| self.text(name));
        let adapter = match (name, raw.lora_id) {
            (Some(name), _) if !name.is_empty() => Adapter::Named(name),
            (_, Some(id)) => Adapter::Numbered(id),
            _ => Adapter::Base,
        };
        Stored {
            hashes: self.hashes.get(raw.hashes.clone()).unwrap_or_default(),
            parent: raw.parent,
            tokens: self.tokens.get(raw.tokens.clone()).unwrap_or_default(),
            pairs: raw.pairs,
            block_size: raw.block_size,
            medium: raw.medium,
            adapter,
            salt: raw.salt.clone().map(|salt| self.text(salt)),
            media: self.media.get(raw.media.clone()).unwrap_or_default(),
            group: raw.group,
            attention: raw.attention,
            remote: raw.remote,
        }
    }

    fn text(&self, range: Range<usize>) -> &str {
        self.text.get(range).unwrap_or_default()
    }

    fn intern(&mut self, text: &str) -> Range<usize> {
        let start = self.text.len();
        self.text.push_str(text);
        start..self.text.len()
    }
}
