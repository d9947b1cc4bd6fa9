//! A policy that decides beside the real one: it changes nothing, and what it would have done is counted.

use kvasir_router::{
    Arrival, Input, Output, Reason, Router, RouterConfig, RouterMode, RouterPolicy, ShadowPolicy,
    WorkerSpec,
};
use kvasir_types::{RequestId, Rng, Time, WorkerId};

use crate::{Host, held, prompt, words};

fn config(mode: RouterMode, policy: RouterPolicy) -> RouterConfig {
    RouterConfig {
        router_mode: mode,
        router_policy: policy,
        ..RouterConfig::default()
    }
}

fn shadowed(live: RouterConfig, shadow: RouterConfig) -> RouterConfig {
    RouterConfig {
        shadow_policy: Some(ShadowPolicy {
            name: "other".into(),
            config: Box::new(shadow),
        }),
        ..live
    }
}

const KV: (RouterMode, RouterPolicy) = (RouterMode::Kv, RouterPolicy::Kv);
const TIME: (RouterMode, RouterPolicy) = (RouterMode::Kv, RouterPolicy::Time);
const TURNS: (RouterMode, RouterPolicy) = (RouterMode::RoundRobin, RouterPolicy::Kv);
const CHANCE: (RouterMode, RouterPolicy) = (RouterMode::Random, RouterPolicy::Kv);

/// What a router does in an hour of made-up traffic.
fn history(config: RouterConfig) -> (Vec<(u128, u64)>, Router) {
    let mut router = Router::new(config);
    let (mut rng, mut out, mut sent) = (Rng::new(5), Vec::new(), Vec::new());
    let mut running: Vec<u128> = Vec::new();
    for id in 1..=5 {
        let spec = WorkerSpec {
            kv_total_blocks: Some(2000),
            ..WorkerSpec::new(WorkerId(id))
        };
        router.step(Time::ZERO, Input::Joined(spec), &mut out);
    }
    for step in 0..3000u64 {
        let now = Time::from_millis(step * 40);
        let id = u128::from(step) + 1;
        match rng.below(3) {
            0 => {
                let mut arrival = prompt(id, &words(rng.below(40), 4 + rng.below(60)));
                arrival.overlap = held(&[(1 + rng.below(5), rng.below(8) as u32)]);
                router.step(now, Input::Arrived(Box::new(arrival)), &mut out);
                running.push(id);
            }
            1 if !running.is_empty() => {
                let id = running[rng.below(running.len() as u64) as usize];
                let id = RequestId(id);
                router.step(now, Input::FirstToken { id }, &mut out);
            }
            _ if !running.is_empty() => {
                let id = running.swap_remove(rng.below(running.len() as u64) as usize);
                let outcome = kvasir_router::Outcome::Completed { output_tokens: 9 };
                let ended = Input::Finished {
                    id: RequestId(id),
                    on: None,
                    outcome,
                };
                router.step(now, ended, &mut out);
            }
            _ => {}
        }
        sent.extend(out.drain(..).filter_map(|output| match output {
            Output::Send(sent) => Some((sent.id.0, sent.target.worker.0)),
            _ => None,
        }));
    }
    (sent, router)
}

#[test]
fn placements_are_the_same_with_and_without_a_shadow() {
    for (live, others) in [
        (KV, [TIME, TURNS]),
        (TIME, [KV, CHANCE]),
        (TURNS, [KV, TIME]),
    ] {
        let live = config(live.0, live.1);
        let (alone, router) = history(live.clone());
        assert!(alone.len() > 500 && router.shadow().is_none());
        for other in others {
            let (beside, router) = history(shadowed(live.clone(), config(other.0, other.1)));
            assert_eq!(alone, beside, "{other:?}");
            let (name, stats) = router.shadow().unwrap();
            assert_eq!(name, "other");
            assert!(stats.compared > 500, "{stats:?}");
            assert!(
                stats.disagreed > 0 && stats.disagreed < stats.compared,
                "{stats:?}"
            );
            assert!(stats.better_s.is_finite() && stats.worse_s.is_finite());
        }
    }
}

#[test]
fn a_policy_agrees_with_itself() {
    for of in [KV, TIME] {
        let live = config(of.0, of.1);
        let (_, router) = history(shadowed(live.clone(), live));
        let (_, stats) = router.shadow().unwrap();
        assert!(stats.compared > 500, "{stats:?}");
        assert_eq!(
            (stats.disagreed, stats.better_s, stats.worse_s),
            (0, 0.0, 0.0)
        );
    }
}

/// The one with the least cost by the time model loses nothing to any other, by that model.
#[test]
fn time_never_regrets_by_its_own_model() {
    let live = config(TIME.0, TIME.1);
    let (_, router) = history(shadowed(live, config(CHANCE.0, CHANCE.1)));
    let (_, stats) = router.shadow().unwrap();
    assert!(stats.worse_s > 0.0 && stats.better_s < 1e-6, "{stats:?}");
}

/// Worker 1 has the prompt cached and worker 2 has nothing to do; in turns the request goes to worker 2.
#[test]
fn a_decision_says_what_the_shadow_would_have_done() {
    let live = config(TURNS.0, TURNS.1);
    let mut host = Host::new(shadowed(live, config(KV.0, KV.1))).workers(2);
    let mut regrets = Vec::new();
    for id in 1..=2 {
        let mut arrival = prompt(id, &words(1, 600));
        arrival.overlap = held(&[(1, 599)]);
        let sent = host.worker(arrival);
        let decision = host.router.explain(RequestId(id)).unwrap();
        let shadow = decision.shadow.unwrap();
        assert_eq!(shadow.rank.worker, WorkerId(1));
        assert_eq!(shadow.disagrees, sent != 1);
        regrets.push(shadow.regret_s);
        host.at(id as u64 * 5000).first_token(id);
        host.finish(id);
    }
    regrets.sort_by(f32::total_cmp);
    assert_eq!(regrets[0], 0.0);
    assert!(regrets[1] > 0.05, "{regrets:?}");
}

#[test]
fn where_there_is_no_choice_nothing_is_compared() {
    let live = config(KV.0, KV.1);
    let mut host = Host::new(shadowed(live, config(TIME.0, TIME.1))).workers(2);
    let mut pinned = Arrival::new(RequestId(1), 100);
    pinned.pin.worker = Some(WorkerId(2));
    host.sent(pinned);
    assert_eq!(host.router.explain(RequestId(1)).unwrap().shadow, None);
    let mut asked = Arrival::new(RequestId(2), 100);
    asked.query_only = true;
    host.sent(asked);
    assert_eq!(host.router.shadow().unwrap().1.placements, 0);
    host.sent(Arrival::new(RequestId(3), 100));
    let decision = host.router.explain(RequestId(3)).unwrap();
    assert!(matches!(
        decision.winner,
        Some((_, Reason::Tie { .. } | Reason::LowestCost))
    ));
    assert_eq!(host.router.shadow().unwrap().1.compared, 1);
}
