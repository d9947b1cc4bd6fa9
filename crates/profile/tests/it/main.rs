//! Step times against the measurements they come from, and the order that any engine must show.
#![expect(clippy::unwrap_used, reason = "a broken fixture is a failed test")]

use kvasir_profile::{Chunk, Constants, Polynomial, Preset, StepTimes, StepWork};
use serde_json::Value;

fn measured(preset: Preset) -> StepTimes {
    StepTimes::Measured(preset.profile().unwrap())
}

fn recording(preset: Preset) -> Value {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../testdata/engine-profiles/h200.json"
    );
    let all: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let name = match preset {
        Preset::H200Llama8b => "llama-3.1-8b",
        Preset::H200Qwen32b => "qwen3-32b",
    };
    all["models"][name].clone()
}

fn decode_ms(times: &StepTimes, sequences: u32, context: u64) -> f64 {
    times.step_ms(&StepWork {
        decodes: sequences,
        decode_context: context * u64::from(sequences),
        ..StepWork::default()
    })
}

/// The embedded tables are the recording: every measured point comes back, short prompts aside, where
/// the recording is bound by launches and the model adds arithmetic to a floor.
#[test]
fn every_measurement_comes_back() {
    for preset in Preset::ALL {
        let (times, recording) = (measured(preset), recording(preset));
        assert_eq!(
            recording["kv_bytes_per_token"].as_u64(),
            Some(preset.kv_bytes_per_token())
        );
        let points = |kind: &str, row: &str| -> Vec<(u32, u64, f64)> {
            let list = recording[kind].as_array().unwrap();
            let read = |p: &Value| {
                let row = p[row].as_u64().unwrap() as u32;
                (row, p["ctx"].as_u64().unwrap(), p["ms"].as_f64().unwrap())
            };
            list.iter().map(read).collect()
        };
        let mut compared = 0;
        for (new, cached, ms) in points("prefill", "new") {
            let ours = times.prefill_ms(new, cached as u32);
            let exact = new >= 512;
            assert!(
                if exact {
                    (ours - ms).abs() < 1e-9
                } else {
                    ours < ms * 1.35 && ours > ms * 0.5
                },
                "{} prefill {new}+{cached}: {ours} is not {ms}",
                preset.name()
            );
            compared += 1;
        }
        for (sequences, context, ms) in points("decode", "batch") {
            let ours = decode_ms(&times, sequences, context);
            assert!(
                (ours - ms).abs() < 1e-9,
                "decode {sequences}x{context}: {ours} is not {ms}"
            );
            compared += 1;
        }
        assert!(compared >= 54, "only {compared} points");
    }
}

/// More of anything never takes less time, far outside the measurements too, and stays finite.
#[test]
fn more_work_never_takes_less() {
    let sources = [
        measured(Preset::H200Llama8b),
        measured(Preset::H200Qwen32b),
        StepTimes::Polynomial(Polynomial),
        StepTimes::Constant(Constants {
            step_ms: 1.0,
            prompt_token_ms: 0.1,
            decode_ms: 0.2,
        }),
    ];
    let sizes = [1, 15, 64, 100, 511, 512, 513, 3000, 8192, 20_000, 200_000];
    for times in &sources {
        let mut last = [0.0; 4];
        for n in sizes {
            let now = [
                times.prefill_ms(n, 0),
                times.prefill_ms(512, n),
                decode_ms(times, n, 700),
                decode_ms(times, 8, u64::from(n)),
            ];
            for (now, last) in now.iter().zip(&last) {
                assert!(
                    now.is_finite() && *now >= *last - 1e-9,
                    "{now} after {last} at {n}"
                );
            }
            last = now;
        }
    }
}

/// A mixed step takes longer than either part alone and less than both one after the other.
#[test]
fn a_mixed_step_lies_between_its_parts_and_their_sum() {
    for preset in Preset::ALL {
        let times = measured(preset);
        for (new, cached, sequences, context) in [
            (2048, 0, 32, 2048),
            (16, 0, 1, 512),
            (512, 8192, 64, 1000),
            (8000, 500, 256, 512),
        ] {
            let chunk = [Chunk { new, cached }];
            let mixed = times.step_ms(&StepWork {
                chunks: &chunk,
                decodes: sequences,
                decode_context: u64::from(sequences) * context,
            });
            let prompt = times.prefill_ms(new, cached);
            let decode = decode_ms(&times, sequences, context);
            assert!(mixed >= prompt.max(decode), "{mixed} < {prompt}, {decode}");
            assert!(mixed <= prompt + decode, "{mixed} > {prompt} + {decode}");
        }
    }
}

/// Several prompts in a pass share its floor: ten of 32 tokens are no ten passes.
#[test]
fn small_prompts_share_a_pass() {
    let times = measured(Preset::H200Llama8b);
    let chunks = [Chunk { new: 32, cached: 0 }; 10];
    let together = times.step_ms(&StepWork {
        chunks: &chunks,
        ..StepWork::default()
    });
    assert!(together < 1.1 * times.prefill_ms(32, 0), "{together}");
    assert_eq!(times.step_ms(&StepWork::default()), 0.0);
}
