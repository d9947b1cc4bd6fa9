//! Payload bytes to [`Batch`].
//!
//! Both shapes are read at once, event by event: arrays with the tag first (vLLM up to 0.23, SGLang up to
//! 0.5.18) and maps with `type` (since then). Fields that we do not know, and elements past the last one
//! that we know, are read past.

use kvasir_msgpack::{DecodeError, Int, Kind, Reader};
use kvasir_types::{EngineHash, Tier, Token};

use super::{Attention, Batch, BlockMedia, EVENTS_MAX, Medium, RawEvent, RawRemoved, RawStored};

type Result<T> = std::result::Result<T, DecodeError>;

/// How Dynamo's frontends mark a salt among a block's extra keys.
const SALT_PREFIX: &str = "dynamo-cache-salt:";
/// Hex digits in a multimodal digest.
const DIGEST_LEN: usize = 64;

/// Fields of an event, whichever way they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    BlockHashes,
    Parent,
    Tokens,
    BlockSize,
    LoraId,
    Medium,
    LoraName,
    Salt,
    ExtraKeys,
    BlockMedia,
    Group,
    SpecKind,
    Locality,
    Other,
}

/// Order of the positional form, after the tag. Append-only in all releases.
const STORED_ORDER: [Field; 12] = [
    Field::BlockHashes,
    Field::Parent,
    Field::Tokens,
    Field::BlockSize,
    Field::LoraId,
    Field::Medium,
    Field::LoraName,
    Field::ExtraKeys,
    Field::Group,
    Field::SpecKind,
    Field::Other,
    Field::Locality,
];
const REMOVED_ORDER: [Field; 4] = [
    Field::BlockHashes,
    Field::Medium,
    Field::Group,
    Field::Locality,
];

/// The field of that name. Length and first letter leave one candidate.
fn field(name: &[u8]) -> Field {
    let (full, field): (&[u8], Field) = match (name.len(), name.first()) {
        (12, _) => (b"block_hashes", Field::BlockHashes),
        (17, _) => (b"parent_block_hash", Field::Parent),
        (9, Some(b't')) => (b"token_ids", Field::Tokens),
        (10, Some(b'b')) => (b"block_size", Field::BlockSize),
        (7, _) => (b"lora_id", Field::LoraId),
        (6, _) => (b"medium", Field::Medium),
        (9, Some(b'l')) => (b"lora_name", Field::LoraName),
        (10, Some(b'c')) => (b"cache_salt", Field::Salt),
        (10, Some(b'e')) => (b"extra_keys", Field::ExtraKeys),
        (14, _) => (b"block_mm_infos", Field::BlockMedia),
        (9, Some(b'g')) => (b"group_idx", Field::Group),
        (18, _) => (b"kv_cache_spec_kind", Field::SpecKind),
        (8, _) => (b"locality", Field::Locality),
        _ => return Field::Other,
    };
    match name == full {
        true => field,
        false => Field::Other,
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Tag {
    Stored,
    Removed,
    Cleared,
    Ignored,
    Unknown,
}

fn tag(name: &[u8]) -> Tag {
    match name {
        b"BlockStored" => Tag::Stored,
        b"BlockRemoved" => Tag::Removed,
        b"AllBlocksCleared" => Tag::Cleared,
        b"Ignored" => Tag::Ignored,
        _ => Tag::Unknown,
    }
}

/// What an event has said so far.
#[derive(Default)]
struct Draft {
    stored: RawStored,
    has_hashes: bool,
    has_tokens: bool,
    has_block_size: bool,
    /// Extra keys that are text and no digest: the adapter's name, the salt, or something unknown.
    keys: Vec<(u32, std::ops::Range<usize>)>,
}

impl Batch {
    /// Reads `payload` in place of what this buffer held. After an error the buffer is empty.
    pub fn decode(&mut self, payload: &[u8]) -> Result<()> {
        self.clear();
        let read = self.read(payload);
        if read.is_err() {
            self.clear();
        }
        read
    }

    fn clear(&mut self) {
        self.at = 0.0;
        self.rank = None;
        self.events.clear();
        self.hashes.clear();
        self.tokens.clear();
        self.media.clear();
        self.text.clear();
    }

    fn read(&mut self, payload: &[u8]) -> Result<()> {
        let mut reader = Reader::new(payload);
        let parts = reader.array()?;
        if parts < 2 {
            return Err(DecodeError::Missing { field: "events" });
        }
        self.at = reader.float()?;
        let events = reader.array()?;
        if events > EVENTS_MAX {
            return Err(DecodeError::Range { field: "events" });
        }
        for _ in 0..events {
            let event = self.event(&mut reader)?;
            self.events.push(event);
        }
        if parts > 2 && !reader.nil()? {
            self.rank = Some(reader.u32("data_parallel_rank")?);
        }
        for _ in 3..parts {
            reader.skip()?;
        }
        reader.finish()
    }

    fn event(&mut self, reader: &mut Reader<'_>) -> Result<RawEvent> {
        let mut draft = Draft::default();
        let tag = match reader.peek()? {
            Kind::Map => self.event_map(reader, &mut draft)?,
            _ => self.event_array(reader, &mut draft)?,
        };
        match tag {
            Tag::Stored => self.stored(draft).map(RawEvent::Stored),
            Tag::Removed if !draft.has_hashes => Err(DecodeError::Missing {
                field: "block_hashes",
            }),
            Tag::Removed => Ok(RawEvent::Removed(RawRemoved {
                hashes: draft.stored.hashes,
                medium: draft.stored.medium,
                group: draft.stored.group,
                remote: draft.stored.remote,
            })),
            Tag::Cleared => Ok(RawEvent::Cleared),
            Tag::Ignored => Ok(RawEvent::Ignored),
            Tag::Unknown => Ok(RawEvent::Unknown),
        }
    }

    fn event_map(&mut self, reader: &mut Reader<'_>, draft: &mut Draft) -> Result<Tag> {
        let mut pairs = reader.map()?;
        let mut body = *reader;
        // Every engine writes it first.
        let tag = if pairs > 0 && body.text_bytes()? == b"type" {
            let tag = read_tag(&mut body)?;
            *reader = body;
            pairs -= 1;
            tag
        } else {
            find_tag(*reader, pairs)?
        };
        for _ in 0..pairs {
            match tag {
                Tag::Stored | Tag::Removed => {
                    let field = read_field(reader)?;
                    self.value(reader, field, draft)?;
                }
                Tag::Cleared | Tag::Ignored | Tag::Unknown => {
                    reader.str()?;
                    reader.skip()?;
                }
            }
        }
        Ok(tag)
    }

    fn event_array(&mut self, reader: &mut Reader<'_>, draft: &mut Draft) -> Result<Tag> {
        let len = reader.array()?;
        if len == 0 {
            return Err(DecodeError::Missing { field: "type" });
        }
        let tag = read_tag(reader)?;
        let order: &[Field] = match tag {
            Tag::Stored => &STORED_ORDER,
            Tag::Removed => &REMOVED_ORDER,
            Tag::Cleared | Tag::Ignored | Tag::Unknown => &[],
        };
        let mut order = order.iter().copied().peekable();
        for _ in 1..len {
            match (order.peek(), reader.peek()?) {
                (None, _) => reader.skip()?,
                // SGLang 0.5.18 may append named fields.
                (Some(_), Kind::Map) => self.named(reader, draft)?,
                // An older relay put multimodal objects in front of the group.
                (Some(Field::Group), Kind::Array) if tag == Tag::Stored => {
                    self.value(reader, Field::BlockMedia, draft)?;
                }
                (Some(&next), _) => {
                    order.next();
                    self.value(reader, next, draft)?;
                }
            }
        }
        Ok(tag)
    }

    fn named(&mut self, reader: &mut Reader<'_>, draft: &mut Draft) -> Result<()> {
        for _ in 0..reader.map()? {
            let field = read_field(reader)?;
            self.value(reader, field, draft)?;
        }
        Ok(())
    }

    fn value(&mut self, reader: &mut Reader<'_>, field: Field, draft: &mut Draft) -> Result<()> {
        let nil = reader.peek()? == Kind::Nil;
        match field {
            Field::BlockHashes => {
                draft.stored.hashes = self.read_hashes(reader)?;
                draft.has_hashes = true;
            }
            Field::Tokens => {
                (draft.stored.tokens, draft.stored.pairs) = self.read_tokens(reader)?;
                draft.has_tokens = true;
            }
            Field::BlockSize => {
                draft.stored.block_size = reader.u32("block_size")?;
                draft.has_block_size = true;
            }
            Field::Other => reader.skip()?,
            _ if nil => reader.skip()?,
            Field::Parent => draft.stored.parent = Some(read_hash(reader)?),
            Field::LoraId => draft.stored.lora_id = optional_int(reader)?,
            Field::Medium => draft.stored.medium = read_medium(reader)?,
            Field::LoraName => draft.stored.lora_name = Some(self.intern(reader.str()?)),
            Field::Salt => draft.stored.salt = Some(self.intern_salt(reader.str()?)),
            Field::ExtraKeys => self.read_extra_keys(reader, draft)?,
            Field::BlockMedia => self.read_block_media(reader, draft)?,
            Field::Group => draft.stored.group = Some(reader.u32("group_idx")?),
            Field::SpecKind => draft.stored.attention = read_attention(reader)?,
            Field::Locality => {
                draft.stored.remote = !reader.str()?.eq_ignore_ascii_case("local");
            }
        }
        Ok(())
    }

    fn read_hashes(&mut self, reader: &mut Reader<'_>) -> Result<std::ops::Range<usize>> {
        let start = self.hashes.len();
        for _ in 0..reader.array()? {
            self.hashes.push(read_hash(reader)?);
        }
        Ok(start..self.hashes.len())
    }

    /// Pairs `(a b) (b c) (c d)` become `a b c d`.
    fn read_tokens(&mut self, reader: &mut Reader<'_>) -> Result<(std::ops::Range<usize>, bool)> {
        let start = self.tokens.len();
        let len = reader.array()?;
        let pairs = len > 0 && reader.peek()? == Kind::Array;
        if !pairs {
            reader.u32s(len, "token_ids", &mut self.tokens)?;
            return Ok((start..self.tokens.len(), false));
        }
        let mut last: Option<Token> = None;
        for _ in 0..len {
            if reader.array()? != 2 {
                return Err(DecodeError::Range { field: "token_ids" });
            }
            self.tokens.push(reader.u32("token_ids")?);
            last = Some(reader.u32("token_ids")?);
        }
        self.tokens.extend(last);
        Ok((start..self.tokens.len(), pairs))
    }

    /// One entry per block: nil, or a list of text, numbers, bytes and `[digest, offset]` pairs.
    fn read_extra_keys(&mut self, reader: &mut Reader<'_>, draft: &mut Draft) -> Result<()> {
        let start = self.media.len();
        let blocks = reader.array()?;
        for block in 0..blocks {
            if reader.nil()? {
                continue;
            }
            let block = u32::try_from(block).map_err(|_| DecodeError::Range {
                field: "extra_keys",
            })?;
            for _ in 0..reader.array()? {
                self.read_extra_key(reader, block, draft)?;
            }
        }
        extend_media(&mut draft.stored.media, start..self.media.len());
        Ok(())
    }

    fn read_extra_key(
        &mut self,
        reader: &mut Reader<'_>,
        block: u32,
        draft: &mut Draft,
    ) -> Result<()> {
        let mut key = *reader;
        reader.skip()?;
        let mut pair = false;
        if key.peek()? == Kind::Array {
            pair = key.array()? > 0;
            if !pair {
                return Ok(());
            }
        }
        match key.peek()? {
            Kind::Str => {
                let text = key.str()?;
                match digest(text) {
                    Some(hash) => self.media.push(BlockMedia { block, hash }),
                    None if pair => self.media.push(BlockMedia {
                        block,
                        hash: fold(text.as_bytes()),
                    }),
                    None => {
                        let range = self.intern(text);
                        draft.keys.push((block, range));
                    }
                }
            }
            Kind::Nil => {}
            Kind::Bin => self.media.push(BlockMedia {
                block,
                hash: fold(key.bin()?),
            }),
            Kind::Int => self.media.push(BlockMedia {
                block,
                hash: key.int()?.bits(),
            }),
            _ => {}
        }
        Ok(())
    }

    /// One entry per block: nil, or `{mm_objects: [{mm_hash, offsets}]}`.
    fn read_block_media(&mut self, reader: &mut Reader<'_>, draft: &mut Draft) -> Result<()> {
        let start = self.media.len();
        for block in 0..reader.array()? {
            if reader.nil()? {
                continue;
            }
            let block = u32::try_from(block).map_err(|_| DecodeError::Range {
                field: "block_mm_infos",
            })?;
            for _ in 0..reader.map()? {
                if reader.str()? != "mm_objects" {
                    reader.skip()?;
                    continue;
                }
                for _ in 0..reader.array()? {
                    self.read_media_object(reader, block)?;
                }
            }
        }
        extend_media(&mut draft.stored.media, start..self.media.len());
        Ok(())
    }

    fn read_media_object(&mut self, reader: &mut Reader<'_>, block: u32) -> Result<()> {
        for _ in 0..reader.map()? {
            if reader.str()? == "mm_hash" {
                let hash = reader.int()?.bits();
                self.media.push(BlockMedia { block, hash });
            } else {
                reader.skip()?;
            }
        }
        Ok(())
    }

    fn intern_salt(&mut self, text: &str) -> std::ops::Range<usize> {
        self.intern(text.strip_prefix(SALT_PREFIX).unwrap_or(text))
    }

    /// Fills in what only the whole event tells: which text among the extra keys is the salt.
    fn stored(&mut self, draft: Draft) -> Result<RawStored> {
        let missing = [
            (draft.has_hashes, "block_hashes"),
            (draft.has_tokens, "token_ids"),
            (draft.has_block_size, "block_size"),
        ];
        if let Some((_, field)) = missing.into_iter().find(|(has, _)| !has) {
            return Err(DecodeError::Missing { field });
        }
        let mut raw = draft.stored;
        let media_start = self.media.len();
        for (block, key) in draft.keys {
            let text = self.text(key.clone());
            let name = raw.lora_name.clone().map(|name| self.text(name));
            if name == Some(text) {
                continue;
            }
            let salt = raw.salt.clone().map(|salt| self.text(salt));
            let bare = text.strip_prefix(SALT_PREFIX).unwrap_or(text);
            if salt == Some(bare) {
                continue;
            }
            if block == 0 && raw.parent.is_none() && salt.is_none() {
                raw.salt = Some(key.end - bare.len()..key.end);
            } else {
                let hash = fold(text.as_bytes());
                self.media.push(BlockMedia { block, hash });
            }
        }
        extend_media(&mut raw.media, media_start..self.media.len());
        if let Some(media) = self.media.get_mut(raw.media.clone()) {
            media.sort_by_key(|m| m.block);
        }
        Ok(raw)
    }
}

/// When the engine made a batch, without decoding the rest.
#[must_use]
pub fn peek_time(payload: &[u8]) -> Option<f64> {
    let mut reader = Reader::new(payload);
    reader.array().ok()?;
    reader.float().ok()
}

/// What kind of event it is; a kind that is no text is refused.
#[inline]
fn read_tag(reader: &mut Reader<'_>) -> Result<Tag> {
    let mut again = *reader;
    let tag = tag(reader.text_bytes()?);
    if tag == Tag::Unknown {
        again.str()?;
    }
    Ok(tag)
}

/// Where blocks lie; almost always the device.
fn read_medium(reader: &mut Reader<'_>) -> Result<Medium> {
    let mut again = *reader;
    match reader.text_bytes()? {
        b"GPU" => Ok(Medium::Known(Tier::Device)),
        _ => Ok(Medium::from_name(again.str()?)),
    }
}

/// A group's kind of attention.
fn read_attention(reader: &mut Reader<'_>) -> Result<Attention> {
    let mut again = *reader;
    match reader.text_bytes()? {
        b"full_attention" => Ok(Attention::Full),
        _ => Ok(Attention::from_name(again.str()?)),
    }
}

/// A key of a map; one that is no text is refused, known ones need no second look.
#[inline]
fn read_field(reader: &mut Reader<'_>) -> Result<Field> {
    let mut again = *reader;
    let field = field(reader.text_bytes()?);
    if field == Field::Other {
        again.str()?;
    }
    Ok(field)
}

/// The `type` of a map that has it somewhere.
fn find_tag(mut body: Reader<'_>, pairs: usize) -> Result<Tag> {
    for _ in 0..pairs {
        if body.str()? == "type" {
            return read_tag(&mut body);
        }
        body.skip()?;
    }
    Err(DecodeError::Missing { field: "type" })
}

/// All media of one event lie side by side, since events are read one after the other.
fn extend_media(into: &mut std::ops::Range<usize>, new: std::ops::Range<usize>) {
    if new.start == new.end {
        return;
    }
    let start = if into.end > into.start {
        into.start
    } else {
        new.start
    };
    *into = start..new.end;
}

fn optional_int(reader: &mut Reader<'_>) -> Result<Option<u64>> {
    if reader.peek()? == Kind::Int {
        return reader.int().map(|id| Some(id.bits()));
    }
    reader.skip()?;
    Ok(None)
}

/// A name is an integer of either sign or a digest, whose last 8 bytes are what engines send when
/// they send integers.
#[inline]
fn read_hash(reader: &mut Reader<'_>) -> Result<EngineHash> {
    if let Some(name) = reader.u64_of_nine_bytes() {
        return Ok(EngineHash(name));
    }
    if reader.peek()? == Kind::Bin {
        let digest = reader.bin()?;
        let tail = digest
            .last_chunk::<8>()
            .map(|tail| u64::from_be_bytes(*tail));
        let short = || {
            digest
                .iter()
                .fold(0, |name, byte| name << 8 | u64::from(*byte))
        };
        return Ok(EngineHash(tail.unwrap_or_else(short)));
    }
    reader.int().map(Int::bits).map(EngineHash)
}

/// A multimodal digest counts by its first 16 hex digits.
fn digest(text: &str) -> Option<u64> {
    let is_digest = text.len() == DIGEST_LEN && text.bytes().all(|b| b.is_ascii_hexdigit());
    let head = text.get(..16).filter(|_| is_digest)?;
    u64::from_str_radix(head, 16).ok()
}

/// A key of unknown meaning makes its block unlike any text block (FNV-1a).
fn fold(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
