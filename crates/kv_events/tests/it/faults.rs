//! Many faults at once, by seed: whatever happened, once every engine was asked again the index equals the
//! engines' caches, and nothing is kept that should be gone.

use bytes::Bytes;
use kvasir_index::Index;
use kvasir_kv_events::{EventFormat, Resync, Sequencer, SourceEvent, SourceFault, StreamOptions};
use kvasir_types::Rng;
use kvasir_wire::frame::Frame;

use crate::sim::{BLOCK, Engine, Worker};

/// Hands a message to the path, which may misbehave.
fn deliver(rng: &mut Rng, worker: &mut Worker, frame: Frame<Bytes>) {
    match rng.below(12) {
        0 => {}
        1 => {
            worker.say(frame.clone());
            worker.say(frame);
        }
        2 => {
            // Overtakes the one before.
            let before = worker.live.pop_back();
            worker.say(frame);
            worker.live.extend(before);
        }
        3 => {
            let mut payload = frame.payload.to_vec();
            payload.truncate(payload.len() / 2);
            worker.say(Frame {
                payload: payload.into(),
                ..frame
            });
        }
        _ => worker.say(frame),
    }
}

fn engine_acts(rng: &mut Rng, worker: &mut Worker, index: &Index) {
    let frame = match rng.below(60) {
        0 => {
            worker.engine.restart();
            if rng.below(2) == 0 {
                worker.live.clear();
                worker.input(index, SourceEvent::Disconnected(SourceFault::Silent));
                worker.input(index, SourceEvent::Connected);
            }
            return;
        }
        1 => return worker.engine.restart_sequence(),
        2 => return worker.engine.clear_silently(),
        3 => worker.engine.clear(),
        4 => {
            worker.live.clear();
            worker.input(index, SourceEvent::Disconnected(SourceFault::Silent));
            return worker.input(index, SourceEvent::Connected);
        }
        5 => {
            worker.replay_up = !worker.replay_up;
            return;
        }
        6 => return worker.resync(index, Resync::Verify),
        7 => return worker.resync(index, Resync::Fill),
        8 => return restart_router(worker, index),
        _ => worker.engine.step(),
    };
    deliver(rng, worker, frame);
}

/// The router ends and begins again, from a checkpoint or without one.
fn restart_router(worker: &mut Worker, index: &Index) {
    worker.live.clear();
    worker.answers.clear();
    let (rank, options) = (worker.rank, worker.options.clone());
    worker.sequencer = match worker.sequencer.checkpoint() {
        Some(checkpoint) => Sequencer::restore(rank, options, &checkpoint),
        None => {
            index.remove_rank(rank);
            Sequencer::new(EventFormat::EngineBatches { rank }, options)
        }
    };
    worker.input(index, SourceEvent::Connected);
}

fn path_moves(rng: &mut Rng, worker: &mut Worker, index: &Index) {
    if rng.below(3) > 0
        && let Some(frame) = worker.live.pop_front()
    {
        worker.input(index, SourceEvent::Live(frame));
    }
    for _ in 0..rng.below(6) {
        match worker.answers.pop_front() {
            // The replay path loses messages too, the end marker among them.
            Some(_) if rng.below(40) == 0 => {}
            Some(answer) => worker.input(index, answer),
            None => break,
        }
    }
    if rng.below(4) == 0
        && let Some(deadline) = worker.sequencer.next_deadline()
    {
        worker.now = worker.now.max(deadline);
        worker.tick(index);
    }
}

/// The faults end and everything on its way arrives. Where the machine then says that its cache view is exact,
/// it is, provided that the engine announced all it did.
fn calm(worker: &mut Worker, index: &Index, context: &str) -> u64 {
    worker.replay_up = true;
    worker.settle(index);
    worker.input(index, SourceEvent::Disconnected(SourceFault::Silent));
    worker.input(index, SourceEvent::Connected);
    worker.settle(index);
    let frame = worker.engine.step();
    worker.say(frame);
    worker.settle(index);
    if worker.engine.honest && worker.sequencer.status().exact {
        worker.compare(index, true, context);
        return 1;
    }
    0
}

fn run(seed: u64) -> [u64; 3] {
    let mut rng = Rng::new(seed);
    let index = Index::new();
    let mut workers: Vec<Worker> = (0..3)
        .map(|id| {
            let buffer = [5, 50, 10_000][rng.below(3) as usize];
            let engine = Engine::new(rng.next_u64(), 12, buffer);
            let mut options = StreamOptions::new(BLOCK);
            options.replay = rng.below(8) > 0;
            options.held_bytes_max = [500, 64 << 20][rng.below(2) as usize];
            options.replace_bytes_max = [500, 64 << 20][rng.below(2) as usize];
            options.orphan_blocks_max = 16;
            Worker::new(id + 1, engine, options)
        })
        .collect();
    for worker in &mut workers {
        for _ in 0..rng.below(20) {
            worker.engine.step();
        }
        worker.input(&index, SourceEvent::Connected);
    }
    for _ in 0..400 {
        let at = rng.below(3) as usize;
        engine_acts(&mut rng, &mut workers[at], &index);
        path_moves(&mut rng, &mut workers[at], &index);
    }
    let (mut equal, mut claimed, mut all) = (0, 0, 0);
    for worker in &mut workers {
        claimed += calm(worker, &index, &format!("seed {seed}, before asking"));
        // Every engine is asked again.
        worker.resync(&index, Resync::Replay);
        worker.settle(&index);
        let frame = worker.engine.step();
        worker.say(frame);
        worker.settle(&index);
        let whole = worker.engine.log_is_whole && worker.sequencer.status().exact;
        let context = format!("seed {seed}");
        if whole {
            worker.compare(&index, true, &context);
            equal += 1;
        }
        // What the engine itself never told (a silent clear) can only be mended by forgetting.
        worker.resync(&index, Resync::Forget);
        let frame = worker.engine.step();
        worker.say(frame);
        worker.settle(&index);
        worker.compare(&index, false, &context);
        // An announced clear makes every cache view exact again.
        let frame = worker.engine.clear();
        worker.say(frame);
        for _ in 0..5 {
            let frame = worker.engine.step();
            worker.say(frame);
        }
        worker.settle(&index);
        worker.compare(&index, true, &context);
        assert!(worker.sequencer.status().exact);
        all += 1;
        let status = worker.sequencer.status();
        assert_eq!((status.held_bytes, status.recovering), (0, None));
        assert!(status.orphan_blocks <= 16);
    }
    for worker in &mut workers {
        worker.sequencer.leave(&index);
        worker.compare(&index, false, "after leaving");
        assert_eq!(worker.sequencer.status().orphan_blocks, 0);
    }
    [equal, claimed, all]
}

fn run_all(seeds: u64) {
    let mut sum = [0; 3];
    for seed in 0..seeds {
        let found = run(seed);
        sum = std::array::from_fn(|i| sum[i] + found[i]);
    }
    let [equal, claimed, all] = sum;
    assert_eq!(all, 3 * seeds);
    // Else the test lost its point: too few engines could be judged.
    let enough = 2 * seeds / 3;
    assert!(
        equal > enough && claimed > enough,
        "{equal} and {claimed} of {all}"
    );
}

#[test]
fn the_index_ends_equal_to_the_engines_whatever_went_wrong() {
    run_all(150);
}

/// As above, for a longer look: `cargo test -p kvasir-kv-events --release --test it -- --ignored thousands`.
#[test]
#[ignore = "takes minutes"]
fn thousands_of_histories() {
    run_all(4000);
}
