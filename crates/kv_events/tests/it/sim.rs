//! An engine that knows what it holds, behind a path that can lose, repeat and delay.

use std::collections::{HashMap, VecDeque};

use bytes::Bytes;
use kvasir_hash::{Scope, local_hashes};
use kvasir_index::{Index, Matches};
use kvasir_kv_events::{EventFormat, Output, Resync, Sequencer, SourceEvent, StreamOptions};
use kvasir_types::{EngineHash, LocalHash, Rng, Time, Token, WorkerRank};
use kvasir_wire::engine::{Dialect, Event, Removed, Stored, encode_batch};
use kvasir_wire::frame::Frame;

pub(crate) const BLOCK: u32 = 4;

/// A block's content: one symbol, four times.
pub(crate) type Prompt = Vec<Token>;

struct Block {
    parent: Option<EngineHash>,
    symbol: Token,
    count: u32,
}

/// The engine: its cache, and what it says about it.
pub(crate) struct Engine {
    pub(crate) rng: Rng,
    blocks: HashMap<EngineHash, Block>,
    capacity: usize,
    pub(crate) log: VecDeque<Frame<Bytes>>,
    pub(crate) buffer_steps: usize,
    pub(crate) next: u64,
    clock: f64,
    life: u64,
    pub(crate) dialect: Dialect,
    pub(crate) block_size: u32,
    /// Whether the log tells all that the cache went through since it was empty.
    pub(crate) log_is_whole: bool,
    /// Whether it announced all that happened to its cache since that was empty.
    pub(crate) honest: bool,
    pub(crate) prompts: Vec<Prompt>,
}

impl Engine {
    pub(crate) fn new(seed: u64, capacity: usize, buffer_steps: usize) -> Self {
        let mut rng = Rng::new(seed);
        let dialect = Dialect::ALL[rng.below(6) as usize];
        Self {
            rng,
            blocks: HashMap::new(),
            capacity,
            log: VecDeque::new(),
            buffer_steps,
            next: 0,
            clock: 1000.0,
            life: seed,
            dialect,
            block_size: BLOCK,
            log_is_whole: true,
            honest: true,
            prompts: Vec::new(),
        }
    }

    fn name(&self, parent: Option<EngineHash>, symbol: Token) -> EngineHash {
        let parent = parent.map_or(self.life, |p| p.0);
        EngineHash(Rng::new(parent ^ u64::from(symbol) << 7).next_u64())
    }

    /// Prompts share prefixes: few symbols, short.
    fn prompt(&mut self) -> Prompt {
        let len = 1 + self.rng.below(7) as usize;
        (0..len).map(|_| self.rng.below(3) as Token).collect()
    }

    /// One scheduler step: a prompt is computed, others are evicted for it. Returns its batch.
    pub(crate) fn step(&mut self) -> Frame<Bytes> {
        let prompt = self.prompt();
        self.run(prompt)
    }

    pub(crate) fn run(&mut self, prompt: Prompt) -> Frame<Bytes> {
        let mut chain = Vec::new();
        let mut parent = None;
        for &symbol in &prompt {
            let name = self.name(parent, symbol);
            chain.push((name, parent, symbol));
            parent = Some(name);
        }
        // As vLLM does, the last block of a prompt that is cached as a whole is stored again.
        let held = chain
            .iter()
            .take_while(|(n, ..)| self.blocks.contains_key(n))
            .count();
        let new = chain.split_off(held.min(chain.len() - 1));
        let keep: Vec<EngineHash> = chain.iter().chain(&new).map(|(n, ..)| *n).collect();
        let removed = self.evict(new.len(), &keep);
        for &(name, parent, symbol) in &new {
            let fresh = Block {
                parent,
                symbol,
                count: 0,
            };
            self.blocks.entry(name).or_insert(fresh).count += 1;
        }
        self.prompts.push(prompt);
        let hashes: Vec<EngineHash> = new.iter().map(|(n, ..)| *n).collect();
        let tokens: Vec<Token> = new
            .iter()
            .flat_map(|(.., s)| std::iter::repeat_n(*s, self.block_size as usize))
            .collect();
        let stored = Event::Stored(Stored {
            hashes: &hashes,
            parent: new[0].1,
            tokens: &tokens,
            block_size: self.block_size,
            ..Stored::default()
        });
        let removals = removed.iter().map(|name| {
            Event::Removed(Removed {
                hashes: std::slice::from_ref(name),
                ..Removed::default()
            })
        });
        let events: Vec<Event<'_>> = removals.chain([stored]).collect();
        self.publish(&events)
    }

    /// Frees room for `need` copies, leaves first, never what `keep` names.
    fn evict(&mut self, need: usize, keep: &[EngineHash]) -> Vec<EngineHash> {
        let mut removed = Vec::new();
        loop {
            let used: u32 = self.blocks.values().map(|b| b.count).sum();
            if used as usize + need <= self.capacity {
                return removed;
            }
            let is_leaf = |name: &EngineHash| {
                !self.blocks.values().any(|b| b.parent == Some(*name)) && !keep.contains(name)
            };
            let mut leaves: Vec<EngineHash> = self.blocks.keys().copied().filter(is_leaf).collect();
            leaves.sort_unstable();
            if leaves.is_empty() {
                return removed;
            }
            let victim = leaves[self.rng.below(leaves.len() as u64) as usize];
            let block = self.blocks.get_mut(&victim).unwrap();
            block.count -= 1;
            if block.count == 0 {
                self.blocks.remove(&victim);
            }
            removed.push(victim);
        }
    }

    /// Evicts one leaf and says so.
    pub(crate) fn evict_leaf(&mut self) -> Frame<Bytes> {
        let capacity = self.capacity;
        self.capacity = self.blocks.values().map(|b| b.count as usize).sum();
        let removed = self.evict(1, &[]);
        self.capacity = capacity;
        let hashes = &removed;
        self.publish(&[Event::Removed(Removed {
            hashes,
            ..Removed::default()
        })])
    }

    pub(crate) fn clear(&mut self) -> Frame<Bytes> {
        self.blocks.clear();
        // From here on, what follows in the log tells all.
        let frame = self.publish(&[Event::Cleared]);
        self.log_is_whole = true;
        self.honest = true;
        frame
    }

    /// The cache is gone and nobody is told.
    pub(crate) fn clear_silently(&mut self) {
        self.blocks.clear();
        self.log_is_whole = false;
        self.honest = false;
    }

    /// The process begins again.
    pub(crate) fn restart(&mut self) {
        self.blocks.clear();
        self.log.clear();
        self.next = 0;
        self.life += 1000;
        self.clock += 5.0;
        self.log_is_whole = true;
        self.honest = true;
    }

    /// Only the numbering begins again; the cache stays.
    pub(crate) fn restart_sequence(&mut self) {
        self.log.clear();
        self.next = 0;
        self.clock += 5.0;
        self.log_is_whole = self.blocks.is_empty();
        self.honest = self.blocks.is_empty();
    }

    pub(crate) fn publish(&mut self, events: &[Event<'_>]) -> Frame<Bytes> {
        self.clock += 0.001;
        let mut payload = Vec::new();
        let events = events.iter().copied();
        encode_batch(self.dialect, self.clock, events, Some(0), &mut payload);
        let frame = Frame {
            sequence: self.next,
            payload: Bytes::from(payload),
        };
        self.next += 1;
        self.log.push_back(frame.clone());
        if self.log.len() > self.buffer_steps {
            self.log.pop_front();
            self.log_is_whole = false;
        }
        frame
    }

    /// How many leading blocks of a prompt are cached.
    pub(crate) fn depth(&self, prompt: &[Token]) -> u32 {
        let mut parent = None;
        let mut depth = 0;
        for &symbol in prompt {
            let name = self.name(parent, symbol);
            match self.blocks.get(&name) {
                Some(block) => assert_eq!((block.parent, block.symbol), (parent, symbol)),
                None => break,
            }
            parent = Some(name);
            depth += 1;
        }
        depth
    }

    pub(crate) fn replay(&self, from: u64) -> Vec<Frame<Bytes>> {
        self.log
            .iter()
            .filter(|f| f.sequence >= from)
            .cloned()
            .collect()
    }
}

/// Local hashes of a prompt as a request would have them.
pub(crate) fn locals(prompt: &[Token]) -> Vec<LocalHash> {
    let repeat = |s: &Token| std::iter::repeat_n(*s, BLOCK as usize);
    let tokens: Vec<Token> = prompt.iter().flat_map(repeat).collect();
    local_hashes(&tokens, BLOCK as usize, &Scope::default())
}

/// One worker: its engine, the sequencer that reads its events, and answers on their way.
pub(crate) struct Worker {
    pub(crate) rank: WorkerRank,
    pub(crate) engine: Engine,
    pub(crate) sequencer: Sequencer,
    pub(crate) options: StreamOptions,
    /// Messages on the live path.
    pub(crate) live: VecDeque<Frame<Bytes>>,
    /// Answers on the replay path.
    pub(crate) answers: VecDeque<SourceEvent>,
    pub(crate) notices: Vec<kvasir_kv_events::Notice>,
    pub(crate) now: Time,
    /// Whether the replay socket answers.
    pub(crate) replay_up: bool,
    out: Vec<Output>,
}

impl Worker {
    pub(crate) fn new(id: u64, engine: Engine, options: StreamOptions) -> Self {
        let rank = WorkerRank::new(id, 0);
        let format = EventFormat::EngineBatches { rank };
        Self {
            rank,
            engine,
            sequencer: Sequencer::new(format, options.clone()),
            options,
            live: VecDeque::new(),
            answers: VecDeque::new(),
            notices: Vec::new(),
            now: Time::ZERO,
            replay_up: true,
            out: Vec::new(),
        }
    }

    pub(crate) fn input(&mut self, index: &Index, input: SourceEvent) {
        let mut out = std::mem::take(&mut self.out);
        self.sequencer.step(self.now, input, index, &mut out);
        self.obey(out);
    }

    pub(crate) fn resync(&mut self, index: &Index, resync: Resync) {
        let mut out = std::mem::take(&mut self.out);
        self.sequencer.resync(self.now, resync, index, &mut out);
        self.obey(out);
    }

    pub(crate) fn tick(&mut self, index: &Index) {
        let mut out = std::mem::take(&mut self.out);
        self.sequencer.tick(self.now, index, &mut out);
        self.obey(out);
    }

    fn obey(&mut self, mut out: Vec<Output>) {
        for output in out.drain(..) {
            match output {
                Output::Notice(notice) => self.notices.push(notice),
                Output::CancelReplay { attempt } => self.cancel(attempt),
                Output::Query { .. } => panic!("engines have no index to ask"),
                Output::Replay { attempt, from } => {
                    self.answers.clear();
                    if !self.replay_up {
                        continue;
                    }
                    for frame in self.engine.replay(from) {
                        self.answers
                            .push_back(SourceEvent::Replayed { attempt, frame });
                    }
                    self.answers.push_back(SourceEvent::ReplayEnded { attempt });
                }
            }
        }
        self.out = out;
    }

    fn cancel(&mut self, cancelled: u64) {
        self.answers.retain(|answer| match answer {
            SourceEvent::Replayed { attempt, .. } | SourceEvent::ReplayEnded { attempt } => {
                *attempt != cancelled
            }
            _ => true,
        });
    }

    pub(crate) fn say(&mut self, frame: Frame<Bytes>) {
        self.live.push_back(frame);
    }

    /// Delivers everything that is on its way, letting time pass where only time helps.
    pub(crate) fn settle(&mut self, index: &Index) {
        for _ in 0..100_000 {
            if let Some(frame) = self.live.pop_front() {
                self.input(index, SourceEvent::Live(frame));
            } else if let Some(answer) = self.answers.pop_front() {
                self.input(index, answer);
            } else if self.sequencer.status().recovering.is_some() {
                self.now = self.sequencer.next_deadline().unwrap();
                self.tick(index);
            } else {
                return;
            }
        }
        let tail = self.notices.iter().rev().take(12).collect::<Vec<_>>();
        panic!(
            "a recovery never ends: {tail:?} {:?} {:?}",
            self.sequencer.status(),
            self.engine.next
        );
    }

    /// Depth that the index shows for this worker.
    pub(crate) fn shown(&self, index: &Index, prompt: &[Token]) -> u32 {
        let mut matches = Matches::new();
        index.find(&locals(prompt), &mut matches);
        matches.get(self.rank).map_or(0, |m| m.device)
    }

    /// Compares the index with the engine on every prompt that it ever saw.
    pub(crate) fn compare(&self, index: &Index, equal: bool, context: &str) {
        for prompt in &self.engine.prompts {
            let (shown, truth) = (self.shown(index, prompt), self.engine.depth(prompt));
            let fine = if equal {
                shown == truth
            } else {
                shown <= truth
            };
            let Self { rank, notices, .. } = self;
            assert!(
                fine,
                "{context}: worker {rank}, prompt {prompt:?}: index {shown}, engine {truth}\n{notices:?}\n{:?}",
                self.sequencer.status()
            );
        }
    }
}
