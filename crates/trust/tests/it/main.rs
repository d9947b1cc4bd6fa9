//! A worker's standing over time: what was shown, what was done about it.

use std::time::Duration;

use expect_test::{Expect, expect};
use kvasir_trust::{Action, Answer, Doubt, Evidence, Level, Trust, TrustOptions};
use kvasir_types::Time;

const BLOCK: u32 = 16;

/// A prompt of 1000 tokens: foretold and reported cached tokens.
fn cached(foretold: u32, reported: u32) -> Evidence {
    Evidence::Answer(Answer {
        prompt: 1000,
        prompt_reported: Some(1000),
        cached: foretold,
        cached_reported: Some(reported),
    })
}

struct Worker {
    trust: Trust,
    now: Time,
    log: String,
}

impl Worker {
    fn new() -> Self {
        Self {
            trust: Trust::new(TrustOptions::new(BLOCK)),
            now: Time::ZERO,
            log: String::new(),
        }
    }

    /// Shows the same evidence `times` times, a second apart, and writes down what is done about it.
    fn show(&mut self, name: &str, times: u32, evidence: Evidence) -> &mut Self {
        for n in 1..=times {
            self.now += Duration::from_secs(1);
            let mut out = Vec::new();
            self.trust.step(self.now, evidence, &mut out);
            for action in out {
                let what = match action {
                    Action::Resync => "resynchronise".to_owned(),
                    Action::Forget => "forget".to_owned(),
                    Action::Changed(opinion) => {
                        let why = opinion.doubt.map_or("", Doubt::name);
                        format!("{:?} {why}", opinion.level)
                    }
                };
                self.log += &format!("{name} {n}: {}\n", what.trim());
            }
        }
        self
    }

    fn check(&self, expected: &Expect) {
        expected.assert_eq(&self.log);
    }
}

#[test]
fn a_worker_begins_approximate_and_is_promoted_on_evidence() {
    let mut worker = Worker::new();
    let start = worker.trust.opinion();
    assert_eq!(
        (start.level, start.doubt, start.credit()),
        (Level::Approximate, Some(Doubt::Starting), 0.0)
    );
    worker
        .show("cold", 10, cached(0, 0))
        .show("hit", 5, cached(320, 320));
    assert_eq!(worker.trust.opinion().credit(), 1.0);
    worker.check(&expect![[r#"
        hit 3: Exact
    "#]]);
}

/// A block's width either way is not wrong: the engine always computes the last token.
#[test]
fn the_tolerance_is_less_than_a_block() {
    let mut worker = Worker::new();
    worker.show("near", 3, cached(320, 305));
    assert_eq!(worker.trust.opinion().level, Level::Exact);
    let mut worker = Worker::new();
    worker.show("a block off", 3, cached(320, 304));
    assert_eq!(worker.trust.opinion().level, Level::Approximate);
}

/// The whole way down, step by step, and up again; the second time it takes longer.
#[test]
fn an_engine_that_evicts_silently_is_resynchronised_then_shrunk_then_demoted() {
    let mut worker = Worker::new();
    worker
        .show("hit", 3, cached(320, 320))
        .show("evicted", 12, cached(320, 0))
        .show("good again", 6, cached(320, 320))
        .show("evicted again", 12, cached(320, 0))
        .show("good at last", 20, cached(320, 320));
    worker.check(&expect![[r#"
        hit 3: Exact
        evicted 4: resynchronise
        evicted 8: forget
        evicted 8: Shrunk silent_eviction
        evicted 12: Approximate silent_eviction
        good again 6: Exact
        evicted again 4: resynchronise
        evicted again 8: forget
        evicted again 8: Shrunk silent_eviction
        evicted again 12: Approximate silent_eviction
        good at last 12: Exact
    "#]]);
}

#[test]
fn a_resynchronisation_that_helps_is_all_that_is_done() {
    let mut worker = Worker::new();
    worker
        .show("hit", 3, cached(320, 320))
        .show("lost", 4, cached(320, 0))
        .show("mended", 50, cached(320, 320));
    worker.check(&expect![[r#"
        hit 3: Exact
        lost 4: resynchronise
    "#]]);
}

/// Answers in which other tokens were counted cannot be mended by asking for events again.
#[test]
fn another_tokenizer_is_named_at_once() {
    let other = Evidence::Answer(Answer {
        prompt: 1000,
        prompt_reported: Some(1007),
        cached: 0,
        cached_reported: Some(0),
    });
    let mut worker = Worker::new();
    worker.show("other tokens", 4, other);
    worker.check(&expect![[r#"
        other tokens 4: Approximate tokenization_differs
    "#]]);
    let mut worker = Worker::new();
    worker
        .show("hit", 3, cached(320, 320))
        .show("other template", 5, other);
    worker.check(&expect![[r#"
        hit 3: Exact
        other template 4: Approximate tokenization_differs
    "#]]);
}

/// An engine that reports no cached tokens is judged by the blocks that appear.
#[test]
fn blocks_that_appear_prove_an_engine_that_reports_nothing() {
    let silent = Evidence::Answer(Answer {
        prompt: 1000,
        ..Answer::default()
    });
    let mut worker = Worker::new();
    worker
        .show("no usage", 10, silent)
        .show(
            "appeared",
            3,
            Evidence::Appeared {
                expected: 60,
                found: 60,
            },
        )
        .show(
            "missing",
            4,
            Evidence::Appeared {
                expected: 60,
                found: 3,
            },
        );
    worker.check(&expect![[r#"
        appeared 3: Exact
        missing 4: Approximate tokenization_differs
    "#]]);
}

#[test]
fn causes_are_told_apart() {
    let mut worker = Worker::new();
    worker
        .show("hit", 3, cached(320, 320))
        .show("recovery begins", 1, Evidence::Recovering(true))
        .show("late", 8, cached(320, 0));
    worker.check(&expect![[r#"
        hit 3: Exact
        late 4: resynchronise
        late 8: Shrunk events_late
    "#]]);
    let mut worker = Worker::new();
    worker
        .show("hit", 3, cached(320, 320))
        .show("more than told", 12, cached(0, 320));
    worker.check(&expect![[r#"
        hit 3: Exact
        more than told 4: resynchronise
        more than told 8: Shrunk events_missing
        more than told 12: Approximate events_missing
    "#]]);
}

/// Siblings that run at once fill the cache after the prediction: a minority of such answers is normal.
#[test]
fn a_few_unforeseen_hits_are_no_fault() {
    let mut worker = Worker::new();
    worker.show("hit", 3, cached(320, 320));
    for _ in 0..30 {
        worker
            .show("sibling", 1, cached(0, 320))
            .show("hit", 2, cached(320, 320));
    }
    worker.check(&expect![[r#"
        hit 3: Exact
    "#]]);
}

/// What is certain needs no window, and when it is gone the worker has to prove itself again.
#[test]
fn a_bar_holds_whatever_answers_say() {
    let mut worker = Worker::new();
    worker
        .show("hit", 3, cached(320, 320))
        .show("block size", 1, Evidence::Barred(Some(Doubt::BlockSize)))
        .show("hit", 10, cached(320, 320))
        .show("same again", 1, Evidence::Barred(Some(Doubt::BlockSize)))
        .show("mended", 1, Evidence::Barred(None))
        .show("hit", 3, cached(320, 320));
    worker.check(&expect![[r#"
        hit 3: Exact
        block size 1: Approximate block_size_differs
        mended 1: Approximate starting
        hit 3: Exact
    "#]]);
}

/// Old answers are forgotten: three wrong ones now and three an hour ago are not six.
#[test]
fn evidence_has_an_age() {
    let mut worker = Worker::new();
    worker.show("hit", 3, cached(320, 320));
    for _ in 0..10 {
        worker.show("wrong", 3, cached(320, 0));
        worker.now += Duration::from_secs(3600);
    }
    worker.check(&expect![[r#"
        hit 3: Exact
    "#]]);
    assert!(worker.trust.samples() <= 3);
    assert_eq!(worker.trust.error(), Some(1.0));
}

#[test]
fn the_window_is_bounded() {
    let mut worker = Worker::new();
    worker.now = Time::ZERO;
    let mut out = Vec::new();
    for _ in 0..10_000 {
        worker.trust.step(Time::ZERO, cached(320, 320), &mut out);
    }
    assert_eq!(worker.trust.samples(), 64);
    assert_eq!(worker.trust.error(), Some(0.0));
    assert_eq!(out.len(), 1);
}
