//! Random drive: whatever is asked, whenever it is cancelled, the engine keeps its invariants and ends.

use std::collections::{HashMap, HashSet};

use kvasir_engine::{
    AdmitError, Engine, EngineConfig, EngineFamily, PreemptionMode, SchedulingPolicy, Step,
};
use kvasir_types::{EngineHash, KvEvent, RequestId, Rng};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use crate::request;

const BLOCK_SIZE: u32 = 4;

#[derive(Clone, Debug)]
enum Act {
    /// A prompt that starts like one of a few families and has a tail of its own.
    Admit {
        family: u32,
        shared: u32,
        own: u32,
        answer: u32,
        priority: i32,
    },
    Cancel(u8),
    Steps(u8),
    Clear,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        6 => (0u32..3, 0u32..40, 0u32..12, 1u32..30, -2i32..3).prop_map(
            |(family, shared, own, answer, priority)| Act::Admit { family, shared, own, answer, priority }
        ),
        1 => any::<u8>().prop_map(Act::Cancel),
        4 => (1u8..12).prop_map(Act::Steps),
        1 => Just(Act::Clear),
    ]
}

fn config() -> impl Strategy<Value = EngineConfig> {
    let family = prop_oneof![
        3 => Just(EngineFamily::Vllm),
        1 => Just(EngineFamily::Sglang),
        1 => Just(EngineFamily::Trtllm)
    ];
    let habits = (
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
        prop::option::of(1u32..9),
    );
    (family, 22u32..40, 1u32..6, 5u32..90, habits).prop_map(
        |(family, num_blocks, max_num_seqs, batched, (caching, fifo, urgent, long))| EngineConfig {
            family,
            block_size: BLOCK_SIZE,
            num_blocks,
            max_num_seqs,
            max_num_batched_tokens: batched,
            max_model_len: 80,
            long_prefill_tokens: long,
            prefix_caching: caching,
            preemption: if fifo {
                PreemptionMode::Fifo
            } else {
                PreemptionMode::Lifo
            },
            scheduling: if urgent {
                SchedulingPolicy::Priority
            } else {
                SchedulingPolicy::Fcfs
            },
            max_waiting: 20,
            ..EngineConfig::default()
        },
    )
}

/// What the events alone say that the cache holds: each name, how often.
#[derive(Default)]
struct Mirror {
    held: HashMap<EngineHash, u32>,
}

impl Mirror {
    fn apply(&mut self, event: &KvEvent) {
        match event {
            KvEvent::Stored { parent, blocks, .. } => {
                let known = |p: &EngineHash| self.held.contains_key(p);
                assert!(
                    parent.as_ref().is_none_or(known),
                    "a block follows one that is not there"
                );
                for block in blocks {
                    *self.held.entry(block.engine).or_default() += 1;
                }
            }
            KvEvent::Removed { blocks, .. } => {
                for name in blocks {
                    let Some(count) = self.held.get_mut(name) else {
                        panic!("removed what was never stored");
                    };
                    *count -= 1;
                    if *count == 0 {
                        self.held.remove(name);
                    }
                }
            }
            KvEvent::Cleared { .. } => self.held.clear(),
        }
    }
}

struct Drive {
    engine: Engine,
    mirror: Mirror,
    live: Vec<RequestId>,
    tokens: HashMap<RequestId, u32>,
    ended: HashSet<RequestId>,
    asked: u128,
}

impl Drive {
    fn step(&mut self) {
        let mut step = Step::default();
        let limit = self.engine.config().max_num_batched_tokens;
        self.engine.step(&mut step);
        self.engine.verify();
        assert!(step.prefill_tokens + step.decodes <= limit);
        for event in &step.events {
            self.mirror.apply(&event.event);
        }
        for output in &step.outputs {
            assert!(self.live.contains(&output.id), "a token for nobody");
            *self.tokens.entry(output.id).or_default() += 1;
            if output.finish.is_some() {
                assert!(self.ended.insert(output.id), "ended twice");
                self.live.retain(|id| *id != output.id);
            }
        }
        let load = self.engine.load();
        assert!(load.running <= self.engine.config().max_num_seqs);
        let held: u32 = self.mirror.held.values().sum();
        let findable = load.used_blocks + load.cached_blocks;
        assert!(
            held <= findable,
            "events say {held} blocks, the pool has {findable}"
        );
    }

    fn act(&mut self, act: &Act) {
        match *act {
            Act::Admit {
                family,
                shared,
                own,
                answer,
                priority,
            } => {
                self.asked += 1;
                let mut tokens: Vec<u32> = (0..shared).map(|i| family * 1000 + i).collect();
                let mut rng = Rng::new(self.asked as u64);
                tokens.extend((0..own).map(|_| 10_000 + rng.below(1000) as u32));
                let mut request = request(self.asked, &tokens, BLOCK_SIZE, answer);
                request.priority = priority;
                match self.engine.admit(request) {
                    Ok(()) => self.live.push(RequestId(self.asked)),
                    Err(AdmitError::EmptyPrompt) => assert!(tokens.is_empty()),
                    Err(AdmitError::QueueFull(20)) => assert!(self.engine.load().waiting >= 20),
                    Err(other) => panic!("{other}"),
                }
            }
            Act::Cancel(which) if !self.live.is_empty() => {
                let at = usize::from(which) % self.live.len();
                assert!(self.engine.cancel(self.live.remove(at)));
                self.engine.verify();
            }
            Act::Cancel(_) => assert!(!self.engine.cancel(RequestId(0))),
            Act::Steps(n) => (0..n).for_each(|_| self.step()),
            Act::Clear => {
                let idle = self.engine.load().used_blocks == 0;
                assert_eq!(self.engine.clear_cache(), idle);
                if idle {
                    self.mirror.held.clear(); // the event comes with the next step
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1000,
        rng_seed: RngSeed::Fixed(5),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Blocks are never lost or owned twice, references match, events can be followed, every request
    /// ends with the tokens it was to get, and at the end nothing is held.
    #[test]
    fn the_engine_keeps_its_invariants(config in config(), acts in prop::collection::vec(act(), 1..60)) {
        let mut drive = Drive {
            engine: Engine::new(config).unwrap(),
            mirror: Mirror::default(),
            live: Vec::new(),
            tokens: HashMap::new(),
            ended: HashSet::new(),
            asked: 0,
        };
        for act in &acts {
            drive.act(act);
        }
        let mut steps = 0;
        while !drive.engine.is_idle() {
            drive.step();
            steps += 1;
            prop_assert!(steps < 20_000, "no end: {:?}", drive.engine.load());
        }
        prop_assert!(drive.live.is_empty());
        prop_assert_eq!(drive.engine.load().used_blocks, 0);
        let asked = |act: &Act| matches!(act, Act::Admit { .. });
        prop_assert!(drive.ended.len() <= acts.iter().filter(|a| asked(a)).count());
        let held: u32 = drive.mirror.held.values().sum();
        prop_assert!(held >= drive.engine.load().cached_blocks, "the cache holds what no event told");
    }
}
