//! Single behaviours: chunking, preemption, limits, engine families, determinism.

use expect_test::{Expect, expect};
use kvasir_engine::{
    AdmitError, ConfigError, Engine, EngineConfig, EngineFamily, PreemptionMode, SchedulingPolicy,
    Step,
};
use kvasir_profile::{Constants, Preset, StepTimes};
use kvasir_types::{FinishReason, KvEvent, RequestId};

use crate::{request, run};

fn small() -> EngineConfig {
    EngineConfig {
        block_size: 4,
        num_blocks: 33,
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_model_len: 128,
        times: StepTimes::Constant(Constants {
            step_ms: 1.0,
            prompt_token_ms: 1.0,
            decode_ms: 0.1,
        }),
        ..EngineConfig::default()
    }
}

/// One line per step: duration, prompt tokens, decodes, preemptions, tokens by request, events.
fn check(engine: &mut Engine, expect: &Expect) {
    let mut text = String::new();
    for step in run(engine) {
        let outputs: Vec<String> = step
            .outputs
            .iter()
            .map(|o| format!("{}{}", o.id.0, if o.finish.is_some() { "." } else { "" }))
            .collect();
        let events: Vec<String> = step.events.iter().map(|e| describe(&e.event)).collect();
        text += format!(
            "{:>4.1} ms  prompt {:>2}  decode {}  thrown out {}  tokens for {}  {}",
            step.duration.as_secs_f64() * 1e3,
            step.prefill_tokens,
            step.decodes,
            step.preempted,
            outputs.join(" "),
            events.join(" "),
        )
        .trim_end();
        text += "\n";
    }
    expect.assert_eq(&text);
}

fn describe(event: &KvEvent) -> String {
    match event {
        KvEvent::Stored { blocks, .. } => format!("+{}", blocks.len()),
        KvEvent::Removed { blocks, .. } => format!("-{}", blocks.len()),
        KvEvent::Cleared { .. } => "cleared".to_owned(),
    }
}

fn tokens(from: u32, len: u32) -> Vec<u32> {
    (from..from + len).collect()
}

/// A prompt of 40 tokens in steps of 16; a second one decodes meanwhile and goes first.
#[test]
fn long_prompts_are_computed_in_pieces_beside_decodes() {
    let mut engine = Engine::new(small()).unwrap();
    engine.admit(request(1, &tokens(0, 6), 4, 4)).unwrap();
    engine.admit(request(2, &tokens(100, 40), 4, 2)).unwrap();
    check(
        &mut engine,
        &expect![[r#"
             17.0 ms  prompt 16  decode 0  thrown out 0  tokens for 1  +1 +2
             16.1 ms  prompt 15  decode 1  thrown out 0  tokens for 1  +4
             16.1 ms  prompt 15  decode 1  thrown out 0  tokens for 1 2  +1 +4
              1.2 ms  prompt  0  decode 2  thrown out 0  tokens for 1. 2.
        "#]],
    );
}

/// A prompt that another engine hands over takes its room and one token of a step; thrown out, it is computed like any other.
#[test]
fn a_prompt_that_is_handed_over_is_not_computed() {
    let mut engine = Engine::new(small()).unwrap();
    let mut handed = request(1, &tokens(0, 30), 4, 3);
    handed.prompt = handed.prompt.transferred();
    engine.admit(handed).unwrap();
    let mut step = Step::default();
    engine.step(&mut step);
    assert_eq!((step.prefill_tokens, step.outputs.len()), (1, 1));
    assert_eq!(engine.load().used_blocks, 8);
    engine.verify();
    let rest = run(&mut engine);
    assert_eq!(rest.iter().map(|step| step.outputs.len()).sum::<usize>(), 2);
    engine.verify();
}

/// Two requests that together outgrow the pool: the later one is preempted and computed again, mostly
/// from its own blocks, and both get all their tokens.
#[test]
fn a_full_pool_throws_the_last_one_out_and_both_end() {
    for (preemption, first_out) in [(PreemptionMode::Lifo, 2), (PreemptionMode::Fifo, 1)] {
        let config = EngineConfig {
            preemption,
            max_model_len: 100,
            ..small()
        };
        let mut engine = Engine::new(config).unwrap();
        engine.admit(request(1, &tokens(0, 40), 4, 60)).unwrap();
        engine.admit(request(2, &tokens(1000, 40), 4, 60)).unwrap();
        let steps = run(&mut engine);
        let preempted: u32 = steps.iter().map(|s| s.preempted).sum();
        assert!(preempted > 0, "{preemption:?}");
        assert_eq!(u64::from(preempted), engine.counters().preemptions);
        let outputs = |id: u128| {
            steps
                .iter()
                .flat_map(|s| &s.outputs)
                .filter(move |o| o.id.0 == id)
        };
        assert_eq!((outputs(1).count(), outputs(2).count()), (60, 60));
        assert!(
            outputs(1)
                .chain(outputs(2))
                .filter(|o| o.cached_tokens.is_some())
                .count()
                == 2
        );
        let last = steps.last().unwrap().outputs.last().unwrap();
        assert_eq!(
            (last.id, last.finish),
            (RequestId(first_out), Some(FinishReason::Length))
        );
        engine.verify();
    }
}

/// The same prompts in one step: vLLM shares at once, the others one pass later.
#[test]
fn families_differ_in_when_a_block_can_be_shared() {
    let hits = |family| {
        let mut engine = Engine::new(EngineConfig {
            family,
            max_num_batched_tokens: 64,
            ..small()
        })
        .unwrap();
        for id in 1..=3 {
            engine.admit(request(id, &tokens(0, 13), 4, 5)).unwrap();
            if id == 2 {
                let mut step = Step::default();
                engine.step(&mut step);
            }
        }
        let steps = run(&mut engine);
        engine.verify();
        let load = engine.load();
        assert_eq!(load.used_blocks, 0);
        let late: u32 = steps
            .iter()
            .flat_map(|s| &s.started)
            .map(|s| s.cached_tokens)
            .sum();
        (
            engine.counters().cached_tokens - u64::from(late),
            late,
            load.cached_blocks,
        )
    };
    assert_eq!(
        hits(EngineFamily::Vllm),
        (12, 12, 6),
        "three answers, a block each"
    );
    assert_eq!(hits(EngineFamily::Sglang), (0, 12, 6));
    assert_eq!(hits(EngineFamily::Trtllm), (0, 12, 6));
}

/// SGLang announces output blocks when the request ends, the others when they fill.
#[test]
fn families_differ_in_when_output_blocks_are_announced() {
    let stored_by_step = |family| {
        let mut engine = Engine::new(EngineConfig { family, ..small() }).unwrap();
        engine.admit(request(1, &tokens(0, 8), 4, 10)).unwrap();
        let steps = run(&mut engine);
        let events = |s: &Step| {
            s.events
                .iter()
                .map(|e| describe(&e.event))
                .collect::<String>()
        };
        steps.iter().map(events).collect::<Vec<_>>().join(",")
    };
    assert_eq!(stored_by_step(EngineFamily::Vllm), "+2,,,,+1,,,,+1,");
    assert_eq!(stored_by_step(EngineFamily::Trtllm), "+2,,,,+1,,,,+1,");
    assert_eq!(stored_by_step(EngineFamily::Sglang), "+2,,,,,,,,,+2");
}

#[test]
fn the_urgent_go_first() {
    let mut engine = Engine::new(EngineConfig {
        scheduling: SchedulingPolicy::Priority,
        max_num_seqs: 1,
        ..small()
    })
    .unwrap();
    for (id, priority) in [(1, 0), (2, 5), (3, 5), (4, -1)] {
        let mut request = request(id, &tokens(id as u32 * 100, 5), 4, 1);
        request.priority = priority;
        engine.admit(request).unwrap();
    }
    let order: Vec<u128> = run(&mut engine)
        .iter()
        .flat_map(|s| &s.started)
        .map(|s| s.id.0)
        .collect();
    assert_eq!(order, [2, 3, 1, 4]);
}

#[test]
fn without_prefix_caching_nothing_is_shared_or_told() {
    let mut engine = Engine::new(EngineConfig {
        prefix_caching: false,
        ..small()
    })
    .unwrap();
    for id in 1..=2 {
        engine.admit(request(id, &tokens(0, 12), 4, 9)).unwrap();
    }
    let steps = run(&mut engine);
    assert!(steps.iter().all(|s| s.events.is_empty()));
    assert_eq!(engine.counters().cached_tokens, 0);
    assert_eq!(engine.load().cached_blocks, 0);
}

#[test]
fn requests_that_can_never_run_are_refused() {
    let mut engine = Engine::new(EngineConfig {
        max_waiting: 1,
        ..small()
    })
    .unwrap();
    let refuse = |engine: &mut Engine, request| engine.admit(request).unwrap_err();
    assert_eq!(
        refuse(&mut engine, request(1, &[], 4, 1)),
        AdmitError::EmptyPrompt
    );
    assert_eq!(
        refuse(&mut engine, request(1, &[1], 4, 0)),
        AdmitError::NoTokens
    );
    let wrong_blocks = AdmitError::BlockSize {
        prompt: 8,
        engine: 4,
    };
    assert_eq!(refuse(&mut engine, request(1, &[1], 8, 1)), wrong_blocks);
    let long = AdmitError::TooLong {
        prompt: 128,
        max: 127,
    };
    assert_eq!(refuse(&mut engine, request(1, &tokens(0, 128), 4, 1)), long);
    engine.admit(request(1, &tokens(0, 127), 4, 99)).unwrap();
    assert_eq!(
        refuse(&mut engine, request(1, &[1], 4, 1)),
        AdmitError::Duplicate(RequestId(1))
    );
    assert_eq!(
        refuse(&mut engine, request(2, &[1], 4, 1)),
        AdmitError::QueueFull(1)
    );
    let steps = run(&mut engine);
    assert_eq!(
        steps.iter().map(|s| s.outputs.len()).sum::<usize>(),
        1,
        "clipped to the model"
    );
}

#[test]
fn engines_that_cannot_be_are_refused() {
    let error = |config: EngineConfig| Engine::new(config).map(|_| ()).unwrap_err();
    assert_eq!(
        error(EngineConfig {
            block_size: 0,
            ..small()
        }),
        ConfigError::Zero("block_size")
    );
    assert_eq!(
        error(EngineConfig {
            speedup: 0.0,
            ..small()
        }),
        ConfigError::Speedup(0.0)
    );
    assert!(matches!(
        error(EngineConfig {
            speedup: f64::NAN,
            ..small()
        }),
        ConfigError::Speedup(_)
    ));
    let small_pool = ConfigError::PoolTooSmall {
        tokens: 124,
        max_model_len: 128,
    };
    assert_eq!(
        error(EngineConfig {
            num_blocks: 32,
            ..small()
        }),
        small_pool
    );
    assert!(EngineConfig::preset(Preset::H200Llama8b, 0).is_err());
}

#[test]
fn presets_fill_the_memory_beside_the_weights() {
    let blocks = |preset| EngineConfig::preset(preset, 16).unwrap().num_blocks;
    assert_eq!(blocks(Preset::H200Llama8b), 48_084);
    assert_eq!(blocks(Preset::H200Qwen32b), 12_249);
    for preset in Preset::ALL {
        let mut engine = Engine::new(EngineConfig::preset(preset, 16).unwrap()).unwrap();
        engine.admit(request(1, &tokens(0, 1000), 16, 2)).unwrap();
        let steps = run(&mut engine);
        assert!(steps[0].duration > steps[1].duration);
    }
}
