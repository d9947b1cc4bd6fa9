//! One test per way in which a stream goes wrong: noticed at the first message that shows it, named, mended.

use std::time::Duration;

use kvasir_hash::{Scope, local_hashes};
use kvasir_index::{Index, Matches};
use kvasir_kv_events::{
    Notice, RecoveryCause, Resync, Sequencer, Skip, SourceEvent, SourceFault, StreamOptions,
};
use kvasir_msgpack::DecodeError;
use kvasir_types::{EngineHash, WorkerRank};
use kvasir_wire::engine::{Dialect, Event, Stored};
use kvasir_wire::frame::Frame;

use crate::sim::{BLOCK, Engine, Worker};

fn worker(buffer_steps: usize) -> (Index, Worker) {
    let engine = Engine::new(3, 1000, buffer_steps);
    let mut worker = Worker::new(1, engine, StreamOptions::new(BLOCK));
    let index = Index::new();
    worker.input(&index, SourceEvent::Connected);
    worker.settle(&index);
    worker.notices.clear();
    (index, worker)
}

fn steps(worker: &mut Worker, index: &Index, count: usize) {
    for _ in 0..count {
        let frame = worker.engine.step();
        worker.input(index, SourceEvent::Live(frame));
    }
}

#[test]
fn a_good_stream_needs_nothing() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 50);
    worker.compare(&index, true, "good stream");
    assert_eq!(worker.notices, []);
    let status = worker.sequencer.status();
    assert!(status.exact && status.connected && status.recovering.is_none());
    assert_eq!(status.counts.batches, 50);
}

#[test]
fn a_lost_message_is_noticed_at_the_next_one_and_asked_for() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    worker.engine.step();
    worker.engine.step();
    steps(&mut worker, &index, 1);
    assert_eq!(
        worker.notices,
        [Notice::Gap {
            expected: 5,
            found: 7
        }]
    );
    assert_eq!(
        worker.sequencer.status().recovering,
        Some(RecoveryCause::Gap)
    );
    // Live messages go on during the recovery and are not lost.
    steps(&mut worker, &index, 3);
    assert!(worker.sequencer.status().held_bytes > 0);
    worker.settle(&index);
    worker.compare(&index, true, "after the gap");
    let status = worker.sequencer.status();
    assert!(status.exact);
    assert_eq!((status.counts.missed, status.held_bytes), (2, 0));
}

/// A loss that the replay repaired is counted, however it was noticed; what a first join reads is no loss.
#[test]
fn repaired_losses_are_counted() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    worker.engine.step();
    worker.engine.step();
    steps(&mut worker, &index, 1);
    worker.settle(&index);
    assert_eq!(worker.sequencer.status().counts.repaired, 2);
    worker.engine.step();
    worker.resync(&index, Resync::Verify);
    worker.settle(&index);
    assert_eq!(worker.sequencer.status().counts.repaired, 3);
    let mut late = Worker::new(1, Engine::new(4, 1000, 100), StreamOptions::new(BLOCK));
    late.engine.step();
    late.input(&index, SourceEvent::Connected);
    late.settle(&index);
    let counts = late.sequencer.status().counts;
    assert_eq!((counts.batches, counts.repaired), (1, 0));
}

/// What a full replay tells again has not happened again: it explains no answer, and a clear in it is no news.
#[test]
fn what_is_told_again_has_not_happened_again() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    let clear = worker.engine.clear();
    worker.input(&index, SourceEvent::Live(clear));
    let is_clear = |notice: &Notice| matches!(notice, Notice::Cleared { .. });
    assert!(worker.notices.iter().any(is_clear));
    let before = worker.sequencer.status().counts;
    worker.notices.clear();
    worker.resync(&index, Resync::Replay);
    worker.settle(&index);
    let after = worker.sequencer.status().counts;
    assert!(after.batches > before.batches, "it was replayed");
    assert_eq!(
        (after.blocks_stored, after.blocks_removed, after.cleared),
        (before.blocks_stored, before.blocks_removed, before.cleared)
    );
    assert!(!worker.notices.iter().any(is_clear), "{:?}", worker.notices);
}

/// A buffer that has lost its start cannot replace what is known: it is read once for that, and not each time.
#[test]
fn a_buffer_without_its_start_is_not_read_again_in_full() {
    let (index, mut worker) = worker(4);
    steps(&mut worker, &index, 20);
    worker.resync(&index, Resync::Fill);
    worker.settle(&index);
    let short = worker.sequencer.status().counts.replays_too_short;
    assert_eq!(short, 1);
    for _ in 0..3 {
        worker.resync(&index, Resync::Fill);
        worker.settle(&index);
    }
    let counts = worker.sequencer.status().counts;
    assert_eq!(counts.replays_too_short, 1);
    worker.compare(&index, true, "nothing was lost");
}

/// Messages that take longer than usual show how late this engine's events come.
#[test]
fn the_lag_of_messages_is_learned() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    let quick = worker.sequencer.status().lag;
    let frame = worker.engine.step();
    worker.now += Duration::from_millis(400);
    worker.input(&index, SourceEvent::Live(frame));
    let slow = worker.sequencer.status().lag;
    assert!(
        slow >= quick + Duration::from_millis(300),
        "{quick:?} {slow:?}"
    );
}

#[test]
fn a_repeated_message_changes_nothing() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    let frame = worker.engine.step();
    worker.input(&index, SourceEvent::Live(frame.clone()));
    worker.input(&index, SourceEvent::Live(frame));
    let first = worker.engine.log[0].clone();
    worker.input(&index, SourceEvent::Live(first));
    assert_eq!(worker.sequencer.status().counts.duplicates, 2);
    assert_eq!(worker.notices, []);
    worker.compare(&index, true, "after duplicates");
}

#[test]
fn messages_that_overtake_each_other_are_put_in_order() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    let (early, late) = (worker.engine.step(), worker.engine.step());
    worker.input(&index, SourceEvent::Live(late));
    worker.input(&index, SourceEvent::Live(early));
    worker.settle(&index);
    worker.compare(&index, true, "after overtaking");
    assert!(worker.sequencer.status().exact);
}

/// The engine's process was replaced behind the same address. It had as many batches as the old one, so
/// the numbers alone look right; the last batch that we know is asked for and is another one.
#[test]
fn a_restart_is_noticed_even_where_the_numbers_go_on() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    worker.engine.restart();
    for _ in 0..5 {
        worker.engine.step();
    }
    worker.input(&index, SourceEvent::Disconnected(SourceFault::Silent));
    worker.input(&index, SourceEvent::Connected);
    worker.settle(&index);
    assert_eq!(worker.notices.first(), Some(&Notice::Restarted));
    worker.compare(&index, true, "after the restart");
    steps(&mut worker, &index, 5);
    worker.compare(&index, true, "and on");
    assert!(worker.sequencer.status().exact);
}

#[test]
fn a_restart_into_an_empty_engine_empties_the_rank_at_once() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    worker.engine.restart();
    worker.input(&index, SourceEvent::Disconnected(SourceFault::Silent));
    worker.input(&index, SourceEvent::Connected);
    worker.settle(&index);
    worker.compare(&index, true, "nothing was sent yet");
    assert!(worker.notices.contains(&Notice::Restarted));
}

#[test]
fn a_sequence_that_begins_again_is_noticed_at_its_first_message() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    worker.engine.restart();
    steps(&mut worker, &index, 1);
    assert_eq!(worker.notices, [Notice::Restarted]);
    worker.compare(&index, true, "first message of the new life");
    assert_eq!(worker.sequencer.status().counts.restarts, 1);
}

#[test]
fn a_replay_that_no_longer_reaches_back_empties_the_rank() {
    let (index, mut worker) = worker(4);
    steps(&mut worker, &index, 5);
    for _ in 0..10 {
        worker.engine.step();
    }
    steps(&mut worker, &index, 1);
    worker.settle(&index);
    let short = Notice::ReplayTooShort {
        asked: 4,
        first: 12,
    };
    assert!(worker.notices.contains(&short), "{:?}", worker.notices);
    assert!(!worker.sequencer.status().exact);
    worker.compare(&index, false, "only what the buffer tells");
    // An announced clear makes the cache view exact again.
    let frame = worker.engine.clear();
    worker.input(&index, SourceEvent::Live(frame));
    steps(&mut worker, &index, 3);
    assert!(worker.sequencer.status().exact);
    worker.compare(&index, true, "after the clear");
}

#[test]
fn a_dead_replay_socket_is_given_up_and_asked_again_later() {
    let (index, mut worker) = worker(100);
    worker.replay_up = false;
    steps(&mut worker, &index, 5);
    worker.engine.step();
    steps(&mut worker, &index, 1);
    worker.settle(&index);
    assert_eq!(
        worker.notices.last(),
        Some(&Notice::RecoveryFailed {
            cause: RecoveryCause::Gap
        })
    );
    worker.compare(&index, false, "emptied and relearned");
    let status = worker.sequencer.status();
    assert!(!status.exact && status.recovering.is_none());

    worker.replay_up = true;
    worker.now = worker.sequencer.next_deadline().unwrap();
    worker.tick(&index);
    worker.settle(&index);
    worker.compare(&index, true, "the engine was asked again");
    assert!(worker.sequencer.status().exact);
}

/// A lost *last* message shows in no later one; the routine comparison finds it.
#[test]
fn a_lost_last_message_is_found_by_the_routine_comparison() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    let prompt = vec![0, 1, 2, 0, 1, 2, 0];
    worker.engine.run(prompt.clone());
    assert!(worker.shown(&index, &prompt) < 7);
    worker.now = worker.sequencer.next_deadline().unwrap();
    worker.tick(&index);
    worker.settle(&index);
    assert_eq!(worker.shown(&index, &prompt), 7);
    let recovered = Notice::Recovered {
        cause: RecoveryCause::Verify,
        messages: 1,
    };
    assert_eq!(worker.notices, [recovered]);
}

/// What the engine never said cannot be replayed; being told to forget, the machine forgets.
#[test]
fn a_silent_clear_is_mended_by_forgetting() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    worker.engine.clear_silently();
    worker.resync(&index, Resync::Replay);
    worker.settle(&index);
    let prompt = worker.engine.prompts[0].clone();
    assert!(
        worker.shown(&index, &prompt) > 0,
        "the replay tells the same story"
    );
    worker.resync(&index, Resync::Forget);
    worker.compare(&index, true, "forgotten");
}

/// While a replay is collected to replace a rank, lookups see the old view; then the new one.
#[test]
fn a_resynchronisation_replaces_the_rank_at_its_end() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    worker.resync(&index, Resync::Replay);
    while worker.answers.len() > 1 {
        let answer = worker.answers.pop_front().unwrap();
        worker.input(&index, answer);
        worker.compare(&index, true, "still the old view");
    }
    worker.settle(&index);
    worker.compare(&index, true, "the new view");
    assert!(worker.sequencer.status().exact);
}

#[test]
fn another_block_size_is_named_once_and_nothing_is_learned() {
    let (index, mut worker) = worker(100);
    worker.engine.block_size = 8;
    steps(&mut worker, &index, 5);
    let skip = Skip::BlockSize { engine: 8 };
    assert_eq!(worker.notices, [Notice::Skipped(skip)]);
    assert_eq!(worker.sequencer.status().counts.block_size_differs, 5);
    for prompt in &worker.engine.prompts {
        assert_eq!(worker.shown(&index, prompt), 0);
    }
    assert!(!worker.sequencer.status().exact);

    // Mended: said once, and not by a single batch.
    worker.notices.clear();
    worker.engine.block_size = BLOCK;
    let frame = worker.engine.clear();
    worker.input(&index, SourceEvent::Live(frame));
    steps(&mut worker, &index, 2);
    assert!(!worker.notices.contains(&Notice::BlockSizeFits));
    steps(&mut worker, &index, 20);
    let fits = worker
        .notices
        .iter()
        .filter(|n| **n == Notice::BlockSizeFits);
    assert_eq!(fits.count(), 1, "{:?}", worker.notices);
    worker.compare(&index, true, "relearned after the clear");
}

/// Somebody suspects that something was missed: asking costs one message if nothing was.
#[test]
fn a_suspicion_is_settled_by_asking() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    worker.resync(&index, Resync::Verify);
    assert_eq!(worker.answers.len(), 2, "the last message and the end");
    worker.settle(&index);
    assert_eq!(worker.notices, []);
    worker.engine.step();
    worker.resync(&index, Resync::Verify);
    worker.settle(&index);
    let recovered = Notice::Recovered {
        cause: RecoveryCause::Verify,
        messages: 1,
    };
    assert_eq!(worker.notices, [recovered]);
    worker.compare(&index, true, "asked");
    // What comes live while the answer is on its way is in the answer, too, and was not missed.
    worker.notices.clear();
    worker.resync(&index, Resync::Verify);
    let frame = worker.engine.step();
    let attempt = match worker.answers.pop_back() {
        Some(SourceEvent::ReplayEnded { attempt }) => attempt,
        other => panic!("{other:?}"),
    };
    let answers = [
        SourceEvent::Replayed {
            attempt,
            frame: frame.clone(),
        },
        SourceEvent::ReplayEnded { attempt },
    ];
    worker.answers.extend(answers);
    worker.input(&index, SourceEvent::Live(frame));
    worker.settle(&index);
    assert_eq!(worker.notices, []);
    worker.compare(&index, true, "asked and heard");
}

/// A buffer that begins in the middle knows less than we do.
#[test]
fn a_short_replay_does_not_replace_a_longer_memory() {
    let (index, mut worker) = worker(4);
    steps(&mut worker, &index, 20);
    worker.resync(&index, Resync::Fill);
    steps(&mut worker, &index, 2);
    worker.settle(&index);
    steps(&mut worker, &index, 2);
    worker.compare(&index, true, "kept");
    assert_eq!(worker.sequencer.status().counts.replays_too_short, 1);

    // Where it tells all, it replaces: here a block that was lost without a trace.
    let (index, mut worker) = self::worker(100);
    steps(&mut worker, &index, 20);
    index.remove_rank(worker.rank);
    worker.resync(&index, Resync::Fill);
    worker.settle(&index);
    worker.compare(&index, true, "filled");
}

#[test]
fn a_message_damaged_on_its_way_is_asked_for_again() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    let mut frame = worker.engine.step();
    frame.payload.truncate(frame.payload.len() - 3);
    worker.input(&index, SourceEvent::Live(frame));
    assert!(matches!(
        worker.notices[..],
        [Notice::Refused(DecodeError::Truncated { .. })]
    ));
    worker.settle(&index);
    worker.compare(&index, true, "after the damage");
    assert!(worker.sequencer.status().exact);
}

/// If the engine itself sends it, it is asked for once and not for every message.
#[test]
fn an_engine_that_sends_garbage_is_not_asked_for_ever() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    for _ in 0..10 {
        let mut frame = worker.engine.publish(&[Event::Cleared]);
        frame.payload = bytes::Bytes::from_static(b"\xc1");
        *worker.engine.log.back_mut().unwrap() = frame.clone();
        worker.input(&index, SourceEvent::Live(frame));
        worker.settle(&index);
    }
    let status = worker.sequencer.status();
    assert!(!status.exact);
    assert_eq!(
        status.counts.recoveries, 2,
        "joining, and the first refusal"
    );
    assert_eq!(status.counts.refused, 11);
    steps(&mut worker, &index, 2);
    assert_eq!(worker.sequencer.status().cursor.unwrap().sequence, 16);
}

/// Without a replay socket a late subscriber learns what it can; children of unknown blocks wait.
#[test]
fn without_replay_children_wait_for_their_parents() {
    let engine = Engine::new(5, 1000, 100);
    let mut options = StreamOptions::new(BLOCK);
    options.replay = false;
    let mut worker = Worker::new(1, engine, options);
    let index = Index::new();
    worker.engine.run(vec![0, 1]);
    let child = worker.engine.run(vec![0, 1, 2, 2]);
    worker.input(&index, SourceEvent::Connected);
    worker.input(&index, SourceEvent::Live(child));
    let status = worker.sequencer.status();
    assert_eq!((status.exact, status.orphan_blocks), (false, 2));
    assert_eq!(worker.shown(&index, &[0, 1, 2, 2]), 0);
    // One child goes meanwhile.
    let gone = worker.engine.evict_leaf();
    worker.input(&index, SourceEvent::Live(gone));
    // The engine refills the parents: their children are found again.
    let payload = worker.engine.log[0].payload.clone();
    let again = Frame {
        sequence: 3,
        payload,
    };
    worker.input(&index, SourceEvent::Live(again));
    assert_eq!(worker.shown(&index, &[0, 1, 2, 2]), 3);
    assert_eq!(worker.sequencer.status().counts.orphans_placed, 2);
    assert_eq!(worker.sequencer.status().orphan_blocks, 0);
}

#[test]
fn without_replay_a_gap_empties_the_rank() {
    let engine = Engine::new(5, 1000, 100);
    let mut options = StreamOptions::new(BLOCK);
    options.replay = false;
    let mut worker = Worker::new(1, engine, options);
    let index = Index::new();
    worker.input(&index, SourceEvent::Connected);
    steps(&mut worker, &index, 5);
    worker.engine.step();
    steps(&mut worker, &index, 1);
    assert!(worker.notices.contains(&Notice::GapWithoutReplay));
    worker.compare(&index, false, "no false hit");
    assert!(!worker.sequencer.status().exact);
}

/// The bound on kept live messages holds, and what was dropped is asked for again.
#[test]
fn live_messages_kept_during_a_recovery_are_bounded() {
    let engine = Engine::new(5, 1000, 10_000);
    let mut options = StreamOptions::new(BLOCK);
    options.held_bytes_max = 1000;
    let mut worker = Worker::new(1, engine, options);
    let index = Index::new();
    worker.input(&index, SourceEvent::Connected);
    let answers = std::mem::take(&mut worker.answers);
    for _ in 0..200 {
        let frame = worker.engine.step();
        worker.input(&index, SourceEvent::Live(frame));
        assert!(worker.sequencer.status().held_bytes <= 1000);
    }
    assert!(worker.notices.contains(&Notice::HeldDropped));
    worker.answers = answers;
    worker.settle(&index);
    worker.compare(&index, true, "after the flood");
    assert!(worker.sequencer.status().exact);
}

/// A cursor that was kept over our own restart is compared with the engine's stream on connecting.
#[test]
fn a_kept_picture_is_taken_up_where_it_was_left() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    let cursor = worker.sequencer.status().cursor;
    for _ in 0..3 {
        worker.engine.step();
    }
    worker.sequencer = Sequencer::resume(WorkerRank::new(1, 0), StreamOptions::new(BLOCK), cursor);
    worker.input(&index, SourceEvent::Connected);
    worker.settle(&index);
    worker.compare(&index, true, "what was missed was replayed");
    let messages = 3;
    let recovered = Notice::Recovered {
        cause: RecoveryCause::Reconnect,
        messages,
    };
    assert_eq!(worker.notices, [recovered]);

    worker.engine.restart();
    worker.engine.step();
    let cursor = worker.sequencer.status().cursor;
    worker.sequencer = Sequencer::resume(WorkerRank::new(1, 0), StreamOptions::new(BLOCK), cursor);
    worker.input(&index, SourceEvent::Connected);
    worker.settle(&index);
    worker.compare(&index, true, "the engine began again meanwhile");
}

fn stored<'a>(
    hashes: &'a [EngineHash],
    parent: Option<EngineHash>,
    tokens: &'a [u32],
    salt: Option<&'a str>,
) -> Event<'a> {
    Event::Stored(Stored {
        hashes,
        parent,
        tokens,
        block_size: BLOCK,
        salt,
        ..Stored::default()
    })
}

/// What later events leave out (a sequence's salt, the kind of a group) is kept with the cursor.
#[test]
fn what_was_learned_is_kept_with_the_picture() {
    let (index, mut worker) = worker(100);
    worker.engine.dialect = Dialect::Vllm24;
    let (first, second) = ([EngineHash(71)], [EngineHash(72)]);
    let block = |symbol| vec![symbol; BLOCK as usize];
    let frame = worker
        .engine
        .publish(&[stored(&first, None, &block(7), Some("tenant"))]);
    worker.input(&index, SourceEvent::Live(frame));
    let kept = worker.sequencer.checkpoint().unwrap();
    assert_eq!(kept.ranks[0].1.salts.len(), 1);
    worker.sequencer = Sequencer::restore(WorkerRank::new(1, 0), StreamOptions::new(BLOCK), &kept);
    worker.input(&index, SourceEvent::Connected);
    worker.settle(&index);
    let parent = Some(EngineHash(71));
    let frame = worker
        .engine
        .publish(&[stored(&second, parent, &block(8), None)]);
    worker.input(&index, SourceEvent::Live(frame));
    let scope = Scope {
        salt: "tenant",
        ..Scope::default()
    };
    let tokens = [block(7), block(8)].concat();
    let mut matches = Matches::new();
    index.find(&local_hashes(&tokens, BLOCK as usize, &scope), &mut matches);
    assert_eq!(matches.get(worker.rank).map(|m| m.device), Some(2));

    // A cache view with a hole is not worth keeping.
    let frame = worker.engine.publish(&[stored(
        &[EngineHash(9)],
        Some(EngineHash(8)),
        &block(1),
        None,
    )]);
    worker.input(&index, SourceEvent::Live(frame));
    assert_eq!(worker.sequencer.checkpoint(), None);
}

#[test]
fn answers_of_an_abandoned_attempt_are_not_taken() {
    let (index, mut worker) = worker(100);
    steps(&mut worker, &index, 5);
    worker.engine.step();
    steps(&mut worker, &index, 1);
    let old: Vec<SourceEvent> = worker.answers.drain(..).collect();
    worker.now += Duration::from_secs(6);
    worker.tick(&index);
    let before = worker.sequencer.status().counts.batches;
    for answer in old {
        worker.input(&index, answer);
    }
    assert_eq!(worker.sequencer.status().counts.batches, before);
    worker.settle(&index);
    worker.compare(&index, true, "second attempt");
}
