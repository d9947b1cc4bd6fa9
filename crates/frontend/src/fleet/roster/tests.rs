//! Which models there are while one is made or forgotten, and what becomes of their series and of what was kept of them.

use std::sync::mpsc;
use std::time::Duration;

use kvasir_host::{LoadedSnapshot, RouterSetup};
use kvasir_index::{Index, IndexOptions};
use kvasir_router::RouterConfig;
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, MetricOptions, Metrics};
use kvasir_types::{TransportKind, WorkerRank};

use super::*;
use crate::{App, AppOptions};

/// Nothing here takes this long unless it hangs.
const HANGS: Duration = Duration::from_secs(20);
const HTTP: (Pool, TransportKind, Option<RouterMode>) = (Pool::Answer, TransportKind::Http, None);
const A: WorkerId = WorkerId(1);
const B: WorkerId = WorkerId(2);

fn app() -> Arc<App> {
    let metrics = Metrics::new(&MetricOptions::default()).unwrap();
    App::new(AppOptions::default(), metrics, Clock::new(), Tasks::new())
}

fn new(name: &str) -> ModelSpec {
    ModelSpec {
        name: name.into(),
        block_size: 16,
        context_length: 100,
        parent: None,
        migration_limit: 0,
    }
}

fn setup() -> RouterSetup {
    let config = RouterConfig {
        router_mode: RouterMode::Kv,
        ..RouterConfig::default()
    };
    RouterSetup::new(config, IndexOptions::default())
}

fn model(app: &App, new: &ModelSpec) -> Arc<ServedModel> {
    let model = setup().make(new, None, app.context());
    ServedModel::new(model, Default::default(), TransportKind::Http)
}

fn fleet(app: &Arc<App>) -> Fleet {
    Fleet::new(app.fleet_context(), setup())
}

fn has_series(app: &App, name: &str) -> bool {
    let mut page = String::new();
    app.metrics().render(&mut page).unwrap();
    page.contains(&format!("model=\"{name}\""))
}

/// Draws a page on another thread; fails if that waits for this one.
fn page_is_drawn(app: &Arc<App>) {
    let (done, drawn) = mpsc::channel();
    let app = Arc::clone(app);
    std::thread::spawn(move || {
        app.models().measure(app.metrics(), app.clock().now());
        done.send(())
    });
    drawn.recv_timeout(HANGS).expect("a page waits for a model");
}

#[tokio::test]
async fn a_page_does_not_wait_for_a_model_that_is_made_or_filled() {
    let app = app();
    let make = || {
        page_is_drawn(&app);
        model(&app, &new("m"))
    };
    let fill = |made: &ServedModel| {
        page_is_drawn(&app);
        assert!(app.models().get(&made.name).is_none(), "nobody asks it yet");
    };
    app.models().make(make, fill);
    assert!(app.models().get("m").is_some());
}

#[tokio::test]
async fn a_model_that_goes_leaves_its_series_to_one_of_its_name_that_is_filled() {
    let app = app();
    let (models, old) = (app.models(), model(&app, &new("m")));
    let make = || model(&app, &new("m"));
    let fill = |_: &ServedModel| models.retire(vec![old], app.metrics());
    models.make(make, fill);
    assert!(has_series(&app, "m"));
    models.retire(models.take("m").into_iter().collect(), app.metrics());
    assert!(!has_series(&app, "m"));
}

#[tokio::test]
async fn names_are_forgotten_together_and_the_router_of_one_in_use_keeps_its_series() {
    let (app, names) = (app(), ["m", "sql", "chat"]);
    let fleet = fleet(&app);
    let mut claimed = fleet.claim(A, HTTP, &names.map(new));
    let busy = claimed.swap_remove(1);
    drop(claimed);
    fleet.disclaim(A, Pool::Answer, names.map(Arc::from));
    assert_eq!(app.models().len(), 0);
    let there = || names.map(|name| has_series(&app, name));
    assert_eq!(there(), [true, true, false], "a request of `sql` runs");
    drop(busy);
    app.models().measure(app.metrics(), app.clock().now());
    assert_eq!(there(), [false; 3]);
}

#[tokio::test]
async fn a_kept_cursor_ends_with_the_index_that_it_was_kept_beside() {
    let (app, ranks) = (app(), [WorkerRank::new(A.0, 0), WorkerRank::new(B.0, 0)]);
    let index = Index::with_options(&IndexOptions::default());
    let kept = LoadedSnapshot::of("m", 16, index.snapshot().unwrap(), &ranks);
    let fleet = fleet(&app).with_snapshot(kept);
    fleet.claim(A, HTTP, &[new("m"), new("sql")]);
    fleet.disclaim(A, Pool::Answer, ["m".into()]);
    assert!(
        fleet.snapshot.trust("m", ranks[1]).is_some(),
        "`sql` has it"
    );
    fleet.disclaim(A, Pool::Answer, ["sql".into()]);
    assert!(fleet.claim(B, HTTP, &[new("m")])[0].is_some());
    assert!(fleet.snapshot.trust("m", ranks[1]).is_none());
    assert!(fleet.snapshot.resume("m", ranks[1]).is_none());
}

/// A card may say how workers that compute prompts are chosen; those that answer are chosen as the operator says.
#[tokio::test]
async fn a_prefill_card_has_a_mode_of_its_own() {
    let app = app();
    let fleet = fleet(&app);
    let mode_of = |pool: Pool, name: &str, said: Option<RouterMode>| {
        let claimed = fleet.claim(A, (pool, TransportKind::Plane, said), &[new(name)]);
        let model = claimed[0].clone().unwrap();
        model.host.ask(|router| router.config().router_mode)
    };
    let said = Some(RouterMode::RoundRobin);
    assert_eq!(mode_of(Pool::Answer, "m", said), RouterMode::Kv);
    assert_eq!(
        mode_of(Pool::Prefill, "m@prefill", said),
        RouterMode::RoundRobin
    );
    assert_eq!(mode_of(Pool::Prefill, "n@prefill", None), RouterMode::Kv);
}
