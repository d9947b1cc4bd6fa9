//! Events to payload bytes, in the shape of a given release: what the mock engine sends.

use kvasir_msgpack::Writer;
use kvasir_types::{EngineHash, Tier, Token};

use super::{Adapter, Attention, Event, Medium, Removed, Stored};

/// The wire shapes in use. Names state the first release that sends them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// vLLM 0.9: arrays of 6.
    Vllm09,
    /// vLLM 0.20 to 0.21: arrays up to `group_idx`.
    Vllm20,
    /// vLLM 0.24 and later: maps.
    Vllm24,
    /// vLLM with `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`: maps, names as 32 bytes.
    Vllm24Bytes,
    /// SGLang up to 0.5.18: arrays, signed names.
    SglangArray,
    /// SGLang 0.5.22 and later: maps, signed names.
    SglangMap,
}

impl Dialect {
    /// Every shape.
    pub const ALL: [Self; 6] = [
        Self::Vllm09,
        Self::Vllm20,
        Self::Vllm24,
        Self::Vllm24Bytes,
        Self::SglangArray,
        Self::SglangMap,
    ];

    const fn is_map(self) -> bool {
        matches!(self, Self::Vllm24 | Self::Vllm24Bytes | Self::SglangMap)
    }

    const fn is_sglang(self) -> bool {
        matches!(self, Self::SglangArray | Self::SglangMap)
    }

    /// Whether this shape can say a salt.
    #[must_use]
    pub const fn has_salt(self) -> bool {
        !matches!(self, Self::Vllm09 | Self::SglangArray)
    }

    /// Whether this shape can say an adapter's name and the media of a block.
    #[must_use]
    pub const fn has_extra_keys(self) -> bool {
        matches!(self, Self::Vllm20 | Self::Vllm24 | Self::Vllm24Bytes)
    }
}

/// Appends the payload of one batch. What a dialect cannot say is left out, as its engine leaves it out.
pub fn encode_batch<'e>(
    dialect: Dialect,
    at: f64,
    events: impl ExactSizeIterator<Item = Event<'e>>,
    rank: Option<u32>,
    out: &mut Vec<u8>,
) {
    let mut writer = Writer::new(out);
    writer.array(3);
    writer.float(at);
    writer.array(events.len());
    for event in events {
        match event {
            Event::Stored(stored) => stored_event(&mut writer, dialect, &stored),
            Event::Removed(removed) => removed_event(&mut writer, dialect, &removed),
            Event::Cleared => bare(&mut writer, dialect, "AllBlocksCleared"),
            Event::Ignored => bare(&mut writer, dialect, "Ignored"),
            Event::Unknown => bare(&mut writer, dialect, "Unknown"),
        }
    }
    match rank {
        Some(rank) => writer.uint(u64::from(rank)),
        None => writer.nil(),
    }
}

fn bare(w: &mut Writer<'_>, dialect: Dialect, tag: &str) {
    if dialect.is_map() {
        w.map(1);
        w.str("type");
    } else {
        w.array(1);
    }
    w.str(tag);
}

/// Writes the head of an event, then its fields one by one, with or without their names.
struct Fields<'w, 'b> {
    writer: &'w mut Writer<'b>,
    named: bool,
}

impl<'w, 'b> Fields<'w, 'b> {
    fn new(writer: &'w mut Writer<'b>, dialect: Dialect, tag: &str, len: usize) -> Self {
        let named = dialect.is_map();
        if named {
            writer.map(len + 1);
            writer.str("type");
        } else {
            writer.array(len + 1);
        }
        writer.str(tag);
        Self { writer, named }
    }

    fn next(&mut self, name: &str) -> &mut Writer<'b> {
        if self.named {
            self.writer.str(name);
        }
        self.writer
    }
}

fn stored_event(w: &mut Writer<'_>, dialect: Dialect, event: &Stored<'_>) {
    let name = match event.adapter {
        Adapter::Named(name) => Some(name),
        Adapter::Base | Adapter::Numbered(_) => None,
    };
    let keys = dialect.has_extra_keys();
    let sglang_map = dialect == Dialect::SglangMap;
    let salt = event.salt.filter(|_| sglang_map);
    let sglang_name = name.filter(|_| sglang_map);
    let kind = event.attention != Attention::Unsaid && dialect.is_map() && keys;
    let group = event.group.filter(|_| keys);
    let mut len = 5;
    len += usize::from(dialect != Dialect::Vllm09);
    len += if keys { 2 } else { 0 };
    len += usize::from(group.is_some()) + usize::from(kind);
    len += usize::from(salt.is_some()) + usize::from(sglang_name.is_some());
    let mut fields = Fields::new(w, dialect, "BlockStored", len);
    hashes(fields.next("block_hashes"), dialect, event.hashes);
    match event.parent {
        Some(parent) => hash(fields.next("parent_block_hash"), dialect, parent),
        None => fields.next("parent_block_hash").nil(),
    }
    tokens(fields.next("token_ids"), event.tokens, event.pairs);
    fields.next("block_size").uint(u64::from(event.block_size));
    match event.adapter {
        Adapter::Numbered(id) => fields.next("lora_id").uint(id),
        Adapter::Base | Adapter::Named(_) => fields.next("lora_id").nil(),
    }
    if dialect != Dialect::Vllm09 {
        medium(fields.next("medium"), dialect, event.medium);
    }
    if keys {
        optional(fields.next("lora_name"), name);
        extra_keys(fields.next("extra_keys"), event, name);
    }
    if let Some(salt) = salt {
        fields.next("cache_salt").str(salt);
    }
    if let Some(name) = sglang_name {
        fields.next("lora_name").str(name);
    }
    if let Some(group) = group {
        fields.next("group_idx").uint(u64::from(group));
    }
    if kind {
        let full = event.attention == Attention::Full;
        let kind = if full {
            "full_attention"
        } else {
            "sliding_window"
        };
        fields.next("kv_cache_spec_kind").str(kind);
    }
}

fn removed_event(w: &mut Writer<'_>, dialect: Dialect, event: &Removed<'_>) {
    let group = event.group.filter(|_| dialect.has_extra_keys());
    let has_medium = dialect != Dialect::Vllm09;
    let len = 1 + usize::from(has_medium) + usize::from(group.is_some());
    let mut fields = Fields::new(w, dialect, "BlockRemoved", len);
    hashes(fields.next("block_hashes"), dialect, event.hashes);
    if has_medium {
        medium(fields.next("medium"), dialect, event.medium);
    }
    if let Some(group) = group {
        fields.next("group_idx").uint(u64::from(group));
    }
}

fn hashes(w: &mut Writer<'_>, dialect: Dialect, names: &[EngineHash]) {
    w.array(names.len());
    for &name in names {
        hash(w, dialect, name);
    }
}

fn hash(w: &mut Writer<'_>, dialect: Dialect, name: EngineHash) {
    if dialect == Dialect::Vllm24Bytes {
        let mut digest = [0u8; 32];
        digest[24..].copy_from_slice(&name.0.to_be_bytes());
        w.bin(&digest);
    } else if dialect.is_sglang() {
        w.sint(name.0 as i64);
    } else {
        w.uint(name.0);
    }
}

fn tokens(w: &mut Writer<'_>, tokens: &[Token], pairs: bool) {
    if pairs {
        w.array(tokens.len().saturating_sub(1));
        for pair in tokens.windows(2) {
            w.array(2);
            for token in pair {
                w.uint(u64::from(*token));
            }
        }
        return;
    }
    w.array(tokens.len());
    for token in tokens {
        w.uint(u64::from(*token));
    }
}

fn medium(w: &mut Writer<'_>, dialect: Dialect, medium: Medium) {
    let sglang = dialect.is_sglang();
    match medium {
        Medium::Unsaid => w.nil(),
        Medium::Unknown => w.str("UNKNOWN"),
        Medium::Known(Tier::Device) => w.str("GPU"),
        Medium::Known(Tier::HostPinned) => w.str(if sglang { "CPU_PINNED" } else { "CPU" }),
        Medium::Known(Tier::Disk) => w.str(if sglang { "DISK" } else { "STORAGE" }),
        Medium::Known(Tier::External) => w.str("EXTERNAL"),
    }
}

fn optional(w: &mut Writer<'_>, text: Option<&str>) {
    match text {
        Some(text) => w.str(text),
        None => w.nil(),
    }
}

/// vLLM's order within a block: adapter, media, salt (first block of a sequence only).
fn extra_keys(w: &mut Writer<'_>, event: &Stored<'_>, name: Option<&str>) {
    w.array(event.hashes.len());
    for block in 0..event.hashes.len() {
        let media = event.media.iter().filter(|m| m.block as usize == block);
        let salt = event.salt.filter(|_| block == 0 && event.parent.is_none());
        let count =
            usize::from(name.is_some()) + media.clone().count() + usize::from(salt.is_some());
        if count == 0 {
            w.nil();
            continue;
        }
        w.array(count);
        if let Some(name) = name {
            w.str(name);
        }
        for object in media {
            w.array(2);
            w.str(&format!("{:016x}{:048x}", object.hash, 0));
            w.uint(0);
        }
        if let Some(salt) = salt {
            w.str(salt);
        }
    }
}
