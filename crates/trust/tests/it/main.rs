//! The trust in a rank over time: what was shown, what was done about it.

mod whole;

use std::time::Duration;

use expect_test::{Expect, expect};
use kvasir_trust::{
    Action, Answer, CacheState, Cause, Evidence, Finding, StoredCheck, Trust, TrustOptions,
    TrustRecord,
};
use kvasir_types::Time;

const BLOCK: u32 = 16;

/// A prompt of 1000 tokens: predicted and reported cached tokens.
fn cached(predicted: u32, reported: u32) -> Evidence {
    Evidence::Answer(Answer {
        prompt: 1000,
        prompt_reported: Some(1000),
        cached: predicted,
        cached_reported: Some(reported),
        ..Answer::default()
    })
}

/// A prompt of 60 blocks of which so many are to be seen, while events told of so many new ones.
fn appeared(found: u32, stored: u32) -> Evidence {
    Evidence::Stored(StoredCheck {
        expected: 60,
        found,
        stored,
        ..StoredCheck::default()
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
                    Action::Judged(_) => continue,
                    Action::Verify => "ask".to_owned(),
                    Action::Resync(_) => "resynchronise".to_owned(),
                    Action::Forget => "forget".to_owned(),
                    Action::Changed(level) => {
                        let why = level.cause.map_or("", Cause::name);
                        format!("{:?} {why}", level.state)
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
    let start = worker.trust.level();
    assert_eq!(
        (start.state, start.cause, start.credit()),
        (CacheState::Approximate, Some(Cause::Starting), 0.5)
    );
    worker
        .show("cold", 10, cached(0, 0))
        .show("hit", 5, cached(320, 320));
    assert_eq!(worker.trust.level().credit(), 1.0);
    worker.check(&expect![[r#"
        hit 3: Exact
    "#]]);
}

/// A block's width either way is not wrong: the engine always computes the last token.
#[test]
fn the_tolerance_is_less_than_a_block() {
    let mut worker = Worker::new();
    worker.show("near", 3, cached(320, 305));
    assert_eq!(worker.trust.level().state, CacheState::Exact);
    let mut worker = Worker::new();
    worker.show("a block off", 3, cached(320, 304));
    assert_eq!(worker.trust.level().state, CacheState::Approximate);
}

/// The whole way down, step by step, and up again; the second time it takes longer.
#[test]
fn an_engine_that_evicts_silently_is_resynchronised_then_discounted_then_demoted() {
    let mut worker = Worker::new();
    worker
        .show("hit", 3, cached(320, 320))
        .show("evicted", 12, cached(320, 0))
        .show("good again", 6, cached(320, 320))
        .show("evicted again", 12, cached(320, 0))
        .show("good at last", 20, cached(320, 320));
    worker.check(&expect![[r#"
        hit 3: Exact
        evicted 1: ask
        evicted 3: ask
        evicted 4: resynchronise
        evicted 7: ask
        evicted 8: forget
        evicted 8: Discounted silent_eviction
        evicted 12: forget
        evicted 12: Approximate silent_eviction
        good again 6: Exact
        evicted again 1: ask
        evicted again 4: resynchronise
        evicted again 8: forget
        evicted again 8: Discounted silent_eviction
        evicted again 12: forget
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
        lost 1: ask
        lost 3: ask
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
        ..Answer::default()
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
        .show("appeared", 3, appeared(60, 60))
        .show("missing", 4, appeared(3, 60));
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
        late 8: Discounted events_late
    "#]]);
    let mut worker = Worker::new();
    worker
        .show("hit", 3, cached(320, 320))
        .show("more than told", 12, cached(0, 320));
    worker.check(&expect![[r#"
        hit 3: Exact
        more than told 1: ask
        more than told 3: ask
        more than told 4: resynchronise
        more than told 7: ask
        more than told 8: Discounted events_missing
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
        sibling 1: ask
        sibling 1: ask
        sibling 1: ask
        sibling 1: ask
        sibling 1: ask
        sibling 1: ask
    "#]]);
}

/// What is certain needs no window, and when it is gone the worker has to prove itself again.
#[test]
fn a_bar_holds_whatever_answers_say() {
    let mut worker = Worker::new();
    worker
        .show("hit", 3, cached(320, 320))
        .show("block size", 1, Evidence::Unusable(Some(Cause::BlockSize)))
        .show("hit", 10, cached(320, 320))
        .show("same again", 1, Evidence::Unusable(Some(Cause::BlockSize)))
        .show("mended", 1, Evidence::Unusable(None))
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
        wrong 1: ask
        wrong 3: ask
        wrong 1: ask
        wrong 1: ask
        wrong 1: ask
        wrong 1: ask
        wrong 1: ask
        wrong 1: ask
        wrong 1: ask
        wrong 1: ask
        wrong 1: ask
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
    assert_eq!(
        out.iter()
            .filter(|a| matches!(a, Action::Changed(_)))
            .count(),
        1
    );
}

fn finding(evidence: Evidence) -> Option<&'static str> {
    let mut out = Vec::new();
    Trust::new(TrustOptions::new(BLOCK)).step(Time::ZERO, evidence, &mut out);
    out.into_iter().find_map(|a| match a {
        Action::Judged(finding) => Some(finding.name()),
        _ => None,
    })
}

/// The answer of a prompt of 60 blocks, with what events show of it when they had their time.
fn answered(cached: u32, reported: u32, removed_since: u32, shown: StoredCheck) -> Evidence {
    Evidence::Answer(Answer {
        prompt: 60 * BLOCK,
        prompt_reported: Some(60 * BLOCK),
        cached,
        cached_reported: Some(reported),
        removed_since,
        hybrid: false,
        shown: Some(StoredCheck {
            expected: 60,
            ..shown
        }),
    })
}

/// Evictions that events told of between prediction and answer are no fault, and neither is a hit whose blocks events
/// show by now; only what they do not explain is.
#[test]
fn what_events_explain_is_late_and_not_wrong() {
    let none = StoredCheck::default();
    let shown = |found| StoredCheck { found, ..none };
    let evicted = |removed| finding(answered(320, 0, removed, none));
    assert_eq!(evicted(320), Some("late"));
    assert_eq!(evicted(305), Some("late"), "within a block");
    assert_eq!(evicted(304), Some("silent_eviction"));
    let unforeseen = |found| finding(answered(0, 320, 0, shown(found)));
    assert_eq!(unforeseen(60), Some("late"));
    assert_eq!(unforeseen(20), Some("late"));
    assert_eq!(unforeseen(19), Some("events_missing"));
    assert_eq!(finding(answered(0, 320, 320, shown(0))), Some("late"));
    assert_eq!(finding(answered(320, 305, 0, none)), Some("right"));
    assert_eq!(finding(answered(0, 0, 0, none)), None);
    let mut worker = Worker::new();
    worker.show("hit", 3, cached(320, 320)).show(
        "evicted meanwhile",
        40,
        answered(320, 0, 320, none),
    );
    worker.check(&expect![[r#"
        hit 3: Exact
    "#]]);
    assert_eq!(
        worker.trust.error_by_cause().next().map(|(d, _)| d),
        Some(Cause::EventsLate)
    );
}

/// Answers that come while events are asked for again say nothing: a replay socket that answers late, or not at all, does not keep a
/// silent engine believed.
#[test]
fn slow_replays_do_not_keep_a_silent_engine_believed() {
    let mut worker = Worker::new();
    worker
        .show("hit", 3, cached(320, 320))
        .show("silent", 1, cached(0, 320))
        .show("asking", 1, Evidence::Recovering(true))
        .show("meanwhile", 60, cached(0, 320))
        .show("nothing", 1, Evidence::Recovering(false))
        .show("still silent", 11, cached(0, 320));
    worker.check(&expect![[r#"
        hit 3: Exact
        silent 1: ask
        still silent 1: ask
        still silent 3: resynchronise
        still silent 5: ask
        still silent 7: Discounted events_missing
        still silent 11: Approximate events_missing
    "#]]);
}

/// Blocks that the engine stored for a prompt, and that are not the prompt's, are another content and not a loss.
#[test]
fn another_content_is_not_called_a_loss() {
    let none = StoredCheck::default();
    let stored = StoredCheck { stored: 40, ..none };
    assert_eq!(finding(answered(0, 320, 0, none)), Some("events_missing"));
    assert_eq!(
        finding(answered(0, 320, 0, stored)),
        Some("tokenization_differs")
    );
    let orphans = StoredCheck {
        orphans: true,
        ..stored
    };
    assert_eq!(
        finding(answered(0, 320, 0, orphans)),
        Some("events_missing")
    );
    let others = StoredCheck {
        others: true,
        ..stored
    };
    assert_eq!(finding(answered(0, 320, 0, others)), Some("other_engine"));
    assert_eq!(finding(answered(320, 0, 0, others)), Some("other_engine"));
    // All of it was cached, so nothing was stored: what earlier prompts stored tells.
    let whole = answered(0, 944, 0, none);
    assert_eq!(finding(whole), Some("events_missing"));
    let mut worker = Worker::new();
    worker
        .show("stored something else", 1, appeared(0, 60))
        .show("found again", 3, whole);
    worker.check(&expect![[r#"
        found again 3: Approximate tokenization_differs
    "#]]);
}

/// Events about another worker's requests cannot be mended by asking for them again.
#[test]
fn events_of_another_engine_are_named_and_not_asked_for_again() {
    let elsewhere = Evidence::Stored(StoredCheck {
        expected: 60,
        stored: 60,
        others: true,
        ..StoredCheck::default()
    });
    let mut worker = Worker::new();
    worker.show("elsewhere", 9, elsewhere);
    worker.check(&expect![[r#"
        elsewhere 4: Approximate other_engine
    "#]]);
    assert!(Cause::OtherEngine.advice().contains("events="));
}

/// Full replays are rare whatever goes wrong: a view that is wrong again right after one is believed less instead.
#[test]
fn full_replays_keep_a_pause_that_grows() {
    let mut worker = Worker::new();
    let mut replays = Vec::new();
    for at in 0..600 {
        worker.now = Time::ZERO + Duration::from_millis(at * 100);
        let wrong = (at / 10) % 2 == 0;
        let evidence = cached(320, if wrong { 0 } else { 320 });
        let mut out = Vec::new();
        worker.trust.step(worker.now, evidence, &mut out);
        if out.iter().any(|a| matches!(a, Action::Resync(_))) {
            replays.push(worker.now.as_nanos() / 1_000_000_000);
        }
    }
    let pauses: Vec<u64> = replays.windows(2).map(|w| w[1] - w[0]).collect();
    assert!(replays.len() >= 2, "{replays:?}");
    assert!(pauses.iter().all(|pause| *pause >= 10), "{replays:?}");
    assert!(replays.len() <= 4, "{replays:?}");
}

/// A socket that is away explains what its events do not show: nothing is judged by it.
#[test]
fn nothing_is_missing_while_the_socket_is_away() {
    let mut worker = Worker::new();
    worker
        .show("not there", 1, Evidence::Link(false))
        .show("a hit", 3, cached(0, 320))
        .show("time", 2, Evidence::Tick);
    worker.check(&expect![[r#"
        time 2: Approximate events_unreachable
    "#]]);
    assert_eq!(worker.trust.samples(), 0);
}

/// An answer that is off is shown when events had their time; one that is right, or counts other tokens, at once.
#[test]
fn only_an_answer_that_is_off_waits_for_events() {
    let mut trust = Trust::new(TrustOptions::new(BLOCK));
    let answer = |cached, reported| Answer {
        prompt: 1000,
        prompt_reported: Some(1000),
        cached,
        cached_reported: reported,
        ..Answer::default()
    };
    assert!(trust.is_open(&answer(320, Some(0))));
    assert!(trust.is_open(&answer(0, Some(320))));
    assert!(!trust.is_open(&answer(320, Some(305))));
    assert!(!trust.is_open(&answer(320, None)), "it never reported any");
    let other = Answer {
        prompt_reported: Some(999),
        ..answer(320, Some(0))
    };
    assert!(!trust.is_open(&other));
    let reported = Evidence::Answer(answer(320, Some(320)));
    trust.step(Time::ZERO, reported, &mut Vec::new());
    assert!(trust.is_open(&answer(320, None)), "silence means none now");
}

/// A lost message costs a question, and when the answer has filled the hole nothing more.
#[test]
fn one_wrong_answer_asks_and_a_mended_hole_is_forgotten() {
    let mut worker = Worker::new();
    worker
        .show("hit", 3, cached(320, 320))
        .show("nothing came", 1, appeared(0, 0))
        .show("mended", 1, Evidence::Mended)
        .show("nothing came", 1, appeared(0, 0))
        .show("mended", 1, Evidence::Mended)
        .show("nothing came", 2, appeared(0, 0));
    worker.check(&expect![[r#"
        hit 3: Exact
        nothing came 1: ask
        nothing came 1: ask
        nothing came 1: ask
    "#]]);
}

/// What does not appear is told apart by what did.
#[test]
fn blocks_that_do_not_appear_have_a_cause() {
    let finding = |appeared: StoredCheck, recovering| {
        let mut out = Vec::new();
        let mut trust = Trust::new(TrustOptions::new(BLOCK));
        trust.step(Time::ZERO, Evidence::Recovering(recovering), &mut out);
        trust.step(Time::ZERO, Evidence::Stored(appeared), &mut out);
        out.into_iter().find_map(|a| match a {
            Action::Judged(finding) => Some(finding),
            _ => None,
        })
    };
    let none = StoredCheck {
        expected: 9,
        ..StoredCheck::default()
    };
    assert_eq!(
        finding(none, false),
        Some(Finding::Wrong(Cause::EventsMissing))
    );
    assert_eq!(finding(none, true), None);
    let others = StoredCheck { stored: 9, ..none };
    assert_eq!(
        finding(others, false),
        Some(Finding::Wrong(Cause::Tokenization))
    );
    let orphans = StoredCheck {
        orphans: true,
        ..others
    };
    assert_eq!(
        finding(orphans, false),
        Some(Finding::Wrong(Cause::EventsMissing))
    );
    let evicted = StoredCheck {
        removed: 9,
        ..others
    };
    assert_eq!(finding(evicted, false), None);
    let all = StoredCheck { found: 9, ..none };
    assert_eq!(finding(all, false), Some(Finding::Right));
    assert_eq!(finding(StoredCheck::default(), false), None);
}

/// A short absence of the event socket is nothing; a long one suspends the worker; what it had proven it has
/// back with the connection, unless the engine began again.
#[test]
fn a_lost_connection_suspends() {
    let mut worker = Worker::new();
    worker
        .show("hit", 3, cached(320, 320))
        .show("lost", 1, Evidence::Link(false))
        .show("a moment", 2, Evidence::Tick)
        .show("back", 1, Evidence::Link(true))
        .show("lost", 1, Evidence::Link(false))
        .show("long", 9, Evidence::Tick)
        .show("back", 1, Evidence::Link(true))
        .show("lost", 1, Evidence::Link(false))
        .show("long", 9, Evidence::Tick)
        .show("restarted", 1, Evidence::Restarted)
        .show("back", 1, Evidence::Link(true))
        .show("hit", 3, cached(320, 320));
    worker.check(&expect![[r#"
        hit 3: Exact
        long 5: Approximate events_unreachable
        back 1: Exact
        long 5: Approximate events_unreachable
        back 1: Approximate starting
        hit 3: Exact
    "#]]);
}

/// While this machine has no descriptor for the event socket, nothing is held against the engine; when it has one again, the engine
/// is given its time anew.
#[test]
fn what_this_machine_lacks_does_not_suspend() {
    let mut worker = Worker::new();
    worker
        .show("hit", 3, cached(320, 320))
        .show("no descriptor", 30, Evidence::LocalFault)
        .show("lost", 1, Evidence::Link(false))
        .show("no descriptor", 30, Evidence::LocalFault)
        .show("not there", 9, Evidence::Tick)
        .show("no descriptor", 30, Evidence::LocalFault)
        .show("back", 1, Evidence::Link(true));
    worker.check(&expect![[r#"
        hit 3: Exact
        not there 5: Approximate events_unreachable
        back 1: Exact
    "#]]);
}

/// Engines that report cached tokens only where there are some.
#[test]
fn no_report_means_none_once_there_was_one() {
    let unsaid = Evidence::Answer(Answer {
        prompt: 1000,
        prompt_reported: Some(1000),
        cached: 320,
        ..Answer::default()
    });
    let mut worker = Worker::new();
    worker
        .show("unsaid", 9, unsaid)
        .show("hit", 3, cached(320, 320))
        .show("unsaid", 4, unsaid);
    worker.check(&expect![[r#"
        hit 3: Exact
        unsaid 1: ask
        unsaid 3: ask
        unsaid 4: resynchronise
    "#]]);
}

#[test]
fn a_standing_outlives_the_router() {
    let mut worker = Worker::new();
    worker.show("hit", 3, cached(320, 320));
    let record = worker.trust.record();
    let resumed = Trust::resume(TrustOptions::new(BLOCK), record);
    assert_eq!(resumed.level(), worker.trust.level());
    let discounted = TrustRecord {
        state: CacheState::Discounted,
        demotions: 2,
    };
    let resumed = Trust::resume(TrustOptions::new(BLOCK), discounted);
    assert_eq!(resumed.level().cause, Some(Cause::Starting));
}

/// A hybrid model's hits are at most what its events tell: it counts half, is never forgotten, and is no worse
/// than that.
#[test]
fn a_hybrid_model_counts_half() {
    let less = Evidence::Answer(Answer {
        prompt: 1000,
        prompt_reported: Some(1000),
        cached: 320,
        cached_reported: Some(64),
        hybrid: true,
        ..Answer::default()
    });
    let mut worker = Worker::new();
    worker
        .show("hit", 3, cached(320, 320))
        .show("less", 40, less)
        .show("hit", 9, cached(320, 320));
    worker.check(&expect![[r#"
        hit 3: Exact
        less 4: Discounted hybrid_cache
        hit 6: Exact
    "#]]);
}
