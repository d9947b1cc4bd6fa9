//! Workers of one router that serve different models: who may go where, and whose load counts.

use super::*;
use kvasir_router::{Exclusion, ExclusionReason, Pin, SessionAction, SessionRequest};

fn names(names: &[&str]) -> Vec<Arc<str>> {
    names.iter().map(|name| Arc::from(*name)).collect()
}

fn of(model: &str, arrival: Arrival) -> Arrival {
    Arrival {
        model: Some(model.into()),
        ..arrival
    }
}

/// Both workers serve the base, the second alone the adapter.
fn host(change: impl FnOnce(&mut RouterConfig)) -> Host {
    let mut host = Host::kv(change);
    host.join(1, |spec| spec.serves = names(&["base"]));
    host.join(2, |spec| spec.serves = names(&["base", "sql"]));
    host
}

#[test]
fn a_request_goes_to_those_who_serve_its_model() {
    let mut host = host(|_| {});
    for id in 1..6 {
        let asked = of("sql", prompt(id, &words(id as u64, 4)));
        assert_eq!(host.worker(asked), 2);
    }
    // All of that is load to the base, too.
    for id in 6..9 {
        let asked = of("base", prompt(id, &words(id as u64, 4)));
        assert_eq!(host.worker(asked), 1);
    }
    let decision = host.router.explain(RequestId(1)).unwrap();
    assert_eq!(decision.model.as_deref(), Some("sql"));
    let excluded = Exclusion {
        count: 1,
        named: vec![(WorkerRank::new(1, 0), ExclusionReason::Model)],
    };
    assert_eq!(decision.excluded, excluded);
}

#[test]
fn nobody_serves_what_nobody_names() {
    let mut host = host(|_| {});
    let unknown = || of("other", prompt(1, &[1]));
    let nobody = RouteError::NoEndpoints { known: 0, down: 0 };
    assert_eq!(host.refused(unknown()), nobody);
    host.join(3, |_| {});
    assert_eq!(host.worker(unknown()), 3, "one that names none serves all");
    host.input(Input::Left(WorkerId(3)));
    assert_eq!(host.refused(of("other", prompt(2, &[1]))), nobody);
    assert_eq!(
        host.worker(prompt(3, &[1])),
        1,
        "who names none goes anywhere"
    );
}

#[test]
fn a_pin_to_one_who_serves_other_models_is_a_pin_to_nobody() {
    let mut host = host(|_| {});
    let mut pinned = of("sql", prompt(1, &[1]));
    pinned.pin = Pin {
        worker: Some(WorkerId(1)),
        rank: None,
    };
    let unknown = RouteError::PinnedWorkerUnknown(WorkerId(1));
    assert_eq!(host.refused(pinned), unknown);
}

#[test]
fn what_a_worker_serves_may_change() {
    let mut host = host(|_| {});
    let update = |serves: &[&str]| {
        let mut spec = WorkerSpec::new(WorkerId(2));
        spec.serves = names(serves);
        Input::Updated(spec)
    };
    assert_eq!(host.worker(of("sql", prompt(1, &[1]))), 2);
    host.input(update(&["base"]));
    host.refused(of("sql", prompt(2, &[1])));
    assert_eq!(host.load(2), (16, 1), "what runs there goes on");
    host.input(update(&["sql"]));
    assert_eq!(host.worker(of("sql", prompt(3, &[2]))), 2);
    assert_eq!(host.worker(of("base", prompt(4, &[3]))), 1);
}

#[test]
fn a_model_that_must_wait_holds_up_no_other() {
    let mut host = Host::kv(|c| c.router_queue_threshold = Some(1.0));
    for (id, serves) in [(1, "base"), (2, "sql")] {
        host.join(id, |spec| {
            spec.serves = names(&[serves]);
            spec.max_num_batched_tokens = Some(16);
        });
    }
    assert_eq!(host.worker(of("sql", prompt(1, &words(1, 4)))), 2);
    assert_eq!(host.arrive(of("sql", prompt(2, &words(2, 4)))).len(), 1);
    assert_eq!(host.router.queued().0, 1, "its only worker is full");
    assert_eq!(host.worker(of("base", prompt(3, &words(3, 4)))), 1);
    host.first_token(1);
    assert_eq!(host.released(), [2]);
}

#[test]
fn a_session_is_followed_only_where_the_model_is_served() {
    let mut host = host(|_| {});
    let bound = |id, model| Arrival {
        session: Some(SessionRequest {
            id: "s".into(),
            action: SessionAction::Bind {
                timeout: std::time::Duration::from_secs(60),
            },
        }),
        ..of(model, prompt(id, &[id as u64]))
    };
    // Bound to the first by its load.
    host.sent(of("sql", prompt(1, &words(1, 8))));
    assert_eq!(host.worker(bound(2, "base")), 1);
    assert_eq!(host.worker(bound(3, "sql")), 2);
}
