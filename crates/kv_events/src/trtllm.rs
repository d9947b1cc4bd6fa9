//! What TensorRT-LLM's events change in a rank's cache.
//!
//! Blocks shorter than the block size (it announces partly filled ones) and windows smaller than the largest one (sliding
//! attention) are left out. Cache level 0 is the device, 1 the host, deeper ones count as disk.
//!
//! Elsewhere: bytes (`kvasir-wire`), other engines' events (`translate`).

use std::collections::HashMap;

use kvasir_hash::{BlockHasher, Scope};
use kvasir_msgpack::Value;
use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, Token};
use kvasir_wire::trtllm::TrtEvent;

use crate::Skip;

/// Blocks remembered per rank, so that a move between levels can be told as stored and removed. Past it,
/// moved blocks count as removed.
pub const BLOCKS_MAX: usize = 1 << 20;

#[derive(Clone, Copy, Debug)]
struct Known {
    parent: Option<EngineHash>,
    local: LocalHash,
}

/// Turns one rank's events into index events.
#[derive(Clone, Debug)]
pub struct TrtTranslator {
    block_size: u32,
    window: u64,
    blocks: HashMap<EngineHash, Known>,
}

impl TrtTranslator {
    /// For an engine with `block_size` tokens per block.
    #[must_use]
    pub fn new(block_size: u32) -> Self {
        Self {
            block_size,
            window: 0,
            blocks: HashMap::new(),
        }
    }

    /// What `event` changes; several index events for a block that moved.
    pub fn translate(&mut self, event: &TrtEvent, out: &mut Vec<KvEvent>) -> Result<(), Skip> {
        let window = event.window.unwrap_or(self.window);
        if window < self.window {
            return Err(Skip::Group);
        }
        self.window = window;
        let body = &event.body;
        match body.get("type").and_then(Value::text) {
            Some("created") => {
                self.blocks.clear();
                out.push(KvEvent::Cleared { tier: None });
                Ok(())
            }
            Some("stored") => self.stored(body, out),
            Some("removed") => self.removed(body, out),
            Some("updated") => self.updated(body, out),
            _ => Err(Skip::Unknown),
        }
    }

    fn stored(&mut self, body: &Value, out: &mut Vec<KvEvent>) -> Result<(), Skip> {
        let mut parent = body
            .get("parent_hash")
            .and_then(Value::bits)
            .map(EngineHash);
        let blocks = body
            .get("blocks")
            .and_then(Value::list)
            .ok_or(Skip::Shape)?;
        for block in blocks {
            let engine = block.get("block_hash").and_then(Value::bits);
            let engine = EngineHash(engine.ok_or(Skip::Shape)?);
            let local = self.local(block)?;
            if self.blocks.len() < BLOCKS_MAX {
                self.blocks.insert(engine, Known { parent, local });
            }
            let tier = level(block.get("cache_level"));
            let stored = StoredBlock { engine, local };
            push_stored(out, tier, parent, stored);
            parent = Some(engine);
        }
        Ok(())
    }

    fn local(&self, block: &Value) -> Result<LocalHash, Skip> {
        let tokens = block
            .get("tokens")
            .and_then(Value::list)
            .ok_or(Skip::Shape)?;
        let id = |token: &Value| {
            let id = token.get("token_id").and_then(Value::uint);
            id.and_then(|id| Token::try_from(id).ok())
                .ok_or(Skip::Shape)
        };
        let tokens: Vec<Token> = tokens.iter().map(id).collect::<Result<_, _>>()?;
        if tokens.len() != self.block_size as usize {
            return Err(match u32::try_from(tokens.len()) {
                Ok(engine) if engine > self.block_size => Skip::BlockSize { engine },
                _ => Skip::Shape,
            });
        }
        let adapter = block.get("lora_id").and_then(Value::uint);
        let adapter = adapter.map(|id| format!("\u{0}lora-id:{id}"));
        let scope = Scope {
            lora: adapter.as_deref().unwrap_or_default(),
            salt: block
                .get("cache_salt")
                .and_then(Value::text)
                .unwrap_or_default(),
            eagle: false,
        };
        let media = media(block.get("mm_keys"));
        let mut out = Vec::with_capacity(1);
        BlockHasher::new(tokens.len(), &scope).extend_with_media(&tokens, |_| &media, &mut out);
        out.first().copied().ok_or(Skip::Shape)
    }

    fn removed(&mut self, body: &Value, out: &mut Vec<KvEvent>) -> Result<(), Skip> {
        let names = body.get("block_hashes").and_then(Value::list);
        let names = names.ok_or(Skip::Shape)?.iter().filter_map(Value::bits);
        let blocks: Vec<EngineHash> = names.map(EngineHash).collect();
        for name in &blocks {
            self.blocks.remove(name);
        }
        // The event does not say where they lay; elsewhere they are unknown, and that is harmless.
        for tier in [Tier::HostPinned, Tier::Disk] {
            let blocks = blocks.clone();
            out.push(KvEvent::Removed { tier, blocks });
        }
        let tier = Tier::Device;
        out.push(KvEvent::Removed { tier, blocks });
        Ok(())
    }

    fn updated(&mut self, body: &Value, out: &mut Vec<KvEvent>) -> Result<(), Skip> {
        let Some(diff @ Value::Map(_)) = body.get("cache_level") else {
            return Ok(());
        };
        let name = body.get("block_hash").and_then(Value::bits);
        let engine = EngineHash(name.ok_or(Skip::Shape)?);
        let blocks = vec![engine];
        out.push(KvEvent::Removed {
            tier: level(diff.get("old_value")),
            blocks,
        });
        if let Some(known) = self.blocks.get(&engine) {
            let local = known.local;
            let tier = level(diff.get("new_value"));
            push_stored(out, tier, known.parent, StoredBlock { engine, local });
        }
        Ok(())
    }
}

/// Adds a block to the last event if it goes on there, else begins a new one.
fn push_stored(out: &mut Vec<KvEvent>, tier: Tier, parent: Option<EngineHash>, block: StoredBlock) {
    if let Some(KvEvent::Stored {
        tier: t, blocks, ..
    }) = out.last_mut()
        && *t == tier
        && parent.is_some()
        && blocks.last().map(|b| b.engine) == parent
    {
        blocks.push(block);
        return;
    }
    let blocks = vec![block];
    out.push(KvEvent::Stored {
        tier,
        parent,
        blocks,
    });
}

fn level(value: Option<&Value>) -> Tier {
    match value.and_then(Value::uint) {
        None | Some(0) => Tier::Device,
        Some(1) => Tier::HostPinned,
        Some(_) => Tier::Disk,
    }
}

/// Objects of a block: `{"hash": hex, ...}` or `[hex, offset]`; the first 16 hex digits count.
fn media(keys: Option<&Value>) -> Vec<u64> {
    let keys = keys.and_then(Value::list).unwrap_or_default();
    let text = |key: &Value| {
        let first = key.list().and_then(|items| items.first());
        let text = key.get("hash").or(first)?.text()?;
        u64::from_str_radix(text.get(..16)?, 16).ok()
    };
    keys.iter().filter_map(text).collect()
}
