//! A token worker as the frontend meets it.
#![expect(clippy::unwrap_used, reason = "a poisoned lock is a failed test")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvasir_engine::{CacheEvent, EngineConfig, Load, OutputTokens};
use kvasir_mocker::{Observer, TokenWorker, WorkerOptions, seeded_answer};
use kvasir_profile::{Constants, StepTimes};
use kvasir_tasks::Tasks;
use kvasir_transport::{MemoryPlane, PlaneError, RequestPlane, TokenStream};
use kvasir_types::{
    DpRank, FinishReason, KvEvent, RequestContext, RequestId, Sampling, TokenRequest, WorkerId,
    WorkerRank,
};
use tokio::time::Instant;

const W: WorkerId = WorkerId(7);

#[derive(Default)]
struct Seen {
    events: Mutex<Vec<(WorkerRank, u64, KvEvent)>>,
    loads: Mutex<Vec<(WorkerRank, Load)>>,
}

impl Observer for Seen {
    fn cache_event(&self, rank: WorkerRank, id: u64, event: &CacheEvent) {
        let seen = (rank, id, event.event.clone());
        self.events.lock().unwrap().push(seen);
    }

    fn load(&self, rank: WorkerRank, load: &Load) {
        self.loads.lock().unwrap().push((rank, *load));
    }
}

struct Fleet {
    tasks: Tasks,
    plane: MemoryPlane,
    worker: Option<TokenWorker>,
    seen: Arc<Seen>,
}

/// Steps of 10 ms.
fn engine() -> EngineConfig {
    EngineConfig {
        block_size: 4,
        num_blocks: 65,
        max_model_len: 200,
        max_waiting: 2,
        max_num_seqs: 2,
        times: StepTimes::Constant(Constants {
            step_ms: 10.0,
            ..Constants::default()
        }),
        ..EngineConfig::default()
    }
}

fn fleet(ranks: u32) -> Fleet {
    let (tasks, plane, seen) = (Tasks::new(), MemoryPlane::new(), Arc::new(Seen::default()));
    let observer: Arc<dyn Observer> = Arc::clone(&seen) as _;
    let options = WorkerOptions {
        engine: engine(),
        ranks,
        answer: seeded_answer(1000),
    };
    let worker = TokenWorker::spawn(&tasks, &plane, W, options, &observer).ok();
    Fleet {
        tasks,
        plane,
        worker,
        seen,
    }
}

fn request(id: u128, tokens: usize, max_tokens: u32) -> TokenRequest {
    TokenRequest {
        id: RequestId(id),
        model: "m".into(),
        tokens: (0..tokens as u32).collect(),
        sampling: Sampling {
            max_tokens,
            ..Sampling::default()
        },
        rank: DpRank(0),
        priority: 0,
        lora: None,
        salt: None,
        context: RequestContext::default(),
    }
}

/// Reads to the end: tokens, cached tokens, and how it ended.
async fn read(
    mut stream: TokenStream,
) -> (
    Vec<u32>,
    Option<u32>,
    Result<Option<FinishReason>, PlaneError>,
) {
    let (mut tokens, mut cached, mut finish) = (Vec::new(), None, None);
    while let Some(item) = stream.next().await {
        match item {
            Ok(item) => {
                tokens.extend(item.tokens);
                cached = cached.or(item.cached_tokens);
                finish = finish.or(item.finish);
            }
            Err(error) => return (tokens, cached, Err(error)),
        }
    }
    (tokens, cached, Ok(finish))
}

#[tokio::test(start_paused = true)]
async fn a_request_takes_its_steps_and_its_blocks_are_found_by_the_next() {
    let fleet = fleet(1);
    let began = Instant::now();
    let first = read(fleet.plane.send(W, request(1, 9, 5)).await.unwrap()).await;
    assert_eq!(began.elapsed(), Duration::from_millis(50));
    assert_eq!(first.0.len(), 5);
    assert_eq!(
        (first.1, first.2),
        (Some(0), Ok(Some(FinishReason::Length)))
    );
    let second = read(fleet.plane.send(W, request(2, 9, 2)).await.unwrap()).await;
    assert_eq!(second.1, Some(8));
    let again = read(fleet.plane.send(W, request(1, 9, 5)).await.unwrap()).await;
    assert_eq!(again.0, first.0, "the same request has the same answer");

    let events = fleet.seen.events.lock().unwrap();
    let ids: Vec<u64> = events.iter().map(|e| e.1).collect();
    assert_eq!(ids, (0..events.len() as u64).collect::<Vec<_>>());
    assert!(
        matches!(&events[0].2, KvEvent::Stored { parent: None, blocks, .. } if blocks.len() == 2)
    );
    let loads = fleet.seen.loads.lock().unwrap();
    assert_eq!(loads[0].1.running, 1);
    assert_eq!(loads.last().unwrap().1.running, 0);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_frees_its_place() {
    let fleet = fleet(1);
    let mut stream = fleet.plane.send(W, request(1, 9, 150)).await.unwrap();
    stream.next().await.unwrap().unwrap();
    drop(stream);
    tokio::time::sleep(Duration::from_millis(25)).await;
    let status = fleet
        .worker
        .as_ref()
        .unwrap()
        .worker()
        .status()
        .next()
        .unwrap();
    assert_eq!((status.load.running, status.load.used_blocks), (0, 0));
    assert_eq!(status.counters.cancelled, 1);
}

/// Two run, two wait, one is refused as overload, a senseless one as the client's fault.
#[tokio::test(start_paused = true)]
async fn past_its_limits_it_refuses() {
    let fleet = fleet(1);
    let mut streams = Vec::new();
    for id in 0..2 {
        streams.push(fleet.plane.send(W, request(id, 9, 100)).await.unwrap());
    }
    streams[1].next().await.unwrap().unwrap();
    for id in 2..4 {
        streams.push(fleet.plane.send(W, request(id, 9, 100)).await.unwrap());
    }
    let late = fleet.plane.send(W, request(9, 9, 100)).await.unwrap();
    assert_eq!(read(late).await.2, Err(PlaneError::Overloaded(W)));
    let long = fleet.plane.send(W, request(10, 500, 1)).await.unwrap();
    assert!(matches!(read(long).await.2, Err(PlaneError::Rejected(_))));
    let mut nowhere = request(11, 9, 1);
    nowhere.rank = DpRank(3);
    let nowhere = fleet.plane.send(W, nowhere).await.unwrap();
    assert!(matches!(
        read(nowhere).await.2,
        Err(PlaneError::Rejected(_))
    ));
    for stream in streams {
        assert_eq!(read(stream).await.2, Ok(Some(FinishReason::Length)));
    }
}

#[tokio::test(start_paused = true)]
async fn ranks_have_caches_of_their_own() {
    let fleet = fleet(2);
    for (rank, cached) in [(0, 0), (1, 0), (0, 8), (1, 8)] {
        let mut request = request(u128::from(rank), 9, 1);
        request.rank = DpRank(rank);
        let stream = fleet.plane.send(W, request).await.unwrap();
        assert_eq!(read(stream).await.1, Some(cached), "rank {rank}");
    }
    let events = fleet.seen.events.lock().unwrap();
    let names: Vec<u32> = events.iter().map(|e| e.0.rank.0).collect();
    assert_eq!(names, [0, 1]);
}

#[tokio::test(start_paused = true)]
async fn draining_answers_what_it_took_and_takes_no_more() {
    let fleet = fleet(1);
    let stream = fleet.plane.send(W, request(1, 9, 50)).await.unwrap();
    let Fleet {
        tasks,
        plane,
        worker,
        ..
    } = fleet;
    drop(worker);
    let (answer, left) = tokio::join!(read(stream), tasks.shut_down(Duration::from_secs(60)));
    assert_eq!((answer.2, left), (Ok(Some(FinishReason::Length)), 0));
    assert_eq!(
        plane.send(W, request(2, 9, 1)).await.err(),
        Some(PlaneError::Gone(W))
    );
}

#[tokio::test(start_paused = true)]
async fn a_restart_disconnects_and_empties() {
    let fleet = fleet(1);
    let worker = fleet.worker.as_ref().unwrap().worker();
    let (first, ..) = read(fleet.plane.send(W, request(1, 9, 1)).await.unwrap()).await;
    assert_eq!(first.len(), 1);
    let mut stream = fleet.plane.send(W, request(2, 9, 100)).await.unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap().cached_tokens, Some(8));
    worker.restart().await;
    assert_eq!(read(stream).await.2, Err(PlaneError::Disconnected(W)));
    let after = read(fleet.plane.send(W, request(3, 9, 1)).await.unwrap()).await;
    assert_eq!(after.1, Some(0));
    assert_eq!(
        fleet.seen.events.lock().unwrap().last().unwrap().1,
        0,
        "events count from 0 again"
    );
}

#[tokio::test(start_paused = true)]
async fn a_stalled_worker_goes_on_where_it_was() {
    let fleet = fleet(1);
    let worker = fleet.worker.as_ref().unwrap().worker();
    let mut stream = fleet.plane.send(W, request(1, 9, 20)).await.unwrap();
    stream.next().await.unwrap().unwrap();
    worker.stall(true).await;
    let quiet = async { while stream.next().await.is_some() {} };
    assert!(
        tokio::time::timeout(Duration::from_secs(5), quiet)
            .await
            .is_err()
    );
    worker.stall(false).await;
    assert_eq!(read(stream).await.2, Ok(Some(FinishReason::Length)));
}

/// Stop tokens end a given answer; told to ignore its end, a model goes on to the limit.
#[tokio::test(start_paused = true)]
async fn given_answers_follow_the_request() {
    let (tasks, plane) = (Tasks::new(), MemoryPlane::new());
    let options = WorkerOptions {
        engine: engine(),
        ranks: 1,
        answer: Arc::new(|_| OutputTokens::Given([5, 6, 7].into())),
    };
    let observer: Arc<dyn Observer> = Arc::new(());
    let _worker = TokenWorker::spawn(&tasks, &plane, W, options, &observer).unwrap();
    let ask = |change: fn(&mut Sampling)| {
        let mut request = request(1, 9, 7);
        change(&mut request.sampling);
        let plane = plane.clone();
        async move {
            let (tokens, _, finish) = read(plane.send(W, request).await.unwrap()).await;
            (tokens, finish.unwrap().unwrap())
        }
    };
    assert_eq!(ask(|_| {}).await, (vec![5, 6, 7], FinishReason::Stop));
    assert_eq!(
        ask(|s| s.stop_tokens = vec![6]).await,
        (vec![5, 6], FinishReason::Stop)
    );
    assert_eq!(
        ask(|s| s.max_tokens = 2).await,
        (vec![5, 6], FinishReason::Length)
    );
    let on = ask(|s| s.ignore_eos = true).await;
    assert_eq!(on, (vec![5, 6, 7, 5, 6, 7, 5], FinishReason::Length));
}
