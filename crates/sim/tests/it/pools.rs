//! Workers that compute prompts for those that answer.

use kvasir_sim::{
    ArrivalMode, BypassRule, Counts, Fleet, FleetChange, PrefillPool, RunReport, SimError,
    TransferLink, simulate,
};
use kvasir_types::Time;

use crate::{fleet, play, policy, workload};

const RULE: BypassRule = BypassRule {
    below_tokens: 2048,
    below_share: 0.7,
};

/// `workers` that compute prompts beside two that answer, joined by links of a gigabyte a second.
fn split(workers: u32, bypass: Option<BypassRule>) -> Fleet {
    Fleet {
        prefill: Some(PrefillPool {
            workers,
            bypass,
            link: TransferLink {
                bytes_per_token: 131_072,
                bytes_per_s: 1e9,
            },
        }),
        ..fleet(2)
    }
}

fn all_completed(report: &RunReport) {
    let expected = Counts {
        completed: report.requests,
        ..Counts::default()
    };
    assert_eq!(report.counts, expected, "{}", report.policy);
}

/// Whatever the policy, every request is answered once, with all its tokens, and its prompt is counted once.
#[test]
fn nothing_is_lost_on_its_way() {
    let trace = workload("chat,sessions=30,turns=4,rate=3,system=800,output=40");
    let tokens: u64 = trace
        .requests
        .iter()
        .map(|r| u64::from(r.output_tokens))
        .sum();
    for mode in ["round-robin", "least-loaded", "kv", "time", "time,sticky"] {
        for bypass in [None, Some(RULE)] {
            let fleet = split(2, bypass);
            let report = play(&trace, &fleet, mode);
            all_completed(&report);
            assert_eq!(report.output_tokens, tokens, "{mode}");
            assert_eq!(report.prompt_tokens, trace.prompt_tokens(), "{mode}");
            assert_eq!((report.workers, report.prefill_workers), (2, 2));
            assert_eq!(report, play(&trace, &fleet, mode), "a seed is a report");
        }
    }
}

/// One request at a time: the first token comes later by the time that the prompt is on its way.
#[test]
fn a_prompt_takes_its_time_from_worker_to_worker() {
    let trace = workload("documents,requests=8,rate=1,documents=5000,document=3000,output=20");
    let at = |bytes_per_s: f64| {
        let mut fleet = split(1, None);
        fleet.arrivals = ArrivalMode::Closed {
            clients: 1,
            think: std::time::Duration::ZERO,
        };
        if let Some(pool) = &mut fleet.prefill {
            pool.link.bytes_per_s = bytes_per_s;
        }
        play(&trace, &fleet, "kv")
    };
    let (free, slow) = (at(0.0), at(1e9));
    let prompt = trace.prompt_tokens() as f64 / trace.requests.len() as f64;
    let expected = prompt * 131_072.0 / 1e9 * 1e3;
    let found = slow.ttft.mean - free.ttft.mean;
    assert!(
        (found / expected - 1.0).abs() < 0.01,
        "{found} for {expected}"
    );
    assert_eq!(slow.itl.p50, free.itl.p50);
}

/// Where prompts are long, answers of workers that compute none have no gaps for them, and others have.
#[test]
fn answers_do_not_wait_for_prompts_of_others() {
    let trace = workload("documents,requests=160,rate=8,documents=5000,document=6000,output=100");
    let together = play(&trace, &fleet(4), "kv");
    let apart = play(&trace, &split(2, None), "kv");
    all_completed(&apart);
    assert!(
        apart.itl.mean < 0.85 * together.itl.mean,
        "{} and {}",
        apart.itl.mean,
        together.itl.mean
    );
}

/// The next turn of a conversation finds its answer where that was made: with a rule it is computed there.
#[test]
fn turns_of_a_conversation_go_where_they_were_answered() {
    let trace = workload("chat,sessions=12,turns=6,rate=1,system=400,output=300");
    let (always, rule) = (
        play(&trace, &split(1, None), "kv"),
        play(&trace, &split(1, Some(RULE)), "kv"),
    );
    assert!(
        rule.hit_share > always.hit_share + 0.1,
        "{} and {}",
        rule.hit_share,
        always.hit_share
    );
}

#[test]
fn what_pools_cannot_have_is_refused() {
    let trace = workload("tenants,requests=2");
    let refused = |fleet: &Fleet| simulate(&trace, fleet, &policy("kv"), &mut |_| {}).unwrap_err();
    assert_eq!(refused(&split(0, None)), SimError::Zero("prefill workers"));
    let routers = Fleet {
        replicas: 2,
        ..split(1, None)
    };
    assert_eq!(refused(&routers), SimError::Pools("more than one router"));
    let at = Time::from_millis(10);
    let leaves = Fleet {
        changes: vec![FleetChange::Leaves { at, worker: 0 }],
        ..split(1, None)
    };
    assert!(matches!(refused(&leaves), SimError::Pools(_)));
}
