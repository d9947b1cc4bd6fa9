//! Router events from MessagePack in one pass: one allocation an event, none a block.
//!
//! Reads what the tree of [`crate::value`] reads and takes the same defaults; a test compares the two.

use kvasir_msgpack::{DecodeError, Int, Kind, Reader, Value};
use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerRank};

use super::{EVENTS_MAX, Encoding, Residency, RouterEvent, missing, residency_of, tier_of};

type Result<T> = std::result::Result<T, DecodeError>;

/// Bytes of the smallest block: a map with two names and two numbers.
const BLOCK_BYTES_MIN: usize = 25;

/// Appends the events of `payload` to `out`: a list of them, or a single one. After an error `out` is as it was.
///
/// ```
/// # use kvasir_wire::native::{Encoding, decode_router_events};
/// let payload = br#"{"worker_id": 3, "event": {"event_id": 1, "data": "cleared"}}"#;
/// let mut events = Vec::new();
/// decode_router_events(Encoding::Json, payload, &mut events)?;
/// assert_eq!((events[0].rank.worker.0, events[0].id), (3, 1));
/// # Ok::<(), kvasir_msgpack::DecodeError>(())
/// ```
pub fn decode_router_events(
    encoding: Encoding,
    payload: &[u8],
    out: &mut Vec<RouterEvent>,
) -> Result<()> {
    let before = out.len();
    let read = match encoding {
        Encoding::MessagePack => read_payload(payload, out),
        Encoding::Json => Value::from_json(payload)
            .and_then(|value| RouterEvent::list_from_value(&value))
            .map(|events| out.extend(events)),
    };
    if read.is_err() {
        out.truncate(before);
    }
    read
}

fn read_payload(payload: &[u8], out: &mut Vec<RouterEvent>) -> Result<()> {
    let mut reader = Reader::new(payload);
    read_events(&mut reader, out)?;
    reader.finish()
}

/// A list of events, or a single one, wherever it stands.
pub(super) fn read_events(reader: &mut Reader<'_>, out: &mut Vec<RouterEvent>) -> Result<()> {
    if reader.peek()? != Kind::Array {
        out.push(read_event(reader)?);
        return Ok(());
    }
    let events = reader.array()?;
    if events > EVENTS_MAX {
        return Err(DecodeError::Range { field: "events" });
    }
    for _ in 0..events {
        out.push(read_event(reader)?);
    }
    Ok(())
}

/// A text, if that is what stands here.
pub(super) fn read_text(reader: &mut Reader<'_>) -> Result<Option<String>> {
    if reader.peek()? == Kind::Str {
        return reader.str().map(|text| Some(text.to_owned()));
    }
    reader.skip()?;
    Ok(None)
}

/// What changed, before the tier is known.
enum Change {
    Stored {
        parent: Option<EngineHash>,
        position: Option<u64>,
        blocks: Vec<StoredBlock>,
    },
    Removed(Vec<EngineHash>),
    Cleared,
}

/// The inner map: what changed, in which rank, under which number.
struct Numbered {
    id: u64,
    rank: u32,
    change: Change,
}

fn read_event(reader: &mut Reader<'_>) -> Result<RouterEvent> {
    let (mut worker, mut numbered) = (None, None);
    let (mut tier, mut residency) = (Tier::Device, None);
    for _ in 0..reader.map()? {
        match reader.text_bytes()? {
            b"worker_id" => worker = Some(reader.u64("worker_id")?),
            b"storage_tier" => tier = tier_of(read_name(reader, "storage_tier")?)?,
            b"residency_domain" => {
                residency = Some(residency_of(read_name(reader, "residency_domain")?)?);
            }
            b"event" => numbered = Some(read_numbered(reader)?),
            _ => reader.skip()?,
        }
    }
    let numbered = numbered.ok_or(missing("event"))?;
    let rank = WorkerRank::new(worker.ok_or(missing("worker_id"))?, numbered.rank);
    let (event, position) = numbered.change.into_event(tier, residency);
    Ok(RouterEvent {
        rank,
        id: numbered.id,
        residency,
        position,
        event,
    })
}

impl Change {
    fn into_event(self, tier: Tier, residency: Option<Residency>) -> (KvEvent, Option<u64>) {
        match self {
            Self::Stored {
                parent,
                position,
                blocks,
            } => {
                let event = KvEvent::Stored {
                    tier,
                    parent,
                    blocks,
                };
                (event, position)
            }
            Self::Removed(blocks) => (KvEvent::Removed { tier, blocks }, None),
            Self::Cleared => {
                let tier = residency.map(|_| tier);
                (KvEvent::Cleared { tier }, None)
            }
        }
    }
}

fn read_numbered(reader: &mut Reader<'_>) -> Result<Numbered> {
    let (mut id, mut rank, mut change) = (None, 0, None);
    for _ in 0..reader.map()? {
        match reader.text_bytes()? {
            b"event_id" => id = Some(reader.u64("event_id")?),
            b"dp_rank" if reader.nil()? => rank = 0,
            b"dp_rank" => rank = reader.u32("dp_rank")?,
            b"data" => change = Some(read_change(reader)?),
            _ => reader.skip()?,
        }
    }
    Ok(Numbered {
        id: id.ok_or(missing("event_id"))?,
        rank,
        change: change.ok_or(missing("data"))?,
    })
}

fn read_change(reader: &mut Reader<'_>) -> Result<Change> {
    if reader.peek()? == Kind::Str {
        return match reader.text_bytes()? {
            b"cleared" => Ok(Change::Cleared),
            _ => Err(missing("stored")),
        };
    }
    let mut change = None;
    for _ in 0..reader.map()? {
        match reader.text_bytes()? {
            b"stored" => change = Some(read_stored(reader)?),
            b"removed" => change = Some(read_removed(reader)?),
            b"cleared" => {
                reader.skip()?;
                change = Some(Change::Cleared);
            }
            _ => reader.skip()?,
        }
    }
    change.ok_or(missing("stored"))
}

fn read_stored(reader: &mut Reader<'_>) -> Result<Change> {
    let (mut parent, mut position, mut blocks) = (None, None, None);
    for _ in 0..reader.map()? {
        match reader.text_bytes()? {
            b"parent_hash" if reader.nil()? => parent = None,
            b"parent_hash" => parent = Some(EngineHash(read_bits(reader)?)),
            b"start_position" if reader.peek()? == Kind::Int => {
                position = match reader.int()? {
                    Int::Unsigned(position) => Some(position),
                    Int::Negative(_) => None,
                };
            }
            b"blocks" => blocks = Some(read_blocks(reader)?),
            _ => reader.skip()?,
        }
    }
    Ok(Change::Stored {
        parent,
        position,
        blocks: blocks.ok_or(missing("blocks"))?,
    })
}

fn read_blocks(reader: &mut Reader<'_>) -> Result<Vec<StoredBlock>> {
    let len = reader.array()?;
    // A claimed length is not believed beyond what its bytes can hold.
    let mut blocks = Vec::with_capacity(len.min(reader.left() / BLOCK_BYTES_MIN));
    for _ in 0..len {
        blocks.push(read_block(reader)?);
    }
    Ok(blocks)
}

fn read_block(reader: &mut Reader<'_>) -> Result<StoredBlock> {
    let (mut engine, mut local) = (None, None);
    for _ in 0..reader.map()? {
        match reader.text_bytes()? {
            b"block_hash" => engine = Some(EngineHash(read_bits(reader)?)),
            b"tokens_hash" => local = Some(LocalHash(read_bits(reader)?)),
            _ => reader.skip()?,
        }
    }
    Ok(StoredBlock {
        engine: engine.ok_or(missing("block_hash"))?,
        local: local.ok_or(missing("tokens_hash"))?,
    })
}

fn read_removed(reader: &mut Reader<'_>) -> Result<Change> {
    let mut names = None;
    for _ in 0..reader.map()? {
        if reader.text_bytes()? != b"block_hashes" {
            reader.skip()?;
            continue;
        }
        let len = reader.array()?;
        let mut list = Vec::with_capacity(len.min(reader.left()));
        for _ in 0..len {
            list.push(EngineHash(read_bits(reader)?));
        }
        names = Some(list);
    }
    Ok(Change::Removed(names.ok_or(missing("block_hashes"))?))
}

/// The 64 bits of a hash, whatever sign they were written with.
#[inline]
fn read_bits(reader: &mut Reader<'_>) -> Result<u64> {
    match reader.u64_of_nine_bytes() {
        Some(bits) => Ok(bits),
        None => reader.int().map(Int::bits),
    }
}

fn read_name<'p>(reader: &mut Reader<'p>, field: &'static str) -> Result<&'p [u8]> {
    match reader.peek()? {
        Kind::Str => reader.text_bytes(),
        _ => Err(DecodeError::Range { field }),
    }
}
