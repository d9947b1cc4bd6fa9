//! What is booked under which settings, what decays, what expires, what replicas and queries see.

use super::*;
use kvasir_router::{Observation, PrefillLoadModel, RankOverlap, Role};
use kvasir_types::DpRank;

#[test]
fn booked_tokens_ignore_the_overlap_credit_and_weigh_lower_tiers() {
    let mut host = Host::kv(|c| c.router_kv_overlap_score_credit = 0.1).workers(1);
    let mut warm = Arrival::new(RequestId(1), 160);
    warm.overlap.ranks = vec![RankOverlap {
        rank: WorkerRank::new(1, 0),
        device: 2.0,
        host: 3,
        disk: 2,
    }];
    let sent = host.sent(warm);
    assert_eq!(sent.cached_tokens, 76, "(2 + 0.75 * 3 + 0.25 * 2) * 16");
    assert_eq!(sent.overlap_blocks, 5);
    assert_eq!(host.load(1).0, 84);
}

#[test]
fn more_cached_than_prompt_books_nothing() {
    let mut host = Host::kv(|_| {}).workers(1);
    let mut whole = Arrival::new(RequestId(1), 20);
    whole.overlap = held(&[(1, 2)]);
    let sent = host.sent(whole);
    assert_eq!((sent.cached_tokens, host.load(1).0), (20, 0));
}

#[test]
fn each_switch_turns_its_figure_off() {
    let booked = |change: fn(&mut RouterConfig)| {
        let mut host = Host::kv(change).workers(1);
        host.sent(prompt(1, &words(1, 4)));
        host.sent(prompt(2, &words(1, 4)));
        host.load(1)
    };
    assert_eq!(booked(|_| {}), (128, 4));
    assert_eq!(booked(|c| c.router_track_active_blocks = false), (128, 0));
    assert_eq!(booked(|c| c.router_assume_kv_reuse = false), (128, 8));
    assert_eq!(booked(|c| c.router_track_prefill_tokens = false), (0, 4));
    assert_eq!(booked(|c| c.router_role = Role::Prefill), (128, 0));
}

#[test]
fn without_active_blocks_the_decode_term_is_0_for_everyone() {
    let mut host = Host::kv(|c| c.router_track_active_blocks = false).workers(1);
    host.sent(prompt(1, &words(1, 4)));
    host.first_token(1);
    host.sent(prompt(2, &words(2, 4)));
    let decision = host.router.explain(RequestId(2)).unwrap();
    assert_eq!(decision.chosen().unwrap().terms.decode_blocks, 0.0);
}

#[test]
fn a_request_may_override_reuse_and_prefill_tracking_for_itself() {
    let mut host = Host::kv(|_| {}).workers(1);
    host.sent(prompt(1, &words(1, 4)));
    let mut own = prompt(2, &words(1, 4));
    own.overrides.assume_kv_reuse = Some(false);
    own.overrides.track_prefill_tokens = Some(false);
    host.sent(own);
    assert_eq!(host.load(1), (64, 8));
    for id in 1..=2 {
        host.finish(id);
    }
    assert!(host.router.is_idle());
}

#[test]
fn output_blocks_count_only_with_their_switch() {
    for (on, blocks) in [(false, 4), (true, 5)] {
        let mut host = Host::kv(|c| c.router_track_output_blocks = on).workers(1);
        host.sent(prompt(1, &words(1, 4)));
        host.first_token(1);
        let id = RequestId(1);
        host.input(Input::Tokens { id, generated: 1 });
        assert_eq!(host.load(1).1, blocks);
        host.finish(1);
        assert!(host.router.is_idle());
    }
}

#[test]
fn a_temperature_of_the_request_replaces_the_routers() {
    let mut host = Host::kv(|_| {}).workers(2);
    let mut load = prompt(1, &words(1, 50));
    load.pin.worker = Some(WorkerId(1));
    host.sent(load);
    let mut reached = [0; 3];
    for id in 10..210 {
        let mut hot = Arrival::new(RequestId(id), 16);
        hot.overrides.router_temperature = Some(10.0);
        reached[host.worker(hot) as usize] += 1;
        host.finish(id);
    }
    assert!(
        reached[1] > 60,
        "a hot request reaches the dear worker too: {reached:?}"
    );
}

#[test]
fn a_booking_nobody_speaks_of_expires_and_is_said() {
    let mut host = Host::kv(|_| {}).workers(1);
    host.sent(prompt(1, &words(1, 4)));
    assert_eq!(
        host.router.next_deadline(),
        Some(Time::from_millis(300_000))
    );
    host.at(200_000).input(Input::Tokens {
        id: RequestId(1),
        generated: 5,
    });
    assert!(host.at(499_999).input(Input::Tick).is_empty());
    let expired = Observation::Expired {
        id: RequestId(1),
        target: WorkerRank::new(1, 0),
    };
    assert_eq!(
        host.at(500_000).input(Input::Tick),
        [Output::Observe(expired)]
    );
    assert!(host.router.is_idle());
    assert!(host.finish(1).is_empty(), "a late end is harmless");
}

#[test]
fn an_expiry_of_0_is_the_default() {
    let mut host = Host::kv(|c| c.router_active_request_expiry_secs = 0.0).workers(1);
    host.sent(Arrival::new(RequestId(1), 16));
    assert_eq!(
        host.router.next_deadline(),
        Some(Time::from_millis(300_000))
    );
}

#[test]
fn a_worker_that_leaves_takes_its_bookings_and_a_late_end_is_harmless() {
    let mut host = Host::kv(|_| {}).workers(2);
    for id in 1..=6 {
        host.sent(prompt(id, &words(id as u64, 4)));
    }
    host.input(Input::Left(WorkerId(1)));
    host.join(3, |_| {});
    assert_eq!(host.load(3), (0, 0), "its slot is clean for the next");
    for id in 1..=6 {
        host.finish(id);
    }
    assert!(host.router.is_idle());
}

#[test]
fn an_update_keeps_the_bookings_of_ranks_that_stay() {
    let mut host = Host::kv(|_| {});
    host.join(1, |spec| spec.ranks = 2);
    for id in 1..=2 {
        host.sent(prompt(id, &words(id as u64, 4)));
    }
    let mut spec = WorkerSpec::new(WorkerId(1));
    spec.first_rank = DpRank(1);
    spec.ranks = 2;
    host.input(Input::Updated(spec));
    let load = |rank| {
        host.router
            .load(WorkerRank::new(1, rank))
            .map(|l| l.active_blocks)
    };
    assert_eq!([load(0), load(1), load(2)], [None, Some(4), Some(0)]);
    assert_eq!(host.router.booked(), 1);
}

/// `aic` with the embedded profile: the oldest prompt's charge shrinks to nothing, the next one's stays.
#[test]
fn a_measured_profile_shrinks_the_oldest_prompt() {
    let preset = kvasir_profile::Preset::H200Llama8b;
    let mut host = Host::kv(|c| {
        c.router_prefill_load_model = PrefillLoadModel::Aic;
        c.aic_profile = Some(preset);
    })
    .workers(1);
    host.sent(Arrival::new(RequestId(1), 4096));
    host.sent(Arrival::new(RequestId(2), 1000));
    assert_eq!(host.load(1).0, 5096);
    host.at(58).input(Input::Tick);
    let half = host.load(1).0;
    assert!(
        (2900..3200).contains(&half),
        "116 ms measured for 4096 tokens: {half} after 58"
    );
    host.at(1000).input(Input::Tick);
    assert_eq!(host.load(1).0, 1000);
}

#[test]
fn waiting_requests_are_looked_at_often_while_charges_shrink() {
    let mut host = Host::kv(|c| {
        c.router_prefill_load_model = PrefillLoadModel::Aic;
        c.aic_profile = Some(kvasir_profile::Preset::H200Llama8b);
        c.router_queue_threshold = Some(1.0);
    });
    host.join(1, |spec| spec.max_num_batched_tokens = Some(1000));
    host.sent(Arrival::new(RequestId(1), 4096));
    host.arrive(Arrival::new(RequestId(2), 10));
    assert_eq!(host.router.queued().0, 1);
    assert_eq!(host.router.next_deadline(), Some(Time::from_millis(100)));
    host.at(100).input(Input::Tick);
    assert_eq!(
        host.released(),
        [2],
        "4096 tokens have shrunk below 1000 by then"
    );
    let mut plain = Host::kv(|c| c.router_queue_threshold = Some(1.0));
    plain.join(1, |spec| spec.max_num_batched_tokens = Some(1000));
    plain.sent(Arrival::new(RequestId(1), 4096));
    plain.arrive(Arrival::new(RequestId(2), 10));
    assert_eq!(
        plain.router.next_deadline(),
        Some(Time::from_millis(60_000))
    );
}

/// Prompts of 1000 tokens that take 100 ms each: after a few the charge is seen to shrink.
#[test]
fn the_learned_model_shrinks_charges_once_it_has_seen_enough() {
    let mut host = Host::kv(|c| c.router_prefill_load_model = PrefillLoadModel::Learned).workers(1);
    let half_way = |host: &mut Host, id: u128, at: u64| {
        host.at(at).sent(Arrival::new(RequestId(id), 1000));
        host.at(at + 50).input(Input::Tick);
        let left = host.load(1).0;
        host.at(at + 100).first_token(id);
        host.finish(id);
        left
    };
    assert_eq!(half_way(&mut host, 1, 0), 1000);
    for id in 2..20 {
        half_way(&mut host, id, id as u64 * 1000);
    }
    let left = half_way(&mut host, 20, 20_000);
    assert!((480..520).contains(&left), "half of 100 ms: {left} of 1000");
}

#[test]
fn potential_loads_are_per_rank_with_this_prompt_added() {
    let mut host = Host::kv(|_| {}).workers(2);
    let mut running = prompt(1, &words(1, 4));
    running.pin.worker = Some(WorkerId(1));
    host.sent(running);
    let asked = prompt(2, &words(1, 6));
    let mut rows = Vec::new();
    let overlap = held(&[(2, 3)]);
    host.router
        .potential_loads(host.now, 100, &overlap, &asked.sequence, &mut rows);
    let rows: Vec<_> = rows
        .iter()
        .map(|r| {
            (
                r.rank.worker.0,
                r.potential_prefill_tokens,
                r.potential_decode_blocks,
                r.active_requests,
            )
        })
        .collect();
    assert_eq!(rows, [(1, 164, 6, 1), (2, 52, 6, 0)]);
}

#[test]
fn a_question_books_nothing_and_may_reuse_any_id() {
    let mut host = Host::kv(|_| {}).workers(1);
    host.sent(prompt(1, &words(1, 4)));
    let mut query = prompt(1, &words(1, 4));
    query.query_only = true;
    let sent = host.sent(query);
    assert!(!sent.booked && !sent.record);
    assert_eq!(host.load(1), (64, 4));
}

#[test]
fn decisions_are_recorded_only_where_an_index_wants_them() {
    for (events, ttl, credit, record) in [
        (true, None, 1.0, false),
        (true, Some(5.0), 1.0, true),
        (false, None, 1.0, true),
        (false, None, 0.0, false),
    ] {
        let mut host = Host::kv(|c| {
            c.router_kv_events = events;
            c.router_predicted_ttl_secs = ttl;
            c.router_kv_overlap_score_credit = credit;
        })
        .workers(1);
        assert_eq!(host.sent(Arrival::new(RequestId(1), 16)).record, record);
    }
}

#[test]
fn time_that_goes_back_counts_as_the_latest_seen() {
    let mut host = Host::kv(|_| {}).workers(1);
    host.at(10_000).sent(prompt(1, &words(1, 4)));
    host.at(5_000).sent(prompt(2, &words(2, 4)));
    assert_eq!(
        host.router.explain(RequestId(2)).unwrap().at,
        Time::from_millis(10_000)
    );
}
