//! One rank's batches: encoded, numbered, kept for replay, and bent where a fault says so.

use std::collections::{HashMap, VecDeque};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kvasir_engine::CacheEvent;
use kvasir_transport::zmq::ReplayStore;
use kvasir_types::{EngineHash, KvEvent, Tier};
use kvasir_wire::engine::{
    Adapter, Attention, Dialect, Event, Medium, Removed, Stored, encode_batch,
};
use kvasir_wire::frame::Frame;

use super::EventOptions;

/// Something that goes wrong with events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The next batches are not sent live; the replay has them.
    Drop(u32),
    /// The next batch is sent twice.
    Duplicate,
    /// The next batch is sent after the one that follows it.
    Reorder,
    /// The next batches come late by this.
    Delay(u32, Duration),
    /// Nothing is published or kept for replay, until [`Self::Unmute`].
    Mute,
    /// Ends [`Self::Mute`].
    Unmute,
    /// Numbering begins again at 0, and the buffer is empty; the cache stays as it is.
    RestartSequence,
    /// The engine begins again behind the same addresses: readers are cut off, numbering begins at 0, and
    /// its cache is empty where somebody can make it so (the control route does).
    RestartEmpty,
    /// The next clear of the cache is not told.
    SilentClear,
    /// The replay forgets all but the last batches.
    ForgetReplay(usize),
    /// Events claim another block size from now on; 0 ends it.
    BlockSize(u32),
}

/// Why a text is no [`Fault`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no event fault; there are drop=COUNT, duplicate, reorder, delay=MS, mute, unmute, \
     restart-sequence, restart-empty, silent-clear, forget-replay=KEEP and block-size=TOKENS"
)]
pub struct FaultError(String);

impl FromStr for Fault {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, number) = match text.split_once('=') {
            Some((name, value)) => (name, value.parse::<u32>().ok()),
            None => (text, None),
        };
        let error = || FaultError(text.to_owned());
        let fault = match (name, number) {
            ("drop", Some(count)) => Self::Drop(count),
            ("delay", Some(ms)) => Self::Delay(1, Duration::from_millis(u64::from(ms))),
            ("forget-replay", Some(keep)) => Self::ForgetReplay(keep as usize),
            ("block-size", Some(tokens)) => Self::BlockSize(tokens),
            _ if text.contains('=') => return Err(error()),
            ("duplicate", _) => Self::Duplicate,
            ("reorder", _) => Self::Reorder,
            ("mute", _) => Self::Mute,
            ("unmute", _) => Self::Unmute,
            ("restart-sequence", _) => Self::RestartSequence,
            ("restart-empty", _) => Self::RestartEmpty,
            ("silent-clear", _) => Self::SilentClear,
            _ => return Err(error()),
        };
        Ok(fault)
    }
}

/// Under what a request's blocks are shared.
#[derive(Clone, Debug, Default)]
pub(super) struct Scope {
    pub(super) lora: Option<Arc<str>>,
    pub(super) salt: Option<Arc<str>>,
}

/// A batch on its way out.
#[derive(Clone, Debug)]
pub(super) struct Outgoing {
    pub(super) frame: Frame<Bytes>,
    pub(super) after: Option<Later>,
}

/// Send it after a pause, if the numbering that it is of goes on then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Later {
    pub(super) pause: Duration,
    pub(super) life: u64,
}

/// An event of the step that is not over yet.
struct Noted {
    event: CacheEvent,
    scope: Scope,
}

#[derive(Default)]
struct Faults {
    drop: u32,
    duplicate: bool,
    reorder: bool,
    delay: Option<(u32, Duration)>,
    silent_clear: bool,
    mute: bool,
    block_size: Option<u32>,
}

/// One rank's batches.
pub(super) struct Log {
    options: EventOptions,
    rank: u32,
    /// How often numbering began again.
    life: u64,
    next: u64,
    noted: Vec<Noted>,
    buffer: VecDeque<Frame<Bytes>>,
    faults: Faults,
    overtaken: Option<Frame<Bytes>>,
    /// What the cache holds, whatever was told: times each block is stored.
    held: HashMap<EngineHash, u32>,
}

impl Log {
    pub(super) fn new(options: &EventOptions, rank: u32) -> Self {
        Self {
            options: options.clone(),
            rank,
            life: 0,
            next: 0,
            noted: Vec::new(),
            buffer: VecDeque::new(),
            faults: Faults::default(),
            overtaken: None,
            held: HashMap::new(),
        }
    }

    /// The blocks that the cache holds, sorted.
    pub(super) fn held(&self) -> Vec<EngineHash> {
        let mut held: Vec<EngineHash> = self.held.keys().copied().collect();
        held.sort_unstable();
        held
    }

    fn hold(&mut self, event: &KvEvent) {
        match event {
            KvEvent::Stored { blocks, .. } => {
                for block in blocks {
                    *self.held.entry(block.engine).or_default() += 1;
                }
            }
            KvEvent::Removed { blocks, .. } => {
                for name in blocks {
                    match self.held.get_mut(name) {
                        Some(count) if *count > 1 => *count -= 1,
                        Some(_) => drop(self.held.remove(name)),
                        None => {}
                    }
                }
            }
            KvEvent::Cleared { .. } => self.held.clear(),
        }
    }

    /// What is sent later is sent only while this stays as it was: a process that is gone sends nothing.
    pub(super) const fn life(&self) -> u64 {
        self.life
    }

    pub(super) const fn published(&self) -> u64 {
        self.next
    }

    pub(super) fn note(&mut self, event: &CacheEvent, scope: Scope) {
        self.hold(&event.event);
        if self.faults.mute {
            return;
        }
        let clear = matches!(event.event, KvEvent::Cleared { .. });
        if clear && std::mem::take(&mut self.faults.silent_clear) {
            return;
        }
        let event = event.clone();
        self.noted.push(Noted { event, scope });
    }

    /// The process began again.
    pub(super) fn restart(&mut self) {
        self.number_anew();
        self.noted.clear();
        self.held.clear();
        self.overtaken = None;
    }

    fn number_anew(&mut self) {
        self.life += 1;
        self.next = 0;
        self.buffer.clear();
    }

    /// Takes a fault; a batch that was held back by an earlier one is let go.
    pub(super) fn inject(&mut self, fault: Fault) -> Vec<Outgoing> {
        let faults = &mut self.faults;
        match fault {
            Fault::Drop(count) => faults.drop = count,
            Fault::Duplicate => faults.duplicate = true,
            Fault::Reorder => faults.reorder = true,
            Fault::Delay(count, by) => faults.delay = Some((count, by)),
            Fault::SilentClear => faults.silent_clear = true,
            Fault::BlockSize(size) => faults.block_size = (size > 0).then_some(size),
            Fault::Mute => faults.mute = true,
            Fault::Unmute => faults.mute = false,
            Fault::RestartEmpty => self.restart(),
            Fault::RestartSequence => self.number_anew(),
            Fault::ForgetReplay(keep) => {
                let gone = self.buffer.len().saturating_sub(keep);
                self.buffer.drain(..gone);
            }
        }
        let after = None;
        let overtaken = self.overtaken.take();
        overtaken
            .map(|frame| Outgoing { frame, after })
            .into_iter()
            .collect()
    }

    /// Ends a step: its batch, if it has one, as it is to be sent.
    pub(super) fn publish(&mut self) -> Vec<Outgoing> {
        if self.noted.is_empty() {
            return Vec::new();
        }
        let payload = self.encode();
        let frame = Frame {
            sequence: self.next,
            payload,
        };
        self.next += 1;
        self.buffer.push_back(frame.clone());
        if self.buffer.len() > self.options.buffer_steps {
            self.buffer.pop_front();
        }
        self.bend(frame)
    }

    fn bend(&mut self, frame: Frame<Bytes>) -> Vec<Outgoing> {
        let faults = &mut self.faults;
        if faults.drop > 0 {
            faults.drop -= 1;
            return Vec::new();
        }
        if std::mem::take(&mut faults.reorder) {
            self.overtaken = Some(frame);
            return Vec::new();
        }
        let after = match &mut faults.delay {
            Some((count, by)) if *count > 0 => {
                *count -= 1;
                let (pause, life) = (*by, self.life);
                Some(Later { pause, life })
            }
            _ => None,
        };
        let mut frames = vec![Outgoing { frame, after }];
        if std::mem::take(&mut faults.duplicate) {
            frames.extend_from_within(..);
        }
        let after = None;
        frames.extend(self.overtaken.take().map(|frame| Outgoing { frame, after }));
        frames
    }

    fn encode(&mut self) -> Bytes {
        let noted = std::mem::take(&mut self.noted);
        let size = self.faults.block_size.unwrap_or(self.options.block_size);
        let names: Vec<Vec<EngineHash>> = noted.iter().map(|n| names(&n.event.event)).collect();
        let mut events = Vec::new();
        for (noted, names) in noted.iter().zip(&names) {
            match &noted.event.event {
                KvEvent::Stored { tier, parent, .. } => {
                    let stored = Stored {
                        hashes: names,
                        parent: *parent,
                        tokens: &noted.event.tokens,
                        block_size: size,
                        medium: medium(*tier),
                        adapter: noted
                            .scope
                            .lora
                            .as_deref()
                            .map_or(Adapter::Base, Adapter::Named),
                        salt: noted.scope.salt.as_deref(),
                        group: Some(0),
                        attention: Attention::Full,
                        ..Stored::default()
                    };
                    events.push(Event::Stored(stored));
                }
                // vLLM sends one event for each.
                KvEvent::Removed { tier, .. } => events.extend(names.chunks(1).map(|hashes| {
                    Event::Removed(Removed {
                        hashes,
                        medium: medium(*tier),
                        group: Some(0),
                        remote: false,
                    })
                })),
                KvEvent::Cleared { .. } => events.push(Event::Cleared),
            }
        }
        let (mut payload, at) = (Vec::new(), (self.options.unix_time)());
        let dialect: Dialect = self.options.dialect;
        encode_batch(
            dialect,
            at,
            events.into_iter(),
            Some(self.rank),
            &mut payload,
        );
        payload.into()
    }
}

fn names(event: &KvEvent) -> Vec<EngineHash> {
    match event {
        KvEvent::Stored { blocks, .. } => blocks.iter().map(|b| b.engine).collect(),
        KvEvent::Removed { blocks, .. } => blocks.clone(),
        KvEvent::Cleared { .. } => Vec::new(),
    }
}

const fn medium(tier: Tier) -> Medium {
    Medium::Known(tier)
}

/// What the replay socket gives out.
pub(super) struct Replay(pub(super) Arc<Mutex<Log>>);

impl ReplayStore for Replay {
    fn messages_from(&self, start: u64) -> Vec<Frame<Bytes>> {
        let log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = log.buffer.iter().filter(|frame| frame.sequence >= start);
        wanted.cloned().collect()
    }
}
